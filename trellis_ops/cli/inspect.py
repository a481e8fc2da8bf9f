"""python -m trellis_ops inspect: the EXL3 matrices of a checkpoint, from its headers."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..formats.checkpoint import Index, read_exl3_index


def add_parser(commands) -> argparse.ArgumentParser:
    text = "list the EXL3 matrices of a checkpoint: shape, bits, codebook, bytes, and the sum"
    parser = commands.add_parser("inspect", help=text, description=text.capitalize() + ".")
    parser.add_argument(
        "path", metavar="PATH", help="a .safetensors file, an index file, or a checkpoint's folder"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run(options: argparse.Namespace) -> int:
    index = read_exl3_index(options.path)
    if options.json:
        print(json.dumps(as_json(index), indent=2))
    else:
        show(index, Console())
    return 0


def as_json(index: Index) -> dict:
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
        "exl3_bytes": index.exl3_bytes,
        "exl3_weights": index.weights,
        "average_bits": index.average_bits,
        "other_tensors": len(index.others),
        "other_bytes": index.other_bytes,
    }


def show(index: Index, console: Console) -> None:
    table = Table("name", "in x out", "bits", "codebook", "bytes")
    for column in table.columns[1:]:
        column.no_wrap = True
    table.columns[0].overflow = "fold"
    for i in (1, 2, 4):
        table.columns[i].justify = "right"
    for group in index.groups:
        table.add_row(
            Text(group.name or "(no name)"),  # a name is text, though it may look like markup
            f"{group.in_features} x {group.out_features}",
            str(group.bits),
            group.codebook,
            f"{group.nbytes:,}",
        )
    if index.groups:
        console.print(table)
    console.print(summary(index), highlight=False, markup=False)


def summary(index: Index) -> str:
    other = f"{len(index.others)} other tensors, {index.other_bytes:,} bytes"
    if not index.groups:
        return f"no EXL3 matrix; {other}"
    stored = 8 * index.exl3_bytes / index.weights
    return (
        f"{len(index.groups)} EXL3 matrices, {index.exl3_bytes:,} bytes, "
        f"{index.weights:,} weights\n"
        f"{index.average_bits:.2f} bits on average, {stored:.2f} with scales and biases\n"
        f"{other}"
    )
