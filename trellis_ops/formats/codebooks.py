"""Codebooks: the value of each of the 65,536 trellis states.

Everything is computed from Python scalars and ``torch.arange`` on the target device, never copied
from host memory, so that a table can also be built while a CUDA graph is being captured.
"""

from __future__ import annotations

import functools

import torch

CODEBOOKS = ("3inst", "mcg", "mul1", "sqg_e4m3", "sqg_fp16")
"""Names in the order of the ids that op schemas use."""

MARKERS: dict[str, int] = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D, "sqg": 0x53514731}
"""Marker tensor beside a trellis -> its value, as an unsigned 32-bit number."""

_STATES = 1 << 16
_LOW32 = 0xFFFFFFFF

_INST3_MULTIPLIER, _INST3_ADDEND = 89226354, 64248484
_HALVES_AND, _HALVES_XOR = 0x8FFF8FFF, 0x3B603B60
# FP16 0x1EEE and 0xC931: value = scale * (1024 + byte sum) + offset
_MUL1_SCALE, _MUL1_OFFSET = 0.00676727294921875, -10.3828125
_SQG_MULTIPLIER, _SQG_ADDEND = 0x3FA7D929, 0xC928FD8E

# Upper half of the T12 law: (rank >> 4) - 2048 at which each E4M3 label 1, 2, ... starts.
_T12_THRESHOLDS = (
    1, 3, 5, 7, 10, 12, 14, 16, 18, 20, 22, 24, 27, 29, 31, 33, 36, 40, 45, 49, 53, 57, 62, 66, 72,
    81, 89, 98, 106, 115, 123, 132, 145, 161, 178, 195, 212, 229, 246, 263, 288, 321, 355, 388,
    421, 454, 486, 519, 567, 630, 693, 754, 814, 873, 930, 986, 1068, 1170, 1267, 1356, 1439, 1514,
    1583, 1646, 1727, 1816, 1884, 1935, 1972, 1998, 2016, 2028, 2039, 2045, 2047,
)  # fmt: skip

# The D3L law: (base, slope) FP16 bit patterns of each linear piece, in descriptor order.
_D3L_PIECES = """
467d0000 461d0000 45ef0000 45d00000 45b80000 45a50000 45950000 45870000
457b0000 45700000 45660000 455d0000 45540000 454c0000 45450000 453e0000
45322600 45272500 451c2500 45132500 450a2500 45022400 44fb2400 44f42200
44e72200 44db2200 44d120cd 44c720cd 44be209a 44b5209a 44ae1e66 44a62000
44991e92 448c1e55 44811dab 44771d25 446e1c92 44651c00 445c1c92 44551adb
44461b4b 44391a85 442d19df 442219a3 4418192a 440f18d6 4406185d 43fb1848
43dd178d 43c116f0 43a71650 439015cd 437a1571 43661513 435314bf 43411472
431f1424 43011380 42e612e0 42cd125a 42b511ee 429f1187 428a112b 427610e7
4252108b 42311022 42120f93 41f60f05 41dc0e8f 41c40e23 41ac0dc7 41970d74
416e0d13 41490ca1 41270c44 41070bee 40e90b68 40cd0af9 40b30a98 409a0a40
406b09d2 40410957 401908f4 3fe808a0 3fa30859 3f61081c 3f2207d0 3ee70774
3e7606fd 3e0f067b 3dae0611 3d5205b9 3cfb056f 3ca80531 3c5904fc 3c0c04cd
3af20493 39dd0456 38d30427 37a50403 35b103e9 338c03d6 2f8603c9 004c03c3
"""


def codebook_id(name: str, op: str = "") -> int:
    """Schema id of a codebook name; an error names the choices, and the op that asks."""
    prefix = f"{op}: " if op else ""
    if not isinstance(name, str):
        raise TypeError(f"{prefix}codebook is {type(name).__name__}, expected one of {CODEBOOKS}")
    if name not in CODEBOOKS:
        raise ValueError(f"{prefix}codebook is {name!r}, expected one of {CODEBOOKS}")
    return CODEBOOKS.index(name)


def rates_of(codebook: str) -> tuple[float, ...]:
    """Every rate (bits per weight) that a codebook is defined for."""
    if codebook == "mul1":
        return (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
    if codebook == "sqg_e4m3":
        return (2, 3, 4, 5, 6)
    if codebook == "sqg_fp16":
        return (5, 6)
    return (1, 2, 3, 4, 5, 6, 7, 8)


def marker_of(codebook: str) -> str | None:
    """Name of the marker tensor that goes with a codebook; 3inst has none."""
    if codebook == "3inst":
        return None
    return "sqg" if codebook.startswith("sqg") else codebook


def marker_tensor(codebook: str, device: torch.device | str | None = None) -> torch.Tensor | None:
    """The 0-dim int32 marker of a codebook, or None for 3inst."""
    name = marker_of(codebook)
    if name is None:
        return None
    value = MARKERS[name]
    return torch.tensor(value - (1 << 32) * (value >> 31), dtype=torch.int32, device=device)


def codebook_table(codebook: str, bits: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """Value of every state.

    Args:
        codebook: one of ``CODEBOOKS``.
        bits: rate; only the sqg codebooks depend on it.
        device: where to build the table. The CPU one is cached; do not write to it.

    Returns:
        float16 [65536].

    Raises:
        ValueError: unknown codebook, or a rate it is not defined for.
    """
    codebook_id(codebook)
    if bits not in rates_of(codebook):
        raise ValueError(
            f"codebook {codebook} at {bits} bits per weight: expected bits in {rates_of(codebook)}"
        )
    key = int(bits) if codebook.startswith("sqg") else 0
    if torch.device(device).type == "cpu":
        return _cpu_table(codebook, key)
    return _build(codebook, key, device)


@functools.cache
def _cpu_table(codebook: str, bits: int) -> torch.Tensor:
    # A table first needed inside inference_mode must not be an inference tensor for ever.
    with torch.inference_mode(False):
        return _build(codebook, bits, "cpu")


def _build(codebook: str, bits: int, device: torch.device | str) -> torch.Tensor:
    states = torch.arange(_STATES, dtype=torch.int64, device=device)
    if codebook == "mul1":
        return _mul1(states)
    if codebook in ("3inst", "mcg"):
        return _two_halves(states, codebook)
    rank = _sqg_rank(states, bits)
    return _t12(rank) if codebook == "sqg_e4m3" else _d3l(rank)


def _two_halves(states: torch.Tensor, codebook: str) -> torch.Tensor:
    if codebook == "3inst":
        x = states * _INST3_MULTIPLIER + _INST3_ADDEND
    else:
        x = states * MARKERS["mcg"]
    x = (x & _HALVES_AND) ^ _HALVES_XOR
    # Halves lie in [1/8, 2) with either sign: their float32 sum is exact, so one rounding remains.
    return (
        _half_from_bits(x & 0xFFFF).float() + _half_from_bits((x >> 16) & 0xFFFF).float()
    ).half()


def _mul1(states: torch.Tensor) -> torch.Tensor:
    x = (states * MARKERS["mul1"]) & _LOW32
    byte_sum = (x & 0xFF) + ((x >> 8) & 0xFF) + ((x >> 16) & 0xFF) + (x >> 24)
    # Exact in float32: (1024 + sum) and the scale have 11 significant bits each.
    return ((byte_sum + 1024).float() * _MUL1_SCALE + _MUL1_OFFSET).half()


def _sqg_rank(states: torch.Tensor, bits: int) -> torch.Tensor:
    width = 16 - bits
    low = (1 << width) - 1
    history, branch = states >> bits, states & ((1 << bits) - 1)
    mixed = history ^ (history >> 11)
    mixed = mixed ^ ((mixed << 11) & low)
    product = (mixed * _SQG_MULTIPLIER + _SQG_ADDEND) & _LOW32
    reversed_branch = torch.zeros_like(branch)
    for i in range(bits):
        reversed_branch |= ((branch >> i) & 1) << (bits - 1 - i)
    return ((reversed_branch ^ (product >> (32 - bits))) << width) | (product & low)


def _t12(rank: torch.Tensor) -> torch.Tensor:
    index = rank >> 4
    negative = index < 2048
    offset = torch.where(negative, 2047 - index, index - 2048)
    label = torch.zeros_like(offset)
    for threshold in _T12_THRESHOLDS:
        label += offset >= threshold
    # An E4M3 code shifted by seven is the FP16 number 2^-8 times as large, subnormals included.
    magnitude = _half_from_bits(label << 7) * 256.0
    return torch.where(negative & (label > 0), -magnitude, magnitude)


def _d3l(rank: torch.Tensor) -> torch.Tensor:
    negative = rank < 0x8000
    magnitude_rank = torch.where(negative, rank ^ 0x7FFF, rank) & 0x7FFF
    tail = 65535 - 2 * magnitude_rank
    exponent = torch.zeros_like(tail)
    for i in range(1, 16):
        exponent += tail >= (1 << i)
    power = torch.ones_like(tail) << exponent
    shift = (exponent - 3).clamp(min=0)
    delta = tail - power
    cell = delta >> shift
    # The eight outermost magnitudes (exponent <= 3) have a piece each.
    alone = exponent <= 3
    single = (torch.ones_like(tail) << (exponent - 1).clamp(min=0)) + ((delta - 1) >> 1)
    piece = torch.where(alone, single, 8 * shift + cell)
    x = torch.where(alone, 0, (power + ((cell + 1) << shift) - 1 - tail) >> 1)
    words = [int(w, 16) for w in _D3L_PIECES.split()]
    base, slope = torch.zeros_like(piece), torch.zeros_like(piece)
    for i, word in enumerate(words):
        here = piece == i
        base = torch.where(here, word >> 16, base)
        slope = torch.where(here, word & 0xFFFF, slope)
    # Product and sum are exact in float32; only the conversion rounds.
    value = (_half_from_bits(slope).float() * x.float() + _half_from_bits(base).float()).half()
    return torch.where(negative, -value, value)


def _half_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Integers 0..65535 read as FP16 bit patterns."""
    return bits.to(torch.int16).view(torch.float16)
