"""Joules of a training loop between its log lines, without waiting for a sensor.

A sensor catches up with a window only some time after it has closed. A log line therefore has the energy of the
interval that the line before it closed; the report at the end has all of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from ..monitor.core import Monitor
from ..monitor.scope import EnergyScope
from ..schema import EnergyReport, Work


@dataclass(slots=True)
class _Interval:
    scope: EnergyScope
    counts: dict[str, float] = field(default_factory=dict)


class TrainingEnergy:
    """Counts work and joules: call `begin`, then `add` for every step, `log` for every log line, and `end`."""

    def __init__(self, name: str, monitor: Monitor | None = None) -> None:
        self._name = name
        self._monitor = monitor
        self._whole: EnergyScope | None = None
        self._current: _Interval | None = None
        self._closed: _Interval | None = None
        self.counts: dict[str, float] = {}

    def begin(self) -> None:
        """Start counting; a second call starts again from zero."""
        self._whole = EnergyScope(self._name, monitor=self._monitor)
        self._whole.__enter__()
        self.counts, self._closed = {}, None
        self._current = self._open_interval()

    def add(self, **work: float | None) -> None:
        """Add work that was done: step=1, sample=64, token=8192. None means unknown, and is not counted."""
        for counts in (self.counts, self._current.counts if self._current else {}):
            for unit, amount in work.items():
                if amount is not None:
                    counts[unit] = counts.get(unit, 0.0) + amount

    def log(self) -> dict[str, float]:
        """Close the current interval and return the figures of the one before it; empty at the first call."""
        if self._current is None:
            return {}
        self._current.scope.__exit__(None, None, None)
        figures = _figures(self._closed) if self._closed is not None else {}
        self._closed, self._current = self._current, self._open_interval()
        return figures

    def end(self) -> EnergyReport | None:
        """Everything from begin to end; waits until the sensor has caught up."""
        if self._whole is None or self._current is None:
            return None
        self._current.scope.__exit__(None, None, None)
        self._whole.__exit__(None, None, None)
        work = [Work(unit=unit, amount=amount) for unit, amount in self.counts.items()]
        report = dataclasses.replace(self._whole.report(), work=work)
        self._whole = self._current = None
        return report

    def _open_interval(self) -> _Interval:
        interval = _Interval(EnergyScope(f"{self._name} log", monitor=self._monitor))
        interval.scope.__enter__()
        return interval


def _figures(interval: _Interval) -> dict[str, float]:
    energy = interval.scope.energy
    if not energy.energy_j >= 0:
        return {}
    figures = {"energy_j": energy.energy_j, "error_j": energy.error_j}
    if energy.power_w is not None:
        figures["power_w"] = energy.power_w
    return figures | {f"j_per_{unit}": energy.energy_j / n for unit, n in interval.counts.items() if n > 0}
