"""Rules about the host, the board and the run as a whole: waiting, launching, copying, throttling, spikes, steps."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from ..advice import Advice
from ..attribute.table import EnergyRow
from ..errors import MeasurementError, TesseraError
from ..recording import COMPILATION
from ..schema import EnergyReport, Telemetry
from ..units import format_duration, format_energy
from .correlate import find_only_gpu
from .devices import whole_span
from .evidence import LAUNCHING, PREPARING, SAVES, UNFED, HostGap, RunEvidence
from .kernel_names import short
from .mean_step import find_expensive, select_steps
from .rules_cpu import advise_function
from .run_energy import FUNCTION
from .spikes import choose_threshold, find_spikes, make_curve

# Shares of the run's joules below which advice is not worth a user's time: chosen, not measured.
IDLE_SHARE = 0.12
MOSTLY_IDLE_SHARE = 0.5
LAUNCH_SHARE = 0.08
OUTSIDE_SHARE = 0.3
ONE_SHARE = 0.3
SAMPLES = 10  # of stacks: with fewer, their shares are chance
THROTTLED_SHARE = 0.3
OUTLIER_SHARE = 0.08
COPY_SHARE = 0.05
# A kernel this near its roof is as good as large products and streams get (70-95% on an H200).
GOOD_PCT = 60.0
# A board may pass its limit for tens of milliseconds before its governor acts (900 W on 700 W: attribute/prior.py).
# Spikes below this are within the limit's own tolerance.
SPIKE_OVER_LIMIT = 1.1
SPIKES = 3
# A lower cap, as a share of the limit, that is considered if the board is held by its own limit: chosen.
LOWER_CAP = 0.8
# Share of a PCIe link's line rate that copies of pinned memory reach (gen 5 x16 gives 55 of 63 GB/s in practice).
PINNED_SHARE = 0.87
BESIDE = "in addition to what tracing causes"
# Idle for this share of the time is always mentioned: chosen.
MUCH_IDLE_SHARE = 0.3
OF_COMPILER = " (dynamo_timed)"
"""How torch ends the names of what its compiler does."""
KEEP_COMPILED = (
    "keep what was compiled (TORCHINDUCTOR_CACHE_DIR on a disk that stays), run longer with it, and compile for fewer "
    "shapes (dynamic=True)"
)
COMPILE = 'torch.compile(mode="reduce-overhead") or '
LAUNCH_AT_ONCE = "a CUDA graph launches them at once; so does a larger batch"
START_UP = "start up faster, or record more steps to see the program itself"
# 59 ms for a new length on an H200, 0.2 ms when it comes again, 0.1 ms by flash (plans_in_use.json)
NEW_LENGTHS = (
    "where lengths change, cuDNN plans its attention for each new one: torch.backends.cuda.enable_cudnn_sdp(False) "
    "takes flash attention; or pad lengths to a few"
)
# Whole words (DistributedDataParallel loads no data); the first match counts.
_REMEDIES = tuple(
    (re.compile(rf"(?<![a-z])(?:{words})(?![a-z])", re.IGNORECASE), remedy)
    for words, remedy in (
        (r"\w*cudnn_attention\w*", NEW_LENGTHS),
        (
            COMPILATION,
            f"the device waits while torch.compile compiles: {KEEP_COMPILED}",
        ),
        (
            r"(?:\w*)dataloader\w*|data|batch_?load\w*",
            "load ahead (more DataLoader workers, pin_memory, prefetch_factor)",
        ),
        (
            "item|local_scalar_dense|nonzero|(?:cuda|hip)?(?:Device|Stream|Event|Context)Synchronize|synchronize",
            "read values back less often; each read makes the device wait for the host",
        ),
        (
            r"(?:cuda|hip|cu)Memcpy\w*|copy_|_to_copy|to",
            "the host waits for a copy: pin its memory (pin_memory=True) and copy with non_blocking=True",
        ),
        ("optimizer", "use the optimizer's fused=True, so that it is a few launches"),
    )
)
# For `tessera measure`, which knows neither kernels nor steps.
MEASURED_IDLE_SHARE = 0.35
UNUSED_SHARE = 0.97
LOW_UTILIZATION_PCT = 50.0


def check_idle(run: RunEvidence) -> Advice | None:
    """Advise if the device waited when it was the program's turn, for 12% of the joules or more.

    Late launches, and the time before and after, have their own rules; idle time that tracing caused does not count. At
    best, all those joules are saved.
    """
    waiting = [g for g in run.gaps if g.during not in (LAUNCHING, *UNFED)]
    joules = run.program_share * (sum(g.energy_j for g in waiting) if run.gaps else run.table.idle_j)
    if not run.table.kernels or not run.share(joules) >= IDLE_SHARE:
        return None
    evidence = f"the device idled for {run.format_amount(joules)}"
    seconds = run.program_share * sum(g.time_s for g in waiting) if waiting else None
    most = waiting[0] if waiting else None
    if most is not None and run.program_share < 1.0:
        evidence += f" {BESIDE}, most of it while {most.during}"
    elif most is not None:
        each = format_duration(most.each_s, 3)
        during = f"{most.count} x {each} " if most.count > 1 else f"{each} " if run.has_joules else ""
        evidence += f", {run.format_spent(most.energy_j)} of it {during}while {most.during}"
    action = _remedy(most.during if most else "", run.table.kernels)
    if run.share(joules) >= MOSTLY_IDLE_SHARE and not (most and COMPILATION in most.during):
        action += "; or give it more to do: consolidate jobs on fewer GPUs (MPS, MIG)"
    return run.advise(
        "idle",
        joules,
        evidence,
        action,
        saves=(joules, seconds),
        by="energy table",
        confidence="medium" if waiting else "low",
    )


def describe_idle(run: RunEvidence) -> Advice | None:
    """Advise if the devices waited for 30% of the time or more, however few joules that is.

    What tracing may have caused counts too, unless untraced steps show how much that is.
    """
    seconds, whole_s = sum(g.time_s for g in run.gaps), run.table.time_s * run.devices
    if run.tracing is not None and run.tracing.basis == "steps":
        seconds *= run.program_share
    if not run.table.kernels or whole_s <= 0 or seconds < MUCH_IDLE_SHARE * whole_s:
        return None
    most = run.gaps[0]
    evidence = f"no kernel or copy ran for {seconds / whole_s:.0%} of the time ({format_duration(seconds, 3)})"
    evidence += f", {format_duration(most.time_s, 3)} of it {_when(most)}"
    if run.tracing is not None and run.tracing.matters and run.tracing.idle_s > 0 and not run.tracing.is_brief:
        tracer_s = min(run.tracing.idle_s, sum(g.time_s for g in run.gaps if g.during not in UNFED))
        evidence += f"; up to {format_duration(tracer_s, 3)} of it may be the tracer's"
    at_once = _launch_at_once(run)
    action = at_once if most.during == LAUNCHING else _remedy(most.during, run.table.kernels)
    action = START_UP if most.during in UNFED else action
    joules = sum(g.energy_j for g in run.gaps)
    saves = (joules * run.program_share, seconds * run.program_share)
    return run.advise("idle", joules, evidence, action, saves=saves, by="energy table", confidence="low")


def _when(gap: HostGap) -> str:
    """Say when a gap was: while in backward, or after the last kernel."""
    return gap.during if gap.during in UNFED else f"while {gap.during}"


def _remedy(during: str, kernels: Sequence[EnergyRow] = ()) -> str:
    """Return what to do about waiting `during` something; the kernels tell whose attention it is."""
    if "scaled_dot_product_attention" in during and any("cudnn" in row.name for row in kernels):
        return NEW_LENGTHS
    for pattern, remedy in _REMEDIES:
        if pattern.search(during):
            return remedy
    return "keep the device fed: larger batches, work queued ahead, no Python between launches"


def _launch_at_once(run: RunEvidence) -> str:
    return f"{COMPILE * run.uses_torch}{LAUNCH_AT_ONCE}"


def check_launches(run: RunEvidence) -> Advice | None:
    """Advise if the device waited for launches (gaps up to 100 us) for 8% of the joules or more.

    In a CUDA graph, a gap is `GAP_S["graph"]` long, as in `tessera.predict` (measured on an H200).
    """
    from ..estimate.predict import GAP_S

    late = next((g for g in run.gaps if g.during == LAUNCHING), None)
    if late is None or run.share(run.program_share * late.energy_j) < LAUNCH_SHARE:
        return None
    late = dataclasses.replace(late, time_s=run.program_share * late.time_s, energy_j=run.program_share * late.energy_j)
    left = min(1.0, late.count * GAP_S["graph"] / late.time_s) if late.time_s > 0 else 1.0
    each = format_duration(late.each_s, 2)
    evidence = f"the device waited for {late.count:,} launches, {each} each: {run.format_amount(late.energy_j)} idle"
    evidence += f" {BESIDE}" if run.program_share < 1.0 else ""
    return run.advise(
        "launch",
        late.energy_j,
        evidence,
        _launch_at_once(run),
        saves=(late.energy_j * (1.0 - left), late.time_s * (1.0 - left)),
        by="prediction",
        confidence="high",
    )


def check_outside(run: RunEvidence) -> Advice | None:
    """Advise if 30% of the joules or more were drawn before anything ran, or after everything had ended."""
    joules = sum(g.energy_j for g in run.gaps if g.during in UNFED)
    if run.share(joules) < OUTSIDE_SHARE:
        return None
    stepped = any(g.during == PREPARING for g in run.gaps)
    first = "whole step" if stepped else "kernel"
    evidence = f"{run.format_amount(joules)} went before the first {first} and after the last kernel"
    return run.advise("outside", joules, evidence, START_UP)


def check_outliers(run: RunEvidence) -> Advice | None:
    """Advise if up to a quarter of the steps cost 1.5 times the median: compilation, autotuning, a slow disk.

    The first steps do not count, nor do they in a mean. Modelled joules do not count: those of a longer step are only
    its time on this machine, which others may have used too.
    """
    steps = [run.table.steps[i] for i in select_steps(run.table.steps).places]
    if len(steps) < 4 or run.table.basis == "modelled":
        return None
    spent = np.array([s.with_backward_j if s.with_backward_j is not None else s.energy_j for s in steps])
    middle = float(np.median(spent))
    high = np.flatnonzero(find_expensive(spent))
    joules = float((spent[high] - middle).sum())
    if not len(high) or len(high) > len(spent) // 4 or run.share(joules) < OUTLIER_SHARE:
        return None
    worst = steps[int(np.argmax(spent))]
    evidence = (
        f"{len(high)} of {len(spent)} steps cost {format_energy(joules, 3)} more than the middle one "
        f"({worst.name}: {spent.max() / middle:.1f} times)"
    )
    action = "see in the page's timeline what they do that the others do not"
    saves = SAVES["outliers"] * joules
    return run.advise("outliers", joules, evidence, action, saves=(saves, None), by="energy table", confidence="medium")


def check_throttling(run: RunEvidence) -> Advice | None:
    """Advise if the board was held back in 30% of its telemetry or more. A cap saves joules; heat does not."""
    throttle = find_throttle(run.telemetry)
    if throttle is None:
        return None
    domain, reason, share = throttle
    spent_j = share * (run.table.energy_j - (run.table.idle_j if run.table.kernels else 0.0))  # else idle is unknown
    evidence = f"{domain} was held by {reason} in {share:.0%} of the readings, {run.format_amount(spent_j)}"
    if reason != "power cap":
        return run.advise("thermal", spent_j, evidence, "check its cooling and inlet temperature")
    action = "it is as fast as its watts allow: lower precision or fewer bytes save time and joules alike"
    limits = [t.power_limit_w for t in run.telemetry[domain] if t.power_limit_w]
    lower = _lower_cap(run, limits[-1] if limits else None)
    if lower is None:
        return run.advise("power cap", spent_j, evidence, action)
    cap_w, energy, time = lower
    action += (
        f"; where time matters less, a cap of {cap_w:.0f} W (or a lower clock) needs {1.0 - energy:.0%} less joules"
        f" and {time - 1.0:.0%} more time"
    )
    saves = (spent_j * (1.0 - energy), -share * run.table.busy_s * (time - 1.0))
    return run.advise("power cap", spent_j, evidence, action, saves=saves, by="prediction", confidence="medium")


def find_throttle(telemetry: Mapping[str, Sequence[Telemetry]]) -> tuple[str, str, float] | None:
    """Return the first device that was held back in 30% of its readings or more, why, and the share; or None."""
    for domain, rows in telemetry.items():
        states = [t.throttle for t in rows if t.throttle is not None]
        for reason in ("power cap", "thermal (software)", "thermal (hardware)", "power brake"):
            share = sum(reason in state for state in states) / len(states) if states else 0.0
            if share >= THROTTLED_SHARE:
                return domain, reason, share
    return None


def _lower_cap(run: RunEvidence, limit_w: float | None) -> tuple[float, float, float] | None:
    """Return a lower cap in watts, and its joules and seconds relative to now, by the power model; None if unknown."""
    from ..estimate.power import DeviceWork, PowerModel

    calls = run.calls
    if calls is None or run.device is None or np.all(np.isnan(calls.flops)):
        return None
    try:
        model = PowerModel.from_device(run.device)
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


def check_spikes(run: RunEvidence) -> Advice | None:
    """Advise at three or more spikes above 1.1 times the board's limit. They cost feeds and breakers, not joules."""
    calls, device = run.calls, run.device
    if run.power is None or calls is None or device is None or device.tdp_w is None or run.timeline is None:
        return None
    if (domain := find_only_gpu(run.power)) is None:
        return None
    try:
        curve = make_curve(run.power, domain, *whole_span(run.timeline, calls.rows))
    except MeasurementError:
        return None
    limit_w = SPIKE_OVER_LIMIT * device.tdp_w.value
    spikes = find_spikes(curve, max(limit_w, choose_threshold(curve)))
    if len(spikes) < SPIKES:
        return None
    peak_w, seconds = max(s.peak_w for s in spikes), sum(s.time_s for s in spikes)
    evidence = (
        f"{len(spikes)} spikes up to {peak_w:.0f} W, {peak_w / device.tdp_w.value:.0%} of the limit of "
        f"{device.tdp_w.value:.0f} W (mean {curve.mean_w:.0f} W)"
    )
    action = "stagger the ranks, add jitter to steps or admit work by a token bucket; a power cap cuts what is left"
    return run.advise(
        "spikes", peak_w * seconds, evidence, action, saves=(0.0, 0.0), by="energy table", confidence="medium"
    )


def check_main_operator(run: RunEvidence) -> Advice | None:
    """Advise if one operator (or kernel) spends 30% of the joules or more, and is not near its roof (60%)."""
    rows: Sequence[EnergyRow] = run.table.ops or run.table.kernels
    most = max(rows, key=lambda r: r.energy_j, default=None)
    if most is None or run.share(most.energy_j) < ONE_SHARE:
        return None
    if most.kind == "op" and math.isnan(most.error_j):
        return None  # in a summary, the outermost operator contains all others
    if _near_its_roof(run, most):
        return None
    if most.name.endswith(OF_COMPILER):
        joules = math.fsum(row.energy_j for row in rows if row.name.endswith(OF_COMPILER))
        evidence = f"torch.compile compiles while {run.format_amount(joules)} are used"
        return run.advise(COMPILATION, joules, evidence, KEEP_COMPILED)
    amount = run.format_amount(most.energy_j)
    what = "uses the most energy" if run.has_joules else "takes the most time"
    evidence = f"{short(most.name, most.kind)} {what}, {amount} in {most.calls:,} calls"
    action = "use a lower precision, or fewer or larger calls"
    if most.kind == FUNCTION:
        if most.calls < SAMPLES:
            return None
        evidence, action = advise_function(most.name, amount)
    return run.advise("one operator", most.energy_j, evidence, action)


def _near_its_roof(run: RunEvidence, row: EnergyRow) -> bool:
    calls, roofs, timeline = run.calls, run.ceilings, run.timeline
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


def check_copies(run: RunEvidence) -> Advice | None:
    """Advise if copies spend 5% of the joules or more.

    For pageable ones, the saving is by the rate of pinned memory.
    """
    rows = [r for r in run.table.kernels if r.kind == "memcpy"]
    joules = sum(r.energy_j for r in rows)
    if run.share(joules) < COPY_SHARE:
        return None
    most = max(rows, key=lambda r: r.energy_j)
    evidence = f"copies spend {run.format_amount(joules)}, most of it {most.name} ({most.calls:,} x)"
    if "pageable" in most.name.lower():
        action = "pin the host's memory (pin_memory=True) and copy with non_blocking=True"
        saves = _save_by_pinning(run)
        if saves is not None:
            return run.advise("copies", joules, evidence, action, saves=saves, by="roofline", confidence="medium")
    elif "dtod" in most.name.lower():
        action = "avoid .clone(), .contiguous() and cat on large tensors"
        return run.advise(
            "copies",
            joules,
            evidence,
            action,
            saves=(joules, sum(r.time_s for r in rows)),
            by="energy table",
            confidence="medium",
        )
    else:
        action = "keep tensors on the device, or copy while it computes"
    return run.advise("copies", joules, evidence, action)


def _save_by_pinning(run: RunEvidence) -> tuple[float, float] | None:
    """Return the joules and seconds that pageable copies would save at the rate of pinned memory."""
    link = run.device.interconnect.get("pcie") if run.device is not None else None
    if link is None or run.calls is None or run.timeline is None:
        return None
    moved = run.timeline["bytes"][run.calls.rows]
    pageable = run.match_calls(lambda n: "pageable" in n.lower()) & (moved > 0)
    seconds = run.calls.seconds
    if not np.any(pageable):
        return None
    new_s = np.minimum(seconds, moved / (PINNED_SHARE * link.one_way_bytes_per_s))
    left = np.divide(new_s, seconds, out=np.ones(len(seconds)), where=seconds > 0)
    return float((run.joules * (1.0 - left))[pageable].sum()), float((seconds - new_s)[pageable].sum())


# -- a measured command -----------------------------------------------------------------------------------------------


def advise_measurement(report: EnergyReport, telemetry: Mapping[str, Sequence[Telemetry]]) -> str | None:
    """Return the one thing to do after `tessera measure`, with the evidence; None if nothing stands out."""
    if report.basis == "modelled":
        return "these joules are modelled: run `tessera doctor` to see which sensors this machine could have"
    if report.total.coverage < 0.98:
        reason = f" ({report.gaps[0].reason})" if report.gaps else ""
        return f"the sensors saw only {report.total.coverage:.0%} of the run{reason}: see `tessera doctor`"
    if text := _describe_idle(report, telemetry):
        return text
    throttle = find_throttle(telemetry)
    if throttle is None:
        return None
    domain, reason, share = throttle
    if reason == "power cap":
        return (
            f"{domain} ran into its power limit in {share:.0%} of the samples: it is as fast as its watts allow, "
            "so lower precision or fewer bytes moved saves time and joules alike"
        )
    return f"{domain} was slowed by {reason} in {share:.0%} of the samples: check its cooling and inlet temperature"


def _describe_idle(report: EnergyReport, telemetry: Mapping[str, Sequence[Telemetry]]) -> str | None:
    if report.idle_w is None or report.total.energy_j <= 0:
        return None
    idle_j = report.idle_w * report.total.time_s
    share = idle_j / report.total.energy_j
    if share < MEASURED_IDLE_SHARE:
        return None
    if share > UNUSED_SHARE:
        return "hardly anything was drawn above idle: was this the right command, and the right GPU?"
    busy = [t.utilization_pct for rows in telemetry.values() for t in rows if t.utilization_pct is not None]
    mean = sum(busy) / len(busy) if busy else None
    used = f", utilisation {mean:.0f}%" if mean is not None and mean < LOW_UTILIZATION_PCT else ""
    return (
        f"{share:.0%} of the joules ({idle_j:.4g} J) are what the machine draws when idle{used}: "
        "larger batches or fewer, busier GPUs would spread them over more work"
    )
