"""What a session has recorded: its timeline, power and joules, also while it runs."""

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
    """The part of a `Session` that is read. While it runs: what has been written so far."""

    _writer: RunWriter | None
    _recording: Recording | None
    _scope: EnergyScope | None
    _stopped: bool

    def recording(self) -> Recording:
        """What was recorded; while the session runs, what has been written so far."""
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
        """What ran when. Kernels and operators of a window are in it once the window has ended."""
        return self.recording().timeline

    def records(self) -> Iterator[Record]:
        """Everything on the timeline, one `Record` each, in time order, with its joules where power was recorded."""
        return self.recording().records()

    def power(self) -> PowerTrace:
        """The power samples."""
        power = self.recording().power
        if power is None:
            raise _no_power()
        return power

    def energy(self) -> EnergyTable:
        """What the joules were spent on: kernels, operators, regions, modules, steps.

        Of a summary or of sampled stacks the rows are shares by time, without an error, as in `tessera report`.
        """
        from ..analyze.answer import find_rows

        return find_rows(self.recording(), keep_learnt(self.recording().energy()))

    def report(self) -> EnergyReport:
        """The measured joules of the whole session as an `EnergyReport`, for diff, JSON and rendering."""
        if self._scope is None:
            raise _no_power()
        return self._scope.report()
