"""Combines power, telemetry and stacks of several ranks: each board once, and the ranks' own processes added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...joules import DomainSamples
from ...recording import Stack
from ...schema import Gap, PowerEvent, Telemetry
from ...trace import PowerTrace
from ..runfile import RunFile
from .clocks import Offset
from .read import RankFile
from .sequences import STRIDE

# Ranks of one host read the same log every 10 s: equal messages within this time are the same event.
SAME_NS = 20_000_000_000


@dataclasses.dataclass(slots=True)
class PowerParts:
    """Power, telemetry, stacks and events of all ranks."""

    power: PowerTrace
    telemetry: list[Telemetry]
    stacks: list[Stack]
    events: list[PowerEvent]


def read_power(files: Sequence[RankFile], offsets: Sequence[Offset], span_ns: tuple[int, int]) -> PowerParts:
    """Return power, telemetry, stacks and events of the ranks' run files, on the common clock.

    Ranks of one host see the same boards: each domain is kept once, from the rank that recorded most of it. Power that
    belongs to a rank's own processes is added up over the ranks. It is also kept for each rank ("cpu0.rank1", not
    counted), so that a rank's operators get the joules of that rank.
    """
    several = len({f.host for f in files}) > 1
    columns: dict[str, DomainSamples] = {}
    processes: dict[str, dict[int, DomainSamples]] = {}
    readings: dict[str, list[Telemetry]] = {}
    gaps: dict[str, list[Gap]] = {}
    stacks: list[Stack] = []
    events: dict[tuple[str, str, str], PowerEvent] = {}
    spans = [span_ns] if all(f.is_run for f in files) else []
    for place, (file, offset) in enumerate(zip(files, offsets, strict=True)):
        if not file.is_run:
            continue
        with RunFile(file.path) as run:
            recording = run.recording()
            power, shift_ns = run.power(), round(offset.offset_ns)
            spans.append((power.start_ns + shift_ns, power.end_ns + shift_ns))
            told: dict[str, list[Telemetry]] = {}
            for reading in recording.telemetry:
                told.setdefault(reading.domain, []).append(reading)
            for name in dict.fromkeys((*power.columns, *told)):
                full = f"{file.host}.{name}" if several else name
                samples = power.columns.get(name)
                if samples is not None and samples.domain.scope == "process":
                    own = _clip(_move_samples(samples, full, offset), *spans[-1])
                    processes.setdefault(full, {})[file.rank] = own
                if _count(samples, told.get(name)) <= _count(columns.get(full), readings.get(full)):
                    continue
                if samples is not None:
                    columns[full] = _move_samples(samples, full, offset)
                    gaps[full] = [
                        dataclasses.replace(g.shift(shift_ns), domain=full) for g in power.gaps if g.domain == name
                    ]
                readings[full] = [
                    dataclasses.replace(t, domain=full, time_ns=t.time_ns + shift_ns) for t in told.get(name, ())
                ]
            _add_events(events, recording.events, f"{file.host}." if several else "", offset)
            for t, thread, stack, count in recording.stacks:
                number = thread + place * STRIDE if isinstance(thread, int) else thread
                stacks.append(Stack(t + shift_ns, number, stack, count))
    start_ns, end_ns = min((s[0] for s in spans), default=span_ns[0]), max((s[1] for s in spans), default=span_ns[1])
    for name, parts in processes.items():
        columns[name] = _add_samples(list(parts.values()), start_ns, end_ns)
        columns |= {f"{name}.rank{rank}": _name_rank(own, rank, start_ns, end_ns) for rank, own in parts.items()}
    trace = PowerTrace(columns, start_ns=start_ns, end_ns=end_ns, gaps=[g for part in gaps.values() for g in part])
    telemetry = sorted((t for part in readings.values() for t in part), key=lambda t: t.time_ns)
    return PowerParts(
        trace,
        telemetry,
        sorted(stacks, key=lambda s: s.epoch_ns),
        sorted(events.values(), key=lambda e: (e.time_ns, e.domain)),
    )


def _add_events(
    known: dict[tuple[str, str, str], PowerEvent], events: Sequence[PowerEvent], host: str, offset: Offset
) -> None:
    """Add a rank's events on the common clock, widened by its error; skip those another rank of the host reported."""
    error_ns = round(offset.error_ns or 0.0)
    for event in events:
        start_ns, end_ns = offset.apply(np.array([event.start_ns, event.time_ns], dtype=np.int64)).tolist()
        since_ns = start_ns - error_ns if event.since_ns is not None or error_ns else None
        moved = dataclasses.replace(event, domain=f"{host}{event.domain}", time_ns=end_ns + error_ns, since_ns=since_ns)
        key = (moved.domain, moved.kind, f"{moved.message}/{event.start_ns // SAME_NS}")
        old = known.get(key)
        # The rank that saw the event with the shortest delay knows its time best.
        if old is None or moved.time_ns - moved.start_ns < old.time_ns - old.start_ns:
            known[key] = moved


def _count(samples: DomainSamples | None, readings: Sequence[Telemetry] | None) -> int:
    return (0 if samples is None else len(samples.times_ns)) + len(readings or ())


def _clip(samples: DomainSamples, start_ns: int, end_ns: int) -> DomainSamples:
    """Cut the samples (means) of a rank off at the ends of its run; they begin before it and end after it."""
    times_ns = samples.times_ns
    if len(times_ns) == 0:
        return samples
    inside = times_ns[(times_ns > start_ns) & (times_ns < end_ns)]
    edges = np.clip(np.array([start_ns, end_ns], dtype=np.int64), times_ns[0], times_ns[-1])
    kept_ns = np.union1d(inside, edges)
    watts = samples.watts[np.searchsorted(times_ns, kept_ns)]
    watts[0] = np.nan  # the power before is unknown
    return dataclasses.replace(samples, times_ns=kept_ns, watts=watts, peaks_w=watts)


def _add_samples(parts: Sequence[DomainSamples], start_ns: int, end_ns: int) -> DomainSamples:
    """Add up the power of ranks on one host over the job, as means; a rank counts 0 before and after its run."""
    times_ns = np.unique(np.concatenate([np.array([start_ns, end_ns], dtype=np.int64), *(p.times_ns for p in parts)]))
    watts = np.zeros(len(times_ns))
    for part in parts:
        place = np.searchsorted(part.times_ns, times_ns)
        inside = (place > 0) & (place < len(part.times_ns))
        watts[inside] += part.watts[place[inside]]
    watts[0] = np.nan  # the power before is unknown
    return dataclasses.replace(parts[0], times_ns=times_ns, watts=watts, peaks_w=watts)


def _name_rank(own: DomainSamples, rank: int, start_ns: int, end_ns: int) -> DomainSamples:
    """Return the power of one rank's processes over the job; it is a part of its host's, so it is not counted."""
    domain = dataclasses.replace(own.domain, name=f"{own.domain.name}.rank{rank}", counted=False, rank=rank)
    return dataclasses.replace(_add_samples([own], start_ns, end_ns), domain=domain)


def _move_samples(samples: DomainSamples, name: str, offset: Offset) -> DomainSamples:
    return dataclasses.replace(
        samples,
        domain=dataclasses.replace(samples.domain, name=name),
        times_ns=offset.apply(samples.times_ns),
        ticks_ns=offset.apply(samples.ticks_ns),
    )
