"""Quantises one linear layer."""

from __future__ import annotations

import torch

from .. import ops
from ..formats import codebooks, tiles
from ..formats.tensor import TrellisTensor
from . import ldlq
from .regularize import Regularized, regularize, transform_rows

# Scales tried, as the coded matrix' rms over the codebook's: coarse ones on few tiles, then steps
# around the best on more. High rates want less than 1, since they lose most beyond the codebook's
# ends.
_COARSE = (0.5, 0.65, 0.8, 0.95, 1.1)
_COARSE_TILES, _FINE_TILES = 16, 64
_FINE_STEP = 0.075


def quantize_linear(
    weight: torch.Tensor,
    bits: float,
    *,
    codebook: str = "mul1",
    hessian: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    seed: int = 0,
) -> TrellisTensor:
    """Quantises a linear layer's weight to EXL3.

    Regularises (random signs, channel scales, Hadamards), searches the global scale, and codes the
    tiles; with a Hessian by block LDLQ with damping, so that the error of the layer's output on
    the calibration data is small, else for least squared error of the weight.

    Args:
        weight: [out_features, in_features] as nn.Linear has it, finite, any float dtype. Sizes
            that are not multiples of 128 are padded.
        bits: 1 to 8, or 1.5, 2.5, 3.5 (mul1 only).
        codebook: "mul1" (default), "mcg", "3inst", "sqg_e4m3" or "sqg_fp16".
        hessian: float [in_features, in_features], the sum or mean of x x' over calibration rows;
            its overall factor does not matter.
        bias: [out_features], kept in float16.
        seed: of the random signs.

    Returns:
        TrellisTensor on weight's device; ``proxy_error`` is tr(E' H E) / tr(W' H W) in the coded
        basis (H the identity without a Hessian).

    Raises:
        TypeError, ValueError: naming the argument.

    Deterministic for a given seed, device and build. The method is QTIP's (Tseng et al., 2024) in
    the form of the EXL3 format.
    """
    _check(weight, hessian, bias)
    words = tiles.tile_words_of(bits)
    table = codebooks.codebook_table(codebook, tiles.bits_of(words))
    spread = float(table.float().square().mean().sqrt())

    def coder(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.quantize_tiles(targets.contiguous(), bits, codebook=codebook)

    with torch.no_grad():
        regular = regularize(weight, seed)
        scale = spread * _best_scale(regular, spread, coder)
        suh, target = regular.at_scale(scale)
        rotated = None if hessian is None else _rotated_hessian(hessian, suh)
        factor = None if rotated is None else ldlq.block_factor(rotated)
        states, coded = ldlq.code_matrix(target, factor, coder)
        return TrellisTensor(
            ops.pack_trellis(states, bits),
            suh,
            regular.svh,
            None if bias is None else bias.detach().to(weight.device, torch.float16),
            codebook,
            weight.shape[1],
            weight.shape[0],
            _proxy_error(target, coded, rotated),
        )


def _check(weight: torch.Tensor, hessian: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    op = "quantize_linear"
    if not isinstance(weight, torch.Tensor) or not weight.dtype.is_floating_point:
        got = weight.dtype if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise TypeError(f"{op}: weight is {got}, expected a float Tensor")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"{op}: weight has shape {list(weight.shape)}, expected [out, in]")
    if not bool(weight.isfinite().all()):
        raise ValueError(f"{op}: weight has NaN or infinite elements, expected finite ones")
    largest = float(weight.detach().abs().max())
    if largest > 2.0**20 or 0 < largest < 2.0**-28:
        raise ValueError(
            f"{op}: weight's largest magnitude is {largest:g}, expected 2^-28 to 2^20 "
            "(beyond, float16 scales cannot hold it)"
        )
    features = weight.shape[1]
    if hessian is not None:
        if tuple(hessian.shape) != (features, features):
            raise ValueError(
                f"{op}: hessian has shape {list(hessian.shape)}, expected [{features}, {features}]"
            )
        if not bool(hessian.isfinite().all()) or not float(hessian.diagonal().mean()) > 0:
            raise ValueError(
                f"{op}: hessian is not finite or has no positive diagonal, expected the sum of "
                "x x' over calibration rows (None: none were seen)"
            )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"{op}: bias has shape {list(bias.shape)}, expected [{weight.shape[0]}]")


def _rotated_hessian(hessian: torch.Tensor, suh: torch.Tensor) -> torch.Tensor:
    """The Hessian of what meets the coded matrix, H(x * suh): signs and magnitudes both count."""
    missing = suh.shape[0] - hessian.shape[0]
    h = ldlq.damped(hessian.to(suh.device, torch.float32))
    h = torch.nn.functional.pad(h, (0, missing, 0, missing)) * suh.float() * suh.float()[:, None]
    h = transform_rows(transform_rows(h).T)
    # Channels with suh 0 (dead, padding) leave the matrix singular; only the coding inside their
    # block sees this.
    return h + 1e-4 * h.diagonal().mean() * torch.eye(h.shape[0], device=h.device)


def _proxy_error(target: torch.Tensor, coded: torch.Tensor, hessian: torch.Tensor | None) -> float:
    error = target - coded
    if hessian is None:
        part, whole = error.square().sum(), target.square().sum()
    else:
        part, whole = (error * (hessian @ error)).sum(), (target * (hessian @ target)).sum()
    return float(part / whole.clamp(min=1e-30))


def _best_scale(regular: Regularized, spread: float, coder: ldlq.Coder) -> float:
    """Scale (over the codebook's rms) of least squared error on sample tiles."""
    samples = _sample(regular.unit)

    def loss(scale: float, count: int) -> float:
        part = samples[:count] if count < samples.shape[0] else samples
        factor = scale * spread
        return float((coder(part * factor)[1] / factor - part).square().mean())

    coarse = {scale: loss(scale, _COARSE_TILES) for scale in _COARSE}
    middle = min(coarse, key=coarse.__getitem__)
    losses = {}
    # The coarse step is two fine ones wide, so the minimum is at most a few steps away.
    for _ in range(3):
        for scale in (middle - _FINE_STEP, middle, middle + _FINE_STEP):
            if scale > 0 and scale not in losses:
                losses[scale] = loss(scale, _FINE_TILES)
        best = min(losses, key=losses.__getitem__)
        if best == middle:
            break
        middle = best
    below, above = losses.get(middle - _FINE_STEP), losses.get(middle + _FINE_STEP)
    if below is None or above is None:
        return middle
    curvature = below - 2 * losses[middle] + above
    if curvature <= 0:
        return middle
    offset = 0.5 * (below - above) / curvature
    return middle + _FINE_STEP * max(-0.5, min(0.5, offset))


def _sample(unit: torch.Tensor) -> torch.Tensor:
    """Tiles [T, 256] spread over the matrix in a fixed pseudo-random order."""
    all_tiles = tiles.matrix_to_tiles(unit).flatten(0, 1)
    count = min(_FINE_TILES, all_tiles.shape[0])
    order = torch.randperm(all_tiles.shape[0], generator=torch.Generator().manual_seed(0))
    return all_tiles[order[:count].to(unit.device)].contiguous()
