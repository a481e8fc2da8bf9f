"""The transformers plugin: what makes ``from_pretrained`` understand ``quant_method: "exl3"``."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..formats.checkpoint import read_exl3_files
from ..nn import Exl3Linear, Exl3MoE, Exl3Parts
from ..nn.frozen import FrozenModule
from ..parallel import SPLIT, current_shard
from . import experts, saving
from .placement import Placement, place
from .tail import check_r7, check_tail, check_tail_against, tail_of, unshare

logger = logging.get_logger(__name__)

# Last name components that lead the loader to _ReadModule: of linears, and of experts.
_SLAB, _EXPERTS = "exl3_slab", "exl3_experts"
_CONSUMED = "exl3.consumed"


class Exl3Config(QuantizationConfigMixin):
    """``quantization_config`` of an EXL3 checkpoint: a record, which decides nothing.

    Headers of the safetensors files say what is quantised, at which rate, with which codebook.
    All fields are kept as they came.
    """

    def __init__(self, quant_method: str = "exl3", **fields: Any) -> None:
        self.quant_method = quant_method
        for name, value in fields.items():
            setattr(self, name, value)


class Exl3Quantizer(HfQuantizer):
    """Puts packed modules into the model before transformers loads its weights."""

    requires_calibration = False

    def __init__(self, quantization_config: Exl3Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # Files are packed whether or not the model's own config says so.
        self.pre_quantized = True
        self.placement = Placement()
        self.shapes: dict[str, torch.Size] = {}

    # ---- loading ----------------------------------------------------------------------------

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        files = [str(file) for file in checkpoint_files or ()]
        if not files or not all(file.endswith(".safetensors") for file in files):
            raise ValueError(f"exl3: the weights are in {files}, expected safetensors files")
        split = getattr(model.config, "distributed_config", None)
        if any((getattr(split, name, None) or 1) > 1 for name in ("tp_size", "ep_size")):
            raise ValueError(
                "exl3: transformers' own tensor parallelism (tp_plan, distributed_config) cannot "
                "split packed layers; load inside trellis_ops.parallel.sharded() without it"
            )
        tail = tail_of(model.config)
        if tail is not None:
            check_tail(tail)
        elif self.quantization_config.quant_method == "modelopt":
            raise ValueError(
                "exl3: the checkpoint is one of modelopt, and its config.json has no "
                "hybrid_tr3_tail that tells of EXL3 experts; trellis_ops cannot load it"
            )
        index = read_exl3_files(files, self.quantization_config.to_dict())
        if not index.groups:
            raise ValueError(
                f"exl3: {files[0]} holds no quantised matrix; if the repository keeps one branch "
                "for each rate, name one (revision=...)"
            )
        renamings = [t for t in _conversions(model) if isinstance(t, WeightRenaming)]
        ignored = _ignored_names(model)
        self.placement = place(
            model,
            index.groups,
            lambda name: _renamed(name, renamings),
            lambda name: ignored.search(name) is not None,
            model.dtype,
            current_shard(),
        )
        if tail is not None:
            layers = model.config.get_text_config().num_hidden_layers
            check_tail_against(tail, self.placement.sets, layers, index.path)
        if hasattr(self.quantization_config, "r7_routed_experts"):
            check_r7(self.quantization_config.r7_routed_experts, self.placement.sets)
        if self.placement.ignored:
            names = self.placement.ignored
            logger.warning(
                f"exl3: {len(names)} matrices that {type(model).__name__} does not run are left "
                f"out, from {names[0]} to {names[-1]}"
            )
        # An instance's own set: that of the class serves every model of the architecture.
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            rf"^{re.escape(_CONSUMED)}$",
            ignored.pattern,
        }
        saving.untie(model)
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return model

    def get_weight_conversions(self):
        return [
            _ToModules(self.placement),
            WeightConverter(_SLAB, "trellis", [_ReadModule(self.placement)]),
            WeightConverter(_EXPERTS, "packed", [_ReadModule(self.placement)]),
        ]

    def update_weight_conversions(self, weight_conversions, *model):
        return [*weight_conversions, *self.get_weight_conversions()]

    def _process_model_after_weight_loading(self, model, **kwargs):
        # transformers 5.17 takes any shape where there is a quantiser.
        for name, parameter in model.named_parameters():
            if parameter.shape != (wanted := self.shapes.get(name, parameter.shape)):
                got = list(parameter.shape)
                raise ValueError(f"exl3: {name} is {got}, expected {list(wanted)}")
        for name, module in model.named_modules():
            if isinstance(module, FrozenModule):
                # The loader makes a trainable parameter of every float tensor.
                module.requires_grad_(False)
                for field, tensor in module.named_parameters():
                    if tensor.dtype in (torch.bfloat16, torch.float32):
                        raise ValueError(
                            f"exl3: {name}.{field} was loaded as {tensor.dtype}, expected float16"
                        )
            elif isinstance(module, SPLIT):
                model.requires_grad_(False)  # no gradient passes through them
        # What is left undoes on saving what was done on loading; a module that was read by
        # _ReadModule is saved in the current layout instead.
        model._weight_conversions = [
            t
            for t in model._weight_conversions
            if not isinstance(t, WeightConverter) or not isinstance(t.operations[0], _ReadModule)
        ]
        # Only what saving needs is kept.
        for done in ("reads", "triggers", "consumed", "sets"):
            getattr(self.placement, done).clear()
        self.shapes.clear()
        saving.attach(model)
        return model

    # ---- saving and the rest ----------------------------------------------------------------

    def get_state_dict_and_metadata(self, model):
        if self.quantization_config.quant_method == "exl3":
            saving.describe(model, self.quantization_config)
        unshare(model.config, self.quantization_config)
        model.config.quantization_config = self.quantization_config
        return saving.state_dict(model), {}

    def _dequantize(self, model, dtype=None):
        if isinstance(dtype, str):  # save_pretrained leaves the name in the config
            dtype = getattr(torch, dtype)
        dtype = dtype or model.dtype
        modules = dict(model.named_modules())
        parts = tuple(f"{n}." for n, module in modules.items() if isinstance(module, Exl3Parts))
        for name, module in modules.items():  # before anything is replaced
            if isinstance(module, SPLIT):
                raise ValueError(f"dequantize: {name} is split over processes")
            if isinstance(module, Exl3MoE) and name not in self.placement.experts:
                raise ValueError(f"dequantize: {name} does not come from a checkpoint")
        for name, module in modules.items():
            if isinstance(module, Exl3MoE):
                original, dense = self.placement.experts[name]
                model.set_submodule(name, experts.dequantize(original, dense, module, dtype))
            elif isinstance(module, (Exl3Linear, Exl3Parts)) and not name.startswith(parts):
                model.set_submodule(name, _dense(module, dtype))
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters train over the frozen layers."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _register() -> None:
    """Registers "exl3" with transformers, once; and "modelopt", if nobody else has.

    Checkpoints of which only the routed experts are EXL3 call themselves modelopt.
    """
    for method in ("exl3", "modelopt"):
        taken = AUTO_QUANTIZER_MAPPING.get(method)
        if taken is Exl3Quantizer:
            continue
        if taken is None and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            register_quantization_config(method)(Exl3Config)
            register_quantizer(method)(Exl3Quantizer)
        elif method == "exl3":
            logger.warning(
                "trellis_ops: another package has registered the quantiser exl3 with transformers, "
                "and loads such checkpoints"
            )


class _ToModules(WeightRenaming):
    """Names of stored tensors -> names in the model; a table, since no pattern tells them."""

    __slots__ = ("placement", "reverse", "stems")

    def __init__(self, placement: Placement, reverse: bool = False) -> None:
        super().__init__("exl3", "exl3")
        self.placement, self.reverse, self.stems = placement, reverse, placement.stems
        if reverse:
            self.stems = {name: stem for stem, name in placement.stems.items()}

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        self._was_used = True
        own, _, field = source_key.rpartition(".")
        if self.reverse:
            return f"{self.stems.get(own, own)}.{field}", None
        stem = self.placement.stem_of(source_key)
        name = self.placement.triggers.get(f"{stem}.{field}")
        if name is not None:
            of_experts = name.removesuffix(".part") in self.placement.experts
            return f"{name}.{_EXPERTS if of_experts else _SLAB}", None
        if stem in self.placement.consumed:
            return _CONSUMED, None
        return f"{self.stems.get(stem, own)}.{field}", None

    def reverse_transform(self) -> _ToModules:
        return _ToModules(self.placement, reverse=True)


class _ReadModule(ConversionOps):
    """Reads a whole module when the loader comes to one small tensor of it."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def __deepcopy__(self, memo) -> _ReadModule:
        return self

    def convert(self, input_dict, full_layer_name="", **kwargs):
        ((tensor, *_), *_) = input_dict.values()
        name = full_layer_name.rpartition(".")[0]
        tensors = self.placement.reads[name](tensor.device)
        return {f"{name}.{field}": part for field, part in tensors.items()}


def _renamed(name: str, renamings: list[WeightRenaming]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _ignored_names(model: nn.Module) -> re.Pattern[str]:
    """Tensors that the model leaves out: what its class says, and the layers after its last.

    Those predict more than one token ahead (MTP), and have the next numbers after the decoder's.
    """
    patterns = [str(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    config = model.config.get_text_config()
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    if not extra and any("layers" in pattern for pattern in patterns):
        extra = 1
    first = getattr(config, "num_hidden_layers", 0)
    patterns += [rf"(^|\.)layers\.{first + i}\." for i in range(extra)]
    patterns.append(r"^(model\.)?mtp\.")
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def _dense(packed: nn.Module, dtype: torch.dtype) -> nn.Linear:
    """An ordinary layer with the weight that the packed one stands for."""
    weight = packed.dequantize(dtype)
    linear = nn.Linear(packed.in_features, packed.out_features, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    bias = packed.bias
    linear.bias = (
        bias if bias is None else nn.Parameter(bias[: linear.out_features].to(dtype), False)
    )
    return linear


def _conversions(model) -> list:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


_register()
