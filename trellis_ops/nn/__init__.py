"""Drop-in modules."""

from .linear import Exl3Linear as Exl3Linear
