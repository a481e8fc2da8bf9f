"""That ops wait for whatever is in front of them, though their launches may overlap."""

from __future__ import annotations

from collections.abc import Callable

import torch


def assert_nothing_is_missed(results: Callable[[Callable[[], None]], list[torch.Tensor]]) -> None:
    """results(between) calls `between` around each op: with a wait there or none, the same bits."""
    want = results(torch.cuda.synchronize)
    for got in (results(lambda: None) for _ in range(20)):
        assert all(map(torch.equal, got, want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(lambda: None)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, want))
