"""Exl3Parts: several matrices in the place of one linear layer."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from layers import BOUNDS, make_layer
from torch import nn

from trellis_ops import Exl3Linear, TrellisTensor
from trellis_ops.nn import Exl3Parts

pytestmark = pytest.mark.usefixtures("one_thread")


def matrix(bits, seed) -> TrellisTensor:
    layer = make_layer("mul1", bits, rows=256, columns=384, seed=seed)
    return TrellisTensor(layer.trellis, layer.suh, layer.svh, None, "mul1", 200, 300)


def distance(got, want) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def parts(axis: str) -> tuple[Exl3Parts, torch.Tensor]:
    """(module, its weight), of two matrices of different rates."""
    made = [matrix(2, 1), matrix(5, 2)]
    layers = {f"slice.{i}": Exl3Linear.from_tensors(t) for i, t in enumerate(made)}
    weights = [t.dequantize(torch.float32).double() for t in made]
    return Exl3Parts(layers, axis), torch.cat(weights, dim=0 if axis == "out" else 1)


@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_one_layer(axis, dtype):
    module, weight = parts(axis)
    assert (module.out_features, module.in_features) == tuple(weight.shape) == module.weight.shape
    x = torch.randn(2, 3, module.in_features).to(dtype)
    y = module(x)
    assert y.dtype == dtype
    # Summands are rounded each, and their sum again.
    assert distance(y, x.double() @ weight.T) < BOUNDS[dtype] * 1.5
    assert distance(module.dequantize(torch.float32), weight) < 1e-6


def test_parts_pass_gradients_and_copies():
    module, weight = parts("in")
    x = torch.randn(4, 400, requires_grad=True)
    grad = torch.randn(4, 300)
    module(x).backward(grad)
    assert distance(x.grad, grad.double() @ weight) < BOUNDS[torch.float32]
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x))
    assert {name for name, _ in module.named_parameters()} == {
        f"slice.{i}.{field}" for i in (0, 1) for field in ("trellis", "suh", "svh", "mul1")
    }


def test_parts_compile_whole():
    module, _ = parts("out")
    x = torch.randn(3, 200)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, "out"), "there are no parts, expected at least one"),
        (({"a": nn.Linear(1, 1)}, "up"), "axis is 'up', expected 'in' or 'out'"),
    ],
)
def test_parts_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"Exl3Parts: {message}"):
        Exl3Parts(*arguments)
