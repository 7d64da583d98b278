"""Traces and power logs of other tools, read as a session would have recorded them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MeasurementError
from ..record import Record
from ..timeline import Timeline, kineto
from ..trace import PowerTrace

if TYPE_CHECKING:
    from ..attribute.table import EnergyTable


class Loaded:
    """A trace, with the power log of the same time where there is one: what a `Session` answers, of any recording."""

    def __init__(self, timeline: Timeline, power: PowerTrace | None) -> None:
        self._timeline = timeline
        self._power = power
        self._energy: EnergyTable | None = None

    def timeline(self) -> Timeline:
        """What ran when."""
        return self._timeline

    def power(self) -> PowerTrace:
        """Watts over time."""
        if self._power is None:
            raise MeasurementError(
                "this trace has no power log",
                why="joules need watts",
                fix="give a power log of the same time: power='power.csv', or --power power.csv",
            )
        return self._power

    def energy(self) -> EnergyTable:
        """Joules by kernel, operator, region, module and step."""
        if self._energy is None:
            from ..attribute.solve import attribute

            self._energy = attribute(self._timeline, self.power())
        return self._energy

    def records(self) -> Iterator[Record]:
        """Every record in time order, with its joules where there is power."""
        if self._power is not None:
            self.energy()
        return self._timeline.records()


def load(
    trace: str | Path, power: str | Path | PowerTrace | None = None, *, progress: Callable[[float], None] | None = None
) -> Loaded:
    """Read a Kineto or Chrome trace, and a power log (epoch_us, domain, watts; nvidia-smi's CSV; or a `PowerTrace`).

    >>> profile.load("trace.json.gz", power="power.csv").energy().top(5)
    """
    from .powerlog import read_power

    log = power if isinstance(power, PowerTrace) or power is None else read_power(power)
    return Loaded(kineto.read(trace, progress=progress), log)
