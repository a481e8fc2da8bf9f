"""swap_linears and Exl3Parts on plain nn.Modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from layers import BOUNDS, make_layer
from torch import nn

from trellis_ops import Exl3Linear, TrellisTensor, swap_linears
from trellis_ops.nn import Exl3Parts

pytestmark = pytest.mark.usefixtures("one_thread")


def matrix(in_features=200, out_features=300, bias=None, bits=3, seed=0) -> TrellisTensor:
    layer = make_layer("mul1", bits, rows=256, columns=384, seed=seed)
    return TrellisTensor(
        layer.trellis, layer.suh, layer.svh, bias, "mul1", in_features, out_features
    )


def model() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(200, 300, bias=False), "b": nn.Linear(300, 200)}).eval()


def distance(got, want) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_by_name():
    net, made = model(), matrix()
    assert swap_linears(net, {"a": made}) == ["a"]
    assert isinstance(net["a"], Exl3Linear) and isinstance(net["b"], nn.Linear)
    assert not net["a"].training
    x = torch.randn(5, 200)
    want = x.double() @ made.dequantize(torch.float32).double().T
    assert distance(net["a"](x), want) < BOUNDS[torch.float32]


def test_by_choice():
    net, seen = model().train(), []

    def choose(name, linear):
        seen.append((name, linear))
        return None

    assert swap_linears(net, choose) == []
    assert seen == [("a", net["a"]), ("b", net["b"])]
    assert swap_linears(net, lambda n, linear: matrix() if n == "a" else None) == ["a"]
    assert net["a"].training


def test_dtype_of_the_layer_is_kept():
    net = model().bfloat16()
    swap_linears(net, {"a": matrix()})
    assert net["a"].weight.dtype == torch.bfloat16 and net["a"].suh.dtype == torch.float16


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"c": matrix()}, ValueError, "swap_linears: 'c' is no nn.Linear of the model"),
        (
            {"b": matrix()},
            ValueError,
            "swap_linears: b gets a matrix 200 x 300, expected 300 x 200 (in x out)",
        ),
        (
            {"a": matrix(bias=torch.zeros(300))},
            ValueError,
            "swap_linears: a gets a bias, expected no bias",
        ),
        (
            {"a": torch.ones(3)},
            TypeError,
            "swap_linears: a gets a Tensor, expected a TrellisTensor",
        ),
    ],
)
def test_refusals_leave_the_model_as_it_was(tensors, error, message):
    net = model()
    before = dict(net.named_modules())
    with pytest.raises(error) as caught:
        swap_linears(net, {"a": matrix(), **tensors})
    assert str(caught.value) == message
    assert dict(net.named_modules()) == before


# ---- parts --------------------------------------------------------------------------------------


def parts(axis: str) -> tuple[Exl3Parts, torch.Tensor]:
    """(module, its weight), of two matrices of different rates."""
    made = [matrix(bits=2, seed=1), matrix(bits=5, seed=2)]
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
