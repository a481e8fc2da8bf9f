"""Argument checks of the mixture-of-experts ops, in the manner of :mod:`.checks`.

What the table holds is data on the device and is not looked at here: ``formats.moe`` validates it
when a layout is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from . import checks
from .checks import FLOATS

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
"""Names in the order of the ids that op schemas use."""

PROJECTIONS = ("gate", "up", "down")
"""In the order of the table's rows."""

_RELU2, _SWIGLU_OAI = ACTIVATIONS.index("relu2"), ACTIVATIONS.index("swiglu_oai")


def is_gated(activation: int) -> bool:
    """Whether the activation multiplies up by something of gate; relu2 has no gate."""
    return activation != _RELU2


def moe(
    op: str,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    packed: torch.Tensor,
    table: torch.Tensor,
    gate_suh: torch.Tensor | None,
    gate_svh: torch.Tensor | None,
    up_suh: torch.Tensor,
    up_svh: torch.Tensor,
    down_suh: torch.Tensor,
    down_svh: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate_codebook: int,
    up_codebook: int,
    down_codebook: int,
    intermediate: int,
    activation: int,
    limit: float,
    limit_after: bool,
    routed_scale: float,
    out_dtype: torch.dtype,
) -> None:
    if not 0 <= activation < len(ACTIVATIONS):
        raise ValueError(f"{op}: activation is {activation}, expected 0 to {len(ACTIVATIONS) - 1}")
    _routes(op, x, topk_ids, topk_weights)
    _tensor(op, "packed", packed, (torch.int16,), x)
    if packed.dim() != 1:
        raise ValueError(f"{op}: packed has shape {list(packed.shape)}, expected [words]")
    _tensor(op, "table", table, (torch.int64,), x)
    if table.dim() != 4 or table.shape[0] != 3 or table.shape[3] != 2 or 0 in table.shape:
        raise ValueError(
            f"{op}: table has shape {list(table.shape)}, expected [3, experts, slices, 2]"
        )
    experts, slices = table.shape[1], table.shape[2]

    gate = is_gated(activation)
    for name, tensor in (("gate_suh", gate_suh), ("gate_svh", gate_svh)):
        if (tensor is not None) != gate:
            raise ValueError(
                f"{op}: {name} is {'None' if tensor is None else 'a Tensor'}, "
                f"expected {'a Tensor' if gate else 'None'} for {ACTIVATIONS[activation]}"
            )
    if gate_bias is not None and not gate:
        raise ValueError(
            f"{op}: gate_bias is a Tensor, expected None for {ACTIVATIONS[activation]}"
        )
    hidden = _padded(op, "up_suh", up_suh, x)
    inner = _padded(op, "up_svh", up_svh, x)
    _vectors(op, "up_suh", up_suh, experts, slices, hidden, x)
    _vectors(op, "up_svh", up_svh, experts, slices, inner, x)
    _vectors(op, "gate_suh", gate_suh, experts, slices, hidden, x)
    _vectors(op, "gate_svh", gate_svh, experts, slices, inner, x)
    _vectors(op, "down_suh", down_suh, experts, slices, inner, x)
    _vectors(op, "down_svh", down_svh, experts, slices, hidden, x)
    _bias(op, "gate_bias", gate_bias, experts * slices, inner, x)
    _bias(op, "up_bias", up_bias, experts * slices, inner, x)
    _bias(op, "down_bias", down_bias, experts, hidden, x)

    columns = x.shape[-1]
    if columns > hidden or columns <= hidden - 128:
        raise ValueError(
            f"{op}: x has {columns} columns, expected {max(hidden - 127, 1)} to {hidden} "
            f"(the experts' hidden size is {hidden})"
        )
    for name, code in (
        ("gate_codebook", gate_codebook),
        ("up_codebook", up_codebook),
        ("down_codebook", down_codebook),
    ):
        if not 0 <= code < 5:
            raise ValueError(f"{op}: {name} is {code}, expected 0 to 4")
    checks.features(op, "intermediate", intermediate, inner)
    if slices > 1 and intermediate != inner:
        raise ValueError(
            f"{op}: intermediate is {intermediate}, expected {inner} "
            f"(all of a slice, as there are {slices} slices)"
        )
    if not 0.0 <= limit < math.inf or (limit > 0.0 and activation == _RELU2):
        wanted = "0 for relu2" if activation == _RELU2 else "0 or a finite positive number"
        raise ValueError(f"{op}: limit is {limit:g}, expected {wanted}")
    if limit_after and activation in (_RELU2, _SWIGLU_OAI):
        raise ValueError(f"{op}: limit_after is True, expected False for {ACTIVATIONS[activation]}")
    if not -math.inf < routed_scale < math.inf:  # Dynamo cannot trace isfinite
        raise ValueError(f"{op}: routed_scale is {routed_scale:g}, expected a finite number")
    checks.out_dtype(op, "out_dtype", out_dtype)


def planned(op: str, *arguments) -> None:
    """The same with a workspace; how large it must be is the kernel's to say."""
    *layer, workspace = arguments
    moe(op, *layer)
    _tensor(op, "workspace", workspace, (torch.uint8,), layer[0])
    if workspace.dim() != 1 or not workspace.is_contiguous():
        raise ValueError(
            f"{op}: workspace has shape {list(workspace.shape)} and strides "
            f"{list(workspace.stride())}, expected [bytes], contiguous"
        )


def grad(op: str, gradient: torch.Tensor, x: torch.Tensor, *layer) -> None:
    moe(op, x, *layer, torch.float32)
    _tensor(op, "grad", gradient, FLOATS, x)
    if gradient.shape != x.shape:
        raise ValueError(
            f"{op}: grad has shape {list(gradient.shape)}, expected {list(x.shape)} (that of x)"
        )


def _tensor(
    op: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], x: torch.Tensor
) -> None:
    # A dozen tensors are looked at in every eager call: the usual case first, the words then.
    if isinstance(tensor, torch.Tensor) and tensor.dtype in dtypes and tensor.device == x.device:
        return
    checks._dtype(op, name, tensor, dtypes)
    checks._device(op, name, tensor, "x", x.device)


def _routes(op: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    checks._dtype(op, "x", x, FLOATS)
    if x.dim() < 1:
        raise ValueError(f"{op}: x has 0 dimensions, expected at least 1")
    _tensor(op, "topk_ids", ids, (torch.int32, torch.int64), x)
    _tensor(op, "topk_weights", weights, FLOATS, x)
    if ids.dim() != x.dim() or ids.shape[:-1] != x.shape[:-1] or ids.shape[-1] < 1:
        raise ValueError(
            f"{op}: topk_ids has shape {list(ids.shape)}, "
            f"expected x's {list(x.shape[:-1])} and a last dimension top_k"
        )
    if weights.shape != ids.shape:
        raise ValueError(
            f"{op}: topk_weights has shape {list(weights.shape)}, "
            f"expected {list(ids.shape)} (that of topk_ids)"
        )


def _padded(op: str, name: str, tensor: torch.Tensor, x: torch.Tensor) -> int:
    """A size that others are measured by: whole Hadamard blocks."""
    _tensor(op, name, tensor, (torch.float16,), x)
    if tensor.dim() != 2 or tensor.shape[1] % 128 != 0 or tensor.shape[1] < 1:
        raise ValueError(
            f"{op}: {name} has shape {list(tensor.shape)}, expected [n, a multiple of 128]"
        )
    return tensor.shape[1]


def _vectors(
    op: str,
    name: str,
    tensor: torch.Tensor | None,
    experts: int,
    slices: int,
    size: int,
    x: torch.Tensor,
) -> None:
    if tensor is None:
        return
    _tensor(op, name, tensor, (torch.float16,), x)
    counts = (experts * slices, slices, 1)
    if tensor.dim() != 2 or tensor.shape[1] != size or tensor.shape[0] not in counts:
        wanted = " or ".join(str(n) for n in dict.fromkeys(counts))
        raise ValueError(
            f"{op}: {name} has shape {list(tensor.shape)}, expected [n, {size}] with n = {wanted}"
        )


def _bias(
    op: str, name: str, tensor: torch.Tensor | None, rows: int, size: int, x: torch.Tensor
) -> None:
    if tensor is None:
        return
    _tensor(op, name, tensor, FLOATS, x)
    if tuple(tensor.shape) != (rows, size):
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}, expected [{rows}, {size}]")


# As checks.OPS.
OPS: dict[str, Callable[..., None]] = {
    "rank_sliced_moe": partial(moe, "rank_sliced_moe"),
    "rank_sliced_moe_inference": partial(moe, "rank_sliced_moe"),
    "rank_sliced_moe_planned": partial(planned, "rank_sliced_moe"),
    "parity_moe": partial(moe, "parity_moe"),
    "moe_grad": partial(grad, "moe_grad"),
}
