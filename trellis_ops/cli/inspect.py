"""python -m trellis_ops inspect: the EXL3 matrices of a checkpoint, from its headers."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..formats.checkpoint import Index, read_exl3_index
from ..formats.experts import PROJECTIONS, ExpertSet, expert_sets


def add_parser(commands) -> argparse.ArgumentParser:
    text = "list the EXL3 matrices of a checkpoint: shape, bits, codebook, bytes, experts, sums"
    parser = commands.add_parser("inspect", help=text, description=text.capitalize() + ".")
    parser.add_argument(
        "path", metavar="PATH", help="a .safetensors file, an index file, or a checkpoint's folder"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run(options: argparse.Namespace) -> int:
    index = read_exl3_index(options.path)
    try:
        sets = expert_sets({group.name: group for group in index.groups})
    except ValueError as error:
        # A shard may hold a part of the experts only; a whole checkpoint may not.
        if index.path.suffix != ".safetensors":
            raise
        print(f"experts are listed one by one: {error}", file=sys.stderr)
        sets = {}
    if options.json:
        print(json.dumps(as_json(index, sets), indent=2))
    else:
        show(index, sets, Console())
    return 0


def as_json(index: Index, sets: Mapping[str, ExpertSet]) -> dict:
    """The table and its sums as plain values."""
    return {
        "path": str(index.path),
        "tensors": [
            {
                "name": group.name,
                "in_features": group.in_features,
                "out_features": group.out_features,
                "bits": group.bits,
                "codebook": group.codebook,
                "fields": sorted(group.tensors),
                "bytes": group.nbytes,
            }
            for group in index.groups
        ],
        "experts": [
            {
                "name": experts.name,
                "layout": experts.layout,
                "experts": experts.experts,
                "slices": experts.slices,
                "tiers": {
                    projection: {str(bits): count for bits, count in tiers(experts, projection)}
                    for projection in projections(experts)
                },
                "bytes": bytes_of(experts),
            }
            for experts in sets.values()
        ],
        "exl3_bytes": index.exl3_bytes,
        "exl3_weights": index.weights,
        "average_bits": index.average_bits,
        "other_tensors": len(index.others),
        "other_bytes": index.other_bytes,
    }


def projections(experts: ExpertSet) -> tuple[str, ...]:
    return PROJECTIONS if experts.gated else PROJECTIONS[1:]


def tiers(experts: ExpertSet, projection: str) -> list[tuple[float, int]]:
    """(bits, how many experts), lowest first."""
    counts = Counter(
        group.bits for (p, _, rank), group in experts.matrices.items()
        if p == projection and rank == 0
    )  # fmt: skip
    return sorted(counts.items())


def bytes_of(experts: ExpertSet, projection: str | None = None) -> int:
    """Stored bytes; vectors that experts share count once, but with each projection."""
    parts = {
        tensor.name: tensor.nbytes
        for (p, *_), group in experts.matrices.items()
        if projection in (None, p)
        for tensor in group.tensors.values()
    }
    return sum(parts.values())


def show(index: Index, sets: Mapping[str, ExpertSet], console: Console) -> None:
    table = Table("name", "in x out", "bits", "codebook", "bytes")
    for column in table.columns[1:]:
        column.no_wrap = True
    table.columns[0].overflow = "fold"
    for i in (1, 2, 4):
        table.columns[i].justify = "right"
    routed = {stem for experts in sets.values() for stem in experts.stems.values()}
    for experts in sets.values():
        for projection in projections(experts):
            first = experts.first(projection)
            count = f"{experts.experts} x "
            count += f"{experts.slices} ranks x " if experts.slices > 1 else ""
            rates = tiers(experts, projection)
            table.add_row(
                Text(f"{experts.name}.*.{projection}"),
                f"{count}{first.in_features} x {first.out_features}",
                ", ".join(f"{b} ({n})" if len(rates) > 1 else str(b) for b, n in rates),
                first.codebook,
                f"{bytes_of(experts, projection):,}",
            )
    for group in index.groups:
        if group.name in routed:
            continue
        table.add_row(
            Text(group.name or "(no name)"),  # a name is text, though it may look like markup
            f"{group.in_features} x {group.out_features}",
            str(group.bits),
            group.codebook,
            f"{group.nbytes:,}",
        )
    if index.groups:
        console.print(table)
    console.print(summary(index, sets), highlight=False, markup=False)


def summary(index: Index, sets: Mapping[str, ExpertSet]) -> str:
    other = f"{len(index.others)} other tensors, {index.other_bytes:,} bytes"
    if not index.groups:
        return f"no EXL3 matrix; {other}"
    kinds = Counter((s.experts, s.slices, s.layout) for s in sets.values())
    lines = [
        f"{layers} layers of {count} experts"
        + (f" in {slices} rank slices" if slices > 1 else "")
        + f" ({layout})\n"
        for (count, slices, layout), layers in kinds.items()
    ]
    stored = 8 * index.exl3_bytes / index.weights
    return "".join(lines) + (
        f"{len(index.groups)} EXL3 matrices, {index.exl3_bytes:,} bytes, "
        f"{index.weights:,} weights\n"
        f"{index.average_bits:.2f} bits on average, {stored:.2f} with scales and biases\n"
        f"{other}"
    )
