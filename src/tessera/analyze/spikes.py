r"""Where a power trace spikes, and whether that falls on something more often than chance would have it.

A trace is straight pieces of watts over wall-clock time, moved back by the sensor's lag. What the sensor
shows at one moment may have happened up to `reach_s` earlier or later (its blur, or half the spacing of its samples):

::

    watts      ______/‾‾‾‾‾\______          foot: where the rise begins     start, end: above the threshold
                    ^ ^     ^
                 foot start end              window: [start - reach, end + reach]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..attribute.time_zones import explain_no_overlap
from ..errors import ArgumentError, MeasurementError
from ..joules import WHOLE, Floats, Ints
from ..notes import name_several
from ..timeline.intervals import Spans, covered_ns, union
from ..trace import PowerTrace, _between, _shared_grid
from ..units import format_power

# A flat load's samples scatter by the sensor's noise: of 100,000 samples, the highest is 4.3 standard deviations up.
NOISE_SIGMAS = 5.0
# Less than this excess over the mean is not called a spike, however quiet the sensor is.
MIN_EXCESS = 0.05
# Noise of a sensor that does not state its own: that of the only sensor we have fitted (the H200's ring).
ASSUMED_NOISE = 0.012
# A dip of less than this many standard deviations below the threshold does not end a spike.
DIP_SIGMAS = 2.0
SPIKES_SHARE = 0.25
"""Power that is above half-way to the peak for more than this share of the time is a level, not spikes: chosen."""
MAX_BINS = 1 << 20
MIN_BINS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Watts over wall-clock time: piece i runs straight from `begin_w[i]` to `end_w[i]`; NaN where nothing is known."""

    edges_ns: Ints
    begin_w: Floats
    end_w: Floats
    domains: tuple[str, ...]
    reach_s: float
    resolution_s: float
    noise: float

    @property
    def domain(self) -> str:
        """What the curve is of, in words: one domain or the sum of several."""
        return name_several(list(self.domains)).replace(", ", "+")

    @property
    def is_sum(self) -> bool:
        return len(self.domains) > 1

    @property
    def start_ns(self) -> int:
        return int(self.edges_ns[0])

    @property
    def end_ns(self) -> int:
        return int(self.edges_ns[-1])

    @property
    def is_known(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.end_w)

    @property
    def known_spans(self) -> Spans:
        at = np.flatnonzero(self.is_known)
        return union(self.edges_ns[at], self.edges_ns[at + 1])

    @property
    def seconds(self) -> Floats:
        """Return lengths of the pieces, 0 where nothing is known."""
        return np.where(self.is_known, np.diff(self.edges_ns) * 1e-9, 0.0)

    @property
    def mean_w(self) -> float:
        """Return the mean power over what is known."""
        seconds = self.seconds
        return float(np.nansum(0.5 * (self.begin_w + self.end_w) * seconds) / np.sum(seconds))

    @property
    def crest_factor(self) -> float | None:
        """Return peak over root mean square, as `PowerTrace.crest_factor`, for this stretch alone."""
        seconds, b, e = self.seconds, self.begin_w, self.end_w
        rms = math.sqrt(float(np.nansum((b * b + b * e + e * e) / 3.0 * seconds) / np.sum(seconds)))
        return float(np.nanmax(np.maximum(b, e))) / rms if rms > 0 else None

    def percentile(self, q: float) -> float:
        """Return power not exceeded q% of the time."""
        chosen, seconds = self.is_known, self.seconds
        watts = np.concatenate([self.begin_w[chosen], self.end_w[chosen]])
        weights = np.concatenate([seconds[chosen], seconds[chosen]])
        order = np.argsort(watts)
        share = np.cumsum(weights[order])
        return float(np.interp(q / 100.0, (share - 0.5 * weights[order]) / share[-1], watts[order]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A stretch above the threshold (wall clock, ns). `rise_w_per_s` is the steepest rise the sensor showed into it.

    The sensor's blur flattens a rise, so the true one is at least as steep. `correlate` fills in what ran in it;
    `throttle` is None if no telemetry was read.
    """

    number: int
    start_ns: int
    end_ns: int
    foot_ns: int
    peak_ns: int
    peak_w: float
    rise_w_per_s: float | None
    kernels: tuple[Any, ...] = ()
    boundaries: tuple[Any, ...] = ()
    throttle: tuple[str, ...] | None = None
    clock_before_mhz: float | None = None
    clock_after_mhz: float | None = None
    temperature_c: float | None = None

    @property
    def time_s(self) -> float:
        """Return how long the power was above the threshold."""
        return (self.end_ns - self.start_ns) * 1e-9


def make_curve(power: PowerTrace, domain: str | None, start_ns: int, end_ns: int) -> Curve:
    """Return a domain of a trace (None: the counted ones together) between two times of the wall clock."""
    moved = power._align_lag(domain)
    edges = _shared_grid(moved) if moved else np.zeros(0, dtype=np.int64)
    if len(edges) < 2 or edges[-1] <= start_ns or edges[0] >= end_ns:
        known = (int(edges[0]), int(edges[-1])) if len(edges) else (power.start_ns, power.end_ns)
        raise explain_no_overlap((start_ns, end_ns), known)
    ends = [_between(t, c, edges) for t, c in moved]
    begin, end = np.sum([e[0] for e in ends], axis=0), np.sum([e[1] for e in ends], axis=0)
    cut = np.clip(edges, start_ns, end_ns)
    left, right = ((cut[s] - edges[:-1]) / np.diff(edges) for s in (slice(None, -1), slice(1, None)))
    keep = np.diff(cut) > 0
    domains = [c.domain for _, c in moved]
    curve = Curve(
        edges_ns=np.append(cut[:-1][keep], cut[1:][keep][-1]),
        begin_w=(begin * (1.0 - left) + end * left)[keep],
        end_w=(begin * (1.0 - right) + end * right)[keep],
        domains=tuple(d.name for d in domains),
        reach_s=max(max(d.blur_s, 0.5 * d.resolution_s) for d in domains),
        resolution_s=max(d.resolution_s for d in domains),
        noise=max(d.sample_noise or ASSUMED_NOISE for d in domains),
    )
    if not np.any(curve.is_known):
        raise MeasurementError(
            f"no power of {curve.domain} is known while the timeline ran",
            why="; ".join(dict.fromkeys(g.reason for g in power.gaps)) or None,
            fix="see `tessera doctor` for the sensor",
        )
    return curve


def format_level(threshold_w: float) -> str:
    """Return the threshold as every sentence writes it, because two roundings of one level would read as two levels."""
    return format_power(threshold_w, 3)


def choose_threshold(curve: Curve, percentile: float | None = None) -> float:
    """Return the percentile; without one, half-way from the median to the peak.

    The 95th percentile is used instead if that is lower, or if the power is above half-way so often that this is a
    level. The threshold is never within what noise alone does to a flat load. A percentile alone finds as many seconds
    of spikes as it says, however many there are: of forty spikes in a tenth of the time, the 95th finds half.
    """
    if percentile is not None and not 0.0 < percentile < 100.0:
        raise ArgumentError(f"percentile={percentile!r} is not between 0 and 100", fix="e.g. percentile=95")
    if percentile is None:
        peak_w = float(np.nanmax(np.maximum(curve.begin_w, curve.end_w)))
        level_w, halfway_w = curve.percentile(95.0), 0.5 * (curve.percentile(50.0) + peak_w)
        if _spans_above(curve, halfway_w).total_ns < SPIKES_SHARE * curve.known_spans.total_ns:
            level_w = min(level_w, halfway_w)
    else:
        level_w = curve.percentile(percentile)
    return max(level_w, curve.mean_w * (1.0 + max(MIN_EXCESS, NOISE_SIGMAS * curve.noise)))


def find_spikes(curve: Curve, threshold_w: float, rise_w_per_s: float | None = None) -> list[Spike]:
    """Return the stretches above a threshold, in time order; only those that rise at least as fast as asked.

    A mean over a window that the curve's end cuts off is not used: the rest of the window was not seen.
    """
    starts, ends = _spans_above(curve, threshold_w)
    if np.array_equal(curve.begin_w, curve.end_w, equal_nan=True):
        at_an_end = (starts == curve.start_ns) | (ends == curve.end_ns)
        seen = ~at_an_end | ((ends - starts) * 1e-9 >= WHOLE[0] * curve.resolution_s)
        starts, ends = starts[seen], ends[seen]
    low, _ = _spans_above(curve, threshold_w * (1.0 - DIP_SIGMAS * curve.noise))
    if len(starts) == 0:
        return []
    same = np.searchsorted(low, starts, side="right")  # stretches with no real dip between them are one spike
    first = np.flatnonzero(np.diff(same, prepend=-1))
    last = np.append(first[1:], len(starts)) - 1
    rates = _rates(curve)
    spikes = [_measure_spike(curve, rates, int(s), int(e)) for s, e in zip(starts[first], ends[last], strict=True)]
    fast = [s for s in spikes if rise_w_per_s is None or (s.rise_w_per_s or 0.0) >= rise_w_per_s]
    return [dataclasses.replace(s, number=i) for i, s in enumerate(fast, start=1)]


def _spans_above(curve: Curve, level_w: float) -> Spans:
    """Return the stretches above a level, to the nanosecond of the straight pieces."""
    b, e = curve.begin_w, curve.end_w
    (i,) = np.nonzero(np.fmax(b, e) > level_w)
    b, e, t0 = b[i], e[i], curve.edges_ns[:-1][i]
    length = np.diff(curve.edges_ns)[i]
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = (level_w - b) / (e - b)
    starts = t0 + np.rint(length * np.where(b > level_w, 0.0, crossing)).astype(np.int64)
    ends = t0 + np.rint(length * np.where(e > level_w, 1.0, crossing)).astype(np.int64)
    ends = np.maximum(ends, starts + 1)
    return union(starts, ends)


def _rates(curve: Curve) -> Floats:
    """Return each piece's rise in W/s; for flat pieces (means), that of the step to it, between their middles."""
    length = np.diff(curve.edges_ns) * 1e-9
    step = np.zeros(len(length))
    step[1:] = (curve.begin_w[1:] - curve.end_w[:-1]) / (0.5 * (length[1:] + length[:-1]))
    return np.asarray((curve.end_w - curve.begin_w) / length + step)


def _measure_spike(curve: Curve, rates: Floats, start_ns: int, end_ns: int) -> Spike:
    edges = curve.edges_ns
    i = int(np.searchsorted(edges, start_ns, side="right")) - 1
    j = max(int(np.searchsorted(edges, end_ns, side="left")), i + 1)
    # The corners of the pieces in the stretch: a straight piece is highest at one of its ends.
    corners = np.concatenate([edges[i:j], edges[i + 1 : j + 1]])
    watts = np.concatenate([curve.begin_w[i:j], curve.end_w[i:j]])
    at = int(np.nanargmax(np.where((corners >= start_ns) & (corners <= end_ns), watts, -np.inf)))
    peak_ns, peak_w = int(corners[at]), float(watts[at])
    foot = i
    length = np.diff(edges) * 1e-9
    while foot > 0 and rates[foot - 1] * length[foot - 1] > 2.0 * curve.noise * curve.end_w[foot - 1]:
        foot -= 1
    peak_piece = max(int(np.searchsorted(edges, peak_ns, side="left")), i + 1)
    rises = rates[foot:peak_piece]
    rise = float(np.nanmax(rises)) if start_ns > curve.start_ns and not np.all(np.isnan(rises)) else None
    return Spike(
        number=0,
        start_ns=start_ns,
        end_ns=end_ns,
        foot_ns=min(int(edges[foot]), start_ns),
        peak_ns=peak_ns,
        peak_w=peak_w,
        rise_w_per_s=rise,
    )


class Chance:
    """What chance would do: the spikes, all together, are shifted around the trace, and the overlap is counted anew.

    Spikes keep their lengths and rhythm, which a test with independent placements would not: a training loop is
    periodic, and a phase that fits by luck fits in every step. Overlaps are given for all shifts (the unshifted first),
    in standard deviations from their mean; `p_values` says how many shifts do as well as the observed one.
    """

    def __init__(self, curve: Curve) -> None:
        span_ns = curve.end_ns - curve.start_ns
        count = int(np.clip(span_ns / (0.25e9 * curve.reach_s), MIN_BINS, MAX_BINS))
        self._reach_ns = round(curve.reach_s * 1e9)
        self._edges = curve.start_ns + np.rint(np.linspace(0.0, span_ns, count + 1)).astype(np.int64)
        self._is_known = covered_ns(curve.known_spans, self._edges[:-1], self._edges[1:]) >= np.diff(self._edges)

    def overlap(self, above: Spans, target: Spans) -> Floats:
        """Return how well stretches overlap a set, within the sensor's reach, at every shift."""
        middles = (self._edges[:-1] + self._edges[1:]) // 2
        near = covered_ns(target, middles - self._reach_ns, middles + self._reach_ns)
        return self._shifts(covered_ns(above, self._edges[:-1], self._edges[1:]), near)

    def hits(self, times_ns: Ints, target: Spans) -> Floats:
        """Return how often moments fall into a set, at every shift."""
        return self._shifts(
            np.histogram(times_ns, self._edges)[0], covered_ns(target, self._edges[:-1], self._edges[1:])
        )

    def _shifts(self, mask: Ints, target: Ints) -> Floats:
        mask, target = mask[self._is_known], target[self._is_known]
        if len(mask) == 0:
            return np.zeros(1)
        # All circular shifts at once.
        sums = np.fft.irfft(np.fft.rfft(target) * np.conj(np.fft.rfft(mask)), n=len(mask))
        spread, scale = float(np.std(sums)), float(np.max(np.abs(sums)))
        # What overlaps the same at every shift (always, or never) tells nothing.
        return np.asarray((sums - np.mean(sums)) / spread) if spread > 1e-9 * scale else np.zeros(len(mask))


def p_values(family: Sequence[Floats]) -> list[float]:
    """Return, for each of several things, the share of shifts at which any of them fits as well as it does unshifted.

    Of many kernels, one fits by luck; kernels that always run together count as one (Westfall and Young's max-T).
    """
    if not family:
        return []
    best = np.max(family, axis=0)
    return [float(np.mean(best >= scores[0] - 1e-6)) if np.any(scores) else 1.0 for scores in family]
