"""Random routed experts, and what they should compute, token by token in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import oracle
import torch
from layers import double, make_layer

from trellis_ops import MoeLayout, TrellisTensor
from trellis_ops.formats.moe import TENSORS
from trellis_ops.formats.moe_build import layout_of

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
PROJECTIONS = ("gate", "up", "down")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def activated(gate, up, activation: str = "silu", limit: float = 0.0, limit_after: bool = False):
    """What down takes, straight from the definitions."""
    if activation == "relu2":
        return np.where(up > 0, up, 0) ** 2
    if limit:
        up = np.minimum(np.maximum(up, -limit), limit)
        gate = gate if limit_after else np.minimum(gate, limit)
    if activation == "swiglu_oai":
        return (up + 1) * gate * sigmoid(1.702 * gate)
    if activation == "silu":
        value = gate * sigmoid(gate)
    elif activation == "gelu":
        value = gate * 0.5 * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
    else:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        value = 0.5 * gate * (1 + np.tanh(inner))
    return (np.minimum(value, limit) if limit and limit_after else value) * up


@dataclass
class Experts:
    """Matrices by projection, expert and rank; None in place of an expert that is absent."""

    gate: list | None
    up: list
    down: list
    hidden: int
    intermediate: int

    def layout(self) -> MoeLayout:
        return layout_of(self.gate, self.up, self.down)

    def weight(self, projection: str, expert: int, rank: int) -> np.ndarray:
        """float64 [in, out], trimmed."""
        t = getattr(self, projection)[expert][rank]
        stored = (part.numpy().tobytes() for part in (t.trellis, t.suh, t.svh))
        weight = _weight(*stored, t.codebook, *t.trellis.shape)
        return weight[: t.in_features, : t.out_features]

    def project(self, projection: str, expert: int, rank: int, x: np.ndarray) -> np.ndarray:
        bias = getattr(self, projection)[expert][rank].bias
        y = x @ self.weight(projection, expert, rank)
        return y if bias is None else y + double(bias)[: y.shape[-1]]

    def expert(self, expert: int, x: np.ndarray, *activation) -> np.ndarray:
        """One expert's result for rows."""
        y = 0
        for rank in range(len(self.up[expert])):
            gate = None if self.gate is None else self.project("gate", expert, rank, x)
            inner = activated(gate, self.project("up", expert, rank, x), *activation)
            y = y + self.project("down", expert, rank, inner)
        return y

    def routes(self, x, ids, *activation) -> np.ndarray:
        """float64 [tokens, top_k, hidden], before the routing weights; zeros where nobody answers."""
        x, ids = double(x), ids.numpy()
        y = np.zeros((*ids.shape, self.hidden))
        for e in range(len(self.up)):
            token, slot = np.nonzero(ids == e)
            if self.up[e] is not None and len(token):
                y[token, slot] = self.expert(e, x[token], *activation)
        return y

    def want(self, x, ids, weights, *activation, scale: float = 1.0) -> np.ndarray:
        """float64 [tokens, hidden]."""
        routes = self.routes(x, ids, *activation)
        return scale * (routes * double(weights.float())[..., None]).sum(1)


@functools.lru_cache(maxsize=256)
def _weight(trellis: bytes, suh: bytes, svh: bytes, codebook: str, *shape: int) -> np.ndarray:
    """Kept, since the ops that compute the same are tested one after the other."""
    words = np.frombuffer(trellis, np.int16).reshape(shape)
    vectors = (np.frombuffer(vector, np.float16) for vector in (suh, svh))
    return oracle.weight(words, *vectors, codebook)


def make_experts(
    experts: int = 4,
    *,
    slices: int = 1,
    hidden: int = 256,
    intermediate: int = 384,
    bits=lambda projection, expert: 4,
    codebook: str | dict = "mcg",
    gated: bool = True,
    biases: bool = False,
    absent: tuple[int, ...] = (),
    seed: int = 0,
) -> Experts:
    """Logical sizes; matrices are padded to whole 128-blocks."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(projection: str, expert: int, rank: int) -> TrellisTensor:
        sizes = (intermediate, hidden) if projection == "down" else (hidden, intermediate)
        rows, columns = (-(-size // 128) * 128 for size in sizes)
        name = codebook if isinstance(codebook, str) else codebook[projection]
        number = ((seed * 3 + PROJECTIONS.index(projection)) * 1000 + expert) * 8 + rank
        layer = make_layer(name, bits(projection, expert), rows=rows, columns=columns, seed=number)
        bias = None
        if biases and (projection != "down" or rank == 0):
            bias = torch.randn(columns, generator=generator).half()
        return TrellisTensor(layer.trellis, layer.suh, layer.svh, bias, name, *sizes)

    def all_of(projection: str) -> list:
        return [
            None if e in absent else [matrix(projection, e, r) for r in range(slices)]
            for e in range(experts)
        ]

    gate = all_of("gate") if gated else None
    return Experts(gate, all_of("up"), all_of("down"), hidden, intermediate)


def arguments(layout: MoeLayout) -> tuple:
    """The layout's tensors in the ops' order."""
    return tuple(getattr(layout, name) for name in TENSORS)


def options(layout: MoeLayout, activation: str = "silu", **changed) -> tuple:
    """The ops' arguments after the tensors."""
    values = {
        "limit": 0.0,
        "limit_after": False,
        "routed_scale": 1.0,
        "out_dtype": torch.float32,
        **changed,
    }
    codes = (oracle.CODEBOOKS.index(name) for name in layout.codebooks)
    return *codes, layout.intermediate, ACTIVATIONS.index(activation), *values.values()


def samples() -> dict[str, list[tuple]]:
    """Arguments of the ops: dtypes, ranks, strides, slices, biases, activations, empty."""
    plain = make_experts(3, intermediate=128, bits=lambda p, e: 2 + e).layout()
    sliced = make_experts(
        3, slices=2, hidden=200, intermediate=128, codebook="mul1", biases=True, absent=(1,)
    ).layout()
    ungated = make_experts(2, intermediate=100, gated=False, bits=lambda p, e: 3).layout()
    x, (ids, weights) = torch.randn(5, 256), routing(5, 2, 3)
    ids[3, 1] = -1

    def folded(t: torch.Tensor) -> torch.Tensor:
        return t[:4].reshape(2, 2, -1).transpose(0, 1)

    last = {"limit": 1.5, "limit_after": True, "routed_scale": 2.5}
    layers = [
        (plain, "silu", {}, (x.half(), ids, weights), {"out_dtype": torch.float16}),
        (sliced, "gelu", last, (x[:, :200], ids.int(), weights), {"out_dtype": torch.bfloat16}),
        (sliced, "swiglu_oai", {"limit": 7.0}, map(folded, (x[:, :200], ids, weights)), {}),
        (ungated, "relu2", {}, (x, ids, weights.t().contiguous().t().bfloat16()), {}),
        (plain, "gelu_tanh", {}, (x[0], ids[0], weights[0]), {}),
        (plain, "silu", {}, (x[:0], ids[:0], weights[:0]), {}),
    ]
    calls = [
        (*tensors, *arguments(layout), *options(layout, name, **changed, **out))
        for layout, name, changed, tensors, out in layers
    ]
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    return {
        "rank_sliced_moe": calls,
        "rank_sliced_moe_inference": calls,
        "rank_sliced_moe_planned": [(*call, workspace) for call in calls],
        "parity_moe": calls,
        "moe_grad": [(torch.randn(call[0].shape), *call[:-1]) for call in calls],
    }


def routing(tokens: int, top_k: int, experts: int, seed: int = 0):
    """Ids without repetition in a row, in no order, and weights."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    ids = scores.argsort(1)[:, :top_k]
    return ids, torch.rand(tokens, top_k, generator=generator) + 0.1
