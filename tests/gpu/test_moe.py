"""rank_sliced_moe on a GPU: rates, routing, every number of tokens, capture, workspaces."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from experts import ACTIVATIONS, arguments, make_experts, options, routing
from layers import BOUNDS, DTYPES, RATES, worst_row
from waiting import assert_nothing_is_missed

import trellis_ops
from trellis_ops import Exl3MoE, Workspace

OPS = torch.ops.trellis_ops
F32, BF16 = torch.float32, torch.bfloat16


def run(layout, x, ids, weights, activation="silu", **changed) -> torch.Tensor:
    """The public op on the GPU, with NaNs where it may find its scratch."""
    layout = layout.to("cuda")
    freed = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 12, 1 << 20)]
    del freed
    return trellis_ops.rank_sliced_moe(
        x.cuda(),
        ids.cuda(),
        weights.cuda(),
        *arguments(layout),
        codebook=layout.codebooks,
        intermediate=layout.intermediate,
        activation=activation,
        **changed,
    ).cpu()


# ---- values -----------------------------------------------------------------------------------


def run_as(wgmma: bool, few_routes: bool):
    """The op whose tiles may use wgmma, as on no GPU but Hopper's, and whose few routes go their own way."""

    def function(layout, x, ids, weights, activation="silu", **changed) -> torch.Tensor:
        layout = layout.to("cuda")
        inputs = (t.cuda() for t in (x, ids, weights))
        last = options(layout, activation, **{"out_dtype": x.dtype, **changed})
        y = OPS._rank_sliced_moe_route(*inputs, *arguments(layout), *last, wgmma, few_routes)
        return y.cpu()

    return function


few_routes, few_rows, without_wgmma = run_as(True, True), run_as(True, False), run_as(False, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codebook", [name for name in RATES if "sqg" not in name])
@pytest.mark.parametrize(
    ("tokens", "function"),
    [(6, few_routes), (6, few_rows), (130, run), (400, run), (400, without_wgmma), (1300, run)],
)
def test_every_rate_of_every_projection(codebook, dtype, tokens, function):
    """Each projection of each expert has another rate; each number of rows has its own kernels."""
    rates = RATES[codebook]
    where = {"gate": 0, "up": 3, "down": 5}
    experts = make_experts(
        len(rates),
        hidden=200,
        intermediate=1300,
        bits=lambda projection, e: rates[(e + where[projection]) % len(rates)],
        codebook=codebook,
    )
    layout = experts.layout()
    x = torch.randn(tokens, 200).to(dtype)
    ids, _ = routing(tokens, 3, len(rates))
    ones = torch.ones(tokens, 1)
    want = experts.routes(x, ids)
    for slot in range(3):
        y = function(layout, x, ids[:, slot : slot + 1], ones)
        assert y.dtype == dtype
        assert worst_row(y, want[:, slot]) <= BOUNDS[dtype]


def test_a_codebook_for_each_projection():
    for names in (("3inst", "mul1", "mcg"), ("mul1", "mcg", "3inst"), ("mcg", "mul1", "mul1")):
        codebooks = dict(zip(("gate", "up", "down"), names, strict=True))
        experts = make_experts(3, bits=lambda p, e: 2 + e, codebook=codebooks)
        x = torch.randn(3, 256)
        ids, weights = routing(3, 2, 3)
        y = run(experts.layout(), x, ids, weights)
        assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]


def test_codebooks_without_a_kernel_are_exact():
    experts = make_experts(3, codebook="sqg_e4m3")
    x = torch.randn(3, 256)
    ids, weights = routing(3, 2, 3)
    y = run(experts.layout(), x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= 1e-6


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 33, 128, 129, 300, 1024])
@pytest.mark.parametrize("count", [2, 16, 64])
def test_numbers_of_tokens(tokens, count):
    experts = make_experts(count, bits=lambda p, e: 3 + e % 3)
    x = torch.randn(tokens, 256)
    ids, weights = routing(tokens, 2, count)
    y = run(experts.layout(), x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]


@pytest.mark.parametrize(
    "layer",
    [
        {"experts": 64, "intermediate": 2048},
        {"experts": 32, "intermediate": 8192},  # more pieces than a block keeps
        {"experts": 36, "hidden": 2048, "intermediate": 128, "slices": 2},
        {"experts": 16, "hidden": 4224, "intermediate": 384},  # three segments
        {"experts": 16, "hidden": 640, "intermediate": 4224, "gated": False},
    ],
)
@pytest.mark.parametrize("tokens", [5, 40, 128])
def test_shares_of_equal_cost(layer, tokens):
    """Rates of unlike cost, so that blocks have unlike numbers of pieces; with 5 tokens there are too few for that."""
    rates = (4, 7, 3, 8, 5, 2, 6)
    experts = make_experts(
        **{"hidden": 128, **layer}, bits=lambda projection, e: rates[(e + len(projection)) % 7]
    )
    x = torch.randn(tokens, experts.hidden)
    ids, weights = routing(tokens, 4, layer["experts"])
    activation = "silu" if layer.get("gated", True) else "relu2"
    y = run(experts.layout(), x, ids, weights, activation)
    assert worst_row(y, experts.want(x, ids, weights, activation)) <= BOUNDS[F32]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_blocks_that_go_through_several_tall_tiles(dtype):
    """More tiles than multiprocessors, of unlike rates and rows: what a ring of copies holds changes in between."""
    experts = make_experts(
        16, hidden=1152, intermediate=1152, bits=lambda p, e: 2 + (e + len(p)) % 5
    )
    x = torch.randn(1000, 1152).to(dtype)
    ids, weights = routing(1000, 2, 16)
    ids[:500, 0] = 3
    y = run(experts.layout(), x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype, tokens", [(F32, 3000), (BF16, 4500)])
def test_more_routes_than_go_through_together(dtype, tokens):
    experts = make_experts(16, hidden=128, intermediate=128, bits=lambda p, e: 3 + e % 3)
    x = torch.randn(tokens, 128).bfloat16()
    ids, weights = routing(tokens, 8, 16)
    y = run(experts.layout(), x, ids, weights, out_dtype=dtype)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[dtype]


# Few rows of an expert, tiles, and tall tiles.
EACH_WAY = pytest.mark.parametrize("tokens", [17, 140, 300])


@EACH_WAY
@pytest.mark.parametrize("slices", [1, 2, 4, 8])
def test_slices_add_up(slices, tokens):
    experts = make_experts(3, slices=slices, intermediate=128, bits=lambda p, e: 3 + e, biases=True)
    x = torch.randn(tokens, 256)
    ids, weights = routing(tokens, 2, 3)
    y = run(experts.layout(), x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]


@pytest.mark.parametrize("top_k", [1, 2, 5, 16])
def test_many_experts(top_k):
    experts = make_experts(256, hidden=128, intermediate=128, bits=lambda p, e: 2 + e % 5)
    x = torch.randn(7, 128)
    ids, weights = routing(7, top_k, 256)
    ids[0, 0] = 255
    y = run(experts.layout(), x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]


@pytest.mark.parametrize("tokens", [1, 9, 120, 200])
def test_all_tokens_on_one_expert(tokens):
    experts = make_experts(8)
    x = torch.randn(tokens, 256)
    ids = torch.full((tokens, 1), 5)
    weights = torch.rand(tokens, 1) + 0.1
    y = run(experts.layout(), x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_no_expert_contribute_exactly_nothing(dtype):
    layout = make_experts(biases=True).layout()
    x = torch.randn(3, 256)
    ids = torch.tensor([[0, 1], [2, 3], [3, 1]], dtype=dtype)
    weights = torch.rand(3, 2) + 0.1
    want = run(layout, x, ids, weights)
    limits = torch.iinfo(dtype)
    for bad in (-1, 4, 5, limits.min, limits.max, 1 << 20):
        more = torch.full((3, 5), bad, dtype=dtype)
        more[:, 1], more[:, 3] = ids[:, 0], ids[:, 1]
        w = torch.full((3, 5), float("nan"))
        w[:, 1], w[:, 3] = weights[:, 0], weights[:, 1]
        assert torch.equal(run(layout, x, more, w), want)
        nothing = run(layout, x, torch.full_like(ids, bad), weights * torch.nan)
        assert torch.equal(nothing, torch.zeros(3, 256))


def test_experts_held_elsewhere_and_experts_named_twice():
    experts = make_experts(6, absent=(0, 3), bits=lambda p, e: 2 + e % 4, biases=True)
    x = torch.randn(4, 256)
    ids = torch.tensor([[0, 3, 3], [1, 1, 2], [4, 0, 4], [5, 5, 5]])
    weights = torch.rand(4, 3) + 0.1
    y = run(experts.layout(), x, ids, weights)
    assert not y[0].any()
    assert worst_row(y[1:], experts.want(x, ids, weights)[1:]) <= BOUNDS[F32]


@EACH_WAY
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, biases, tokens):
    experts = make_experts(gated=activation != "relu2", biases=biases, intermediate=300)
    x = torch.randn(tokens, 256) * 2
    ids, weights = routing(tokens, 3, 4)
    y = run(experts.layout(), x, ids, weights, activation, routed_scale=2.5)
    want = experts.want(x, ids, weights, activation, scale=2.5)
    assert worst_row(y, want) <= BOUNDS[F32]


@pytest.mark.parametrize(
    ("activation", "after"),
    [(a, after) for a in ("silu", "gelu", "gelu_tanh") for after in (False, True)]
    + [("swiglu_oai", False)],
)
@EACH_WAY
def test_limits(activation, after, tokens):
    experts = make_experts(biases=True)
    x = torch.randn(tokens, 256) * 3
    ids, weights = routing(tokens, 2, 4)
    y = run(experts.layout(), x, ids, weights, activation, limit=1.25, limit_after=after)
    want = experts.want(x, ids, weights, activation, 1.25, after)
    assert worst_row(y, want) <= BOUNDS[F32]


@EACH_WAY
def test_large_and_small_activations(tokens):
    experts = make_experts()
    layout = experts.layout()
    ids, weights = routing(tokens, 2, 4)
    base = torch.randn(tokens, 256)
    for scale in (1e-18, 1e12):
        x = (base * scale).to(BF16)
        y = run(layout, x, ids, weights, out_dtype=F32)
        assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]
    x = base.to(BF16)
    x[:, 7] = 1e5
    y = run(layout, x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[BF16]


@EACH_WAY
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_blocks_of_any_magnitude_in_one_row(tokens, dtype):
    """Sums are in units of a row's largest scale so far, whichever order scales come in."""
    experts = make_experts(3, hidden=2304)
    x = torch.randn(tokens, 18, 128)
    factors = torch.tensor([0.0, 1e-12, 1e-6, 1e-3, 1.0, 1e3])
    x *= factors[torch.randint(0, 6, (tokens, 18))][..., None]
    x[:4] = torch.randn(4, 18, 128) * factors[1]
    x[:2, ::2] = 0.0
    x = x.reshape(tokens, 2304).to(dtype)
    ids, weights = routing(tokens, 2, 3)
    y = run(experts.layout(), x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[dtype]


@EACH_WAY
@pytest.mark.parametrize(
    ("hidden", "inner"), [(129, 1), (200, 300), (255, 129), (384, 128), (2200, 3300), (3300, 130)]
)
def test_padded_sizes(hidden, inner, tokens):
    """The last two: K is cut into segments of two lengths."""
    experts = make_experts(hidden=hidden, intermediate=inner, biases=True)
    x = torch.randn(tokens, hidden)
    ids, weights = routing(tokens, 2, 4)
    y = run(experts.layout(), x, ids, weights)
    assert y.shape == (tokens, hidden)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]


@pytest.mark.parametrize(("hidden", "inner"), [(8448, 128), (128, 8448)])
def test_rows_longer_than_a_block_holds(hidden, inner):
    experts = make_experts(2, hidden=hidden, intermediate=inner)
    x = torch.randn(130, hidden).to(BF16)
    ids, weights = routing(130, 1, 2)
    y = run(experts.layout(), x, ids, weights, out_dtype=F32)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]


def test_more_routes_of_a_token_than_a_warp_has_lanes():
    experts = make_experts(64, hidden=128, intermediate=128, biases=True)
    x = torch.randn(200, 128)
    ids, weights = routing(200, 40, 64)
    y = run(experts.layout(), x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]


@EACH_WAY
def test_tensors_that_begin_at_odd_elements(tokens):
    experts = make_experts(3, biases=True)
    layout = experts.layout().to("cuda")
    ids, weights = routing(tokens, 2, 3)
    x = torch.randn(tokens, 256).half()

    def odd(t):
        moved = torch.zeros(t.numel() + 1, dtype=t.dtype, device="cuda")
        moved[1:] = t.flatten()
        return moved[1:].view(t.shape)

    tensors = [
        t if t is None or t is layout.packed or t is layout.table else odd(t)
        for t in arguments(layout)
    ]
    y = OPS.rank_sliced_moe(
        odd(x.cuda()), odd(ids.cuda()), odd(weights.cuda()), *tensors, *options(layout)
    )
    assert worst_row(y.cpu(), experts.want(x, ids, weights)) <= BOUNDS[F32]


@EACH_WAY
@pytest.mark.parametrize("slices", [1, 4])
def test_vectors_that_experts_share(slices, tokens):
    experts = make_experts(3, slices=slices, intermediate=128, bits=lambda p, e: 3 + e)
    x = torch.randn(tokens, 256)
    ids, weights = routing(tokens, 2, 3)
    for projection, kind in (("gate", "suh"), ("up", "suh"), ("down", "svh")):
        for r in range(slices):
            one = getattr(getattr(experts, projection)[0][r], kind)
            for ranks in getattr(experts, projection):
                object.__setattr__(ranks[r], kind, one)
    y = run(experts.layout(), x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]
    for gate, up in zip(experts.gate, experts.up, strict=True):
        for r in range(slices):
            object.__setattr__(gate[r], "suh", up[r].suh)
    layout = experts.layout()
    assert layout.gate_suh is layout.up_suh
    y = run(layout, x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights)) <= BOUNDS[F32]


def test_one_vector_of_gate_among_many_of_up():
    """Both begin at the same address."""
    experts = make_experts(3)
    for ts in experts.gate:
        object.__setattr__(ts[0], "suh", experts.up[0][0].suh)
    layout = experts.layout()
    object.__setattr__(layout, "gate_suh", layout.up_suh[:1])
    x = torch.randn(5, 256)
    ids, weights = routing(5, 2, 3)
    on_gpu = layout.to("cuda")
    object.__setattr__(on_gpu, "gate_suh", on_gpu.up_suh[:1])
    y = OPS.rank_sliced_moe_inference(
        x.cuda(), ids.cuda(), weights.cuda(), *arguments(on_gpu), *options(on_gpu)
    )
    assert worst_row(y.cpu(), experts.want(x, ids, weights)) <= BOUNDS[F32]


@EACH_WAY
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(value, tokens):
    layout = make_experts().layout()
    x = torch.randn(tokens, 256)
    ids, weights = routing(tokens, 2, 4)
    want = run(layout, x, ids, weights)
    x[1, 200] = value
    y = run(layout, x, ids, weights)
    others = [row for row in range(tokens) if row != 1]
    assert not y[1].isfinite().any()
    assert torch.equal(y[others], want[others])


@EACH_WAY
def test_ids_of_no_expert_beside_others(tokens):
    experts = make_experts(6, absent=(0, 3), biases=True)
    x = torch.randn(tokens, 256)
    ids, weights = routing(tokens, 4, 6)
    ids[::3, 1], ids[1::5, 2] = -1, 1 << 40
    ids[2] = torch.tensor([0, 3, -7, 6])
    y = run(experts.layout(), x, ids, weights)
    want = experts.want(x, ids, weights)
    hit = np.abs(want).sum(1) > 0
    assert not y[~torch.from_numpy(hit)].any()
    assert worst_row(y[torch.from_numpy(hit)], want[hit]) <= BOUNDS[F32]


def test_a_plan_covers_all_that_is_smaller():
    sizes = {"experts": 100, "slices": 2, "hidden": 3200, "intermediate": 3300, "device": "cuda"}
    for tokens, top_k in ((1, 1), (17, 2), (86, 8), (129, 8), (3000, 5), (9000, 7)):
        nbytes = trellis_ops.moe_plan(tokens, top_k, **sizes).nbytes
        for fewer in (1, tokens // 3, tokens - 1):
            assert nbytes >= trellis_ops.moe_plan(max(fewer, 1), top_k, **sizes).nbytes
        for fewer in (1, top_k - 1):
            assert nbytes >= trellis_ops.moe_plan(tokens, max(fewer, 1), **sizes).nbytes
        smaller = {"experts": (98, 16, 1), "slices": (1,), "hidden": (3072, 128)}
        for name, values in {**smaller, "intermediate": (3000, 128)}.items():
            for less in values:
                assert nbytes >= trellis_ops.moe_plan(tokens, top_k, **{**sizes, name: less}).nbytes


def test_strides():
    layout = make_experts().layout().to("cuda")
    ids, weights = (t.cuda() for t in routing(12, 2, 4))
    base = torch.randn(12, 2, 256, device="cuda")
    wide = torch.stack((ids, ids + 7), 2)

    def moe(x, ids, weights):
        return OPS.rank_sliced_moe_inference(x, ids, weights, *arguments(layout), *options(layout))

    want = moe(base[:, 1].contiguous(), ids, weights)
    assert torch.equal(moe(base[:, 1], wide[..., 0], weights.t().contiguous().t()), want)


# ---- determinism ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_same_bits_every_time_and_for_any_number_of_tokens(dtype):
    layout = make_experts(8, intermediate=2304, bits=lambda p, e: 2 + e % 4).layout()
    x = torch.randn(128, 256).to(dtype)
    ids, weights = routing(128, 3, 8)
    want = run(layout, x, ids, weights)
    for _ in range(20):
        assert torch.equal(run(layout, x, ids, weights), want)
    for first, last in ((0, 1), (3, 9), (40, 73), (0, 127)):
        part = run(layout, x[first:last], ids[first:last], weights[first:last])
        assert torch.equal(part, want[first:last])
    large = torch.randn(500, 256).to(dtype)
    ids, weights = routing(500, 3, 8)
    assert torch.equal(run(layout, large, ids, weights), run(layout, large, ids, weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"hidden": 2304, "intermediate": 128},  # two segments of K; a single 128-block
        {"hidden": 100, "intermediate": 2100, "biases": True},
        {"experts": 40, "slices": 4, "hidden": 640, "intermediate": 256, "biases": True},
        {"codebook": "mul1", "gated": False, "absent": (1,)},
        {"hidden": 128, "intermediate": 8192, "slices": 4},  # more pieces than a block keeps
    ],
)
def test_few_routes_have_the_bits_of_few_rows(layer, dtype):
    """Every way of rows to experts: one each, several, more than one pass serves, none, all to one."""
    layer = {"experts": 5, "bits": lambda p, e: 2 + (e + len(p)) % 5, **layer}
    layout = make_experts(**layer).layout()
    activation = "silu" if layer.get("gated", True) else "relu2"
    for tokens, top_k in ((1, 1), (1, 5), (3, 2), (3, 5), (8, 2), (16, 1)):
        x = torch.randn(tokens, layer.get("hidden", 256)).to(dtype)
        ids, weights = routing(tokens, min(top_k, 5), layer["experts"])
        for only in (ids, torch.zeros_like(ids), torch.where(ids == 0, -1, ids).int()):
            want = few_rows(layout, x, only, weights, activation)
            assert torch.equal(few_routes(layout, x, only, weights, activation), want)
            assert not want.isnan().any()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swiglu_oai"])
def test_activations_have_one_set_of_bits(activation):
    layout = make_experts(5, biases=True).layout()
    x = 3 * torch.randn(4, 256)
    ids, weights = routing(4, 4, 5)
    want = few_rows(layout, x, ids, weights, activation, limit=2.0)
    assert torch.equal(few_routes(layout, x, ids, weights, activation, limit=2.0), want)


def test_no_expert_at_all_many_times():
    """The rotation has nothing to do then, and must not let the products start before the sort has ended."""
    layout = make_experts(8).layout().to("cuda")
    x = torch.randn(64, 256, device="cuda")
    ids, weights = (t.cuda() for t in routing(64, 8, 8))
    rest = *arguments(layout), *options(layout), True, False
    for _ in range(100):
        OPS._rank_sliced_moe_route(x, ids, weights, *rest)
        assert not OPS._rank_sliced_moe_route(x, torch.full_like(ids, -1), weights, *rest).any()


def test_a_table_that_begins_between_two_pieces():
    layout = make_experts(4).layout().to("cuda")
    x = torch.randn(3, 256)
    ids, weights = routing(3, 2, 4)
    want = few_routes(layout, x, ids, weights)
    shifted = torch.empty(layout.table.numel() + 1, dtype=torch.int64, device="cuda")[1:]
    table = shifted.view(layout.table.shape).copy_(layout.table)
    assert torch.equal(few_routes(replace(layout, table=table), x, ids, weights), want)


# ---- capture, workspaces, streams -------------------------------------------------------------


def module_of(seed: int = 0) -> Exl3MoE:
    experts = make_experts(8, bits=lambda p, e: 3 + e % 3, seed=seed)
    return Exl3MoE(experts.layout()).cuda()


def test_capture_at_any_number_of_tokens():
    """The first call of each size is a captured one; replays equal eager and allocate nothing."""
    module = module_of()
    for tokens in (*range(1, 41), 200, 512):
        x = torch.randn(tokens, 256, device="cuda").bfloat16()
        ids, weights = (t.cuda() for t in routing(tokens, 2, 8))
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = module(x, ids, weights)
        x.copy_(torch.randn_like(x))
        new_ids, new_weights = routing(tokens, 2, 8, seed=tokens)
        ids.copy_(new_ids), weights.copy_(new_weights)
        before = torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        assert torch.equal(y, module(x, ids, weights))


def test_first_call_of_a_process_is_captured():
    script = """
        import sys, torch
        sys.path[:0] = sys.argv[1:]
        from experts import make_experts, routing
        from trellis_ops import Exl3MoE
        module = Exl3MoE(make_experts(4).layout()).cuda()
        x = torch.randn(3, 256, device="cuda")
        ids, weights = (t.cuda() for t in routing(3, 2, 4))
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = module(x, ids, weights)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, module(x, ids, weights))
        print("equal")
    """
    folders = [path for path in sys.path if path.endswith("tests")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *folders], capture_output=True, text=True
    )
    assert done.stdout.strip() == "equal", done.stderr


def test_a_workspace_is_all_that_a_call_needs():
    module = module_of()
    plan = module.plan(64, 2)
    workspace = Workspace(plan)
    assert workspace.buffer.nbytes == plan.nbytes
    for tokens in (1, 5, 64):
        torch.cuda.empty_cache()  # a block that was larger than needed would count as a whole
        x = torch.randn(tokens, 256, device="cuda")
        ids, weights = (t.cuda() for t in routing(tokens, 2, 8))
        with torch.no_grad():
            module.workspace = None
            want = module(x, ids, weights)
            module.workspace = workspace
            workspace.buffer.fill_(0xFF)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y = module(x, ids, weights)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()  # comparing takes some too
        assert torch.equal(y, want)
        assert peak - before <= -(-y.nbytes // 512) * 512
    with pytest.raises(ValueError, match=r"tokens is 65, expected at most 64"):
        module(torch.randn(65, 256, device="cuda"), *(t.cuda() for t in routing(65, 2, 8)))


def test_many_captures_do_not_grow_memory():
    module = module_of()
    x = torch.randn(7, 256, device="cuda")
    ids, weights = (t.cuda() for t in routing(7, 2, 8))
    module.workspace = Workspace(module.plan(7, 2))
    pool = torch.cuda.graph_pool_handle()
    used = []
    for _ in range(200):
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph, pool=pool):
            module(x, ids, weights)
        graph.replay()
        torch.cuda.synchronize()
        del graph
        used.append(torch.cuda.memory_reserved())
    assert used[-1] == used[10]


def test_two_models_on_two_streams():
    modules = [module_of(0), module_of(1)]
    x = torch.randn(16, 256, device="cuda")
    ids, weights = (t.cuda() for t in routing(16, 2, 8))
    streams = [torch.cuda.Stream() for _ in modules]
    with torch.no_grad():
        wants = [module(x, ids, weights) for module in modules]
        for module in modules:
            module.workspace = Workspace(module.plan(16, 2))
        torch.cuda.synchronize()
        got = [[], []]
        for _ in range(50):
            for i, (module, stream) in enumerate(zip(modules, streams, strict=True)):
                with torch.cuda.stream(stream):
                    got[i].append(module(x, ids, weights))
        torch.cuda.synchronize()
    for want, results in zip(wants, got, strict=True):
        assert all(torch.equal(y, want) for y in results)


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_whatever_is_in_front_is_waited_for(tokens):
    """The first launch begins while what writes x, ids or weights still runs. Eager and captured."""
    module = module_of()
    source = torch.randn(tokens, 256, device="cuda").bfloat16()
    x = torch.empty_like(source)
    routings = [tuple(t.cuda() for t in routing(tokens, 2, 8, seed=seed)) for seed in range(4)]
    ids, weights = (torch.empty_like(t) for t in routings[0])

    def results(between) -> list[torch.Tensor]:
        found = []
        for new_ids, new_weights in routings:
            torch.add(new_ids, 0, out=ids), torch.mul(new_weights, 0.1, out=weights)
            x.copy_(source)
            for _ in range(3):
                between()
                y = module(x, ids, weights)
                between()
                found.append(y)
                torch.tanh(y, out=x)
        return found

    with torch.no_grad():
        assert_nothing_is_missed(results)


def test_compiles_whole_and_without_a_compilation_for_each_size():
    from torch._dynamo.utils import counters

    module = module_of()
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (300, 1, 2, 17, 40):
            x = torch.randn(tokens, 256, device="cuda").bfloat16()
            ids, weights = (t.cuda() for t in routing(tokens, 2, 8))
            assert torch.equal(compiled(x, ids, weights), module(x, ids, weights))
    assert counters["stats"]["unique_graphs"] <= 2


def test_gradients():
    experts = make_experts(4)
    module = Exl3MoE(experts.layout()).cuda()
    ids, weights = (t.cuda() for t in routing(5, 2, 4))
    x = torch.randn(5, 256, device="cuda", requires_grad=True)
    weights.requires_grad_()
    y = module(x, ids, weights)
    direction = torch.randn_like(y)
    y.backward(direction)
    step = 1e-3
    change = torch.randn(5, 256).double().numpy()
    there, back = (
        experts.want(
            torch.from_numpy(x.detach().cpu().double().numpy() + s * change),
            ids.cpu(),
            weights.detach().cpu(),
        )
        for s in (step, -step)
    )
    want = float(((there - back) / (2 * step) * direction.cpu().double().numpy()).sum())
    got = float((x.grad.cpu().double().numpy() * change).sum())
    assert abs(got - want) <= 1e-3 * np.linalg.norm(change) * np.linalg.norm(
        x.grad.cpu().double().numpy()
    )
    routes = experts.routes(x.detach().cpu(), ids.cpu())
    by_weight = (routes * direction.cpu().double().numpy()[:, None]).sum(-1)
    assert worst_row(weights.grad.cpu(), by_weight) <= 1e-3
