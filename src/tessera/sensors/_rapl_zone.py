"""One wrapping energy counter: joules between two readings, however often it wrapped in between.

energy_uj   /|  /|  /            two readings give the mean power between them, once it is known
           / | / | /             how often the counter wrapped. Every number of wraps whose power the
          /  |/  |/              zone could really draw is a candidate:
        ──●───────●──► time        none: the counter was reset         -> gap
          read    read             one:  that one, exactly             -> sample
                                   more: the one near the power before, if one clearly is; else a gap
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from ..clock import NS_PER_S
from ..schema import Domain, Gap
from .base import Batch

# A read may be held up between the clock and the counter; without this a late read looks like a jump.
READ_SLACK_S = 0.05
# 61 µJ a count: a domain that draws anything moves its counter within a second.
STALL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Joules between two readings of a counter, or why they cannot be told."""

    energy_j: float | None
    reason: str = ""
    guessed: bool = False


def counter_delta(
    before_uj: int,
    after_uj: int,
    *,
    range_uj: int,
    elapsed_s: float,
    max_power_w: float,
    previous_w: float | None,
) -> Delta:
    """Joules a wrapping counter counted between two readings, with any number of wraps in between.

    `max_power_w` bounds what is possible, `previous_w` (the mean power of the interval before) decides among
    several possible numbers of wraps, but only where it lies well within the nearest one.
    """
    range_j = range_uj * 1e-6
    least_j = ((after_uj - before_uj) % range_uj) * 1e-6
    most_j = max_power_w * (elapsed_s + READ_SLACK_S)
    if least_j > most_j:
        way = "went backwards" if after_uj < before_uj else "jumped"
        why = "a reset (suspend, module reload), not a wrap"
        return Delta(
            energy_j=None,
            reason=f"the energy counter {way} by more than {max_power_w:g} W can explain: {why}",
        )
    most_wraps = math.floor((most_j - least_j) / range_j)
    if most_wraps == 0:
        return Delta(energy_j=least_j)
    undecided = f"{elapsed_s:.1f} s between reads: the counter may have wrapped {most_wraps} times more than seen"
    if previous_w is None:
        return Delta(energy_j=None, reason=undecided)
    expected_j = previous_w * elapsed_s
    wraps = min(max(round((expected_j - least_j) / range_j), 0), most_wraps)
    energy_j = least_j + wraps * range_j
    # Within a quarter range of the expectation the next candidate is at least three times as far away.
    if abs(energy_j - expected_j) > range_j / 4:
        return Delta(
            energy_j=None,
            reason=f"{undecided}, and the power before ({previous_w:.1f} W) fits no number of wraps",
        )
    return Delta(energy_j=energy_j, guessed=True)


@dataclass(slots=True, kw_only=True)
class Zone:
    """One counter, and the reading the next sample counts from."""

    domain: Domain
    path: Path
    range_uj: int
    max_power_w: float
    energy_uj: int = 0
    time_ns: int = 0
    previous_w: float | None = None
    fresh: bool = True
    lost: bool = False
    stalled: bool = False
    guesses: int = 0

    def rebase(self, batch: Batch, time_ns: int, energy_uj: int) -> None:
        """Count from here; what came before is unknown."""
        batch.add(self.domain.name, time_ns, math.nan)
        self.energy_uj, self.time_ns, self.previous_w = energy_uj, time_ns, None
        self.lost = self.stalled = False

    def advance(self, batch: Batch, time_ns: int, energy_uj: int) -> None:
        """Turn one more reading into a sample, or into a gap with its reason."""
        if self.fresh:
            batch.add(self.domain.name, self.time_ns, math.nan)
            self.fresh = False
        if self.lost:
            self.rebase(batch, time_ns, energy_uj)
        elif not 0 <= energy_uj <= self.range_uj:
            self._gap(
                batch,
                time_ns,
                energy_uj % self.range_uj,
                f"the counter shows {energy_uj} µJ, outside its range",
            )
        elif energy_uj == self.energy_uj and self._unmoved(batch, time_ns):
            return
        elif self.stalled:
            # When it moved is only known within the last read; start from there.
            self.rebase(batch, time_ns, energy_uj)
        elif time_ns > self.time_ns:
            self._sample(batch, time_ns, energy_uj)

    def _unmoved(self, batch: Batch, time_ns: int) -> bool:
        """Leave the interval open while the counter stands still (True); the next sample covers it."""
        elapsed_s = (time_ns - self.time_ns) / NS_PER_S
        if self.max_power_w * elapsed_s >= self.range_uj * 1e-6:
            return False  # long enough to have gone all the way round
        if elapsed_s > STALL_S and not self.stalled:
            self.stalled = True
            reason = f"the counter has not moved for {elapsed_s:.1f} s: the firmware does not feed it"
            batch.gaps.append(Gap(domain=self.domain.name, start_ns=self.time_ns, end_ns=None, reason=reason))
        return True

    def _sample(self, batch: Batch, time_ns: int, energy_uj: int) -> None:
        elapsed_s = (time_ns - self.time_ns) / NS_PER_S
        delta = counter_delta(
            self.energy_uj,
            energy_uj,
            range_uj=self.range_uj,
            elapsed_s=elapsed_s,
            max_power_w=self.max_power_w,
            previous_w=self.previous_w,
        )
        if delta.energy_j is None:
            self._gap(batch, time_ns, energy_uj, delta.reason)
            return
        self.guesses += delta.guessed
        self.previous_w = delta.energy_j / elapsed_s
        batch.add(self.domain.name, time_ns, self.previous_w)
        self.energy_uj, self.time_ns = energy_uj, time_ns

    def _gap(self, batch: Batch, time_ns: int, energy_uj: int, reason: str) -> None:
        batch.gaps.append(Gap(domain=self.domain.name, start_ns=self.time_ns, end_ns=time_ns, reason=reason))
        self.rebase(batch, time_ns, energy_uj)

    def lose(self, batch: Batch, reason: str) -> None:
        """Report once that the zone no longer answers."""
        if self.lost:
            return
        self.lost = True
        batch.gaps.append(Gap(domain=self.domain.name, start_ns=self.time_ns, end_ns=None, reason=reason))

    def described(self) -> Domain:
        """Return the domain, saying where wraps had to be inferred."""
        if not self.guesses:
            return self.domain
        told = f"{self.guesses} intervals had their wraps inferred from the power before"
        return replace(self.domain, note="; ".join(filter(None, (self.domain.note, told))))
