"""Loads the shared library trellis_ops/_C.so, and remembers why if that fails.

The package works without the library: schemas, fakes and the pure PyTorch reference are Python.
So a failure is no error at import, but it is never lost either: ``reason()`` tells it, and
``require()`` raises it where an op needs the library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

MIN_TORCH = (2, 11)
_FIX = (
    "Build the library in a checkout of trellis_ops with: pip install --no-build-isolation -e . "
    "(python -m trellis_ops env shows what was found.)"
)


@dataclass
class _State:
    tried: bool = False
    reason: str | None = None


_state = _State()


def path() -> Path:
    """Where the library is looked for: beside this file."""
    return Path(__file__).with_name("_C.so")


def try_load(library: Path) -> str | None:
    """Loads the library; returns None, or in one sentence why it could not be loaded."""
    version = str(torch.__version__)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_TORCH:
        wanted = ".".join(map(str, MIN_TORCH))
        return f"torch {version} is older than {wanted}, the oldest that the library works with"
    if not library.is_file():
        return f"{library} does not exist"
    try:
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:  # not loadable; a registration that torch refuses
        # torch wraps the loader's own words, which are the ones that help.
        return f"{library} could not be loaded: {error.__cause__ or error}"
    return None


def load() -> bool:
    """Loads the library once; later calls only tell how that went."""
    if not _state.tried:
        _state.reason = try_load(path())
        _state.tried = True
    return available()


def available() -> bool:
    """Whether the library is loaded."""
    return _state.tried and _state.reason is None


def reason() -> str | None:
    """Why the library is not loaded; None if it is."""
    return _state.reason if _state.tried else "trellis_ops did not try to load it yet"


def require(op_name: str) -> None:
    """Raises RuntimeError, naming the op, the reason and the fix, unless the library is loaded."""
    if not available():
        raise RuntimeError(
            f"trellis_ops::{op_name} needs the compiled library, which is not loaded: "
            f"{reason()}. {_FIX}"
        )
