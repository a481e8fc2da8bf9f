"""Reading a checkpoint's headers: what is found, and the message for each kind of damage."""

from __future__ import annotations

import faulthandler
import json
import re
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from trellis_ops.formats.checkpoint import read_exl3_index
from trellis_ops.formats.experts import expert_sets

MCG, MUL1, SQG = 0xCBAC1FED, 0x83DCD12D, 0x53514731


def marker(value: int) -> torch.Tensor:
    return torch.tensor(value).to(torch.uint32).view(torch.int32)


def matrix(words: int = 64, *, prefix: str = "q_proj.", **extra) -> dict[str, torch.Tensor]:
    """The tensors of a matrix 128 x 256; a value None in extra takes a tensor away."""
    tensors = {
        "trellis": torch.zeros(8, 16, words, dtype=torch.int16),
        "suh": torch.ones(128, dtype=torch.float16),
        "svh": torch.ones(256, dtype=torch.float16),
        **extra,
    }
    return {prefix + name: tensor for name, tensor in tensors.items() if tensor is not None}


def written(folder: Path, tensors: dict[str, torch.Tensor], name: str = "a.safetensors") -> Path:
    save_file(tensors, folder / name)
    return folder / name


def only_group(path: Path):
    (group,) = read_exl3_index(path).groups
    return group


# ---- what is found ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "words", "codebook", "bits"),
    [
        ({}, 16, "3inst", 1),
        ({"mcg": marker(MCG)}, 48, "mcg", 3),
        ({"mul1": marker(MUL1)}, 128, "mul1", 8),
        ({"mul1": marker(MUL1)}, 24, "mul1", 1.5),
        ({"mul1": marker(MUL1)}, 40, "mul1", 2.5),
        ({"mul1": marker(MUL1)}, 56, "mul1", 3.5),
        ({"mul1": marker(MUL1).reshape(1)}, 64, "mul1", 4),
        ({"sqg": marker(SQG)}, 32, "sqg_e4m3", 2),
        ({"sqg": marker(SQG)}, 64, "sqg_e4m3", 4),
        ({"sqg": marker(SQG)}, 80, "sqg", 5),
        ({"sqg": marker(SQG)}, 96, "sqg", 6),
    ],
)
def test_rate_and_codebook_come_from_the_tensors(tmp_path, extra, words, codebook, bits):
    group = only_group(written(tmp_path, matrix(words, **extra)))
    assert (group.name, group.codebook, group.bits) == ("q_proj", codebook, bits)
    assert (group.in_features, group.out_features) == (128, 256)
    assert set(group.tensors) == {"trellis", "suh", "svh", *extra}
    assert group.nbytes == 2 * (8 * 16 * words + 128 + 256) + 4 * len(extra)


@pytest.mark.parametrize("file", ["config.json", "quantization_config.json"])
@pytest.mark.parametrize(
    ("named", "words", "codebook"),
    [
        ("sqg_fp16_d3l", 96, "sqg_fp16"),
        ("sqg_fp16", 80, "sqg_fp16"),
        ("sqg_xor_cheb_t12", 96, "sqg_e4m3"),
        ("sqg_e4m3", 80, "sqg_e4m3"),
        ("sqg_fp16", 64, "sqg_e4m3"),  # not defined at 4 bits
        ("mul1", 96, "sqg"),
        (7, 96, "sqg"),
    ],
)
def test_metadata_tells_the_two_sqg_codebooks_apart(tmp_path, file, named, words, codebook):
    config = {"codebook": named}
    if file == "config.json":
        config = {"quantization_config": config}
    (tmp_path / file).write_text(json.dumps(config))
    path = written(tmp_path, matrix(words, sqg=marker(SQG)))
    assert only_group(path).codebook == codebook
    assert only_group(tmp_path).codebook == codebook


def test_markers_win_over_metadata(tmp_path):
    (tmp_path / "quantization_config.json").write_text('{"codebook": "mul1"}')
    assert only_group(written(tmp_path, matrix(mcg=marker(MCG)))).codebook == "mcg"


def test_legacy_sign_words_bias_and_no_prefix(tmp_path):
    legacy = matrix(
        prefix="",
        suh=None,
        svh=None,
        su=torch.zeros(8, dtype=torch.int16),
        sv=torch.zeros(16, dtype=torch.int16),
        bias=torch.zeros(200, dtype=torch.bfloat16),
    )
    group = only_group(written(tmp_path, legacy))
    assert group.name == ""
    assert set(group.tensors) == {"trellis", "su", "sv", "bias"}


def test_totals_order_and_other_tensors(tmp_path):
    tensors = {
        **matrix(32, prefix="layers.10.up."),
        **matrix(64, prefix="layers.9.up."),
        "norm.weight": torch.ones(128, dtype=torch.bfloat16),
        "layers.9.up.lora.weight": torch.ones(3, 5),
        "embed.weight": torch.ones(7, 0, dtype=torch.float8_e4m3fn),
    }
    index = read_exl3_index(written(tmp_path, tensors))
    assert [group.name for group in index.groups] == ["layers.9.up", "layers.10.up"]
    others = {tensor.name: tensor.nbytes for tensor in index.others}
    assert others == {"embed.weight": 0, "layers.9.up.lora.weight": 60, "norm.weight": 256}
    assert index.other_bytes == 316
    assert index.exl3_bytes == sum(t.nbytes for n, t in tensors.items() if n not in others)
    assert index.average_bits == 3
    assert index.weights == 2 * 128 * 256


def test_a_checkpoint_without_exl3_tensors(tmp_path):
    index = read_exl3_index(written(tmp_path, {"weight": torch.ones(3)}))
    assert index.groups == [] and index.average_bits is None


def test_a_matrix_may_lie_in_two_shards(tmp_path):
    tensors = matrix(mul1=marker(MUL1))
    vectors = {name: tensors.pop(name) for name in ("q_proj.suh", "q_proj.mul1")}
    written(tmp_path, tensors, "m-1.safetensors")
    written(tmp_path, vectors, "m-2.safetensors")
    assert only_group(tmp_path).codebook == "mul1"
    places = dict.fromkeys(tensors, "m-1.safetensors") | dict.fromkeys(vectors, "m-2.safetensors")
    index_file = tmp_path / "m.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": places}))
    for path in (tmp_path, index_file):
        group = only_group(path)
        assert group.tensors["suh"].file.name == "m-2.safetensors"
        assert group.codebook == "mul1"


# ---- damage -----------------------------------------------------------------------------------

F16 = torch.float16
I16 = torch.int16


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            matrix(trellis=torch.zeros(8, 16, 64, dtype=torch.uint16)),
            "q_proj.trellis is U16 [8, 16, 64], expected I16 [in/16, out/16, 16*bits]",
        ),
        (
            matrix(trellis=torch.zeros(8, 16 * 64, dtype=I16)),
            "q_proj.trellis is I16 [8, 1024], expected I16 [in/16, out/16, 16*bits]",
        ),
        *(
            (
                matrix(words, mul1=marker(MUL1)),
                f"q_proj.trellis is I16 [8, 16, {words}], expected a last dimension of 16*bits "
                "with bits from 1 to 8, or 24, 40 or 56",
            )
            for words in (0, 8, 17, 72, 144, 160)
        ),
        *(
            (
                matrix(words, **extra),
                f"q_proj.trellis has {words / 16} bits, expected one of (1, 2, 3, 4, 5, 6, 7, 8) "
                f"for {codebook} (a half rate needs the marker mul1)",
            )
            for words, extra, codebook in ((24, {}, "3inst"), (56, {"mcg": marker(MCG)}, "mcg"))
        ),
        (
            matrix(40, sqg=marker(SQG)),
            "q_proj.trellis has 2.5 bits, expected one of (2, 3, 4, 5, 6) for sqg_e4m3 "
            "(a half rate needs the marker mul1)",
        ),
        (
            matrix(112, sqg=marker(SQG)),
            "q_proj.trellis has 7 bits, expected one of (2, 3, 4, 5, 6) for sqg_e4m3",
        ),
        (
            matrix(trellis=torch.zeros(9, 16, 64, dtype=I16)),
            "q_proj.trellis is I16 [9, 16, 64]: in is 144, expected a multiple of 128",
        ),
        (
            matrix(trellis=torch.zeros(8, 0, 64, dtype=I16)),
            "q_proj.trellis is I16 [8, 0, 64]: out is 0, expected a multiple of 128",
        ),
        (
            matrix(mcg=marker(MCG), mul1=marker(MUL1)),
            "q_proj.mcg has mul1 beside it, expected one marker",
        ),
        (
            matrix(mul1=marker(MUL1), sqg=marker(SQG)),
            "q_proj.mul1 has sqg beside it, expected one marker",
        ),
        *(
            (
                matrix(**{name: marker(value ^ 1)}),
                f"q_proj.{name} has the value {value ^ 1:#010x}, expected {value:#010x}",
            )
            for name, value in (("mcg", MCG), ("mul1", MUL1), ("sqg", SQG))
        ),
        (
            matrix(mcg=torch.tensor(MCG)),
            "q_proj.mcg is I64 [], expected one I32 value",
        ),
        (
            matrix(mul1=torch.zeros(2, dtype=torch.int32)),
            "q_proj.mul1 is I32 [2], expected one I32 value",
        ),
        (matrix(suh=None), "q_proj.trellis has no suh (or legacy su) beside it"),
        (matrix(svh=None), "q_proj.trellis has no svh (or legacy sv) beside it"),
        (
            matrix(su=torch.zeros(8, dtype=I16)),
            "q_proj.suh has su beside it, expected one of the two",
        ),
        (
            matrix(suh=torch.ones(256, dtype=F16)),
            "q_proj.suh is F16 [256], expected F16 [128], as the trellis has it",
        ),
        (
            matrix(svh=torch.ones(256, dtype=torch.bfloat16)),
            "q_proj.svh is BF16 [256], expected F16 [256], as the trellis has it",
        ),
        (
            matrix(svh=torch.ones(1, 256, dtype=F16)),
            "q_proj.svh is F16 [1, 256], expected F16 [256], as the trellis has it",
        ),
        (
            matrix(suh=None, su=torch.zeros(16, dtype=I16)),
            "q_proj.su is I16 [16], expected I16 [8], as the trellis has it",
        ),
        (
            matrix(bias=torch.zeros(128, dtype=F16)),
            "q_proj.bias is F16 [128], expected F16, BF16 or F32 [256], or less than 128 shorter",
        ),
        (
            matrix(bias=torch.zeros(256, dtype=torch.int32)),
            "q_proj.bias is I32 [256], expected F16, BF16 or F32 [256], or less than 128 shorter",
        ),
        (
            matrix(tile_order=torch.zeros(1, dtype=torch.int32)),
            "q_proj.tile_order is no tensor of an EXL3 matrix, expected one of "
            "('trellis', 'suh', 'svh', 'su', 'sv', 'bias', 'mcg', 'mul1', 'sqg')",
        ),
        (
            matrix(weight=torch.zeros(1)),
            "q_proj.weight is no tensor of an EXL3 matrix, expected one of "
            "('trellis', 'suh', 'svh', 'su', 'sv', 'bias', 'mcg', 'mul1', 'sqg')",
        ),
        (matrix(trellis=None), "q_proj.suh has no trellis beside it"),
        (matrix(trellis=None, svh=None), "q_proj.suh has no trellis beside it"),
        (
            {"q_proj.su": torch.zeros(16, dtype=torch.int16)},
            "q_proj.su has no trellis beside it",
        ),
        ({"q_proj.mul1": marker(0x83DCD12D)}, "q_proj.mul1 has no trellis beside it"),
    ],
)
def test_tensors_that_break_the_format(tmp_path, tensors, message):
    path = written(tmp_path, tensors)
    with pytest.raises(ValueError) as caught:
        read_exl3_index(path)
    assert str(caught.value) == f"{path}: {message}"


def test_a_lost_marker_is_noticed_where_metadata_tells(tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"codebook": "mul1"}}')
    path = written(tmp_path, matrix())
    message = (
        f"{path}: q_proj.trellis has no marker beside it, expected mul1, "
        "as quantization_config says"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        read_exl3_index(tmp_path)


def _index(content: object) -> str:
    return json.dumps({"weight_map": content})


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "x.safetensors.index.json: not valid JSON: "),
        ("[" * 100_000, "x.safetensors.index.json: not valid JSON: "),
        ("[]", "x.safetensors.index.json: holds a JSON list, expected an object"),
        ("{}", "x.safetensors.index.json: has no object weight_map"),
        (_index([]), "x.safetensors.index.json: has no object weight_map"),
        (
            _index({"q_proj.suh": "gone.safetensors"}),
            "x.safetensors.index.json: the file gone.safetensors that it names does not exist",
        ),
        (
            _index({"a": "p.safetensors", "b": "q.safetensors"}),
            "x.safetensors.index.json: the file p.safetensors and 1 more that it names "
            "does not exist",
        ),
        (
            _index({"q_proj.suh": "../a.safetensors"}),
            "x.safetensors.index.json: q_proj.suh is in '../a.safetensors', "
            "expected a file of the same folder",
        ),
        (
            _index({"q_proj.suh": None}),
            "x.safetensors.index.json: q_proj.suh is in None, expected a file of the same folder",
        ),
        (
            _index({"k_proj.suh": "a.safetensors"}),
            "a.safetensors: k_proj.suh is missing, though the index names it",
        ),
    ],
)
def test_index_files_that_do_not_fit(tmp_path, index, message):
    written(tmp_path, matrix())
    (tmp_path / "x.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError) as caught:
        read_exl3_index(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_two_index_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has 2 index files .*name one of them"):
        read_exl3_index(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        written(tmp_path, matrix(), name)
    message = f"{tmp_path}/b.safetensors: q_proj.s.h is also in {tmp_path}/a.safetensors"
    with pytest.raises(ValueError, match=message):
        read_exl3_index(tmp_path)


def test_a_folder_without_tensors(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}: holds no .safetensors file"):
        read_exl3_index(tmp_path)


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone.safetensors"):
        read_exl3_index(tmp_path / "gone.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json: not valid JSON"),
        ("config.json", "3", "config.json: holds a JSON int, expected an object"),
        (
            "config.json",
            '{"quantization_config": [1]}',
            r"config.json: quantization_config is \[1\], expected an object",
        ),
        ("quantization_config.json", "\udcff", "quantization_config.json: not valid JSON"),
    ],
)
def test_damaged_metadata(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        read_exl3_index(written(tmp_path, matrix()))


def _raw(header: dict | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _entry(shape: list[int], begin: int, end: int, dtype: str = "I16") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        _raw(b"{}", length=2**63),
        _raw(b"{}", length=2**64 - 1),
        _raw(b"{}", length=3),
        _raw(b"{"),
        _raw(b"[]"),
        _raw(b"\xff\xfe"),
        _raw(b"[" * 100_000),
        _raw({"a": _entry([2], 0, 3)}, b"\0" * 4),
        _raw({"a": _entry([2], 0, 4)}, b"\0" * 3),
        _raw({"a": _entry([2], -4, 0)}, b"\0" * 4),
        _raw({"a": _entry([-2], 0, 4)}, b"\0" * 4),
        _raw({"a": _entry([2**32, 2**32], 0, 0)}),
        _raw({"a": _entry([2**62, 4], 0, 0)}),
        _raw({"a": _entry([2], 0, 4), "b": _entry([2], 2, 6)}, b"\0" * 6),
        _raw({"a": _entry([2], 0, 4), "b": _entry([2], 6, 10)}, b"\0" * 10),
        _raw({"a": _entry([1], 0, 2, "I17")}, b"\0" * 2),
        _raw({"a": {"dtype": "I16"}}),
        _raw({"a": None}),
    ],
    ids=lambda content: content[:40].hex(),
)
def test_headers_that_lie(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: "):
        read_exl3_index(path)


VALID = save(
    {
        **matrix(trellis=torch.zeros(8, 8, 16, dtype=torch.int16), svh=torch.ones(128).half()),
        "q_proj.mul1": marker(MUL1),
        "norm.weight": torch.ones(4, 2),
    }
)
HEADER_END = 8 + int.from_bytes(VALID[:8], "little")
ANYTHING = st.recursive(
    st.none() | st.integers(-(2**65), 2**65) | st.sampled_from(["I16", "F16", "I32", "", "x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_value_in_a_header(tmp_path, data):
    header = json.loads(VALID[8:HEADER_END])
    name = data.draw(st.sampled_from(sorted(header)))
    part = data.draw(st.sampled_from([*header[name], None]))
    if part is None:
        header[name] = data.draw(ANYTHING)
    else:
        header[name][part] = data.draw(ANYTHING)
    path = tmp_path / "a.safetensors"
    path.write_bytes(_raw(header, VALID[HEADER_END:]))
    try:
        read_exl3_index(path)
    except ValueError as error:
        assert str(path) in str(error)


PREFIXES = (
    "", "q_proj.", "experts.shared_h.", "experts.r7_shared.", "experts.0.gate_proj.",
    "experts.7.up_proj.", "experts.0.down_proj.rank0.", "a.experts.999999.w1.rank999.",
)  # fmt: skip


def _damaged(random: Random) -> bytes:
    """The valid file with some damage to its header, as text or as values, and to its length."""
    content = bytearray(VALID)
    header = json.loads(VALID[8:HEADER_END])
    if random.random() < 0.5:
        for _ in range(random.randint(1, 4)):
            at = random.randrange(HEADER_END + 8)
            removed = random.randint(0, 4)
            if random.random() < 0.5:
                new = bytes(random.choices(b'0123456789-,:"[]{}.IFUq', k=random.randint(0, 4)))
            else:
                new = random.randbytes(random.randint(0, 4))
            content[at : at + removed] = new
        if random.random() < 0.5:  # so that the damage gets past the check of the length
            size = max(len(content) - (len(VALID) - HEADER_END) - 8, 0)
            content[:8] = size.to_bytes(8, "little")
        return bytes(content)
    for _ in range(random.randint(1, 3)):
        name = random.choice(sorted(header))
        entry = header[name]
        what = random.choice(("rename", "drop", "dtype", "shape", "offsets", "value"))
        if what == "rename":
            parts = ("trellis", "suh", "svh", "su", "bias", "mcg", "mul1", "sqg", "rank0", "x")
            prefix = random.choice(PREFIXES)
            header[prefix + random.choice(parts)] = header.pop(name)
        elif what == "drop":
            del header[name]
        elif what == "value" or not isinstance(entry, dict):
            header[name] = random.choice((None, [], {}, "x", 2**70, -1, {"shape": [1]}))
        elif what == "dtype":
            entry["dtype"] = random.choice(("I16", "U16", "F16", "BF16", "I32", "I64", "F4", "?"))
        else:
            key = {"shape": "shape", "offsets": "data_offsets"}[what]
            numbers = entry.get(key) or [0]
            if isinstance(numbers, list):
                numbers[random.randrange(len(numbers))] = random.choice(
                    (0, 1, -1, 7, 16, 128, 2**31, 2**62, 2**63, 2**64, 2**70, 1.5, "8", None)
                )
                entry[key] = numbers
        if not header:
            break
    return _raw(header, VALID[HEADER_END:])


def test_ten_thousand_damaged_headers(tmp_path):
    """Each gives a ValueError that names the file, or an index that holds together."""
    random, path = Random(0), tmp_path / "a.safetensors"
    errors = 0
    faulthandler.dump_traceback_later(300, exit=True)  # a reader that hangs
    for _ in range(10_000):
        path.write_bytes(_damaged(random))
        try:
            index = read_exl3_index(path)
        except ValueError as error:
            assert str(path) in str(error)
            errors += 1
            continue
        for group in index.groups:
            assert group.bits * group.weights == 8 * group.tensors["trellis"].nbytes
        try:
            expert_sets({group.name: group for group in index.groups})
        except ValueError as error:
            assert "experts" in str(error)
    faulthandler.cancel_dump_traceback_later()
    assert 8_000 < errors < 10_000  # some damage, as to a name that nobody reads, is none


def test_an_index_of_an_older_save(tmp_path):
    written(tmp_path, matrix(), "model.safetensors")
    stale = {"q_proj.trellis": "model-00001-of-00002.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": stale}))
    (group,) = read_exl3_index(tmp_path).groups
    assert group.tensors["trellis"].file == tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors"):
        read_exl3_index(index)


def test_no_quantization_config(tmp_path):
    written(tmp_path, matrix())
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    assert read_exl3_index(tmp_path).quantization_config == {}
