"""A transformers model with packed layers as an EXL3 checkpoint."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..formats import codebooks
from ..formats.checkpoint import Index, read_exl3_index
from ..nn import Exl3Linear, Exl3MoE
from ..parallel import SPLIT
from ..staging import staged
from . import experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECORD = "quantization_config.json"

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def save_model(
    model: PreTrainedModel,
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    calibration: Mapping[str, int] | None = None,
    **options: Any,
) -> None:
    """Writes a model with packed layers as an EXL3 checkpoint: weights, config, tokenizer.

    What ``model.save_pretrained`` does, and besides every file is complete before it gets its
    name: an existing checkpoint in ``directory`` is replaced file by file, and other files there
    are left alone. The same model gives the same bytes. Afterwards ``model.save_pretrained``
    writes the same checkpoint.

    Args:
        model: its linears quantised, for instance by ``quantize_model``; or loaded as such.
        directory: made if missing.
        tokenizer: saved beside the model, if given.
        calibration: ``{"rows": ..., "cols": ...}`` of the text behind the Hessians, for the
            record; default what the model's own config says.
        options: of ``save_pretrained``, such as ``max_shard_size``.

    Raises:
        ValueError: nothing in the model is packed, or a tensor is on the meta device.
    """
    if not any(isinstance(module, (Exl3Linear, Exl3MoE)) for module in model.modules()):
        raise ValueError("save_model: the model has no Exl3Linear, quantise it first")
    prepare_saving(model)
    method = model.hf_quantizer.quantization_config.quant_method
    if method not in ("exl3", "modelopt"):
        raise ValueError(f"save_model: the model is quantised with {method} too, expected none")
    for name, tensor in model.state_dict().items():
        if tensor.is_meta and not hasattr(model, "hf_device_map"):
            raise ValueError(f"save_model: {name} is on the meta device and has no values")
    if calibration is not None:
        model.hf_quantizer.quantization_config.calibration = dict(sorted(calibration.items()))
    with staged(Path(directory), "save_model") as staging:
        model.save_pretrained(staging, **options)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)


def prepare_saving(model: nn.Module) -> None:
    """Makes ``save_pretrained`` of a model whose layers were swapped write an EXL3 checkpoint.

    Does nothing to a model that is not of transformers; one that another method has quantised too
    stays with the saver of that.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    from .quantizer import Exl3Config, Exl3Quantizer

    present = getattr(model, "hf_quantizer", None)
    # What was loaded from GGUF is dense by now.
    if present is None or present.quantization_config.quant_method == "gguf":
        model.hf_quantizer = Exl3Quantizer(Exl3Config())
        attach(model)
    untie(model)


def untie(model: PreTrainedModel) -> None:
    """A packed head is a matrix of its own, whatever the config says of tied embeddings."""
    for target in list(model.all_tied_weights_keys):
        owner = model.get_submodule(target.rpartition(".")[0])
        if isinstance(owner, (Exl3Linear, *SPLIT)):
            del model.all_tied_weights_keys[target]
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False


def attach(model: PreTrainedModel) -> None:
    """Has ``model.save_pretrained`` also write quantization_config.json, for other tools.

    transformers offers no place for it: its hook for quantisers is not told the directory.
    """
    # Not a bound method: pickle looks that up again by its name, in vain.
    model.save_pretrained = functools.partial(_save_pretrained, model)


def _save_pretrained(self: PreTrainedModel, save_directory, *args, **kwargs) -> None:
    save = type(self).save_pretrained
    save(self, save_directory, *args, **kwargs)
    if getattr(self, "hf_quantizer", None) is None or getattr(self, "_hf_peft_config_loaded", None):
        return
    given = inspect.signature(save).bind(self, save_directory, *args, **kwargs).arguments
    if not given.get("is_main_process", True):
        return
    variant = f".{given['variant']}" if given.get("variant") else ""
    folder = Path(save_directory)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    record = config["quantization_config"]
    # A former save into the folder may have left the other of the two.
    names = f"model{variant}.safetensors", f"model.safetensors.index{variant}.json"
    written = [folder / name for name in names]
    newest = max(filter(Path.is_file, written), key=lambda file: file.stat().st_mtime_ns)
    record["tensor_storage"] = tensor_storage(read_exl3_index(newest))
    text = json.dumps(record, indent=2) + "\n"
    (folder / RECORD).write_text(text, encoding="utf-8")


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state dict, with experts matrix by matrix as a checkpoint has them.

    Raises:
        ValueError: the model is split over processes, or its experts are offloaded.
    """
    tensors = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, SPLIT):
            raise ValueError(
                f"save: {name} is split over processes, expected a model loaded by a single one"
            )
        if isinstance(module, Exl3MoE):
            for field, _ in module.named_parameters():
                del tensors[f"{name}.{field}"]
            tensors.update(experts.stored(name, module))
    return tensors


def describe(model: nn.Module, config: Any) -> None:
    """Brings the fields of a quantization_config up to date with the model's layers."""
    from .. import __version__

    body, head, used = [], [], []
    for name, module in model.named_modules():
        if isinstance(module, Exl3Linear):
            matrices = [module.tensors()]
        elif isinstance(module, Exl3MoE):
            layout = module.layout()
            matrices = [layout.matrix(*piece) for piece in layout.pieces()]
        else:
            continue
        (head if _is_head(name) else body).extend(matrices)
        used += [matrix.codebook for matrix in matrices]
    weights = [matrix.trellis.shape[:2].numel() for matrix in body or head]
    bits = sum(m.bits * count for m, count in zip(body or head, weights, strict=True))
    config.bits = round(bits / sum(weights), 2)
    config.head_bits = head[0].bits if head else 16
    # Markers beside the tensors decide. To readers this field tells what it means if there is none.
    config.codebook = "3inst" if "3inst" in used else max(sorted(set(used)), key=used.count)
    for name, default in (("version", __version__), ("out_scales", "always")):
        if not hasattr(config, name):
            setattr(config, name, default)


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"


def tensor_storage(index: Index) -> dict[str, dict]:
    """What quantization_config.json tells of every tensor, by the name of its module."""
    storage: dict[str, dict] = {}
    groups = {group.name: group for group in index.groups}
    stored = [*index.others, *(t for group in index.groups for t in group.tensors.values())]
    for tensor in sorted(stored, key=lambda tensor: tensor.name):
        stem = tensor.name.rpartition(".")[0]
        entry = storage.setdefault(stem, {"stored_tensors": {}})
        entry["stored_tensors"][tensor.name] = {
            "shape": list(tensor.shape),
            "n_bytes": tensor.nbytes,
            "dtype": f"torch.{_DTYPES.get(tensor.dtype, tensor.dtype.lower())}",
        }
    for name, group in groups.items():
        storage[name].update(quant_format="exl3", bits_per_weight=group.bits)
        if group.codebook in ("mcg", "mul1"):
            storage[name][f"{group.codebook}_multiplier"] = codebooks.MARKERS[group.codebook]
    return storage
