"""What modules over packed weights have in common: frozen tensors that no cast reaches."""

from __future__ import annotations

import torch
from torch import nn


class FrozenModule(nn.Module):
    """Holds tensors that are stored as they are, whatever dtype the model is cast to.

    Args:
        dtype: what ``.to(dtype)`` changes in place of the tensors; default torch's.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype or torch.get_default_dtype()

    def _freeze(self, name: str, tensor: torch.Tensor | None) -> None:
        # A parameter, not a buffer: accelerate leaves buffers out of offloading and disk loading.
        frozen = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        self.register_parameter(name, frozen)

    def _apply(self, fn, recurse=True):
        # .to(dtype), .half(), .type() would cast the FP16 vectors, and .type() the packed words:
        # let fn see every tensor as integers, and keep it to what it does besides casting.
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            words = tensor.view(torch.int16) if tensor.dtype == torch.float16 else tensor
            result = fn(words)
            if result.dtype != words.dtype:
                result = words.to(result.device)
            return result.view(tensor.dtype)

        # How fn treats a float of the module's own dtype tells whether it casts.
        device = next(self.parameters(recurse=False)).device
        probe = fn(torch.zeros(1, dtype=self.dtype, device=device))
        super()._apply(moved, recurse)
        if probe.dtype.is_floating_point:
            self.dtype = probe.dtype
        return self
