"""Routed experts of a transformers model: sizes and activation, and the packed module for them.

The activation is found by trying the module's own function, not by its name: a family that limits
or scales in its own way is refused rather than computed nearly right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..formats import tiles
from ..formats.experts import ExpertSet, empty_layout, read_experts
from ..formats.moe import MoeLayout
from ..formats.reading import Reader
from ..nn import Exl3MoE
from ..parallel import ParallelMoE, Shard

# Converters divide the routed up_proj of these by 128, which no file says, and which their own
# inference code multiplies back into the routed sum.
_UP_DIVISOR = {"laguna": 128.0, "mistral4": 128.0}


@dataclass(frozen=True)
class Dense:
    """What a module of routed experts is like.

    Attributes:
        experts, hidden, intermediate: sizes.
        gated, biased: whether there are a gate projection, and biases.
        transposed: whether weights are [E, in, out].
        interleaved: whether gate and up take turns in ``gate_up_proj``.
        activation, limit, limit_after: as :class:`Exl3MoE` has them.
    """

    experts: int
    hidden: int
    intermediate: int
    gated: bool
    biased: bool
    transposed: bool
    interleaved: bool
    activation: str
    limit: float
    limit_after: bool


def is_experts(name: str, module: nn.Module) -> bool:
    """Whether a module holds routed experts as transformers 5 does: stacked weights."""
    if name.rpartition(".")[2] != "experts" or not hasattr(module, "down_proj"):
        return False
    return any(
        isinstance(getattr(module, field, None), nn.Parameter) and getattr(module, field).dim() == 3
        for field in ("gate_up_proj", "up_proj")
    )


def describe(name: str, module: nn.Module) -> Dense:
    """Raises ValueError where the experts compute what no packed module can."""
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{name}: {type(module).__name__} norms each expert's result, unsupported")
    gated = hasattr(module, "gate_up_proj")
    transposed = bool(getattr(module, "is_transposed", False))
    wide = module.gate_up_proj if gated else module.up_proj
    experts, *sizes = wide.shape
    hidden, outputs = sizes if transposed else sizes[::-1]
    interleaved = not getattr(module, "is_concatenated", True)
    activation, limit, after = activation_of(name, module, gated, interleaved)
    return Dense(
        experts,
        hidden,
        outputs // 2 if gated else outputs,
        gated,
        hasattr(module, "down_proj_bias"),
        transposed,
        interleaved,
        activation,
        limit,
        after,
    )


def activation_of(
    name: str, module: nn.Module, gated: bool, interleaved: bool
) -> tuple[str, float, bool]:
    """(activation, limit, limit_after) that give what the module's own function gives."""
    # Sizes at which every limit in use shows.
    values = torch.linspace(-40, 40, 41, dtype=torch.float64)
    gate, up = (part.flatten() for part in torch.meshgrid(values, values, indexing="ij"))
    with torch.device("cpu"), torch.no_grad():
        if gated:
            both = torch.stack([gate, up], -1).flatten(-2) if interleaved else torch.cat([gate, up])
            got = module._apply_gate(both[None]).squeeze(0)
        else:
            got = module.act_fn(up)
    limits = {0.0}
    for owner in (module, getattr(module, "config", None)):
        for field in ("limit", "swiglu_limit"):
            value = getattr(owner, field, None)
            if isinstance(value, (int, float)) and value > 0:
                limits.add(float(value))
    for activation, function in _FUNCTIONS.items():
        if gated == (activation == "relu2"):
            continue
        for limit in sorted(limits):
            for after in (False, True):
                want = function(gate, up, limit, after)
                if want.shape == got.shape and torch.allclose(got, want, rtol=1e-5, atol=1e-6):
                    return activation, limit, after
    raise ValueError(
        f"{name}: the experts of {type(module).__name__} compute an activation that is none of "
        f"{', '.join(_FUNCTIONS)}, with or without its limit"
    )


def _limited(function: Callable[[torch.Tensor], torch.Tensor]):
    def run(gate, up, limit, after):
        if limit:
            up = up.clamp(-limit, limit)
            if after:
                return function(gate).clamp(max=limit) * up
            gate = gate.clamp(max=limit)
        return function(gate) * up

    return run


def _swiglu_oai(gate, up, limit, after):
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


_FUNCTIONS = {
    "silu": _limited(nn.functional.silu),
    "gelu": _limited(nn.functional.gelu),
    "gelu_tanh": _limited(lambda x: nn.functional.gelu(x, approximate="tanh")),
    "swiglu_oai": _swiglu_oai,
    "relu2": lambda gate, up, limit, after: nn.functional.relu(up).square(),
}


@dataclass
class Packed:
    """A packed module for experts, and how to read its tensors."""

    module: nn.Module
    read: Callable[[torch.device], dict[str, torch.Tensor]]


def pack(
    name: str,
    dense: Dense,
    experts: ExpertSet,
    reader: Reader,
    model_type: str,
    dtype: torch.dtype,
    shard: Shard | None,
) -> Packed:
    """The module, on the meta device.

    Raises:
        ValueError: the experts in the checkpoint do not fit those of the model.
    """
    if experts.experts != dense.experts:
        raise ValueError(
            f"{experts.name} has {experts.experts} experts, expected {dense.experts} as the model"
        )
    if experts.gated != dense.gated:
        raise ValueError(
            f"{experts.name} has {'a' if experts.gated else 'no'} gate projection, "
            f"and the model's experts have {'one' if dense.gated else 'none'}"
        )
    if ("bias" in experts.first("down").tensors) != dense.biased:
        raise ValueError(
            f"{experts.name} has {'no ' if dense.biased else ''}biases, "
            f"and the model's experts have {'them' if dense.biased else 'none'}"
        )
    intermediate = _slice_size(experts, dense)
    held, ranks = _share(experts, shard)
    layout = empty_layout(experts, dense.hidden, intermediate, held, ranks)
    divisor = _UP_DIVISOR.get(model_type, 1.0)

    options = {
        "activation": dense.activation,
        "limit": dense.limit,
        "limit_after": dense.limit_after,
        "routed_scale": divisor,
        "dtype": dtype,
    }

    def read(device: torch.device) -> dict[str, torch.Tensor]:
        filled = read_experts(experts, layout.materialize(device), reader, held, ranks)
        if filled.gated:
            _check_divisor(experts.name, filled, divisor)
        # The module knows the names of its parameters.
        return dict(Exl3MoE(filled, **options).named_parameters())

    part = Exl3MoE(layout, **options)
    return Packed(part if shard is None else ParallelMoE(part, shard), read)


def _slice_size(experts: ExpertSet, dense: Dense) -> int:
    """Logical intermediate size of one slice; checks the sizes of what is stored."""
    slices, up, down = experts.slices, experts.first("up"), experts.first("down")
    whole = dense.intermediate
    if slices > 1 and whole % (tiles.HADAMARD * slices):
        raise ValueError(
            f"{experts.name} has {slices} rank slices of an intermediate size {whole}, "
            f"expected a multiple of {tiles.HADAMARD * slices}"
        )
    size = whole // slices
    wanted = (tiles.padded(dense.hidden), tiles.padded(size))
    for group, shape in ((up, wanted), (down, wanted[::-1])):
        if (group.in_features, group.out_features) != shape:
            raise ValueError(
                f"{group.name}.trellis is {group.in_features} x {group.out_features}, expected "
                f"{shape[0]} x {shape[1]} (in x out, padded) for the model's experts "
                f"of {dense.hidden} x {whole}"
            )
    for (projection, *_), group in experts.matrices.items():
        group.check_bias(dense.hidden if projection == "down" else size)
    return size


def _share(experts: ExpertSet, shard: Shard | None) -> tuple[range | None, range | None]:
    """(experts, rank slices) of this process: slices where they divide evenly, else experts."""
    if shard is None:
        return None, None
    for count, first in ((experts.slices, False), (experts.experts, True)):
        if count % shard.size == 0:
            each = count // shard.size
            mine = range(shard.rank * each, (shard.rank + 1) * each)
            return (mine, None) if first else (None, mine)
    raise ValueError(
        f"{experts.name} has {experts.experts} experts in {experts.slices} rank slices, "
        f"which {shard.size} processes cannot share evenly"
    )


def _check_divisor(name: str, layout: MoeLayout, divisor: float) -> None:
    """Whether up is as much smaller than gate as the architecture says: nothing else tells."""
    gate, up = layout.gate_suh.float().abs().mean(), layout.up_suh.float().abs().mean()
    ratio = float(gate / up)
    # Far from both values: halfway, on a logarithmic scale, is about 11.
    if (ratio > 11) != (divisor > 1):
        raise ValueError(
            f"{name}: scales of gate_proj are {ratio:.3g} times those of up_proj, expected about "
            f"{divisor:g} for this architecture"
        )


def dequantize(original: nn.Module, dense: Dense, packed: Exl3MoE, dtype: torch.dtype) -> nn.Module:
    """The original module, which is on the meta device, with the weights that are packed."""
    layout = packed.layout()

    def stacked(projection: str) -> torch.Tensor:
        axis = 1 if projection == "down" else 0
        return torch.stack(
            [
                torch.cat(
                    [
                        layout.matrix(projection, e, r).dequantize(dtype)
                        for r in range(layout.slices)
                    ],
                    dim=axis,
                )
                for e in range(layout.experts)
            ]
        )

    def biases(projection: str, size: int) -> torch.Tensor:
        return getattr(layout, f"{projection}_bias").view(layout.experts, -1)[:, :size].to(dtype)

    weights = {"up_proj": stacked("up") * packed.routed_scale, "down_proj": stacked("down")}
    if dense.biased:
        weights["up_proj_bias"] = biases("up", dense.intermediate) * packed.routed_scale
        weights["down_proj_bias"] = biases("down", dense.hidden)
    if dense.gated:
        weights["gate_proj"] = stacked("gate")
        if dense.biased:
            weights["gate_proj_bias"] = biases("gate", dense.intermediate)
        for end in ("proj", "proj_bias") if dense.biased else ("proj",):
            pair = [weights.pop(f"gate_{end}"), weights.pop(f"up_{end}")]
            both = torch.stack(pair, 2).flatten(1, 2) if dense.interleaved else torch.cat(pair, 1)
            weights[f"gate_up_{end}"] = both
    for name, weight in weights.items():
        turned = dense.transposed and not name.endswith("_bias")
        value = weight.transpose(1, 2).contiguous() if turned else weight
        setattr(original, name, nn.Parameter(value, requires_grad=False))
    return original


def stored(name: str, packed: Exl3MoE) -> dict[str, torch.Tensor]:
    """A module's tensors as a checkpoint has them: every matrix of every expert apart."""
    if packed.packed.is_meta:
        raise ValueError(
            f"{name}: the experts are offloaded, expected them in memory (load without a "
            "device_map to save the model)"
        )
    tensors, layout = {}, packed.layout()
    for piece in layout.pieces():
        rank = f".rank{piece.rank}" if layout.slices > 1 else ""
        prefix = f"{name}.{piece.expert}.{piece.projection}_proj{rank}."
        for field, tensor in layout.matrix(*piece).state_dict(prefix).items():
            # Rows that experts share would be the same memory under several names.
            tensors[field] = tensor if field.endswith(".trellis") else tensor.clone()
    return tensors
