"""One quantised matrix: the tensors a checkpoint holds for it, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..meta import checks
from . import codebooks, tiles

FIELDS = ("trellis", "suh", "svh", "bias")


@dataclass(frozen=True, eq=False)
class TrellisTensor:
    """A quantised linear layer's weight, as stored.

    Attributes:
        trellis: int16 [in/16, out/16, 16 * bits], dimensions padded to multiples of 128.
        suh: float16 [in], input signs and scales.
        svh: float16 [out], output signs and scales.
        bias: [out] padded, or None.
        codebook: name, one of ``trellis_ops.formats.CODEBOOKS``.
        in_features, out_features: logical sizes (0: the padded ones).
        proxy_error: what the quantiser reported, tr(E' H E) / tr(W' H W); None where unknown.

    Raises:
        TypeError, ValueError: at construction, naming the field, what came and what was expected.
    """

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    bias: torch.Tensor | None = None
    codebook: str = "3inst"
    in_features: int = 0
    out_features: int = 0
    proxy_error: float | None = None

    def __post_init__(self) -> None:
        op = "TrellisTensor"
        checks.trellis(op, self.trellis, codebooks.codebook_id(self.codebook, op))
        checks.is_tensor(op, "suh", self.suh)
        checks.is_tensor(op, "svh", self.svh)
        checks.scales(op, self.trellis, self.suh, self.svh)
        for name, axis in (("in_features", 0), ("out_features", 1)):
            full = self.trellis.shape[axis] * tiles.TILE
            if not getattr(self, name):
                object.__setattr__(self, name, full)
            checks.features(op, name, getattr(self, name), full)
        if self.bias is not None:
            full = self.trellis.shape[1] * tiles.TILE
            checks.bias(op, self.bias, self.out_features, full, "trellis", self.trellis.device)
            if self.bias.shape[0] != full:
                padded = self.bias.new_zeros(full)
                padded[: self.out_features] = self.bias
                object.__setattr__(self, "bias", padded)

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return tiles.bits_of(self.trellis.shape[-1])

    @property
    def device(self) -> torch.device:
        return self.trellis.device

    @property
    def nbytes(self) -> int:
        """Stored bytes, the marker's four not counted."""
        parts = (self.trellis, self.suh, self.svh, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device | str) -> TrellisTensor:
        """The same on another device."""
        moved = {
            name: part.to(device) for name in FIELDS if (part := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def dequantize(self, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        """The weight in the original basis and nn.Linear's orientation, [out, in], trimmed."""
        from .. import ops

        full = ops.dequantize(self.trellis, self.suh, self.svh, codebook=self.codebook, dtype=dtype)
        return full[: self.in_features, : self.out_features].T.contiguous()

    def state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """The tensors under the names that a checkpoint gives them, the marker among them."""
        tensors = {
            prefix + name: part for name in FIELDS if (part := getattr(self, name)) is not None
        }
        marker = codebooks.marker_of(self.codebook)
        if marker is not None:
            value = codebooks.marker_tensor(self.codebook, self.device)
            assert value is not None
            tensors[prefix + marker] = value
        return tensors

    @classmethod
    def from_state_dict(
        cls,
        tensors: Mapping[str, torch.Tensor],
        prefix: str = "",
        *,
        in_features: int = 0,
        out_features: int = 0,
        codebook: str | None = None,
    ) -> TrellisTensor:
        """Takes the tensors ``prefix + name`` from a mapping; legacy su/sv sign words are accepted.

        Args:
            tensors: any mapping of names to tensors; names without the prefix are ignored.
            prefix: e.g. ``"model.layers.0.self_attn.q_proj."``.
            in_features, out_features: logical sizes, 0 for the padded ones.
            codebook: needed only to tell sqg_fp16 from sqg_e4m3; must agree with the marker.

        Raises:
            ValueError: a tensor is missing, there are two markers, a marker has a wrong value, a
                name under the prefix is unknown.
        """
        known = (*FIELDS, "su", "sv", *codebooks.MARKERS)
        own = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        for name in own:
            if name not in known:
                raise ValueError(f"{prefix}{name}: unknown tensor, expected one of {known}")
        if "trellis" not in own:
            raise ValueError(f"{prefix}trellis: missing")
        checks.trellis(
            f"TrellisTensor ({prefix}trellis)" if prefix else "TrellisTensor", own["trellis"]
        )
        bits = tiles.bits_of(own["trellis"].shape[-1])
        found = codebook_from_markers(own, prefix, bits, codebook)
        vectors = {}
        for name, legacy in (("suh", "su"), ("svh", "sv")):
            if name in own:
                vectors[name] = own[name]
            elif legacy in own:
                checks.sign_words(prefix + legacy, own[legacy])
                vectors[name] = tiles.unpack_signs(own[legacy])
            else:
                raise ValueError(f"{prefix}{name}: missing (and no legacy {legacy})")
        return cls(
            own["trellis"],
            vectors["suh"],
            vectors["svh"],
            own.get("bias"),
            found,
            in_features,
            out_features,
        )


def codebook_from_markers(
    tensors: Mapping[str, torch.Tensor], prefix: str, bits: float, hint: str | None = None
) -> str:
    """Codebook name that the marker tensors of one matrix state; their values are checked."""
    present = [name for name in codebooks.MARKERS if name in tensors]
    if len(present) > 1:
        raise ValueError(f"{prefix}{present[0]} and {prefix}{present[1]}: expected one marker")
    if not present:
        found = "3inst"
    else:
        check_marker(prefix + present[0], present[0], tensors[present[0]])
        found = present[0]
    if found == "sqg":
        if hint is not None and codebooks.marker_of(hint) == "sqg":
            return hint
        if bits in (5, 6) and hint is None:
            raise ValueError(
                f"{prefix}sqg: at {bits} bits the marker fits sqg_e4m3 and sqg_fp16, "
                "expected codebook to say which"
            )
        found = "sqg_e4m3"
    if hint is not None and hint != found:
        raise ValueError(f"{prefix}: the markers say codebook {found}, expected {hint}")
    return found


def check_marker(full_name: str, marker: str, tensor: torch.Tensor) -> None:
    """A marker is a 0-dim int32 with its one known value; on meta only dtype and shape show."""
    if tensor.dtype != torch.int32 or tensor.numel() != 1:
        raise ValueError(
            f"{full_name}: {tensor.dtype} with {tensor.numel()} elements, expected one int32"
        )
    if not tensor.is_meta and int(tensor) & 0xFFFFFFFF != codebooks.MARKERS[marker]:
        raise ValueError(
            f"{full_name}: value {int(tensor) & 0xFFFFFFFF:#010x}, "
            f"expected {codebooks.MARKERS[marker]:#010x}"
        )
