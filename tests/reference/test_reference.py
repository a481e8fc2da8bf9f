"""The PyTorch implementations, where they differ in structure from the compiled ones."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import pytest
import torch
from layers import double, make_layer, worst_row

from trellis_ops import reference

pytestmark = pytest.mark.usefixtures("one_thread")

F32 = torch.float32


@pytest.mark.parametrize("out_features", [1025, 1040, 2048, 2049, 2176, 2300, 2304])
def test_columns_are_decoded_in_chunks(out_features):
    """Chunks of 1024 columns end inside, at and behind out_features."""
    columns = -(-out_features // 128) * 128
    layer = make_layer("mul1", 2.5, rows=128, columns=columns)
    x = torch.randn(3, 128)
    bias = torch.randn(out_features)
    weights = (layer.trellis, layer.suh, layer.svh)
    y = reference.linear(x, *weights, bias, layer.code, out_features, F32)
    want = double(x) @ layer.weight()[:, :out_features] + double(bias)
    assert y.shape == (3, out_features)
    assert worst_row(y, want) <= 1e-7
    grad = torch.randn(3, out_features)
    dx = reference.input_grad(grad, *weights, layer.code, 128, F32)
    assert worst_row(dx, double(grad) @ layer.weight()[:, :out_features].T) <= 1e-7


def test_chunks_of_a_matrix_without_vectors():
    layer = make_layer("3inst", 7, rows=16, columns=1072)
    x = torch.randn(2, 16)
    w = oracle.inner_weight(layer.trellis.numpy(), "3inst")
    y = reference.linear(x, layer.trellis, None, None, None, 0, 1072, F32)
    assert worst_row(y, double(x) @ w) <= 1e-7
    grad = torch.randn(2, 1072)
    dx = reference.input_grad(grad, layer.trellis, None, None, 0, 16, F32)
    assert worst_row(dx, double(grad) @ w.T) <= 1e-7


@pytest.mark.parametrize(("codebook", "bits"), [("mcg", 1), ("mul1", 3.5), ("sqg_fp16", 5)])
def test_dequantize(codebook, bits):
    layer = make_layer(codebook, bits)
    for suh, svh in itertools.product((layer.suh, None), (layer.svh, None)):
        arrays = (None if v is None else v.numpy() for v in (layer.trellis, suh, svh))
        want = oracle.weight(*arrays, codebook)
        w = reference.dequantize(layer.trellis, suh, svh, layer.code, F32)
        assert w.is_contiguous()
        assert worst_row(w, want) <= 1e-7


def test_hadamard():
    x = torch.randn(4, 3, 256).transpose(0, 1)
    y = reference.hadamard_128(x)
    assert y.is_contiguous()
    assert worst_row(y, oracle.hadamard(double(x))) <= 1e-7


def test_results_are_rounded_once():
    """parity_gemm is exact arithmetic and one rounding: nearly always the nearest number."""
    layer = make_layer("mcg", 4)
    x = torch.randn(20, 256)
    weights = (layer.trellis, layer.suh, layer.svh)
    want = torch.from_numpy(double(x) @ layer.weight())
    for dtype in (torch.float16, torch.bfloat16, F32):
        y = reference.linear(x, *weights, None, layer.code, 384, dtype)
        assert (y == want.to(dtype)).double().mean() > 0.999


def test_search_in_chunks_of_tiles():
    targets = torch.randn(11, 256)
    states, values = reference.quantize_tiles(targets, 64, 2)
    assert oracle.closed(states.numpy(), 4).all()
    assert np.array_equal(double(values), oracle.table("mul1", 4)[states.numpy()])
    alone = reference.quantize_tiles(targets[9:10], 64, 2)[0]
    assert torch.equal(states[9:10], alone)
