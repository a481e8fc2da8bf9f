"""Parts of a quantised matrix. Hadamard blocks are whole: cuts fall on multiples of 128."""

from __future__ import annotations

from dataclasses import replace

from ..formats.tensor import TrellisTensor
from ..formats.tiles import HADAMARD, TILE, padded


def cut(features: int, parts: int, index: int, what: str = "features") -> tuple[int, int]:
    """Begin and end of one of several equal parts of the padded features.

    Raises:
        ValueError: the parts would not be whole blocks of 128.
    """
    whole = padded(features)
    if whole % (HADAMARD * parts):
        raise ValueError(
            f"{what} are {whole} (padded), which {parts} processes cannot share in multiples of "
            f"{HADAMARD}, expected a multiple of {HADAMARD * parts}"
        )
    size = whole // parts
    return index * size, (index + 1) * size


def slice_columns(tensor: TrellisTensor, begin: int, end: int) -> TrellisTensor:
    """Outputs ``begin`` to ``end``: the columns of x W that they are. Shares storage.

    Args:
        begin, end: multiples of 128 within the padded out_features.

    Raises:
        ValueError: they are not.
    """
    _check(tensor, "out", begin, end, tensor.svh.shape[0])
    return replace(
        tensor,
        trellis=tensor.trellis[:, begin // TILE : end // TILE],
        svh=tensor.svh[begin:end],
        bias=None if tensor.bias is None else tensor.bias[begin:end],
        out_features=min(end, tensor.out_features) - begin,
        proxy_error=None,
    )


def slice_rows(tensor: TrellisTensor, begin: int, end: int) -> TrellisTensor:
    """Inputs ``begin`` to ``end``: a summand of x W. Shares storage; the bias goes with input 0.

    Args:
        begin, end: multiples of 128 within the padded in_features.

    Raises:
        ValueError: they are not.
    """
    _check(tensor, "in", begin, end, tensor.suh.shape[0])
    return replace(
        tensor,
        trellis=tensor.trellis[begin // TILE : end // TILE],
        suh=tensor.suh[begin:end],
        bias=tensor.bias if begin == 0 else None,
        in_features=min(end, tensor.in_features) - begin,
        proxy_error=None,
    )


def _check(tensor: TrellisTensor, side: str, begin: int, end: int, size: int) -> None:
    if begin % HADAMARD or end % HADAMARD or not 0 <= begin < end <= size:
        raise ValueError(
            f"slice of {side}_features {begin} to {end}, "
            f"expected multiples of {HADAMARD} between 0 and {size}"
        )
