"""TrellisTensor: what it accepts, what it stores, and its state dict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from expecttest import TestCase
from layers import CASES, double, make_layer, worst_row

from trellis_ops import TrellisTensor

F16 = torch.float16


def make(codebook: str = "mcg", bits: float = 3, **options) -> TrellisTensor:
    layer = make_layer(codebook, bits)
    return TrellisTensor(layer.trellis, layer.suh, layer.svh, codebook=codebook, **options)


def equal(a: TrellisTensor, b: TrellisTensor) -> None:
    for name in ("trellis", "suh", "svh"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    assert (a.bias is None) == (b.bias is None)
    assert a.bias is None or torch.equal(a.bias, b.bias)
    for name in ("codebook", "bits", "in_features", "out_features"):
        assert getattr(a, name) == getattr(b, name)


@pytest.mark.parametrize(("codebook", "bits"), CASES)
def test_state_dict_round_trip(codebook, bits):
    bias = torch.randn(300, dtype=F16)
    tensors = make(codebook, bits, bias=bias, in_features=200, out_features=300)
    state = tensors.state_dict("model.q_proj.")
    assert all(name.startswith("model.q_proj.") for name in state)
    state["model.k_proj.trellis"] = torch.zeros(1)
    back = TrellisTensor.from_state_dict(
        state,
        "model.q_proj.",
        in_features=200,
        out_features=300,
        codebook=codebook if codebook.startswith("sqg") else None,
    )
    equal(back, tensors)
    assert back.bits == bits
    assert back.bias.shape == (384,)
    assert torch.equal(back.bias[:300], bias)
    assert not back.bias[300:].any()


def test_sizes_bytes_and_device():
    tensors = make("mul1", 1.5, in_features=250, out_features=300)
    assert (tensors.in_features, tensors.out_features, tensors.bits) == (250, 300, 1.5)
    assert tensors.nbytes == 256 * 384 * 1.5 / 8 + 2 * (256 + 384)
    assert (make().in_features, make().out_features) == (256, 384)
    moved = make(bias=torch.ones(384)).to("meta")
    assert {moved.device.type, moved.bias.device.type, moved.svh.device.type} == {"meta"}


def test_dequantize_is_trimmed_and_in_the_orientation_of_linear():
    layer = make_layer()
    weight = make(in_features=200, out_features=300).dequantize(torch.float32)
    assert (weight.shape, weight.is_contiguous()) == ((300, 200), True)
    assert worst_row(weight, layer.weight()[:200, :300].T) <= 1e-6


def test_it_is_compared_by_identity_and_can_be_a_key():
    a, b = make(), make()
    assert a == a
    assert a != b
    assert len({a, b, a}) == 2


def test_legacy_sign_words():
    tensors = make("3inst", 4)
    random = np.random.default_rng(0)
    su, sv = (random.integers(-(2**15), 2**15, n, np.int16) for n in (16, 24))
    state = {"trellis": tensors.trellis, "su": torch.from_numpy(su), "sv": torch.from_numpy(sv)}
    back = TrellisTensor.from_state_dict(state)
    for vector, words in ((back.suh, su), (back.svh, sv)):
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        assert np.array_equal(double(vector), 1.0 - 2.0 * bits)
    both = TrellisTensor.from_state_dict({**state, "suh": tensors.suh})
    assert torch.equal(both.suh, tensors.suh)


class Refusals(TestCase):
    maxDiff = None

    def make(self, kind: type[Exception], codebook="mcg", bits=3, **changed) -> str:
        layer = make_layer("mcg", bits)
        fields = {"trellis": layer.trellis, "suh": layer.suh, "svh": layer.svh}
        with self.assertRaises(kind) as caught:
            TrellisTensor(**{**fields, **changed}, codebook=codebook)
        return str(caught.exception)

    def load(self, changed: dict, stored="mcg", bits=3, **options) -> str:
        state = {**make(stored, bits).state_dict("up."), **changed}
        state = {name: tensor for name, tensor in state.items() if tensor is not None}
        with self.assertRaises((ValueError, TypeError)) as caught:
            TrellisTensor.from_state_dict(state, "up.", **options)
        return str(caught.exception)

    def test_fields(self):
        layer = make_layer()
        self.assertExpectedInline(
            self.make(TypeError, trellis=layer.trellis.int()),
            """TrellisTensor: trellis has dtype int32, expected int16""",
        )
        self.assertExpectedInline(
            self.make(TypeError, trellis=None),
            """TrellisTensor: trellis is NoneType, expected a Tensor""",
        )
        self.assertExpectedInline(
            self.make(ValueError, trellis=layer.trellis[0]),
            """TrellisTensor: trellis has 2 dimensions, expected 3: [in/16, out/16, 16*bits]""",
        )
        self.assertExpectedInline(
            self.make(ValueError, suh=layer.svh),
            """TrellisTensor: suh has shape [384], expected [256] (in_features of the trellis)""",
        )
        self.assertExpectedInline(
            self.make(TypeError, svh=layer.svh.float()),
            """TrellisTensor: svh has dtype float32, expected float16""",
        )
        self.assertExpectedInline(
            self.make(TypeError, svh=None), """TrellisTensor: svh is NoneType, expected a Tensor"""
        )
        self.assertExpectedInline(
            self.make(ValueError, bias=torch.ones(383)),
            """TrellisTensor: bias has shape [383], expected [384]""",
        )
        self.assertExpectedInline(
            self.make(TypeError, bias=torch.ones(384).int()),
            """TrellisTensor: bias has dtype int32, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            self.make(ValueError, bits=2.5),
            """TrellisTensor: codebook mcg at 2.5 bits, expected mul1: half rates exist for mul1 only""",
        )
        self.assertExpectedInline(
            self.make(ValueError, codebook="sqg_fp16"),
            """TrellisTensor: codebook sqg_fp16 at 3 bits, expected bits in 5, 6""",
        )
        self.assertExpectedInline(
            self.make(ValueError, codebook="mcg "),
            """TrellisTensor: codebook is 'mcg ', expected one of ('3inst', 'mcg', 'mul1', 'sqg_e4m3', 'sqg_fp16')""",
        )
        self.assertExpectedInline(
            self.make(ValueError, in_features=128),
            """TrellisTensor: in_features is 128, expected 129 to 256""",
        )
        self.assertExpectedInline(
            self.make(ValueError, out_features=400),
            """TrellisTensor: out_features is 400, expected 257 to 384""",
        )
        self.assertExpectedInline(
            self.make(ValueError, in_features=-1),
            """TrellisTensor: in_features is -1, expected 129 to 256""",
        )
        self.assertExpectedInline(
            self.make(TypeError, out_features=300.0),
            """TrellisTensor: out_features is float, expected an int""",
        )
        self.assertExpectedInline(
            self.make(ValueError, suh=layer.suh.to("meta")),
            """TrellisTensor: suh is on meta, expected cpu (the device of trellis)""",
        )

    def test_state_dicts(self):
        mcg, mul1 = (make(name).state_dict("up.") for name in ("mcg", "mul1"))
        self.assertExpectedInline(self.load({"up.trellis": None}), """up.trellis: missing""")
        self.assertExpectedInline(
            self.load({"up.suh": None}), """up.suh: missing (and no legacy su)"""
        )
        self.assertExpectedInline(
            self.load({"up.svh": None}), """up.svh: missing (and no legacy sv)"""
        )
        self.assertExpectedInline(
            self.load({"up.scale": torch.ones(1)}),
            """up.scale: unknown tensor, expected one of ('trellis', 'suh', 'svh', 'bias', 'su', 'sv', 'mcg', 'mul1', 'sqg')""",
        )
        self.assertExpectedInline(
            self.load({"up.mul1": mul1["up.mul1"]}), """up.mcg and up.mul1: expected one marker"""
        )
        self.assertExpectedInline(
            self.load({"up.mcg": mcg["up.mcg"] ^ 1}),
            """up.mcg: value 0xcbac1fec, expected 0xcbac1fed""",
        )
        self.assertExpectedInline(
            self.load({"up.mcg": torch.ones(())}),
            """up.mcg: torch.float32 with 1 elements, expected one int32""",
        )

    def test_hints(self):
        self.assertExpectedInline(
            self.load({}, "sqg_e4m3", 5),
            """up.sqg: at 5 bits the marker fits sqg_e4m3 and sqg_fp16, expected codebook to say which""",
        )
        self.assertExpectedInline(
            self.load({}, "sqg_e4m3", 4, codebook="sqg_fp16"),
            """TrellisTensor: codebook sqg_fp16 at 4 bits, expected bits in 5, 6""",
        )
        self.assertExpectedInline(
            self.load({}, "mul1", 4, codebook="mcg"),
            """up.: the markers say codebook mul1, expected mcg""",
        )

    def test_damaged_tensors(self):
        trellis = make().trellis
        self.assertExpectedInline(
            self.load({"up.trellis": torch.tensor(3)}),
            """TrellisTensor (up.trellis): trellis has dtype int64, expected int16""",
        )
        self.assertExpectedInline(
            self.load({"up.trellis": trellis[..., :47]}),
            """TrellisTensor (up.trellis): trellis has 47 words per tile, expected 16 * bits with bits from 1 to 8, or 24, 40 or 56""",
        )
        self.assertExpectedInline(
            self.load({"up.trellis": trellis[..., :40]}),
            """TrellisTensor: codebook mcg at 2.5 bits, expected mul1: half rates exist for mul1 only""",
        )
        words = torch.zeros(16)
        self.assertExpectedInline(
            self.load({"up.suh": None, "up.su": words}),
            """up.su: torch.float32 [16], expected int16 [features/16]""",
        )
        self.assertExpectedInline(
            self.load({"up.suh": None, "up.su": words.short().view(4, 4)}),
            """up.su: torch.int16 [4, 4], expected int16 [features/16]""",
        )
        self.assertExpectedInline(
            self.load({"up.suh": None, "up.su": words[:8].short()}),
            """TrellisTensor: suh has shape [128], expected [256] (in_features of the trellis)""",
        )
