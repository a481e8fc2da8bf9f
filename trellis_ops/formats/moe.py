"""The routed experts of one layer as a few tensors: packed words, a table that finds each matrix in
them, and stacked vectors.

An expert is three matrices, gate, up and down, each with a rate of its own, and may be stored as R
*rank slices* of its intermediate size, which add up to it. The table says where a slice's matrix
lies and at which rate, so layers that mix rates differently differ in data only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ..meta import checks, moe_checks
from ..meta.moe_checks import PROJECTIONS
from . import codebooks, tiles
from .tensor import TrellisTensor

VECTORS = ("gate_suh", "gate_svh", "up_suh", "up_svh", "down_suh", "down_svh")
BIASES = ("gate_bias", "up_bias", "down_bias")

# Kernels load sixteen bytes at a time.
_ALIGNMENT = 8


class Entry(NamedTuple):
    """Where a slice's matrix lies in ``packed``, and its rate; both count int16 words."""

    offset: int
    tile_words: int

    @property
    def absent(self) -> bool:
        return self.tile_words == 0


ABSENT = Entry(-1, 0)


class Slice(NamedTuple):
    """Names one matrix."""

    projection: str
    expert: int
    rank: int

    def __str__(self) -> str:
        return f"{self.projection} of expert {self.expert}, rank {self.rank}"


@dataclass(frozen=True, eq=False)
class MoeLayout:
    """The weights of E experts in R rank slices, as ``rank_sliced_moe`` takes them.

    Attributes:
        packed: int16 [words]; every matrix's tiles, [in/16, out/16, 16 * bits] each.
        table: int64 [3, E, R, 2]; for gate, up and down the offset in ``packed`` and the words of a
            tile, or (-1, 0) where this process holds no such expert (or there is no gate).
        gate_suh, up_suh, down_svh: float16 [n, hidden padded].
        gate_svh, up_svh, down_suh: float16 [n, intermediate padded]. Slice r of expert e uses row
            (e * R + r) % n, so n is E * R, or R or 1 where experts share. gate_suh may be up_suh.
        gate_bias, up_bias: [E * R, intermediate padded] or None; down_bias: [E, hidden padded] or
            None, added once for all slices.
        codebooks: names for gate, up and down.
        hidden: logical hidden size.
        intermediate: logical intermediate size of one slice; padded where there are several.

    The gate's fields are None where the activation has no gate.

    Raises:
        TypeError, ValueError: at construction, naming the field, or projection, expert and rank.
    """

    packed: torch.Tensor
    table: torch.Tensor
    gate_suh: torch.Tensor | None
    gate_svh: torch.Tensor | None
    up_suh: torch.Tensor
    up_svh: torch.Tensor
    down_suh: torch.Tensor
    down_svh: torch.Tensor
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    codebooks: tuple[str, str, str]
    hidden: int
    intermediate: int
    # [3][E][R], the table on the host: it outlives a move to the meta device.
    entries: tuple[tuple[tuple[Entry, ...], ...], ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        op = "MoeLayout"
        # The op's own checks, on rows of no tokens.
        checks.is_tensor(op, "packed", self.packed)
        checks.is_tensor(op, "up_suh", self.up_suh)
        rows = torch.empty(0, *self.up_suh.shape[-1:], device=self.packed.device)
        moe_checks.moe(
            op,
            rows,
            rows.new_empty((0, 1), dtype=torch.int64),
            rows.new_empty((0, 1)),
            *(getattr(self, name) for name in TENSORS),
            *(codebooks.codebook_id(name, op) for name in self.codebooks),
            self.intermediate,
            moe_checks.ACTIVATIONS.index("silu" if self.gated else "relu2"),
            0.0,
            False,
            1.0,
            torch.float32,
        )
        checks.features(op, "hidden", self.hidden, self.hidden_padded)
        if self.entries is None:
            if self.table.is_meta:
                raise ValueError(f"{op}: table is on meta and entries is None, expected entries")
            object.__setattr__(self, "entries", entries_of(self.table))
        self._check_entries()

    # ---- sizes --------------------------------------------------------------------------------

    @property
    def gated(self) -> bool:
        """Whether there is a gate projection."""
        return self.gate_suh is not None

    @property
    def experts(self) -> int:
        return self.table.shape[1]

    @property
    def slices(self) -> int:
        return self.table.shape[2]

    @property
    def hidden_padded(self) -> int:
        return self.up_suh.shape[1]

    @property
    def intermediate_padded(self) -> int:
        """Of one slice."""
        return self.up_svh.shape[1]

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        parts = {id(part): part.nbytes for part in self.tensors().values()}
        return sum(parts.values())

    @property
    def bits(self) -> float:
        """Bits per weight on average."""
        words = sum(self.entry(piece).tile_words for piece in self.pieces())
        return words / 16 / max(1, sum(1 for _ in self.pieces()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors there are, by field name."""
        return {name: part for name in TENSORS if (part := getattr(self, name)) is not None}

    def shape(self, projection: str) -> tuple[int, int]:
        """(in, out) of a projection's matrices, padded."""
        sizes = self.hidden_padded, self.intermediate_padded
        return sizes if projection != "down" else sizes[::-1]

    def to(self, device: torch.device | str) -> MoeLayout:
        """The same on another device; "meta" keeps no values but the table's."""
        if self.packed.is_meta and torch.device(device).type != "meta":
            raise ValueError(f"MoeLayout: is on meta, expected materialize({str(device)!r})")
        moved = {name: part.to(device) for name, part in self.tensors().items()}
        if self.gate_suh is self.up_suh:
            moved["gate_suh"] = moved["up_suh"]
        return replace(self, **moved)

    def materialize(self, device: torch.device | str | None = None) -> MoeLayout:
        """The same sizes and table in zeroed memory of a device, to be filled."""
        zeros = {
            name: torch.zeros(part.shape, dtype=part.dtype, device=device)
            for name, part in self.tensors().items()
            if name != "table"
        }
        if self.gate_suh is self.up_suh:
            zeros["gate_suh"] = zeros["up_suh"]
        table = torch.tensor(self.entries, dtype=torch.int64, device=device)
        return replace(self, table=table, **zeros)

    # ---- pieces -------------------------------------------------------------------------------

    def pieces(self) -> Iterator[Slice]:
        """Every matrix that is present, in the order of the table."""
        for projection in PROJECTIONS:
            for expert in range(self.experts):
                for rank in range(self.slices):
                    piece = Slice(projection, expert, rank)
                    if not self.entry(piece).absent:
                        yield piece

    def entry(self, piece: Slice) -> Entry:
        assert self.entries is not None  # set at construction
        return self.entries[PROJECTIONS.index(piece.projection)][piece.expert][piece.rank]

    def trellis(self, piece: Slice) -> torch.Tensor:
        """int16 [in/16, out/16, 16 * bits], a view of ``packed``."""
        entry = self.entry(piece)
        if entry.absent:
            raise ValueError(f"MoeLayout: {piece} is absent")
        rows, columns = (size // tiles.TILE for size in self.shape(piece.projection))
        words = self.packed[entry.offset : entry.offset + rows * columns * entry.tile_words]
        return words.view(rows, columns, entry.tile_words)

    def row(self, name: str, expert: int, rank: int) -> int:
        """Of a vector or bias, for a slice."""
        tensor = getattr(self, name)
        if name == "down_bias":
            return expert
        return (expert * self.slices + rank) % tensor.shape[0]

    def matrix(self, projection: str, expert: int, rank: int = 0) -> TrellisTensor:
        """One matrix as a :class:`TrellisTensor`, sharing storage; down's bias is with rank 0."""
        piece = Slice(projection, expert, rank)
        sizes = self.hidden, self.intermediate
        logical = sizes if projection != "down" else sizes[::-1]
        trellis = self.trellis(piece)

        def of(kind: str) -> torch.Tensor | None:
            tensor = getattr(self, f"{projection}_{kind}")
            if tensor is None or (kind == "bias" and projection == "down" and rank > 0):
                return None
            return tensor[self.row(f"{projection}_{kind}", expert, rank)]

        name = self.codebooks[PROJECTIONS.index(projection)]
        return TrellisTensor(trellis, of("suh"), of("svh"), of("bias"), name, *logical)

    def _check_entries(self) -> None:
        """The table as a whole: nothing missing, out of range, overlapping or at no rate."""
        op, ends = "MoeLayout", []
        for p, projection in enumerate(PROJECTIONS):
            rows, columns = (size // tiles.TILE for size in self.shape(projection))
            for expert, rank in self._slices():
                piece = Slice(projection, expert, rank)
                offset, words = entry = self.entry(piece)
                absent = entry.absent
                if absent != (offset == -1):
                    raise ValueError(
                        f"{op}: {piece}: table entry is ({offset}, {words}), expected an offset "
                        "and a tile's words, or (-1, 0) where it is absent"
                    )
                if projection == "gate" and not self.gated:
                    if not absent:
                        raise ValueError(
                            f"{op}: {piece}: present, expected absent as there is no gate_suh"
                        )
                    continue
                other = Slice("down", expert, 0)
                if absent != self.entry(other).absent:
                    present, missing = (other, piece) if absent else (piece, other)
                    raise ValueError(f"{op}: {missing}: missing, though {present} is present")
                if absent:
                    continue
                name = codebooks.codebook_id(self.codebooks[p])
                checks.tile_words(f"{op}: {piece}", "table", words, name)
                end = offset + rows * columns * words
                if offset < 0 or offset % _ALIGNMENT or end > self.packed.shape[0]:
                    raise ValueError(
                        f"{op}: {piece}: words {offset} to {end}, expected a multiple of "
                        f"{_ALIGNMENT} and within the {self.packed.shape[0]} words of packed"
                    )
                ends.append((offset, end, piece))
        ends.sort()
        for (_, end, first), (offset, _, second) in itertools.pairwise(ends):
            if offset < end:
                raise ValueError(f"{op}: {first} and {second}: overlap in packed")

    def _slices(self) -> Iterator[tuple[int, int]]:
        return ((e, r) for e in range(self.experts) for r in range(self.slices))

    # ---- making one ---------------------------------------------------------------------------

    @classmethod
    def empty(
        cls,
        bits: tuple[float | Sequence[float | None] | None, ...],
        *,
        experts: int,
        hidden: int,
        intermediate: int,
        slices: int = 1,
        codebook: str | tuple[str, str, str] = "mcg",
        shared: Sequence[str] = (),
        one_suh: bool = False,
        biases: Sequence[str] = (),
        device: torch.device | str | None = None,
    ) -> MoeLayout:
        """A layout of zeros from sizes and rates alone; a :class:`MoeFiller` fills it.

        Args:
            bits: for gate, up and down: one rate, or one per expert, with None for an expert that
                this process does not hold. None in place of gate's: no gate.
            experts, slices: E and R.
            hidden: logical hidden size.
            intermediate: logical intermediate size of one slice.
            codebook: one for all, or one each for gate, up and down.
            shared: vectors that are stored once per rank for all experts, by field name.
            one_suh: gate and up have one suh, stored as up_suh.
            biases: which there are, by field name.
            device: "meta" works.
        """
        op = "MoeLayout.empty"
        names = three_codebooks(op, codebook)
        for name, given, known in (("shared", shared, VECTORS), ("biases", biases, BIASES)):
            for one in given:
                if one not in known:
                    raise ValueError(f"{op}: {name} has {one!r}, expected some of {known}")
        for name, count in (("experts", experts), ("slices", slices)):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{op}: {name} is {count!r}, expected a positive int")
        if not isinstance(bits, tuple) or len(bits) != 3:
            raise ValueError(f"{op}: bits is {bits!r}, expected a tuple for gate, up and down")
        words = [
            [[count] * slices for count in _tile_words(op, projection, rates, experts)]
            for projection, rates in zip(PROJECTIONS, bits, strict=True)
        ]
        rows = {
            name: slices if name in shared else experts * slices
            for name in VECTORS
            if bits[0] is not None or not name.startswith("gate")
        }
        for name in biases:
            rows[name] = experts if name == "down_bias" else experts * slices
        return cls.of_words(words, rows, names, hidden, intermediate, one_suh, {}, device)

    @classmethod
    def of_words(
        cls,
        words: Sequence[Sequence[Sequence[int]]],
        rows: Mapping[str, int],
        names: tuple[str, str, str],
        hidden: int,
        intermediate: int,
        one_suh: bool,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device | str | None,
    ) -> MoeLayout:
        """Zeros: words [3][E][R] of a tile (0: absent), and how many rows each vector has."""
        for name, size in (("hidden", hidden), ("intermediate", intermediate)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"MoeLayout: {name} is {size!r}, expected a positive int")
        wide, narrow = tiles.padded(hidden), tiles.padded(intermediate)
        sizes = {
            "gate": {"suh": wide, "svh": narrow, "bias": narrow},
            "up": {"suh": wide, "svh": narrow, "bias": narrow},
            "down": {"suh": narrow, "svh": wide, "bias": wide},
        }
        made: dict[str, torch.Tensor | None] = {}
        for name in (*VECTORS, *BIASES):
            projection, kind = name.split("_")
            dtype = dtypes.get(name, torch.float16)
            made[name] = None
            if name in rows:
                shape = rows[name], sizes[projection][kind]
                made[name] = torch.zeros(shape, dtype=dtype, device=device)
        if one_suh and made["gate_suh"] is not None:
            made["gate_suh"] = made["up_suh"]
        # Projection by projection, so that a uniform stack of experts is one range of words.
        matrix_tiles = (wide // tiles.TILE) * (narrow // tiles.TILE)
        entries, total = [], 0
        for projection in words:
            found = []
            for expert in projection:
                ranks = []
                for count in expert:
                    ranks.append(Entry(total, count) if count else ABSENT)
                    total += matrix_tiles * count
                found.append(tuple(ranks))
            entries.append(tuple(found))
        return cls(
            torch.zeros(total, dtype=torch.int16, device=device),
            torch.tensor(entries, dtype=torch.int64, device=device),
            **made,
            codebooks=names,
            hidden=hidden,
            intermediate=intermediate,
            entries=tuple(entries),
        )


TENSORS = ("packed", "table", *VECTORS, *BIASES)
"""Field names of the tensors, in the order of the ops' arguments."""


def entries_of(table: torch.Tensor) -> tuple[tuple[tuple[Entry, ...], ...], ...]:
    """A table on the host."""
    return tuple(
        tuple(tuple(Entry(*entry) for entry in expert) for expert in projection)
        for projection in table.tolist()
    )


def three_codebooks(op: str, codebook: str | tuple[str, str, str]) -> tuple[str, str, str]:
    """Names for gate, up and down, from one for all or one each."""
    names = (codebook,) * 3 if isinstance(codebook, str) else codebook
    if not isinstance(names, tuple) or len(names) != 3:
        raise TypeError(
            f"{op}: codebook is {codebook!r}, expected a name, or a tuple of three for gate, up "
            "and down"
        )
    for name in names:
        codebooks.codebook_id(name, op)
    return names


def _tile_words(
    op: str, projection: str, rates: float | Sequence[float | None] | None, experts: int
) -> list[int]:
    """Words of a tile per expert; 0 where it is absent."""
    if rates is None:
        if projection != "gate":
            raise ValueError(f"{op}: bits of {projection} is None, expected rates")
        return [0] * experts
    if isinstance(rates, (int, float)):
        rates = [rates] * experts
    if len(rates) != experts:
        raise ValueError(f"{op}: bits of {projection} has {len(rates)} rates, expected {experts}")
    return [
        0 if rate is None else tiles.tile_words_of(rate, f"{op}: {projection} of expert {e}")
        for e, rate in enumerate(rates)
    ]
