"""Other libraries' models as EXL3 checkpoints (transformers)."""

from .causal_lm import load_model as load_model
from .causal_lm import save_model as save_model
