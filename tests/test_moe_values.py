"""Routed experts against the float64 oracle: rates, codebooks, slices, routing, activations, sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from experts import ACTIVATIONS, arguments, make_experts, options, routing
from layers import BOUNDS, CASES, DTYPES, RATES, double, poison, worst_row

import trellis_ops
from trellis_ops import Exl3MoE

pytestmark = pytest.mark.usefixtures("one_thread")

OPS = torch.ops.trellis_ops
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# parity_moe computes in float64: what is left is the one rounding of the result.
ROUNDING = {F16: 3e-4, BF16: 2.3e-3, F32: 1e-7}
ISAS = [i for i in range(8) if OPS._cpu_isas() >> i & 1]


def run(op: str, layout, x, ids, weights, activation="silu", **changed) -> torch.Tensor:
    """The public op."""
    function = getattr(trellis_ops, op)
    poison()
    return function(
        x,
        ids,
        weights,
        *arguments(layout),
        codebook=layout.codebooks,
        intermediate=layout.intermediate,
        activation=activation,
        **changed,
    )


MOES = [
    pytest.param((partial(run, "rank_sliced_moe"), BOUNDS), id="rank_sliced_moe"),
    pytest.param((partial(run, "parity_moe"), ROUNDING), id="parity_moe"),
]


def single_routes(function, layout, x, ids, **changed) -> np.ndarray:
    """Each route alone, with weight 1: [tokens, top_k, hidden]."""
    ones = torch.ones(ids.shape[0], 1)
    columns = [
        double(function(layout, x, ids[:, s : s + 1], ones, **changed)) for s in range(ids.shape[1])
    ]
    return np.stack(columns, 1)


# ---- rates and codebooks ----------------------------------------------------------------------


@pytest.mark.parametrize("moe", MOES)
@pytest.mark.parametrize("codebook", RATES)
def test_every_rate_of_every_projection(moe, codebook):
    """Each projection of each expert has another rate, and all rates of the codebook occur."""
    function, bounds = moe
    rates = RATES[codebook]
    where = {"gate": 0, "up": 3, "down": 5}
    experts = make_experts(
        len(rates),
        hidden=200,
        intermediate=300,
        bits=lambda projection, e: rates[(e + where[projection]) % len(rates)],
        codebook=codebook,
    )
    layout = experts.layout()
    x = torch.randn(6, 200)
    ids, weights = routing(6, min(4, len(rates)), len(rates))
    ids[0] = torch.arange(ids.shape[1])
    want = experts.routes(x, ids)
    got = single_routes(function, layout, x, ids)
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max() <= bounds[F32]
    y = function(layout, x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= bounds[F32]


@pytest.mark.parametrize("moe", MOES)
def test_a_codebook_for_each_projection(moe):
    function, bounds = moe
    for names in itertools.permutations(("3inst", "mul1", "sqg_e4m3")):
        codebooks = dict(zip(("gate", "up", "down"), names, strict=True))
        experts = make_experts(3, bits=lambda p, e: 2 + e, codebook=codebooks)
        layout = experts.layout()
        assert layout.codebooks == names
        x = torch.randn(3, 256)
        ids, weights = routing(3, 2, 3)
        y = function(layout, x, ids, weights)
        assert worst_row(y, experts.want(x, ids, weights)) <= bounds[F32]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("codebook", "bits"), CASES)
def test_every_instruction_set(codebook, bits, isa):
    experts = make_experts(2, intermediate=256, bits=lambda p, e: bits, codebook=codebook)
    layout = experts.layout()
    x = torch.randn(70, 256)
    ids = torch.zeros(70, 1, dtype=torch.int32)
    ids[::9] = 1
    ones = torch.ones(70, 1)
    every = (*arguments(layout), *options(layout))
    y = OPS._rank_sliced_moe_isa(x, ids, ones, *every, isa)
    assert worst_row(y, experts.want(x, ids, ones)) <= BOUNDS[F32]


@pytest.mark.parametrize("moe", MOES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(moe, dtype):
    function, bounds = moe
    experts = make_experts(bits=lambda p, e: 3 + e % 3)
    layout = experts.layout()
    ids, weights = routing(9, 3, 4)
    for weight_dtype, id_dtype in itertools.product(DTYPES, (torch.int32, torch.int64)):
        x, w = torch.randn(9, 256).to(dtype), weights.to(weight_dtype)
        want = experts.want(x, ids, w)
        y = function(layout, x, ids.to(id_dtype), w)
        assert (y.shape, y.dtype, y.is_contiguous()) == ((9, 256), dtype, True)
        assert worst_row(y, want) <= bounds[dtype]
    for out in DTYPES:
        y = function(layout, x, ids, w, out_dtype=out)
        assert y.dtype == out
        assert worst_row(y, want) <= bounds[out]


# ---- rank slices ------------------------------------------------------------------------------


@pytest.mark.parametrize("moe", MOES)
@pytest.mark.parametrize("slices", [1, 2, 4, 8])
def test_slices_add_up(moe, slices):
    function, bounds = moe
    experts = make_experts(3, slices=slices, intermediate=128, bits=lambda p, e: 3 + e, biases=True)
    layout = experts.layout()
    assert layout.slices == slices
    x = torch.randn(5, 256)
    ids, weights = routing(5, 2, 3)
    y = function(layout, x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= bounds[F32]


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_slices_of_one_matrix_equal_the_whole(slices):
    """A whole expert, cut along its intermediate size, where the cuts are whole 128-blocks."""
    whole = make_experts(3, intermediate=1024, bits=lambda p, e: 3 + e)
    width = 1024 // slices

    def cut(t, projection, r):
        tiles = slice(r * width // 16, (r + 1) * width // 16)
        features = slice(r * width, (r + 1) * width)
        if projection == "down":
            parts = t.trellis[tiles], t.suh[features], t.svh
        else:
            parts = t.trellis[:, tiles], t.suh, t.svh[features]
        return trellis_ops.TrellisTensor(*(p.contiguous() for p in parts), None, t.codebook)

    sliced = Exl3MoE.from_rank_slices(
        *(
            [[cut(ts[0], p, r) for r in range(slices)] for ts in getattr(whole, p)]
            for p in ("gate", "up", "down")
        )
    )
    x = torch.randn(33, 256)
    ids, weights = routing(33, 2, 3)
    y = sliced(x, ids, weights)
    assert worst_row(y, double(Exl3MoE(whole.layout())(x, ids, weights))) <= 1e-3
    assert worst_row(y, whole.want(x, ids, weights)) <= BOUNDS[F32]


# ---- routing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("moe", MOES)
@pytest.mark.parametrize("tokens", [0, 1, 3, 33])
def test_numbers_of_tokens(moe, tokens):
    function, bounds = moe
    experts = make_experts(bits=lambda p, e: 2 + e)
    layout = experts.layout()
    x = torch.randn(tokens, 256)
    ids, weights = routing(tokens, 2, 4)
    y = function(layout, x, ids, weights)
    assert y.shape == (tokens, 256)
    if tokens:
        assert worst_row(y, experts.want(x, ids, weights)) <= bounds[F32]


@pytest.mark.parametrize("top_k", [3, 8])
def test_many_tokens(top_k):
    """Beyond what goes through the projections together, and what is summed together."""
    experts = make_experts(16, hidden=128, intermediate=128, bits=lambda p, e: 3 + e % 3)
    layout = experts.layout()
    tokens = 1024 if top_k == 3 else 1100
    x = torch.randn(tokens, 128)
    ids, weights = routing(tokens, top_k, 16)
    ids[5], ids[1000] = -1, 16
    y = run("rank_sliced_moe", layout, x, ids, weights)
    want = experts.want(x, ids, weights)
    kept = torch.ones(tokens, dtype=torch.bool)
    kept[[5, 1000]] = False
    assert worst_row(y[kept], want[kept.numpy()]) <= BOUNDS[F32]
    assert not y[~kept].any()

    # A row does not depend on the others where no expert gets many.
    def part(first, last):
        rows = slice(first, last)
        return run("rank_sliced_moe", layout, x[rows], ids[rows], weights[rows])

    few = part(6, 12)
    for token in range(6):
        assert torch.equal(part(6 + token, 7 + token), few[token : token + 1])


@pytest.mark.parametrize("moe", MOES)
@pytest.mark.parametrize("top_k", [1, 2, 5, 16])
def test_many_experts(moe, top_k):
    function, bounds = moe
    experts = make_experts(256, hidden=128, intermediate=128, bits=lambda p, e: 2 + e % 5)
    layout = experts.layout()
    x = torch.randn(7, 128)
    ids, weights = routing(7, top_k, 256)
    ids[0, 0] = 255
    y = function(layout, x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= bounds[F32]


@pytest.mark.parametrize("moe", MOES)
def test_all_tokens_on_one_expert(moe):
    function, bounds = moe
    experts = make_experts(8)
    layout = experts.layout()
    x = torch.randn(200, 256)
    ids = torch.full((200, 1), 5)
    weights = torch.rand(200, 1) + 0.1
    y = function(layout, x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= bounds[F32]


@pytest.mark.parametrize("moe", MOES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_no_expert_contribute_exactly_nothing(moe, dtype):
    function, _ = moe
    layout = make_experts(biases=True).layout()
    x = torch.randn(3, 256)
    ids = torch.tensor([[0, 1], [2, 3], [3, 1]], dtype=dtype)
    weights = torch.rand(3, 2) + 0.1
    want = function(layout, x, ids, weights)
    limits = torch.iinfo(dtype)
    for bad in (-1, 4, 5, limits.min, limits.max, 1 << 20):
        more = torch.full((3, 5), bad, dtype=dtype)
        more[:, 1], more[:, 3] = ids[:, 0], ids[:, 1]
        # What their weights are does not matter either.
        w = torch.full((3, 5), float("nan"))
        w[:, 1], w[:, 3] = weights[:, 0], weights[:, 1]
        assert torch.equal(function(layout, x, more, w), want)
        nothing = function(layout, x, torch.full_like(ids, bad), weights * torch.nan)
        assert torch.equal(nothing, torch.zeros(3, 256))


@pytest.mark.parametrize("moe", MOES)
def test_experts_held_elsewhere_contribute_nothing(moe):
    function, bounds = moe
    experts = make_experts(6, absent=(0, 3), bits=lambda p, e: 2 + e % 4, biases=True)
    layout = experts.layout()
    x = torch.randn(8, 256)
    ids, weights = routing(8, 4, 6)
    ids[0] = torch.tensor([0, 3, 3, 0])
    y = function(layout, x, ids, weights)
    assert not y[0].any()
    assert worst_row(y[1:], experts.want(x, ids, weights)[1:]) <= bounds[F32]


@pytest.mark.parametrize("moe", MOES)
def test_an_expert_named_twice_counts_twice(moe):
    function, bounds = moe
    experts = make_experts(biases=True)
    layout = experts.layout()
    x = torch.randn(3, 256)
    ids = torch.tensor([[1, 1, 2], [3, 0, 3], [2, 2, 2]])
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.3, 0.5]])
    y = function(layout, x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= bounds[F32]


@pytest.mark.parametrize("moe", MOES)
def test_leading_dimensions_and_strides(moe):
    function, _ = moe
    layout = make_experts().layout()
    x, w = torch.randn(3, 4, 256), torch.rand(3, 4, 2)
    ids = torch.randint(0, 4, (3, 4, 2))
    want = function(layout, x.view(12, 256), ids.view(12, 2), w.view(12, 2)).view(3, 4, 256)
    assert torch.equal(function(layout, x, ids, w), want)
    # parity's last bit may depend on the number of rows.
    alone = function(layout, x[1, 2], ids[1, 2], w[1, 2])
    assert alone.shape == (256,)
    assert worst_row(alone, double(want[1, 2])) <= 1e-7
    assert function(layout, x[:, :0], ids[:, :0], w[:, :0]).shape == (3, 0, 256)
    base = torch.randn(12, 2, 256)
    wide = torch.stack((ids.view(12, 2), ids.view(12, 2) + 7), 2)
    y = function(layout, base[:, 1], wide[..., 0], w.view(12, 2).t().contiguous().t())
    copy = function(layout, base[:, 1].clone(), ids.view(12, 2), w.view(12, 2))
    assert torch.equal(y, copy)
    x = torch.randn(1, 256).expand(12, 256)
    assert torch.equal(
        function(layout, x, ids.view(12, 2), w.view(12, 2)),
        function(layout, x.clone(), ids.view(12, 2), w.view(12, 2)),
    )


# ---- activations, biases, scale ---------------------------------------------------------------


@pytest.mark.parametrize("moe", MOES)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(moe, activation, biases):
    function, bounds = moe
    experts = make_experts(gated=activation != "relu2", biases=biases, intermediate=300)
    layout = experts.layout()
    x = torch.randn(17, 256) * 2
    ids, weights = routing(17, 3, 4)
    y = function(layout, x, ids, weights, activation, routed_scale=2.5)
    want = experts.want(x, ids, weights, activation, scale=2.5)
    assert worst_row(y, want) <= bounds[F32]


@pytest.mark.parametrize("moe", MOES)
@pytest.mark.parametrize(
    ("activation", "after"),
    [(a, after) for a in ("silu", "gelu", "gelu_tanh") for after in (False, True)]
    + [("swiglu_oai", False)],
)
def test_limits(moe, activation, after):
    function, bounds = moe
    experts = make_experts(biases=True)
    layout = experts.layout()
    x = torch.randn(17, 256) * 3
    ids, weights = routing(17, 2, 4)
    changed = {"limit": 1.25, "limit_after": after}
    y = function(layout, x, ids, weights, activation, **changed)
    want = experts.want(x, ids, weights, activation, 1.25, after)
    assert worst_row(y, want) <= bounds[F32]
    assert worst_row(y, experts.want(x, ids, weights, activation)) > 0.01
    if activation != "swiglu_oai":
        other = experts.want(x, ids, weights, activation, 1.25, not after)
        assert worst_row(y, other) > 0.01


@pytest.mark.parametrize("moe", MOES)
def test_routed_scale_is_applied_outside_half_precision(moe):
    function, bounds = moe
    experts = make_experts()
    layout = experts.layout()
    x = torch.randn(4, 256).to(F16) * 40
    ids, weights = routing(4, 2, 4)
    want = experts.want(x, ids, weights, scale=128.0)
    assert np.abs(want).max() > 65504
    y = function(layout, x, ids, weights, routed_scale=128.0, out_dtype=BF16)
    assert worst_row(y, want) <= bounds[BF16]


@pytest.mark.parametrize("moe", MOES)
def test_large_and_small_activations(moe):
    function, bounds = moe
    experts = make_experts()
    layout = experts.layout()
    ids, weights = routing(4, 2, 4)
    base = torch.randn(4, 256)
    for scale in (1e-18, 1e12):
        x = (base * scale).to(BF16)
        y = function(layout, x, ids, weights, out_dtype=F32)
        assert worst_row(y, experts.want(x, ids, weights)) <= bounds[F32]
    x = base.to(BF16)
    x[:, 7] = 1e5
    y = function(layout, x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= bounds[BF16]


# ---- sizes and vectors ------------------------------------------------------------------------


@pytest.mark.parametrize("moe", MOES)
@pytest.mark.parametrize(("hidden", "inner"), [(129, 1), (200, 300), (255, 129), (384, 128)])
def test_padded_sizes(moe, hidden, inner):
    function, bounds = moe
    experts = make_experts(hidden=hidden, intermediate=inner, biases=True)
    layout = experts.layout()
    assert (layout.hidden, layout.intermediate) == (hidden, inner)
    parent = torch.full((5, 512), float("nan"))
    parent[:, :hidden] = torch.randn(5, hidden)
    x = parent[:, :hidden]
    ids, weights = routing(5, 2, 4)
    y = function(layout, x, ids, weights)
    assert y.shape == (5, hidden)
    assert worst_row(y, experts.want(x, ids, weights)) <= bounds[F32]


@pytest.mark.parametrize("moe", MOES)
@pytest.mark.parametrize("slices", [1, 4])
def test_vectors_that_experts_share(moe, slices):
    function, bounds = moe
    experts = make_experts(3, slices=slices, intermediate=128, bits=lambda p, e: 3 + e)
    for projection, kind in (("gate", "suh"), ("up", "suh"), ("down", "svh")):
        for r in range(slices):
            one = getattr(getattr(experts, projection)[0][r], kind)
            for ranks in getattr(experts, projection):
                object.__setattr__(ranks[r], kind, one)
    layout = experts.layout()
    x = torch.randn(5, 256)
    ids, weights = routing(5, 2, 3)
    want = experts.want(x, ids, weights)
    assert [layout.gate_suh.shape[0], layout.gate_svh.shape[0]] == [slices, 3 * slices]
    assert [layout.up_suh.shape[0], layout.down_svh.shape[0]] == [slices, slices]
    assert worst_row(function(layout, x, ids, weights), want) <= bounds[F32]
    # Gate and up together, as checkpoints with one vector for both have them.
    for gate, up in zip(experts.gate, experts.up, strict=True):
        for r in range(slices):
            object.__setattr__(gate[r], "suh", up[r].suh)
    layout = experts.layout()
    assert layout.gate_suh is layout.up_suh
    y = function(layout, x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= bounds[F32]


def test_one_vector_of_gate_among_many_of_up():
    """Both begin at the same address."""
    experts = make_experts(3)
    for ts in experts.gate:
        object.__setattr__(ts[0], "suh", experts.up[0][0].suh)
    layout = experts.layout()
    object.__setattr__(layout, "gate_suh", layout.up_suh[:1])
    x = torch.randn(5, 256)
    ids, weights = routing(5, 2, 3)
    y = run("rank_sliced_moe", layout, x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]


def test_a_vector_of_one_row_serves_all_slices():
    experts = make_experts(3, slices=2, intermediate=128)
    layout = experts.layout()
    names = ("gate_suh", "up_suh", "down_svh")
    expanded = {name: getattr(layout, name)[:1].expand(6, -1).contiguous() for name in names}
    single = {name: getattr(layout, name)[:1].contiguous() for name in names}
    x = torch.randn(5, 256)
    ids, weights = routing(5, 2, 3)
    a = run("rank_sliced_moe", replace(layout, **expanded), x, ids, weights)
    b = run("rank_sliced_moe", replace(layout, **single), x, ids, weights)
    assert torch.equal(a, b)


# ---- determinism ------------------------------------------------------------------------------


def test_threads_do_not_matter():
    layout = make_experts(16, bits=lambda p, e: 2 + e % 4).layout()
    x = torch.randn(130, 256)
    ids, weights = routing(130, 4, 16)
    want = run("rank_sliced_moe", layout, x, ids, weights)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(run("rank_sliced_moe", layout, x, ids, weights), want)


def test_parity_is_repeatable():
    layout = make_experts().layout()
    x = torch.randn(30, 256)
    ids, weights = routing(30, 3, 4)
    a, b = (run("parity_moe", layout, x, ids, weights) for _ in range(2))
    assert torch.equal(a, b)
