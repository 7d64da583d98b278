"""`op.all_reduce`: the collective of `tessera.dist`, under the name that programs of operators use."""

from __future__ import annotations

from ..dist.collectives import PendingReduce as PendingReduce
from ..dist.collectives import all_reduce as all_reduce
