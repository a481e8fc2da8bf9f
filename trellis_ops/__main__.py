"""python -m trellis_ops"""

import sys

from .cli import main

sys.exit(main())
