"""Scratch of the mixture-of-experts op that the caller owns: planned first, allocated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _binary
from .formats.tiles import padded


@dataclass(frozen=True)
class MoePlan:
    """How much scratch a call needs, and what that was computed from.

    Attributes:
        max_tokens, top_k: the most that one call may bring.
        experts, slices: E and R.
        hidden, intermediate: sizes of one slice, padded.
        device: where the scratch is to be.
        nbytes: how much it is; never less for less tokens, experts, ... than these.
    """

    max_tokens: int
    top_k: int
    experts: int
    slices: int
    hidden: int
    intermediate: int
    device: torch.device
    nbytes: int


def moe_plan(
    max_tokens: int,
    top_k: int,
    *,
    experts: int,
    hidden: int,
    intermediate: int,
    slices: int = 1,
    device: torch.device | str = "cpu",
) -> MoePlan:
    """Computes the scratch of :func:`rank_sliced_moe` before anything is allocated.

    Args:
        max_tokens: the most tokens of a call.
        top_k: the most experts of a token.
        experts, slices, hidden, intermediate: the largest of any layer that is to use it; the last
            is that of one slice. Logical sizes will do.
        device: of the layers.

    On the CPU, with padded sizes, r = min(max_tokens * top_k, max(8192, top_k)) routes at a time
    and s = min(r, 1024) of them in each step, it is 4 * r * hidden + 4 * s * (hidden + max(hidden,
    intermediate) + 2 * intermediate) bytes, and some 8 * r + 20 * s + 4 * experts for the order of
    routes; so it stops growing with the number of tokens.

    On a GPU, with R = min(max_tokens * top_k, max(32768 / t, top_k)) routes at a time, where t = 1
    for bfloat16 results and 2 for others, and r = min(R, max(128 * top_k, 12 * experts)), it is the
    most, for either t, of (r + 7 * e) * slices * ((4 * t + 4) * hidden + 2 * t * intermediate) with
    e = min(experts, r), the same with 15 * e and e = min(experts, r / 7), and, for more than 128
    tokens, (R + 8 * e) * slices * (4 * t * hidden + (2 * t + 8) * intermediate) with e =
    min(experts, R / 12); and for sums on their way between blocks 64 bytes * multiprocessors *
    max(hidden, intermediate) for each of the two first.

    Raises:
        ValueError: an argument is no positive int.
        RuntimeError: the compiled library is not loaded, or has no kernel for the device.
    """
    op = "moe_plan"
    sizes = {
        "max_tokens": max_tokens,
        "top_k": top_k,
        "experts": experts,
        "slices": slices,
        "hidden": hidden,
        "intermediate": intermediate,
    }
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{op}: {name} is {size!r}, expected a positive int")
    sizes.update(hidden=padded(hidden), intermediate=padded(intermediate))
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{op}: device is {device}, expected a cpu or cuda device")
    _binary.require(op)
    nbytes = torch.ops.trellis_ops._moe_workspace_bytes(*sizes.values(), device.type == "cuda")
    return MoePlan(**sizes, device=device, nbytes=nbytes)


class Workspace:
    """The scratch of a plan, allocated from torch.

    Calls that share one must follow each other: have one per model and stream, never one for a
    target and a draft model whose CUDA graphs replay between each other.

    Args:
        plan: from :func:`moe_plan`.
    """

    def __init__(self, plan: MoePlan) -> None:
        self.plan = plan
        self.buffer = torch.empty(plan.nbytes, dtype=torch.uint8, device=plan.device)

    def __reduce__(self):
        # A copy or a pickle has scratch of its own, not these bytes.
        return Workspace, (self.plan,)

    def check(
        self,
        op: str,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        table: torch.Tensor,
        up_suh: torch.Tensor,
        up_svh: torch.Tensor,
    ) -> torch.Tensor:
        """The buffer, if the plan covers a call; ValueError says what goes beyond it."""
        tokens = 1
        for size in x.shape[:-1]:
            tokens = tokens * size
        call = {
            "max_tokens": tokens,
            "top_k": topk_ids.shape[-1],
            "experts": table.shape[1],
            "slices": table.shape[2],
            "hidden": up_suh.shape[1],
            "intermediate": up_svh.shape[1],
        }
        for name, size in call.items():
            planned = getattr(self.plan, name)
            if size > planned:
                raise ValueError(
                    f"{op}: {name.removeprefix('max_')} is {size}, expected at most {planned} "
                    "(what the workspace was planned for)"
                )
        return self.buffer
