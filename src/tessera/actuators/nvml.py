"""Sets power limit and clocks of an NVIDIA GPU through NVML (nvidia-ml-py).

Setting needs root: NVML documents "requires root/admin access" for every device command
(docs.nvidia.com/deploy/nvml-api, Device Commands). Limits and locks end with a reboot or when the driver is unloaded.
NVML cannot read locked clocks, so a lock that somebody else set before us cannot be restored; it is removed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from ..errors import ActuatorError, ActuatorPermission, SensorError
from ..sensors._visible import VisibleBoard, visible_boards
from ..sensors.nvml import import_nvml, read_boards, translate_error
from .actuator import PowerLimit
from .nvml_smoothing import NvmlSmoothing

NODE = "/dev/nvidia{}"
_PERMISSION_FIX = (
    "run as root (`sudo -E python ...`), in a container also with --cap-add SYS_ADMIN; or ask an administrator to run "
    "`sudo nvidia-smi -i {uuid} -pl WATTS` (clocks: -lgc LOW,HIGH); without either, a schedule uses pacing instead"
)


class NvmlActuator(NvmlSmoothing):
    """One board, by UUID: numbers may differ between processes, the UUID does not."""

    vendor = "nvidia"

    def __init__(self, uuid: str, *, gpu: str | None = None) -> None:
        self._nvml = _start()
        self._started = True
        self.uuid = uuid
        self._handle: Any = None
        try:
            self._open()
            self.gpu = gpu or f"gpu{self._nvml.nvmlDeviceGetIndex(self._handle)}"
            node = Path(NODE.format(self._nvml.nvmlDeviceGetMinorNumber(self._handle)))
            self.node = node if node.exists() else None  # WSL has none
        except self._nvml.NVMLError as exc:
            self.close()
            raise self._error("find it", exc, gpu or uuid) from exc

    def power_limit(self) -> PowerLimit:
        low_mw, high_mw = self._call("read its power limit", "nvmlDeviceGetPowerManagementLimitConstraints")
        return PowerLimit(
            now_w=self._call("read its power limit", "nvmlDeviceGetPowerManagementLimit") / 1000,
            default_w=self._call("read its power limit", "nvmlDeviceGetPowerManagementDefaultLimit") / 1000,
            min_w=low_mw / 1000,
            max_w=high_mw / 1000,
        )

    def set_power_limit_w(self, limit_w: float) -> None:
        self._call(f"set its power limit to {limit_w:g} W", "nvmlDeviceSetPowerManagementLimit", round(limit_w * 1000))

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        nvml = self._nvml
        try:
            memory_mhz = max(nvml.nvmlDeviceGetSupportedMemoryClocks(self._handle), default=0)
            return tuple(nvml.nvmlDeviceGetSupportedGraphicsClocks(self._handle, memory_mhz))
        except nvml.NVMLError:  # not every board lists them; only the early check needs the list
            return ()

    def locked_clocks_mhz(self) -> tuple[int, int] | None:
        return None  # NVML cannot tell

    def lock_clocks_mhz(self, low_mhz: int, high_mhz: int) -> None:
        self._call(f"lock its clocks to {low_mhz}..{high_mhz} MHz", "nvmlDeviceSetGpuLockedClocks", low_mhz, high_mhz)

    def reset_clocks(self) -> None:
        try:
            self._call("reset its clocks", "nvmlDeviceResetGpuLockedClocks")
        except ActuatorError as exc:
            if not isinstance(exc.__cause__, self._nvml.NVMLError_NotSupported):
                raise

    def close(self) -> None:
        if self._started:  # NVML counts: a second shutdown would end somebody else's session
            self._started = False
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _open(self) -> None:
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self.uuid)

    def _call(self, what: str, function: str, *args: Any) -> Any:
        call = getattr(self._nvml, function)
        try:
            try:
                return call(self._handle, *args)
            except self._nvml.NVMLError_Uninitialized:  # closed, or the driver was restarted: try once more
                self._nvml.nvmlInit()
                self._started = True
                self._open()
                return call(self._handle, *args)
        except self._nvml.NVMLError as exc:
            raise self._error(what, exc, self.gpu) from exc

    def _error(self, what: str, exc: Exception, gpu: str) -> ActuatorError:
        why = f"NVML reports: {exc}"
        if isinstance(exc, self._nvml.NVMLError_NoPermission):
            return ActuatorPermission(
                f"{gpu}: this user may not {what}", why=why, fix=_PERMISSION_FIX.format(uuid=self.uuid)
            )
        if isinstance(exc, self._nvml.NVMLError_NotSupported):
            return ActuatorError(
                f"{gpu} cannot {what}", why=why, fix="use pacing: this board does not offer that control"
            )
        return ActuatorError(f"{gpu}: could not {what}", why=why, fix="check nvidia-smi, and `dmesg` for Xid errors")


def _start() -> Any:
    try:
        nvml = import_nvml()
    except SensorError as exc:
        raise ActuatorError(exc.what, why=exc.why, fix=exc.fix) from exc
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        error = translate_error(nvml, exc)
        raise ActuatorError(error.what, why=error.why, fix=error.fix) from exc
    return nvml


def list_boards() -> list[VisibleBoard]:
    """Return the NVIDIA boards this process may use, in CUDA's order. Raises ActuatorError without NVML."""
    nvml = _start()
    try:
        return visible_boards(read_boards(nvml), os.environ.get("CUDA_VISIBLE_DEVICES"))
    except nvml.NVMLError as exc:
        raise ActuatorError("NVML cannot list its GPUs", why=f"NVML reports: {exc}", fix="check nvidia-smi") from exc
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
