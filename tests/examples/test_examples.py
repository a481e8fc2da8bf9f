"""The examples run and show what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_swap_linears(capsys):
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    runpy.run_path(str(EXAMPLES / "swap_linears.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "swapped 3 layers" in printed
    error = float(printed.split("differ by ")[1].split("%")[0])
    assert 0 < error < 10
    assert "from_pretrained gives the same logits: True" in printed


def test_lora_loss_falls(monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(EXAMPLES)
    losses = runpy.run_path(str(EXAMPLES / "lora.py"))["main"]()
    assert losses[0] > losses[10] > losses[20]
    assert losses[20] < 0.7 * losses[0]


def test_notebook():
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "quantise_one_layer.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    text = "".join(out.get("text", "") for out in outputs)
    assert any("image/png" in out.get("data", {}) for out in outputs)
    without, with_ = _two_errors(text)
    assert 0 < with_ < without < 0.2


def _two_errors(text: str) -> tuple[float, float]:
    line = next(line for line in text.splitlines() if line.startswith("output error at 2 bits"))
    first, second = line.removeprefix("output error at 2 bits: ").split(" without, ")
    return float(first), float(second.split()[0])
