"""What the compiler sees of trellis_ops: schemas, argument checks and fake implementations.

This package knows shapes, dtypes and wording, and nothing of how an op computes its result. It is
imported once by ``trellis_ops``; the shared library and the PyTorch reference only attach
implementations to the schemas defined here, so either may be absent or come first.
"""

from . import checks as checks
from . import fakes as fakes
from . import moe_checks as moe_checks
from .schemas import LIBRARY as LIBRARY
from .schemas import NAMESPACE as NAMESPACE
from .schemas import SCHEMAS as SCHEMAS
