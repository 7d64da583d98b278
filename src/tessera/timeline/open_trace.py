"""Which reader a trace needs, by its first bytes or its name: Kineto and Chrome, rocprofv3, JAX, Perfetto."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from . import kineto, perfetto, rocprof, xplane
from .columns import Timeline
from .memory_timeline import is_memory_timeline
from .source import read_start

HEAD_BYTES = 4 << 20
"""Where `traceEvents` begins, at the latest: Kineto writes the devices and process groups of a job before it."""
XPLANE = (".xplane.pb", ".xplane.pb.gz")
PERFETTO = (".pftrace", ".pftrace.gz", ".perfetto-trace")
Progress = Callable[[float], None]


def read_trace(path: Path, *, progress: Progress | None = None, frames: bool = False) -> Timeline:
    """The rows of a trace of any tool; `frames` keeps those of Python that torch's tracer recorded (`kineto.read`)."""
    if path.name.endswith(rocprof.KERNELS):
        return rocprof.read_csv(path)
    if path.name.endswith(XPLANE):
        return xplane.read_xplane(path)
    if path.name.endswith(PERFETTO):
        return perfetto.read_perfetto(path)
    if rocprof.KEY in read_start(path, 256):
        return rocprof.read_json(path)
    return kineto.read(path, progress=progress, frames=frames)


def is_trace(path: Path) -> bool:
    """Whether a file is a trace, or torch's memory timeline, by its name or how it begins."""
    if path.name.endswith((rocprof.KERNELS, *XPLANE, *PERFETTO)):
        return True
    text = read_start(path, HEAD_BYTES).lstrip()
    if text.startswith(b"["):
        return b'"ph"' in text or is_memory_timeline(text)
    return text.startswith(b"{") and (b'"traceEvents"' in text or rocprof.KEY in text[:256])
