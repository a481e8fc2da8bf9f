"""Makes EXL3 weights: one matrix (quantize_linear), or a whole model from its Hessians."""

from .layer import quantize_linear as quantize_linear
