"""From points predicted and measured to the factors of an overlay.

A factor is what a kernel's own time must be multiplied by for the *whole* model to give what was measured: the gaps
between kernels are taken off first, and where the power limit held the clock, the clock is taken as measured. Energy is
compared above the static power, which the host-bound networks give: they draw little else.

Points of a group scatter, because the prediction of each kernel is off in its own way; what is wanted is what the group
has in common. So its factor is the mean of an estimate that knows (`Prior`) how far such a factor can be from 1: little
on a chip whose figures were fitted on measurements, where only boards differ, and much on one known from its datasheet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..device import Device
from ..graph.ir import Graph, Op
from ..monitor.steady_state import t90
from . import overlay as laid
from .bench import Sample
from .host import HostModel
from .kernel_time import KernelTime, chip
from .ops import OpModel
from .overlay import Overlay, Scale, Watts
from .power import PowerModel
from .predict import Estimate, Launch, estimate, host_of
from .timeline import Array, Iteration

if TYPE_CHECKING:
    from .points import Point

# A kernel over and over, alone, takes this share of its time among the other kernels of a model, which is what is
# predicted. Mean over the groups of an H200 as it ships (0.908 and 0.910 in two runs), whose predictions are fitted on
# whole models. With it 49 recorded models go from 8.1 to 8.0% as shipped, from 9.8 to 10.0% as if from the datasheet
# (benchmarks/results/calibrate_check.json); without it they went to 8.4 and 13.5%.
ALONE = 0.91
# Two runs of the same kernel on the same kind of board differ by this much (2.5-8.5%, public H200 timings).
REPEATABLE = 0.03
# What is known of the scatter beforehand counts as so many points: one or two points alone would not tell it.
_KNOWN_POINTS = 2
# Where dynamic energy is a smaller share than this, its factor is the error of the static power.
_DYNAMIC_SHARE = 0.2
_FULL_CLOCK = 0.97  # below this share of boost the clock is being held
_WIDEST = 0.95
_NO_SENSOR = "no power sensor of this GPU is readable: tessera doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program predicted for a device from the catalogue alone: its graph, its kernels and the gaps between them."""

    device: Device
    launch: Launch
    graph: Graph
    found: Estimate
    gaps_s: Array

    @property
    def joules(self) -> float:
        """As predicted."""
        solved = self.found.solved
        return float((solved.static_j + solved.compute_j + solved.memory_j).sum())

    @property
    def work(self) -> list[tuple[str, str]]:
        """Kind and precision of each kernel."""
        return [(op.kind, op.precision) for op in self.graph.kernels]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A point, predicted and measured; one iteration of the case is `copies` calls of the point."""

    point: Point
    case: Case
    copies: int
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is known of a group before it is measured: standard deviations of logarithms.

    `tau` is how far its factor may be from 1, `scatter` how far a point may be from its group.
    """

    tau: float
    scatter: float


# Scatters are those of the points about their groups, pooled over the eleven groups of an H200, as it ships and as if
# known from its datasheet alone (benchmarks/results/calibrate_check.json).
FITTED = Prior(tau=0.03, scatter=0.13)
"""A chip whose figures were fitted on measurements: boards of one kind differ by about 3%."""
DATASHEET = Prior(tau=0.25, scatter=0.17)
"""A chip known from its datasheet: carried over to the A100, times are off by 15-21% (benchmarks/README.md)."""
HOST = Prior(tau=0.4, scatter=0.25)
"""A host: others launch in half to twice the time. Looks at one differ because the launch model is off by 15% from one
network to the next, and because the same call takes 1 to 1.7 times as long minutes later (h200_ops.jsonl.gz)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A point's measured over its predicted value, and the relative 90% half-width it was predicted within."""

    value: float
    interval: float

    @property
    def outside(self) -> bool:
        """Whether the interval does not hold what was measured."""
        return abs(self.value - 1.0) > self.interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an iteration comes to; `clock` is relative to boost."""

    seconds: float
    joules: float
    clock: float


def case_of(device: Device, graph: Graph, launch: Launch) -> Case:
    """A captured program as the catalogue alone predicts it: no calibration is ever laid over this."""
    model, host = OpModel(device), host_of(device)
    found = estimate(graph, device, model, launch=launch, host=host)
    burst = estimate(graph, device, model, launch=launch, host=host, burst=True)
    own_s = np.array([max(k.seconds, k.clock_s) for k in burst.kernels])
    gaps_s = np.maximum(0.0, burst.solved.device_s - own_s)  # what an iteration adds to its kernels at full clock
    return Case(device=device, launch=launch, graph=graph, found=found, gaps_s=gaps_s)


def after(case: Case, overlay: Overlay | None) -> Outcome:
    """An iteration with a calibration laid over it."""
    power = laid.power(PowerModel.from_device(case.device), overlay)
    if case.launch == "eager":
        solved = _eager(case, overlay, laid.host(host_of(case.device), overlay)).solved
        joules = power.static_w * solved.seconds + _dynamic_j(case, overlay)
        return Outcome(seconds=solved.seconds, joules=joules, clock=solved.clock)
    pairs = zip(case.found.kernels, case.work, strict=True)
    iteration = Iteration([laid.apply(k, *work, overlay) for k, work in pairs], list(case.gaps_s), power)
    laid.charge(iteration, case.work, overlay)
    solved = iteration.solve(None)
    joules = float((solved.static_j + solved.compute_j + solved.memory_j).sum())
    return Outcome(seconds=solved.seconds, joules=joules, clock=solved.clock)


def alone(overlay: Overlay) -> Overlay:
    """The overlay for kernels that run over and over, each alone."""
    scales = {group: overlay.time_scale.get(group, Scale(factor=1.0, spread=None, points=0)) for group in laid.GROUPS}
    faster = {group: msgspec.structs.replace(s, factor=ALONE * s.factor) for group, s in scales.items()}
    return msgspec.structs.replace(overlay, time_scale=faster)


class _Calibrated(OpModel):
    """Kernel times with an overlay laid over them."""

    def __init__(self, device: Device, overlay: Overlay | None) -> None:
        super().__init__(device)
        self._overlay = overlay

    def time(self, op: Op, hbm_bytes: float | None = None) -> KernelTime:
        """As predicted, times the factor of its group."""
        return laid.apply(super().time(op, hbm_bytes), op.kind, op.precision, self._overlay)


def _eager(case: Case, overlay: Overlay | None, host: HostModel) -> Estimate:
    return estimate(case.graph, case.device, _Calibrated(case.device, overlay), launch="eager", host=host)


def _dynamic_j(case: Case, overlay: Overlay | None) -> float:
    """Dynamic joules of an eager iteration: they do not depend on how long the device waits."""
    solved = _eager(case, overlay, host_of(case.device)).solved
    factors = [laid.energy_factor(*work, overlay) for work in case.work]
    return float(((solved.compute_j + solved.memory_j) * factors).sum())


# -- all factors ------------------------------------------------------------------------------------------------


def fit(
    blank: Overlay, kernels: Sequence[Measured], nets: Sequence[Measured], held: Measured | None
) -> tuple[Overlay, list[str]]:
    """The overlay that brings the model to what was measured, and what to know about it."""
    notes: list[str] = []
    times = [time_ratio(m.case, m.sample) for m in kernels]
    groups = [(m.point.group, chip(m.case.device).calibrated) for m in kernels]
    found = msgspec.structs.replace(blank, time_scale=_by_group(groups, times), limit_w=_limit(held))
    found = msgspec.structs.replace(found, host_scale=_host_scale(nets, found, notes))
    for _ in range(3):  # the static power needs the networks' few dynamic joules, and those the static power
        found = msgspec.structs.replace(found, static_w=_static(nets, found))
        joules = [_energy_ratio(m.case, m.sample, found) for m in kernels]
        found = msgspec.structs.replace(found, energy_scale=_by_group(groups, joules))
    notes += _held_clocks(kernels)
    if not found.energy_scale:
        notes.append("no joules were measured: energy is predicted as before")
    return found, notes


def _by_group(groups: Sequence[tuple[str, bool]], ratios: Sequence[Ratio | None]) -> dict[str, Scale]:
    """The scale of each group; beside its name stands whether its chip's figures were fitted on measurements."""
    known: dict[tuple[str, bool], list[Ratio]] = {}
    for group, ratio in zip(groups, ratios, strict=True):
        if ratio is not None:
            known.setdefault(group, []).append(ratio)
    return {name: group_scale(found, fitted) for (name, fitted), found in known.items()}


def group_scale(ratios: Sequence[Ratio], fitted: bool) -> Scale:
    """The scale of a group of kernels.

    On a fitted chip a few points neither move a group far nor replace an interval that rests on hundreds of kernels,
    unless they contradict it: two points or more, and more than half of them outside their 90% intervals. Were the
    intervals right, that would happen to one group in a hundred (of three points: three). The group is then taken as
    what it has shown to be: not the one that was fitted.
    """
    outside = sum(ratio.outside for ratio in ratios)
    if not fitted or (len(ratios) > 1 and 2 * outside > len(ratios)):
        return scale([ratio.value for ratio in ratios], DATASHEET)
    return msgspec.structs.replace(scale([ratio.value for ratio in ratios], FITTED), spread=None)


def scale(ratios: Sequence[float], prior: Prior) -> Scale:
    """The factor that ratios have in common, drawn towards 1 by what is known of it, and the interval of another ratio.

    Of logarithms, all normal: the factor's lie about 0 by `tau`, the ratios' about the factor's by s, which is that of
    the points and of `prior.scatter` together. The interval is the 90% half-width about the factor used (Student's t):
    of a ratio's own scatter, the factor's error, and what the factor was drawn in by.
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


def _share(case: Case, sample: Sample) -> float | None:
    """The clock relative to boost; boards may run a little above what the catalogue says."""
    return min(1.0, sample.clock_hz / chip(case.device).clock_hz) if sample.clock_hz else None


def _capped(case: Case, sample: Sample) -> bool:
    """Whether the power limit held the clock: as the driver says, or as the clock does."""
    share = _share(case, sample)
    return sample.capped if sample.capped is not None else share is not None and share < _FULL_CLOCK


def _clock(case: Case, sample: Sample) -> float | None:
    """The clock to reckon with, relative to boost: 1 unless the power limit held it; None where it is not known.

    A clock that something else holds (locked, hot) is no business of the power model: it belongs to the factor.
    """
    return _share(case, sample) if _capped(case, sample) else 1.0


def time_ratio(case: Case, sample: Sample) -> Ratio:
    """What the times of such kernels in a model are to be multiplied by, and the interval they were predicted with."""
    kernels = case.found.kernels
    interval = float(np.mean([k.relative_error for k in kernels]))  # of copies of one kernel: that kernel's
    return Ratio(value=_alone_factor(case, sample) / ALONE, interval=interval)


def _alone_factor(case: Case, sample: Sample) -> float:
    """What the kernels' times would have to be multiplied by to give the sample."""
    clock = _clock(case, sample)
    own_s = sample.seconds - float(case.gaps_s.sum())
    if clock is None or own_s <= 0:
        return sample.seconds / case.found.solved.seconds
    predicted_s = sum(k.clock_s / clock + max(0.0, k.seconds - k.clock_s) for k in case.found.kernels)
    return own_s / predicted_s


def _energy_ratio(case: Case, sample: Sample, found: Overlay) -> Ratio | None:
    """What the dynamic joules are to be multiplied by; None where they hardly show above the static ones.

    What is compared is what the point costs, given how long it took.
    """
    if sample.joules is None:
        return None
    power = laid.power(PowerModel.from_device(case.device), found)
    factor = _alone_factor(case, sample)
    kernels = [replace(k, seconds=k.seconds * factor, clock_s=k.clock_s * factor) for k in case.found.kernels]
    iteration = Iteration(kernels, list(case.gaps_s), power)
    compute, memory = iteration.dynamic_j(_clock(case, sample) or case.found.solved.clock, 1.0)
    dynamic_j = float(compute.sum() + memory.sum())
    above_j = sample.joules - power.static_w * sample.seconds
    if min(above_j, dynamic_j) <= _DYNAMIC_SHARE * sample.joules:
        return None
    # The model's interval is of all joules; here the dynamic ones alone take up the difference.
    interval = PowerModel.from_device(case.device).relative_error * sample.joules / dynamic_j
    return Ratio(value=above_j / dynamic_j, interval=interval)


def _held_clocks(kernels: Sequence[Measured]) -> list[str]:
    """A note where the clock stood below boost and the power limit was not why."""
    shares = [_share(m.case, m.sample) for m in kernels if not _capped(m.case, m.sample)]
    free = [share for share in shares if share is not None]
    if not free or float(np.median(free)) >= _FULL_CLOCK:
        return []
    return [
        f"the clock stood at {100 * float(np.median(free)):.0f}% of boost though the power limit did not hold it "
        "(locked, or hot): the factors hold for this clock"
    ]


# -- watts ------------------------------------------------------------------------------------------------------


def _limit(held: Measured | None) -> Watts:
    """The power the board sustains, if the product reached its limit."""
    if held is None:
        return Watts(value=None, how="the product that should reach the limit could not be run")
    watts, name = held.sample.watts, held.point.name
    if watts is None:
        return Watts(value=None, how=_NO_SENSOR)
    if not _capped(held.case, held.sample):
        return Watts(value=None, how=f"not reached: {name} drew {watts:.0f} W at full clock")
    return Watts(value=watts, how=f"{name}, held by the power limit")


def _static(nets: Sequence[Measured], found: Overlay) -> Watts:
    """What the board draws while its SMs wait: the networks' power, less the little their kernels cost."""
    watts = []
    for m in nets:
        if m.sample.joules is not None:
            watts.append((m.sample.joules - _dynamic_j(m.case, found)) / m.sample.seconds)
    watts = [w for w in watts if w > 0]
    if not watts:
        return Watts(value=None, how="no power was measured while the host held up the device")
    error_w = 0.5 * (max(watts) - min(watts))
    return Watts(value=float(np.mean(watts)), error_w=error_w, how="host-bound iterations, less their kernels")


# -- the host ---------------------------------------------------------------------------------------------------


def _host_scale(nets: Sequence[Measured], found: Overlay, notes: list[str]) -> Scale | None:
    """What the looks at the host say of it; they narrow the launch model's interval, but are too few to widen it."""
    ratios = []
    for m in nets:
        factor = host_factor(m.case, m.sample, found)
        if factor is None:
            notes.append(f"{m.point.name} was bound by the device: it says nothing of the host")
        else:
            ratios.append(factor)
    if not ratios:
        return None
    of_looks, before = scale(ratios, HOST), host_of(nets[0].case.device).relative_error
    spread = None if of_looks.spread is None else min(of_looks.spread, before)
    return msgspec.structs.replace(of_looks, spread=spread)


def host_factor(case: Case, sample: Sample, found: Overlay) -> float | None:
    """The factor on all the host's times at which the iteration takes what it took; None where the device decides."""
    default = host_of(case.device)

    def seconds(log: float) -> float:
        host = default.scaled(math.exp(log), "trial", default.relative_error)
        return _eager(case, found, host).solved.seconds

    low, high = math.log(0.02), math.log(50.0)
    if sample.seconds <= 1.05 * seconds(low) or sample.seconds > seconds(high):
        return None
    for _ in range(24):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if seconds(middle) < sample.seconds else (low, middle)
    return math.exp(0.5 * (low + high))
