"""The public ops: each validates in Python, then calls ``torch.ops.trellis_ops``.

Unless a docstring says otherwise an op is functional (writes nothing but its new, contiguous
result), deterministic (the same bits for the same inputs, device and build), takes inputs of any
strides, traces through ``torch.compile(fullgraph=True)`` and ``torch.export``, and may be captured
in a CUDA graph at its first call. Bad arguments raise TypeError (type, dtype) or ValueError (shape,
device, value) before anything runs; the message names op, argument, what came and what was wanted.
"""

from __future__ import annotations

import torch

from .formats import codebooks
from .formats.tiles import TILE, tile_words_of
from .meta import checks


def trellis_gemm(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor | None,
    svh: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    codebook: str,
    out_features: int | None = None,
    out_dtype: torch.dtype | None = None,
    act: str = "exact",
) -> torch.Tensor:
    """A quantised linear layer: y = H(H(x * suh) @ decode(trellis)) * svh + bias.

    H is the orthonormal Hadamard transform of each block of 128 features. Sums are float32 or
    wider and results are rounded once; any finite activation is safe (rows are scaled by a power of
    two on the way). Rotated activations may be rounded to sixteen bits (on the CPU: integers with
    one scale for 128 or 512 of them), within the error that follows. Relative L2 error against
    exact arithmetic: at most 5e-4 (float16, float32 output), 3e-3 (bfloat16 output). On the CPU a
    row's result does not depend on the other rows; where that has AMX it does so far as more than
    eight rows have another kernel than fewer.

    Args:
        x: float16, bfloat16 or float32 [..., in]; may fall short of the trellis' in_features by
            less than 128, and is then zero-extended. Gradient flows to x alone.
        trellis: int16 [in/16, out/16, 16 * bits].
        suh: float16 [in], or None: no scale and no transform on the input side.
        svh: float16 [out], or None: no transform and no scale on the output side.
        bias: [out_features] or the trellis' [out], added last.
        codebook: "3inst", "mcg", "mul1", "sqg_e4m3" or "sqg_fp16".
        out_features: trims the output by less than 128 columns; default: the trellis' own.
        out_dtype: default x.dtype, or the autocast dtype inside an autocast region.
        act: "exact" (default): the errors above. "int8", for mul1 on a CPU and where x needs no
            gradient: rotated activations may be rounded to eight bits, with one scale for each 128
            of them, which is done for one or two rows where the processor has VNNI. The error is
            then 7e-3 for activations without outliers, and at most 5e-2.

    Returns:
        [..., out_features] in out_dtype.

    Raises:
        TypeError, ValueError: see the module; also where an argument but x requires grad.
        RuntimeError: on the CPU, if the compiled library is not loaded.

    The maths is that of the EXL3 format (ExLlamaV3), of the QTIP family (Tseng et al., 2024).
    """
    return _gemm("trellis_gemm", x, trellis, suh, svh, bias, codebook, out_features, out_dtype, act)


def parity_gemm(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor | None,
    svh: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    codebook: str,
    out_features: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What :func:`trellis_gemm` should give: exact decode, float64 arithmetic, one rounding.

    Plain PyTorch on every device that has float64; slow. Arguments, result and errors are those of
    :func:`trellis_gemm`. Repeatable, but a row's last bit may depend on the number of rows, as the
    device's float64 matrix product may.
    """
    return _gemm("parity_gemm", x, trellis, suh, svh, bias, codebook, out_features, out_dtype)


def _gemm(
    op: str,
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor | None,
    svh: torch.Tensor | None,
    bias: torch.Tensor | None,
    codebook: str,
    out_features: int | None,
    out_dtype: torch.dtype | None,
    act: str = "exact",
) -> torch.Tensor:
    code = codebooks.codebook_id(codebook, op)
    if out_features is None:
        checks.trellis(op, trellis, code)
        out_features = trellis.shape[1] * TILE
    checks.is_tensor(op, "x", x)
    if out_dtype is None:
        out_dtype = default_out_dtype(x)
    checks.gemm(op, x, trellis, suh, svh, bias, code, out_features, out_dtype)
    checks.frozen(op, suh=suh, svh=svh, bias=bias)
    differentiable = x.requires_grad and torch.is_grad_enabled()
    if act != "exact":
        choice = checks.act_id(op, act)
        checks.act(op, choice, code, x.device)
        if differentiable:
            raise ValueError(f"{op}: x requires grad with act {act}, expected act exact")
        return torch.ops.trellis_ops.trellis_gemm_act(
            x, trellis, suh, svh, bias, code, out_features, out_dtype, choice
        )
    function = getattr(torch.ops.trellis_ops, op)
    if op == "trellis_gemm" and not differentiable:
        function = torch.ops.trellis_ops.trellis_gemm_inference
    return function(x, trellis, suh, svh, bias, code, out_features, out_dtype)


def default_out_dtype(x: torch.Tensor) -> torch.dtype:
    """x.dtype, or the autocast dtype inside an autocast region."""
    device = x.device.type
    # No torch.amp.is_autocast_available: torch 2.11 cannot trace it.
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def dequantize(
    trellis: torch.Tensor,
    suh: torch.Tensor | None = None,
    svh: torch.Tensor | None = None,
    *,
    codebook: str,
    dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """The weight as a dense matrix: diag(suh) H decode(trellis) H diag(svh).

    Args:
        trellis: int16 [in/16, out/16, 16 * bits].
        suh: float16 [in], or None to leave the input side in the rotated basis.
        svh: float16 [out], or None to leave the output side in the rotated basis.
        codebook: see :func:`trellis_gemm`.
        dtype: float16 (default), bfloat16 or float32.

    Returns:
        [in, out] (transposed to nn.Linear's). With suh and svh None: the codebook values, exact in
        float16 and float32; else float32 arithmetic or wider, rounded once.
    """
    code = codebooks.codebook_id(codebook, "dequantize")
    checks.dequantize("dequantize", trellis, suh, svh, code, dtype)
    checks.frozen("dequantize", suh=suh, svh=svh)
    return torch.ops.trellis_ops.dequantize(trellis, suh, svh, code, dtype)


def hadamard_128(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Sylvester-Hadamard transform of each block of 128 elements of the last axis.

    Its own inverse and its own gradient. Sums are wider than x.dtype; one rounding at the end.

    Args:
        x: float16, bfloat16 or float32 [..., 128 * n].

    Returns:
        x.shape in x.dtype.
    """
    checks.hadamard("hadamard_128", x)
    return torch.ops.trellis_ops.hadamard_128(x)


def unpack_trellis(trellis: torch.Tensor) -> torch.Tensor:
    """The 16-bit state of every weight.

    Args:
        trellis: int16 [in/16, out/16, 16 * bits].

    Returns:
        int32 [in/16, out/16, 256], 0..65535, each tile in stream order.
    """
    checks.trellis("unpack_trellis", trellis)
    return torch.ops.trellis_ops.unpack_trellis(trellis)


def pack_trellis(states: torch.Tensor, bits: float) -> torch.Tensor:
    """Packs closed paths of states; the inverse of :func:`unpack_trellis`.

    Args:
        states: int32 or int64 [..., 256] in stream order. Each state must continue the one before
            it at this rate, and the first the last.
        bits: 1 to 8, or 1.5, 2.5, 3.5.

    Returns:
        int16 [..., 16 * bits].

    Raises:
        ValueError: the states of a tile are no closed path. This looks at the data, so on a GPU
            the op waits for the device and cannot be captured in a CUDA graph.
    """
    words = tile_words_of(bits, "pack_trellis")
    checks.states("pack_trellis", states, words)
    return torch.ops.trellis_ops.pack_trellis(states, words)


def quantize_tiles(
    tiles: torch.Tensor, bits: float, *, codebook: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds for each tile a closed trellis path whose values are near the tile's (least squares).

    Two-pass tail-biting Viterbi search: a first pass around the seam chooses the edge in which the
    second pass starts and ends. Scale the tiles to about the codebook's own spread first (standard
    deviation 1 for mul1, 1.24 for 3inst and mcg, 1.5 for sqg). Results carry no gradient.

    Args:
        tiles: float32 [T, 256] in stream order; where one is not finite its tile gets some path.
        bits: a rate the codebook has.
        codebook: see :func:`trellis_gemm`.

    Returns:
        (states int32 [T, 256], their values float32 [T, 256]).
    """
    code = codebooks.codebook_id(codebook, "quantize_tiles")
    words = tile_words_of(bits, "quantize_tiles")
    checks.tiles("quantize_tiles", tiles, words, code)
    return torch.ops.trellis_ops.quantize_tiles(tiles, words, code)
