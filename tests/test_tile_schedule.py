"""How a product of many rows is cut among CUDA workers: all of it, once, and so that parts find one another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import trellis_ops  # noqa: F401 (defines the op)

OP = "trellis_ops::_tile_schedule"
KEY = "CompositeExplicitAutograd"
pytestmark = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key(OP, KEY),
    reason="needs a build with CUDA kernels",
)
FIELDS = "tiles", "steps", "slices", "cluster", "workers", "rounds", "rest", "share", "pitch"
# As in csrc/cuda/gemm/problem.h: rows of a tile.
ROUTES = {2: 64, 3: 128, 4: 256, 5: 128}


def schedule(*shape: int) -> dict[str, int]:
    op = torch.ops.trellis_ops._tile_schedule
    return {name: op(*shape, i) for i, name in enumerate(FIELDS)}


def stretches(s: dict[str, int], worker: int):
    """Tile, first and last step, and place of its part among the worker's, as tile.cuh walks."""
    at = worker * s["share"]
    stop = min(at + s["share"], s["rest"] * s["pitch"])
    while at < stop:
        rest, first = divmod(at, s["pitch"])
        length = min(s["pitch"] - first, stop - at)
        at += length
        place = 0 if worker * s["share"] >= rest * s["pitch"] else 1
        yield rest, first, min(first + length, s["steps"]), place


@settings(max_examples=500)
@example(m=300, in_tiles=32, out_tiles=688, route=4, sm_count=132)  # a round, then even parts
@example(m=256, in_tiles=512, out_tiles=1792, route=4, sm_count=132)  # stretches
@example(m=2048, in_tiles=512, out_tiles=1792, route=4, sm_count=132)  # rounds, then stretches
@example(m=64, in_tiles=256, out_tiles=256, route=2, sm_count=132)
@given(
    m=st.integers(1, 9000),
    in_tiles=st.integers(1, 2000),
    out_tiles=st.integers(1, 2000),
    route=st.sampled_from(sorted(ROUTES)),
    sm_count=st.sampled_from((2, 16, 46, 78, 108, 114, 132, 170)),
)
def test_every_step_of_every_tile_has_one_worker(m, in_tiles, out_tiles, route, sm_count):
    s = schedule(m, in_tiles, out_tiles, route, sm_count)
    assert s["tiles"] == -(-m // ROUTES[route]) * -(-out_tiles // 16)
    assert s["steps"] == -(-in_tiles // 4)
    if s["slices"] > 1:  # a cluster a tile
        assert (s["rounds"], s["rest"], s["workers"]) == (1, 0, s["tiles"])
        return
    # All at once on the GPU: a worker waits for the others of its tile, though not without end.
    assert s["workers"] * s["cluster"] <= max(sm_count, s["cluster"])
    assert s["rounds"] * s["workers"] + s["rest"] == s["tiles"]
    found = [[] for _ in range(s["rest"])]
    for worker in range(s["workers"]):
        places = []
        for rest, first, last, place in stretches(s, worker):
            assert first < last
            found[rest].append((first, last, worker))
            if last - first < s["steps"]:
                places.append(place)
        assert len(set(places)) == len(places)
    for rest, parts in enumerate(found):
        ends = [0, *(last for _, last, _ in parts)]
        assert [first for first, _, _ in parts] == ends[:-1] and ends[-1] == s["steps"]
        if len(parts) > 1:  # those whom each of them takes for the others
            start = rest * s["pitch"]
            first, last = start // s["share"], (start + s["pitch"] - 1) // s["share"]
            assert [worker for _, _, worker in parts] == list(range(first, last + 1))
