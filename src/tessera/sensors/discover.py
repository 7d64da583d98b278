"""Finds and starts the sensors of this machine, and keeps the reason for each one that is missing."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ArgumentError, SensorError, SensorPermission, SensorUnavailable, did_you_mean
from ..schema import Capability, Scope
from .base import Sensor
from .processes import ProcessTree
from .slow import WAIT_S, SlowSensor

VARIABLE = "TESSERA_SENSORS"
"""Environment variable that picks sensors: "nvml,rapl", "replay:power.csv", "modelled"."""

SCOPE_VARIABLE = "TESSERA_SCOPE"
"""Environment variable with the scope of CPU energy: "process" or "machine"."""


@dataclass(frozen=True, slots=True)
class DiscoveredSensors:
    """The started sensors, and what is missing, with reason and fix."""

    sensors: Sequence[Sensor]
    missing: Sequence[Capability]

    @property
    def modelled_only(self) -> bool:
        """Return whether all joules that count are modelled."""
        counted = [d for s in self.sensors for d in s.domains() if d.counted]
        return bool(counted) and all(d.basis == "modelled" for d in counted)


def _load(module: str, sensor: str) -> Sensor:
    make_sensor: Callable[[], Sensor] = getattr(importlib.import_module(f".{module}", __package__), sensor)
    return make_sensor()


def _load_redfish() -> Sensor:
    from .redfish import RedfishConfig, RedfishSensor

    config = RedfishConfig.from_env()
    if config is None:
        raise SensorUnavailable(
            "no BMC or PDU address is given",
            why="TESSERA_REDFISH_URL is not set",
            fix="export TESSERA_REDFISH_URL=https://bmc TESSERA_REDFISH_USER=... TESSERA_REDFISH_PASSWORD=...",
        )
    return SlowSensor(RedfishSensor(config))


KINDS: dict[str, Callable[[], Sensor]] = {  # a vendor's module is imported only when its sensor is wanted
    "nvml": functools.partial(_load, "nvml", "NvmlSensor"),
    "amd": functools.partial(_load, "amd", "AmdSensor"),
    "intel": functools.partial(_load, "intel", "IntelSensor"),
    "rapl": functools.partial(_load, "rapl", "RaplSensor"),
    "redfish": _load_redfish,
    "ipmi": lambda: SlowSensor(_load("ipmi", "IpmiSensor")),
    "modelled": functools.partial(_load, "modelled", "ModelledSensor"),
}
# Started only if asked for by name: Redfish needs an address, IPMI needs root and takes seconds.
ON_REQUEST = ("redfish", "ipmi", "modelled")


def discover(
    names: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    scope: Scope | None = None,
    tree: ProcessTree | None = None,
) -> DiscoveredSensors:
    """Start the named sensors, or all that this machine has. If none of them has power that counts, add the model.

    If two sensors claim the same domain name (an NVIDIA and an Intel GPU are both gpu0), only the first is used.
    With `scope` "process" the CPU energy is that of a process `tree` (by default this process and its children), with
    "machine" that of everything that ran. Without it, modelled energy is the process's, and measured packages are the
    machine's.
    """
    env = os.environ if environ is None else environ
    wanted = list(names) if names is not None else [n.strip() for n in env.get(VARIABLE, "").split(",") if n.strip()]
    automatic = not wanted
    scope = scope or _read_scope(env)
    started: list[Sensor] = []
    missing: list[Capability] = []
    try:
        for name in dict.fromkeys(wanted) or [k for k in KINDS if k not in ON_REQUEST]:
            _try(name, started, missing)
        if automatic and env.get("TESSERA_REDFISH_URL"):
            _try("redfish", started, missing)
        if automatic and not any(d.counted for s in started for d in s.domains()):
            _try("modelled", started, missing)  # a BMC has the node's power, of which nobody knows the chips' share
    except BaseException:  # a wrong name, a recording that cannot be read: nobody will stop those already started
        for sensor in started:
            sensor.stop()
        raise
    if not started:
        raise SensorError(
            f"none of the requested sensors works here: {', '.join(wanted) or 'any'}",
            why="; ".join(f"{c.name}: {c.reason}" for c in missing),
            fix="run `tessera doctor` to see what each one needs, or use the modelled sensor",
        )
    return DiscoveredSensors([_narrow(s, scope, tree) for s in started], missing)


def _read_scope(env: Mapping[str, str]) -> Scope | None:
    word = env.get(SCOPE_VARIABLE, "")
    if word not in ("", "process", "machine"):
        raise ArgumentError(f"{SCOPE_VARIABLE}={word} is not a scope", fix="set it to process or machine")
    return word or None  # type: ignore[return-value]


def _narrow(sensor: Sensor, scope: Scope | None, tree: ProcessTree | None) -> Sensor:
    """Return the sensor for a scope: the model for a process tree unless "machine" is asked for; RAPL if asked."""
    wanted = scope or ("process" if sensor.name == "modelled" else "machine")
    if sensor.name not in ("modelled", "rapl") or wanted == "machine":
        return sensor
    from .modelled import ModelledSensor, ProcessShare

    try:
        tree = tree or ProcessTree()
    except SensorUnavailable:  # no /proc/PID here: the machine's is what there is, and its domain says so
        return sensor
    if sensor.name == "rapl":
        return ProcessShare(sensor, tree)
    narrowed = ModelledSensor(tree=tree)
    narrowed.start()
    return narrowed


def make(name: str) -> Sensor:
    """Return a sensor by its name, not started; "replay:FILE" plays a recording."""
    kind, _, rest = name.partition(":")
    if kind == "replay" and rest:
        from .replay import ReplaySensor

        return ReplaySensor.from_csv(rest)
    if name not in KINDS:
        raise ArgumentError(
            f"no sensor {name!r}{did_you_mean(name, [*KINDS, 'replay'])}",
            fix=f"one of: {', '.join(KINDS)}, replay:FILE.csv",
        )
    return KINDS[name]()


def _try(name: str, started: list[Sensor], missing: list[Capability]) -> None:
    sensor: Sensor | None = None
    try:
        sensor = make(name)
        sensor.start()
    except SensorError as exc:
        if sensor is not None:
            sensor.stop()  # it may have started halfway: NVML is loaded even if it then shows no GPU
        state = "no permission" if isinstance(exc, SensorPermission) else None
        reason = ": ".join(p for p in (state, exc.what, exc.why) if p)
        missing.append(Capability(name=name, available=False, reason=reason, fix=exc.fix))
        return
    clash = sorted({d.name for s in started for d in s.domains()} & {d.name for d in sensor.domains()})
    if clash:
        sensor.stop()
        reason = f"another sensor already has its domains: {', '.join(clash)}"
        missing.append(Capability(name=name, available=False, reason=reason, fix=f"set {VARIABLE}={name} to prefer it"))
        return
    if isinstance(sensor, SlowSensor) and sensor.pending:
        reason = f"it has not answered within {WAIT_S:g} s: its power appears once it has"
        missing.append(Capability(name=name, available=False, reason=reason, fix="check the address and the network"))
    started.append(sensor)
