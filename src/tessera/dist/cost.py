"""What a collective takes inside a node, before it runs: latency, bytes over the link, and the ramp between the two.

    time = a + b S + ramp sqrt(a b S)      a: latency; b: bytes sent for each byte of S, over the link's useful speed

The first term is what the smallest message takes, the second what the largest does, the third what is lost while
pipelines fill. Fitted to NCCL on A100, H100, B200 (NVLink) and L40S (PCIe) by benchmarks/fit/fit_collectives.py. Ramp
and efficiency are nearly the same on all NVLink systems, so a chip without data takes their mean and its own link.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..device import Device, Link
from ..errors import ArgumentError
from ..hardware import lookup

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# 90% of single timings are within these: sizes kept out of the fit, and an NVLink system kept out of it
# (benchmarks/results/fit_collectives.json).
ERROR_FITTED, ERROR_OTHER = 0.20, 0.45
_LINKS = ("nvlink", "xgmi", "xe_link", "pcie")
_SAME_LINK = 0.05  # chips whose links differ by less have the same generation of it


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Predicted seconds of one collective with the half-width of a 90% interval, and the bytes each rank sends."""

    time_s: float
    error_s: float
    sent_bytes: float
    link: str
    source: str


def sent_share(kind: str, ranks: int) -> float:
    """Bytes each rank sends for each byte of the whole buffer, by the most frugal algorithm."""
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def collective_cost(kind: str, nbytes: float, ranks: int, *, on: str | Device) -> CollectiveCost:
    """What a collective over GPUs of one node takes. `nbytes` is the whole buffer (of all_gather: the result)."""
    if kind not in KINDS:
        raise ArgumentError(f"the cost of {kind!r} is not known", fix=f"one of: {', '.join(KINDS)}")
    if ranks < 2:
        return CollectiveCost(time_s=0.0, error_s=0.0, sent_bytes=0.0, link="", source="one rank sends nothing")
    device = lookup(on) if isinstance(on, str) else on
    name, link = find_link(device)
    system = _find_system(device)
    latency_s, efficiency, ramp = _interpolate(_figures(system, kind), ranks)
    per_byte_s = sent_share(kind, ranks) / (efficiency * link.one_way_bytes_per_s)
    time_s = latency_s + per_byte_s * nbytes + ramp * math.sqrt(latency_s * per_byte_s * nbytes)
    return CollectiveCost(
        time_s=time_s,
        error_s=time_s * (ERROR_FITTED if system is not None else ERROR_OTHER),
        sent_bytes=nbytes * sent_share(kind, ranks),
        link=name,
        source=f"NCCL on {system}" if system is not None else "mean of NVLink systems, scaled to this link",
    )


def find_link(device: Device) -> tuple[str, Link]:
    """The fastest link between chips that a catalogue entry has, and its name."""
    for name in _LINKS:
        if name in device.interconnect:
            return name, device.interconnect[name]
    raise ArgumentError(
        f"{device.name} has no link between chips in the catalogue",
        fix="add [interconnect] to its file (docs/howto/hardware.md)",
    )


@functools.cache
def _read_fits() -> dict[str, Any]:
    text = resources.files("tessera.dist").joinpath("data/nccl.json").read_text()
    systems: dict[str, Any] = json.loads(text)["systems"]
    return systems


def _find_system(device: Device) -> str | None:
    """The measured system with this chip, or with the same link."""
    systems = _read_fits()
    if device.name in systems:
        return device.name
    name, link = find_link(device)
    for system in systems:
        other_name, other = find_link(lookup(system))
        ratio = other.one_way_bytes_per_s / link.one_way_bytes_per_s
        if other_name == name and abs(ratio - 1) < _SAME_LINK:
            return system
    return None


def _figures(system: str | None, kind: str) -> Mapping[int, Sequence[float]]:
    """(latency, efficiency, ramp) by number of GPUs, of a system; without one the means of others."""
    systems = _read_fits()
    if system is not None:
        return {int(ranks): figures for ranks, figures in systems[system][kind].items()}
    return mean_figures({name: table[kind] for name, table in systems.items()})


def mean_figures(tables: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[int, list[float]]:
    """Geometric means: the latency of all systems, which is the software's; the rest of those with NVLink."""
    fast = [t for name, t in tables.items() if find_link(lookup(name))[0] == "nvlink"]
    used = [list(tables.values()), fast, fast]
    return {
        int(ranks): [math.exp(math.fsum(math.log(t[ranks][i]) for t in use) / len(use)) for i, use in enumerate(used)]
        for ranks in fast[0]
    }


def _interpolate(figures: Mapping[int, Sequence[float]], ranks: int) -> list[float]:
    """Between the numbers of GPUs that were measured, in logarithms; beyond them, latency grows as between the last."""
    known = sorted(figures)
    low = max((n for n in known[:-1] if n <= ranks), default=known[0])
    high = known[known.index(low) + 1]
    part = (math.log(ranks) - math.log(low)) / (math.log(high) - math.log(low))
    inside = min(part, 1.0)
    steps = [part, inside, inside]  # efficiency and ramp stay as they are beyond the largest
    return [a * (b / a) ** p for a, b, p in zip(figures[low], figures[high], steps, strict=True)]
