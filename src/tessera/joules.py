"""Joules between two times: the one place where power samples, and the ticks of an energy counter, become energy.

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
# A sample that lasts from the one to the other share of the sensor's period is a whole one: a thread wakes up a little
# early or late.
WHOLE = (0.9, 1.1)


@dataclass(frozen=True)
class DomainSamples:
    """The samples of one domain, and the ticks of its energy counter where they were recorded.

    `peaks_w` is the highest power each sample stands for: the sample itself, unless several were merged.
    """

    domain: Domain
    times_ns: Ints
    watts: Floats
    peaks_w: Floats
    ticks_ns: Ints = dataclasses.field(default_factory=lambda: _NO_TIMES)
    ticks_j: Floats = dataclasses.field(default_factory=lambda: _NO_JOULES)

    @classmethod
    def of(cls, domain: Domain, times_ns: Sequence[int] | Ints, watts: Sequence[float] | Floats) -> DomainSamples:
        """Plain samples, without a counter. Those that no board can have drawn are gaps."""
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
        """Which samples have a value: NaN means that nothing is known since the sample before."""
        return ~np.isnan(self.watts)

    @cached_property
    def at_resolution(self) -> DomainSamples:
        """These samples, none finer than the sensor: a recording divides those of a modelled CPU at regions and steps.

        Joules need the parts. A peak of a part is no peak of what a power supply sees: it is as short as a region.
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
        """The same samples on another clock."""
        return dataclasses.replace(self, times_ns=self.times_ns + offset_ns, ticks_ns=self.ticks_ns + offset_ns)

    def mark(self, time_ns: int) -> Mark:
        """The running sums at a time."""
        x_ns, reach_ns = time_ns + self.lag_ns, find_reach_ns(self.domain)
        return mark(self.times_ns, self.watts, self._sums, x_ns, mean=self._mean, reach_ns=reach_ns)

    @cached_property
    def counter(self) -> CounterHistory:
        """The ticks of the counter beside the samples, and what they show of them."""
        history = CounterHistory(self.domain)
        for time_ns, joules in zip(self.ticks_ns.tolist(), self.ticks_j.tolist(), strict=True):
            history.add(time_ns, joules, self.mark(time_ns))
        return history

    def find_seen(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """The stretches of a window that the samples tell of: those without a hole."""
        times = self.times_ns - self.lag_ns
        edge = np.diff(self.known[1:].astype(np.int64), prepend=0, append=0)  # of the stretch up to each sample
        starts, stops = (np.clip(times[np.flatnonzero(edge == e)], start_ns, end_ns) for e in (1, -1))
        return [(a, b) for a, b in zip(starts.tolist(), stops.tolist(), strict=True) if b > a]

    def energy(self, start_ns: int, end_ns: int, *, fill_gaps: bool = False) -> Energy:
        """Joules between two times: by the counter where it was live, else by the samples.

        `fill_gaps` asks the counter about the holes in the samples as well. Without it they have no joules, as the rows
        of a table have none that ran in a hole.
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
        unseen_j = parts.energy_j * (1.0 / coverage - 1.0)  # may have drawn as much as the rest
        return dataclasses.replace(parts, time_s=seconds, coverage=coverage, error_j=parts.error_j + unseen_j)


def drop_impossible_samples(domain: Domain, watts: Floats) -> Floats:
    """The samples, with NaN (nothing is known) in place of those below 0 or above `Domain.max_w`."""
    possible = (watts >= 0.0) & (watts <= domain.max_w)  # NaN is not
    return watts if possible.all() else np.where(possible, watts, np.nan)


def sum_domains(parts: Sequence[Energy], seconds: float) -> Energy:
    """The sum of several domains over one window. Their errors are independent, so they add in quadrature.

    A domain of which nothing is known (NaN) is left out, and the error widened by what the others drew on average. The
    sum of no domain is not known either: nothing was measured, which is not 0 J.
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
    """The sum of one thing over several windows of time.

    What all of them are off by alike (`Energy.common_error_j`) adds up as the joules do, the rest in quadrature.
    Windows of which nothing is known lower the coverage and widen the error by what the others drew.
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
    """One modelled or simulated part makes the whole so."""
    return max(bases, key=BASES.index, default="measured")
