"""python -m trellis_ops bench moe: what it measures and writes, not how fast that is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from experts import routing
from layers import double, worst_row

from trellis_ops.cli import bench, bench_moe, main


@pytest.fixture
def small_memory(monkeypatch, one_thread):
    monkeypatch.setattr(bench._Cpu, "unit", 1 << 20)


def test_rows_of_the_table(small_memory, tmp_path, capsys):
    path = tmp_path / "moe.json"
    command = "bench moe --device cpu --models small --m 1,3 --bits 2.5,mixed --codebook mcg,mul1"
    assert main([*command.split(), "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["command"] == "python -m trellis_ops " + command
    rows = written["rows"]
    # Half rates exist for mul1 only.
    assert [(r["m"], r["codebook"], r["bits"]) for r in rows] == [
        (m, *rest)
        for m in (1, 3)
        for rest in (("mcg", "mixed"), ("mul1", "2.5"), ("mul1", "mixed"))
    ]
    assert [r["average_bits"] for r in rows] == [4, 2.5, 4] * 2
    assert {r["kernel"] for r in rows} == {bench.gemm_kernel(1)}
    assert rows[0]["touched_weights"] == 4 * 3 * 512 * 256
    for row in rows:
        assert row["us"] > 0 and row["ratio"] == row["dense_us"] / row["us"]
    printed = capsys.readouterr().out
    assert printed.count("mixed") == 4


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--models", "big"], "--models big: expected some of qwen3-30b-a3b, glm-like, small"),
        (["--codebook", "qtip"], "--codebook qtip: expected some of"),
        (["--plot", "x.png"], "--plot: bench moe draws no plot"),
        (["--act", "int8"], "--act int8: experts have exact activations only"),
    ],
)
def test_user_errors(arguments, problem, capsys):
    assert main(["bench", "moe", "--device", "cpu", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_a_mix_has_a_third_of_each_rate():
    for model in bench_moe.MODELS.values():
        for rates in bench_moe._bits(model, "mixed"):
            assert len(rates) == model.experts and sum(rates) == 4 * model.experts
            assert rates.count(3) == rates.count(5) == model.experts // 3


def test_the_dense_experts_compute_the_same_function():
    gate_up, down = torch.randn(5, 64, 96).bfloat16() / 8, torch.randn(5, 48, 64).bfloat16() / 7
    x = torch.randn(9, 64).bfloat16()
    ids, weights = routing(9, 2, 5)
    y = bench_moe.dense_experts(x, ids, weights, gate_up, down)
    want = np.zeros((9, 64))
    for t, s in np.ndindex(9, 2):
        gate, up = np.split(double(x[t]) @ double(gate_up[ids[t, s]]), 2)
        inner = gate / (1 + np.exp(-gate)) * up
        want[t] += double(weights)[t, s] * (inner @ double(down[ids[t, s]]))
    assert worst_row(y, want) <= 2e-2
