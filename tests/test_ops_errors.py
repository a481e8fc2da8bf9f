"""Every check's words: from the Python entry, the fake, a meta tensor, and the op called directly.

The expected texts are written by expecttest: EXPECTTEST_ACCEPT=1 pytest tests/test_ops_errors.py.
"""

from __future__ import annotations

import oracle
import torch
from expecttest import TestCase
from layers import closed_states, make_layer
from torch._subclasses import FakeTensorMode

import trellis_ops

F16, F32, F64 = torch.float16, torch.float32, torch.float64
OPS = torch.ops.trellis_ops
GEMMS = ("trellis_gemm", "parity_gemm", "trellis_gemm_inference")


def message(call, *kinds: type[Exception]) -> str:
    """The first line of what a call raises, which must be one of the kinds."""
    try:
        call()
    except kinds as error:
        return str(error).splitlines()[0]
    raise AssertionError(f"nothing was raised, expected one of {kinds}")


def entry(op: str, arguments: list) -> object:
    """The public function, given the op's own arguments."""
    if op in GEMMS:
        *tensors, code, out_features, out_dtype = arguments
        return getattr(trellis_ops, op.removesuffix("_inference"))(
            *tensors,
            codebook=oracle.CODEBOOKS[code],
            out_features=out_features,
            out_dtype=out_dtype,
        )
    if op == "dequantize":
        *tensors, code, dtype = arguments
        return trellis_ops.dequantize(*tensors, codebook=oracle.CODEBOOKS[code], dtype=dtype)
    if op == "quantize_tiles":
        tiles, words, code = arguments
        return trellis_ops.quantize_tiles(tiles, words / 16, codebook=oracle.CODEBOOKS[code])
    if op == "pack_trellis":
        return trellis_ops.pack_trellis(arguments[0], arguments[1] / 16)
    return getattr(trellis_ops, op)(*arguments)


def mapped(arguments: list, function) -> list:
    return [function(a) if isinstance(a, torch.Tensor) else a for a in arguments]


class Messages(TestCase):
    maxDiff = None

    def refused(
        self, kind: type[Exception], op: str, arguments: list, *, public: bool = True
    ) -> str:
        """The one text that all ways to the op give for these arguments."""
        # The compiled kernels can raise RuntimeError only; those in Python keep the kind.
        texts = {"direct": message(lambda: getattr(OPS, op)(*arguments), kind, RuntimeError)}
        if public:
            texts["entry"] = message(lambda: entry(op, arguments), kind)
        meta = mapped(arguments, lambda t: t.to("meta"))
        texts["meta"] = message(lambda: getattr(OPS, op)(*meta), kind)
        with FakeTensorMode() as mode:
            fake = mapped(arguments, mode.from_tensor)
            texts["fake"] = message(lambda: getattr(OPS, op)(*fake), kind)
        assert len(set(texts.values())) == 1, texts
        return texts["direct"]

    def gemm(self, kind: type[Exception], public: bool = True, **changed) -> str:
        """The text of the gemms with some arguments replaced, the op's name left out."""
        layer = make_layer()
        arguments = {
            "x": torch.zeros(3, 256),
            "trellis": layer.trellis,
            "suh": layer.suh,
            "svh": layer.svh,
            "bias": None,
            "codebook": 1,
            "out_features": 384,
            "out_dtype": F32,
        }
        assert changed.keys() <= arguments.keys()
        values = list({**arguments, **changed}.values())
        texts = {self.refused(kind, op, values, public=public) for op in GEMMS}
        rests = {text.removeprefix("trellis_gemm").removeprefix("parity_gemm") for text in texts}
        assert len(texts) == 2, texts
        assert len(rests) == 1, rests
        return rests.pop()

    # ---- the gemms ----------------------------------------------------------------------------

    def test_x(self):
        self.assertExpectedInline(
            self.gemm(TypeError, x=torch.zeros(3, 256, dtype=F64)),
            """: x has dtype float64, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            self.gemm(TypeError, x=torch.zeros(3, 256).int()),
            """: x has dtype int32, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            self.gemm(TypeError, x=torch.zeros(3, 256, dtype=torch.complex64)),
            """: x has dtype complex64, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            self.gemm(TypeError, x=torch.zeros(3, 256).to(torch.float8_e4m3fn)),
            """: x has dtype float8_e4m3fn, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, x=torch.zeros(())),
            """: x has 0 dimensions, expected at least 1""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, x=torch.zeros(3, 128)),
            """: x has 128 columns, expected 129 to 256 (in_features of the trellis is 256)""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, x=torch.zeros(0, 257)),
            """: x has 257 columns, expected 129 to 256 (in_features of the trellis is 256)""",
        )

    def test_trellis(self):
        def words(count: int) -> torch.Tensor:
            return torch.zeros(16, 24, count, dtype=torch.int16)

        self.assertExpectedInline(
            self.gemm(TypeError, trellis=words(48).int()),
            """: trellis has dtype int32, expected int16""",
        )
        self.assertExpectedInline(
            self.gemm(TypeError, trellis=words(48).to(torch.uint16)),
            """: trellis has dtype uint16, expected int16""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, trellis=words(48)[0]),
            """: trellis has 2 dimensions, expected 3: [in/16, out/16, 16*bits]""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, trellis=words(0)),
            """: trellis has 0 words per tile, expected 16 * bits with bits from 1 to 8, or 24, 40 or 56""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, trellis=words(47)),
            """: trellis has 47 words per tile, expected 16 * bits with bits from 1 to 8, or 24, 40 or 56""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, trellis=words(72)),
            """: trellis has 72 words per tile, expected 16 * bits with bits from 1 to 8, or 24, 40 or 56""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, trellis=words(144)),
            """: trellis has 144 words per tile, expected 16 * bits with bits from 1 to 8, or 24, 40 or 56""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, trellis=words(24)),
            """: codebook mcg at 1.5 bits, expected mul1: half rates exist for mul1 only""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, trellis=words(40), codebook=3),
            """: codebook sqg_e4m3 at 2.5 bits, expected mul1: half rates exist for mul1 only""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, trellis=words(16), codebook=3),
            """: codebook sqg_e4m3 at 1 bits, expected bits in 2, 3, 4, 5, 6""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, trellis=words(112), codebook=3),
            """: codebook sqg_e4m3 at 7 bits, expected bits in 2, 3, 4, 5, 6""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, trellis=words(64), codebook=4),
            """: codebook sqg_fp16 at 4 bits, expected bits in 5, 6""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, codebook=5, public=False), """: codebook is 5, expected 0 to 4"""
        )
        self.assertExpectedInline(
            self.gemm(ValueError, codebook=-1, public=False),
            """: codebook is -1, expected 0 to 4""",
        )

    def test_scales(self):
        self.assertExpectedInline(
            self.gemm(TypeError, suh=torch.ones(256)),
            """: suh has dtype float32, expected float16""",
        )
        self.assertExpectedInline(
            self.gemm(TypeError, svh=torch.ones(384, dtype=torch.bfloat16)),
            """: svh has dtype bfloat16, expected float16""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, suh=torch.ones(384, dtype=F16)),
            """: suh has shape [384], expected [256] (in_features of the trellis)""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, svh=torch.ones(1, 384, dtype=F16)),
            """: svh has shape [1, 384], expected [384] (out_features of the trellis)""",
        )
        ragged = {"trellis": torch.zeros(15, 23, 48, dtype=torch.int16), "x": torch.zeros(3, 240)}
        self.assertExpectedInline(
            self.gemm(ValueError, suh=torch.ones(240, dtype=F16), **ragged),
            """: trellis has 240 in_features, expected a multiple of 128 where suh is given""",
        )
        ragged["out_features"] = 368
        self.assertExpectedInline(
            self.gemm(ValueError, suh=None, svh=torch.ones(368, dtype=F16), **ragged),
            """: trellis has 368 out_features, expected a multiple of 128 where svh is given""",
        )

    def test_out_features_and_dtype(self):
        self.assertExpectedInline(
            self.gemm(ValueError, out_features=385),
            """: out_features is 385, expected 257 to 384""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, out_features=256),
            """: out_features is 256, expected 257 to 384""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, out_features=-3), """: out_features is -3, expected 257 to 384"""
        )
        small = {"trellis": torch.zeros(16, 4, 48, dtype=torch.int16), "svh": None}
        self.assertExpectedInline(
            self.gemm(ValueError, out_features=0, **small),
            """: out_features is 0, expected 1 to 64""",
        )
        self.assertExpectedInline(
            self.gemm(TypeError, out_dtype=F64),
            """: out_dtype is float64, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            self.gemm(TypeError, out_dtype=torch.int8),
            """: out_dtype is int8, expected float16 or bfloat16 or float32""",
        )

    def test_bias(self):
        self.assertExpectedInline(
            self.gemm(TypeError, bias=torch.ones(384, dtype=F64)),
            """: bias has dtype float64, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, bias=torch.ones(300)),
            """: bias has shape [300], expected [384]""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, bias=torch.ones(299), out_features=300),
            """: bias has shape [299], expected [300] or [384]""",
        )
        self.assertExpectedInline(
            self.gemm(ValueError, bias=torch.ones(1, 384)),
            """: bias has shape [1, 384], expected [384]""",
        )

    def test_devices(self):
        """A device of its own is all that the meta device can stand for here."""
        layer = make_layer()
        x, bias = torch.zeros(3, 256), torch.zeros(384)
        weights = (layer.trellis, layer.suh, layer.svh, bias)

        def with_one_on_meta(position: int) -> str:
            tensors = [x, *weights]
            tensors[position] = tensors[position].to("meta")
            arguments = [*tensors, 1, 384, F32]
            texts = {
                message(lambda: entry("trellis_gemm", arguments), ValueError),
                message(lambda: OPS.trellis_gemm(*arguments), ValueError),
                message(lambda: OPS.trellis_gemm_inference(*arguments), ValueError),
            }
            assert len(texts) == 1, texts
            return texts.pop()

        self.assertExpectedInline(
            with_one_on_meta(0),
            """trellis_gemm: trellis is on cpu, expected meta (the device of x)""",
        )
        self.assertExpectedInline(
            with_one_on_meta(1),
            """trellis_gemm: suh is on cpu, expected meta (the device of trellis)""",
        )
        self.assertExpectedInline(
            with_one_on_meta(2),
            """trellis_gemm: suh is on meta, expected cpu (the device of trellis)""",
        )
        self.assertExpectedInline(
            with_one_on_meta(3),
            """trellis_gemm: svh is on meta, expected cpu (the device of trellis)""",
        )
        self.assertExpectedInline(
            with_one_on_meta(4), """trellis_gemm: bias is on meta, expected cpu (the device of x)"""
        )

    def test_what_only_the_python_entry_can_see(self):
        layer = make_layer()
        tensors = {"trellis": layer.trellis, "suh": layer.suh, "svh": layer.svh}

        def text(kind, x=None, codebook="mcg", **changed):
            x = torch.zeros(3, 256) if x is None else x
            arguments = {**tensors, **changed}
            return message(
                lambda: trellis_ops.trellis_gemm(x, **arguments, codebook=codebook), kind
            )

        self.assertExpectedInline(
            text(TypeError, x=[1.0]), """trellis_gemm: x is list, expected a Tensor"""
        )
        self.assertExpectedInline(
            text(TypeError, trellis=None),
            """trellis_gemm: trellis is NoneType, expected a Tensor""",
        )
        self.assertExpectedInline(
            text(TypeError, suh=2.0), """trellis_gemm: suh is float, expected a Tensor"""
        )
        self.assertExpectedInline(
            text(TypeError, bias=[0.0]), """trellis_gemm: bias is list, expected a Tensor"""
        )
        self.assertExpectedInline(
            text(ValueError, codebook="sqg"),
            """trellis_gemm: codebook is 'sqg', expected one of ('3inst', 'mcg', 'mul1', 'sqg_e4m3', 'sqg_fp16')""",
        )
        self.assertExpectedInline(
            text(TypeError, codebook=None),
            """trellis_gemm: codebook is NoneType, expected one of ('3inst', 'mcg', 'mul1', 'sqg_e4m3', 'sqg_fp16')""",
        )
        self.assertExpectedInline(
            text(TypeError, out_features="384"),
            """trellis_gemm: out_features is str, expected an int""",
        )
        self.assertExpectedInline(
            text(TypeError, out_features=384.0),
            """trellis_gemm: out_features is float, expected an int""",
        )
        self.assertExpectedInline(
            text(TypeError, out_dtype="float32"),
            """trellis_gemm: out_dtype is str, expected a torch.dtype""",
        )

    def test_frozen_arguments(self):
        layer = make_layer()
        x = torch.zeros(1, 256)
        for name in ("suh", "svh", "bias"):
            tensors = {"suh": layer.suh, "svh": layer.svh, "bias": torch.zeros(384)}
            tensors[name] = tensors[name].clone().requires_grad_()

            def call(tensors=tensors):
                return trellis_ops.trellis_gemm(x, layer.trellis, **tensors, codebook="mcg")

            got = message(call, ValueError)
            assert got == f"trellis_gemm: {name} requires grad, expected a frozen tensor"
            with torch.no_grad():
                assert call().shape == (1, 384)
        self.assertExpectedInline(
            message(
                lambda: trellis_ops.dequantize(
                    layer.trellis, layer.suh.clone().requires_grad_(), codebook="mcg"
                ),
                ValueError,
            ),
            """dequantize: suh requires grad, expected a frozen tensor""",
        )

    # ---- the others ---------------------------------------------------------------------------

    def test_gemm_input_grad(self):
        layer = make_layer()

        def text(kind, grad=None, in_features=256, dtype=F32, suh=layer.suh):
            grad = torch.zeros(3, 384) if grad is None else grad
            arguments = [grad, layer.trellis, suh, layer.svh, 1, in_features, dtype]
            return self.refused(kind, "gemm_input_grad", arguments, public=False)

        self.assertExpectedInline(
            text(ValueError, grad=torch.zeros(3, 256)),
            """gemm_input_grad: grad has 256 columns, expected 257 to 384 (out_features of the trellis is 384)""",
        )
        self.assertExpectedInline(
            text(TypeError, grad=torch.zeros(3, 384).long()),
            """gemm_input_grad: grad has dtype int64, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            text(ValueError, in_features=128),
            """gemm_input_grad: in_features is 128, expected 129 to 256""",
        )
        self.assertExpectedInline(
            text(TypeError, dtype=F64),
            """gemm_input_grad: out_dtype is float64, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            text(ValueError, suh=layer.svh),
            """gemm_input_grad: suh has shape [384], expected [256] (in_features of the trellis)""",
        )

    def test_dequantize(self):
        layer = make_layer()

        def text(kind, trellis=layer.trellis, suh=None, svh=None, dtype=F16, code=1):
            return self.refused(kind, "dequantize", [trellis, suh, svh, code, dtype])

        self.assertExpectedInline(
            text(TypeError, trellis=layer.trellis.float()),
            """dequantize: trellis has dtype float32, expected int16""",
        )
        self.assertExpectedInline(
            text(ValueError, trellis=layer.trellis[..., :17]),
            """dequantize: trellis has 17 words per tile, expected 16 * bits with bits from 1 to 8, or 24, 40 or 56""",
        )
        self.assertExpectedInline(
            text(ValueError, suh=layer.svh),
            """dequantize: suh has shape [384], expected [256] (in_features of the trellis)""",
        )
        self.assertExpectedInline(
            text(TypeError, svh=layer.svh.float()),
            """dequantize: svh has dtype float32, expected float16""",
        )
        self.assertExpectedInline(
            text(TypeError, dtype=F64),
            """dequantize: dtype is float64, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            text(ValueError, code=4),
            """dequantize: codebook sqg_fp16 at 3 bits, expected bits in 5, 6""",
        )

    def test_hadamard(self):
        def text(kind, x):
            return self.refused(kind, "hadamard_128", [x])

        self.assertExpectedInline(
            text(TypeError, torch.zeros(128, dtype=F64)),
            """hadamard_128: x has dtype float64, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            text(ValueError, torch.zeros(128, 4)),
            """hadamard_128: x has shape [128, 4], expected a last dimension that is a multiple of 128""",
        )
        self.assertExpectedInline(
            text(ValueError, torch.zeros(())),
            """hadamard_128: x has shape [], expected a last dimension that is a multiple of 128""",
        )

    def test_unpack_and_pack(self):
        trellis = make_layer().trellis

        def unpack(kind, trellis):
            return self.refused(kind, "unpack_trellis", [trellis])

        self.assertExpectedInline(
            unpack(TypeError, trellis.long()),
            """unpack_trellis: trellis has dtype int64, expected int16""",
        )
        self.assertExpectedInline(
            unpack(ValueError, trellis[0]),
            """unpack_trellis: trellis has 2 dimensions, expected 3: [in/16, out/16, 16*bits]""",
        )
        self.assertExpectedInline(
            unpack(ValueError, trellis[..., :20]),
            """unpack_trellis: trellis has 20 words per tile, expected 16 * bits with bits from 1 to 8, or 24, 40 or 56""",
        )

        states = closed_states(3, 4)

        def pack(kind, states, words=48, public=True):
            return self.refused(kind, "pack_trellis", [states, words], public=public)

        self.assertExpectedInline(
            pack(TypeError, states.float()),
            """pack_trellis: states has dtype float32, expected int32 or int64""",
        )
        self.assertExpectedInline(
            pack(ValueError, states[:, :255]),
            """pack_trellis: states has shape [4, 255], expected [..., 256]""",
        )
        self.assertExpectedInline(
            pack(ValueError, states, words=20, public=False),
            """pack_trellis: states has 20 words per tile, expected 16 * bits with bits from 1 to 8, or 24, 40 or 56""",
        )

        def data(states, bits=3):
            direct = message(lambda: OPS.pack_trellis(states, int(16 * bits)), ValueError)
            assert message(lambda: trellis_ops.pack_trellis(states, bits), ValueError) == direct
            return direct

        broken = states.clone()
        broken[2, 255] ^= 1
        self.assertExpectedInline(
            data(broken),
            """pack_trellis: states of tile 2 are no closed path at 3 bits, expected each state to continue the one before it""",
        )
        self.assertExpectedInline(
            data(states, bits=3.5),
            """pack_trellis: states of tile 0 are no closed path at 3.5 bits, expected each state to continue the one before it""",
        )
        broken = states.long()
        broken[1] += 1 << 16
        self.assertExpectedInline(
            data(broken.unflatten(0, (2, 2))),
            """pack_trellis: states of tile 1 are no closed path at 3 bits, expected each state to continue the one before it""",
        )

    def test_quantize_tiles(self):
        def text(kind, tiles, words=48, code=1, public=True):
            got = self.refused(kind, "quantize_tiles", [tiles, words, code], public=public)
            isa = message(lambda: OPS._quantize_tiles_isa(tiles, words, code, 0), RuntimeError)
            assert isa == got
            return got

        self.assertExpectedInline(
            text(TypeError, torch.zeros(2, 256, dtype=F16)),
            """quantize_tiles: tiles has dtype float16, expected float32""",
        )
        self.assertExpectedInline(
            text(ValueError, torch.zeros(256)),
            """quantize_tiles: tiles has shape [256], expected [T, 256]""",
        )
        self.assertExpectedInline(
            text(ValueError, torch.zeros(256, 16)),
            """quantize_tiles: tiles has shape [256, 16], expected [T, 256]""",
        )
        self.assertExpectedInline(
            text(ValueError, torch.zeros(2, 256), words=56),
            """quantize_tiles: codebook mcg at 3.5 bits, expected mul1: half rates exist for mul1 only""",
        )
        self.assertExpectedInline(
            text(ValueError, torch.zeros(2, 256), words=32, code=4),
            """quantize_tiles: codebook sqg_fp16 at 2 bits, expected bits in 5, 6""",
        )
        self.assertExpectedInline(
            text(ValueError, torch.zeros(2, 256), words=129, public=False),
            """quantize_tiles: tiles has 129 words per tile, expected 16 * bits with bits from 1 to 8, or 24, 40 or 56""",
        )
        self.assertExpectedInline(
            text(ValueError, torch.zeros(2, 256), code=7, public=False),
            """quantize_tiles: codebook is 7, expected 0 to 4""",
        )
        for isa in (-1, 9, 62, 63, 1 << 40):
            got = message(
                lambda isa=isa: OPS._quantize_tiles_isa(torch.zeros(2, 256), 48, 1, isa),
                RuntimeError,
            )
            want = f"quantize_tiles: isa is {isa}, expected one that this machine can run"
            assert got == want

    def test_rates(self):
        tiles = torch.zeros(1, 256)

        def text(bits):
            got = message(
                lambda: trellis_ops.quantize_tiles(tiles, bits, codebook="mul1"), ValueError
            )
            pack = message(lambda: trellis_ops.pack_trellis(tiles.int(), bits), ValueError)
            assert pack == got.replace("quantize_tiles", "pack_trellis")
            return got

        self.assertExpectedInline(
            text(0),
            """quantize_tiles: bits is 0, expected an integer from 1 to 8, or 1.5, 2.5 or 3.5""",
        )
        self.assertExpectedInline(
            text(9),
            """quantize_tiles: bits is 9, expected an integer from 1 to 8, or 1.5, 2.5 or 3.5""",
        )
        self.assertExpectedInline(
            text(4.5),
            """quantize_tiles: bits is 4.5, expected an integer from 1 to 8, or 1.5, 2.5 or 3.5""",
        )
        self.assertExpectedInline(
            text("4"),
            """quantize_tiles: bits is '4', expected an integer from 1 to 8, or 1.5, 2.5 or 3.5""",
        )
        self.assertExpectedInline(
            text(float("nan")),
            """quantize_tiles: bits is nan, expected an integer from 1 to 8, or 1.5, 2.5 or 3.5""",
        )
        self.assertExpectedInline(
            text(-float("inf")),
            """quantize_tiles: bits is -inf, expected an integer from 1 to 8, or 1.5, 2.5 or 3.5""",
        )
        self.assertExpectedInline(
            text(None),
            """quantize_tiles: bits is None, expected an integer from 1 to 8, or 1.5, 2.5 or 3.5""",
        )
