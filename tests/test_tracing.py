"""What the compiler sees: opcheck, fakes, torch.compile, export, AOTInductor, and gradients."""

from __future__ import annotations

import itertools

import experts
import numpy as np
import oracle
import pytest
import torch
from layers import BOUNDS, DTYPES, closed_states, double, make_layer, worst_row
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import trellis_ops
from trellis_ops.meta import SCHEMAS

pytestmark = pytest.mark.usefixtures("one_thread")

OPS = torch.ops.trellis_ops
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def samples() -> dict[str, list[tuple]]:
    """Arguments of every op: dtypes, ranks, strides, short rows, no vectors, half rates, empty."""
    layer, half = make_layer("mcg", 3), make_layer("mul1", 2.5)
    weights, half_weights = ((v.trellis, v.suh, v.svh) for v in (layer, half))
    bias = torch.randn(300, dtype=F16)
    gemm = [
        (torch.randn(3, 256, dtype=F16), *weights, None, 1, 384, F16),
        (torch.randn(2, 3, 200), *half_weights, bias, 2, 300, BF16),
        (torch.randn(256, 33).to(BF16).t(), layer.trellis, None, layer.svh, None, 1, 384, F32),
        (torch.randn(5, 384), layer.trellis.transpose(0, 1), None, None, None, 1, 256, F32),
        (torch.randn(256), *weights, bias, 1, 300, F32),
        (torch.randn(0, 7, 256), *weights, None, 1, 384, F32),
    ]
    states = closed_states(3, 6)
    tiles = torch.randn(2, 256)
    return {
        "trellis_gemm": gemm,
        "trellis_gemm_inference": gemm,
        "trellis_gemm_act": [
            (torch.randn(2, 200), *half_weights, bias, 2, 300, BF16, 1),
            (torch.randn(0, 7, 256), *half_weights, None, 2, 384, F32, 1),
            (torch.randn(256, 3, dtype=F16).t(), *weights, None, 1, 384, F16, 0),
        ],
        "parity_gemm": gemm,
        "gemm_input_grad": [
            (torch.randn(3, 384, dtype=F16), *weights, 1, 256, F16),
            (torch.randn(2, 3, 300).transpose(0, 1), *half_weights, 2, 200, F32),
            (torch.randn(0, 384), layer.trellis, layer.suh, None, 1, 256, BF16),
        ],
        "dequantize": [
            (*weights, 1, F16),
            (half.trellis.transpose(0, 1), None, None, 2, F32),
            (layer.trellis, None, layer.svh, 1, BF16),
        ],
        "hadamard_128": [
            (torch.randn(3, 256),),
            (torch.randn(256, 3, dtype=F16).t(),),
            (torch.randn(2, 4, 128).to(BF16).transpose(0, 1),),
            (torch.randn(0, 128),),
        ],
        "unpack_trellis": [(layer.trellis,), (half.trellis.transpose(0, 1),)],
        "pack_trellis": [(states, 48), (states.long().view(2, 3, 256).transpose(0, 1), 48)],
        "quantize_tiles": [(tiles, 16, 1), (torch.randn(256, 1).t(), 24, 2), (tiles[:0], 16, 0)],
        "_quantize_tiles_isa": [(tiles, 16, 1, 0)],
        **experts.samples(),
    }


NUMBERED = [
    pytest.param(name, i, id=f"{name}-{i}") for name, calls in samples().items()
    for i in range(len(calls))
]  # fmt: skip


def test_every_op_has_samples():
    assert {name for name in SCHEMAS if not name.startswith("_")} <= samples().keys()


@pytest.mark.parametrize(("name", "i"), NUMBERED)
def test_opcheck(name, i):
    arguments = samples()[name][i]
    torch.library.opcheck(getattr(OPS, name).default, arguments)
    # Of moe_grad there is no gradient, which its own test sees.
    if arguments[0].is_floating_point() and name != "moe_grad":
        first = arguments[0].detach().requires_grad_()
        torch.library.opcheck(getattr(OPS, name).default, (first, *arguments[1:]))


@pytest.mark.parametrize(("name", "i"), NUMBERED)
def test_fake_and_real_results_look_alike(name, i):
    arguments = samples()[name][i]
    op = getattr(OPS, name)

    def look(results) -> list[tuple]:
        results = results if isinstance(results, (tuple, list)) else (results,)
        return [(r.shape, r.dtype, r.stride(), r.storage_offset(), r.device.type) for r in results]

    def mapped(function) -> list:
        return [function(a) if isinstance(a, torch.Tensor) else a for a in arguments]

    real = look(op(*arguments))
    with FakeTensorMode() as mode:
        assert look(op(*mapped(mode.from_tensor))) == real
    meta = look(op(*mapped(lambda t: t.to("meta"))))
    assert meta == [(*rest, "meta") for *rest, _ in real]


# ---- torch.compile ----------------------------------------------------------------------------


def linear(**options) -> trellis_ops.Exl3Linear:
    layer = make_layer("mul1", 4)
    return trellis_ops.Exl3Linear.from_tensors(
        trellis_ops.TrellisTensor(
            layer.trellis,
            layer.suh,
            layer.svh,
            torch.randn(384, dtype=F16),
            "mul1",
            **{"in_features": 200, "out_features": 300, **options},
        )
    )


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("first", [1, 2048])
def test_two_compilations_serve_every_number_of_rows(first, grad):
    module = linear()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    sizes = (2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 127, 128, 144, 145, 200, 255, 299, 300)
    for m in (first, *sizes, 1, 300):
        x = torch.randn(m, 200, requires_grad=grad)
        y = compiled(x)
        assert torch.equal(y, module(x))
        if grad:
            (dx,) = torch.autograd.grad(y.sum(), x)
            (want,) = torch.autograd.grad(module(x).sum(), x)
            assert torch.equal(dx, want)
    assert counter.frame_count <= 2


def test_a_marked_dimension_compiles_once():
    module = linear()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for m in (2, 300, 17):
        x = torch.randn(m, 200)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=4096)
        assert torch.equal(compiled(x), module(x))
    assert counter.frame_count == 1


def test_inductor_compiles_the_layer_with_what_surrounds_it():
    module = linear()

    def block(x):
        # Model code reads weight's dtype and device.
        x = torch.nn.functional.silu(x).to(module.weight.dtype)
        y = module(x)
        return y.transpose(0, 1) * 2 + trellis_ops.hadamard_128(y[:, :256]).t().sum()

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for m in (5, 1, 40):
        x = torch.randn(m, 200)
        with torch.inference_mode(m == 40):
            got, want = compiled(x), block(x)
        # Inductor may add up the sum in another order.
        assert torch.linalg.norm(got - want) <= 1e-5 * torch.linalg.norm(want)


def test_every_public_op_traces_without_a_break():
    layer = make_layer("mul1", 1.5)
    states = closed_states(1.5, 4)

    def everything(x, trellis, suh, svh, states, tiles):
        return (
            trellis_ops.trellis_gemm(x, trellis, suh, svh, codebook="mul1", out_dtype=BF16),
            trellis_ops.parity_gemm(x, trellis, suh, svh, codebook="mul1", out_features=300),
            trellis_ops.dequantize(trellis, suh, svh, codebook="mul1"),
            trellis_ops.hadamard_128(x),
            trellis_ops.unpack_trellis(trellis),
            trellis_ops.pack_trellis(states, 1.5),
            *trellis_ops.quantize_tiles(tiles, 1.5, codebook="mul1"),
        )

    x = torch.randn(3, 256)
    arguments = (x, layer.trellis, layer.suh, layer.svh, states, torch.randn(2, 256))
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(*arguments), everything(*arguments), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_bad_arguments_are_named_while_compiling():
    module = linear()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"x has 199 columns, expected in_features 200"):
        compiled(torch.randn(2, 199))
    layer = make_layer()
    gemm = torch.compile(OPS.trellis_gemm, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"trellis_gemm: x has 300 columns, expected 129 to 256"):
        gemm(torch.randn(2, 300), layer.trellis, layer.suh, layer.svh, None, 1, 384, F32)


# ---- export and AOTInductor -------------------------------------------------------------------


def exported() -> tuple[trellis_ops.Exl3Linear, torch.export.ExportedProgram]:
    module = linear()
    m = torch.export.Dim("m", min=1, max=4096)
    program = torch.export.export(module, (torch.randn(7, 200),), dynamic_shapes={"x": {0: m}})
    return module, program


def test_export_save_and_load(tmp_path):
    module, program = exported()
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "trellis_ops.trellis_gemm_inference.default" in names
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for m in (1, 2, 7, 300):
        x = torch.randn(m, 200)
        assert torch.equal(loaded(x), module(x))
    state = torch.export.load(tmp_path / "layer.pt2").state_dict
    for name, tensor in module.state_dict().items():
        assert torch.equal(state[name], tensor)


# Seen with an op of one tensor and no kernel of ours.
@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.11 crashes while it loads a package that calls any custom op",
)
def test_aotinductor_package(tmp_path):
    module, program = exported()
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "layer.pt2")
    )
    package = torch._inductor.aoti_load_package(path)
    for m in (1, 7, 300):
        x = torch.randn(m, 200)
        assert torch.equal(package(x), module(x))


# ---- modes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_chooses_the_output_dtype(compiled):
    module = linear()
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    x = torch.randn(3, 200)
    for dtype in (BF16, F16):
        with torch.autocast("cpu", dtype=dtype):
            y = run(x)
        assert y.dtype == dtype
        assert worst_row(y, double(module(x))) <= BOUNDS[dtype]
    with torch.autocast("cpu", enabled=False):
        assert run(x).dtype == F32


def test_inference_mode_and_no_grad_give_the_same_bits():
    module = linear()
    x = torch.randn(3, 200, requires_grad=True)
    want = module(x)
    assert want.requires_grad
    with torch.inference_mode():
        assert torch.equal(module(x), want)
    with torch.no_grad():
        y = module(x)
    assert torch.equal(y, want)
    assert not y.requires_grad
    assert not module(x.detach()).requires_grad


# ---- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("gemm", [trellis_ops.trellis_gemm, trellis_ops.parity_gemm])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_x(gemm, dtype):
    layer = make_layer("mul1", 3.5)
    for suh, svh in itertools.product((layer.suh, None), (layer.svh, None)):
        weight = oracle.weight(
            *(None if v is None else v.numpy() for v in (layer.trellis, suh, svh)), "mul1"
        )[:200, :300]
        x = torch.randn(2, 3, 200).to(dtype).requires_grad_()
        y = gemm(x, layer.trellis, suh, svh, codebook="mul1", out_features=300, out_dtype=F32)
        g = torch.randn(3, 2, 300).transpose(0, 1)
        (dx,) = torch.autograd.grad(y, x, g)
        assert (dx.shape, dx.dtype) == (x.shape, dtype)
        assert worst_row(dx, double(g) @ weight.T) <= BOUNDS[dtype]
        expanded = gemm(x[0, 0], layer.trellis, suh, svh, codebook="mul1", out_features=300)
        (dx,) = torch.autograd.grad(expanded.sum(), x)
        assert worst_row(dx[:1, 0], weight.sum(1)[None]) <= BOUNDS[dtype]
        assert not dx[1:].any()


def test_bias_gets_no_gradient_but_does_not_stop_it():
    layer = make_layer()
    x = torch.randn(2, 256, requires_grad=True)
    bias = torch.randn(384)
    y = trellis_ops.trellis_gemm(x, layer.trellis, layer.suh, layer.svh, bias, codebook="mcg")
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert worst_row(dx, np.tile(layer.weight().sum(1), (2, 1))) <= BOUNDS[F32]


def test_double_backward():
    layer = make_layer()
    weight = layer.weight()
    x = torch.randn(2, 256, requires_grad=True)
    y = trellis_ops.trellis_gemm(x, layer.trellis, layer.suh, layer.svh, codebook="mcg")
    (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    v = torch.randn_like(dx)
    (second,) = torch.autograd.grad((dx * v).sum(), x)
    want = (6 * double(y) * (double(v) @ weight)) @ weight.T
    assert worst_row(second, want) <= BOUNDS[F32]
    # And a third time, back through the gradient's own formula.
    g = torch.randn(2, 384, requires_grad=True)
    x = torch.randn(2, 256, requires_grad=True)
    y = trellis_ops.trellis_gemm(x, layer.trellis, layer.suh, layer.svh, codebook="mcg")
    (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
    (dg,) = torch.autograd.grad(dx, g, v)
    assert worst_row(dg, double(v) @ weight) <= BOUNDS[F32]


def test_gradient_of_hadamard_is_hadamard():
    x = torch.randn(3, 256, requires_grad=True)
    g = torch.randn(3, 256)
    (dx,) = torch.autograd.grad(trellis_ops.hadamard_128(x), x, g, create_graph=True)
    assert torch.equal(dx, trellis_ops.hadamard_128(g))


def test_activation_checkpointing():
    module = linear()
    x = torch.randn(4, 200, requires_grad=True)

    def block(x):
        return torch.nn.functional.silu(module(x))

    y = checkpoint(block, x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(dx, want)


def test_a_low_rank_update_trains_over_the_frozen_layer():
    module = linear()
    a = torch.zeros(200, 4).requires_grad_()
    b = torch.randn(4, 300)
    x = torch.randn(8, 200)
    before = module.tensors().dequantize(F32)
    y = module(x + (x @ a) @ b[:, :200])
    (da,) = torch.autograd.grad(y.sum(), a)
    want = x.T @ (before.sum(0) @ b[:, :200].T).expand(8, 4)
    assert worst_row(da, double(want)) <= 1e-5
    assert torch.equal(module.tensors().dequantize(F32), before)


def test_results_without_gradient_say_so():
    layer = make_layer()
    x = torch.randn(2, 256, requires_grad=True)
    tiles = torch.randn(1, 256, requires_grad=True)
    outputs = [
        OPS.trellis_gemm_inference(x, layer.trellis, layer.suh, layer.svh, None, 1, 384, F32),
        *OPS.quantize_tiles(tiles, 16, 1),
        trellis_ops.dequantize(layer.trellis, layer.suh, layer.svh, codebook="mcg"),
    ]
    assert not any(output.requires_grad for output in outputs)
