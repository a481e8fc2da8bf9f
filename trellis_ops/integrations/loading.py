"""Loads an EXL3 checkpoint as a transformers model, and insists on every tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load_model(
    directory: str | Path, dtype: torch.dtype | str | None = None, **options: Any
) -> PreTrainedModel:
    """``from_pretrained`` for an EXL3 checkpoint, which raises where that would only warn.

    Args:
        directory: a checkpoint with config.json and safetensors files, or a name on the Hub.
        dtype: of everything that is not quantised; default as the config or the files say.
        options: of ``from_pretrained``, such as ``device_map``.

    Returns:
        The model in eval mode, of the class that the config names, else a causal language model;
        each EXL3 matrix an :class:`Exl3Linear`.

    Raises:
        ValueError: the checkpoint is damaged, lacks a tensor, or has one that the model does not;
            the message names the tensor.
    """
    from transformers import AutoConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    from .quantizer import Exl3Config

    directory = str(directory)
    older = options.pop("torch_dtype", None)  # the name that it had before transformers 5
    known = ("revision", "trust_remote_code", "cache_dir", "token", "local_files_only", "subfolder")
    hub = {name: options[name] for name in known if name in options}
    config = AutoConfig.from_pretrained(directory, **hub)
    method = getattr(config, "quantization_config", None)
    if method is None or not AutoHfQuantizer.supports_quant_method(method):
        options.setdefault("quantization_config", Exl3Config())
    model, info = _class_of(config).from_pretrained(
        directory,
        dtype=dtype or older or "auto",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # named below, where transformers says only that there is one
        **options,
    )
    for name, got, wanted in sorted(info["mismatched_keys"]):
        raise ValueError(f"load_model: {name} is {list(got)}, expected {list(wanted)}")
    for kind, problem in (
        ("missing_keys", "the checkpoint lacks"),
        ("unexpected_keys", "the model has no place for"),
    ):
        names = sorted(info[kind])
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"load_model: {problem} {names[0]}{more}")
    return model


def _class_of(config):
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM
