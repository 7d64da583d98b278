"""`analyze.power`: how high, how fast and how regularly the power swings, and what ran when it did.

Spikes and the checklist come from `correlate`, frequencies and ramps from `spectrum`; this module combines them by
domain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..attribute.fit import response_of
from ..errors import ArgumentError, MeasurementError
from ..profile.open_recording import open_recording
from ..profile.powerlog import read_power
from ..schema import PowerEvent, Telemetry
from ..timeline.columns import Timeline
from ..timeline.open_trace import is_trace
from ..trace import PowerTrace
from .alignment import SpikeWork, find_boundaries
from .correlate import (
    WITHIN_S,
    ChecklistAnswer,
    Correlation,
    add_aftermath,
    check_feeds,
    check_throttling,
    correlate,
    find_only_gpu,
    read_telemetry,
    select_rows,
    slowing_reasons,
    sort_telemetry,
)
from .devices import whole_span
from .kernel_names import short
from .result import Result, columns
from .spectrum import BAND_HZ, Ramp, Spectrum, alias_hz, compute_spectrum, even_parts, find_ramps, sensor_gain
from .spikes import NOISE_SIGMAS, Curve, Spike, choose_threshold, find_spikes, make_curve

TOTAL = "all counted"
NEEDS_TIMELINE = "a timeline of the same time: tessera analyze power TRACE --power LOG"
# A dominant frequency within this share of the step rate (or of two or three times it) is taken as the steps', if the
# lines are narrower still.
SAME = 0.02
Readings = Iterable[Telemetry] | Mapping[str, Sequence[Telemetry]]

COLUMNS = columns(
    ("domain", "domain"),
    ("peak_w", "peak"),
    ("mean_w", "mean"),
    ("p50_w", "p50", "not exceeded half of the time"),
    ("p99_w", "p99", "not exceeded 99% of the time"),
    ("crest_factor", "crest", "peak over root mean square of the current"),
    ("ramp_up_w_per_s", "ramp up", "steepest rise over one step of the sensor"),
    ("ramp_down_w_per_s", "ramp down", "steepest fall over one step of the sensor"),
    ("band_rms_w", "0.1-20 Hz", "root mean square of the swing in the band"),
    ("band_pct", "of the swing", "share of the variance that lies in the band"),
    ("dominant_hz", "dominant", "the strongest line that is not chance"),
    ("energy_j", "energy"),
    ("error_j", "±", "half-width of a 90% interval"),
    ("resolution_s", "every", "true resolution of the sensor"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleEpisode:
    """A stretch in which a device reported that it was slowed: from the first such reading to the first without.

    Times are nanoseconds of the wall clock, as exact as the interval of the readings.
    """

    domain: str
    reasons: tuple[str, ...]
    start_ns: int
    end_ns: int

    @property
    def time_s(self) -> float:
        return (self.end_ns - self.start_ns) * 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PowerResult(Result):
    """A `Result` whose rows are domains; `facts` are about `domain`, the one that is studied closely.

    `correlation` has every spike with what ran (None without a timeline; `spikes` are there all the same), `spectra`
    the periodograms by row, `throttled` the episodes.
    """

    domain: str = ""
    spikes: Sequence[Spike] = ()
    correlation: Correlation | None = None
    throttled: Sequence[ThrottleEpisode] = ()
    spectra: Mapping[str, Spectrum] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; spectra as their band and strongest line only."""
        spikes = {"spikes": [dataclasses.asdict(s) for s in self.spikes]}
        more = self.correlation.to_dict() if self.correlation else spikes
        throttled = [{**dataclasses.asdict(t), "time_s": t.time_s} for t in self.throttled]
        return {**Result.to_dict(self), "domain": self.domain, "throttled": throttled, **more}


def power(
    trace: Any,
    *,
    power: str | Path | PowerTrace | None = None,
    telemetry: Readings | None = None,
    threshold_w: float | None = None,
    domain: str | None = None,
) -> PowerResult:
    """Return peaks, percentiles, crest factor, ramps, the 0.1-20 Hz band, throttling and spikes of a power trace.

    `trace` is a run, a session, a timeline or Kineto trace (with `power`, a log or a `PowerTrace`), or a `PowerTrace`
    or a log (CSV) alone. Percentiles and means are by time. If something ran on a device, only that stretch is studied;
    `facts` also has mean and joules of all that was recorded (`recorded_mean_w`, `recorded_j`). Power above
    `threshold_w` counts as a spike (by default half-way from median to peak). `domain` is the one to study closely: by
    default the only GPU, else all counted ones together.
    """
    timeline, log, given, events, notes, is_run = _open(trace, power, telemetry)
    name = domain or find_only_gpu(log)
    running = timeline if timeline is not None and len(timeline.device_rows) > 0 else None
    window = _Window(log, running)
    focus, *others = window.study_all(name)
    readings = sort_telemetry(given if given is not None else read_telemetry(log))
    missing: dict[str, str] = {}
    correlation: Correlation | None = None
    if running is not None:
        correlation = correlate(
            running, log, threshold_w=threshold_w, telemetry=given or (), events=events, domain=domain
        )
        spikes, answers, level_w = correlation.spikes, correlation.checklist, correlation.threshold_w
        notes += correlation.notes
    else:
        level_w, spikes, answers = _find_spikes_alone(focus.curve, readings, threshold_w, events or log.events)
        has_rows = timeline is not None and len(timeline) > 0
        missing["what ran in the spikes"] = "nothing ran on a GPU here" if has_rows else NEEDS_TIMELINE
    if not readings:
        missing |= _explain_no_throttle(log, is_run)
    throttled = _episodes([t for t in readings if focus.curve.start_ns <= t.time_ns <= focus.curve.end_ns])
    step_hz = _step_hz(timeline)
    facts = window.facts(name) | focus.facts(step_hz)
    facts |= _throttle_facts(throttled) if readings else dict.fromkeys(("throttled_s", "throttle_reasons"))
    facts |= {"spikes": len(spikes), "spikes_s": sum(s.time_s for s in spikes), "spike_threshold_w": level_w}
    facts["checklist"] = {a.key: a.verdict for a in answers}
    notes += [f"{a.question} {a.verdict}: {a.evidence}" for a in answers]
    missing |= {f"checklist: {a.key}": a.needs for a in answers if a.needs and (readings or a.key != "throttle")}
    return PowerResult(
        kind="power",
        title=f"Power of {focus.curve.domain}{', from the first kernel to the last' if running is not None else ''}",
        columns=COLUMNS,
        rows=[r.row() for r in (focus, *others)],
        facts=facts,
        notes=[*focus.notes(), *notes],
        missing=missing,
        domain=focus.curve.domain,
        spikes=spikes,
        correlation=correlation,
        throttled=throttled,
        spectra={r.label: r.spectrum for r in (focus, *others) if r.spectrum is not None},
    )


def _open(
    trace: Any, power: str | Path | PowerTrace | None, telemetry: Readings | None
) -> tuple[Timeline | None, PowerTrace, Readings | None, Sequence[PowerEvent] | None, list[str], bool]:
    """Return timeline, power, telemetry, events, notes, and whether it is a run of ours."""
    if isinstance(trace, str | Path) and power is None and Path(trace).suffix == ".csv" and not is_trace(Path(trace)):
        trace = read_power(trace)
    if isinstance(trace, PowerTrace):
        if power is not None:
            raise ArgumentError("the power is given twice", fix="analyze.power(power_trace), or a trace and power=")
        return None, trace, telemetry, None, [], False
    recording = open_recording(trace, power=power)
    log = recording.power
    if log is None or not log.columns:
        raise MeasurementError(
            f"no power was recorded with {recording.facts.name}",
            why="there is nothing to analyse",
            fix="`tessera doctor` shows which sensors are available"
            if recording.facts.kind == "run"
            else "give the power log of the same time: power='power.csv', or --power power.csv",
        )
    readings = telemetry if telemetry is not None else (recording.telemetry or None)
    is_run = recording.facts.kind == "run"
    return recording.timeline, log, readings, recording.events or None, list(recording.notes), is_run


def _has_two(log: PowerTrace, domain: str) -> bool:
    """Return whether a domain has at least two samples: with one there are neither ramps nor percentiles."""
    return int(np.sum(~np.isnan(log.columns[domain].watts))) > 1


class _Window:
    """A power trace over the stretch in which something ran, or over all of it."""

    def __init__(self, log: PowerTrace, timeline: Timeline | None) -> None:
        self.log, self.timeline = log, timeline
        self.start_ns, self.end_ns = int(log.start_ns), int(log.end_ns)
        if timeline is not None:
            self.start_ns, self.end_ns = whole_span(timeline, timeline.device_rows)

    def facts(self, domain: str | None) -> dict[str, Any]:
        """Return the window that is studied, and mean and joules of all that was recorded, as attribution has them."""
        window_s = (self.end_ns - self.start_ns) * 1e-9
        if self.timeline is None:
            return {"recorded_s": window_s}
        start_ns, end_ns = max(self.timeline.start_ns, self.log.start_ns), min(self.timeline.end_ns, self.log.end_ns)
        spent = self.log.energy(domain, start_ns, end_ns)
        facts = {"window_s": window_s, "recorded_s": spent.time_s, "recorded_j": spent.energy_j}
        facts["recorded_error_j"] = spent.error_j
        return facts | {"recorded_mean_w": spent.energy_j / spent.time_s if spent.time_s > 0 else None}

    def study(self, domain: str | None) -> _DomainStudy:
        """Study one domain, or all counted ones together."""
        return _DomainStudy(self, domain, make_curve(self.log, domain, self.start_ns, self.end_ns))

    def study_all(self, first: str | None) -> list[_DomainStudy]:
        """Study the domain asked for first, then the others that have a curve, then the sum of the counted ones."""
        focus, names = self.study(first), [d.name for d in self.log.domains]
        others = [self.study(name) for name in names if name != focus.curve.domain and _has_two(self.log, name)]
        several = first is not None and sum(d.counted for d in self.log.domains) > 1
        return [focus, *others, *([self.study(None)] if several else [])]


class _DomainStudy:
    """The figures of one curve."""

    def __init__(self, window: _Window, domain: str | None, curve: Curve) -> None:
        self.log, self.timeline, self.domain, self.curve = window.log, window.timeline, domain, curve
        self.label = TOTAL if domain is None and curve.is_sum else curve.domain
        parts = even_parts(curve)
        self.longest = max(parts, key=lambda p: p.seconds, default=None)
        self.spectrum = compute_spectrum(self.longest) if self.longest else None
        self.peak = self.spectrum.peak() if self.spectrum else None
        self.up, self.down = find_ramps(parts)
        highest_w = float(np.nanmax(np.maximum(curve.begin_w, curve.end_w)))
        self.peak_w = max(highest_w, self._merged_peak_w())
        crest = curve.crest_factor
        self.crest_factor = None if crest is None else crest * self.peak_w / highest_w

    def _merged_peak_w(self) -> float:
        """Return the peak of a long live trace, whose old rows hold the highest sample of each second."""
        if self.curve.is_sum:
            return 0.0  # the peaks of several domains need not be at the same moment
        column = self.log.columns[self.curve.domain].at_resolution
        moved = column.times_ns - column.lag_ns
        inside = (moved > self.curve.start_ns) & (moved <= self.curve.end_ns) & ~np.isnan(column.peaks_w)
        return float(np.max(column.peaks_w[inside], initial=0.0))

    @property
    def band_w2(self) -> float | None:
        """Return the mean square of the swing within 0.1-20 Hz."""
        return self.spectrum.band_w2(*BAND_HZ) if self.spectrum else None

    def row(self) -> dict[str, Any]:
        spent = self.log.energy(self.domain, self.curve.start_ns, self.curve.end_ns)
        s, band_w2 = self.spectrum, self.band_w2
        return {
            "domain": self.label,
            "peak_w": self.peak_w,
            "mean_w": self.curve.mean_w,
            "p50_w": self.curve.percentile(50.0),
            "p99_w": self.curve.percentile(99.0),
            "crest_factor": self.crest_factor,
            "ramp_up_w_per_s": self.up and self.up.watts_per_s,
            "ramp_down_w_per_s": self.down and self.down.watts_per_s,
            "band_w2": band_w2,
            "band_rms_w": None if band_w2 is None else math.sqrt(band_w2),
            "band_pct": 100.0 * band_w2 / s.ac_w2 if s is not None and band_w2 is not None and s.ac_w2 > 0 else None,
            "dominant_hz": self.peak and self.peak.frequency_hz,
            "energy_j": spent.energy_j,
            "error_j": spent.error_j,
            "resolution_s": self.curve.resolution_s,
            "source": spent.source,
            "basis": spent.basis,
        }

    def facts(self, step_hz: float | None) -> dict[str, Any]:
        """Return the figures for which the table has no column."""
        s = self.spectrum
        facts: dict[str, Any] = {"band_w2": self.band_w2, "ramp_noise_w_per_s": self.noise_w_per_s}
        facts["during"] = {"ramp_up": self._describe(self.up), "ramp_down": self._describe(self.down)}
        if s is not None:
            column = self.log.columns.get(self.curve.domain)
            shown = sensor_gain(response_of(column.domain, s.step_s), BAND_HZ[1]) if column else None
            facts |= {"resolvable_from_hz": s.resolvable_hz[0], "resolvable_to_hz": s.resolvable_hz[1]}
            facts["shown_at_20_hz_pct"] = None if shown is None else 100.0 * shown
        facts |= {"dominant_hz": self.peak and self.peak.frequency_hz, "step_hz": step_hz}
        return facts | {"dominant_is": self._compare_with_steps(step_hz)}

    def _compare_with_steps(self, step_hz: float | None) -> str | None:
        """Say whether the dominant frequency is that of the steps."""
        peak, s = self.peak, self.spectrum
        if peak is None or step_hz is None or s is None:
            return None
        for times, what in ((1, "the step rate"), (2, "twice the step rate"), (3, "three times the step rate")):
            shown_hz = alias_hz(times * step_hz, s.step_s)
            if abs(peak.frequency_hz - shown_hz) <= max(1.5 * peak.width_hz, SAME * shown_hz):
                is_slow = times * step_hz <= s.resolvable_hz[1]
                return what if is_slow else f"{what}, folded back: it is too fast for the sensor"
        return f"not the step rate ({step_hz:.3g} Hz)"

    def _describe(self, ramp: Ramp | None) -> str | None:
        """Say what ran at a ramp: the nearest boundary, and the kernel that ran longest within the sensor's reach."""
        if ramp is None or self.timeline is None:
            return None
        rows, _ = select_rows(self.timeline, self.domain)
        moment = Spike(
            number=1,
            start_ns=(ramp.start_ns + ramp.end_ns) // 2,
            end_ns=ramp.end_ns,
            foot_ns=ramp.start_ns,
            peak_ns=ramp.end_ns,
            peak_w=0.0,
            rise_w_per_s=None,
        )
        work = SpikeWork(self.timeline, rows, self.curve, [moment])
        moment = work.describe(moment, find_boundaries(self.timeline, rows, self.curve))
        parts = [f"{edge.kind} ({short(edge.name, 'kernel')})" for edge in moment.boundaries[:1]]
        parts += [f"{short(kernel.name, 'kernel')} {kernel.share:.0%} of it" for kernel in moment.kernels[:1]]
        return "; ".join(parts) or "nothing ran"

    @property
    def noise_w_per_s(self) -> float | None:
        """Return the ramp that the sensor's noise alone shows for a flat load."""
        if self.longest is None:
            return None
        return NOISE_SIGMAS * math.sqrt(2.0) * self.curve.noise * self.curve.mean_w / self.longest.step_s

    def notes(self) -> list[str]:
        """Return notes on what the sensor cannot show."""
        s, noise = self.spectrum, self.noise_w_per_s
        if s is None:
            return ["too few samples for a spectrum: record longer"]
        ramps = [(way, ramp) for way, ramp in (("rise", self.up), ("fall", self.down)) if ramp is not None]
        notes = [
            f"steepest {way}, {abs(r.watts_per_s):,.0f} W/s over {s.step_s * 1e3:.3g} ms: {self._describe(r)}"
            for way, r in (ramps if self.timeline is not None else ())
        ]
        if ramps and self.timeline is None:
            notes.append(f"ramps are over one sample of {s.step_s * 1e3:.3g} ms: a utility means those over a second")
        low, high = s.resolvable_hz
        seen = f"{max(low, BAND_HZ[0]):.3g}-{min(high, BAND_HZ[1]):.3g} Hz"
        if seen != "0.1-20 Hz":  # ten seconds less a sample miss nothing that can be written
            notes.append(
                f"of 0.1-20 Hz only {seen} can be resolved:"
                f" samples {s.step_s * 1e3:.3g} ms apart over {s.seconds:.3g} s"
            )
        if s.seconds < 0.9 * float(np.sum(self.curve.seconds)):
            notes.append(f"the spectrum is of the longest stretch without a gap, {s.seconds:.3g} s")
        coarse = np.diff(self.curve.edges_ns) * 1e-9 > 3.0 * self.curve.resolution_s
        share = float(np.sum(self.curve.seconds[coarse]) / np.sum(self.curve.seconds))
        if share > 0.05:
            notes.append(f"{share:.0%} of the time has samples further apart than the sensor's resolution")
        if noise is not None and max((abs(r.watts_per_s) for _, r in ramps), default=0.0) <= noise:
            notes.append(f"the ramps are within the sensor's noise ({noise:.3g} W/s)")
        return notes


def _step_hz(timeline: Timeline | None) -> float | None:
    """Return steps per second, by the median distance of their starts; None for fewer than three."""
    starts = [step.start_ns for step in timeline.linked.steps] if timeline is not None and len(timeline) else []
    if len(starts) < 3:
        return None
    apart_s = float(np.median(np.diff(starts))) * 1e-9
    return 1.0 / apart_s if apart_s > 0 else None


def _find_spikes_alone(
    curve: Curve, readings: Sequence[Telemetry], threshold_w: float | None, events: Sequence[PowerEvent]
) -> tuple[float, Sequence[Spike], Sequence[ChecklistAnswer]]:
    """Find spikes without a timeline, and answer what of the checklist can be answered then."""
    level_w = choose_threshold(curve) if threshold_w is None else threshold_w
    if not level_w > 0:
        raise ArgumentError(f"threshold_w={threshold_w!r} is not positive", fix="leave it out, or give watts")
    own = [t for t in readings if curve.is_sum or t.domain in curve.domains]
    spikes = [add_aftermath(s, own, WITHIN_S) for s in find_spikes(curve, level_w)]
    return level_w, spikes, (check_throttling(spikes, own, WITHIN_S), check_feeds(curve, events, readings))


def _explain_no_throttle(log: PowerTrace, is_run: bool) -> dict[str, str]:
    """Return why it is not known whether the device throttled."""
    if not is_run:
        return {"throttle": "throttling is not in a power log: record with `tessera run`"}
    if not any(d.device.is_gpu for d in log.domains):
        return {}
    return {"throttle": "the GPU did not report in this run whether it throttled: `tessera doctor`"}


def _throttle_facts(episodes: Sequence[ThrottleEpisode]) -> dict[str, Any]:
    reasons = dict.fromkeys(r for t in episodes for r in t.reasons)
    return {"throttled_s": sum(t.time_s for t in episodes), "throttle_reasons": ", ".join(reasons)}


def _episodes(readings: Sequence[Telemetry]) -> list[ThrottleEpisode]:
    """Return throttling by domain, in time order (readings: sorted)."""
    episodes: list[ThrottleEpisode] = []
    for domain in dict.fromkeys(t.domain for t in readings):
        since: int | None = None
        reasons: dict[str, None] = {}
        own = [t for t in readings if t.domain == domain]
        for t in own:
            now = slowing_reasons(t)
            if now:
                since = t.time_ns if since is None else since
                reasons |= dict.fromkeys(now)
            if since is not None and (not now or t is own[-1]):
                episode = ThrottleEpisode(domain=domain, reasons=tuple(reasons), start_ns=since, end_ns=t.time_ns)
                episodes.append(episode)
                since, reasons = None, {}
    return sorted(episodes, key=lambda t: t.start_ns)
