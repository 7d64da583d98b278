"""`Share`: the joules of one device as watts by class; `by_time` makes one from modelled power.

Modelled samples know only the utilisation, so they cannot tell operators apart. Every moment has the watts of its
sample, shared evenly by what runs then; the rest is idle. A host's sample that contains operators and waiting is
divided by the power of each (`host_power.py`). All rows sum to the modelled joules.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..joules import Z90, DomainSamples, Floats, Ints, accumulate
from ..notes import Note, name_several
from ..schema import DeviceId, Domain, Energy, Hold
from ..sensors.modelled import LINE_ERROR
from ..units import format_duration
from .activity import Activity, Sharing, gaps, sum_by_key
from .fit import PowerFit, add_level_error, conserve_energy
from .host_power import HostDivision, divide_samples
from .learn_response import LearntResponse

HOST = DeviceId("", "cpu", 0)
"""The device of operators if nothing ran on an accelerator; in a merged run its index is the rank."""
# In shorter idle gaps the device waits for the next launch; in longer ones the program does other things.
_SHORT_GAP_NS = 2_000_000
# From this share of the joules in samples with both operators and waiting on, the report mentions the fit.
_MIXED = 0.1
# Sources of logs of other tools, which can be logged more often; from this spacing on, that helps more than more steps.
_LOGS = ("csv", "nvidia-smi", "amd-smi", "rocm-smi", "xpu-smi", "plain log")
_SPARSE_S = 0.25
ENOUGH = 500
"""Samples in ten seconds of the ring; more of them hardly help to tell kernels apart (measure/light_joules.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The result for one device: intervals (those of `activity`, then its gaps) with watts by class."""

    device: DeviceId
    domain: Domain
    activity: Activity
    gap_start_ns: Ints
    gap_end_ns: Ints
    gap_cls: Ints
    watts: Floats
    covariance: Floats
    group: Ints
    joules: float
    error_j: float
    coverage: float
    fit: PowerFit
    learnt: LearntResponse | None = None
    division: HostDivision | None = None
    gap_weight: Floats | None = None
    """The power of each gap relative to its class, if samples tell it; None: all gaps are equal."""

    @property
    def on_host(self) -> bool:
        """Whether operators of the host ran, not kernels."""
        return is_host(self.device)

    @property
    def seconds(self) -> Floats:
        """The weight of each row: its share of the device times its relative power."""
        return self.activity.share_s * self.activity.weight

    @property
    def row_j(self) -> Floats:
        return self.seconds * self.watts[self.activity.cls]

    @property
    def gap_s(self) -> Floats:
        """The weight of each gap: its length times its relative power."""
        weight = 1.0 if self.gap_weight is None else self.gap_weight
        seconds: Floats = (self.gap_end_ns - self.gap_start_ns).astype(np.float64) * 1e-9 * weight
        return seconds

    @property
    def gap_j(self) -> Floats:
        return self.gap_s * self.watts[self.gap_cls]


def is_host(device: DeviceId) -> bool:
    """Return whether a device is the host, or one rank's part of it."""
    return (device.host, device.kind) == (HOST.host, HOST.kind)


def idle_class(start_ns: Ints, end_ns: Ints, classes: int) -> Ints:
    """Return the class of each gap, numbered after the classes that ran: short gaps, then long ones."""
    return (classes + ((end_ns - start_ns) >= _SHORT_GAP_NS)).astype(np.int64)


def by_time(
    device: DeviceId, column: DomainSamples, activity: Activity, seen: Sequence[tuple[int, int]], energy: Energy,
    most_w: float | None = None,
) -> Share:  # fmt: skip
    """Return the share of a device with modelled power. `activity` lies within `seen`; `energy` is that of `seen`.

    All operators of a host together draw `most_w` at most.
    """
    idle_in = [gaps(activity, *stretch) for stretch in seen]
    none = np.zeros(0, np.int64)
    gap_start, gap_end = (np.concatenate([none, *(part[i] for part in idle_in)]) for i in (0, 1))
    gap_cls = idle_class(gap_start, gap_end, activity.classes)
    joules_at: Callable[[Ints], Floats] = functools.partial(running_joules, column)
    division = None
    if is_host(device) and column.domain.hold is Hold.MEAN:
        times_ns = column.times_ns - column.lag_ns
        division = divide_samples(times_ns, joules_at, seen, (gap_start, gap_end), gap_cls - activity.classes, most_w)
        joules_at = joules_at if division is None else division.joules_at
    sharing = Sharing(activity.start_ns, activity.end_ns)
    share_s, row_j = sharing.of(), sharing.of(joules_at)
    mean_w = energy.energy_j / max(energy.time_s * energy.coverage, 1e-12)
    busy_w = float(row_j.sum() / share_s.sum()) if share_s.sum() > 0 else mean_w
    gap_j = joules_at(gap_end) - joules_at(gap_start)
    watts = np.full(activity.classes + 2, busy_w)
    watts[activity.classes :] = _idle_w(gap_cls - activity.classes, gap_end - gap_start, gap_j, mean_w)
    weight = np.divide(row_j, share_s * busy_w, out=np.ones(len(row_j)), where=share_s * busy_w > 0)
    weighted = dataclasses.replace(activity, share_s=share_s, weight=weight)
    seconds = sum_by_key(activity.cls, share_s * weight, len(watts)) + sum_by_key(
        gap_cls, (gap_end - gap_start) * 1e-9, len(watts)
    )
    covariance = _covariance(watts, _spread_w(column, seen), seconds, division)
    level, covariance = conserve_energy(watts, covariance, seconds, energy.energy_j)
    covariance = add_level_error(level, covariance, energy)
    return Share(
        device=device, domain=column.domain, activity=weighted, gap_start_ns=gap_start, gap_end_ns=gap_end,
        gap_cls=gap_cls, watts=level, covariance=covariance, group=np.full(activity.classes, -1, np.int64),
        joules=energy.energy_j, error_j=energy.error_j, coverage=energy.coverage,
        fit=PowerFit(watts=watts, covariance=covariance, informed=np.zeros(len(watts)), noise_w=0.0, samples=0),
        division=division, gap_weight=_weigh_gaps(gap_end - gap_start, gap_j, watts[gap_cls]),
    )  # fmt: skip


def running_joules(column: DomainSamples, at_ns: Ints) -> Floats:
    """Return the running sum of a column's joules at some times of the program."""
    times = column.times_ns - round(column.domain.lag_s * 1e9)
    if len(times) < 2:
        return np.zeros(len(at_ns))
    mean = column.domain.hold is Hold.MEAN
    sums = accumulate(column.times_ns, column.watts, mean=mean).joules
    i = np.clip(np.searchsorted(times, at_ns, side="right") - 1, 0, len(times) - 2)
    after_s = np.clip(at_ns - times[i], 0, times[i + 1] - times[i]) * 1e-9
    lasts_s = np.maximum((times[i + 1] - times[i]) * 1e-9, 1e-12)
    end_w = column.watts[i + 1]
    begin_w = np.where(mean | np.isnan(column.watts[i]), end_w, column.watts[i])
    inside_j = (begin_w + 0.5 * (end_w - begin_w) * after_s / lasts_s) * after_s
    return np.asarray(sums[i] + np.nan_to_num(inside_j), np.float64)


def _weigh_gaps(length_ns: Ints, gap_j: Floats, class_w: Floats) -> Floats:
    """Return the power of each gap relative to the mean of its class."""
    expected_j = length_ns * 1e-9 * class_w
    weight: Floats = np.divide(gap_j, expected_j, out=np.ones(len(gap_j)), where=expected_j > 0)
    return weight


def _idle_w(long: Ints, length_ns: Ints, gap_j: Floats, mean_w: float) -> Floats:
    """Return mean watts of the short gaps, and of the long ones."""
    seconds, joules = sum_by_key(long, length_ns * 1e-9, 2), sum_by_key(long, gap_j, 2)
    watts: Floats = np.divide(joules, seconds, out=np.full(2, mean_w), where=seconds > 0)
    return watts


def _spread_w(column: DomainSamples, seen: Sequence[tuple[int, int]]) -> float:
    """Return the standard deviation of the samples."""
    times = column.times_ns - column.lag_ns
    inside = np.zeros(len(times), bool)
    for begin, end in seen:
        inside |= (times >= begin) & (times <= end)
    samples_w = column.watts[inside & ~np.isnan(column.watts)]
    return float(samples_w.std()) if len(samples_w) > 1 else 0.0


def _covariance(watts: Floats, spread_w: float, seconds: Floats, division: HostDivision | None) -> Floats:
    """Return the covariance of the classes: from what the model's line misses, and from the spread of the samples.

    If samples were divided by a fit: from their spread around the fit, and from the error of the fit.
    """
    if division is None:
        own: Floats = np.diag((LINE_ERROR / Z90 * watts) ** 2 + spread_w**2)
        return own
    part = np.zeros((len(watts), 3))
    part[:-2, 0], part[-2, 1], part[-1, 2] = 1.0, 1.0, 1.0
    by_joule = part / np.maximum(seconds @ part, 1e-12)
    fitted: Floats = by_joule @ division.covariance @ by_joule.T
    return fitted + np.diag((LINE_ERROR / Z90 * watts) ** 2 + division.noise_w**2)


def join_coverage(parts: Sequence[Share]) -> float:
    """Return the share of the time that was seen: all joules over the seen seconds are the boards' own watts, added."""
    least, total_j = min(p.coverage for p in parts), sum(p.joules for p in parts)
    return total_j / sum(p.joules / p.coverage for p in parts) if least > 0.0 and total_j > 0.0 else least


def join_errors(parts: Sequence[Share], errors_j: Sequence[float]) -> float:
    """Return the error of a sum of parts: boards' errors are independent, ranks share the error of one model."""
    on_host = sum(error for p, error in zip(parts, errors_j, strict=True) if p.on_host)
    return math.hypot(on_host, *(error for p, error in zip(parts, errors_j, strict=True) if not p.on_host))


def _is_sparse_log(domain: Domain) -> bool:
    return domain.source.startswith(_LOGS) and domain.resolution_s >= _SPARSE_S


def note_fits(parts: Sequence[Share]) -> list[str]:
    """Return notes about how joules were divided; each text once, with all devices it is true for."""
    said: dict[str, list[str]] = {}
    for p in parts:
        if p.domain.basis == "modelled":
            text = "power is modelled, so joules are divided among operators by time"
            said.setdefault(text, []).append(p.domain.name)
            continue
        if _is_sparse_log(p.domain):
            every = f"power was logged every {format_duration(p.domain.resolution_s, 2)}"
            example = " (nvidia-smi -lms 100)" if p.domain.source.startswith("nvidia-smi") else ""
            text = f"{every}, and what was drawn between two rows is not known: log it more often{example}"
            said.setdefault(text, []).append(p.domain.name)
        busy = sum_by_key(p.activity.cls, p.seconds, len(p.watts))[: p.activity.classes]
        informed = p.fit.informed[: p.activity.classes]
        joules = busy * p.watts[: p.activity.classes]
        if joules.sum() > 0 and float(joules @ informed) < 0.5 * float(joules.sum()):
            modelled = "(the sum is measured, most of the split is modelled)"
            advice = "log power more often" if _is_sparse_log(p.domain) else "record more steps"
            few = f"{p.fit.samples} samples are too few to split the energy among kernels {modelled}: {advice}"
            alike = f"{p.fit.samples} samples, yet many kernels run too close together to be told apart {modelled}"
            said.setdefault(few if p.fit.samples < ENOUGH else alike, []).append(p.domain.name)
    fitted = [p.division for p in parts if p.division is not None and p.division.mixed > _MIXED]
    told = []
    if fitted:
        every_ms = max(d.spacing_s for d in fitted) * 1e3
        told = [Note(f"power is known every {every_ms:.0f} ms: a fit tells shorter work and waiting apart", "fitted")]
    return [*told, *(f"{name_several(names)}: {text}" for text, names in said.items())]
