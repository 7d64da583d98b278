"""Models the power of machines without a sensor: utilisation times a device's power curve, always marked as modelled.

The machine's power is idle + (maximum - idle) x utilisation of all CPUs. A process gets the same share of both parts as
it has of the machine's CPU time: (maximum - idle) x share for what it runs, and idle x share. So its joules do not
depend on other processes, and the processes of a busy machine add up to the machine. Every figure from this model says
that it is modelled (`basis="modelled"`). Its error comes from the two figures, idle and maximum, and from the straight
line between them.

CPU time of a process may be seen late: when a child was found or has ended. It is never dropped. What does not fit into
the time since the last read (all CPUs busy) was used earlier, and is added to the samples of that time.

`ProcessShare` divides a measured package among processes by their CPU time.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ..clock import NS_PER_S, now_ns
from ..device import ASSUMED_ERROR, Device, Figure
from ..errors import SensorLost, SensorUnavailable
from ..hardware import host_cpu
from ..schema import Capability, Domain, Hold, Telemetry
from .base import Batch, Sensor
from .processes import ProcessTree

LINE_ERROR = 0.15
"""The relative error of power as a straight line of utilisation, between programs with the same utilisation.

It is 10-20% in Fan, Weber, Barroso, "Power provisioning for a warehouse-sized computer" (ISCA 2007), with idle and
maximum measured.
"""
MODEL_ERROR = math.hypot(LINE_ERROR, 0.80)
"""The relative error of modelled power if the curve is unknown (a log): that of the catalogue's `generic-cpu`."""
_RESET_S = 1.0
KEPT_SPANS = 600
"""How many samples of a process can still be raised: those of a minute."""
IDLE_PART, MACHINE_PART = ".idle_share", ".machine"
"""The endings of the names of domains that stand beside a process's own domain."""


def model_error(device: Device) -> float:
    """Return the relative error of a device's modelled power at any load: its worse figure's and the line's."""
    ends = [_relative(figure) for figure in (device.idle_w, device.tdp_w) if figure is not None]
    return math.hypot(LINE_ERROR, max(ends, default=MODEL_ERROR))


def _relative(figure: Figure) -> float:
    """Return a figure's relative error; if none is stated, that of an assumption if the figure is assumed, else 0."""
    if figure.error is None:
        return ASSUMED_ERROR if figure.assumed else 0.0
    return figure.error / figure.value


def proc_stat_busy(path: Path = Path("/proc/stat")) -> tuple[float, float]:
    """Return the busy and the total CPU seconds of the machine since boot."""
    try:
        fields = [float(v) for v in path.read_text().split("\n", 1)[0].split()[1:]]
        idle = fields[3] + (fields[4] if len(fields) > 4 else 0.0)  # idle + iowait
    except (OSError, ValueError, IndexError) as exc:
        raise SensorUnavailable(f"cannot read {path}", why=str(exc), fix="the modelled sensor needs Linux") from exc
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    total = sum(fields[:8])  # guest time is already in user time
    return (total - idle) * tick_s, total * tick_s


def read_machine_s() -> float | None:
    """Return the CPU seconds of everything on the machine since boot; None if they are not counted."""
    try:
        return proc_stat_busy()[0]
    except SensorUnavailable:
        return None


@dataclasses.dataclass(slots=True)
class _CpuSpan:
    """The time up to a sample: the CPU seconds that the process can have used in it, and those that it used.

    `samples` has, by domain, the sample of a sensor of the whole machine.
    """

    end_ns: int
    room_s: float
    used_s: float = 0.0
    samples: dict[str, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)


def _charge_spans(spans: Sequence[_CpuSpan], used_s: float) -> tuple[list[_CpuSpan], float]:
    """Charge CPU time to the last span, and what does not fit into it to the spans before.

    Returns the spans that changed, and the seconds that fit into none: they are to be charged with the next read.
    """
    left_s, changed = max(used_s, 0.0), []
    for span in reversed(spans):
        taken_s = min(left_s, span.room_s - span.used_s)
        span.used_s += taken_s
        left_s -= taken_s
        changed.append(span)
        if left_s <= 0:
            break
    return changed[::-1], left_s


class ModelledSensor:
    """Models the host's CPUs by their utilisation, or the share of a process `tree` in them.

    `device` has the power curve. `busy` returns busy and total seconds of the machine; a tree's CPU time is divided by
    the clock times the number of CPUs.
    """

    name = "modelled"
    period_s = 0.1  # /proc/stat counts in ticks of 10 ms; every 50 ms took more of a core than selftest allows

    def __init__(
        self,
        device: Device | None = None,
        *,
        tree: ProcessTree | None = None,
        busy: Callable[[], tuple[float, float]] = proc_stat_busy,
        domain: str = "cpu0",
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self._device = device
        self._tree = tree
        self._busy = busy
        self._clock = clock
        self._name = domain
        self._last: tuple[float, float] | None = None
        self._spans: deque[_CpuSpan] = deque(maxlen=KEPT_SPANS)

    def start(self) -> None:
        """Look up the host's CPU if no device was given."""
        if self._device is None:
            self._device = host_cpu()
        if self._device.tdp_w is None or self._device.idle_w is None:
            raise SensorUnavailable(
                f"{self._device.name} has no power curve",
                why="the catalogue knows no idle or maximum power for it",
                fix="give ModelledSensor a Device with tdp_w and idle_w",
            )
        self._last = None
        self._spans.clear()

    def domains(self) -> Sequence[Domain]:
        if self._device is None:
            return []
        d = self._device
        assert d.idle_w is not None and d.tdp_w is not None
        error = model_error(d)
        of = "utilisation" if self._tree is None else "CPU time of the process and its children"
        curve = f"{of} x {d.idle_w.value:g}-{d.tdp_w.value:g} W, {d.tdp_w.source}"
        line = f"between them a straight line, which alone is off by {LINE_ERROR:.0%}: ±{error:.0%} in all"
        domain = Domain(
            name=self._name,
            source="modelled",
            label=d.name,
            resolution_s=self.period_s,
            hold=Hold.MEAN,
            gain_error=error,
            basis="modelled",
            note=f"{curve}; {line}",
            scope="machine" if self._tree is None else "process",
            core_w=None if self._tree is None else d.tdp_w.value / (os.cpu_count() or 1),
        )
        if self._tree is None:
            return [domain]
        note = f"of {self._name}: its share of the {d.idle_w.value:g} W that the machine draws when idle"
        idle = dataclasses.replace(domain, name=self._name + IDLE_PART, counted=False, label="", note=note, core_w=None)
        return [domain, idle]

    def capabilities(self) -> Sequence[Capability]:
        return []

    def read(self) -> Batch:
        """Return the mean power since the last read; of a process, also the earlier samples that it raises."""
        assert self._device is not None and self._device.idle_w is not None and self._device.tdp_w is not None
        batch = Batch(replaces=self._tree is not None)
        t = self._clock()  # before the CPU time: what a sample covers is in it
        try:
            if self._tree is None:
                busy_s, total_s = self._busy()
            else:
                busy_s, total_s = self._tree.poll(), (os.cpu_count() or 1) * t / NS_PER_S
        except SensorUnavailable as exc:
            raise SensorLost(exc.what, why=exc.why, fix=exc.fix) from exc
        last, self._last = self._last, (busy_s, total_s)
        idle_w, full_w = self._device.idle_w.value, self._device.tdp_w.value
        if self._tree is not None:
            batch.own_cpu, cores = self._tree.own_cpu, os.cpu_count() or 1
            batch.core_w = {self._name: full_w / cores, self._name + IDLE_PART: idle_w / cores}
        # The kernel may take back a few ticks of idle time, but not seconds. If it does, the counters began anew (a
        # container was moved).
        if last is None or total_s < last[1] - _RESET_S:
            for domain in self.domains():
                batch.add(domain.name, t, math.nan)
            return batch
        if total_s <= last[1]:  # /proc/stat counts in ticks of 10 ms: nothing new yet
            self._last = last
            return batch
        used_s, room_s = busy_s - last[0], total_s - last[1]
        share = min(max(used_s / room_s, 0.0), 1.0)
        if self._tree is None:
            batch.add(self._name, t, idle_w + (full_w - idle_w) * share)
        else:
            self._spans.append(_CpuSpan(t, room_s))
            changed, left_s = _charge_spans(self._spans, used_s)
            self._last = (busy_s - left_s, total_s)
            for span in changed:
                batch.add(self._name, span.end_ns, full_w * span.used_s / span.room_s)
                batch.add(self._name + IDLE_PART, span.end_ns, idle_w * span.used_s / span.room_s)
        batch.telemetry.append(Telemetry(time_ns=t, domain=self._name, utilization_pct=100.0 * share))
        return batch

    def stop(self) -> None:
        """Do nothing: there is nothing to release."""


class ProcessShare:
    """Wraps a sensor of CPU packages, and divides its counted domains by CPU time: the share of a process tree.

    Each domain keeps its name; the whole package stands beside it as "cpu0.machine". The sum is measured, but its
    division is modelled: the same watts for every second of CPU time.
    """

    def __init__(
        self, sensor: Sensor, tree: ProcessTree, *, busy: Callable[[], tuple[float, float]] = proc_stat_busy
    ) -> None:
        self._sensor = sensor
        self._tree = tree
        self._busy = busy
        self._last: tuple[float, float] | None = None
        self._spans: deque[_CpuSpan] = deque(maxlen=KEPT_SPANS)
        self.name = sensor.name

    @property
    def period_s(self) -> float:
        return self._sensor.period_s

    def start(self) -> None:
        self._sensor.start()
        self._last = None
        self._spans.clear()

    def domains(self) -> Sequence[Domain]:
        parts = []
        for d in self._sensor.domains():
            if d.counted:
                parts.append(
                    dataclasses.replace(
                        d,
                        source=f"{d.source}, shared by CPU time",
                        basis="modelled",
                        gain_error=math.hypot(d.gain_error, LINE_ERROR),
                        resolution_s=max(d.resolution_s, self.period_s),
                        scope="process",
                        note="; ".join(filter(None, (d.note, "divided by CPU time: the share of the process tree"))),
                    )
                )
            parts.append(dataclasses.replace(d, name=d.name + MACHINE_PART, counted=False) if d.counted else d)
        return parts

    def capabilities(self) -> Sequence[Capability]:
        return self._sensor.capabilities()

    def read(self) -> Batch:
        """Return the mean power of each package and the tree's share of it, and earlier samples that it raises."""
        counted = {d.name for d in self._sensor.domains() if d.counted}
        batch = self._sensor.read()
        batch.replaces = True
        used_s, busy_s = self._tree.poll(), self._busy()[0]
        last = self._last or (used_s, busy_s)
        if not self._spans or self._spans[-1].room_s > 0:  # else /proc/stat had no new tick: the span goes on
            self._spans.append(_CpuSpan(0, 0.0))
        span = self._spans[-1]
        span.room_s = max(busy_s - last[1], 0.0)
        for name in counted & batch.samples.keys():
            batch.samples[name + MACHINE_PART] = batch.samples.pop(name)
            span.samples.setdefault(name, []).extend(batch.samples[name + MACHINE_PART])
        changed, left_s = [span], used_s - last[0]
        if span.room_s > 0:
            changed, left_s = _charge_spans(self._spans, left_s)
        self._last = (used_s - left_s, busy_s)
        for span in changed:
            share = span.used_s / span.room_s if span.room_s > 0 else 0.0
            for name, samples in span.samples.items():
                batch.samples.setdefault(name, []).extend((t, w * share) for t, w in samples)
        return batch

    def stop(self) -> None:
        self._sensor.stop()
