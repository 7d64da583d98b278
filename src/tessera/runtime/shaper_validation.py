"""Does a shaper do its work? The same run in blocks with it and without it, judged by the guide's rule 9.4.

::

    steps   off off off | on on on | off off off | on on on ...      ranks start each block together
    power   5-20 ms windows, summed over the ranks by their epoch times

Three things must be true: spikes are lower, throughput is within 2-5%, and there are no new stalls.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MeasurementError
from .shaping import LOSS

WINDOW_S = 0.02
"""Seconds of the windows in which spikes are looked for: an H200's ring has a sample every 20 ms."""
SPIKE = 99.0
"""The percentile of the windows that is called the peak: the highest single window depends on chance."""
STALL = 3.0
"""A step that takes at least this many times the median is a stall."""
TARGET_LOSS = 0.02
_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class PowerCurve:
    """What one rank spent so far (joules, or seconds of CPU time where there is no power), at epoch times."""

    times_s: NDArray[np.float64]
    spent: NDArray[np.float64]


def sum_windows(curves: Sequence[PowerCurve], start_s: float, end_s: float) -> NDArray[np.float64]:
    """Return the mean rate of all curves together in each window between two times."""
    edges = np.arange(start_s, end_s, WINDOW_S)
    if len(edges) < 2:
        return np.empty(0)
    return np.asarray(sum(np.diff(np.interp(edges, c.times_s, c.spent)) for c in curves)) / WINDOW_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedBlock:
    """Some steps of every rank, with the shaper or without it: their power, and the median of their times."""

    shaped: bool
    peak: float
    mean: float
    crest_factor: float
    ramp_per_s: float
    step_s: float
    stalls: int

    @classmethod
    def measure(cls, shaped: bool, windows: NDArray[np.float64], steps_s: Sequence[float]) -> ShapedBlock:
        """Measure a block from the windows of all ranks together and the times of all their steps."""
        usual_s = median(steps_s)
        rms = float(np.sqrt(np.mean(np.square(windows))))
        peak = float(np.percentile(windows, SPIKE))
        return cls(
            shaped=shaped,
            peak=peak,
            mean=float(windows.mean()),
            crest_factor=peak / rms if rms > 0 else 1.0,
            ramp_per_s=float(np.percentile(np.abs(np.diff(windows)), SPIKE)) / WINDOW_S if len(windows) > 1 else 0.0,
            step_s=usual_s,
            stalls=sum(s > STALL * usual_s for s in steps_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShaperValidation:
    """Pass or fail, by the guide's rule 9.4. `unit` is "W", or "CPUs" where there is no power sensor for a rank."""

    unit: str
    ranks: int
    window_s: float
    blocks: tuple[ShapedBlock, ...]
    notes: tuple[str, ...] = ()

    def _mean(self, name: str, shaped: bool) -> float:
        return fmean(getattr(b, name) for b in self.blocks if b.shaped is shaped)

    def _step_s(self, shaped: bool) -> float:
        return median(b.step_s for b in self.blocks if b.shaped is shaped)

    def _sum_up(self, *, shaped: bool) -> dict[str, float]:
        return {name: self._mean(name, shaped) for name in _FIGURES} | {"step_s": self._step_s(shaped)}

    @property
    def off(self) -> dict[str, float]:
        """Return the means over the blocks without the shaper; for the step's time, the median."""
        return self._sum_up(shaped=False)

    @property
    def on(self) -> dict[str, float]:
        """Return the means over the blocks with the shaper; for the step's time, the median."""
        return self._sum_up(shaped=True)

    @property
    def spikes_down(self) -> bool:
        """Return whether the mean peak with the shaper is below the lowest peak without it, which is hardly chance."""
        return self._mean("peak", True) < min(b.peak for b in self.blocks if not b.shaped)

    @property
    def loss(self) -> float:
        """Return the share of throughput that the usual step lost, negative where it became faster.

        Stalls do not count here: they have a rule of their own.
        """
        return 1 - self._step_s(False) / self._step_s(True)

    @property
    def loss_within(self) -> bool:
        """Return whether the loss is within 5%."""
        return self.loss <= LOSS

    @property
    def new_stalls(self) -> int:
        """Return how many more stalls there were with the shaper than without it."""
        on, off = (sum(b.stalls for b in self.blocks if b.shaped is shaped) for shaped in (True, False))
        return max(on - off, 0)

    @property
    def passed(self) -> bool:
        """Return whether all three rules are met."""
        return self.spikes_down and self.loss_within and self.new_stalls == 0

    def __str__(self) -> str:
        from ..report.shaper import validation_text

        return validation_text(self)


_FIGURES = ("peak", "mean", "crest_factor", "ramp_per_s")


class ActivityMeter:
    """Records what this rank spends: its GPU's power, or its own CPU time where it has no GPU with a sensor."""

    def __init__(self) -> None:
        self.unit = "W" if _own_gpu() is not None else "CPUs"
        self._trace: Any = None
        self._times: list[float] = []
        self._spent: list[float] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to record."""
        if self.unit == "W":
            from ..monitor import power_trace

            self._trace = power_trace(interval_ms=5)
            self._trace.__enter__()
            return
        self._thread = threading.Thread(target=self._run, name="tessera-activity", daemon=True)
        self._thread.start()

    def stop(self) -> PowerCurve:
        """Stop recording, and return the curve."""
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            times_ns, watts = self._trace.total(_own_gpu())
            times_s = np.asarray(times_ns, dtype=np.float64) * 1e-9
            joules = np.concatenate([[0.0], np.cumsum(np.diff(times_s) * (watts[1:] + watts[:-1]) / 2)])
            return PowerCurve(times_s, joules)
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        return PowerCurve(np.array(self._times), np.array(self._spent))

    def _run(self) -> None:
        while not self._stop.is_set():
            self._times.append(time.time())
            self._spent.append(time.process_time())
            self._stop.wait(_LOOK_S)


def _own_gpu() -> str | None:
    """Return the domain of this rank's GPU; None if it has none that is measured."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    from .. import monitor

    gpus = [n for n in monitor.default().sampler.counted_domains() if n.startswith("gpu")]
    index = int(torch.cuda.current_device())
    return gpus[index] if index < len(gpus) else None


@dataclass(slots=True)
class ShaperTrial:
    """Decides which steps run with the shaper: `steps` without it, as many with it, and so on, `pairs` times."""

    steps: int = 20
    pairs: int = 3
    meter: ActivityMeter = field(default_factory=ActivityMeter)
    _begun: list[list[float]] = field(default_factory=list)

    def end_step(self, now_s: float) -> bool:
        """Note that a step has ended (if one had begun); return whether a block has to begin now."""
        if self._begun:
            self._begun[-1].append(now_s)
        return not self._begun or len(self._begun[-1]) > self.steps

    @property
    def is_over(self) -> bool:
        """Return whether the last step of the last block has ended."""
        return len(self._begun) == 2 * self.pairs and len(self._begun[-1]) > self.steps

    def begin_block(self, now_s: float) -> bool:
        """Begin the next block; return whether it is one with the shaper."""
        if not self._begun:
            self.meter.start()
        self._begun.append([now_s])
        return len(self._begun) % 2 == 0

    def finish(self) -> tuple[str, PowerCurve, list[list[float]]]:
        """Return what this rank measured: the unit, its curve, and the starts of the steps of each block."""
        return self.meter.unit, self.meter.stop(), self._begun


def judge_trial(measured: Sequence[tuple[str, PowerCurve, list[list[float]]]]) -> ShaperValidation:
    """Make the validation from what every rank measured."""
    units = {unit for unit, _, _ in measured}
    curves = [curve for _, curve, _ in measured]
    blocks, notes = [], []
    for number in range(min(len(begun) for _, _, begun in measured)):
        starts = [begun[number] for _, _, begun in measured]
        # without the first step, in which groups find their places
        start_s, end_s = max(s[1] for s in starts), min(s[-1] for s in starts)
        windows = sum_windows(curves, start_s, end_s)
        if len(windows) < 2:
            notes.append(f"block {number + 1} is too short for windows of {WINDOW_S * 1e3:g} ms")
            continue
        steps_s = [float(b - a) for s in starts for a, b in pairwise(s[1:])]
        blocks.append(ShapedBlock.measure(number % 2 == 1, windows, steps_s))
    if len({b.shaped for b in blocks}) < 2:
        raise MeasurementError(
            f"the blocks are too short for windows of {WINDOW_S * 1e3:g} ms", fix="more steps in each: steps=100"
        )
    return ShaperValidation(
        unit=units.pop() if len(units) == 1 else "mixed units",
        ranks=len(measured),
        window_s=WINDOW_S,
        blocks=tuple(blocks),
        notes=tuple(notes),
    )
