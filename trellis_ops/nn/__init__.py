"""Drop-in modules."""

from .linear import Exl3Linear as Exl3Linear
from .moe import Exl3MoE as Exl3MoE
from .parts import Exl3Parts as Exl3Parts
