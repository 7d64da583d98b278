"""Adds device rows of traces that are not Kineto's: what a kernel or copy is, is read from its name."""

from __future__ import annotations

import msgspec

from ..record import Kind
from .columns import NONE, Builder, Launch
from .events import fit
from .transfers import GRAPH_LAUNCH, collective_type, copy, is_collective


def add_kernel(
    builder: Builder,
    name: str,
    start_ns: int,
    end_ns: int,
    *,
    device: int,
    stream: int,
    correlation: int = NONE,
    launch: Launch | None = None,
) -> None:
    """Add a kernel, or a collective if its name says so."""
    launch = launch or Launch()
    if is_collective(name):
        launch = msgspec.structs.replace(launch, collective_type=collective_type(name.partition("(")[0]))
    builder.add(
        "collective" if is_collective(name) else "kernel", name, start_ns, end_ns, device=device, stream=fit(stream),
        correlation=fit(correlation), launch=builder.intern_launch(launch),
    )  # fmt: skip


def add_copy(
    builder: Builder,
    name: str,
    start_ns: int,
    end_ns: int,
    *,
    device: int,
    stream: int,
    correlation: int = NONE,
    size: int = NONE,
) -> None:
    """Add a copy, or a memset if its name says so."""
    is_set = "memset" in name.lower()
    builder.add(
        "memset" if is_set else "memcpy", name, start_ns, end_ns, device=device, stream=fit(stream),
        correlation=fit(correlation), bytes=fit(size), launch=NONE if is_set else builder.intern_launch(copy(name)),
    )  # fmt: skip


def name_copy(operation: str) -> str:
    """Return the usual name for MEMORY_COPY_HOST_TO_DEVICE or HOST_TO_DEVICE."""
    return f"Memcpy {operation.removeprefix('MEMORY_COPY_')}"


def add_call(builder: Builder, name: str, start_ns: int, end_ns: int, *, thread: int, correlation: int = NONE) -> None:
    """Add a call of the runtime on the host."""
    kind: Kind = "graph_launch" if name.startswith(GRAPH_LAUNCH) else "runtime"
    builder.add(kind, name, start_ns, end_ns, thread=fit(thread), correlation=fit(correlation))
