"""Every op's schema and tags, once.

Scalars are ints, bools and ScalarTypes only: a ``str`` argument leaks in the stable ABI. A rate
travels as ``tile_words``, the int16 words of one packed tile (16 * bits), because that stays an
int at half rates; a codebook travels as its index in ``formats.codebooks.CODEBOOKS``.
"""

import torch

NAMESPACE = "trellis_ops"

_GEMM = (
    "(Tensor x, Tensor trellis, Tensor? suh, Tensor? svh, Tensor? bias, int codebook,"
    " SymInt out_features, ScalarType out_dtype) -> Tensor"
)

# The routed experts of one layer; see trellis_ops/moe_ops.py for what each argument holds.
_MOE_LAYER = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor packed, Tensor table,"
    " Tensor? gate_suh, Tensor? gate_svh, Tensor up_suh, Tensor up_svh,"
    " Tensor down_suh, Tensor down_svh,"
    " Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias,"
    " int gate_codebook, int up_codebook, int down_codebook,"
    " SymInt intermediate, int activation, float limit, bool limit_after, float routed_scale"
)
_MOE = f"({_MOE_LAYER}, ScalarType out_dtype) -> Tensor"

SCHEMAS: dict[str, str] = {
    "trellis_gemm": _GEMM,
    # The same kernel without an autograd formula: registering one costs every eager call about
    # ten microseconds, also under no_grad, which a decode step of a few microseconds would feel.
    "trellis_gemm_inference": _GEMM,
    # The same with rounded activations (ACTS in meta/checks.py); no gradient, and the CPU alone.
    "trellis_gemm_act": _GEMM.replace(") ->", ", int act) ->"),
    "parity_gemm": _GEMM,
    "gemm_input_grad": (
        "(Tensor grad, Tensor trellis, Tensor? suh, Tensor? svh, int codebook,"
        " SymInt in_features, ScalarType out_dtype) -> Tensor"
    ),
    "dequantize": (
        "(Tensor trellis, Tensor? suh, Tensor? svh, int codebook, ScalarType dtype) -> Tensor"
    ),
    "hadamard_128": "(Tensor x) -> Tensor",
    "unpack_trellis": "(Tensor trellis) -> Tensor",
    "pack_trellis": "(Tensor states, int tile_words) -> Tensor",
    "quantize_tiles": "(Tensor tiles, int tile_words, int codebook) -> (Tensor, Tensor)",
    "rank_sliced_moe": _MOE,
    # As with trellis_gemm_inference. "planned" takes its scratch from the caller.
    "rank_sliced_moe_inference": _MOE,
    "rank_sliced_moe_planned": _MOE.replace(") ->", ", Tensor(a!) workspace) ->"),
    "parity_moe": _MOE,
    "moe_grad": f"(Tensor grad, {_MOE_LAYER}) -> (Tensor, Tensor)",
    # Private: force one CUDA route and its share of the matrix (see csrc/cuda/gemm/problem.h).
    "_trellis_gemm_route": _GEMM.replace(") ->", ", int route, int share) ->"),
    # Private: how a product is cut on CUDA (see csrc/cuda_bindings.cpp).
    "_tile_schedule": (
        "(int m, int in_tiles, int out_tiles, int route, int sm_count, int field) -> int"
    ),
    # Private: whether experts' tiles may use wgmma, and whether few routes go their own way.
    "_rank_sliced_moe_route": _MOE.replace(") ->", ", bool wgmma, bool few_routes) ->"),
    # Private: force one instruction set (tests), and name those this machine can run.
    "_trellis_gemm_isa": _GEMM.replace(") ->", ", int isa) ->"),
    "_rank_sliced_moe_isa": _MOE.replace(") ->", ", int isa) ->"),
    "_quantize_tiles_isa": (
        "(Tensor tiles, int tile_words, int codebook, int isa) -> (Tensor, Tensor)"
    ),
    "_cpu_isas": "() -> int",
    # Private: bytes of scratch that rank_sliced_moe needs; sizes are those of one slice, padded.
    "_moe_workspace_bytes": (
        "(int tokens, int top_k, int experts, int slices, int hidden, int intermediate, bool cuda)"
        " -> int"
    ),
    # Private: the instruction set that trellis_gemm runs on for that many rows.
    "_cpu_gemm_isa": "(int rows) -> int",
}

LIBRARY = torch.library.Library(NAMESPACE, "DEF")

for _name, _schema in SCHEMAS.items():
    LIBRARY.define(
        _name + _schema,
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
    )
