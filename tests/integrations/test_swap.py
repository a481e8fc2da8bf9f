"""swap_linears, on plain modules and on a transformers model; and Exl3Parts."""

from __future__ import annotations

import pytest
import torch
from layers import BOUNDS, make_layer
from torch import nn

from trellis_ops import Exl3Linear, TrellisTensor, swap_linears

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


def test_a_transformers_model_saves_what_was_swapped(tmp_path):
    pytest.importorskip("transformers")
    from checkpoints import build, logits
    from transformers import AutoModelForCausalLM

    net = build("Llama", tie_word_embeddings=True)
    name = "model.layers.0.mlp.up_proj"
    swap_linears(net, {name: matrix(192, 320)})
    net.save_pretrained(tmp_path / "a")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert isinstance(loaded.get_submodule(name), Exl3Linear)
    assert torch.equal(logits(loaded), logits(net))
    # A head of its own is no longer tied.
    swap_linears(loaded, {"lm_head": matrix(192, 300, seed=1)})
    loaded.save_pretrained(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert isinstance(again.lm_head, Exl3Linear) and not again.config.tie_word_embeddings
    assert torch.equal(logits(again), logits(loaded))
