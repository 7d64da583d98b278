"""Adds device rows of traces that are not Kineto's, and tells what a kernel or copy is."""

from __future__ import annotations

import msgspec
import numpy as np

from ..record import Kind
from .columns import NONE, Builder, Launch, Timeline
from .events import fit
from .transfers import GRAPH_LAUNCH, collective_type, copy, is_collective

_C10D = "nccl:"


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


def name_collectives(timeline: Timeline) -> None:
    """Take the kind of a collective whose kernel does not tell it from c10d's operator around its launch.

    NCCL 2.12 to 2.18 run most collectives by one kernel, ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t, and newer ones by
    ncclDevKernel_Generic.
    """
    unsure = {i for i, launch in enumerate(timeline.launches) if launch.collective_type in (None, "send_recv")}
    rows = timeline.rows("collective")
    rows = rows[np.isin(timeline["launch"][rows], list(unsure))]
    if not len(rows):
        return
    links, numbers = timeline.linked, dict[Launch, int]()
    for row, op in zip(rows.tolist(), links.op[rows].tolist(), strict=True):
        names = [timeline.name(r) for r in links.path(op)]
        kinds = [collective_type(n.removeprefix(_C10D)) for n in names if n.startswith(_C10D)]
        if kinds and kinds[-1] is not None:
            launch = msgspec.structs.replace(timeline.launches[timeline["launch"][row]], collective_type=kinds[-1])
            number = numbers.setdefault(launch, len(timeline.launches))
            if number == len(timeline.launches):
                timeline.launches.append(launch)
            timeline["launch"][row] = number
    timeline.links = None  # the reader's caller may still move or drop rows
