"""How each layer of a transformers model is split over processes.

The model's own tensor-parallel plan says which layers of a block can pass parts of their results
to each other; where it does and the cuts fall on whole blocks of 128 (and whole heads), gate, up
and down of an MLP, or q, k, v and o of an attention, communicate once. Any other layer takes and
gives whole activations, which is right whatever the model does with them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Container
from enum import Enum

from torch import nn

from ..formats.tiles import HADAMARD, padded
from ..parallel import Shard


class Style(Enum):
    """What a process has of a layer, and what goes in and out of it."""

    WHOLE = "all of it"
    COLUMN = "outputs, and gives them"
    COLUMN_GATHER = "outputs, and gives everybody's"
    ROW = "inputs, and gets them"
    ROW_SPLIT = "inputs, and gets everybody's"


_LINKED = {"colwise": Style.COLUMN, "rowwise": Style.ROW}
_HARMLESS = ("replicated_with_grad_allreduce",)  # norms of single heads


def style_of(model: nn.Module, name: str, packed: Container[str], shard: Shard) -> Style:
    """The style of the module ``name``; ``packed`` are the layers that are quantised."""
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear):
        return Style.WHOLE
    if name in packed and _linked(model, name.rpartition(".")[0], packed, shard):
        return _LINKED[_planned(model, name)]
    return apart(module.in_features, module.out_features, shard)


def apart(in_features: int, out_features: int, shard: Shard) -> Style:
    """The style of a layer that takes and gives whole activations."""
    for features, style in (
        (out_features, Style.COLUMN_GATHER),
        (in_features, Style.ROW_SPLIT),
    ):
        if padded(features) % (HADAMARD * shard.size) == 0:
            return style
    return Style.WHOLE


def _planned(model: nn.Module, name: str) -> str | None:
    plan = getattr(model, "tp_plan", None) or {}
    return next((style for glob, style in plan.items() if fnmatch.fnmatchcase(name, glob)), None)


def _linked(model: nn.Module, parent: str, packed: Container[str], shard: Shard) -> bool:
    """Whether the layers of a block can pass parts to each other."""
    block = model.get_submodule(parent)
    if next(block.parameters(recurse=False), None) is not None:
        return False  # something of its own, such as a sink for each head, would be split as well
    head, styles = getattr(block, "head_dim", None), set()
    for child, layer in block.named_modules():
        name = f"{parent}.{child}"
        style = _planned(model, name) if child else None
        if style in _HARMLESS:
            continue
        if isinstance(layer, nn.Linear):
            cut = layer.out_features if style == "colwise" else layer.in_features
            if style not in _LINKED or name not in packed or cut % (HADAMARD * shard.size):
                return False
            if head and (cut // shard.size) % head:
                return False
        elif style is not None:
            return False
        styles.add(style)
    return {"colwise", "rowwise"} <= styles
