"""Lists the figures for loggers of experiments (W&B, MLflow): joules, watts, seconds, joules per unit of work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import find_cost
from ..errors import ArgumentError
from ..monitor.scope import EnergyScope
from ..recording import Recording
from ..schema import Energy, EnergyReport

if TYPE_CHECKING:
    from ..attribute.table import EnergyRow

Source = EnergyScope | EnergyReport | Energy | Recording | str | Path
"""What has joules: a closed scope, a report, a recording or the path of a run file."""


def list_figures(source: Source, prefix: str = "energy/") -> dict[str, float]:
    """Return names and values to log, without unknown ones. With the user's factors also kWh, cost and gCO2e."""
    if isinstance(source, (str, Path, Recording)):
        figures = _of_recording(source)
    elif isinstance(source, (EnergyScope, EnergyReport)):
        report = source.report() if isinstance(source, EnergyScope) else source
        figures = _of_energy(report.total) | {f"j_per_{unit}": joules for unit, joules, _ in report.per_work()}
    elif isinstance(source, Energy):
        figures = _of_energy(source)
    else:
        raise ArgumentError(
            f"{type(source).__name__} has no joules to log",
            fix="give an energy_scope, an EnergyReport, a Recording or the path of a run file",
        )
    cost = find_cost(figures["energy_j"]) if figures["energy_j"] is not None else None
    extra = {"kwh": cost.kwh, "cost": cost.cost, "gco2e": cost.gco2e} if cost else {}
    known = {k: v for k, v in {**figures, **extra}.items() if v is not None and math.isfinite(v)}
    return {f"{prefix}{name}": value for name, value in known.items()}


def list_steps(source: Source, prefix: str = "energy/") -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the joules, watts and seconds of each step of a recording, by its number; nothing for other sources."""
    if not isinstance(source, (str, Path, Recording)):
        return
    rows: list[EnergyRow] = list(_open(source).energy().steps)
    for number, row in enumerate(rows):
        if not math.isnan(row.energy_j):
            time_s = row.wall_s or row.time_s
            power = {f"{prefix}step_power_w": row.energy_j / time_s} if time_s > 0 else {}
            yield number, {f"{prefix}step_j": row.energy_j, f"{prefix}step_s": time_s, **power}


def _of_energy(energy: Energy) -> dict[str, float | None]:
    return {
        "energy_j": energy.energy_j,
        "error_j": energy.error_j,
        "power_w": energy.power_w,
        "time_s": energy.time_s,
    }


def _of_recording(source: str | Path | Recording) -> dict[str, float | None]:
    from ..analyze.answer import answer

    found = answer(_open(source))
    whole = found.whole
    figures = {"energy_j": whole.energy_j, "error_j": whole.error_j, "power_w": whole.power_w, "time_s": whole.time_s}
    return figures | {f"j_per_{p.unit}": p.energy_j for p in found.per_work}


def _open(source: str | Path | Recording) -> Recording:
    from ..profile.open_recording import open_recording

    return open_recording(source)
