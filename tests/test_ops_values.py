"""What the ops compute, against the float64 oracle: every codebook, rate, dtype, layout and size."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import pytest
import torch
from layers import BOUNDS, CASES, DTYPES, double, make_layer, poison, worst_row

import trellis_ops

pytestmark = pytest.mark.usefixtures("one_thread")

OPS = torch.ops.trellis_ops
GEMMS = (trellis_ops.trellis_gemm, trellis_ops.parity_gemm)
ROWS = (0, 1, 2, 3, 5, 16, 17, 33, 144, 145)
# parity_gemm computes in float64: what is left is the one rounding of the result.
ROUNDING = {torch.float16: 3e-4, torch.bfloat16: 2.3e-3, torch.float32: 1e-7}


def bound(gemm, dtype: torch.dtype) -> float:
    return BOUNDS[dtype] if gemm is trellis_ops.trellis_gemm else ROUNDING[dtype]


def want_of(layer, x, **extra) -> np.ndarray:
    arrays = (None if v is None else v.numpy() for v in (layer.trellis, layer.suh, layer.svh))
    return oracle.linear(double(x), *arrays, layer.codebook, **extra)


@pytest.mark.parametrize(("codebook", "bits"), CASES)
def test_gemm_of_a_padded_layer(codebook, bits):
    layer = make_layer(codebook, bits)
    bias = torch.randn(300, dtype=torch.float16)
    full = torch.randn(max(ROWS), 200)
    weight = layer.weight()[:200, :300]
    for dtype in DTYPES:
        x = full.to(dtype)
        want = double(x) @ weight + double(bias)
        for m, gemm in itertools.product(ROWS, GEMMS):
            poison()
            y = gemm(
                x[:m],
                layer.trellis,
                layer.suh,
                layer.svh,
                bias,
                codebook=codebook,
                out_features=300,
            )
            assert (y.shape, y.dtype, y.is_contiguous()) == ((m, 300), dtype, True)
            if m:
                assert worst_row(y, want[:m]) <= bound(gemm, dtype), (gemm.__name__, m, dtype)


@pytest.mark.parametrize("isa", [i for i in range(8) if OPS._cpu_isas() >> i & 1])
@pytest.mark.parametrize(("codebook", "bits"), CASES)
def test_every_instruction_set(codebook, bits, isa):
    """Right, and a row has the same bits among few rows and among many, in whichever block of them."""
    layer = make_layer(codebook, bits, rows=384, columns=256)
    parts = layer.trellis, layer.suh, layer.svh
    x = torch.randn(150, 330)
    want = double(x) @ layer.weight()[:330, :200]
    everything = OPS._trellis_gemm_isa(x, *parts, None, layer.code, 200, torch.float32, isa)
    assert worst_row(everything, want) <= BOUNDS[torch.float32]
    few = OPS._trellis_gemm_isa(x[:8], *parts, None, layer.code, 200, torch.float32, isa)
    assert worst_row(few, want[:8]) <= BOUNDS[torch.float32]
    for first, last in ((0, 1), (2, 5), (60, 70), (135, 150)):
        y = OPS._trellis_gemm_isa(x[first:last], *parts, None, layer.code, 200, torch.float32, isa)
        assert torch.equal(y, (few if last <= 8 else everything)[first:last])
    inner = oracle.inner_weight(layer.trellis.numpy(), codebook)[: 16 * 21, : 16 * 11]
    ragged = layer.trellis[:21, :11].contiguous()
    y = OPS._trellis_gemm_isa(x, ragged, None, None, None, layer.code, 176, torch.float32, isa)
    assert worst_row(y, double(x) @ inner[:330]) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize(("codebook", "bits"), [("mul1", 2.5), ("sqg_fp16", 5)])
def test_every_pair_of_dtypes(gemm, codebook, bits):
    layer = make_layer(codebook, bits)
    for given, asked in itertools.product(DTYPES, DTYPES):
        x = torch.randn(5, 256).to(given)
        y = gemm(x, layer.trellis, layer.suh, layer.svh, codebook=codebook, out_dtype=asked)
        assert y.dtype == asked
        assert worst_row(y, want_of(layer, x)) <= bound(gemm, asked)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("columns", [16, 304, 384])
@pytest.mark.parametrize("rows", [16, 208, 256])
def test_a_side_without_its_vector_is_left_alone(gemm, rows, columns):
    layer = make_layer("3inst", 4, rows=rows, columns=columns)
    x = torch.randn(7, rows - 3)
    for suh, svh in itertools.product((layer.suh, None), (layer.svh, None)):
        if (suh is not None and rows % 128) or (svh is not None and columns % 128):
            continue
        layer.suh, layer.svh = suh, svh
        y = gemm(x, layer.trellis, suh, svh, codebook="3inst", out_features=columns - 5)
        assert y.shape == (7, columns - 5)
        assert worst_row(y, want_of(layer, x, out_features=columns - 5)) <= bound(gemm, y.dtype)
        layer = make_layer("3inst", 4, rows=rows, columns=columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "kept"), [(144, 127), (144, 128), (144, 100), (1040, 980)])
def test_a_narrow_last_block_trimmed_off_altogether(columns, kept, dtype):
    layer = make_layer("mul1", 2.5, rows=208, columns=columns)
    layer.suh = layer.svh = None
    bias = torch.randn(kept)
    x = torch.randn(20, 208)
    want = want_of(layer, x, bias=double(bias), out_features=kept)
    for m, gemm in itertools.product((1, 2, 20), GEMMS):
        y = gemm(
            x[:m],
            layer.trellis,
            None,
            None,
            bias,
            codebook="mul1",
            out_features=kept,
            out_dtype=dtype,
        )
        assert worst_row(y, want[:m]) <= bound(gemm, dtype)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_of_logical_or_padded_length(gemm, dtype):
    layer = make_layer()
    x = torch.randn(4, 256, dtype=torch.float16)
    padded = torch.randn(384).to(dtype)
    padded[300:] = float("nan")  # what belongs to no output must not reach one
    want = want_of(layer, x, bias=double(padded), out_features=300)
    ys = [
        gemm(x, layer.trellis, layer.suh, layer.svh, bias, codebook="mcg", out_features=300)
        for bias in (padded, padded[:300], torch.stack((padded, padded), 1)[:300, 0])
    ]
    assert worst_row(ys[0], want) <= bound(gemm, x.dtype)
    assert torch.equal(ys[0], ys[1])
    assert torch.equal(ys[0], ys[2])


@pytest.mark.parametrize("gemm", GEMMS)
def test_shapes_of_x_from_one_to_four_dimensions_and_empty(gemm):
    layer = make_layer()

    def run(x):
        return gemm(x, layer.trellis, layer.suh, layer.svh, codebook="mcg", out_features=300)

    x = torch.randn(2, 3, 5, 200)
    flat = run(x.reshape(30, 200))
    assert torch.equal(run(x), flat.reshape(2, 3, 5, 300))
    assert worst_row(run(x[0, 0, 0]), double(flat[0])) <= bound(gemm, x.dtype)
    for shape in ((0, 200), (0, 7, 200), (3, 0, 200)):
        assert run(torch.empty(shape)).shape == (*shape[:-1], 300)
    assert torch.equal(run(x), flat.reshape(2, 3, 5, 300)), "an empty call left something behind"


def strided(name: str) -> torch.Tensor:
    """[5, 256], or [3, 4, 256], of values that no contiguous reading of the storage gives."""
    base = torch.randn(40, 1100, dtype=torch.float16)
    return {
        "every second column": lambda: base[:5, ::2][:, :256],
        "transposed": lambda: torch.randn(256, 5).half().t(),
        "long rows": lambda: base[:5, 128:384],
        "every third row": lambda: base[:15:3, :256],
        "offset by one element": lambda: base.flatten()[1 : 1 + 5 * 256].view(5, 256),
        "one row expanded": lambda: base[0, :256].expand(5, 256),
        "one column expanded": lambda: base[:5, :1].expand(5, 256),
        "three dimensions transposed": lambda: torch.randn(4, 3, 256).half().transpose(0, 1),
        "overlapping rows": lambda: base.flatten().as_strided((5, 256), (3, 1)),
    }[name]()


STRIDED = (
    "every second column",
    "transposed",
    "long rows",
    "every third row",
    "offset by one element",
    "one row expanded",
    "one column expanded",
    "three dimensions transposed",
    "overlapping rows",
)


@pytest.mark.parametrize("name", STRIDED)
def test_strides_and_offsets_of_x_do_not_matter(name):
    layer = make_layer()
    x = strided(name)
    copy = torch.empty(x.shape, dtype=x.dtype).copy_(x)
    arguments = (layer.trellis, layer.suh, layer.svh)
    for gemm in GEMMS:
        y = gemm(x, *arguments, codebook="mcg")
        assert torch.equal(y, gemm(copy, *arguments, codebook="mcg"))
        assert worst_row(y, want_of(layer, x)) <= bound(gemm, x.dtype)
    assert torch.equal(trellis_ops.hadamard_128(x), trellis_ops.hadamard_128(copy))
    grad = torch.ops.trellis_ops.gemm_input_grad
    options = (layer.code, 250, torch.float32)
    wide, wide_copy = (torch.cat((v, v), -1)[..., ::2] for v in (x, copy))
    square = make_layer(columns=256)
    weights = (square.trellis, square.suh, square.svh)
    assert torch.equal(grad(wide, *weights, *options), grad(wide_copy.clone(), *weights, *options))


def test_strides_and_offsets_of_the_weights_do_not_matter():
    layer = make_layer(rows=256, columns=1024)
    x = torch.randn(3, 256)
    tiles = slice(8, 32)  # the middle part of a fused matrix
    views = (
        layer.trellis[:, tiles],
        layer.suh.repeat_interleave(3)[::3],
        torch.cat((layer.svh[:1], layer.svh))[1:][128:512],
    )
    assert not views[0].is_contiguous()
    assert not views[1].is_contiguous()
    copies = tuple(view.contiguous().clone() for view in views)
    reversed_words = torch.stack((copies[0], copies[0]), -1).transpose(0, 1)[..., 1].transpose(0, 1)
    assert reversed_words.stride() != copies[0].stride()
    bias = torch.randn(2, 384, dtype=torch.float16).t()[:, 1]
    for gemm in GEMMS:
        want = gemm(x, *copies, bias.clone(), codebook="mcg")
        assert torch.equal(gemm(x, *views, bias, codebook="mcg"), want)
        assert torch.equal(gemm(x, reversed_words, *views[1:], bias, codebook="mcg"), want)
    for function in (
        lambda t, u, v: trellis_ops.dequantize(t, u, v, codebook="mcg"),
        lambda t, u, v: trellis_ops.dequantize(t, codebook="mcg"),
        lambda t, u, v: trellis_ops.unpack_trellis(t),
    ):
        assert torch.equal(function(*views), function(*copies))
        assert torch.equal(function(reversed_words, *views[1:]), function(*copies))


@pytest.mark.parametrize("gemm", GEMMS)
def test_what_lies_behind_a_short_row_is_not_read(gemm):
    layer = make_layer()
    parent = torch.full((9, 256), float("nan"))
    parent[:, :200] = torch.randn(9, 200)
    x = parent[:, :200]
    y = gemm(x, layer.trellis, layer.suh, layer.svh, codebook="mcg", out_features=300)
    assert worst_row(y, want_of(layer, x, out_features=300)) <= bound(gemm, x.dtype)


@pytest.mark.parametrize("columns", [129, 255, 256])
def test_a_short_row_equals_one_padded_with_zeros(columns):
    layer = make_layer()
    x = torch.randn(3, columns)
    padded = torch.nn.functional.pad(x, (0, 256 - columns))
    for gemm in GEMMS:
        short, long = (
            gemm(v, layer.trellis, layer.suh, layer.svh, codebook="mcg") for v in (x, padded)
        )
        assert torch.equal(short, long)


def test_a_matrix_without_inputs_gives_the_bias():
    trellis = torch.empty(0, 24, 48, dtype=torch.int16)
    bias = torch.randn(384)
    for gemm, svh in itertools.product(GEMMS, (None, torch.ones(384, dtype=torch.float16))):
        y = gemm(torch.empty(2, 0), trellis, None, svh, bias, codebook="mcg")
        assert torch.equal(y, bias.expand(2, 384))
    assert trellis_ops.dequantize(trellis, codebook="mcg").shape == (0, 384)
    assert trellis_ops.unpack_trellis(trellis).shape == (0, 24, 256)


def test_the_codebook_argument_matters():
    layer = make_layer(bits=3)
    x = torch.randn(2, 256)
    ys = {
        name: trellis_ops.trellis_gemm(x, layer.trellis, layer.suh, layer.svh, codebook=name)
        for name in ("3inst", "mcg", "mul1", "sqg_e4m3")
    }
    for name, y in ys.items():
        layer.codebook = name
        assert worst_row(y, want_of(layer, x)) <= BOUNDS[x.dtype]
    for a, b in itertools.combinations(ys.values(), 2):
        assert worst_row(a, double(b)) > 0.5


@pytest.mark.parametrize(("codebook", "bits"), [("3inst", 1), ("mul1", 3.5), ("sqg_e4m3", 6)])
def test_dequantize(codebook, bits):
    layer = make_layer(codebook, bits)
    for suh, svh, dtype in itertools.product((layer.suh, None), (layer.svh, None), DTYPES):
        w = trellis_ops.dequantize(layer.trellis, suh, svh, codebook=codebook, dtype=dtype)
        arrays = (None if v is None else v.numpy() for v in (layer.trellis, suh, svh))
        want = oracle.weight(*arrays, codebook)
        assert (w.shape, w.dtype, w.is_contiguous()) == ((256, 384), dtype, True)
        if suh is None and svh is None and dtype != torch.bfloat16:
            assert np.array_equal(double(w), want)
        assert worst_row(w, want) <= BOUNDS[dtype]


def test_dequantize_of_dimensions_that_are_multiples_of_16_only():
    layer = make_layer("mul1", 1.5, rows=144, columns=80)
    w = trellis_ops.dequantize(layer.trellis, codebook="mul1")
    assert np.array_equal(double(w), oracle.inner_weight(layer.trellis.numpy(), "mul1"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hadamard(dtype):
    x = torch.randn(3, 5, 384).to(dtype)
    y = trellis_ops.hadamard_128(x)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert worst_row(y, oracle.hadamard(double(x))) <= ROUNDING[dtype]
    assert worst_row(trellis_ops.hadamard_128(y), double(x)) <= 2 * ROUNDING[dtype]
    for shape in ((0, 128), (3, 0, 256), (128,), (3, 0)):
        assert trellis_ops.hadamard_128(torch.ones(shape, dtype=dtype)).shape == shape


def test_hadamard_of_a_unit_vector_is_a_row_of_the_matrix():
    for i in (0, 1, 64, 127):
        x = torch.zeros(128)
        x[i] = 1
        want = torch.from_numpy(oracle.hadamard_matrix()[i])
        assert torch.equal(trellis_ops.hadamard_128(x), want.float())
