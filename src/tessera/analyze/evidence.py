"""`RunEvidence`: everything that a rule of advice may use; `HostGap`: what the host did while a device waited."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..advice import Advice, Confidence, SavingBy
from ..attribute.table import EnergyRow, EnergyTable
from ..attribute.work import OpWork
from ..device import Device
from ..errors import TesseraError
from ..joules import Floats
from ..profile.ranks.collectives import Meeting
from ..recording import COMPILATION, CpuUse, Recording
from ..schema import Telemetry
from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.intervals import Nesting
from ..trace import PowerTrace
from ..units import format_duration, format_energy
from .collectives import find_meetings
from .devices import busy_spans, find_twins, list_devices, row_joules, strip_counter, whole_span
from .kernel_names import op_name, region_name
from .kernel_work import Calls, list_calls
from .roofline import Ceilings, find_device, read_capability
from .slowdown import Slowdown, find_untouched

LAUNCHING = "launching kernels"
BEFORE, AFTER = "before the first kernel", "after the last kernel"
PREPARING = "before the first whole step"
UNFED = (BEFORE, PREPARING, AFTER)
"""Gaps outside all steps, when the program does not feed the device."""
STEPS = 3
"""A program with fewer steps may still be in what comes before its steps."""
LAUNCH_GAP_S = 100e-6
"""Seconds: in a gap up to this long, the host is late with a launch; in a longer one, it does something else."""
# The share of the joules behind an advice that the change may save, if nothing better is known. Measured on an H200:
# fp32 GEMMs 13.2 pJ/FLOP against TF32's 2.0; GPT-2 training eager 26.5 J, compiled 18.7 J a step, with CUDA graphs 17.5
# J; its products with a vocabulary of 50257 3.9 pJ/FLOP against 1.03 of aligned ones. The others are guesses that only
# order the list.
SAVES = {
    "idle": 0.8,
    "launch": 0.8,
    "fp32": 0.85,
    "unaligned": 0.7,
    "copies": 0.7,
    "fuse": 0.5,
    "communication": 0.5,
    "outliers": 0.9,
    "outside": 0.2,
    "power cap": 0.1,
    "thermal": 0.2,
    "one operator": 0.15,
    "data loading": 0.3,
    "dropout": 0.5,
    "threads": 0.1,
    "formats": 0.3,
}


@dataclass(kw_only=True)
class RunEvidence:
    """What is known of a run. Rules read it; figures that take time to compute are computed when first needed.

    Without power (`has_joules` False), every joule of `table` stands for a second of a device: rules weigh by time, and
    a reader sees no joules.
    """

    table: EnergyTable
    telemetry: Mapping[str, Sequence[Telemetry]]
    gaps: Sequence[HostGap] = ()
    timeline: Timeline | None = None
    power: PowerTrace | None = None
    on: str | Device | None = None
    tracing: Slowdown | None = None
    cpu_use: CpuUse | None = None
    has_joules: bool = True
    meetings: Sequence[Meeting] = ()
    """Collectives that two or more ranks recorded."""

    @classmethod
    def of_recording(cls, recording: Recording, **more: Any) -> RunEvidence:
        """Return what a recording shows; `more` is what was computed from it: the table, gaps, tracing."""
        return cls(
            telemetry=group_telemetry(recording.telemetry),
            timeline=recording.timeline,
            power=recording.power,
            cpu_use=recording.facts.cpu_use,
            meetings=find_meetings(recording),
            **more,
        )

    @functools.cached_property
    def device(self) -> Device | None:
        """Return the chip that it ran on, if the recording names one of the catalogue."""
        labels = [d.label for d in self.power.domains if d.label] if self.power is not None else []
        return find_device(self.timeline, self.on, labels[0] if labels else None) if self.timeline is not None else None

    @property
    def uses_torch(self) -> bool:
        """Return whether torch ran; other tools' traces name their recorder, and torch's kernels are known by name."""
        if self.timeline is None or "recorded_by" not in self.timeline.meta:
            return True
        return any("at::native" in name for name in self.timeline.names)

    @functools.cached_property
    def ceilings(self) -> Ceilings | None:
        return Ceilings.of(self.device) if self.device is not None else None

    @functools.cached_property
    def calls(self) -> Calls | None:
        """Return the work of every call; None if nothing ran on a device, or there is no timeline."""
        if self.timeline is None or not len(self.timeline.device_rows):
            return None
        return list_calls(self.timeline)

    @functools.cached_property
    def joules(self) -> Floats:
        assert self.timeline is not None and self.calls is not None
        return row_joules(self.timeline, self.calls.rows, self.table)

    @functools.cached_property
    def program_share(self) -> float:
        """Return the share of the time a device waited for the host that the program caused, not the tracer."""
        waited_s = sum(g.time_s for g in self.gaps if g.during not in UNFED)
        if self.tracing is None or self.tracing.is_brief or not self.tracing.matters or waited_s <= 0:
            return 1.0
        return max(0.0, 1.0 - self.tracing.idle_s / waited_s)

    def match_calls(self, matches: Callable[[str], Any]) -> NDArray[np.bool_]:
        """Return which calls have a kernel whose name matches."""
        assert self.timeline is not None and self.calls is not None
        hits = np.array([bool(matches(name)) for name in self.timeline.names], bool)
        return np.asarray(hits[self.timeline["name"][self.calls.rows]], np.bool_)

    def sum_kernels(self, matches: Callable[[EnergyRow], Any]) -> tuple[float, float]:
        """Return joules and seconds of the kernels of the table that match."""
        rows = [r for r in self.table.kernels if matches(r)]
        return sum(r.energy_j for r in rows), sum(r.time_s for r in rows)

    def share(self, energy_j: float) -> float:
        return energy_j / self.table.energy_j

    def format_spent(self, energy_j: float) -> str:
        """Return joules in words; without power, seconds."""
        return format_energy(energy_j, 3) if self.has_joules else format_duration(energy_j, 3)

    def format_amount(self, energy_j: float) -> str:
        """Return joules (without power, seconds) and their share, in words."""
        return f"{self.format_spent(energy_j)} ({self.share(energy_j):.0%})"

    @functools.cached_property
    def devices(self) -> int:
        """Return how many devices ran anything; 1 if none did."""
        return max(1, len(list_devices(self.timeline))) if self.timeline is not None else 1

    @property
    def formats(self) -> frozenset[str] | None:
        """Return the number formats of the chip's matrix units; None if neither the catalogue nor the trace tells."""
        if self.device is not None and self.device.matrix:
            return frozenset(self.device.matrix)
        major = read_capability(self.timeline) if self.timeline is not None else None
        if major is None:
            return frozenset() if self.device is not None else None
        # NVIDIA's CUDA programming guide, "Compute capabilities": TF32 and bf16 from 8.0, tensor cores from 7.0.
        return frozenset({"tf32", "bf16", "fp16"} if major >= 8 else {"fp16"} if major >= 7 else ())

    def advise(
        self,
        kind: str,
        energy_j: float,
        evidence: str,
        action: str,
        *,
        saves: tuple[float, float | None] | None = None,
        by: SavingBy = "experience",
        confidence: Confidence = "low",
    ) -> Advice:
        """Return advice for this run; without a computed saving, the share that `SAVES` has for its kind."""
        if saves is None:
            saves, by, confidence = (SAVES.get(kind, 0.0) * energy_j, None), "experience", "low"
        saves_j, saves_s = saves
        if saves_s is not None:  # devices work at the same time, so together at most as long as the run
            saves_s = min(saves_s / self.devices, self.table.time_s)
        joules: dict[str, Any] = {"energy_j": energy_j, "saves_j": saves_j, "saves_share": self.share(saves_j)}
        if not self.has_joules:
            if saves_s is None:
                saves_s = min(saves_j / self.devices, self.table.time_s)
            share = max(0.0, saves_s * self.devices / self.table.energy_j) if self.table.energy_j > 0 else 0.0
            joules, by = {"saves_share": share}, "recorded times" if by == "energy table" else by
        return Advice(
            kind=kind,
            evidence=evidence,
            action=action,
            share=self.share(energy_j),
            saves_s=saves_s,
            by=by,
            confidence=confidence,
            **joules,
        )


def group_telemetry(telemetry: Sequence[Telemetry]) -> dict[str, list[Telemetry]]:
    """Return readings by device."""
    groups: dict[str, list[Telemetry]] = {}
    for reading in telemetry:
        groups.setdefault(reading.domain, []).append(reading)
    return groups


def product_cost(device: Device, sizes: Sequence[int], precision: str, layout: str) -> tuple[float, float] | None:
    """Return predicted seconds and joules of a product (batch, m, n, k) under the power limit; None if unknown."""
    from ..estimate.gemm import gemm_time
    from ..estimate.power import DeviceWork, PowerModel

    batch, m, n, k = sizes
    try:
        kernel = gemm_time(device, m, n, k, batch, precision, layout=layout)
        cost = PowerModel.from_device(device).estimate(DeviceWork.of(kernel))
    except TesseraError:
        return None
    return cost.seconds, cost.energy_j


def save_by_products(
    run: RunEvidence,
    chosen: NDArray[np.bool_],
    change: Callable[[OpWork], tuple[str | None, Sequence[int], str | None]],
    *,
    work_factor: float = 1.0,
    layouts: Sequence[str] = ("nt",),
) -> tuple[float, float] | None:
    """Return joules and seconds that other sizes or another precision would save of the chosen calls.

    What was measured is scaled by the ratio of two predictions, so that an error of both does not matter. `change`
    gives a product's precision, and its new sizes and precision; the new product does `work_factor` times the work. The
    operands' layout is not recorded, so the slowest of `layouts` is assumed. None if nothing is known.
    """
    calls = run.calls
    if calls is None or run.device is None:
        return None
    saved_j = saved_s = 0.0
    is_predicted = False
    for number, work in enumerate(calls.works):
        own = np.flatnonzero(chosen & (calls.work == number))
        if not len(own) or work.sizes is None:
            continue
        precision, sizes, other = change(work)
        if precision is None or other is None:
            continue
        costs = [(product_cost(run.device, work.sizes, precision, at), at) for at in layouts]
        old, layout = max(((c, at) for c, at in costs if c is not None), default=(None, ""))
        new = product_cost(run.device, sizes, other, layout) if old is not None else None
        if old is None or new is None:
            continue
        is_predicted = True
        saved_j += float(run.joules[own].sum()) * max(0.0, 1.0 - new[1] / old[1] / work_factor)
        saved_s += float(calls.seconds[own].sum()) * max(0.0, 1.0 - new[0] / old[0] / work_factor)
    return (saved_j, saved_s) if is_predicted else None


# -- what the host did while a device waited --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGap:
    """Time in which a device waited, by what the host did meanwhile."""

    during: str
    count: int
    time_s: float
    energy_j: float

    @property
    def each_s(self) -> float:
        return self.time_s / self.count


def find_run_gaps(recording: Recording, table: EnergyTable) -> list[HostGap]:
    """Return what the host did while the devices waited, unless a tracer of operators made them wait."""
    timeline = recording.timeline
    if not table.kernels:
        return []
    if recording.power is None and recording.facts.kind == "trace":  # from its first device row to its last
        return find_host_gaps(timeline, table, [whole_span(timeline, timeline.device_rows)])
    return find_host_gaps(timeline, table, find_untouched(recording), accounted=recording.accounted_windows)


def find_host_gaps(
    timeline: Timeline, table: EnergyTable, windows: Sequence[tuple[int, int]], *,
    accounted: Sequence[tuple[int, int]] = (),
) -> list[HostGap]:  # fmt: skip
    """Return the time in which no device row ran within some windows, by what the host did meanwhile, most first.

    Joules are shared out by time. The table's are for the `accounted` windows, if those differ.
    """
    parts = [_gaps(timeline, begin, end) for begin, end in windows]
    starts, ends = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    lengths = ends - starts
    if not lengths.sum() > 0:
        return []
    idle_in = [_gaps(timeline, begin, end) for begin, end in accounted] or parts
    total_s = float(sum((end - begin).sum() for begin, end in idle_in)) * 1e-9
    is_long = lengths > LAUNCH_GAP_S * 1e9
    seconds: dict[str, float] = {}
    counts: Counter[str] = Counter()
    if short := int((~is_long).sum()):
        seconds[LAUNCHING], counts[LAUNCHING] = float(lengths[~is_long].sum()) * 1e-9, short
    labels = _labels(timeline, starts[is_long], ends[is_long])
    for label, length in zip(labels, lengths[is_long].tolist(), strict=True):
        seconds[label] = seconds.get(label, 0.0) + length * 1e-9
        counts[label] += 1
    return [
        HostGap(during=label, count=counts[label], time_s=s, energy_j=table.idle_j * s / total_s)
        for label, s in sorted(seconds.items(), key=lambda kv: -kv[1])
    ]


def _gaps(timeline: Timeline, start_ns: int, end_ns: int) -> tuple[Ints, Ints]:
    """Return idle stretches of all devices within a window."""
    parts = []
    for device in list_devices(timeline):
        busy = busy_spans(timeline, device.rows)
        begins, ends = np.r_[start_ns, busy.end_ns], np.r_[busy.start_ns, end_ns]
        begins, ends = np.maximum(begins, start_ns), np.minimum(ends, end_ns)
        parts.append((begins[ends > begins], ends[ends > begins]))
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *(p[0] for p in parts)]), np.concatenate([none, *(p[1] for p in parts)])


def _labels(timeline: Timeline, starts: Ints, ends: Ints) -> list[str]:
    """Return what the host did in the middle of each gap: the region it was in and the operator or call inside."""
    rows = timeline.device_rows
    first, last = whole_span(timeline, rows)
    links = timeline.linked
    steps = {s.row for s in links.steps}
    middle = (starts + ends) // 2
    begun = links.steps[0].start_ns if len(links.steps) >= STEPS else first
    regions = timeline.rows("region")
    ops = timeline.rows("op")
    ops = ops[links.op[ops] != NONE]  # without the Python tracer's frames
    seen = _find_traced_times(timeline, rows, starts, ends)
    inside = [_open_at(timeline, regions, middle)]
    inside += [_open_at(timeline, part, seen) for part in (links.top_op[ops], timeline.rows("runtime"))]
    out = []
    for i, (region, op, call) in enumerate(zip(*(rows.tolist() for rows in inside), strict=True)):
        if ends[i] <= first or starts[i] >= last:
            out.append(BEFORE if ends[i] <= first else AFTER)
            continue
        name = "" if region == NONE else region_name(timeline.name(region))
        if middle[i] < begun and name != COMPILATION:
            out.append(PREPARING)
            continue
        where = strip_counter(name) if region in steps else name
        doing = op_name(timeline.name(op)) if op != NONE else timeline.name(call) if call != NONE else ""
        parts = [f"in {part}" for part in dict.fromkeys((where, doing)) if part]
        out.append(", ".join(parts) or "no operator running")
    return out


def _find_traced_times(timeline: Timeline, rows: Ints, starts: Ints, ends: Ints) -> Ints:
    """Return the middle of each gap; before a kernel of an untraced step, as long before the kernel that it repeats."""
    rows = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
    following = rows[np.searchsorted(timeline["start_ns"][rows], ends).clip(max=len(rows) - 1)]
    traced = find_twins(timeline, following)
    moved: Ints = (starts + ends) // 2 + timeline["start_ns"][traced] - timeline["start_ns"][following]
    return moved


def _open_at(timeline: Timeline, rows: Ints, times: Ints) -> Ints:
    """Return the innermost of some rows at each time, on any thread; `NONE` if none is open."""
    rows = np.unique(rows)
    if not len(rows):
        return np.full(len(times), NONE, np.int64)
    nowhere = np.zeros_like(rows)
    nested = Nesting(rows, nowhere, timeline["start_ns"][rows], timeline["end_ns"][rows])
    return nested.at(np.zeros_like(times), times)
