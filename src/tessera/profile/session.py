"""`profile.session(...)`: checks the options of a session, and decides where its run file goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Never

from ..errors import ArgumentError
from ..job_rank import find_rank
from .options import ACTIVITIES, Activity, Mode, SessionOptions, check_keywords, choose_mode
from .recorder import Session
from .tracing_schedule import TracingSchedule

if TYPE_CHECKING:
    from .export import Exporter


def default_path(name: str = "session", *, folder: bool = False) -> Path:
    """Return `runs/NAME.tessera`, or the first free one of NAME-2, NAME-3 ...; with `.rankN` if this is a rank.

    With `folder`, ranks share a folder: runs/NAME/rankN.tessera, or runs/NAME.JOB/rankN.tessera if the job has a name.
    """
    me = find_rank() if folder else None
    job = f".{me.job}" if me is not None and me.job else ""
    number = 1
    name = name if name.strip(".") else "run"  # a name of dots would be another folder
    while True:
        base = Path("runs", (name if number == 1 else f"{name}-{number}") + job)
        path = rank_path(base) if me is not None else with_rank(base.with_name(f"{base.name}.tessera"))
        if not path.exists():
            return path
        number += 1


def with_rank(path: Path) -> Path:
    """Return NAME.rankN.tessera for NAME.tessera if a launcher says that this process is rank N of a job."""
    me = find_rank()
    return path.with_suffix(f".rank{me.rank}{path.suffix}") if me is not None else path


def rank_path(folder: Path) -> Path:
    """Return the file of this rank in the folder of its job."""
    me = find_rank()
    return folder / f"rank{me.rank if me is not None else 0}.tessera"


def session(
    activities: Sequence[Activity] | None = None,
    *,
    mode: Mode | Literal["timeline", "kernels"] | None = None,
    operator_steps: int | None = None,
    record_shapes: bool = True,
    with_stack: bool = False,
    with_modules: bool = False,
    sample_interval_ms: float | None = None,
    exporters: Sequence[Exporter] = (),
    tensorboard_dir: str | Path | None = None,
    path: str | Path | None = None,
    schedule: TracingSchedule | None = None,
    flush_s: float | None = None,
    limit_s: float | None = None,
    align_clocks: bool = False,
    **unknown: Never,
) -> Session:
    """Record a `with` block: kernels, copies, collectives, operators, regions, and the power beside them.

    >>> with profile.session(activities=["gpu", "memcpy", "collective", "power"]) as sess:
    ...     step()
    >>> print(sess.energy())

    The mode "light", the default, records every kernel of the whole block at a few percent of its time, and operators,
    shapes and modules in `operator_steps` steady steps (three; 0 for none). "operators" also records every event of the
    host, and slows the program; stacks and "memory" need this mode. "sampling" traces nothing (power, clocks and Python
    stacks only). "summary" adds up what each name took and forgets the events. The former names "timeline" (operators)
    and "kernels" (light without operators) work too. See `SessionOptions` for the rest. The run file is `path`, or a
    file in `runs/`, and is written as the run happens.
    """
    if unknown:
        known = (*SessionOptions.__dataclass_fields__, "exporters", "tensorboard_dir", "path", "schedule")
        check_keywords(unknown, known)
    if isinstance(activities, str):
        raise ArgumentError(f"activities={activities!r} is one word", fix=f"give a list of: {', '.join(ACTIVITIES)}")
    if schedule is not None and not isinstance(schedule, TracingSchedule):
        raise ArgumentError(
            f"schedule={schedule!r} is not one of ours",
            fix="profile.trace_schedule(wait=..., warmup=..., active=..., repeat=...)",
        )
    chosen, steps = choose_mode(mode, operator_steps, for_all=with_stack or "memory" in (activities or ()))
    options = SessionOptions(
        mode=chosen,
        operator_steps=steps,
        activities=None if activities is None else tuple(activities),
        record_shapes=record_shapes,
        with_stack=with_stack,
        with_modules=with_modules,
        sample_interval_ms=sample_interval_ms,
        flush_s=flush_s,
        limit_s=limit_s,
        align_clocks=align_clocks,
    )
    writers = _check_exporters(exporters)
    if tensorboard_dir is not None:
        from .export import TensorBoard

        if not isinstance(tensorboard_dir, (str, Path)):
            raise ArgumentError(f"tensorboard_dir={tensorboard_dir!r} is not a folder", fix='tensorboard_dir="runs"')
        writers.append(TensorBoard(tensorboard_dir))
    if path is not None:
        return Session(options, exporters=writers, path=with_rank(Path(path)), schedule=schedule)
    return Session(options, exporters=writers, path=default_path(), next_path=default_path, schedule=schedule)


def _check_exporters(exporters: Sequence[Exporter]) -> list[Exporter]:
    """Check the exporters before the work begins: an error after it would come too late."""
    if isinstance(exporters, (str, Path)) or hasattr(exporters, "write"):
        raise ArgumentError(f"exporters={exporters!r} is not a list", fix=f"exporters=[{_exporter_of(exporters)}]")
    for exporter in exporters:
        if isinstance(exporter, type) or not callable(getattr(exporter, "write", None)):
            raise ArgumentError(
                f"exporters=[{exporter!r}] is not a list of exporters",
                why="an exporter has a format, and writes the run when the session ends",
                fix=f"exporters=[{_exporter_of(exporter)}]",
            )
        if callable(check := getattr(exporter, "check", None)):
            check()
    return list(exporters)


_FORMS = {".csv": "summary", ".parquet": "parquet"}


def _exporter_of(value: object) -> str:
    """Return the code for the exporter that the user probably meant."""
    if not isinstance(value, (str, Path)):
        return (
            repr(value) if hasattr(value, "write") and not isinstance(value, type) else 'profile.chrome("trace.json")'
        )
    text = str(value)
    form = "otlp" if text.startswith(("http://", "https://")) else _FORMS.get(Path(text).suffix, "chrome")
    return f'profile.{form}("{text}")'
