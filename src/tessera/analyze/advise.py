"""`advise`: what to change, with the evidence, the predicted saving in joules and seconds, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..attribute.prior import Board, board_of, prior
from ..attribute.table import EnergyRow, EnergyTable
from ..device import Device
from ..record import NEEDS_SHAPES
from ..timeline.columns import NONE, Timeline
from ..timeline.intervals import union
from .answer import by_domain, window_of
from .ceilings import device_of
from .devices import no_device, no_power
from .findings import Finding, findings
from .host_gaps import host_gaps
from .result import Column, Result
from .source import Progress, Source, open_source
from .stalls import COMMAND

NOTHING = "nothing stands out: no change known to us would save a share worth the work"

# The numbers first: a narrow screen cuts what comes last.
_COLUMNS = (
    Column(key="kind", title="Finding"),
    Column(key="saves_j", title="Saves", unit="J"),
    Column(key="saves_s", title="Saves time", unit="s", help="negative: it costs time"),
    Column(key="confidence", title="Confidence"),
    Column(key="evidence", title="Evidence"),
    Column(key="action", title="What to do"),
    Column(key="energy_j", title="Behind it", unit="J"),
    Column(key="share_pct", title="Of the run", unit="%"),
    Column(key="by", title="Computed by", help="prediction: tessera.estimate's models; roofline: the chip's ceilings; "
           "counters; energy table: joules spent for nothing; experience: what it saved elsewhere"),
)  # fmt: skip


def advise(
    trace: Any, *, power: Any = None, arch: str | Device | None = None, progress: Progress | None = None
) -> Result:
    """What to do about a recording, most joules saved first; a healthy one has no rows.

    Without power the joules are the chip's power model's (`facts["basis"]` is "modelled"); without a known chip too,
    only seconds are given.
    """
    source = open_source(trace, power=power, progress=progress)
    table = source.energy()
    notes, missing = list(source.notes), _missing(source)
    known = table is not None and table.total_j > 0
    if table is None or not known:
        table, known = _modelled(source.timeline, arch)
        missing["energy"] = no_power(source)
        said = "joules are modelled: no power was recorded" if known else "no joules: no power, and no chip is named"
        notes.append(said)
    gaps = host_gaps(source.timeline, table, *_window(source)) if table.kernels else []
    tracing = source.tracing()
    found = findings(
        table, by_domain(source.telemetry), gaps, timeline=source.timeline, power=source.power, arch=arch,
        tracing=tracing,
    )  # fmt: skip
    rows = [
        {
            "kind": f.kind, "evidence": f.evidence, "action": f.action, "energy_j": f.energy_j if known else None,
            "share_pct": 100.0 * f.share, "saves_j": f.saves_j if known else None, "saves_s": f.saves_s, "by": f.by,
            "confidence": f.confidence,
        }
        for f in found
    ]  # fmt: skip
    if tracing is not None and tracing.text:
        notes.append(tracing.text)
    if not rows:
        notes.append(NOTHING)
    facts = {
        "energy_j": table.total_j if known else None, "time_s": table.seconds, "basis": table.basis if known else None,
        "saves_j": _together(found, table) if known else None,
    }  # fmt: skip
    return Result(
        kind="advise", title="What to do", columns=_COLUMNS, rows=rows, facts=facts, notes=notes, missing=missing
    )


def _together(found: Sequence[Finding], table: EnergyTable) -> float:
    """All of them: they overlap (a fused kernel is not launched either), so each saves of what the others leave."""
    return table.total_j * (1.0 - math.prod(1.0 - min(1.0, f.saves_j / table.total_j) for f in found))


def _missing(source: Source) -> dict[str, str]:
    timeline, missing = source.timeline, {}
    if not len(timeline.device_rows):
        return {"kernels": no_device(source)}  # nor have counters, shapes and throttling anything to say
    if not timeline.extra:
        missing["counters"] = f"occupancy, divergence and memory stalls are hardware counters: {COMMAND}"
    if not np.any(timeline["shapes"] != NONE):
        missing["shapes"] = f"savings of products and fusions are rough without shapes: {NEEDS_SHAPES}"
    if not any(t.throttle is not None for t in source.telemetry):
        here = "the GPU did not say in this run whether it throttled: `tessera doctor` says what it can"
        missing["throttling"] = here if source.run is not None else "not in a trace: record with `tessera run`"
    return missing


def _window(source: Source) -> tuple[int, int]:
    """What was accounted for, as attribution has it: the idle joules of the table lie in it."""
    if source.run is not None:
        return window_of(source.run)
    if source.power is None:
        return _span(source.timeline)
    start_ns = max(source.timeline.start_ns, source.power.start_ns)
    return start_ns, min(source.timeline.end_ns, source.power.end_ns)


def _span(timeline: Timeline) -> tuple[int, int]:
    """What a trace without power covers: from the first device row to the last."""
    rows = timeline.device_rows
    if not len(rows):
        return timeline.start_ns, timeline.end_ns
    return int(timeline["start_ns"][rows].min()), int(timeline["end_ns"][rows].max())


def _modelled(timeline: Timeline, arch: str | Device | None) -> tuple[EnergyTable, bool]:
    """Joules by the power model of the chip, and whether there is one; without it 1 W each, to weigh by seconds."""
    device = device_of(timeline, arch)
    board = board_of(device.name, np.zeros(0)) if device is not None else Board(static_w=1.0, limit_w=1.0)
    rows = timeline.device_rows
    start_ns, end_ns = _span(timeline)
    seconds = (end_ns - start_ns) * 1e-9
    lasted = (timeline["end_ns"][rows] - timeline["start_ns"][rows]) * 1e-9
    keys = np.stack([timeline["name"][rows], timeline["launch"][rows], timeline["kind"][rows]], axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    inverse = np.asarray(inverse).reshape(-1)
    spent_s, calls = np.bincount(inverse, lasted), np.bincount(inverse)
    watts = np.ones(len(first))
    if device is not None and len(rows):
        watts = prior(timeline, rows[first], spent_s / calls, timeline.linked.op, board).watts
    busy_s = 0.0
    by_device = timeline.by_device(rows)
    for mine in by_device.values():
        busy_s += union(timeline["start_ns"][mine], timeline["end_ns"][mine]).total_ns * 1e-9
    idle_j = max(0.0, seconds * max(1, len(by_device)) - busy_s) * board.static_w
    total = float((watts * spent_s).sum()) + idle_j
    by_name: dict[tuple[str, str], list[float]] = {}
    for i, at in enumerate(first.tolist()):
        row = int(rows[at])
        sums = by_name.setdefault((timeline.name(row), timeline.kind(row)), [0.0, 0.0, 0.0])
        for place, value in enumerate((calls[i], spent_s[i], watts[i] * spent_s[i])):
            sums[place] += float(value)
    kernels = [
        EnergyRow(
            name=name, kind=kind, calls=int(n), time_s=s, energy_j=j, energy_error_j=math.nan, share=j / total
        )
        for (name, kind), (n, s, j) in by_name.items()
    ]  # fmt: skip
    table = EnergyTable(
        total_j=total, total_error_j=math.nan, idle_j=idle_j, idle_error_j=math.nan, seconds=seconds, busy_s=busy_s,
        kernels=kernels, source="power model", basis="modelled",
    )  # fmt: skip
    return table, device is not None
