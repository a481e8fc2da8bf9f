"""Tiny models of transformers' families, and EXL3 checkpoints of them written by hand.

A checkpoint is written in the converter's layout from random packed matrices, tensor by tensor and
without the library's own savers; the same matrices, dequantised by the oracle, make the dense
model that it has to equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import oracle
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

Rates = Callable[[str, int], float]

MARKERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
VOCABULARY = 300  # padded to 384


def marker(codebook: str) -> torch.Tensor:
    return torch.tensor(MARKERS[codebook]).to(torch.uint32).view(torch.int32)


def padded(size: int) -> int:
    return -(-size // 128) * 128


class Checkpoint:
    """Tensors of a checkpoint in the making, and the dense model that they stand for.

    Args:
        model: its weights are replaced by what the packed matrices stand for.
        seed: of the words and scales.
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.model, self.random = model, np.random.default_rng(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        self.packed: set[str] = set()

    def matrix(
        self,
        stem: str,
        in_features: int,
        out_features: int,
        bits: float,
        codebook: str,
        bias: torch.Tensor | None = None,
        suh: np.ndarray | None = None,
        svh: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Adds a matrix's tensors; returns its weight, float32 [out, in]."""
        rows, columns = padded(in_features), padded(out_features)
        shape = (rows // 16, columns // 16, int(16 * bits))
        trellis = self.random.integers(-(2**15), 2**15, shape, np.int16)
        suh = self._scales(rows, 1.0) if suh is None else suh
        svh = self._scales(columns, rows**-0.5) if svh is None else svh
        for field, array in (("trellis", trellis), ("suh", suh), ("svh", svh)):
            self.tensors[f"{stem}.{field}"] = torch.from_numpy(array)
        if codebook != "3inst":
            self.tensors[f"{stem}.{codebook}"] = marker(codebook)
        if bias is not None:
            full = torch.zeros(columns, dtype=torch.float16)
            full[:out_features] = bias
            self.tensors[f"{stem}.bias"] = full
        weight = oracle.weight(trellis, suh, svh, codebook)[:in_features, :out_features]
        return torch.from_numpy(weight.T.astype(np.float32)).contiguous()

    def _scales(self, features: int, factor: float) -> np.ndarray:
        values = self.random.choice([-1, 1], features) * self.random.uniform(0.5, 2, features)
        return (values * factor).astype(np.float16)

    def linear(self, name: str, bits: float, codebook: str, stem: str | None = None) -> None:
        """Packs the model's layer ``name``."""
        layer = self.model.get_submodule(name)
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.half().float()
        layer.weight = nn.Parameter(
            self.matrix(stem or name, layer.in_features, layer.out_features, bits, codebook,
                        layer.bias)
        )  # fmt: skip
        self.packed |= {f"{name}.weight", f"{name}.bias"}

    def fused(self, name: str, parts: dict[str, int], rates: list[tuple[float, str]]) -> None:
        """Packs a fused layer as the parts beside it: name -> outputs."""
        layer, parent = self.model.get_submodule(name), name.rpartition(".")[0]
        weights = [
            self.matrix(f"{parent}.{part}", layer.in_features, size, *rate)
            for (part, size), rate in zip(parts.items(), rates, strict=True)
        ]
        layer.weight = nn.Parameter(torch.cat(weights))
        self.packed.add(f"{name}.weight")

    def experts(
        self,
        name: str,
        rates: Rates,
        codebook: str = "mcg",
        *,
        stem: str | None = None,
        spelled: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        slices: int = 1,
        marked: bool = False,
        shared: str | None = None,
    ) -> None:
        """Packs routed experts.

        Args:
            name: of the module, which holds ``gate_up_proj`` and ``down_proj``.
            rates: (projection, expert) -> bits.
            stem: their prefix in the checkpoint.
            spelled: names of gate, up and down there.
            slices: rank slices of each expert; ``marked``: name one slice as such too.
            shared: "shared_h_v1" or "r7": hidden-side vectors are stored once for all.
        """
        module, stem = self.model.get_submodule(name), stem or name
        turned, biased = module.is_transposed, module.has_bias
        count, *sizes = module.down_proj.shape
        hidden, whole = sizes[::-1] if turned else sizes
        size = whole // slices
        vectors = {
            (p, r): self._scales(padded(hidden), 1.0 if p != "down" else size**-0.5)
            for p in ("gate", "up", "down")
            for r in range(slices)
        }
        if shared == "r7":
            vectors["up", 0] = vectors["gate", 0]
        gates_ups, downs = [], []
        biases: dict[str, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
        for e in range(count):
            parts: dict[str, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
            for p, spelling in zip(parts, spelled, strict=True):
                for r in range(slices):
                    rank = f".rank{r}" if marked or slices > 1 else ""
                    full = f"{stem}.{e}.{spelling}{rank}"
                    sizes = (size, hidden) if p == "down" else (hidden, size)
                    field = "svh" if p == "down" else "suh"
                    own = {field: vectors[p, r]} if shared else {}
                    if biased:
                        own["bias"] = torch.randn(sizes[1]).half().float()
                        biases[p].append(own["bias"])
                    parts[p].append(self.matrix(full, *sizes, rates(p, e), codebook, **own))
                    if shared:
                        del self.tensors[f"{full}.{field}"]
            gate, up = torch.cat(parts["gate"]), torch.cat(parts["up"])
            gates_ups.append(_joined(gate, up, module.is_concatenated))
            downs.append(torch.cat(parts["down"], dim=1))
        if shared == "shared_h_v1":
            for (p, r), vector in vectors.items():
                field = "svh" if p == "down" else "suh"
                full = f"{stem}.shared_h.{p}_proj.rank{r}.{field}"
                self.tensors[full] = torch.from_numpy(vector)
        elif shared == "r7":
            self.tensors[f"{stem}.r7_shared.gate_up_suh"] = torch.from_numpy(vectors["gate", 0])
            self.tensors[f"{stem}.r7_shared.down_svh"] = torch.from_numpy(vectors["down", 0])
        for field, weights in (("gate_up_proj", gates_ups), ("down_proj", downs)):
            weight = torch.stack(weights)
            weight = weight.transpose(1, 2).contiguous() if turned else weight
            setattr(module, field, nn.Parameter(weight))
            self.packed |= {f"{name}.{field}", f"{name}.{field}_bias"}
        if biased:
            gate_up = map(_joined, biases["gate"], biases["up"], [module.is_concatenated] * count)
            module.gate_up_proj_bias = nn.Parameter(torch.stack([*gate_up]))
            module.down_proj_bias = nn.Parameter(torch.stack(biases["down"]))

    def dense(self) -> dict[str, torch.Tensor]:
        """What stays as it is, under the names of a checkpoint."""
        state = self.model.state_dict()
        tied = self.model.all_tied_weights_keys
        left = {
            n: t.contiguous() for n, t in state.items() if n not in self.packed and n not in tied
        }
        return revert_weight_conversion(self.model, left)

    def write(self, folder: Path, **quantization: object) -> Path:
        """Writes model.safetensors and config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({**self.dense(), **self.tensors}, folder / "model.safetensors")
        config = self.model.config.to_dict()
        config["architectures"] = [type(self.model).__name__]
        config["dtype"] = "float32"
        config["quantization_config"] = {"quant_method": "exl3", "bits": 3.0, **quantization}
        (folder / "config.json").write_text(json.dumps(config))
        return folder


def _joined(gate: torch.Tensor, up: torch.Tensor, concatenated: bool) -> torch.Tensor:
    return torch.cat([gate, up]) if concatenated else torch.stack([gate, up], 1).flatten(0, 1)


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 320,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build(family: str, seed: int = 0, **options: object) -> nn.Module:
    """A tiny model with random weights; ``family`` as in transformers' class names."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases with an effect of their own
                parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))
    return model


MOE = {
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 160},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160},
    "Glm4Moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "q_lora_rank": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
        "v_head_dim": 32, "num_key_value_heads": 6,
    },
    "GlmMoeDsa": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "q_lora_rank": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
        "v_head_dim": 32, "num_key_value_heads": 6, "index_head_dim": 64, "index_n_heads": 2,
        "index_topk": 16, "qk_head_dim": 64,
    },
}  # fmt: skip
"""What tiny models with routed experts need besides ``SIZES``."""


RATES = [(3, "mcg"), (4, "mul1"), (5, "3inst"), (2.5, "mul1"), (2, "mcg"), (6, "mul1")]


def pack_linears(checkpoint: Checkpoint, skip: tuple[str, ...] = ()) -> None:
    """Every nn.Linear but those whose name ends in one of ``skip``, with mixed rates."""
    model = checkpoint.model
    fused = {
        "qkv_proj": lambda layer, head: {"q_proj": 192, "k_proj": 64, "v_proj": 64},
        "gate_up_proj": lambda layer, head: {
            "gate_proj": layer.out_features // 2, "up_proj": layer.out_features // 2
        },
    }  # fmt: skip
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    for i, (name, layer) in enumerate(layers):
        last = name.rpartition(".")[2]
        if name.endswith(skip):
            continue
        if last in fused:
            parts = fused[last](layer, model.config.head_dim)
            checkpoint.fused(name, parts, RATES[: len(parts)])
        else:
            checkpoint.linear(name, *RATES[i % len(RATES)])


def logits(model: nn.Module, count: int = 24) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(3, 3 + count)[None]).logits


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2."""
    return float((got.double() - want.double()).norm() / want.double().norm())
