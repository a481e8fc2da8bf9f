"""What the ops should compute, in NumPy, from the description of the format alone.

Deliberately by another road than the library: packed words become single bits, FP16 codebook values
become integers in units of 2^-24, the Hadamard matrix comes from popcounts, the E4M3 law from the
normal distribution that it quantises. Slow and exact: everything after decoding is float64.
"""

from __future__ import annotations

import functools
import statistics

import numpy as np

CODEBOOKS = ("3inst", "mcg", "mul1", "sqg_e4m3", "sqg_fp16")

# (base, slope) of the 104 linear pieces of the FP16 normal law, as FP16 bit patterns.
_BASES = bytes.fromhex(
    "467d461d45ef45d045b845a545954587457b45704566455d4554454c4545453e453245274"
    "51c4513450a450244fb44f444e744db44d144c744be44b544ae44a64499448c4481447744"
    "6e4465445c445544464439442d44224418440f440643fb43dd43c143a74390437a4366435"
    "34341431f430142e642cd42b5429f428a427642524231421241f641dc41c441ac4197416e"
    "41494127410740e940cd40b3409a406b404140193fe83fa33f613f223ee73e763e0f3dae3"
    "d523cfb3ca83c593c0c3af239dd38d337a535b1338c2f86004c"
)
_SLOPES = bytes(32) + bytes.fromhex(
    "2600250025002500250024002400220022002200"
    "20cd20cd209a209a1e6620001e921e551dab1d251c921c001c921adb1b4b1a8519df19a31"
    "92a18d6185d1848178d16f0165015cd1571151314bf14721424138012e0125a11ee118711"
    "2b10e7108b10220f930f050e8f0e230dc70d740d130ca10c440bee0b680af90a980a4009d"
    "2095708f408a00859081c07d0077406fd067b061105b9056f053104fc04cd049304560427"
    "040303e903d603c903c3"
)


# ---- bits -------------------------------------------------------------------------------------


def widths(bits: float) -> np.ndarray:
    """Bits that each of the 256 positions adds to the stream."""
    return np.where(np.arange(256) % 2 == 0, int(np.floor(bits)), int(np.ceil(bits)))


def stream_bits(trellis: np.ndarray) -> np.ndarray:
    """[..., words] int16 -> [..., 16 * words] single bits in stream order."""
    words32 = np.ascontiguousarray(trellis).view("<u4")
    return np.unpackbits(words32.astype(">u4").view(np.uint8), axis=-1)


def unpack(trellis: np.ndarray) -> np.ndarray:
    """States [..., 256]: the 16 stream bits that end with a position's own."""
    bits = stream_bits(trellis).astype(np.int64)
    ends = np.cumsum(widths(trellis.shape[-1] / 16))
    states = np.zeros((*trellis.shape[:-1], 256), np.int64)
    for age in range(16):
        states += bits[..., (ends - 1 - age) % bits.shape[-1]] << age
    return states


def pack(symbols: np.ndarray, bits: float) -> np.ndarray:
    """The newest bits of each position, [256] -> packed int16 [16 * bits], through a bit string."""
    text = "".join(f"{int(s):0{w}b}" for s, w in zip(symbols, widths(bits), strict=True))
    words = [int(text[i : i + 32], 2) for i in range(0, len(text), 32)]
    return np.array(words, dtype="<u4").view(np.int16)


def closed(states: np.ndarray, bits: float) -> np.ndarray:
    """bool [T]: each state's older bits are its predecessor's newer ones, all the way round."""
    right = np.ones(states.shape[0], bool)
    for p, width in enumerate(widths(bits)):
        older, before = states[:, p] // 2**width, states[:, p - 1] % 2 ** (16 - width)
        right &= (older == before) & (states[:, p] >= 0) & (states[:, p] < 65536)
    return right


@functools.cache
def positions() -> np.ndarray:
    """[16, 16] stream position of each row (input) and column (output) of a tile."""
    order = np.empty((16, 16), np.int64)
    for lane in range(32):
        for j in range(8):
            row = 2 * (lane % 4) + j % 2 + 8 * (j // 2 % 2)
            order[row, lane // 4 + 8 * (j // 4)] = 8 * lane + j
    return order


def matrix(tiles: np.ndarray) -> np.ndarray:
    """[in/16, out/16, 256] in stream order -> [in, out], tile by tile."""
    rows = [np.concatenate([tile[positions()] for tile in row], axis=1) for row in tiles]
    return np.concatenate(rows, axis=0)


# ---- codebooks --------------------------------------------------------------------------------


def _units(half_bits: np.ndarray) -> np.ndarray:
    """FP16 bit patterns (finite) as integers in units of 2^-24."""
    half_bits = np.asarray(half_bits, np.int64)
    exponent, fraction = half_bits >> 10 & 31, half_bits & 1023
    magnitude = np.where(exponent == 0, fraction, (1024 + fraction) << np.maximum(exponent - 1, 0))
    return np.where(half_bits >> 15, -magnitude, magnitude)


def _round_to_half(units: np.ndarray) -> np.ndarray:
    """Integers in units of 2^-24, rounded to eleven bits (ties to even), as float64."""
    magnitude = np.abs(units)
    step = np.ones_like(magnitude)
    while (wide := magnitude // step >= 2048).any():
        step = np.where(wide, 2 * step, step)
    kept, rest = np.divmod(magnitude, step)
    kept += (2 * rest > step) | ((2 * rest == step) & (kept % 2 == 1))
    return np.sign(units) * (kept * step) / 2.0**24


def _ranks(bits: int) -> np.ndarray:
    """The bijection of states that all sqg codebooks share, state by state in Python integers."""
    width = 16 - bits
    ranks = []
    for state in range(65536):
        history, branch = divmod(state, 2**bits)
        mixed = history ^ (history >> 11)
        mixed ^= (mixed << 11) % 2**width
        product = (mixed * 0x3FA7D929 + 0xC928FD8E) % 2**32
        mirrored = int(f"{branch:0{bits}b}"[::-1], 2)
        ranks.append((mirrored ^ (product >> (32 - bits))) * 2**width + product % 2**width)
    return np.array(ranks)


@functools.cache
def _normal_law() -> np.ndarray:
    """Values of the 65,536 ranks: the most frequent E4M3 label of each sixteen neighbours."""
    codes = np.arange(127)
    subnormal = codes < 8
    values = np.where(subnormal, codes / 512.0, (8 + codes % 8) * 2.0 ** (codes // 8 - 10))
    borders = (values[1:] + values[:-1]) / 2
    inverse = statistics.NormalDist().inv_cdf
    upper = [1.5 * inverse((rank + 0.5) / 65536) for rank in range(32768, 65536)]
    labels = np.searchsorted(borders, upper).reshape(2048, 16)
    frequent = np.array([np.bincount(group).argmax() for group in labels])
    upper_values = np.repeat(values[frequent], 16)
    return np.concatenate((-upper_values[::-1], upper_values))


def _linear_law() -> np.ndarray:
    """Values of the 65,536 ranks: FP16 pieces over octaves of the distance from the tail."""
    bases, slopes = np.frombuffer(_BASES, ">u2"), np.frombuffer(_SLOPES, ">u2")
    units = []
    for rank in range(32768, 65536):
        tail = 65535 - 2 * (rank - 32768)
        exponent = tail.bit_length() - 1
        delta = tail - 2**exponent
        if exponent > 3:
            size = 2 ** (exponent - 3)
            piece = 8 * (exponent - 3) + delta // size
            x = (2**exponent + (delta // size + 1) * size - 1 - tail) // 2
        else:
            piece, x = 2 ** max(exponent - 1, 0) + (delta - 1) // 2, 0
        units.append(int(_units(slopes[piece])) * x + int(_units(bases[piece])))
    upper = _round_to_half(np.array(units))
    return np.concatenate((-upper[::-1], upper))


@functools.cache
def table(codebook: str, bits: float) -> np.ndarray:
    """float64 [65536]: the value of every state."""
    state = np.arange(65536, dtype=np.int64)
    if codebook == "mul1":
        product = state * 0x83DCD12D % 2**32
        total = sum(product // 256**i % 256 for i in range(4))
        # Both constants are FP16: 1774 * 2^-18 and -1329 * 2^-7.
        values = _round_to_half(((1024 + total) * 1774 - 1329 * 2**11) * 2**6)
    elif codebook in ("3inst", "mcg"):
        mixed = state * 89226354 + 64248484 if codebook == "3inst" else state * 0xCBAC1FED
        mixed = (mixed & 0x8FFF8FFF) ^ 0x3B603B60
        values = _round_to_half(_units(mixed % 65536) + _units(mixed // 65536 % 65536))
    elif codebook == "sqg_e4m3":
        values = _normal_law()[_ranks(int(bits))]
    else:
        values = _linear_law()[_ranks(int(bits))]
    values = values + 0.0  # no negative zeros
    values.setflags(write=False)
    return values


# ---- the layer --------------------------------------------------------------------------------


@functools.cache
def hadamard_matrix() -> np.ndarray:
    """H[i, j] = (-1)^popcount(i & j) / sqrt(128)."""
    parity = [[(i & j).bit_count() % 2 for j in range(128)] for i in range(128)]
    return (1 - 2 * np.array(parity)) / np.sqrt(128)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Each 128 elements of the last axis times H."""
    blocks = np.split(np.asarray(x, np.float64), x.shape[-1] // 128, axis=-1)
    return np.concatenate([block @ hadamard_matrix() for block in blocks], axis=-1)


def inner_weight(trellis: np.ndarray, codebook: str) -> np.ndarray:
    """float64 [in, out]: the codebook values."""
    return matrix(table(codebook, trellis.shape[-1] / 16)[unpack(trellis)])


def weight(
    trellis: np.ndarray, suh: np.ndarray | None, svh: np.ndarray | None, codebook: str
) -> np.ndarray:
    """float64 [in, out]: diag(suh) H inner H diag(svh), a side without its vector left alone."""
    w = inner_weight(trellis, codebook)
    if suh is not None:
        w = hadamard(w.T).T * suh.astype(np.float64)[:, None]
    if svh is not None:
        w = hadamard(w) * svh.astype(np.float64)
    return w


def linear(
    x: np.ndarray,
    trellis: np.ndarray,
    suh: np.ndarray | None,
    svh: np.ndarray | None,
    codebook: str,
    bias: np.ndarray | None = None,
    out_features: int | None = None,
) -> np.ndarray:
    """float64 [..., out_features]: x through the dense weight."""
    w = weight(trellis, suh, svh, codebook)
    y = (np.asarray(x, np.float64) @ w[: x.shape[-1]])[..., :out_features]
    return y if bias is None else y + np.asarray(bias, np.float64)[: y.shape[-1]]
