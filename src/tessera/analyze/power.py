"""`analyze.power`: how high, how fast and how regularly the power swings, and what ran when it did.

Spikes and the checklist are `correlate`'s, frequencies and ramps `spectrum`'s; this puts them side by side by domain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..attribute.response import response_of
from ..errors import ArgumentError, MeasurementError
from ..schema import Telemetry
from ..timeline.columns import Timeline
from ..trace import PowerTrace
from . import checklist
from .alignment import Work, boundaries
from .correlate import WITHIN_S, Correlation, _device_rows, _flatten, _only_gpu, _own_telemetry, correlate
from .kernel_names import short
from .result import Column, Result
from .source import open_source
from .spectrum import BAND_HZ, Even, Peak, Ramp, Spectrum, even_parts, gain, ramps, seen_at_hz, spectrum
from .spikes import NOISE_SIGMAS, Curve, Spike, curve_of, find, threshold_of

TOTAL = "all counted"
# A dominant frequency this near the step rate (or twice, three times it) is it, where the lines are narrower still.
SAME = 0.02
ALIKE = 0.005  # two rates this near read alike in the three digits of a report
Told = Iterable[Telemetry] | Mapping[str, Sequence[Telemetry]]

COLUMNS = (
    Column(key="domain", title="domain"),
    Column(key="peak_w", title="peak", unit="W"),
    Column(key="mean_w", title="mean", unit="W"),
    Column(key="p50_w", title="p50", unit="W", help="not exceeded half of the time"),
    Column(key="p99_w", title="p99", unit="W", help="not exceeded 99% of the time"),
    Column(key="crest_factor", title="crest", help="peak over root mean square of the current"),
    Column(key="ramp_up_w_per_s", title="ramp up", unit="W/s", help="steepest rise over one step of the sensor"),
    Column(key="ramp_down_w_per_s", title="ramp down", unit="W/s", help="steepest fall over one step of the sensor"),
    Column(key="band_rms_w", title="0.1-20 Hz", unit="W", help="root mean square of the swing in the band"),
    Column(key="band_pct", title="of the swing", unit="%", help="share of the variance that lies in the band"),
    Column(key="dominant_hz", title="dominant", unit="Hz", help="the strongest line that is no chance"),
    Column(key="energy_j", title="energy", unit="J"),
    Column(key="energy_error_j", title="±", unit="J", help="half-width of a 90% interval"),
    Column(key="resolution_s", title="every", unit="s", help="true resolution of the sensor"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttled:
    """A stretch in which a device said it was slowed: from the first reading that says so to the first that does not.

    Times are nanoseconds of the wall clock, as exact as the readings are close.
    """

    domain: str
    reasons: tuple[str, ...]
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """How long."""
        return (self.end_ns - self.start_ns) * 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerResult(Result):
    """A `Result` whose rows are domains; `facts` are of `domain`, the one looked at closely.

    `correlation` has every spike with what ran (None without a timeline; `spikes` are there all the same),
    `spectra` the periodograms by row, `throttled` the episodes.
    """

    domain: str = ""
    spikes: Sequence[Spike] = ()
    correlation: Correlation | None = None
    throttled: Sequence[Throttled] = ()
    spectra: Mapping[str, Spectrum] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data; spectra as their band and strongest line only."""
        found = self.correlation
        more = found.to_json() if found else {"spikes": [dataclasses.asdict(s) for s in self.spikes]}
        slow = [{**dataclasses.asdict(t), "seconds": t.seconds} for t in self.throttled]
        return {**Result.to_json(self), "domain": self.domain, "throttled": slow, **more}


def power(
    trace: Any,
    *,
    power: str | Path | PowerTrace | None = None,
    telemetry: Told | None = None,
    threshold_w: float | None = None,
    domain: str | None = None,
) -> PowerResult:
    """Peaks, percentiles, crest factor, ramps, the 0.1-20 Hz band, throttling and spikes of a power trace.

    `trace` is a run, a session, a timeline or Kineto trace (with `power`, a log or a `PowerTrace`), or a `PowerTrace`
    alone. Percentiles and means are by time. Where something ran on a device, only that stretch is looked at;
    `facts` has mean and joules of all that was recorded beside it (`recorded_mean_w`, `recorded_j`).
    `threshold_w` is what counts as a spike (the 95th percentile unless given), `domain` the one to look at closely:
    the GPU where there is one, else all counted ones together.
    """
    timeline, log, told, notes, recorded = _opened(trace, power, telemetry)
    name = domain or _only_gpu(log)
    ran = timeline is not None and len(timeline.device_rows) > 0
    look = _Look(log, timeline if ran else None)
    focus = look.at(name)
    rows = [focus, *(look.at(d.name) for d in log.domains if d.name != focus.curve.domain and _known(log, d.name))]
    if name is not None and sum(d.counted for d in log.domains) > 1:
        rows.append(look.at(None))
    readings = _flatten(told if told is not None else _own_telemetry(log))
    missing: dict[str, str] = {}
    found: Correlation | None = None
    if ran and timeline is not None:
        found = correlate(timeline, log, threshold_w=threshold_w, telemetry=told or (), domain=domain)
        spikes, answers, level_w = found.spikes, found.checklist, found.threshold_w
        notes += found.notes
    else:
        level_w, spikes, answers = _alone(focus.curve, readings, threshold_w)
        missing["what ran in the spikes"] = (
            "nothing ran on a GPU here" if timeline is not None and len(timeline) else
            "a timeline of the same time: tessera analyze power TRACE --power LOG"
        )  # fmt: skip
    if not readings and not recorded:
        missing["throttle"] = "throttling is not in a power log: record with `tessera run`"
    elif not readings and any(d.device.is_gpu for d in log.domains):
        missing["throttle"] = "the GPU did not say in this run whether it throttled: `tessera doctor`"
    slow = _throttled([t for t in readings if focus.curve.start_ns <= t.time_ns <= focus.curve.end_ns])
    facts = _facts(focus, spikes, level_w, slow, bool(readings), _step_hz(timeline))
    facts = look.facts(name) | facts
    facts["checklist"] = {a.key: a.verdict for a in answers}
    notes += _of_which_step(timeline, facts["step_hz"])
    notes += [f"{a.question} {a.verdict}: {a.evidence}" for a in answers]
    told_already = () if readings else ("throttle",)
    missing |= {f"checklist: {a.key}": a.needs for a in answers if a.needs and a.key not in told_already}
    return PowerResult(
        kind="power", title=f"Power of {focus.curve.domain}{look.said}", columns=COLUMNS, rows=[r.row() for r in rows],
        facts=facts, notes=[*focus.notes(), *notes], missing=missing, domain=focus.curve.domain, spikes=spikes,
        correlation=found, throttled=slow, spectra={r.label: r.spectrum for r in rows if r.spectrum is not None},
    )  # fmt: skip


def _opened(
    trace: Any, power: str | Path | PowerTrace | None, telemetry: Told | None
) -> tuple[Timeline | None, PowerTrace, Told | None, list[str], bool]:
    """What was given, and whether it is a run of ours: then nobody need be told to record one."""
    if isinstance(trace, PowerTrace):
        if power is not None:
            raise ArgumentError("the power is given twice", fix="analyze.power(power_trace), or a trace and power=")
        return None, trace, telemetry, [], False
    if isinstance(power, (str, Path)):
        from ..profile.powerlog import read_power

        power = read_power(power)
    source = open_source(trace, power=power)
    log = source.power if power is None else power
    if log is None or not log.columns:
        raise MeasurementError(
            f"no power was recorded beside {source.name}", why="there is nothing to look at",
            fix="`tessera doctor` says which sensors can be read" if source.run is not None else
            "give the power log of the same time: power='power.csv'",
        )  # fmt: skip
    told = telemetry if telemetry is not None else (source.telemetry or None)
    return source.timeline, log, told, list(source.notes), source.run is not None


def _known(log: PowerTrace, domain: str) -> bool:
    """Whether a domain has two samples at least: one has neither ramps nor percentiles."""
    return int(np.sum(~np.isnan(log.columns[domain].watts))) > 1


class _Look:
    """One trace, looked at by domain, over the stretch in which something ran."""

    def __init__(self, log: PowerTrace, timeline: Timeline | None) -> None:
        self.log, self.timeline = log, timeline
        if timeline is not None:
            rows = timeline.device_rows
            self.start_ns, self.end_ns = int(timeline["start_ns"][rows].min()), int(timeline["end_ns"][rows].max())
        else:
            self.start_ns, self.end_ns = log.start_ns, log.end_ns

    @property
    def said(self) -> str:
        """What the rows are of, in words."""
        return ", from the first kernel to the last" if self.timeline is not None else ""

    def facts(self, domain: str | None) -> dict[str, Any]:
        """The window looked at, and mean and joules of all that was recorded, as attribution and reports have them."""
        if self.timeline is None:
            return {"recorded_s": (self.end_ns - self.start_ns) * 1e-9}
        start_ns = max(self.timeline.start_ns, self.log.start_ns)
        spent = self.log.energy(domain, start_ns, min(self.timeline.end_ns, self.log.end_ns))
        return {
            "window_s": (self.end_ns - self.start_ns) * 1e-9, "recorded_s": spent.seconds, "recorded_j": spent.joules,
            "recorded_error_j": spent.error_j,
            "recorded_mean_w": spent.joules / spent.seconds if spent.seconds > 0 else None,
        }  # fmt: skip

    def at(self, domain: str | None) -> _Domain:
        """One domain, or all counted ones together."""
        return _Domain(self, domain, curve_of(self.log, domain, self.start_ns, self.end_ns))


class _Domain:
    """The figures of one curve."""

    def __init__(self, look: _Look, domain: str | None, curve: Curve) -> None:
        self.log, self.timeline, self.asked, self.curve = look.log, look.timeline, domain, curve
        self.label = TOTAL if domain is None and "+" in curve.domain else curve.domain
        self.parts = even_parts(curve)
        self.longest: Even | None = max(self.parts, key=lambda p: p.seconds, default=None)
        self.spectrum = spectrum(self.longest) if self.longest else None
        self.peak: Peak | None = self.spectrum.peak() if self.spectrum else None
        self.up, self.down = ramps(self.parts)
        drawn = float(np.nanmax(np.maximum(curve.begin_w, curve.end_w)))
        self.peak_w = max(drawn, self._merged_peak_w())
        crest = curve.crest_factor
        self.crest_factor = None if crest is None else crest * self.peak_w / drawn

    def _merged_peak_w(self) -> float:
        """A long live trace keeps rows of a second with the highest sample of each: that peak counts."""
        if self.asked is None and "+" in self.curve.domain:
            return 0.0  # the peaks of several domains need not be at one moment
        column = self.log.columns[self.curve.domain]
        moved = column.times_ns - column.lag_ns
        inside = (moved > self.curve.start_ns) & (moved <= self.curve.end_ns) & ~np.isnan(column.peaks_w)
        return float(np.max(column.peaks_w[inside], initial=0.0))

    @property
    def band_w2(self) -> float | None:
        return self.spectrum.band_w2(*BAND_HZ) if self.spectrum else None

    @property
    def band_pct(self) -> float | None:
        s = self.spectrum
        return 100.0 * s.band_w2(*BAND_HZ) / s.ac_w2 if s is not None and s.ac_w2 > 0 else None

    def row(self) -> dict[str, Any]:
        spent = self.log.energy(self.asked, self.curve.start_ns, self.curve.end_ns)
        return {
            "domain": self.label, "peak_w": self.peak_w, "mean_w": self.curve.mean_w,
            "p50_w": self.curve.percentile(50.0), "p99_w": self.curve.percentile(99.0),
            "crest_factor": self.crest_factor, "ramp_up_w_per_s": self.up and self.up.watts_per_s,
            "ramp_down_w_per_s": self.down and self.down.watts_per_s, "band_w2": self.band_w2,
            "band_rms_w": None if self.band_w2 is None else math.sqrt(self.band_w2), "band_pct": self.band_pct,
            "dominant_hz": self.peak and self.peak.frequency_hz, "energy_j": spent.joules,
            "energy_error_j": spent.error_j, "resolution_s": self.curve.resolution_s, "source": spent.source,
            "basis": spent.basis,
        }  # fmt: skip

    def during(self, ramp: Ramp | None) -> str | None:
        """What ran at a ramp: the nearest boundary, and the kernel that ran longest within the sensor's reach."""
        if ramp is None or self.timeline is None:
            return None
        rows, _ = _device_rows(self.timeline, self.asked)
        middle_ns = (ramp.start_ns + ramp.end_ns) // 2
        moment = Spike(
            number=1, start_ns=middle_ns, end_ns=ramp.end_ns, foot_ns=ramp.start_ns, peak_ns=ramp.end_ns, peak_w=0.0,
            rise_w_per_s=None,
        )  # fmt: skip
        work = Work(self.timeline, rows, self.curve, [moment])
        tied = work.tied(moment, boundaries(self.timeline, rows, self.curve))
        near = tied.boundaries[0] if tied.boundaries else None
        edge = f"{near.kind} ({short(near.name, 'kernel')})" if near else ""
        kernel = f"{short(tied.kernels[0].name, 'kernel')} {tied.kernels[0].share:.0%} of it" if tied.kernels else ""
        return "; ".join(part for part in (edge, kernel) if part) or "nothing ran"

    @property
    def noise_w_per_s(self) -> float | None:
        """The ramp that the sensor's noise alone makes of a flat load."""
        if self.longest is None:
            return None
        return NOISE_SIGMAS * math.sqrt(2.0) * self.curve.noise * self.curve.mean_w / self.longest.step_s

    def notes(self) -> list[str]:
        """What the sensor cannot show."""
        s, noise = self.spectrum, self.noise_w_per_s
        if s is None:
            return ["too few samples for a spectrum: record longer"]
        notes = [
            f"steepest {way}, {abs(ramp.watts_per_s):,.0f} W/s over {s.step_s * 1e3:.3g} ms: {self.during(ramp)}"
            for way, ramp in (("rise", self.up), ("fall", self.down))
            if ramp is not None and self.timeline is not None
        ]
        low, high = s.resolvable_hz
        if low > BAND_HZ[0] or high < BAND_HZ[1]:
            notes.append(
                f"of 0.1-20 Hz only {max(low, BAND_HZ[0]):.3g}-{min(high, BAND_HZ[1]):.3g} Hz can be resolved:"
                f" samples {s.step_s * 1e3:.3g} ms apart over {s.seconds:.3g} s"
            )
        if s.seconds < 0.9 * float(np.sum(self.curve.seconds)):
            notes.append(f"the spectrum is of the longest stretch without a gap, {s.seconds:.3g} s")
        coarse = np.diff(self.curve.edges_ns) * 1e-9 > 3.0 * self.curve.resolution_s
        share = float(np.sum(self.curve.seconds[coarse]) / np.sum(self.curve.seconds))
        if share > 0.05:
            notes.append(f"{share:.0%} of the time has samples further apart than the sensor's resolution")
        if noise is not None and max((abs(r.watts_per_s) for r in (self.up, self.down) if r), default=0.0) <= noise:
            notes.append(f"the ramps are within the sensor's noise ({noise:.3g} W/s)")
        return notes


def _facts(
    at: _Domain, spikes: Sequence[Spike], level_w: float, slow: Sequence[Throttled], told: bool,
    step_hz: float | None,
) -> dict[str, Any]:  # fmt: skip
    row, s = at.row(), at.spectrum
    facts: dict[str, Any] = {"band_w2": at.band_w2, "ramp_noise_w_per_s": at.noise_w_per_s}
    facts["during"] = {"ramp_up": at.during(at.up), "ramp_down": at.during(at.down)}
    if s is not None:
        column = at.log.columns.get(at.curve.domain)
        facts |= {"resolvable_from_hz": s.resolvable_hz[0], "resolvable_to_hz": s.resolvable_hz[1]}
        shown = gain(response_of(column.domain, s.step_s), BAND_HZ[1]) if column else None
        facts["shown_at_20_hz_pct"] = None if shown is None else 100.0 * shown
    facts |= {"dominant_hz": row["dominant_hz"], "step_hz": step_hz, "dominant_is": _named(at.peak, step_hz, s)}
    facts["throttled_s"] = sum(t.seconds for t in slow) if told else None
    facts["throttle_reasons"] = ", ".join(dict.fromkeys(r for t in slow for r in t.reasons)) if told else None
    facts |= {"spikes": len(spikes), "spikes_s": sum(x.seconds for x in spikes)}
    facts["spike_threshold_w"] = level_w
    return facts


def _step_hz(timeline: Timeline | None) -> float | None:
    """Steps a second: by the middle distance of their starts; None for fewer than three."""
    starts = [step.start_ns for step in timeline.linked.steps] if timeline is not None and len(timeline) else []
    if len(starts) < 3:
        return None
    apart_s = float(np.median(np.diff(starts))) * 1e-9
    return 1.0 / apart_s if apart_s > 0 else None


def _of_which_step(timeline: Timeline | None, step_hz: float | None) -> list[str]:
    """Why this is not the steps/s of a report, where it is not."""
    if timeline is None or step_hz is None:
        return []
    mean_s = float(np.mean([step.end_ns - step.start_ns for step in timeline.linked.steps])) * 1e-9
    if abs(mean_s * step_hz - 1.0) < ALIKE:
        return []
    return [
        f"{step_hz:.4g} Hz is the rate of the middle step, to compare frequencies with; the steps/s of a report are of "
        "the mean step, long and short ones included"
    ]


def _named(peak: Peak | None, step_hz: float | None, s: Spectrum | None) -> str | None:
    """Whether the dominant frequency is that of the steps, in words."""
    if peak is None or step_hz is None or s is None:
        return None
    for times, what in ((1, "the step rate"), (2, "twice the step rate"), (3, "three times the step rate")):
        shown = seen_at_hz(times * step_hz, s.step_s)
        if abs(peak.frequency_hz - shown) <= max(1.5 * peak.width_hz, SAME * shown):
            folded = "" if times * step_hz <= s.resolvable_hz[1] else ", folded back: it is too fast for the sensor"
            return what + folded
    return f"not the step rate ({step_hz:.3g} Hz)"


def _alone(
    curve: Curve, readings: Sequence[Telemetry], threshold_w: float | None
) -> tuple[float, Sequence[Spike], Sequence[checklist.Answer]]:
    """Spikes without a timeline, and what of the checklist can be answered then."""
    level_w = threshold_of(curve, 95.0) if threshold_w is None else threshold_w
    if not level_w > 0:
        raise ArgumentError(f"threshold_w={threshold_w!r} is not positive", fix="leave it out, or give watts")
    mine = [t for t in readings if t.domain == curve.domain or "+" in curve.domain]
    spikes = [checklist.aftermath(s, mine, WITHIN_S) for s in find(curve, level_w)]
    return level_w, spikes, (checklist.throttling(spikes, mine, WITHIN_S), checklist.feeds(curve, (), readings))


def _throttled(readings: Sequence[Telemetry]) -> list[Throttled]:
    """Episodes by domain, in time order (readings: wall clock, sorted)."""
    out: list[Throttled] = []
    for domain in dict.fromkeys(t.domain for t in readings):
        since: int | None = None
        reasons: dict[str, None] = {}
        mine = [t for t in readings if t.domain == domain]
        for t in mine:
            now = checklist.slowing(t)
            if now:
                since = t.time_ns if since is None else since
                reasons |= dict.fromkeys(now)
            elif since is not None:
                out.append(Throttled(domain=domain, reasons=tuple(reasons), start_ns=since, end_ns=t.time_ns))
                since, reasons = None, {}
        if since is not None:
            out.append(Throttled(domain=domain, reasons=tuple(reasons), start_ns=since, end_ns=mine[-1].time_ns))
    return sorted(out, key=lambda t: t.start_ns)
