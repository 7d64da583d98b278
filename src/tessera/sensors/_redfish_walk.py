"""Finds the power readings of a Redfish service, and parses them.

New services (since 2020) describe power in EnvironmentMetrics, PowerSubsystem and Sensors, old ones in the single
resource Power. Rack PDUs are listed apart, under PowerEquipment. Names are those of the DMTF schemas (DSP8010).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from ._redfish_http import Json, RequestFailed

ROOT = "/redfish/v1"
# A service that lists more members than this is broken or hostile; a full rack has fewer.
MAX_MEMBERS = 512
MAX_PAGES = 64
# Chassis types (Chassis.ChassisType) that are a whole machine, and not a module or zone inside one.
WHOLE_TYPES = ("RackMount", "StandAlone", "Blade", "Sled", "Enclosure")
# No rack draws this many watts: a larger reading has a wrong unit.
MAX_POWER_W = 1e7

_SKIPPED_LOGS = re.compile(r"dump|post ?code|journal|audit|crash|telemetry", re.I)
_TOTAL_POWER = re.compile(r"total[ _-]?(?:system[ _-]?)?power|power[ _-]?total|system[ _-]?power", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedfishReading:
    """One reading of a resource. If `power_w` is None, `problem` has the reason."""

    power_w: float | None = None
    problem: str = "the service gives no power value"
    stamp: str | None = None
    current_a: float | None = None
    peak_current_a: float | None = None
    voltage_v: float | None = None
    rating_a: float | None = None
    power_limit_w: float | None = None
    breaker: str | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RedfishPoint:
    """Where one domain's power is read: a resource, and how to parse it. A circuit may have a current and no power."""

    domain: str
    path: str
    parse: Callable[[Json], RedfishReading]
    label: str
    note: str = ""
    circuit: bool = False
    has_power: bool = True


@dataclass(slots=True, kw_only=True)
class Survey:
    """The result of a walk: points to read, logs to follow, and what could not be read."""

    points: list[RedfishPoint] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def number(value: object) -> float | None:
    """Return a finite JSON number, or None for null, text, truth values and anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number_ = float(value)
    except OverflowError:
        return None
    return number_ if math.isfinite(number_) else None


def mapping(value: object) -> Json:
    """Return a JSON object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def items(value: object) -> list[Json]:
    """Return a JSON list as objects; empty for anything else. Elements that are not objects become empty ones."""
    return [mapping(v) for v in value] if isinstance(value, list) else []


def link(resource: Json, *keys: str) -> object:
    """Return the @odata.id under nested keys, or None."""
    for key in keys:
        resource = mapping(resource.get(key))
    return resource.get("@odata.id")


def text(value: object) -> str | None:
    """Return a short string, or None for anything else."""
    return value[:200] if isinstance(value, str) else None


def slug(value: object, fallback: str) -> str:
    """Return an Id with only those characters that a domain name may have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text(value) or "").strip("_") or fallback


def _excerpt(resource: Json, key: str) -> float | None:
    """Return the number in a sensor excerpt ({"Reading": 1.0}) or a bare number."""
    value = resource.get(key)
    return number(value.get("Reading")) if isinstance(value, dict) else number(value)


def _read_power(power: object, name: str) -> RedfishReading:
    """Return the reading for a raw power value, or the reason why the value is not a power."""
    power_w = number(power)
    if power_w is None:
        return RedfishReading(problem=f"{name} is {'null' if power is None else 'not a number'}")
    if not 0 <= power_w <= MAX_POWER_W:
        return RedfishReading(problem=f"{name} is {power_w:g} W, which is impossible")
    return RedfishReading(power_w=power_w, problem="")


def parse_power_watts(resource: Json) -> RedfishReading:
    """Read the PowerWatts excerpt of EnvironmentMetrics or of PDU metrics."""
    excerpt = mapping(resource.get("PowerWatts"))
    return replace(_read_power(excerpt.get("Reading"), "PowerWatts"), stamp=text(excerpt.get("ReadingTime")))


def parse_sensor(resource: Json) -> RedfishReading:
    """Read a Sensor resource whose ReadingType is Power."""
    return replace(_read_power(resource.get("Reading"), "Reading"), stamp=text(resource.get("ReadingTime")))


def parse_control(resource: Json) -> RedfishReading:
    """Read PowerControl[0] of the old Power resource, which is the whole chassis."""
    control = (items(resource.get("PowerControl")) or [{}])[0]
    if "PowerConsumedWatts" in control:
        reading = _read_power(control["PowerConsumedWatts"], "PowerConsumedWatts")
    else:
        average = mapping(control.get("PowerMetrics")).get("AverageConsumedWatts")
        reading = _read_power(average, "AverageConsumedWatts")
    return replace(reading, power_limit_w=number(mapping(control.get("PowerLimit")).get("LimitInWatts")))


def parse_supply_metrics(resource: Json) -> RedfishReading:
    """Read PowerSupplyMetrics: the input power, or the output power if the supply meters only that."""
    key = "InputPowerWatts" if "InputPowerWatts" in resource else "OutputPowerWatts"
    return replace(
        _read_power(_excerpt(resource, key), key),
        current_a=_excerpt(resource, "InputCurrentAmps"),
        peak_current_a=number(mapping(resource.get("InputCurrentAmps")).get("PeakReading")),
        voltage_v=_excerpt(resource, "InputVoltage"),
    )


def parse_old_supply(resource: Json, index: int) -> RedfishReading:
    """Read PowerSupplies[index] of the old Power resource."""
    supplies = items(resource.get("PowerSupplies"))
    supply = supplies[index] if index < len(supplies) else {}
    keys = ("PowerInputWatts", "PowerOutputWatts", "LastPowerOutputWatts")
    key = next((k for k in keys if number(supply.get(k)) is not None), keys[0])
    bad = mapping(supply.get("Status")).get("Health") == "Critical"
    fault = f"{text(supply.get('Name')) or f'power supply {index}'} is in critical health" if bad else None
    reading = _read_power(supply.get(key), key)
    return replace(reading, voltage_v=number(supply.get("LineInputVoltage")), fault=fault)


def parse_circuit(resource: Json) -> RedfishReading:
    """Read a Circuit or Outlet. Of several phases, the one with the highest current is taken."""
    phases = mapping(resource.get("PolyPhaseCurrentAmps"))
    currents = [mapping(p) for p in (resource.get("CurrentAmps"), *phases.values())]
    readings = [a for c in currents if (a := number(c.get("Reading"))) is not None]
    peaks = [a for c in currents if (a := number(c.get("PeakReading"))) is not None]
    return replace(
        _read_power(_excerpt(resource, "PowerWatts"), "PowerWatts"),
        current_a=max(readings, default=None),
        peak_current_a=max(peaks, default=None),
        voltage_v=_excerpt(resource, "Voltage"),
        rating_a=number(resource.get("RatedCurrentAmps")),
        breaker=text(resource.get("BreakerState")),
    )


def collection(get: Callable[[object], Json], uri: object) -> list[Json]:
    """Return the Members of a collection, from all its pages: links, or the entries of a log."""
    members: list[Json] = []
    for _ in range(MAX_PAGES):
        page = get(uri)
        members += items(page.get("Members"))
        uri = page.get("Members@odata.nextLink")
        if uri is None:
            break
    return members


class Walker:
    """Walks a service once, into a Survey. It notes optional parts that fail, and raises if the service is dead."""

    def __init__(self, get: Callable[[object], Json]) -> None:
        self._get = get
        self._survey = Survey()

    def walk(self) -> Survey:
        """Survey chassis, rack PDUs and logs."""
        root = self._get(ROOT)
        chassis = list(self.members(link(root, "Chassis")))
        self._chassis(chassis)
        self._pdus(self._optional(link(root, "PowerEquipment")))
        hosts = [m for key in ("Systems", "Managers") for m in self.members(link(root, key))]
        for resource in (*hosts, *chassis):
            self._logs(resource)
        return self._survey

    def members(self, uri: object) -> Iterator[Json]:
        """Yield the resources of a collection, page by page; nothing if there is no collection."""
        for entry in self.entries(uri)[:MAX_MEMBERS]:
            resource = self._optional(entry.get("@odata.id"))
            if resource:
                yield resource

    def entries(self, uri: object) -> list[Json]:
        """Return the Members of a collection that may be missing."""
        try:
            return [] if uri is None else collection(self._get, uri)
        except RequestFailed as error:
            self._note(error)
            return []

    def _optional(self, uri: object) -> Json:
        """Get a resource that may be missing. If it is, return an empty one and note the problem."""
        try:
            return {} if uri is None else self._get(uri)
        except RequestFailed as error:
            self._note(error)
            return {}

    def _note(self, error: RequestFailed) -> None:
        if error.kind not in ("status", "malformed"):
            raise error
        self._survey.problems.append(error.reason)

    def _chassis(self, chassis: list[Json]) -> None:
        metered: list[tuple[Json, list[RedfishPoint]]] = []
        for resource in chassis:
            old = self._optional(link(resource, "Power"))
            points = [*self._whole(resource, old), *(self._supplies(resource) or self._old_supplies(resource, old))]
            if points:
                metered.append((resource, points))
        whole = [r for r, _ in metered if r.get("ChassisType") in WHOLE_TYPES]
        node = whole[0] if len(whole) == 1 else metered[0][0] if len(metered) == 1 else None
        for i, (resource, points) in enumerate(metered):
            prefix = "node" if resource is node else f"chassis.{slug(resource.get('Id'), str(i))}"
            self._survey.points += [replace(p, domain=prefix + p.domain) for p in points]

    def _whole(self, chassis: Json, old: Json) -> list[RedfishPoint]:
        label = text(chassis.get("Name")) or "chassis"
        uri = link(chassis, "EnvironmentMetrics")
        if isinstance(self._optional(uri).get("PowerWatts"), dict):
            return [RedfishPoint(domain="", path=str(uri), parse=parse_power_watts, label=label)]
        for entry in self.entries(link(chassis, "Sensors")):
            uri = entry.get("@odata.id")
            # Each sensor is one request, and a BMC has hundreds: look only at those whose name has "power" in it.
            if isinstance(uri, str) and re.search(r"power|pwr", uri.rpartition("/")[2], re.I):
                sensor = self._optional(uri)
                named = f"{sensor.get('Id')} {sensor.get('Name')}"
                if sensor.get("ReadingType") == "Power" and _TOTAL_POWER.search(named):
                    return [RedfishPoint(domain="", path=uri, parse=parse_sensor, label=label)]
        control = items(old.get("PowerControl"))
        if not control:
            return []
        averaged = "PowerConsumedWatts" not in control[0]
        note = "a mean over minutes, not the power now" if averaged else ""
        return [RedfishPoint(domain="", path=str(link(chassis, "Power")), parse=parse_control, label=label, note=note)]

    def _supplies(self, chassis: Json) -> list[RedfishPoint]:
        subsystem = self._optional(link(chassis, "PowerSubsystem"))
        points = []
        for i, supply in enumerate(self.members(link(subsystem, "PowerSupplies"))):
            uri = link(supply, "Metrics")
            metrics = self._optional(uri)
            if metrics.keys() & {"InputPowerWatts", "OutputPowerWatts"}:
                label = text(supply.get("Name")) or f"power supply {i}"
                note = "" if "InputPowerWatts" in metrics else "output power: without the supply's own loss"
                points.append(
                    RedfishPoint(domain=f".psu{i}", path=str(uri), parse=parse_supply_metrics, label=label, note=note)
                )
        return points

    def _old_supplies(self, chassis: Json, old: Json) -> list[RedfishPoint]:
        return [
            RedfishPoint(
                domain=f".psu{i}",
                path=str(link(chassis, "Power")),
                parse=functools.partial(parse_old_supply, index=i),
                label=text(supply.get("Name")) or f"power supply {i}",
                note="" if "PowerInputWatts" in supply else "output power: without the supply's own loss",
            )
            for i, supply in enumerate(items(old.get("PowerSupplies")))
            if supply.keys() & {"PowerInputWatts", "PowerOutputWatts", "LastPowerOutputWatts"}
        ]

    def _pdus(self, equipment: Json) -> None:
        for i, pdu in enumerate(self.members(link(equipment, "RackPDUs"))):
            prefix = f"rack.pdu.{slug(pdu.get('Id'), str(i))}"
            label = text(pdu.get("Name")) or "rack PDU"
            uri = link(pdu, "Metrics")
            if isinstance(self._optional(uri).get("PowerWatts"), dict):
                self._survey.points.append(
                    RedfishPoint(domain=prefix, path=str(uri), parse=parse_power_watts, label=label)
                )
            for key, name in (("Mains", "mains"), ("Branches", "branch"), ("Outlets", "outlet")):
                self._circuits(link(pdu, key), f"{prefix}.{name}", label)

    def _circuits(self, uri: object, prefix: str, label: str) -> None:
        for i, circuit in enumerate(self.members(uri)):
            self._survey.points.append(
                RedfishPoint(
                    domain=f"{prefix}.{slug(circuit.get('Id'), str(i))}",
                    path=str(circuit.get("@odata.id")),
                    parse=parse_circuit,
                    label=f"{label}: {text(circuit.get('Name')) or 'circuit'}",
                    circuit=True,
                    has_power="PowerWatts" in circuit,
                )
            )

    def _logs(self, resource: Json) -> None:
        for service in self.members(link(resource, "LogServices")):
            uri = link(service, "Entries")
            if isinstance(uri, str) and not _SKIPPED_LOGS.search(str(service.get("Id"))):
                self._survey.logs.append(uri)
