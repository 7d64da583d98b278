"""`tessera.optimize`, checkpointing plans and `graph.profile(step_fn)` as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from ..graph.rewrites import Rewrite
from ..units import format_bytes, format_duration, format_energy, format_si

if TYPE_CHECKING:
    from ..analyze.graph_profile import GraphProfile, OpProfile
    from ..rewrite.checkpoint import BlockPlan, CheckpointPlan
    from ..rewrite.checkpoint_search import CheckpointSetting
    from ..rewrite.optimize import Optimized
    from ..rewrite.use_report import UseReport, VariantInUse
    from ..rewrite.variants import Variant

TOP = 20
"""Rewrites or operators that a text lists."""


def optimized_text(optimized: Optimized) -> str:
    """Return the candidates, every rewrite on one line, and their total."""
    if not optimized.chosen:
        return f"{type(optimized.original).__name__}: not optimized yet: the first call optimizes it"
    lines = [f"runs as: {optimized.chosen}"]
    lines += [use_line(optimized.in_use)] if optimized.in_use is not None else []
    lines += [_variant_line(variant, optimized.chosen) for variant in optimized.variants]
    if optimized.spent_s:
        lines.append(search_line(optimized.spent_s, optimized.spent_j, optimized.paid_after_calls))
    shown, trace = optimized.rewrites[:TOP], optimized.trace
    basis = trace.basis if trace is not None else "modelled"
    # A reason that is also a note is printed only there.
    once = [replace(r, why="") if r.why in optimized.notes else r for r in shown]
    lines += [f"  {rewrite_line(r, basis)}" for r in once]
    if len(optimized.rewrites) > TOP:
        lines.append(f"  ... and {len(optimized.rewrites) - TOP} more")
    if trace is not None and trace.before_j is not None and trace.after_j is not None:
        how = "timed, divided by the model" if trace.basis == "timed" else "modelled"
        lines.append(
            f"{how} on {trace.device}: {format_energy(trace.before_j)} -> {format_energy(trace.after_j)}, "
            f"{format_duration(trace.before_s or 0.0)} -> {format_duration(trace.after_s or 0.0)}, "
            f"{trace.launches_before} -> {trace.launches_after} launches"
        )
    lines += [f"undone: {rewrite_line(rewrite)}" for rewrite in optimized.undone]
    lines += [f"note: {note}" for note in optimized.notes]
    return "\n".join(lines)


def use_line(report: UseReport) -> str:
    """Return whether the choice kept its promise in the user's loop, and what runs now."""
    if report.outcome == "shared" or not report.variants:
        return "in use: not compared with its trial, since several threads call it"
    chosen = report.variants[0]
    if report.outcome == "confirmed":
        return f"in use: as promised, {_figures_in_use(chosen)}"
    later = "; to be compared again when shapes come again: most were new" if report.provisional else ""
    if not report.fell_back:
        return f"in use: still the best of {len(report.variants)}, {_figures_in_use(chosen)}{later}"
    now = next(v for v in report.variants if v.variant == report.runs)
    took, takes = _figures_in_use(chosen), _figures_in_use(now)
    return f"in use: {chosen.variant} took {took}; {now.variant} runs now: {takes}{later}"


def _figures_in_use(used: VariantInUse) -> str:
    parts = [format_duration(used.time_s)] + ([] if used.energy_j is None else [format_energy(used.energy_j)])
    if used.estimated:
        parts[0] += " by its trial, since each call here had to get memory"
    elif used.promised_s is not None:
        parts.append(f"promised {format_duration(used.promised_s)}")
    again = [(used.compilations, "compiled again"), (used.recordings, "graphs recorded again")]
    parts += [f"{count} {what} in {used.calls} calls" for count, what in again if count]
    return ", ".join(parts)


def search_line(spent_s: float, spent_j: float | None, paid_after_calls: int | None) -> str:
    """Return what the search took, and after how many calls it has paid for itself."""
    joules = "" if spent_j is None else f" and {format_energy(spent_j)}"
    paid = "nothing is saved" if paid_after_calls is None else f"paid after {paid_after_calls:,} calls"
    return f"the search took {format_duration(spent_s)}{joules}: {paid}"


def rewrite_line(rewrite: Rewrite, usual: str = "modelled") -> str:
    """Return a rewrite's line: "rule: before -> after, xN", what it saved, by whom, and an unusual basis."""
    parts = [f"{rewrite.rule}: {rewrite.before} -> {rewrite.after}"]
    if rewrite.times > 1:
        parts.append(f"x{rewrite.times}")
    savings = []
    if rewrite.saved_bytes:
        savings.append(_format_signed(rewrite.saved_bytes, format_bytes))
    if rewrite.saved_j:
        error = f" ± {format_energy(rewrite.saved_error_j)}" if rewrite.saved_error_j else ""
        savings.append(f"{_format_signed(rewrite.saved_j, format_energy)}{error}")
    if rewrite.saved_s:
        savings.append(_format_signed(rewrite.saved_s, format_duration))
    if savings:
        parts.append(f"saves {', '.join(savings)}")
    where = f" on {rewrite.device}" if rewrite.device and rewrite.basis == "modelled" else ""
    tail = f"[{rewrite.by}{', ' + rewrite.basis + where if rewrite.basis != usual else ''}]"
    why = f" ({rewrite.why})" if rewrite.why else ""
    return "  ".join([*parts, tail]) + why


def _format_signed(value: float, form: Callable[[float], str]) -> str:
    return f"-{form(-value)}" if value < 0 else form(value)


def _variant_line(variant: Variant, chosen: str) -> str:
    mark = "*" if variant.name == chosen else " "
    parts = [f" {mark} {variant.name:<28}"]
    if variant.time_s is not None:
        parts.append(format_duration(variant.time_s))
    if variant.energy_j is not None:
        parts.append(
            f"{format_energy(variant.energy_j)}" + (f" ± {format_energy(variant.error_j)}" if variant.error_j else "")
        )
    if variant.compile_s:
        parts.append(f"compiled in {format_duration(variant.compile_s)}")
    if variant.comparison is not None and variant.compile_s:
        parts.append(f"error {variant.comparison.relative:.1e} of {variant.comparison.allowed:.0e}")
    if variant.unsettled:
        parts.append("it compiles or records again with other data")
    if variant.why:
        parts.append(variant.why)
    return "  ".join(parts)


# -- checkpointing --------------------------------------------------------------------------------------------------


def checkpoint_text(plan: CheckpointPlan) -> str:
    """Return a few lines: the conclusion, the three settings, the blocks."""
    none, chosen = plan.settings["none"], plan.settings["chosen"]
    lines = [f"{plan.name} on {plan.device}: {_conclusion(none, chosen)}", ""]
    lines.append(f"  {'':8} {'energy':>12} {'time':>10} {'peak':>10}  recomputed  in part")
    lines += [
        f"  {s.name:8} {format_energy(s.energy_j):>12} {format_duration(s.time_s):>10} "
        f"{format_bytes(s.peak_bytes):>10}  {s.recomputed:>10}  {s.selective:>7}"
        for s in plan.settings.values()
    ]
    lines.append("")
    for _, group in groupby(plan.blocks, key=lambda b: (b.choice, round(b.saved_bytes))):
        same = list(group)
        name = same[0].name if len(same) == 1 else f"{same[0].name} .. {same[-1].name}"
        lines.append(f"  {name:30} {same[0].choice.name:10} {_effect(same)}")
    if plan.blocks:
        lines.append(f"  {plan.blocks[0].name}: {plan.blocks[0].why}")
    lines += [f"  note: {note}" for note in plan.notes]
    lines.append("  predicted, for one step; the forward pass writes a block's bytes in any case")
    return "\n".join(lines)


def _conclusion(none: CheckpointSetting, chosen: CheckpointSetting) -> str:
    if not chosen.recomputed and not chosen.selective:
        return "keep everything"
    saved = none.peak_bytes - chosen.peak_bytes
    more = chosen.energy_j / none.energy_j - 1.0
    slower = chosen.time_s / none.time_s - 1.0
    return f"{format_bytes(saved)} less at the peak for {more:+.1%} joules and {slower:+.1%} time"


def _effect(same: Sequence[BlockPlan]) -> str:
    if same[0].choice.name == "keep":
        return f"x{len(same)}"
    freed = format_bytes(sum(b.saved_bytes for b in same))
    joules, seconds = sum(b.spent_j for b in same), sum(b.spent_s for b in same)
    saves = f", saves {len(same[0].choice.saves)} operators" if same[0].choice.saves else ""
    return f"x{len(same)}  frees {freed} for {format_energy(joules)} and {format_duration(seconds)}{saves}"


# -- graph.profile --------------------------------------------------------------------------------------------------


def graph_profile_text(profile: GraphProfile) -> str:
    """Return the longest operators, aligned, then a step, then what was fused."""
    shown, rest = profile.rows[:TOP], profile.rows[TOP:]
    width = max((len(r.label) for r in shown), default=0)
    lines = [_operator_line(r, width) for r in shown]
    if rest:
        lines.append(f"... and {len(rest)} more, {format_duration(sum(r.total_s for r in rest))} together")
    if profile.step_s > 0:
        joules = ""
        if profile.step_j is not None and profile.step_error_j is not None:
            basis = "" if profile.basis == "measured" else f" ({profile.basis})"
            joules = f", {format_energy(profile.step_j)} ± {format_energy(profile.step_error_j)}{basis}"
        lines.append(f"one step: {format_duration(profile.step_s)}{joules}, mean of {profile.steps}")
    # The step was measured on this machine's chip; each saving names the chip it is modelled for.
    lines += [f"rewritten: {rewrite_line(rewrite, usual='')}" for rewrite in profile.rewrites]
    lines += [f"note: {note}" for note in profile.notes]
    return "\n".join(lines)


def _operator_line(row: OpProfile, width: int) -> str:
    parts = [f"{row.label:<{width}}", f"latency={format_duration(row.latency_s)}"]
    if row.occupancy_pct is not None:
        parts.append(f"occupancy<={row.occupancy_pct:.0f}%")
    if row.bandwidth_bytes_per_s is not None:
        parts.append(f"bandwidth={format_si(row.bandwidth_bytes_per_s, 'B/s', 3)}")
    if row.tiles is not None:
        each = f" in {row.waves} waves, {format_duration(row.tile_latency_s)} each" if row.tile_latency_s else ""
        parts.append(f"tiles={row.tiles}{each}")
    if row.dram_gbps is not None:
        parts.append(f"HBM={row.dram_gbps:.0f} GB/s")
    if row.energy_j is not None:
        parts.append(f"{format_energy(row.energy_j / row.calls)}/call")
    parts.append(f"x{row.calls}")
    return "  ".join(parts)
