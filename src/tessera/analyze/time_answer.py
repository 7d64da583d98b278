"""The answer of a recording without power: where the time of its devices went, by what ran, and what to do about it.

This is for time what `analyze.answer` is for joules. Seconds of kernels are those of devices: several at once count
each. If nothing ran on a device, seconds are those of operators on the host, without the operators that they call, and
those of a region are its own, from begin to end, whatever ran inside (`TimeAnswer.region_time` says which of the two).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..advice import Advice
from ..notes import order_notes
from ..recording import Recording
from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.intervals import union_by_key
from .advise import advise
from .answer import describe_device, name_of
from .breakdown import IDLE, breakdown
from .devices import explain_no_device, region_passes, region_paths
from .job_summary import JobSummary, summarize_job
from .kernel_names import CATEGORIES, category
from .python_frames import find_own_frames
from .time_table import list_modules

VIEWS = ("ops", "kernels", "regions", "modules", "functions")
ON_DEVICE_TIME = "time of a region: what it launched, on the device; share: of the devices' time"
ON_HOST_TIME = "time of a region: from its begin to its end; share: of the traced time of all ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """Seconds of one operator, kernel, region or module; `share` is of all seconds of the devices, including idle ones.

    `calls` are its own, however many kernels or operators ran inside; for a region, its passes.
    """

    name: str
    kind: str
    calls: int
    time_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """One device of one rank: its span, and how much of it computed, communicated, copied and idled.

    `communication_s` and `copies_s` are the parts that no kernel hides, so that the four sum to the span.
    """

    where: str
    rank: int | None
    span_s: float
    compute_s: float
    communication_s: float
    copies_s: float
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAnswer:
    """Where time went. If `on_device` is False, nothing ran on a device, and the rows are operators of the host."""

    name: str
    device: str
    on_device: bool
    time_s: float
    steps: int
    devices: Sequence[DeviceTime]
    parts: Mapping[str, float]
    ops: Sequence[TimeRow] = ()
    kernels: Sequence[TimeRow] = ()
    regions: Sequence[TimeRow] = ()
    modules: Sequence[TimeRow] = ()
    functions: Sequence[TimeRow] = ()
    """Functions of the user's own code by what they launched, if the trace was read with its Python frames."""
    region_time: str = ""
    """What the seconds of a region mean, in a sentence for the reader."""
    advice: Sequence[Advice] = ()
    job: JobSummary | None = None
    missing: str | None = None
    notes: Sequence[str] = ()

    @property
    def device_s(self) -> float:
        """Return the spans of all devices together."""
        return sum(d.span_s for d in self.devices)

    def share(self, part: str) -> float:
        """Return a part's share of all devices' spans: "compute_s", "communication_s", "copies_s" or "idle_s"."""
        whole = self.device_s
        return float(sum(getattr(d, part) for d in self.devices)) / whole if whole > 0 else 0.0

    def rows(self, by: str) -> Sequence[TimeRow]:
        """Return the rows of one view, most time first."""
        rows: Sequence[TimeRow] = getattr(self, by)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: what `tessera report TRACE --json` prints."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        shares = {p.removesuffix("_s"): self.share(p) for p in ("compute_s", "communication_s", "copies_s", "idle_s")}
        plain = {key: [dataclasses.asdict(row) for row in data[key]] for key in ("devices", *VIEWS, "advice")}
        job = self.job.to_dict() if self.job is not None else None
        return {**data, **plain, "shares": shares, "notes": [str(n) for n in self.notes], "job": job}


def answer_by_time(recording: Recording) -> TimeAnswer:
    """Compute everything that the screen and the page of a trace without power show."""
    timeline = recording.timeline
    rows = timeline.device_rows
    on_device = bool(len(rows))
    seconds = (timeline["end_ns"] - timeline["start_ns"]) * 1e-9
    if not on_device:
        rows, seconds = _host_seconds(timeline)
    devices = _sum_devices(breakdown(recording).rows)
    whole_s = sum(d.span_s for d in devices) or float(seconds[rows].sum()) or 1.0
    start_ns, end_ns = timeline.traced_span if len(timeline) else (0, 0)
    links = timeline.linked
    op = links.op[rows] if on_device else rows
    views = {
        "ops": _group(timeline, rows, op, "op", seconds, whole_s),
        "kernels": _group(timeline, rows, rows, "kernel", seconds, whole_s) if on_device else [],
        "regions": _sum_regions(timeline, rows, seconds, whole_s) if on_device else _measure_regions(timeline),
        "modules": _sum_modules(timeline, rows, seconds, whole_s),
        "functions": _group(timeline, rows, find_own_frames(timeline, rows), "function", seconds, whole_s),
    }
    parts: dict[str, float] = {}
    for row in views["kernels"] or views["ops"]:
        name = category(row.name, row.kind)
        parts[name] = parts.get(name, 0.0) + row.time_s
    return TimeAnswer(
        name=name_of(recording),
        device=describe_device(recording) if on_device else "",
        on_device=on_device,
        time_s=(end_ns - start_ns) * 1e-9,
        steps=_count_steps(timeline),
        devices=devices,
        parts={name: parts[name] for name in CATEGORIES if parts.get(name)},
        region_time=ON_DEVICE_TIME if on_device else ON_HOST_TIME,
        advice=advise(recording).advice,
        job=summarize_job(recording),
        missing=None if on_device else explain_no_device(recording),
        notes=order_notes(recording.notes),
        **views,
    )


def _count_steps(timeline: Timeline) -> int:
    """Return the steps of the rank that has most: all ranks run the same ones."""
    ranks = Counter(int(timeline["rank"][s.row]) if s.row != NONE else NONE for s in timeline.linked.steps)
    return max(ranks.values(), default=0)


def _host_seconds(timeline: Timeline) -> tuple[Ints, Any]:
    """Return the operators of the host, and the seconds of each without those of the operators it calls."""
    ops = timeline.linked.ops
    assert ops is not None, "nothing ran on a device"
    owners, begins, until = ops.stretches()
    return ops.rows, np.bincount(owners, weights=(until - begins) * 1e-9, minlength=len(timeline))


def _group(timeline: Timeline, rows: Ints, owners: Ints, kind: str, seconds: Any, whole_s: float) -> list[TimeRow]:
    """Return seconds of rows by the name of what each belongs to; rows that belong to nothing are left out."""
    known = owners != NONE
    names = timeline["name"][owners[known]]
    if not len(names):
        return []
    used, inverse = np.unique(names, return_inverse=True)
    spent = np.bincount(inverse, weights=seconds[rows[known]])
    calls = np.bincount(np.searchsorted(used, timeline["name"][np.unique(owners[known])]))
    found = [
        TimeRow(name=timeline.names[n], kind=kind, calls=int(c), time_s=float(s), share=float(s) / whole_s)
        for n, c, s in zip(used.tolist(), calls, spent, strict=True)
    ]
    return sorted((r for r in found if r.time_s > 0), key=lambda r: -r.time_s)


def _sum_modules(timeline: Timeline, rows: Ints, seconds: Any, whole_s: float) -> list[TimeRow]:
    """Return modules with everything inside them, as tables of joules have them."""
    found = [
        TimeRow(name=r.name, kind="module", calls=r.calls, time_s=r.time_s, share=r.time_s / whole_s)
        for r in list_modules(timeline, rows, seconds[rows])
    ]
    return sorted((r for r in found if r.time_s > 0), key=lambda r: -r.time_s)


def _sum_regions(timeline: Timeline, rows: Ints, seconds: Any, whole_s: float) -> list[TimeRow]:
    """Return regions with everything inside them; steps are one row."""
    which, paths = region_paths(timeline, rows)
    spent = np.bincount(which, weights=seconds[rows], minlength=len(paths))
    passes = region_passes(timeline)
    sums: dict[str, float] = {}
    for path, s in zip(paths, spent.tolist(), strict=True):
        for name in set(path):
            sums[name] = sums.get(name, 0.0) + s
    found = [
        TimeRow(name=name, kind="region", calls=len(passes[name]), time_s=s, share=s / whole_s)
        for name, s in sums.items()
    ]
    return sorted(found, key=lambda r: -r.time_s)


def _measure_regions(timeline: Timeline) -> list[TimeRow]:
    """Return regions by their own seconds; time in which several passes of a rank are open counts once."""
    start_ns, end_ns = timeline.traced_span if len(timeline) else (0, 0)
    whole_s = (end_ns - start_ns) * 1e-9 * len(np.unique(timeline["rank"])) or 1.0
    found = []
    for name, passes in region_passes(timeline).items():
        _, spans = union_by_key(*(timeline[c][passes] for c in ("rank", "start_ns", "end_ns")))
        took_s = spans.total_ns * 1e-9
        found.append(TimeRow(name=name, kind="region", calls=len(passes), time_s=took_s, share=took_s / whole_s))
    return sorted((r for r in found if r.time_s > 0), key=lambda r: -r.time_s)


def _sum_devices(rows: Sequence[Mapping[str, Any]]) -> list[DeviceTime]:
    """Return the parts of `breakdown` by device, as four parts that sum to its span."""
    places: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["where"] != "all":
            places.setdefault(row["where"], []).append(row)

    def total(own: Sequence[Mapping[str, Any]], keep: Any) -> float:
        return float(sum(r["ns"] for r in own if keep(r["part"]))) / 1e9

    return [
        DeviceTime(
            where=where,
            rank=own[0]["rank"],
            span_s=total(own, lambda part: True),
            compute_s=total(own, lambda part: part.startswith("compute")),
            communication_s=total(own, lambda part: part.startswith("communication")),
            copies_s=total(own, lambda part: part == "copies"),
            idle_s=total(own, lambda part: part in IDLE),
        )
        for where, own in places.items()
    ]
