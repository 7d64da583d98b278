"""Power limits and clocks of GPUs. They change only when you ask, and are restored on every way out.

::

    with actuators.cap_power("gpu0", cap_w=300): ...      the driver's power limit
    with actuators.lock_clocks("gpu0", sm_mhz=1200): ...  the SM clock
    tessera doctor --restore                              after a kill -9

    find_gpu ──► Actuator (nvml, amd): reads and sets one GPU, keeps no state
    hold_gpus ─► claims: journal on disk, then the driver, then the journal again
      └────────► guard: signals, exit, fork, and a watcher process for deaths that Python does not see
"""

from __future__ import annotations

from .actuator import Actuator, PowerLimit, find_gpu, list_gpus
from .hold import GpuHold, cap_power, hold_gpus, lock_clocks
from .journal import Journal
from .restore import OutstandingChange, check_limits, list_outstanding, restore_outstanding

__all__ = [
    "Actuator",
    "GpuHold",
    "Journal",
    "OutstandingChange",
    "PowerLimit",
    "cap_power",
    "check_limits",
    "find_gpu",
    "hold_gpus",
    "list_gpus",
    "list_outstanding",
    "lock_clocks",
    "restore_outstanding",
]
