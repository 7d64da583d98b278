"""The power-debugging checklist: four questions one asks of a spiky trace, each answered from evidence or not at all.

An answer is yes, no or unknown; it says on what it rests, and unknown says what would provide the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..record import ON_DEVICE
from ..schema import PowerEvent, Telemetry
from .kernel_names import short_name
from .spikes import Curve, Spike, level_text

if TYPE_CHECKING:
    from .alignment import Alignment, Traffic

Verdict = Literal["yes", "no", "unknown"]

# What makes a device slower against its will; a clock the user asked for ("application clocks") is none of it.
SLOWING = ("power", "thermal", "slowdown", "board limit", "reliability", "current", "psu", "voltage", "prochot")
OVERCURRENT = ("over_current", "overcurrent", "over-current", "breaker", "power_limit", "psu_fault")
# Of the board's own trace or a feed's ampere reading. A flat load has 1.0 and a sine around its mean at most 1.6;
# supplies are built for twice their rating over 0.1 ms (ATX 3.0), not over the tens of ms a sensor shows.
HIGH_CREST = 1.5
# A clock that moves less is a step or two of the governor (15 MHz of 1980).
CLOCK_DROP = 0.03
# PCIe and NVLink carry some MiB/s of polling when nothing is copied.
TRAFFIC_MIB_PER_S = 100.0
LINKS = ("pcie", "nvlink", "xgmi")
CROWD = "changes follow each other faster than the sensor can tell apart"
RUNNING = (*ON_DEVICE, "activity")
CLOCKS = ("sm", "graphics", "gfx", "gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question of the checklist. `needs` says what would provide what is missing, empty when nothing is."""

    key: str
    question: str
    verdict: Verdict
    evidence: str
    needs: str = ""


def alignment(spikes: Sequence[Spike], aligned: Sequence[Alignment], threshold_w: float) -> Answer:
    """Say (a) whether spikes are aligned with collectives or kernel boundaries."""
    question = "are spikes aligned with collectives or kernel boundaries?"
    key = "aligned"
    if not spikes:
        return Answer(
            key=key, question=question, verdict="no",
            evidence=f"there is no spike: nothing exceeds {level_text(threshold_w)}",
        )  # fmt: skip
    asked = [a for a in aligned if a.name == "collectives" or a.kind not in RUNNING]
    kernels = [a for a in aligned if a.kind in RUNNING and a.name != "collectives" and a.verdict == "aligned"]
    hits = [a for a in asked if a.verdict == "aligned"]
    beside = "; what runs more in spikes: " + ", ".join(told(k) for k in kernels[:2]) if kernels else ""
    if hits:
        text = "; ".join(told(a) for a in hits) + beside
        return Answer(key=key, question=question, verdict="yes", evidence=text)
    none = "" if any(a.kind == "collective" for a in asked) else "the timeline has no collective"
    crowd = [a.kind for a in asked if a.reason == CROWD]
    crowded = f"{', '.join(crowd)}: {CROWD}" if crowd else ""
    text = "; ".join(t for t in (none, *(told(a) for a in asked if a.reason != CROWD), crowded) if t) + beside
    if all(a.verdict == "not aligned" for a in asked):
        return Answer(key=key, question=question, verdict="no", evidence=text or "nothing to align with")
    return Answer(
        key=key, question=question, verdict="unknown", evidence=text,
        needs="more spikes to compare (record longer), or a sensor faster than the steps",
    )  # fmt: skip


def told(a: Alignment) -> str:
    """An alignment in words, with its numbers."""
    lift = "in spikes only" if a.lift is None else f"{a.lift:.1f}x"
    p = "" if a.p_value is None else f", p = {a.p_value:.2g}"
    reason = f": {a.verdict}, {a.reason}" if a.verdict != "aligned" else ""
    if a.kind in RUNNING:
        name = short_name(a.name) if a.kind == "kernel" else a.name
        return f"{name} {a.in_spikes:.0%} of the time in spikes, {a.outside:.0%} outside ({lift}{p}){reason}"
    return f"{a.in_spikes:.0%} of spikes rise at {a.name}, {a.outside:.0%} would by chance{p}{reason}"


def clock_of(row: Telemetry) -> float | None:
    """The core's clock in MHz."""
    for name in CLOCKS:
        if name in row.clocks_mhz:
            return row.clocks_mhz[name]
    return next(iter(row.clocks_mhz.values()), None)


def slowing(row: Telemetry) -> tuple[str, ...] | None:
    """The reasons that slow a device down; None when it does not tell."""
    if row.throttle is None:
        return None
    return tuple(r for r in row.throttle if any(word in r for word in SLOWING))


def aftermath(spike: Spike, rows: Sequence[Telemetry], within_s: float) -> Spike:
    """A spike with what the device said of itself from its start until `within_s` after its end (rows: epoch)."""
    times = np.array([r.time_ns for r in rows], dtype=np.int64)
    within_ns = round(within_s * 1e9)
    first = int(np.searchsorted(times, spike.start_ns))
    last = int(np.searchsorted(times, spike.end_ns + within_ns, side="right"))
    during = rows[first:last]
    before = rows[first - 1] if first and spike.start_ns - times[first - 1] <= within_ns else None
    told = [t for t in map(slowing, during) if t is not None]
    counted = _counted(before, during[-1]) if before and during else None
    told_of = dict.fromkeys([r for t in told for r in t] + (counted or []))
    reasons = tuple(told_of) if told or counted is not None else None
    clocks = [c for c in map(clock_of, during) if c is not None]
    temperatures = [r.temperature_c for r in during if r.temperature_c is not None]
    return dataclasses.replace(
        spike, throttle=reasons, clock_before_mhz=clock_of(before) if before else None,
        clock_after_mhz=min(clocks, default=None), temperature_c=max(temperatures, default=None),
    )  # fmt: skip


def _counted(before: Telemetry, after: Telemetry) -> list[str] | None:
    """Reasons whose counted seconds grew: they catch what no single look did."""
    if before.throttled_s is None or after.throttled_s is None:
        return None
    then = before.throttled_s
    return [r for r, s in after.throttled_s.items() if s > then.get(r, s) and any(w in r for w in SLOWING)]


def throttling(spikes: Sequence[Spike], rows: Sequence[Telemetry], within_s: float) -> Answer:
    """Say (b) whether clocks throttle right after."""
    question = "do clocks throttle right after a spike?"
    key = "throttle"
    if not spikes:
        return Answer(key=key, question=question, verdict="no", evidence="there is no spike")
    seen = [s for s in spikes if s.throttle is not None]
    if not seen:
        spacing = _spacing_s(rows)
        needs = (
            'telemetry of the device: correlate(..., telemetry=trace.telemetry("gpu0")), or activities=["gpu", "power"]'
            if spacing is None
            else f"telemetry at least every {within_s * 1e3:.0f} ms, with throttle reasons: these are {spacing:.2g} s"
            " apart, and none that falls on a spike has any"
        )
        return Answer(key=key, question=question, verdict="unknown", evidence="no throttle state was read", needs=needs)
    hit = [s for s in seen if s.throttle]
    reasons = ", ".join(dict.fromkeys(r for s in hit for r in s.throttle or ()))
    text = f"{len(hit)} of {len(seen)} spikes are followed by throttling within {within_s * 1e3:.0f} ms"
    text += f" ({reasons})" if reasons else ""
    outside = _outside(spikes, rows, within_s)
    if hit and outside is not None:
        text += f"; outside spikes {outside:.0%} of the readings are throttled"
        text += ", so it is no more common after spikes" if len(hit) / len(seen) <= outside else ""
    verdict: Verdict = "yes" if hit else "no"
    return Answer(key=key, question=question, verdict=verdict, evidence=text + _clock_text(seen) + _heat_text(seen))


def _clock_text(spikes: Sequence[Spike]) -> str:
    pairs = [(s.clock_before_mhz, s.clock_after_mhz) for s in spikes if s.clock_before_mhz and s.clock_after_mhz]
    if not pairs:
        return ""
    drops = [a / b for b, a in pairs if a < b * (1.0 - CLOCK_DROP)]
    rises = [a / b for b, a in pairs if a > b * (1.0 + CLOCK_DROP)]
    if not drops and not rises:
        return f"; the clock stays within {CLOCK_DROP:.0%}"
    text = f"; the clock falls by {1.0 - float(np.median(drops)):.0%} in {len(drops)} of {len(pairs)}" if drops else ""
    return text + (f"; it had risen in {len(rises)} of {len(pairs)}" if rises else "")


def _heat_text(spikes: Sequence[Spike]) -> str:
    known = [s.temperature_c for s in spikes if s.temperature_c is not None]
    return f"; up to {max(known):.0f} °C" if known else ""


def _spacing_s(rows: Sequence[Telemetry]) -> float | None:
    return float(np.median(np.diff([r.time_ns for r in rows]))) * 1e-9 if len(rows) > 1 else None


def _outside(spikes: Sequence[Spike], rows: Sequence[Telemetry], within_s: float) -> float | None:
    """The share of readings with throttling away from any spike."""
    calm = _calm(spikes, rows, within_s)
    states = [t for r, quiet in zip(rows, calm, strict=True) if quiet and (t := slowing(r)) is not None]
    return sum(bool(t) for t in states) / len(states) if states else None


def _calm(spikes: Sequence[Spike], rows: Sequence[Telemetry], within_s: float) -> list[bool]:
    starts = np.array([s.start_ns for s in spikes], dtype=np.int64)
    ends = np.array([s.end_ns for s in spikes], dtype=np.int64) + round(within_s * 1e9)
    at = [int(np.searchsorted(starts, r.time_ns, side="right")) - 1 for r in rows]
    return [i < 0 or bool(r.time_ns > ends[i]) for i, r in zip(at, rows, strict=True)]


def feeds(curve: Curve, events: Sequence[PowerEvent], rows: Sequence[Telemetry]) -> Answer:
    """Say (c) whether PDUs report over-current or a high crest factor."""
    question = "do PDUs or supplies report over-current or a high crest factor?"
    crest = curve.crest_factor
    own = "" if crest is None else (
        f"the trace of {curve.domain} has a crest factor of {crest:.2f} at {curve.resolution_s * 1e3:.3g} ms"
        f" ({'high' if crest >= HIGH_CREST else 'not high'})"
    )  # fmt: skip
    loud = [e for e in events if any(word in e.kind.lower() for word in OVERCURRENT)]
    amps = [(r.domain, r.peak_current_a / r.current_a) for r in rows if r.current_a and r.peak_current_a]
    worst = max(amps, key=lambda a: a[1], default=None)
    parts = [f"{e.domain}: {e.kind}, {e.message}" for e in loud[:3]]
    if worst is not None:
        parts.append(f"{worst[0]} has drawn {worst[1]:.2f} times its present current")
    parts.append(own)
    text = "; ".join(p for p in parts if p)
    if loud or (worst is not None and worst[1] >= HIGH_CREST):
        return Answer(key="feeds", question=question, verdict="yes", evidence=text)
    if any(r.current_a is not None for r in rows) or events:
        return Answer(key="feeds", question=question, verdict="no", evidence=f"no over-current was logged; {text}")
    return Answer(
        key="feeds", question=question, verdict="unknown", evidence=f"no PDU or supply was read; {text}",
        needs="the Redfish or IPMI sensor (TESSERA_REDFISH_URL; `tessera doctor`), and events= with what it logged",
    )  # fmt: skip


def links(spikes: Sequence[Spike], rows: Sequence[Telemetry], traffic: Traffic, reach_s: float) -> Answer:
    """Say (d) whether there is NVLink or PCIe traffic during spikes."""
    question = "is there NVLink or PCIe traffic during spikes?"
    key = "links"
    if not spikes:
        return Answer(key=key, question=question, verdict="no", evidence="there is no spike")
    rated = [r for r in rows if any(k.startswith(LINKS) for k in r.activity_pct)]
    calm = _calm(spikes, rated, reach_s)
    rates = {name: _rate(rated, calm, name) for name in dict.fromkeys(_link(k) for r in rated for k in r.activity_pct)}
    parts = [
        f"{name} {inside:.0f} MiB/s in spikes, {_number(outside)} outside"
        for name, (inside, outside) in rates.items()
        if name and inside is not None
    ]
    share = f"copies or collectives run in {traffic.in_spikes:.0%} of the spikes' time, {traffic.outside:.0%} outside"
    none = "the timeline has no copy between host and device, nor a collective"
    text = "; ".join([*parts, share if traffic.copies or traffic.collectives else none])
    busy = any(inside is not None and inside >= TRAFFIC_MIB_PER_S for inside, _ in rates.values())
    if busy or traffic.in_spikes > 0.01:
        return Answer(key=key, question=question, verdict="yes", evidence=text)
    needs = "" if parts else "link rates of GPM (Hopper or later): kernels that reach a peer's memory are no copies"
    return Answer(key=key, question=question, verdict="no", evidence=text, needs=needs)


def _link(metric: str) -> str:
    """`nvlink_tx` -> nvlink; empty for what is no link."""
    return next((link for link in LINKS if metric.startswith(link)), "")


def _rate(rows: Sequence[Telemetry], calm: Sequence[bool], link: str) -> tuple[float | None, float | None]:
    """Mean MiB/s of a link, both ways, in readings during spikes and outside."""
    sums: tuple[list[float], list[float]] = ([], [])
    for row, quiet in zip(rows, calm, strict=True):
        values = [v for k, v in row.activity_pct.items() if link and _link(k) == link]
        if values:
            sums[quiet].append(sum(values))
    inside, outside = (sum(v) / len(v) if v else None for v in sums)
    return inside, outside


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f}"
