"""LoRA adapters over a model that was loaded packed."""

from __future__ import annotations

import pytest
import torch

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

import checkpoints as cp  # noqa: E402
from checkpoints import Checkpoint, build, logits  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from trellis_ops import Exl3Linear  # noqa: E402
from trellis_ops.integrations.peft import register_lora  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path):
    checkpoint = Checkpoint(build("Llama", num_hidden_layers=1))
    cp.pack_linears(checkpoint)
    return checkpoint.write(tmp_path / "exl3")


def adapted(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, register_lora(config))


def test_only_adapters_train_and_the_loss_falls(folder):
    model = adapted(folder)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 4 and all("lora_" in name for name in trained)
    before = {n: p.clone() for n, p in model.named_parameters() if n not in trained}
    ids = torch.arange(5, 21)[None]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for name, parameter in model.named_parameters():
        if name not in trained:
            assert torch.equal(parameter, before[name]), name


def test_without_the_adapter_the_model_is_the_loaded_one(folder, tmp_path):
    model = adapted(folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(logits(model), logits(base))
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(base))
    # Only the adapter is saved, and it goes on the packed model again.
    model.save_pretrained(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(names) == 4 and all("lora_" in name for name in names)
    assert isinstance(model.unload().model.layers[0].self_attn.q_proj, Exl3Linear)


def test_no_merging_into_packed_words(folder):
    with pytest.raises(ValueError, match="an adapter cannot be merged into packed weights"):
        adapted(folder).merge_and_unload()


def test_an_adapter_over_a_layer_in_parts(tmp_path):
    checkpoint = Checkpoint(build("Phi3", num_hidden_layers=1))
    cp.pack_linears(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.write(tmp_path / "phi"))
    config = peft.LoraConfig(r=4, target_modules=["qkv_proj"], init_lora_weights=False)
    layer = peft.get_peft_model(model, register_lora(config)).get_submodule(
        "base_model.model.model.layers.0.self_attn.qkv_proj"
    )
    x = torch.randn(3, 192)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    want = layer.base_layer(x) + x @ a.T @ b.T * layer.scaling["default"]
    torch.testing.assert_close(layer(x), want)
    with pytest.raises(ValueError, match="cannot be merged"):
        layer.merge()
