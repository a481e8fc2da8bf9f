"""Other libraries' models as EXL3 checkpoints (transformers)."""

from ._registration import register_with_transformers as register_with_transformers
from .loading import load_model as load_model
from .saving import save_model as save_model
from .swap import swap_linears as swap_linears
