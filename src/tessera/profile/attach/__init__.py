"""Look at a process that runs already: `attach(pid)`. See `tessera-prof --help`.

::

    process    who it is                                      kineto     whether libkineto waits in it
    sampling   CPU, memory, NVML's figures of the process     ipc        the datagrams it speaks
    tracks     figures over time, of process and device       daemon     answers them
    export     trace with counters, summary                   request    what to record, and the folder for it
                                                              tracefile  what is in the trace
"""

from __future__ import annotations

from .kineto import Kineto as Kineto
from .process import NoProcess as NoProcess
from .process import NotYours as NotYours
from .process import Target as Target
from .request import What as What
from .session import Attached as Attached
from .session import AttachOptions as AttachOptions
from .session import attach as attach
from .tracefile import TraceFigures as TraceFigures
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
