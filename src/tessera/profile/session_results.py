"""The results of a session: its timeline, power and joules. They can be read while the session runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import MeasurementError
from ..sensors.response_store import keep_learnt

if TYPE_CHECKING:
    from ..attribute.table import EnergyTable
    from ..monitor import EnergyScope
    from ..record import Record
    from ..recording import Recording
    from ..schema import EnergyReport
    from ..timeline.columns import Timeline
    from ..trace import PowerTrace
    from .runfile import RunWriter


def _no_power() -> MeasurementError:
    return MeasurementError(
        "this session measured no power", fix='name it: profile.session(activities=["gpu", "power"])'
    )


class SessionResults:
    """The part of a `Session` that reads. While the session runs, it returns what has been written so far."""

    _writer: RunWriter | None
    _recording: Recording | None
    _scope: EnergyScope | None
    _stopped: bool

    def recording(self) -> Recording:
        """Return what was recorded; while the session runs, what has been written so far."""
        if self._recording is not None:
            return self._recording
        if self._writer is None:
            raise MeasurementError("this session was never started", fix="with profile.session(...) as sess:")
        from .runfile import RunFile

        if not self._stopped:
            self._writer.flush()
            return RunFile(self._writer.path).recording()
        self._recording = RunFile(self._writer.path).recording()
        return self._recording

    def timeline(self) -> Timeline:
        """Return what ran when. Kernels and operators of a window are included once the window has ended."""
        return self.recording().timeline

    def records(self) -> Iterator[Record]:
        """Yield a `Record` for everything on the timeline, in time order; with joules if power was recorded."""
        return self.recording().records()

    def power(self) -> PowerTrace:
        """Return the power samples."""
        power = self.recording().power
        if power is None:
            raise _no_power()
        return power

    def energy(self) -> EnergyTable:
        """Return what the joules were spent on: kernels, operators, regions, modules, steps.

        For a summary or sampled stacks, the rows are shares by time, without an error, as in `tessera report`.
        """
        from ..analyze.answer import find_rows

        return find_rows(self.recording(), keep_learnt(self.recording().energy()))

    def report(self) -> EnergyReport:
        """Return the measured joules of the whole session as an `EnergyReport`, for diff, JSON and rendering."""
        if self._scope is None:
            raise _no_power()
        return self._scope.report()
