"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged(directory: Path, op: str) -> Iterator[Path]:
    """A hidden folder whose files move to ``directory`` when all of them are written.

    Args:
        directory: made if missing. Where it exists, its files of the same names are replaced, and
            others left alone; files of other weights are an error.
        op: who says so in errors.
    """
    directory = Path(os.path.abspath(directory))
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{op}: {directory} exists and is no directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # In it where it exists: what is around it may be another file system, or not be writable.
    parent = directory if directory.exists() else directory.parent
    staging = parent / f".{directory.name}.{secrets.token_hex(4)}.tmp"
    staging.mkdir()
    try:
        yield staging
        for file in staging.glob("*.safetensors"):
            # safetensors makes its files readable by their owner only.
            file.chmod(0o666 & ~_umask())
        if directory.exists():
            _reject_strangers(directory, {file.name for file in staging.iterdir()}, op)
            # Weights last: until then the old ones stand, and the new ones' name is never half.
            written = [file for file in staging.rglob("*") if file.is_file()]
            for file in sorted(written, key=lambda file: "safetensors" in file.name):
                target = directory / file.relative_to(staging)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
        else:
            os.replace(staging, directory)
    finally:
        if staging.exists():
            shutil.rmtree(staging)


def _reject_strangers(directory: Path, new: set[str], op: str) -> None:
    for pattern in ("*.safetensors", "*.safetensors.index.json"):
        for file in directory.glob(pattern):
            if file.name not in new:
                raise FileExistsError(
                    f"{op}: {file} would be mixed up with the new weights, choose another directory"
                )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
