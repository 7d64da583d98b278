"""`advise`: what to change, with the evidence, the predicted saving in joules and seconds, and how sure that is.

`analyze.advise`, the screen and the page all show the same list. A rule says nothing below a share that is worth a
user's time, so a healthy run has no advice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..advice import Advice
from ..attribute.prior import Board, board_of, prior
from ..attribute.table import EnergyRow, EnergyTable
from ..device import Device
from ..profile.open_recording import Progress, open_recording
from ..record import NEEDS_SHAPES
from ..recording import Recording
from ..timeline.columns import NONE, Timeline
from . import rules_cpu, rules_host, rules_kernels, rules_ranks
from .devices import busy_spans, explain_no_device, explain_no_power, list_devices, whole_span
from .evidence import RunEvidence, find_run_gaps
from .kernels import COMMAND
from .result import Result, columns
from .roofline import find_device
from .slowdown import slowdown_of

NOTHING = "no known change would save a worthwhile share of the energy"
NOTHING_BY_TIME = "no known change would save a worthwhile share of the time"
IDLE = ("idle", "launch", "outside", "data loading")
WORTHWHILE = 0.005
"""Advice that saves less than this share of the run, but something, is not worth a line: chosen, not measured."""
COVERED = 0.5
"""If a rule about kernels covers this share of what the most expensive operator spends, "start there" adds nothing."""
RULES: tuple[Callable[[RunEvidence], Advice | None], ...] = (
    rules_host.check_idle,
    rules_host.check_launches,
    rules_host.check_outside,
    rules_kernels.check_fp32,
    rules_kernels.check_alignment,
    rules_kernels.check_tensor_use,
    rules_kernels.check_accumulators,
    rules_host.check_copies,
    rules_kernels.check_fusion,
    rules_ranks.check_late_rank,
    rules_ranks.check_communication,
    rules_kernels.check_occupancy,
    rules_kernels.check_coalescing,
    rules_kernels.check_divergence,
    rules_host.check_outliers,
    rules_host.check_throttling,
    rules_host.check_spikes,
    rules_host.check_main_operator,
    rules_cpu.check_data_loading,
    rules_cpu.check_children,
    rules_cpu.check_between_operators,
    rules_cpu.check_stragglers,
    rules_cpu.check_dropout,
    rules_cpu.check_threads,
    rules_cpu.check_formats,
)
"""All rules; the docstring of each says when it applies and how its saving is computed."""
OF_TORCH = (rules_kernels.check_fp32, rules_kernels.check_accumulators, rules_kernels.check_fusion)
"""The rules whose remedy is a setting of torch."""
_OF_KERNELS = {"fp32", "unaligned", "low tensor use", "accumulators", "low occupancy", "uncoalesced", "divergence"}
_OF_KERNELS |= {"dropout", "formats"}
# The numbers come first, because a narrow screen cuts the last columns.
_COLUMNS = columns(
    ("kind", "Advice"),
    ("saves_j", "Saves"),
    ("saves_s", "Saves time", "negative: it costs time"),
    ("confidence", "Confidence"),
    ("evidence", "Evidence"),
    ("action", "What to do"),
    ("energy_j", "Behind it"),
    ("share_pct", "Of the run"),
    (
        "by",
        "Computed by",
        "prediction: tessera.estimate's models; roofline: the chip's ceilings; counters; energy table: joules spent "
        "for nothing; experience: what it saved elsewhere",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AdviceResult(Result):
    """A `Result` whose rows are the `advice`, one by one."""

    advice: Sequence[Advice] = ()


def advise(
    trace: Any,
    *,
    power: Any = None,
    on: str | Device | None = None,
    arch: str | Device | None = None,
    progress: Progress | None = None,
) -> AdviceResult:
    """Return what to do about a recording, most joules saved first; a healthy one has no rows.

    Without power, everything is in seconds and in shares of the devices' time. `on` (or `arch`) names the chip if the
    recording does not; without power, the joules are then those of its power model (`facts["basis"]` is "modelled").
    """
    recording = open_recording(trace, power=power, progress=progress)
    timeline, table = recording.timeline, recording.find_energy()
    notes, missing = list(recording.notes), _missing(recording)
    has_joules = table is not None and table.energy_j > 0
    if table is None or not has_joules:
        # Joules of a model only if the user names the chip, and so asks for them, and the chip ran something: for a
        # chip that waits for a CPU's operators, only the idle power would be counted.
        device = find_device(timeline, on or arch) if on or arch else None
        if device is not None and not len(timeline.device_rows):
            notes.append(f"no joules of {device.name}: nothing in the trace ran on it, and its idle power says nothing")
            device = None
        table, has_joules = _model_table(timeline, device), device is not None
        missing["energy"] = explain_no_power(recording)
        if device is not None:
            notes.append(f"joules are modelled for {device.name}: no power was recorded")
    tracing = slowdown_of(recording, table if has_joules else None)
    found = {"table": table, "gaps": find_run_gaps(recording, table), "tracing": tracing, "has_joules": has_joules}
    advice = find_advice(RunEvidence.of_recording(recording, on=on or arch, **found))
    rows = []
    for a in advice:
        row = {key: getattr(a, key) for key in ("kind", "evidence", "action", "saves_s", "by", "confidence")}
        row |= {key: getattr(a, key) if has_joules else None for key in ("energy_j", "saves_j")}
        rows.append(row | {"share_pct": 100.0 * (a.share or 0.0)})
    if tracing is not None and tracing.text:
        notes.append(tracing.text)
    if not rows:
        notes.append(NOTHING if has_joules else NOTHING_BY_TIME)
    facts: dict[str, Any] = dict.fromkeys(("energy_j", "basis", "saves_j", "saves_s")) | {"time_s": table.time_s}
    if has_joules:
        saved = _sum_savings([a.saves_j / table.energy_j for a in advice])
        facts |= {"energy_j": table.energy_j, "basis": table.basis, "saves_j": table.energy_j * saved}
    elif table.time_s > 0:
        facts["saves_s"] = table.time_s * _sum_savings([(a.saves_s or 0.0) / table.time_s for a in advice])
    return AdviceResult(
        kind="advise",
        title="What to do",
        columns=[c for c in _COLUMNS if has_joules or c.key not in ("saves_j", "energy_j")],
        rows=rows,
        facts=facts,
        notes=notes,
        missing=missing,
        advice=advice,
    )


def find_advice(run: RunEvidence) -> list[Advice]:
    """Return everything that stands out, most joules saved first; [] when nothing does."""
    if not run.table.energy_j > 0:
        return []
    rules = RULES if run.uses_torch else [rule for rule in RULES if rule not in OF_TORCH]
    advice = [a for rule in rules if (a := rule(run)) is not None]
    if not any(a.kind in IDLE for a in advice) and (idle := rules_host.describe_idle(run)) is not None:
        advice.append(idle)
    advice = [a for a in advice if not 0 < max(a.saves_share, _share_of_time(a, run)) < WORTHWHILE]
    kernels_j = max((a.energy_j or 0.0 for a in advice if a.kind in _OF_KERNELS), default=0.0)
    advice = [a for a in advice if a.kind != "one operator" or kernels_j < COVERED * (a.energy_j or 0.0)]
    return sorted(advice, key=lambda a: (a.saves_share, a.share or 0.0), reverse=True)


def _share_of_time(advice: Advice, run: RunEvidence) -> float:
    return (advice.saves_s or 0.0) / run.table.time_s if run.table.time_s > 0 else 0.0


def _sum_savings(shares: Sequence[float]) -> float:
    """Return the joint saving: savings overlap (a fused kernel is not launched either), so each applies to the rest."""
    return 1.0 - math.prod(1.0 - min(1.0, share) for share in shares)


def _missing(recording: Recording) -> dict[str, str]:
    timeline, missing = recording.timeline, {}
    if not len(timeline.device_rows):
        return {"kernels": explain_no_device(recording)}  # counters, shapes and throttling then tell nothing either
    if not timeline.extra:
        missing["counters"] = f"occupancy, divergence and memory stalls are hardware counters: {COMMAND}"
    if not np.any(timeline["shapes"] != NONE):
        missing["shapes"] = f"savings of products and fusions are rough without shapes: {NEEDS_SHAPES}"
    if not any(t.throttle is not None for t in recording.telemetry):
        here = "the GPU did not report in this run whether it throttled: `tessera doctor` shows what it can report"
        missing["throttling"] = here if recording.facts.kind == "run" else "not in a trace: record with `tessera run`"
    return missing


def _span(timeline: Timeline) -> tuple[int, int]:
    """Return the time that a trace without power covers: from the first device row to the last, or what was traced."""
    rows = timeline.device_rows
    if not len(rows):
        return timeline.traced_span
    return whole_span(timeline, rows)


def _model_table(timeline: Timeline, device: Device | None) -> EnergyTable:
    """Return joules by a chip's power model; without a chip 1 W each, so that rules weigh by seconds (never shown).

    Those of all devices together are then their time: kernels that overlap are in it once, as in a breakdown.
    """
    board = board_of(device.name, np.zeros(0)) if device is not None else Board(static_w=1.0, limit_w=1.0)
    rows = timeline.device_rows
    start_ns, end_ns = _span(timeline)
    seconds = (end_ns - start_ns) * 1e-9
    lengths_s = (timeline["end_ns"][rows] - timeline["start_ns"][rows]) * 1e-9
    keys = np.stack([timeline["name"][rows], timeline["launch"][rows], timeline["kind"][rows]], axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    inverse = np.asarray(inverse).reshape(-1)
    spent_s, calls = np.bincount(inverse, lengths_s), np.bincount(inverse)
    watts = np.ones(len(first))
    if device is not None and len(rows):
        watts = prior(timeline, rows[first], spent_s / calls, timeline.linked, board).watts
    devices = list_devices(timeline)
    busy_s = sum(busy_spans(timeline, device.rows).total_ns * 1e-9 for device in devices)
    devices_s = seconds * max(1, len(devices))
    idle_j = max(0.0, devices_s - busy_s) * board.static_w
    total = float((watts * spent_s).sum()) + idle_j if device is not None else devices_s
    by_name: dict[tuple[str, str], list[float]] = {}
    for i, at in enumerate(first.tolist()):
        row = int(rows[at])
        sums = by_name.setdefault((timeline.name(row), timeline.kind(row)), [0.0, 0.0, 0.0])
        for place, value in enumerate((calls[i], spent_s[i], watts[i] * spent_s[i])):
            sums[place] += float(value)
    kernels = [
        EnergyRow(name=name, kind=kind, calls=int(n), time_s=s, energy_j=j, error_j=math.nan, share=j / (total or 1.0))
        for (name, kind), (n, s, j) in by_name.items()
    ]
    return EnergyTable(
        energy_j=total,
        error_j=math.nan,
        idle_j=idle_j,
        idle_error_j=math.nan,
        time_s=seconds,
        busy_s=busy_s,
        kernels=kernels,
        source="power model",
        basis="modelled",
    )
