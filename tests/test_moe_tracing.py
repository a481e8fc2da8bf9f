"""Routed experts under torch.compile and torch.export, and their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from experts import ACTIVATIONS, arguments, make_experts, options, routing, samples
from layers import BOUNDS, double, worst_row
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import trellis_ops
from trellis_ops import Exl3MoE, Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

OPS = torch.ops.trellis_ops
F32 = torch.float32


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_module(**changed) -> Exl3MoE:
    return Exl3MoE(make_experts(4, intermediate=128, bits=lambda p, e: 2 + e).layout(), **changed)


# ---- torch.compile and export -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["inference", "workspace", "grad"])
@pytest.mark.parametrize("first", [1, 40])
def test_two_compilations_serve_every_number_of_tokens(first, how):
    module = make_module(limit=0.7, routed_scale=2.5)
    if how == "workspace":
        module.workspace = Workspace(module.plan(40, 2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (first, *range(1, 41)):
        x = torch.randn(tokens, 256, requires_grad=how == "grad")
        routes = routing(tokens, 2, 4)
        y = compiled(x, *routes)
        want = module(x, *routes)
        assert torch.equal(y, want)
        if how == "grad" and tokens % 13 == 1:
            (dx,) = torch.autograd.grad(y.sum(), x)
            (want_dx,) = torch.autograd.grad(want.sum(), x)
            assert torch.equal(dx, want_dx)
    assert counter.frame_count <= 2


def test_inductor_compiles_the_experts_with_a_router():
    module = make_module()
    module.workspace = Workspace(module.plan(64, 2))
    router = torch.nn.Linear(256, 4)

    def block(x):
        weights, ids = torch.topk(torch.softmax(router(x), -1), 2)
        return x + module(torch.nn.functional.silu(x), ids, weights)

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (5, 1, 40):
            x = torch.randn(tokens, 256)
            assert worst_row(compiled(x), double(block(x))) <= 1e-5


def test_a_workspace_too_small_is_named_while_compiling():
    module = make_module()
    module.workspace = Workspace(module.plan(4, 2))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    with pytest.raises(Exception, match=r"tokens is \S+, expected at most 4"):
        compiled(torch.randn(5, 256), *routing(5, 2, 4))


@pytest.mark.parametrize("planned", [False, True])
def test_export_save_and_load(tmp_path, planned):
    module = make_module()
    if planned:
        module.workspace = Workspace(module.plan(4096, 2))
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    sample = (torch.randn(7, 256), *routing(7, 2, 4))
    program = torch.export.export(module, sample, dynamic_shapes=[{0: tokens}] * 3)
    # An exported program plans its own memory.
    targets = {str(node.target) for node in program.graph.nodes}
    assert "trellis_ops.rank_sliced_moe_inference.default" in targets
    torch.export.save(program, tmp_path / "experts.pt2")
    loaded = torch.export.load(tmp_path / "experts.pt2").module()
    for count in (1, 2, 7, 300):
        x, routes = torch.randn(count, 256), routing(count, 2, 4)
        assert torch.equal(loaded(x, *routes), module(x, *routes))


# Seen with an op of one tensor and no kernel of ours.
@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.11 crashes while it loads a package that calls any custom op",
)
def test_aotinductor_package(tmp_path):
    module = make_module(limit=0.7)
    module.workspace = Workspace(module.plan(4096, 2))
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    sample = (torch.randn(7, 256), *routing(7, 2, 4))
    program = torch.export.export(module, sample, dynamic_shapes=[{0: tokens}] * 3)
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "experts.pt2")
    )
    package = torch._inductor.aoti_load_package(path)
    for count in (1, 7, 300):
        x, routes = torch.randn(count, 256), routing(count, 2, 4)
        assert torch.equal(package(x, *routes), module(x, *routes))


def test_autocast_chooses_the_output_dtype():
    module = make_module()
    x, routes = torch.randn(3, 256), routing(3, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x, *routes)
    assert y.dtype == torch.bfloat16
    assert worst_row(y, double(module(x, *routes))) <= BOUNDS[torch.bfloat16]


# ---- gradients --------------------------------------------------------------------------------


def dense(experts, x, ids, weights, activation, limit, after, scale) -> torch.Tensor:
    """The experts in differentiable float64, written with torch's own activations."""
    functional = torch.nn.functional
    curves = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
    }

    def project(projection, e, r, rows):
        y = rows @ torch.from_numpy(experts.weight(projection, e, r))
        bias = getattr(experts, projection)[e][r].bias
        return y if bias is None else y + bias[: y.shape[-1]].double()

    rows = []
    for t, slots in enumerate(ids.tolist()):
        total = torch.zeros(experts.hidden, dtype=torch.float64)
        for s, e in enumerate(slots):
            if not 0 <= e < len(experts.up) or experts.up[e] is None:
                continue
            value = 0
            for r in range(len(experts.up[e])):
                up = project("up", e, r, x[t])
                if activation == "relu2":
                    inner = functional.relu(up).square()
                else:
                    gate = project("gate", e, r, x[t])
                    if limit:
                        up = up.clamp(-limit, limit)
                        gate = gate if after else gate.clamp(max=limit)
                    if activation == "swiglu_oai":
                        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                    else:
                        value_of = curves[activation](gate)
                        inner = (value_of.clamp(max=limit) if limit and after else value_of) * up
                value = value + project("down", e, r, inner)
            total = total + weights[t, s] * value
        rows.append(total * scale)
    return torch.stack(rows)


CASES = [(name, 0.0, False) for name in ACTIVATIONS] + [
    ("silu", 0.7, False),
    ("gelu", 0.7, True),
    ("gelu_tanh", 0.7, True),
    ("swiglu_oai", 0.7, False),
]


@pytest.mark.parametrize("op", ["rank_sliced_moe", "parity_moe"])
@pytest.mark.parametrize(("activation", "limit", "after"), CASES)
def test_gradients_against_float64(op, activation, limit, after):
    experts = make_experts(
        4,
        slices=2,
        hidden=200,
        intermediate=128,
        gated=activation != "relu2",
        biases=True,
        absent=(2,),
        bits=lambda p, e: 3 + e,
    )
    layout = experts.layout()
    x = torch.randn(6, 200, requires_grad=True)
    ids, weights = routing(6, 3, 4)
    ids[0], ids[1, 1], ids[2, 2] = torch.tensor([1, 1, 3]), -1, 4
    weights.requires_grad_()
    y = getattr(trellis_ops, op)(
        x,
        ids,
        weights,
        *arguments(layout),
        codebook="mcg",
        activation=activation,
        limit=limit,
        limit_after=after,
        routed_scale=2.5,
    )
    wide = [t.detach().double().requires_grad_() for t in (x, weights)]
    want = dense(experts, wide[0], ids, wide[1], activation, limit, after, 2.5)
    assert worst_row(y, double(want)) <= BOUNDS[F32]
    g = torch.randn(200, 6).t()
    got = torch.autograd.grad(y, (x, weights), g)
    expected = torch.autograd.grad(want, wide, g.double())
    assert [t.dtype for t in got] == [F32, F32]
    assert worst_row(got[0], double(expected[0])) <= 1e-6
    assert np.abs(double(got[1]) - double(expected[1])).max() <= 1e-6 * expected[1].abs().max()
    assert not got[1][1, 1] and not got[1][2, 2] and not got[1][ids == 2].any()


def test_gradient_dtypes_and_one_of_the_two():
    module = make_module()
    ids, weights = routing(5, 2, 4)
    for dtype in BOUNDS:
        x, w = torch.randn(5, 256).to(dtype), weights.to(dtype)
        both = [t.clone().requires_grad_() for t in (x, w)]
        dx, dw = torch.autograd.grad(module(both[0], ids, both[1]).float().sum(), both)
        assert (dx.dtype, dw.dtype, dw.shape) == (dtype, dtype, (5, 2))
        (alone,) = torch.autograd.grad(module(x, ids, both[1]).float().sum(), both[1])
        assert torch.equal(alone, dw)
        (alone,) = torch.autograd.grad(module(both[0], ids, w).float().sum(), both[0])
        assert torch.equal(alone, dx)


def test_activation_checkpointing():
    module = make_module()
    x = torch.randn(4, 256, requires_grad=True)
    routes = routing(4, 2, 4)

    def block(x):
        return torch.nn.functional.silu(module(x, *routes))

    (dx,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x)
    (want,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(dx, want)


def test_there_is_no_second_derivative_and_that_is_said():
    module = make_module()
    x = torch.randn(4, 256, requires_grad=True)
    y = module(x, *routing(4, 2, 4))
    (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="moe_grad: has no gradient of its own"):
        torch.autograd.grad(dx.sum(), x)


def test_frozen_tensors_and_results_without_gradient_say_so():
    layout = make_experts(3, intermediate=128).layout()
    x = torch.randn(2, 256, requires_grad=True)
    tensors = list(arguments(layout))
    tensors[3] = tensors[3].clone().requires_grad_()
    with pytest.raises(ValueError, match="rank_sliced_moe: gate_svh requires grad, expected a"):
        trellis_ops.rank_sliced_moe(x, *routing(2, 2, 3), *tensors, codebook="mcg")
    every = (x, *routing(2, 2, 3), *arguments(layout), *options(layout))
    assert not OPS.rank_sliced_moe_inference(*every).requires_grad
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    assert not OPS.rank_sliced_moe_planned(*every, workspace).requires_grad
    with torch.inference_mode():
        assert torch.equal(OPS.rank_sliced_moe(*every), OPS.rank_sliced_moe_inference(*every))


def test_the_planned_op_gives_the_same_bits():
    for planned in samples()["rank_sliced_moe_planned"]:
        y = OPS.rank_sliced_moe(*planned[:-1])
        assert torch.equal(OPS.rank_sliced_moe_planned(*planned), y)
