"""Layers that several processes compute together. For inference: no gradient passes through."""

from __future__ import annotations

import torch
from torch import nn

from .. import ops
from ..nn import Exl3Linear, Exl3MoE
from ..nn.linear import PackedWeight
from .group import Shard


class _ParallelLinear(nn.Module):
    """A layer of which ``part`` is this process's own."""

    def __init__(self, part: Exl3Linear, features: tuple[int, int], shard: Shard) -> None:
        super().__init__()
        self.part, self.shard = part, shard
        self.in_features, self.out_features = features

    @property
    def weight(self) -> PackedWeight:
        own = self.part.weight
        return PackedWeight((self.out_features, self.in_features), own.dtype, own.device)

    @property
    def bias(self) -> torch.Tensor | None:
        return self.part.bias

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"rank={self.shard.rank} of {self.shard.size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """Each process has equally many of the (padded) outputs.

    Args:
        part: this process's outputs, of full padded blocks where ``gather`` is set.
        features: logical (in, out) of the whole layer.
        shard: the processes.
        gather: whether the result is the whole output, or this process's part of it.
    """

    def __init__(
        self, part: Exl3Linear, features: tuple[int, int], shard: Shard, gather: bool = True
    ) -> None:
        super().__init__(part, features, shard)
        self.gather = gather

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features], the same in every process -> [..., out_features] or a part."""
        _refuse_gradient(x)
        y = self.part(x)
        return self.shard.all_gather(y)[..., : self.out_features] if self.gather else y


class RowParallelLinear(_ParallelLinear):
    """Each process has equally many of the (padded) inputs, and the results are added.

    Args:
        part: this process's inputs.
        features: logical (in, out) of the whole layer.
        shard: the processes.
        split: whether x is the whole input, or already this process's part of it.
    """

    def __init__(
        self, part: Exl3Linear, features: tuple[int, int], shard: Shard, split: bool = True
    ) -> None:
        super().__init__(part, features, shard)
        self.split = split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] or this process's part of them -> [..., out_features]."""
        _refuse_gradient(x)
        part = self.part
        if self.split:
            begin = self.shard.rank * part.trellis.shape[0] * 16
            x = x[..., begin : begin + part.in_features]
        # Summands stay in float32, and their sum is rounded once.
        y = ops.trellis_gemm(
            x,
            part.trellis,
            part.suh,
            part.svh,
            part.bias,
            codebook=part.codebook,
            out_features=part.out_features,
            out_dtype=torch.float32,
            act=part.act,
        )
        return self.shard.all_reduce(y).to(ops.default_out_dtype(x))


class ParallelMoE(nn.Module):
    """Routed experts of which each process has some, or a slice of all.

    Args:
        part: this process's experts, or rank slices of them; absent ones contribute nothing.
        shard: the processes.
    """

    def __init__(self, part: Exl3MoE, shard: Shard) -> None:
        super().__init__()
        self.part, self.shard = part, shard

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """As :meth:`Exl3MoE.forward`, with the same arguments in every process."""
        _refuse_gradient(hidden_states)
        # In float32, so that the sum over processes is rounded once.
        y = self.part(hidden_states.float(), top_k_index, top_k_weights)
        return self.shard.all_reduce(y.float()).to(ops.default_out_dtype(hidden_states))


SPLIT = (ColumnParallelLinear, RowParallelLinear, ParallelMoE)
"""Modules that hold this process's part of a layer only."""


def _refuse_gradient(x: torch.Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "a layer that is split over processes got an input that requires grad, expected none: "
            "no gradient passes through it"
        )
