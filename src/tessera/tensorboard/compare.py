"""Puts runs side by side: the totals of each, and how the others differ from the first, if they can be compared.

Totals are compared if both runs did the same work, by their steps; joules and watts if both are known in the same way.
Figures per step, per token or per second can always be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..analyze.answer import Answer
from ..analyze.kernel_names import CATEGORIES
from ..analyze.time_answer import TimeAnswer
from ..attribute.table import IDLE_NAMES
from ..report.predict import format_rate
from ..units import format_duration, format_energy_error, format_error, format_share

Value = tuple[str, float, float]  # text, value, half-width of its 90% interval (0 if there is none)
TOTALS = ("energy", "time", *IDLE_NAMES)
"""Figures that grow with the work done."""
TIMES = ("time", "compute", "communication alone", "idle time")
"""Figures that do not depend on how power is known."""


def compare_runs(runs: Sequence[tuple[str, Answer | TimeAnswer]]) -> dict[str, Any]:
    """Return rows of figures with one column per run; the others are compared with the first."""
    columns = [_values(answer) for _, answer in runs]
    answers = [answer for _, answer in runs]
    titles = list(dict.fromkeys(title for values in columns for title in values))
    rows = []
    for title in titles:
        cells = [values.get(title) for values in columns]
        with_first = [_is_comparable(title, answers[0], answer) for answer in answers]
        firsts = [cells[0] if fits else None for fits in with_first]
        rows.append({"title": title, "cells": [_cell(title, cell, firsts[i], i) for i, cell in enumerate(cells)]})
    described = [
        {
            "run": name,
            "name": answer.name,
            "device": answer.device,
            "basis": answer.basis if isinstance(answer, Answer) else "time only",
            "parts": [[part, share, _colour(part)] for part, share in _parts(answer)],
        }
        for name, answer in runs
    ]
    return {"runs": described, "rows": rows, "notes": _explain(runs)}


def _is_comparable(title: str, first: Answer | TimeAnswer, other: Answer | TimeAnswer) -> bool:
    if title in TOTALS and not _did_the_same(first, other):
        return False
    if title in TIMES or title.endswith("/s"):
        return True
    return isinstance(first, Answer) and isinstance(other, Answer) and first.basis == other.basis


def _did_the_same(first: Answer | TimeAnswer, other: Answer | TimeAnswer) -> bool:
    """Return whether two runs have the same number of steps; also true if neither has any."""
    return _count_steps(first) == _count_steps(other)


def _count_steps(answer: Answer | TimeAnswer) -> int:
    return (answer.whole.steps or 0) if isinstance(answer, Answer) else answer.steps


def _explain(runs: Sequence[tuple[str, Answer | TimeAnswer]]) -> list[str]:
    """Say why some changes are not shown."""
    if not runs:
        return []
    notes, (first_name, first) = [], runs[0]
    for name, answer in runs[1:]:
        if not _did_the_same(first, answer):
            counts = f"{_count_steps(first):,} and {_count_steps(answer):,} steps"
            notes.append(f"{first_name} and {name} have {counts}: their totals are not compared")
        if not _is_comparable("mean power", first, answer):
            notes.append(f"power of {first_name} and {name} is not known in the same way: joules are not compared")
        if answer.device != first.device:
            notes.append(f"{first_name} and {name} ran on different devices: {first.device} and {answer.device}")
    return notes


def _parts(answer: Answer | TimeAnswer) -> list[tuple[str, float]]:
    if isinstance(answer, Answer):
        return [(p.name, p.share) for p in answer.parts]
    whole_s = answer.device_s or sum(answer.parts.values()) or 1.0
    parts = [(name, seconds / whole_s) for name, seconds in answer.parts.items()]
    return [*parts, ("idle", answer.share("idle_s"))] if answer.on_device else parts


def _values(answer: Answer | TimeAnswer) -> dict[str, Value]:
    if isinstance(answer, TimeAnswer):
        return _time_values(answer)
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
        out[answer.idle_name] = (idle, answer.idle_j, answer.idle_error_j or 0.0)
    return out


def _time_values(answer: TimeAnswer) -> dict[str, Value]:
    """Return the figures of a trace without power."""
    out: dict[str, Value] = {"time": (format_duration(answer.time_s), answer.time_s, 0.0)}
    if answer.steps:
        rate = answer.steps / answer.time_s if answer.time_s > 0 else 0.0
        out["steps/s"] = (format_rate(rate), rate, 0.0)
    for key, title in (("compute_s", "compute"), ("communication_s", "communication alone"), ("idle_s", "idle time")):
        if answer.on_device:
            out[title] = (format_share(answer.share(key)), answer.share(key), 0.0)
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
        if title in ("peak power", "compute"):  # neither is better
            out["better"] = None
    return out


def _colour(part: str) -> int:
    """Return the number of a category's colour, as on the page; -1 is the colour of idle time."""
    return CATEGORIES.index(part) if part in CATEGORIES else -1
