"""Files: the trace with counter tracks added (Chrome/Perfetto JSON), and the summary as CSV.

Kineto's times are microseconds since its `baseTimeNanoseconds`, which is of the wall clock:
epoch_us = baseTimeNanoseconds / 1000 + ts. Counters are put on the same line.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from ...errors import RecordingError
from .tracks import Track, TrackSummary

CATEGORY = "tessera"
_OWN_HEAD = b'{"schemaVersion":1,"displayTimeUnit":"ms","baseTimeNanoseconds":%d,"traceEvents":[\n'
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_HEAD = 1 << 20  # bytes in which the header of a trace must lie
_COMPRESSION = 3  # of gzip: a trace of 200 MB takes 3 s instead of 10, and is 10% larger


def write_trace(path: Path, kineto: bytes | None, tracks: Sequence[Track]) -> None:
    """Write the process's own trace with our counters in it; the counters alone where it left none.

    The process's bytes are kept as they are.
    """
    if kineto is None:
        base_ns = min((int(t.times_ns[0]) for t in tracks), default=0)
        head, tail, comma = _OWN_HEAD % base_ns, b"]}\n", b""
    else:
        base_ns, head, tail = split(kineto)
        comma = b"" if tail.lstrip().startswith(b"]") else b","
    events = b",\n".join(counters(tracks, -base_ns))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _open(part, compressed=path.suffix == ".gz") as f:
            for piece in (head, events, comma if events else b"", tail):
                f.write(piece)
        part.replace(path)  # nobody sees half a trace
    finally:
        part.unlink(missing_ok=True)


def split(kineto: bytes) -> tuple[int, bytes, bytes]:
    """A Kineto trace as its base time, all up to its first event, and the rest."""
    head = kineto[:_HEAD]
    base, begin = _BASE.search(head), _EVENTS.search(head)
    if begin is None:
        raise RecordingError("the trace has no list of events at its beginning", fix="is it Kineto's JSON?")
    base_ns = int(base.group(1)) if base else 0  # before 2024 the times themselves were the wall clock's
    return base_ns, kineto[: begin.end()], kineto[begin.end() :]


def counters(tracks: Sequence[Track], offset_ns: int) -> Iterable[bytes]:
    """The tracks as counter events, one track each, with its unit and whose it is in its name."""
    encode = msgspec.json.Encoder().encode
    pids = {t.scope: f"tessera: {t.scope}" for t in tracks}
    for scope, pid in pids.items():
        label = "the whole device, all processes" if scope == "device" else "the process"
        yield encode({"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": label}})
    for t in tracks:
        name = f"{t.name} ({t.unit})" if t.basis == "measured" else f"{t.name} ({t.unit}, {t.basis})"
        common = {"ph": "C", "cat": CATEGORY, "name": name, "pid": pids[t.scope], "tid": 0}
        for time_ns, value in zip(t.times_ns.tolist(), t.values.tolist(), strict=True):
            yield encode({**common, "ts": (time_ns + offset_ns) / 1e3, "args": {t.unit: value}})


def _open(path: Path, *, compressed: bool) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "wb", _COMPRESSION)) if compressed else path.open("wb")


def write_summary(path: Path, metrics: Sequence[TrackSummary]) -> None:
    """A row for each metric: metric, unit, scope, mean, min, max, samples, basis."""
    with path.open("w", newline="") as f:
        out = csv.writer(f)
        out.writerow([column.name for column in fields(TrackSummary)])
        for metric in metrics:
            out.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in astuple(metric)])
