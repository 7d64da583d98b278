"""Finds the process group of each collective of gloo: Kineto shows the calls, torch's flight recorder the groups.

::

    Kineto            thread 7   [gloo:all_reduce, 256 KB]      ──┐  by kind, sizes and the order of each group
    flight recorder   group 1 "mesh_dp", number 12, all_reduce  ──┴──► Launch(group="1", group_label="dp"), number 12

A thread of gloo serves one group only. A call that two groups could have made belongs to the group of its thread.
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..timeline.columns import NONE, Launch, Timeline
from ..timeline.shapes import parse
from ..timeline.transfers import DTYPE_BYTES, ON_HOST, UNEVEN, collective_type, group_label

SIZE_VARIABLE = "TORCH_FR_BUFFER_SIZE"
MOST_CALLS = "10000"
"""How many collectives torch keeps, the newest: more than five seconds of tracing have. Each takes some 100 bytes."""
STAMPS_NS = 1_000_000
"""Most difference between Kineto's times (from the CPU's counter) and the recorder's (from the wall clock)."""
_Kind = tuple[str | None, tuple[int, ...]]


class FlightCall(msgspec.Struct, frozen=True):
    """One collective in torch's flight recorder."""

    profiling_name: str
    process_group: tuple[str, str]
    collective_seq_id: int
    time_created_ns: int
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    output_sizes: list[list[int]] = []
    output_dtypes: list[str] = []
    is_p2p: bool = False

    @property
    def kind(self) -> _Kind:
        """The type, and how many elements each tensor has: what Kineto's row of the same call says too."""
        kind = collective_type(self.profiling_name)
        return kind, () if kind in UNEVEN else tuple(math.prod(s) for s in self.input_sizes)

    @property
    def bytes(self) -> int | None:
        """Size of the message as nccl-tests counts it: the larger one of input and output."""
        both = ((self.input_sizes, self.input_dtypes), (self.output_sizes, self.output_dtypes))
        sums = [
            sum(math.prod(s) * DTYPE_BYTES.get(d.lower(), 1) for s, d in zip(sizes, dtypes, strict=False))
            for sizes, dtypes in both
        ]
        return max(sums) or None


def enable() -> None:
    """Let torch record its newest collectives. Call it before the program makes its first process group."""
    os.environ.setdefault(SIZE_VARIABLE, MOST_CALLS)


def read_calls() -> list[FlightCall]:
    """Return the collectives of this process that torch still has; none if it records none, or is older than 2.7.

    Recent versions record 2,000 by default.
    """
    torch: Any = sys.modules.get("torch")
    dump = getattr(getattr(getattr(torch, "_C", None), "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None or "torch.distributed" not in sys.modules:
        return []
    try:
        calls = msgspec.json.decode(dump(), type=dict[str, Any]).get("entries") or []
        return [c for c in msgspec.convert(calls, list[FlightCall], strict=False) if not c.is_p2p]
    except (msgspec.MsgspecError, RuntimeError, TypeError):
        return []


def name_groups(timeline: Timeline, calls: Sequence[FlightCall], sizes: dict[str, int] | None = None) -> None:
    """Give a timeline's host collectives their groups, bytes and numbers. `sizes`: how many ranks each group has."""
    named = np.array([n.startswith(ON_HOST) for n in timeline.names] or [False])
    rows = np.flatnonzero(named[timeline["name"]]) if len(timeline) else np.zeros(0, np.int64)
    if not len(rows) or not calls:
        return
    rows = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
    waiting: dict[_Kind, dict[str, deque[FlightCall]]] = defaultdict(lambda: defaultdict(deque))
    issued = [c for c in calls if c.time_created_ns >= timeline.start_ns - STAMPS_NS]  # older calls have no row here
    for call in sorted(issued, key=lambda c: c.time_created_ns):
        waiting[call.kind][call.process_group[0]].append(call)
    kinds = [_kind_of(timeline, row) for row in rows.tolist()]
    threads = timeline["thread"][rows].tolist()
    # The group of a thread is known from calls that only one group makes.
    group_of = {
        thread: next(iter(waiting[kind]))
        for kind, thread in zip(kinds, threads, strict=True)
        if len(waiting[kind]) == 1
    }
    launches = {launch: i for i, launch in enumerate(timeline.launches)}
    columns = {c: timeline.columns[c].copy() for c in ("launch", "correlation", "bytes")}
    for row, kind, thread in zip(rows.tolist(), kinds, threads, strict=True):
        queue = _queue_of(waiting[kind], group_of.get(thread), int(timeline["start_ns"][row]))
        if queue is None:
            continue
        call = queue.popleft()
        name, description = call.process_group
        launch = Launch(
            collective_type=kind[0], collective_bytes=call.bytes, group=name, group_size=(sizes or {}).get(name),
            dtype=next(iter(call.input_dtypes), None), group_label=group_label(description),
        )  # fmt: skip
        columns["launch"][row] = launches.setdefault(launch, len(launches))
        columns["correlation"][row] = call.collective_seq_id
        columns["bytes"][row] = NONE if call.bytes is None else call.bytes
    timeline.columns |= columns
    timeline.launches = list(launches)


def _kind_of(timeline: Timeline, row: int) -> _Kind:
    kind, shapes = collective_type(timeline.name(row).partition(":")[2]), timeline.text("shapes", row)
    return kind, tuple(math.prod(dims) for dims, _ in parse(shapes)) if shapes and kind not in UNEVEN else ()


def _queue_of(groups: dict[str, deque[FlightCall]], group: str | None, start_ns: int) -> deque[FlightCall] | None:
    """Return the queue of calls that a row's call is in; if its group is unknown, that of the call issued first."""
    own = groups.values() if group is None else [groups[group]] if group in groups else []
    issued = [queue for queue in own if queue and queue[0].time_created_ns <= start_ns + STAMPS_NS]
    return min(issued, key=lambda queue: queue[0].time_created_ns, default=None)


def group_sizes() -> dict[str, int]:
    """Return how many ranks each process group has; empty if torch.distributed does not run any more."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return {}
    try:
        return {str(g["pg_name"]): int(g["group_size"]) for g in c10d._get_all_pg_configs()}
    except (AttributeError, KeyError, TypeError):
        return {}
