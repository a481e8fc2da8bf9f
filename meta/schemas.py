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

SCHEMAS: dict[str, str] = {
    "trellis_gemm": _GEMM,
    # The same kernel without an autograd formula: registering one costs every eager call about
    # ten microseconds, also under no_grad, which a decode step of a few microseconds would feel.
    "trellis_gemm_inference": _GEMM,
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
    # Private: force one CUDA route and its share of the matrix (see csrc/cuda/gemm/problem.h).
    "_trellis_gemm_route": _GEMM.replace(") ->", ", int route, int share) ->"),
    # Private: force one instruction set (tests), and name those this machine can run.
    "_trellis_gemm_isa": _GEMM.replace(") ->", ", int isa) ->"),
    "_quantize_tiles_isa": (
        "(Tensor tiles, int tile_words, int codebook, int isa) -> (Tensor, Tensor)"
    ),
    "_cpu_isas": "() -> int",
    # Private: the instruction set that trellis_gemm runs on for that many rows.
    "_cpu_gemm_isa": "(int rows) -> int",
}

LIBRARY = torch.library.Library(NAMESPACE, "DEF")

for _name, _schema in SCHEMAS.items():
    LIBRARY.define(
        _name + _schema,
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
    )
