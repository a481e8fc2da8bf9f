"""Routed experts in float64, expert by expert, and their gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..formats import codebooks, tiles
from ..meta.moe_checks import ACTIVATIONS, PROJECTIONS
from . import gemm


@dataclass
class _Layer:
    """The ops' arguments from ``packed`` on, and the name of the op for what is wrong with them."""

    op: str
    packed: torch.Tensor
    table: torch.Tensor
    gate_suh: torch.Tensor | None
    gate_svh: torch.Tensor | None
    up_suh: torch.Tensor
    up_svh: torch.Tensor
    down_suh: torch.Tensor
    down_svh: torch.Tensor
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate_codebook: int
    up_codebook: int
    down_codebook: int
    intermediate: int
    activation: int
    limit: float
    limit_after: bool
    routed_scale: float

    def __post_init__(self) -> None:
        self.entries = self.table.tolist()
        self.experts, self.slices = self.table.shape[1:3]

    @property
    def gated(self) -> bool:
        return self.gate_suh is not None

    def holds(self, expert: int) -> bool:
        return all(words > 0 for _, words in self.entries[2][expert])

    def matrix(self, projection: str, expert: int, rank: int) -> tuple:
        """trellis, suh, svh."""
        suh, svh = (self.of(f"{projection}_{kind}", expert, rank) for kind in ("suh", "svh"))
        offset, words = self.entries[PROJECTIONS.index(projection)][expert][rank]
        rows, columns = len(suh) // tiles.TILE, len(svh) // tiles.TILE
        end = offset + rows * columns * words
        name = codebooks.CODEBOOKS[getattr(self, f"{projection}_codebook")]
        known = words % 8 == 0 and tiles.bits_of(words) in codebooks.rates_of(name)
        if not (known and 0 <= offset and end <= len(self.packed)):
            raise ValueError(
                f"{self.op}: table has ({offset}, {words}) for {projection} of expert "
                f"{expert}, rank {rank}, expected a rate of its codebook, and a matrix within the "
                f"{len(self.packed)} words of packed"
            )
        return self.packed[offset:end].view(rows, columns, words), suh, svh

    def of(self, name: str, expert: int, rank: int) -> torch.Tensor | None:
        tensor = getattr(self, name)
        return None if tensor is None else tensor[(expert * self.slices + rank) % len(tensor)]

    def project(self, projection: str, expert: int, rank: int, x: torch.Tensor) -> torch.Tensor:
        """float64; down without its bias, which belongs to no slice."""
        columns = x.shape[1] if projection == "down" else self.intermediate
        if projection == "down":
            columns, bias = self.down_svh.shape[1], None
        else:
            bias = self.of(f"{projection}_bias", expert, rank)
        code = getattr(self, f"{projection}_codebook")
        weights = self.matrix(projection, expert, rank)
        return gemm.linear(x, *weights, bias, code, columns, torch.float64)

    def back(
        self, projection: str, expert: int, rank: int, grad: torch.Tensor, columns: int
    ) -> torch.Tensor:
        """The transpose of project, bias apart."""
        code = getattr(self, f"{projection}_codebook")
        weights = self.matrix(projection, expert, rank)
        return gemm.input_grad(grad, *weights, code, columns, torch.float64)

    def activate(self, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        return activate(gate, up, self.activation, self.limit, self.limit_after)


def experts(
    op: str,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *layer_and_dtype,
) -> torch.Tensor:
    """y[t] = routed_scale * sum over s of weight[t, s] * expert[ids[t, s]](x[t]); one rounding."""
    *arguments, out_dtype = layer_and_dtype
    layer = _Layer(op, *arguments)
    rows, weights = _flat(x), _flat(topk_weights.float())
    y = rows.new_zeros(rows.shape)
    for expert, token, slot in _routes(topk_ids, layer):
        result = _expert(layer, expert, rows[token])[0]
        _add(y, token, slot, result * weights[token, slot, None])
    return (y * layer.routed_scale).to(out_dtype).reshape(x.shape)


def experts_grad(
    op: str,
    grad: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *arguments,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of topk_weights, in their dtypes."""
    layer = _Layer(op, *arguments)
    rows, weights = _flat(x), _flat(topk_weights.float())
    grads = _flat(grad) * layer.routed_scale
    dx, dweights = rows.new_zeros(rows.shape), weights.new_zeros(weights.shape)
    for expert, token, slot in _routes(topk_ids, layer):
        result, inner = _expert(layer, expert, rows[token])
        dweights[token, slot] = (grads[token] * result).sum(-1)
        gradient = grads[token] * weights[token, slot, None]
        total = torch.zeros_like(gradient)
        for rank, (gate, up) in enumerate(inner):
            middle = layer.back("down", expert, rank, gradient, layer.intermediate)
            dgate, dup = activation_grad(
                middle, gate, up, layer.activation, layer.limit, layer.limit_after
            )
            total += layer.back("up", expert, rank, dup, rows.shape[1])
            if gate is not None:
                total += layer.back("gate", expert, rank, dgate, rows.shape[1])
        _add(dx, token, slot, total)
    return dx.to(x.dtype).reshape(x.shape), dweights.to(topk_weights.dtype).reshape(topk_ids.shape)


def _expert(layer: _Layer, expert: int, rows: torch.Tensor) -> tuple[torch.Tensor, list[tuple]]:
    """The result, and what gate and up gave in each slice."""
    result, inner = torch.zeros_like(rows), []
    for rank in range(layer.slices):
        gate = layer.project("gate", expert, rank, rows) if layer.gated else None
        up = layer.project("up", expert, rank, rows)
        inner.append((gate, up))
        part = layer.project("down", expert, rank, layer.activate(gate, up))
        result += part[:, : rows.shape[1]]
    if layer.down_bias is not None:
        result += layer.down_bias[expert, : rows.shape[1]].double()
    return result, inner


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.double().reshape(-1, x.shape[-1])


def _routes(
    topk_ids: torch.Tensor, layer: _Layer
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(expert, its tokens, their slots) for every expert that is hit and held."""
    ids, top_k = topk_ids.flatten().long(), topk_ids.shape[-1]
    known = torch.where((ids >= 0) & (ids < layer.experts), ids, layer.experts)
    order = known.argsort(stable=True)
    start = 0
    for expert, count in enumerate(known.bincount(minlength=layer.experts + 1).tolist()):
        routes = order[start : start + count]
        start += count
        if count and expert < layer.experts and layer.holds(expert):
            yield expert, routes // top_k, routes % top_k


def _add(y: torch.Tensor, token: torch.Tensor, slot: torch.Tensor, rows: torch.Tensor) -> None:
    """Adds rows slot by slot, where no token comes twice, so that the order is always the same."""
    for s in slot.unique().tolist():
        here = slot == s
        y[token[here]] += rows[here]


# ---- activations --------------------------------------------------------------------------------


def activate(
    gate: torch.Tensor | None, up: torch.Tensor, activation: int, limit: float, limit_after: bool
) -> torch.Tensor:
    """What down takes."""
    name = ACTIVATIONS[activation]
    if name == "relu2":
        return up.relu().square()
    if limit > 0:
        up = up.clamp(-limit, limit)
        if not limit_after:
            gate = gate.clamp(max=limit)
    if name == "swiglu_oai":
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    value = _curve(name, gate)[0]
    return (value.clamp(max=limit) if limit > 0 and limit_after else value) * up


def activation_grad(
    grad: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    activation: int,
    limit: float,
    limit_after: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Gradients of gate and up."""
    name = ACTIVATIONS[activation]
    if name == "relu2":
        return None, grad * 2 * up.relu()
    inside = torch.ones_like(up)
    gate_inside = inside
    if limit > 0:
        inside = (up.abs() <= limit).double()
        up = up.clamp(-limit, limit)
        if not limit_after:
            gate_inside = (gate <= limit).double()
            gate = gate.clamp(max=limit)
    if name == "swiglu_oai":
        sigmoid = torch.sigmoid(1.702 * gate)
        slope = sigmoid * (1 + 1.702 * gate * (1 - sigmoid))
        return grad * (up + 1) * slope * gate_inside, grad * gate * sigmoid * inside
    value, slope = _curve(name, gate)
    if limit > 0 and limit_after:
        gate_inside = (value <= limit).double()
        value = value.clamp(max=limit)
    return grad * up * slope * gate_inside, grad * value * inside


def _curve(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An activation of one argument, and its slope."""
    if name == "silu":
        sigmoid = torch.sigmoid(x)
        return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
    if name == "gelu":
        below = 0.5 * torch.special.erfc(-x / math.sqrt(2))
        return x * below, below + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    root = math.sqrt(2 / math.pi)
    tanh = torch.tanh(root * (x + 0.044715 * x**3))
    inner_slope = root * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner_slope
