"""What a device did while its power spiked: kernels, collectives and boundaries, and whether that is more than chance.

::

    timeline (epoch)  ──► shares of each kernel in and outside the spikes' windows ──► lift, p-value ──► `aligned`
    power (less the sensor's lag) ──► spikes ──────────────┘
    telemetry, events ──► throttling, clocks, links, feeds after the spikes ──► `checklist`

The checklist has the four questions of power debugging. An answer is yes, no or unknown; it has its evidence, and an
unknown one says what would provide the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import ArgumentError, MeasurementError, TesseraError, check_positive
from ..record import ON_DEVICE
from ..recording import Recording
from ..schema import DeviceId, PowerEvent, Telemetry
from ..timeline.columns import NONE, Ints, Timeline
from ..trace import PowerTrace
from .alignment import CROWD, Alignment, LinkTraffic, SpikeWork, align_boundaries, find_boundaries
from .devices import whole_span
from .kernel_names import short_name
from .result import encode_json, make_frame
from .spikes import Curve, Spike, choose_threshold, find_spikes, format_level, make_curve

WITHIN_S = 0.2
# If power is above a threshold for more than this share of the time, the threshold marks a level, not spikes.
LEVEL_SHARE = 0.5
# Reasons that slow a device against its will; a clock that the user asked for ("application clocks") is not one.
SLOWING = ("power", "thermal", "slowdown", "board limit", "reliability", "current", "psu", "voltage", "prochot")
OVERCURRENT = ("over_current", "overcurrent", "over-current", "breaker", "power_limit", "psu_fault")
# A crest factor above this counts as high, for the board's own trace or a feed's ampere reading. A flat load has 1.0,
# and a sine around its mean at most 1.6. Supplies are built for twice their rating over 0.1 ms (ATX 3.0), not over the
# tens of ms that a sensor shows.
HIGH_CREST = 1.5
# Share by which a clock must drop: a smaller change is a step or two of the governor (15 MHz of 1980).
CLOCK_DROP = 0.03
# PCIe and NVLink carry some MiB/s of polling when nothing is copied.
TRAFFIC_MIB_PER_S = 100.0
LINKS = ("pcie", "nvlink", "xgmi")
CLOCKS = ("sm", "graphics", "gfx", "gpu")
_RUNNING = (*ON_DEVICE, "activity")
_QUESTIONS = {
    "aligned": "are spikes aligned with collectives or kernel boundaries?",
    "throttle": "do clocks throttle right after a spike?",
    "feeds": "do PDUs or supplies report over-current or a high crest factor?",
    "links": "is there NVLink or PCIe traffic during spikes?",
}
YesNo = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecklistAnswer:
    """One question of the checklist. `needs` says what would provide missing data; empty if nothing is missing."""

    key: str
    question: str
    verdict: YesNo
    evidence: str
    needs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """The spikes of a trace, each with what ran; what all of them coincide with; and the answered checklist."""

    spikes: Sequence[Spike]
    aligned: Sequence[Alignment]
    checklist: Sequence[ChecklistAnswer]
    domain: str
    threshold_w: float
    mean_w: float
    start_ns: int
    end_ns: int
    reach_s: float
    lag_s: float
    notes: Sequence[str] = ()

    def answer(self, key: str) -> ChecklistAnswer:
        """Return one answer of the checklist: "aligned", "throttle", "feeds" or "links"."""
        answers = {a.key: a for a in self.checklist}
        if key not in answers:
            raise ArgumentError(f"the checklist has no {key!r}", fix=f"one of: {', '.join(answers)}")
        return answers[key]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data = dataclasses.asdict(self)
        for row, alignment in zip(data["aligned"], self.aligned, strict=True):
            row["lift"] = alignment.lift
        for row, spike in zip(data["spikes"], self.spikes, strict=True):
            row["time_s"] = spike.time_s
        return data

    def to_json(self) -> str:
        """Return the correlation as JSON."""
        return encode_json(self.to_dict())

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per spike and what overlaps it most."""
        rows = []
        for spike in self.spikes:
            row = {f.name: getattr(spike, f.name) for f in dataclasses.fields(spike)}
            first = spike.kernels[0] if spike.kernels else None
            row |= {"kernels": [k.name for k in spike.kernels], "boundaries": [b.kind for b in spike.boundaries]}
            top = {"top": first and first.name, "top_share": first and first.share, "top_lift": first and first.lift}
            rows.append({**row, "time_s": spike.time_s, **top})
        return make_frame(rows, None, "Correlation.to_frame")

    def __repr__(self) -> str:
        return f"<Correlation of {len(self.spikes)} power spikes and what ran meanwhile; print() shows them>"

    def __str__(self) -> str:
        from ..report.analysis import correlation_text

        return correlation_text(self)

    def _repr_html_(self) -> str:
        from ..report.analysis import correlation_html

        return correlation_html(self)


def correlate(
    timeline: Timeline,
    power: PowerTrace,
    *,
    threshold_w: float | None = None,
    percentile: float | None = None,
    rise_w_per_s: float | None = None,
    telemetry: Iterable[Telemetry] | Mapping[str, Sequence[Telemetry]] = (),
    events: Iterable[PowerEvent] | None = None,
    domain: str | None = None,
    within_s: float = WITHIN_S,
) -> Correlation:
    """Relate the spikes of a power trace to what the timeline shows.

    A spike is a stretch above `threshold_w` or above the percentile of the trace; without either, above half-way from
    its median to its peak (and clearly above its mean, so that noise on a flat load is not one). It rises at least as
    fast as `rise_w_per_s`, if given. `within_s` is how long after a spike throttling counts as its consequence.
    `events` None: those of the live trace. All times are epoch nanoseconds.
    """
    for name, value in (("threshold_w", threshold_w), ("rise_w_per_s", rise_w_per_s), ("within_s", within_s)):
        if value is not None:
            check_positive(name, value, fix=f"leave {name} out, or give a positive number")
    domain = domain or find_only_gpu(power)
    rows, notes = select_rows(timeline, domain)
    curve = make_curve(power, domain, *whole_span(timeline, rows))
    level_w = choose_threshold(curve, percentile) if threshold_w is None else threshold_w
    spikes = find_spikes(curve, level_w, rise_w_per_s)
    share = sum(s.time_s for s in spikes) / float(np.sum(curve.seconds))
    if share > LEVEL_SHARE:
        level = format_level(level_w)
        notes.append(f"the power is above {level} for {share:.0%} of the time: that is a level, not spikes")
    readings = sort_telemetry(telemetry or read_telemetry(power))
    own = [t for t in readings if curve.is_sum or t.domain in curve.domains]
    work = SpikeWork(timeline, rows, curve, spikes)
    edges = find_boundaries(timeline, rows, curve)
    aligned = [*work.alignments(), *align_boundaries(curve, spikes, edges)]
    spikes = [add_aftermath(work.describe(s, edges), own, within_s) for s in spikes]
    return Correlation(
        spikes=tuple(spikes),
        aligned=tuple(aligned),
        checklist=(
            _check_alignment(spikes, aligned, level_w),
            check_throttling(spikes, own, within_s),
            check_feeds(curve, power.events if events is None else events, readings),
            check_links(spikes, own, work.traffic(), curve.reach_s),
        ),
        domain=curve.domain,
        threshold_w=level_w,
        mean_w=curve.mean_w,
        start_ns=curve.start_ns,
        end_ns=curve.end_ns,
        reach_s=curve.reach_s,
        lag_s=max(c.domain.lag_s for _, c in power._align_lag(domain)),
        notes=tuple(notes),
    )


def correlate_recording(recording: Recording) -> Correlation | None:
    """Return the spikes of a recording and their checklist; None without kernels or power to relate."""
    if recording.power is None or not len(recording.timeline.device_rows):
        return None
    try:
        return correlate(recording.timeline, recording.power, telemetry=recording.telemetry, events=recording.events)
    except TesseraError:  # then the page has no section about spikes; its answer does not depend on them
        return None


def find_only_gpu(power: PowerTrace) -> str | None:
    """Return the only counted GPU of a trace, whose spikes are not those of the CPU beside it; None: all domains."""
    gpus = [d.name for d in power.domains if d.counted and d.device.is_gpu]
    return gpus[0] if len(gpus) == 1 else None


def select_rows(timeline: Timeline, domain: str | None) -> tuple[Ints, list[str]]:
    """Return what ran on the device that a domain measures, or else the host's outermost operators or regions."""
    rows = timeline.device_rows
    if len(rows) == 0:
        ops = timeline.rows("op")
        ops = ops[timeline.linked.parent[ops] == NONE]
        host = ops if len(ops) else timeline.rows("region")
        if len(host) == 0:
            raise MeasurementError(
                "the timeline has nothing that could explain spikes",
                why="only marks or counters were recorded" if len(timeline) else "it is empty",
                fix='record with activities=["gpu", "power"], or name parts with profile.region(...)',
            )
        return host, ["nothing ran on a GPU: spikes are compared with what the host did"]
    by_device = timeline.by_device(rows)
    device = DeviceId.of_domain(domain) if domain else None
    if len(by_device) == 1 or device is None or not device.is_gpu:
        return rows, []
    if device not in by_device:
        return rows, [f"no kernel ran on {device}: those of all devices are compared with {domain}"]
    return by_device[device], []


def sort_telemetry(telemetry: Iterable[Telemetry] | Mapping[str, Sequence[Telemetry]]) -> list[Telemetry]:
    """Return readings in time order."""
    rows = [t for part in telemetry.values() for t in part] if isinstance(telemetry, Mapping) else list(telemetry)
    return sorted(rows, key=lambda t: t.time_ns)


def read_telemetry(power: PowerTrace) -> list[Telemetry]:
    """Return the telemetry that a live trace has beside its samples."""
    return [t for d in power.domains for t in power.telemetry(d.name)]


# -- the checklist ----------------------------------------------------------------------------------------------------


def make_answer(key: str, verdict: YesNo, evidence: str, needs: str = "") -> ChecklistAnswer:
    """Return an answer to one of the four questions."""
    return ChecklistAnswer(key=key, question=_QUESTIONS[key], verdict=verdict, evidence=evidence, needs=needs)


def _check_alignment(spikes: Sequence[Spike], aligned: Sequence[Alignment], threshold_w: float) -> ChecklistAnswer:
    if not spikes:
        return make_answer("aligned", "no", f"there is no spike: nothing exceeds {format_level(threshold_w)}")
    asked = [a for a in aligned if a.name == "collectives" or a.kind not in _RUNNING]
    kernels = [a for a in aligned if a.kind in _RUNNING and a.name != "collectives" and a.verdict == "aligned"]
    hits = [a for a in asked if a.verdict == "aligned"]
    beside = f"; what runs more in spikes: {', '.join(map(describe_alignment, kernels[:2]))}" if kernels else ""
    if hits:
        return make_answer("aligned", "yes", "; ".join(map(describe_alignment, hits)) + beside)
    none = "" if any(a.kind == "collective" for a in asked) else "the timeline has no collective"
    crowd = [a.kind for a in asked if a.reason == CROWD]
    crowded = f"{', '.join(crowd)}: {CROWD}" if crowd else ""
    texts = (none, *(describe_alignment(a) for a in asked if a.reason != CROWD), crowded)
    evidence = "; ".join(t for t in texts if t) + beside
    if all(a.verdict == "not aligned" for a in asked):
        return make_answer("aligned", "no", evidence or "nothing to align with")
    needs = "more spikes to compare (record longer), or a sensor faster than the steps"
    return make_answer("aligned", "unknown", evidence, needs)


def describe_alignment(a: Alignment) -> str:
    """Return an alignment in words, with its numbers."""
    lift = "in spikes only" if a.lift is None else f"{a.lift:.1f}x"
    p = "" if a.p_value is None else f", p = {a.p_value:.2g}"
    reason = f": {a.verdict}, {a.reason}" if a.verdict != "aligned" else ""
    if a.kind in _RUNNING:
        name = short_name(a.name) if a.kind == "kernel" else a.name
        return f"{name} {a.in_spikes:.0%} of the time in spikes, {a.outside:.0%} outside ({lift}{p}){reason}"
    return f"{a.in_spikes:.0%} of spikes rise at {a.name}, {a.outside:.0%} would by chance{p}{reason}"


def _clock_mhz(row: Telemetry) -> float | None:
    """Return the clock of the core."""
    names = [*(name for name in CLOCKS if name in row.clocks_mhz), *row.clocks_mhz]
    return row.clocks_mhz[names[0]] if names else None


def slowing_reasons(row: Telemetry) -> tuple[str, ...] | None:
    """Return the reasons that slow a device down; None if it does not report them."""
    if row.throttle is None:
        return None
    return tuple(r for r in row.throttle if any(word in r for word in SLOWING))


def add_aftermath(spike: Spike, rows: Sequence[Telemetry], within_s: float) -> Spike:
    """Return a spike with what the device reported from its start until `within_s` after its end (rows: epoch)."""
    times = np.array([r.time_ns for r in rows], dtype=np.int64)
    within_ns = round(within_s * 1e9)
    first = int(np.searchsorted(times, spike.start_ns))
    during = rows[first : int(np.searchsorted(times, spike.end_ns + within_ns, side="right"))]
    before = rows[first - 1] if first and spike.start_ns - times[first - 1] <= within_ns else None
    states = [state for state in map(slowing_reasons, during) if state is not None]
    # Reasons whose counted seconds grew: they show what no single reading showed.
    counted = None
    if before and during and before.throttled_s is not None and during[-1].throttled_s is not None:
        then, now = before.throttled_s, during[-1].throttled_s
        counted = [r for r, s in now.items() if s > then.get(r, s) and any(w in r for w in SLOWING)]
    reasons = tuple(dict.fromkeys([r for state in states for r in state] + (counted or [])))
    clocks = [c for c in map(_clock_mhz, during) if c is not None]
    return dataclasses.replace(
        spike,
        throttle=reasons if states or counted is not None else None,
        clock_before_mhz=_clock_mhz(before) if before else None,
        clock_after_mhz=min(clocks, default=None),
        temperature_c=max((r.temperature_c for r in during if r.temperature_c is not None), default=None),
    )


def check_throttling(
    spikes: Sequence[Spike], rows: Sequence[Telemetry], within_s: float, noun: str = "spike"
) -> ChecklistAnswer:
    """Return whether clocks throttle right after spikes; `noun` is another word for the spikes."""
    if not spikes:
        return make_answer("throttle", "no", f"there is no {noun}")
    watched = [s for s in spikes if s.throttle is not None]
    if not watched:
        spacing_s = float(np.median(np.diff([r.time_ns for r in rows]))) * 1e-9 if len(rows) > 1 else None
        needs = (
            'telemetry of the device: correlate(..., telemetry=trace.telemetry("gpu0")), or activities=["gpu", "power"]'
            if spacing_s is None
            else f"telemetry at least every {within_s * 1e3:.0f} ms, with throttle reasons: these readings are "
            f"{spacing_s:.2g} s apart, and none that falls on {'an' if noun[0] in 'aeiou' else 'a'} {noun} has any"
        )
        return make_answer("throttle", "unknown", "no throttle state was read", needs)
    hit = [s for s in watched if s.throttle]
    reasons = ", ".join(dict.fromkeys(r for s in hit for r in s.throttle or ()))
    text = f"{len(hit)} of {len(watched)} {noun}s are followed by throttling within {within_s * 1e3:.0f} ms"
    text += f" ({reasons})" if reasons else ""
    calm = [slowing_reasons(r) for r, quiet in zip(rows, _away(spikes, rows, within_s), strict=True) if quiet]
    states = [bool(state) for state in calm if state is not None]
    if hit and states:
        outside = sum(states) / len(states)
        text += f"; outside {noun}s {outside:.0%} of the readings are throttled"
        text += f", so it is not more common after {noun}s" if len(hit) / len(watched) <= outside else ""
    heat = [s.temperature_c for s in watched if s.temperature_c is not None]
    text += _describe_clocks(watched) + (f"; up to {max(heat):.0f} °C" if heat else "")
    return make_answer("throttle", "yes" if hit else "no", text)


def _describe_clocks(spikes: Sequence[Spike]) -> str:
    pairs = [(s.clock_before_mhz, s.clock_after_mhz) for s in spikes if s.clock_before_mhz and s.clock_after_mhz]
    drops = [after / before for before, after in pairs if after < before * (1.0 - CLOCK_DROP)]
    rises = [after / before for before, after in pairs if after > before * (1.0 + CLOCK_DROP)]
    if not drops and not rises:
        return f"; the clock stays within {CLOCK_DROP:.0%}" if pairs else ""
    text = f"; the clock falls by {1.0 - float(np.median(drops)):.0%} in {len(drops)} of {len(pairs)}" if drops else ""
    return text + (f"; it had risen in {len(rises)} of {len(pairs)}" if rises else "")


def _away(spikes: Sequence[Spike], rows: Sequence[Telemetry], within_s: float) -> list[bool]:
    """Return which readings are away from any spike."""
    starts = np.array([s.start_ns for s in spikes], dtype=np.int64)
    ends = np.array([s.end_ns for s in spikes], dtype=np.int64) + round(within_s * 1e9)
    at = [int(np.searchsorted(starts, r.time_ns, side="right")) - 1 for r in rows]
    return [i < 0 or bool(r.time_ns > ends[i]) for i, r in zip(at, rows, strict=True)]


def check_feeds(curve: Curve, events: Iterable[PowerEvent], rows: Sequence[Telemetry]) -> ChecklistAnswer:
    """Return whether PDUs report over-current or a high crest factor during this stretch of time."""
    crest = curve.crest_factor
    inside = [e for e in events if e.time_ns >= curve.start_ns and e.start_ns <= curve.end_ns]
    alarms = [e for e in inside if any(word in e.kind.lower() for word in OVERCURRENT)]
    amps = [(r.domain, r.peak_current_a / r.current_a) for r in rows if r.current_a and r.peak_current_a]
    worst = max(amps, key=lambda a: a[1], default=None)
    parts = [f"{e.domain}: {e.kind}, {e.message}" for e in alarms[:3]]
    if worst is not None:
        parts.append(f"{worst[0]} has drawn {worst[1]:.2f} times its present current")
    if crest is not None:
        size = "high" if crest >= HIGH_CREST else "not high"
        resolution = f"{curve.resolution_s * 1e3:.3g} ms"
        parts.append(f"the trace of {curve.domain} has a crest factor of {crest:.2f} at {resolution} ({size})")
    evidence = "; ".join(parts)
    if alarms or (worst is not None and worst[1] >= HIGH_CREST):
        return make_answer("feeds", "yes", evidence)
    if any(r.current_a is not None for r in rows) or inside:
        return make_answer("feeds", "no", f"no over-current was logged; {evidence}")
    needs = "the Redfish or IPMI sensor (TESSERA_REDFISH_URL; `tessera doctor`), and its events (events=)"
    return make_answer("feeds", "unknown", f"no PDU or supply was read; {evidence}", needs)


def check_links(
    spikes: Sequence[Spike], rows: Sequence[Telemetry], traffic: LinkTraffic, reach_s: float, noun: str = "spike"
) -> ChecklistAnswer:
    """Return whether links carry much during spikes; `noun` is another word for the spikes."""
    if not spikes:
        return make_answer("links", "no", f"there is no {noun}")
    rated = [r for r in rows if any(k.startswith(LINKS) for k in r.activity_pct)]
    away = _away(spikes, rated, reach_s)
    rates = {link: _link_rates(rated, away, link) for link in LINKS}
    parts = [
        f"{link} {inside:.0f} MiB/s in {noun}s, {'unknown' if outside is None else f'{outside:.0f}'} outside"
        for link, (inside, outside) in rates.items()
        if inside is not None
    ]
    share = f"copies or collectives run in {traffic.in_spikes:.0%} of the {noun}s' time, {traffic.outside:.0%} outside"
    none = "the timeline has no copy between host and device, nor a collective"
    evidence = "; ".join([*parts, share if traffic.copies or traffic.collectives else none])
    is_busy = any(inside is not None and inside >= TRAFFIC_MIB_PER_S for inside, _ in rates.values())
    if is_busy or traffic.in_spikes > 0.01:
        return make_answer("links", "yes", evidence)
    needs = "" if parts else "link rates of GPM (Hopper or later): kernels that reach a peer's memory are not copies"
    return make_answer("links", "no", evidence, needs)


def _link_rates(rows: Sequence[Telemetry], away: Sequence[bool], link: str) -> tuple[float | None, float | None]:
    """Return the mean MiB/s of a link, both directions, in readings during spikes and outside."""
    sums: tuple[list[float], list[float]] = ([], [])
    for row, quiet in zip(rows, away, strict=True):
        values = [v for k, v in row.activity_pct.items() if k.startswith(link)]
        if values:
            sums[quiet].append(sum(values))
    inside, outside = (sum(v) / len(v) if v else None for v in sums)
    return inside, outside
