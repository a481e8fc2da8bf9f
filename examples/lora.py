"""Trains a LoRA adapter over frozen packed layers, with peft.

    python examples/lora.py

A small random model learns to repeat one sequence: its layers stay as they were quantised, and
gradients pass through them to the adapters.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from swap_linears import small_model

import trellis_ops
from trellis_ops.integrations.peft import register_lora

STEPS = 21


def main() -> list[float]:
    model = small_model()
    trellis_ops.swap_linears(
        model, lambda name, linear: trellis_ops.quantize_linear(linear.weight, 3)
    )
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(model, register_lora(config))
    model.print_trainable_parameters()

    tokens = torch.arange(7, 39)[None]
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    losses = []
    for step in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:2d}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
