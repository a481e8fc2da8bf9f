"""Every instruction set's GEMM where its integers are pressed hardest."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import pytest
import torch
from layers import BOUNDS, double, make_layer, worst_row

from trellis_ops.cli.env import ISAS

pytestmark = pytest.mark.usefixtures("one_thread")

OPS = torch.ops.trellis_ops
HERE = [isa for isa in range(len(ISAS)) if OPS._cpu_isas() >> isa & 1]
every_isa = pytest.mark.parametrize("isa", HERE, ids=[ISAS[isa] for isa in HERE])
CODEBOOKS = ("3inst", "mcg", "mul1", "sqg_e4m3", "sqg_fp16")


def run(x, layer, isa, out_dtype=torch.float32):
    parts = layer.trellis, layer.suh, layer.svh
    features = layer.trellis.shape[1] * 16
    return OPS._trellis_gemm_isa(x, *parts, None, layer.code, features, out_dtype, isa)


def run_unrotated(x, layer, isa):
    """Without scales, so that the kernel gets the activations as they are."""
    features = layer.trellis.shape[1] * 16
    return OPS._trellis_gemm_isa(
        x, layer.trellis, None, None, None, layer.code, features, torch.float32, isa
    )


def uneven_rows(features: int) -> dict[str, torch.Tensor]:
    """Rows that quantised activations may be bad at, before or after the rotation."""
    torch.manual_seed(0)
    spike = torch.zeros(features)
    spike[37] = 1
    tail = torch.randn(features) / torch.randn(features)
    wave = torch.ones(features)
    wave[1::2] = -1
    steps = torch.randn(features) * torch.logspace(0, -6, features)
    return {"spike": spike, "constant": torch.ones(features), "tail": tail, "wave": wave,
            "steps": steps}  # fmt: skip


@every_isa
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_uneven_activations(codebook, isa):
    layer = make_layer(codebook, 5, rows=512, columns=256)
    named = uneven_rows(512)
    x = torch.stack(list(named.values()))
    weight = layer.weight()
    for dtype, times in itertools.product((torch.float32, torch.float16), (1, 4)):
        given = x.to(dtype)  # five rows, and twenty
        y = run(given.repeat(times, 1), layer, isa, dtype)
        for i, name in enumerate(named):
            want = double(given[i : i + 1]) @ weight
            assert worst_row(y[i : i + 1], want) <= BOUNDS[dtype], (name, dtype)


@every_isa
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_the_largest_sums_fit(codebook, isa):
    """All weights as large as they get, and as large activations of their sign: no sum overflows."""
    table = oracle.table(codebook, 5)
    layer = make_layer(codebook, 5, rows=512, columns=256)
    for state in (int(table.argmax()), int(table.argmin())):
        # At 5 bits no constant stream repeats a state; the nearest is its own sixteen bits again.
        bits = np.tile([int(bit) for bit in f"{state:016b}"], 80)
        words = np.packbits(bits.reshape(-1, 32), axis=1).view(">u4").astype("<u4").view(np.int16)
        layer.trellis[:] = torch.from_numpy(words.ravel().copy())
        inner = oracle.inner_weight(layer.trellis.numpy(), codebook)
        x = torch.from_numpy(np.sign(inner[:, :12].T)).float() * 3
        y = run_unrotated(x, layer, isa)
        assert worst_row(y, double(x) @ inner) <= BOUNDS[torch.float32]


@every_isa
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_rounding_of_one_sign_does_not_add_up(codebook, isa):
    """Activations that are rounded, or cut in two, all alike: so many that an average shows."""
    layer = make_layer(codebook, 5, rows=4096, columns=256)
    inner = oracle.inner_weight(layer.trellis.numpy(), codebook)
    x = torch.empty(12, 4096)
    x[:] = torch.linspace(0.97, 1, 12)[:, None]
    x[:, ::128] = 1
    x[6:, 256::512] = 1.003
    for count in (4, 12):
        y = run_unrotated(x[-count:], layer, isa)
        assert worst_row(y, double(x[-count:]) @ inner) <= BOUNDS[torch.float32]


@every_isa
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_one_activation_far_larger_than_all_others(codebook, isa):
    """Then what is rounded off the others, and left out of their products, is most of the whole."""
    layer = make_layer(codebook, 5, rows=1024, columns=256)
    inner = oracle.inner_weight(layer.trellis.numpy(), codebook)
    x = torch.randn(36, 1024)
    x[::2] = x[::2].sign() + torch.randn(18, 1024) / 8
    x[:, 77] = torch.logspace(1.3, 4, 36)
    want = double(x) @ inner

    y = run_unrotated(x, layer, isa)
    assert worst_row(y, want) <= BOUNDS[torch.float32]
    assert worst_row(run_unrotated(x[:5], layer, isa), want[:5]) <= BOUNDS[torch.float32]
    # The same bits where no other row is like that.
    for row in (3, 8):
        others = torch.randn(9, 1024)
        others[4] = x[row]
        others[5], plain = torch.randn(2, 1024)
        assert torch.equal(run_unrotated(others, layer, isa)[4], y[row])
        spiked = run_unrotated(others, layer, isa)
        others[4] = plain
        assert torch.equal(run_unrotated(others, layer, isa)[5], spiked[5])


@every_isa
def test_a_row_has_the_same_bits_in_any_company(isa):
    """On either side of each change of method but the one at eight rows, and of a block of rows."""
    layer = make_layer("mcg", 3, rows=384, columns=256)
    x = torch.randn(530, 384)
    want = double(x) @ layer.weight()
    for most, counts in ((8, (1, 2, 3, 4, 7)), (530, (9, 16, 17, 64, 65, 511, 512, 513))):
        everything = run(x[:most], layer, isa)
        assert worst_row(everything, want[:most]) <= BOUNDS[torch.float32]
        for count in counts:
            assert torch.equal(run(x[:count], layer, isa), everything[:count]), count
            assert torch.equal(run(x[most - count : most], layer, isa), everything[-count:]), count


@every_isa
@pytest.mark.parametrize("rows", [1, 12])
def test_what_is_not_finite_stays_in_its_row(isa, rows):
    layer = make_layer("mul1", 2.5)
    x = torch.randn(rows + 2, 256)
    clean = run(x, layer, isa)
    x[0, 3], x[1, 250] = float("nan"), float("inf")
    y = run(x, layer, isa)
    assert not torch.isfinite(y[:2]).any()
    assert torch.equal(y[2:], clean[2:])


@every_isa
@pytest.mark.parametrize("rows", [3, 20])
def test_tiny_and_zero_rows(isa, rows):
    layer = make_layer("3inst", 4)
    x = torch.randn(rows, 256)
    want = double(x) @ layer.weight()
    x[1] = 0
    for scale in (2.0**-130, 2.0**-100, 2.0**100):
        y = run(x * scale, layer, isa).double() / scale
        assert worst_row(y[[0, 2]], want[[0, 2]]) <= BOUNDS[torch.float32]
        assert torch.equal(y[1], torch.zeros(384, dtype=torch.float64))


@every_isa
def test_threads_change_no_bit(isa):
    layer = make_layer("mul1", 4, rows=256, columns=512)
    x = torch.randn(40, 256)
    one = run(x, layer, isa)
    torch.set_num_threads(2)  # the fixture puts it back
    assert torch.equal(run(x, layer, isa), one)
