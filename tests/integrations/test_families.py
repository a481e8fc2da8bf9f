"""from_pretrained of every family: the logits of the dequantised model, and the same bytes back."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

import checkpoints as cp  # noqa: E402
from checkpoints import Checkpoint, build, distance, logits  # noqa: E402
from layers import BOUNDS  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402

import trellis_ops  # noqa: E402
from trellis_ops import Exl3Linear, Exl3MoE  # noqa: E402
from trellis_ops.nn import Exl3Parts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {},
    "Phi3": {},
    "Gemma": {},
    "Glm4": {},
}
# What a router or an MLA projection is stays dense in converters' output.
KEPT = ("kv_b_proj", "mlp.gate", "weights_proj", "router")


def a_rate_each(projection: str, expert: int) -> int:
    return {"gate": 3, "up": 4, "down": 2}[projection] + expert


def packed(family: str, folder, **options):
    """(dense model, folder of its EXL3 checkpoint)."""
    model = build(family, **{**DENSE.get(family, {}), **cp.MOE.get(family, {}), **options})
    checkpoint = Checkpoint(model)
    cp.pack_linears(checkpoint, skip=KEPT)
    for name, module in list(model.named_modules()):
        if name.endswith("experts") and hasattr(module, "gate_up_proj"):
            how = {}
            if family == "Mixtral":
                how["stem"] = name.replace(".mlp.", ".block_sparse_moe.")
                how["spelled"] = ("w1", "w3", "w2")
            elif family == "GlmMoeDsa":
                how["slices"] = 4
            checkpoint.experts(name, a_rate_each, **how)
    return model, checkpoint.write(folder)


def bound(model) -> float:
    """Each packed matrix rounds for itself, so the errors add up like a random walk."""
    kinds = (Exl3Linear, Exl3MoE)
    matrices = sum((1, 3)[isinstance(m, Exl3MoE)] for m in model.modules() if isinstance(m, kinds))
    return BOUNDS[torch.float32] * matrices**0.5


@pytest.mark.parametrize("family", [*DENSE, *cp.MOE])
def test_logits_of_the_dequantised_model(tmp_path, family):
    dense, folder = packed(family, tmp_path / "exl3")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert distance(logits(model), logits(dense)) < bound(model)
    left = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert all(name.endswith(KEPT) for name in left), left

    model.save_pretrained(tmp_path / "again")
    names = set(load_file(folder / "model.safetensors"))
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "thrice")
    files = sorted(file.name for file in (tmp_path / "again").iterdir())
    assert "quantization_config.json" in files
    for name in files:
        first, second = (tmp_path / place / name for place in ("again", "thrice"))
        assert first.read_bytes() == second.read_bytes(), name

    # The plain checkpoint that is left after dequantising is that of the dense model.
    loaded.dequantize().save_pretrained(tmp_path / "dense")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert distance(logits(plain), logits(dense)) < 1e-5


def test_parts_of_fused_layers_keep_their_rates(tmp_path):
    _, folder = packed("Phi3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    fused = model.model.layers[0].self_attn.qkv_proj
    assert isinstance(fused, Exl3Parts)
    rates = [(part.bits, part.codebook) for part in fused.parts]
    assert rates == [(3, "mcg"), (4, "mul1"), (5, "3inst")]
    assert (fused.in_features, fused.out_features) == (192, 320)


@pytest.mark.parametrize("family", ["Qwen3", "Phi3", "Qwen3Moe"])
def test_base_model_without_a_head(tmp_path, family):
    dense, folder = packed(family, tmp_path)
    model, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        want = dense.model(ids).last_hidden_state
        got = model(ids).last_hidden_state
    assert distance(got, want) < bound(model)


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
def test_experts_of_every_codebook(tmp_path, codebook):
    dense = build("Qwen3Moe", num_hidden_layers=1, **cp.MOE["Qwen3Moe"])
    checkpoint = Checkpoint(dense)
    checkpoint.experts("model.layers.0.mlp.experts", lambda p, e: 3, codebook)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.write(tmp_path))
    assert model.model.layers[0].mlp.experts.codebooks == (codebook,) * 3
    assert distance(logits(model), logits(dense)) < bound(model)


def test_text_model_of_a_multimodal_one(tmp_path):
    """Prefixes of an older transformers, as converters keep them."""
    torch.manual_seed(0)
    text = {k: v for k, v in cp.SIZES.items() if not k.endswith("token_id")}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=299
    )
    dense = transformers.Gemma3ForConditionalGeneration(config).eval()
    checkpoint = Checkpoint(dense)
    for name, module in list(dense.named_modules()):
        if isinstance(module, torch.nn.Linear) and "language_model" in name:
            stem = name.replace("model.language_model.", "language_model.model.")
            checkpoint.linear(name, 3, "mul1", stem)
    folder = checkpoint.write(tmp_path / "a")
    names = set(load_file(folder / "model.safetensors"))
    assert "language_model.model.layers.0.mlp.up_proj.trellis" in names
    model = trellis_ops.load_model(folder)
    assert type(model) is type(dense)
    assert distance(logits(model), logits(dense)) < bound(model)
    model.save_pretrained(tmp_path / "b")
    assert set(load_file(tmp_path / "b" / "model.safetensors")) == names
