"""Sets power limits and clocks of GPUs. They change only when you ask, and are restored however the process ends.

::

    with actuators.cap_power("gpu0", cap_w=300): ...      the driver's power limit
    with actuators.lock_clocks("gpu0", sm_mhz=1200): ...  the SM clock
    with actuators.smooth_power("gpu0", floor_percent=60): ...   Blackwell's power smoothing
    with actuators.use_power_profiles("gpu0", "max_q"): ...      Blackwell's workload power profiles
    tessera doctor --restore                              after a kill -9

    find_gpu ──► Actuator (nvml, amd): reads and sets one GPU, keeps no state
    hold_gpus ─► claims: journal on disk, then the driver, then the journal again
      └────────► guard: signals, exit, fork, and a watcher process for deaths that Python does not see
"""

from __future__ import annotations

from .actuator import Actuator, PowerLimit, find_gpu, list_gpus
from .hold import GpuHold, cap_power, hold_gpus, lock_clocks, smooth_power, use_power_profiles
from .journal import Journal
from .restore import OutstandingChange, check_limits, check_smoothing, list_outstanding, restore_outstanding
from .smoothing import PowerSmoothing

__all__ = [
    "Actuator",
    "GpuHold",
    "Journal",
    "OutstandingChange",
    "PowerLimit",
    "PowerSmoothing",
    "cap_power",
    "check_limits",
    "check_smoothing",
    "find_gpu",
    "hold_gpus",
    "list_gpus",
    "list_outstanding",
    "lock_clocks",
    "restore_outstanding",
    "smooth_power",
    "use_power_profiles",
]
