"""python -m trellis_ops: what it prints, and how it says that something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest
import torch
from safetensors.torch import save_file

from trellis_ops import _binary
from trellis_ops.cli import env, main

MUL1 = torch.tensor(0x83DCD12D).to(torch.uint32).view(torch.int32)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")

    def matrix(prefix, words):
        return {
            prefix + "trellis": torch.zeros(8, 16, words, dtype=torch.int16),
            prefix + "suh": torch.ones(128, dtype=torch.float16),
            prefix + "svh": torch.ones(256, dtype=torch.float16),
            prefix + "mul1": MUL1.clone(),
        }

    save_file(
        {
            **matrix("model.layers.[0].up_proj.", 40),
            **matrix("lm_head.", 96),
            "norm.weight": torch.ones(100),
        },
        tmp_path / "model.safetensors",
    )
    return tmp_path


def test_inspect_prints_a_table(checkpoint, capsys):
    assert main(["inspect", str(checkpoint)]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == [
        "┏━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━┳━━━━━━━━━━┳━━━━━━━━┓",
        "┃ name                     ┃  in x out ┃ bits ┃ codebook ┃  bytes ┃",
        "┡━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━╇━━━━━━━━━━╇━━━━━━━━┩",
        "│ lm_head                  │ 128 x 256 │    6 │ mul1     │ 25,348 │",
        "│ model.layers.[0].up_proj │ 128 x 256 │  2.5 │ mul1     │ 11,012 │",
        "└──────────────────────────┴───────────┴──────┴──────────┴────────┘",
        "2 EXL3 matrices, 36,360 bytes, 65,536 weights",
        "4.25 bits on average, 4.44 with scales and biases",
        "1 other tensors, 400 bytes",
    ]


def test_inspect_prints_json(checkpoint, capsys):
    assert main(["inspect", "--json", str(checkpoint / "model.safetensors")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("path") == str(checkpoint / "model.safetensors")
    assert printed.pop("tensors")[1] == {
        "name": "model.layers.[0].up_proj",
        "in_features": 128,
        "out_features": 256,
        "bits": 2.5,
        "codebook": "mul1",
        "fields": ["mul1", "suh", "svh", "trellis"],
        "bytes": 11012,
    }
    assert printed == {
        "experts": [],
        "exl3_bytes": 36360,
        "exl3_weights": 65536,
        "average_bits": 4.25,
        "other_tensors": 1,
        "other_bytes": 400,
    }


def test_inspect_of_a_plain_checkpoint(tmp_path, capsys):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no EXL3 matrix; 1 other tensors, 8 bytes\n"


def test_a_user_error_is_one_line(tmp_path, capsys):
    (tmp_path / "a.safetensors").write_bytes(b"\0")
    for path, problem in (
        (tmp_path / "a.safetensors", "not a valid safetensors file"),
        (tmp_path / "b.safetensors", "No such file"),
    ):
        assert main(["inspect", str(path)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("trellis_ops inspect: ") and printed.err.count("\n") == 1
        assert problem in printed.err and str(path) in printed.err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["inspect"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m trellis_ops" in capsys.readouterr().err


def test_help_names_every_command():
    done = subprocess.run(
        [sys.executable, "-m", "trellis_ops", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "env " in done.stdout and "inspect " in done.stdout


def test_env_prints_every_fact(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "500")
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    for name, value in env.facts():
        assert any(name in line and value in line for line in printed.splitlines()), name


def test_env_tells_instruction_sets_of_the_kernels():
    facts = dict(env.facts())
    if not _binary.available():
        pytest.skip(f"the library is not loaded: {_binary.reason()}")
    assert facts["kernels for"].split(", ")[0] == "generic"


def test_env_tells_why_the_library_is_not_loaded(monkeypatch):
    monkeypatch.setattr(_binary, "_state", _binary._State(True, "the reason"))
    facts = dict(env.facts())
    assert "NOT loaded: the reason" in facts.values()
    assert facts["kernels for"] == "none, the library is not loaded"


def test_env_lists_gpus(monkeypatch):
    gpu = types.SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    facts = dict(env.facts())
    assert facts["cuda:1"] == "Some GPU, capability 9.0, 80 GiB"
