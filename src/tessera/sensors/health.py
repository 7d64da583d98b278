"""Finds out what this machine can measure and what it lacks: the facts behind `tessera doctor`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import SensorError, SensorPermission
from ..schema import Capability, Domain
from .base import Sensor
from .discover import KINDS, make
from .response_store import SensorResponse, find


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorHealth:
    """One kind of sensor: "ok", "missing" or "no permission", with its domains, or the reason and the fix.

    `responses` has, by domain, what earlier runs learnt of the sensor's lag and blur and of the idle board.
    """

    name: str
    state: str
    domains: Sequence[Domain] = ()
    responses: Mapping[str, SensorResponse] = field(default_factory=dict)
    lacks: Sequence[Capability] = ()
    reason: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """One property of the machine: True, False or None (unknown), with the reason and the fix."""

    name: str
    ok: bool | None
    detail: str
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Everything that `tessera doctor` shows."""

    sensors: Sequence[SensorHealth]
    checks: Sequence[MachineCheck] = field(default_factory=tuple)

    @property
    def measures(self) -> bool:
        """Return whether anything here measures power (the model does not)."""
        return any(s.state == "ok" and s.name != "modelled" for s in self.sensors)


def examine(names: Sequence[str] | None = None) -> Health:
    """Try every kind of sensor, one after the other, and check what else is needed for measuring."""
    return Health(
        sensors=[examine_sensor(name) for name in names or KINDS],
        checks=[performance_counters(), power_control(), clock_synchronised()],
    )


def examine_sensor(name: str) -> SensorHealth:
    """Start one sensor, note what it has, and stop it."""
    sensor: Sensor | None = None
    try:
        sensor = make(name)
        sensor.start()
        lacks = [c for c in sensor.capabilities() if not c.available]
        domains = list(sensor.domains())
        learnt = {domain.name: found for domain in domains if (found := find(domain)) is not None}
        return SensorHealth(name=name, state="ok", domains=domains, lacks=lacks, responses=learnt)
    except SensorPermission as exc:
        return SensorHealth(name=name, state="no permission", reason=_reason(exc), fix=exc.fix)
    except SensorError as exc:
        return SensorHealth(name=name, state="missing", reason=_reason(exc), fix=exc.fix)
    finally:
        if sensor is not None:
            sensor.stop()


def _reason(exc: SensorError) -> str:
    return f"{exc.what} ({exc.why})" if exc.why else exc.what


def performance_counters(
    params: Path = Path("/proc/driver/nvidia/params"), status: Path = Path("/proc/self/status")
) -> MachineCheck:
    """Check whether ncu and CUPTI may read the GPU's performance counters here."""
    name = "GPU performance counters (ncu)"
    try:
        lines = dict(line.split(":", 1) for line in params.read_text().splitlines() if ":" in line)
    except OSError:
        return MachineCheck(name=name, ok=None, detail="no NVIDIA driver to ask (/proc/driver/nvidia/params)")
    if lines.get("RmProfilingAdminOnly", "1").strip() == "0":
        return MachineCheck(name=name, ok=True, detail="permitted to every user (RmProfilingAdminOnly: 0)")
    if _has_sys_admin(status):
        return MachineCheck(name=name, ok=True, detail="permitted: this process has CAP_SYS_ADMIN")
    return MachineCheck(
        name=name,
        ok=False,
        detail="the driver keeps them for administrators (RmProfilingAdminOnly: 1)",
        fix="echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-prof.conf, "
        "then reload the driver; https://developer.nvidia.com/ERR_NVGPUCTRPERM",
    )


def power_control(driver: Path = Path("/proc/driver/nvidia"), status: Path = Path("/proc/self/status")) -> MachineCheck:
    """Check whether a schedule with TESSERA_CONTROL=1 could set power limits and clocks here."""
    name = "GPU power limits and clocks"
    if not driver.exists():
        return MachineCheck(name=name, ok=None, detail=f"no NVIDIA driver to ask ({driver})")
    if _has_sys_admin(status):
        detail = "this process may set them; schedules do so only with TESSERA_CONTROL=1"
        return MachineCheck(name=name, ok=True, detail=detail)
    return MachineCheck(
        name=name,
        ok=False,
        detail="the driver keeps them for root: schedules hold their caps by pacing",
        fix="run as root, in a container with --cap-add SYS_ADMIN, and TESSERA_CONTROL=1",
    )


_CAP_SYS_ADMIN = 21  # linux/capability.h


def _has_sys_admin(status: Path) -> bool:
    try:
        line = next(text for text in status.read_text().splitlines() if text.startswith("CapEff:"))
    except (OSError, StopIteration):
        return os.geteuid() == 0
    return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)


class _Timex(ctypes.Structure):
    """The first fields of struct timex (linux/timex.h); `rest` is space for the fields after them."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


_STA_UNSYNC = 0x40  # linux/timex.h
_MAX_ERROR_US = 100_000


def clock_synchronised() -> MachineCheck:
    """Check whether NTP or PTP keeps the kernel's clock right, which merging runs of several hosts needs."""
    name = "host clock synchronised"
    timex = _Timex()  # modes 0: only read
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError) as exc:
        return MachineCheck(name=name, ok=None, detail=f"adjtimex cannot be called: {exc}")
    if state < 0:
        return MachineCheck(name=name, ok=None, detail=f"adjtimex: {os.strerror(ctypes.get_errno())}")
    if timex.status & _STA_UNSYNC:
        return MachineCheck(
            name=name,
            ok=False,
            detail="the kernel says the clock is not synchronised; times within this machine are not affected",
            fix="install chrony or enable systemd-timesyncd; it matters only when runs of several hosts are merged",
        )
    return MachineCheck(
        name=name, ok=timex.maxerror < _MAX_ERROR_US, detail=f"largest error {timex.maxerror / 1000:.1f} ms"
    )
