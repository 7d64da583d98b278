"""Sets power cap and clocks of an AMD GPU through AMD SMI. Tested against a fake at the ABI, not yet on hardware.

Caps are in microwatts on bare metal (amdsmi.h, amdsmi_power_cap_info_t). amdsmi_set_gpu_clk_limit sets the lowest and
the highest graphics clock, which puts the board in the performance level MANUAL. The level AUTO undoes both, as
`amd-smi reset --clocks` does. Setting needs root.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import ActuatorError, ActuatorPermission, SensorError
from ..sensors._amd_gpu import NO_PERMISSION, AmdGpu, Smi, as_nonzero, as_watts, error_text
from ..sensors.amd import import_amdsmi, order_by_hip, select_gpus
from .actuator import PowerLimit

_NOT_SUPPORTED = 2  # AMDSMI_STATUS_NOT_SUPPORTED, amdsmi.h


class AmdActuator:
    """One GPU, by the UUID that AMD SMI has for it."""

    vendor = "amd"

    def __init__(self, uuid: str, *, gpu: str | None = None) -> None:
        self._smi, machine = _machine()
        match = next((g for g in machine if uuid in g.uuids), None)
        if match is None:
            raise ActuatorError(f"no AMD GPU {uuid!r}", why=f"AMD SMI lists {len(machine)}", fix="see `amd-smi list`")
        self._handle = match._handle
        self.gpu, self.uuid = gpu or match.name, uuid
        render = Path(f"/sys/bus/pci/devices/{match.bdf}/drm").glob("renderD*")
        self.node = next((Path("/dev/dri", path.name) for path in render), None)

    def power_limit(self) -> PowerLimit:
        info = self._call("read its power cap", "amdsmi_get_power_cap_info")
        now_w = as_watts(info.get("power_cap"))
        if now_w is None:
            raise ActuatorError(
                f"{self.gpu} does not report its power cap", why="AMD SMI reports N/A", fix="use pacing"
            )
        max_w = as_watts(info.get("max_power_cap")) or now_w
        return PowerLimit(
            now_w=now_w,
            default_w=as_watts(info.get("default_power_cap")) or max_w,
            min_w=as_watts(info.get("min_power_cap")) or 0.0,
            max_w=max_w,
        )

    def set_power_limit_w(self, limit_w: float) -> None:
        self._call(f"set its power cap to {limit_w:g} W", "amdsmi_set_power_cap", 0, round(limit_w * 1e6))

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        try:
            info = self._smi.call("amdsmi_get_clk_freq", self._handle, self._smi.module.AmdSmiClkType.SYS)
        except self._smi.error:
            return ()
        levels = [round(hz / 1e6) for hz in info.get("frequency", ()) if as_nonzero(hz)]
        # AMD SMI lists levels (on an MI300X the lowest and the highest), but a limit may be any MHz between them.
        return tuple(range(max(levels), min(levels) - 1, -1)) if levels else ()

    def locked_clocks_mhz(self) -> tuple[int, int] | None:
        """Return the locked range; None at the performance level AUTO, at which the driver chooses."""
        try:
            if str(self._smi.call("amdsmi_get_gpu_perf_level", self._handle)).endswith("AUTO"):
                return None
            info = self._smi.call("amdsmi_get_clock_info", self._handle, self._smi.module.AmdSmiClkType.SYS)
        except self._smi.error:
            return None
        low, high = as_nonzero(info.get("min_clk")), as_nonzero(info.get("max_clk"))
        return (int(low), int(high)) if low and high else None

    def lock_clocks_mhz(self, low_mhz: int, high_mhz: int) -> None:
        what = f"lock its clocks to {low_mhz}..{high_mhz} MHz"
        self._call(what, "amdsmi_set_gpu_clk_limit", "sclk", "max", high_mhz)
        self._call(what, "amdsmi_set_gpu_clk_limit", "sclk", "min", low_mhz)

    def reset_clocks(self) -> None:
        try:
            self._call("reset its clocks", "amdsmi_set_gpu_perf_level", self._smi.module.AmdSmiDevPerfLevel.AUTO)
        except ActuatorError as exc:
            if getattr(exc.__cause__, "err_code", None) != _NOT_SUPPORTED:
                raise

    def close(self) -> None:
        """Do nothing: AMD SMI's shutdown would end it for the whole process (see sensors/amd.py)."""

    def _call(self, what: str, function: str, *args: Any) -> Any:
        try:
            return self._smi.call(function, self._handle, *args)
        except self._smi.error as exc:
            raise self._error(what, exc) from exc

    def _error(self, what: str, exc: Exception) -> ActuatorError:
        code, why = getattr(exc, "err_code", None), f"AMD SMI reports: {error_text(exc)}"
        if code == NO_PERMISSION:
            return ActuatorPermission(
                f"{self.gpu}: this user may not {what}",
                why=why,
                fix="run as root, or ask an administrator to run `sudo amd-smi set --power-cap WATTS`; "
                "without either, a schedule uses pacing instead",
            )
        if code == _NOT_SUPPORTED:
            return ActuatorError(
                f"{self.gpu} cannot {what}", why=why, fix="use pacing: this board does not offer that control"
            )
        return ActuatorError(f"{self.gpu}: could not {what}", why=why, fix="see `sudo dmesg | grep amdgpu`")


def _machine() -> tuple[Smi, list[AmdGpu]]:
    try:
        smi = Smi(import_amdsmi())
    except SensorError as exc:
        raise ActuatorError(exc.what, why=exc.why, fix=exc.fix) from exc
    try:
        smi.call("amdsmi_init")
        return smi, order_by_hip([AmdGpu(smi, handle) for handle in smi.call("amdsmi_get_processor_handles")])
    except smi.error as exc:
        raise ActuatorError("AMD SMI does not start", why=error_text(exc), fix="check `lsmod | grep amdgpu`") from exc


def list_boards() -> dict[str, str]:
    """Return the UUIDs of the AMD GPUs this process may use, by name, in HIP's order. Raises ActuatorError."""
    _, machine = _machine()
    uuids = {}
    for gpu in select_gpus(machine, os.environ):
        if not gpu.uuids:
            raise ActuatorError(f"{gpu.name} has no UUID", why="AMD SMI gives none", fix="see `amd-smi list`")
        uuids[gpu.name] = min(gpu.uuids)  # any of them, but always the same
    return uuids
