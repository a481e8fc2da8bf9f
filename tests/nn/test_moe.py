"""Exl3MoE as a module: construction, state dicts, copies, casts, moves, workspaces, refusals."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
from expecttest import TestCase
from experts import make_experts, routing
from layers import BOUNDS, double, worst_row
from torch import nn

from trellis_ops import Exl3MoE, MoeLayout, Workspace, moe_plan
from trellis_ops.formats.moe import TENSORS

F16 = torch.float16
MIXED = {"gate": (3, 4, 5), "up": (5, 3, 3), "down": (4, 6, 2)}


def mixed(**changed):
    sizes = {"hidden": 200, "intermediate": 300, "biases": True, **changed}
    return make_experts(3, bits=lambda p, e: MIXED[p][e], **sizes)


def make_module(**changed) -> Exl3MoE:
    return Exl3MoE(mixed(**changed).layout())


def call(module: Exl3MoE, tokens: int = 5, **options) -> torch.Tensor:
    torch.manual_seed(1)
    return module(torch.randn(tokens, module.hidden), *routing(tokens, 2, 3), **options)


def same(a: Exl3MoE, b: Exl3MoE) -> None:
    assert torch.equal(call(a), call(b))
    assert list(a.state_dict()) == list(b.state_dict())
    for name, tensor in a.state_dict().items():
        other = b.state_dict()[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert torch.equal(tensor, other), name


# ---- making one -------------------------------------------------------------------------------


def test_from_experts():
    experts = mixed()
    module = Exl3MoE.from_experts(
        *([ranks[0] for ranks in getattr(experts, p)] for p in ("gate", "up", "down")),
        routed_scale=2.5,
        limit=2.0,
    )
    for dtype, bound in BOUNDS.items():
        x = torch.randn(5, 200).to(dtype)
        ids, weights = routing(5, 2, 3)
        y = module(x, ids, weights)
        assert (y.shape, y.dtype) == ((5, 200), dtype)
        assert worst_row(y, experts.want(x, ids, weights, "silu", 2.0, scale=2.5)) <= bound


def test_from_experts_held_in_part_and_without_a_gate():
    experts = make_experts(3, gated=False, absent=(1,))
    ups, downs = ([r and r[0] for r in part] for part in (experts.up, experts.down))
    module = Exl3MoE.from_experts(None, ups, downs, activation="relu2")
    x = torch.randn(5, 256)
    ids, weights = routing(5, 2, 3)
    y = module(x, ids, weights)
    assert worst_row(y, experts.want(x, ids, weights, "relu2")) <= BOUNDS[torch.float32]


def test_from_rank_slices():
    experts = make_experts(3, slices=2, intermediate=128)
    module = Exl3MoE.from_rank_slices(experts.gate, experts.up, experts.down)
    x = torch.randn(5, 256)
    ids, weights = routing(5, 2, 3)
    assert worst_row(module(x, ids, weights), experts.want(x, ids, weights)) <= 5e-4


def test_from_stacked():
    experts = make_experts(3, hidden=200, codebook="mul1", biases=True)

    def stack(projection, kinds):
        parts = [ranks[0] for ranks in getattr(experts, projection)]
        return [torch.stack([getattr(t, kind) for t in parts]) for kind in kinds]

    projections = ("gate", "up", "down")
    module = Exl3MoE.from_stacked(
        *(stack(p, ("trellis", "suh", "svh")) for p in projections),
        codebook="mul1",
        **{f"{p}_bias": stack(p, ("bias",))[0] for p in projections},
        hidden=200,
    )
    same(module, Exl3MoE(experts.layout()))


def test_what_it_says_it_is():
    module = make_module()
    assert repr(module) == (
        "Exl3MoE(experts=3, slices=1, hidden=200, intermediate=300, bits=3.89, codebook=mcg, "
        "activation=silu)"
    )
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert list(module.state_dict()) == [*TENSORS, "codebook"]
    bare = make_module(biases=False).state_dict()
    assert list(bare) == [*(name for name in TENSORS if not name.endswith("bias")), "codebook"]


def test_the_layout_shares_storage():
    module = make_module()
    layout = module.layout()
    for name, tensor in layout.tensors().items():
        assert tensor.data_ptr() == getattr(module, name).data_ptr()
    same(Exl3MoE(layout), module)


def test_one_suh_for_gate_and_up_is_one_parameter():
    experts = mixed(biases=False)
    for gate, up in zip(experts.gate, experts.up, strict=True):
        object.__setattr__(gate[0], "suh", up[0].suh)
    module = Exl3MoE(experts.layout())
    assert "gate_suh" not in module.state_dict()
    x = torch.randn(5, 200)
    ids, weights = routing(5, 2, 3)
    assert worst_row(module(x, ids, weights), experts.want(x, ids, weights)) <= 5e-4
    other = Exl3MoE(module.layout(), device="meta")
    other.load_state_dict(module.state_dict(), assign=True)
    same(other, module)
    assert other.layout().gate_suh is other.layout().up_suh


# ---- state dicts ------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_strict_round_trip(assign):
    module = make_module()
    sizes = module.layout().to("meta")
    other = Exl3MoE(sizes) if assign else Exl3MoE(sizes.materialize())
    result = other.load_state_dict(module.state_dict(), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    same(other, module)
    assert (other.packed.data_ptr() == module.packed.data_ptr()) == assign


def test_from_sizes_alone_and_under_a_prefix(tmp_path):
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": make_module()})})
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    layout = MoeLayout.empty(
        tuple(MIXED.values()),
        experts=3,
        hidden=200,
        intermediate=300,
        biases=("gate_bias", "up_bias", "down_bias"),
        device="meta",
    )
    other = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Exl3MoE(layout)})})
    other.load_state_dict(state, assign=True)
    same(other["mlp"]["experts"], model["mlp"]["experts"])


def test_a_table_of_another_order_is_taken_with_its_words():
    """The table is data: where matrices lie may differ from one file to the next."""
    module = make_module()
    state = copy.deepcopy(module.state_dict())
    half = 8 * 1000
    words = state["packed"]
    state["packed"] = torch.cat((words[-half:], words[:-half]))
    state["table"][..., 0] = (state["table"][..., 0] + half) % len(words)
    with pytest.raises(RuntimeError, match=r"table: MoeLayout: .*within the \d+ words of packed"):
        Exl3MoE(module.layout()).load_state_dict(state)  # the last matrix is cut in two
    layout = module.layout()
    last = layout.trellis(list(layout.pieces())[-1]).numel()
    state["packed"] = torch.cat((words[-last:], words[:-last]))
    state["table"][..., 0] = (module.table[..., 0] + last) % len(words)
    other = Exl3MoE(module.layout().materialize())
    other.load_state_dict(state)
    assert torch.equal(call(other), call(module))
    assert torch.equal(
        other.layout().matrix("down", 2).trellis, module.layout().matrix("down", 2).trellis
    )


class RefusedStateDicts(TestCase):
    maxDiff = None

    def refused(self, module: Exl3MoE, **changed) -> str:
        """One text, whatever strict and assign say; and nothing was loaded."""
        before = copy.deepcopy(module.state_dict())
        state = {**module.state_dict(), **changed}
        state = {f"experts.{k}": v for k, v in state.items() if v is not None}
        texts = set()
        for strict, assign in itertools.product((True, False), (True, False)):
            with self.assertRaises(RuntimeError) as caught:
                nn.ModuleDict({"experts": module}).load_state_dict(
                    state, strict=strict, assign=assign
                )
            lines = str(caught.exception).splitlines()[1:]
            texts.add("\n".join(line.strip() for line in lines))
            for name, tensor in module.state_dict().items():
                assert torch.equal(tensor, before[name])
        assert len(texts) == 1, texts
        return texts.pop()

    def test_refusals(self):
        module = make_module()
        self.assertExpectedInline(
            self.refused(module, codebook=module.codebook + 1),
            """experts.codebook: [2, 2, 2], expected [1, 1, 1]""",
        )
        self.assertExpectedInline(
            self.refused(module, codebook=None),
            """experts.codebook: missing beside experts.packed""",
        )
        self.assertExpectedInline(
            self.refused(module, packed=module.packed.int()),
            """experts.packed: dtype torch.int32, expected torch.int16""",
        )
        self.assertExpectedInline(
            self.refused(module, up_suh=module.up_suh.bfloat16()),
            """experts.up_suh: dtype torch.bfloat16, expected torch.float16""",
        )
        table = module.table.clone()
        table[0, 1, 0, 1] = 64 - 16 * 3
        table[1, 1] = table[0, 1]
        self.assertExpectedInline(
            self.refused(module, table=table),
            """experts.table: MoeLayout: gate of expert 1, rank 0 and up of expert 1, rank 0: overlap in packed""",
        )
        self.assertExpectedInline(
            self.refused(module, packed=module.packed[:-8]),
            """size mismatch for experts.packed: copying a param with shape torch.Size([215032]) from checkpoint, the shape in current model is torch.Size([215040]).""",
        )


def test_missing_and_unexpected_keys_as_any_module():
    module = make_module()
    state = module.state_dict()
    del state["down_svh"]
    state["scale"] = torch.ones(1)
    other = Exl3MoE(module.layout().materialize())
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"down_svh".*Unexpected.*"scale"'):
        other.load_state_dict(state)
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["down_svh"], ["scale"])


# ---- copies, casts, moves ---------------------------------------------------------------------


def test_deepcopy_is_independent():
    module = make_module()
    before = call(module)
    other = copy.deepcopy(module)
    same(other, module)
    other.packed.add_(1)
    other.down_svh.mul_(2)
    assert torch.equal(call(module), before)
    assert not torch.equal(call(other), before)


def test_pickle_and_save_of_the_module():
    module = make_module()
    same(pickle.loads(pickle.dumps(module)), module)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    same(torch.load(buffer, weights_only=False), module)


CASTS = {
    "to bfloat16": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "type": (lambda m: m.type(torch.bfloat16), torch.bfloat16),
    "type of integers": (lambda m: m.type(torch.int32), torch.float32),
    "to device and dtype": (lambda m: m.to("cpu", torch.float16), torch.float16),
    "inside a model": (lambda m: nn.Sequential(m).double()[0], torch.float64),
    "share_memory": (lambda m: m.share_memory(), torch.float32),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_change_no_stored_bit(name):
    cast, dtype = CASTS[name]
    module = make_module()
    state = copy.deepcopy(module.state_dict())
    before = call(module)
    result = cast(module)
    assert result.dtype == dtype
    for key, tensor in result.state_dict().items():
        assert tensor.dtype == state[key].dtype
        assert torch.equal(tensor, state[key])
    assert torch.equal(call(result), before)


def test_meta_and_to_empty():
    module = make_module()
    state = copy.deepcopy(module.state_dict())
    before = call(module)
    module.to("meta")
    y = module(torch.empty(2, 200, device="meta"), *(t.to("meta") for t in routing(2, 2, 3)))
    assert (y.shape, y.device.type) == ((2, 200), "meta")
    module.to_empty(device="cpu")
    module.load_state_dict(state)
    assert torch.equal(call(module), before)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_accelerate_loads_and_offloads(tmp_path, place):
    accelerate = pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")

    class Block(nn.Module):
        def __init__(self, layout):
            super().__init__()
            self.experts = Exl3MoE(layout)
            self.norm = nn.LayerNorm(200, device=layout.device)

        def forward(self, x, ids, weights):
            return self.norm(self.experts(x, ids, weights))

    layout = mixed().layout()
    model = Block(layout)
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    x, routes = torch.randn(3, 200), routing(3, 2, 3)
    want = model(x, *routes)
    loaded = accelerate.load_checkpoint_and_dispatch(
        Block(layout.to("meta")),
        str(tmp_path / "model.safetensors"),
        device_map={"experts": place, "norm": "cpu"},
        offload_folder=str(tmp_path / "offload"),
        force_hooks=True,
    )
    for _ in range(2):
        assert torch.equal(loaded(x, *routes), want)
    assert loaded.experts.packed.dtype == torch.int16
    assert loaded.experts.up_suh.dtype == F16


# ---- workspaces -------------------------------------------------------------------------------


def test_a_workspace_changes_nothing_whatever_lies_in_it():
    small, large = make_module(), Exl3MoE(make_experts(3, intermediate=512).layout())
    plan = large.plan(40, 4)
    workspace = Workspace(plan)
    assert workspace.buffer.nbytes == plan.nbytes
    for fill in (0, 255, 127):
        workspace.buffer.fill_(fill)
        for module, tokens in itertools.product((large, small), (0, 1, 7, 40)):
            assert torch.equal(call(module, tokens, workspace=workspace), call(module, tokens))


def test_a_workspace_of_the_module():
    module = make_module()
    module.workspace = Workspace(module.plan(5, 2))
    want = call(make_module())
    module.workspace.buffer.fill_(255)
    assert torch.equal(call(module), want)
    used = module.workspace.buffer.clone()
    # With a gradient the op keeps to memory of its own.
    module.workspace.buffer.fill_(255)
    x = torch.randn(5, 200, requires_grad=True)
    module(x, *routing(5, 2, 3)).sum().backward()
    assert x.grad.isfinite().all()
    assert module.workspace.buffer.eq(255).all()
    assert not used.eq(255).all()
    # Copies have scratch of their own.
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.workspace.plan == module.workspace.plan
        assert other.workspace.buffer.data_ptr() != module.workspace.buffer.data_ptr()
        assert torch.equal(call(other), want)
    assert len(pickle.dumps(module)) < sum(t.nbytes for t in module.parameters()) + 20000


def test_a_plan_covers_all_that_is_smaller():
    sizes = {"experts": 16, "slices": 2, "hidden": 256, "intermediate": 512}
    for tokens, top_k in itertools.product((1, 3, 17, 1000, 3000, 9000), (1, 2, 3, 5, 8, 16)):
        nbytes = moe_plan(tokens, top_k, **sizes).nbytes
        assert nbytes >= moe_plan(max(tokens - 1, 1), top_k, **sizes).nbytes
        assert nbytes >= moe_plan(tokens, max(top_k - 1, 1), **sizes).nbytes
        for name, less in (("experts", 15), ("slices", 1), ("hidden", 128), ("intermediate", 128)):
            assert nbytes >= moe_plan(tokens, top_k, **{**sizes, name: less}).nbytes


def test_scratch_does_not_grow_with_the_number_of_tokens_beyond_bounds():
    module = make_module()
    assert module.plan(100_000, 8).nbytes == module.plan(2_000, 8).nbytes


class Refusals(TestCase):
    maxDiff = None

    def text(self, function, *kinds) -> str:
        with self.assertRaises(kinds or ValueError) as caught:
            function()
        return str(caught.exception)

    def test_workspaces(self):
        module = make_module()
        workspace = Workspace(module.plan(5, 2))
        self.assertExpectedInline(
            self.text(lambda: call(module, 6, workspace=workspace)),
            """rank_sliced_moe: tokens is 6, expected at most 5 (what the workspace was planned for)""",
        )
        x = torch.randn(5, 200)
        self.assertExpectedInline(
            self.text(lambda: module(x, *routing(5, 3, 3), workspace=workspace)),
            """rank_sliced_moe: top_k is 3, expected at most 2 (what the workspace was planned for)""",
        )
        wide = Exl3MoE(make_experts(3, hidden=384, intermediate=512).layout())
        self.assertExpectedInline(
            self.text(lambda: call(wide, 2, workspace=workspace)),
            """rank_sliced_moe: hidden is 384, expected at most 256 (what the workspace was planned for)""",
        )
        many = Exl3MoE(make_experts(4, slices=2, intermediate=128).layout())
        self.assertExpectedInline(
            self.text(lambda: call(many, 2, workspace=workspace)),
            """rank_sliced_moe: experts is 4, expected at most 3 (what the workspace was planned for)""",
        )
        x.requires_grad_()
        self.assertExpectedInline(
            self.text(lambda: module(x, *routing(5, 2, 3), workspace=workspace)),
            """rank_sliced_moe: workspace is given and x or topk_weights requires grad, expected no gradient with a workspace""",
        )
        sizes = {"experts": 3, "hidden": 200, "intermediate": 300}
        self.assertExpectedInline(
            self.text(lambda: moe_plan(0, 2, **sizes)),
            """moe_plan: max_tokens is 0, expected a positive int""",
        )
        self.assertExpectedInline(
            self.text(lambda: moe_plan(4, 2.0, **sizes)),
            """moe_plan: top_k is 2.0, expected a positive int""",
        )
        self.assertExpectedInline(
            self.text(lambda: moe_plan(4, 2, **sizes, device="meta")),
            """moe_plan: device is meta, expected a cpu or cuda device""",
        )

    def test_construction_and_calls(self):
        layout, bare = mixed().layout(), make_experts(3, gated=False).layout()
        self.assertExpectedInline(
            self.text(lambda: Exl3MoE(layout, activation="swish")),
            """Exl3MoE: activation is 'swish', expected one of ('silu', 'gelu', 'gelu_tanh', 'relu2', 'swiglu_oai')""",
        )
        self.assertExpectedInline(
            self.text(lambda: Exl3MoE(layout, activation="relu2")),
            """Exl3MoE: layout has a gate, expected none for relu2""",
        )
        self.assertExpectedInline(
            self.text(lambda: Exl3MoE(bare)),
            """Exl3MoE: layout has no gate, expected one for silu""",
        )
        module = Exl3MoE(layout)
        self.assertExpectedInline(
            self.text(lambda: module(torch.randn(2, 199), *routing(2, 2, 3))),
            """Exl3MoE: hidden_states has 199 columns, expected hidden 200""",
        )
        ids, weights = routing(2, 2, 3)
        self.assertExpectedInline(
            self.text(lambda: module(torch.randn(3, 200), ids, weights)),
            """rank_sliced_moe: topk_ids has shape [2, 2], expected x's [3] and a last dimension top_k""",
        )


# ---- gradients --------------------------------------------------------------------------------


def test_a_low_rank_update_trains_over_the_frozen_experts():
    experts = mixed()
    module = Exl3MoE(experts.layout())
    x = torch.randn(6, 200)
    ids, weights = routing(6, 2, 3)
    a = torch.zeros(200, 4, requires_grad=True)
    b = torch.randn(4, 200)
    router = torch.randn(200, 2, requires_grad=True)
    weights = weights * torch.sigmoid(x @ router)
    y = module(x + x @ a @ b, ids, weights)
    da, drouter = torch.autograd.grad(y.square().sum(), (a, router))
    h = 1e-3 * da / da.norm()
    plus, minus = (experts.want(x + x @ (s * h) @ b, ids, weights.detach()) for s in (1, -1))
    slope = ((plus**2).sum() - (minus**2).sum()) / 2 / 1e-3
    assert abs(slope - da.norm().item()) <= 2e-3 * slope
    h = 1e-3 * drouter / drouter.norm()
    base = routing(6, 2, 3)[1]
    plus, minus = (
        experts.want(x, ids, base * torch.sigmoid(x @ (router.detach() + s * h))) for s in (1, -1)
    )
    slope = ((plus**2).sum() - (minus**2).sum()) / 2 / 1e-3
    assert abs(slope - drouter.norm().item()) <= 2e-3 * slope
    assert double(y).shape == (6, 200)
