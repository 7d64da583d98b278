"""Collectives: bytes, time, bandwidth, what hid behind kernels, and which rank the others waited for.

::

    algorithm bandwidth = bytes / time            bus bandwidth = algorithm bandwidth * factor(kind, ranks)

The bus bandwidth is what the links carry, comparable between kinds and numbers of ranks (nccl-tests' PERFORMANCE.md).
Where several ranks recorded a collective, its time is from the last one's start to the last one's end: until then the
others wait, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..profile.ranks.clocks import Offset
from ..profile.ranks.meet import Meeting, meetings, overlap_pct, summary
from ..timeline import Launch, Timeline
from ..timeline.columns import NONE
from ..timeline.shapes import parse
from ..timeline.transfers import collective_type
from .devices import no_device, places, ranks_of
from .result import Column, Result
from .source import Progress, Source, open_source

MIN_BYTES = 64 << 20
_HALF = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_WHOLE = ("broadcast", "reduce", "send", "recv", "send_recv")
ON_HOST = ("gloo:", "mpi:", "ucc:")
"""How the annotations of backends begin that run on the host."""
_DTYPE_BYTES = {"f64": 8, "i64": 8, "c64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2}  # others: 1
NEEDS_HOSTS = 'which hosts the ranks ran on is not in the trace: merge .tessera runs, or traces with "host_name"'


def bus_factor(kind: str | None, ranks: int | None) -> float | None:
    """What the algorithm bandwidth is to be multiplied with; None where it is not defined."""
    if kind in _WHOLE:
        return 1.0
    if not ranks or ranks < 2:
        return None
    if kind == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in _HALF else None


def collectives(
    trace: Any, *, power: Any = None, min_bytes: int = MIN_BYTES, progress: Progress | None = None
) -> Result:
    """Each collective of at least so many bytes; `facts["by_kind"]` sums all of them, of any size.

    Of a folder of ranks one row is one collective on all of them: `skew_s` is the latest start less the earliest,
    `straggler` the rank that came last (None where the clocks are not known so well), `wait_s` what the others waited.

    >>> analyze.collectives("ranks/", min_bytes=1 << 20).facts["by_kind"]["all_reduce"]["bus_bytes_per_s"]
    """
    if min_bytes < 0:
        raise ArgumentError(f"min_bytes={min_bytes} is no size", fix="min_bytes=0 for all of them")
    source = open_source(trace, power=power, progress=progress)
    timeline = source.timeline
    met = meetings_of(source)
    found = _rows(timeline, met, _hosts(source)) or _host_rows(timeline)
    listed = [r for r in found if (r["bytes"] is not None and r["bytes"] >= min_bytes) or not min_bytes]
    unknown = sum(r["bytes"] is None for r in found)
    notes, missing = list(source.notes), {}
    if len(found) - len(listed) - (unknown if min_bytes else 0):
        smaller = len(found) - len(listed) - unknown
        notes.append(f"{smaller} collectives of fewer than {min_bytes} bytes are not listed: the sums contain them")
    if unknown:
        missing["bytes"] = f"{unknown} collectives do not say how much they move: record with a newer PyTorch (>= 2.4)"
    if found and found[0]["on"] == "host":
        notes.append("these ran on the host: a row is what one thread of the backend took, waiting included")
    if not found:
        missing["collectives"] = "the trace has no collectives" if places(timeline) else no_device(source)
    elif all(r["path"] is None for r in found):
        missing["path"] = NEEDS_HOSTS
    if found and not met:
        missing["skew_s"] = "skew and stragglers need the traces of two or more ranks: give their folder"
    return Result(
        kind="collectives", title=f"Collectives of {source.name}", columns=_COLUMNS if met else _ALONE, rows=listed,
        facts={"count": len(found), "by_kind": _by_kind(found), **_across(timeline, met)}, notes=notes,
        missing=missing,
    )  # fmt: skip


_ALONE = (
    Column(key="start_s", title="at", unit="s", help="since the start of the trace"),
    Column(key="kind", title="kind"), Column(key="ranks", title="ranks"),
    Column(key="bytes", title="bytes", unit="B"), Column(key="seconds", title="time", unit="s"),
    Column(key="bytes_per_s", title="algorithm", unit="B/s"), Column(key="bus_bytes_per_s", title="bus", unit="B/s"),
    Column(key="overlap_pct", title="beside kernels", unit="%"), Column(key="path", title="path"),
)  # fmt: skip
_COLUMNS = (
    *_ALONE[:-1], Column(key="skew_s", title="skew", unit="s"), Column(key="straggler", title="last rank"),
    Column(key="wait_s", title="waited", unit="s"), _ALONE[-1],
)  # fmt: skip


def meetings_of(source: Source) -> list[Meeting]:
    """The collectives that two or more ranks recorded; `rows` are those of the source's timeline."""
    timelines = ranks_of(source)
    if len(timelines) < 2:
        return []
    said = {m.get("rank"): m for m in source.timeline.meta.get("ranks") or () if isinstance(m, Mapping)}
    # The times are on one clock already: of the offsets only how sure they are matters.
    offsets = [
        Offset(rank=int(t.rank or 0), error_ns=said.get(t.rank, {}).get("error_ns"), source="merged") for t in timelines
    ]
    counts = [len(t) for t in timelines]
    return meetings(timelines, offsets, [sum(counts[:i]) for i in range(len(counts))])


def _hosts(source: Source) -> dict[int, str]:
    """The host of each rank, where the recordings say so."""
    said = source.timeline.meta.get("ranks") or ()
    return {int(m["rank"]): m["host"] for m in said if isinstance(m, Mapping) and m.get("host")}


def _rows(timeline: Timeline, met: Sequence[Meeting], hosts: Mapping[int, str]) -> list[dict[str, Any]]:
    """One row for each meeting, and for each collective that only one rank has."""
    beside = overlap_pct(timeline, met)
    rows = timeline.rows("collective")
    alone = set(rows.tolist()) - {r for m in met for r in m.rows}
    first_ns = timeline.start_ns
    out = []
    for m in met:
        launch = _launch(timeline, m.rows[0])
        ns = max(m.end_ns - m.ready_ns, 0)
        shares = [beside[r] for r in m.rows if r in beside]
        out.append(
            {
                **_figures(m.kind, m.bytes, ns, launch.group_size or len(m.ranks)), "group": m.group,
                "start_s": (m.start_ns - first_ns) / 1e9, "overlap_pct": sum(shares) / len(shares) if shares else None,
                "skew_s": m.skew_s, "straggler": m.straggler, "wait_s": m.wait_s, "recorded_by": list(m.ranks),
                "path": _path(m.ranks, launch.group_size, hosts), "dtype": launch.dtype, "on": "device",
            }
        )  # fmt: skip
    for row in sorted(alone):
        launch = _launch(timeline, row)
        ns = int(timeline["end_ns"][row] - timeline["start_ns"][row])
        rank = int(timeline["rank"][row])
        out.append(
            {
                **_figures(launch.collective_type, launch.collective_bytes, ns, launch.group_size),
                "group": launch.group, "start_s": (int(timeline["start_ns"][row]) - first_ns) / 1e9,
                "overlap_pct": beside.get(row), "skew_s": None, "straggler": None, "wait_s": None,
                "recorded_by": [] if rank == NONE else [rank], "path": None, "dtype": launch.dtype, "on": "device",
            }
        )  # fmt: skip
    return sorted(out, key=lambda r: r["start_s"])


def _launch(timeline: Timeline, row: int) -> Launch:
    number = int(timeline["launch"][row])
    return Launch() if number == NONE else timeline.launches[number]


def _host_rows(timeline: Timeline) -> list[dict[str, Any]]:
    """Collectives of backends that run on the host: their annotations, with bytes from the shapes."""
    ops = timeline.rows("op")
    names = np.array([n.startswith(ON_HOST) for n in timeline.names] or [False])
    info = timeline.meta.get("distributedInfo")
    size = info.get("world_size") if isinstance(info, dict) else None
    out = []
    for row in ops[names[timeline["name"][ops]]].tolist():
        kind, shapes = collective_type(timeline.name(row).partition(":")[2]), timeline.text("shapes", row)
        tensors = parse(shapes) if shapes else []
        count = sum(int(np.prod(dims, dtype=object)) * _DTYPE_BYTES.get(dtype, 1) for dims, dtype in tensors)
        ns = int(timeline["end_ns"][row] - timeline["start_ns"][row])
        rank = int(timeline["rank"][row])
        out.append(
            {
                **_figures(kind, count if tensors else None, ns, size if isinstance(size, int) else None),
                "group": None, "start_s": (int(timeline["start_ns"][row]) - timeline.start_ns) / 1e9,
                "overlap_pct": None, "skew_s": None, "straggler": None, "wait_s": None,
                "recorded_by": [] if rank == NONE else [rank], "path": None,
                "dtype": tensors[0][1] if tensors else None, "on": "host",
            }
        )  # fmt: skip
    return sorted(out, key=lambda r: r["start_s"])


def _figures(kind: str | None, size: int | None, ns: int, ranks: int | None) -> dict[str, Any]:
    rate = size / ns * 1e9 if size is not None and ns > 0 else None
    factor = bus_factor(kind, ranks)
    return {
        "kind": kind or "other", "ranks": ranks, "bytes": size, "seconds": ns / 1e9, "ns": ns, "bytes_per_s": rate,
        "bus_bytes_per_s": None if rate is None or factor is None else rate * factor,
    }  # fmt: skip


def _path(ranks: Sequence[int], size: int | None, hosts: Mapping[int, str]) -> str | None:
    """Whether a group stays on one host; None where not every member's host is known."""
    known = {hosts[r] for r in ranks if r in hosts}
    if len(known) > 1:
        return "between nodes"
    complete = len(ranks) == (size or len(ranks)) and all(r in hosts for r in ranks)
    return "within a node" if known and complete else None


def _by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for kind in sorted({r["kind"] for r in rows}):
        same = [r for r in rows if r["kind"] == kind]
        sized = [r for r in same if r["bytes_per_s"] is not None]
        ns, size = sum(r["ns"] for r in sized), sum(r["bytes"] for r in sized)
        bus = [r for r in sized if r["bus_bytes_per_s"] is not None]
        carried = sum(r["bus_bytes_per_s"] * r["ns"] for r in bus)
        beside = [r for r in same if r["overlap_pct"] is not None]
        whole = sum(r["ns"] for r in beside)
        out[kind] = {
            "count": len(same), "bytes": size if sized else None, "seconds": sum(r["ns"] for r in same) / 1e9,
            "bytes_per_s": size / ns * 1e9 if ns else None,
            "bus_bytes_per_s": carried / sum(r["ns"] for r in bus) if bus else None,
            "overlap_pct": sum(r["overlap_pct"] * r["ns"] for r in beside) / whole if whole else None,
            "wait_s": sum(r["wait_s"] or 0.0 for r in same),
        }  # fmt: skip
    return out


def _across(timeline: Timeline, met: Sequence[Meeting]) -> dict[str, Any]:
    return {"across_ranks": summary(met, overlap_pct(timeline, met))} if met else {}
