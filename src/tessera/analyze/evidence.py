"""`RunEvidence`: everything a rule of advice may look at, and what other matrix products would cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..advice import Advice, Confidence, SavingBy
from ..attribute.table import EnergyRow, EnergyTable
from ..attribute.work import OpWork
from ..device import Device
from ..errors import TesseraError
from ..integral import Floats
from ..schema import Telemetry
from ..timeline.columns import Timeline
from ..trace import PowerTrace
from ..units import format_energy
from .host_gaps import UNFED, HostGap, row_joules
from .kernel_work import Calls, list_calls
from .roofline import Ceilings, find_device
from .slowdown import Slowdown

# The share of the joules behind an advice that the change may save where nothing better is known. Measured on an H200:
# fp32 GEMMs 13.2 pJ/FLOP against TF32's 2.0; GPT-2 training eager 26.5 J, compiled 18.7 J a step, with CUDA graphs
# 17.5 J; its products with a vocabulary of 50257 3.9 pJ/FLOP against 1.03 of aligned ones. The others are guesses that
# only order the list.
SAVES = {
    "idle": 0.8,
    "launch": 0.8,
    "fp32": 0.85,
    "unaligned": 0.7,
    "copies": 0.7,
    "fuse": 0.5,
    "communication": 0.5,
    "outliers": 0.9,
    "outside": 0.2,
    "power cap": 0.1,
    "thermal": 0.2,
    "one operator": 0.15,
}


@dataclass(kw_only=True)
class RunEvidence:
    """What is known of a run. Rules read it; what costs time to find out is found when first asked for."""

    table: EnergyTable
    telemetry: Mapping[str, Sequence[Telemetry]]
    gaps: Sequence[HostGap] = ()
    timeline: Timeline | None = None
    power: PowerTrace | None = None
    on: str | Device | None = None
    tracing: Slowdown | None = None

    @functools.cached_property
    def device(self) -> Device | None:
        """The chip it ran on, where the recording names one of the catalogue."""
        labels = [d.label for d in self.power.domains if d.label] if self.power is not None else []
        return find_device(self.timeline, self.on, labels[0] if labels else None) if self.timeline is not None else None

    @functools.cached_property
    def ceilings(self) -> Ceilings | None:
        """The ceilings of that chip."""
        return Ceilings.of(self.device) if self.device is not None else None

    @functools.cached_property
    def calls(self) -> Calls | None:
        """The work of every call; None where nothing ran on a device, or there is no timeline."""
        if self.timeline is None or not len(self.timeline.device_rows):
            return None
        return list_calls(self.timeline)

    @functools.cached_property
    def joules(self) -> Floats:
        """Joules of every call."""
        assert self.timeline is not None and self.calls is not None
        return row_joules(self.timeline, self.calls.rows, self.table)

    @functools.cached_property
    def program_share(self) -> float:
        """The share of the time a device waited for the host that the program caused, and not the tracer."""
        waited_s = sum(g.time_s for g in self.gaps if g.during not in UNFED)
        if self.tracing is None or not self.tracing.matters or waited_s <= 0:
            return 1.0
        return max(0.0, 1.0 - self.tracing.idle_s / waited_s)

    def match_calls(self, matches: Callable[[str], Any]) -> NDArray[np.bool_]:
        """Which calls have a kernel whose name matches."""
        assert self.timeline is not None and self.calls is not None
        hits = np.array([bool(matches(name)) for name in self.timeline.names], bool)
        return np.asarray(hits[self.timeline["name"][self.calls.rows]], np.bool_)

    def sum_kernels(self, matches: Callable[[EnergyRow], Any]) -> tuple[float, float]:
        """Joules and seconds of the kernels of the table that match."""
        rows = [r for r in self.table.kernels if matches(r)]
        return sum(r.energy_j for r in rows), sum(r.time_s for r in rows)

    def share(self, energy_j: float) -> float:
        """Of the whole run."""
        return energy_j / self.table.total_j

    def format_amount(self, energy_j: float) -> str:
        """Joules and their share, in words."""
        return f"{format_energy(energy_j, 3)} ({self.share(energy_j):.0%})"

    def advise(
        self,
        kind: str,
        energy_j: float,
        evidence: str,
        action: str,
        *,
        saves: tuple[float, float | None] | None = None,
        by: SavingBy = "experience",
        confidence: Confidence = "low",
    ) -> Advice:
        """Advice for this run; without a computed saving, the share that `SAVES` has for its kind."""
        if saves is None:
            saves, by, confidence = (SAVES.get(kind, 0.0) * energy_j, None), "experience", "low"
        return Advice(
            kind=kind,
            evidence=evidence,
            action=action,
            energy_j=energy_j,
            share=self.share(energy_j),
            saves_j=saves[0],
            saves_share=self.share(saves[0]),
            saves_s=saves[1],
            by=by,
            confidence=confidence,
        )


def group_telemetry(telemetry: Sequence[Telemetry]) -> dict[str, list[Telemetry]]:
    """Readings by the device they are of."""
    groups: dict[str, list[Telemetry]] = {}
    for reading in telemetry:
        groups.setdefault(reading.domain, []).append(reading)
    return groups


def product_cost(
    device: Device, sizes: Sequence[int], precision: str, layout: str = "nt"
) -> tuple[float, float] | None:
    """Predicted seconds and joules of a matrix product (batch, m, n, k) under the power limit; None where unknown."""
    from ..estimate.gemm import gemm_time
    from ..estimate.power import DeviceWork, PowerModel

    batch, m, n, k = sizes
    try:
        kernel = gemm_time(device, m, n, k, batch, precision, layout=layout)
        cost = PowerModel.from_device(device).estimate(DeviceWork.of(kernel))
    except TesseraError:
        return None
    return cost.seconds, cost.energy_j


def save_by_products(
    run: RunEvidence,
    chosen: NDArray[np.bool_],
    change: Callable[[OpWork], tuple[str | None, Sequence[int], str | None]],
    *,
    work_factor: float = 1.0,
    layouts: Sequence[str] = ("nt",),
) -> tuple[float, float] | None:
    """Joules and seconds that other sizes or another precision would save of the chosen calls.

    What was measured is scaled by the ratio of two predictions, so that an error both share does not matter. `change`
    gives a product's precision and its new sizes and precision; the new one does `work_factor` times the work. How
    the operands lie is not recorded: of `layouts` it is the slowest. None where nothing is known.
    """
    calls = run.calls
    if calls is None or run.device is None:
        return None
    saved_j = saved_s = 0.0
    is_predicted = False
    for number, work in enumerate(calls.works):
        own = np.flatnonzero(chosen & (calls.work == number))
        if not len(own) or work.sizes is None:
            continue
        precision, sizes, other = change(work)
        if precision is None or other is None:
            continue
        costs = [(product_cost(run.device, work.sizes, precision, at), at) for at in layouts]
        old, layout = max(((c, at) for c, at in costs if c is not None), default=(None, ""))
        new = product_cost(run.device, sizes, other, layout) if old is not None else None
        if old is None or new is None:
            continue
        is_predicted = True
        saved_j += float(run.joules[own].sum()) * max(0.0, 1.0 - new[1] / old[1] / work_factor)
        saved_s += float(calls.seconds[own].sum()) * max(0.0, 1.0 - new[0] / old[0] / work_factor)
    return (saved_j, saved_s) if is_predicted else None
