"""The metrics and spans of a run with OpenTelemetry's names, as plain values. `otlp` sends them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...joules import DomainSamples, accumulate
from ...record import CODE
from ...schema import Energy, Hold, Telemetry
from ...timeline.columns import NONE
from ...trace import PowerTrace

if TYPE_CHECKING:
    from ...attribute.table import EnergyTable
    from ...recording import Recording, Rows

Point = tuple[int, float]
_TOP_KERNELS = 200
_COMPONENTS = {
    "memory": "mem|hbm|dram", "gpu": r"gpu\d+$", "cpu": r"cpu\d*$|core|uncore", "power_supply": "psu|pdu|outlet|supply",
    "host": r"(?:node|system|host)\d*$|psys",
}  # fmt: skip
_NO_NAME = re.compile(r"[^A-Za-z0-9_.\-/]+")


@dataclass(frozen=True, slots=True)
class MetricPoints:
    """One metric of one component: (epoch ns, value) points. `sums` makes it a counter that began at `start_ns`."""

    name: str
    unit: str
    description: str
    attributes: Mapping[str, Any]
    points: Sequence[Point]
    start_ns: int = 0
    sums: bool = False
    monotonic: bool = False

    def split_points(self, count: int) -> tuple[MetricPoints, MetricPoints]:
        first, rest = self.points[:count], self.points[count:]
        return dataclasses.replace(self, points=first), dataclasses.replace(self, points=rest)


def series(recording: Recording, period_s: float) -> Iterator[MetricPoints]:
    """Yield every metric of a run that has points."""
    for column in recording.power.columns.values() if recording.power is not None else ():
        yield from _power(column, period_s)
    yield from _telemetry(recording)
    yield from _counters(recording.rows)
    table = recording.find_energy()
    if table is not None:
        yield from _kernels(recording, table)


def component(domain: str) -> str:
    """Return what a domain is, in OpenTelemetry's words for `hw.type`, or "host" for a whole machine."""
    for part in reversed(domain.lower().split(".")):  # "node7.gpu0.memory": the last part that says anything
        for kind, pattern in _COMPONENTS.items():
            if re.match(pattern, part):
                return kind
    return "enclosure"


def hardware(domain: str, label: str = "") -> dict[str, Any]:
    """Return the attributes that name the component of a domain. A host has metrics of its own and needs no type."""
    kind, parent = component(domain), domain.rpartition(".")[0]
    attributes = {"hw.type": "enclosure" if kind == "host" else kind, "hw.name": label, "hw.parent": parent}
    return {"hw.id": domain, **{k: v for k, v in attributes.items() if v}}


def _power(column: DomainSamples, period_s: float) -> Iterator[MetricPoints]:
    domain, times, watts, lag_ns = column.domain, column.times_ns, column.watts, column.lag_ns
    name = domain.name
    if len(times) < 2:
        return
    sums = accumulate(times, watts, mean=domain.hold is Hold.MEAN)
    if period_s > 0:
        step = max(round(period_s * 1e9), 1)
        grid = np.append(np.arange(times[0], times[-1], step), times[-1])
    else:
        grid = times
    joules = np.interp(grid - times[0], times - times[0], sums.joules)
    seen_s = np.interp(grid - times[0], times - times[0], sums.covered_s)
    at = (grid - lag_ns).tolist()
    # A whole machine's energy has another name than that of its parts, so that nobody adds them up.
    prefix = "hw.host." if component(name) == "host" else "hw."
    attributes = {
        **hardware(name, domain.label), "tessera.source": domain.source, "tessera.basis": domain.basis,
        "tessera.counted": domain.counted,
    }  # fmt: skip
    energy = list(zip(at, joules.tolist(), strict=True))
    text = "Energy consumed by the component."
    yield MetricPoints(f"{prefix}energy", "J", text, attributes, energy, start_ns=at[0], sums=True, monotonic=True)
    seconds = np.diff(seen_s)
    covered = seconds > 0  # there is no point for a time that no sensor saw
    mean_w = np.diff(joules)[covered] / seconds[covered]
    power = list(zip((grid[1:][covered] - lag_ns).tolist(), mean_w.tolist(), strict=True))
    text = "Power consumed by the component, mean since the point before."
    yield MetricPoints(f"{prefix}power", "W", text, attributes, power)


def _telemetry(recording: Recording) -> Iterator[MetricPoints]:
    rows: dict[str, list[Telemetry]] = {}
    for row in recording.telemetry:
        rows.setdefault(row.domain, []).append(row)
    domains = {d.name: d for d in recording.power.domains} if recording.power is not None else {}
    for domain, readings in rows.items():
        label = domains[domain].label if domain in domains else ""
        yield from _of_domain(hardware(domain, label), readings)


def _of_domain(who: Mapping[str, Any], rows: Sequence[Telemetry]) -> Iterator[MetricPoints]:
    sensor = {"hw.id": f"{who['hw.id']}.temperature", "hw.type": "temperature", "hw.parent": who["hw.id"]}
    location = {"hw.sensor_location": "memory"}
    plain: list[tuple[str, str, str, Mapping[str, Any], list[tuple[int, float | None]]]] = [
        ("hw.temperature", "Cel", "Temperature.", sensor, [(r.time_ns, r.temperature_c) for r in rows]),
        ("hw.temperature", "Cel", "Temperature.", {**sensor, "hw.id": f"{who['hw.id']}.memory.temperature", **location},
         [(r.time_ns, r.memory_temperature_c) for r in rows]),
        ("hw.voltage", "V", "Voltage.", {**who, "hw.type": "voltage"}, [(r.time_ns, r.voltage_v) for r in rows]),
        ("tessera.power.limit", "W", "Power limit in force.", who, [(r.time_ns, r.power_limit_w) for r in rows]),
    ]  # fmt: skip
    if who["hw.type"] == "gpu":
        task = {**who, "hw.gpu.task": "general"}
        plain += [
            ("hw.gpu.utilization", "1", "Fraction of time spent in a specific task.", task,
             [(r.time_ns, _part(r.utilization_pct)) for r in rows]),
            ("hw.gpu.memory.utilization", "1", "Fraction of GPU memory used.", who,
             [(r.time_ns, _memory_share(r)) for r in rows]),
        ]  # fmt: skip
        for name, text, field in (
            ("hw.gpu.memory.usage", "GPU memory used.", "memory_used_bytes"),
            ("hw.gpu.memory.limit", "Size of the GPU memory.", "memory_total_bytes"),
        ):
            points = _drop_missing([(r.time_ns, getattr(r, field)) for r in rows])
            if points:  # the conventions make them UpDownCounters: sums that may fall
                yield MetricPoints(name, "By", text, who, points, start_ns=points[0][0], sums=True)
    for clock in dict.fromkeys(c for r in rows for c in r.clocks_mhz):
        hz = [(r.time_ns, r.clocks_mhz[clock] * 1e6) for r in rows if clock in r.clocks_mhz]
        name = "hw.cpu.speed" if who["hw.type"] == "cpu" else "tessera.gpu.clock"
        plain.append((name, "Hz", "Clock frequency.", {**who, "tessera.clock": clock}, [*hz]))
    for name, unit, text, attributes, points_or_none in plain:
        if points := _drop_missing(points_or_none):
            yield MetricPoints(name, unit, text, attributes, points)


def _part(percent: float | None) -> float | None:
    return None if percent is None else percent / 100.0


def _memory_share(row: Telemetry) -> float | None:
    if row.memory_used_bytes is None or not row.memory_total_bytes:
        return None
    return row.memory_used_bytes / row.memory_total_bytes


def _drop_missing(points: Sequence[tuple[int, float | None]]) -> list[Point]:
    return [(t, v) for t, v in points if v is not None and math.isfinite(v)]


def _counters(rows: Rows) -> Iterator[MetricPoints]:
    """Yield the user's own counters, by their names."""
    names = rows.names
    points_by_name: dict[tuple[int, int], list[Point]] = {}
    for chunk in rows.chunks(("kind", "name", "unit", "start_ns", "value")):
        these = np.flatnonzero((chunk["kind"] == CODE["counter"]) & np.isfinite(chunk["value"]))
        columns = (chunk[c][these].tolist() for c in ("name", "unit", "start_ns", "value"))
        for name, unit, start_ns, value in zip(*columns, strict=True):
            points_by_name.setdefault((name, unit), []).append((start_ns, value))
    for (name, unit), points in points_by_name.items():
        text = names[name]
        plain = _NO_NAME.sub("_", text).strip("_") or "counter"
        about = {"tessera.counter": text}
        shown = "" if unit == NONE else names[unit]
        yield MetricPoints(f"tessera.counter.{plain}"[:255], shown, text, about, sorted(points))


def _kernels(recording: Recording, table: EnergyTable) -> Iterator[MetricPoints]:
    start_ns, end_ns = recording.span_ns
    about = {"tessera.basis": table.basis}
    for row in table.top(_TOP_KERNELS):
        if math.isfinite(row.energy_j):
            who = {"tessera.kind": row.kind, "tessera.name": row.name, **about}
            text, one = "Joules of one of the most expensive kernels.", [(end_ns, row.energy_j)]
            yield MetricPoints(
                "tessera.kernel.energy", "J", text, who, one, start_ns=start_ns, sums=True, monotonic=True
            )


@dataclass(frozen=True, slots=True)
class Span:
    """One span; `parent` is the index of the span around it."""

    name: str
    start_ns: int
    end_ns: int
    parent: int | None
    attributes: Mapping[str, Any]


def spans(recording: Recording, limit: int) -> tuple[list[Span], int]:
    """Return the run and its regions as spans, outer before inner; and how many short regions `limit` left out."""
    parts = [_regions(chunk) for chunk in recording.rows.chunks(("kind", "name", "start_ns", "end_ns", "thread"))]
    rows = np.concatenate(parts) if parts else np.zeros((0, 4), np.int64)
    left_out = max(len(rows) - limit, 0)
    if left_out:
        keep = np.argsort(rows[:, 1] - rows[:, 2], kind="stable")[:limit]
        rows = rows[keep]
    rows = rows[np.lexsort((-rows[:, 2], rows[:, 1]))]
    power, names, table = recording.power, recording.rows.names, recording.find_energy()
    attributed = {r.name: r for r in (*table.regions, *table.steps)} if table is not None else {}
    start_ns, end_ns = map(int, recording.span_ns)
    if len(rows):
        start_ns, end_ns = min(start_ns, int(rows[0, 1])), max(end_ns, int(rows[:, 2].max()))
    about: dict[str, Any] = _joules(power, start_ns, end_ns)
    if table is not None:
        about |= _finite({"tessera.energy_j": table.energy_j, "tessera.energy_error_j": table.error_j})
        about |= _finite({"tessera.idle_j": table.idle_j}) | {"tessera.basis": table.basis}
    result = [Span(recording.facts.title, start_ns, end_ns, None, about)]
    open_spans: dict[int, list[tuple[int, int]]] = {}
    for name, start, end, thread in rows.tolist():
        stack = open_spans.setdefault(thread, [])
        while stack and stack[-1][0] < end:
            stack.pop()
        attributes = _joules(power, start, end)
        if thread != NONE:
            attributes["thread.id"] = thread
        if (row := attributed.get(names[name])) is not None:
            attributes |= _finite({"tessera.attributed_j_per_call": row.j_per_call}) | {"tessera.calls": row.calls}
        result.append(Span(names[name], start, end, stack[-1][1] if stack else 0, attributes))
        stack.append((end, len(result) - 1))
    return result, left_out


def _regions(chunk: Any) -> Any:
    these = np.flatnonzero((chunk["kind"] == CODE["region"]) & (chunk["end_ns"] >= chunk["start_ns"]))
    return np.stack([chunk[c][these] for c in ("name", "start_ns", "end_ns", "thread")], axis=1)


def _joules(power: PowerTrace | None, start_ns: int, end_ns: int) -> dict[str, Any]:
    """Return what the counted domains drew between two times; empty if nothing was measured."""
    if power is None or not power.is_counted:
        return {}
    energy: Energy = power.energy(None, start_ns, end_ns)
    figures = {
        "tessera.energy_j": energy.energy_j, "tessera.energy_error_j": energy.error_j,
        "tessera.power_w": energy.power_w, "tessera.coverage": energy.coverage,
    }  # fmt: skip
    finite = _finite(figures)
    return finite | {"tessera.basis": energy.basis} if "tessera.energy_j" in finite else {}


def _finite(figures: Mapping[str, float | None]) -> dict[str, Any]:
    return {k: v for k, v in figures.items() if v is not None and math.isfinite(v)}
