"""Defines the Sensor protocol: a sensor names its domains, starts, is read again and again, and stops.

A sensor never prints and never retries on the user's thread. When one reading fails, `read` does not raise: it
reports a gap with the reason and continues. It raises `SensorLost` only when nothing answers any more; the sampler
then calls `start` again from time to time, so that a restarted driver comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ..schema import Capability, Domain, Gap, PowerEvent, Telemetry
from .processes import OwnCpu


@dataclass(slots=True)
class Batch:
    """What a sensor has read since the last read.

    `samples` has, by domain, (time_ns, watts) in increasing time. A sample of NaN watts means "nothing is known between
    the sample before and this one". The first sample of a `Hold.MEAN` domain is NaN, and the first after a gap.
    `anchors` has (time_ns, joules) of a cumulative energy counter, taken at its ticks and already corrected for its
    lag; the sampler checks its integral against them. If `replaces` is set, these samples replace all earlier ones from
    the first one's time on, because the sensor learnt late about CPU time. `own_cpu` is this process's CPU time at the
    newest sample. `core_w` has, by domain, the watts for each core that this process keeps busy.
    """

    samples: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    anchors: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    telemetry: list[Telemetry] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    events: list[PowerEvent] = field(default_factory=list)
    replaces: bool = False
    own_cpu: OwnCpu | None = None
    core_w: dict[str, float] = field(default_factory=dict)

    def add(self, domain: str, time_ns: int, power_w: float) -> None:
        """Append one power sample."""
        self.samples.setdefault(domain, []).append((time_ns, power_w))


@runtime_checkable
class Sensor(Protocol):
    """One source of power readings. The module's docstring says which method may raise what."""

    @property
    def name(self) -> str:
        """The short name: "nvml", "rapl", "redfish"."""

    @property
    def period_s(self) -> float:
        """Return how often `read` must be called so that nothing is lost."""

    def start(self) -> None:
        """Start, or start again after a loss. Raises SensorUnavailable or SensorPermission."""

    def domains(self) -> Sequence[Domain]:
        """Return the sensor's domains; known after `start`."""

    def capabilities(self) -> Sequence[Capability]:
        """Return what it can measure, and what it cannot, with reason and fix; known after `start`."""

    def read(self) -> Batch:
        """Return everything new since the last read. Raises SensorLost if nothing answers any more."""

    def stop(self) -> None:
        """Release what `start` acquired. Safe to call twice."""


def telemetry_capabilities(
    first: Telemetry, rates: Mapping[str, object], missing: Mapping[str, str], otherwise: str
) -> list[Capability]:
    """Return which telemetry a GPU has, by its first answer. `rates` has the values that need two readings.

    The reason for an absent value is in `missing` under its name; if there is none, it is `otherwise`.
    """
    values = {
        "temperature": first.temperature_c,
        "memory_temperature": first.memory_temperature_c,
        "clocks": first.clocks_mhz or None,
        "power_limit": first.power_limit_w,
        "throttle": first.throttle,
        "memory": first.memory_used_bytes,
    } | dict(rates)
    return [
        Capability(
            name=f"{first.domain}.{name}",
            available=value is not None,
            reason=None if value is not None else missing.get(name, otherwise),
        )
        for name, value in values.items()
    ]
