"""Look at a process that runs already: `attach(pid)`. See `tessera-prof --help`.

::

    process    finds the process, reads its figures in /proc, and tells whether libkineto waits in it
    sampling   samples CPU, memory and NVML's figures of the process
    tracks     figures over time, their summary, and the trace with counters in it
    daemon     answers the datagrams that libkineto sends
    request    what to record, the folder for it, and what is in the trace
    session    `attach` itself
"""

from __future__ import annotations

from .process import Kineto as Kineto
from .process import NoProcess as NoProcess
from .process import NotYours as NotYours
from .process import Target as Target
from .request import TraceFigures as TraceFigures
from .request import What as What
from .session import Attached as Attached
from .session import AttachOptions as AttachOptions
from .session import attach as attach
from .tracks import SECTIONS as SECTIONS
from .tracks import Track as Track
from .tracks import TrackSummary as TrackSummary

__all__ = [
    "SECTIONS",
    "AttachOptions",
    "Attached",
    "Kineto",
    "NoProcess",
    "NotYours",
    "Target",
    "TraceFigures",
    "Track",
    "TrackSummary",
    "What",
    "attach",
]
