"""Power, telemetry and stacks of several ranks on one clock: each board once, each rank's own processes added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...joules import DomainSamples
from ...recording import Stack
from ...schema import Gap, Telemetry
from ...trace import PowerTrace
from ..runfile import RunFile
from .clocks import Offset
from .read import RankFile
from .sequences import STRIDE


@dataclasses.dataclass(slots=True)
class PowerParts:
    """Power, telemetry and stacks of all ranks."""

    power: PowerTrace
    telemetry: list[Telemetry]
    stacks: list[Stack]


def read_power(files: Sequence[RankFile], offsets: Sequence[Offset], span_ns: tuple[int, int]) -> PowerParts:
    """Power, telemetry and stacks of the ranks' run files, on the common clock.

    Ranks of one host see the same boards: each domain is kept once, from the rank that recorded most of it. What is the
    power of each rank's own processes is added up.
    """
    several = len({f.host for f in files}) > 1
    columns: dict[str, DomainSamples] = {}
    readings: dict[str, list[Telemetry]] = {}
    gaps: dict[str, list[Gap]] = {}
    stacks: list[Stack] = []
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
                if samples is not None and samples.domain.scope == "process" and full in columns:
                    columns[full] = _add_samples(columns[full], _move_samples(samples, full, offset))
                    continue
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
            for t, thread, stack, count in recording.stacks:
                number = thread + place * STRIDE if isinstance(thread, int) else thread
                stacks.append(Stack(t + shift_ns, number, stack, count))
    start_ns, end_ns = min((s[0] for s in spans), default=span_ns[0]), max((s[1] for s in spans), default=span_ns[1])
    trace = PowerTrace(columns, start_ns=start_ns, end_ns=end_ns, gaps=[g for part in gaps.values() for g in part])
    telemetry = sorted((t for part in readings.values() for t in part), key=lambda t: t.time_ns)
    return PowerParts(trace, telemetry, sorted(stacks, key=lambda s: s.epoch_ns))


def _count(samples: DomainSamples | None, readings: Sequence[Telemetry] | None) -> int:
    return (0 if samples is None else len(samples.times_ns)) + len(readings or ())


def _add_samples(one: DomainSamples, other: DomainSamples) -> DomainSamples:
    """The power of two ranks on one host together: means, each until the next sample of either; 0 before and after."""
    times_ns = np.union1d(one.times_ns, other.times_ns)
    watts = np.zeros(len(times_ns))
    for part in (one, other):
        place = np.searchsorted(part.times_ns, times_ns)
        inside = (place > 0) & (place < len(part.times_ns))
        watts[inside] += part.watts[place[inside]]
    watts[0] = np.nan  # nothing is known before
    return dataclasses.replace(one, times_ns=times_ns, watts=watts, peaks_w=watts)


def _move_samples(samples: DomainSamples, name: str, offset: Offset) -> DomainSamples:
    return dataclasses.replace(
        samples,
        domain=dataclasses.replace(samples.domain, name=name),
        times_ns=offset.apply(samples.times_ns),
        ticks_ns=offset.apply(samples.ticks_ns),
    )
