"""What an analysis looks at: any trace or run, as one thing with a timeline, power, telemetry and joules.

`open_source` takes a run file, a Kineto/Chrome trace (gzip too), a folder of ranks, a `Session`, a `Loaded`, a
`RunFile` or a bare `Timeline`: every analysis has the same `trace=` argument and does the same with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, MeasurementError, RecordingError
from ..timeline import Timeline, kineto

if TYPE_CHECKING:  # a Kineto trace needs none of them: what reads run files and attributes is loaded with the first one
    from ..attribute.table import EnergyTable
    from ..profile.runfile import RunFile
    from ..schema import Telemetry
    from ..trace import PowerTrace
    from .slowdown import Slowdown

Progress = Callable[[float], None]


@dataclass(slots=True)
class Source:
    """One recording. `power` is None where none was recorded; `ranks` has one source a rank for a folder of them."""

    name: str
    timeline: Timeline
    power: PowerTrace | None = None
    telemetry: Sequence[Telemetry] = ()
    run: RunFile | None = None
    ranks: Sequence[Source] = ()
    notes: list[str] = field(default_factory=list)
    _energy: EnergyTable | None = None

    def energy(self) -> EnergyTable | None:
        """The attributed joules (computed once; fills `timeline.energy_j`); None where no power was recorded."""
        if self._energy is None and self.power is not None and self.power.columns:
            try:
                self._energy = self._attributed()
            except MeasurementError as exc:
                self.notes.append(f"no joules: {exc.what}")
                self.power = None
        return self._energy

    def tracing(self) -> Slowdown | None:
        """What tracing did to the program; None where nothing was traced, and of several ranks at once.

        Its joules are known once `energy` was asked for.
        """
        from .slowdown import slowdown_of

        return slowdown_of(self.run, self._energy, self.timeline, self.power) if not self.ranks else None

    def _attributed(self) -> EnergyTable:
        if self.run is not None:
            from ..profile.untraced import table_of

            return table_of(self.run, self.timeline)
        from ..attribute.solve import attribute

        assert self.power is not None
        return attribute(self.timeline, self.power)


def open_source(
    trace: Any, *, power: str | Path | PowerTrace | None = None, progress: Progress | None = None
) -> Source:
    """Whatever was given, as a `Source`."""
    if isinstance(trace, Source):
        return trace
    if isinstance(trace, Timeline):
        return Source("trace", trace, _power(power))
    if isinstance(trace, (str, Path)):
        return _of_path(Path(trace), power, progress)
    from ..profile.load import Loaded
    from ..profile.runfile import RunFile

    if isinstance(trace, Loaded):
        return Source("trace", trace.timeline(), trace._power)
    if isinstance(trace, RunFile):
        return _of_run(trace, trace.path.name)
    if hasattr(trace, "run") and hasattr(trace, "records"):  # a Session
        return _of_run(trace.run(), "session")
    raise ArgumentError(
        f"{type(trace).__name__} is no trace", why="an analysis reads a recording",
        fix="give a .tessera file, a Kineto .json or .json.gz, a folder of ranks, a session or a timeline",
    )  # fmt: skip


def _of_path(path: Path, power: str | Path | PowerTrace | None, progress: Progress | None) -> Source:
    if path.is_dir():
        return _of_folder(path, progress)
    if not path.exists():
        raise RecordingError(f"there is no file {path}", fix="give a .tessera run or a Kineto trace")
    if path.suffix == ".tessera":
        from ..profile.runfile import RunFile

        return _of_run(RunFile(path), path.name)
    timeline = kineto.read(path, progress=progress)
    return Source(path.name, timeline, _power(power), notes=list(timeline.notes))


def _power(given: str | Path | PowerTrace | None) -> PowerTrace | None:
    if isinstance(given, (str, Path)):
        from ..profile.powerlog import read_power

        return read_power(given)
    return given


def _of_run(run: RunFile, name: str) -> Source:
    from ..profile.recorded import timeline_of

    power = run.power()
    return Source(
        name, timeline_of(run), power if power.columns else None, run.telemetry(), run, notes=list(run.notes)
    )  # fmt: skip


def _of_folder(path: Path, progress: Progress | None) -> Source:
    """All ranks of a folder, their clocks aligned; the timeline is the merged one.

    In this process: a library must not start others behind a script that has no `if __name__ == "__main__"`. The
    command reads ranks in parallel.
    """
    from .folder import read_folder

    return read_folder(path, progress=progress, workers=1)
