"""Every value of every codebook, in Python and in the compiled library."""

from __future__ import annotations

import hashlib

import numpy as np
import oracle
import pytest
import torch
from layers import CASES, RATES, make_layer

import trellis_ops
from trellis_ops.formats import codebooks

# SHA-256 of the 65,536 values in the order of the states: FP16 little-endian; E4M3 for sqg_e4m3.
DIGESTS = {
    "3inst": "ad88de2dcff5bb05fff2faec37cceceb43aa1c2e8203f9d81a6fbd6dd3393eea",
    "mcg": "95383563929baa9d1ae5de0be22490284382673620bdd85929feea7bdbef04a9",
    "mul1": "bc48d02cb1c14939dc47b90f870dd689d63e3b1ab69a157e65538db68677a6c8",
    "sqg_e4m3 2": "62027916386245a84c86156a0a08b6cf07e41548871af0e56fb40780558f6293",
    "sqg_e4m3 3": "afe7b3633e7d243b00b379b18ec4dca573722b3727cafef47fcb6470d7e7e6c9",
    "sqg_e4m3 4": "5a9620f0c4d8f0a60d0b6fbea921dcecbd193e6febf31043aaa6403c20389c2f",
    "sqg_e4m3 5": "a1caf5572c67d4face423478f423e1ed6149a8c920be5c28d4702946c93cae2f",
    "sqg_e4m3 6": "8e0edc92e20eb92f5287dbdadc8e870fc500fc03c5eed996cae0781d197ebcb0",
    "sqg_fp16 5": "828f212de9a30e3ea5b321e2ab8637e7c633df2ce416fcabb747f094b654ee0a",
    "sqg_fp16 6": "2ec7ed71fd5658c9acbf1fa4587b6351898e8c0faa5dd5cc9a2b0a16371b1b54",
}


def digest_of(codebook: str, bits: float) -> str:
    return DIGESTS.get(codebook) or DIGESTS[f"{codebook} {bits}"]


def digest(codebook: str, values: torch.Tensor) -> str:
    assert values.shape == (65536,)
    assert values.dtype == torch.float16
    if codebook == "sqg_e4m3":
        narrow = values.to(torch.float8_e4m3fn)
        assert torch.equal(narrow.half(), values), "a value that is no E4M3 number"
        values = narrow.view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def all_states(bits: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A trellis [16 tiles of inputs, ...] whose closed paths visit every state.

    Each run of positions after a fresh 16 bits shows one chosen state, so `period` positions per
    state suffice; the others are whatever they are.
    """
    widths = oracle.widths(bits)
    period = 16 if bits == 1 else 12 if bits == 1.5 else 8
    slots = np.arange(period - 1, 256, period)
    tiles = -(-65536 // len(slots))
    wanted = np.zeros(tiles * len(slots), np.int64)
    wanted[:65536] = np.arange(65536)
    symbols = np.zeros((tiles, 256), np.int64)
    for slot, states in zip(slots, wanted.reshape(tiles, -1).T, strict=True):
        shift = 0
        for p in range(slot, slot - period, -1):
            symbols[:, p] = states >> shift & (2 ** widths[p] - 1)
            shift += widths[p]
    packed = np.stack([oracle.pack(row, bits) for row in symbols])
    return torch.from_numpy(packed), torch.from_numpy(slots)


@pytest.mark.parametrize(("codebook", "bits"), CASES)
def test_python_table(codebook, bits):
    values = codebooks.codebook_table(codebook, bits)
    assert digest(codebook, values) == digest_of(codebook, bits)
    assert np.array_equal(values.double().numpy(), oracle.table(codebook, bits))


@pytest.mark.parametrize("bits", RATES["mul1"])
def test_compiled_decoder_in_every_state(bits):
    packed, slots = all_states(bits)
    states = trellis_ops.unpack_trellis(packed[:, None])
    assert np.array_equal(states[:, 0].numpy(), oracle.unpack(packed.numpy()))
    visited = states[:, 0][:, slots].flatten()[:65536]
    assert torch.equal(visited, torch.arange(65536, dtype=torch.int32))
    where = torch.from_numpy(np.argsort(oracle.positions().flatten()))  # row-major of a position
    for codebook, rates in RATES.items():
        if bits not in rates:
            continue
        dense = trellis_ops.dequantize(packed[:, None], codebook=codebook)
        tiles = dense.reshape(-1, 256)[:, where]
        assert digest(codebook, tiles[:, slots].flatten()[:65536]) == digest_of(codebook, bits)
        # Also where a decoder may err only at some positions, such as around the seam.
        assert np.array_equal(tiles.double().numpy(), oracle.table(codebook, bits)[states[:, 0]])


@pytest.mark.parametrize(("codebook", "bits"), CASES)
def test_compiled_reference_and_oracle_decode_alike(codebook, bits):
    from trellis_ops import reference

    layer = make_layer(codebook, bits, rows=32, columns=48, seed=int(2 * bits))
    want = oracle.inner_weight(layer.trellis.numpy(), codebook)
    compiled = trellis_ops.dequantize(layer.trellis, codebook=codebook, dtype=torch.float32)
    plain = reference.dequantize(layer.trellis, None, None, layer.code, torch.float32)
    assert np.array_equal(compiled.double().numpy(), want)
    assert torch.equal(compiled, plain)


def test_values_named_in_the_description_of_the_format():
    states = [0, 1, 2, 0x1234, 0x8000, 0xFFFF]
    for codebook, words in {
        "3inst": "3a25 bb5b 3b74 c066 b7f8 b110",
        "mcg": "3f60 304e ba13 3e0f b915 3acd",
        "mul1": "c2e8 3921 b72d b89e baf2 b936",
    }.items():
        values = codebooks.codebook_table(codebook, 4)[states].view(torch.int16)
        assert [f"{int(v) & 0xFFFF:04x}" for v in values] == words.split()


def test_rates_and_ids():
    assert codebooks.CODEBOOKS == oracle.CODEBOOKS
    assert {name: codebooks.rates_of(name) for name in codebooks.CODEBOOKS} == RATES


@pytest.mark.parametrize(
    ("codebook", "marker", "value"),
    [
        ("3inst", None, None),
        ("mcg", "mcg", -877912083),
        ("mul1", "mul1", -2082680531),
        ("sqg_e4m3", "sqg", 0x53514731),
        ("sqg_fp16", "sqg", 0x53514731),
    ],
)
def test_markers(codebook, marker, value):
    assert codebooks.marker_of(codebook) == marker
    tensor = codebooks.marker_tensor(codebook)
    if value is None:
        assert tensor is None
    else:
        assert (tensor.dtype, tensor.shape, tensor.item()) == (torch.int32, (), value)


def test_a_table_first_built_in_inference_mode_serves_training_too():
    codebooks._cpu_table.cache_clear()
    with torch.inference_mode():
        table = codebooks.codebook_table("mcg", 3)
    assert not table.is_inference()
    assert table is codebooks.codebook_table("mcg", 8)


@pytest.mark.parametrize(("codebook", "bits"), [("sqg_fp16", 4), ("mcg", 2.5), ("mul1", 9)])
def test_rates_that_a_codebook_lacks(codebook, bits):
    with pytest.raises(ValueError, match=f"^codebook {codebook} at {bits} bits per weight: exp"):
        codebooks.codebook_table(codebook, bits)


def test_unknown_codebooks():
    with pytest.raises(ValueError, match=r"^codebook is 'mul2', expected one of \('3inst', "):
        codebooks.codebook_table("mul2", 4)
    with pytest.raises(TypeError, match=r"^codebook is int, expected one of \('3inst', "):
        codebooks.codebook_id(2)
