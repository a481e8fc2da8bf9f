"""Tail-biting trellis search in PyTorch: full Viterbi, vectorised over states and tiles.

Between two neighbouring weights lies an *edge*: the bits their two states share. A state splits
into the incoming edge (its high bits) and the outgoing edge (its low bits), so one step is

    cost'[outgoing] = min over the states s with that outgoing edge of cost[incoming(s)] + d(s)

Two passes close the path: the first, free, over the tile rolled by half finds a good edge before
position 0; the second is forced to start and end in that edge.
"""

from __future__ import annotations

import torch

from ..formats import codebooks, tiles

# Tiles searched together: back pointers take 256 * 65536 / 2^bits bytes each.
_TILE_CHUNK = 8


def quantize_tiles(
    targets: torch.Tensor, tile_words: int, codebook: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Closed path of least squared error (up to the choice of its edge) for each tile.

    Args:
        targets: float32 [T, 256] in stream order.
        tile_words: 16 * bits.
        codebook: schema id.

    Returns:
        states int32 [T, 256] and their values float32 [T, 256].
    """
    bits = tiles.bits_of(tile_words)
    table = codebooks.codebook_table(codebooks.CODEBOOKS[codebook], bits, targets.device).float()
    # Any closed path is as good as another where the target is not a number.
    targets = torch.nan_to_num(targets, nan=0.0, posinf=1e4, neginf=-1e4).clamp(-1e4, 1e4)
    states = torch.empty(targets.shape, dtype=torch.int32, device=targets.device)
    for start in range(0, targets.shape[0], _TILE_CHUNK):
        chunk = targets[start : start + _TILE_CHUNK]
        states[start : start + _TILE_CHUNK] = _search(chunk, tile_words, table)
    return states, table[states.long()]


def _search(targets: torch.Tensor, tile_words: int, table: torch.Tensor) -> torch.Tensor:
    half = tiles.TILE_WEIGHTS // 2
    cost, choices = _forward(targets.roll(-half, 1), tile_words, table, None)
    edge = _trace(choices[half:], cost.argmin(-1), tile_words)[1]
    _, choices = _forward(targets, tile_words, table, edge)
    return _trace(choices, edge, tile_words)[0]


def _widths(tile_words: int) -> tuple[int, int]:
    """Bits of an even and of an odd position."""
    return tile_words // 16, tile_words // 8 - tile_words // 16


def _forward(
    targets: torch.Tensor, tile_words: int, table: torch.Tensor, start: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Costs of the edges after the last position, and the best high bits per edge and position."""
    widths = _widths(tile_words)
    cost = table.new_zeros(targets.shape[0], 1 << (16 - widths[0]))
    if start is not None:
        cost.fill_(torch.inf).scatter_(1, start[:, None], 0.0)
    choices = []
    for i in range(targets.shape[1]):
        this, following = widths[i % 2], widths[(i + 1) % 2]
        total = cost.repeat_interleave(1 << this, 1) + (table - targets[:, i : i + 1]).square()
        cost, choice = total.unflatten(1, (1 << following, -1)).min(1)
        choices.append(choice.to(torch.uint8))
    return cost, choices


def _trace(
    choices: list[torch.Tensor], edge: torch.Tensor, tile_words: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """States along the best path into ``edge``, and the edge that path came from."""
    widths = _widths(tile_words)
    states = []
    for i in range(len(choices) - 1, -1, -1):
        this, following = widths[i % 2], widths[(i + 1) % 2]
        high = choices[i].gather(1, edge[:, None])[:, 0].long()
        state = (high << (16 - following)) | edge
        states.append(state)
        edge = state >> this
    return torch.stack(states[::-1], 1), edge
