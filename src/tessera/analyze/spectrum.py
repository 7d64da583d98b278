r"""How fast the power swings: watts on an even grid, their steepest ramps, and how much of the swing lies in a band.

::

    samples (uneven)  ──► every stretch without a gap, on a grid of the sensor's own spacing ──► ramps
                                                     the longest of them ──► periodogram ──► band, dominant frequency

A line of the periodogram is a mean square in W². All lines sum to the variance of the power (Parseval), so a share of
that sum is a share of the swing's energy. There is no correction for what the sensor smooths away: `sensor_gain` says
how much of a swing it shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..attribute.fit import Response
from ..joules import Floats
from .spikes import Curve

BAND_HZ = (0.1, 20.0)
"""The band in which a load's swing meets the grid and its generators: inter-area modes from 0.1 Hz, shafts up to 20 Hz.
"""
# Fewer points give no meaningful spectrum.
MIN_POINTS = 16
# A line counts if white noise has as strong a line with less than this probability (Fisher's test).
CHANCE = 0.01
# What happens fewer times in a recording is its shape, not a frequency.
CYCLES = 3
# Share of the sensor's own spacing by which samples may be closer: closer ones are those of several domains, not
# jitter.
JITTER = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenSamples:
    """Watts on an even grid, one stretch without gaps; the first at `start_ns` (wall clock)."""

    start_ns: int
    step_s: float
    watts: Floats

    @property
    def seconds(self) -> float:
        return len(self.watts) * self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """The steepest change over one step of the sensor (wall clock, ns). The sensor's blur makes it look less steep."""

    start_ns: int
    end_ns: int
    watts_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpectralPeak:
    """The strongest line: its frequency, the share of the swing in it, and the chance of it in white noise."""

    frequency_hz: float
    share: float
    p_value: float
    width_hz: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """Mean squares (W²) by frequency, above 0. They sum to `ac_w2`, the variance of the power."""

    frequencies_hz: Floats
    square_w2: Floats
    step_s: float
    seconds: float

    @property
    def resolvable_hz(self) -> tuple[float, float]:
        """Return the frequencies that the stretch resolves: from one cycle in all to half the sampling rate."""
        return 1.0 / self.seconds, 0.5 / self.step_s

    @property
    def ac_w2(self) -> float:
        """Return the whole swing: the variance of the power."""
        return float(np.sum(self.square_w2))

    def band_w2(self, low_hz: float, high_hz: float) -> float:
        """Return the mean square within a band, both ends included."""
        tiny = 1e-9 / self.seconds  # a line on the band's edge belongs to it, whatever was rounded
        inside = (self.frequencies_hz >= low_hz - tiny) & (self.frequencies_hz <= high_hz + tiny)
        return float(np.sum(self.square_w2[inside]))

    def peak(self) -> SpectralPeak | None:
        """Return the strongest line of three cycles or more, if it is not chance; None for noise and for a constant."""
        lines = self.square_w2[CYCLES - 1 :]
        total, count = float(np.sum(lines)), len(lines)
        if count < 2 or not total > 1e-12 * self.ac_w2:
            return None
        # A swing between two lines is in both, so two neighbours count together; otherwise its harmonic on a line would
        # win.
        pair = int(np.argmax(lines[:-1] + lines[1:]))
        top = pair + int(lines[pair + 1] > lines[pair])
        strongest = float(lines[top] / total)
        chance = min(1.0, count * math.exp((count - 1) * math.log1p(-strongest))) if strongest < 1 else 0.0
        # Higher than the line before it: lines that only fall off from slower ones belong to a trend.
        if chance > CHANCE or lines[top] <= self.square_w2[top + CYCLES - 2]:
            return None
        both, near = slice(pair + CYCLES - 1, pair + CYCLES + 1), slice(top + CYCLES - 2, top + CYCLES + 1)
        weights = self.square_w2[near]
        return SpectralPeak(
            frequency_hz=float(np.average(self.frequencies_hz[both], weights=self.square_w2[both])),
            share=float(np.sum(weights) / self.ac_w2),
            p_value=chance,
            width_hz=1.0 / self.seconds,
        )


def even_parts(curve: Curve) -> list[EvenSamples]:
    """Return a curve on an even grid: every stretch without a gap that has at least two points."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[False], curve.is_known, [False]])))
    parts = (_resample(curve, int(a), int(b)) for a, b in zip(bounds[::2], bounds[1::2], strict=True))
    return [part for part in parts if part is not None]


def _resample(curve: Curve, first: int, last: int) -> EvenSamples | None:
    if last - first > 4:  # the window's edges may cut it: a piece shorter than the sensor's step
        first, last = first + 1, last - 1
    edges = curve.edges_ns[first : last + 1]
    begin, end = curve.begin_w[first:last], curve.end_w[first:last]
    span_s = float(edges[-1] - edges[0]) * 1e-9
    mean_s = span_s / (last - first)
    # The samples' own mean spacing keeps the grid on the samples; a grid that drifts against them would lose fast
    # swings.
    step_s = max(mean_s, curve.resolution_s) if mean_s < (1.0 - JITTER) * curve.resolution_s else mean_s
    count = round(span_s / step_s)
    if count < 2:
        return None
    if np.array_equal(begin, end):  # means, one for each cell of the grid
        sums = np.concatenate([[0.0], np.cumsum(begin * np.diff(edges))])
        grid = np.linspace(edges[0], edges[-1], count + 1)
        watts = np.diff(np.interp(grid, edges, sums)) / np.diff(grid)
        return EvenSamples(start_ns=int(edges[0] + 0.5e9 * span_s / count), step_s=span_s / count, watts=watts)
    grid = np.linspace(edges[0], edges[-1], count + 1)
    at = np.clip(np.searchsorted(edges, grid, side="right") - 1, 0, last - first - 1)
    share = (grid - edges[at]) / (edges[at + 1] - edges[at])
    watts = begin[at] * (1.0 - share) + end[at] * share
    return EvenSamples(start_ns=int(edges[0]), step_s=span_s / count, watts=watts)


def find_ramps(parts: list[EvenSamples]) -> tuple[Ramp | None, Ramp | None]:
    """Return the steepest rise and the steepest fall over one step; None if the power never rises, or falls."""
    up: Ramp | None = None
    down: Ramp | None = None
    for part in parts:
        rates = np.diff(part.watts) / part.step_s
        for i in {int(np.argmax(rates)), int(np.argmin(rates))}:
            start_ns = part.start_ns + round(i * part.step_s * 1e9)
            end_ns = start_ns + round(part.step_s * 1e9)
            ramp = Ramp(start_ns=start_ns, end_ns=end_ns, watts_per_s=float(rates[i]))
            if ramp.watts_per_s > (up.watts_per_s if up else 0.0):
                up = ramp
            if ramp.watts_per_s < (down.watts_per_s if down else 0.0):
                down = ramp
    return up, down


def compute_spectrum(part: EvenSamples) -> Spectrum | None:
    """Return the periodogram of a stretch without its mean; None for a stretch that is too short."""
    count = len(part.watts)
    if count < MIN_POINTS:
        return None
    lines = np.fft.rfft(part.watts - np.mean(part.watts))
    square = 2.0 * np.abs(lines) ** 2 / count**2
    if count % 2 == 0:
        square[-1] *= 0.5  # the last line of an even count counts once, the others twice
    frequencies = np.asarray(np.fft.rfftfreq(count, part.step_s), dtype=np.float64)
    return Spectrum(frequencies_hz=frequencies[1:], square_w2=square[1:], step_s=part.step_s, seconds=part.seconds)


def sensor_gain(response: Response, frequency_hz: float) -> float:
    """Return the share of a swing's amplitude at one frequency that a sensor shows."""
    omega = 2.0 * math.pi * frequency_hz
    return abs(float(np.sinc(frequency_hz * response.box_s))) / math.hypot(1.0, omega * response.tau_s)


def alias_hz(frequency_hz: float, step_s: float) -> float:
    """Return where a frequency shows in samples so far apart: itself below half the rate, folded back above it."""
    rate = 1.0 / step_s
    return abs(frequency_hz - rate * round(frequency_hz / rate))
