"""dequantize, hadamard_128, pack_trellis and unpack_trellis on a GPU, against the oracle."""

from __future__ import annotations

import warnings

import oracle
import pytest
import torch
from layers import CASES, make_layer

import trellis_ops


@pytest.mark.parametrize(("codebook", "bits"), CASES)
def test_decodes_bit_for_bit(codebook, bits):
    layer = make_layer(codebook, bits, rows=16 * 21, columns=16 * 11)
    want = torch.from_numpy(oracle.inner_weight(layer.trellis.numpy(), codebook))
    got = trellis_ops.dequantize(layer.trellis.cuda(), codebook=codebook, dtype=torch.float16)
    assert torch.equal(got.cpu(), want.half())


@pytest.mark.parametrize(("codebook", "bits"), [("mcg", 4), ("mul1", 2.5), ("sqg_e4m3", 3)])
def test_transforms_and_scales(codebook, bits):
    layer = make_layer(codebook, bits, rows=384, columns=640)
    parts = layer.trellis.cuda(), layer.suh.cuda(), layer.svh.cuda()
    want = torch.from_numpy(layer.weight()).cuda()
    for dtype, bound in ((torch.float32, 1e-6), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the slow reference would warn
            got = trellis_ops.dequantize(*parts, codebook=codebook, dtype=dtype)
        assert got.dtype == dtype
        assert float((got.double() - want).norm() / want.norm()) <= bound


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
def test_every_state_decodes_bit_for_bit(codebook):
    layer = make_layer(codebook, 8, rows=1024, columns=2048)
    assert len(trellis_ops.unpack_trellis(layer.trellis).unique()) == 65536
    want = torch.from_numpy(oracle.inner_weight(layer.trellis.numpy(), codebook))
    got = trellis_ops.dequantize(layer.trellis.cuda(), codebook=codebook, dtype=torch.float16)
    assert torch.equal(got.cpu(), want.half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_hadamard(dtype):
    x = torch.randn(5, 3, 384, device="cuda").to(dtype)
    bound = {torch.float16: 4e-4, torch.bfloat16: 3e-3, torch.float32: 1e-6}[dtype]
    want = trellis_ops.reference.hadamard_128(x.double())
    for view in (x, x.transpose(0, 1), x[:, 1:, :256]):
        want = trellis_ops.reference.hadamard_128(view.double())
        got = trellis_ops.hadamard_128(view)
        assert got.dtype == dtype and got.is_contiguous()
        assert float((got.double() - want).norm() / want.norm()) <= bound


@pytest.mark.parametrize("bits", [1, 1.5, 3, 3.5, 4, 8])
def test_pack_and_unpack(bits):
    layer = make_layer("mul1", bits, rows=48, columns=64)
    states = trellis_ops.unpack_trellis(layer.trellis.cuda())
    assert torch.equal(states.cpu(), trellis_ops.unpack_trellis(layer.trellis))
    packed = trellis_ops.pack_trellis(states, bits=bits)
    assert torch.equal(packed.cpu(), layer.trellis)
