"""The errors of a prediction, by kernel and of the host, and those of the difference of two predictions.

Two predictions by one model share errors, and an error that both make is not in their difference:

::

    kernels of a ──┐  e(a), by kernel          same kernel in both: its errors cancel
                   ├──► e(b) - e(a) ──►        same kind:           SHARED of them do, the rest is each kernel's own
    kernels of b ──┘                           other kinds:         add up as if independent

A prediction's kernels err by kind and by kernel: of a half-width e, SHARED * e is the kind's (cuBLAS is 3% faster here
than the fit says) and sqrt(1 - SHARED²) * e the kernel's own (this shape got a poor tile). The split is the one that
gives whole predictions their interval. A kernel is recognised by its operator, FLOPs and bytes. The host errs as a kind
does, its own part being that of operators which only one side launches.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..schema import EnergyDescriptor, EnergyReport
from .prediction_report import PER_SECOND, SHARED, device_error_s

# What both sides have is known no better than this share of it: another program leaves the kernels another clock, and
# a board's clock moves in steps of 15 MHz (0.8% of an H200's 1980), of which an iteration sees a mixture.
SMALLEST_ERROR = 1e-3
Kernel = tuple[str, str, float, int]
"""Kind, operator, FLOPs and bytes across memory."""
_OWN = math.sqrt(1.0 - SHARED**2)


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    """90% half-widths (seconds, joules) by kernel and of the host; `launched` counts the operators the host ran."""

    kernels: Mapping[Kernel, tuple[float, float]]
    host: tuple[float, float] = (0.0, 0.0)
    launched: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: PredictionErrors) -> PredictionErrors:
        sums = defaultdict(lambda: (0.0, 0.0), self.kernels)
        for kernel, (s, j) in other.kernels.items():
            sums[kernel] = (sums[kernel][0] + s, sums[kernel][1] + j)
        host = (self.host[0] + other.host[0], self.host[1] + other.host[1])
        return PredictionErrors(dict(sums), host, Counter(self.launched) + Counter(other.launched))

    def scale(self, factor: float) -> PredictionErrors:
        """The same, of a part of the work."""
        kernels = {k: (s * factor, j * factor) for k, (s, j) in self.kernels.items()}
        return PredictionErrors(kernels, (self.host[0] * factor, self.host[1] * factor), self.launched)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCost:
    """What a prediction says of one unit of work, with its errors; costs of one `model` share theirs."""

    model: str
    time_s: float
    energy_j: float
    error_s: float
    error_j: float
    errors: PredictionErrors

    @classmethod
    def of(cls, report: EnergyReport) -> PredictedCost:
        """The cost of one iteration."""
        total, of = report.total, report.prediction
        error_s = of.error_s if of is not None else 0.0
        figures = {"time_s": total.time_s, "energy_j": total.energy_j, "error_s": error_s, "error_j": total.error_j}
        return cls(model=model_of(report), **figures, errors=whole_errors(report))

    def scale(self, factor: float) -> PredictedCost:
        """The same, of a part of the work."""
        figures = (self.time_s, self.energy_j, self.error_s, self.error_j)
        time_s, energy_j, error_s, error_j = (figure * factor for figure in figures)
        errors = self.errors.scale(factor)
        return PredictedCost(
            model=self.model, time_s=time_s, energy_j=energy_j, error_s=error_s, error_j=error_j, errors=errors
        )

    def difference_error(self, other: PredictedCost) -> tuple[float, float]:
        """90% half-widths (seconds, joules) of the difference of two costs, as `tessera diff` gives them."""
        error_s, error_j = math.hypot(self.error_s, other.error_s), math.hypot(self.error_j, other.error_j)
        if not self.model or self.model != other.model:
            return error_s, error_j
        alike_s, alike_j = difference_errors(self.errors, other.errors)
        alike_s = math.hypot(alike_s, SMALLEST_ERROR * min(self.time_s, other.time_s))
        alike_j = math.hypot(alike_j, SMALLEST_ERROR * min(self.energy_j, other.energy_j))
        return min(error_s, alike_s), min(error_j, alike_j)  # errors in common never widen a difference


def model_of(report: EnergyReport) -> str:
    """By what a report was predicted: those of equal names err alike; "" where it cannot be known."""
    of = report.prediction
    if of is None or not report.descriptors:
        return ""
    # Not "latency": it names the fit most of the time is by, which is another for another program.
    parts = ("device", "power", "host", "dispatch")
    sources = [f"{part}: {of.provenance[part]}" for part in parts if part in of.provenance]
    return "; ".join([of.device.partition("@")[0], of.launch, *sources])


def errors_of(descriptors: Iterable[EnergyDescriptor]) -> PredictionErrors:
    """Of kernels alone."""
    sums: defaultdict[Kernel, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for d in descriptors:
        kernel = (d.kind, _operator(d), d.flops, round(d.hbm_bytes))
        s, j = sums[kernel]
        sums[kernel] = (s + d.error_s, j + d.error_j)
    return PredictionErrors(dict(sums))


def whole_errors(report: EnergyReport) -> PredictionErrors:
    """Of a whole prediction: its kernels, and what its interval has beyond them, which is the host's."""
    of, kernels = report.prediction, errors_of(report.descriptors)
    if of is None or not ("dispatch" in of.provenance or ("host" in of.provenance and of.launch != "compile")):
        return kernels
    waits = any(d.latency_s > d.device_s for d in report.descriptors)
    device_s = device_error_s([(d.kind, d.error_s) for d in report.descriptors], waits)
    host_s = math.sqrt(max(0.0, of.error_s**2 - device_s**2))
    watts = report.total.energy_j / report.total.time_s if report.total.time_s > 0 else 0.0
    launched = Counter(_operator(d) for d in report.descriptors)
    return PredictionErrors(kernels.kernels, (host_s, PER_SECOND * watts * host_s), launched)


def watts_error(report: EnergyReport) -> float | None:
    """90% half-width of a prediction's mean watts: joules follow the time by PER_SECOND, so that not all of it counts.

    None for what is not a prediction, or takes no time.
    """
    of, total = report.prediction, report.total
    if of is None or not (total.time_s > 0 and total.energy_j > 0):
        return None
    return _ratio_error(of.error_s, total.error_j, total.energy_j / total.time_s) / total.time_s


def _ratio_error(error_s: float, error_j: float, power_w: float) -> float:
    """What a half-width of the seconds and one of the joules do to joules over seconds, times the seconds."""
    late_j = power_w * error_s
    level_j = math.sqrt(max(0.0, error_j**2 - (PER_SECOND * late_j) ** 2))
    return math.hypot(level_j, (1.0 - PER_SECOND) * late_j)


def difference_errors(before: PredictionErrors, after: PredictionErrors) -> tuple[float, float]:
    """90% half-widths (seconds, joules) of a difference of two predictions by one model."""
    return _combine(before, after, 0), _combine(before, after, 1)


def difference_error_w(
    before: PredictionErrors, before_w: float, before_s: float, after: PredictionErrors, after_w: float, after_s: float
) -> float:
    """90% half-width of the difference of their mean watts; each side with its watts and seconds."""
    return _combine(_in_watts(before, before_w, before_s), _in_watts(after, after_w, after_s), 0)


def _in_watts(errors: PredictionErrors, power_w: float, seconds: float) -> PredictionErrors:
    """What each kernel and the host do to the mean watts, in place of their seconds; joules are in that."""
    kernels = {k: (_ratio_error(s, j, power_w) / seconds, 0.0) for k, (s, j) in errors.kernels.items()}
    return PredictionErrors(kernels, (_ratio_error(*errors.host, power_w) / seconds, 0.0), errors.launched)


def _combine(before: PredictionErrors, after: PredictionErrors, which: int) -> float:
    by_kind: defaultdict[str, float] = defaultdict(float)
    own = []
    for kernel in before.kernels.keys() | after.kernels.keys():
        change = after.kernels.get(kernel, (0.0, 0.0))[which] - before.kernels.get(kernel, (0.0, 0.0))[which]
        by_kind[kernel[0]] += change
        own.append(_OWN * change)
    return math.hypot(*(SHARED * e for e in by_kind.values()), *own, *_host(before, after, which))


def _host(before: PredictionErrors, after: PredictionErrors, which: int) -> tuple[float, ...]:
    """The host's level, the operators of one side only, and what the operators of both differ by."""
    both = sum(min(n, after.launched.get(name, 0)) for name, n in before.launched.items())
    a, b = before.host[which], after.host[which]
    part_a, part_b = (both / max(1, sum(side.launched.values())) for side in (before, after))
    level = SHARED * (b - a)
    return level, _OWN * (1.0 - part_a) * a, _OWN * (1.0 - part_b) * b, _OWN * (part_b * b - part_a * a)


def _operator(d: EnergyDescriptor) -> str:
    return d.subgraph_name.rpartition(".")[2]
