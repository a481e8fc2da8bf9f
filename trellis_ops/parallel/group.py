"""The processes that share a model, and the two collectives that its layers need.

Plain functional collectives on ordinary tensors: they trace through ``torch.compile``, work on
gloo and NCCL, and need no DTensor. A group goes by its name, so that modules stay picklable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist

_collectives = torch.ops._c10d_functional


@dataclass(frozen=True)
class Shard:
    """This process's place in a group.

    Attributes:
        name: of the process group.
        rank, size: of this process in it, and how many there are.
    """

    name: str
    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        return _collectives.wait_tensor(_collectives.all_reduce(x, "sum", self.name))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The last dimensions of all processes, joined in the order of ranks."""
        gathered = _collectives.wait_tensor(
            _collectives.all_gather_into_tensor(x.contiguous(), self.size, self.name)
        )
        return gathered.unflatten(0, (self.size, x.shape[0])).movedim(0, -2).flatten(-2)


_current: ContextVar[Shard | None] = ContextVar("trellis_ops_shard", default=None)


@contextmanager
def sharded(group: dist.ProcessGroup | None = None) -> Iterator[Shard]:
    """Models that are loaded inside are split over the processes of a group.

    Every process of the group has to load the same model, and reads its own part of it::

        with trellis_ops.parallel.sharded():
            model = AutoModelForCausalLM.from_pretrained(path)

    Args:
        group: default all processes. ``torch.distributed`` has to be initialised.

    Raises:
        RuntimeError: it is not.
        ValueError: this process is not in the group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "sharded: torch.distributed is not initialised, expected init_process_group() before"
        )
    group = group or dist.group.WORLD
    # new_group() gives a number where the process is no member.
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"sharded: process {dist.get_rank()} is not in the group, expected one of its members"
        )
    shard = Shard(group.group_name, dist.get_rank(group), dist.get_world_size(group))
    token = _current.set(shard)
    try:
        yield shard
    finally:
        _current.reset(token)


def current_shard() -> Shard | None:
    """The shard of the surrounding ``sharded()``; None outside, and for a single process."""
    shard = _current.get()
    return shard if shard is not None and shard.size > 1 else None
