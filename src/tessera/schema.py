"""The nouns everything speaks in: Domain, PowerTrace, Energy, EnergyReport, Telemetry, Device.

Times are integer nanoseconds of the one monotonic clock (`tessera.clock`). Every uncertainty is the half-width
of a 90% interval. What is missing is None (or a `Gap`, or an unavailable `Capability`) with a reason, never 0.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .device import Caches as Caches
from .device import Clocks as Clocks
from .device import Device as Device
from .device import Figure as Figure
from .device import Link as Link
from .device import Memory as Memory
from .device import OperatingPoint as OperatingPoint
from .errors import ArgumentError

# Above any board there is (the catalogue ends at 1.4 kW, MI355X) and far below what a corrupt or reset counter fakes.
MAX_BOARD_W = 10_000.0
SCHEMA_VERSION = 1
"""Version of everything we write to disk; readers refuse a newer one and say so."""

Basis = Literal["measured", "modelled", "simulated", "predicted"]


class Hold(enum.Enum):
    """What a power sample means between the samples."""

    LINEAR = "linear"
    """A (nearly) instantaneous reading: power runs straight from one sample to the next."""
    MEAN = "mean"
    """The mean since the sample before, e.g. the difference of two readings of an energy counter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Something a sensor may give; where it does not, why and what would help."""

    name: str
    available: bool
    reason: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A named place where power is drawn, and how well its sensor sees it.

    `resolution_s` is the period at which the sensor really has something new, `lag_s` how late it shows a change,
    `blur_s` the width within which an edge may lie, `sample_noise` the relative standard deviation of one
    sample, `gain_error` the relative 90% error of the level that no averaging removes.
    `counted` domains add up to the total; the others (HBM inside a board, a whole chassis) overlap them.
    """

    name: str
    source: str
    resolution_s: float
    lag_s: float = 0.0
    blur_s: float = 0.0
    sample_noise: float = 0.0
    gain_error: float = 0.0
    hold: Hold = Hold.LINEAR
    counted: bool = True
    basis: Basis = "measured"
    label: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A stretch of time without data, and why. An open gap (`end_ns` None) lasts until data come again."""

    domain: str
    start_ns: int
    end_ns: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerEvent:
    """Something a power supply, PDU or BMC logged: over-current, breaker near trip, supply fault."""

    time_ns: int
    domain: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What a device says of itself beside power, at one moment. None: see the sensor's capabilities."""

    time_ns: int
    domain: str
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    clocks_mhz: Mapping[str, float] = field(default_factory=dict)
    power_limit_w: float | None = None
    throttle: tuple[str, ...] | None = None
    throttled_s: Mapping[str, float] | None = None
    utilization_pct: float | None = None
    memory_utilization_pct: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_activity_pct: float | None = None
    activity_pct: Mapping[str, float] = field(default_factory=dict)
    current_a: float | None = None
    peak_current_a: float | None = None
    voltage_v: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Joules with their 90% half-width, the source they come from and the share of time that was seen.

    Joules are NaN (null in JSON) when nothing at all was seen: unknown is not zero.
    """

    joules: float
    error_j: float
    seconds: float
    source: str
    coverage: float = 1.0
    basis: Basis = "measured"

    @property
    def watts(self) -> float | None:
        """Mean power over the time that was seen; None where nothing was."""
        seen_s = self.seconds * self.coverage
        return self.joules / seen_s if seen_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionEnergy:
    """All the passes through one named region of a program, together, from its first start to its last end."""

    name: str
    calls: int
    energy: Energy
    start_ns: int = 0
    end_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run achieved, in the user's unit: steps, samples, tokens, FLOPs."""

    amount: float
    unit: str


def works(named: Mapping[str, float | None], work: float | None, unit: str | None, example: str) -> dict[str, Work]:
    """The kinds of work a user gave: by a name of ours, or as `work` of their own `unit`. `example` shows how."""
    if unit is not None and work is None:
        raise ArgumentError("a unit needs an amount of work", why="a unit alone says no amount", fix=example)
    if unit is not None and named.get(unit) is not None:
        raise ArgumentError(f"the work in {unit!r} is given twice", fix="give it once, or in another unit")
    given = {k: v for k, v in {**named, unit or "unit": work}.items() if v is not None}
    for name, amount in given.items():
        if not 0 < amount < math.inf:
            raise ArgumentError(f"the work must be a positive number: {name}={amount!r}")
    return {name: Work(amount=float(amount), unit=name) for name, amount in given.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyReport:
    """Joules, watts, seconds of one run, split by domain and region, with uncertainty and provenance."""

    name: str
    total: Energy
    by_domain: Mapping[str, Energy]
    domains: Sequence[Domain] = ()
    regions: Sequence[RegionEnergy] = ()
    work: Sequence[Work] = ()
    peak_w: float | None = None
    idle_w: float | None = None
    gaps: Sequence[Gap] = ()
    missing: Sequence[Capability] = ()
    events: Sequence[PowerEvent] = ()
    notes: Sequence[str] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def basis(self) -> Basis:
        """Where the numbers come from, worst of the domains: one modelled domain makes the total modelled."""
        return self.total.basis

    def per_work(self) -> list[tuple[str, float, float]]:
        """(unit, joules per unit, 90% half-width) for each kind of work."""
        return [
            (w.unit, self.total.joules / w.amount, self.total.error_j / w.amount) for w in self.work if w.amount > 0
        ]
