"""Attaches the PyTorch implementations and the autograd formulas to the schemas, at import.

The shared library registers its kernels under the CPU (and CUDA) dispatch keys by itself; what is
registered here under CompositeExplicitAutograd serves every other device.
"""

from __future__ import annotations

import warnings

import torch

from . import _binary, reference
from .formats import tiles
from .meta import LIBRARY, NAMESPACE, checks, moe_checks

_EVERYWHERE = "CompositeExplicitAutograd"
_CHECKS = {**checks.OPS, **moe_checks.OPS}


def _unpack_trellis(trellis):
    return tiles.unpack_states(trellis).contiguous()


def _pack_trellis(states, tile_words):
    closed = tiles.is_closed_path(states, tile_words)
    if not bool(closed.all()):
        bad = int((~closed).flatten().nonzero()[0])
        raise ValueError(
            f"pack_trellis: states of tile {bad} are no closed path at "
            f"{tiles.bits_of(tile_words)} bits, expected each state to continue the one before it"
        )
    return tiles.pack_states(states, tile_words).contiguous()


def _checked(name: str, implementation):
    """For callers of torch.ops that bypass the Python entry, as the compiled kernels check too."""
    check = _CHECKS[name]

    def run(*args):
        check(*args)
        return implementation(*args)

    return run


def _without_kernel(name: str, implementation):
    """The reference where the library has no kernel: never on the CPU, elsewhere with a warning."""

    def run(*args):
        device = args[0].device.type
        if device == "cpu":
            _binary.require(name)
        _warn_slow(name, device)
        return implementation(*args)

    return _checked(name, run)


def _warn_slow(name: str, device: str) -> None:
    warnings.warn(
        f"trellis_ops::{name} has no {device} kernel in this build; "
        "the slow PyTorch reference runs",
        stacklevel=2,
    )


def _on_host(name: str, function=reference.experts):
    """The experts in PyTorch: which of them are hit is read on the host."""

    def run(*args):
        if args[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name}: the PyTorch implementation reads table and ids on the host, "
                "which a CUDA graph cannot capture"
            )
        return function(name, *args)

    return run


_experts = _on_host("rank_sliced_moe")

# Exact and plain on every device: these are the ops, not a fallback.
for _name, _function in {
    "parity_gemm": reference.linear,
    "gemm_input_grad": reference.input_grad,
    "parity_moe": _on_host("parity_moe"),
    "moe_grad": _on_host("moe_grad", reference.experts_grad),
    "unpack_trellis": _unpack_trellis,
    "pack_trellis": _pack_trellis,
}.items():
    LIBRARY.impl(_name, _checked(_name, _function), _EVERYWHERE)

for _name, _function in {
    "trellis_gemm": reference.linear,
    "trellis_gemm_inference": reference.linear,
    "trellis_gemm_act": reference.linear,
    "dequantize": reference.dequantize,
    "hadamard_128": reference.hadamard_128,
    "quantize_tiles": reference.quantize_tiles,
    "rank_sliced_moe": _experts,
    "rank_sliced_moe_inference": _experts,
    "rank_sliced_moe_planned": lambda *args: _experts(*args[:-1]),
}.items():
    LIBRARY.impl(_name, _without_kernel(_name, _function), _EVERYWHERE)


# ---- autograd -----------------------------------------------------------------------------------
# The layer is linear in x, and everything else is frozen: one formula, its own transpose's inverse.


def _save_gemm(ctx, inputs, output):
    x, trellis, suh, svh, _, codebook, _, _ = inputs
    ctx.save_for_backward(trellis, suh, svh)
    ctx.codebook, ctx.in_features, ctx.dtype = codebook, x.shape[-1], x.dtype


def _gemm_backward(ctx, grad):
    trellis, suh, svh = ctx.saved_tensors
    dx = torch.ops.trellis_ops.gemm_input_grad(
        grad, trellis, suh, svh, ctx.codebook, ctx.in_features, ctx.dtype
    )
    return dx, None, None, None, None, None, None, None


def _save_input_grad(ctx, inputs, output):
    grad, trellis, suh, svh, codebook, _, _ = inputs
    ctx.save_for_backward(trellis, suh, svh)
    ctx.codebook, ctx.out_features, ctx.dtype = codebook, grad.shape[-1], grad.dtype


def _input_grad_backward(ctx, grad):
    trellis, suh, svh = ctx.saved_tensors
    back = torch.ops.trellis_ops.trellis_gemm(
        grad, trellis, suh, svh, None, ctx.codebook, ctx.out_features, ctx.dtype
    )
    return back, None, None, None, None, None, None


_MOE_TENSORS = 14  # of the experts' arguments: x, ids, weights, then the layer's


def _save_moe(ctx, inputs, output):
    tensors, ctx.options = inputs[:_MOE_TENSORS], inputs[_MOE_TENSORS:-1]
    ctx.save_for_backward(*tensors)


def _moe_backward(ctx, grad):
    dx, dweights = torch.ops.trellis_ops.moe_grad(grad, *ctx.saved_tensors, *ctx.options)
    others = _MOE_TENSORS - 3 + len(ctx.options) + 1
    return dx, None, dweights, *[None] * others


def _no_second_backward(ctx, *grads):
    raise RuntimeError("moe_grad: has no gradient of its own, so the experts differentiate once")


def _hadamard_backward(ctx, grad):
    return torch.ops.trellis_ops.hadamard_128(grad)


for _name in ("trellis_gemm", "parity_gemm"):
    torch.library.register_autograd(
        f"{NAMESPACE}::{_name}", _gemm_backward, setup_context=_save_gemm, lib=LIBRARY
    )
torch.library.register_autograd(
    f"{NAMESPACE}::gemm_input_grad",
    _input_grad_backward,
    setup_context=_save_input_grad,
    lib=LIBRARY,
)
for _name in ("rank_sliced_moe", "parity_moe"):
    torch.library.register_autograd(
        f"{NAMESPACE}::{_name}", _moe_backward, setup_context=_save_moe, lib=LIBRARY
    )
torch.library.register_autograd(f"{NAMESPACE}::moe_grad", _no_second_backward, lib=LIBRARY)
torch.library.register_autograd(f"{NAMESPACE}::hadamard_128", _hadamard_backward, lib=LIBRARY)

# Their results carry no gradient, by contract; a fallthrough says so without the cost of a node.
for _name in (
    "trellis_gemm_inference",
    "trellis_gemm_act",
    "_trellis_gemm_isa",
    "rank_sliced_moe_inference",
    "rank_sliced_moe_planned",
    "_rank_sliced_moe_isa",
    "_rank_sliced_moe_route",
    "dequantize",
    "unpack_trellis",
    "pack_trellis",
    "quantize_tiles",
    "_quantize_tiles_isa",
):
    LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
