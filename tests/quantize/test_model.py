"""quantize_model: what is replaced, with which arguments, and what is reported."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trellis_ops import Exl3Linear, quantize_linear
from trellis_ops.quantize import quantize_model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 40)
        self.body = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(40, 60), "down": nn.Linear(60, 40, bias=False)})
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(40)
        self.lm_head = nn.Linear(40, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.body:
            x = x + block["down"](torch.relu(block["up"](x)))
        return self.lm_head(self.norm(x))


LINEARS = ["body.0.up", "body.0.down", "body.1.up", "body.1.down"]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(3)
    return Net().eval()


def hessian(features: int, seed: int) -> torch.Tensor:
    x = torch.randn(200, features, generator=torch.Generator().manual_seed(seed))
    return x.T @ x


def kinds(net: nn.Module) -> dict[str, type]:
    return {n: type(m) for n, m in net.named_modules() if isinstance(m, (nn.Linear, Exl3Linear))}


def test_linears_are_replaced_in_place(net):
    errors = quantize_model(net, 5, codebook="mcg", progress=False)
    assert kinds(net) == {**dict.fromkeys(LINEARS, Exl3Linear), "lm_head": nn.Linear}
    assert list(errors) == LINEARS and all(0 < error < 0.01 for error in errors.values())
    up = net.get_submodule("body.0.up")
    assert (up.in_features, up.out_features, up.bits, up.codebook) == (40, 60, 5, "mcg")
    assert up.bias is not None and net.get_submodule("body.0.down").bias is None
    assert not up.training


def test_outputs_come_close_to_the_original(net):
    ids = torch.arange(11)
    with torch.no_grad():
        want = net(ids)
        quantize_model(net, 6, progress=False)
        got = net(ids)
    assert (got - want).norm() / want.norm() < 0.03


def test_layers_equal_quantize_linear_with_the_hessian_and_bias(net):
    weights = {n: net.get_submodule(n).weight.detach().clone() for n in LINEARS}
    bias = net.get_submodule("body.1.up").bias.detach().clone()
    hessians = {"body.1.up": hessian(40, 0), "body.1.down": hessian(60, 1)}
    errors = quantize_model(net, 3, hessians=hessians, progress=False, seed=7)
    made = quantize_linear(
        weights["body.1.up"], 3, hessian=hessians["body.1.up"], bias=bias, seed=7 + 2
    )
    layer = net.get_submodule("body.1.up")
    for name, tensor in made.state_dict().items():
        assert torch.equal(layer.state_dict()[name], tensor), name
    assert errors["body.1.up"] == made.proxy_error
    plain = quantize_linear(weights["body.0.down"], 3, seed=7 + 1)
    assert torch.equal(net.get_submodule("body.0.down").trellis, plain.trellis)


def test_layers_with_one_hessian_share_their_signs():
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(40, 16, bias=False) for name in ("q", "k", "o")})
    shared = hessian(40, 0)
    quantize_model(net, 4, hessians={"q": shared, "k": shared}, progress=False)
    signs = {name: layer.suh[:40].sign() for name, layer in net.items()}
    assert torch.equal(signs["q"], signs["k"])
    assert not torch.equal(signs["q"], signs["o"])


def test_progress_reports_every_layer(net):
    seen = []
    errors = quantize_model(net, 4, progress=lambda *args: seen.append(args))
    done = [2400, 4800, 7200, 9600]
    assert seen == [(name, errors[name], d, 9600) for name, d in zip(LINEARS, done, strict=True)]


def test_skip_takes_full_names_and_last_components(net):
    quantize_model(net, 4, skip=("body.0.up", "down"), progress=False)
    replaced = [name for name, kind in kinds(net).items() if kind is Exl3Linear]
    assert replaced == ["body.1.up", "lm_head"]


def test_errors_name_the_layer(net):
    with torch.no_grad():
        net.get_submodule("body.0.down").weight[3, 5] = float("nan")
    with pytest.raises(ValueError, match=r"^body\.0\.down: quantize_linear: weight has NaN"):
        quantize_model(net, 4, progress=False)
    with pytest.raises(ValueError, match="quantize_model: hessians has 'body.9.up'"):
        quantize_model(net, 4, hessians={"body.9.up": hessian(40, 0)}, progress=False)
    with pytest.raises(ValueError, match="has no nn.Linear outside of skip"):
        quantize_model(nn.Sequential(nn.ReLU()), 4, progress=False)
    with pytest.raises(TypeError, match="skip is the str 'lm_head'"):
        quantize_model(net, 4, skip="lm_head", progress=False)
