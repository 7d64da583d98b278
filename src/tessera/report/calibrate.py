"""`tessera calibrate` in the terminal: the factors, the points they come from, the watts, and the file written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..estimate.calibrate import CalibrationResult, CalibrationRow
from ..estimate.calibration import LIMIT, Calibration, Scale
from ..units import format_duration
from .console import Console, label_table, open_table


def print_calibration(result: CalibrationResult, path: Path | None, console: Console) -> None:
    """Print the conclusion first, then the evidence, then what to type next."""
    calibration = result.calibration
    console.print(Text(_headline(result), style="bold"), soft_wrap=True)
    software = f"driver {calibration.driver or 'unknown'}, torch {calibration.torch}"
    console.print(Text(f"{calibration.board}, {software}, {calibration.host_cpu}"))
    console.print()
    console.print(_factors(calibration))
    console.print(Text("measured / predicted: the mean of the points, and the factor that is used", style="dim"))
    console.print(Text("±: the 90% interval after calibration; -: the prediction is unchanged", style="dim"))
    console.print()
    console.print(_watts(calibration))
    console.print()
    console.print(_points(result.rows))
    console.print(
        Text("measured / predicted for each kernel alone: time and energy before calibration, time after", style="dim")
    )
    for note in calibration.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    console.print()
    if path is None:
        console.print(Text("dry run: nothing was written", style="yellow"))
        return
    console.print(Text(f"written to {path}"), soft_wrap=True)
    console.print(Text(f"next: tessera predict resnet18 --on {calibration.device}", style="cyan"), soft_wrap=True)


def mean_error(ratios: Sequence[float]) -> float:
    """Return the mean distance of the ratios from 1."""
    return sum(abs(r - 1.0) for r in ratios) / len(ratios) if ratios else math.nan


def _headline(result: CalibrationResult) -> str:
    kernels = [row for row in result.rows if row.launch == "graph" and row.group != LIMIT]
    before, after = (mean_error([getattr(row, name) for row in kernels]) for name in ("ratio", "ratio_after"))
    host = result.calibration.host_scale
    launches = f"; the host launches in {host.factor:.2f} times the predicted time" if host is not None else ""
    return (
        f"{result.calibration.device} calibrated in {result.seconds:.0f} s: predicted times of {len(kernels)} "
        f"kernels were off by {before:.1%} before, {after:.1%} after{launches}"
    )


def _factors(calibration: Calibration) -> Table:
    table = open_table("group", "points", "time", "used", "±", "energy", "used", "±")
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
    table = label_table()
    rows = {"idle": calibration.idle_w, "idle, context": calibration.idle_context_w, "static": calibration.static_w}
    for name, watts in {**rows, "limit": calibration.limit_w}.items():
        power = "-" if watts.value is None else f"{watts.value:.1f} W"
        table.add_row(name, Text(f"{power:<8} ").append(watts.how, style="dim"))
    return table


def _points(rows: Sequence[CalibrationRow]) -> Table:
    table = open_table("point", "predicted", "measured", "time", "energy", "after")
    for row in rows:
        energy = "-" if row.measured_j is None else f"{row.measured_j / row.predicted_j:.3f}"
        times = (format_duration(row.predicted_s), format_duration(row.measured_s))
        table.add_row(row.name, *times, f"{row.ratio:.3f}", energy, f"{row.ratio_after:.3f}")
    return table
