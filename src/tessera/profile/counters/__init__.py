"""Hardware counters of single kernels in one schema: read by replay (NVIDIA) or from files (AMD, Intel).

    found = replay([sys.executable, "train.py"])      # runs the command again, under ncu
    merged = merge(timeline, found)
    timeline.extra = merged.extra                     # -> Record.sm_occupancy, dram_read_gbps, stall_reasons, ...

`amd.read(path)` and `intel.read(path)` read what rocprof and unitrace wrote.
"""

from __future__ import annotations

from .merge import Merged as Merged
from .merge import merge as merge
from .names import KernelCounters as KernelCounters
from .ncu import Replay as Replay
from .ncu import replay as replay
