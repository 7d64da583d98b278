"""What ran when: the columns of a timeline, and the readers that fill them from traces.

::

    a trace ────► open_trace ─────┐   (kineto, rocprof, xplane, perfetto)
    run file ───► profile.runfile ┴──► Timeline ──► link (operators, regions, steps) ──► attribute, analyze, export
"""

from __future__ import annotations

from .columns import Builder as Builder
from .columns import Launch as Launch
from .columns import Timeline as Timeline

__all__ = ["Builder", "Launch", "Timeline"]
