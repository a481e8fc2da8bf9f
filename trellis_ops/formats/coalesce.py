"""Rank slices of experts joined to whole matrices, where that loses nothing."""

from __future__ import annotations

import torch

from .experts import PROJECTIONS, ExpertSet
from .reading import Reader
from .tensor import TrellisTensor


def coalesced(experts: ExpertSet, reader: Reader) -> dict[tuple[str, int], TrellisTensor]:
    """The whole matrices of a layer's experts: (projection, expert) -> matrix.

    Slices of a matrix that was quantised whole share the vector of the side that is not cut, byte
    for byte. Where that differs, each slice was quantised for itself and has a rotation of its own,
    and no single matrix equals their sum.

    Raises:
        ValueError: naming the first matrix whose slices cannot be joined, and why.
    """
    joined = {}
    for projection in PROJECTIONS if experts.gated else PROJECTIONS[1:]:
        for expert in range(experts.experts):
            groups = [experts.matrices[projection, expert, r] for r in range(experts.slices)]
            parts = [reader.matrix(group) for group in groups]
            kind, cut = ("svh", "suh") if projection == "down" else ("suh", "svh")
            first = getattr(parts[0], kind)
            for group, part in zip(groups, parts, strict=True):
                if not torch.equal(getattr(part, kind).view(torch.int16), first.view(torch.int16)):
                    raise ValueError(
                        f"{group.name}.{kind} differs from that of {groups[0].name}: its slices "
                        "were quantised one by one, and no whole matrix equals them"
                    )
                if (part.codebook, part.bits) != (parts[0].codebook, parts[0].bits):
                    raise ValueError(
                        f"{group.name}.trellis has {part.codebook} at {part.bits} bits, and "
                        f"{groups[0].name}.trellis {parts[0].codebook} at {parts[0].bits}"
                    )
            vectors = {kind: first, cut: torch.cat([getattr(part, cut) for part in parts])}
            bias = parts[0].bias
            if bias is not None and projection != "down":
                bias = torch.cat([part.bias for part in parts])
            joined[projection, expert] = TrellisTensor(
                torch.cat([part.trellis for part in parts], dim=0 if projection == "down" else 1),
                vectors["suh"],
                vectors["svh"],
                bias,
                parts[0].codebook,
            )
    return joined
