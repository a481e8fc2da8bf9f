"""Random layers and error measures that the tests share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import oracle
import torch

RATES = {
    "3inst": (1, 2, 3, 4, 5, 6, 7, 8),
    "mcg": (1, 2, 3, 4, 5, 6, 7, 8),
    "mul1": (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8),
    "sqg_e4m3": (2, 3, 4, 5, 6),
    "sqg_fp16": (5, 6),
}
CASES = [(codebook, bits) for codebook, rates in RATES.items() for bits in rates]

# Relative L2 error against float64 that every op promises, by output dtype.
BOUNDS = {torch.float16: 5e-4, torch.bfloat16: 3e-3, torch.float32: 5e-4}
DTYPES = tuple(BOUNDS)


@dataclass
class Layer:
    """One packed matrix; scales are no mere signs, so that swapped ones show."""

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: str

    @property
    def code(self) -> int:
        return oracle.CODEBOOKS.index(self.codebook)

    def weight(self) -> np.ndarray:
        """float64 [in, out]."""
        return oracle.weight(
            self.trellis.numpy(), self.suh.numpy(), self.svh.numpy(), self.codebook
        )


def make_layer(
    codebook: str = "mcg", bits: float = 3, *, rows: int = 256, columns: int = 384, seed: int = 0
) -> Layer:
    """Any bits are a valid tile, so a random layer needs no quantiser. rows are inputs."""
    random = np.random.default_rng(seed)
    words = int(16 * bits)
    trellis = random.integers(-(2**15), 2**15, (rows // 16, columns // 16, words), np.int16)

    def scales(features: int, factor: float) -> torch.Tensor:
        values = random.choice([-1, 1], features) * random.uniform(0.5, 2, features) * factor
        return torch.from_numpy(values.astype(np.float16))

    return Layer(
        torch.from_numpy(trellis), scales(rows, 1.0), scales(columns, rows**-0.5), codebook
    )


def closed_states(bits: float, tiles: int, seed: int = 0) -> torch.Tensor:
    """int32 [tiles, 256]: random closed paths."""
    packed = make_layer("mul1", bits, rows=16, columns=16 * tiles, seed=seed).trellis
    return torch.from_numpy(oracle.unpack(packed.numpy())[0].astype(np.int32))


def double(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def worst_row(got: torch.Tensor, want: np.ndarray) -> float:
    """The largest relative L2 error of a row; infinite where a value is not finite."""
    got = double(got).reshape(-1, got.shape[-1])
    want = want.reshape(got.shape)
    if not np.isfinite(got).all():
        return float("inf")
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())


def poison() -> None:
    """Leaves NaNs in memory that the next allocations are likely to get."""
    freed = [torch.full((size,), float("nan")) for size in (1 << 8, 1 << 12, 1 << 16, 1 << 18)]
    del freed
