"""How a measured program tells `tessera measure` about its own scopes: a JSON file per process, at its exit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ..schema import SCHEMA_VERSION, Energy, RegionEnergy
from ..trace import worst_basis

REGIONS_VARIABLE = "TESSERA_REGIONS_DIR"
"""Environment variable with the folder; set by `tessera measure` for the command it runs."""


class _File(msgspec.Struct, kw_only=True):
    schema_version: int = SCHEMA_VERSION
    regions: list[RegionEnergy]


def write_regions(folder: Path, regions: Sequence[RegionEnergy]) -> None:
    """Write this process's regions; a folder that has gone away with its reader is no error."""
    if not regions or not folder.is_dir():
        return
    (folder / f"{os.getpid()}.json").write_bytes(msgspec.json.encode(_File(regions=list(regions))))


def read_regions(folder: Path) -> list[RegionEnergy]:
    """All regions of all processes, those of one name together, the most joules first."""
    found: list[RegionEnergy] = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.extend(msgspec.json.decode(path.read_bytes(), type=_File).regions)
        except msgspec.DecodeError:
            continue  # a process that was killed while writing: the rest still counts
    return merge(found)


def merge(regions: Iterable[RegionEnergy]) -> list[RegionEnergy]:
    """Regions of one name added up."""
    by_name: dict[str, list[RegionEnergy]] = {}
    for region in regions:
        by_name.setdefault(region.name, []).append(region)
    merged = [_sum(name, parts) for name, parts in by_name.items()]
    return sorted(merged, key=lambda r: -r.energy.joules)


def _sum(name: str, parts: list[RegionEnergy]) -> RegionEnergy:
    seconds = sum(p.energy.seconds for p in parts)
    energy = Energy(
        joules=sum(p.energy.joules for p in parts),
        error_j=sum(p.energy.error_j**2 for p in parts) ** 0.5,
        seconds=seconds,
        source=parts[0].energy.source,
        coverage=sum(p.energy.coverage * p.energy.seconds for p in parts) / seconds if seconds > 0 else 0.0,
        basis=worst_basis(p.energy.basis for p in parts),
    )
    return RegionEnergy(name=name, calls=sum(p.calls for p in parts), energy=energy)
