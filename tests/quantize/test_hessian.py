"""HessianCapture: the sums against x' x of inputs that the test records by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trellis_ops.quantize import HessianCapture


class Block(nn.Module):
    """q, k and v read one tensor, out another; `separate` gives k a copy of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, n, bias=False) for n in (24, 8, 8))
        self.out = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, separate: bool = False) -> torch.Tensor:
        x = torch.tanh(x)
        own = 2.0 * x if separate else x
        q, k, v = self.q(x), self.k(own), self.v(own)
        return self.out(input=q * k.mean(-1, keepdim=True) + v.sum(-1, keepdim=True))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def recorded(block: Block, batches, **options) -> dict[str, torch.Tensor]:
    """The sums in float64, from hooks of the test's own."""
    sums = {name: torch.zeros(24, 24, dtype=torch.float64) for name in ("q", "k", "v", "out")}

    def hook_of(name):
        def hook(module, args, kwargs):
            rows = (args[0] if args else kwargs["input"]).double().reshape(-1, 24)
            for row in rows[torch.isfinite(rows).all(1)]:
                sums[name] += torch.outer(row, row)

        return hook

    handles = [
        block.get_submodule(name).register_forward_pre_hook(hook_of(name), with_kwargs=True)
        for name in sums
    ]
    with torch.no_grad():
        for x in batches:
            block(x, **options)
    for handle in handles:
        handle.remove()
    return sums


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in ((2, 5, 24), (7, 24), (1, 1, 24))]


def test_hessians_are_sums_of_outer_products(block):
    want = recorded(block, batches())
    with HessianCapture(block) as capture, torch.no_grad():
        for x in batches():
            block(x)
    assert set(capture.hessians) == {"q", "k", "v", "out"}
    assert capture.rows == dict.fromkeys(("q", "k", "v", "out"), 18)
    for name, hessian in capture.hessians.items():
        assert hessian.dtype == torch.float32
        torch.testing.assert_close(hessian.double(), want[name], rtol=1e-5, atol=1e-6)


def test_layers_with_one_input_share_one_tensor(block):
    with HessianCapture(block) as capture, torch.no_grad():
        for x in batches():
            block(x)
    hessians = capture.hessians
    assert hessians["q"] is hessians["k"] and hessians["k"] is hessians["v"]
    assert hessians["out"] is not hessians["q"]


def test_sharing_that_changes_between_calls_stays_exact(block):
    want = recorded(block, batches())
    apart = recorded(block, batches(), separate=True)
    with HessianCapture(block) as capture, torch.no_grad():
        for x in batches():
            block(x)
            block(x, separate=True)
    for name, hessian in capture.hessians.items():
        total = want[name] + apart[name]
        torch.testing.assert_close(hessian.double(), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(apart["k"], 4 * apart["q"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_left_out(bad):
    linear = nn.Linear(6, 3)
    x = torch.arange(24.0).reshape(4, 6)
    good = x[[0, 2, 3]]
    x[1, 4] = bad
    model = nn.Sequential(linear)
    with HessianCapture(model) as capture:
        model(x)
    assert torch.equal(capture.hessians["0"], good.T @ good)
    assert capture.rows == {"0": 3}


def test_layer_without_a_finite_row_has_no_hessian():
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))
    with HessianCapture(model, ["0"]) as capture:
        model(torch.full((2, 6), float("nan")))
    assert capture.hessians == {} and capture.rows == {"0": 0}


def test_same_layer_twice_on_one_tensor_counts_twice():
    linear = nn.Linear(6, 6)
    x = torch.randn(5, 6)
    model = nn.ModuleDict({"layer": linear})
    with HessianCapture(model) as capture:
        linear(x)
        linear(x)
    torch.testing.assert_close(capture.hessians["layer"], 2 * x.T @ x)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_sums_are_plain_float32_tensors(block, guard):
    with HessianCapture(block.bfloat16()) as capture, guard():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for x in batches():
                block(x.bfloat16())
    for hessian in capture.hessians.values():
        assert hessian.dtype == torch.float32
        assert not hessian.requires_grad and not hessian.is_inference()
        hessian += 1.0


def test_hooks_are_gone_afterwards_also_after_an_error(block):
    with pytest.raises(ZeroDivisionError):
        with HessianCapture(block) as capture:
            block(batches()[1])
            raise ZeroDivisionError
    before = capture.rows
    block(batches()[1])
    assert capture.rows == before == dict.fromkeys(("q", "k", "v", "out"), 7)


def test_unknown_name_is_refused(block):
    with pytest.raises(ValueError, match="HessianCapture: the model has no module named 'kk'"):
        HessianCapture(block, ["q", "kk"])
