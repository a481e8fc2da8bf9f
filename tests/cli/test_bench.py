"""python -m trellis_ops bench linear: what it measures and writes, not how fast that is."""

from __future__ import annotations

import json

import pytest

from trellis_ops.cli import bench, main

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows_and_kernels(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench._Cpu, "unit", 1 << 20)
    path = tmp_path / "linear.json"
    command = "bench linear --device cpu --shapes 128x256 --m 1,3 --bits 2,2.5 --codebook mcg,mul1"
    assert main([*command.split(), "--act", "exact,int8", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["command"] == f"python -m trellis_ops {command} --act exact,int8"
    rows = content["rows"]
    cases = [("mcg", 2, "exact"), ("mul1", 2, "exact"), ("mul1", 2, "int8")]
    cases += [("mul1", 2.5, "exact"), ("mul1", 2.5, "int8")]
    for m in (1, 3):
        assert sorted((r["codebook"], r["bits"], r["act"]) for r in rows if r["m"] == m) == cases
    for row in rows:
        assert row["kernel"] == bench.gemm_kernel(row["m"], row["act"])
        assert row["us"] > 0 and row["dense_us"] > 0 and row["float32_us"] > 0
    assert "mul1 int8" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--act", "int4"], ["--act", "exact,"]])
def test_unknown_accuracies(arguments, capsys):
    assert main(["bench", "linear", "--device", "cpu", *arguments]) == 2
    assert "expected exact, or int8 on a CPU" in capsys.readouterr().err
