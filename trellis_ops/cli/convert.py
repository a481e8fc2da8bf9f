"""python -m trellis_ops convert: rank slices of experts joined to whole matrices."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file

from ..formats.checkpoint import Index, read_exl3_index, read_json_object
from ..formats.coalesce import coalesced
from ..formats.experts import ExpertSet, expert_sets
from ..formats.reading import Reader
from ..integrations.tail import tail_of_dict, unshare_tail
from ..staging import staged

OPERATION = "lossless_tp_rank_coalesce"
_REPLACED = ("config.json", "quantization_config.json")


def add_parser(commands) -> argparse.ArgumentParser:
    text = "join the rank slices of experts that were quantised whole; refuse others, saying why"
    parser = commands.add_parser("convert", help=text, description=text.capitalize() + ".")
    parser.add_argument("path", metavar="DIR", type=Path, help="a checkpoint's folder")
    parser.add_argument("output", metavar="OUT", type=Path, help="the folder to write")
    return parser


def run(options: argparse.Namespace) -> int:
    console = Console(highlight=False, markup=False)
    index = read_exl3_index(options.path)
    stems = {group.name: group for group in index.groups}
    sets = {n: s for n, s in expert_sets(stems).items() if s.slices > 1}
    if not sets:
        raise ValueError(f"{options.path}: has no rank slices of experts to join")
    config = read_json_object(options.path / "config.json")
    ranked = update_config(config, next(iter(sets.values())).slices)
    with staged(options.output, "convert") as folder:
        write_weights(index, sets, folder, ".rank0" if ranked else "", console)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_others(options.path, folder)
    count = sum(experts.experts for experts in sets.values())
    console.print(f"{count} experts of {len(sets)} layers joined into {options.output}")
    return 0


def update_config(config: dict, slices: int) -> bool:
    """Tells in the metadata what was done; whether names keep a rank, as the metadata demands."""
    tail = tail_of_dict(config.get("hybrid_tr3_tail"))
    if tail is None:
        return False
    unshare_tail(tail)
    tail.update(tp=1, source_tp=slices, source_operation=OPERATION)
    return True


def write_weights(
    index: Index, sets: dict[str, ExpertSet], folder: Path, rank: str, console: Console
) -> None:
    """One shard for each layer's experts, and one for what is left of each file."""
    reader = Reader()
    done = {t.name for s in sets.values() for g in s.matrices.values() for t in g.tensors.values()}
    rest = [*index.others, *(t for group in index.groups for t in group.tensors.values())]
    left: dict[Path, list] = {}
    for tensor in rest:
        if tensor.name not in done:
            left.setdefault(tensor.file, []).append(tensor)
    total, weight_map, size = len(sets) + len(left), {}, 0
    jobs = [*sets.values(), *left.values()]
    for number, job in enumerate(track(jobs, "convert", console=console), start=1):
        if isinstance(job, ExpertSet):
            tensors = {}
            for (projection, expert), matrix in coalesced(job, reader).items():
                stem = job.stems[projection, expert, 0].removesuffix(".rank0")
                tensors.update(matrix.state_dict(f"{stem}{rank}."))
        else:
            tensors = {tensor.name: reader.read(tensor) for tensor in job}
        name = f"model-{number:05}-of-{total:05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        size += sum(tensor.nbytes for tensor in tensors.values())
    content = {"metadata": {"total_size": size}, "weight_map": weight_map}
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_others(source: Path, target: Path, replaced: tuple[str, ...] = _REPLACED) -> None:
    """Tokenizer and the like: every file beside the weights that was not written anew."""
    for file in source.iterdir():
        weights = file.suffix == ".safetensors" or file.name.endswith(".safetensors.index.json")
        if file.is_file() and not weights and file.name not in replaced:
            shutil.copy2(file, target / file.name)
