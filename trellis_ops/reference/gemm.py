"""The layer in float64: decode exactly, compute wide, round once to the output dtype.

float64 makes every finite FP16, BF16 and FP32 activation safe without scaling, and leaves one
rounding point: the result.
"""

from __future__ import annotations

import math

import torch

from ..formats import codebooks, tiles
from ..meta import checks

# Columns decoded at a time: bounds the float64 copy of the weights at in_features * 8 KiB.
_COLUMN_CHUNK = 1024


def hadamard_matrix(device: torch.device | str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The 128-point Sylvester matrix, entries +-1, built on the device (safe in graph capture)."""
    h = torch.ones(1, 1, dtype=dtype, device=device)
    while h.shape[0] < tiles.HADAMARD:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h


def _transform(x: torch.Tensor) -> torch.Tensor:
    """Blockwise orthonormal Hadamard of the last axis, in float64."""
    h = hadamard_matrix(x.device)
    return (x.unflatten(-1, (-1, tiles.HADAMARD)) @ h).flatten(-2) / math.sqrt(tiles.HADAMARD)


def hadamard_128(x: torch.Tensor) -> torch.Tensor:
    """Blockwise 128-point orthonormal Hadamard of the last axis, rounded once to x.dtype."""
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return _transform(x.double()).to(x.dtype).contiguous()


def inner_weight(trellis: torch.Tensor, codebook: int) -> torch.Tensor:
    """float16 [in, out]: the codebook values, exactly."""
    table = codebooks.codebook_table(
        codebooks.CODEBOOKS[codebook], tiles.bits_of(trellis.shape[-1]), trellis.device
    )
    return tiles.tiles_to_matrix(table[tiles.unpack_states(trellis)])


def dequantize(
    trellis: torch.Tensor,
    suh: torch.Tensor | None,
    svh: torch.Tensor | None,
    codebook: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[in, out]: diag(suh) H decode(trellis) H diag(svh); no vector: no transform."""
    weight = inner_weight(trellis, codebook)
    if suh is None and svh is None:
        return weight.to(dtype).contiguous()
    weight = weight.double()
    if suh is not None:
        weight = _transform(weight.T).T * suh.double()[:, None]
    if svh is not None:
        weight = _transform(weight) * svh.double()
    return weight.to(dtype).contiguous()


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor | None,
    svh: torch.Tensor | None,
    bias: torch.Tensor | None,
    codebook: int,
    out_features: int,
    out_dtype: torch.dtype,
    act: int = 0,
) -> torch.Tensor:
    """y = H(H(x * suh) @ decode(trellis)) * svh + bias, trimmed to out_features."""
    rows = _extend(x, trellis.shape[0] * tiles.TILE)
    if suh is not None:
        rows = _transform(rows * suh.double())
    if checks.ACTS[act] == "int8":
        rows = round_to_int8(rows)
    y = torch.empty(rows.shape[0], out_features, dtype=out_dtype, device=x.device)
    for start in range(0, out_features, _COLUMN_CHUNK):
        stop = min(start + _COLUMN_CHUNK, out_features)
        # Whole tiles and whole Hadamard blocks; what exceeds out_features is cut below.
        columns = trellis[:, start // tiles.TILE : (start + _COLUMN_CHUNK) // tiles.TILE]
        part = rows @ inner_weight(columns, codebook).double()
        if svh is not None:
            part = _transform(part) * svh[start : start + part.shape[1]].double()
        part = part[:, : stop - start]
        if bias is not None:
            part = part + bias[start:stop].double()
        y[:, start:stop] = part
    return y.reshape(*x.shape[:-1], out_features)


def round_to_int8(rows: torch.Tensor) -> torch.Tensor:
    """To the nearest multiple of a unit for each 128 columns, of which their largest is 127."""
    parts = []
    for block in rows.split(tiles.HADAMARD, dim=-1):
        unit = block.abs().amax(-1, keepdim=True) / 127
        parts.append((block / unit.masked_fill(unit == 0, 1)).round() * unit)
    return torch.cat(parts, -1)


def input_grad(
    grad: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor | None,
    svh: torch.Tensor | None,
    codebook: int,
    in_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """dx = H(H(grad * svh) @ decode(trellis).T) * suh, trimmed to in_features."""
    rows = _extend(grad, trellis.shape[1] * tiles.TILE)
    if svh is not None:
        rows = _transform(rows * svh.double())
    dx = rows.new_zeros(rows.shape[0], trellis.shape[0] * tiles.TILE)
    for start in range(0, trellis.shape[1] * tiles.TILE, _COLUMN_CHUNK):
        columns = trellis[:, start // tiles.TILE : (start + _COLUMN_CHUNK) // tiles.TILE]
        weight = inner_weight(columns, codebook).double()
        dx += rows[:, start : start + weight.shape[1]] @ weight.T
    if suh is not None:
        dx = _transform(dx) * suh.double()
    return dx[:, :in_features].to(out_dtype).reshape(*grad.shape[:-1], in_features).contiguous()


def _extend(x: torch.Tensor, features: int) -> torch.Tensor:
    """x as float64 rows, zero-extended: the transform spreads real inputs over the padding."""
    rows = x.double().flatten(0, -2) if x.dim() > 1 else x.double()[None]
    return torch.nn.functional.pad(rows, (0, features - x.shape[-1]))
