"""trellis_ops: EXL3 (ExLlamaV3 trellis) quantised weights as torch.library ops and modules."""

from . import _binary

_binary.load()

from . import _register as _register  # noqa: E402  (implementations follow the library)
from .formats import CODEBOOKS, TrellisTensor  # noqa: E402
from .integrations import load_model, register, save_model  # noqa: E402
from .nn import Exl3Linear, swap_linears  # noqa: E402
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

__version__ = "0.1.0"

register()

__all__ = [
    "CODEBOOKS",
    "Exl3Linear",
    "TrellisTensor",
    "dequantize",
    "hadamard_128",
    "load_model",
    "pack_trellis",
    "parity_gemm",
    "quantize_linear",
    "quantize_tiles",
    "save_model",
    "swap_linears",
    "trellis_gemm",
    "unpack_trellis",
]
