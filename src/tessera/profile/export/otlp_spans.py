"""Regions and steps of a run as spans: nested as they lay in each other, with the joules drawn meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...record import CODE
from ...schema import Energy
from ...timeline.columns import NONE
from ...trace import PowerTrace

if TYPE_CHECKING:
    from ...recording import Facts, Recording


@dataclass(frozen=True, slots=True)
class Span:
    """One span; `parent` is the place of the one it lies in."""

    name: str
    start_ns: int
    end_ns: int
    parent: int | None
    attributes: Mapping[str, Any]


def spans(recording: Recording, limit: int) -> tuple[list[Span], int]:
    """The run itself and its regions, outer before inner; the longest where there are too many, and how many not."""
    parts = [_regions(chunk) for chunk in recording.rows.chunks(("kind", "name", "start_ns", "end_ns", "thread"))]
    rows = np.concatenate(parts) if parts else np.zeros((0, 4), np.int64)
    left_out = max(len(rows) - limit, 0)
    if left_out:
        keep = np.argsort(rows[:, 1] - rows[:, 2], kind="stable")[:limit]
        rows = rows[keep]
    rows = rows[np.lexsort((-rows[:, 2], rows[:, 1]))]
    power, names, table = recording.power, recording.rows.names, recording.find_energy()
    attributed = {r.name: r for r in (*table.regions, *table.steps)} if table is not None else {}
    start_ns, end_ns = map(int, recording.span_ns)
    if len(rows):
        start_ns, end_ns = min(start_ns, int(rows[0, 1])), max(end_ns, int(rows[:, 2].max()))
    about: dict[str, Any] = _joules(power, start_ns, end_ns)
    if table is not None:
        about |= _finite({"tessera.energy_j": table.energy_j, "tessera.energy_error_j": table.error_j})
        about |= _finite({"tessera.idle_j": table.idle_j}) | {"tessera.basis": table.basis}
    made = [Span(service_name(recording.facts), start_ns, end_ns, None, about)]
    open_spans: dict[int, list[tuple[int, int]]] = {}
    for name, start, end, thread in rows.tolist():
        stack = open_spans.setdefault(thread, [])
        while stack and stack[-1][0] < end:
            stack.pop()
        attributes = _joules(power, start, end)
        if thread != NONE:
            attributes["thread.id"] = thread
        if (row := attributed.get(names[name])) is not None:
            attributes |= _finite({"tessera.attributed_j_per_call": row.j_per_call}) | {"tessera.calls": row.calls}
        made.append(Span(names[name], start, end, stack[-1][1] if stack else 0, attributes))
        stack.append((end, len(made) - 1))
    return made, left_out


def service_name(facts: Facts) -> str:
    """What the run is called in a collector."""
    return str(facts.meta.get("name") or (facts.path.stem if facts.path is not None else facts.name))


def _regions(chunk: Any) -> Any:
    these = np.flatnonzero((chunk["kind"] == CODE["region"]) & (chunk["end_ns"] >= chunk["start_ns"]))
    return np.stack([chunk[c][these] for c in ("name", "start_ns", "end_ns", "thread")], axis=1)


def _joules(power: PowerTrace | None, start_ns: int, end_ns: int) -> dict[str, Any]:
    """What the counted domains drew between two times; nothing where nobody measured."""
    if power is None or not power.is_counted:
        return {}
    energy: Energy = power.energy(None, start_ns, end_ns)
    figures = {
        "tessera.energy_j": energy.energy_j, "tessera.energy_error_j": energy.error_j,
        "tessera.power_w": energy.power_w, "tessera.coverage": energy.coverage,
    }  # fmt: skip
    known = _finite(figures)
    return known | {"tessera.basis": energy.basis} if "tessera.energy_j" in known else {}


def _finite(figures: Mapping[str, float | None]) -> dict[str, Any]:
    return {k: v for k, v in figures.items() if v is not None and math.isfinite(v)}
