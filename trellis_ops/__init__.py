"""trellis_ops: EXL3 (ExLlamaV3 trellis) quantised weights as torch.library ops and modules."""

from . import _binary

_binary.load()

from . import _register as _register  # noqa: E402  (implementations follow the library)
from .formats import CODEBOOKS, MoeFiller, MoeLayout, TrellisTensor  # noqa: E402
from .integrations import (  # noqa: E402
    load_model,
    register_with_transformers,
    save_model,
    swap_linears,
)
from .moe_ops import parity_moe, rank_sliced_moe  # noqa: E402
from .nn import Exl3Linear, Exl3MoE  # noqa: E402
from .ops import (  # noqa: E402
    dequantize,
    hadamard_128,
    pack_trellis,
    parity_gemm,
    quantize_tiles,
    trellis_gemm,
    unpack_trellis,
)
from .quantize import quantize_linear  # noqa: E402
from .workspace import MoePlan, Workspace, moe_plan  # noqa: E402

__version__ = "0.1.0"

register_with_transformers()

__all__ = [
    "CODEBOOKS",
    "Exl3Linear",
    "Exl3MoE",
    "MoeFiller",
    "MoeLayout",
    "MoePlan",
    "TrellisTensor",
    "Workspace",
    "dequantize",
    "hadamard_128",
    "load_model",
    "moe_plan",
    "pack_trellis",
    "parity_gemm",
    "parity_moe",
    "quantize_linear",
    "quantize_tiles",
    "rank_sliced_moe",
    "save_model",
    "swap_linears",
    "trellis_gemm",
    "unpack_trellis",
]
