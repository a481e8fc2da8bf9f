"""Activations of eight bits: what they cost, where they are used, and that nobody gets them unasked."""

from __future__ import annotations

import copy

import pytest
import torch
from expecttest import TestCase
from layers import BOUNDS, RATES, double, make_layer, worst_row
from torch._subclasses import FakeTensorMode

import trellis_ops
from trellis_ops import reference
from trellis_ops.cli.env import ISAS

pytestmark = pytest.mark.usefixtures("one_thread")

OPS = torch.ops.trellis_ops
F32 = torch.float32
# Where no kernel has use for them, results are exact.
ROUNDED = bool(OPS._cpu_isas() >> ISAS.index("avx512_vnni") & 1)


def run(layer, x, **options):
    return trellis_ops.trellis_gemm(
        x, layer.trellis, layer.suh, layer.svh, codebook=layer.codebook, **options
    )


def of_reference(layer, x):
    weights = layer.trellis, layer.suh, layer.svh
    return reference.linear(x, *weights, None, layer.code, layer.trellis.shape[1] * 16, F32, 1)


@pytest.mark.parametrize("bits", RATES["mul1"])
@pytest.mark.parametrize("rows", [1, 2])
def test_error_and_definition(bits, rows):
    layer = make_layer("mul1", bits, rows=640, columns=384)
    x = torch.randn(rows, 600)
    y = run(layer, x, act="int8")
    want = double(x) @ layer.weight()[:600]
    assert worst_row(y, want) <= 1e-2
    if ROUNDED:
        assert worst_row(y, want) > 3e-3
        assert worst_row(y, double(of_reference(layer, x))) <= 1e-3  # ties may go either way
    assert worst_row(of_reference(layer, x), want) <= 1e-2


def test_exact_is_the_default():
    layer = make_layer("mul1", 4)
    x = torch.randn(2, 256)
    y = run(layer, x)
    assert worst_row(y, double(x) @ layer.weight()) <= BOUNDS[F32]
    assert torch.equal(y, run(layer, x, act="exact"))


def test_a_row_does_not_depend_on_the_other():
    layer = make_layer("mul1", 3, rows=384)
    x = torch.randn(2, 384)
    both = run(layer, x, act="int8")
    assert torch.equal(
        torch.cat([run(layer, x[:1], act="int8"), run(layer, x[1:], act="int8")]), both
    )


@pytest.mark.parametrize("rows", [0, 3, 8, 20])
def test_more_rows_are_exact(rows):
    layer = make_layer("mul1", 4)
    x = torch.randn(rows, 256)
    assert torch.equal(run(layer, x, act="int8"), run(layer, x))


@pytest.mark.parametrize("bits", [2, 4])
def test_uneven_activations(bits):
    layer = make_layer("mul1", bits, rows=512)
    spike, tail = torch.zeros(512), torch.randn(512) / torch.randn(512)
    spike[300] = 3
    mean = torch.randn(512) + 3  # after the rotation, one large element for each 128
    for x in (spike, tail, mean, torch.ones(512) * 2.0**-100, torch.ones(512) * 2.0**100):
        y = run(layer, x[None], act="int8")
        assert worst_row(y, double(x[None]) @ layer.weight()) <= 3e-2
    assert torch.equal(run(layer, torch.zeros(1, 512), act="int8"), torch.zeros(1, 384))
    x = torch.stack([torch.randn(512), torch.randn(512)])
    clean = run(layer, x, act="int8")
    x[0, 5] = float("inf")
    y = run(layer, x, act="int8")
    assert y[0].isnan().all()
    assert torch.equal(y[1], clean[1])


def test_activations_that_all_but_one_of_a_block_are_rounded_to_zero():
    """As large an error as there is."""
    layer = make_layer("mul1", 4, rows=512, columns=512)
    rotated = torch.full((1, 4, 128), 0.499 / 127)
    rotated[..., 0] = 1
    x = trellis_ops.hadamard_128(rotated).flatten(1) / layer.suh.float()
    assert worst_row(run(layer, x, act="int8"), double(x) @ layer.weight()) <= 5e-2


def test_ragged_sizes_and_a_bias():
    layer = make_layer("mul1", 2.5)
    trellis = layer.trellis[:13, :19].contiguous()
    x, bias = torch.randn(1, 208), torch.randn(300)
    y = trellis_ops.trellis_gemm(
        x, trellis, None, None, bias, codebook="mul1", out_features=300, act="int8"
    )
    want = reference.linear(x, trellis, None, None, bias, 2, 300, F32)
    assert worst_row(y, double(want)) <= 1e-2


def test_linear():
    layer = make_layer("mul1", 4)
    parts = layer.trellis, layer.suh, layer.svh
    module = trellis_ops.Exl3Linear.from_tensors(
        trellis_ops.TrellisTensor(*parts, None, "mul1", in_features=256, out_features=384)
    )
    x = torch.randn(1, 256)
    exact = module(x)
    assert torch.equal(exact, run(layer, x))
    module.act = "int8"
    rounded = module(x)
    assert torch.equal(rounded, run(layer, x, act="int8"))
    assert torch.equal(copy.deepcopy(module)(x), rounded)
    assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(x), rounded)
    other = copy.deepcopy(module)
    other.act = "exact"
    assert torch.equal(other(x), exact)


class Messages(TestCase):
    maxDiff = None

    def refused(self, codebook="mul1", x=None, **options) -> str:
        layer = make_layer(codebook, 3)
        with self.assertRaises(ValueError) as raised:
            run(layer, torch.zeros(1, 256) if x is None else x, **options)
        return str(raised.exception)

    def test_values(self):
        self.assertExpectedInline(
            self.refused(act="int4"),
            """trellis_gemm: act is 'int4', expected one of ('exact', 'int8')""",
        )
        self.assertExpectedInline(
            self.refused(act=None),
            """trellis_gemm: act is None, expected one of ('exact', 'int8')""",
        )
        self.assertExpectedInline(
            self.refused("mcg", act="int8"),
            """trellis_gemm: act int8 with codebook mcg, expected mul1""",
        )
        x = torch.zeros(1, 256, requires_grad=True)
        self.assertExpectedInline(
            self.refused(x=x, act="int8"),
            """trellis_gemm: x requires grad with act int8, expected act exact""",
        )

    def test_every_way_to_the_op(self):
        """A number that is no choice, and another codebook: direct, fake and on meta."""
        for codebook, act in (("mul1", 2), ("3inst", 1)):
            layer = make_layer(codebook, 3)
            tensors = [torch.zeros(1, 256), layer.trellis, layer.suh, layer.svh]
            rest = None, layer.code, 384, F32, act
            texts = set()
            with FakeTensorMode() as mode:
                fake = [mode.from_tensor(tensor) for tensor in tensors]
            for of in (tensors, fake, [tensor.to("meta") for tensor in tensors]):
                with self.assertRaises((ValueError, RuntimeError)) as raised:
                    OPS.trellis_gemm_act(*of, *rest)
                texts.add(str(raised.exception).splitlines()[0])
            self.assertEqual(len(texts), 1, texts)

    def test_another_device(self):
        layer = make_layer("mul1", 3)
        with FakeTensorMode():
            x, *parts = (
                torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                for tensor in (torch.zeros(1, 256), layer.trellis, layer.suh, layer.svh)
            )
            with self.assertRaises(ValueError) as raised:
                trellis_ops.trellis_gemm(x, *parts, codebook="mul1", act="int8")
        self.assertExpectedInline(
            str(raised.exception), """trellis_gemm: act int8 with x on cuda:0, expected cpu"""
        )
