"""Converts counters in CSV files of `rocprofv3` and `rocprof` (AMD) to the schema. Untested on hardware.

Names and formulas: counter_defs.yaml in ROCm/rocprofiler-sdk (source/lib/rocprofiler-sdk/counters/yaml) and
"MI300 and MI200 Series performance counters" in the ROCm documentation. A wave takes the place of a warp, a compute
unit (CU) that of an SM, LDS that of shared memory. The file formats are those in rocprofiler-sdk's
docs/how-to/using-rocprofv3.rst (one row for each counter of a dispatch) and in ROCm/rocprofiler's README (one row for
each dispatch, a column for each counter); the tests use samples we wrote to these descriptions.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...errors import RecordingError
from ..demangle import demangle
from .names import (
    CounterMetric,
    KernelCounters,
    Normalised,
    apply,
    complement_pct,
    number,
    put,
    same,
    text_of,
)

_KIB = 1024.0


def _kib(value: float) -> float:
    return value * _KIB  # the expressions of FETCH_SIZE and WRITE_SIZE end in /1024


TABLE: dict[str, CounterMetric] = {
    "OccupancyPercent": CounterMetric("sm_occupancy", same, "%", "GPU occupancy as % of maximum"),
    "MeanOccupancyPerCU": CounterMetric("warps_active", same, "waves per CU", "mean occupancy per compute unit"),
    "SQ_WAVES": CounterMetric("warps_launched", same, "waves", "waves sent to the sequencers, all of them added"),
    "SQ_WAVES_sum": CounterMetric("warps_launched", same, "waves", "the same, by its derived name"),
    "Wavefronts": CounterMetric("warps_launched", same, "waves", "the same, by its older name"),
    "VALUUtilization": CounterMetric("warp_divergence_pct", complement_pct, "%", "active vector ALU threads in a wave"),
    "VALUBusy": CounterMetric("alu_util_pct", same, "%", "% of GPU time vector ALU instructions are processed"),
    "MfmaUtil": CounterMetric("tc_util_pct", same, "%", "% of GPU time the matrix units are busy"),
    "L2CacheHit": CounterMetric("l2_hit_rate", same, "%", "% of L2 (TCC) accesses that hit; not defined for MI300"),
    "TCP_TOTAL_CACHE_ACCESSES_sum": CounterMetric(
        "l1_transactions", same, "cache lines", "tag accesses of the vector L1"
    ),
    "SQ_LDS_BANK_CONFLICT": CounterMetric(
        "smem_bank_conflicts", same, "cycles", "cycles LDS is stalled by bank conflicts"
    ),
    "FETCH_SIZE": CounterMetric("dram_read_bytes", _kib, "B", "kilobytes fetched from video memory"),
    "FetchSize": CounterMetric("dram_read_bytes", _kib, "B", "the same, by its older name"),
    "WRITE_SIZE": CounterMetric("dram_write_bytes", _kib, "B", "kilobytes written to video memory"),
    "WriteSize": CounterMetric("dram_write_bytes", _kib, "B", "the same, by its older name"),
    "GRBM_GUI_ACTIVE": CounterMetric("active_cycles", same, "cycles", "cycles the GPU was active"),
}
STALLS = {"MemUnitStalled": "memory unit", "WriteUnitStalled": "write unit", "LDSBankConflict": "LDS bank conflict"}
"""% of GPU time a unit is stalled. AMD counts units here, not waves: these shares do not add up."""
WAVE_SHARES = {  # shares of SQ_WAVE_CYCLES; all three count quad-cycles
    "SQ_WAIT_ANY": "dependency_stall_pct",  # waiting for anything: s_waitcnt, barriers
    "SQ_WAIT_INST_ANY": "structural_stall_pct",  # waiting for an instruction to be issued
}
DURATIONS = (("Start_Timestamp", "End_Timestamp"), ("BeginNs", "EndNs"))
_NAMES = ("Kernel_Name", "KernelName")
_GRIDS = ("Grid_Size", "grd", "GRD")
_GROUPS = ("Workgroup_Size", "wgr", "WGR")
_IDS = ("Dispatch_Id", "Dispatch_ID", "Index")
_DEVICES = ("Agent_Id", "GPU_ID", "gpu-id")
_REST = "\0"  # key of cells beyond the last column; no column has this name


def normalise(raw: Mapping[str, float], seconds: float | None = None) -> Normalised:
    """Convert the raw counters of one dispatch to the schema; rates need its `seconds`."""
    result = apply(TABLE, raw)
    hits, misses = raw.get("TCC_HIT_sum"), raw.get("TCC_MISS_sum")
    if "l2_hit_rate" not in result.values and hits is not None and misses is not None and hits + misses > 0:
        put(result, "l2_hit_rate", 100.0 * hits / (hits + misses))
    stalls = {name: raw[n] for n, name in STALLS.items() if n in raw}
    if stalls:
        put(result, "stall_reasons", stalls)
    units = [raw[n] for n in ("MemUnitStalled", "WriteUnitStalled") if n in raw]
    if units:
        put(result, "memory_stall_pct", max(units))
    waves = raw.get("SQ_WAVE_CYCLES")
    for name, field in WAVE_SHARES.items():
        if waves and name in raw:
            put(result, field, min(100.0, 100.0 * raw[name] / waves))
    for way in ("read", "write"):
        moved = result.figures.get(f"dram_{way}_bytes")
        if moved is not None and seconds:
            put(result, f"dram_{way}_gbps", moved / seconds * 1e-9)
        else:
            result.missing[f"dram_{way}_gbps"] = "needs FETCH_SIZE/WRITE_SIZE and the timestamps of the dispatch"
    if seconds:
        result.figures["seconds"] = seconds
    return result


def read(path: str | Path) -> list[KernelCounters]:
    """Read the dispatches in a CSV file of `rocprofv3 --pmc ...` or `rocprof -i ...`."""
    try:
        cells = list(csv.DictReader(text_of(path).splitlines(), skipinitialspace=True, restkey=_REST, restval=""))
    except csv.Error as exc:
        raise RecordingError(f"cannot read {path}", why=str(exc), fix="give the CSV that rocprof wrote") from exc
    rows = [{c: t for c, t in row.items() if c != _REST} for row in cells]
    if not rows or _first(rows[0], _NAMES) is None:
        raise RecordingError(
            f"{path} is not a counter file of rocprof",
            why="it has no column Kernel_Name or KernelName",
            fix="record one with: rocprofv3 --pmc SQ_WAVES OccupancyPercent -f csv -- COMMAND",
        )
    return _kernels(rows)


def _kernels(rows: Iterable[Mapping[str, str]]) -> list[KernelCounters]:
    first: dict[tuple[str | None, ...], Mapping[str, str]] = {}
    counters: dict[tuple[str | None, ...], dict[str, float]] = {}
    for row in rows:
        # Dispatches are numbered in each process and, in old files, on each GPU.
        key = (_first(row, ("Process_Id", "pid", "PID")), _first(row, _DEVICES), _first(row, _IDS))
        first.setdefault(key, row)
        values = counters.setdefault(key, {})
        # rocprofv3 has a row for each counter, and repeats the dispatch for several passes.
        pairs = [(row["Counter_Name"], row.get("Counter_Value"))] if "Counter_Name" in row else list(row.items())
        values |= {name: value for name, text in pairs if (value := number(text or "")) is not None}
    return [_kernel(row, counters[key]) for key, row in first.items()]


def _kernel(row: Mapping[str, str], raw: Mapping[str, float]) -> KernelCounters:
    result = normalise(raw, _seconds(row))
    items, group, device = (number(_first(row, c) or "") for c in (_GRIDS, _GROUPS, _DEVICES))
    return KernelCounters(
        name=demangle((_first(row, _NAMES) or "").strip('" ').removesuffix(".kd")),  # .kd: a kernel descriptor
        # AMD's grid is counted in work items, CUDA's and Kineto's in blocks.
        grid=(round(items / group),) if items and group else None,
        block=(round(group),) if group else None,
        values=result.values,
        figures=result.figures,
        missing=result.missing,
        source="rocprofv3" if "Counter_Name" in row else "rocprof",
        device=None if device is None else round(device),
    )


def _seconds(row: Mapping[str, str]) -> float | None:
    for start, end in DURATIONS:
        with contextlib.suppress(ValueError):  # the cell is not a whole number
            if row.get(start) and row.get(end):
                return (int(row[end]) - int(row[start])) * 1e-9
    return None


def _first(row: Mapping[str, str], columns: Iterable[str]) -> str | None:
    return next((row[c] for c in columns if row.get(c)), None)
