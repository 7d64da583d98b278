"""Merges several ranks into one run: on one clock, with their collectives side by side.

::

    clocks.exchange   at the start and end of a session: ping-pong with rank 0         ──► Offset (in the run file)
    align.align       afterwards: matched collectives end together, whatever clocks say ──► Offset
    merge.merge       run files or Kineto traces of the ranks ──► one Timeline, skew and straggler of each collective
"""

from __future__ import annotations

from .align import align as align
from .clocks import ClockReading as ClockReading
from .clocks import Offset as Offset
from .clocks import exchange as exchange
from .clocks import settle as settle
from .merge import merge as merge

__all__ = ["ClockReading", "Offset", "align", "exchange", "merge", "settle"]
