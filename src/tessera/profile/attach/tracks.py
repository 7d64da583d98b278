"""`Track`: one figure over time, of the process or of a whole device.

The summary and the exported counters are both made of tracks.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import BinaryIO, Literal, cast

import msgspec
import numpy as np

from ...errors import RecordingError
from ...joules import DomainSamples, Floats, Ints
from ...output import escape_formula, replace_when_written
from ...schema import Basis, Domain, Hold, Telemetry
from ...trace import PowerTrace

Scope = Literal["process", "device"]
Section = Literal["always", "gpu", "mem", "tc", "collectives"]
SECTIONS: tuple[Section, ...] = ("gpu", "mem", "tc", "collectives")
MIB = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackSummary:
    """One row of the summary. A figure with scope `device` includes all processes that run there."""

    metric: str
    unit: str
    scope: Scope
    mean: float
    min: float
    max: float
    samples: int
    basis: Basis


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Values at epoch times. `mean` is given if it is not the plain mean of the values."""

    name: str
    unit: str
    scope: Scope
    section: Section
    times_ns: Ints
    values: Floats
    basis: Basis = "measured"
    mean: float | None = None

    def metric(self) -> TrackSummary:
        mean = float(self.values.mean()) if self.mean is None else self.mean
        low, high = float(self.values.min()), float(self.values.max())
        # A mean over time includes the time before the first sample, so it may lie beyond all samples.
        low, high = min(low, mean), max(high, mean)
        return TrackSummary(
            metric=self.name, unit=self.unit, scope=self.scope, mean=mean, min=low, max=high,
            samples=len(self.values), basis=self.basis,
        )  # fmt: skip


def track(
    name: str, unit: str, scope: Scope, section: Section, points: Sequence[tuple[int, float]], mean: float | None = None
) -> Track | None:
    """Return a track of (time, value) pairs; None if there are no pairs."""
    if not points:
        return None
    times, values = zip(*points, strict=True)
    return Track(
        name=name, unit=unit, scope=scope, section=section, mean=mean,
        times_ns=np.asarray(times, np.int64), values=np.asarray(values, np.float64),
    )  # fmt: skip


Ask = Callable[[Telemetry], float | None]


def _activity(unit: str) -> Ask:
    return lambda t: t.activity_pct.get(unit)


def _link(name: str) -> Ask:
    # GPM gives the traffic of links in MiB/s.
    return lambda t: None if name not in t.activity_pct else t.activity_pct[name] * MIB


def _clock(name: str) -> Ask:
    return lambda t: None if name not in t.clocks_mhz else t.clocks_mhz[name] * 1e6


_OF_DEVICE: tuple[tuple[str, str, Section, Ask], ...] = (
    ("utilization", "%", "gpu", lambda t: t.utilization_pct),
    ("sm_activity", "%", "gpu", lambda t: t.sm_activity_pct),
    ("sm_occupancy", "%", "gpu", _activity("occupancy")),
    ("sm_clock", "Hz", "gpu", _clock("sm")),
    ("temperature", "°C", "gpu", lambda t: t.temperature_c),
    ("power_limit", "W", "gpu", lambda t: t.power_limit_w),
    ("memory_used", "B", "mem", lambda t: t.memory_used_bytes),
    ("memory_utilization", "%", "mem", lambda t: t.memory_utilization_pct),
    ("dram_activity", "%", "mem", _activity("dram")),
    ("memory_clock", "Hz", "mem", _clock("memory")),
    ("memory_temperature", "°C", "mem", lambda t: t.memory_temperature_c),
    ("tensor_activity", "%", "tc", _activity("tensor")),
    ("fp64_activity", "%", "tc", _activity("fp64")),
    ("fp32_activity", "%", "tc", _activity("fp32")),
    ("fp16_activity", "%", "tc", _activity("fp16")),
    ("nvlink_rx", "B/s", "collectives", _link("nvlink_rx")),
    ("nvlink_tx", "B/s", "collectives", _link("nvlink_tx")),
    ("pcie_rx", "B/s", "collectives", _link("pcie_rx")),
    ("pcie_tx", "B/s", "collectives", _link("pcie_tx")),
)


def device_tracks(
    trace: PowerTrace, telemetry: Mapping[str, Sequence[Telemetry]], sections: Collection[Section]
) -> list[Track]:
    """Return the power of every domain, and the telemetry of its device if its section is asked for."""
    tracks: list[Track | None] = []
    for name, column in trace.columns.items():
        memory = name.endswith(".memory")
        if not memory or "mem" in sections:
            tracks.append(_power(trace, name, column, "mem" if memory else "always"))
    for domain, readings in telemetry.items():
        for what, unit, section, ask in _OF_DEVICE:
            if section in sections:
                points = [(t.time_ns, float(v)) for t in readings if (v := ask(t)) is not None]
                scope = _scope(trace.columns[domain].domain) if domain in trace.columns else "device"
                tracks.append(track(f"{domain}.{what}", unit, scope, section, points))
    return [t for t in tracks if t is not None]


def _power(trace: PowerTrace, name: str, column: DomainSamples, section: Section) -> Track | None:
    """Return the samples of the trace, moved back by the sensor's lag so that they align with the work."""
    domain: Domain = column.domain
    times = column.times_ns - round(domain.lag_s * 1e9)
    inside = ~np.isnan(column.watts) & (times >= trace.start_ns) & (times <= trace.end_ns)
    if domain.hold is Hold.MEAN and len(times):
        # A counter track holds a value until the next one, so the mean of an interval is put at its beginning.
        begins = np.concatenate([times[:1], times[:-1]])
        inside = ~np.isnan(column.watts) & (times > trace.start_ns) & (begins < trace.end_ns)
        times = np.maximum(begins, trace.start_ns)
    if not inside.any():
        return None
    return Track(
        name=f"{name}.power", unit="W", scope=_scope(domain), section=section, times_ns=times[inside],
        values=column.watts[inside], basis=domain.basis, mean=trace.energy(name).power_w,
    )  # fmt: skip


def _scope(domain: Domain) -> Scope:
    """Return whose figures a domain has: the CPU's are the share of the process."""
    return "process" if domain.scope == "process" else "device"


CATEGORY = "tessera"
_OWN_HEAD = b'{"schemaVersion":1,"displayTimeUnit":"ms","baseTimeNanoseconds":%d,"traceEvents":[\n'
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_HEAD_BYTES = 1 << 20  # bytes in which the header of a trace must lie
_COMPRESSION = 3  # of gzip: a trace of 200 MB takes 3 s instead of 10, and is 10% larger


def write_trace(path: Path, kineto: bytes | None, tracks: Sequence[Track]) -> None:
    """Write the process's own trace with our counters added, or the counters alone if there is no trace.

    The bytes of the process's trace are not changed. Its times are microseconds since `baseTimeNanoseconds`, a time of
    the wall clock; our counters use the same.
    """
    if kineto is None:
        base_ns = min((int(t.times_ns[0]) for t in tracks), default=0)
        head, tail, comma = _OWN_HEAD % base_ns, b"]}\n", b""
    else:
        base_ns, head, tail = split(kineto)
        comma = b"" if tail.lstrip().startswith(b"]") else b","
    events = b",\n".join(counters(tracks, -base_ns))
    with replace_when_written(path) as part, _open(part, compressed=path.suffix == ".gz") as f:
        for piece in (head, events, comma if events else b"", tail):
            f.write(piece)


def split(kineto: bytes) -> tuple[int, bytes, bytes]:
    """Return the base time of a Kineto trace, its bytes up to the first event, and the rest of its bytes."""
    head = kineto[:_HEAD_BYTES]
    base, begin = _BASE.search(head), _EVENTS.search(head)
    if begin is None:
        raise RecordingError("the trace has no list of events at its beginning", fix="is it Kineto's JSON?")
    base_ns = int(base.group(1)) if base else 0  # before 2024 the times themselves were the wall clock's
    return base_ns, kineto[: begin.end()], kineto[begin.end() :]


def counters(tracks: Sequence[Track], offset_ns: int) -> Iterable[bytes]:
    """Yield the tracks as counter events. A counter's name has the unit; its process is the track's scope."""
    encode = msgspec.json.Encoder().encode
    pids = {t.scope: f"tessera: {t.scope}" for t in tracks}
    for scope, pid in pids.items():
        label = "the whole device, all processes" if scope == "device" else "the process"
        yield encode({"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": label}})
    for t in tracks:
        name = f"{t.name} ({t.unit})" if t.basis == "measured" else f"{t.name} ({t.unit}, {t.basis})"
        common = {"ph": "C", "cat": CATEGORY, "name": name, "pid": pids[t.scope], "tid": 0}
        for time_ns, value in zip(t.times_ns.tolist(), t.values.tolist(), strict=True):
            yield encode({**common, "ts": (time_ns + offset_ns) / 1e3, "args": {t.unit: value}})


def _open(path: Path, *, compressed: bool) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "wb", _COMPRESSION)) if compressed else path.open("wb")


def write_summary(path: Path, metrics: Sequence[TrackSummary]) -> None:
    """Write a CSV file with a row for each metric: metric, unit, scope, mean, min, max, samples, basis."""
    with replace_when_written(path) as part, part.open("w", newline="") as f:
        out = csv.writer(f)
        out.writerow([column.name for column in fields(TrackSummary)])
        for metric in metrics:
            out.writerow([f"{v:.6g}" if isinstance(v, float) else escape_formula(v) for v in astuple(metric)])
