"""LoRA adapters over packed layers, with peft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..nn import Exl3Linear, Exl3Parts

if TYPE_CHECKING:
    from peft import LoraConfig


def register_lora(config: LoraConfig) -> LoraConfig:
    """Tells a LoraConfig that its target modules may be Exl3Linear or Exl3Parts.

    The layer is as it was and stays frozen; adapters are added to its results and train. They
    cannot be merged into packed weights: ``merge_and_unload`` raises.

    Returns:
        The same config, for ``get_peft_model``.
    """
    adapter = _adapter()
    config._register_custom_module({Exl3Linear: adapter, Exl3Parts: adapter})
    return config


def _adapter() -> type:
    from peft.tuners.lora import Linear

    class LoraExl3Linear(Linear):
        """peft's own adapter of a linear layer, over one that has no weight to merge into."""

        def merge(self, *args, **kwargs) -> None:
            raise ValueError(
                "Exl3Linear: an adapter cannot be merged into packed weights; call .dequantize() "
                "on the model before adding adapters, or keep them apart"
            )

    return LoraExl3Linear
