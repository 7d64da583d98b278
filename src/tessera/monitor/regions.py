"""The scopes of a program by name, and how they get to `tessera measure`: a JSON file per process, at its exit."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..joules import sum_windows
from ..schema import SCHEMA_VERSION, Energy, RegionEnergy

if TYPE_CHECKING:
    from .core import Monitor, Window

REGIONS_VARIABLE = "TESSERA_REGIONS_DIR"
"""Environment variable with the folder; set by `tessera measure` for the command it runs."""
MAX_RECENT = 256
"""Stretches of a region that a window which ends later may still overlap: a slow request beside many quick ones."""


class RegionTotal:
    """All windows of one name as they settle, in any order; a moment that lies in several counts once.

    `recent` has the last stretches of time that they cover, in order. The joules of earlier ones are in `_older`, which
    ends with `_last_older`: of a window that reaches back before that, only the rest after it is added.
    """

    __slots__ = ("_last_older", "_older", "calls", "end_ns", "overlaps", "recent", "start_ns")

    def __init__(self, window: Window) -> None:
        self.calls = 0
        self.overlaps = False
        self.start_ns = window.start.host_ns
        self.end_ns = window.end_ns
        self.recent: list[Window] = []
        self._older: list[Energy] = []
        self._last_older: Window | None = None

    def add(self, window: Window, monitor: Monitor) -> None:
        """Count a settled window, and of its time what no other has counted."""
        self.calls += 1
        self.overlaps |= window.overlaps
        self.start_ns = min(self.start_ns, window.start.host_ns)
        self.end_ns = max(self.end_ns, window.end_ns)
        older = self._last_older
        if older is not None and window.start.host_ns < older.end_ns:
            self.overlaps = True
            if window.end_ns <= older.end_ns:
                return
            window = window.continue_after(older, monitor.sampler)
        later = []
        while self.recent and self.recent[-1].end_ns > window.start.host_ns:
            last = self.recent.pop()
            if last.start.host_ns >= window.end_ns:
                later.append(last)
            else:
                self.overlaps = True
                window = window.join(last, monitor.sampler)
        self.recent += [window, *reversed(later)]
        if len(self.recent) > MAX_RECENT:
            self._last_older = self.recent.pop(0)
            self._older = [sum_windows([*self._older, monitor.total(self._last_older)])]

    def energy(self, monitor: Monitor) -> Energy:
        """The joules of all stretches so far."""
        return sum_windows([*self._older, *map(monitor.total, self.recent)])


class RegionsFile(msgspec.Struct, kw_only=True):
    """The regions of one process."""

    schema_version: int = SCHEMA_VERSION
    regions: list[RegionEnergy]


def write_regions(folder: Path, regions: Sequence[RegionEnergy]) -> None:
    """Write this process's regions, unless the folder was removed by its reader."""
    if not regions or not folder.is_dir():
        return
    (folder / f"{os.getpid()}.json").write_bytes(msgspec.json.encode(RegionsFile(regions=list(regions))))


def read_regions(folder: Path) -> list[RegionEnergy]:
    """All regions of all processes, those of one name together, the most joules first."""
    regions: list[RegionEnergy] = []
    for path in sorted(folder.glob("*.json")):
        try:
            regions.extend(_decode(path.read_bytes()).regions)
        except (msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # a process that was killed while writing: the rest still counts
    return merge_regions(regions)


def _decode(data: bytes) -> RegionsFile:
    """JSON has no NaN: joules that are not known were written as null."""
    raw = msgspec.json.decode(data)
    for region in raw["regions"]:
        for key in ("energy_j", "error_j"):
            if region["energy"][key] is None:
                region["energy"][key] = math.nan
    return msgspec.convert(raw, RegionsFile)


def merge_regions(regions: Iterable[RegionEnergy]) -> list[RegionEnergy]:
    """Merge regions of one name, from processes that may have run side by side.

    Every process of a node measures the same boards, so the ranks of one job must not be added up: of regions that
    overlap in time (all processes share the monotonic clock) the one with the most joules stands for all. Regions one
    after the other are added.
    """
    by_name: dict[str, list[RegionEnergy]] = {}
    for region in sorted(regions, key=lambda r: r.start_ns):
        apart = by_name.setdefault(region.name, [])
        if apart and region.start_ns < apart[-1].end_ns:
            end_ns = max(apart[-1].end_ns, region.end_ns)
            apart[-1] = dataclasses.replace(sort_regions([apart[-1], region])[0], end_ns=end_ns)
        else:
            apart.append(region)
    return sort_regions([_add_up(name, parts) for name, parts in by_name.items()])


def sort_regions(regions: Sequence[RegionEnergy]) -> list[RegionEnergy]:
    """The most joules first; unknown ones last."""
    return sorted(regions, key=lambda r: math.inf if math.isnan(r.energy.energy_j) else -r.energy.energy_j)


def _add_up(name: str, parts: Sequence[RegionEnergy]) -> RegionEnergy:
    return RegionEnergy(
        name=name,
        calls=sum(p.calls for p in parts),
        energy=sum_windows([p.energy for p in parts]),
        start_ns=parts[0].start_ns,
        end_ns=max(p.end_ns for p in parts),
        overlaps=any(p.overlaps for p in parts),
    )
