"""`tessera.optimize` as text: the variants tried, every rewrite on one line, what they add up to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..graph.rewrites import Rewrite
from ..units import format_bytes, format_duration, format_energy

if TYPE_CHECKING:
    from ..rewrite.optimize import Optimized
    from ..rewrite.variants import Variant


def text(optimized: Optimized, top: int = 20) -> str:
    """The whole report."""
    if not optimized.chosen:
        return f"{type(optimized.original).__name__}: not optimized yet: the first call does it"
    lines = [f"runs as: {optimized.chosen}"]
    lines += [_format_variant(variant, optimized.chosen) for variant in optimized.variants]
    shown, trace = optimized.rewrites[:top], optimized.trace
    usual = trace.basis if trace is not None else "modelled"
    # A reason that is a note as well stands there, once.
    lines += [f"  {line(replace(r, why='') if r.why in optimized.notes else r, usual)}" for r in shown]
    if len(optimized.rewrites) > top:
        lines.append(f"  ... and {len(optimized.rewrites) - top} more")
    if trace is not None and trace.before_j is not None and trace.after_j is not None:
        how = "timed, shared out by the model" if trace.basis == "timed" else "modelled"
        lines.append(
            f"{how} on {trace.device}: {format_energy(trace.before_j)} -> {format_energy(trace.after_j)}, "
            f"{format_duration(trace.before_s or 0.0)} -> {format_duration(trace.after_s or 0.0)}, "
            f"{trace.launches_before} -> {trace.launches_after} launches"
        )
    lines += [f"undone: {line(rewrite)}" for rewrite in optimized.undone]
    lines += [f"note: {note}" for note in optimized.notes]
    return "\n".join(lines)


def line(rewrite: Rewrite, usual: str = "modelled") -> str:
    """rule: before -> after, xN, bytes and joules saved (by whom, and how that is known where it is not as usual)."""
    parts = [f"{rewrite.rule}: {rewrite.before} -> {rewrite.after}"]
    if rewrite.times > 1:
        parts.append(f"x{rewrite.times}")
    saved = []
    if rewrite.saved_bytes:
        saved.append(_signed(rewrite.saved_bytes, format_bytes))
    if rewrite.saved_j:
        error = f" ± {format_energy(rewrite.saved_error_j)}" if rewrite.saved_error_j else ""
        saved.append(f"{_signed(rewrite.saved_j, format_energy)}{error}")
    if rewrite.saved_s:
        saved.append(_signed(rewrite.saved_s, format_duration))
    if saved:
        parts.append(f"saves {', '.join(saved)}")
    where = f" on {rewrite.device}" if rewrite.device and rewrite.basis == "modelled" else ""
    tail = f"[{rewrite.by}{', ' + rewrite.basis + where if rewrite.basis != usual else ''}]"
    why = f" ({rewrite.why})" if rewrite.why else ""
    return "  ".join([*parts, tail]) + why


def _signed(value: float, form: object) -> str:
    assert callable(form)
    return f"-{form(-value)}" if value < 0 else str(form(value))


def _format_variant(variant: Variant, chosen: str) -> str:
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
    if variant.why:
        parts.append(variant.why)
    return "  ".join(parts)
