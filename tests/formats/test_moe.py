"""MoeLayout: what it holds, how it is filled piece by piece, and what it refuses."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from expecttest import TestCase
from experts import PROJECTIONS, make_experts

from trellis_ops import MoeFiller, MoeLayout
from trellis_ops.formats.moe import TENSORS, Entry
from trellis_ops.formats.moe_build import layout_of, layout_of_stacks

MIXED = {"gate": (3, 4, 5), "up": (5, 3, 3), "down": (4, 6, 2)}


def mixed(**changed):
    return make_experts(3, bits=lambda p, e: MIXED[p][e], **changed)


def same(a: MoeLayout, b: MoeLayout) -> None:
    assert (a.codebooks, a.hidden, a.intermediate, a.entries) == (
        b.codebooks,
        b.hidden,
        b.intermediate,
        b.entries,
    )
    assert a.tensors().keys() == b.tensors().keys()
    for name, tensor in a.tensors().items():
        assert torch.equal(tensor, b.tensors()[name]), name


# ---- contents ---------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("absent", [(), (1,)])
def test_every_matrix_comes_back_out(slices, absent):
    experts = mixed(slices=slices, hidden=200, intermediate=256, biases=True, absent=absent)
    layout = experts.layout()
    assert (layout.experts, layout.slices) == (3, slices)
    assert (layout.hidden, layout.hidden_padded) == (200, 256)
    assert (layout.intermediate, layout.intermediate_padded) == (256, 256)
    seen = 0
    for projection, e, r in itertools.product(PROJECTIONS, range(3), range(slices)):
        if e in absent:
            with pytest.raises(ValueError, match=f"{projection} of expert {e}, rank {r} is absent"):
                layout.matrix(projection, e, r)
            continue
        given, got = getattr(experts, projection)[e][r], layout.matrix(projection, e, r)
        for name in ("trellis", "suh", "svh"):
            assert torch.equal(getattr(got, name), getattr(given, name))
        assert (got.bias is None) == (given.bias is None)
        assert got.bias is None or torch.equal(got.bias, given.bias)
        assert (got.codebook, got.bits) == (given.codebook, MIXED[projection][e])
        assert (got.in_features, got.out_features) == (given.in_features, given.out_features)
        assert (
            got.trellis.untyped_storage().data_ptr() == layout.packed.untyped_storage().data_ptr()
        )
        seen += got.trellis.numel()
    assert seen == layout.packed.numel()
    rates = [MIXED[p][e] for p in PROJECTIONS for e in range(3) if e not in absent]
    assert layout.bits == sum(rates) / len(rates)
    assert layout.nbytes == sum(t.nbytes for t in layout.tensors().values())


def test_stacks_make_the_same_layout_as_lists():
    experts = make_experts(4, hidden=200, intermediate=300, codebook="mul1", biases=True)

    def stack(projection):
        parts = [ranks[0] for ranks in getattr(experts, projection)]
        return [
            torch.stack([getattr(t, kind) for t in parts]) for kind in ("trellis", "suh", "svh")
        ]

    def bias(projection):
        return torch.stack([ranks[0].bias for ranks in getattr(experts, projection)])

    stacked = layout_of_stacks(
        stack("gate"),
        stack("up"),
        stack("down"),
        codebook="mul1",
        gate_bias=bias("gate"),
        up_bias=bias("up"),
        down_bias=bias("down"),
        hidden=200,
        intermediate=300,
    )
    same(stacked, experts.layout())
    ungated = make_experts(3, gated=False)
    experts = ungated
    stacked = layout_of_stacks(None, stack("up"), stack("down"), codebook="mcg")
    same(stacked, ungated.layout())
    assert not stacked.gated


def test_devices():
    layout = mixed(biases=True).layout()
    meta = layout.to("meta")
    assert {t.device.type for t in meta.tensors().values()} == {"meta"}
    assert meta.entries == layout.entries
    assert meta.bits == layout.bits
    empty = meta.materialize()
    assert torch.equal(empty.table, layout.table)
    assert not empty.packed.any()
    for name, tensor in layout.tensors().items():
        assert (empty.tensors()[name].shape, empty.tensors()[name].dtype) == (
            tensor.shape,
            tensor.dtype,
        )
    same(layout.to("cpu"), layout)


# ---- filling ----------------------------------------------------------------------------------


def pieces_of(experts, shared=()):
    """What a checkpoint would hold, in any order: (projection, expert, rank, kind, tensor)."""
    pieces = []
    for projection in PROJECTIONS:
        held = [(e, ranks) for e, ranks in enumerate(getattr(experts, projection) or ()) if ranks]
        for kind in ("trellis", "suh", "svh", "bias"):
            common = f"{projection}_{kind}" in shared
            for e, ranks in held[:1] if common else held:
                for r, t in enumerate(ranks):
                    if getattr(t, kind) is not None:
                        pieces.append(
                            (projection, None if common else e, r, kind, getattr(t, kind))
                        )
    random.Random(0).shuffle(pieces)
    return pieces


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("absent", [(), (0, 2)])
@pytest.mark.parametrize("on_meta_first", [False, True])
def test_filled_piece_by_piece(slices, absent, on_meta_first):
    experts = mixed(slices=slices, hidden=200, intermediate=256, biases=True, absent=absent)
    layout = MoeLayout.empty(
        tuple([None if e in absent else MIXED[p][e] for e in range(3)] for p in PROJECTIONS),
        experts=3,
        slices=slices,
        hidden=200,
        intermediate=256,
        biases=("gate_bias", "up_bias", "down_bias"),
        device="meta" if on_meta_first else None,
    )
    filler = MoeFiller(layout.materialize() if on_meta_first else layout)
    pieces = pieces_of(experts)
    for piece in pieces:
        assert len(filler.missing()) > 0
        filler.put(*piece)
    assert filler.missing() == []
    same(filler.finish(), experts.layout())


@pytest.mark.parametrize("one_suh", [False, True])
def test_vectors_that_all_experts_share_come_once(one_suh):
    experts = make_experts(3, slices=2, intermediate=128)
    for projection, kind in (("gate", "suh"), ("up", "suh"), ("down", "svh")):
        source = "up" if one_suh and projection == "gate" else projection
        for r in range(2):
            one = getattr(getattr(experts, source)[0][r], kind)
            for ranks in getattr(experts, projection):
                object.__setattr__(ranks[r], kind, one)
    shared = ("gate_suh", "up_suh", "down_svh")
    layout = MoeLayout.empty(
        (4, 4, 4),
        experts=3,
        slices=2,
        hidden=256,
        intermediate=128,
        shared=shared,
        one_suh=one_suh,
    )
    filler = MoeFiller(layout)
    for piece in pieces_of(experts, shared):
        if one_suh and (piece[0], piece[3]) == ("gate", "suh"):
            with pytest.raises(ValueError, match="no such piece"):
                filler.put(*piece)
            continue
        filler.put(*piece)
    filled = filler.finish()
    same(filled, experts.layout())
    assert (filled.gate_suh is filled.up_suh) == one_suh
    assert filled.up_suh.shape[0] == 2


def test_one_expert_shares_with_itself():
    for given, shared in itertools.product((None, 0), ((), ("up_suh",))):
        layout = MoeLayout.empty(
            (4, 4, 4), experts=1, slices=2, hidden=128, intermediate=128, shared=shared
        )
        filler = MoeFiller(layout)
        filler.put("up", given, 1, "suh", torch.ones(128, dtype=torch.float16))
        assert layout.up_suh[1].eq(1).all()
        assert not layout.up_suh[0].any()


# ---- refusals ---------------------------------------------------------------------------------


def text(call, kinds=(TypeError, ValueError)) -> str:
    try:
        call()
    except kinds as error:
        return str(error)
    raise AssertionError("nothing was raised")


class Refusals(TestCase):
    maxDiff = None

    def changed(self, change, **options) -> str:
        """A layout whose table had an entry changed."""
        layout = mixed(**options).layout()
        table = layout.table.clone()
        change(table)
        return text(lambda: replace(layout, table=table, entries=None))

    def test_table(self):
        def out_of_range(table):
            table[2, 2, 0, 0] += 8

        self.assertExpectedInline(
            self.changed(out_of_range),
            """MoeLayout: down of expert 2, rank 0: words 202760 to 215048, expected a multiple of 8 and within the 215040 words of packed""",
        )

        def negative(table):
            table[0, 1, 0, 0] = -8

        self.assertExpectedInline(
            self.changed(negative),
            """MoeLayout: gate of expert 1, rank 0: words -8 to 24568, expected a multiple of 8 and within the 215040 words of packed""",
        )

        def crooked(table):
            table[0, 1, 0, 0] += 1

        self.assertExpectedInline(
            self.changed(crooked),
            """MoeLayout: gate of expert 1, rank 0: words 18433 to 43009, expected a multiple of 8 and within the 215040 words of packed""",
        )

        def overlapping(table):
            table[1, 2, 0, 0] -= 16

        self.assertExpectedInline(
            self.changed(overlapping),
            """MoeLayout: up of expert 1, rank 0 and up of expert 2, rank 0: overlap in packed""",
        )

        def duplicate(table):
            table[1, 2, 1] = table[1, 1, 0]

        self.assertExpectedInline(
            self.changed(duplicate, slices=2, intermediate=128),
            """MoeLayout: up of expert 1, rank 0 and up of expert 2, rank 1: overlap in packed""",
        )

        def longer(table):
            table[0, 0, 0, 1] = 64

        self.assertExpectedInline(
            self.changed(longer),
            """MoeLayout: gate of expert 0, rank 0 and gate of expert 1, rank 0: overlap in packed""",
        )

        def no_rate(table):
            table[0, 0, 0, 1] = 24

        self.assertExpectedInline(
            self.changed(no_rate),
            """MoeLayout: gate of expert 0, rank 0: codebook mcg at 1.5 bits, expected mul1: half rates exist for mul1 only""",
        )

        def no_words(table):
            table[0, 0, 0, 1] = 47

        self.assertExpectedInline(
            self.changed(no_words),
            """MoeLayout: gate of expert 0, rank 0: table has 47 words per tile, expected 16 * bits with bits from 1 to 8, or 24, 40 or 56""",
        )

        def missing(table):
            table[0, 1, 0] = torch.tensor([-1, 0])

        self.assertExpectedInline(
            self.changed(missing),
            """MoeLayout: gate of expert 1, rank 0: missing, though down of expert 1, rank 0 is present""",
        )

        def missing_rank(table):
            table[:, 1, 1] = torch.tensor([-1, 0])

        self.assertExpectedInline(
            self.changed(missing_rank, slices=2, intermediate=128),
            """MoeLayout: gate of expert 1, rank 1: missing, though down of expert 1, rank 0 is present""",
        )

        def missing_down(table):
            table[2, 1, 0] = torch.tensor([-1, 0])

        self.assertExpectedInline(
            self.changed(missing_down),
            """MoeLayout: down of expert 1, rank 0: missing, though gate of expert 1, rank 0 is present""",
        )

        def half_absent(table):
            table[2, 1, 0, 1] = 0

        self.assertExpectedInline(
            self.changed(half_absent),
            """MoeLayout: down of expert 1, rank 0: missing, though gate of expert 1, rank 0 is present""",
        )

        def with_gate(table):
            table[0, 1, 0] = torch.tensor([0, 64])

        self.assertExpectedInline(
            self.changed(with_gate, gated=False),
            """MoeLayout: gate of expert 1, rank 0: present, expected absent as there is no gate_suh""",
        )

    def test_tensors(self):
        layout = mixed().layout()
        for name, tensor, kind in (
            ("packed", layout.packed.int(), TypeError),
            ("packed", layout.packed.view(8, -1), ValueError),
            ("table", layout.table.int(), TypeError),
            ("table", layout.table[:2], ValueError),
            ("up_suh", layout.up_suh[:2], ValueError),
            ("down_svh", layout.down_svh.float(), TypeError),
            ("gate_svh", None, ValueError),
            ("down_bias", torch.zeros(4, 256), ValueError),
        ):
            message = text(lambda n=name, t=tensor: replace(layout, **{n: t}), kind)
            assert message.startswith("MoeLayout: "), message
            assert name in message
        self.assertExpectedInline(
            text(lambda: replace(layout, hidden=128)),
            """MoeLayout: hidden is 128, expected 129 to 256""",
        )
        self.assertExpectedInline(
            text(lambda: replace(layout, intermediate=256)),
            """MoeLayout: intermediate is 256, expected 257 to 384""",
        )
        self.assertExpectedInline(
            text(lambda: replace(layout, codebooks=("mcg", "mcg", "qtip"))),
            """MoeLayout: codebook is 'qtip', expected one of ('3inst', 'mcg', 'mul1', 'sqg_e4m3', 'sqg_fp16')""",
        )
        meta = layout.to("meta")
        self.assertExpectedInline(
            text(lambda: replace(meta, entries=None)),
            """MoeLayout: table is on meta and entries is None, expected entries""",
        )
        self.assertExpectedInline(
            text(lambda: meta.to("cpu")), """MoeLayout: is on meta, expected materialize('cpu')"""
        )

    def test_lists(self):
        def lists(change) -> str:
            experts = mixed(slices=2, intermediate=128, biases=True)
            change(experts)
            return text(lambda: layout_of(experts.gate, experts.up, experts.down))

        other = make_experts(3, slices=2, intermediate=128, biases=True, codebook="mul1")
        wide = make_experts(3, slices=2, intermediate=256, biases=True)
        bare = make_experts(3, slices=2, intermediate=128)
        self.assertExpectedInline(
            lists(lambda x: x.down.pop()), """MoeLayout: down has 2 experts, expected 3 as up has"""
        )
        self.assertExpectedInline(
            lists(lambda x: x.gate[1].pop()),
            """MoeLayout: gate of expert 1: 1 rank slices, expected 2""",
        )
        self.assertExpectedInline(
            lists(lambda x: x.gate.__setitem__(2, None)),
            """MoeLayout: gate of expert 2: missing, though up is present""",
        )
        self.assertExpectedInline(
            lists(lambda x: x.down.__setitem__(1, wide.down[1])),
            """MoeLayout: down of expert 1, rank 0: 256 x 256, expected 128 x 256""",
        )
        self.assertExpectedInline(
            lists(lambda x: x.up.__setitem__(1, other.up[1])),
            """MoeLayout: up of expert 1, rank 0: codebook mul1, expected mcg as the others of up""",
        )
        self.assertExpectedInline(
            lists(lambda x: x.up.__setitem__(1, bare.up[1])),
            """MoeLayout: up of expert 1, rank 0: bias is None, expected a Tensor""",
        )
        self.assertExpectedInline(
            lists(lambda x: x.down[2].__setitem__(1, x.down[2][0])),
            """MoeLayout: down of expert 2, rank 1: bias is a Tensor, expected None""",
        )
        self.assertExpectedInline(
            lists(lambda x: x.up[0].__setitem__(1, x.up[0][1].trellis)),
            """MoeLayout: up of expert 0, rank 1: Tensor, expected TrellisTensor""",
        )
        self.assertExpectedInline(
            lists(lambda x: x.up.__setitem__(1, x.up[1][0])),
            """MoeLayout: up of expert 1: TrellisTensor, expected a list of rank slices or None""",
        )
        self.assertExpectedInline(
            lists(lambda x: [x.up.__setitem__(e, None) for e in range(3)]),
            """MoeLayout: up has no expert, expected at least one""",
        )
        self.assertExpectedInline(
            lists(lambda x: x.gate[2].__setitem__(0, x.gate[2][0].to("meta"))),
            """MoeLayout: gate of expert 2, rank 0: on meta, expected cpu""",
        )

    def test_stacks(self):
        def stack(*shape):
            return (
                torch.zeros(*shape, 64, dtype=torch.int16),
                torch.zeros(1, shape[1] * 16, dtype=torch.float16),
                torch.zeros(1, shape[2] * 16, dtype=torch.float16),
            )

        up, down = stack(3, 16, 24), stack(3, 24, 16)

        def stacks(gate, up, down, codebook="mcg", **changed) -> str:
            return text(lambda: layout_of_stacks(gate, up, down, codebook=codebook, **changed))

        self.assertExpectedInline(
            stacks(up, up, up),
            """MoeLayout: down trellis has shape [3, 16, 24, 64], expected [3, 24, 16, 16*bits] to go with up""",
        )
        self.assertExpectedInline(
            stacks(stack(2, 16, 24), up, down),
            """MoeLayout: gate trellis has shape [2, 16, 24, 64], expected [3, 16, 24, 16*bits] to go with up""",
        )
        self.assertExpectedInline(
            stacks(up, (up[0].int(), *up[1:]), down),
            """MoeLayout: up trellis is torch.int32 [3, 16, 24, 64], expected int16 [experts, in/16, out/16, 16*bits]""",
        )
        self.assertExpectedInline(
            stacks(up, up, down, codebook="sqg_fp16"),
            """MoeLayout: gate of expert 0, rank 0: codebook sqg_fp16 at 4 bits, expected bits in 5, 6""",
        )
        self.assertExpectedInline(
            stacks(up, up, down, codebook=("mcg", "mcg")),
            """MoeLayout: codebook is ('mcg', 'mcg'), expected a name, or a tuple of three for gate, up and down""",
        )
        self.assertExpectedInline(
            stacks(up, up, down, hidden=128), """MoeLayout: hidden is 128, expected 129 to 256"""
        )

    def test_empty(self):
        def empty(bits=(4, 4, 4), **changed) -> str:
            sizes = {"experts": 3, "hidden": 256, "intermediate": 384, **changed}
            return text(lambda: MoeLayout.empty(bits, **sizes))

        self.assertExpectedInline(
            empty((4, 4)),
            """MoeLayout.empty: bits is (4, 4), expected a tuple for gate, up and down""",
        )
        self.assertExpectedInline(
            empty((4, None, 4)), """MoeLayout.empty: bits of up is None, expected rates"""
        )
        self.assertExpectedInline(
            empty((4, [4, 4], 4)), """MoeLayout.empty: bits of up has 2 rates, expected 3"""
        )
        self.assertExpectedInline(
            empty((4, [4, 9, 4], 4)),
            """MoeLayout.empty: up of expert 1: bits is 9, expected an integer from 1 to 8, or 1.5, 2.5 or 3.5""",
        )
        self.assertExpectedInline(
            empty((4, [4, 2.5, 4], 4)),
            """MoeLayout: up of expert 1, rank 0: codebook mcg at 2.5 bits, expected mul1: half rates exist for mul1 only""",
        )
        self.assertExpectedInline(
            empty((4, [4, None, 4], 4)),
            """MoeLayout: up of expert 1, rank 0: missing, though down of expert 1, rank 0 is present""",
        )
        self.assertExpectedInline(
            empty(experts=0), """MoeLayout.empty: experts is 0, expected a positive int"""
        )
        self.assertExpectedInline(
            empty(hidden=2.0), """MoeLayout: hidden is 2.0, expected a positive int"""
        )
        self.assertExpectedInline(
            empty(slices=2, intermediate=300),
            """MoeLayout: intermediate is 300, expected 384 (all of a slice, as there are 2 slices)""",
        )
        self.assertExpectedInline(
            empty(shared=("up_bias",)),
            """MoeLayout.empty: shared has 'up_bias', expected some of ('gate_suh', 'gate_svh', 'up_suh', 'up_svh', 'down_suh', 'down_svh')""",
        )
        self.assertExpectedInline(
            empty(biases=("up_suh",)),
            """MoeLayout.empty: biases has 'up_suh', expected some of ('gate_bias', 'up_bias', 'down_bias')""",
        )

    def test_filler(self):
        layout = MoeLayout.empty(
            (None, [3, 4, None], [3, 4, None]),
            experts=3,
            slices=2,
            hidden=256,
            intermediate=128,
            shared=("down_svh",),
            biases=("down_bias",),
        )
        filler = MoeFiller(layout)

        def put(*piece) -> str:
            return text(lambda: filler.put(*piece))

        half = torch.zeros(256, dtype=torch.float16)
        words = torch.zeros(16, 8, 48, dtype=torch.int16)
        filler.put("up", 0, 1, "trellis", words)
        self.assertExpectedInline(
            put("up", 0, 1, "trellis", words),
            """MoeFiller.put: up trellis of expert 0, rank 1: came twice""",
        )
        self.assertExpectedInline(
            put("up", 1, 0, "trellis", words),
            """MoeFiller.put: up trellis of expert 1, rank 0: torch.int16 [16, 8, 48], expected torch.int16 [16, 8, 64]""",
        )
        self.assertExpectedInline(
            put("up", 0, 0, "trellis", words.int()),
            """MoeFiller.put: up trellis of expert 0, rank 0: torch.int32 [16, 8, 48], expected torch.int16 [16, 8, 48]""",
        )
        self.assertExpectedInline(
            put("up", 2, 0, "trellis", words),
            """MoeFiller.put: up trellis of expert 2, rank 0: the layout has no such piece""",
        )
        self.assertExpectedInline(
            put("up", 3, 0, "trellis", words),
            """MoeFiller.put: up trellis of expert 3, rank 0: the layout has no such piece""",
        )
        self.assertExpectedInline(
            put("up", 0, 2, "trellis", words),
            """MoeFiller.put: up trellis of expert 0, rank 2: the layout has no such piece""",
        )
        self.assertExpectedInline(
            put("up", -1, 0, "suh", half),
            """MoeFiller.put: up suh of expert -1, rank 0: the layout has no such piece""",
        )
        self.assertExpectedInline(
            put("gate", 0, 0, "suh", half),
            """MoeFiller.put: gate suh of expert 0, rank 0: the layout has no such piece""",
        )
        self.assertExpectedInline(
            put("up", None, 0, "suh", half),
            """MoeFiller.put: up suh of expert None, rank 0: the layout has no such piece""",
        )
        self.assertExpectedInline(
            put("down", 0, 0, "svh", half),
            """MoeFiller.put: down svh of expert 0, rank 0: the layout has no such piece""",
        )
        self.assertExpectedInline(
            put("down", 0, 1, "bias", half),
            """MoeFiller.put: down bias of expert 0, rank 1: the layout has no such piece""",
        )
        self.assertExpectedInline(
            put("up", 0, 0, "suh", half[:128]),
            """MoeFiller.put: up suh of expert 0, rank 0: torch.float16 [128], expected torch.float16 [256]""",
        )
        self.assertExpectedInline(
            put("up", 0, 0, "suh", half.bfloat16()),
            """MoeFiller.put: up suh of expert 0, rank 0: torch.bfloat16 [256], expected torch.float16 [256]""",
        )
        self.assertExpectedInline(
            put("up", 0, 0, "mcg", half),
            """MoeFiller.put: up mcg of expert 0, rank 0, expected a projection in ('gate', 'up', 'down') and a kind in ('trellis', 'suh', 'svh', 'bias')""",
        )
        self.assertExpectedInline(
            put("w1", 0, 0, "suh", half),
            """MoeFiller.put: w1 suh of expert 0, rank 0, expected a projection in ('gate', 'up', 'down') and a kind in ('trellis', 'suh', 'svh', 'bias')""",
        )
        self.assertExpectedInline(
            put("up", 0, 0, "suh", [1.0]),
            """MoeFiller.put: up suh of expert 0, rank 0 is list, expected a Tensor""",
        )
        self.assertExpectedInline(
            text(filler.finish),
            """MoeFiller: 23 pieces missing: up trellis of expert 0, rank 0; up suh of expert 0, rank 0; up svh of expert 0, rank 0; up suh of expert 0, rank 1; up svh of expert 0, rank 1; up trellis of expert 1, rank 0; up suh of expert 1, rank 0; up svh of expert 1, rank 0; ...""",
        )
        self.assertExpectedInline(
            "\n".join(filler.missing()),
            """\
up trellis of expert 0, rank 0
up suh of expert 0, rank 0
up svh of expert 0, rank 0
up suh of expert 0, rank 1
up svh of expert 0, rank 1
up trellis of expert 1, rank 0
up suh of expert 1, rank 0
up svh of expert 1, rank 0
up trellis of expert 1, rank 1
up suh of expert 1, rank 1
up svh of expert 1, rank 1
down trellis of expert 0, rank 0
down suh of expert 0, rank 0
down svh of all experts, rank 0
down bias of expert 0, rank 0
down trellis of expert 0, rank 1
down suh of expert 0, rank 1
down svh of all experts, rank 1
down trellis of expert 1, rank 0
down suh of expert 1, rank 0
down bias of expert 1, rank 0
down trellis of expert 1, rank 1
down suh of expert 1, rank 1""",
        )
        self.assertExpectedInline(
            text(lambda: MoeFiller(layout.to("meta"))),
            """MoeFiller: layout is on meta, expected one that is materialized""",
        )


def test_entries_are_what_the_table_says():
    layout = mixed().layout()
    assert layout.entry(next(layout.pieces())) == Entry(0, 48)
    assert layout.table[0, 0, 0].tolist() == [0, 48]
    assert list(TENSORS[:2]) == ["packed", "table"]
