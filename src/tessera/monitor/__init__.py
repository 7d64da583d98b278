"""Measured energy: `energy_scope`, `power_trace`, `EnergyBenchmark`, and the sampler behind them.

::

    sensors ──► Sampler (one thread) ──► PowerSeries, CounterAnchors ──► Window ──► energy_scope
                                                                    └──► LiveTrace (power_trace)

`default()` is the process's monitor, started at first use; `use(Monitor([...]).start())` replaces it.
"""

from __future__ import annotations

from .benchmark import BenchmarkResult as BenchmarkResult
from .benchmark import EnergyBenchmark as EnergyBenchmark
from .core import Monitor as Monitor
from .core import default as default
from .core import use as use
from .scope import EnergyScope as EnergyScope
from .scope import LiveTrace as LiveTrace
from .scope import energy_scope as energy_scope
from .scope import power_trace as power_trace

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
