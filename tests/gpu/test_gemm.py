"""trellis_gemm on a GPU: right for every codebook, rate and m; the same bits every time."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import oracle
import pytest
import torch
from layers import BOUNDS, CASES, DTYPES, make_layer
from waiting import assert_nothing_is_missed

import trellis_ops

FORCED = torch.ops.trellis_ops._trellis_gemm_route


# As in csrc/cuda/gemm/problem.h: what each route takes at most, and shares that cut its work anyhow
# (negative: slices of a tile by the blocks of a cluster).
SMALL, WIDE_64, WIDE_128, WIDE_256, TILED_128 = 1, 2, 3, 4, 5
SHARES = {
    SMALL: (1, 2, 3, 7, 17, 18, 19, 40, 1000),
    WIDE_64: (1, 2, 3, 5, 9, 17, 18, 19, 1000, -1, -2, -4, -8),
    WIDE_128: (1, 2, 3, 5, 9, 17, 18, 19, 1000, -1, -2, -4, -8),
    WIDE_256: (1, 2, 3, 5, 9, 17, 18, 19, 1000),
    TILED_128: (1, 2, 3, 5, 9, 17, 18, 19, 1000),
}


def on_gpu(layer):
    return layer.trellis.cuda(), layer.suh.cuda(), layer.svh.cuda()


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    if not got.isfinite().all():
        return float("inf")
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    return float(error.max())


@pytest.mark.parametrize(("codebook", "bits"), CASES)
def test_every_m_meets_the_bound(codebook, bits):
    layer = make_layer(codebook, bits, rows=640, columns=384)
    weight = torch.from_numpy(layer.weight()).cuda()
    parts = on_gpu(layer)
    for dtype in DTYPES:
        x = torch.randn(130, 640, device="cuda").to(dtype)
        want = x.double() @ weight
        for m in range(1, 131):
            y = trellis_ops.trellis_gemm(x[:m], *parts, codebook=codebook)
            assert y.dtype == dtype and worst_row(y, want[:m]) <= BOUNDS[dtype], m


@pytest.mark.parametrize("route", SHARES)
@pytest.mark.parametrize(("codebook", "bits"), [c for c in CASES if "sqg" not in c[0]])
def test_every_route_meets_the_bound(codebook, bits, route):
    layer = make_layer(codebook, bits, rows=640, columns=384)
    parts = on_gpu(layer)
    x = torch.randn(130, 640, device="cuda").half()
    want = x.double() @ torch.from_numpy(layer.weight()).cuda()
    for m in range(1, 131):
        y = FORCED(x[:m], *parts, None, layer.code, 384, torch.float32, route, 0)
        assert worst_row(y, want[:m]) <= BOUNDS[torch.float32], m


@pytest.mark.parametrize("m", [1, 4, 5, 9, 17, 33, 64, 129, 300])
@pytest.mark.parametrize("route", SHARES)
@pytest.mark.parametrize(
    ("codebook", "bits"), [("mcg", 3), ("3inst", 8), ("mul1", 4), ("mul1", 2.5)]
)
def test_every_cut_meets_the_bound(codebook, bits, route, m):
    """Stretches of any length: one worker for all, one for each piece, any between; and slices."""
    layer = make_layer(codebook, bits, rows=1152, columns=640)
    x = torch.randn(m, 1100, device="cuda").half()
    want = x.double() @ torch.from_numpy(layer.weight()[:1100, :550]).cuda()
    bias = torch.randn(550, device="cuda")
    for share in SHARES[route]:
        y = FORCED(x, *on_gpu(layer), bias, layer.code, 550, torch.float32, route, share)
        assert worst_row(y, want + bias.double()) <= BOUNDS[torch.float32], share
        again = FORCED(x, *on_gpu(layer), bias, layer.code, 550, torch.float32, route, share)
        assert torch.equal(y, again)


@pytest.mark.parametrize(
    ("m", "rows", "columns"),
    [(m, 2048, 1152) for m in (128, 129, 192, 256, 257, 512, 513, 1000)]
    # A round of whole tiles, then tiles in parts or in stretches, on 132 multiprocessors.
    + [(128, 512, 38400), (300, 512, 11008), (700, 2048, 11008), (900, 512, 11008)],
)
def test_many_rows(m, rows, columns):
    layer = make_layer("mcg", 4, rows=rows, columns=columns)
    x = torch.randn(m, rows, device="cuda").bfloat16()
    bias = torch.randn(columns, device="cuda")
    want = x.double() @ torch.from_numpy(layer.weight()).cuda() + bias.double()
    y = trellis_ops.trellis_gemm(x, *on_gpu(layer), bias, codebook="mcg")
    assert worst_row(y, want) <= BOUNDS[torch.bfloat16]


def test_few_rows_over_whole_tiles_go_apart():
    """Where another tile of 256 rows costs more than another launch; each has the bits that it has alone."""
    layer = make_layer("mcg", 4, rows=512, columns=28672)
    weight, parts = torch.from_numpy(layer.weight()).cuda(), on_gpu(layer)
    bias = torch.randn(28672, device="cuda")
    all_x = torch.randn(769, 512, device="cuda").bfloat16()

    def call(x):
        return trellis_ops.trellis_gemm(x, *parts, bias, codebook="mcg")

    for m in (257, 264, 266, 282, 320, 384, 513, 640, 769):
        x, tiles = all_x[:m], m // 256 * 256
        y = call(x)
        assert worst_row(y, x.double() @ weight + bias.double()) <= BOUNDS[torch.bfloat16], m
        assert torch.equal(y, torch.cat([call(x[:tiles]), call(x[tiles:])])), m
    if torch.cuda.get_device_capability() == (9, 0):
        names = kernels_of(lambda: call(all_x[:257]))
        assert "wide_kernel" in names and "small_kernel" in names


def test_the_longest_sums():
    layer = make_layer("mul1", 2, rows=28672, columns=256)
    weight = torch.from_numpy(layer.weight()).cuda()
    for m, route in (
        (1, SMALL),
        (8, SMALL),
        (32, SMALL),
        (64, WIDE_64),
        (300, WIDE_256),
        (300, TILED_128),
    ):
        x = torch.randn(m, 28672, device="cuda").half()
        y = FORCED(x, *on_gpu(layer), None, layer.code, 256, torch.float32, route, 0)
        assert worst_row(y, x.double() @ weight) <= BOUNDS[torch.float32]


def test_offsets_beyond_two_to_the_31():
    """y has more than 2^31 elements, and so has the input of a layer with few outputs."""
    layer = make_layer("mul1", 2, rows=128, columns=49152)
    parts = on_gpu(layer)
    m = 2**31 // 49152 + 300
    x = torch.randn(m, 128, device="cuda").half()
    y = trellis_ops.trellis_gemm(x, *parts, codebook="mul1")
    weight = torch.from_numpy(layer.weight()).cuda()
    rows = [0, 1, m // 2, m - 301, m - 2, m - 1]
    assert worst_row(y[rows], x[rows].double() @ weight) <= BOUNDS[torch.float16]
    del y

    layer = make_layer("mcg", 2, rows=49152, columns=128)
    x = torch.zeros(m, 49152, device="cuda", dtype=torch.float16)
    x[rows] = torch.randn(len(rows), 49152, device="cuda").half()
    y = trellis_ops.trellis_gemm(x, *on_gpu(layer), codebook="mcg")
    want = x[rows].double() @ torch.from_numpy(layer.weight()).cuda()
    assert worst_row(y[rows], want) <= BOUNDS[torch.float16]
    assert not y[2 : m // 2].any()


def test_packed_words_beyond_two_to_the_31():
    """The last column block of a matrix of 2.2e9 packed words."""
    in_tiles, out_tiles = 16, 16 * 1024 * 1024 // 16 + 8
    words = 128
    layer = make_layer("mul1", 8, rows=256, columns=128)
    trellis = torch.zeros(in_tiles, out_tiles, words, dtype=torch.int16, device="cuda")
    assert trellis.numel() > 2**31
    trellis[:, -8:] = layer.trellis.cuda()
    out = out_tiles * 16
    svh = torch.zeros(out, dtype=torch.float16, device="cuda")
    svh[-128:] = layer.svh.cuda()
    weight = torch.from_numpy(layer.weight()).cuda()
    for m in (1, 16, 40):
        x = torch.randn(m, 256, device="cuda").half()
        y = trellis_ops.trellis_gemm(x, trellis, layer.suh.cuda(), svh, codebook="mul1")
        assert worst_row(y[:, -128:], x.double() @ weight) <= BOUNDS[torch.float16]
        assert not y[:, :-128].any()


@pytest.mark.parametrize("m", [1, 7, 32])
def test_rows_do_not_depend_on_how_many_there_are(m):
    """Within the rows that one kernel takes, a row's result has the same bits alone and in company."""
    layer = make_layer("mcg", 4, rows=1024, columns=512)
    parts = on_gpu(layer)
    x = torch.randn(m, 1024, device="cuda").bfloat16()
    of_all = FORCED(x, *parts, None, layer.code, 512, torch.bfloat16, WIDE_64, 0)
    for row in range(m):
        alone = FORCED(x[row : row + 1], *parts, None, layer.code, 512, torch.bfloat16, WIDE_64, 0)
        assert torch.equal(alone[0], of_all[row])


@pytest.mark.parametrize(("rows", "columns", "out"), [(208, 176, 176), (112, 144, 127)])
def test_without_vectors_and_with_ragged_tiles(rows, columns, out):
    """In the second case the last column block has one tile, all of which is trimmed off."""
    layer = make_layer("mul1", 3, rows=rows, columns=columns)
    inner = torch.from_numpy(oracle.inner_weight(layer.trellis.numpy(), "mul1")).cuda().double()
    for m in (1, 8, 12, 32, 33, 100, 200):
        x = torch.randn(m, rows, device="cuda")
        y = trellis_ops.trellis_gemm(
            x, layer.trellis.cuda(), None, None, codebook="mul1", out_features=out
        )
        assert y.shape == (m, out)
        assert worst_row(y, x.double() @ inner[:, :out]) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("m", [2, 200])
def test_a_matrix_without_inputs_gives_the_bias(m):
    trellis = torch.empty(0, 24, 48, dtype=torch.int16, device="cuda")
    bias = torch.randn(384, device="cuda")
    x = torch.empty(m, 0, device="cuda")
    y = trellis_ops.trellis_gemm(x, trellis, None, None, bias, codebook="mcg")
    assert torch.equal(y, bias.expand(m, 384))


@pytest.mark.parametrize("codebook", ["mcg", "mul1"])
@pytest.mark.parametrize("m", [1, 6, 16, 32, 64, 128, 200])
def test_any_finite_activation(codebook, m):
    layer = make_layer(codebook, 4, rows=512, columns=256)
    weight = torch.from_numpy(layer.weight()).cuda()
    parts = on_gpu(layer)
    base = torch.randn(m, 512, device="cuda")
    column = base.clone()
    column[:, 5] = 1e5
    cases = [
        column.bfloat16(),
        (base * 1e30).bfloat16(),
        (base * 1e30).float(),
        (base * 1e36).float(),
        (base * 1e-30).float(),
        (base * 1e-37).float(),
        torch.full((m, 512), 6e4, device="cuda", dtype=torch.float16),
    ]
    for x in cases:
        out = torch.float32 if x.dtype == torch.float16 else x.dtype
        y = trellis_ops.trellis_gemm(x, *parts, codebook=codebook, out_dtype=out)
        assert worst_row(y, x.double() @ weight) <= BOUNDS[out]


@pytest.mark.parametrize("codebook", ["mcg", "mul1"])
def test_outliers_in_one_block_do_not_cost_the_others(codebook):
    """A block 1,000 times the rest: what the other blocks add must keep its own precision."""
    layer = make_layer(codebook, 4, rows=512, columns=256)
    weight = torch.from_numpy(layer.weight()).cuda()
    parts = on_gpu(layer)
    for m in (1, 5, 16, 64, 200):
        small = torch.randn(m, 512, device="cuda").half().float()
        loud, quiet = small.clone(), small.clone()
        loud[:, 128:256] *= 1000
        loud[:, 256:], loud[:, :128] = small[:, 256:], small[:, :128]
        quiet[:, 128:256] = 0
        only_loud = loud - quiet
        both = trellis_ops.trellis_gemm(loud, *parts, codebook=codebook).double()
        alone = trellis_ops.trellis_gemm(only_loud, *parts, codebook=codebook).double()
        want = quiet.double() @ weight
        error = ((both - alone) - want).norm(dim=-1) / want.norm(dim=-1)
        # The difference of two float32 results a thousand times as large, plus the bound itself.
        assert float(error.max()) <= 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("codebook", ["mcg", "mul1"])
def test_what_is_not_finite_stays_in_its_row(codebook, value):
    layer = make_layer(codebook, 4, rows=512, columns=256)
    parts = on_gpu(layer)
    for m in (3, 7, 12, 40, 100, 200):
        x = torch.randn(m, 512, device="cuda").bfloat16()
        want = trellis_ops.trellis_gemm(x, *parts, codebook=codebook)
        x[1, 200] = value
        y = trellis_ops.trellis_gemm(x, *parts, codebook=codebook)
        assert not y[1].isfinite().any()
        others = [row for row in range(m) if row != 1]
        assert torch.equal(y[others], want[others])


@pytest.mark.parametrize(
    ("m", "rows", "columns"),
    [(m, 2048, 1024) for m in (1, 4, 7, 16, 32, 64, 100, 300)]
    + [(257, 512, 28672), (330, 512, 28672)],  # two launches
)
def test_repeats_and_replays_bit_for_bit(m, rows, columns):
    layer = make_layer("mcg" if m % 2 else "mul1", 4, rows=rows, columns=columns)
    parts = on_gpu(layer)
    x = torch.randn(m, rows, device="cuda").bfloat16()

    def call():
        return trellis_ops.trellis_gemm(x, *parts, codebook=layer.codebook)

    want = call()
    for _ in range(100):
        assert torch.equal(call(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    y.fill_(float("nan"))
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, want)
    assert torch.cuda.memory_allocated() == held


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 16, 17, 32, 33, 128, 300])
def test_first_call_of_a_process_may_be_captured(m):
    script = f"""
        import torch, trellis_ops
        torch.manual_seed(0)
        shape = (32, 16, 64)
        trellis = torch.randint(-32768, 32768, shape, dtype=torch.int16).cuda()
        suh, svh = torch.ones(512).half().cuda(), torch.ones(256).half().cuda()
        x = torch.randn({m}, 512).half().cuda()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = trellis_ops.trellis_gemm(x, trellis, suh, svh, codebook="mcg")
        graph.replay()
        eager = trellis_ops.trellis_gemm(x, trellis, suh, svh, codebook="mcg")
        assert eager.isfinite().all() and torch.equal(y, eager)
        print("same")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.stdout == "same\n", done.stderr


def test_strides_and_alignment():
    layer = make_layer("mul1", 4, rows=256, columns=384)
    trellis, suh, svh = on_gpu(layer)
    base = torch.randn(64, 600, device="cuda").half()
    moved = torch.zeros(trellis.numel() + 1, dtype=torch.int16, device="cuda")
    moved[1:] = trellis.flatten()
    odd_trellis = moved[1:].view(trellis.shape)

    def odd(vector):
        return torch.cat([vector[:1], vector])[1:]

    views = [base[:5, :512:2], base[:, 10:266], base.t()[:256].t()[1:6], base[3:4, 1:257]]
    views += [base[:1, :256].expand(7, 256), base[:6, :256].view(2, 3, 256).transpose(0, 1)]
    views += [base[:, 3:259], base.repeat(3, 1)[:150, 5:261]]
    for x in views:
        want = trellis_ops.trellis_gemm(x.contiguous(), trellis, suh, svh, codebook="mul1")
        assert torch.equal(trellis_ops.trellis_gemm(x, trellis, suh, svh, codebook="mul1"), want)
        odd_parts = odd_trellis, odd(suh), odd(svh)
        assert torch.equal(trellis_ops.trellis_gemm(x, *odd_parts, codebook="mul1"), want)


def test_current_stream_is_honoured():
    layer = make_layer("mcg", 4, rows=256, columns=256)
    parts = on_gpu(layer)
    x = torch.zeros(2, 256, device="cuda")
    want = trellis_ops.trellis_gemm(torch.full_like(x, 3.0), *parts, codebook="mcg")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(1e8))
        x.fill_(3.0)
        y = trellis_ops.trellis_gemm(x, *parts, codebook="mcg")
    stream.synchronize()
    assert torch.equal(y, want)


@pytest.mark.parametrize("m", [1, 40, 300])
def test_whatever_is_in_front_is_waited_for(m):
    """
    A kernel that writes x or the weights, another op, a copy, a fill, another stream; eager and
    captured.
    """
    layers = [on_gpu(make_layer("mcg", 4, rows=2048, columns=2048, seed=seed)) for seed in (0, 1)]
    source = torch.randn(m, 2048, device="cuda").half()
    x, weights = torch.empty_like(source), tuple(torch.empty_like(part) for part in layers[0])
    side = torch.cuda.Stream()

    def results(between) -> list[torch.Tensor]:
        def op(x):
            between()
            y = trellis_ops.trellis_gemm(x, *weights, codebook="mcg")
            between()
            return y

        found = []
        for layer in layers:
            for part, new in zip(weights, layer, strict=True):
                torch.add(new, 0, out=part)
            y = op(op(x.copy_(source)) * 0.5)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.copy_(y).mul_(0.25)
            torch.cuda.current_stream().wait_stream(side)
            found += [y, op(x), op(x.zero_())]
        return found

    assert_nothing_is_missed(results)


def test_empty_and_mixed_devices():
    layer = make_layer("mcg", 4)
    trellis, suh, svh = on_gpu(layer)
    empty = trellis_ops.trellis_gemm(
        torch.empty(0, 7, 256, device="cuda"), trellis, suh, svh, codebook="mcg"
    )
    assert empty.shape == (0, 7, 384)
    x = torch.randn(2, 256, device="cuda")
    with pytest.raises(ValueError, match=r"trellis is on cpu, expected cuda:0"):
        trellis_ops.trellis_gemm(x, layer.trellis, layer.suh, layer.svh, codebook="mcg")
    assert trellis_ops.trellis_gemm(x, trellis, suh, svh, codebook="mcg").isfinite().all()


@pytest.mark.parametrize("m", [1, 4, 64, 300])
def test_reduce_overhead(m):
    from torch._dynamo.utils import counters

    layer = make_layer("mcg", 4, rows=512, columns=512)
    module = trellis_ops.Exl3Linear.from_tensors(
        trellis_ops.TrellisTensor(layer.trellis, layer.suh, layer.svh, codebook="mcg")
    ).cuda()
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(m, 512, device="cuda").bfloat16()
    counters.clear()
    with torch.inference_mode():
        want = module(x)
        for _ in range(4):
            assert torch.equal(compiled(x), want)
    assert counters["inductor"]["cudagraph_skips"] == 0


def kernels_of(call) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages())


def test_one_compilation_serves_every_number_of_rows():
    """Compiled at m = 2048, the op still runs the kernel for few rows at m = 1."""
    from torch._dynamo.utils import counters

    layer = make_layer("mcg", 4, rows=512, columns=512)
    module = trellis_ops.Exl3Linear.from_tensors(
        trellis_ops.TrellisTensor(layer.trellis, layer.suh, layer.svh, codebook="mcg")
    ).cuda()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    wide = "wide_kernel" if torch.cuda.get_device_capability() == (9, 0) else "small_kernel"
    with torch.inference_mode():
        compiled(torch.randn(2048, 512, device="cuda").bfloat16())
        counters.clear()
        for m, kernel in ((4096, wide), (2, "small_kernel"), (300, wide), (32, "small_kernel")):
            x = torch.randn(m, 512, device="cuda").bfloat16()
            assert kernel in kernels_of(lambda x=x: compiled(x))
            assert torch.equal(compiled(x), module(x))
        assert counters["stats"]["unique_graphs"] == 0


def test_scratch_stays_small():
    """No copy of the decoded matrix: at 8192 x 28672 and 4,096 rows below 128 MiB beside x and y."""
    trellis = torch.randint(-32768, 32768, (512, 1792, 64), dtype=torch.int16, device="cuda")
    suh, svh = torch.ones(8192).half().cuda(), torch.ones(28672).half().cuda()
    x = torch.randn(4096, 8192, device="cuda").bfloat16()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = trellis_ops.trellis_gemm(x, trellis, suh, svh, codebook="mcg")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before - y.nbytes < 128 << 20


def test_opcheck():
    layer = make_layer("mul1", 3)
    for m in (0, 1, 3, 33, 200):
        x = torch.randn(m, 250, device="cuda").half()
        arguments = (x, *on_gpu(layer), None, layer.code, 384, torch.float16)
        torch.library.opcheck(torch.ops.trellis_ops.trellis_gemm_inference.default, arguments)
