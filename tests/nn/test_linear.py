"""Exl3Linear as a module: state dicts, copies, casts, moves, offload, and what it refuses."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import numpy as np
import oracle
import pytest
import torch
from expecttest import TestCase
from layers import BOUNDS, CASES, double, make_layer, worst_row
from torch import nn

from trellis_ops import Exl3Linear, TrellisTensor

F16 = torch.float16
STORED = {"trellis": torch.int16, "suh": F16, "svh": F16, "bias": F16, "mul1": torch.int32}


def make_tensors(codebook="mul1", bits=3, *, bias=True, seed=0, **sizes) -> TrellisTensor:
    layer = make_layer(codebook, bits, seed=seed)
    sizes = {"in_features": 200, "out_features": 300, **sizes}
    added = torch.randn(sizes["out_features"], dtype=F16) if bias else None
    return TrellisTensor(layer.trellis, layer.suh, layer.svh, added, codebook, **sizes)


def make_module(*args, **kwargs) -> Exl3Linear:
    return Exl3Linear.from_tensors(make_tensors(*args, **kwargs))


def fresh(module: Exl3Linear, **changed) -> Exl3Linear:
    options = {"bits": module.bits, "codebook": module.codebook, **changed}
    return Exl3Linear(module.in_features, module.out_features, module.bias is not None, **options)


def same(a: Exl3Linear, b: Exl3Linear, x: torch.Tensor | None = None) -> None:
    x = torch.randn(3, a.in_features) if x is None else x
    assert torch.equal(a(x), b(x))
    assert list(a.state_dict()) == list(b.state_dict())
    for name, tensor in a.state_dict().items():
        other = b.state_dict()[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert torch.equal(tensor, other), name


# ---- the product ------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(200, 300), (256, 384), (129, 257)])
def test_forward(sizes, bias):
    tensors = make_tensors(bias=bias, in_features=sizes[0], out_features=sizes[1])
    module = Exl3Linear.from_tensors(tensors)
    for dtype, bound in BOUNDS.items():
        x = torch.randn(2, 3, sizes[0]).to(dtype)
        arrays = (tensors.trellis, tensors.suh, tensors.svh)
        want = oracle.linear(
            double(x),
            *(a.numpy() for a in arrays),
            "mul1",
            bias=None if tensors.bias is None else tensors.bias.numpy(),
            out_features=sizes[1],
        )
        y = module(x)
        assert (y.shape, y.dtype) == ((2, 3, sizes[1]), dtype)
        assert worst_row(y, want) <= bound


def test_same_trellis_three_codebooks_three_results():
    trellis = make_tensors()
    x = torch.randn(2, 200)
    results = []
    for codebook in ("3inst", "mcg", "mul1"):
        tensors = TrellisTensor(trellis.trellis, trellis.suh, trellis.svh, None, codebook, 200, 300)
        results.append(Exl3Linear.from_tensors(tensors)(x))
    for a, b in itertools.combinations(results, 2):
        assert worst_row(a, double(b)) > 0.5


def test_dequantize_is_the_weight_of_the_linear_it_stands_for():
    module = make_module()
    dense = nn.Linear(200, 300)
    dense.weight.data = module.dequantize(torch.float32)
    dense.bias.data = module.bias[:300].float()
    x = torch.randn(5, 200)
    # The kernels may leave a value of the codebook unrounded; the bound is the op's own.
    assert worst_row(module(x), double(dense(x))) <= BOUNDS[torch.float32]
    assert module.dequantize().dtype == torch.get_default_dtype()


def test_a_new_module_is_zero_and_says_what_it_is():
    module = Exl3Linear(200, 300, True, bits=2.5, codebook="mul1")
    assert not module(torch.randn(3, 200)).any()
    assert repr(module) == (
        "Exl3Linear(in_features=200, out_features=300, bias=True, bits=2.5, codebook=mul1)"
    )
    assert not any(tensor.requires_grad for tensor in module.parameters())


# ---- state dicts ------------------------------------------------------------------------------


@pytest.mark.parametrize(("codebook", "bits"), CASES)
def test_strict_round_trip(codebook, bits):
    module = make_module(codebook, bits)
    marker = {"3inst": [], "mcg": ["mcg"], "mul1": ["mul1"]}.get(codebook, ["sqg"])
    assert list(module.state_dict()) == ["trellis", "suh", "svh", "bias", *marker]
    copied = fresh(module)
    copied.load_state_dict(module.state_dict())
    same(copied, module)
    assert copied.trellis.data_ptr() != module.trellis.data_ptr()
    assigned = fresh(module, device="meta")
    assert assigned.weight.is_meta
    assigned.load_state_dict(module.state_dict(), assign=True)
    same(assigned, module)
    assert assigned.trellis.data_ptr() == module.trellis.data_ptr()


def test_round_trip_under_a_prefix_and_through_torch_save(tmp_path):
    model = nn.Sequential(make_module(), nn.ReLU(), nn.ModuleDict({"a": make_module("mcg", 2)}))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert "2.a.mcg" in state
    other = nn.Sequential(
        fresh(model[0]), nn.ReLU(), nn.ModuleDict({"a": fresh(model[2]["a"], device="meta")})
    )
    other.load_state_dict(state, assign=True)
    same(other[0], model[0])
    same(other[2]["a"], model[2]["a"])


def test_tensors_share_storage_and_survive_the_round_trip():
    module = make_module()
    tensors = module.tensors()
    assert tensors.trellis.data_ptr() == module.trellis.data_ptr()
    assert (tensors.in_features, tensors.out_features) == (200, 300)
    same(Exl3Linear.from_tensors(tensors), module)


def test_a_bias_of_the_logical_length_is_padded():
    module = make_module()
    state = module.state_dict()
    state["bias"] = state["bias"][:300]
    for assign in (False, True):
        other = fresh(module)
        other.load_state_dict(state, assign=assign)
        same(other, module)


@pytest.mark.parametrize("assign", [False, True])
def test_legacy_sign_words(assign):
    module = make_module("3inst", 4)
    random = np.random.default_rng(0)
    state = module.state_dict()
    for name, legacy, words in (("suh", "su", 16), ("svh", "sv", 24)):
        packed = random.integers(-(2**15), 2**15, words, np.int16)
        bits = np.unpackbits(packed.view(np.uint8), bitorder="little")
        module.get_parameter(name).copy_(torch.from_numpy(1.0 - 2.0 * bits))
        del state[name]
        state[legacy] = torch.from_numpy(packed)
    other = fresh(module)
    other.load_state_dict(state, assign=assign)
    same(other, module)


class Refusals(TestCase):
    maxDiff = None

    def refused(self, module: Exl3Linear, state: dict, prefix: str = "") -> str:
        """One text, whatever strict and assign say; and nothing was loaded."""
        texts = set()
        before = copy.deepcopy(module.state_dict())
        holder = nn.ModuleDict({prefix: module}) if prefix else module
        dotted = f"{prefix}." if prefix else ""
        prefixed = {dotted + name: tensor for name, tensor in state.items()}
        for strict, assign in itertools.product((True, False), (True, False)):
            with self.assertRaises(RuntimeError) as caught:
                holder.load_state_dict(prefixed, strict=strict, assign=assign)
            lines = str(caught.exception).splitlines()[1:]
            texts.add("\n".join(line.strip() for line in lines))
            for name, tensor in module.state_dict().items():
                assert torch.equal(tensor, before[name])
        assert len(texts) == 1, texts
        return texts.pop()

    def test_bits(self):
        module = make_module("mul1", 4)
        self.assertExpectedInline(
            self.refused(module, make_module("mul1", 3).state_dict(), "q_proj"),
            """q_proj.trellis: 3 bits in the state dict, expected bits=4""",
        )
        self.assertExpectedInline(
            self.refused(module, make_module("mul1", 2.5).state_dict()),
            """trellis: 2.5 bits in the state dict, expected bits=4""",
        )

    def test_markers(self):
        mcg, plain = make_module("mcg", 4).state_dict(), make_module("3inst", 4).state_dict()
        mul1 = make_module("mul1", 4)
        self.assertExpectedInline(
            self.refused(mul1, mcg, "up"),
            """\
up.mcg: found, but the module's codebook is mul1
up.mul1: missing beside up.trellis, and the module's codebook is mul1""",
        )
        self.assertExpectedInline(
            self.refused(mul1, plain, "up"),
            """up.mul1: missing beside up.trellis, and the module's codebook is mul1""",
        )
        self.assertExpectedInline(
            self.refused(make_module("3inst", 4), mcg, "up"),
            """up.mcg: found, but the module's codebook is 3inst""",
        )
        both = {**mul1.state_dict(), "mcg": mcg["mcg"]}
        self.assertExpectedInline(
            self.refused(mul1, both), """mcg: found, but the module's codebook is mul1"""
        )
        wrong = {**mul1.state_dict(), "mul1": mul1.mul1 + 1}
        self.assertExpectedInline(
            self.refused(mul1, wrong), """mul1: value 0x83dcd12e, expected 0x83dcd12d"""
        )
        wrong["mul1"] = mul1.mul1.float()
        self.assertExpectedInline(
            self.refused(mul1, wrong), """mul1: torch.float32 with 1 elements, expected one int32"""
        )
        wrong["mul1"] = mul1.mul1.repeat(2)
        self.assertExpectedInline(
            self.refused(mul1, wrong), """mul1: torch.int32 with 2 elements, expected one int32"""
        )

    def test_dtypes(self):
        module = make_module("mul1", 4)
        state = module.state_dict()
        self.assertExpectedInline(
            self.refused(module, {**state, "trellis": module.trellis.int()}),
            """trellis: dtype torch.int32, expected torch.int16""",
        )
        self.assertExpectedInline(
            self.refused(module, {**state, "suh": module.suh.bfloat16()}),
            """suh: dtype torch.bfloat16, expected torch.float16""",
        )

    def test_calls(self):
        module = make_module()
        with self.assertRaises(ValueError) as caught:
            module(torch.randn(2, 199))
        self.assertExpectedInline(
            str(caught.exception), """Exl3Linear: x has 199 columns, expected in_features 200"""
        )
        with self.assertRaises(ValueError) as caught:
            module(torch.randn(()))
        self.assertExpectedInline(
            str(caught.exception), """trellis_gemm: x has 0 dimensions, expected at least 1"""
        )
        with self.assertRaises(TypeError) as caught:
            module(torch.randn(2, 200).double())
        self.assertExpectedInline(
            str(caught.exception),
            """trellis_gemm: x has dtype float64, expected float16 or bfloat16 or float32""",
        )

    def test_construction(self):
        def text(*sizes, bits=4, codebook="mul1"):
            with self.assertRaises((ValueError, TypeError)) as caught:
                Exl3Linear(*sizes, bits=bits, codebook=codebook)
            return str(caught.exception)

        self.assertExpectedInline(
            text(0, 16), """Exl3Linear: in_features is 0, expected a positive int"""
        )
        self.assertExpectedInline(
            text(16, 2.0), """Exl3Linear: out_features is 2.0, expected a positive int"""
        )
        self.assertExpectedInline(
            text(16, 16, bits=9),
            """Exl3Linear: bits is 9, expected an integer from 1 to 8, or 1.5, 2.5 or 3.5""",
        )
        self.assertExpectedInline(
            text(16, 16, bits=2.5, codebook="mcg"),
            """Exl3Linear: codebook mcg at 2.5 bits, expected bits in (1, 2, 3, 4, 5, 6, 7, 8)""",
        )
        self.assertExpectedInline(
            text(16, 16, codebook="qtip"),
            """Exl3Linear: codebook is 'qtip', expected one of ('3inst', 'mcg', 'mul1', 'sqg_e4m3', 'sqg_fp16')""",
        )

    def test_weight_as_a_tensor(self):
        weight = make_module().weight
        x = torch.randn(2, 200)
        with self.assertRaises(TypeError) as caught:
            nn.functional.linear(x, weight)
        self.assertExpectedInline(
            str(caught.exception),
            """Exl3Linear keeps its weight packed and has no dense one: call .dequantize() for a copy, or the module itself for the product (passed to linear)""",
        )
        with self.assertRaises(TypeError):
            x @ weight
        with self.assertRaises(AttributeError) as caught:
            weight.T  # noqa: B018
        self.assertExpectedInline(
            str(caught.exception),
            """Exl3Linear keeps its weight packed and has no dense one: call .dequantize() for a copy, or the module itself for the product (asked for weight.T)""",
        )
        self.assertExpectedInline(
            repr(weight), """PackedWeight(shape=(300, 200), dtype=torch.float32, device=cpu)"""
        )


def test_missing_and_unexpected_keys_as_any_module():
    module = make_module()
    state = module.state_dict()
    del state["svh"]
    state["scale"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"svh".*Unexpected key.*"scale"'):
        fresh(module).load_state_dict(state)
    missing, unexpected = fresh(module).load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["svh"], ["scale"])
    missing, unexpected = fresh(module).load_state_dict({}, strict=False)
    assert (missing, unexpected) == ([*STORED], [])


# ---- copies, casts, moves ---------------------------------------------------------------------


def test_deepcopy_is_independent():
    module = make_module()
    x = torch.randn(2, 200)
    before = module(x)
    other = copy.deepcopy(module)
    same(other, module)
    other.svh.mul_(2)
    other.bias.zero_()
    other.trellis.add_(1)
    assert torch.equal(module(x), before)
    assert not torch.equal(other(x), before)


def test_pickle_and_save_of_the_module():
    module = make_module("sqg_fp16", 5)
    same(pickle.loads(pickle.dumps(module)), module)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    same(torch.load(buffer, weights_only=False), module)


CASTS = {
    "to bfloat16": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "float": (lambda m: m.half().float(), torch.float32),
    "double": (lambda m: m.double(), torch.float64),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "type": (lambda m: m.type(torch.bfloat16), torch.bfloat16),
    "type of integers": (lambda m: m.type(torch.int64), torch.float32),
    "to device and dtype": (lambda m: m.to("cpu", torch.float16), torch.float16),
    "to a tensor's": (lambda m: m.to(torch.zeros(1, dtype=torch.float16)), torch.float16),
    "cpu": (lambda m: m.cpu(), torch.float32),
    "share_memory": (lambda m: m.share_memory(), torch.float32),
    "inside a model": (lambda m: nn.Sequential(m).to(torch.bfloat16)[0], torch.bfloat16),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_change_what_weight_says_and_no_stored_bit(name):
    cast, dtype = CASTS[name]
    module = make_module()
    state = copy.deepcopy(module.state_dict())
    x = torch.randn(2, 200)
    before = module(x)
    result = cast(module)
    assert result.weight.dtype == dtype
    for key, tensor in result.state_dict().items():
        assert tensor.dtype == STORED[key]
        assert torch.equal(tensor, state[key])
        assert tensor.is_shared() == (name == "share_memory")
    assert torch.equal(result(x), before)


def test_meta_and_to_empty_keep_dtypes_and_shapes():
    module = make_module()
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    state = copy.deepcopy(module.state_dict())
    module.to("meta")
    assert module.weight.device.type == "meta"
    assert module(torch.empty(2, 3, 200, device="meta")).shape == (2, 3, 300)
    for _ in range(2):
        for name, tensor in module.state_dict().items():
            assert (tensor.dtype, tensor.shape) == (STORED[name], shapes[name])
        module.to_empty(device="cpu")
    module.load_state_dict(state)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_a_device_context_and_a_default_dtype():
    with torch.device("meta"):
        module = Exl3Linear(200, 300, True, bits=4, codebook="mcg", dtype=torch.bfloat16)
    assert {tensor.device.type for tensor in module.parameters()} == {"meta"}
    assert module.weight.dtype == torch.bfloat16
    assert {"trellis", "suh", "svh", "bias", "mcg"} == set(module.state_dict())


def test_what_weight_tells():
    weight = make_module().weight
    assert (weight.shape, weight.ndim, weight.size(), weight.size(0)) == (
        (300, 200),
        2,
        (300, 200),
        300,
    )
    assert (weight.dtype, weight.device) == (torch.float32, torch.device("cpu"))
    assert (weight.requires_grad, weight.is_meta) == (False, False)
    x = torch.zeros(1, dtype=torch.float64).to(device=weight.device, dtype=weight.dtype)
    assert x.dtype == torch.float32


def test_bias_of_another_dtype_is_kept_and_used():
    tensors = make_tensors()
    wide = TrellisTensor(
        tensors.trellis, tensors.suh, tensors.svh, tensors.bias.float() + 1e-5, "mul1", 200, 300
    )
    module = Exl3Linear.from_tensors(wide).to(torch.bfloat16)
    assert module.bias.dtype == torch.float32
    x = torch.zeros(1, 200)
    assert torch.equal(module(x)[0], wide.bias[:300])


# ---- accelerate -------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        options = {"bits": 3, "codebook": "mul1", "device": device}
        self.first = Exl3Linear(200, 300, True, **options)
        self.second = Exl3Linear(300, 200, **options)
        self.norm = nn.LayerNorm(200, device=device)

    def forward(self, x):
        return self.norm(self.second(torch.relu(self.first(x))) + x)


@pytest.mark.parametrize(
    ("place", "offload_buffers"), [("cpu", False), ("disk", False), ("disk", True)]
)
def test_accelerate_loads_and_offloads(tmp_path, place, offload_buffers):
    accelerate = pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    model = Model()
    for part, seed in ((model.first, 1), (model.second, 2)):
        layer = make_layer("mul1", 3, rows=part.suh.numel(), columns=part.svh.numel(), seed=seed)
        part.load_state_dict(
            {
                **part.state_dict(),
                "trellis": layer.trellis,
                "suh": layer.suh,
                "svh": layer.svh,
            }
        )
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(3, 200)
    want = model(x)
    loaded = accelerate.load_checkpoint_and_dispatch(
        Model("meta"),
        str(tmp_path / "model.safetensors"),
        device_map={"first": "cpu", "second": place, "norm": "cpu"},
        offload_folder=str(tmp_path / "offload"),
        offload_buffers=offload_buffers,
        force_hooks=True,
    )
    for _ in range(2):
        assert torch.equal(loaded(x), want)
    assert loaded.second.trellis.dtype == torch.int16
    assert loaded.second.suh.dtype == F16
