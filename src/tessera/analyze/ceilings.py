"""The roofs of a chip as plain numbers: FLOP/s by unit, bytes/s of memory and cache, and their joules at best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..device import Device
from ..errors import ArgumentError, TesseraError, did_you_mean
from ..hardware import catalogue, identify_board, lookup
from ..timeline.columns import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What a device can do at most. `flops_per_s` and `flop_per_j` are by unit ("matrix.bf16")."""

    device: Device
    flops_per_s: Mapping[str, float]
    bytes_per_s: float | None
    l2_bytes_per_s: float | None
    flop_per_j: Mapping[str, float]
    bytes_per_j: float | None
    sources: Mapping[str, str]

    def ridge(self, unit: str | None) -> float | None:
        """FLOPs per byte above which the unit, and below which the memory, is the limit."""
        peak = self.flops_per_s.get(unit or "")
        return peak / self.bytes_per_s if peak and self.bytes_per_s else None

    def facts(self) -> dict[str, Any]:
        """Plain data for a plot."""
        return {
            "device": self.device.id, "device_name": self.device.name, "ceilings_flop_per_s": dict(self.flops_per_s),
            "hbm_bytes_per_s": self.bytes_per_s, "l2_bytes_per_s": self.l2_bytes_per_s,
            "ridge_flop_per_byte": {u: r for u in self.flops_per_s if (r := self.ridge(u)) is not None},
            "best_flop_per_j": dict(self.flop_per_j), "best_bytes_per_j": self.bytes_per_j,
            "sources": dict(self.sources),
        }  # fmt: skip


def ceilings(device: Device) -> Ceilings:
    """The roofs of a device. The best FLOP/J is the measured one where the catalogue has it, else peak over limit."""
    tables = {"matrix": device.matrix, "vector": device.vector}
    peaks = {f"{unit}.{name}": peak.value for unit, table in tables.items() for name, peak in table.items()}
    bandwidth, l2 = device.memory.bandwidth_bytes_per_s, device.caches.l2_bandwidth_bytes_per_s
    watts = device.tdp_w.value if device.tdp_w else None
    best = {unit: peak / watts for unit, peak in peaks.items()} if watts else {}
    sources = dict.fromkeys(best, "peak FLOP/s over the board's limit")
    for unit in peaks:
        kind, _, precision = unit.partition(".")
        # fp16 runs at bf16's rate on the same units, int8 at fp8's: nearly the same joules, were they measured.
        like = {"fp16": "bf16", "int8": "fp8"}.get(precision, precision) if kind == "matrix" else precision
        measured = device.energy.get(f"matmul_{precision}_j_per_flop") or device.energy.get(f"matmul_{like}_j_per_flop")
        if measured is not None and (kind == "matrix" or precision == "fp32"):
            best[unit], sources[unit] = 1.0 / measured.value, measured.source
    stream = device.energy.get("stream_j_per_byte")
    per_byte = 1.0 / stream.value if stream else bandwidth.value / watts if bandwidth and watts else None
    sources["bytes"] = stream.source if stream else "peak bytes/s over the board's limit"
    return Ceilings(
        device=device, flops_per_s=peaks, bytes_per_s=bandwidth.value if bandwidth else None,
        l2_bytes_per_s=l2.value if l2 else None, flop_per_j=best, bytes_per_j=per_byte, sources=sources,
    )  # fmt: skip


def device_of(timeline: Timeline, arch: str | Device | None = None, label: str | None = None) -> Device | None:
    """The chip a trace ran on: an id ("h200"), a compute capability ("sm90"), or what the trace says; None if nothing.

    A capability alone leaves several chips: of those the one the trace names, else the one with the most bandwidth.
    """
    if isinstance(arch, Device):
        return arch
    named = _named(timeline, label)
    if arch is None:
        return named
    wanted = arch.strip().lower().replace("_", "")
    known = catalogue().values()
    family = [d for d in known if wanted in ((d.compute_capability or "").lower(), (d.architecture or "").lower())]
    if family:
        if named is not None and named in family:
            return named
        return max(family, key=lambda d: d.memory.bandwidth_bytes_per_s.value if d.memory.bandwidth_bytes_per_s else 0)
    try:
        return lookup(arch)
    except ArgumentError as exc:
        names = sorted({n for d in known for n in (d.id, d.compute_capability or d.id)})
        raise ArgumentError(
            f"no chip or architecture {arch!r}{did_you_mean(wanted, names)}",
            why="ceilings come from the catalogue",
            fix="give a chip such as h200 or sm90; `tessera hardware list` shows all",
        ) from exc


def _named(timeline: Timeline, label: str | None) -> Device | None:
    said = [p.get("name") for p in timeline.meta.get("deviceProperties") or () if isinstance(p, dict)]
    for name in (*said, label):
        if isinstance(name, str) and name:
            try:
                return identify_board(name)
            except TesseraError:
                continue
    return None
