"""Models split over processes: the logits of a single one, from a share of the bytes each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layers import make_layer
from torch import nn

from trellis_ops import Exl3Linear, TrellisTensor
from trellis_ops.parallel import RowParallelLinear, Shard, cut, sharded, slice_columns, slice_rows

pytest.importorskip("transformers")

import checkpoints as cp
from checkpoints import Checkpoint, build, distance, logits
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND = 1e-3
# Sizes at which parts of attention and MLP can pass their results on: 4 heads of 64, 4 of keys.
EVEN = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parallel")
    made = {}
    models = {
        "even": ("Qwen3", EVEN),
        "uneven": ("Qwen2", {"num_hidden_layers": 1}),
        "fused": ("Phi3", {"num_hidden_layers": 1}),
        "sinks": ("GptOss", {**EVEN, **cp.MOE["GptOss"]}),
        "experts": ("Qwen3Moe", {**cp.MOE["Qwen3Moe"], "num_hidden_layers": 1}),
        "slices": ("GlmMoeDsa", cp.MOE["GlmMoeDsa"]),
    }
    for name, (family, options) in models.items():
        checkpoint = Checkpoint(build(family, **options))
        if name in ("even", "uneven", "fused", "sinks"):
            cp.pack_linears(checkpoint, skip=("router",))
        if name in ("experts", "slices", "sinks"):
            layer = 1 if name == "slices" else 0
            slices = 4 if name == "slices" else 1
            experts = f"model.layers.{layer}.mlp.experts"
            checkpoint.experts(experts, lambda p, e: 3 + e % 2, slices=slices)
        made[name] = checkpoint.write(root / name)
    return made


def run(count: int, result: Path, folders: list[Path]) -> dict:
    worker = Path(__file__).with_name("worker.py")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(count), str(worker), str(result), *map(str, folders),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(result, weights_only=True)


@pytest.fixture(scope="module")
def two(folders, tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("two") / "result", list(folders.values()))


@pytest.fixture(scope="module")
def four(folders, tmp_path_factory):
    return run(4, tmp_path_factory.mktemp("four") / "result", [folders["slices"]])


def all_words(folder: Path) -> int:
    from trellis_ops.formats.checkpoint import read_exl3_index

    return sum(group.tensors["trellis"].nbytes for group in read_exl3_index(folder).groups)


@pytest.mark.parametrize("name", ["even", "uneven", "fused", "sinks", "experts", "slices"])
def test_two_processes_give_what_one_gives(folders, two, name):
    want = logits(AutoModelForCausalLM.from_pretrained(folders[name]))
    for got, words, _, same, saved in two[name]:
        assert distance(got, want) < BOUND
        assert words == all_words(folders[name]) // 2
        assert same, "the compiled model gives other bits"
        assert "is split over processes, expected a model loaded by a single one" in saved


def test_slices_in_one_two_and_four_processes(folders, two, four):
    want = logits(AutoModelForCausalLM.from_pretrained(folders["slices"]))
    for got, words, *_ in four["slices"]:
        assert distance(got, want) < BOUND
        assert words == all_words(folders["slices"]) // 4
    assert distance(four["slices"][0][0], two["slices"][0][0]) < BOUND


def test_parts_are_passed_on_where_the_plan_and_the_sizes_allow(two):
    kinds = two["even"][0][2]
    layer = {n.rpartition(".")[2]: kind for n, kind in kinds.items() if "layers.0" in n}
    assert layer == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "ColumnParallelLinearFalse"),
        **dict.fromkeys(("gate_proj", "up_proj"), "ColumnParallelLinearFalse"),
        **dict.fromkeys(("o_proj", "down_proj"), "RowParallelLinearFalse"),
    }
    assert kinds["lm_head"] == "RowParallelLinearTrue"  # 384 padded outputs are three blocks
    kinds = two["uneven"][0][2]
    assert kinds["model.layers.0.self_attn.q_proj"] == "ColumnParallelLinearTrue"
    assert kinds["model.layers.0.self_attn.k_proj"] == "RowParallelLinearTrue"


# ---- parts of a matrix --------------------------------------------------------------------------


def matrix(rows: int, columns: int, in_features: int, out_features: int) -> TrellisTensor:
    layer = make_layer("mul1", 3, rows=rows, columns=columns)
    bias = torch.randn(columns).half()
    return TrellisTensor(
        layer.trellis, layer.suh, layer.svh, bias, "mul1", in_features, out_features
    )


def exact(tensor: TrellisTensor, x: torch.Tensor) -> torch.Tensor:
    y = x.double() @ tensor.dequantize(torch.float32).double().T
    return y if tensor.bias is None else y + tensor.bias[: tensor.out_features].double()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_columns_join_and_rows_add_up_to_the_whole(parts):
    tensor = matrix(512, 1024, 500, 1000)
    x = torch.randn(7, 500)
    want = exact(tensor, x)
    bounds = [cut(1000, parts, i) for i in range(parts)]
    columns = [Exl3Linear.from_tensors(slice_columns(tensor, *b)) for b in bounds]
    assert distance(torch.cat([c(x) for c in columns], -1), want) < BOUND
    bounds = [cut(500, parts, i) for i in range(parts)]
    rows = [slice_rows(tensor, *b) for b in bounds]
    assert [part.bias is None for part in rows] == [False] + [True] * (parts - 1)
    got = sum(
        Exl3Linear.from_tensors(r)(x[:, b : min(e, 500)])
        for r, (b, e) in zip(rows, bounds, strict=True)
    )
    assert distance(got, want) < BOUND


@pytest.mark.parametrize(
    ("function", "begin", "end", "message"),
    [
        (slice_columns, 64, 128, "slice of out_features 64 to 128, expected multiples of 128"),
        (slice_rows, 0, 64, "slice of in_features 0 to 64, expected multiples of 128 between 0 a"),
        (slice_rows, 128, 128, "slice of in_features 128 to 128, expected"),
        (
            slice_columns,
            0,
            512,
            "slice of out_features 0 to 512, expected multiples of 128 between 0 and 384",
        ),
        (slice_columns, -128, 128, "slice of out_features -128 to 128"),
    ],
)
def test_other_cuts_are_refused(function, begin, end, message):
    with pytest.raises(ValueError, match=message):
        function(matrix(256, 384, 256, 384), begin, end)


@pytest.mark.parametrize(("features", "parts"), [(256, 4), (384, 2), (130, 3)])
def test_cut_finer_than_a_block_is_refused(features, parts):
    message = f"which {parts} processes cannot share in multiples of 128, expected a multiple"
    with pytest.raises(ValueError, match=message):
        cut(features, parts, 0)


def test_outside_of_a_process_group():
    with pytest.raises(RuntimeError, match="torch.distributed is not initialised"), sharded():
        pass


def test_a_process_that_is_not_in_the_group(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER  # what new_group() gives there
    with pytest.raises(ValueError, match="process 1 is not in the group"), sharded(outside):
        pass


def test_no_gradient_passes():
    part = Exl3Linear.from_tensors(matrix(256, 384, 256, 384))
    layer = RowParallelLinear(part, (512, 384), Shard("none", 0, 2))
    with pytest.raises(ValueError, match="got an input that requires grad, expected none"):
        layer(torch.randn(3, 512, requires_grad=True))


def test_a_parallel_layer_looks_like_a_linear():
    part = Exl3Linear.from_tensors(matrix(256, 384, 256, 384))
    layer = RowParallelLinear(part, (512, 384), Shard("none", 0, 2))
    like = nn.Linear(512, 384)
    assert layer.weight.shape == like.weight.shape
    assert re.search("in_features=512, out_features=384, rank=0 of 2", repr(layer))
