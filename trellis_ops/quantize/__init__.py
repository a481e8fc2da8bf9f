"""Makes EXL3 weights: one matrix (quantize_linear), or a whole model from its Hessians."""

from .hessian import HessianCapture as HessianCapture
from .layer import quantize_linear as quantize_linear
from .model import quantize_model as quantize_model
