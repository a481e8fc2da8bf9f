"""inspect, convert and dequantize on tiny checkpoints with routed experts."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import checkpoints as cp
from checkpoints import Checkpoint, build, distance, logits
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trellis_ops.cli import main
from trellis_ops.integrations.tail import SCHEMA

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "model.layers.1.mlp.experts"
TAIL = {
    "format": "exl3-trellis", "bits": 3.0, "codebook": "mcg", "experts_per_layer": 4,
    "moe_layers": [1, 1], "tensor_schema": SCHEMA, "tp": 4,
}  # fmt: skip


def rank_sliced(folder, *, whole: bool, tail: bool = False):
    """(dense model, folder) of experts cut into four: before (not whole) or after quantising."""
    dense = build("GlmMoeDsa", **cp.MOE["GlmMoeDsa"])
    checkpoint = Checkpoint(dense)
    checkpoint.experts(NAME, lambda p, e: 3, slices=1 if whole else 4)
    if whole:
        for name in list(checkpoint.tensors):
            stem, _, field = name.rpartition(".")
            projection, tensor = stem.rpartition(".")[2], checkpoint.tensors.pop(name)
            axis = {"trellis": int(projection != "down_proj")}.get(field)
            if field == ("suh" if projection == "down_proj" else "svh"):
                axis = 0
            for r in range(4):
                part = tensor if axis is None else tensor.chunk(4, axis)[r]
                checkpoint.tensors[f"{stem}.rank{r}.{field}"] = part.clone()
    checkpoint.write(folder)
    if tail:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config |= {"hybrid_tr3_tail": TAIL, "quantization_config": {"quant_method": "modelopt"}}
        file.write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return dense, folder


def test_inspect_sums_experts_up(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    checkpoint = Checkpoint(build("Qwen3Moe", **cp.MOE["Qwen3Moe"]))
    for layer in range(2):
        checkpoint.experts(f"model.layers.{layer}.mlp.experts", lambda p, e: 3 + (e == 2), "mul1")
    folder = checkpoint.write(tmp_path)
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if "layers.1" in line]
    cells = [cell.strip() for cell in rows[0].strip("│").split("│")]
    words = (3 * 3 + 4) * 256 * 256 // 8
    size = f"{words + 4 * (2 * 512 + 4):,}"
    assert cells == [
        "model.layers.1.mlp.experts.*.gate",
        "4 x 256 x 256",
        "3 (3), 4 (1)",
        "mul1",
        size,
    ]
    assert len(rows) == 3
    assert "\n2 layers of 4 experts (per_expert)\n24 EXL3 matrices, " in printed
    assert main(["inspect", "--json", str(folder)]) == 0
    experts = json.loads(capsys.readouterr().out)["experts"]
    assert experts[1] == {
        "name": NAME, "layout": "per_expert", "experts": 4, "slices": 1, "bytes": 3 * (words + 4112),
        "tiers": {p: {"3": 3, "4": 1} for p in ("gate", "up", "down")},
    }  # fmt: skip


def test_inspect_tells_ranks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    _, folder = rank_sliced(tmp_path, whole=False)
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "4 x 4 ranks x 256 x 128" in printed
    assert "1 layers of 4 experts in 4 rank slices (per_expert_v1)" in printed


def test_inspect_of_a_shard_with_a_part_of_the_experts(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    _, folder = rank_sliced(tmp_path / "a", whole=False)
    stored = load_file(folder / "model.safetensors")
    part = {name: tensor for name, tensor in stored.items() if ".rank1." in name}
    save_file(part, tmp_path / "rank1.safetensors")
    assert main(["inspect", str(tmp_path / "rank1.safetensors")]) == 0
    printed = capsys.readouterr()
    assert "12 EXL3 matrices" in printed.out and f"{NAME}.0.gate_proj.rank1" in printed.out
    assert printed.err == (
        f"experts are listed one by one: {NAME}: gate of expert 0, rank slice 0 of 2 is missing, "
        "expected 4 experts\n"
    )
    (tmp_path / "b").mkdir()
    save_file(part, tmp_path / "b" / "rank1.safetensors")
    assert main(["inspect", str(tmp_path / "b")]) == 2
    assert "rank slice 0 of 2 is missing" in capsys.readouterr().err


@pytest.mark.parametrize("tail", [False, True])
def test_convert_joins_what_was_cut_after_quantising(tmp_path, capsys, tail):
    dense, folder = rank_sliced(tmp_path / "a", whole=True, tail=tail)
    assert main(["convert", str(folder), str(tmp_path / "b")]) == 0
    assert "4 experts of 1 layers joined into" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert model.get_submodule(NAME).layout().slices == 1
    assert distance(logits(model), logits(dense)) < 1e-3
    # Bit for bit the matrices that were cut.
    whole = Checkpoint(build("GlmMoeDsa", **cp.MOE["GlmMoeDsa"]))
    whole.experts(NAME, lambda p, e: 3)
    stored = {}
    for file in (tmp_path / "b").glob("*.safetensors"):
        stored |= load_file(file)
    for name, tensor in whole.tensors.items():
        stem, _, field = name.rpartition(".")
        assert torch.equal(stored[f"{stem}.rank0.{field}" if tail else name], tensor), name
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    if tail:
        added = {"tp": 1, "source_tp": 4, "source_operation": "lossless_tp_rank_coalesce"}
        assert config["hybrid_tr3_tail"] == {**TAIL, **added}
    assert (tmp_path / "b" / "tokenizer.json").is_file()


def test_convert_refuses_what_was_quantised_in_slices(tmp_path, capsys):
    _, folder = rank_sliced(tmp_path / "a", whole=False)
    assert main(["convert", str(folder), str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err == (
        f"trellis_ops convert: {NAME}.0.gate_proj.rank1.suh differs from that of "
        f"{NAME}.0.gate_proj.rank0: its slices were quantised one by one, and no whole matrix "
        "equals them\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_convert_without_slices(tmp_path, capsys):
    checkpoint = Checkpoint(build("Llama"))
    checkpoint.linear("lm_head", 3, "mcg")
    folder = checkpoint.write(tmp_path / "a")
    assert main(["convert", str(folder), str(tmp_path / "b")]) == 2
    assert "has no rank slices of experts to join" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["Phi3", "Qwen3Moe"])
def test_dequantize_writes_an_ordinary_checkpoint(tmp_path, capsys, family):
    dense = build(family, **cp.MOE.get(family, {}))
    checkpoint = Checkpoint(dense)
    cp.pack_linears(checkpoint, skip=("mlp.gate",))
    for name, module in list(dense.named_modules()):
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            checkpoint.experts(name, lambda p, e: 3)
    folder = checkpoint.write(tmp_path / "a")
    (folder / "tokenizer.json").write_text("{}")
    assert main(["dequantize", str(folder), str(tmp_path / "b")]) == 0
    assert "parameters in bfloat16 written to" in capsys.readouterr().out
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    names = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    assert distance(logits(model), logits(dense.bfloat16().float())) < 1e-2
    assert distance(logits(model), logits(dense)) < 1e-2


def test_dequantize_of_a_folder_without_a_model(tmp_path, capsys):
    assert main(["dequantize", str(tmp_path), str(tmp_path / "b")]) == 2
    assert "has no config.json, expected a checkpoint's folder" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{"])
def test_convert_with_a_config_that_is_none(tmp_path, capsys, text):
    folder = rank_sliced(tmp_path / "a", whole=True)[1]
    (folder / "config.json").write_text(text)
    assert main(["convert", str(folder), str(tmp_path / "b")]) == 2
    assert f"{folder / 'config.json'}: " in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
