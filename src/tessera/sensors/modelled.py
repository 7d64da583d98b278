"""A modelled sensor for machines that have none: utilisation times a device's power curve, always marked.

Power is idle + (maximum - idle) x utilisation of all CPUs. It is a model and every figure that comes from it says
so (`basis="modelled"`). Its error is that of the two figures, and what a straight line between them misses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ..clock import now_ns
from ..device import ASSUMED_ERROR
from ..errors import SensorLost, SensorUnavailable
from ..hardware import host_cpu
from ..schema import Capability, Device, Domain, Figure, Hold, Telemetry
from .base import Batch

LINE_ERROR = 0.15
"""The relative error of a straight line by utilisation, from one program to the next at the same utilisation.

10-20% in Fan, Weber, Barroso, "Power provisioning for a warehouse-sized computer" (ISCA 2007), with both ends measured.
"""
MODEL_ERROR = math.hypot(LINE_ERROR, 0.80)
"""The relative error of modelled power whose curve is unknown (a log): that of the catalogue's `generic-cpu`."""
_RESET_S = 1.0


def model_error(device: Device) -> float:
    """The relative error of a device's modelled power at any load: that of its worse end, and that of the line."""
    ends = [_relative(figure) for figure in (device.idle_w, device.tdp_w) if figure is not None]
    return math.hypot(LINE_ERROR, max(ends, default=MODEL_ERROR))


def _relative(figure: Figure) -> float:
    """A figure without a stated error is taken as read, or, where it was assumed, as any assumption."""
    if figure.error is None:
        return ASSUMED_ERROR if figure.assumed else 0.0
    return figure.error / figure.value


def proc_stat_busy(path: Path = Path("/proc/stat")) -> tuple[float, float]:
    """Busy and total CPU seconds of the machine since boot."""
    try:
        fields = [float(v) for v in path.read_text().split("\n", 1)[0].split()[1:]]
        idle = fields[3] + (fields[4] if len(fields) > 4 else 0.0)  # idle + iowait
    except (OSError, ValueError, IndexError) as exc:
        raise SensorUnavailable(f"cannot read {path}", why=str(exc), fix="the modelled sensor needs Linux") from exc
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    total = sum(fields[:8])  # guest time is already in user time
    return (total - idle) * tick_s, total * tick_s


class ModelledSensor:
    """The host's CPUs by their utilisation. `device` has the power curve; `busy` returns busy and total seconds."""

    name = "modelled"
    period_s = 0.1

    def __init__(
        self,
        device: Device | None = None,
        *,
        busy: Callable[[], tuple[float, float]] = proc_stat_busy,
        domain: str = "cpu0",
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self._device = device
        self._busy = busy
        self._clock = clock
        self._name = domain
        self._last: tuple[float, float] | None = None

    def start(self) -> None:
        """Look up the host's CPU, if no device was given."""
        if self._device is None:
            self._device = host_cpu()
        if self._device.tdp_w is None or self._device.idle_w is None:
            raise SensorUnavailable(
                f"{self._device.name} has no power curve",
                why="the catalogue knows no idle or maximum power for it",
                fix="give ModelledSensor a Device with tdp_w and idle_w",
            )
        self._last = None

    def domains(self) -> Sequence[Domain]:
        if self._device is None:
            return []
        d = self._device
        assert d.idle_w is not None and d.tdp_w is not None
        error = model_error(d)
        curve = f"utilisation x {d.idle_w.value:g}-{d.tdp_w.value:g} W, {d.tdp_w.source}"
        line = f"between them a straight line, which alone is off by {LINE_ERROR:.0%}: ±{error:.0%} in all"
        return [
            Domain(
                name=self._name,
                source="modelled",
                label=d.name,
                resolution_s=self.period_s,
                hold=Hold.MEAN,
                gain_error=error,
                basis="modelled",
                note=f"{curve}; {line}",
            )
        ]

    def capabilities(self) -> Sequence[Capability]:
        return []

    def read(self) -> Batch:
        """Mean power since the last read."""
        assert self._device is not None and self._device.idle_w is not None and self._device.tdp_w is not None
        batch = Batch()
        try:
            busy_s, total_s = self._busy()
        except SensorUnavailable as exc:
            raise SensorLost(exc.what, why=exc.why, fix=exc.fix) from exc
        t = self._clock()
        last, self._last = self._last, (busy_s, total_s)
        # The kernel may take back a few ticks of idle time, not seconds: then the counters began anew (a container
        # that was moved).
        if last is None or total_s < last[1] - _RESET_S:
            batch.add(self._name, t, math.nan)
            return batch
        if total_s <= last[1]:  # /proc/stat counts in ticks of 10 ms: nothing new yet
            self._last = last
            return batch
        share = min(max((busy_s - last[0]) / (total_s - last[1]), 0.0), 1.0)
        idle_w, full_w = self._device.idle_w.value, self._device.tdp_w.value
        batch.add(self._name, t, idle_w + (full_w - idle_w) * share)
        batch.telemetry.append(Telemetry(time_ns=t, domain=self._name, utilization_pct=100.0 * share))
        return batch

    def stop(self) -> None:
        """Nothing to release."""
