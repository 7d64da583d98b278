"""Writes a TensorBoard folder: scalars, the trace for torch's profiler plugin, and the run file for our plugin.

Scalars are power, joules per step and counters. Our plugin is `tessera.tensorboard`; it shows a copy of the run file.
"""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ArgumentError
from ...output import replace_when_written
from ...record import CODE
from ..runfile_checksum import seal
from ..runfile_open import RunDatabase
from .chrome import Chrome

if TYPE_CHECKING:
    from ...recording import Recording

Scalar = tuple[str, int, int, float]  # tag, step, epoch ns, value
_STEP = re.compile(r"(?:ProfilerStep#|(?:train_|training_)?(?:step|iteration|iter)[\s_#:/-]*)(\d*)", re.IGNORECASE)
_MAX_POINTS = 20_000  # TensorBoard draws a thousand points of a scalar; more only make the file larger


@dataclass(frozen=True, slots=True)
class TensorBoard:
    """`profile.tensorboard("runs/tb")`: `tensorboard --logdir runs/tb`.

    The step number of power, clocks and temperature is the milliseconds since the run began; that of joules is the
    program's step. Without the package tensorboard no scalars are written, and the text that `write` returns says so.
    """

    directory: str | Path

    def write(self, recording: Recording) -> str:
        """Write all files into the directory; return what was written."""
        target, facts = Path(self.directory), recording.facts
        host = re.sub(r"[^\w\-]", "_", facts.host or "host")  # a dot would end the plugin's worker name
        began_ms = recording.span_ns[0] // 1_000_000
        if facts.path is not None and facts.path.suffix == ".tessera":  # for a foreign trace our plugin shows the trace
            _copy_run(facts.path, began_ms, target)
        trace = Chrome(target / f"{host}_{facts.pid}.{began_ms}.pt.trace.json.gz").write(recording)
        if importlib.util.find_spec("tensorboard") is None:
            return f"{trace} (no scalars: they need the package 'tensorboard': pip install tensorboard)"
        count = _write_scalars(target, scalars(recording))
        return f"{trace} and {count} scalars in {target}"


def _copy_run(run: Path, began_ms: int, directory: Path) -> None:
    """Copy the run file into plugins/tessera, TensorBoard's folder for a plugin; not if it already lies in `directory`.

    A copy, not a link, since log directories are moved and synchronised. SQLite makes the copy, since the run may still
    be written to.
    """
    if run.resolve().is_relative_to(directory.resolve()):
        return
    name = f"{run.stem}.{began_ms}.tessera"
    try:
        target = directory / "plugins" / "tessera" / name
        with closing(RunDatabase(run)) as source, replace_when_written(target, make_folder=True) as part:
            with closing(sqlite3.connect(part)) as copy:
                source.db.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")  # one file, readable in a read-only folder too
            if not source.checked.lost_bytes:  # a seal says that the file is complete
                seal(Path(part))
    except sqlite3.Error as exc:
        raise ArgumentError(
            f"cannot copy the run into {directory}", why=str(exc), fix="give a directory you may write to, with room"
        ) from exc


def _write_scalars(directory: Path, values: Iterator[Scalar]) -> int:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    try:
        writer = EventFileWriter(str(directory))
    except OSError as exc:
        raise ArgumentError(
            f"cannot write into {directory}", why=str(exc.strerror), fix="give a directory you may write to"
        ) from exc
    count = 0
    try:
        for tag, step, epoch_ns, value in values:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=epoch_ns * 1e-9, step=step, summary=summary))
            count += 1
    finally:
        writer.close()
    return count


def scalars(recording: Recording) -> Iterator[Scalar]:
    """Yield everything that TensorBoard draws as a line."""
    start_ns = recording.span_ns[0]
    for name, column in recording.power.columns.items() if recording.power is not None else ():
        samples = np.flatnonzero(column.known)
        samples = samples[:: len(samples) // _MAX_POINTS + 1]
        times = column.times_ns[samples] - column.lag_ns
        for t, w in zip(times.tolist(), column.watts[samples].tolist(), strict=True):
            yield f"power_w/{name}", (t - start_ns) // 1_000_000, t, w
    for row in recording.telemetry:
        at = ((row.time_ns - start_ns) // 1_000_000, row.time_ns)
        if row.temperature_c is not None:
            yield f"temperature_c/{row.domain}", *at, row.temperature_c
        for clock, mhz in row.clocks_mhz.items():
            yield f"clock_mhz/{row.domain}.{clock}", *at, mhz
    yield from _rows(recording)


def _rows(recording: Recording) -> Iterator[Scalar]:
    """Yield counters in order of time, and the joules of steps: attributed joules, else what was drawn meanwhile."""
    table, power = recording.find_energy(), recording.power
    rows = recording.rows
    names = rows.names
    joules = {r.name: r.energy_j for r in table.steps} if table is not None else {}
    counts: dict[str, int] = {}
    for chunk in rows.chunks(("kind", "name", "start_ns", "end_ns", "value")):
        these = np.flatnonzero(np.isin(chunk["kind"], [CODE["region"], CODE["counter"]]))
        columns: Any = zip(*(chunk[c][these].tolist() for c in chunk.columns), strict=True)
        for kind, number, start_ns, end_ns, value in columns:
            name = names[number]
            if kind == CODE["counter"]:
                step = counts[name] = counts.get(name, -1) + 1
                if np.isfinite(value):
                    yield f"counter/{name}", step, start_ns, value
            elif (match := _STEP.fullmatch(name)) is not None:
                place = counts["step\0"] = counts.get("step\0", -1) + 1
                drawn = joules.get(name)
                if drawn is None and power is not None and power.is_counted:
                    drawn = power.energy(None, start_ns, end_ns).energy_j
                step = int(match[1]) if match[1] else place
                if drawn is not None and np.isfinite(drawn):
                    yield "energy_j/step", step, end_ns, drawn
                yield "seconds/step", step, end_ns, (end_ns - start_ns) * 1e-9
