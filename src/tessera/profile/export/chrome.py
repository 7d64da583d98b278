"""Writes Chrome and Perfetto traces: what ran and what power it drew, in one picture.

::

    survey (times, lanes, correlations) ──► head ──► rows chunk by chunk ──► counter tracks ──► .json or .json.gz

The rows are read twice and never held: memory grows by some 110 bytes per device row (for overlap and arrows), not with
the text. Times are exact: microseconds with three decimals since `baseTimeNanoseconds`. That base is the same as
Kineto's, so that a trace of torch.profiler of the same time can be laid over this one.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...output import replace_when_written
from ...record import CODE
from ...schema import DeviceId
from ...timeline.columns import NONE
from ...timeline.path_segment import PATH, PathSegment
from ...timeline.stream_names import KEY, label
from .chrome_rows import DEVICE_CODES, LAUNCHERS, Overlap, RowWriter, device_pid, host_pid, track

if TYPE_CHECKING:
    from ...attribute.table import EnergyTable
    from ...recording import Recording

PERIOD_NS = 7_889_238 * 1_000_000_000
"""Kineto counts from the last whole multiple of this (a quarter of a year), so that a double holds nanoseconds."""
_SMALL_PID = 1 << 16  # above any number of GPUs; a process in a container may be number 1
_PATH_PID = 2**31 - 1  # the largest number; no process has it
_LANES = ("kind", "start_ns", "end_ns", "device", "stream", "thread", "correlation", "rank")


@dataclass(frozen=True, slots=True)
class Chrome:
    """`profile.chrome("trace.json")`: for Perfetto, chrome://tracing and everything that reads Kineto's traces."""

    path: str | Path
    critical_path: Sequence[PathSegment] = field(default=(), repr=False)
    """Drawn as a process above all others; rows on the path have the argument "critical", as HTA's traces have."""

    def write(self, recording: Recording) -> Path:
        """Write the trace; compressed if the name ends in .gz."""
        target = Path(self.path)
        table = recording.find_energy()
        critical = {s.row for s in self.critical_path if s.row != NONE}
        if critical:
            recording.timeline  # noqa: B018  (this numbers the rows as the path does; in the file they may differ)
        survey = _Survey.of(recording)
        pid = recording.facts.pid
        pid += _SMALL_PID if pid < _SMALL_PID else 0
        rows = RowWriter(recording.rows, table, survey.base_ns, pid, Overlap(survey.intervals), critical)
        rows.link(survey.launched, survey.ran)
        survey.intervals.clear()
        with (
            replace_when_written(target, make_folder=True) as part,
            _open_text(part, target.name.endswith(".gz")) as out,
        ):
            out.write(json.dumps(_head(recording, survey, table), default=str)[:-1])
            out.write(',"traceEvents":[\n')
            out.write(",\n".join(_names(recording, survey, pid)))
            _write(out, _draw_path(self.critical_path, survey.base_ns))
            for chunk in recording.rows.chunks(rows.columns):
                _write(out, rows.events(chunk))
            _write(out, _power(recording, survey.base_ns, pid))
            _write(out, _telemetry(recording, survey.base_ns, pid))
            out.write("\n]}\n")
        return target


@dataclass(slots=True)
class _Survey:
    """What must be known of all rows before the first event is written."""

    base_ns: int
    lanes: set[tuple[int, int, int]] = field(default_factory=set)
    threads: set[tuple[int, int]] = field(default_factory=set)
    intervals: list[tuple[NDArray[Any], ...]] = field(default_factory=list)
    launched: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    ran: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, recording: Recording) -> _Survey:
        """Read the columns that say on which track a row goes."""
        self = cls(0)
        starts, launched, ran = [t.time_ns for t in recording.telemetry[:1]], [], []
        columns = recording.power.columns.values() if recording.power is not None else ()
        starts += [int(c.times_ns[0]) for c in columns if len(c.times_ns)]
        for chunk in recording.rows.chunks(_LANES):
            starts.append(int(chunk["start_ns"].min()))
            on_device = np.isin(chunk["kind"], DEVICE_CODES)
            correlated = chunk["correlation"] != NONE
            launched.append(chunk["correlation"][np.isin(chunk["kind"], LAUNCHERS) & correlated])
            ran.append(chunk["correlation"][on_device & correlated])
            rank, device = chunk["rank"][on_device], chunk["device"][on_device]
            start, end = chunk["start_ns"][on_device], chunk["end_ns"][on_device]
            # Small types, since there is one value for every kernel of the run.
            kind, place = chunk["kind"][on_device].astype(np.int8), device_pid(rank, device).astype(np.int32)
            self.intervals.append((kind, start, end, place))
            self.lanes |= _distinct(rank, device, chunk["stream"][on_device])
            host = ~on_device & (chunk["kind"] != CODE["counter"])
            self.threads |= _distinct(chunk["rank"][host], chunk["thread"][host])
        if launched:
            self.launched, self.ran = np.unique(np.concatenate(launched)), np.unique(np.concatenate(ran))
        self.base_ns = min(starts, default=0) // PERIOD_NS * PERIOD_NS
        return self


def _distinct(*columns: NDArray[Any]) -> set[Any]:
    return set(map(tuple, np.unique(np.stack(columns), axis=1).T.tolist()))


@contextmanager
def _open_text(path: Path, packed: bool) -> Iterator[IO[str]]:
    with path.open("wb") as raw:
        if not packed:
            with io.TextIOWrapper(raw, "utf-8", newline="\n") as text:
                yield text
            return
        # Level 3 is a third slower than 1 and a quarter smaller; 9 would take five times as long. Without name and
        # time in the header, the same run gives the same bytes.
        with gzip.GzipFile("", "wb", 3, raw, 0) as zipped, io.TextIOWrapper(zipped, "utf-8", newline="\n") as text:
            yield text


def _write(out: IO[str], events: Iterable[str]) -> None:
    """Write events after earlier ones, a few thousand at a time."""
    source = iter(events)
    while batch := list(islice(source, 4096)):
        out.write(",\n")
        out.write(",\n".join(batch))


def _head(recording: Recording, survey: _Survey, table: EnergyTable | None) -> dict[str, Any]:
    head: dict[str, Any] = {
        "schemaVersion": 1, "deviceProperties": [], "displayTimeUnit": "ms", "baseTimeNanoseconds": survey.base_ns,
    }  # fmt: skip
    meta, facts = recording.rows.row_meta, recording.facts
    # Other tools look for these facts of Kineto about the machine and the ranks.
    head |= {k: meta[k] for k in ("deviceProperties", "distributedInfo") if k in meta}
    head["tessera"] = {"run": facts.name, "meta": facts.meta, "notes": [str(n) for n in facts.notes]}
    if table is not None:
        head["tessera"]["energy"] = {
            "energy_j": _number(table.energy_j), "error_j": _number(table.error_j),
            "idle_j": _number(table.idle_j), "basis": table.basis, "source": table.source,
        }  # fmt: skip
    return head


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _names(recording: Recording, survey: _Survey, pid: int) -> Iterator[str]:
    domains = recording.power.domains if recording.power is not None else ()
    labels = {d.device.index: d.label for d in domains if d.device.is_gpu and d.name == str(d.device)}
    meta = recording.rows.row_meta
    thread_names = {int(t): n for t, n in meta.get("threads", {}).items()}
    for rank in sorted({r for r, _ in survey.threads} | {NONE}):
        yield from _process(host_pid(pid, rank), f"{_of_rank(rank)}python", "CPU", max(rank, 0) * 1000)
    for rank, thread in sorted(survey.threads):
        shown = thread_names.get(thread, "host" if thread == NONE else f"thread {track(thread)}")
        yield _meta("thread_name", host_pid(pid, rank), track(thread), {"name": shown})
    devices = {(r, max(d, 0)) for r, d, _ in survey.lanes}
    devices |= {(NONE, d.device.index) for d in domains if d.device.is_gpu}
    for rank, device in sorted(devices):
        at, name = _pid(rank, device), f"{_of_rank(rank)}GPU {device}"
        yield from _process(at, f"{name} {labels.get(device) or ''}".strip(), name, max(rank, 0) * 1000 + device + 1)
    called = {KEY: meta.get(KEY) or {}}
    for rank, device, stream in sorted({(r, max(d, 0), max(s, 0)) for r, d, s in survey.lanes}):
        at = _pid(rank, device)
        yield _meta("thread_name", at, stream, {"name": label(called, device, stream, rank)})
        yield _meta("thread_sort_index", at, stream, {"sort_index": stream})


def _of_rank(rank: int) -> str:
    return "" if rank == NONE else f"rank {rank} "


def _pid(rank: int, device: int) -> int:
    return int(device_pid(np.array(rank), np.array(device)))


def _process(pid: int, name: str, label: str, index: int) -> Iterator[str]:
    yield _meta("process_name", pid, 0, {"name": name})
    yield _meta("process_labels", pid, 0, {"labels": label})
    yield _meta("process_sort_index", pid, 0, {"sort_index": index})


def _meta(kind: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}, separators=(",", ":"))


def _draw_path(segments: Sequence[PathSegment], base_ns: int) -> Iterator[str]:
    """Yield the segments of a critical path on three tracks: host, device, and gaps."""
    if not segments:
        return
    yield from _process(_PATH_PID, "critical path", "", -1)
    tracks = {on: number for number, on in enumerate(("host", "device", "gap"), 1)}
    for on, tid in tracks.items():
        yield _meta("thread_name", _PATH_PID, tid, {"name": on})
    for s in segments:
        since, lasts = s.start_ns - base_ns, s.end_ns - s.start_ns
        yield (
            f'{{"ph":"X","cat":"{PATH}","name":{json.dumps(s.name)},"pid":{_PATH_PID},"tid":{tracks[s.on]},'
            f'"ts":{since // 1000}.{since % 1000:03d},"dur":{lasts // 1000}.{lasts % 1000:03d},'
            f'"args":{{"kind":"{s.kind}"}}}}'
        )


def _counter(name: str, unit: str, pid: int, since_ns: int, value: float) -> str:
    ts = f"{since_ns // 1000}.{since_ns % 1000:03d}"
    return f'{{"ph":"C","name":{json.dumps(name)},"pid":{pid},"tid":0,"ts":{ts},"args":{{"{unit}":{value:.7g}}}}}'


def _power(recording: Recording, base_ns: int, host: int) -> Iterator[str]:
    """Yield watts at the time they were drawn: a sensor shows them late, so they are moved back by its lag."""
    for name, column in recording.power.columns.items() if recording.power is not None else ():
        since = np.maximum(column.times_ns - column.lag_ns - base_ns, 0)
        for t, w in zip(since[column.known].tolist(), column.watts[column.known].tolist(), strict=True):
            yield _counter(f"power {name}", "W", _counter_pid(name, host), t, w)


def _counter_pid(domain: str, host: int) -> int:
    """Return the process under which a domain's curves are shown: its GPU, or the host."""
    device = DeviceId.of_domain(domain)
    return device.index if device.is_gpu else host


def _telemetry(recording: Recording, base_ns: int, host: int) -> Iterator[str]:
    for row in recording.telemetry:
        at = (_counter_pid(row.domain, host), row.time_ns - base_ns)
        for clock, mhz in row.clocks_mhz.items():
            yield _counter(f"clock {clock} {row.domain}", "MHz", *at, mhz)
        single = (
            ("temperature", "C", row.temperature_c), ("memory temperature", "C", row.memory_temperature_c),
            ("power limit", "W", row.power_limit_w), ("utilization", "%", row.utilization_pct),
            ("SM activity", "%", row.sm_activity_pct), ("memory used", "B", row.memory_used_bytes),
        )  # fmt: skip
        for name, unit, value in single:
            if value is not None and math.isfinite(value):
                yield _counter(f"{name} {row.domain}", unit, *at, value)
