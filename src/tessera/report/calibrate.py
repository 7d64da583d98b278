"""`tessera calibrate` in the terminal: the factors, the points they come from, the watts, and where it is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..estimate.calibrate import CalibrationResult, CalibrationRow
from ..estimate.calibration import LIMIT, Calibration, Scale, Watts
from ..units import format_duration


def print_calibration(found: CalibrationResult, path: Path | None, console: Console) -> None:
    """The conclusion first, then what it rests on, then what to type next."""
    calibration = found.calibration
    console.print(Text(_headline(found), style="bold"), soft_wrap=True)
    software = f"driver {calibration.driver or 'unknown'}, torch {calibration.torch}"
    console.print(Text(f"{calibration.board}, {software}, {calibration.host_cpu}"))
    console.print()
    console.print(_factors(calibration))
    console.print(Text("measured / predicted: the mean of the points, and what of it is used", style="dim"))
    console.print(Text("±: the 90% interval that leaves; -: it stays as it was predicted", style="dim"))
    console.print()
    console.print(_watts(calibration))
    console.print()
    console.print(_points(found.rows))
    console.print(
        Text("measured / predicted, of each kernel alone; time and energy before calibration, time after", style="dim")
    )
    for note in calibration.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    console.print()
    if path is None:
        console.print(Text("dry run: nothing was written", style="yellow"))
        return
    console.print(Text(f"written to {path}"), soft_wrap=True)
    console.print(Text(f"next: tessera predict resnet18 --on {calibration.device}", style="cyan"), soft_wrap=True)


def typical(ratios: Sequence[float]) -> float:
    """How far a ratio typically is from 1, as a share: the mean of what it is off by."""
    return sum(abs(r - 1.0) for r in ratios) / len(ratios) if ratios else math.nan


def _headline(found: CalibrationResult) -> str:
    kernels = [row for row in found.rows if row.launch == "graph" and row.group != LIMIT]
    before, after = (typical([getattr(row, name) for row in kernels]) for name in ("ratio", "ratio_after"))
    host = found.calibration.host_scale
    launches = f"; the host launches in {host.factor:.2f} x the time predicted" if host is not None else ""
    return (
        f"{found.calibration.device} calibrated in {found.seconds:.0f} s: time of {len(kernels)} kernels off by "
        f"{before:.1%} before, {after:.1%} after{launches}"
    )


def _factors(calibration: Calibration) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("group", "points", "time", "used", "±", "energy", "used", "±"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for group in sorted({*calibration.time_scale, *calibration.energy_scale}):
        time = calibration.time_scale.get(group)
        points = str(time.points) if time is not None else "-"
        table.add_row(group, points, *_scale(time), *_scale(calibration.energy_scale.get(group)))
    if calibration.host_scale is not None:
        table.add_row("host", str(calibration.host_scale.points), *_scale(calibration.host_scale), *_scale(None))
    return table


def _scale(scale: Scale | None) -> tuple[str, str, str]:
    if scale is None:
        return "-", "-", "-"
    mean = "-" if scale.mean is None else f"{scale.mean:.3f}"
    return mean, f"{scale.factor:.3f}", "-" if scale.spread is None else f"{scale.spread:.0%}"


def _watts(calibration: Calibration) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    rows = (
        ("idle", calibration.idle_w),
        ("idle, context", calibration.idle_context_w),
        ("static", calibration.static_w),
        ("limit", calibration.limit_w),
    )
    for name, watts in rows:
        table.add_row(name, _power(watts), Text(watts.how, style="dim"))
    return table


def _power(watts: Watts) -> str:
    return "-" if watts.value is None else f"{watts.value:.1f} W"


def _points(rows: Sequence[CalibrationRow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("point", "predicted", "measured", "time", "energy", "after"):
        table.add_column(name, justify="left" if name == "point" else "right")
    for row in rows:
        energy = "-" if row.measured_j is None else f"{row.measured_j / row.predicted_j:.3f}"
        table.add_row(
            row.name,
            format_duration(row.predicted_s),
            format_duration(row.measured_s),
            f"{row.ratio:.3f}",
            energy,
            f"{row.ratio_after:.3f}",
        )
    return table
