"""Joules of a training loop between its log lines, without ever waiting for a sensor.

A sensor catches up with a window only some time after it has closed. A log line therefore tells of the stretch that the
line before it closed; the report at the end has all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..monitor.core import Monitor
from ..monitor.scope import EnergyScope
from ..schema import EnergyReport, Work


@dataclass(slots=True)
class _Stretch:
    scope: EnergyScope
    counts: dict[str, float] = field(default_factory=dict)


class Tally:
    """Counts work and joules. `begin`, then `add` for every step, `line` for every log line, `end`."""

    def __init__(self, name: str, monitor: Monitor | None = None) -> None:
        self._name = name
        self._monitor = monitor
        self._whole: EnergyScope | None = None
        self._now: _Stretch | None = None
        self._before: _Stretch | None = None
        self.counts: dict[str, float] = {}

    def begin(self) -> None:
        """Start to count; a loop that begins again starts anew."""
        self._whole = EnergyScope(self._name, monitor=self._monitor)
        self._whole.__enter__()
        self.counts, self._before = {}, None
        self._now = self._opened()

    def add(self, **work: float | None) -> None:
        """Work that was done: step=1, sample=64, token=8192. None is not known, and not counted."""
        for counts in (self.counts, self._now.counts if self._now else {}):
            for unit, amount in work.items():
                if amount is not None:
                    counts[unit] = counts.get(unit, 0.0) + amount

    def line(self) -> dict[str, float]:
        """What the stretch before this line spent; empty at the first one."""
        if self._now is None:
            return {}
        self._now.scope.__exit__(None, None, None)
        told = _figures(self._before) if self._before is not None else {}
        self._before, self._now = self._now, self._opened()
        return told

    def end(self) -> EnergyReport | None:
        """Everything from begin to end; waits until the sensor has seen it."""
        if self._whole is None or self._now is None:
            return None
        self._now.scope.__exit__(None, None, None)
        self._whole.__exit__(None, None, None)
        import dataclasses

        work = [Work(unit=unit, amount=amount) for unit, amount in self.counts.items()]
        report = dataclasses.replace(self._whole.report(), work=work)
        self._whole = self._now = None
        return report

    def _opened(self) -> _Stretch:
        stretch = _Stretch(EnergyScope(f"{self._name} log", monitor=self._monitor))
        stretch.scope.__enter__()
        return stretch


def _figures(stretch: _Stretch) -> dict[str, float]:
    energy = stretch.scope.energy
    if not energy.joules >= 0:
        return {}
    found = {"energy_j": energy.joules, "energy_error_j": energy.error_j}
    if energy.watts is not None:
        found["power_w"] = energy.watts
    return found | {f"j_per_{unit}": energy.joules / n for unit, n in stretch.counts.items() if n > 0}
