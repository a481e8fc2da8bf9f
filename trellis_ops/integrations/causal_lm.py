"""A transformers causal language model with Exl3Linear layers, as an EXL3 checkpoint and back.

The headers of the safetensors files are the truth about what is quantised, at which rate and with
which codebook; the JSON beside them is written for other tools and believed in nothing.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..formats import codebooks, tiles
from ..formats.checkpoint import Exl3Group, read_exl3_index
from ..nn import Exl3Linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = "model.safetensors"


# ---- saving -------------------------------------------------------------------------------------


def save_model(
    model: PreTrainedModel,
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: torch.dtype | None = None,
    calibration: Mapping[str, int] | None = None,
) -> None:
    """Writes a model with Exl3Linear layers as an EXL3 checkpoint: weights, config, tokenizer.

    Every file is complete before it gets its name; an existing checkpoint in ``directory`` is
    replaced file by file, and other files there are left alone. The same model gives the same
    bytes.

    Args:
        model: its state dict's names are the checkpoint's. Tied weights are stored once.
        directory: made if missing.
        tokenizer: saved beside the model, if given.
        dtype: of everything that is not quantised, as it is written; default as the model has it.
        calibration: ``{"rows": ..., "cols": ...}`` of the text behind the Hessians, for the
            record; default what the model's own config says.

    Raises:
        ValueError: the model has no Exl3Linear, or a tensor is on the meta device.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Exl3Linear)}
    if not layers:
        raise ValueError("save_model: the model has no Exl3Linear, quantise it first")
    tensors = _tensors_of(model, layers, dtype)
    own = getattr(model.config, "quantization_config", None)
    if calibration is None and isinstance(own, dict) and own.get("quant_method") == "exl3":
        calibration = own.get("calibration")
    quantization = _quantization_config(layers, calibration)

    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype or model.dtype
    config.quantization_config = quantization
    tied = any(name not in tensors for name in model.state_dict())
    if getattr(config, "tie_word_embeddings", False) and not tied:
        config.tie_word_embeddings = False  # the head has been quantised or replaced

    with _staged(Path(directory)) as staging:
        config.save_pretrained(staging)
        if model.can_generate():
            model.generation_config.save_pretrained(staging)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        storage = {**quantization, "tensor_storage": _tensor_storage(tensors, layers)}
        text = json.dumps(storage, indent=2) + "\n"
        (staging / "quantization_config.json").write_text(text, encoding="utf-8")
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        # safetensors makes its files readable by their owner only.
        shutil.copymode(staging / "config.json", staging / WEIGHTS)


def _tensors_of(
    model: PreTrainedModel, layers: Mapping[str, Exl3Linear], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """The state dict, each tied tensor under its first name only."""
    tensors, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.is_meta:
            raise ValueError(f"save_model: {name} is on the meta device and has no values")
        storage = tensor.untyped_storage()
        place = (storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        if dtype is not None and tensor.is_floating_point() and _stem(name) not in layers:
            tensors[name] = _cast(name, tensor, dtype)
            continue
        # A copy of its own: safetensors refuses tensors that share storage.
        whole = storage.nbytes() == tensor.nbytes and tensor.is_contiguous()
        tensors[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
    return tensors


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if not bool(cast.isfinite().all()) and bool(tensor.isfinite().all()):
        raise ValueError(f"save_model: {name} has values beyond the range of {dtype}")
    return cast


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _quantization_config(
    layers: Mapping[str, Exl3Linear], calibration: Mapping[str, int] | None
) -> dict:
    from .. import __version__

    body = {name: layer for name, layer in layers.items() if not _is_head(name)} or layers
    weights = {name: layer.trellis.shape[:2].numel() for name, layer in body.items()}
    bits = sum(body[name].bits * count for name, count in weights.items()) / sum(weights.values())
    head = [layer.bits for name, layer in layers.items() if _is_head(name)]
    used = [layer.codebook for layer in layers.values()]
    config = {
        "quant_method": "exl3",
        "version": __version__,
        "bits": round(bits, 2),
        "head_bits": head[0] if head else 16,
        "out_scales": "always",
        # Markers beside the tensors decide; a mixed model is described by its commonest codebook.
        "codebook": max(sorted(set(used)), key=used.count),
    }
    if calibration is not None:
        config["calibration"] = dict(sorted(calibration.items()))
    return config


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"


def _tensor_storage(
    tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Exl3Linear]
) -> dict[str, dict]:
    storage: dict[str, dict] = {}
    for name, tensor in tensors.items():
        entry = storage.setdefault(_stem(name), {"stored_tensors": {}})
        entry["stored_tensors"][name] = {
            "shape": list(tensor.shape),
            "n_bytes": tensor.nbytes,
            "dtype": str(tensor.dtype),
        }
    for name, layer in layers.items():
        storage[name].update(quant_format="exl3", bits_per_weight=layer.bits)
        if layer.codebook in ("mcg", "mul1"):
            storage[name][f"{layer.codebook}_multiplier"] = codebooks.MARKERS[layer.codebook]
    return storage


@contextmanager
def _staged(directory: Path):
    """A folder beside ``directory`` whose files move there when all of them are written."""
    directory = Path(os.path.abspath(directory))
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"save_model: {directory} exists and is no directory")
    for pattern in ("*.safetensors", "*.safetensors.index.json"):
        for file in directory.glob(pattern):
            if file.name != WEIGHTS:
                raise FileExistsError(
                    f"save_model: {file} would be mixed up with the new weights, "
                    "choose another directory"
                )
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.parent / f".{directory.name}.{secrets.token_hex(4)}.tmp"
    staging.mkdir()
    try:
        yield staging
        if directory.exists():
            # Weights last: until then the old ones stand, and the new ones' name is never half.
            for file in sorted(staging.iterdir(), key=lambda file: file.name == WEIGHTS):
                os.replace(file, directory / file.name)
        else:
            os.replace(staging, directory)
    finally:
        if staging.exists():
            shutil.rmtree(staging)


# ---- loading ------------------------------------------------------------------------------------


def load_model(directory: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Loads an EXL3 checkpoint of a transformers causal language model, on the CPU.

    Args:
        directory: a checkpoint with config.json and safetensors files.
        dtype: of everything that is not quantised; default as stored.

    Returns:
        The model in eval mode, each EXL3 matrix an :class:`Exl3Linear`.

    Raises:
        ValueError: the checkpoint is damaged, or does not fit the model; the message names the
            tensor.
    """
    from transformers import AutoConfig, GenerationConfig

    directory = Path(directory)
    index = read_exl3_index(directory)
    groups = {group.name: group for group in index.groups}
    packed = {tensor.name for group in index.groups for tensor in group.tensors.values()}
    tensors: dict[str, torch.Tensor] = {}
    files = {tensor.file for group in index.groups for tensor in group.tensors.values()}
    for file in sorted(files | {tensor.file for tensor in index.others}):
        tensors.update(load_file(file))
    for name, tensor in tensors.items():
        tensors[name] = _converted(name.rpartition(".")[2], tensor, name in packed, dtype)

    config = AutoConfig.from_pretrained(directory)
    if dtype is not None:
        config.dtype = dtype
    model = _empty_model(config)
    if _has_own_head(model.all_tied_weights_keys, groups, tensors):
        config.tie_word_embeddings = False
        model = _empty_model(config)
    tied = model.all_tied_weights_keys
    for name, source in tied.items():
        if name in tensors:
            tensors.setdefault(source, tensors.pop(name))
    for group in groups.values():
        _swap(model, group, model.dtype)
    _load(model, tensors, set(tied))
    model.tie_weights()
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval()


def _converted(
    field: str, tensor: torch.Tensor, packed: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    if not packed:
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
    if field == "bias":
        return tensor.half()  # old converters stored float32
    # Some writers give the marker a dimension.
    return tensor.reshape(()) if field in codebooks.MARKERS else tensor


def _has_own_head(
    tied: Mapping[str, str],
    groups: Mapping[str, Exl3Group],
    tensors: Mapping[str, torch.Tensor],
) -> bool:
    """Whether a weight that the config calls tied is in the checkpoint with values of its own.

    Converters quantise the head of a tied model and leave ``tie_word_embeddings`` as it was.
    """
    for name, source in tied.items():
        if name.removesuffix(".weight") in groups:
            return True
        both = name in tensors and source in tensors
        if both and not torch.equal(tensors[name], tensors[source]):
            return True
    return False


def _empty_model(config) -> PreTrainedModel:
    """The model on the meta device, except for the buffers that no checkpoint holds."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, module in model.named_modules():
        lost = {
            key: buffer
            for key, buffer in module.named_buffers(recurse=False)
            if key in module._non_persistent_buffers_set
        }
        if not lost:
            continue
        for key, buffer in lost.items():
            # NaN tells afterwards what the model's own initialisation did not write.
            fill = float("nan") if buffer.is_floating_point() else 0
            setattr(module, key, torch.full_like(buffer, fill, device="cpu"))
        model._init_weights(module)
        for key in lost:
            value = getattr(module, key)
            if not value.is_floating_point() or bool(value.isnan().any()):
                raise ValueError(
                    f"load_model: the buffer {name}.{key} is in no checkpoint, and "
                    f"{type(model).__name__} does not say how to compute it"
                )
    return model


def _swap(model: nn.Module, group: Exl3Group, dtype: torch.dtype) -> None:
    try:
        linear = model.get_submodule(group.name)
    except AttributeError:
        raise ValueError(f"load_model: {group.name}.trellis has no place in the model") from None
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"load_model: {group.name}.trellis belongs to a {type(linear).__name__} of the model, "
            "expected an nn.Linear"
        )
    stored = (group.in_features, group.out_features)
    padded = (tiles.padded(linear.in_features), tiles.padded(linear.out_features))
    if stored != padded:
        raise ValueError(
            f"load_model: {group.name}.trellis is {stored[0]} x {stored[1]}, expected "
            f"{padded[0]} x {padded[1]} (in x out, padded) for the model's "
            f"{linear.in_features} x {linear.out_features}"
        )
    if group.codebook not in codebooks.CODEBOOKS:
        raise ValueError(
            f"load_model: {group.name}.{group.codebook} at {group.bits} bits fits two codebooks, "
            "expected quantization_config to say which"
        )
    replacement = Exl3Linear(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        bits=group.bits,
        codebook=group.codebook,
        device="meta",
        dtype=dtype,
    )
    model.set_submodule(group.name, replacement, strict=True)


def _load(model: nn.Module, tensors: dict[str, torch.Tensor], tied: set[str]) -> None:
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise ValueError(f"load_model: {error}") from error
    missing = [name for name in missing if name not in tied]
    if missing:
        raise ValueError(
            f"load_model: the checkpoint lacks {_some(missing)}, which the model expects "
            f"(shape {list(expected[missing[0]])})"
        )
    if unexpected:
        raise ValueError(f"load_model: the model has no place for {_some(unexpected)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
