"""The analyses a run's page shows beside its joules, and all that could not be answered, by what would provide it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import analyze
from ..analyze.result import Result
from ..analyze.source import Source
from ..attribute.table import EnergyTable
from ..errors import TesseraError
from ..profile.runfile import RunFile
from ..record import CAPABILITY
from ..timeline.columns import Timeline

KINDS = ("roofline", "stalls", "collectives", "memory")
_OPTIONS: dict[str, dict[str, Any]] = {"collectives": {"min_bytes": 0}}
_WORDS = {
    "dram_bytes": "measured bytes", "flops": "FLOPs and intensity", "l2_pct": "share of the L2's bandwidth",
    "ceilings": "the roofs of the chip", "energy": "joules", "memory": "allocated memory over time",
    "stall_reasons": "what warps waited for", "skew_s": "stragglers among ranks", "path": "within or between nodes",
}  # fmt: skip
_REMEDIES = {
    "--counters": "hardware counters: tessera run --counters script.py",
    "record_shapes": "the shapes of operators: profile.session(record_shapes=True)",
}
_TELEMETRY = ("temp_c", "throttle_reason")
# Fields that the analyses name in other words.
_SAID = ("memory_stall_pct", "dependency_stall_pct", "structural_stall_pct", "flops", "shapes", "dram_read_gbps",
         "dram_write_gbps")  # fmt: skip
_PARTS = {
    "pct": "%", "gbps": "GB/s", "tc": "tensor core", "sm": "SM", "l1": "L1", "l2": "L2", "dram": "DRAM",
    "inst": "instruction", "smem": "shared memory", "alu": "ALU", "eff": "efficiency", "util": "use", "c": "°C",
    "temp": "temperature", "pcie": "PCIe", "nvlink": "NVLink", "cp": "copies", "async": "asynchronous",
    "inflight": "in flight",
}  # fmt: skip


def results_of(run: RunFile, table: EnergyTable, timeline: Timeline) -> dict[str, Result]:
    """Every analysis of the page by its kind. One that cannot answer has no rows, and says why in `missing`."""
    power = run.power()
    source = Source(run.path.name, timeline, power if power.columns else None, run.telemetry(), run, _energy=table)
    return {kind: _result(kind, source) for kind in KINDS if len(timeline)}


def _result(kind: str, source: Source) -> Result:
    try:
        found: Result = getattr(analyze, kind)(source, **_OPTIONS.get(kind, {}))
    except TesseraError as exc:  # the page is worth having without it
        said = f"{exc.what}{f': {exc.fix}' if exc.fix else ''}"
        return Result(kind=kind, title=kind, columns=(), rows=(), missing={kind: said})
    return found


def counters_missing(timeline: Timeline) -> dict[str, str]:
    """Fields of device rows that nothing recorded, with their capability tag."""
    if not len(timeline.device_rows):
        return {}
    known = _known(timeline)
    return {field: why for field, why in CAPABILITY.items() if field not in known}


def _known(timeline: Timeline) -> set[str]:
    found = {key for fields in _some(timeline.extra.values()) for key, value in fields.items() if value is not None}
    if timeline.energy_j is not None:
        found |= {"energy_j", "energy_error_j", "power_w"}
    if (timeline["shapes"] >= 0).any():
        found |= {"shapes", "flops"}
    if timeline.rows("collective").size == 0:  # nobody misses the path of a collective that was not there
        found |= {"collective_algorithm", "collective_path"}
    return found


def _some(rows: Iterable[Mapping[str, Any]], most: int = 2000) -> Sequence[Mapping[str, Any]]:
    """The first ones: fields are the same from kernel to kernel, and there may be millions."""
    return [fields for fields, _ in zip(rows, range(most), strict=False)]


def missing(results: Mapping[str, Result], timeline: Timeline, *, telemetry: bool = False) -> list[tuple[str, str]]:
    """(what is missing, what would provide it), one line for each remedy; those that one can follow come first."""
    by_fix: dict[str, list[str]] = {}
    for result in results.values():
        for what, fix in result.missing.items():
            if what == "collectives":  # there were none: nothing is missing
                continue
            by_fix.setdefault(_remedy(fix), []).append(_WORDS.get(what, _spoken(what)))
    for field, why in counters_missing(timeline).items():
        if field not in _SAID and not (telemetry and field in _TELEMETRY):
            by_fix.setdefault(_remedy(why), []).append(_spoken(field))
    lines = [(", ".join(dict.fromkeys(whats)), fix) for fix, whats in by_fix.items()]
    return sorted(lines, key=lambda line: "catalogue" in line[1])


def _remedy(fix: str) -> str:
    """One wording for one command: several analyses and fields ask for the same."""
    return next((said for command, said in _REMEDIES.items() if command in fix), fix)


def _spoken(field: str) -> str:
    if " " in field or not field.islower():
        return field
    words = [_PARTS.get(part, part) for part in field.split("_")]
    unit = [words.pop()] if words[-1] in ("%", "GB/s", "°C") else []
    return " ".join(words) + (f" ({unit[0]})" if unit else "")
