"""The scopes of a program by name, and how `tessera measure` gets them: from a JSON file per process, at its exit."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..joules import sum_domains, sum_windows
from ..schema import SCHEMA_VERSION, Energy, RegionEnergy, Scope

if TYPE_CHECKING:
    from .core import Monitor, Window

REGIONS_VARIABLE = "TESSERA_REGIONS_DIR"
"""Environment variable with the folder; `tessera measure` sets it for the command it runs."""
MAX_RECENT = 256
"""Times of a region that a window which ends later may still overlap: a slow request beside many quick ones."""


class RegionTotal:
    """Adds up all windows of one name as they settle, in any order; a moment that lies in several counts once.

    `recent` has the last times that they cover, in order. The joules of earlier times are in `_older`, up to the end of
    `_last_older`: of a window that reaches back before that, only the part after it is added.
    """

    __slots__ = ("_last_older", "_older", "calls", "end_ns", "overlaps", "recent", "start_ns")

    def __init__(self, window: Window) -> None:
        self.calls = 0
        self.overlaps = False
        self.start_ns = window.start.host_ns
        self.end_ns = window.end_ns
        self.recent: list[Window] = []
        self._older: dict[Scope, Energy] = {}
        self._last_older: Window | None = None

    def add(self, window: Window, monitor: Monitor) -> None:
        """Count a settled window, and the part of its time that no other window has counted."""
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
            for scope, energy in monitor.total_by_scope(self._last_older).items():
                self._older[scope] = sum_windows([self._older[scope], energy] if scope in self._older else [energy])

    def stretches(self, monitor: Monitor) -> list[RegionStretch]:
        """Return the times that the passes cover; the first one combines all times that are not kept singly."""
        first, last = self.start_ns, self._last_older
        older = [] if last is None else [RegionStretch(start_ns=first, end_ns=last.end_ns, energies=self._older)]
        return older + [
            RegionStretch(start_ns=w.start.host_ns, end_ns=w.end_ns, energies=monitor.total_by_scope(w))
            for w in self.recent
        ]

    def energy(self, monitor: Monitor) -> Energy:
        """Return the joules of all times so far."""
        return _sum_stretches([(stretch, 1.0) for stretch in self.stretches(monitor)])


class RegionStretch(msgspec.Struct, kw_only=True):
    """A time that passes of a region cover, and its joules.

    Joules of scope "machine" are the same in every process that measures them; scope "process" is the process's own.
    """

    start_ns: int
    end_ns: int
    energies: dict[Scope, Energy]

    def without_own(self) -> RegionStretch:
        """Return only what every process measures alike."""
        shared: dict[Scope, Energy] = {k: v for k, v in self.energies.items() if k == "machine"}
        return RegionStretch(start_ns=self.start_ns, end_ns=self.end_ns, energies=shared)


class ProcessRegions(msgspec.Struct, kw_only=True):
    """The regions of one process, with the times that each covers, as written to a file."""

    schema_version: int = SCHEMA_VERSION
    pid: int = 0
    parent_pid: int = 0
    regions: list[RegionEnergy]
    stretches: dict[str, list[RegionStretch]]


def write_regions(folder: Path, regions: ProcessRegions) -> None:
    """Write this process's regions, unless its reader has removed the folder."""
    if regions.regions and folder.is_dir():
        (folder / f"{os.getpid()}.json").write_bytes(msgspec.json.encode(regions))


def read_regions(folder: Path) -> list[RegionEnergy]:
    """Return the regions of all processes, joined by name, the most joules first."""
    processes: list[ProcessRegions] = []
    for path in sorted(folder.glob("*.json")):
        try:
            processes.append(_decode(path.read_bytes()))
        except (msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # a process was killed while writing; the others still count
    return merge_regions(processes)


def _decode(data: bytes) -> ProcessRegions:
    """Read regions from JSON, which has no NaN: unknown joules were written as null."""
    raw = msgspec.json.decode(data)
    energies = [e for part in raw["stretches"].values() for stretch in part for e in stretch["energies"].values()]
    for energy in (*energies, *(region["energy"] for region in raw["regions"])):
        for key in ("energy_j", "error_j"):
            if energy[key] is None:
                energy[key] = math.nan
    found = msgspec.convert(raw, ProcessRegions)
    for region in found.regions:
        if not found.stretches.get(region.name) or not all(s.energies for s in found.stretches[region.name]):
            raise ValueError(f"{region.name} has no joules")
    return found


def merge_regions(processes: Sequence[ProcessRegions]) -> list[RegionEnergy]:
    """Merge regions of one name, from processes that may have run side by side.

    Every process of a node measures the same boards, so a moment that lies in the regions of several counts once; they
    all share the monotonic clock. What each process uses itself is added up, except that a child's is already in its
    parent's.
    """
    by_name: dict[str, dict[int, RegionEnergy]] = {}
    stretches: dict[str, list[RegionStretch]] = {}
    for process in processes:
        for region in process.regions:
            by_name.setdefault(region.name, {})[process.pid] = region
    for process in processes:
        for region in process.regions:
            above = by_name[region.name].get(process.parent_pid)
            stretches.setdefault(region.name, []).extend(
                stretch.without_own() if above and _overlap(stretch, above) else stretch
                for stretch in process.stretches[region.name]
            )
    return sort_regions(
        [
            RegionEnergy(
                name=name,
                calls=sum(r.calls for r in regions.values()),
                energy=_sum_stretches(_cover_once(stretches[name])),
                start_ns=min(r.start_ns for r in regions.values()),
                end_ns=max(r.end_ns for r in regions.values()),
                overlaps=any(r.overlaps for r in regions.values()),
            )
            for name, regions in by_name.items()
        ]
    )


def _overlap(one: RegionStretch, two: RegionEnergy) -> bool:
    return one.start_ns < two.end_ns and two.start_ns < one.end_ns


def _cover_once(stretches: Sequence[RegionStretch]) -> list[tuple[RegionStretch, float]]:
    """Return each time with the share of it that no earlier one covers; its power is assumed to be even."""
    covered_ns, parts = 0, []
    for stretch in sorted(stretches, key=lambda s: (s.start_ns, -s.end_ns)):
        length_ns = stretch.end_ns - stretch.start_ns
        rest_ns = min(stretch.end_ns - covered_ns, length_ns)
        parts.append((stretch, max(rest_ns, 0) / length_ns if length_ns > 0 else 1.0))
        covered_ns = max(covered_ns, stretch.end_ns)
    return parts


def _sum_stretches(stretches: Sequence[tuple[RegionStretch, float]]) -> Energy:
    """Return the joules of some times, each multiplied by its share; a process's own joules count in full."""
    machine = [_scale(s.energies["machine"], share) for s, share in stretches if "machine" in s.energies and share > 0]
    own = [s.energies["process"] for s, _ in stretches if "process" in s.energies]
    parts = [sum_windows(part) for part in (machine, own) if part]
    if machine:
        return sum_domains(parts, parts[0].time_s)
    return sum_domains(parts, sum(s.energies["process"].time_s * share for s, share in stretches if s.energies))


def _scale(energy: Energy, share: float) -> Energy:
    """Return a share of the joules of a window, with the same share of its errors."""
    if share == 1.0:
        return energy
    joules, error_j, seconds = share * energy.energy_j, share * energy.error_j, share * energy.time_s
    return dataclasses.replace(energy, energy_j=joules, error_j=error_j, common_error_j=error_j, time_s=seconds)


def sort_regions(regions: Sequence[RegionEnergy]) -> list[RegionEnergy]:
    """Sort by joules, the most first; unknown ones last."""
    return sorted(regions, key=lambda r: math.inf if math.isnan(r.energy.energy_j) else -r.energy.energy_j)
