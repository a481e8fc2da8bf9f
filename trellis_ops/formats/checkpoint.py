"""What a checkpoint in safetensors holds, read from the headers of its files alone.

The headers are the truth: a tensor's shape tells its rate and its marker tells its codebook.
Metadata in JSON decides one thing only, which of the two SQG codebooks a marker at 5 or 6 bits
means. Every fault is a ValueError that names the file and the tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from . import tiles
from .codebooks import MARKERS, rates_of

FIELDS = ("trellis", "suh", "svh", "su", "sv", "bias", *MARKERS)
"""Last name components of the tensors of one EXL3 matrix; su and sv are the legacy sign words."""

SQG_NAMES = {
    "sqg_e4m3": "sqg_e4m3",
    "sqg_xor_cheb_t12": "sqg_e4m3",
    "sqg_fp16": "sqg_fp16",
    "sqg_fp16_d3l": "sqg_fp16",
}
"""Names of the SQG codebooks in metadata -> ours."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as a header describes it; dtype is safetensors' name, such as ``"F16"``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def fault(self, problem: str) -> ValueError:
        return ValueError(f"{self.file}: {self.name} {problem}")

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Exl3Group:
    """The tensors of one quantised matrix.

    Attributes:
        name: what the tensors' names have in common, e.g. ``"model.layers.0.mlp.up_proj"``; empty
            where they have no prefix.
        tensors: field (a name of ``FIELDS``) -> tensor; a vector that the experts of a layer share
            is with each of them, under its own name.
        codebook: a name of ``CODEBOOKS``; ``"sqg"`` where the marker fits two codebooks and no
            metadata says which.
        bits: bits per weight, an int where it is one.
        in_features, out_features: as stored, multiples of 128.
    """

    name: str
    tensors: Mapping[str, TensorInfo]
    codebook: str
    bits: float
    in_features: int
    out_features: int

    @property
    def weights(self) -> int:
        return self.in_features * self.out_features

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def check_bias(self, out_features: int) -> None:
        """Raises ValueError where there is a bias, and it is shorter than the logical outputs."""
        bias = self.tensors.get("bias")
        if bias is not None and bias.shape[0] < out_features:
            raise bias.fault(
                f"is {bias}, expected [{out_features}] as the model, or [{self.out_features}]"
            )


@dataclass(frozen=True)
class Index:
    """Every tensor of a checkpoint: those of EXL3 matrices in groups, and the others."""

    path: Path
    groups: list[Exl3Group]
    others: list[TensorInfo]
    quantization_config: dict = field(default_factory=dict)

    @property
    def exl3_bytes(self) -> int:
        # A vector that experts share counts once.
        parts = {t.name: t.nbytes for group in self.groups for t in group.tensors.values()}
        return sum(parts.values())

    @property
    def other_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.others)

    @property
    def weights(self) -> int:
        """Number of quantised weights, padding included."""
        return sum(group.weights for group in self.groups)

    @property
    def average_bits(self) -> float | None:
        """Mean of the groups' bits, weighted by their size; None without groups."""
        if not self.weights:
            return None
        return sum(group.bits * group.weights for group in self.groups) / self.weights


def read_exl3_index(path: str | Path) -> Index:
    """Reads the headers of a checkpoint.

    Args:
        path: a .safetensors file, an index file (``*.safetensors.index.json``), or a folder.

    Raises:
        ValueError: a file is damaged or missing, or a tensor breaks the format; the message names
            the file and the tensor.
        OSError: the path does not exist or cannot be read.
    """
    path = Path(path)
    files, placed = _files_of(path)
    config = _quantization_config(path if path.is_dir() else path.parent)
    return _index(path, files, placed, config)


def read_exl3_files(files: Iterable[str | Path], config: dict) -> Index:
    """The same of files that are known, and of a quantization_config that is read."""
    files = [Path(file) for file in files]
    return _index(files[0].parent, files, {}, {**config, **_quantization_config(files[0].parent)})


def _index(path: Path, files: list[Path], placed: Mapping[str, Path], config: dict) -> Index:
    tensors: dict[str, TensorInfo] = {}
    markers: dict[str, int] = {}
    for file in files:
        _read_header(file, tensors, markers)
    for name, file in placed.items():
        if name not in tensors or tensors[name].file != file:
            raise ValueError(f"{file}: {name} is missing, though the index names it")

    stems = {_stem(name) for name in tensors if _field(name) == "trellis"}
    members: dict[str, dict[str, TensorInfo]] = {stem: {} for stem in stems}
    others, shared = [], {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if stem not in stems:
            if is_shared(name):
                shared[name] = tensor
            else:
                others.append(tensor)
        elif part in FIELDS:
            members[stem][part] = tensor
        else:
            raise tensor.fault(f"is no tensor of an EXL3 matrix, expected one of {FIELDS}")
    _share(members, shared)
    _reject_orphans(others, markers)
    groups = [_group(stem, members[stem], markers, config) for stem in sorted(stems, key=_natural)]
    return Index(path, groups, sorted(others, key=lambda tensor: _natural(tensor.name)), config)


# ---- names ----------------------------------------------------------------------------------


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _field(name: str) -> str:
    return name.rpartition(".")[2]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layers.10 after layers.9."""
    parts = name.split(".")
    return [(0, int(p), p) if p.isdecimal() and len(p) < 19 else (1, 0, p) for p in parts]


# ---- vectors that experts share ---------------------------------------------------------------

_SHARED_H = re.compile(r"(.*\.)?shared_h\.(gate_proj|up_proj|down_proj)\.rank(\d+)\.(suh|svh)")
_SHARED_R7 = re.compile(r"(.*\.)?r7_shared\.(gate_up_suh|down_svh)")
_EXPERT = re.compile(r"(.*\.)?\d+\.(gate_proj|up_proj|down_proj)(?:\.rank(\d+))?")


def is_shared(name: str) -> bool:
    """Whether a tensor is a hidden-side vector of all experts of a layer."""
    shared = "shared_h." in name or "r7_shared." in name
    return shared and bool(_SHARED_H.fullmatch(name) or _SHARED_R7.fullmatch(name))


def _share(members: dict[str, dict[str, TensorInfo]], shared: dict[str, TensorInfo]) -> None:
    """Gives experts the vectors that are stored once for all of them."""
    if not shared:
        return
    unused = set(shared)
    for stem, fields in members.items():
        match = _EXPERT.fullmatch(stem)
        if not match:
            continue
        prefix, projection, rank = match[1] or "", match[2], match[3]
        kind = "svh" if projection == "down_proj" else "suh"
        name = f"{prefix}shared_h.{projection}.rank{rank}.{kind}"
        if rank is None:
            whole = "down_svh" if projection == "down_proj" else "gate_up_suh"
            name = f"{prefix}r7_shared.{whole}"
        if name not in shared:
            continue
        if kind in fields:
            raise fields[kind].fault(f"is there besides {name}, expected one of the two")
        fields[kind] = shared[name]
        unused.discard(name)
    for name in sorted(unused):
        raise shared[name].fault("is shared by experts, but none of them lacks it")


# ---- files ----------------------------------------------------------------------------------


@contextmanager
def _json_faults(file: Path):
    # A deeply nested text exhausts the stack of the parser; UnicodeDecodeError is a ValueError.
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error


def read_json_object(file: Path) -> dict:
    """The JSON object in a file; ValueError where it holds something else."""
    with _json_faults(file):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a JSON {type(content).__name__}, expected an object")
    return content


def _files_of(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files to read, and where an index file says that each tensor is."""
    if not path.is_dir():
        return _files_of_index(path) if path.suffix == ".json" else ([path], {})
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        names = ", ".join(file.name for file in indices)
        raise ValueError(f"{path}: has {len(indices)} index files ({names}), name one of them")
    whole = path / "model.safetensors"
    if indices and whole.is_file():
        # transformers looks for that first; it leaves the index of an older save beside it.
        return [whole], {}
    if indices:
        return _files_of_index(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path}: holds no .safetensors file")
    return files, {}


def _files_of_index(index: Path) -> tuple[list[Path], dict[str, Path]]:
    places = read_json_object(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index}: has no object weight_map")
    placed = {}
    for name, file in places.items():
        if not isinstance(file, str) or not file or Path(file).name != file or "\0" in file:
            raise ValueError(f"{index}: {name} is in {file!r}, expected a file of the same folder")
        placed[name] = index.parent / file
    files = sorted(set(placed.values()))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{index}: the file {missing[0]}{more} that it names does not exist")
    return files, placed


def _read_header(file: Path, tensors: dict[str, TensorInfo], markers: dict[str, int]) -> None:
    """Adds a file's tensors, and the values of those that may be markers."""
    try:
        with safe_open(file, framework="pt"):  # checks sizes, offsets and overlaps
            pass
    except SafetensorError as error:
        raise ValueError(f"{file}: not a valid safetensors file: {error}") from error
    # Read once more and by hand: asking the library for each tensor takes ten times as long.
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        with _json_faults(file):
            header = json.loads(stream.read(size))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            tensor = TensorInfo(name, file, entry["dtype"], shape, end - begin)
            if name in tensors:
                raise tensor.fault(f"is also in {tensors[name].file}")
            tensors[name] = tensor
            if _field(name) in MARKERS and tensor.dtype == "I32" and tensor.nbytes == 4:
                stream.seek(8 + size + begin)
                markers[name] = int.from_bytes(stream.read(4), "little")


def _quantization_config(folder: Path) -> dict:
    """quantization_config.json, or else the entry of that name in config.json, or else {}."""
    own, model = folder / "quantization_config.json", folder / "config.json"
    if own.is_file():
        return read_json_object(own)
    if not model.is_file():
        return {}
    entry = read_json_object(model).get("quantization_config")
    if entry is None:
        return {}
    if not isinstance(entry, dict):
        raise ValueError(f"{model}: quantization_config is {entry!r:.40}, expected an object")
    return entry


# ---- one matrix -----------------------------------------------------------------------------


def _group(
    stem: str, tensors: dict[str, TensorInfo], markers: Mapping[str, int], config: dict
) -> Exl3Group:
    trellis = tensors["trellis"]
    if trellis.dtype != "I16" or len(trellis.shape) != 3:
        raise trellis.fault(f"is {trellis}, expected I16 [in/16, out/16, 16*bits]")
    words = trellis.shape[2]
    if not tiles.is_tile_words(words):
        raise trellis.fault(
            f"is {trellis}, expected a last dimension of 16*bits with bits from 1 to 8, "
            "or 24, 40 or 56"
        )
    sizes = [tiles.TILE * size for size in trellis.shape[:2]]
    for name, size in zip(("in", "out"), sizes, strict=True):
        if size == 0 or size % tiles.HADAMARD:
            raise trellis.fault(
                f"is {trellis}: {name} is {size}, expected a multiple of {tiles.HADAMARD}"
            )
    for (name, legacy), size in zip((("suh", "su"), ("svh", "sv")), sizes, strict=True):
        _check_scale(trellis, tensors, name, legacy, size)
    _check_bias(tensors.get("bias"), sizes[1])
    bits = tiles.bits_of(words)
    codebook = _codebook(trellis, tensors, markers, config, bits)
    return Exl3Group(stem, tensors, codebook, bits, sizes[0], sizes[1])


def _check_scale(
    trellis: TensorInfo, tensors: Mapping[str, TensorInfo], name: str, legacy: str, size: int
) -> None:
    scale, signs = tensors.get(name), tensors.get(legacy)
    if scale is None and signs is None:
        raise trellis.fault(f"has no {name} (or legacy {legacy}) beside it")
    if scale is not None and signs is not None:
        raise scale.fault(f"has {legacy} beside it, expected one of the two")
    if scale is not None and (scale.dtype != "F16" or scale.shape != (size,)):
        raise scale.fault(f"is {scale}, expected F16 [{size}], as the trellis has it")
    if signs is not None and (signs.dtype != "I16" or signs.shape != (size // 16,)):
        raise signs.fault(f"is {signs}, expected I16 [{size // 16}], as the trellis has it")


def _check_bias(bias: TensorInfo | None, size: int) -> None:
    if bias is None:
        return
    fits = len(bias.shape) == 1 and size - tiles.HADAMARD < bias.shape[0] <= size
    if bias.dtype not in ("F16", "BF16", "F32") or not fits:
        raise bias.fault(f"is {bias}, expected F16, BF16 or F32 [{size}], or less than 128 shorter")


def _codebook(
    trellis: TensorInfo,
    tensors: Mapping[str, TensorInfo],
    markers: Mapping[str, int],
    config: dict,
    bits: float,
) -> str:
    present = [name for name in MARKERS if name in tensors]
    if len(present) > 1:
        raise tensors[present[0]].fault(f"has {present[1]} beside it, expected one marker")
    found = present[0] if present else "3inst"
    if present:
        _check_marker(tensors[found], found, markers)
    if found == "sqg":
        named = config.get("codebook")
        # Only the law of sqg_e4m3 is defined below 5 bits, whatever the metadata says.
        hint = SQG_NAMES.get(named) if isinstance(named, str) and bits in (5, 6) else None
        rates = rates_of("sqg_e4m3")
        found = hint or ("sqg" if bits in (5, 6) else "sqg_e4m3")
    else:
        rates = rates_of(found)
    if not present and (lost := _recorded_codebook(trellis.name, config)):
        # A lost marker gives fluent noise, not an error, further on.
        raise trellis.fault(
            f"has no marker beside it, expected {lost}, as quantization_config says"
        )
    if bits not in rates:
        advice = " (a half rate needs the marker mul1)" if bits != int(bits) else ""
        raise trellis.fault(f"has {bits} bits, expected one of {rates} for {found}{advice}")
    return found


def _recorded_codebook(trellis: str, config: dict) -> str | None:
    """Codebook with a marker that metadata tells of a matrix, or else of the whole checkpoint."""
    storage = config.get("tensor_storage")
    entry = storage.get(_stem(trellis)) if isinstance(storage, dict) else None
    if isinstance(entry, dict) and entry.get("quant_format") == "exl3":
        return next((name for name in ("mcg", "mul1") if entry.get(f"{name}_multiplier")), None)
    named = config.get("codebook")
    return named if named in ("mcg", "mul1") else None


def _check_marker(tensor: TensorInfo, marker: str, values: Mapping[str, int]) -> None:
    if tensor.name not in values:
        raise tensor.fault(f"is {tensor}, expected one I32 value")
    value, wanted = values[tensor.name], MARKERS[marker]
    if value != wanted:
        raise tensor.fault(f"has the value {value:#010x}, expected {wanted:#010x}")


def _reject_orphans(others: Iterable[TensorInfo], markers: Mapping[str, int]) -> None:
    """What is left of a matrix without its trellis: a part of the checkpoint is missing."""
    kinds = {"suh": "F16", "svh": "F16", "su": "I16", "sv": "I16"}
    for tensor in others:
        part = _field(tensor.name)
        vector = tensor.dtype == kinds.get(part) and len(tensor.shape) == 1
        if vector or (part in MARKERS and markers.get(tensor.name) == MARKERS[part]):
            raise tensor.fault("has no trellis beside it")
