"""Routed experts in every stored layout, their activations, and metadata that disagrees."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import checkpoints as cp  # noqa: E402
from checkpoints import Checkpoint, build, distance, logits  # noqa: E402
from layers import BOUNDS  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from trellis_ops.integrations import experts as places  # noqa: E402
from trellis_ops.integrations.tail import SCHEMA  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "model.layers.1.mlp.experts"
BOUND = 3 * BOUNDS[torch.float32]
TAIL = {
    "format": "exl3-trellis", "bits": 3.0, "codebook": "mcg", "experts_per_layer": 4,
    "moe_layers": [1, 1], "tensor_schema": SCHEMA, "tp": 4,
}  # fmt: skip


def rates(projection: str, expert: int) -> int:
    return 3 + expert % 2


def written(folder, *, tail=None, quantization=None, bits=lambda p, e: 3, **options):
    """(dense model, folder): a GlmMoeDsa whose experts alone are packed."""
    dense = build("GlmMoeDsa", **cp.MOE["GlmMoeDsa"])
    checkpoint = Checkpoint(dense)
    checkpoint.experts(NAME, bits, **options)
    checkpoint.write(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if tail is not None:
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        config["hybrid_tr3_tail"] = tail
    config["quantization_config"] |= quantization or {}
    file.write_text(json.dumps(config))
    return dense, folder


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model


# ---- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        {"slices": 1},
        {"slices": 1, "marked": True},  # tp 1, with .rank0. in the names
        {"slices": 2, "bits": rates},
        {"slices": 4, "tail": TAIL},
        {"slices": 4, "tail": {**TAIL, "bits": "mixed"}, "bits": rates},
        {
            "slices": 4, "shared": "shared_h_v1",
            "tail": {**TAIL, "rotation_layout": "shared_h_v1", "shared_h_tensor_schema": "x"},
        },
        {
            "shared": "r7", "bits": lambda p, e: {"gate": 3, "up": 4, "down": 5}[p],
            "quantization": {"r7_routed_experts": {
                "schema": "r7-complete-v2-checkpoint-v1", "codebook": "mcg",
            }},
        },
    ],
    ids=["whole", "marked", "slices", "tail", "mixed", "shared_h", "r7"],
)  # fmt: skip
def test_every_layout(tmp_path, layout):
    dense, folder = written(tmp_path / "a", **layout)
    model = load(folder)
    module = model.get_submodule(NAME)
    slices = layout.get("slices", 1)
    assert module.layout().slices == slices
    assert distance(logits(model), logits(dense)) < BOUND
    if layout.get("shared"):  # kept once
        assert module.up_suh.shape[0] == slices and module.down_svh.shape[0] == slices
    # Saved with vectors of each expert's own, which other loaders know.
    model.save_pretrained(tmp_path / "b")
    again = load(tmp_path / "b")
    assert torch.equal(logits(again), logits(model))
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    if "tail" in layout:
        assert config["hybrid_tr3_tail"].get("rotation_layout", "per_expert_v1") == "per_expert_v1"
    assert "r7_routed_experts" not in config["quantization_config"]
    if not layout.get("shared"):
        names = set(load_file(folder / "model.safetensors"))
        assert set(load_file(tmp_path / "b" / "model.safetensors")) == names
    again.save_pretrained(tmp_path / "c")
    for file in (tmp_path / "b").iterdir():
        assert file.read_bytes() == (tmp_path / "c" / file.name).read_bytes(), file.name


def test_rates_of_a_plan_beside_the_weights(tmp_path):
    tail = {**TAIL, "bits": "mixed", "bits_per_expert": "tier_bitmap.json:k"}
    _, folder = written(tmp_path, slices=4, tail=tail, bits=rates)
    plan = tmp_path / "tier_bitmap.json"
    plan.write_text(json.dumps({"1": {"k": [3, 4, 3, 4]}, "2": {"tail_tr3": [0, 1, 2, 3]}}))
    load(folder)
    plan.write_text(json.dumps({"1": {"k": [3, 4, 4, 4]}}))
    with pytest.raises(ValueError, match="of expert 2 in layer 1 has 4 bits, and .* has 3"):
        load(folder)
    plan.write_text(json.dumps({"1": {"k": [3, 4, 4]}}))
    with pytest.raises(ValueError, match=r"tier_bitmap\.json: k is no list of bits for each"):
        load(folder)


# ---- metadata -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: None}, f"lacks {name}") for name in TAIL if name != "format"),
        ({"bits": None, "tp": None}, "lacks bits, tp"),
        ({"codebook": "mul1"}, "codebook is 'mul1', expected 'mcg'"),
        ({"moe_layers": [1]}, "moe_layers is [1], expected [first, last]"),
        ({"moe_layers": [-1, 1]}, "moe_layers is [-1, 1], expected [first, last]"),
        ({"moe_layers": [2, 1]}, "moe_layers is [2, 1], expected [first, last]"),
        ({"moe_layers": "1-1"}, "moe_layers is '1-1', expected [first, last]"),
        ({"moe_layers": [0, 1]}, "moe_layers is [0, 1]: some experts in layer 0, and the files"),
        ({"tensor_schema": "x"}, "tensor_schema is 'x', expected 'model.layers.{L}.mlp"),
        ({"tp": 0}, "tp is 0, expected a positive int"),
        ({"tp": 2}, f"tp is 2, and {NAME} has 4"),
        ({"experts_per_layer": 8}, f"experts_per_layer is 8, and {NAME} has 4"),
        ({"bits": 3.5}, "bits is 3.5, expected one of (2, 3, 4, 5, 6), or 'mixed'"),
        ({"bits": 4}, "down of expert 0 in layer 1 has 4 bits, and "),
        ({"rotation_layout": "v9"}, "rotation_layout is 'v9', expected one of"),
        ({"rotation_layout": "shared_h_v1"}, "rotation_layout is 'shared_h_v1', and "),
        ({"nvfp4_keep_per_layer": 64}, "nvfp4_keep_per_layer is 64, expected 0"),
        ({"bits_per_expert": "k"}, "bits_per_expert is 'k', expected 'file.json:field'"),
        ({"bits_per_expert": "../x.json:k"}, "bits_per_expert is '../x.json:k', expected"),
    ],
)
def test_tail_that_is_refused(tail_checkpoint, tmp_path, change, message):
    tail = {name: value for name, value in {**TAIL, **change}.items() if value is not None}
    file = tail_checkpoint / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "hybrid_tr3_tail": tail}))
    with pytest.raises(ValueError) as caught:
        load(tail_checkpoint)
    assert str(caught.value).startswith(f"hybrid_tr3_tail: {message}")


@pytest.fixture(scope="module")
def tail_checkpoint(tmp_path_factory):
    return written(tmp_path_factory.mktemp("tail"), slices=4, tail=TAIL)[1]


def test_modelopt_without_a_tail_is_refused(tmp_path):
    _, folder = written(tmp_path, slices=4, tail={"format": "other"})
    with pytest.raises(ValueError, match="one of modelopt, and its config.json has no hybrid_tr3"):
        load(folder)


def test_r7_of_another_schema_is_refused(tmp_path):
    entry = {"r7_routed_experts": {"schema": "r8"}}
    _, folder = written(tmp_path, shared="r7", quantization=entry)
    with pytest.raises(ValueError, match="schema is 'r8', expected 'r7-complete-v2-checkpoint-v1'"):
        load(folder)


# ---- files --------------------------------------------------------------------------------------


def drop(folder, target, part: str, **added):
    stored = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if part not in name}
    assert len(kept) < len(stored) or added
    target.mkdir()
    save_file(kept | added, target / "model.safetensors")
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (".experts.2.up_proj.rank1.", "up of expert 2, rank slice 1 of 4 is missing, expected 4 e"),
        (".experts.1.", "gate of expert 1, rank slice 0 of 4 is missing, expected 4 experts"),
        (".rank3.", "tp is 4, and model.layers.1.mlp.experts has 3"),
        (".experts.3.", "has 3 experts, expected 4 as the model"),
        (".experts.0.gate_proj.rank0.suh", r"rank0.trellis has no suh \(or legacy su\) beside it"),
    ],
)
def test_missing_pieces_are_named(tail_checkpoint, tmp_path, part, message):
    if part == ".rank3.":  # the sizes of three slices do not fit either
        message = "has 3 rank slices of an intermediate size 512"
    with pytest.raises(ValueError, match=message):
        load(drop(tail_checkpoint, tmp_path / "b", part))


def matrices(stem: str, rows: int, columns: int, bits: float = 3, **options):
    """A matrix's tensors."""
    checkpoint = Checkpoint(nn.Module(), seed=7)
    checkpoint.matrix(stem, rows, columns, bits, "mcg", **options)
    return checkpoint.tensors


@pytest.mark.parametrize(
    ("gone", "added", "message"),
    [
        (
            "nothing",
            {
                **matrices(f"{NAME}.4.gate_proj", 192, 512),
                **matrices(f"{NAME}.4.up_proj", 192, 512),
                **matrices(f"{NAME}.4.down_proj", 512, 192),
            },
            "has 5 experts, expected 4 as the model",
        ),
        (
            f"{NAME}.2.up_proj",
            matrices(f"{NAME}.2.up_proj", 192, 384),
            r"2\.up_proj\.trellis has out_features 384, expected 512 as .*\.0\.up_proj\.trellis",
        ),
        (
            f"{NAME}.0.up_proj",
            matrices(f"{NAME}.0.up_proj", 192, 640),
            r"0\.up_proj\.trellis is 256 x 640, expected 256 x 512 \(in x out, padded\) for the",
        ),
        (
            f"{NAME}.1.down_proj",
            matrices(f"{NAME}.1.down_proj", 512, 192, bias=torch.ones(192)),
            r"1\.down_proj\.trellis and .*0\.down_proj\.trellis: one has a bias, the other none",
        ),
        (
            f"{NAME}.0.down_proj",
            matrices(f"{NAME}.0.down_proj", 512, 192, bias=torch.ones(192)),
            "has biases, and the model's experts have none",
        ),
        ("gate_proj", {}, "has no gate projection, and the model's experts have one"),
        (
            "nothing",
            {f"{NAME}.1.up_proj.scale": torch.ones(1)},
            r"1\.up_proj\.scale is no tensor of an EXL3 matrix",
        ),
        (
            "nothing",
            matrices("model.layers.0.mlp.experts.0.up_proj", 192, 512),
            r"layers\.0\.mlp\.experts\.0\.up_proj\.trellis has no place in the model",
        ),
    ],
    ids=["more", "shape", "first shape", "bias", "biases", "gate", "unknown", "dense layer"],
)
def test_matrices_that_do_not_fit_are_refused(plain_checkpoint, tmp_path, gone, added, message):
    with pytest.raises(ValueError, match=message):
        load(drop(plain_checkpoint, tmp_path / "b", gone, **added))


@pytest.fixture(scope="module")
def plain_checkpoint(tmp_path_factory):
    """Without any other layer packed, so that every gate_proj in it is an expert's."""
    dense = build("GlmMoeDsa", **cp.MOE["GlmMoeDsa"])
    checkpoint = Checkpoint(dense)
    checkpoint.experts(NAME, lambda p, e: 3)
    folder = checkpoint.write(tmp_path_factory.mktemp("plain"))
    return folder


def test_slices_of_a_matrix_share_a_rate(tmp_path):
    _, folder = written(tmp_path / "a", slices=4)
    stem = f"{NAME}.2.up_proj.rank1"
    new = matrices(stem, 192, 128, 4)
    with pytest.raises(ValueError, match=r"rank1\.trellis has 4 bits, expected 3 as .*rank0\.trel"):
        load(drop(folder, tmp_path / "b", stem, **new))


def test_a_matrix_twice_is_refused(tail_checkpoint, tmp_path):
    stored = load_file(tail_checkpoint / "model.safetensors")
    twice = {
        name.replace("gate_proj", "w1"): tensor.clone()
        for name, tensor in stored.items()
        if f"{NAME}.0.gate_proj.rank0" in name
    }
    with pytest.raises(ValueError, match="are the same matrix of an expert"):
        load(drop(tail_checkpoint, tmp_path / "b", "nothing", **twice))


def test_slices_and_whole_matrices_mixed_are_refused(tail_checkpoint, tmp_path):
    stored = load_file(tail_checkpoint / "model.safetensors")
    whole = {
        name.replace(".rank0", ""): tensor.clone()
        for name, tensor in stored.items()
        if f"{NAME}.0.gate_proj.rank0" in name
    }
    with pytest.raises(ValueError, match="some matrices of these experts are rank slices and some"):
        load(drop(tail_checkpoint, tmp_path / "b", ".experts.0.gate_proj", **whole))


def test_shared_vectors(tmp_path):
    _, folder = written(tmp_path / "a", slices=4, shared="shared_h_v1")
    with pytest.raises(ValueError, match=r"up_proj\.rank2\.trellis has no suh"):
        load(drop(folder, tmp_path / "b", "shared_h.up_proj.rank2"))
    vector = torch.ones(256, dtype=torch.float16)
    twice = {f"{NAME}.0.up_proj.rank1.suh": vector}
    with pytest.raises(ValueError, match=r"rank1\.suh is there besides .*shared_h\.up_proj\.rank1"):
        load(drop(folder, tmp_path / "c", "nothing", **twice))
    unused = {f"{NAME}.shared_h.up_proj.rank7.suh": vector}
    with pytest.raises(ValueError, match=r"rank7\.suh is shared by experts, but none of them"):
        load(drop(folder, tmp_path / "d", "nothing", **unused))


def test_codebooks_of_a_projection_differ(tmp_path):
    _, folder = written(tmp_path / "a")
    name = f"{NAME}.2.up_proj.mul1"
    changed = drop(folder, tmp_path / "b", f"{NAME}.2.up_proj.mcg", **{name: cp.marker("mul1")})
    with pytest.raises(ValueError, match=r"2\.up_proj\.trellis has codebook mul1, expected mcg as"):
        load(changed)


# ---- activations and scales ---------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self, function, **attributes) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(2, 512, 128, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(2, 128, 256, device="meta"))
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def _apply_gate(self, both):
        return self.function(*both.chunk(2, dim=-1))


silu = nn.functional.silu


@pytest.mark.parametrize(
    ("function", "limit", "want"),
    [
        (lambda g, u: silu(g) * u, 0.0, ("silu", 0.0, False)),
        (lambda g, u: nn.functional.gelu(g) * u, 0.0, ("gelu", 0.0, False)),
        (
            lambda g, u: nn.functional.gelu(g, approximate="tanh") * u,
            0.0,
            ("gelu_tanh", 0.0, False),
        ),
        (lambda g, u: silu(g.clamp(max=7)) * u.clamp(-7, 7), 7.0, ("silu", 7.0, False)),
        (lambda g, u: silu(g).clamp(max=7) * u.clamp(-7, 7), 7.0, ("silu", 7.0, True)),
        (
            lambda g, u: (
                (u.clamp(-7, 7) + 1) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7))
            ),
            7.0,
            ("swiglu_oai", 7.0, False),
        ),
    ],
)
def test_activation_is_found_by_trying(function, limit, want):
    module = Experts(function, limit=limit)
    dense = places.describe("experts", module)
    assert (dense.activation, dense.limit, dense.limit_after) == want
    assert (dense.experts, dense.hidden, dense.intermediate) == (2, 128, 256)


@pytest.mark.parametrize(
    "function",
    [
        lambda g, u: torch.tanh(g) * u,
        lambda g, u: silu(g) * u * 2,
        lambda g, u: silu(u) * g,
        lambda g, u: silu(g.clamp(max=9)) * u,  # a limit that no attribute tells
        lambda g, u: (u + 1) * g * torch.sigmoid(1.6 * g),
    ],
)
def test_unknown_activation_is_refused(function):
    with pytest.raises(ValueError, match="experts: the experts of Experts compute an activation"):
        places.describe("experts", Experts(function))


@pytest.mark.parametrize(
    ("family", "want"),
    [
        ("GptOss", ("swiglu_oai", 7.0, False)),
        ("DeepseekV4", ("silu", 10.0, False)),
        ("Laguna", ("silu", 0.0, False)),
        ("Glm4Moe", ("silu", 0.0, False)),
    ],
)
def test_activation_of_families(family, want):
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    dense = places.describe("experts", experts_of(family))
    assert (dense.activation, dense.limit, dense.limit_after) == want
    assert dense.biased == dense.transposed == dense.interleaved == (family == "GptOss")


def experts_of(family):
    import importlib

    package = {"GptOss": "gpt_oss", "DeepseekV4": "deepseek_v4", "Laguna": "laguna"}
    name = package.get(family, "glm4_moe")
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    found = [
        c
        for n, c in vars(modeling).items()
        if n.startswith(family) and n.endswith(("Experts", "NaiveMoe"))
    ]
    with torch.device("meta"):
        return found[0](getattr(transformers, f"{family}Config")())


@pytest.mark.parametrize("family", ["Laguna", "Llama"])
@pytest.mark.parametrize("divided", [True, False])
def test_a_divisor_that_no_file_tells(family, divided):
    """Laguna's up_proj is stored divided by 128: by architecture, and the scales have to agree."""
    from trellis_ops import MoeLayout

    layout = MoeLayout.empty((3, 3, 3), experts=2, hidden=128, intermediate=128)
    for name in ("gate_suh", "up_suh"):
        getattr(layout, name).copy_(torch.rand(2, 128) + 0.5)
    if divided:
        layout.up_suh.div_(128)
    divisor = places._UP_DIVISOR.get(family.lower(), 1.0)
    assert divisor == (128.0 if family == "Laguna" else 1.0)
    if divided == (family == "Laguna"):
        places._check_divisor("experts", layout, divisor)
        return
    with pytest.raises(ValueError, match="scales of gate_proj are .* times those of up_proj"):
        places._check_divisor("experts", layout, divisor)


def test_divided_experts_give_the_whole_sum(tmp_path):
    """A tiny Laguna: what is stored divided by 128 comes back in the routed sum."""
    if not hasattr(transformers, "LagunaConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Laguna")
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
    dense = build("Laguna", **options, shared_expert_intermediate_size=160)
    checkpoint = Checkpoint(dense)
    checkpoint.experts(NAME, rates)
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("up_proj.suh"):
            tensor.div_(128)
    model = load(checkpoint.write(tmp_path / "a"))
    assert model.get_submodule(NAME).routed_scale == 128
    assert distance(logits(model), logits(dense)) < BOUND
    plain = model.dequantize()
    assert distance(logits(plain), logits(dense)) < 1e-5


def test_rank_slices_under_the_names_of_deepseek_v4(tmp_path):
    """Other names for everything, no prefix, and a limit inside the activation."""
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek-V4")
    options = {
        "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4,
        "head_dim": 64, "q_lora_rank": 64, "num_experts_per_tok": 2, "n_routed_experts": 4,
        "o_groups": 2, "o_lora_rank": 64, "index_n_heads": 2, "index_head_dim": 64,
        "index_topk": 16, "layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["moe"] * 2,
    }  # fmt: skip
    dense = build("DeepseekV4", **options)
    checkpoint = Checkpoint(dense)
    for i in range(2):
        checkpoint.experts(
            f"model.layers.{i}.mlp.experts",
            rates,
            stem=f"layers.{i}.ffn.experts",
            spelled=("w1", "w3", "w2"),
            slices=2,
        )
    model = load(checkpoint.write(tmp_path))
    module = model.get_submodule(NAME)
    assert (module.activation, module.limit, module.layout().slices) == ("silu", 10.0, 2)
    assert distance(logits(model), logits(dense)) < BOUND


@pytest.mark.parametrize(("projection", "size"), [("up", 160), ("down", 192)])
def test_a_short_bias_of_an_expert_is_refused(tmp_path, projection, size):
    checkpoint = Checkpoint(build("GptOss", **{**cp.MOE["GptOss"], "num_hidden_layers": 1}))
    checkpoint.experts("model.layers.0.mlp.experts", lambda p, e: 3)
    name = f"model.layers.0.mlp.experts.2.{projection}_proj.bias"
    checkpoint.tensors[name] = checkpoint.tensors[name][: size - 1].clone()
    with pytest.raises(ValueError, match=rf"{name} is F16 \[{size - 1}\], expected \[{size}\]"):
        load(checkpoint.write(tmp_path))


def test_dequantize_refuses_before_it_replaces(tmp_path):
    checkpoint = Checkpoint(build("Qwen3Moe", **{**cp.MOE["Qwen3Moe"], "num_hidden_layers": 1}))
    checkpoint.experts("model.layers.0.mlp.experts", lambda p, e: 3)
    cp.pack_linears(checkpoint, skip=("gate",))
    model = load(checkpoint.write(tmp_path))
    before = list(model.modules())
    model.hf_quantizer.placement.experts.clear()
    with pytest.raises(ValueError, match="mlp.experts does not come from a checkpoint"):
        model.dequantize()
    assert list(model.modules()) == before
