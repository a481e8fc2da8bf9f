"""Fake implementations: the shape, dtype, device and strides of each op's result, and its checks.

All results are new and contiguous, whatever the strides of the inputs.
"""

from __future__ import annotations

import torch

from . import moe_checks
from .checks import OPS
from .schemas import LIBRARY, NAMESPACE


def _fake(name: str):
    return torch.library.register_fake(f"{NAMESPACE}::{name}", lib=LIBRARY)


def _register_gemm(name: str) -> None:
    @_fake(name)
    def fake(x, trellis, suh, svh, bias, codebook, out_features, out_dtype, *act):
        OPS[name](x, trellis, suh, svh, bias, codebook, out_features, out_dtype, *act)
        return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype)


for _name in ("trellis_gemm", "trellis_gemm_inference", "trellis_gemm_act", "parity_gemm"):
    _register_gemm(_name)


def _forced_gemm(x, trellis, suh, svh, bias, codebook, out_features, out_dtype, *_choice):
    OPS["trellis_gemm"](x, trellis, suh, svh, bias, codebook, out_features, out_dtype)
    return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype)


for _name in ("_trellis_gemm_route", "_trellis_gemm_isa"):
    _fake(_name)(_forced_gemm)


@_fake("gemm_input_grad")
def _gemm_input_grad(grad, trellis, suh, svh, codebook, in_features, out_dtype):
    OPS["gemm_input_grad"](grad, trellis, suh, svh, codebook, in_features, out_dtype)
    return grad.new_empty((*grad.shape[:-1], in_features), dtype=out_dtype)


@_fake("dequantize")
def _dequantize(trellis, suh, svh, codebook, dtype):
    OPS["dequantize"](trellis, suh, svh, codebook, dtype)
    return trellis.new_empty((trellis.shape[0] * 16, trellis.shape[1] * 16), dtype=dtype)


@_fake("hadamard_128")
def _hadamard_128(x):
    OPS["hadamard_128"](x)
    return x.new_empty(x.shape)


@_fake("unpack_trellis")
def _unpack_trellis(trellis):
    OPS["unpack_trellis"](trellis)
    return trellis.new_empty((*trellis.shape[:2], 256), dtype=torch.int32)


@_fake("pack_trellis")
def _pack_trellis(states, tile_words):
    OPS["pack_trellis"](states, tile_words)
    return states.new_empty((*states.shape[:-1], tile_words), dtype=torch.int16)


def _quantize_tiles(tiles, tile_words, codebook):
    OPS["quantize_tiles"](tiles, tile_words, codebook)
    return tiles.new_empty(tiles.shape, dtype=torch.int32), tiles.new_empty(tiles.shape)


_fake("quantize_tiles")(_quantize_tiles)


@_fake("_quantize_tiles_isa")
def _quantize_tiles_isa(tiles, tile_words, codebook, isa):
    return _quantize_tiles(tiles, tile_words, codebook)


_MOE_OUT_DTYPE = 21  # among the arguments after x


def _register_moe(name: str) -> None:
    @_fake(name)
    def fake(x, *arguments):
        moe_checks.OPS[name](x, *arguments)
        return x.new_empty(x.shape, dtype=arguments[_MOE_OUT_DTYPE])


for _name in (
    "rank_sliced_moe",
    "rank_sliced_moe_inference",
    "rank_sliced_moe_planned",
    "parity_moe",
):
    _register_moe(_name)


def _forced_moe(x, *arguments):
    moe_checks.OPS["rank_sliced_moe"](x, *arguments[:-1])
    return x.new_empty(x.shape, dtype=arguments[_MOE_OUT_DTYPE])


for _name in ("_rank_sliced_moe_isa", "_rank_sliced_moe_route"):
    _fake(_name)(_forced_moe)


@_fake("moe_grad")
def _moe_grad(grad, x, topk_ids, topk_weights, *layer):
    moe_checks.OPS["moe_grad"](grad, x, topk_ids, topk_weights, *layer)
    return x.new_empty(x.shape), topk_weights.new_empty(topk_weights.shape)
