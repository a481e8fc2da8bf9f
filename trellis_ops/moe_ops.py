"""The mixture-of-experts ops, in the manner of :mod:`.ops`."""

from __future__ import annotations

import torch

from .formats import codebooks
from .formats.moe import TENSORS, three_codebooks
from .meta import checks, moe_checks
from .meta.moe_checks import ACTIVATIONS
from .ops import default_out_dtype
from .workspace import Workspace


def rank_sliced_moe(
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
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    codebook: str | tuple[str, str, str],
    intermediate: int | None = None,
    activation: str = "silu",
    limit: float = 0.0,
    limit_after: bool = False,
    routed_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Routed experts: y[t] = routed_scale * sum over slots s of weight[t, s] * expert(x[t]).

    expert(x) = sum over rank slices r of down_r(act(gate_r(x), up_r(x))), plus down_bias once; each
    projection is the linear layer of :func:`trellis_gemm`. Sums are float32 or wider, over slots
    and slices in their order, and the result is rounded once, so it is deterministic; a row's
    result does not depend on the other rows (on a GPU: up to 128 tokens; on a CPU with AMX: where
    no expert gets more than eight). Error bounds are those of :func:`trellis_gemm`, per route. An
    id below 0 or from E on contributes exactly nothing, and so does an expert that the table says
    is absent; an id named twice counts twice.

    Args:
        x: float16, bfloat16 or float32 [..., hidden]; may fall short of the padded hidden size by
            less than 128, and is then zero-extended. Gradient flows to x and topk_weights alone.
        topk_ids: int32 or int64 [..., top_k].
        topk_weights: float16, bfloat16 or float32 [..., top_k], used as float32.
        packed, table, gate_suh, ..., down_bias: the experts, as :class:`MoeLayout` describes and
            validates them; the op itself trusts the table where that is on a GPU. Gate's are None
            for relu2.
        codebook: one for all, or one each for gate, up and down; see :func:`trellis_gemm`.
        intermediate: logical intermediate size of a slice, default the padded one. What lies behind
            it is noise, and does not reach down.
        activation: "silu", "gelu", "gelu_tanh" (of gate, times up), "relu2" (the square of up's
            positive part, no gate) or "swiglu_oai" ((up + 1) * gate * sigmoid(1.702 * gate)).
        limit: keeps up within +-limit and gate below it, before the activation; 0: no limit.
        limit_after: limit the activated gate instead (silu, gelu and gelu_tanh).
        routed_scale: a factor of the sum, applied in float32.
        out_dtype: default x.dtype, or the autocast dtype inside an autocast region.
        workspace: scratch that the caller owns (see :func:`moe_plan`): nothing is then allocated
            but the result, and copies of arguments that are not contiguous. Without gradient only.

    Returns:
        [..., hidden] in out_dtype, trimmed as x is.

    Raises:
        TypeError, ValueError: see :mod:`.ops`; also where an argument but x and topk_weights
            requires grad, and where there are more tokens than the workspace was planned for.
        RuntimeError: on the CPU, if the compiled library is not loaded.

    Layout and activations are those of ExLlamaV3 and of checkpoints derived from it.
    """
    arguments = _arguments(
        "rank_sliced_moe",
        (x, topk_ids, topk_weights),
        (packed, table, gate_suh, gate_svh, up_suh, up_svh, down_suh, down_svh),
        (gate_bias, up_bias, down_bias),
        (codebook, intermediate, activation, limit, limit_after, routed_scale, out_dtype),
    )
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad)
    if workspace is None:
        op = torch.ops.trellis_ops
        return (op.rank_sliced_moe if needs_grad else op.rank_sliced_moe_inference)(*arguments)
    if needs_grad:
        raise ValueError(
            "rank_sliced_moe: workspace is given and x or topk_weights requires grad, "
            "expected no gradient with a workspace"
        )
    buffer = workspace.check("rank_sliced_moe", x, topk_ids, table, up_suh, up_svh)
    return torch.ops.trellis_ops.rank_sliced_moe_planned(*arguments, buffer)


def parity_moe(
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
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    codebook: str | tuple[str, str, str],
    intermediate: int | None = None,
    activation: str = "silu",
    limit: float = 0.0,
    limit_after: bool = False,
    routed_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What :func:`rank_sliced_moe` should give: exact decode, float64 arithmetic, one rounding.

    Plain PyTorch on every device that has float64; slow. Reads table and ids on the host, so on a
    GPU it waits for the device and cannot be captured in a CUDA graph (RuntimeError). Arguments,
    result and errors are otherwise those of :func:`rank_sliced_moe`, without workspaces.
    """
    arguments = _arguments(
        "parity_moe",
        (x, topk_ids, topk_weights),
        (packed, table, gate_suh, gate_svh, up_suh, up_svh, down_suh, down_svh),
        (gate_bias, up_bias, down_bias),
        (codebook, intermediate, activation, limit, limit_after, routed_scale, out_dtype),
    )
    return torch.ops.trellis_ops.parity_moe(*arguments)


def activation_id(op: str, name: str) -> int:
    """Schema id of an activation's name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{op}: activation is {name!r}, expected one of {ACTIVATIONS}")
    return ACTIVATIONS.index(name)


def _arguments(op: str, routes: tuple, weights: tuple, biases: tuple, options: tuple) -> tuple:
    """The op's own arguments, checked."""
    codebook, intermediate, activation, limit, limit_after, routed_scale, out_dtype = options
    codes = (codebooks.codebook_id(name, op) for name in three_codebooks(op, codebook))
    checks.is_tensor(op, "x", routes[0])
    if intermediate is None:
        up_svh = weights[5]
        checks.is_tensor(op, "up_svh", up_svh)
        intermediate = up_svh.shape[-1] if up_svh.dim() else 0
    arguments = (
        *routes,
        *weights,
        *biases,
        *codes,
        intermediate,
        activation_id(op, activation),
        float(limit),
        limit_after,
        float(routed_scale),
        default_out_dtype(routes[0]) if out_dtype is None else out_dtype,
    )
    moe_checks.moe(op, *arguments)
    checks.frozen(op, **dict(zip(TENSORS, (*weights, *biases), strict=True)))
    return arguments
