"""Quantised matrices in the place of a model's linear layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from ..formats.tensor import TrellisTensor
from ..nn import Exl3Linear
from .saving import prepare_saving

Chooser = Callable[[str, nn.Linear], TrellisTensor | None]
"""Called with a layer's name and the layer; gives what shall replace it, or None to leave it."""


def swap_linears(model: nn.Module, tensors: Mapping[str, TrellisTensor] | Chooser) -> list[str]:
    """Replaces nn.Linear layers of a model by :class:`Exl3Linear`.

    Every replacement is checked before the first is made, so an error leaves the model as it was.
    ``save_pretrained`` of a transformers model then writes an EXL3 checkpoint.

    Args:
        model: changed in place; any nn.Module.
        tensors: module name -> quantised matrix, or a callable ``(name, linear) -> TrellisTensor``
            that returns None for a layer to leave alone. A replacement goes to the layer's device
            and says the dtype of the layer's weight.

    Returns:
        Names of the layers that were replaced.

    Raises:
        ValueError: a name that is no nn.Linear of the model, or a matrix that does not fit.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if callable(tensors):
        chosen = {name: tensors(name, linear) for name, linear in layers.items()}
    else:
        chosen = dict(tensors)
    replacements = {}
    for name, matrix in chosen.items():
        if matrix is not None:
            if name not in layers:
                raise ValueError(f"swap_linears: {name!r} is no nn.Linear of the model")
            replacements[name] = _replacement(name, layers[name], matrix)
    for name, layer in replacements.items():
        model.set_submodule(name, layer, strict=True)
    if replacements:
        prepare_saving(model)
    return list(replacements)


def _replacement(name: str, linear: nn.Linear, matrix: TrellisTensor) -> Exl3Linear:
    if not isinstance(matrix, TrellisTensor):
        raise TypeError(
            f"swap_linears: {name} gets a {type(matrix).__name__}, expected a TrellisTensor"
        )
    got = (matrix.in_features, matrix.out_features)
    wanted = (linear.in_features, linear.out_features)
    if got != wanted:
        raise ValueError(
            f"swap_linears: {name} gets a matrix {got[0]} x {got[1]}, "
            f"expected {wanted[0]} x {wanted[1]} (in x out)"
        )
    if (matrix.bias is None) != (linear.bias is None):
        have = ("a bias", "no bias")
        raise ValueError(
            f"swap_linears: {name} gets {have[matrix.bias is None]}, "
            f"expected {have[linear.bias is None]}"
        )
    device = linear.weight.device
    layer = Exl3Linear.from_tensors(
        matrix if device.type == "meta" else matrix.to(device), dtype=linear.weight.dtype
    )
    return layer.train(linear.training)
