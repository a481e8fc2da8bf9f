"""Block LDLQ: codes rows of tiles from the last to the first, feeding errors forward.

With H = L D L' (L unit block-lower-triangular, blocks of 16 inputs) the loss tr(E' H E) is a sum
over blocks of the error of ``W_R + sum over later blocks j of L[j, R]' E_j``, so each block codes
that target. The idea is QuIP#'s (Tseng et al., 2024); the error inside a tile is left unweighted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..formats import tiles

_DAMPING = 0.025
_MORE_DAMPING = 2.0
_ATTEMPTS = 10

Coder = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""float32 tiles [T, 256] -> (states, values), as ``ops.quantize_tiles`` does."""


def damped(hessian: torch.Tensor) -> torch.Tensor:
    """The Hessian plus a fraction of its mean diagonal, for inputs that calibration missed."""
    return hessian + _DAMPING * hessian.diagonal().mean() * torch.eye(
        hessian.shape[0], dtype=hessian.dtype, device=hessian.device
    )


def block_factor(hessian: torch.Tensor) -> torch.Tensor:
    """L of H = L D L', unit block-lower-triangular.

    Raises:
        ValueError: H is not positive definite even after strong damping.
    """
    eye = torch.eye(hessian.shape[0], dtype=hessian.dtype, device=hessian.device)
    step = _MORE_DAMPING * _DAMPING * hessian.diagonal().mean()
    for attempt in range(_ATTEMPTS):
        root, failed = torch.linalg.cholesky_ex(hessian + attempt * step * eye)
        if not int(failed):
            break
    else:
        raise ValueError(
            f"quantize_linear: hessian is not positive definite with {_ATTEMPTS - 1} times "
            f"{_MORE_DAMPING * _DAMPING:g} of its mean diagonal added, expected a sum of x x'"
        )
    n = hessian.shape[0] // tiles.TILE
    diagonal = root.unflatten(0, (n, tiles.TILE)).unflatten(2, (n, tiles.TILE))
    diagonal = diagonal.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [n, 16, 16]
    panels = root.unflatten(1, (n, tiles.TILE)).permute(1, 0, 2)  # [n, in, 16]
    eye = torch.eye(tiles.TILE, dtype=root.dtype, device=root.device)
    # Inverting the small blocks and multiplying is far quicker than solving with long panels.
    inverse = torch.linalg.solve_triangular(diagonal, eye.expand_as(diagonal), upper=False)
    return (panels @ inverse).permute(1, 0, 2).flatten(1)


def code_matrix(
    weight: torch.Tensor, factor: torch.Tensor | None, coder: Coder
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes a regularised matrix.

    Args:
        weight: float32 [in, out], multiples of 16.
        factor: L of :func:`block_factor`, or None for no feedback.
        coder: codes tiles.

    Returns:
        (states int32 [in/16, out/16, 256], coded values float32 [in, out]).
    """
    if factor is None:
        targets = tiles.matrix_to_tiles(weight)
        states, values = coder(targets.flatten(0, 1))
        return states.view(targets.shape), tiles.tiles_to_matrix(values.view(targets.shape))
    coded = torch.empty_like(weight)
    error = torch.zeros_like(weight)
    states = []
    for start in range(weight.shape[0] - tiles.TILE, -1, -tiles.TILE):
        stop = start + tiles.TILE
        target = weight[start:stop] + factor[stop:, start:stop].T @ error[stop:]
        targets = tiles.matrix_to_tiles(target)
        block, values = coder(targets[0])
        coded[start:stop] = tiles.tiles_to_matrix(values[None])
        error[start:stop] = weight[start:stop] - coded[start:stop]
        states.append(block)
    return torch.stack(states[::-1]), coded
