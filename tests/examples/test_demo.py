"""Pieces of examples/demo.py, on a tiny random Llama."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from trellis_ops import Exl3Linear  # noqa: E402
from trellis_ops.integrations import load_model, save_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=256,
    )
    return transformers.LlamaForCausalLM(config).eval()


def quantized(model):
    """With random packed words: valid, and no search."""
    generator = torch.Generator().manual_seed(0)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            layer = Exl3Linear(module.in_features, module.out_features, bits=4, codebook="mul1")
            layer.trellis.random_(-(1 << 15), 1 << 15, generator=generator)
            layer.suh.fill_(1.0)
            layer.svh.fill_(0.05)
            model.model.set_submodule(name, layer)
    return model


def test_chats_alternate_and_keep_their_lines(demo):
    chats = demo.read_chats()
    assert len(chats) == 12
    assert all([m["role"] for m in chat] == ["user", "assistant"] for chat in chats)
    assert chats[5] == [
        {"role": "user", "content": "How many minutes are there in a week?"},
        {
            "role": "assistant",
            "content": "There are 10,080 minutes in a week. A week has 7 days, each day has "
            "24 hours, and each hour has 60 minutes, so the calculation is 7 × 24 × 60 = 10,080.",
        },
    ]
    assert "    a, b = 0, 1\n    for _ in range(n):\n" in chats[2][1]["content"]


def test_heldout_text_is_not_calibrated_on(demo):
    heldout = (demo.TEXT / "heldout.txt").read_text(encoding="utf-8")
    paragraphs = [p for p in heldout.split("\n\n") if p.strip()]
    assert len(heldout.split()) > 1000
    for name in ("prose.txt", "chat.txt"):
        text = (demo.TEXT / name).read_text(encoding="utf-8")
        for sentence in (s for p in paragraphs for s in p.strip().split(". ")):
            assert sentence not in text


def test_compare_gives_the_divergence_by_hand(demo):
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]])
    divergence, agreement = demo.compare(p.log(), q.log())
    assert math.isclose(divergence, 0.25 * math.log(2) / 2, rel_tol=1e-5)
    assert agreement == 0.5


def test_log_probabilities_are_those_of_each_window(demo, model, monkeypatch):
    monkeypatch.setattr(demo, "WINDOW", 8)
    tokens = torch.arange(20)
    got = demo.log_probabilities(model, tokens)
    assert got.shape == (20, 257)
    with torch.inference_mode():
        last = model(tokens[None, 16:]).logits[0].log_softmax(-1)
    assert torch.equal(got[16:], last)


def test_generate_equals_greedy_generation_of_transformers(demo, model):
    prompt = torch.arange(5, 12)[None]
    cache = demo.static_cache(model, 7 + 20)
    for _ in range(2):  # the second time in a used cache
        tokens, speed = demo.generate(model, model, cache, prompt, 20)
        want = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        assert tokens == want[0, 7:].tolist()
        assert speed > 0


def test_generate_stops_at_the_end_token(demo, model):
    prompt = torch.arange(5, 12)[None]
    cache = demo.static_cache(model, 7 + 20)
    tokens, _ = demo.generate(model, model, cache, prompt, 20)
    end = tokens[4]
    model.generation_config.eos_token_id = [end]
    assert demo.generate(model, model, cache, prompt, 20)[0] == tokens[: tokens.index(end) + 1]


def test_one_compiled_step_serves_every_position(demo, model):
    model = quantized(model)
    prompt = torch.arange(5, 12)[None]
    cache = demo.static_cache(model, 7 + 12)
    want, _ = demo.generate(model, model, cache, prompt, 12)
    # Tracing is what is tested: the backend that generates code would only add its own time.
    step = torch.compile(model, fullgraph=True, backend="eager")
    demo.generate(model, step, cache, prompt, 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        tokens, _ = demo.generate(model, step, cache, prompt, 12)
    assert tokens == want


def test_bytes_before_and_after(demo, model, tmp_path):
    linears = 2 * (192 * 192 * 2 + 192 * 64 * 2 + 3 * 192 * 256)
    dense = 257 * 192 + 5 * 192
    assert demo.bytes_in_bf16(model) == (2 * linears, 2 * (linears + dense))
    save_model(quantized(model), tmp_path / "exl3")
    body, file = demo.bytes_of_checkpoint(load_model(tmp_path / "exl3"), tmp_path / "exl3")
    # per layer, padded: q, o 256 x 256; k, v 256 x 128; gate, up, down 256 x 256
    weights = 2 * (5 * 256 * 256 + 2 * 256 * 128)
    vectors = 2 * 2 * (5 * (256 + 256) + 2 * (256 + 128))
    assert body == weights // 2 + vectors + 4 * 14
    assert body + 4 * dense < file < body + 4 * dense + 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "9"], "--bits 9 with mul1: expected one of 1, 1.5, 2"),
        (["--bits", "1.5", "--codebook", "mcg"], "--bits 1.5 with mcg: expected one of 1, 2, 3"),
        (["--bits", "4", "--codebook", "sqg_fp16"], "expected one of 5, 6"),
        (["--layers", "0"], "--layers at least 1"),
    ],
)
def test_bad_options_get_one_clear_line(demo, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        demo.parse_options()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_packages_are_named(demo):
    with pytest.raises(SystemExit, match="demo: the demo needs not_there_1, not_there_2; `make"):
        demo.require("not_there_1", "math", "not_there_2")


def test_layers_option_keeps_the_rest(demo, model):
    keep = demo.layers_to_keep(model, 1)
    assert len(keep) == 8 and "lm_head" in keep and "model.layers.0.mlp.up_proj" not in keep
    assert demo.layers_to_keep(model, None) == ["lm_head"]
