"""Hessians of linear layers: what quantize_linear minimises the output error with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class HessianCapture:
    """Sums x x' over the inputs of linear layers while the model runs inside a ``with`` block.

    Linears that are called one after the other with the same tensor (q, k and v of an attention,
    gate and up of an MLP) cost one product and share one Hessian. Rows (tokens) with a NaN or an
    infinite element are left out.

    Args:
        model: any module; its forward is not changed.
        names: modules to watch, as ``model.named_modules()`` calls them; default every nn.Linear.

    Example::

        with HessianCapture(model) as capture, torch.inference_mode():
            for ids in batches:
                model(input_ids=ids)
        quantize_model(model, 4, hessians=capture.hessians)
    """

    def __init__(self, model: nn.Module, names: Iterable[str] | None = None) -> None:
        modules = dict(model.named_modules())
        if names is None:
            names = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        self._modules: dict[str, nn.Module] = {}
        for name in names:
            if name not in modules:
                raise ValueError(f"HessianCapture: the model has no module named {name!r}")
            self._modules[name] = modules[name]
        # Keyed by every module that a tensor went through: a layer that shares its input in one
        # call but not in the next still gets the sum of exactly what it saw.
        self._sums: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        # The latest input is kept alive, so that `is` cannot mistake a new tensor for it.
        self._input: torch.Tensor | None = None
        self._readers: tuple[str, ...] = ()
        self._product: tuple[torch.Tensor, torch.Tensor] | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> HessianCapture:
        for name, module in self._modules.items():
            hook = self._hook_of(name)
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._flush()

    @property
    def hessians(self) -> dict[str, torch.Tensor]:
        """Name -> float32 [in, in], the sum so far; modules that saw no finite row are missing.

        Modules with the same inputs have the same tensor (not a copy).
        """
        return {name: total for name, (total, rows) in self._totals().items() if int(rows)}

    @property
    def rows(self) -> dict[str, int]:
        """Name -> number of rows summed so far."""
        return {name: int(rows) for name, (_, rows) in self._totals().items()}

    def _totals(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        self._flush()
        totals: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for readers, (product, rows) in self._sums.items():
            for name in readers:
                if name in totals:
                    product_so_far, rows_so_far = totals[name]
                    totals[name] = (product_so_far + product, rows_so_far + rows)
                else:
                    totals[name] = (product, rows)
        return totals

    def _hook_of(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            x = args[0] if args else kwargs["input"]
            if x is self._input and name not in self._readers:
                self._readers += (name,)
                return
            self._flush()
            self._input, self._readers, self._product = x, (name,), _outer_sum(x)

        return hook

    def _flush(self) -> None:
        """Books the latest product under its readers, which are all known by now."""
        if self._product is not None:
            if self._readers in self._sums:
                for total, part in zip(self._sums[self._readers], self._product, strict=True):
                    total += part
            else:
                self._sums[self._readers] = self._product
        self._input, self._readers, self._product = None, (), None


def _outer_sum(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x' x over the finite rows of [..., in], and their number (on the device: no sync)."""
    # The sums outlive an inference_mode that the model runs under; no autocast shall round them.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        finite = rows.isfinite().all(dim=1)
        rows = rows.masked_fill(~finite[:, None], 0.0)
        return rows.T @ rows, finite.sum()
