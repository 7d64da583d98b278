"""Rules about the host, the board and the run as a whole: waiting, launching, throttling, spikes, uneven steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..attribute.table import EnergyRow
from ..errors import MeasurementError, TesseraError
from ..units import format_duration, format_energy
from .energy_by_time import FUNCTION
from .evidence import SAVES, Case, Finding
from .host_gaps import LAUNCHING, PREPARING, UNFED
from .kernel_names import short
from .mean_step import counted, dear
from .spikes import curve_of, find, threshold_of

# Shares of the run's joules below which a finding is not worth a user's time: chosen, not measured.
IDLE_SHARE = 0.12
MOSTLY_IDLE_SHARE = 0.5
LAUNCH_SHARE = 0.08
OUTSIDE_SHARE = 0.3
ONE_SHARE = 0.3
THROTTLED_SHARE = 0.3
OUTLIER_SHARE = 0.08
# A kernel this near its roof is as good as large products and streams get (h200/kernels.jsonl: 70-95%).
GOOD_PCT = 60.0
# A board may pass its limit for tens of milliseconds before its governor acts (900 W on 700 W: attribute/prior.py);
# spikes below this are within the limit's own tolerance.
SPIKE_OVER_LIMIT = 1.1
SPIKES = 3
# A cap of this share of the limit, looked at where the board is held by its own: chosen.
LOWER_CAP = 0.8
BESIDE = "beside what tracing explains"


def idle(case: Case) -> Finding | None:
    """The device waited while it was the program's turn, for 12% of the joules or more.

    Late launches, and what lies before and after, are findings of their own; what the tracer explains is nobody's. At
    best all those joules are saved.
    """
    waiting = [g for g in case.gaps if g.during not in (LAUNCHING, *UNFED)]
    joules = case.own * (sum(g.energy_j for g in waiting) if case.gaps else case.table.idle_j)
    if not case.table.kernels or not case.share(joules) >= IDLE_SHARE:
        return None
    evidence = f"the device idled for {case.amount(joules)}"
    seconds = case.own * sum(g.seconds for g in waiting) if waiting else None
    most = waiting[0] if waiting else None
    if most is not None and case.own < 1.0:
        evidence += f" {BESIDE}, most of it while {most.during}"
    elif most is not None:
        each = format_duration(most.each_s, 3)
        during = f"{most.count} x {each}" if most.count > 1 else each
        evidence += f", {format_energy(most.energy_j, 3)} of it {during} while {most.during}"
    action = _remedy(most.during if most else "")
    if case.share(joules) >= MOSTLY_IDLE_SHARE:
        action += "; or give it more to do: consolidate jobs on fewer GPUs (MPS, MIG)"
    return case.finding(
        "idle", joules, evidence, action, saves=(joules, seconds), by="energy table",
        confidence="medium" if waiting else "low",
    )  # fmt: skip


def _remedy(during: str) -> str:
    low = during.lower()
    if "dataloader" in low or "data" in low:
        return "load ahead (more DataLoader workers, pin_memory, prefetch_factor)"
    if "item" in low or "local_scalar" in low or "synchronize" in low or "nonzero" in low:
        return "read values back less often; each read makes the device wait for the host"
    if "optimizer" in low:
        return "use the optimizer's fused=True, so that it is a few launches"
    return "keep the device fed: larger batches, work queued ahead, no Python between launches"


def launch(case: Case) -> Finding | None:
    """The device waited for launches (gaps up to 100 us) for 8% of the joules or more.

    In a CUDA graph a gap is `GAP_S["graph"]` long, as `tessera.predict` has it (measured on an H200).
    """
    from ..estimate.predict import GAP_S

    late = next((g for g in case.gaps if g.during == LAUNCHING), None)
    if late is None or case.share(case.own * late.energy_j) < LAUNCH_SHARE:
        return None
    late = dataclasses.replace(late, seconds=case.own * late.seconds, energy_j=case.own * late.energy_j)
    left = min(1.0, late.count * GAP_S["graph"] / late.seconds) if late.seconds > 0 else 1.0
    each = format_duration(late.each_s, 2)
    evidence = f"the device waited for {late.count:,} launches, {each} each: {case.amount(late.energy_j)} idle"
    evidence += f" {BESIDE}" if case.own < 1.0 else ""
    action = 'torch.compile(mode="reduce-overhead") or a CUDA graph launches them at once; so does a larger batch'
    return case.finding(
        "launch", late.energy_j, evidence, action, saves=(late.energy_j * (1.0 - left), late.seconds * (1.0 - left)),
        by="prediction", confidence="high",
    )  # fmt: skip


def outside(case: Case) -> Finding | None:
    """Nothing ran yet, or any more, for 30% of the joules or more."""
    joules = sum(g.energy_j for g in case.gaps if g.during in UNFED)
    if case.share(joules) < OUTSIDE_SHARE:
        return None
    stepped = any(g.during == PREPARING for g in case.gaps)
    first = "whole step" if stepped else "kernel"
    evidence = f"{case.amount(joules)} went before the first {first} and after the last kernel"
    action = "start up faster, or record more steps to see the program itself"
    return case.finding("outside", joules, evidence, action)


def outliers(case: Case) -> Finding | None:
    """Up to a quarter of the steps cost half as much again as the middle one: compilation, autotuning, a slow disk.

    Not the first ones, which no mean counts either. Nor on modelled joules: those of a longer step are its time on this
    machine, whoever else used it.
    """
    steps = [case.table.steps[i] for i in counted(case.table.steps).places]
    if len(steps) < 4 or case.table.basis == "modelled":
        return None
    spent = np.array([s.with_backward_j if s.with_backward_j is not None else s.energy_j for s in steps])
    middle = float(np.median(spent))
    high = np.flatnonzero(dear(spent))
    joules = float((spent[high] - middle).sum())
    if not len(high) or len(high) > len(spent) // 4 or case.share(joules) < OUTLIER_SHARE:
        return None
    worst = steps[int(np.argmax(spent))]
    evidence = (
        f"{len(high)} of {len(spent)} steps cost {format_energy(joules, 3)} more than the middle one "
        f"({worst.name}: {spent.max() / middle:.1f} times)"
    )
    action = "see in the page's timeline what they do that the others do not"
    saves = SAVES["outliers"] * joules
    return case.finding(
        "outliers", joules, evidence, action, saves=(saves, None), by="energy table", confidence="medium"
    )


def throttled(case: Case) -> Finding | None:
    """The board was held back in 30% of its telemetry or more. A cap is joules well spent; heat is not."""
    busy_j = case.table.total_j - case.table.idle_j
    for domain, rows in case.telemetry.items():
        known = [t.throttle for t in rows if t.throttle is not None]
        for reason in ("power cap", "thermal (software)", "thermal (hardware)", "power brake"):
            share = sum(reason in t for t in known) / len(known) if known else 0.0
            if share < THROTTLED_SHARE:
                continue
            spent = share * busy_j
            evidence = f"{domain} was held by {reason} in {share:.0%} of the readings, {case.amount(spent)}"
            if reason == "power cap":
                return _capped(case, spent, share, evidence, [t.power_limit_w for t in rows if t.power_limit_w])
            return case.finding("thermal", spent, evidence, "check its cooling and inlet temperature")
    return None


def _capped(case: Case, spent: float, share: float, evidence: str, limits: Sequence[float]) -> Finding:
    action = "it is as fast as its watts allow: lower precision or fewer bytes save time and joules alike"
    limit_w = limits[-1] if limits else None
    found = _lower_cap(case, limit_w)
    if found is None:
        return case.finding("power cap", spent, evidence, action)
    cap_w, energy, time = found
    action += (
        f"; where time matters less, a cap of {cap_w:.0f} W (or a lower clock) needs {1.0 - energy:.0%} less joules"
    )
    action += f" and {time - 1.0:.0%} more time"
    saves = (spent * (1.0 - energy), -share * case.table.busy_s * (time - 1.0))
    return case.finding("power cap", spent, evidence, action, saves=saves, by="prediction", confidence="medium")


def _lower_cap(case: Case, limit_w: float | None) -> tuple[float, float, float] | None:
    """A lower cap in watts, and its joules and seconds relative to now, by the power model; None where unknown."""
    from ..estimate.power import DeviceWork, PowerModel

    calls = case.calls
    if calls is None or case.device is None or np.all(np.isnan(calls.flops)):
        return None
    try:
        model = PowerModel.from_device(case.device)
    except TesseraError:
        return None
    flops = {u: float(np.nansum(calls.flops[calls.unit == i])) for i, u in enumerate(calls.units)}
    matrix = np.array([*(u.startswith("matrix") for u in calls.units), False])[calls.unit]
    clock_s, busy_s = float(calls.seconds[matrix].sum()), float(calls.seconds.sum())
    hbm = float(np.nansum(calls.bytes))
    work = DeviceWork(clock_s=clock_s, fixed_s=busy_s - clock_s, busy_s=busy_s, flops=flops, hbm_bytes=hbm)
    limit = limit_w or model.limit_w
    now = dataclasses.replace(model, limit_w=limit).estimate(work)
    then = dataclasses.replace(model, limit_w=LOWER_CAP * limit).estimate(work)
    energy, time = then.energy_j / now.energy_j, then.seconds / now.seconds
    return (LOWER_CAP * limit, energy, time) if energy < 0.99 else None


def spikes(case: Case) -> Finding | None:
    """Three or more spikes above 1.1 times the board's limit. They cost feeds and breakers, not joules."""
    calls, device = case.calls, case.device
    if case.power is None or calls is None or device is None or device.tdp_w is None or case.timeline is None:
        return None
    start, end = case.timeline["start_ns"][calls.rows].min(), case.timeline["end_ns"][calls.rows].max()
    gpus = [d.name for d in case.power.domains if d.counted and d.device.is_gpu]
    if len(gpus) != 1:
        return None
    try:
        curve = curve_of(case.power, gpus[0], int(start), int(end))
    except MeasurementError:
        return None
    limit_w = SPIKE_OVER_LIMIT * device.tdp_w.value
    found = find(curve, max(limit_w, threshold_of(curve, 95.0)))
    if len(found) < SPIKES:
        return None
    peak_w, seconds = max(s.peak_w for s in found), sum(s.seconds for s in found)
    evidence = (
        f"{len(found)} spikes up to {peak_w:.0f} W, {peak_w / device.tdp_w.value:.0%} of the limit of "
        f"{device.tdp_w.value:.0f} W (mean {curve.mean_w:.0f} W)"
    )
    action = "stagger the ranks, add jitter to steps or admit work by a token bucket; a power cap cuts what is left"
    return case.finding(
        "spikes", peak_w * seconds, evidence, action, saves=(0.0, 0.0), by="energy table", confidence="medium"
    )  # fmt: skip


def one(case: Case) -> Finding | None:
    """One operator (or kernel) spends 30% of the joules or more, and is not known to be near its roof (60%)."""
    rows: Sequence[EnergyRow] = case.table.ops or case.table.kernels
    most = max(rows, key=lambda r: r.energy_j, default=None)
    if most is None or case.share(most.energy_j) < ONE_SHARE:
        return None
    if most.kind == "op" and math.isnan(most.energy_error_j):
        return None  # of a summary: the outermost operator holds all the others
    if _near_its_roof(case, most):
        return None
    evidence = f"{short(most.name, most.kind)} spends most, {case.amount(most.energy_j)} in {most.calls:,} calls"
    action = "lower precision, fewer or larger calls"
    if most.kind == FUNCTION:
        evidence = f"the host is in {most.name} while {case.amount(most.energy_j)} are spent"
        action = "record without mode sampling to see which kernels run meanwhile"
    return case.finding("one operator", most.energy_j, evidence, action)


def _near_its_roof(case: Case, row: EnergyRow) -> bool:
    calls, roofs, timeline = case.calls, case.roofs, case.timeline
    if calls is None or roofs is None or timeline is None:
        return False
    entries = calls.op if row.kind == "op" else calls.rows
    names = np.array([n == row.name for n in timeline.names], bool)
    mine = (entries >= 0) & names[timeline["name"][entries]] & ~np.isnan(calls.flops) & ~np.isnan(calls.bytes)
    seconds = float(calls.seconds[mine].sum())
    if seconds <= 0.0:
        return False
    ideal = np.zeros(len(calls.rows))
    peaks = np.array([*(roofs.flops_per_s.get(u, np.nan) for u in calls.units), np.nan])[calls.unit]
    ideal = np.nan_to_num(calls.flops / peaks)
    if roofs.bytes_per_s:
        ideal = np.maximum(ideal, np.nan_to_num(calls.bytes / roofs.bytes_per_s))
    return bool(100.0 * float(ideal[mine].sum()) / seconds >= GOOD_PCT)
