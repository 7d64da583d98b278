"""What two predictions by one model have in common: an error that both make is not in their difference.

::

    kernels of a ──┐  e(a), by kernel          same kernel in both: its errors cancel
                   ├──► e(b) - e(a) ──►        same kind:           SHARED of them do, the rest is each kernel's own
    kernels of b ──┘                           other kinds:         add up as if independent

A prediction's kernels err by kind and by kernel: of a half-width e, SHARED * e is the kind's (cuBLAS is 3% faster here
than the fit says) and sqrt(1 - SHARED²) * e the kernel's own (this shape got a poor tile). The split is the one that
gives whole predictions their interval. A kernel is known again by its operator, FLOPs and bytes. The host errs as a
kind does, its own part being that of operators which only one side launches.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import ArgumentError
from ..estimate.prediction_report import PER_SECOND, SHARED, device_error_s
from ..hardware import lookup
from ..schema import EnergyDescriptor, EnergyReport
from ..units import format_power

# What both sides have is known no better than this share of it: another program leaves the kernels another clock, and
# a board's clock moves in steps of 15 MHz (0.8% of an H200's 1980), of which an iteration sees a mixture.
SMALLEST = 1e-3
_OWN = math.sqrt(1.0 - SHARED**2)
Kernel = tuple[str, str, float, int]
"""Kind, operator, FLOPs and bytes across memory."""


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


NONE = PredictionErrors({})


def model_of(report: EnergyReport) -> str:
    """By what a report was predicted: those of equal names err alike; "" where it cannot be known."""
    of = report.prediction
    if of is None or not report.descriptors:
        return ""
    # Not "latency": it names the fit most of the time is by, which is another for another program.
    parts = ("device", "power", "host", "dispatch")
    sources = [f"{part}: {of.provenance[part]}" for part in parts if part in of.provenance]
    return "; ".join([of.device, of.launch, *sources])


def errors_of(descriptors: Iterable[EnergyDescriptor]) -> PredictionErrors:
    """Of kernels alone."""
    sums: defaultdict[Kernel, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for d in descriptors:
        kernel = (d.kind, _operator(d), d.flops, round(d.hbm_bytes))
        s, j = sums[kernel]
        sums[kernel] = (s + d.latency_error_s, j + d.error_j)
    return PredictionErrors(dict(sums))


def whole_errors(report: EnergyReport) -> PredictionErrors:
    """Of a whole prediction: its kernels, and what its interval has beyond them, which is the host's."""
    of, kernels = report.prediction, errors_of(report.descriptors)
    if of is None or not (of.launch == "eager" or "dispatch" in of.provenance):  # a CPU dispatches either way
        return kernels
    waits = any(d.latency_s > d.device_s for d in report.descriptors)
    device_s = device_error_s([(d.kind, d.latency_error_s) for d in report.descriptors], waits)
    host_s = math.sqrt(max(0.0, of.latency_error_s**2 - device_s**2))
    watts = report.total.joules / report.total.seconds if report.total.seconds > 0 else 0.0
    launched = Counter(_operator(d) for d in report.descriptors)
    return PredictionErrors(kernels.kernels, (host_s, PER_SECOND * watts * host_s), launched)


def watts_error(report: EnergyReport) -> float | None:
    """90% half-width of a prediction's mean watts: joules follow the time by PER_SECOND, so that not all of it counts.

    None for what is not a prediction, or takes no time.
    """
    of, total = report.prediction, report.total
    if of is None or not (total.seconds > 0 and total.joules > 0):
        return None
    return _ratio_error(of.latency_error_s, total.error_j, total.joules / total.seconds) / total.seconds


def _ratio_error(error_s: float, error_j: float, power_w: float) -> float:
    """What a half-width of the seconds and one of the joules do to joules over seconds, times the seconds."""
    late_j = power_w * error_s
    level_j = math.sqrt(max(0.0, error_j**2 - (PER_SECOND * late_j) ** 2))
    return math.hypot(level_j, (1.0 - PER_SECOND) * late_j)


def difference(before: PredictionErrors, after: PredictionErrors) -> tuple[float, float]:
    """90% half-widths (seconds, joules) of a difference of two predictions by one model."""
    return _one(before, after, 0), _one(before, after, 1)


def difference_w(
    before: PredictionErrors, before_w: float, before_s: float, after: PredictionErrors, after_w: float, after_s: float
) -> float:
    """90% half-width of the difference of their mean watts; each side with its watts and seconds."""
    return _one(_in_watts(before, before_w, before_s), _in_watts(after, after_w, after_s), 0)


def _in_watts(errors: PredictionErrors, power_w: float, seconds: float) -> PredictionErrors:
    """What each kernel and the host do to the mean watts, in place of their seconds; joules are in that."""
    kernels = {k: (_ratio_error(s, j, power_w) / seconds, 0.0) for k, (s, j) in errors.kernels.items()}
    return PredictionErrors(kernels, (_ratio_error(*errors.host, power_w) / seconds, 0.0), errors.launched)


def _one(before: PredictionErrors, after: PredictionErrors, which: int) -> float:
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


def note_power_limit(report: EnergyReport) -> list[str]:
    """A note where the ± of a predicted power reaches what the board cannot draw."""
    of, total, error_w = report.prediction, report.total, watts_error(report)
    if of is None or error_w is None:
        return []
    try:
        limit = lookup(of.device).tdp_w
    except ArgumentError:  # predicted elsewhere, for a chip described there
        return []
    if limit is None or total.joules / total.seconds + error_w <= limit.value:
        return []
    return [
        f"the ± of the watts reaches past {format_power(limit.value)}, the power limit of {of.device}: "
        "only the part below is possible"
    ]
