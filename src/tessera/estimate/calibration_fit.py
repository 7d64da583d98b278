"""From predicted and measured points to the factors of a calibration.

A factor multiplies a kernel's own time so that the *whole* model gives the measurement: the gaps between kernels are
subtracted first, and where the power limit held the clock, the measured clock is used. Energy is compared above the
static power, which comes from the host-bound networks: they draw little else.

The points of a group scatter, because each kernel's prediction has its own error; the factor is what the group has in
common. Its prior (`FactorPrior`) is near 1 on a chip whose figures were fitted on measurements, where only boards
differ, and wide on a chip known from its datasheet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..device import Device
from ..graph.ir import Graph
from ..joules import Floats
from ..monitor.steady_state import t90
from .calibration import GROUPS, Calibration, Scale, Watts
from .calibration_bench import MeasuredLaunch, Sample
from .host import HostModel
from .iteration import Iteration
from .kernel_time import chip
from .ops import OpModel
from .power import PowerModel
from .predict import estimate
from .prediction_report import Estimate

if TYPE_CHECKING:
    from .calibration_kernels import CalibrationPoint

# A kernel that repeats alone takes this share of its time among the other kernels of a model, which is what is
# predicted. Mean over the groups of an H200 as it ships (0.908 and 0.910 in two runs), whose predictions are fitted on
# whole models. With it 49 recorded models go from 8.1 to 8.0% as shipped, from 9.8 to 10.0% as if from the datasheet
# (benchmarks/results/calibrate_check.json); without it they went to 8.4 and 13.5%.
ALONE = 0.91
# Two runs of the same kernel on the same kind of board differ by this much (2.5-8.5%, public H200 timings).
REPEATABLE = 0.03
# The prior on the scatter counts as so many points: one or two measured points alone do not determine it.
_KNOWN_POINTS = 2
# Where dynamic energy is a smaller share than this, its factor would only show the error of the static power.
_DYNAMIC_SHARE = 0.2
_FULL_CLOCK = 0.97  # below this share of boost the clock is being held
_WIDEST = 0.95
_NO_SENSOR = "no power sensor of this GPU is readable: tessera doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationCase:
    """A program predicted for a device from the catalogue alone: its graph, its kernels and the gaps between them."""

    device: Device
    launch: MeasuredLaunch
    graph: Graph
    estimate: Estimate
    gaps_s: Floats
    host: HostModel

    @property
    def work(self) -> list[tuple[str, str]]:
        """Kind and precision of each kernel."""
        return [(op.kind, op.precision) for op in self.graph.kernels]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """A point, predicted and measured; one iteration of the case is `copies` calls of the point."""

    point: CalibrationPoint
    case: CalibrationCase
    copies: int
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorPrior:
    """What is known about a group before it is measured: standard deviations of logarithms.

    `tau` is how far its factor may be from 1, `scatter` how far a point may be from its group.
    """

    tau: float
    scatter: float


# Scatters are those of the points about their groups, pooled over the eleven groups of an H200, as it ships and as if
# known from its datasheet alone (benchmarks/results/calibrate_check.json).
FITTED = FactorPrior(tau=0.03, scatter=0.13)
"""A chip whose figures were fitted on measurements: boards of one kind differ by about 3%."""
DATASHEET = FactorPrior(tau=0.25, scatter=0.17)
"""A chip known from its datasheet: carried over to the A100, times are off by 15-21% (benchmarks/README.md)."""
HOST = FactorPrior(tau=0.4, scatter=0.25)
"""A host: others launch in half to twice the time. Measurements of one host differ because the launch model is off by
15% from one network to the next, and the same call takes 1 to 1.7 times as long minutes later (h200_ops.jsonl.gz)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A point's measured over its predicted value, and the relative 90% half-width of the prediction."""

    value: float
    interval: float

    @property
    def is_outside(self) -> bool:
        """Whether the measurement lies outside the predicted interval."""
        return abs(self.value - 1.0) > self.interval


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """Seconds and joules of an iteration; `clock` is relative to boost."""

    seconds: float
    joules: float
    clock: float


def case_of(
    device: Device, graph: Graph, launch: MeasuredLaunch, point: CalibrationPoint | None = None
) -> CalibrationCase:
    """A captured program, that of a point or any, as predicted from the catalogue alone, without any calibration."""
    model, host = OpModel(device), HostModel.of_device(device)
    if point is not None:
        host = host.scale(point.host_share, host.provenance, host.relative_error)
    sustained = estimate(graph, device, model, launch=launch, host=host)
    burst = estimate(graph, device, model, launch=launch, host=host, state="burst")
    own_s = np.array([max(k.seconds, k.clock_s) for k in burst.kernels])
    gaps_s = np.maximum(0.0, burst.solved.device_s - own_s)  # what an iteration adds to its kernels at full clock
    return CalibrationCase(device=device, launch=launch, graph=graph, estimate=sustained, gaps_s=gaps_s, host=host)


def calibrated_outcome(case: CalibrationCase, calibration: Calibration) -> CaseOutcome:
    """An iteration predicted with a calibration."""
    power = calibration.scale_power(PowerModel.from_device(case.device))
    if case.launch == "eager":
        host = calibration.scale_host(case.host)
        solved = _estimate_eager(case, calibration, host).solved
        joules = power.static_w * solved.seconds + _dynamic_j(case, calibration)
        return CaseOutcome(seconds=solved.seconds, joules=joules, clock=solved.clock)
    kernels = [calibration.scale_kernel(k, *work) for k, work in zip(case.estimate.kernels, case.work, strict=True)]
    iteration = Iteration(kernels, list(case.gaps_s), power)
    calibration.scale_energy(iteration, case.work)
    solved = iteration.solve(None)
    return CaseOutcome(seconds=solved.seconds, joules=solved.energy_j, clock=solved.clock)


def calibration_alone(calibration: Calibration) -> Calibration:
    """The calibration for kernels that repeat alone."""
    one = Scale(factor=1.0, spread=None, points=0)
    scales = {group: calibration.time_scale.get(group, one) for group in GROUPS}
    faster = {group: msgspec.structs.replace(s, factor=ALONE * s.factor) for group, s in scales.items()}
    return msgspec.structs.replace(calibration, time_scale=faster)


def _estimate_eager(case: CalibrationCase, calibration: Calibration, host: HostModel) -> Estimate:
    """An eager iteration with calibrated kernel times; its power and host are not calibrated."""
    unknown = Watts(value=None, how="")
    times = msgspec.structs.replace(calibration, energy_scale={}, static_w=unknown, limit_w=unknown)
    return estimate(case.graph, case.device, OpModel(case.device), host=host, calibration=times)


def _dynamic_j(case: CalibrationCase, calibration: Calibration) -> float:
    """Dynamic joules of an eager iteration: they do not depend on how long the device waits."""
    solved = _estimate_eager(case, calibration, HostModel.of_device(case.device)).solved
    factors = [calibration.energy_factor(*work) for work in case.work]
    return float(((solved.compute_j + solved.memory_j) * factors).sum())


# -- all factors ------------------------------------------------------------------------------------------------


def fit(
    blank: Calibration, kernels: Sequence[MeasuredPoint], nets: Sequence[MeasuredPoint], held: MeasuredPoint | None
) -> tuple[Calibration, list[str]]:
    """The calibration that makes the model give the measurements, and notes about it."""
    notes: list[str] = []
    times = [time_ratio(m.case, m.sample) for m in kernels]
    groups = [(m.point.group, chip(m.case.device).calibrated) for m in kernels]
    calibration = msgspec.structs.replace(blank, time_scale=_by_group(groups, times), limit_w=_limit(held))
    calibration = msgspec.structs.replace(calibration, host_scale=_host_scale(nets, calibration, notes))
    for _ in range(3):  # the static power needs the networks' few dynamic joules, and those the static power
        calibration = msgspec.structs.replace(calibration, static_w=_static(nets, calibration))
        joules = [_energy_ratio(m.case, m.sample, calibration) for m in kernels]
        calibration = msgspec.structs.replace(calibration, energy_scale=_by_group(groups, joules))
    notes += _note_low_clock(kernels)
    if not calibration.energy_scale:
        notes.append("no joules were measured: energy is predicted without calibration")
    return calibration, notes


def _by_group(groups: Sequence[tuple[str, bool]], ratios: Sequence[Ratio | None]) -> dict[str, Scale]:
    """The scale of each group; a group is its name, and whether its chip's figures were fitted on measurements."""
    by_group: dict[tuple[str, bool], list[Ratio]] = {}
    for group, ratio in zip(groups, ratios, strict=True):
        if ratio is not None:
            by_group.setdefault(group, []).append(ratio)
    return {name: group_scale(members, fitted) for (name, fitted), members in by_group.items()}


def group_scale(ratios: Sequence[Ratio], fitted: bool) -> Scale:
    """The scale of a group of kernels.

    On a fitted chip a few points neither move a group far nor replace an interval that rests on hundreds of kernels,
    unless they contradict it: two points or more, and more than half of them outside their 90% intervals. With correct
    intervals that happens to one group in a hundred (with three points: three). The group is then treated as on a chip
    known from its datasheet.
    """
    outside = sum(ratio.is_outside for ratio in ratios)
    if not fitted or (len(ratios) > 1 and 2 * outside > len(ratios)):
        return scale([ratio.value for ratio in ratios], DATASHEET)
    return msgspec.structs.replace(scale([ratio.value for ratio in ratios], FITTED), spread=None)


def scale(ratios: Sequence[float], prior: FactorPrior) -> Scale:
    """The factor that ratios have in common, drawn towards 1 by its prior, and the interval of another ratio.

    All logarithms are normal: the factor's about 0 with deviation `tau`, the ratios' about the factor's with one that
    is estimated from the points and `prior.scatter` together. The interval is the 90% half-width about the factor used
    (Student's t): a ratio's own scatter, the factor's error, and the distance by which it was drawn towards 1.
    """
    logs = np.log(np.asarray(ratios, float))
    n, mean = len(logs), float(logs.mean())
    degrees = _KNOWN_POINTS + n - 1
    variance = (_KNOWN_POINTS * prior.scatter**2 + float(((logs - mean) ** 2).sum())) / degrees
    variance = max(variance, REPEATABLE**2)
    weight = prior.tau**2 / (prior.tau**2 + variance / n)
    factor = weight * mean
    half = t90(degrees) * math.sqrt(variance + weight * variance / n + (mean - factor) ** 2)
    spread = min(_WIDEST, math.expm1(min(half, 1.0))) if n > 1 else None
    return Scale(factor=math.exp(factor), spread=spread, points=n, mean=math.exp(mean))


# -- kernels ----------------------------------------------------------------------------------------------------


def _clock_share(case: CalibrationCase, sample: Sample) -> float | None:
    """The clock relative to boost; boards may run a little above what the catalogue says."""
    return min(1.0, sample.clock_hz / chip(case.device).clock_hz) if sample.clock_hz else None


def _is_capped(case: CalibrationCase, sample: Sample) -> bool:
    """Whether the power limit held the clock, by the driver's reasons or by the clock itself."""
    share = _clock_share(case, sample)
    return sample.capped if sample.capped is not None else share is not None and share < _FULL_CLOCK


def _clock(case: CalibrationCase, sample: Sample) -> float | None:
    """The clock for the power model, relative to boost: 1 unless the power limit held it; None where it is not known.

    A clock that is low for another reason (locked, hot) is not the power model's concern: the factor contains it.
    """
    return _clock_share(case, sample) if _is_capped(case, sample) else 1.0


def time_ratio(case: CalibrationCase, sample: Sample) -> Ratio:
    """The factor on the times of such kernels in a model, and the interval of their prediction."""
    kernels = case.estimate.kernels
    interval = float(np.mean([k.relative_error for k in kernels]))  # of copies of one kernel: that kernel's
    return Ratio(value=_alone_factor(case, sample) / ALONE, interval=interval)


def _alone_factor(case: CalibrationCase, sample: Sample) -> float:
    """The factor on the kernels' times that gives the sample."""
    clock = _clock(case, sample)
    own_s = sample.seconds - float(case.gaps_s.sum())
    if clock is None or own_s <= 0:
        return sample.seconds / case.estimate.solved.seconds
    predicted_s = sum(k.clock_s / clock + max(0.0, k.seconds - k.clock_s) for k in case.estimate.kernels)
    return own_s / predicted_s


def _energy_ratio(case: CalibrationCase, sample: Sample, calibration: Calibration) -> Ratio | None:
    """The factor on the dynamic joules at the measured time; None where they are too small beside the static ones."""
    if sample.joules is None:
        return None
    power = calibration.scale_power(PowerModel.from_device(case.device))
    factor = _alone_factor(case, sample)
    kernels = [replace(k, seconds=k.seconds * factor, clock_s=k.clock_s * factor) for k in case.estimate.kernels]
    iteration = Iteration(kernels, list(case.gaps_s), power)
    compute, memory = iteration.dynamic_j(_clock(case, sample) or case.estimate.solved.clock)
    dynamic_j = float(compute.sum() + memory.sum())
    above_j = sample.joules - power.static_w * sample.seconds
    if min(above_j, dynamic_j) <= _DYNAMIC_SHARE * sample.joules:
        return None
    # The model's interval is for all joules; here the dynamic ones alone carry the difference.
    interval = PowerModel.from_device(case.device).relative_error * sample.joules / dynamic_j
    return Ratio(value=above_j / dynamic_j, interval=interval)


def _note_low_clock(kernels: Sequence[MeasuredPoint]) -> list[str]:
    """A note where the clock was below boost for another reason than the power limit."""
    shares = [_clock_share(m.case, m.sample) for m in kernels if not _is_capped(m.case, m.sample)]
    free = [share for share in shares if share is not None]
    if not free or float(np.median(free)) >= _FULL_CLOCK:
        return []
    return [
        f"the clock was at {100 * float(np.median(free)):.0f}% of boost although the power limit did not hold it "
        "(locked, or hot): the factors are for this clock"
    ]


# -- watts ------------------------------------------------------------------------------------------------------


def _limit(held: MeasuredPoint | None) -> Watts:
    """The power the board sustains, if the product reached its limit."""
    if held is None:
        return Watts(value=None, how="the product that should reach the limit could not be run")
    watts, name = held.sample.watts, held.point.name
    if watts is None:
        return Watts(value=None, how=_NO_SENSOR)
    if not _is_capped(held.case, held.sample):
        return Watts(value=None, how=f"not reached: {name} drew {watts:.0f} W at full clock")
    return Watts(value=watts, how=f"{name}, held by the power limit")


def _static(nets: Sequence[MeasuredPoint], calibration: Calibration) -> Watts:
    """The power of the board while its SMs wait: the networks' power, less the little that their kernels draw."""
    measured = [(m, m.sample.joules) for m in nets if m.sample.joules is not None]
    watts = [(joules - _dynamic_j(m.case, calibration)) / m.sample.seconds for m, joules in measured]
    watts = [w for w in watts if w > 0]
    if not watts:
        return Watts(value=None, how="no power was measured while the device waited for the host")
    error_w = 0.5 * (max(watts) - min(watts))
    return Watts(value=float(np.mean(watts)), error_w=error_w, how="host-bound iterations, less their kernels")


# -- the host ---------------------------------------------------------------------------------------------------


def _host_scale(nets: Sequence[MeasuredPoint], calibration: Calibration, notes: list[str]) -> Scale | None:
    """The factor of the host; a few measurements may narrow the launch model's interval, but not widen it."""
    factors = [(m.point.name, host_factor(m.case, m.sample, calibration)) for m in nets]
    notes += [f"{name} was bound by the device: it does not measure the host" for name, f in factors if f is None]
    ratios = [factor for _, factor in factors if factor is not None]
    if not ratios:
        return None
    of_looks, before = scale(ratios, HOST), nets[0].case.host.relative_error
    spread = None if of_looks.spread is None else min(of_looks.spread, before)
    return msgspec.structs.replace(of_looks, spread=spread)


def host_factor(case: CalibrationCase, sample: Sample, calibration: Calibration) -> float | None:
    """The factor on all host times that gives the measured iteration; None where the device decides its time."""

    def seconds(factor: float) -> float:
        host = case.host.scale(factor, "trial", case.host.relative_error)
        return _estimate_eager(case, calibration, host).solved.seconds

    low, high = 0.02, 50.0
    low_s, high_s = seconds(low), seconds(high)
    if sample.seconds <= 1.05 * low_s or sample.seconds > high_s:
        return None
    # Regula falsi (Illinois): seconds rise with the factor, in proportion where the host decides.
    low_off, high_off, off = low_s - sample.seconds, high_s - sample.seconds, 0.0
    while high - low > 1e-6 * low:
        middle, before = (low * high_off - high * low_off) / (high_off - low_off), off
        off = seconds(middle) - sample.seconds
        if abs(off) < 1e-7 * sample.seconds:
            return middle
        if off < 0.0:
            low, low_off, high_off = middle, off, high_off * (0.5 if before < 0.0 else 1.0)
        else:
            high, high_off, low_off = middle, off, low_off * (0.5 if before > 0.0 else 1.0)
    return 0.5 * (low + high)
