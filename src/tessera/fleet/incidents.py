"""What ran on every node when a supply, PDU or breaker reported an event: the checklist, for a fleet.

::

    runs of the nodes ──► merge (one clock, with its errors) ──► timeline, power, events of the samplers ─┐
    logs of PDUs and BMCs ──────────────────────────────────────────────────────────────────────────────┤
                                            for each event: its window on each node, what ran in it  ◄────┘
                                            for all of them: more of a kernel than by chance?  the checklist

An event's window is as wide as its own time is unsure, and wider on each node by what its clock may be off.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..analyze.alignment import Alignment, SpikeOverlap, SpikeWork, judge_alignment
from ..analyze.correlate import (
    OVERCURRENT,
    ChecklistAnswer,
    Correlation,
    YesNo,
    add_aftermath,
    check_links,
    check_throttling,
    correlate,
    make_answer,
    select_rows,
    sort_telemetry,
)
from ..analyze.correlate import WITHIN_S as THROTTLE_S
from ..analyze.kernel_names import short_name
from ..analyze.result import encode_json
from ..analyze.spikes import Curve, Spike, make_curve
from ..errors import MeasurementError
from ..notes import Note
from ..power_event import PowerEvent
from ..profile.open_recording import open_recording
from ..profile.ranks.merge import merge
from ..profile.ranks.read import find_files
from ..record import CODE, KINDS
from ..recording import Recording
from ..timeline.columns import Ints, Timeline
from ..timeline.intervals import covered_ns, union

# Seconds from an event within which something that ran may be its cause. A breaker's magnetic part trips within 10 ms
# (IEC 60898-1); a supply's over-current protection waits some milliseconds; the reporting devices are read every tens
# of milliseconds.
WITHIN_S = 0.05
# Names listed for a node in one incident.
TOP = 4
# Number of names whose alignment is tried: those that ran longest.
NAMES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """What one node did in an incident's window: the share of it that devices were busy, and with what.

    `clock_error_s` is how far the node's clock may be off from the others (a 90% half-width); None: nothing ties it to
    them. If nothing ran on a device, these are operators of the host.
    """

    host: str
    ranks: tuple[int, ...]
    busy_share: float
    collective_share: float
    copy_share: float
    work: tuple[SpikeOverlap, ...]
    clock_error_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """An event and what ran then. Power is of all counted devices together; None if it is not known."""

    event: PowerEvent
    start_ns: int
    end_ns: int
    nodes: tuple[NodeWork, ...]
    power_w: float | None
    peak_w: float | None
    outside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetIncidents:
    """The incidents of a run, what they have in common, and the checklist, answered for all nodes together.

    In `aligned`, `in_spikes` is the share of the events during which something ran, `outside` the share of all times at
    which it runs. Whether spikes are aligned is answered for the events if there are any, and otherwise for the spikes
    of all devices' power together.
    """

    incidents: tuple[Incident, ...]
    aligned: tuple[Alignment, ...]
    checklist: tuple[ChecklistAnswer, ...]
    correlation: Correlation | None
    mean_w: float | None
    crest_factor: float | None
    hosts: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def answer(self, key: str) -> ChecklistAnswer:
        """Return one answer of the checklist: "aligned", "throttle", "feeds" or "links"."""
        return {a.key: a for a in self.checklist}[key]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data = dataclasses.asdict(dataclasses.replace(self, correlation=None))
        for row, alignment in zip(data["aligned"], self.aligned, strict=True):
            row["lift"] = alignment.lift
        data["spikes"] = len(self.correlation.spikes) if self.correlation else None
        data.pop("correlation")
        data["notes"] = [str(n) for n in self.notes]
        return data

    def to_json(self) -> str:
        """Return the incidents as JSON."""
        return encode_json(self.to_dict())


def find_incidents(
    runs: Recording | str | Path | Sequence[str | Path],
    events: Iterable[PowerEvent] = (),
    *,
    within_s: float = WITHIN_S,
) -> FleetIncidents:
    """Tie over-current, near-trip and supply events to what ran on each node.

    `runs` is a recording, a run file, or those of several ranks and nodes, which are put on one clock. `events` come
    from logs; those that the runs' own samplers saw are added.
    """
    recording = _open_runs(runs)
    known = sorted({*recording.events, *events}, key=lambda e: (e.time_ns, e.domain, e.kind))
    alarms = [e for e in known if any(word in e.kind for word in OVERCURRENT)]
    timeline = recording.timeline
    rows, notes = select_rows(timeline, None)
    errors = read_clock_errors(recording)
    within_ns = round(within_s * 1e9)
    curve = _find_curve(recording, rows, notes)
    by_host = _split_hosts(recording, timeline, rows)
    incidents = [_describe_incident(event, by_host, timeline, errors, curve, within_ns) for event in alarms]
    inside = [i for i in incidents if not i.outside]
    if len(inside) < len(incidents):
        notes.append(f"{len(incidents) - len(inside)} events lie outside the time that was recorded")
    unknown = [host for host, error in errors.items() if error is None]
    if unknown and len(errors) > 1:
        notes.append(f"the clocks of {', '.join(unknown)} could not be compared: what ran there is by their own time")
    correlation = _correlate(recording, known, notes)
    aligned = _align_events(timeline, rows, inside) if inside else []
    return FleetIncidents(
        incidents=tuple(incidents),
        aligned=tuple(aligned),
        checklist=_fill_checklist(correlation, aligned, inside, _check_after(recording, rows, curve, inside)),
        correlation=correlation,
        mean_w=None if curve is None else curve.mean_w,
        crest_factor=None if curve is None else curve.crest_factor,
        hosts=tuple(errors),
        notes=tuple({str(note): note for note in notes}.values()),
    )


def _open_runs(runs: Recording | str | Path | Sequence[str | Path]) -> Recording:
    if isinstance(runs, Recording):
        return runs
    paths = [Path(runs)] if isinstance(runs, (str, Path)) else [Path(p) for p in runs]
    if len(paths) == 1 and paths[0].is_dir():
        inside, _ = find_files(paths)
        paths = inside if len(inside) == 1 else paths  # a folder with one run is that run
    return merge(paths) if len(paths) > 1 or paths[0].is_dir() else open_recording(paths[0])


def read_clock_errors(recording: Recording) -> dict[str, float | None]:
    """Return how far each node's clock may be off, in seconds; 0 for the node with which others are compared."""
    ranks: Sequence[Mapping[str, Any]] = recording.timeline.meta.get("ranks") or []
    if not ranks:
        return {recording.facts.host: 0.0}
    errors: dict[str, float | None] = {}
    for number, rank in enumerate(ranks):
        error_ns = 0.0 if number == 0 else rank.get("error_ns")
        error_s = None if error_ns is None else float(error_ns) * 1e-9
        errors.setdefault(str(rank.get("host") or ""), error_s)
    return errors


def _split_hosts(recording: Recording, timeline: Timeline, rows: Ints) -> dict[str, tuple[tuple[int, ...], Ints]]:
    """Return the ranks and rows of each node."""
    ranks: Sequence[Mapping[str, Any]] = timeline.meta.get("ranks") or []
    if not ranks:
        return {recording.facts.host: ((), rows)}
    of_rank = {int(r["rank"]): str(r.get("host") or "") for r in ranks}
    by_host: dict[str, list[int]] = {}
    for rank, host in of_rank.items():
        by_host.setdefault(host, []).append(rank)
    numbers = timeline["rank"][rows]
    return {host: (tuple(own), rows[np.isin(numbers, own)]) for host, own in by_host.items()}


def _find_curve(recording: Recording, rows: Ints, notes: list[str]) -> Curve | None:
    if recording.power is None:
        notes.append("no power was recorded: what ran is known, not what it drew")
        return None
    timeline = recording.timeline
    try:
        return make_curve(
            recording.power, None, int(timeline["start_ns"][rows].min()), int(timeline["end_ns"][rows].max())
        )
    except MeasurementError as error:
        notes.append(f"no power: {error.what}")
        return None


def _describe_incident(
    event: PowerEvent,
    by_host: Mapping[str, tuple[tuple[int, ...], Ints]],
    timeline: Timeline,
    errors: Mapping[str, float | None],
    curve: Curve | None,
    within_ns: int,
) -> Incident:
    start_ns, end_ns = event.start_ns - within_ns, event.time_ns + within_ns
    nodes = []
    for host, (ranks, rows) in by_host.items():
        error_s = errors.get(host)
        margin_ns = round((error_s or 0.0) * 1e9)
        begin, end = start_ns - margin_ns, end_ns + margin_ns
        nodes.append(_describe_node(timeline, rows, host, ranks, begin, end, error_s))
    power_w, peak_w = (None, None) if curve is None else _power_between(curve, start_ns, end_ns)
    is_recorded = bool(timeline.start_ns < end_ns and timeline.end_ns > start_ns)
    return Incident(
        event=event,
        start_ns=start_ns,
        end_ns=end_ns,
        nodes=tuple(nodes),
        power_w=power_w,
        peak_w=peak_w,
        outside=not is_recorded and all(node.busy_share == 0 for node in nodes),
    )


def _describe_node(
    timeline: Timeline, rows: Ints, host: str, ranks: tuple[int, ...], begin: int, end: int, error_s: float | None
) -> NodeWork:
    starts, ends = timeline["start_ns"][rows], timeline["end_ns"][rows]
    ran = rows[(starts < end) & (ends > begin)]
    length_ns = max(end - begin, 1)

    def share(chosen: Ints) -> float:
        spans = union(timeline["start_ns"][chosen], timeline["end_ns"][chosen])
        return int(covered_ns(spans, np.array([begin]), np.array([end]))[0]) / length_ns

    kinds, names = timeline["kind"][ran], timeline["name"][ran]
    by_name = []
    for name in np.unique(names):
        chosen = ran[names == name]
        kind = KINDS[int(timeline["kind"][chosen[0]])]
        part = share(chosen)
        text = timeline.names[int(name)]
        by_name.append(SpikeOverlap(name=text, kind=kind, overlap_s=part * length_ns * 1e-9, share=part, lift=None))
    by_name.sort(key=lambda o: (-o.share, o.name))
    return NodeWork(
        host=host,
        ranks=ranks,
        busy_share=share(ran),
        collective_share=share(ran[kinds == CODE["collective"]]),
        copy_share=share(ran[kinds == CODE["memcpy"]]),
        work=tuple(by_name[:TOP]),
        clock_error_s=error_s,
    )


def _power_between(curve: Curve, start_ns: int, end_ns: int) -> tuple[float | None, float | None]:
    """Return mean and highest power of a stretch, as far as it is known."""
    cut = np.clip(curve.edges_ns, start_ns, end_ns)
    seconds = np.diff(cut) * 1e-9 * curve.is_known
    if not np.sum(seconds) > 0:
        return None, None
    inside = seconds > 0
    middle = 0.5 * (curve.begin_w + curve.end_w)
    mean_w = float(np.nansum(middle * seconds) / np.sum(seconds))
    return mean_w, float(np.nanmax(np.maximum(curve.begin_w, curve.end_w)[inside]))


def _align_events(timeline: Timeline, rows: Ints, incidents: Sequence[Incident]) -> list[Alignment]:
    """Return whether the events coincide with a kind of work more often than they would at random times.

    Each event is placed anew at any time of the run, with a window as wide as its own: events are rare, so one tells
    nothing about the next. Spikes of a periodic load are instead shifted all together (`analyze.spikes.Chance`).
    """
    kinds, names = timeline["kind"][rows], timeline["name"][rows]
    groups = [
        ("collectives", "collective", kinds == CODE["collective"]),
        ("copies", "memcpy", kinds == CODE["memcpy"]),
        ("any work", "activity", np.ones(len(rows), dtype=bool)),
    ]
    lengths = np.bincount(names, weights=timeline["end_ns"][rows] - timeline["start_ns"][rows], minlength=1)
    top = [int(n) for n in np.argsort(-lengths, kind="stable")[:NAMES] if lengths[n] > 0]
    groups += [(timeline.names[n], KINDS[int(kinds[np.argmax(names == n)])], names == n) for n in top]
    span = (int(timeline["start_ns"][rows].min()), int(timeline["end_ns"][rows].max()))
    found = []
    for name, kind, chosen in groups:
        if not np.any(chosen):
            continue
        ran = union(timeline["start_ns"][rows[chosen]], timeline["end_ns"][rows[chosen]])
        hits, expected = 0, 0.0
        for incident in incidents:
            begin, end = np.array([incident.start_ns]), np.array([incident.end_ns])
            hits += int(covered_ns(ran, begin, end)[0] > 0)
            half_ns = (incident.end_ns - incident.start_ns) // 2
            near = union(ran.start_ns - half_ns, ran.end_ns + half_ns)
            inside_ns = int(covered_ns(near, np.array([span[0]]), np.array([span[1]]))[0])
            expected += inside_ns / max(span[1] - span[0], 1)
        count = len(incidents)
        # Among several names, one fits by luck (Bonferroni).
        p = min(_binomial_tail(count, hits, expected / count) * (len(top) if kind in ("kernel", "op") else 1), 1.0)
        found.append(judge_alignment(name, kind, hits / count, expected / count, p, count))
    return found


def _check_after(
    recording: Recording, rows: Ints, curve: Curve | None, incidents: Sequence[Incident]
) -> list[ChecklistAnswer]:
    """Return whether clocks throttle after the events and links are busy during them; nothing without data."""
    if curve is None or not incidents:
        return []
    readings = sort_telemetry(recording.telemetry)
    events = [add_aftermath(_as_spike(i, n), readings, THROTTLE_S) for n, i in enumerate(incidents, start=1)]
    traffic = SpikeWork(recording.timeline, rows, curve, events).traffic()
    return [
        check_throttling(events, readings, THROTTLE_S, "event"),
        check_links(events, readings, traffic, curve.reach_s, "event"),
    ]


def _as_spike(incident: Incident, number: int) -> Spike:
    """Return an incident's time as a stretch for the checks of spikes."""
    start_ns, end_ns = incident.event.start_ns, max(incident.event.time_ns, incident.event.start_ns + 1)
    peak_w = incident.peak_w or 0.0
    return Spike(
        number=number,
        start_ns=start_ns,
        end_ns=end_ns,
        foot_ns=start_ns,
        peak_ns=start_ns,
        peak_w=peak_w,
        rise_w_per_s=None,
    )


def _fill_checklist(
    correlation: Correlation | None,
    aligned: Sequence[Alignment],
    incidents: Sequence[Incident],
    after: Sequence[ChecklistAnswer],
) -> tuple[ChecklistAnswer, ...]:
    """Return the four answers; without power, those that need it are unknown."""
    if correlation is not None:
        answers = {a.key: a for a in correlation.checklist}
    else:
        needs = "power recorded with the run: `tessera doctor` shows the sensors"
        answers = {
            k: make_answer(k, "unknown", "no power was recorded", needs) for k in ("aligned", "throttle", "links")
        }
        told = "; ".join(f"{i.event.domain}: {i.event.kind}, {i.event.message}" for i in incidents[:3])
        answers["feeds"] = make_answer("feeds", "yes" if incidents else "unknown", told or "no event is known", needs)
    answers |= {answer.key: answer for answer in after}
    if aligned:
        hits = [a for a in aligned if a.verdict == "aligned" and a.kind != "activity"]
        shown = hits or [a for a in aligned if a.kind != "activity"][:3]
        verdict: YesNo = "yes" if hits else "no" if all(a.verdict == "not aligned" for a in aligned) else "unknown"
        needs = "" if verdict != "unknown" else "more events, or events whose time is known better"
        answers["aligned"] = make_answer("aligned", verdict, "; ".join(map(describe_events, shown)), needs)
    return tuple(answers[key] for key in ("aligned", "throttle", "feeds", "links"))


def describe_events(alignment: Alignment) -> str:
    """Return an alignment of events in words, with its numbers."""
    p = "" if alignment.p_value is None else f", p = {alignment.p_value:.2g}"
    name = short_name(alignment.name) if alignment.kind == "kernel" else alignment.name
    reason = f": {alignment.verdict}, {alignment.reason}" if alignment.verdict != "aligned" else ""
    shares = f"in {alignment.in_spikes:.0%} of the events, at {alignment.outside:.0%} of all times{p}"
    return f"{name} ran {shares}{reason}".replace("in spikes than outside", "in events than at other times")


def _binomial_tail(count: int, hits: int, chance: float) -> float:
    """Return the probability of at least so many hits."""
    chance = min(max(chance, 0.0), 1.0)
    return math.fsum(math.comb(count, k) * chance**k * (1.0 - chance) ** (count - k) for k in range(hits, count + 1))


def _correlate(recording: Recording, events: Sequence[PowerEvent], notes: list[str]) -> Correlation | None:
    if recording.power is None:
        return None
    names = [d.name for d in recording.power.domains if d.counted and d.device.is_gpu]
    domain = names[0] if len(names) == 1 else None
    try:
        found = correlate(
            recording.timeline, recording.power, telemetry=recording.telemetry, events=events, domain=domain
        )
    except MeasurementError as error:
        notes.append(Note(f"the checklist is not answered: {error.what}"))
        return None
    notes += found.notes
    return found
