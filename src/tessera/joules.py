"""Computes joules between two times. No other module turns power samples or counter ticks into energy.

`sums.py` has the arithmetic of the samples, `anchors.py` that of the counter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .anchors import CounterHistory
from .schema import Basis, Domain, Energy, Hold
from .sums import FULL as FULL
from .sums import Z90 as Z90
from .sums import ZERO as ZERO
from .sums import Floats as Floats
from .sums import Ints as Ints
from .sums import Mark as Mark
from .sums import Sums as Sums
from .sums import accumulate as accumulate
from .sums import energy_between as energy_between
from .sums import find_reach_ns as find_reach_ns
from .sums import mark as mark
from .sums import window_error_j as window_error_j

BASES: tuple[Basis, ...] = ("measured", "predicted", "modelled", "simulated", "timed")

_NO_TIMES: Ints = np.zeros(0, np.int64)
_NO_JOULES: Floats = np.zeros(0)
# A sample counts as whole if it lasts from 0.9 to 1.1 of the sensor's period: a thread wakes up a little early or late.
WHOLE = (0.9, 1.1)


@dataclass(frozen=True)
class DomainSamples:
    """The samples of one domain, and the ticks of its energy counter if they were recorded.

    `peaks_w` is the highest power that each sample stands for: the sample itself, unless several were merged.
    """

    domain: Domain
    times_ns: Ints
    watts: Floats
    peaks_w: Floats
    ticks_ns: Ints = dataclasses.field(default_factory=lambda: _NO_TIMES)
    ticks_j: Floats = dataclasses.field(default_factory=lambda: _NO_JOULES)

    @classmethod
    def of(cls, domain: Domain, times_ns: Sequence[int] | Ints, watts: Sequence[float] | Floats) -> DomainSamples:
        """Return samples without a counter. Impossible values are replaced by gaps."""
        w = drop_impossible_samples(domain, np.asarray(watts, dtype=np.float64))
        return cls(domain, np.asarray(times_ns, dtype=np.int64), w, w)

    @cached_property
    def _sums(self) -> Sums:
        return accumulate(self.times_ns, self.watts, mean=self._mean, noise=self.domain.sample_noise)

    @property
    def _mean(self) -> bool:
        return self.domain.hold is Hold.MEAN

    @property
    def lag_ns(self) -> int:
        """How late the sensor shows a change."""
        return round(self.domain.lag_s * 1e9)

    @property
    def known(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which samples have a value. NaN means that the power since the sample before is unknown."""
        return ~np.isnan(self.watts)

    @cached_property
    def at_resolution(self) -> DomainSamples:
        """These samples, but none shorter than the sensor's period.

        A recording divides the samples of a modelled CPU at regions and steps. Joules need these parts, but peaks do
        not: a power supply does not see peaks as short as a region.
        """
        least_ns, most_ns = (share * self.domain.resolution_s * 1e9 for share in WHOLE)
        if self.domain.basis != "modelled" or not self._mean or not np.any(np.diff(self.times_ns) < least_ns):
            return self
        kept = [0]
        while kept[-1] < len(self.times_ns) - 1:
            since_ns = self.times_ns[kept[-1]]
            least, most = np.searchsorted(self.times_ns, [since_ns + least_ns, since_ns + most_ns]).tolist()
            kept.append(min(max(least, most - 1), len(self.times_ns) - 1))
        if len(kept) > 2 and self.times_ns[kept[-1]] - self.times_ns[kept[-2]] < least_ns:
            del kept[-2]
        joules, seen_s = np.diff(self._sums.joules[kept]), np.diff(self._sums.covered_s[kept])
        watts = np.divide(joules, seen_s, out=np.full(len(joules), np.nan), where=seen_s > 0)
        return DomainSamples.of(self.domain, self.times_ns[kept], np.concatenate([self.watts[:1], watts]))

    def shift(self, offset_ns: int) -> DomainSamples:
        """Return the same samples on another clock."""
        return dataclasses.replace(self, times_ns=self.times_ns + offset_ns, ticks_ns=self.ticks_ns + offset_ns)

    def mark(self, time_ns: int) -> Mark:
        """The running sums at a time."""
        x_ns, reach_ns = time_ns + self.lag_ns, find_reach_ns(self.domain)
        return mark(self.times_ns, self.watts, self._sums, x_ns, mean=self._mean, reach_ns=reach_ns)

    @cached_property
    def counter(self) -> CounterHistory:
        """The ticks of the counter, and what they show about the samples."""
        history = CounterHistory(self.domain)
        for time_ns, joules in zip(self.ticks_ns.tolist(), self.ticks_j.tolist(), strict=True):
            history.add(time_ns, joules, self.mark(time_ns))
        return history

    def find_seen(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Return the parts of a window that the samples cover, without their holes."""
        times = self.times_ns - self.lag_ns
        edge = np.diff(self.known[1:].astype(np.int64), prepend=0, append=0)  # of the interval before each sample
        starts, stops = (np.clip(times[np.flatnonzero(edge == e)], start_ns, end_ns) for e in (1, -1))
        return [(a, b) for a, b in zip(starts.tolist(), stops.tolist(), strict=True) if b > a]

    def energy(self, start_ns: int, end_ns: int, *, fill_gaps: bool = False) -> Energy:
        """Return the joules between two times: by the counter if it was live, else by the samples.

        `fill_gaps` uses the counter also for holes in the samples. Without it holes have no joules, because rows that
        ran in a hole have no joules in a table either.
        """
        seconds = max(end_ns - start_ns, 0) * 1e-9
        start, end = self.mark(start_ns), self.mark(end_ns)
        if fill_gaps or end.covered_s - start.covered_s >= FULL * seconds:
            return self.counter.energy(start_ns, start, end_ns, end)
        seen = [self.counter.energy(a, self.mark(a), b, self.mark(b)) for a, b in self.find_seen(start_ns, end_ns)]
        if not seen:
            return energy_between(self.domain, start, end, seconds)
        parts = sum_windows(seen)
        coverage = min(parts.time_s / seconds, 1.0)
        unseen_j = parts.energy_j * (1.0 / coverage - 1.0)  # the unseen time may have drawn as much as the rest
        return dataclasses.replace(parts, time_s=seconds, coverage=coverage, error_j=parts.error_j + unseen_j)


def drop_impossible_samples(domain: Domain, watts: Floats) -> Floats:
    """Return the samples with NaN (unknown) in place of those below 0 or above `Domain.max_w`."""
    possible = (watts >= 0.0) & (watts <= domain.max_w)  # False for NaN
    return watts if possible.all() else np.where(possible, watts, np.nan)


def sum_domains(parts: Sequence[Energy], seconds: float) -> Energy:
    """Add up several domains over one window. Their errors are independent, so they are added in quadrature.

    An unknown domain (NaN) is left out, and the error is widened by the mean joules of the others. The sum of no
    domains is unknown too: nothing was measured, which is not 0 J.
    """
    known = [p for p in parts if not math.isnan(p.energy_j)]
    joules = sum(p.energy_j for p in known)
    missing_j = (len(parts) - len(known)) * joules / len(known) if known else 0.0
    nothing = not known and (bool(parts) or seconds > 0)
    return Energy(
        energy_j=math.nan if nothing else float(joules),
        error_j=math.nan if nothing else float(np.sqrt(sum(p.error_j**2 for p in known))) + missing_j,
        common_error_j=math.hypot(*(p.common_error_j for p in known)),
        time_s=seconds,
        source="+".join(dict.fromkeys(p.source for p in parts)) or "none",
        coverage=min((p.coverage for p in parts), default=0.0),
        basis=worst_basis(p.basis for p in parts),
    )


def sum_windows(parts: Sequence[Energy]) -> Energy:
    """Add up one domain, or one total, over several windows of time.

    Errors that all windows share (`Energy.common_error_j`) are added like the joules, the rest in quadrature. Unknown
    windows lower the coverage and widen the error by what the others drew.
    """
    known = [p for p in parts if not math.isnan(p.energy_j)]
    seconds, known_s = sum(p.time_s for p in parts), sum(p.time_s for p in known)
    joules = sum(p.energy_j for p in known)
    unknown_j = joules / known_s * (seconds - known_s) if known_s > 0 else 0.0
    common_j = sum(p.common_error_j for p in known)
    own_j2 = sum(max(p.error_j**2 - p.common_error_j**2, 0.0) for p in known)
    return Energy(
        energy_j=joules if known else math.nan,
        error_j=math.sqrt(common_j**2 + own_j2) + unknown_j if known else math.nan,
        common_error_j=common_j,
        time_s=seconds,
        source=parts[-1].source,
        coverage=sum(p.coverage * p.time_s for p in parts) / seconds if seconds > 0 else 0.0,
        basis=worst_basis(p.basis for p in parts),
    )


def worst_basis(bases: Iterable[Basis]) -> Basis:
    """Return the weakest basis: one modelled or simulated part makes the whole modelled or simulated."""
    return max(bases, key=BASES.index, default="measured")
