"""What a utility requires of a feed: crest factor, ramp, dynamic range, and how much of the swing is in a band.

The spectrum is that of `analyze.power`. Ramps are the largest change within one second, in W/s: over a step of 5 ms,
any edge would be gigawatts a second, which no spec means.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..analyze.spectrum import BAND_HZ, EvenSamples, compute_spectrum
from ..joules import Floats
from ..policy import UtilitySpec
from ..units import format_power, format_power_rate

RAMP_S = 1.0
"""Seconds over which a ramp is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerQuality:
    """Figures of one level. Ramps are over all the time, the others from `from_s` on.

    `range_w` is highest less lowest, `range_share` that over the mean. `band_share` is the root mean square of the
    swing in the band over the mean power. `band_of_swing` is the share of the swing's energy (its variance) that is in
    the band.
    """

    from_s: float
    mean_w: float
    peak_w: float
    low_w: float
    crest_factor: float
    ramp_up_w_per_s: float
    ramp_down_w_per_s: float
    steepest_w_per_s: float
    band_hz: tuple[float, float]
    band_rms_w: float
    band_share: float
    band_of_swing: float | None
    dominant_hz: float | None

    @property
    def ramp_w_per_s(self) -> float:
        """Return the larger of the two ramps."""
        return max(self.ramp_up_w_per_s, self.ramp_down_w_per_s)

    @property
    def range_w(self) -> float:
        """Return the highest less the lowest power."""
        return self.peak_w - self.low_w

    @property
    def range_share(self) -> float:
        """Return the range over the mean."""
        return self.range_w / self.mean_w if self.mean_w > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**dataclasses.asdict(self), "range_w": self.range_w, "range_share": self.range_share}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One line of a utility's spec: its limit, what was found, and whether that passes."""

    what: str
    found: float
    limit: float
    unit: str

    @property
    def passed(self) -> bool:
        """Return whether what was found is within the limit."""
        return self.found <= self.limit * (1 + 1e-9)  # a value at the limit passes, however it was rounded

    def show(self) -> tuple[str, str]:
        """Return what was found and what is allowed, for people; with more digits if a failure would read as equal."""
        for digits in range(3, 8):
            found, limit = (self._format(value, digits) for value in (self.found, self.limit))
            if self.passed or found != limit:
                break
        return found, limit

    def _format(self, value: float, digits: int) -> str:
        if self.unit == "W/s":
            return format_power_rate(value, digits)
        if self.unit == "W":
            return format_power(value, digits)
        return f"{value:.{digits - 2}%}" if self.what == "band share" else f"{value:.{digits - 1}f}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**dataclasses.asdict(self), "passed": self.passed}


def measure_quality(
    watts: Floats, step_s: float, *, from_s: float = 0.0, band_hz: tuple[float, float] = BAND_HZ
) -> PowerQuality:
    """Return the figures of evenly spaced watts."""
    steady = watts[min(round(from_s / step_s), max(0, len(watts) - 2)) :]
    mean_w = float(np.mean(steady))
    rms_w = math.sqrt(float(np.mean(np.square(steady))))
    up, down = find_ramps_within(watts, step_s)
    spectrum = compute_spectrum(EvenSamples(start_ns=0, step_s=step_s, watts=steady))
    # A swing of a billionth of the mean is rounding.
    swing_w2 = spectrum.ac_w2 if spectrum and spectrum.ac_w2 > (1e-9 * mean_w) ** 2 else 0.0
    band_w2 = spectrum.band_w2(*band_hz) if spectrum and swing_w2 else 0.0
    peak = spectrum.peak() if spectrum and swing_w2 else None
    return PowerQuality(
        from_s=from_s,
        mean_w=mean_w,
        peak_w=float(np.max(steady)),
        low_w=float(np.min(steady)),
        crest_factor=float(np.max(steady)) / rms_w if rms_w > 0 else 1.0,
        ramp_up_w_per_s=up,
        ramp_down_w_per_s=down,
        steepest_w_per_s=float(np.max(np.abs(np.diff(watts)))) / step_s if len(watts) > 1 else 0.0,
        band_hz=band_hz,
        band_rms_w=math.sqrt(band_w2),
        band_share=math.sqrt(band_w2) / mean_w if mean_w > 0 else 0.0,
        band_of_swing=band_w2 / swing_w2 if swing_w2 else None,
        dominant_hz=peak.frequency_hz if peak else None,
    )


def find_ramps_within(watts: Floats, step_s: float) -> tuple[float, float]:
    """Return the largest rise and the largest fall within `RAMP_S`, as watts a second (both from 0 on)."""
    if len(watts) < 2:
        return 0.0, 0.0
    count = min(max(1, round(RAMP_S / step_s)), len(watts) - 1)
    highest_before, lowest_before = _slide(watts, count, np.maximum), _slide(watts, count, np.minimum)
    up = float(np.max(watts - lowest_before))
    down = float(np.max(highest_before - watts))
    return up / (count * step_s), down / (count * step_s)


def _slide(watts: Floats, count: int, pick: np.ufunc) -> Floats:
    """Return the highest (or lowest) of each value and the `count` before it, by doubling windows."""
    best, width = watts.copy(), 1
    while width < count + 1:
        shift = min(width, count + 1 - width)
        moved = best.copy()
        moved[shift:] = pick(best[shift:], best[:-shift])
        best, width = moved, width + shift
    return best


def judge(quality: PowerQuality, spec: UtilitySpec | None) -> list[Verdict]:
    """Return a verdict for each line that the spec states."""
    if spec is None:
        return []
    lines = [
        ("ramp", quality.ramp_w_per_s, spec.ramp_w_per_s, "W/s"),
        ("dynamic range", quality.range_w, spec.dynamic_range_w, "W"),
        ("band share", quality.band_share, spec.band_share, ""),
        ("crest factor", quality.crest_factor, spec.crest_factor, ""),
    ]
    return [
        Verdict(what=what, found=found, limit=limit, unit=unit)
        for what, found, limit, unit in lines
        if limit is not None
    ]
