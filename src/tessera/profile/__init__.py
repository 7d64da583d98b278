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

Modules: `session`, `recorder`, `assemble` and `ending` begin, hold and end a session; `tracing`, `kineto_collector` and
`torch_hooks` trace; `power_feed` and `sampling` sample power and stacks; `summary_mode` only adds up; `runfile` writes
and reads run files; `export` writes other tools' formats; `launch` runs a script unchanged (`tessera run`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import load_lazily
from .recorder import Session as Session
from .region import counter as counter
from .region import mark as mark
from .region import region as region
from .session import session as session
from .tracing_schedule import TracingSchedule as TracingSchedule
from .tracing_schedule import trace_schedule as trace_schedule

if TYPE_CHECKING:
    from . import export
    from .open_recording import load as load
    from .open_recording import open_recording as open_recording
    from .runfile import RunFile as RunFile

    chrome = export.Chrome  # used like functions: exporters=[profile.chrome(path)]
    otlp = export.Otlp
    parquet = export.Parquet
    summary = export.SummaryCsv
    tensorboard = export.TensorBoard

__all__ = load_lazily(  # noqa: PLE0605 - a list of strings, which the linter cannot see
    __name__,
    {
        "export": "chrome=Chrome otlp=Otlp parquet=Parquet summary=SummaryCsv tensorboard=TensorBoard",
        "open_recording": "load open_recording",
        "recorder": "Session",
        "region": "counter mark region",
        "runfile": "RunFile",
        "session": "session",
        "tracing_schedule": "TracingSchedule trace_schedule",
    },
)
