"""Packed tiles: rates, bit stream, and the order of the 256 weights of a 16x16 tile.

Index arithmetic uses ``torch.arange`` on the tensor's own device (no host copies), so that these
functions may run while a CUDA graph is being captured.
"""

from __future__ import annotations

import torch

TILE = 16
TILE_WEIGHTS = 256
HADAMARD = 128

_HALF_RATES = (24, 40, 56)


def tile_words_of(bits: float, op: str = "") -> int:
    """int16 words of one packed tile at a rate; ValueError for a rate the format lacks."""
    words = 16 * bits if isinstance(bits, (int, float)) else 0
    if words in _HALF_RATES or (words % 16 == 0 and 16 <= words <= 128):
        return int(words)
    prefix = f"{op}: " if op else ""
    raise ValueError(
        f"{prefix}bits is {bits!r}, expected an integer from 1 to 8, or 1.5, 2.5 or 3.5"
    )


def bits_of(tile_words: int) -> float:
    """Rate (bits per weight) of a packed tile of that many int16 words: an int where it is one."""
    return tile_words // 16 if tile_words % 16 == 0 else tile_words / 16


def is_tile_words(tile_words: int) -> bool:
    """Whether a trellis may have this last dimension."""
    return tile_words in _HALF_RATES or (tile_words % 16 == 0 and 16 <= tile_words <= 128)


def padded(features: int) -> int:
    """Features rounded up to whole Hadamard blocks."""
    return -(-features // HADAMARD) * HADAMARD


def _ends(tile_words: int, device: torch.device) -> torch.Tensor:
    """Stream bit at which the symbol of each position ends (exclusive)."""
    position = torch.arange(1, TILE_WEIGHTS + 1, dtype=torch.int64, device=device)
    return position * tile_words // 16


def _stream_words(trellis: torch.Tensor) -> torch.Tensor:
    """int64 [..., tile_words]: the stream's 16-bit words in order, first bit most significant.

    The stream runs through little-endian 32-bit words from their top, so int16 neighbours swap.
    """
    pairs = trellis.to(torch.int64).bitwise_and_(0xFFFF).unflatten(-1, (-1, 2))
    return pairs.flip(-1).flatten(-2)


def unpack_states(trellis: torch.Tensor) -> torch.Tensor:
    """States of every weight.

    Args:
        trellis: int16 [..., tile_words].

    Returns:
        int32 [..., 256], values 0..65535, in stream order.
    """
    tile_words = trellis.shape[-1]
    words = _stream_words(trellis)
    start = (_ends(tile_words, trellis.device) - 16) % (16 * tile_words)
    first = start // 16
    window = (words[..., first] << 16) | words[..., (first + 1) % tile_words]
    return ((window >> (16 - start % 16)) & 0xFFFF).to(torch.int32)


def pack_states(states: torch.Tensor, tile_words: int) -> torch.Tensor:
    """Inverse of :func:`unpack_states`; keeps only each state's newest bits.

    Args:
        states: integer [..., 256]; a closed path (see :func:`is_closed_path`).
        tile_words: 16 * bits.

    Returns:
        int16 [..., tile_words].
    """
    bit = torch.arange(16 * tile_words, dtype=torch.int64, device=states.device)
    # Pairs of positions take tile_words / 8 bits at every rate, the even one the smaller half.
    pair, rest = bit // (tile_words // 8), bit % (tile_words // 8)
    position = 2 * pair + (rest >= tile_words // 16)
    end = (position + 1) * tile_words // 16
    stream = (states.to(torch.int64)[..., position] >> (end - 1 - bit)) & 1
    weight = 1 << torch.arange(15, -1, -1, dtype=torch.int64, device=states.device)
    words = (stream.unflatten(-1, (-1, 16)) * weight).sum(-1)
    return words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).to(torch.int16)


def is_closed_path(states: torch.Tensor, tile_words: int) -> torch.Tensor:
    """bool [...]: every state continues its predecessor, the first one the last."""
    end = _ends(tile_words, states.device)
    width = end - torch.cat((end.new_zeros(1), end[:-1]))
    states = states.to(torch.int64)
    kept = states.roll(1, -1) & ((1 << (16 - width)) - 1)
    in_range = (states >= 0) & (states <= 0xFFFF)
    return ((states >> width == kept) & in_range).all(-1)


def tiles_to_matrix(tiles: torch.Tensor) -> torch.Tensor:
    """[in/16, out/16, 256] in stream order -> [in, out].

    Bits of a stream position, high to low: columns 2 1 0, rows 2 1, column 3, row 3, row 0.
    """
    rows, cols, _ = tiles.shape
    split = tiles.reshape(rows, cols, 8, 4, 2, 2, 2)
    return split.permute(0, 5, 3, 6, 1, 4, 2).reshape(rows * TILE, cols * TILE)


def matrix_to_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """[in, out] -> [in/16, out/16, 256] in stream order; inverse of :func:`tiles_to_matrix`."""
    rows, cols = matrix.shape[0] // TILE, matrix.shape[1] // TILE
    split = matrix.reshape(rows, 2, 4, 2, cols, 2, 8)
    return split.permute(0, 4, 6, 2, 5, 1, 3).reshape(rows, cols, TILE_WEIGHTS)


def unpack_signs(words: torch.Tensor) -> torch.Tensor:
    """Legacy ``su`` / ``sv``: int16 [n/16] -> float16 [n]; a set bit, LSB first, is -1."""
    bit = (words.to(torch.int64)[:, None] >> torch.arange(16, device=words.device)) & 1
    return (1 - 2 * bit).flatten().to(torch.float16)
