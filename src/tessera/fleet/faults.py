"""Faults of a simulation: what fails, when, and for how long.

::

    faults:
      - {at: 20s, kind: node_lost, place: row1/rack2/node3}
      - {at: 30s, kind: sensor_lost, place: row1/rack1, for: 60s}
      - {at: 40s, kind: breaker_trip, place: row1/rack4}
      - {at: 50s, kind: cooling_lost, place: row1, for: 120s}
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, check_choice
from ..units import parse_duration, with_unit
from .facility import Facility
from .yaml_tables import Keys, build, list_tables, read_text

_LEVELS: dict[str, tuple[str, ...]] = {
    "node_lost": ("node",),
    "sensor_lost": ("node", "rack"),
    "breaker_trip": ("rack", "row"),
    "cooling_lost": ("row",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something fails at `at_s`. Sensors and cooling come back after `for_s`; nodes and breakers do not."""

    at_s: float
    kind: str
    place: str
    for_s: float = math.inf

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, _LEVELS)
        if not self.at_s >= 0 or not self.for_s > 0:
            raise ArgumentError("a fault begins at 0 s or later, and lasts longer than 0 s")

    def find(self, facility: Facility) -> tuple[str, int]:
        """Return the level and number of what fails."""
        level, number = facility.find_place(self.place)
        if level not in _LEVELS[self.kind]:
            raise ArgumentError(
                f"{self.kind} is of a {' or a '.join(_LEVELS[self.kind])}, and {self.place} is a {level}"
            )
        return level, number

    @property
    def end_s(self) -> float:
        """Return when what failed comes back; infinite if it stays lost."""
        return self.at_s + self.for_s if self.kind in ("sensor_lost", "cooling_lost") else math.inf

    def is_on(self, now_s: float) -> bool:
        """Return whether the fault is present now."""
        return self.at_s <= now_s < self.at_s + self.for_s


_duration = with_unit(parse_duration)
_KEYS: Keys = {
    "at": ("at_s", _duration),
    "kind": ("kind", read_text),
    "place": ("place", read_text),
    "for": ("for_s", _duration),
}


def read_faults(tables: Any, facility: Facility) -> list[Fault]:
    """Return the faults of a file, each checked against the facility."""
    found = list_tables(tables, "faults", "{at: 20s, kind: node_lost, place: row1/rack1/node1}")
    faults = [build(Fault, table, _KEYS, f"faults[{i}]") for i, table in enumerate(found, 1)]
    for fault in faults:
        fault.find(facility)
    return faults


def mark_differences(faults: list[Fault], facility: Facility) -> dict[str, dict[int, object]]:
    """Return what differs from its like, by level and number: for the tree of classes."""
    marks: dict[str, dict[int, object]] = {"node": {}, "rack": dict(facility.own_breakers), "row": {}}
    for i, fault in enumerate(faults):
        level, number = fault.find(facility)
        marks[level][number] = (marks[level].get(number), i)
    return marks
