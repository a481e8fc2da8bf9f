"""The trellis search: closed paths, quality, and agreement between instruction sets and threads."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from layers import CASES, RATES, closed_states

import trellis_ops
from trellis_ops import reference
from trellis_ops.formats import tiles

OPS = torch.ops.trellis_ops
ISAS = [isa for isa in range(8) if OPS._cpu_isas() >> isa & 1]
# Standard deviation of each codebook's values, the natural size of targets.
SPREAD = {"mul1": 1.0, "mcg": 1.244, "3inst": 1.244, "sqg_e4m3": 1.5, "sqg_fp16": 1.5}


def gaussian(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed))


def checked(targets, result, codebook, bits) -> torch.Tensor:
    """Squared error of each tile; the states are a closed path and the values are theirs."""
    states, values = result
    assert (states.dtype, values.dtype) == (torch.int32, torch.float32)
    assert states.shape == values.shape == targets.shape
    assert oracle.closed(states.numpy(), bits).all()
    assert np.array_equal(values.double().numpy(), oracle.table(codebook, bits)[states.numpy()])
    return (values - targets).square().sum(1)


def run(targets, bits, codebook, isa=None):
    if isa is None:
        return trellis_ops.quantize_tiles(targets, bits, codebook=codebook)
    code = oracle.CODEBOOKS.index(codebook)
    return OPS._quantize_tiles_isa(targets, int(16 * bits), code, isa)


@pytest.mark.parametrize(("codebook", "bits"), CASES)
def test_closed_paths_of_the_expected_error(codebook, bits):
    scale = SPREAD[codebook] * (1.0 if bits <= 2 else 0.93 if bits <= 4 else 0.8)
    targets = gaussian(4) * scale
    error = checked(targets, run(targets, bits, codebook), codebook, bits).sum()
    # In units of the least error that any code can have. High rates lose beyond the ends of the
    # codebook, and E4M3 values are too coarse for 6 bits.
    limit = 3.0 if (codebook, bits) == ("sqg_e4m3", 6) else {7: 1.7, 8: 2.6}.get(bits, 1.42)
    assert 1.0 < float(error / targets.square().sum()) * 4**bits < limit


@pytest.mark.parametrize("bits", RATES["mul1"])
def test_instruction_sets_agree(bits):
    targets = gaussian(3)
    results = [run(targets, bits, "mul1", isa) for isa in ISAS]
    errors = [checked(targets, result, "mul1", bits) for result in results]
    for result, error in zip(results, errors, strict=True):
        torch.testing.assert_close(error, errors[0], rtol=1e-4, atol=0)
        if bits <= 4:  # integer costs
            assert torch.equal(result[0], results[0][0])
    best = run(targets, bits, "mul1")
    assert torch.equal(best[0], results[-1][0])


@pytest.mark.parametrize(
    ("codebook", "bits", "scale", "mse"),
    [
        ("mul1", 2, 1.0, 0.0688),
        ("mul1", 3, 0.94, 0.01752),
        ("mul1", 4, 0.92, 0.00447),
        ("mcg", 2, 1.0, 0.0688),
        ("mcg", 3, 0.95, 0.01756),
        ("mcg", 4, 0.91, 0.00454),
        ("3inst", 2, 1.0, 0.0692),
        ("3inst", 3, 0.94, 0.01784),
        ("3inst", 4, 0.91, 0.00466),
    ],
)
def test_error_of_gaussian_targets(codebook, bits, scale, mse):
    targets = gaussian(176, seed=5)
    factor = scale * SPREAD[codebook]
    error = checked(targets * factor, run(targets * factor, bits, codebook), codebook, bits)
    assert float(error.mean()) / 256 / factor**2 == pytest.approx(mse, rel=0.02)


@pytest.mark.parametrize(("bits", "mse"), [(1.5, 0.137), (2.5, 0.0354), (3.5, 0.0094)])
def test_error_at_half_rates(bits, mse):
    targets = gaussian(64, seed=1)
    best = min(
        float(checked(targets * f, run(targets * f, bits, "mul1"), "mul1", bits).mean()) / f**2
        for f in (0.85, 0.92, 1.0)
    )
    assert 4.0**-bits < best / 256 < mse * 1.01


@pytest.mark.parametrize(
    ("codebook", "bits", "count"),
    [("mcg", 1, 12), ("mul1", 1.5, 16), ("3inst", 2, 12), ("mul1", 3.5, 8), ("sqg_fp16", 6, 4)],
)
def test_as_good_as_the_plain_search(codebook, bits, count):
    torch.set_num_threads(1)  # thousands of small operations
    targets = gaussian(count, seed=2) * SPREAD[codebook]
    code = oracle.CODEBOOKS.index(codebook)
    plain = reference.quantize_tiles(targets, int(16 * bits), code)
    want = checked(targets, plain, codebook, bits).sum()
    for isa in ISAS:
        got = checked(targets, run(targets, bits, codebook, isa), codebook, bits).sum()
        assert float(got) == pytest.approx(float(want), rel=0.01)


@pytest.mark.parametrize("bits", RATES["mul1"])
def test_targets_that_are_values_of_a_path_are_found_again(bits):
    states = closed_states(bits, 3, seed=7)
    targets = torch.from_numpy(oracle.table("mul1", bits)[states.numpy()]).float()
    for isa in ISAS:
        result = run(targets, bits, "mul1", isa)
        assert checked(targets, result, "mul1", bits).max() < 256 * 1e-6


def test_packing_what_was_found_gives_the_values_back():
    targets = gaussian(6)
    states, values = run(targets, 2.5, "mul1")
    trellis = trellis_ops.pack_trellis(states.view(2, 3, 256), 2.5)
    dense = trellis_ops.dequantize(trellis, codebook="mul1", dtype=torch.float32)
    assert torch.equal(tiles.matrix_to_tiles(dense).reshape(6, 256), values)


@pytest.mark.parametrize(("codebook", "bits"), [("mul1", 2), ("mcg", 5)])
def test_threads_neighbours_and_strides_change_nothing(codebook, bits):
    targets = gaussian(7)
    want = run(targets, bits, codebook)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for got, expected in zip(run(targets, bits, codebook), want, strict=True):
            assert torch.equal(got, expected)
    assert torch.equal(run(targets[4:5], bits, codebook)[0], want[0][4:5])
    assert torch.equal(run(targets.t().contiguous().t(), bits, codebook)[0], want[0])
    wide = torch.full((7, 300), float("nan"))
    wide[:, 3:259] = targets
    assert torch.equal(run(wide[:, 3:259], bits, codebook)[0], want[0])


def test_no_tiles():
    for isa in (None, *ISAS):
        states, values = run(torch.empty(0, 256), 3, "mul1", isa)
        assert (states.shape, values.shape) == ((0, 256), (0, 256))


@pytest.mark.parametrize("bits", [1, 2.5, 4, 5, 8])
def test_any_targets_give_closed_paths(bits):
    nan, inf = float("nan"), float("inf")
    targets = gaussian(14)
    targets[1, 7], targets[2], targets[3, ::3] = nan, nan, inf
    targets[4], targets[5, 0] = -inf, 3e38
    targets[6], targets[7], targets[8] = 3e38, 0.0, 1e-40
    targets[9], targets[10] = 100.0, -100.0
    targets[11, ::2], targets[12] = -3e38, targets[12] * 1e6
    zeroed = targets.nan_to_num(nan=0.0, posinf=inf, neginf=-inf)
    for isa in ISAS:
        states, values = run(targets, bits, "mul1", isa)
        assert oracle.closed(states.numpy(), bits).all()
        table = oracle.table("mul1", bits)
        assert np.array_equal(values.double().numpy(), table[states.numpy()])
        assert torch.equal(states, run(zeroed, bits, "mul1", isa)[0]), "a NaN counts as 0"
        clean = run(targets[[0, 13]], bits, "mul1", isa)[0]
        assert torch.equal(states[[0, 13]], clean), "tiles must not see each other"
        # Far out of reach the best path still leans as far as the trellis lets it.
        lean = {1: 1.444, 2.5: 1.706, 4: 2.718, 5: 2.310, 8: 2.718}[bits]
        assert values[9].mean() == pytest.approx(lean, abs=1e-3)
        assert values[6].mean() == pytest.approx(lean, abs=0.05)
        assert values[[4, 10]].mean(1).max() < -1.3
        assert values[7].square().mean() < 4.0**-bits
