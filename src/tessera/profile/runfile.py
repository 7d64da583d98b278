"""The run file, `runs/NAME.tessera`: SQLite, written as the run happens, readable after any crash.

::

    with RunWriter("runs/train.tessera", meta={"command": sys.argv}) as run:
        run.add_row("region", "step", start_ns, end_ns)           # under a microsecond; a thread writes
        run.add_samples(domain, epoch_ns, watts)
        run.add_timeline(kineto.read("trace.json"))

    run = RunFile("runs/train.tessera")
    run.timeline(), run.power(), run.telemetry(), run.stacks(), run.get("start_ns"), run.notes
"""

from __future__ import annotations

from .runfile_format import RUN_VERSION as RUN_VERSION
from .runfile_read import RunFile as RunFile
from .runfile_write import RunWriter as RunWriter

__all__ = ["RUN_VERSION", "RunFile", "RunWriter"]
