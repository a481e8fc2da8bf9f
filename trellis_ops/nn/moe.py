"""Exl3MoE: the place of a transformers model's routed experts, over packed matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import moe_ops
from ..formats import codebooks
from ..formats.moe import TENSORS, MoeLayout, entries_of
from ..formats.moe_build import layout_of, layout_of_stacks
from ..formats.tensor import TrellisTensor
from ..meta.moe_checks import is_gated
from ..workspace import MoePlan, Workspace, moe_plan
from .frozen import FrozenModule


def _traced_as_constant(name: str) -> property:
    """A float that torch.compile(dynamic=True) does not take for a symbol, as it does all floats of
    a module, and then compiles twice: integers of a module are constants."""

    def get(self) -> float:
        numerator, denominator = getattr(self, f"_{name}")
        return numerator / denominator

    def set(self, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"Exl3MoE: {name} is {value}, expected a finite number")
        setattr(self, f"_{name}", float(value).as_integer_ratio())

    return property(get, set)


class Exl3MoE(FrozenModule):
    """Routed experts over quantised matrices that are never unpacked in memory.

    Args:
        layout: the experts; the module shares its storage unless a device is given.
        activation, limit, limit_after, routed_scale: see :func:`trellis_ops.rank_sliced_moe`.
        device: where the tensors go; "meta" works. Default: where they are.
        dtype: what ``.to(dtype)`` changes; default torch's. Results have the dtype of the hidden
            states all the same, and the stored tensors keep theirs.

    Frozen parameters are named as the layout's fields, and ``codebook`` holds the codebooks' ids.
    ``workspace`` may be set to a :class:`trellis_ops.Workspace`, which calls without gradient then
    use (exported programs do not). Gradient flows to hidden states and routing weights.
    """

    limit = _traced_as_constant("limit")
    routed_scale = _traced_as_constant("routed_scale")

    def __init__(
        self,
        layout: MoeLayout,
        *,
        activation: str = "silu",
        limit: float = 0.0,
        limit_after: bool = False,
        routed_scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        gated = is_gated(moe_ops.activation_id("Exl3MoE", activation))
        if gated != layout.gated:
            raise ValueError(
                f"Exl3MoE: layout has {'a' if layout.gated else 'no'} gate, "
                f"expected {'one' if gated else 'none'} for {activation}"
            )
        if device is not None:
            layout = layout.to(device)
        self.hidden, self.intermediate = layout.hidden, layout.intermediate
        self.codebooks = layout.codebooks
        self.activation, self.limit, self.limit_after = activation, limit, limit_after
        self.routed_scale = routed_scale
        self.workspace: Workspace | None = None
        self._entries = layout.entries
        # One parameter has one name, or safetensors would refuse the state dict.
        self._one_suh = layout.gate_suh is layout.up_suh
        for name in TENSORS:
            shown = None if name == "gate_suh" and self._one_suh else getattr(layout, name)
            self._freeze(name, shown)
        ids = [codebooks.codebook_id(name) for name in self.codebooks]
        self._freeze("codebook", torch.tensor(ids, dtype=torch.int32, device=layout.device))

    @classmethod
    def from_experts(
        cls,
        gate: Sequence[TrellisTensor | None] | None,
        up: Sequence[TrellisTensor | None],
        down: Sequence[TrellisTensor | None],
        **options,
    ) -> Exl3MoE:
        """From one matrix for each expert, None where this process does not hold it.

        Args:
            gate, up, down: matrices by expert; ``gate=None`` for an activation without one.
            options: as of the class.
        """

        def single(experts):
            return None if experts is None else [None if t is None else [t] for t in experts]

        return cls(layout_of(single(gate), single(up), single(down)), **options)

    @classmethod
    def from_rank_slices(
        cls,
        gate: Sequence[Sequence[TrellisTensor] | None] | None,
        up: Sequence[Sequence[TrellisTensor] | None],
        down: Sequence[Sequence[TrellisTensor] | None],
        **options,
    ) -> Exl3MoE:
        """As :meth:`from_experts`, with a list of rank slices for each expert."""
        return cls(layout_of(gate, up, down), **options)

    @classmethod
    def from_stacked(
        cls,
        gate: Sequence[torch.Tensor] | None,
        up: Sequence[torch.Tensor],
        down: Sequence[torch.Tensor],
        *,
        codebook: str | tuple[str, str, str],
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        hidden: int = 0,
        intermediate: int = 0,
        **options,
    ) -> Exl3MoE:
        """From stacked tensors: for each projection (trellis, suh, svh) over all experts.

        Args:
            gate, up, down: trellis int16 [E, in/16, out/16, 16 * bits], suh float16 [n, in] and svh
                float16 [n, out] with n = E, or 1 where all experts share it.
            codebook: one for all, or one each for gate, up and down.
            gate_bias, up_bias, down_bias: [E, out], padded.
            hidden, intermediate: logical sizes, 0 for the padded ones.
            options: as of the class.
        """
        layout = layout_of_stacks(
            gate,
            up,
            down,
            codebook=codebook,
            gate_bias=gate_bias,
            up_bias=up_bias,
            down_bias=down_bias,
            hidden=hidden,
            intermediate=intermediate,
        )
        return cls(layout, **options)

    def layout(self) -> MoeLayout:
        """The module's experts, sharing storage."""
        return MoeLayout(**self._fields(), entries=self._entries)

    def plan(self, max_tokens: int, top_k: int) -> MoePlan:
        """Scratch of this layer: see :func:`trellis_ops.moe_plan`."""
        return moe_plan(
            max_tokens,
            top_k,
            experts=self.table.shape[1],
            slices=self.table.shape[2],
            hidden=self.hidden,
            intermediate=self.intermediate,
            device=self.packed.device,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        workspace: Workspace | None = None,
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts' results.

        Args:
            hidden_states: [T, hidden], or any leading dimensions.
            top_k_index: int32 or int64 [T, top_k]; see :func:`trellis_ops.rank_sliced_moe`.
            top_k_weights: [T, top_k].
            workspace: default the module's own, if it has one and no gradient is asked for.

        Returns:
            [T, hidden], in the dtype of hidden_states or the autocast dtype.
        """
        if hidden_states.dim() > 0 and hidden_states.shape[-1] != self.hidden:
            raise ValueError(
                f"Exl3MoE: hidden_states has {hidden_states.shape[-1]} columns, "
                f"expected hidden {self.hidden}"
            )
        needs_grad = torch.is_grad_enabled() and (
            hidden_states.requires_grad or top_k_weights.requires_grad
        )
        # An exported program plans its own memory, and could not write to a constant.
        if workspace is None and not needs_grad and not torch.compiler.is_exporting():
            workspace = self.workspace
        return moe_ops.rank_sliced_moe(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.packed,
            self.table,
            self.up_suh if self._one_suh else self.gate_suh,
            self.gate_svh,
            self.up_suh,
            self.up_svh,
            self.down_suh,
            self.down_svh,
            self.gate_bias,
            self.up_bias,
            self.down_bias,
            codebook=self.codebooks,
            intermediate=self.intermediate,
            activation=self.activation,
            limit=self.limit,
            limit_after=self.limit_after,
            routed_scale=self.routed_scale,
            workspace=workspace,
        )

    def extra_repr(self) -> str:
        names = self.codebooks[0] if len(set(self.codebooks)) == 1 else self.codebooks
        return (
            f"experts={self.table.shape[1]}, slices={self.table.shape[2]}, hidden={self.hidden}, "
            f"intermediate={self.intermediate}, bits={self.layout().bits:.2f}, codebook={names}, "
            f"activation={self.activation}"
        )

    def _fields(self) -> dict:
        """Of the layout."""
        fields = {name: getattr(self, name) for name in TENSORS}
        if self._one_suh:
            fields["gate_suh"] = self.up_suh
        sizes = {"hidden": self.hidden, "intermediate": self.intermediate}
        return {**fields, **sizes, "codebooks": self.codebooks}

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        own = {
            name: state_dict[prefix + name]
            for name, _ in self.named_parameters(recurse=False)
            if prefix + name in state_dict
        }
        # What strict=False, assign=True and silent casts would let through as fluent noise.
        faults = [
            f"{prefix}{name}: dtype {tensor.dtype}, expected {expected}"
            for name, tensor in own.items()
            if tensor.dtype != (expected := getattr(self, name).dtype)
            and not name.endswith("_bias")
        ]
        shapes = all(tensor.shape == getattr(self, name).shape for name, tensor in own.items())
        entries = self._entries
        if not faults and shapes:  # other shapes are for nn.Module to refuse
            faults, entries = self._faults(prefix, own)
        if faults:
            error_msgs.extend(faults)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._entries = entries

    def _faults(self, prefix: str, own: dict[str, torch.Tensor]) -> tuple[list[str], tuple]:
        """Whether codebooks and table go with the module, and the table's entries."""
        faults, entries = [], self._entries
        ids = own.get("codebook")
        if "packed" in own and ids is None:
            faults.append(f"{prefix}codebook: missing beside {prefix}packed")
        elif ids is not None and not ids.is_meta:
            wanted = [codebooks.codebook_id(name) for name in self.codebooks]
            if ids.tolist() != wanted:
                faults.append(f"{prefix}codebook: {ids.tolist()}, expected {wanted}")
        table = own.get("table")
        if table is not None and not table.is_meta:
            entries = entries_of(table)
            try:
                MoeLayout(**self._fields(), entries=entries)
            except ValueError as error:
                faults.append(f"{prefix}table: {error}")
        return faults, entries
