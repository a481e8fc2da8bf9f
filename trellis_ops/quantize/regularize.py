"""Brings a weight into the basis in which it is coded: signs, scales, Hadamards on both sides.

The coded matrix is near Gaussian with equal variance everywhere, which is what the trellis
codebooks are made for. Scales are rounded to float16 before the weight is divided by them, so that
their rounding costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..formats import tiles
from ..reference.gemm import hadamard_matrix

# Where typical weights lie outside this range, svh takes half of their magnitude's exponent.
_SUH_LOW, _SUH_HIGH = 2.0**-9, 2.0**3


@dataclass
class Regularized:
    """W = diag(rows) H unit H diag(svh).

    ``unit`` is float32 [in, out] with mean square 1 in every block of 128 rows.
    """

    unit: torch.Tensor
    rows: torch.Tensor
    svh: torch.Tensor

    def at_scale(self, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """suh (float16) for a coded matrix of rms ``scale``, and that matrix.

        H unit H is what W leaves once divided by exact scales; dividing by the rounded ones instead
        multiplies row k by exact / rounded.
        """
        suh = (self.rows / scale).half()
        rounded = suh.float()
        ratio = torch.where(rounded != 0, self.rows / rounded, torch.zeros_like(rounded))
        return suh, transform_rows(ratio[:, None] * transform_rows(self.unit))


def transform_rows(w: torch.Tensor) -> torch.Tensor:
    """Blockwise orthonormal Hadamard along the first axis."""
    h = hadamard_matrix(w.device, w.dtype) / math.sqrt(tiles.HADAMARD)
    blocks = w.unflatten(0, (-1, tiles.HADAMARD))
    return torch.einsum("ij,bjn->bin", h, blocks).flatten(0, 1)


def regularize(weight: torch.Tensor, seed: int) -> Regularized:
    """Regularises an nn.Linear weight.

    Args:
        weight: [out, in], finite.
        seed: of the random signs.
    """
    w = weight.detach().float().T
    w = torch.nn.functional.pad(
        w, (0, -w.shape[1] % tiles.HADAMARD, 0, -w.shape[0] % tiles.HADAMARD)
    )
    generator = torch.Generator().manual_seed(seed)
    sign_in, sign_out = (
        (torch.randint(0, 2, (n,), generator=generator) * 2 - 1).to(w.device) for n in w.shape
    )
    columns = _equal_blocks(w.square().mean(0).sqrt())
    alive = columns[columns > 0]
    mean = float(alive.mean()) if alive.numel() else 1.0
    columns = columns / mean
    level = _level(mean)
    svh = (sign_out * columns * level).half()
    w = _divide(w.T, svh.float()).T
    w = transform_rows(w.T).T
    rows = sign_in * _equal_blocks(w.square().mean(1).sqrt())
    return Regularized(transform_rows(_divide(w, rows)), rows, svh)


def _level(mean: float) -> float:
    """Power of two that svh carries so that neither vector meets float16's ends."""
    if _SUH_LOW <= mean <= _SUH_HIGH:
        return 1.0
    return 2.0 ** round(math.log2(mean) / 2)


def _divide(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """w / scale by rows; a dead row (scale 0) stays 0 and, with its scale, contributes nothing."""
    return torch.where(scale[:, None] != 0, w / scale[:, None], torch.zeros_like(w))


def _equal_blocks(rms: torch.Tensor) -> torch.Tensor:
    """Scales that give every 128-block the same energy.

    A block that is partly dead (padding, mostly) would come out of the transform weaker than the
    codebook expects, at a worse ratio of signal to noise; smaller scales on its live rows lift it.
    """
    blocks = rms.unflatten(0, (-1, tiles.HADAMARD))
    live = (blocks > 0).float().mean(-1, keepdim=True)
    return (blocks * live.sqrt()).flatten()
