"""What a device did while its power spiked: kernels, collectives and boundaries, and whether that is more than chance.

::

    timeline (epoch)  ──► shares of each kernel in and outside the spikes' windows ──► lift, p-value ──► `aligned`
    power (monotonic + offset, less the sensor's lag) ──► spikes ──┘
    telemetry, events ──► throttling, clocks, links, feeds after the spikes ──► `checklist`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError, MeasurementError, MissingExtra
from ..schema import DeviceId, PowerEvent, Telemetry
from ..timeline.columns import NONE, Ints, Timeline
from ..trace import PowerTrace
from . import checklist
from .alignment import Alignment, Work, boundaries, edge_alignments
from .checklist import Answer
from .spikes import Spike, curve_of, find, level_text, threshold_of

WITHIN_S = 0.2
# Above this share of the time a threshold marks a level, not spikes.
LEVEL_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """The spikes of a trace, each with what ran; what they align with as a whole; and the checklist, answered."""

    spikes: Sequence[Spike]
    aligned: Sequence[Alignment]
    checklist: Sequence[Answer]
    domain: str
    threshold_w: float
    mean_w: float
    start_ns: int
    end_ns: int
    reach_s: float
    lag_s: float
    notes: Sequence[str] = ()

    def answer(self, key: str) -> Answer:
        """One answer of the checklist: "aligned", "throttle", "feeds" or "links"."""
        found = {a.key: a for a in self.checklist}
        if key not in found:
            raise ArgumentError(f"the checklist has no {key!r}", fix=f"one of: {', '.join(found)}")
        return found[key]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data = dataclasses.asdict(self)
        for row, alignment in zip(data["aligned"], self.aligned, strict=True):
            row["lift"] = alignment.lift
        for row, spike in zip(data["spikes"], self.spikes, strict=True):
            row["seconds"] = spike.seconds
        return data

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per spike and what overlaps it most."""
        try:
            import pandas as pd
        except ImportError as exc:
            raise MissingExtra("pandas", "frame", "Correlation.to_frame") from exc
        rows = []
        for spike in self.spikes:
            plain = {f.name: getattr(spike, f.name) for f in dataclasses.fields(spike)}
            first = spike.kernels[0] if spike.kernels else None
            plain |= {"kernels": [k.name for k in spike.kernels], "boundaries": [b.kind for b in spike.boundaries]}
            top = {"top": first and first.name, "top_share": first and first.share, "top_lift": first and first.lift}
            rows.append({**plain, "seconds": spike.seconds, **top})
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        from ..report.correlate import text

        return text(self)

    def _repr_html_(self) -> str:
        from ..report.correlate import html

        return html(self)


def correlate(
    timeline: Timeline,
    power: PowerTrace,
    *,
    threshold_w: float | None = None,
    percentile: float = 95.0,
    rise_w_per_s: float | None = None,
    telemetry: Iterable[Telemetry] | Mapping[str, Sequence[Telemetry]] = (),
    events: Iterable[PowerEvent] = (),
    domain: str | None = None,
    within_s: float = WITHIN_S,
) -> Correlation:
    """Tie the spikes of a power trace to what the timeline says ran.

    A spike is a stretch above `threshold_w`, or above the percentile of the trace (and clearly above its mean: noise
    on a flat load is no spike) that rises at least as fast as `rise_w_per_s`, where given. `within_s` is how long
    after a spike throttling counts as its consequence. All times are epoch nanoseconds.
    """
    for name, value in (("threshold_w", threshold_w), ("rise_w_per_s", rise_w_per_s), ("within_s", within_s)):
        if value is not None and not value > 0:
            raise ArgumentError(f"{name}={value!r} is not positive", fix=f"leave {name} out, or give a positive number")
    domain = domain or _only_gpu(power)
    rows, notes = _device_rows(timeline, domain)
    curve = curve_of(power, domain, int(timeline["start_ns"][rows].min()), int(timeline["end_ns"][rows].max()))
    level_w = threshold_of(curve, percentile) if threshold_w is None else threshold_w
    spikes = find(curve, level_w, rise_w_per_s)
    share = sum(s.seconds for s in spikes) / float(np.sum(curve.seconds))
    if share > LEVEL_SHARE:
        notes.append(
            f"the power is above {level_text(level_w)} for {share:.0%} of the time: that is a level, not spikes"
        )
    told = _flatten(telemetry or _own_telemetry(power))
    mine = [t for t in told if t.domain == curve.domain or "+" in curve.domain]
    work = Work(timeline, rows, curve, spikes)
    edges = boundaries(timeline, rows, curve)
    aligned = [*work.alignments(), *edge_alignments(curve, spikes, edges)]
    spikes = [checklist.aftermath(work.tied(s, edges), mine, within_s) for s in spikes]
    lags = [c.domain.lag_s for _, c in power._moved(domain)]
    return Correlation(
        spikes=tuple(spikes),
        aligned=tuple(aligned),
        checklist=(
            checklist.alignment(spikes, aligned, level_w),
            checklist.throttling(spikes, mine, within_s),
            checklist.feeds(curve, [e for e in events if curve.start_ns <= e.time_ns <= curve.end_ns], told),
            checklist.links(spikes, mine, work.traffic(), curve.reach_s),
        ),
        domain=curve.domain, threshold_w=level_w, mean_w=curve.mean_w, start_ns=curve.start_ns, end_ns=curve.end_ns,
        reach_s=curve.reach_s, lag_s=max(lags), notes=tuple(notes),
    )  # fmt: skip


def _only_gpu(power: PowerTrace) -> str | None:
    """The one counted GPU of a trace: its spikes are not those of the CPU beside it. None: all domains together."""
    gpus = [d.name for d in power.domains if d.counted and d.device.is_gpu]
    return gpus[0] if len(gpus) == 1 else None


def _device_rows(timeline: Timeline, domain: str | None) -> tuple[Ints, list[str]]:
    """What ran on the device a domain measures; on the host (outermost operators, or regions) where nothing did."""
    rows = timeline.device_rows
    if len(rows) == 0:
        ops = timeline.rows("op")
        ops = ops[timeline.linked.parent[ops] == NONE]
        host = ops if len(ops) else timeline.rows("region")
        if len(host) == 0:
            raise MeasurementError(
                "the timeline has nothing that spikes could be tied to",
                why="only marks or counters were recorded" if len(timeline) else "it is empty",
                fix='record with activities=["gpu", "power"], or name parts with profile.region(...)',
            )
        return host, ["nothing ran on a GPU: spikes are tied to what the host did"]
    by_device = timeline.by_device(rows)
    device = DeviceId.of_domain(domain) if domain else None
    if len(by_device) == 1 or device is None or not device.is_gpu:
        return rows, []
    if device not in by_device:
        return rows, [f"no kernel ran on {device}: those of all devices are shown beside {domain}"]
    return by_device[device], []


def _flatten(telemetry: Iterable[Telemetry] | Mapping[str, Sequence[Telemetry]]) -> list[Telemetry]:
    rows = [t for part in telemetry.values() for t in part] if isinstance(telemetry, Mapping) else list(telemetry)
    return sorted(rows, key=lambda t: t.time_ns)


def _own_telemetry(power: PowerTrace) -> list[Telemetry]:
    """A live trace knows the telemetry beside its samples."""
    return [t for d in power.domains for t in power.telemetry(d.name)]
