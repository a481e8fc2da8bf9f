"""Reader: parts of a matrix from files, equal to parts of the whole one."""

from __future__ import annotations

import pytest
import torch
from layers import make_layer
from safetensors.torch import save_file

from trellis_ops import TrellisTensor
from trellis_ops.formats import tiles
from trellis_ops.formats.checkpoint import read_exl3_index
from trellis_ops.formats.reading import Reader, is_plain
from trellis_ops.parallel import slice_columns, slice_rows


@pytest.fixture
def stored(tmp_path):
    """(group, matrix) of 512 x 384 with a bias."""
    layer = make_layer("mul1", 3, rows=512, columns=384)
    bias = torch.randn(384).half()
    matrix = TrellisTensor(layer.trellis, layer.suh, layer.svh, bias, "mul1")
    save_file(matrix.state_dict("up."), tmp_path / "a.safetensors")
    return read_exl3_index(tmp_path).groups[0], matrix


def same(got: TrellisTensor, want: TrellisTensor) -> bool:
    fields = ("trellis", "suh", "svh", "bias")
    pairs = [(getattr(got, f), getattr(want, f)) for f in fields]
    equal = [a is b is None or torch.equal(a, b) for a, b in pairs]
    return all(equal) and (got.in_features, got.out_features, got.codebook) == (
        want.in_features, want.out_features, want.codebook,
    )  # fmt: skip


def test_the_whole_and_its_parts(stored):
    group, matrix = stored
    assert is_plain(group) and same(Reader().matrix(group), matrix)
    for begin, end in ((0, 128), (128, 384)):
        part = Reader().matrix(group, columns=(begin, end))
        assert same(part, slice_columns(matrix, begin, end))
    for begin, end in ((0, 256), (256, 512)):
        part = Reader().matrix(group, rows=(begin, end))
        assert same(part, slice_rows(matrix, begin, end))


@pytest.mark.parametrize("part", [{}, {"columns": (128, 256)}, {"rows": (128, 256)}])
def test_parts_hold_nothing_else(stored, part):
    for name, tensor in Reader().parts(stored[0], **part).items():
        assert tensor.is_contiguous(), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"rows": (64, 128)}, "rows are 64 to 128, expected multiples of 128 between 0 and 512"),
        (
            {"columns": (0, 512)},
            "columns are 0 to 512, expected multiples of 128 between 0 and 384",
        ),
        ({"columns": (128, 128)}, "columns are 128 to 128, expected"),
        ({"rows": (-128, 128)}, "rows are -128 to 128, expected"),
    ],
)
def test_other_parts_are_refused(stored, part, message):
    with pytest.raises(ValueError, match=f"up.trellis: {message}"):
        Reader().matrix(stored[0], **part)


def test_sign_words_and_a_short_bias(tmp_path):
    layer = make_layer("mcg", 2, rows=256, columns=384)
    words = torch.arange(-8, 8, dtype=torch.int16) * 1111
    tensors = {
        "up.trellis": layer.trellis,
        "up.su": words,
        "up.svh": layer.svh,
        "up.mcg": torch.tensor([-877912083], dtype=torch.int32),
        "up.bias": torch.randn(300),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    (group,) = read_exl3_index(tmp_path).groups
    assert not is_plain(group)
    matrix = Reader().matrix(group, out_features=172, columns=(128, 384))
    assert torch.equal(matrix.suh, tiles.unpack_signs(words))
    assert torch.equal(matrix.svh, layer.svh[128:])
    want = torch.zeros(256, dtype=torch.float16)
    want[:172] = tensors["up.bias"][128:].half()
    assert torch.equal(matrix.bias, want)
