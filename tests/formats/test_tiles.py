"""The packed tile: bit stream, states, order of the 256 weights, and the rates there are."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import RATES, closed_states, make_layer

import trellis_ops
from trellis_ops.formats import tiles

ALL_RATES = RATES["mul1"]
WORDS = st.sampled_from([int(16 * bits) for bits in ALL_RATES])

# Symbols (5p + 3) mod 2^K: the first six int16 words as hex, and states 0, 1, 2, 3 and 255.
PATTERNS = {
    1: ("aaaa aaaa aaaa aaaa aaaa aaaa", None),
    2: ("c6c6 c6c6 c6c6 c6c6 c6c6 c6c6", None),
    3: ("0e62 62af 62af af0e af0e 0e62", "7873 c398 1cc5 e62a af0e"),
    4: ("7c16 38d2 f49e b05a 7c16 38d2", "49e3 9e38 e38d 38d2 f49e"),
    5: ("2bf0 1a1b 2baf 265c 9e3a 912e", None),
    8: ("0d12 0308 2126 171c 353a 2b30", "fe03 0308 080d 0d12 f9fe"),
}


def hexadecimal(values) -> str:
    return " ".join(f"{int(value) & 0xFFFF:04x}" for value in values)


@pytest.mark.parametrize("bits", PATTERNS)
def test_patterns_named_in_the_description_of_the_format(bits):
    words, states = PATTERNS[bits]
    packed = oracle.pack((5 * np.arange(256) + 3) % 2**bits, bits)
    assert hexadecimal(packed[:6]) == words
    unpacked = trellis_ops.unpack_trellis(torch.from_numpy(packed)[None, None])[0, 0]
    if states is not None:
        assert hexadecimal(unpacked[[0, 1, 2, 3, 255]]) == states
    repacked = trellis_ops.pack_trellis(unpacked, bits)
    assert hexadecimal(repacked[:6]) == words
    assert np.array_equal(repacked.numpy(), packed)


@pytest.mark.parametrize("bits", ALL_RATES)
def test_unpack_and_pack_against_the_oracle(bits):
    trellis = make_layer("mul1", bits, rows=48, columns=32).trellis
    states = trellis_ops.unpack_trellis(trellis)
    assert (states.dtype, states.shape) == (torch.int32, (3, 2, 256))
    assert np.array_equal(states.numpy(), oracle.unpack(trellis.numpy()))
    assert tiles.is_closed_path(states, trellis.shape[-1]).all()
    assert oracle.closed(states.numpy().reshape(-1, 256), bits).all()
    for given_states in (states, states.long(), states.flip(0).flip(0).transpose(0, 1)):
        packed = trellis_ops.pack_trellis(given_states, bits)
        assert (packed.dtype, packed.shape[-1]) == (torch.int16, int(16 * bits))
    assert torch.equal(trellis_ops.pack_trellis(states, bits), trellis)
    assert torch.equal(packed, trellis.transpose(0, 1))
    assert torch.equal(trellis_ops.pack_trellis(states[1, 0], bits), trellis[1, 0])


@settings(deadline=None, max_examples=60)
@given(words=WORDS, data=st.data())
def test_any_words_are_a_closed_path_and_pack_again(words, data):
    raw = data.draw(st.binary(min_size=2 * words, max_size=2 * words))
    trellis = torch.from_numpy(np.frombuffer(raw, np.int16).copy())[None, None]
    states = trellis_ops.unpack_trellis(trellis)
    assert np.array_equal(states.numpy(), oracle.unpack(trellis.numpy()))
    assert torch.equal(trellis_ops.pack_trellis(states, words / 16), trellis)


@settings(deadline=None, max_examples=60)
@given(
    words=WORDS,
    seed=st.integers(0, 1 << 32),
    position=st.integers(0, 255),
    bit=st.integers(0, 31),
)
def test_one_wrong_bit_of_a_state_breaks_the_path(words, seed, position, bit):
    states = closed_states(words / 16, 2, seed).long()
    states[1, position] ^= 1 << bit
    assert tiles.is_closed_path(states, words).tolist() == [True, False]
    with pytest.raises(ValueError, match="states of tile 1 are no closed path"):
        trellis_ops.pack_trellis(states, words / 16)


def test_no_tiles():
    for bits in ALL_RATES:
        words = int(16 * bits)
        states = trellis_ops.unpack_trellis(torch.empty(0, 3, words, dtype=torch.int16))
        assert states.shape == (0, 3, 256)
        assert trellis_ops.pack_trellis(states, bits).shape == (0, 3, words)


def test_order_of_the_weights_in_a_tile():
    order = tiles.tiles_to_matrix(torch.arange(256)[None, None])
    assert np.array_equal(order.numpy(), oracle.positions())
    first = [tuple(map(int, np.argwhere(order.numpy() == p)[0])) for p in range(12)]
    assert first == [
        *((0, 0), (1, 0), (8, 0), (9, 0), (0, 8), (1, 8), (8, 8), (9, 8)),
        *((2, 0), (3, 0), (10, 0), (11, 0)),
    ]


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(0, 5), columns=st.integers(0, 5))
def test_matrix_and_tiles_are_inverse(rows, columns):
    matrix = torch.randn(16 * rows, 16 * columns)
    split = tiles.matrix_to_tiles(matrix)
    assert split.shape == (rows, columns, 256)
    assert torch.equal(tiles.tiles_to_matrix(split), matrix)
    if rows and columns:
        assert np.array_equal(oracle.matrix(split.numpy()), matrix.numpy())


def test_rates_and_tile_words():
    for bits in ALL_RATES:
        words = tiles.tile_words_of(bits)
        assert (words, type(words)) == (16 * bits, int)
        assert tiles.is_tile_words(words)
        assert (tiles.bits_of(words), type(tiles.bits_of(words))) == (bits, type(bits))
    assert tiles.tile_words_of(4.0) == 64
    known = [words for words in range(-16, 300) if tiles.is_tile_words(words)]
    assert known == sorted(int(16 * bits) for bits in ALL_RATES)


@pytest.mark.parametrize(("features", "padded"), [(1, 128), (128, 128), (129, 256), (576, 640)])
def test_padding(features, padded):
    assert tiles.padded(features) == padded


def test_sign_words():
    words = torch.tensor([0b1000000000000101, 0, -1], dtype=torch.int32).to(torch.int16)
    signs = tiles.unpack_signs(words)
    assert signs.dtype == torch.float16
    assert torch.where(signs[:16] < 0)[0].tolist() == [0, 2, 15]
    assert signs[16:32].eq(1).all()
    assert signs[32:].eq(-1).all()
