"""One linear layer that a checkpoint stores as several matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .linear import PackedWeight


class Exl3Parts(nn.Module):
    """Several :class:`Exl3Linear` in the place of one nn.Linear.

    Each part keeps its own rate, codebook and input transform, which is why they cannot be one
    matrix. Parts that split the outputs get the same x, and their results are joined (``qkv_proj``
    from q, k and v); parts that split the inputs get their columns of x, and their results are
    added (slices of a very wide ``down_proj``).

    Args:
        parts: name -> layer, in order of their features. The names become those of submodules; a
            dot in them makes a nested one.
        axis: "out" or "in", the features that the parts split.

    Gradient flows to x, as through each part.
    """

    def __init__(self, parts: Mapping[str, nn.Module], axis: str) -> None:
        super().__init__()
        if axis not in ("in", "out"):
            raise ValueError(f"Exl3Parts: axis is {axis!r}, expected 'in' or 'out'")
        if not parts:
            raise ValueError("Exl3Parts: there are no parts, expected at least one")
        self.axis, self.names = axis, tuple(parts)
        for name, part in parts.items():
            owner: nn.Module = self
            *path, last = name.split(".")
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            owner.add_module(last, part)

    @property
    def parts(self) -> list[nn.Module]:
        return [self.get_submodule(name) for name in self.names]

    @property
    def in_features(self) -> int:
        sizes = [part.in_features for part in self.parts]
        return sum(sizes) if self.axis == "in" else sizes[0]

    @property
    def out_features(self) -> int:
        sizes = [part.out_features for part in self.parts]
        return sum(sizes) if self.axis == "out" else sizes[0]

    @property
    def bias(self) -> None:
        """None: a bias belongs to its part."""
        return None

    @property
    def weight(self) -> PackedWeight:
        first = self.parts[0].weight
        return PackedWeight((self.out_features, self.in_features), first.dtype, first.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], in x.dtype or the autocast dtype."""
        parts = self.parts
        if self.axis == "out":
            return torch.cat([part(x) for part in parts], dim=-1)
        pieces = x.split([part.in_features for part in parts], dim=-1)
        results = [part(piece) for part, piece in zip(parts, pieces, strict=True)]
        # Added in float32: each part has been rounded once, their sum shall be rounded once more.
        return sum(result.float() for result in results).to(results[0].dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A dense copy of the weight, [out_features, in_features]."""
        axis = 0 if self.axis == "out" else 1
        return torch.cat([part.dequantize(dtype) for part in self.parts], dim=axis)

    def extra_repr(self) -> str:
        return f"axis={self.axis}"
