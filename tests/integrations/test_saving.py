"""save_model and load_model on tiny Llamas with random words: same bits back, faults named."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

transformers = pytest.importorskip("transformers")

from trellis_ops import Exl3Linear  # noqa: E402
from trellis_ops.formats import codebooks  # noqa: E402
from trellis_ops.formats.checkpoint import read_exl3_index  # noqa: E402
from trellis_ops.integrations import load_model, save_model  # noqa: E402

UP = "model.layers.1.mlp.up_proj"


def llama(seed: int = 0, *, tied: bool = True, bias: bool = False, **options):
    """Hidden 192 and intermediate 320: both padded."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_bias=bias,
        eos_token_id=2,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def random_exl3(linear: nn.Linear, bits: float, codebook: str, seed: int) -> Exl3Linear:
    """Any bit pattern is a valid trellis, so no search is needed."""
    generator = torch.Generator().manual_seed(seed)
    layer = Exl3Linear(
        linear.in_features, linear.out_features, linear.bias is not None, bits=bits,
        codebook=codebook,
    )  # fmt: skip
    layer.trellis.random_(-(1 << 15), 1 << 15, generator=generator)
    layer.suh.uniform_(0.5, 2.0, generator=generator)
    layer.svh.uniform_(-0.05, 0.05, generator=generator)
    if layer.bias is not None:
        layer.bias[: layer.out_features] = linear.bias.detach()
    return layer


def quantized(model, bits: float = 2, codebook: str = "mul1", skip=("lm_head",)):
    for i, (name, module) in enumerate(list(model.named_modules())):
        if isinstance(module, nn.Linear) and name not in skip:
            model.set_submodule(name, random_exl3(module, bits, codebook, i))
    return model


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(3, 40)[None]).logits


def rewritten(directory: Path, **changes: torch.Tensor | None) -> None:
    """Changes, adds, or (None) takes away tensors of a saved checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    tensors |= {name.replace("/", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def saved(tmp_path) -> Path:
    save_model(quantized(llama()), tmp_path / "exl3")
    return tmp_path / "exl3"


# ---- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("codebook", codebooks.CODEBOOKS)
def test_round_trip_gives_the_same_bits(tmp_path, codebook):
    model = quantized(llama(), bits=5, codebook=codebook)
    save_model(model, tmp_path / "exl3")
    loaded = load_model(tmp_path / "exl3")
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert not loaded.training
    assert not any(t.is_meta for t in (*loaded.parameters(), *loaded.buffers()))
    layer = loaded.get_submodule(UP)
    assert (layer.in_features, layer.out_features, layer.bits) == (192, 320, 5)
    assert layer.codebook == codebook


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_of_every_kind_of_model(tmp_path, tied, bias, dtype):
    model = llama(tied=tied, bias=bias, rope_parameters={"rope_type": "linear", "factor": 4.0,
                  "rope_theta": 500.0})  # fmt: skip
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model = quantized(model)
    save_model(model, tmp_path / "exl3")
    loaded = load_model(tmp_path / "exl3")
    assert loaded.dtype == dtype
    assert torch.equal(logits(loaded), logits(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_saving_what_was_loaded_gives_the_same_files(tmp_path):
    model = quantized(llama())
    model.generation_config.max_length = 77
    save_model(model, tmp_path / "a", calibration={"rows": 3, "cols": 512})
    save_model(load_model(tmp_path / "a"), tmp_path / "b")
    save_model(load_model(tmp_path / "b"), tmp_path / "b")  # over itself
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert names == [
        "config.json", "generation_config.json", "model.safetensors", "quantization_config.json",
    ]  # fmt: skip
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert load_model(tmp_path / "b").generation_config.max_length == 77


def test_dtype_casts_all_but_the_packed_tensors(saved):
    loaded = load_model(saved, dtype=torch.bfloat16)
    state, stored = loaded.state_dict(), load_file(saved / "model.safetensors")
    for name, tensor in stored.items():
        own = tensor.dtype if name.rpartition(".")[2] in ("trellis", "suh", "svh", "mul1") else None
        assert state[name].dtype == (own or torch.bfloat16), name
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name
    assert loaded.dtype == loaded.config.dtype == loaded.get_submodule(UP).dtype == torch.bfloat16
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    assert logits(loaded).dtype == torch.bfloat16


def test_tensors_have_the_names_of_an_exl3_checkpoint(saved):
    names = set(load_file(saved / "model.safetensors"))
    mine = {name for name in names if name.startswith(UP)}
    assert mine == {f"{UP}.{field}" for field in ("trellis", "suh", "svh", "mul1")}
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert len(names) == 2 * (7 * 4 + 2) + 2


def test_metadata_is_what_other_tools_expect(saved):
    config = json.loads((saved / "config.json").read_text())
    expected = {
        "quant_method": "exl3", "bits": 2.0, "head_bits": 16, "codebook": "mul1",
        "out_scales": "always",
    }  # fmt: skip
    assert expected.items() <= config["quantization_config"].items()
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    full = json.loads((saved / "quantization_config.json").read_text())
    storage = full.pop("tensor_storage")
    assert full == config["quantization_config"]
    assert storage[UP] == {
        "stored_tensors": {
            f"{UP}.trellis": {"shape": [16, 24, 32], "n_bytes": 24576, "dtype": "torch.int16"},
            f"{UP}.suh": {"shape": [256], "n_bytes": 512, "dtype": "torch.float16"},
            f"{UP}.svh": {"shape": [384], "n_bytes": 768, "dtype": "torch.float16"},
            f"{UP}.mul1": {"shape": [], "n_bytes": 4, "dtype": "torch.int32"},
        },
        "quant_format": "exl3",
        "bits_per_weight": 2,
        "mul1_multiplier": 2212286765,
    }
    assert storage["model.norm"] == {
        "stored_tensors": {
            "model.norm.weight": {"shape": [192], "n_bytes": 768, "dtype": "torch.float32"}
        }
    }
    assert len(read_exl3_index(saved).groups) == 14


def test_quantised_head_of_a_tied_model_is_used(tmp_path):
    model = quantized(llama(), skip=())
    save_model(model, tmp_path / "exl3")
    config = json.loads((tmp_path / "exl3" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    # Converters leave the entry as it was.
    (tmp_path / "exl3" / "config.json").write_text(
        json.dumps({**config, "tie_word_embeddings": True})
    )
    loaded = load_model(tmp_path / "exl3")
    assert isinstance(loaded.lm_head, Exl3Linear)
    assert torch.equal(logits(loaded), logits(model))
    loaded.tie_weights()
    assert isinstance(loaded.lm_head, Exl3Linear)


@pytest.mark.parametrize("same", [True, False])
def test_tied_model_with_both_weights_stored(saved, same):
    head = load_file(saved / "model.safetensors")["model.embed_tokens.weight"]
    head = head if same else head.flip(0)
    rewritten(saved, **{"lm_head.weight": head.clone()})
    loaded = load_model(saved)
    assert torch.equal(loaded.lm_head.weight, head)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == same


def test_tied_model_stored_under_the_name_of_the_head(saved):
    want = logits(load_model(saved))
    embedding = load_file(saved / "model.safetensors")["model.embed_tokens.weight"]
    rewritten(saved, **{"lm_head.weight": embedding, "model.embed_tokens.weight": None})
    assert torch.equal(logits(load_model(saved)), want)


def test_rates_and_codebooks_come_from_the_tensors(tmp_path):
    model = quantized(llama())
    for i, bits in enumerate((1, 1.5, 3, 3.5, 8)):
        name = [n for n, m in model.named_modules() if isinstance(m, Exl3Linear)][i]
        old = model.get_submodule(name)
        linear = nn.Linear(old.in_features, old.out_features, bias=False)
        codebook = "mul1" if bits in (1.5, 3.5) else "mcg"
        model.set_submodule(name, random_exl3(linear, bits, codebook, 90 + i))
    save_model(model, tmp_path / "exl3")
    for name in ("config.json", "quantization_config.json"):
        content = json.loads((tmp_path / "exl3" / name).read_text())
        content.setdefault("quantization_config", {}).update(bits=4.0)
        (tmp_path / "exl3" / name).write_text(json.dumps({**content, "bits": 4.0}))
    assert torch.equal(logits(load_model(tmp_path / "exl3")), logits(model))


def test_old_layouts_of_a_matrix(saved):
    """Sign words in place of suh, and a marker with a dimension."""
    tensors = load_file(saved / "model.safetensors")
    words = torch.tensor([0x0F0F, -1, 0, 1] * 4, dtype=torch.int16)
    rewritten(saved, **{f"{UP}.suh": None, f"{UP}.su": words})
    rewritten(saved, **{f"{UP}.mul1": tensors[f"{UP}.mul1"].reshape(1)})
    layer = load_model(saved).get_submodule(UP)
    bits = (words[:, None].int() >> torch.arange(16)) & 1
    assert torch.equal(layer.suh, (1 - 2 * bits).flatten().half())


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["suh", "svh", "trellis"])
def test_missing_field_is_named(saved, field):
    rewritten(saved, **{f"{UP}.{field}": None})
    with pytest.raises(ValueError, match=rf"{UP}\.(trellis|suh|svh|mul1) has no {field}"):
        load_model(saved)


def test_missing_marker_is_named(saved):
    rewritten(saved, **{f"{UP}.mul1": None})
    with pytest.raises(ValueError, match=rf"{UP}\.trellis has no marker.*mul1"):
        load_model(saved)


def test_two_markers_are_named(saved):
    rewritten(saved, **{f"{UP}.mcg": codebooks.marker_tensor("mcg")})
    with pytest.raises(ValueError, match=rf"{UP}\.mcg has mul1 beside it"):
        load_model(saved)


def test_wrong_marker_value_is_named(saved):
    rewritten(saved, **{f"{UP}.mul1": torch.tensor(7, dtype=torch.int32)})
    with pytest.raises(ValueError, match=rf"{UP}\.mul1 has the value 0x00000007"):
        load_model(saved)


def test_missing_dense_tensor_is_named(saved):
    rewritten(saved, **{"model.norm.weight": None})
    with pytest.raises(ValueError, match=r"the checkpoint lacks model\.norm\.weight$"):
        load_model(saved)


def test_missing_layer_is_named(saved):
    rewritten(saved, **{f"{UP}.{field}": None for field in ("trellis", "suh", "svh", "mul1")})
    with pytest.raises(ValueError, match=rf"lacks {UP}\.weight"):
        load_model(saved)


def test_unexpected_tensors_are_named(saved):
    rewritten(saved, **{"model.layers.1.mlp.extra.weight": torch.ones(3)})
    with pytest.raises(ValueError, match=r"no place for model\.layers\.1\.mlp\.extra\.weight"):
        load_model(saved)


def test_matrix_without_a_place_is_named(saved):
    tensors = load_file(saved / "model.safetensors")
    fields = ("trellis", "suh", "svh", "mul1")
    copies = {f"model.layers.7.up.{f}": tensors[f"{UP}.{f}"].clone() for f in fields}
    rewritten(saved, **copies)
    with pytest.raises(ValueError, match=r"model\.layers\.7\.up\.trellis has no place"):
        load_model(saved)


def test_matrix_of_another_size_is_named(saved):
    tensors = load_file(saved / "model.safetensors")
    rewritten(
        saved,
        **{
            f"{UP}.trellis": tensors[f"{UP}.trellis"][:8].clone(),
            f"{UP}.suh": tensors[f"{UP}.suh"][:128].clone(),
        },
    )
    with pytest.raises(ValueError, match=rf"{UP}\.trellis is 128 x 384, expected 256 x 384"):
        load_model(saved)


def test_dense_tensor_of_another_size_is_named(saved):
    rewritten(saved, **{"model.norm.weight": torch.ones(100)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight is \[100\], expected \[192\]"):
        load_model(saved)


def test_model_without_exl3_layers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="save_model: the model has no Exl3Linear"):
        save_model(llama(), tmp_path / "exl3")
    assert list(tmp_path.iterdir()) == []


class Foreign:
    def __init__(self, method: str) -> None:
        self.quantization_config = type("Config", (), {"quant_method": method})


def test_model_of_another_quantiser(tmp_path):
    """What comes from GGUF is dense and ours to save; what stays packed otherwise is not."""
    model = quantized(llama())
    model.hf_quantizer = Foreign("bitsandbytes")
    with pytest.raises(ValueError, match="the model is quantised with bitsandbytes too"):
        save_model(model, tmp_path / "exl3")
    model.hf_quantizer = Foreign("gguf")
    save_model(model, tmp_path / "exl3")
    assert torch.equal(logits(load_model(tmp_path / "exl3")), logits(model))


def test_meta_tensor_is_refused(tmp_path):
    model = quantized(llama())
    model.model.norm.to("meta")
    with pytest.raises(ValueError, match=r"save_model: model\.norm\.weight is on the meta device"):
        save_model(model, tmp_path / "exl3")
    assert list(tmp_path.iterdir()) == []


class BrokenTokenizer:
    def save_pretrained(self, directory) -> None:
        (Path(directory) / "tokenizer.json").write_text("{")
        raise OSError("no space left on device")


def test_failure_leaves_nothing_behind(tmp_path):
    with pytest.raises(OSError, match="no space left"):
        save_model(quantized(llama()), tmp_path / "deep" / "exl3", BrokenTokenizer())
    assert list((tmp_path / "deep").iterdir()) == []


def test_failure_leaves_an_older_checkpoint_whole(saved):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with pytest.raises(OSError, match="no space left"):
        save_model(quantized(llama(seed=5), bits=3), saved, BrokenTokenizer())
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]


def test_other_weights_in_the_directory_are_not_mixed_up(saved):
    (saved / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(FileExistsError, match="model-00001-of-00002.safetensors"):
        save_model(quantized(llama()), saved)


def test_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "exl3").write_text("")
    with pytest.raises(NotADirectoryError, match="exl3 exists and is no directory"):
        save_model(quantized(llama()), tmp_path / "exl3")


def test_a_folder_on_another_file_system(tmp_path):
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or os.stat(elsewhere).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs a second file system")
    model = quantized(llama())
    with tempfile.TemporaryDirectory(dir=elsewhere) as folder:
        (tmp_path / "link").symlink_to(folder)
        save_model(model, tmp_path / "link")
        assert torch.equal(logits(load_model(tmp_path / "link")), logits(model))
        assert not [file for file in Path(folder).iterdir() if file.name.startswith(".")]


class Tokenizer:
    def save_pretrained(self, directory) -> None:
        (Path(directory) / "templates").mkdir()
        (Path(directory) / "templates" / "tool.jinja").write_text("{}")


def test_folders_are_saved_again(tmp_path):
    for _ in range(2):
        save_model(quantized(llama()), tmp_path / "a", Tokenizer())
    assert (tmp_path / "a" / "templates" / "tool.jinja").read_text() == "{}"


def test_pickle(saved, tmp_path):
    model = load_model(saved)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(again), logits(model))
    with torch.no_grad():
        again.model.norm.weight.fill_(0.5)
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "quantization_config.json").is_file()
    assert torch.equal(logits(load_model(tmp_path / "again")), logits(again))


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_a_variant(saved, tmp_path, size):
    model = load_model(saved)
    model.save_pretrained(tmp_path / "v", variant="fp16", max_shard_size=size)
    again = load_model(tmp_path / "v", variant="fp16")
    assert torch.equal(logits(again), logits(model))
    record = json.loads((tmp_path / "v" / "quantization_config.json").read_text())
    assert record["tensor_storage"]["model.layers.0.mlp.up_proj"]["quant_format"] == "exl3"


def test_a_process_that_is_not_the_main_one(saved, tmp_path):
    load_model(saved).save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / "quantization_config.json").exists()


def test_an_older_name_of_dtype(saved):
    assert load_model(saved, torch_dtype=torch.float16).dtype == torch.float16
    assert load_model(saved, torch.bfloat16, torch_dtype=torch.float16).dtype == torch.bfloat16
