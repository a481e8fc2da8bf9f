"""Which module of a transformers model takes which matrices of a checkpoint.

Works on the model's skeleton, before any weight is read: modules are replaced by packed ones on
the meta device, and it is settled how each tensor gets to its place. A matrix that no module
claims is an error, since a model with a layer left at random talks fluently all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..formats import codebooks, tiles
from ..formats.checkpoint import Exl3Group, is_shared
from ..formats.experts import ExpertSet, expert_sets
from ..formats.reading import Reader, is_plain
from ..nn import Exl3Linear, Exl3Parts
from ..parallel import ColumnParallelLinear, RowParallelLinear, Shard, cut
from . import experts
from .plan import Style, apart, style_of

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Layers that transformers fuses, and the layers beside them that converters store instead."""

Read = Callable[[torch.device], dict[str, torch.Tensor]]
"""Gives the tensors of a module on a device, by their names in it."""


@dataclass
class Placement:
    """What was replaced, and where tensors go.

    A *stem* is the name of a matrix in the checkpoint, as the model's own renamings leave it, with
    the base model's prefix (``"model."``) where the model has one.

    Attributes:
        prefix: of the base model, as checkpoints have it.
        roots: names of the model's own submodules.
        stems: stem -> name of the matrix's module. Its tensors are loaded as they are, but for
            those in ``consumed``.
        reads: module -> how to read it, where its tensors need more than to be copied.
        triggers: name of a tensor, with its stem -> module to read when it comes up.
        consumed: stems whose tensors nobody loads: ``reads`` take care of them, or the model does
            not run their layer.
        experts: module of routed experts -> what stood there, and what that is like.
        sets: the same -> its matrices.
        ignored: names of matrices that are left out on purpose.
    """

    prefix: str = ""
    roots: frozenset[str] = frozenset()
    stems: dict[str, str] = field(default_factory=dict)
    reads: dict[str, Read] = field(default_factory=dict)
    triggers: dict[str, str] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)
    experts: dict[str, tuple[nn.Module, experts.Dense]] = field(default_factory=dict)
    sets: dict[str, ExpertSet] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def stem_of(self, name: str) -> str:
        """Stem of a tensor, by its renamed name."""
        stem = name.rpartition(".")[0]
        if not self.prefix:
            return stem
        if self.prefix not in self.roots:  # the model is the base model itself
            return stem.removeprefix(f"{self.prefix}.")
        return stem if stem.partition(".")[0] in self.roots else f"{self.prefix}.{stem}"


def place(
    model: nn.Module,
    groups: Iterable[Exl3Group],
    rename: Callable[[str], str],
    ignored: Callable[[str], bool],
    dtype: torch.dtype,
    shard: Shard | None = None,
) -> Placement:
    """Replaces the modules of ``model`` that ``groups`` hold the weights of.

    Args:
        model: on the meta device; changed in place.
        groups: the checkpoint's matrices.
        rename: a tensor's name in the checkpoint -> the model's own name for it.
        ignored: tells of a tensor's name whether the model leaves it out on purpose.
        dtype: what the packed modules say that their weight has.
        shard: the processes that split the model, and this one's place among them.

    Raises:
        ValueError: a matrix without a module, or one that does not fit its module.
    """
    return _Placer(model, groups, rename, ignored, dtype, shard).run()


class _Placer:
    def __init__(self, model, groups, rename, ignored, dtype, shard) -> None:
        self.model, self.dtype, self.shard = model, dtype, shard
        roots = frozenset(name for name, _ in model.named_children())
        self.result = Placement(getattr(model, "base_model_prefix", ""), roots)
        self.reader = Reader()
        self.styles: dict[str, Style] = {}
        self.groups: dict[str, Exl3Group] = {}
        self.ignored = ignored
        self.rename = rename
        for group in groups:
            stem = self._stem(f"{group.name}.trellis")
            if stem in self.groups:
                raise ValueError(
                    f"{group.name}.trellis and {self.groups[stem].name}.trellis are both {stem} of "
                    "the model, expected one of them"
                )
            self.groups[stem] = group

    def _stem(self, name: str) -> str:
        return self.result.stem_of(self.rename(name))

    def run(self) -> Placement:
        modules = dict(self.model.named_modules())
        slices = _slices(self.groups)
        routed = {name for name, module in modules.items() if experts.is_experts(name, module)}
        sets = expert_sets(self.groups, routed)
        if self.shard is not None:
            self.styles = {n: style_of(self.model, n, self.groups, self.shard) for n in modules}
        for name, module in modules.items():
            if name in sets:
                self._experts(name, module, sets[name])
            if not isinstance(module, nn.Linear):
                continue
            if name in self.groups:
                self._replace(name, self._linear(name, name, module))
            elif name in slices:
                self._sliced(name, module, slices[name])
            elif name.rpartition(".")[2] in FUSED:
                self._fused(name, module)
        self._reject_rest()
        return self.result

    def _replace(self, name: str, new: nn.Module) -> None:
        self.model.set_submodule(name, new, strict=True)

    def _linear(
        self, stem: str, name: str, like: nn.Linear, sizes: tuple[int, int] | None = None
    ) -> nn.Module:
        """A packed layer for the matrix ``stem``, whose module will be ``name``."""
        group = self.groups.pop(stem)
        in_features, out_features = sizes or (like.in_features, like.out_features)
        _check_size(group, in_features, out_features)
        if group.codebook not in codebooks.CODEBOOKS:
            raise ValueError(
                f"{group.name}.{group.codebook} at {group.bits} bits fits two codebooks, "
                "expected quantization_config to say which"
            )
        if ("bias" in group.tensors) != (like.bias is not None):
            raise ValueError(
                f"{group.name}.trellis has {'a' if 'bias' in group.tensors else 'no'} bias "
                f"beside it, and the model's {name} has {'none' if like.bias is None else 'one'}"
            )
        logical = in_features, out_features
        if self.shard is not None:
            style = self.styles.get(name) or apart(*logical, self.shard)
            if style != Style.WHOLE:
                return self._parallel(stem, name, group, logical, style)
        self.result.stems[stem] = name
        if not is_plain(group):
            # All of them: the loader takes a name that the model has too for that one.
            self.result.triggers.update({f"{stem}.{field}": name for field in group.tensors})
            self.result.reads[name] = self._reader(group, logical)
        return self._packed(group, logical, like.bias is not None)

    def _packed(self, group: Exl3Group, features: tuple[int, int], bias: bool) -> Exl3Linear:
        return Exl3Linear(
            *features,
            bias,
            bits=group.bits,
            codebook=group.codebook,
            device="meta",
            dtype=self.dtype,
        )

    def _reader(self, group: Exl3Group, features: tuple[int, int], **part) -> Read:
        def read(device: torch.device) -> dict[str, torch.Tensor]:
            matrix = self.reader.matrix(
                group, in_features=features[0], out_features=features[1], **part
            )
            return matrix.to(device).state_dict()

        return read

    def _parallel(
        self, stem: str, name: str, group: Exl3Group, features: tuple[int, int], style: Style
    ) -> nn.Module:
        """This process's part of a layer, and only that is read."""
        size, rank = self.shard.size, self.shard.rank
        bias = "bias" in group.tensors
        if style in (Style.COLUMN, Style.COLUMN_GATHER):
            begin, end = cut(features[1], size, rank, f"{group.name}.trellis: outputs")
            # Gathered results are trimmed afterwards, so that all parts are of one size.
            own = (features[0], end - begin)
            read = self._reader(group, own, columns=(begin, end))
            part = self._packed(group, own, bias)
            module = ColumnParallelLinear(
                part, features, self.shard, gather=style == Style.COLUMN_GATHER
            )
        else:
            begin, end = cut(features[0], size, rank, f"{group.name}.trellis: inputs")
            own = (min(end, features[0]) - begin, features[1])
            read = self._reader(group, own, rows=(begin, end))
            part = self._packed(group, own, bias and begin == 0)
            module = RowParallelLinear(part, features, self.shard, split=style == Style.ROW_SPLIT)
        self._read_later(f"{name}.part", stem, group, read)
        self.result.consumed.add(stem)
        return module

    def _read_later(self, name: str, stem: str, group: Exl3Group, read: Read) -> None:
        """Reads module ``name`` when a small tensor of one matrix comes up."""
        field = next(f for f in ("svh", "sv") if f in group.tensors)
        self.result.triggers[f"{stem}.{field}"] = name
        self.result.reads[name] = read

    def _experts(self, name: str, module: nn.Module, found: ExpertSet) -> None:
        dense = experts.describe(name, module)
        model_type = self.model.config.get_text_config().model_type
        packed = experts.pack(name, dense, found, self.reader, model_type, self.dtype, self.shard)
        for (projection, expert, rank), stem in found.stems.items():
            slice_name = f".rank{rank}" if found.slices > 1 else ""
            self.result.stems[stem] = f"{name}.{expert}.{projection}_proj{slice_name}"
            tensors = self.groups.pop(stem).tensors.values()
            self.result.consumed.add(stem)
            self.result.consumed.update(self._stem(t.name) for t in tensors if is_shared(t.name))
        first = found.stems["up", 0, 0]
        place = name if self.shard is None else f"{name}.part"
        self._read_later(place, first, found.first("up"), packed.read)
        self.result.experts[name], self.result.sets[name] = (module, dense), found
        self._replace(name, packed.module)

    def _fused(self, name: str, module: nn.Linear) -> None:
        """Parts stored beside the place of a fused layer, such as q, k and v of qkv_proj."""
        parent, _, last = name.rpartition(".")
        stems = {part: f"{parent}.{part}" if parent else part for part in FUSED[last]}
        present = [part for part, stem in stems.items() if stem in self.groups]
        if not present:
            return
        if len(present) < len(stems):
            missing = next(part for part in stems if part not in present)
            raise ValueError(
                f"{stems[present[0]]}.trellis is a part of {name}, "
                f"but {stems[missing]}.trellis is missing"
            )
        if module.bias is not None:
            raise ValueError(f"{name} has a bias, expected none where its parts are stored apart")
        stored = [self.groups[stem].out_features for stem in stems.values()]
        sizes = _logical_parts(module.out_features, stored, self._known_parts(last))
        if sizes is None:
            raise ValueError(
                f"{stems[present[0]]}.trellis and the parts beside it have {stored} outputs, "
                f"which do not make the {module.out_features} of {name}"
            )
        parts = {
            part: self._linear(stem, f"{name}.{part}", module, (module.in_features, size))
            for (part, stem), size in zip(stems.items(), sizes, strict=True)
        }
        self._replace(name, Exl3Parts(parts, "out"))

    def _known_parts(self, last: str) -> list[int] | None:
        """Logical sizes of parts, where the config tells: padding hides them in the files."""
        if last == "gate_up_proj":
            return None
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv = getattr(config, "num_key_value_heads", None) or heads
        return [heads * size, kv * size, kv * size]

    def _sliced(self, name: str, module: nn.Linear, count: int) -> None:
        """A very wide layer stored as ``name.slice.0`` and so on."""
        stems = [f"{name}.slice.{i}" for i in range(count)]
        groups = [self.groups[stem] for stem in stems]
        rows, columns = [g.in_features for g in groups], [g.out_features for g in groups]
        whole = (tiles.padded(module.in_features), tiles.padded(module.out_features))
        if sum(columns) == whole[1] and set(rows) == {whole[0]}:
            axis, sizes = "out", [(module.in_features, size) for size in columns]
            sizes[-1] = (module.in_features, columns[-1] - whole[1] + module.out_features)
        elif sum(rows) == whole[0] and set(columns) == {whole[1]}:
            axis, sizes = "in", [(size, module.out_features) for size in rows]
            sizes[-1] = (rows[-1] - whole[0] + module.in_features, module.out_features)
        else:
            raise ValueError(
                f"{groups[0].name}.trellis and its {count - 1} other slices are "
                f"{list(zip(rows, columns, strict=True))} (in x out), "
                f"which do not make the {whole[0]} x {whole[1]} of {name}"
            )
        if module.bias is not None:
            raise ValueError(f"{name} has a bias, expected none where it is stored in slices")
        parts = {
            f"slice.{i}": self._linear(stem, stem, module, size)
            for i, (stem, size) in enumerate(zip(stems, sizes, strict=True))
        }
        self._replace(name, Exl3Parts(parts, axis))

    def _reject_rest(self) -> None:
        """What no module claimed, unless the model leaves it out on purpose."""
        heads = ()
        if self.model.get_output_embeddings() is None:  # a base model, or one that classifies
            heads = "lm_head", f"{self.result.prefix}.lm_head"
        for stem, group in list(self.groups.items()):
            names = f"{stem}.trellis", f"{group.name}.trellis"
            # Not before: patterns of a class may match layers that this very model has.
            if any(map(self.ignored, names)) or stem in heads:
                self.result.ignored.append(group.name)
                self.result.consumed.add(stem)
                del self.groups[stem]
        if not self.groups:
            return
        stem, group = next(iter(self.groups.items()))
        more = f" (and {len(self.groups) - 1} more)" if len(self.groups) > 1 else ""
        try:
            module = self.model.get_submodule(stem)
        except AttributeError:
            raise ValueError(f"{group.name}.trellis has no place in the model{more}") from None
        raise ValueError(
            f"{group.name}.trellis belongs to a {type(module).__name__} of the model, "
            f"expected an nn.Linear{more}"
        )


def _slices(groups: Iterable[str]) -> dict[str, int]:
    """Name of a sliced layer -> number of its slices."""
    found: dict[str, set[int]] = {}
    for stem in groups:
        match = re.fullmatch(r"(.+)\.slice\.(\d+)", stem)
        if match:
            found.setdefault(match[1], set()).add(int(match[2]))
    for name, numbers in found.items():
        if numbers != set(range(len(numbers))):
            missing = min(set(range(len(numbers))) - numbers)
            raise ValueError(f"{name}.slice.{missing}.trellis is missing beside other slices")
    return {name: len(numbers) for name, numbers in found.items()}


def _logical_parts(total: int, stored: list[int], known: list[int] | None) -> list[int] | None:
    """Logical outputs of each part, given the fused layer's and the padded ones."""
    if known is None and total % len(stored) == 0:
        known = [total // len(stored)] * len(stored)
    if known is None or sum(known) != total:
        return None
    return known if [tiles.padded(size) for size in known] == stored else None


def _check_size(group: Exl3Group, in_features: int, out_features: int) -> None:
    wanted = (tiles.padded(in_features), tiles.padded(out_features))
    if (group.in_features, group.out_features) != wanted:
        raise ValueError(
            f"{group.name}.trellis is {group.in_features} x {group.out_features}, expected "
            f"{wanted[0]} x {wanted[1]} (in x out, padded) for the model's "
            f"{in_features} x {out_features}"
        )
    group.check_bias(out_features)
