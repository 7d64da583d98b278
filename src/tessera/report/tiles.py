"""`graph.profile(step_fn)` as text: one line an operator, then what was fused."""

from __future__ import annotations

from ..analyze.graph_profile import GraphProfile, OpProfile
from ..units import format_duration, format_energy
from .optimize import line


def text(found: GraphProfile, top: int = 20) -> str:
    """The longest operators, aligned."""
    shown = found.rows[:top]
    width = max((len(r.label) for r in shown), default=0)
    lines = [_line(r, width) for r in shown]
    rest = found.rows[top:]
    if rest:
        lines.append(f"... and {len(rest)} more, {format_duration(sum(r.total_s for r in rest))} in all")
    if found.step_s > 0:
        joules = ""
        if found.step_j is not None and found.step_error_j is not None:
            marked = "" if found.basis == "measured" else f" ({found.basis})"
            joules = f", {format_energy(found.step_j)} ± {format_energy(found.step_error_j)}{marked}"
        lines.append(f"a step: {format_duration(found.step_s)}{joules}, mean of {found.steps}")
    # A step's joules are of the chip at hand: whose the savings are, each line says.
    lines += [f"rewritten: {line(rewrite, usual='')}" for rewrite in found.rewrites]
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines)


def _line(row: OpProfile, width: int) -> str:
    parts = [f"{row.label:<{width}}", f"latency={format_duration(row.latency_s)}"]
    if row.occupancy_pct is not None:
        parts.append(f"occupancy<={row.occupancy_pct:.0f}%")
    if row.bandwidth_bytes_per_s is not None:
        parts.append(f"bandwidth={_rate(row.bandwidth_bytes_per_s)}")
    if row.tiles is not None:
        each = f" in {row.waves} waves, {format_duration(row.tile_latency_s)} each" if row.tile_latency_s else ""
        parts.append(f"tiles={row.tiles}{each}")
    if row.dram_gbps is not None:
        parts.append(f"HBM={row.dram_gbps:.0f} GB/s")
    if row.energy_j is not None:
        parts.append(f"{format_energy(row.energy_j / row.calls)}/call")
    parts.append(f"x{row.calls}")
    return "  ".join(parts)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e12:.3g} TB/s" if bytes_per_s >= 1e12 else f"{bytes_per_s / 1e9:.3g} GB/s"
