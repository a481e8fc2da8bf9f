"""Pure PyTorch implementations of every op, on any device: plain, slow, and the right answer.

``parity_gemm`` and ``parity_moe`` *are* this code on every device. ``register`` also attaches it
where no kernel of the shared library exists.
"""

from .gemm import dequantize as dequantize
from .gemm import hadamard_128 as hadamard_128
from .gemm import input_grad as input_grad
from .gemm import linear as linear
from .moe import experts as experts
from .moe import experts_grad as experts_grad
from .search import quantize_tiles as quantize_tiles
