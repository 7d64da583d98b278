"""Chooses the reader for a trace by its first bytes or its name: Kineto and Chrome, rocprofv3, JAX, Perfetto."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import RecordingError
from . import kineto, perfetto, rocprof, xplane
from .columns import Timeline
from .memory_timeline import is_memory_timeline
from .source import read_start

HEAD_BYTES = 4 << 20
"""`traceEvents` begins within this; before it, Kineto writes the devices and process groups of a job."""
XPLANE = (".xplane.pb", ".xplane.pb.gz")
PERFETTO = (".pftrace", ".pftrace.gz", ".perfetto-trace")
Progress = Callable[[float], None]


def read_trace(path: Path, *, progress: Progress | None = None, frames: bool = False) -> Timeline:
    """Read a trace of any tool; `frames` keeps the Python frames that torch's tracer recorded (`kineto.read`)."""
    start = read_start(path, 1024)
    if path.name.endswith(rocprof.KERNELS) or all(column in start for column in rocprof.COLUMNS):
        return rocprof.read_csv(path)
    if path.name.endswith(XPLANE):
        return xplane.read_xplane(path)
    if path.name.endswith(PERFETTO):
        return perfetto.read_perfetto(path)
    if rocprof.KEY in start[:256]:
        return rocprof.read_json(path)
    if start.startswith(b"SQLite format 3\0"):
        raise RecordingError(
            f"{path} is an SQLite database, as Nsight Systems (nsys) and rocprofv3 write it, and not a trace",
            fix="give a trace of torch.profiler (export_chrome_trace), rocprofv3's --output-format json or pftrace, or "
            "record: tessera run script.py",
        )
    if path.suffix == ".csv":
        raise RecordingError(
            f"{path} is a table (CSV), and not a trace",
            fix="of rocprofv3 give *_kernel_trace.csv; a power log goes beside a trace: --power LOG.csv",
        )
    return kineto.read(path, progress=progress, frames=frames)


def is_trace(path: Path) -> bool:
    """Return whether a file is a trace, or torch's memory timeline, by its name or its beginning."""
    if path.name.endswith((rocprof.KERNELS, *XPLANE, *PERFETTO)):
        return True
    text = read_start(path, HEAD_BYTES).lstrip()
    if text.startswith(b"["):
        return b'"ph"' in text or is_memory_timeline(text)
    return text.startswith(b"{") and (b'"traceEvents"' in text or rocprof.KEY in text[:256])
