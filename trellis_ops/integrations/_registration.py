"""Tells transformers of "exl3", whichever of the two packages is imported first.

transformers has no entry points for quantisers, and importing it takes longer than importing torch;
so where it is not loaded yet, its registry is filled in at the moment that it is.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder

_REGISTRY = "transformers.quantizers.auto"


def register_with_transformers() -> None:
    """Registers now if transformers' registry is loaded, else when it gets loaded."""
    if _REGISTRY in sys.modules:
        _fill_registry()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _fill_registry() -> None:
    # Its import registers. Where that import itself has come to the registry, it is under way.
    try:
        from . import quantizer as quantizer
    except ImportError as error:
        # Nobody's import of transformers shall fail for a plugin that it may not even need.
        version = getattr(sys.modules.get("transformers"), "__version__", "?")
        warnings.warn(
            f"trellis_ops: EXL3 models cannot be loaded with transformers {version}, "
            f"expected 5.17 or newer: {error}",
            stacklevel=2,
        )


class _Finder(MetaPathFinder):
    """Steps aside after one import, that of the registry."""

    def find_spec(self, fullname, path, target=None):
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        # The module shall know its own loader, not this one.
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _fill_registry()
