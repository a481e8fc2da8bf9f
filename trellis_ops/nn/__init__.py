"""Drop-in modules."""

from .linear import Exl3Linear as Exl3Linear
from .parts import Exl3Parts as Exl3Parts
from .swap import swap_linears as swap_linears
