"""Converts Level Zero metrics, as `unitrace` (intel/pti-gpu) writes them to CSV, to the schema. Untested on hardware.

Names and file format: tools/unitrace/README.md ("Hardware Performance Metrics") and scripts/metrics/config of
intel/pti-gpu; the groups are ComputeBasic, MemoryProfile and L1Profile* of Data Center GPU Max (pvc) and Battlemage
(bmg). An Xe vector engine (XVE) takes the place of an SM's scheduler, a hardware thread that of a warp, SLM that of
shared memory, and L3, the last cache before memory, that of L2. The tests use samples we wrote to that description.
Exports of VTune are not read: their columns depend on the view.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

from ...errors import RecordingError
from .names import CounterMetric, KernelCounters, Normalised, apply, number, put, same, text_of

TABLE: dict[str, CounterMetric] = {
    "XVE_THREADS_OCCUPANCY_ALL": CounterMetric("sm_occupancy", same, "%", "ComputeBasic: thread slots in use"),
    "XVE_ACTIVE": CounterMetric(
        "inst_issue_eff_pct", same, "%", "ComputeBasic: time an engine executes an instruction"
    ),
    "XVE_INST_EXECUTED_XMX_ALL_UTILIZATION": CounterMetric("tc_util_pct", same, "%", "ComputeBasic: matrix engine"),
    "XVE_INST_EXECUTED_ALU0_ALL_UTILIZATION": CounterMetric("alu_util_pct", same, "%", "ComputeBasic: float pipe"),
    "XVE_INST_EXECUTED_ALU1_ALL_UTILIZATION": CounterMetric("alu_util_pct", same, "%", "ComputeBasic: integer pipe"),
    "XVE_COMPUTE_THREAD_COUNT": CounterMetric("warps_launched", same, "threads", "ComputeBasic: hardware threads"),
    "LOAD_STORE_CACHE_ACCESS": CounterMetric("l1_transactions", same, "accesses", "ComputeBasic (bmg)"),
    "SLM_ACCESS_COUNT": CounterMetric("smem_transactions", same, "accesses", "MemoryProfile (bmg)"),
    "SLM_BANK_CONFLICT_COUNT": CounterMetric(
        "smem_bank_conflicts", same, "conflicts", "L1ProfileSlmBankConflicts (pvc)"
    ),
    "GPU_MEMORY_BYTE_READ": CounterMetric("dram_read_bytes", same, "B", "ComputeBasic"),
    "GPU_MEMORY_BYTE_WRITE": CounterMetric("dram_write_bytes", same, "B", "ComputeBasic"),
    "L3_BYTE_READ": CounterMetric("l2_read_bytes", same, "B", "ComputeBasic"),
    "L3_BYTE_WRITE": CounterMetric("l2_write_bytes", same, "B", "ComputeBasic"),
    "GpuTime": CounterMetric("seconds", same, "s", "every group"),
}
LARGEST = ("alu_util_pct",)
# unitrace --stall-sampling: events by reason, at each instruction. They have the same classes as nvidia.STALLS.
STALLS: dict[str, tuple[str | None, str]] = {
    "SendStall": ("memory_stall_pct", "the queue to memory and other shared units is full"),
    "SbidStall": ("memory_stall_pct", "waits on a scoreboard, which loads and other messages set"),
    "DistStall": ("dependency_stall_pct", "waits a fixed distance for the instruction before"),
    "SyncStall": ("dependency_stall_pct", "waits at a barrier or fence"),
    "ControlStall": ("dependency_stall_pct", "waits for a branch"),
    "PipeStall": ("structural_stall_pct", "the pipe it needs is taken"),
    "InstrFetchStall": ("structural_stall_pct", "its next instruction has not been fetched"),
    "OtherStall": (None, "a reason the hardware does not tell"),
}
_CLASSES = ("memory_stall_pct", "dependency_stall_pct", "structural_stall_pct")
_COLUMN = re.compile(r"(?P<name>\w+)(?:\[(?P<unit>[^\]]*)\])?$")
_LAUNCH = re.compile(r"\[SIMD\w* \{(?P<groups>[\d; ]+)\} \{(?P<size>[\d; ]+)\}\]$")
_DEVICE = re.compile(r"=== Device #(\d{1,9}) Metrics ===")
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}


def normalise(raw: Mapping[str, float]) -> Normalised:
    """Convert the raw metrics of one kernel, in SI units, to the schema."""
    result = apply(TABLE, raw, LARGEST)
    seconds = result.figures.get("seconds")
    for way in ("read", "write"):
        moved = result.figures.get(f"dram_{way}_bytes")
        if moved is not None and seconds:
            put(result, f"dram_{way}_gbps", moved / seconds * 1e-9)
    cached = [v for f in ("l2_read_bytes", "l2_write_bytes") if (v := result.figures.get(f)) is not None]
    if cached and seconds:
        put(result, "l2_gbps", sum(cached) / seconds * 1e-9)
    hits, misses = raw.get("L3_HIT"), raw.get("L3_MISS")
    if hits is not None and misses is not None and hits + misses > 0:
        put(result, "l2_hit_rate", 100.0 * hits / (hits + misses))
    stalls = {s: raw[s] for s in STALLS if s in raw}
    events = sum(stalls.values()) + raw.get("Active", 0.0)
    if stalls and events > 0:
        put(result, "stall_reasons", {s: 100.0 * v / events for s, v in stalls.items()})
        for kind in _CLASSES:
            put(result, kind, 100.0 * sum(v for s, v in stalls.items() if STALLS[s][0] == kind) / events)
    elif "XVE_STALL" in raw:
        put(result, "stall_reasons", {"all reasons": raw["XVE_STALL"]})
        result.missing.update(dict.fromkeys(_CLASSES, "needs unitrace --stall-sampling"))
    return result


def read(path: str | Path) -> list[KernelCounters]:
    """Read the kernels in a CSV file of `unitrace -q`, `-k` or `--stall-sampling`."""
    device: int | None = None
    header: list[str] | None = None
    samples: dict[tuple[str, str, int | None], list[dict[str, float]]] = {}
    for line in text_of(path).splitlines():
        banner = _DEVICE.search(line)
        if banner:
            device, header = int(banner[1]), None
            continue
        try:
            cells = next(csv.reader([line], skipinitialspace=True), [])
        except csv.Error:  # a line that is longer than any line of a table
            continue
        if cells and cells[0].strip() == "Kernel" and any("[" in c for c in cells):
            header = [c.strip() for c in cells]
        elif header and len(cells) >= len(header) - 1 and cells[0].strip():
            row = dict(zip(header, (c.strip() for c in cells), strict=False))
            key = (row["Kernel"], row.get("GlobalInstanceId", ""), device)
            samples.setdefault(key, []).append(_metrics(row))
    if not samples:
        raise RecordingError(
            f"{path} has no kernel metrics of unitrace",
            why='it has no table with a column "Kernel" and metrics such as XVE_ACTIVE[%]',
            fix="record one with: unitrace -q -o metrics.csv COMMAND",
        )
    return [_kernel(name, device, rows) for (name, _, device), rows in samples.items()]


def _metrics(row: Mapping[str, str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for column, text in row.items():
        match, value = _COLUMN.match(column), number(text)
        if match and value is not None and column != "Kernel":
            metrics[match["name"]] = value * _UNITS.get(match["unit"] or "", 1.0)
    return metrics


def _kernel(name: str, device: int | None, rows: list[dict[str, float]]) -> KernelCounters:
    result = normalise(_together(rows))
    launch = _LAUNCH.search(name)
    return KernelCounters(
        name=name[: launch.start()] if launch else name,
        grid=_sizes(launch["groups"]) if launch else None,
        block=_sizes(launch["size"]) if launch else None,
        values=result.values, figures=result.figures, missing=result.missing, source="unitrace", device=device,
    )  # fmt: skip


def _together(rows: list[dict[str, float]]) -> dict[str, float]:
    """Combine the samples, sub-devices or instructions of one kernel: average shares by their time, add up counts."""
    if len(rows) == 1:
        return rows[0]
    times = [r.get("GpuTime", 1.0) for r in rows]
    total = sum(times) or 1.0
    combined: dict[str, float] = {}
    for name in {n: None for r in rows for n in r}:
        values = [r.get(name, 0.0) for r in rows]
        share = name in TABLE and TABLE[name].unit == "%"
        if share or name == "XVE_STALL":
            combined[name] = sum(v * t for v, t in zip(values, times, strict=True)) / total
        else:
            combined[name] = sum(values)
    return combined


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d{1,18}", text))
