"""Which matrices of a checkpoint are the routed experts of a layer, and in which layout."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from .checkpoint import Exl3Group, is_shared
from .moe import MoeLayout
from .moe_build import MoeFiller
from .reading import Reader

PROJECTIONS = ("gate", "up", "down")

# Both spellings; Mixtral and its kin number them.
_SPELLINGS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
_STEM = re.compile(
    rf"((?:.+\.)?experts)\.([0-9]{{1,6}})\.({'|'.join(_SPELLINGS)})(?:\.rank([0-9]{{1,3}}))?"
)

# Fewer threads than a fast disk could use; more of them wait for the interpreter.
_READERS = 4


@dataclass(frozen=True)
class ExpertSet:
    """The routed experts of one layer.

    Attributes:
        name: prefix of their matrices, e.g. ``"model.layers.3.mlp.experts"``.
        matrices: (projection, expert, rank) -> matrix. Projections are gate, up and down.
        stems: the same -> the matrix's name, of which ``name`` is the beginning.
        experts, slices: how many.
        layout: "per_expert"; "per_expert_v1" and "shared_h_v1" (rank slices, with the hidden-side
            vectors apart or shared); "r7" (no slices, shared).
    """

    name: str
    matrices: Mapping[tuple[str, int, int], Exl3Group]
    stems: Mapping[tuple[str, int, int], str]
    experts: int
    slices: int
    layout: str

    @property
    def gated(self) -> bool:
        return ("gate", 0, 0) in self.matrices

    def first(self, projection: str) -> Exl3Group:
        return self.matrices[projection, 0, 0]


def expert_sets(
    groups: Mapping[str, Exl3Group], names: Container[str] | None = None
) -> dict[str, ExpertSet]:
    """Finds the experts among matrices, by the names that these go by.

    Args:
        groups: name -> matrix.
        names: which sets to look for; None for all.

    Raises:
        ValueError: an expert, projection or rank slice is missing or there twice; the message names
            it.
    """
    found: dict[str, dict[tuple[str, int, int], str]] = {}
    ranked: dict[str, bool] = {}
    for stem in groups:
        match = _STEM.fullmatch(stem)
        if not match or (names is not None and match[1] not in names):
            continue
        name, key = match[1], (_SPELLINGS[match[3]], int(match[2]), int(match[4] or 0))
        own = found.setdefault(name, {})
        if key in own:
            raise ValueError(
                f"{groups[stem].name}.trellis and {groups[own[key]].name}.trellis "
                "are the same matrix of an expert, expected one of the two"
            )
        if ranked.setdefault(name, match[4] is not None) != (match[4] is not None):
            raise ValueError(
                f"{groups[stem].name}.trellis: some matrices of these experts are rank slices and "
                "some are not"
            )
        own[key] = stem
    return {name: _set(name, stems, groups, ranked[name]) for name, stems in found.items()}


def _set(
    name: str,
    stems: Mapping[tuple[str, int, int], str],
    groups: Mapping[str, Exl3Group],
    ranked: bool,
) -> ExpertSet:
    experts = 1 + max(expert for _, expert, _ in stems)
    slices = 1 + max(rank for *_, rank in stems)
    gated = any(projection == "gate" for projection, *_ in stems)
    present = PROJECTIONS if gated else PROJECTIONS[1:]
    if len(stems) != experts * slices * len(present):
        for expert in range(experts):
            for projection in present:
                for rank in range(slices):
                    if (projection, expert, rank) not in stems:
                        part = f", rank slice {rank} of {slices}" if ranked else ""
                        raise ValueError(
                            f"{name}: {projection} of expert {expert}{part} is missing, "
                            f"expected {experts} experts"
                        )
    matrices = {key: groups[stem] for key, stem in stems.items()}
    shares = any(is_shared(t.name) for t in matrices["up", 0, 0].tensors.values())
    layout = "per_expert"
    if shares:
        layout = "shared_h_v1" if ranked else "r7"
    elif ranked:
        layout = "per_expert_v1"
    return ExpertSet(name, matrices, stems, experts, slices, layout)


def empty_layout(
    experts: ExpertSet,
    hidden: int,
    intermediate: int,
    held: Iterable[int] | None = None,
    ranks: Iterable[int] | None = None,
) -> MoeLayout:
    """The experts' layout on the meta device.

    Args:
        hidden, intermediate: logical sizes; of the whole expert, or of one slice where there are
            several.
        held: experts that this process holds; None for all.
        ranks: rank slices that it holds; None for all.

    Raises:
        ValueError: codebooks or sizes of a projection differ between experts.
    """
    held = set(range(experts.experts)) if held is None else set(held)
    ranks = tuple(range(experts.slices)) if ranks is None else tuple(ranks)
    bits: list[list[float | None] | None] = []
    codebooks = []
    for projection in PROJECTIONS:
        if projection == "gate" and not experts.gated:
            bits.append(None)
            codebooks.append(experts.first("up").codebook)
            continue
        codebooks.append(experts.first(projection).codebook)
        bits.append([])
        for expert in range(experts.experts):
            parts = [experts.matrices[projection, expert, rank] for rank in ranks]
            _check_alike(experts, projection, parts)
            bits[-1].append(parts[0].bits if expert in held else None)
    shared, one_suh = (), False
    if experts.layout == "shared_h_v1":
        shared = ("gate_suh", "up_suh", "down_svh")
    elif experts.layout == "r7":
        shared, one_suh = ("gate_suh", "up_suh", "down_svh"), True
    biases = [
        f"{projection}_bias"
        for projection in PROJECTIONS
        if bits[PROJECTIONS.index(projection)]
        and "bias" in experts.first(projection).tensors
        and not (projection == "down" and ranks[0] > 0)
    ]
    return MoeLayout.empty(
        tuple(bits),
        experts=experts.experts,
        hidden=hidden,
        intermediate=intermediate,
        slices=len(ranks),
        codebook=tuple(codebooks),
        shared=[name for name in shared if experts.gated or not name.startswith("gate")],
        one_suh=one_suh and experts.gated,
        biases=biases,
        device="meta",
    )


def _check_alike(experts: ExpertSet, projection: str, parts: list[Exl3Group]) -> None:
    first = experts.first(projection)
    for part in parts:
        for what in ("codebook", "in_features", "out_features"):
            got, wanted = getattr(part, what), getattr(first, what)
            if got != wanted:
                raise ValueError(
                    f"{part.name}.trellis has {what} {got}, expected {wanted} "
                    f"as {first.name}.trellis"
                )
        if part.bits != parts[0].bits:
            raise ValueError(
                f"{part.name}.trellis has {part.bits} bits, expected {parts[0].bits} "
                f"as {parts[0].name}.trellis, a slice of the same matrix"
            )
        first_slice = projection != "down" or part is parts[0]
        if first_slice and ("bias" in part.tensors) != ("bias" in first.tensors):
            raise ValueError(
                f"{part.name}.trellis and {first.name}.trellis: one has a bias, the other none"
            )


def read_experts(
    experts: ExpertSet,
    layout: MoeLayout,
    reader: Reader,
    held: Iterable[int] | None = None,
    ranks: Iterable[int] | None = None,
) -> MoeLayout:
    """Fills the memory of a layout that :func:`empty_layout` made, one copy for each matrix.

    Args:
        layout: materialized, on any device.
        held, ranks: as there.

    Raises:
        ValueError: a piece is missing at the end.
    """
    held = set(range(experts.experts)) if held is None else set(held)
    local = {rank: i for i, rank in enumerate(range(experts.slices) if ranks is None else ranks)}
    filler = MoeFiller(layout)
    mine: dict[int, list[tuple[str, int, int]]] = {expert: [] for expert in held}
    for key in experts.matrices:
        if key[1] in mine and key[2] in local:
            mine[key[1]].append(key)

    def read(keys: list[tuple[str, int, int]]) -> None:
        for key in keys:
            (projection, expert, rank), group = key, experts.matrices[key]
            for kind, tensor in reader.parts(group).items():
                stored = group.tensors.get(kind)
                if stored is not None and is_shared(stored.name):
                    continue
                if projection == "down" and kind == "bias" and rank > 0:
                    continue
                filler.put(projection, expert, local[rank], kind, tensor)

    with torch.no_grad(), ThreadPoolExecutor(_READERS) as pool:
        for _ in pool.map(read, mine.values()):
            pass
        for projection, kind, rank, tensor in _shared(experts, local):
            if not (projection == "gate" and layout.gate_suh is layout.up_suh):
                filler.put(projection, None, local[rank], kind, reader.read(tensor))
    return filler.finish()


def _shared(experts: ExpertSet, local: Mapping[int, int]):
    """(projection, kind, rank, tensor) of each vector that all experts share."""
    for projection in PROJECTIONS:
        for rank in local:
            group = experts.matrices.get((projection, 0, rank))
            for kind, tensor in (group.tensors if group else {}).items():
                if is_shared(tensor.name):
                    yield projection, kind, rank, tensor
