"""Every check's words: from the Python entry, the fake, a meta tensor, and the op called directly.

The expected texts are written by expecttest: EXPECTTEST_ACCEPT=1 pytest tests/test_moe_errors.py.
"""

from __future__ import annotations

import oracle
import pytest
import torch
from expecttest import TestCase
from experts import ACTIVATIONS, arguments, make_experts, options, routing
from torch._subclasses import FakeTensorMode

import trellis_ops

F16, F32 = torch.float16, torch.float32
OPS = torch.ops.trellis_ops
NAMES = (
    "x topk_ids topk_weights packed table gate_suh gate_svh up_suh up_svh down_suh down_svh gate_bias "
    "up_bias down_bias gate_codebook up_codebook down_codebook intermediate activation limit "
    "limit_after routed_scale out_dtype"
).split()


def message(call, *kinds: type[Exception]) -> str:
    """The first line of what a call raises, which must be one of the kinds."""
    try:
        call()
    except kinds as error:
        return str(error).splitlines()[0]
    raise AssertionError(f"nothing was raised, expected one of {kinds}")


def entry(op: str, values: dict) -> object:
    """The public function, given the op's own arguments."""
    given = dict(values)
    codes = [given.pop(f"{p}_codebook") for p in ("gate", "up", "down")]
    return getattr(trellis_ops, op)(
        **{**given, "activation": ACTIVATIONS[given["activation"]]},
        codebook=tuple(oracle.CODEBOOKS[code] for code in codes),
    )


class Messages(TestCase):
    maxDiff = None

    def refused(
        self, kind: type[Exception], *, public: bool = True, made: dict | None = None, **changed
    ) -> str:
        """The one text that all ways to all ops give, the op's name left out."""
        layout = make_experts(3, slices=2, intermediate=128, **(made or {})).layout()
        call = (torch.zeros(4, 256), *routing(4, 2, 3), *arguments(layout), *options(layout))
        values = dict(zip(NAMES, call, strict=True))
        assert changed.keys() <= values.keys()
        values.update(changed)
        texts = set()
        for op in ("rank_sliced_moe", "parity_moe", "rank_sliced_moe_inference", "moe_grad"):
            given = list(values.values())
            if op == "moe_grad":
                if "out_dtype" in changed:
                    continue
                given = [torch.zeros(4, 256), *given[:-1]]
            function = getattr(OPS, op)

            def mapped(convert, given=given):
                return [convert(a) if isinstance(a, torch.Tensor) else a for a in given]

            # The compiled kernels can raise RuntimeError only; those in Python keep the kind.
            found = {message(lambda f=function, g=given: f(*g), kind, RuntimeError)}
            meta = mapped(lambda t: t.to("meta"))
            found.add(message(lambda f=function, g=meta: f(*g), kind))
            with FakeTensorMode() as mode:
                fake = mapped(mode.from_tensor)
                found.add(message(lambda f=function, g=fake: f(*g), kind))
            if public and op in ("rank_sliced_moe", "parity_moe"):
                found.add(message(lambda op=op: entry(op, values), kind))
            assert len(found) == 1, found
            name, _, rest = found.pop().partition(": ")
            assert name == op.removesuffix("_inference")
            texts.add(rest)
        assert len(texts) == 1, texts
        return texts.pop()

    def test_routes(self):
        ids = torch.zeros(4, 2, dtype=torch.int64)
        self.assertExpectedInline(
            self.refused(TypeError, x=torch.zeros(4, 256).double()),
            """x has dtype float64, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, x=torch.zeros(())),
            """x has 0 dimensions, expected at least 1""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, x=torch.zeros(4, 128)),
            """x has 128 columns, expected 129 to 256 (the experts' hidden size is 256)""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, x=torch.zeros(4, 257)),
            """x has 257 columns, expected 129 to 256 (the experts' hidden size is 256)""",
        )
        self.assertExpectedInline(
            self.refused(TypeError, topk_ids=ids.short()),
            """topk_ids has dtype int16, expected int32 or int64""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, topk_ids=ids[:3]),
            """topk_ids has shape [3, 2], expected x's [4] and a last dimension top_k""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, topk_ids=ids[0]),
            """topk_ids has shape [2], expected x's [4] and a last dimension top_k""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, topk_ids=ids[:, :0]),
            """topk_ids has shape [4, 0], expected x's [4] and a last dimension top_k""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, x=torch.zeros(2, 2, 256)),
            """topk_ids has shape [4, 2], expected x's [2, 2] and a last dimension top_k""",
        )
        self.assertExpectedInline(
            self.refused(TypeError, topk_weights=ids),
            """topk_weights has dtype int64, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, topk_weights=torch.zeros(4, 3)),
            """topk_weights has shape [4, 3], expected [4, 2] (that of topk_ids)""",
        )

    def test_words_and_table(self):
        words = torch.zeros(64, dtype=torch.int16)
        table = torch.zeros(3, 3, 2, 2, dtype=torch.int64)
        self.assertExpectedInline(
            self.refused(TypeError, packed=words.int()),
            """packed has dtype int32, expected int16""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, packed=words.view(8, 8)),
            """packed has shape [8, 8], expected [words]""",
        )
        self.assertExpectedInline(
            self.refused(TypeError, table=table.int()), """table has dtype int32, expected int64"""
        )
        self.assertExpectedInline(
            self.refused(ValueError, table=table[:2]),
            """table has shape [2, 3, 2, 2], expected [3, experts, slices, 2]""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, table=table[0]),
            """table has shape [3, 2, 2], expected [3, experts, slices, 2]""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, table=table[:, :0]),
            """table has shape [3, 0, 2, 2], expected [3, experts, slices, 2]""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, table=table[..., :1]),
            """table has shape [3, 3, 2, 1], expected [3, experts, slices, 2]""",
        )

    def test_vectors(self):
        half = torch.zeros(6, 256, dtype=F16)
        narrow = half[:, :128]
        self.assertExpectedInline(
            self.refused(TypeError, up_suh=half.float()),
            """up_suh has dtype float32, expected float16""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, up_suh=half[0]),
            """up_suh has shape [256], expected [n, a multiple of 128]""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, up_svh=half[:, :100]),
            """up_svh has shape [6, 100], expected [n, a multiple of 128]""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, up_suh=half[:3]),
            """up_suh has shape [3, 256], expected [n, 256] with n = 6 or 2 or 1""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, gate_suh=narrow),
            """gate_suh has shape [6, 128], expected [n, 256] with n = 6 or 2 or 1""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, down_suh=half),
            """down_suh has shape [6, 256], expected [n, 128] with n = 6 or 2 or 1""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, down_svh=half[:0]),
            """down_svh has shape [0, 256], expected [n, 256] with n = 6 or 2 or 1""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, gate_suh=None),
            """gate_suh is None, expected a Tensor for silu""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, activation=3),
            """gate_suh is a Tensor, expected None for relu2""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, activation=3, gate_suh=None),
            """gate_svh is a Tensor, expected None for relu2""",
        )
        self.assertExpectedInline(
            self.refused(
                ValueError, activation=3, gate_suh=None, gate_svh=None, gate_bias=half[:, :128]
            ),
            """gate_bias is a Tensor, expected None for relu2""",
        )

    def test_biases(self):
        half = torch.zeros(6, 256, dtype=F16)
        self.assertExpectedInline(
            self.refused(TypeError, up_bias=half[:, :128].double()),
            """up_bias has dtype float64, expected float16 or bfloat16 or float32""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, gate_bias=half[:3, :128]),
            """gate_bias has shape [3, 128], expected [6, 128]""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, up_bias=half),
            """up_bias has shape [6, 256], expected [6, 128]""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, down_bias=half),
            """down_bias has shape [6, 256], expected [3, 256]""",
        )

    def test_numbers(self):
        self.assertExpectedInline(
            self.refused(ValueError, gate_codebook=5, public=False),
            """gate_codebook is 5, expected 0 to 4""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, down_codebook=-1, public=False),
            """down_codebook is -1, expected 0 to 4""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, intermediate=0), """intermediate is 0, expected 1 to 128"""
        )
        self.assertExpectedInline(
            self.refused(ValueError, intermediate=129), """intermediate is 129, expected 1 to 128"""
        )
        self.assertExpectedInline(
            self.refused(ValueError, intermediate=100),
            """intermediate is 100, expected 128 (all of a slice, as there are 2 slices)""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, activation=5, public=False),
            """activation is 5, expected 0 to 4""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, limit=-1.5),
            """limit is -1.5, expected 0 or a finite positive number""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, limit=float("inf")),
            """limit is inf, expected 0 or a finite positive number""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, limit=float("nan")),
            """limit is nan, expected 0 or a finite positive number""",
        )
        ungated = {"gated": False}
        self.assertExpectedInline(
            self.refused(ValueError, activation=3, limit=7.0, made=ungated),
            """limit is 7, expected 0 for relu2""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, activation=4, limit_after=True),
            """limit_after is True, expected False for swiglu_oai""",
        )
        self.assertExpectedInline(
            self.refused(ValueError, routed_scale=float("inf")),
            """routed_scale is inf, expected a finite number""",
        )
        self.assertExpectedInline(
            self.refused(TypeError, out_dtype=torch.float64),
            """out_dtype is float64, expected float16 or bfloat16 or float32""",
        )

    def test_python_entry_only(self):
        layout = make_experts(3, intermediate=128).layout()

        def text(x=None, *, changed=(), **options) -> str:
            tensors = dict(zip(NAMES[3:14], arguments(layout), strict=True))
            tensors.update(changed)
            call = {"codebook": "mcg", **options}
            x = torch.zeros(4, 256) if x is None else x
            return message(
                lambda: trellis_ops.rank_sliced_moe(x, *routing(4, 2, 3), **tensors, **call),
                TypeError,
                ValueError,
            )

        self.assertExpectedInline(text([1.0]), """rank_sliced_moe: x is list, expected a Tensor""")
        self.assertExpectedInline(
            text(codebook="qtip"),
            """rank_sliced_moe: codebook is 'qtip', expected one of ('3inst', 'mcg', 'mul1', 'sqg_e4m3', 'sqg_fp16')""",
        )
        self.assertExpectedInline(
            text(codebook=("mcg", "mcg")),
            """rank_sliced_moe: codebook is ('mcg', 'mcg'), expected a name, or a tuple of three for gate, up and down""",
        )
        self.assertExpectedInline(
            text(codebook=3),
            """rank_sliced_moe: codebook is 3, expected a name, or a tuple of three for gate, up and down""",
        )
        self.assertExpectedInline(
            text(activation="swish"),
            """rank_sliced_moe: activation is 'swish', expected one of ('silu', 'gelu', 'gelu_tanh', 'relu2', 'swiglu_oai')""",
        )
        self.assertExpectedInline(
            text(intermediate=2.0), """rank_sliced_moe: intermediate is float, expected an int"""
        )
        self.assertExpectedInline(
            text(out_dtype="float16"),
            """rank_sliced_moe: out_dtype is str, expected a torch.dtype""",
        )
        self.assertExpectedInline(
            text(changed={"up_svh": None}),
            """rank_sliced_moe: up_svh is NoneType, expected a Tensor""",
        )
        self.assertExpectedInline(
            text(changed={"packed": None}),
            """rank_sliced_moe: packed is NoneType, expected a Tensor""",
        )

    def test_devices(self):
        layout = make_experts(3, intermediate=128).layout()
        for name in NAMES[1:11]:
            call = (torch.zeros(4, 256), *routing(4, 2, 3), *arguments(layout))
            values = dict(zip(NAMES, call, strict=False))
            values[name] = values[name].to("meta")
            text = message(
                lambda v=values: trellis_ops.rank_sliced_moe(**v, codebook="mcg"), ValueError
            )
            assert text == (f"rank_sliced_moe: {name} is on meta, expected cpu (the device of x)")

    def test_gradient(self):
        layout = make_experts(3, intermediate=128).layout()
        x = torch.zeros(4, 256)
        rest = (x, *routing(4, 2, 3), *arguments(layout), *options(layout)[:-1])
        for grad, kind in ((torch.zeros(4, 255), ValueError), (x.double(), TypeError)):
            text = message(lambda g=grad: OPS.moe_grad(g, *rest), kind)
            assert text in (
                "moe_grad: grad has shape [4, 255], expected [4, 256] (that of x)",
                "moe_grad: grad has dtype float64, expected float16 or bfloat16 or float32",
            )

    def test_workspace(self):
        layout = make_experts(3, intermediate=128).layout()
        call = (torch.zeros(4, 256), *routing(4, 2, 3), *arguments(layout), *options(layout))
        planned = OPS.rank_sliced_moe_planned

        def text(workspace) -> str:
            found = {
                message(lambda: planned(*call, workspace), TypeError, ValueError, RuntimeError)
            }
            with FakeTensorMode() as mode:
                fake = [
                    mode.from_tensor(a) if isinstance(a, torch.Tensor) else a
                    for a in (*call, workspace)
                ]
                found.add(message(lambda: planned(*fake), TypeError, ValueError))
            assert len(found) == 1, found
            return found.pop()

        wide = torch.zeros(1 << 20, dtype=torch.uint8)
        self.assertExpectedInline(
            text(wide.char()), """rank_sliced_moe: workspace has dtype int8, expected uint8"""
        )
        self.assertExpectedInline(
            text(wide[::2]),
            """rank_sliced_moe: workspace has shape [524288] and strides [2], expected [bytes], contiguous""",
        )
        short = message(lambda: planned(*call, wide[:1000]), RuntimeError)
        self.assertExpectedInline(
            short,
            """rank_sliced_moe: workspace has 1000 bytes, expected at least 33280 for 4 tokens""",
        )


@pytest.mark.parametrize("op", ["rank_sliced_moe", "parity_moe", "moe_grad"])
@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((2, 1, 0, 0), 1 << 40),
        ((0, 1, 0, 0), -8),
        ((1, 1, 0, 1), 47),
        ((1, 1, 0, 1), 24),
        ((0, 1, 0, 1), 0),
    ],
)
def test_a_bad_entry_of_an_expert_that_is_hit(op, place, value):
    """The table is data, which only the kernels see; a layout would have refused it."""
    layout = make_experts(3, intermediate=128).layout()
    tensors = list(arguments(layout))
    tensors[1] = tensors[1].clone()
    tensors[1][place] = value
    x, weights = torch.ones(2, 256), torch.ones(2, 1)
    projection = ("gate", "up", "down")[place[0]]
    entry = tuple(tensors[1][place[:-1]].tolist())

    def call(ids):
        after = options(layout)
        before = (x,) if op == "moe_grad" else ()
        after = after[:-1] if op == "moe_grad" else after
        return getattr(OPS, op)(*before, x, ids, weights, *tensors, *after)

    with pytest.raises((ValueError, RuntimeError)) as caught:
        call(torch.tensor([[0], [1]]))
    assert str(caught.value).splitlines()[0] == (
        f"{op}: table has {entry} for {projection} of expert 1, rank 0, expected a rate "
        f"of its codebook, and a matrix within the {len(tensors[0])} words of packed"
    )
    call(torch.tensor([[0], [2]]))  # nobody asks for expert 1
