"""What every sensor is: it names its domains, starts, is read again and again, stops.

A sensor never renders, never retries on the user's thread and never raises from `read` for a reading that
failed: it reports a gap with the reason and goes on. It raises `SensorLost` only when nothing of it answers
any more; the sampler then calls `start` again now and then, so that a restarted driver comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..schema import Capability, Domain, Gap, PowerEvent, Telemetry


@dataclass(slots=True)
class Batch:
    """What came since the last read.

    `samples` has, by domain, (time_ns, watts) in increasing time. A sample of NaN watts means "nothing is known
    between the sample before and here": the first sample of a `Hold.MEAN` domain, and the first after a gap.
    `anchors` has (time_ns, joules) of a cumulative energy counter, taken at its ticks and already corrected for
    its lag; the sampler checks the integral against it.
    """

    samples: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    anchors: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    telemetry: list[Telemetry] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    events: list[PowerEvent] = field(default_factory=list)

    def add(self, domain: str, time_ns: int, power_w: float) -> None:
        """Append one power sample."""
        self.samples.setdefault(domain, []).append((time_ns, power_w))


@runtime_checkable
class Sensor(Protocol):
    """One source of power readings. See the module's docstring for what may be raised when."""

    @property
    def name(self) -> str:
        """Short name: "nvml", "rapl", "redfish"."""
        ...

    @property
    def period_s(self) -> float:
        """How often `read` wants to be called so that nothing is lost."""
        ...

    def start(self) -> None:
        """Begin (or begin again after a loss). Raises SensorUnavailable or SensorPermission."""
        ...

    def domains(self) -> Sequence[Domain]:
        """The domains it has; known after `start`."""
        ...

    def capabilities(self) -> Sequence[Capability]:
        """What it gives and what it cannot, with reason and fix; known after `start`."""
        ...

    def read(self) -> Batch:
        """Everything new since the last read. Raises SensorLost when nothing answers any more."""
        ...

    def stop(self) -> None:
        """Release what `start` took. May be called twice."""
        ...


def telemetry_of(
    told: Telemetry, more: Mapping[str, Any], missing: Mapping[str, str], otherwise: str
) -> list[Capability]:
    """What a GPU says of itself, by its first answer; of what it does not, why (`missing` by name, or `otherwise`)."""
    given = {
        "temperature": told.temperature_c,
        "memory_temperature": told.memory_temperature_c,
        "clocks": told.clocks_mhz or None,
        "power_limit": told.power_limit_w,
        "throttle": told.throttle,
        **more,
        "memory": told.memory_used_bytes,
    }
    return [
        Capability(name=f"{told.domain}.{what}", available=True)
        if value is not None
        else Capability(name=f"{told.domain}.{what}", available=False, reason=missing.get(what, otherwise))
        for what, value in given.items()
    ]
