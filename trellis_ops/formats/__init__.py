"""The EXL3 format: codebooks, rates, tile order, packing, and one layer's tensors."""

from .codebooks import CODEBOOKS as CODEBOOKS
from .codebooks import MARKERS as MARKERS
from .codebooks import codebook_table as codebook_table
from .moe import MoeLayout as MoeLayout
from .moe_build import MoeFiller as MoeFiller
from .tensor import TrellisTensor as TrellisTensor
