"""Records what a program runs and what it draws: sessions, regions, marks, counters, and the run file.

::

    from tessera import profile

    with profile.session(activities=["gpu", "memcpy", "collective", "power"]) as sess:
        for batch in data:
            with profile.region("forward"):
                loss = model(batch)
            ...
            sess.step()
    print(sess.energy())                     # joules by kernel, operator, region, module, step
    sess.path                                # runs/session.tessera: `tessera report` shows it again

Modules: `session`, `recorder`, `assemble` and `ending` hold it together; `tracing`, `kineto_collector` and
`torch_hooks` trace; `power_feed` and `sampling` sample; `summary_mode` adds up; `runfile` keeps; `export` writes other
tools' forms; `launch` runs a script unchanged (`tessera run`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .recorder import Session as Session
from .region import counter as counter
from .region import mark as mark
from .region import region as region
from .session import session as session
from .tracing_schedule import TracingSchedule as TracingSchedule
from .tracing_schedule import trace_schedule as trace_schedule

if TYPE_CHECKING:
    from .export import Chrome as chrome  # noqa: N813  (used like functions: exporters=[profile.chrome(path)])
    from .export import Otlp as otlp  # noqa: N813
    from .export import Parquet as parquet  # noqa: N813
    from .export import SummaryCsv as summary  # noqa: N813
    from .export import TensorBoard as tensorboard  # noqa: N813
    from .open_recording import load as load
    from .open_recording import open_recording as open_recording
    from .runfile import RunFile as RunFile

_EXPORTERS = {
    "chrome": "Chrome",
    "otlp": "Otlp",
    "parquet": "Parquet",
    "summary": "SummaryCsv",
    "tensorboard": "TensorBoard",
}

__all__ = [
    "RunFile",
    "Session",
    "TracingSchedule",
    "chrome",
    "counter",
    "load",
    "mark",
    "open_recording",
    "otlp",
    "parquet",
    "region",
    "session",
    "summary",
    "tensorboard",
    "trace_schedule",
]

if not TYPE_CHECKING:  # a checker that saw it would take every misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name in _EXPORTERS:
            from . import export

            return getattr(export, _EXPORTERS[name])
        if name == "RunFile":
            from .runfile import RunFile

            return RunFile
        if name in ("load", "open_recording"):
            import importlib

            module = importlib.import_module(".open_recording", __name__)
            globals().update(load=module.load, open_recording=module.open_recording)
            return globals()[name]
        raise AttributeError(f"module 'tessera.profile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
