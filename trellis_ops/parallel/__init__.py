"""Models split over processes: tensor-parallel linears, expert-parallel and rank-sliced MoE."""

from .group import Shard as Shard
from .group import current_shard as current_shard
from .group import sharded as sharded
from .layers import SPLIT as SPLIT
from .layers import ColumnParallelLinear as ColumnParallelLinear
from .layers import ParallelMoE as ParallelMoE
from .layers import RowParallelLinear as RowParallelLinear
from .slicing import cut as cut
from .slicing import slice_columns as slice_columns
from .slicing import slice_rows as slice_rows
