"""Range, isolation of rows, and reproducibility of the ops."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import oracle
import pytest
import torch
from layers import BOUNDS, Layer, double, make_layer, worst_row

import trellis_ops

GEMMS = (trellis_ops.trellis_gemm, trellis_ops.parity_gemm)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def check(x: torch.Tensor, layer: Layer, out_dtype: torch.dtype | None = None) -> None:
    """Both ops give the right answer, which must be finite for that."""
    dtype = out_dtype or x.dtype
    want = double(x) @ layer.weight()
    assert np.abs(want).max() < torch.finfo(dtype).max, "the test itself asks for too much"
    for gemm in GEMMS:
        y = gemm(
            x,
            layer.trellis,
            layer.suh,
            layer.svh,
            codebook=layer.codebook,
            out_dtype=out_dtype,
        )
        assert y.dtype == dtype
        assert worst_row(y, want) <= BOUNDS[dtype], gemm.__name__


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1", "sqg_e4m3"])
def test_bfloat16_column_of_1e5(codebook):
    x = torch.randn(5, 256).to(BF16)
    x[:, 77] = 1e5
    check(x, make_layer(codebook, 4))


@pytest.mark.parametrize("value", [6e4, -6e4, 65504.0])
@pytest.mark.parametrize("out_dtype", [F16, BF16, F32])
def test_float16_block_of_6e4(value, out_dtype):
    x = torch.randn(3, 256).to(F16)
    x[:, 128:] = value  # the block's sum is 6e4 * 128, its transform 6e4 * sqrt(128)
    layer = make_layer("mul1", 3)
    layer.suh.fill_(1)
    layer.svh.mul_(2.0**-6)
    check(x, layer, out_dtype)


def test_output_beyond_float16_where_another_dtype_is_asked():
    x = torch.full((2, 256), 3e4, dtype=F16)
    layer = make_layer("mcg", 2)
    for dtype in (BF16, F32):
        check(x, layer, dtype)
    assert np.abs(double(x) @ layer.weight()).max() > 1e5


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("value", [3e38, 1e30, 1e-30, 1e-37])
def test_ends_of_the_exponent_range(dtype, value):
    layer = make_layer("3inst", 5)
    layer.svh.mul_(2.0**-4)  # keeps the outputs of 3e38 inside the range
    x = torch.zeros(4, 256)
    x[0] = torch.randn(256).clamp(-1, 1)
    x[1, 3] = 1
    x[2] = 0.75
    x[3, ::2] = -1
    check((x * value).to(dtype), layer, F32 if value < 1 else dtype)


def test_subnormal_float16_inputs_and_scales():
    layer = make_layer("mcg", 4)
    layer.suh.mul_(2.0**-20)
    layer.svh.mul_(2.0**-14)
    assert 0 < layer.suh.abs().max() < 2.0**-14
    x = torch.randn(3, 256).mul(2.0**-18).to(F16)
    check(x, layer, F32)


def test_rows_of_very_different_sizes_and_outliers():
    x = torch.randn(6, 256)
    x *= torch.tensor([1e-30, 1e-6, 1.0, 1e6, 1e20, 1e30])[:, None]
    check(x, make_layer())
    outliers = torch.randn(4, 256)
    outliers[:, 5] *= 1e3
    outliers[1, 200] = 3e4
    for dtype in (F16, BF16, F32):
        check(outliers.to(dtype), make_layer("mul1", 1))


def test_large_scales():
    layer = make_layer("3inst", 3)
    layer.suh.mul_(2.0**14)
    layer.svh.mul_(2.0**17)
    assert layer.suh.abs().max() > 3e4
    assert layer.svh.abs().max() > 1e4
    x = torch.randn(2, 256) * 1e20
    check(x, layer, F32)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("gemm", GEMMS)
def test_a_row_that_is_not_finite_spoils_only_itself(gemm, value):
    layer = make_layer()
    x = torch.randn(6, 256, dtype=F16)
    spoilt = x.clone()
    spoilt[2, 9] = value
    clean, y = (gemm(v, layer.trellis, layer.suh, layer.svh, codebook="mcg") for v in (x, spoilt))
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[others], clean[others])
    assert not y[2].isfinite().any(), "the fault must show, in every output it reaches"


def test_zero_rows_give_the_bias():
    layer = make_layer()
    bias = torch.randn(384, dtype=F16)
    for gemm in GEMMS:
        y = gemm(torch.zeros(2, 256), layer.trellis, layer.suh, layer.svh, bias, codebook="mcg")
        assert torch.equal(y, bias.float().expand(2, 384))


def test_flushing_subnormals_changes_no_weight():
    layer = make_layer("sqg_fp16", 6)
    layer.suh.mul_(2.0**-20)
    arguments = (layer.trellis, layer.suh, layer.svh)
    x = torch.randn(2, 256)
    want = trellis_ops.trellis_gemm(x, *arguments, codebook="sqg_fp16")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        torch.set_num_threads(1)
        assert torch.equal(trellis_ops.trellis_gemm(x, *arguments, codebook="sqg_fp16"), want)
    finally:
        torch.set_flush_denormal(False)


# ---- reproducibility --------------------------------------------------------------------------


def results(x: torch.Tensor, layer: Layer) -> list[torch.Tensor]:
    weights = (layer.trellis, layer.suh, layer.svh)
    grad = torch.ops.trellis_ops.gemm_input_grad
    return [
        *(gemm(x, *weights, codebook=layer.codebook) for gemm in GEMMS),
        trellis_ops.dequantize(*weights, codebook=layer.codebook, dtype=F32),
        trellis_ops.hadamard_128(x),
        trellis_ops.unpack_trellis(layer.trellis),
        grad(torch.cat((x, x), -1)[:, :384], *weights, layer.code, 256, F32),
    ]


def test_repeated_calls_give_the_same_bits():
    x, layer = torch.randn(33, 256), make_layer("mul1", 1.5)
    first = results(x, layer)
    for _ in range(5):
        for a, b in zip(first, results(x, layer), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("m", [1, 3, 145, 300])
def test_the_number_of_threads_changes_no_bit(m):
    x, layer = torch.randn(m, 256, dtype=F16), make_layer("3inst", 5, columns=640)
    weights = (layer.trellis, layer.suh, layer.svh)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(
            (
                trellis_ops.trellis_gemm(x, *weights, codebook="3inst"),
                trellis_ops.dequantize(*weights, codebook="3inst"),
                trellis_ops.hadamard_128(x),
            )
        )
    for other, (a, b) in itertools.product((1, 2), enumerate(found[0])):
        assert torch.equal(found[other][a], b)


def test_calls_from_several_python_threads_share_nothing():
    layers = [make_layer("mul1", bits, seed=seed) for seed, bits in enumerate((1, 2.5, 4, 8))]
    x = torch.randn(33, 256)

    def run(layer: Layer) -> list[torch.Tensor]:
        weights = (layer.trellis, layer.suh, layer.svh)
        return [
            trellis_ops.trellis_gemm(x, *weights, codebook="mul1"),
            trellis_ops.dequantize(*weights, codebook="mul1"),
        ]

    want = [run(layer) for layer in layers]
    with ThreadPoolExecutor(len(layers)) as pool:
        for _ in range(10):
            for got, expected in zip(pool.map(run, layers), want, strict=True):
                for a, b in zip(got, expected, strict=True):
                    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_a_row_of_trellis_gemm_does_not_depend_on_the_others(dtype):
    layer = make_layer("mul1", 3)
    x = torch.randn(300, 256).to(dtype)
    weights = (layer.trellis, layer.suh, layer.svh)

    def gemm(rows):
        return trellis_ops.trellis_gemm(rows, *weights, codebook="mul1")

    # Few rows and many may be computed differently.
    for first, ms in ((292, (1, 2, 3, 5)), (0, (9, 16, 17, 33, 127, 128, 129, 144, 145, 256, 257))):
        rows = x[first:]
        whole = gemm(rows)
        for m in ms:
            assert torch.equal(gemm(rows[:m]), whole[:m])
            assert torch.equal(gemm(rows[-m:]), whole[-m:])


def test_inputs_are_not_written():
    layer = make_layer("mcg", 2)
    x = torch.randn(4, 256)
    tensors = (x, layer.trellis, layer.suh, layer.svh)
    before = [tensor.clone() for tensor in tensors]
    results(x, layer)
    for now, then in zip(tensors, before, strict=True):
        assert torch.equal(now, then)


def test_every_row_of_the_oracle_is_checked():
    """worst_row, on which this file rests, sees one wrong row among many."""
    want = oracle.hadamard(np.random.default_rng(0).normal(size=(100, 128)))
    got = torch.from_numpy(want.copy())
    assert worst_row(got, want) == 0
    got[50] *= 1.01
    assert worst_row(got, want) == pytest.approx(0.01)
    got[50, 3] = float("nan")
    assert worst_row(got, want) == float("inf")
