"""The interface that compiled packages, exported programs and users rely on."""

from __future__ import annotations

import torch
from expecttest import TestCase

import trellis_ops
from trellis_ops.meta import SCHEMAS

OPS = torch.ops.trellis_ops


class Interface(TestCase):
    maxDiff = None

    def test_schemas(self):
        """Compiled packages and exported programs name ops by these: a change breaks them."""
        public = [name for name in SCHEMAS if not name.startswith("_")]
        lines = [str(getattr(OPS, name).default._schema) for name in public]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
trellis_ops::trellis_gemm(Tensor x, Tensor trellis, Tensor? suh, Tensor? svh, Tensor? bias, int codebook, SymInt out_features, ScalarType out_dtype) -> Tensor
trellis_ops::trellis_gemm_inference(Tensor x, Tensor trellis, Tensor? suh, Tensor? svh, Tensor? bias, int codebook, SymInt out_features, ScalarType out_dtype) -> Tensor
trellis_ops::trellis_gemm_act(Tensor x, Tensor trellis, Tensor? suh, Tensor? svh, Tensor? bias, int codebook, SymInt out_features, ScalarType out_dtype, int act) -> Tensor
trellis_ops::parity_gemm(Tensor x, Tensor trellis, Tensor? suh, Tensor? svh, Tensor? bias, int codebook, SymInt out_features, ScalarType out_dtype) -> Tensor
trellis_ops::gemm_input_grad(Tensor grad, Tensor trellis, Tensor? suh, Tensor? svh, int codebook, SymInt in_features, ScalarType out_dtype) -> Tensor
trellis_ops::dequantize(Tensor trellis, Tensor? suh, Tensor? svh, int codebook, ScalarType dtype) -> Tensor
trellis_ops::hadamard_128(Tensor x) -> Tensor
trellis_ops::unpack_trellis(Tensor trellis) -> Tensor
trellis_ops::pack_trellis(Tensor states, int tile_words) -> Tensor
trellis_ops::quantize_tiles(Tensor tiles, int tile_words, int codebook) -> (Tensor, Tensor)
trellis_ops::rank_sliced_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor packed, Tensor table, Tensor? gate_suh, Tensor? gate_svh, Tensor up_suh, Tensor up_svh, Tensor down_suh, Tensor down_svh, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, int gate_codebook, int up_codebook, int down_codebook, SymInt intermediate, int activation, float limit, bool limit_after, float routed_scale, ScalarType out_dtype) -> Tensor
trellis_ops::rank_sliced_moe_inference(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor packed, Tensor table, Tensor? gate_suh, Tensor? gate_svh, Tensor up_suh, Tensor up_svh, Tensor down_suh, Tensor down_svh, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, int gate_codebook, int up_codebook, int down_codebook, SymInt intermediate, int activation, float limit, bool limit_after, float routed_scale, ScalarType out_dtype) -> Tensor
trellis_ops::rank_sliced_moe_planned(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor packed, Tensor table, Tensor? gate_suh, Tensor? gate_svh, Tensor up_suh, Tensor up_svh, Tensor down_suh, Tensor down_svh, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, int gate_codebook, int up_codebook, int down_codebook, SymInt intermediate, int activation, float limit, bool limit_after, float routed_scale, ScalarType out_dtype, Tensor(a!) workspace) -> Tensor
trellis_ops::parity_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor packed, Tensor table, Tensor? gate_suh, Tensor? gate_svh, Tensor up_suh, Tensor up_svh, Tensor down_suh, Tensor down_svh, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, int gate_codebook, int up_codebook, int down_codebook, SymInt intermediate, int activation, float limit, bool limit_after, float routed_scale, ScalarType out_dtype) -> Tensor
trellis_ops::moe_grad(Tensor grad, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor packed, Tensor table, Tensor? gate_suh, Tensor? gate_svh, Tensor up_suh, Tensor up_svh, Tensor down_suh, Tensor down_svh, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, int gate_codebook, int up_codebook, int down_codebook, SymInt intermediate, int activation, float limit, bool limit_after, float routed_scale) -> (Tensor, Tensor)""",
        )
        for name in SCHEMAS:
            tags = getattr(OPS, name).default.tags
            assert torch.Tag.pt2_compliant_tag in tags
            assert torch.Tag.needs_fixed_stride_order in tags

    def test_public_names(self):
        self.assertExpectedInline(
            "\n".join(trellis_ops.__all__),
            """\
CODEBOOKS
Exl3Linear
Exl3MoE
MoeFiller
MoeLayout
MoePlan
TrellisTensor
Workspace
dequantize
hadamard_128
load_model
moe_plan
pack_trellis
parity_gemm
parity_moe
quantize_linear
quantize_tiles
rank_sliced_moe
save_model
swap_linears
trellis_gemm
unpack_trellis""",
        )
        for name in trellis_ops.__all__:
            assert hasattr(trellis_ops, name)
