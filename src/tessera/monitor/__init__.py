"""Measured energy: `energy_scope`, `power_trace`, `EnergyBenchmark`, and the sampler behind them.

::

    sensors ──► Sampler (one thread) ──► Series, Anchors ──► Window ──► energy_scope
                                                        └──► LiveTrace (power_trace)

`default()` is the process's monitor, started at first use; `use(Monitor([...]).start())` replaces it.
"""

from __future__ import annotations

from .benchmark import EnergyBenchmark as EnergyBenchmark
from .core import Monitor as Monitor
from .core import default as default
from .core import use as use
from .live import LiveTrace as LiveTrace
from .live import power_trace as power_trace
from .result import BenchmarkResult as BenchmarkResult
from .scope import EnergyScope as EnergyScope
from .scope import energy_scope as energy_scope

__all__ = [
    "BenchmarkResult",
    "EnergyBenchmark",
    "EnergyScope",
    "LiveTrace",
    "Monitor",
    "default",
    "energy_scope",
    "power_trace",
    "use",
]
