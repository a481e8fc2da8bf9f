"""Reads the tensors of quantised matrices from files, no more of them than is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from . import codebooks, tiles
from .checkpoint import Exl3Group, TensorInfo
from .tensor import TrellisTensor


class Reader:
    """Open files of a checkpoint; may be shared by threads. Closes its files with its last user."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def slice(self, tensor: TensorInfo) -> Any:
        """A handle that reads what it is indexed with."""
        if tensor.file not in self._files:
            self._files[tensor.file] = safe_open(tensor.file, framework="pt")
        return self._files[tensor.file].get_slice(tensor.name)

    def read(self, tensor: TensorInfo) -> torch.Tensor:
        return self.slice(tensor)[...]

    def parts(
        self,
        group: Exl3Group,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The tensors of a matrix, or of the part between two inputs (rows) or outputs (columns).

        Args:
            group: where its tensors are. Sign words are unpacked, a bias is padded and cast.
            rows, columns: begin and end, multiples of 128. Rows from 0 on keep the bias, others
                have none: parts that split the inputs are added.

        Returns:
            trellis, suh, svh and, where there is one, bias.

        Raises:
            ValueError: a begin or end that is no multiple of 128, or beyond the matrix.
        """
        inner = _blocks(group, "rows", rows, group.in_features)
        outer = _blocks(group, "columns", columns, group.out_features)
        tensors = group.tensors
        found = {"trellis": self.slice(tensors["trellis"])[_tiles(inner), _tiles(outer)]}
        for name, legacy, part in (("suh", "su", inner), ("svh", "sv", outer)):
            if name in tensors:
                found[name] = self.slice(tensors[name])[part]
            else:
                found[name] = tiles.unpack_signs(self.read(tensors[legacy]))[part]
        if "bias" in tensors and inner.start == 0:
            stored = self.read(tensors["bias"]).half()
            full = torch.nn.functional.pad(stored, (0, group.out_features - stored.shape[0]))
            found["bias"] = full[outer]
        return {name: _own(tensor) for name, tensor in found.items()}

    def matrix(
        self,
        group: Exl3Group,
        *,
        in_features: int = 0,
        out_features: int = 0,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> TrellisTensor:
        """The same as a :class:`TrellisTensor`.

        Args:
            in_features, out_features: logical sizes of what is read, 0 for the stored ones.
        """
        return TrellisTensor(
            **self.parts(group, rows, columns),
            codebook=group.codebook,
            in_features=in_features,
            out_features=out_features,
        )


def _blocks(group: Exl3Group, name: str, part: tuple[int, int] | None, size: int) -> slice:
    begin, end = part or (0, size)
    block = tiles.HADAMARD
    if begin % block or end % block or not 0 <= begin < end <= size:
        raise ValueError(
            f"{group.name}.trellis: {name} are {begin} to {end}, "
            f"expected multiples of {block} between 0 and {size}"
        )
    return slice(begin, end)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The same without what it was cut from: a part of a tensor in a file may be a strided view.

    Every product would copy that anew, and a saved or copied model would keep the whole.
    """
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _tiles(part: slice) -> slice:
    return slice(part.start // tiles.TILE, part.stop // tiles.TILE)


def is_plain(group: Exl3Group) -> bool:
    """Whether the tensors are stored just as an Exl3Linear holds them."""
    tensors = group.tensors
    bias = tensors.get("bias")
    return (
        not {"su", "sv"} & set(tensors)
        and (bias is None or bias.shape == (group.out_features,))
        and all(tensors[name].shape == () for name in codebooks.MARKERS if name in tensors)
    )
