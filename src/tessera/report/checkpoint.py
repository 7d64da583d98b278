"""A checkpointing plan as text: the settings beside each other, then what each kind of block does and why."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ..units import format_bytes, format_duration, format_energy

if TYPE_CHECKING:
    from ..rewrite.checkpoint import BlockPlan, CheckpointPlan
    from ..rewrite.trial import Setting


def text(plan: CheckpointPlan) -> str:
    """A few lines: the conclusion, the three settings, the blocks."""
    none, chosen = plan.settings["none"], plan.settings["chosen"]
    lines = [f"{plan.name} on {plan.device}: {_conclusion(plan, none, chosen)}", ""]
    lines.append(f"  {'':8} {'energy':>12} {'time':>10} {'peak':>10}  recomputed  in part")
    lines += [f"  {_row(s)}" for s in plan.settings.values()]
    lines.append("")
    for same in _runs(plan.blocks):
        lines.append(f"  {_name(same):30} {same[0].way.name:10} {_effect(same)}")
    if plan.blocks:
        lines.append(f"  {plan.blocks[0].name}: {plan.blocks[0].why}")
    lines += [f"  note: {note}" for note in plan.notes]
    lines.append("  predicted, for one step; forward writes a block's bytes whether they are kept or not")
    return "\n".join(lines)


def _conclusion(plan: CheckpointPlan, none: Setting, chosen: Setting) -> str:
    if not chosen.recomputed and not chosen.selective:
        return "keep everything"
    saved = none.peak_bytes - chosen.peak_bytes
    more = chosen.energy_j / none.energy_j - 1.0
    slower = chosen.latency_s / none.latency_s - 1.0
    return f"{format_bytes(saved)} less at the peak for {more:+.1%} joules and {slower:+.1%} time"


def _row(s: Setting) -> str:
    return (
        f"{s.name:8} {format_energy(s.energy_j):>12} {format_duration(s.latency_s):>10} "
        f"{format_bytes(s.peak_bytes):>10}  {s.recomputed:>10}  {s.selective:>7}"
    )


def _runs(blocks: Sequence[BlockPlan]) -> list[list[BlockPlan]]:
    """Neighbours that go the same way."""
    return [list(group) for _, group in groupby(blocks, key=lambda b: (b.way, round(b.saved_bytes)))]


def _name(same: Sequence[BlockPlan]) -> str:
    return same[0].name if len(same) == 1 else f"{same[0].name} .. {same[-1].name}"


def _effect(same: Sequence[BlockPlan]) -> str:
    if same[0].way.name == "keep":
        return f"x{len(same)}"
    freed = format_bytes(sum(b.saved_bytes for b in same))
    joules, seconds = sum(b.spent_j for b in same), sum(b.spent_s for b in same)
    saves = f", saves {len(same[0].way.saves)} operators" if same[0].way.saves else ""
    return f"x{len(same)}  frees {freed} for {format_energy(joules)} and {format_duration(seconds)}{saves}"
