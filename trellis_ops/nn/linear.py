"""Exl3Linear: nn.Linear's place in a model, over a packed matrix."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import nn

from .. import ops
from ..formats import codebooks, tiles
from ..formats.tensor import FIELDS, TrellisTensor, check_marker
from .frozen import FrozenModule


class PackedWeight:
    """Stands where model code looks for ``linear.weight``: tells dtype, device and shape only."""

    requires_grad = False

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device

    @property
    def ndim(self) -> int:
        return 2

    @property
    def is_meta(self) -> bool:
        return self.device.type == "meta"

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def __repr__(self) -> str:
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{_NO_WEIGHT} (asked for weight.{name})")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None) -> NoReturn:
        raise TypeError(f"{_NO_WEIGHT} (passed to {getattr(func, '__name__', func)})")


_NO_WEIGHT = (
    "Exl3Linear keeps its weight packed and has no dense one: call .dequantize() for a copy, "
    "or the module itself for the product"
)


class Exl3Linear(FrozenModule):
    """y = x W' + b over a quantised W that is never unpacked in memory.

    Args:
        in_features, out_features: logical sizes; the packed ones are padded to multiples of 128.
        bias: whether there is one (kept in float16).
        bits: rate, 1 to 8 or 1.5, 2.5, 3.5.
        codebook: see :func:`trellis_ops.trellis_gemm`.
        device: where the tensors go; "meta" works.
        dtype: what ``.weight.dtype`` says and ``.to(dtype)`` changes; default torch's. The result
            has the dtype of x all the same, and the stored tensors keep theirs.

    Frozen parameters are named as in an EXL3 checkpoint: trellis, suh, svh, bias, and the marker of
    the codebook (mcg, mul1 or sqg; none for 3inst). A new module is all zeros: load a state dict,
    or use :meth:`from_linear` or :meth:`from_tensors`. Gradient flows to x only.

    Attributes:
        act: accuracy of the activations, "exact" unless set otherwise; see
            :func:`trellis_ops.trellis_gemm`.
    """

    act = "exact"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        bits: float,
        codebook: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Exl3Linear: {name} is {value!r}, expected a positive int")
        words = tiles.tile_words_of(bits, "Exl3Linear")
        codebooks.codebook_id(codebook, "Exl3Linear")
        if bits not in codebooks.rates_of(codebook):
            raise ValueError(
                f"Exl3Linear: codebook {codebook} at {bits} bits, "
                f"expected bits in {codebooks.rates_of(codebook)}"
            )
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.codebook = tiles.bits_of(words), codebook
        rows, columns = tiles.padded(in_features), tiles.padded(out_features)
        half = {"dtype": torch.float16, "device": device}
        shape = (rows // tiles.TILE, columns // tiles.TILE, words)
        self._freeze("trellis", torch.zeros(shape, dtype=torch.int16, device=device))
        self._freeze("suh", torch.zeros(rows, **half))
        self._freeze("svh", torch.zeros(columns, **half))
        self._freeze("bias", torch.zeros(columns, **half) if bias else None)
        marker = codebooks.marker_of(codebook)
        if marker is not None:
            self._freeze(marker, codebooks.marker_tensor(codebook, device))

    @classmethod
    def from_tensors(
        cls, tensors: TrellisTensor, *, dtype: torch.dtype | None = None
    ) -> Exl3Linear:
        """Wraps a quantised matrix; shares its storage."""
        module = cls(
            tensors.in_features,
            tensors.out_features,
            tensors.bias is not None,
            bits=tensors.bits,
            codebook=tensors.codebook,
            device="meta",
            dtype=dtype,
        )
        module.load_state_dict(tensors.state_dict(), assign=True)
        return module

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        bits: float,
        *,
        codebook: str = "mul1",
        hessian: torch.Tensor | None = None,
        seed: int = 0,
    ) -> Exl3Linear:
        """Quantises an nn.Linear; arguments as in :func:`trellis_ops.quantize_linear`."""
        from ..quantize import quantize_linear

        weight = linear.weight.detach()
        bias = None if linear.bias is None else linear.bias.detach()
        tensors = quantize_linear(
            weight, bits, codebook=codebook, hessian=hessian, bias=bias, seed=seed
        )
        return cls.from_tensors(tensors, dtype=weight.dtype)

    def tensors(self) -> TrellisTensor:
        """The module's matrix as a :class:`TrellisTensor`, sharing storage."""
        return TrellisTensor(
            self.trellis,
            self.suh,
            self.svh,
            self.bias,
            self.codebook,
            self.in_features,
            self.out_features,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], in x.dtype or the autocast dtype."""
        if x.dim() > 0 and x.shape[-1] != self.in_features:
            raise ValueError(
                f"Exl3Linear: x has {x.shape[-1]} columns, expected in_features {self.in_features}"
            )
        return ops.trellis_gemm(
            x,
            self.trellis,
            self.suh,
            self.svh,
            self.bias,
            codebook=self.codebook,
            out_features=self.out_features,
            act=self.act,
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A dense copy of the weight, [out_features, in_features]."""
        return self.tensors().dequantize(dtype or self.dtype)

    @property
    def weight(self) -> PackedWeight:
        """No tensor: an object that knows dtype, device and shape, and says so when used as one."""
        return PackedWeight((self.out_features, self.in_features), self.dtype, self.trellis.device)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, bits={self.bits}, codebook={self.codebook}"
        )

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        own = {
            name: state_dict[prefix + name]
            for name in (*FIELDS, "su", "sv", *codebooks.MARKERS)
            if prefix + name in state_dict
        }
        expected = dict(self.named_parameters(recurse=False))
        replaced = self._legacy_or_short(own)
        faults: list[str] = []
        for name, tensor in {**own, **replaced}.items():
            faults.extend(self._faults(prefix, name, tensor, expected))
        marker = codebooks.marker_of(self.codebook)
        if "trellis" in own and marker is not None and marker not in own:
            # Not left to strict: without its marker a trellis is one of 3inst.
            faults.append(
                f"{prefix}{marker}: missing beside {prefix}trellis, "
                f"and the module's codebook is {self.codebook}"
            )
        if faults:
            error_msgs.extend(faults)
            return
        # Reads a mapping with the converted tensors in place of the stored ones.
        view = {**state_dict, **{prefix + name: tensor for name, tensor in replaced.items()}}
        if "su" in own and "suh" in replaced:
            del view[prefix + "su"]
        if "sv" in own and "svh" in replaced:
            del view[prefix + "sv"]
        super()._load_from_state_dict(
            view, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _legacy_or_short(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sign words unpacked, and a bias of the logical length padded."""
        replaced = {}
        for name, legacy in (("suh", "su"), ("svh", "sv")):
            words = own.get(legacy)
            if words is not None and name not in own and words.dtype == torch.int16:
                replaced[name] = tiles.unpack_signs(words.flatten())
        bias = own.get("bias")
        if bias is not None and self.bias is not None and bias.shape == (self.out_features,):
            replaced["bias"] = nn.functional.pad(bias, (0, self.bias.shape[0] - bias.shape[0]))
        return replaced

    def _faults(
        self, prefix: str, name: str, tensor: torch.Tensor, expected: dict[str, torch.Tensor]
    ) -> list[str]:
        """What strict=False, assign=True and silent casts would let through as fluent noise."""
        if name in codebooks.MARKERS:
            if name not in expected:
                return [f"{prefix}{name}: found, but the module's codebook is {self.codebook}"]
            try:
                check_marker(prefix + name, name, tensor)
            except ValueError as error:
                return [str(error)]
            return []
        if name not in expected:
            return []
        if tensor.dtype != expected[name].dtype and name != "bias":
            return [f"{prefix}{name}: dtype {tensor.dtype}, expected {expected[name].dtype}"]
        if name == "trellis" and tensor.dim() == 3 and tensor.shape[2] != expected[name].shape[2]:
            return [
                f"{prefix}trellis: {tensor.shape[2] / 16:g} bits in the state dict, "
                f"expected bits={self.bits}"
            ]
        return []
