"""Opens whatever was recorded, by Tessera or by another tool, as a `Recording`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import ArgumentError, RecordingError
from ..recording import Facts, Recording
from ..timeline import Timeline
from ..timeline.open_trace import read_trace
from ..timeline.rocprof import KERNELS
from ..trace import PowerTrace

Progress = Callable[[float], None]
OTHERS = ("AMD", "Intel", "MTIA", "ARTEMIS")
"""How device names begin if their sensor is not NVML."""


def load(
    trace: str | Path,
    power: str | Path | PowerTrace | None = None,
    *,
    progress: Progress | None = None,
    frames: bool = False,
) -> Recording:
    """Read a trace (Kineto, Chrome, rocprofv3, JAX, Perfetto) or a run file, and a power log of the same time.

    The log is a CSV (epoch_us, domain, watts; or that of nvidia-smi, amd-smi, rocm-smi or xpu-smi) or a `PowerTrace`.

    `frames` keeps the Python frames of a trace that was recorded `with_stack=True`, which are most of its events.

    >>> profile.load("trace.json.gz", power="power.csv").energy().top(5)
    """
    path = Path(trace)
    if path.suffix == ".tessera" or path.is_dir():
        return open_recording(path, power=power, progress=progress)
    timeline = read_trace(path, progress=progress, frames=frames)
    _add_rocprof_counters(path, timeline)
    return Recording(timeline, _read_power(power, timeline), facts=Facts(name=path.name, path=path))


def _add_rocprof_counters(path: Path, timeline: Timeline) -> None:
    """Add the counters that rocprofv3 wrote beside its trace of kernels (`--kernel-trace --pmc ...`)."""
    beside = path.with_name(path.name.removesuffix(KERNELS) + "_counter_collection.csv")
    if path.name.endswith(KERNELS) and beside.exists():
        from .counters import amd, merge

        merged = merge(timeline, amd.read(beside))
        timeline.extra = merged.extra
        timeline.notes += merged.notes()


def open_recording(
    recorded: object,
    *,
    power: str | Path | PowerTrace | None = None,
    progress: Progress | None = None,
    frames: bool = False,
) -> Recording:
    """Open a run file, a Kineto trace, a folder of ranks, a session or a timeline as a `Recording`.

    `power` is a log for a recording without its own power samples. `frames` keeps the Python frames of a trace.
    """
    recording = _open(recorded, progress, frames)
    if power is None or recording.power is power:
        return recording
    if recording.power is not None:
        fix = "leave the power log out"
        if path := recording.facts.path:
            fix += f" (tessera report {path}), or export its trace first: tessera export {path} --chrome trace.json"
        raise ArgumentError(
            f"{recording.facts.name} has its own power samples",
            why="a power log is for a trace without them",
            fix=fix,
        )
    recording.power = _read_power(power, recording.timeline)
    return recording


def _open(recorded: object, progress: Progress | None, frames: bool) -> Recording:
    if isinstance(recorded, Recording):
        return recorded
    if isinstance(recorded, Timeline):
        return Recording(recorded)
    if isinstance(recorded, (str, Path)):
        return _open_path(Path(recorded), progress, frames)
    from .recorder import Session
    from .runfile import RunFile

    if isinstance(recorded, (RunFile, Session)):
        return recorded.recording()
    raise ArgumentError(
        f"{type(recorded).__name__} is not a recording",
        fix="give a .tessera file, a Kineto .json or .json.gz, a folder of ranks, a session or a timeline",
    )


def _open_path(path: Path, progress: Progress | None, frames: bool) -> Recording:
    if path.is_dir():
        from .ranks.merge import merge

        # With one worker: a library must not start processes in a script without `if __name__ == "__main__"`.
        return merge(path, progress=progress, workers=1)
    if not path.exists():
        raise RecordingError(f"{path} does not exist", fix="give a .tessera run or a Kineto trace")
    if path.suffix == ".tessera":
        from .runfile import RunFile

        return RunFile(path).recording()
    return load(path, progress=progress, frames=frames)


def _read_power(power: str | Path | PowerTrace | None, timeline: Timeline) -> PowerTrace | None:
    if isinstance(power, (str, Path)):
        from .powerlog import read_power

        named = [str(p.get("name") or "") for p in timeline.device_properties]
        is_other = any(name.startswith(OTHERS) for name in named)
        return read_power(power, of_nvidia=not is_other)
    return power
