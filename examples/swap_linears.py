"""Swaps some layers of a transformers model for packed ones, compiles it, saves and loads it.

    python examples/swap_linears.py

The model is a small Llama with random weights, so that nothing is downloaded: put a name for
``AutoModelForCausalLM.from_pretrained`` in its place.
"""

from __future__ import annotations

import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import trellis_ops

BITS = 4


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def choose(name: str, linear: torch.nn.Linear) -> trellis_ops.TrellisTensor | None:
    """Quantises the MLPs and leaves attention and head alone."""
    if ".mlp." not in name:
        return None
    return trellis_ops.quantize_linear(linear.weight, BITS, codebook="mul1", bias=linear.bias)


def main() -> None:
    model = small_model()
    tokens = torch.arange(5, 21)[None]
    with torch.inference_mode():
        before = model(tokens).logits

    start = time.perf_counter()
    swapped = trellis_ops.swap_linears(model, choose)
    print(f"swapped {len(swapped)} layers in {time.perf_counter() - start:.1f} s")
    print(f"  {swapped[0]}: {model.get_submodule(swapped[0])}")

    # One graph without a break; the number of tokens may change.
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        after = compiled(tokens).logits
    error = (after - before).norm() / before.norm()
    print(f"logits of the compiled model differ by {error:.1%} from those before")

    with tempfile.TemporaryDirectory() as folder:
        trellis_ops.save_model(model, folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        same = torch.equal(loaded(tokens).logits, model(tokens).logits)
    print(f"from_pretrained gives the same logits: {same}")


if __name__ == "__main__":
    main()
