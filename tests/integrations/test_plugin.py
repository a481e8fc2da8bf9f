"""The transformers plugin: registration, dtypes, devices, unusual layouts, and what it refuses."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import checkpoints as cp  # noqa: E402
from checkpoints import Checkpoint, build, distance, logits  # noqa: E402
from layers import BOUNDS  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import trellis_ops  # noqa: E402
from trellis_ops import Exl3Linear  # noqa: E402
from trellis_ops.integrations.quantizer import Exl3Config, Exl3Quantizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

UP = "model.layers.1.mlp.up_proj"
BOUND = 4 * BOUNDS[torch.float32]  # of some fifteen matrices in a row


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """(dense model, folder): Qwen2, all of it packed but the embedding, which is tied."""
    model = build("Qwen2", tie_word_embeddings=True)
    checkpoint = Checkpoint(model)
    # Converters store a head of its own and leave tie_word_embeddings as it was.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    cp.pack_linears(checkpoint)
    return model, checkpoint.write(tmp_path_factory.mktemp("qwen"))


def changed(folder, target, **tensors):
    """A copy of a checkpoint with tensors changed, added, or (None) taken away."""
    stored = load_file(folder / "model.safetensors") | tensors
    target.mkdir(exist_ok=True)
    save_file({n: t for n, t in stored.items() if t is not None}, target / "model.safetensors")
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


# ---- registration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [("trellis_ops", "transformers"), ("transformers", "trellis_ops")]
)
def test_registers_in_either_order(order):
    code = f"""
import sys, {order[0]}
assert "{order[0]}" == "transformers" or "transformers" not in sys.modules
import {order[1]}
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers import auto
for method in ("exl3", "modelopt"):
    print(AUTO_QUANTIZER_MAPPING[method].__module__, AUTO_QUANTIZATION_CONFIG_MAPPING[method].__name__)
print(type(auto.__spec__.loader).__name__, len([f for f in sys.meta_path if "trellis_ops" in str(type(f)) and "editable" not in str(type(f))]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split("\n") == [
        "trellis_ops.integrations.quantizer Exl3Config",
        "trellis_ops.integrations.quantizer Exl3Config",
        "SourceFileLoader 0",
        "",
    ], done.stderr


def test_a_name_that_is_taken_stays_so():
    code = """
import transformers.quantizers.auto as auto
class Other: pass
auto.AUTO_QUANTIZER_MAPPING["modelopt"] = Other
auto.AUTO_QUANTIZER_MAPPING["exl3"] = Other
import trellis_ops
print(auto.AUTO_QUANTIZER_MAPPING["modelopt"] is Other, auto.AUTO_QUANTIZER_MAPPING["exl3"] is Other)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True True\n", done.stderr
    assert "another package has registered the quantiser exl3" in done.stderr


def test_another_version_of_transformers_can_be_imported(tmp_path):
    package = tmp_path / "transformers" / "quantizers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text('__version__ = "4.40.0"')
    (package / "__init__.py").write_text("from . import auto")
    (package / "auto.py").write_text("")
    for order in ("trellis_ops, transformers.quantizers", "transformers.quantizers, trellis_ops"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {order}; print('imported')"],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert done.stdout == "imported\n", done.stderr
        assert "with transformers 4.40.0, expected 5.17 or newer" in done.stderr


# ---- what is loaded -----------------------------------------------------------------------------


def test_a_quantised_head_is_untied(qwen):
    dense, folder = qwen
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    model = load(folder)
    assert isinstance(model.lm_head, Exl3Linear)
    assert not model.config.tie_word_embeddings
    assert distance(logits(model), logits(dense)) < BOUND
    model.tie_weights()
    assert isinstance(model.lm_head, Exl3Linear)
    assert distance(logits(model), logits(dense)) < BOUND


def test_padding_is_trimmed(qwen):
    model = load(qwen[1])
    assert logits(model).shape[-1] == cp.VOCABULARY
    assert model.lm_head.trellis.shape[1] * 16 == 384


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"])
def test_no_cast_reaches_packed_tensors(qwen, dtype):
    dense, folder = qwen
    stored = load_file(folder / "model.safetensors")
    model = load(folder, dtype=dtype)
    if dtype == torch.bfloat16:
        model = model.to(torch.float32).bfloat16()
    wanted = torch.float32 if dtype == "auto" else dtype
    assert model.dtype == model.get_submodule(UP).dtype == wanted
    state = model.state_dict()
    for field in ("trellis", "suh", "svh"):
        assert torch.equal(state[f"{UP}.{field}"], stored[f"{UP}.{field}"])
        assert state[f"{UP}.{field}"].dtype == stored[f"{UP}.{field}"].dtype
    assert logits(model).dtype == wanted
    # The dense model in that dtype is as far from exact; norms and softmax round too.
    assert distance(logits(model), logits(copy.deepcopy(dense).to(wanted))) < 2e-2


def test_deepcopy_saves_itself(qwen, tmp_path):
    model = load(qwen[1])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.mul_(2)
    twin.save_pretrained(tmp_path / "twin")
    saved = load_file(tmp_path / "twin" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(saved, 2 * model.model.norm.weight)
    assert (tmp_path / "twin" / "quantization_config.json").is_file()


def test_shards_and_index(qwen, tmp_path):
    model = load(qwen[1])
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    storage = json.loads((tmp_path / "quantization_config.json").read_text())["tensor_storage"]
    assert storage[UP]["quant_format"] == "exl3" and "model.norm" in storage
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_saving_over_a_save_of_the_other_kind(qwen, tmp_path):
    model = load(qwen[1])
    want = None
    for size in ("100KB", "1GB", "100KB"):
        model.save_pretrained(tmp_path, max_shard_size=size)
        record = (tmp_path / "quantization_config.json").read_text()
        want = want or record
        assert record == want


@pytest.mark.parametrize("map_", ["auto", {"": "cpu"}])
def test_device_map(qwen, map_):
    assert torch.equal(logits(load(qwen[1], device_map=map_)), logits(load(qwen[1])))


def test_offload_to_disk(qwen, tmp_path):
    folder = qwen[1]
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "lm_head": "disk"}
    model = load(folder, device_map=places, offload_folder=tmp_path / "offload")
    assert model.get_submodule(UP).trellis.is_meta
    want = logits(load(folder))
    for _ in range(2):
        assert torch.equal(logits(model), want)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_experts_on_disk(tmp_path, place):
    dense = build("Qwen3Moe", num_hidden_layers=2, **cp.MOE["Qwen3Moe"])
    checkpoint = Checkpoint(dense)
    for i in range(2):
        checkpoint.experts(f"model.layers.{i}.mlp.experts", lambda p, e: 3)
    folder = checkpoint.write(tmp_path / "exl3")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb"), "cpu")
    places |= {"lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": place}
    model = load(folder, device_map=places, offload_folder=tmp_path / "offload")
    assert model.model.layers[1].mlp.experts.packed.is_meta == (place == "disk")
    for _ in range(2):
        assert distance(logits(model), logits(dense)) < BOUND
    if place == "disk":
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts: the experts are offloaded"):
            model.save_pretrained(tmp_path / "again")


def test_legacy_sign_words_and_short_biases(qwen, tmp_path):
    """What old converters wrote: signs only, a bias without padding, a marker with a dimension."""
    folder = qwen[1]
    stored = load_file(folder / "model.safetensors")
    query = "model.layers.0.self_attn.k_proj"
    words = torch.tensor([0x0F0F, -1, 0, 1] * 4, dtype=torch.int16)
    marker = next(n for n in stored if n.startswith(UP) and n.rpartition(".")[2] in cp.MARKERS)
    new = {
        f"{UP}.suh": None,
        f"{UP}.su": words,
        marker: stored[marker].reshape(1),
        f"{query}.bias": stored[f"{query}.bias"][:64].float(),
    }
    model, info = load(changed(folder, tmp_path / "old", **new), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    signs = 1 - 2 * ((words[:, None].int() >> torch.arange(16)) & 1)
    layer = model.get_submodule(UP)
    assert torch.equal(layer.suh, signs.flatten().half())
    assert torch.equal(layer.svh, stored[f"{UP}.svh"])
    bias = model.get_submodule(query).bias
    assert bias.dtype == torch.float16 and torch.equal(bias, stored[f"{query}.bias"])
    # Saved in the current layout.
    model.save_pretrained(tmp_path / "new")
    assert torch.equal(logits(load(tmp_path / "new")), logits(model))
    assert f"{UP}.suh" in load_file(tmp_path / "new" / "model.safetensors")


def test_wide_layers_in_slices(tmp_path):
    dense = build("Llama", intermediate_size=384 - 60)
    checkpoint = Checkpoint(dense)
    mlp = dense.model.layers[0].mlp
    for name, axis in (("gate_proj", "out"), ("up_proj", "out"), ("down_proj", "in")):
        stem = f"model.layers.0.mlp.{name}.slice"
        sizes = [(192, 256), (192, 68)] if axis == "out" else [(256, 192), (68, 192)]
        parts = [
            checkpoint.matrix(f"{stem}.{i}", *size, 3 + i, "mul1") for i, size in enumerate(sizes)
        ]
        weight = torch.cat(parts, dim=0 if axis == "out" else 1)
        getattr(mlp, name).weight = nn.Parameter(weight)
        checkpoint.packed.add(f"model.layers.0.mlp.{name}.weight")
    folder = checkpoint.write(tmp_path / "a")
    model, info = load(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert distance(logits(model), logits(dense)) < BOUND
    model.save_pretrained(tmp_path / "b")
    again = load(tmp_path / "b")
    assert torch.equal(logits(again), logits(model))
    assert distance(logits(again.dequantize()), logits(dense)) < 1e-5
    gone = {
        f"model.layers.0.mlp.up_proj.slice.0.{field}": None
        for field in ("trellis", "suh", "svh", "mul1")
    }
    with pytest.raises(ValueError, match=r"up_proj\.slice\.0\.trellis is missing"):
        load(changed(folder, tmp_path / "c", **gone))


def test_layers_for_multi_token_prediction_are_left_out(tmp_path, caplog):
    dense = build("Glm4Moe", **cp.MOE["Glm4Moe"], num_nextn_predict_layers=1)
    checkpoint = Checkpoint(dense)
    checkpoint.linear("model.layers.0.mlp.up_proj", 3, "mul1")
    for name in ("mlp.up_proj", "mlp.experts.0.gate_proj"):
        checkpoint.matrix(f"model.layers.2.{name}", 192, 320, 3, "mul1")
    checkpoint.tensors["model.layers.2.eh_proj.weight"] = torch.ones(192, 384)
    folder = checkpoint.write(tmp_path)
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").propagate = True
        model, info = load(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert distance(logits(model), logits(dense)) < BOUND
    lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert lines == [
        "exl3: 2 matrices that Glm4MoeForCausalLM does not run are left out, from "
        "model.layers.2.mlp.experts.0.gate_proj to model.layers.2.mlp.up_proj"
    ]


def test_patterns_of_a_class_do_not_hide_layers_that_the_model_has(tmp_path, monkeypatch):
    """Glm4Moe names layers 46 and 92, the one after the last of two models of different depth."""
    cls = transformers.Glm4MoeForCausalLM
    monkeypatch.setattr(cls, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.1.*"])
    dense = build("Glm4Moe", **cp.MOE["Glm4Moe"])
    checkpoint = Checkpoint(dense)
    checkpoint.linear("model.layers.1.self_attn.o_proj", 3, "mul1")
    checkpoint.experts("model.layers.1.mlp.experts", lambda p, e: 3)
    model = load(checkpoint.write(tmp_path))
    assert isinstance(model.model.layers[1].self_attn.o_proj, Exl3Linear)
    assert distance(logits(model), logits(dense)) < BOUND


@pytest.mark.parametrize("method", [None, "exl3_selective_tp4"])
def test_a_method_that_nobody_knows(qwen, tmp_path, method):
    """load_model, and from_pretrained that is told; alone it would load random weights."""
    dense, folder = qwen
    target = changed(folder, tmp_path)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    if method is None:
        del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    for model in (
        trellis_ops.load_model(target),
        load(target, quantization_config=Exl3Config()),
    ):
        assert distance(logits(model), logits(dense)) < BOUND


# ---- compile and train --------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [False, True])
def test_generate_with_a_static_cache_compiles_whole(qwen, tmp_path, experts):
    """transformers compiles only what says it can be; a graph break would be an error."""
    folder = qwen[1]
    if experts:
        checkpoint = Checkpoint(build("Qwen3Moe", num_hidden_layers=1, **cp.MOE["Qwen3Moe"]))
        checkpoint.experts("model.layers.0.mlp.experts", lambda p, e: 3)
        folder = checkpoint.write(tmp_path)
    model = load(folder)
    prompt = torch.arange(5, 12)[None]
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    with torch.inference_mode():
        want = model.generate(prompt, **options)
    model.generation_config.compile_config = transformers.CompileConfig(
        fullgraph=True, backend="aot_eager", mode=None
    )
    model.generation_config.compile_config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.inference_mode():
        got = model.generate(prompt, cache_implementation="static", **options)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["calls_captured"] > 0, "nothing was compiled"
    assert not counters["graph_break"]
    assert torch.equal(got, want)


# ---- refusals -----------------------------------------------------------------------------------


def matrix(stem, rows=192, columns=320):
    checkpoint = Checkpoint(nn.Module())
    checkpoint.matrix(stem, rows, columns, 3, "mcg")
    return checkpoint.tensors


def test_a_matrix_without_a_module_is_refused(qwen, tmp_path):
    folder = changed(qwen[1], tmp_path, **matrix("model.layers.7.mlp.up_proj"))
    with pytest.raises(
        ValueError, match=r"model\.layers\.7\.mlp\.up_proj\.trellis has no place in the model"
    ):
        load(folder)


def test_a_matrix_of_another_module_is_refused(qwen, tmp_path):
    folder = changed(qwen[1], tmp_path, **matrix("model.rotary_emb"))
    with pytest.raises(ValueError, match=r"rotary_emb\.trellis belongs to a Qwen2RotaryEmbedding"):
        load(folder)


def test_a_matrix_of_another_size_is_refused(qwen, tmp_path):
    old = {n: None for n in load_file(qwen[1] / "model.safetensors") if n.startswith(UP)}
    folder = changed(qwen[1], tmp_path, **{**old, **matrix(UP, 192, 512)})
    with pytest.raises(ValueError, match="is 256 x 512, expected 256 x 384"):
        load(folder)


def test_a_lost_bias_is_refused(qwen, tmp_path):
    query = "model.layers.0.self_attn.q_proj"
    folder = changed(qwen[1], tmp_path, **{f"{query}.bias": None})
    with pytest.raises(ValueError, match=rf"{query}\.trellis has no bias beside it"):
        load(folder)


def test_a_short_bias_is_refused(qwen, tmp_path):
    name = "model.layers.1.self_attn.q_proj.bias"
    stored = load_file(qwen[1] / "model.safetensors")[name]
    changed(qwen[1], tmp_path, **{name: stored[:191].clone()})
    message = rf"{name} is F16 \[191\], expected \[192\] as the model, or \[256\]"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
    # Any more than that is padding.
    changed(qwen[1], tmp_path, **{name: stored[:200].clone()})
    assert distance(logits(load(tmp_path)), logits(qwen[0])) < BOUND


def test_a_lost_part_of_a_fused_layer_is_refused(tmp_path):
    model = build("Phi3")
    checkpoint = Checkpoint(model)
    cp.pack_linears(checkpoint)
    folder = checkpoint.write(tmp_path)
    part = "model.layers.1.self_attn.k_proj"
    gone = {n: None for n in load_file(folder / "model.safetensors") if n.startswith(part)}
    with pytest.raises(ValueError, match=rf"is a part of .*qkv_proj, but {part}\.trellis is missi"):
        load(changed(folder, tmp_path / "b", **gone))


def test_a_checkpoint_without_matrices_is_refused(tmp_path):
    folder = Checkpoint(build("Llama")).write(tmp_path)
    with pytest.raises(ValueError, match="holds no quantised matrix; if the repository keeps one"):
        load(folder)


def test_sqg_that_nobody_names_is_refused(tmp_path):
    checkpoint = Checkpoint(build("Llama"))
    checkpoint.linear(UP, 5, "mcg")
    checkpoint.tensors[f"{UP}.sqg"] = torch.tensor(0x53514731, dtype=torch.int32)
    del checkpoint.tensors[f"{UP}.mcg"]
    with pytest.raises(ValueError, match=rf"{UP}\.sqg at 5 bits fits two codebooks"):
        load(checkpoint.write(tmp_path))


def test_load_model_names_a_missing_tensor(qwen, tmp_path):
    folder = changed(qwen[1], tmp_path, **{"model.norm.weight": None})
    with pytest.raises(ValueError, match=r"the checkpoint lacks model\.norm\.weight$"):
        trellis_ops.load_model(folder)


def test_a_classifier_has_no_use_for_the_head(qwen):
    model, folder = qwen
    got = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    ids = torch.arange(3, 27)[None]
    with torch.inference_mode():
        want = model.model(ids).last_hidden_state
        assert distance(got.model(ids).last_hidden_state, want) < BOUND


def test_tensor_parallelism_of_transformers_is_refused(qwen):
    config = transformers.AutoConfig.from_pretrained(qwen[1])
    config.distributed_config = types.SimpleNamespace(tp_size=2)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    quantizer = Exl3Quantizer(Exl3Config())
    with pytest.raises(ValueError, match=r"tensor parallelism .* inside trellis_ops.parallel"):
        quantizer._process_model_before_weight_loading(
            skeleton, checkpoint_files=[qwen[1] / "model.safetensors"]
        )
