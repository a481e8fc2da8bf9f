"""Ways to make a :class:`MoeLayout`: piece by piece, from lists of matrices, from stacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..meta import checks
from ..meta.moe_checks import PROJECTIONS
from .moe import VECTORS, MoeLayout, Slice, entries_of, three_codebooks
from .tensor import TrellisTensor
from .tiles import TILE

KINDS = ("trellis", "suh", "svh", "bias")


class MoeFiller:
    """Copies checkpoint tensors into a layout's memory, each exactly once.

    Args:
        layout: where to; allocated (see :meth:`MoeLayout.empty` and :meth:`MoeLayout.materialize`).
    """

    def __init__(self, layout: MoeLayout) -> None:
        if layout.packed.is_meta:
            raise ValueError("MoeFiller: layout is on meta, expected one that is materialized")
        self.layout = layout
        self._missing = dict.fromkeys(_wanted(layout))
        self._known = frozenset(self._missing)

    def put(
        self, projection: str, expert: int | None, rank: int, kind: str, tensor: torch.Tensor
    ) -> None:
        """Takes one tensor of a checkpoint.

        Args:
            projection: "gate", "up" or "down".
            expert: index; None for a vector that all experts share.
            rank: rank slice.
            kind: "trellis", "suh", "svh" or "bias" (down's bias comes with rank 0 only).
            tensor: its values, of the layout's own dtype and shape; on any device.

        Raises:
            TypeError, ValueError: no such piece, a piece that came before, another dtype or shape.
        """
        op = "MoeFiller.put"
        where = f"{projection} {kind} of expert {expert}, rank {rank}"
        if projection not in PROJECTIONS or kind not in KINDS:
            raise ValueError(
                f"{op}: {where}, expected a projection in {PROJECTIONS} and a kind in {KINDS}"
            )
        key = _key(self.layout, projection, expert, rank, kind)
        if key not in self._known:
            raise ValueError(f"{op}: {where}: the layout has no such piece")
        if key not in self._missing:
            raise ValueError(f"{op}: {where}: came twice")
        target = _target(self.layout, key)
        checks.is_tensor(op, where, tensor)
        if tensor.dtype != target.dtype or tensor.shape != target.shape:
            raise ValueError(
                f"{op}: {where}: {tensor.dtype} {list(tensor.shape)}, "
                f"expected {target.dtype} {list(target.shape)}"
            )
        target.copy_(tensor)
        del self._missing[key]

    def missing(self) -> list[str]:
        """What has not come yet, in words."""
        return [_words(self.layout, key) for key in self._missing]

    def finish(self) -> MoeLayout:
        """The layout, once every piece came; ValueError tells what did not."""
        missing = self.missing()
        if missing:
            shown = "; ".join(missing[:8]) + ("; ..." if len(missing) > 8 else "")
            raise ValueError(f"MoeFiller: {len(missing)} pieces missing: {shown}")
        return self.layout


# A piece: a matrix's Slice, or a row of a vector or bias as (field name, row).
_Key = Slice | tuple[str, int]


def _wanted(layout: MoeLayout) -> list[_Key]:
    keys: dict[_Key, None] = {}
    for piece in layout.pieces():
        keys[piece] = None
        for kind in KINDS[1:]:
            name = f"{piece.projection}_{kind}"
            if getattr(layout, name) is None:
                continue
            if name == "gate_suh" and layout.gate_suh is layout.up_suh:
                continue
            keys[name, layout.row(name, piece.expert, piece.rank)] = None
    return list(keys)


def _key(
    layout: MoeLayout, projection: str, expert: int | None, rank: int, kind: str
) -> _Key | None:
    """None: there is no such piece."""
    in_range = 0 <= rank < layout.slices and (expert is None or 0 <= expert < layout.experts)
    name = f"{projection}_{kind}"
    if not in_range or (name == "down_bias" and rank > 0):
        return None
    if kind == "trellis":
        return None if expert is None else Slice(projection, expert, rank)
    tensor = getattr(layout, name)
    if tensor is None or (name == "gate_suh" and layout.gate_suh is layout.up_suh):
        return None
    # One expert shares with nobody, so either way of naming it will do.
    shared = name in VECTORS and tensor.shape[0] < layout.experts * layout.slices
    if layout.experts > 1 and shared != (expert is None):
        return None
    return name, layout.row(name, expert or 0, rank)


def _target(layout: MoeLayout, key: _Key) -> torch.Tensor:
    if isinstance(key, Slice):
        return layout.trellis(key)
    name, row = key
    return getattr(layout, name)[row]


def _words(layout: MoeLayout, key: _Key) -> str:
    if isinstance(key, Slice):
        return f"{key.projection} trellis of expert {key.expert}, rank {key.rank}"
    name, row = key
    projection, kind = name.split("_")
    tensor = getattr(layout, name)
    if name == "down_bias":
        return f"down bias of expert {row}, rank 0"
    if tensor.shape[0] < layout.experts * layout.slices:
        return f"{projection} {kind} of all experts, rank {row}"
    return f"{projection} {kind} of expert {row // layout.slices}, rank {row % layout.slices}"


Experts = Sequence[Sequence[TrellisTensor] | None]


def layout_of(gate: Experts | None, up: Experts, down: Experts) -> MoeLayout:
    """Copies quantised matrices together.

    Args:
        gate, up, down: for each expert the list of its rank slices, or None where this process does
            not hold it; ``gate=None``: there is no gate. A vector that is one and the same tensor
            for all experts is stored once per rank. A bias of down belongs to rank 0.

    Raises:
        ValueError: naming projection, expert and rank that do not go with the others.
    """
    op = "MoeLayout"
    given = {"up": up, "down": down} if gate is None else {"gate": gate, "up": up, "down": down}
    for projection, experts in given.items():
        if len(experts) != len(up):
            raise ValueError(
                f"{op}: {projection} has {len(experts)} experts, expected {len(up)} as up has"
            )
        for e, ranks in enumerate(experts):
            for r, part in enumerate(_ranks(f"{op}: {projection} of expert {e}", ranks)):
                if not isinstance(part, TrellisTensor):
                    where = Slice(projection, e, r)
                    raise TypeError(f"{op}: {where}: {type(part).__name__}, expected TrellisTensor")
    held = [e for e, ranks in enumerate(up) if ranks]
    if not held:
        raise ValueError(f"{op}: up has no expert, expected at least one")
    first = {projection: experts[held[0]] for projection, experts in given.items()}
    slices = len(up[held[0]])
    for projection, experts in given.items():
        _check_alike(op, projection, experts, up, slices, first)

    words = [
        [
            [part.trellis.shape[2] for part in ranks] if ranks else [0] * slices
            for ranks in given.get(projection, [None] * len(up))
        ]
        for projection in PROJECTIONS
    ]
    rows, dtypes = {}, {}
    for projection, experts in given.items():
        parts = [ranks for ranks in experts if ranks]
        for kind in ("suh", "svh"):
            shared = len(held) > 1 and all(
                getattr(part, kind) is getattr(parts[0][r], kind)
                for ranks in parts
                for r, part in enumerate(ranks)
            )
            rows[f"{projection}_{kind}"] = slices if shared else len(up) * slices
        bias = first[projection][0].bias
        if bias is not None:
            rows[f"{projection}_bias"] = len(up) * (1 if projection == "down" else slices)
            dtypes[f"{projection}_bias"] = bias.dtype
    one_suh = gate is not None and all(
        gate[e][r].suh is up[e][r].suh for e in held for r in range(slices)
    )
    names = tuple(first.get(projection, first["up"])[0].codebook for projection in PROJECTIONS)
    sizes = first["up"][0].in_features, first["up"][0].out_features
    layout = MoeLayout.of_words(words, rows, names, *sizes, one_suh, dtypes, first["up"][0].device)
    filler = MoeFiller(layout)
    for projection, experts in given.items():
        for expert in held:
            for rank, part in enumerate(experts[expert]):
                for kind in KINDS:
                    name, tensor = f"{projection}_{kind}", getattr(part, kind)
                    if tensor is None or (name == "gate_suh" and one_suh):
                        continue
                    shared = name in VECTORS and rows[name] < len(up) * slices
                    if shared and expert != held[0]:
                        continue
                    filler.put(projection, None if shared else expert, rank, kind, tensor)
    return filler.finish()


def _ranks(where: str, ranks: Sequence[TrellisTensor] | None) -> Sequence[TrellisTensor]:
    if ranks is not None and not isinstance(ranks, (list, tuple)):
        raise TypeError(f"{where}: {type(ranks).__name__}, expected a list of rank slices or None")
    return ranks or ()


def _check_alike(
    op: str,
    projection: str,
    experts: Experts,
    up: Experts,
    slices: int,
    first: dict[str, Sequence[TrellisTensor]],
) -> None:
    """Every expert of a projection against the first one of up."""
    like = first["up"][0]
    sizes = like.in_features, like.out_features
    if projection == "down":
        sizes = sizes[::-1]
    for e, ranks in enumerate(experts):
        if bool(ranks) != bool(up[e]):
            present, missing = (projection, "up") if ranks else ("up", projection)
            raise ValueError(f"{op}: {missing} of expert {e}: missing, though {present} is present")
        if not ranks:
            continue
        if len(ranks) != slices:
            raise ValueError(
                f"{op}: {projection} of expert {e}: {len(ranks)} rank slices, expected {slices}"
            )
        for r, part in enumerate(ranks):
            where = f"{op}: {Slice(projection, e, r)}"
            if (part.in_features, part.out_features) != sizes:
                raise ValueError(
                    f"{where}: {part.in_features} x {part.out_features}, "
                    f"expected {sizes[0]} x {sizes[1]}"
                )
            if part.device != like.device:
                raise ValueError(f"{where}: on {part.device}, expected {like.device}")
            wanted = first[projection][0]
            if part.codebook != wanted.codebook:
                raise ValueError(
                    f"{where}: codebook {part.codebook}, expected {wanted.codebook} "
                    f"as the others of {projection}"
                )
            bias = wanted.bias if projection != "down" or r == 0 else None
            if (part.bias is None) != (bias is None):
                raise ValueError(
                    f"{where}: bias is {'None' if part.bias is None else 'a Tensor'}, "
                    f"expected {'None' if bias is None else 'a Tensor'}"
                )
            if bias is not None and part.bias.dtype != bias.dtype:
                raise ValueError(f"{where}: bias is {part.bias.dtype}, expected {bias.dtype}")


def layout_of_stacks(
    gate: Sequence[torch.Tensor] | None,
    up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    *,
    codebook: str | tuple[str, str, str],
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    hidden: int = 0,
    intermediate: int = 0,
) -> MoeLayout:
    """Experts of one rate for each projection, unsliced, from stacked tensors (copied).

    Args:
        gate, up, down: (trellis int16 [E, in/16, out/16, 16 * bits], suh float16 [n, in], svh
            float16 [n, out]) with n = E or 1; ``gate=None``: there is no gate.
        codebook: one for all, or one each.
        gate_bias, up_bias, down_bias: [E, out], padded.
        hidden, intermediate: logical sizes, 0 for the padded ones.
    """
    op = "MoeLayout"
    given = {"up": up, "down": down} if gate is None else {"gate": gate, "up": up, "down": down}
    for projection, (trellis, *_) in given.items():
        checks.is_tensor(op, f"{projection} trellis", trellis)
        if trellis.dim() != 4 or trellis.dtype != torch.int16:
            raise ValueError(
                f"{op}: {projection} trellis is {trellis.dtype} {list(trellis.shape)}, "
                "expected int16 [experts, in/16, out/16, 16*bits]"
            )
    experts, rows, columns, _ = up[0].shape
    for projection, (trellis, *_) in given.items():
        shape = (columns, rows) if projection == "down" else (rows, columns)
        if tuple(trellis.shape[:3]) != (experts, *shape):
            raise ValueError(
                f"{op}: {projection} trellis has shape {list(trellis.shape)}, "
                f"expected [{experts}, {shape[0]}, {shape[1]}, 16*bits] to go with up"
            )
    table, start = torch.full((3, experts, 1, 2), -1), 0
    table[..., 1] = 0
    for p, projection in enumerate(PROJECTIONS):
        if projection not in given:
            continue
        trellis = given[projection][0]
        each = trellis[0].numel()
        table[p, :, 0, 0] = start + each * torch.arange(experts)
        table[p, :, 0, 1] = trellis.shape[3]
        start += trellis.numel()
    device = up[0].device
    no_gate = (None, None, None)
    _, gate_suh, gate_svh = gate or no_gate
    entries = entries_of(table)
    return MoeLayout(
        torch.cat([stack[0].flatten() for stack in given.values()]),
        table.to(device),
        gate_suh,
        gate_svh,
        *up[1:],
        *down[1:],
        gate_bias,
        up_bias,
        down_bias,
        three_codebooks(op, codebook),
        hidden or rows * TILE,
        intermediate or columns * TILE,
        entries,
    )
