"""Power limits and clocks, changed only when asked and put back on every way out.

::

    with actuators.capped("gpu0", cap_w=300): ...      the driver's limit, tightest of all holders
    with actuators.locked("gpu0", sm_mhz=1200): ...    the clocks
    tessera doctor --restore                           after a kill -9

    find ──► Actuator (nvml, amd): reads and sets one GPU, remembers nothing
    hold ──► claims (join, leave, heal) ──► journal on disk, then the actuator, then the journal
      └────► guard: signals, exit, fork, a watcher process for deaths that Python does not see
"""

from __future__ import annotations

from .base import Actuator, PowerLimit
from .discover import find, visible
from .hold import Hold, capped, held, locked
from .journal import Journal
from .outstanding import Outstanding, examine, heal

__all__ = [
    "Actuator",
    "Hold",
    "Journal",
    "Outstanding",
    "PowerLimit",
    "capped",
    "examine",
    "find",
    "heal",
    "held",
    "locked",
    "visible",
]
