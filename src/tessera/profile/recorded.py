"""What a session recorded: its run file, and what is read from it."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import MeasurementError

if TYPE_CHECKING:
    from ..attribute.table import EnergyTable
    from ..monitor import EnergyScope
    from ..record import Record
    from ..schema import EnergyReport, Telemetry
    from ..timeline.columns import Timeline
    from ..trace import PowerTrace
    from .runfile import RunFile, RunWriter


def timeline_of(run: RunFile) -> Timeline:
    """The timeline of a run, with the hardware counters of its replay where there was one."""
    from .counters import KernelCounters, merge

    timeline = run.timeline()
    kept = run.get("counters")
    if kept:
        found = merge(timeline, msgspec.convert(kept, list[KernelCounters]))
        timeline.extra = found.extra
        timeline.notes += found.notes()
    return timeline


def with_state(records: Iterable[Record], telemetry: Sequence[Telemetry]) -> Iterator[Record]:
    """Records of a device with what it said of itself then: watts, temperature, throttling."""
    by_device: dict[str, list[Telemetry]] = {}
    for row in telemetry:
        by_device.setdefault(row.domain, []).append(row)
    times = {domain: [t.time_ns for t in rows] for domain, rows in by_device.items()}
    for record in records:
        if record.energy_j is not None and record.seconds > 0 and record.power_w is None:
            record.power_w = record.energy_j / record.seconds
        domain = f"gpu{record.device}"
        if record.device is not None and domain in times:
            place = max(bisect.bisect_right(times[domain], record.start_ns) - 1, 0)
            state = by_device[domain][place]
            record.temp_c = state.temperature_c
            record.throttle_reason = ", ".join(state.throttle) if state.throttle else None
        yield record


class Recorded:
    """The side of a `Session` that is read; while it runs, what has been written so far."""

    path: Path
    _writer: RunWriter | None
    _scope: EnergyScope | None
    _table: EnergyTable | None
    _stopped: bool

    def run(self) -> RunFile:
        """The run file, as far as it is written."""
        from .runfile import RunFile

        if self._writer is None:
            raise MeasurementError(
                "this session was never started", fix="use it as: with profile.session(...) as sess:"
            )
        if not self._stopped:
            self._writer.flush()
        return RunFile(self.path)

    def timeline(self) -> Timeline:
        """What ran when. Kernels and operators of a window are in it once the window has ended."""
        with self.run() as run:
            return timeline_of(run)

    def records(self) -> Iterator[Record]:
        """Everything on the timeline, one `Record` each, in time order, with its joules where power was recorded."""
        with self.run() as run:
            timeline = timeline_of(run)
            telemetry = run.telemetry()
            with contextlib.suppress(MeasurementError):  # without power a record's joules are None, and it says why
                self._account(run, timeline)
        return with_state(timeline.records(), telemetry)

    def _account(self, run: RunFile, timeline: Timeline) -> EnergyTable:
        from .energy import energy
        from .untraced import traced, untraced

        # Sampling mode traces nothing: its regions and steps come from the samples of all domains.
        table = energy(run, timeline) if traced(timeline, run.domains) or not run.domains else untraced(run, timeline)
        if self._stopped:
            self._table = table
        return table

    def power(self) -> PowerTrace:
        """The power samples, in epoch time."""
        with self.run() as run:
            return run.power()

    def energy(self) -> EnergyTable:
        """What the joules were spent on: kernels, operators, regions, modules, steps."""
        if self._table is not None and self._stopped:
            return self._table
        with self.run() as run:
            return self._account(run, timeline_of(run))

    def report(self) -> EnergyReport:
        """The measured joules of the whole session as an `EnergyReport`, for diff, JSON and rendering."""
        if self._scope is None:
            raise MeasurementError(
                "this session measured no power", fix='name it: profile.session(activities=["gpu", "power"])'
            )
        return self._scope.report()
