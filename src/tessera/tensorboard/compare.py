"""Runs side by side: the totals of each, and how the others differ from the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..analyze.answer import Answer
from ..analyze.kernel_names import CATEGORIES
from ..report.predict import format_rate
from ..units import format_duration, format_energy_error, format_error, format_share

Value = tuple[str, float, float]  # text, value, half-width of its 90% interval (0 if there is none)


def compare_runs(runs: Sequence[tuple[str, Answer]]) -> dict[str, Any]:
    """Rows of figures, one column per run; the others are compared with the first."""
    columns = [_values(answer) for _, answer in runs]
    titles = list(dict.fromkeys(title for values in columns for title in values))
    rows = []
    for title in titles:
        cells = [values.get(title) for values in columns]
        rows.append({"title": title, "cells": [_cell(title, cell, cells[0], i) for i, cell in enumerate(cells)]})
    return {
        "runs": [
            {
                "run": name,
                "name": answer.name,
                "device": answer.device,
                "basis": answer.basis,
                "parts": [[p.name, p.share, _colour(p.name)] for p in answer.parts],
            }
            for name, answer in runs
        ],
        "rows": rows,
    }


def _values(answer: Answer) -> dict[str, Value]:
    whole = answer.whole
    energy = format_energy_error(whole.energy_j, whole.error_j)
    out: dict[str, Value] = {"energy": (energy, whole.energy_j, whole.error_j)}
    if whole.power_w is not None:
        error = whole.error_w or 0.0
        out["mean power"] = (format_error(whole.power_w, error, "W"), whole.power_w, error)
    if answer.peak_w is not None:
        out["peak power"] = (f"{answer.peak_w:.0f} W", answer.peak_w, 0.0)
    out["time"] = (format_duration(whole.time_s), whole.time_s, 0.0)
    for per in answer.per_work:
        out[f"per {per.unit}"] = (format_energy_error(per.energy_j, per.error_j), per.energy_j, per.error_j)
    for per in answer.per_work:
        rate = per.rate_per_s
        out[f"{per.unit}s/s"] = (format_rate(rate), rate, 0.0)
    if answer.idle_share is not None and answer.idle_j is not None:
        idle = f"{format_energy_error(answer.idle_j, answer.idle_error_j)} ({format_share(answer.idle_share)})"
        out["idle"] = (idle, answer.idle_j, answer.idle_error_j or 0.0)
    return out


def _cell(title: str, cell: Value | None, first: Value | None, place: int) -> dict[str, Any] | None:
    if cell is None:
        return None
    text, value, error = cell
    out: dict[str, Any] = {"text": text}
    if place and first is not None and math.isfinite(value) and math.isfinite(first[1]) and first[1] > 0:
        change = value / first[1] - 1
        spread = math.hypot(*(e for e in (error, first[2]) if math.isfinite(e)), 0.0)
        same = abs(value - first[1]) <= max(spread, 0.0005 * first[1])
        out |= {"change": f"{change:+.1%}", "same": same, "better": (change > 0) == title.endswith("/s")}
        if title == "peak power":  # neither is better
            out["better"] = None
    return out


def _colour(part: str) -> int:
    """The number of a category's colour, as on the page; -1 is idle's."""
    return CATEGORIES.index(part) if part in CATEGORIES else -1
