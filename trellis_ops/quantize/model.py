"""Quantises the linear layers of a whole model in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..integrations.saving import prepare_saving
from ..nn import Exl3Linear
from .layer import quantize_linear

Progress = Callable[[str, float, int, int], None]
"""Called after each layer with its name, its proxy error, and the weights done and in total."""


def quantize_model(
    model: nn.Module,
    bits: float,
    *,
    codebook: str = "mul1",
    hessians: Mapping[str, torch.Tensor] | None = None,
    skip: Sequence[str] = ("lm_head",),
    progress: bool | Progress = True,
    seed: int = 0,
) -> dict[str, float]:
    """Replaces every nn.Linear of a model by an :class:`Exl3Linear`, one after the other.

    Embeddings, norms and everything else stay as they are. If it raises, the layers before the
    one at fault are already replaced.

    Args:
        model: changed in place.
        bits: rate of every layer.
        codebook: as in :func:`quantize_linear`.
        hessians: module name -> Hessian, as ``HessianCapture.hessians`` has them; layers without
            one are quantised for least squared error of the weight.
        skip: layers to leave alone: full names, or last components of them.
        progress: True for a bar with the time left, False for silence, or a callable.
        seed: of the random signs; layers that share a Hessian share their signs.

    Returns:
        Name -> proxy error of every layer that was replaced.

    Raises:
        ValueError: nothing to quantise, a Hessian for an unknown layer, or what
            :func:`quantize_linear` raises, with the layer's name in front.
    """
    layers = linear_names(model, skip)
    if not layers:
        raise ValueError(f"quantize_model: the model has no nn.Linear outside of skip={skip}")
    modules = dict(model.named_modules())
    hessians = hessians or {}
    for name in hessians:
        if name not in modules:
            raise ValueError(f"quantize_model: hessians has {name!r}, which the model does not")

    seeds = _seeds([hessians.get(name) for name in layers], seed)
    errors: dict[str, float] = {}
    total = sum(modules[name].weight.numel() for name in layers)
    done = 0
    with _reporter(progress, total) as report:
        for name, seed in zip(layers, seeds, strict=True):
            linear = modules.pop(name)
            try:
                tensors = quantize_linear(
                    linear.weight.detach(),
                    bits,
                    codebook=codebook,
                    hessian=hessians.get(name),
                    bias=None if linear.bias is None else linear.bias.detach(),
                    seed=seed,
                )
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from error
            replacement = Exl3Linear.from_tensors(tensors, dtype=linear.weight.dtype)
            replacement.train(linear.training)
            model.set_submodule(name, replacement, strict=True)
            done += linear.weight.numel()
            errors[name] = float(tensors.proxy_error)
            report(name, errors[name], done, total)
    prepare_saving(model)
    return errors


def linear_names(model: nn.Module, skip: Sequence[str] = ("lm_head",)) -> list[str]:
    """Names of the nn.Linear modules that :func:`quantize_model` replaces, in its order."""
    if isinstance(skip, str):
        raise TypeError(f"quantize_model: skip is the str {skip!r}, expected a sequence of names")
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name not in skip
        and name.rpartition(".")[2] not in skip
    ]


def _seeds(hessians: Sequence[torch.Tensor | None], first: int) -> list[int]:
    """A seed for each layer; the same one for layers whose Hessian is the same tensor."""
    seen: dict[int, int] = {}
    return [
        first + (place if hessian is None else seen.setdefault(id(hessian), place))
        for place, hessian in enumerate(hessians)
    ]


@contextmanager
def _reporter(progress: bool | Progress, total: int) -> Iterator[Progress]:
    if callable(progress):
        yield progress
        return
    if not progress:
        yield lambda *_: None
        return
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        # A column shares a narrow terminal with the layer's long name, unless it refuses to.
        TextColumn("{task.percentage:3.0f} %", table_column=Column(no_wrap=True, min_width=5)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn(
            "left; {task.fields[layer]}", table_column=Column(no_wrap=True, overflow="ellipsis")
        ),
    )
    with Bar(*columns) as bar:
        task = bar.add_task("quantise", total=total, layer="")

        def report(name: str, error: float, done: int, total: int) -> None:
            bar.update(task, completed=done, layer=f"{name}: proxy error {error:.2e}")

        yield report
