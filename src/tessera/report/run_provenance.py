"""Where every number of a run's page comes from (measured, attributed, computed, modelled), and which are missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import islice
from typing import Any

from .. import analyze
from ..analyze.answer import Answer
from ..analyze.kernel_names import fit
from ..analyze.result import Result
from ..analyze.slowdown import Slowdown
from ..attribute.table import EnergyTable
from ..errors import TesseraError
from ..notes import name_several
from ..record import CAPABILITY, NEEDS_NCU, NEEDS_SHAPES
from ..recording import Recording
from ..timeline.columns import Timeline
from ..units import format_duration, format_power, format_share
from .html import capitalize, prose
from .measure import SCOPES
from .run import interval_text

ANALYSES = ("roofline", "stalls", "collectives", "memory")
"""The analyses that the page shows."""
_TELEMETRY = ("clocks", "temperature", "throttling")
_HOW = (
    "Joules are {known} over the {span}. Each kernel's share is the one that fits the power samples best, given when "
    "each kernel ran. A kernel's joules contain the board's static power while it ran; idle is what was drawn while no "
    "kernel ran; all rows sum to the total. ± is the half-width of a 90% interval. Kernels with the same letter always "
    "ran together, so that only their sum is accurate."
)
_HOW_MODELLED = (
    "Joules are {known} over the {span}: the power is modelled from CPU time, which cannot distinguish "
    "what ran. So each row has a share in proportion to its time; idle is what was drawn while nothing ran; all rows "
    "sum to the total. ± is the half-width of a 90% interval."
)
_HOW_SHARED = (
    "Joules of the whole run, of regions and of steps are {known}. Nothing was traced, so the rows below them are "
    "divided as if everything drew the same power. ± is the half-width of a 90% interval."
)

Provenance = tuple[str, str, str]  # (what, how it is known, from where)


def provenance(
    recording: Recording, table: EnergyTable, answer: Answer, results: Mapping[str, Result], missing: int
) -> str:
    """Return the section: how each figure is known, then the facts that the run recorded about itself."""
    rows = [*_energy_sources(recording, table, answer), *_result_sources(results)]
    if missing:
        rows.append(("other figures", "missing", f"{missing}, each with what would provide it: see above"))
    body = "".join(
        f"<tr><td>{escape(what)}</td><td><span class='tag {how.split()[0]}'>{escape(how)}</span></td>"
        f"<td class='wrap'>{prose(where)}</td></tr>"
        for what, how, where in rows
    )
    notes = "".join(f"<li>{prose(note)}</li>" for note in answer.notes)
    known = "measured by the sensor" if answer.basis == "measured" else f"{answer.basis}, not measured"
    how = _HOW_SHARED if answer.shared_by else _HOW_MODELLED if answer.basis == "modelled" else _HOW
    how = how.format(known=known, span="part that was traced" if answer.partial else "whole run")
    return (
        f"<section id='origin'><h2>How it was measured</h2><p>{escape(how)}</p>"
        f"{f'<ul>{notes}</ul>' if notes else ''}<div class='scroll'><table><caption class='sr'>How each figure is known"
        "</caption><thead><tr><th scope='col'>what</th><th scope='col'>known by</th><th scope='col'>from</th></tr>"
        f"</thead><tbody>{body}</tbody></table></div>{_run_facts(recording)}</section>"
    )


def _energy_sources(recording: Recording, table: EnergyTable, answer: Answer) -> Iterator[Provenance]:
    if table.energy_j >= 0:
        yield "energy of the run", answer.basis, f"{answer.source}, measured {answer.coverage:.1%} of the time"
    else:
        yield "energy of the run", "missing", "no power was recorded"
    alike: dict[tuple[str, str], list[str]] = {}  # eight GPUs of one node are one line
    for domain in recording.power.domains if recording.power is not None else ():
        detail = f"{domain.source}, every {format_duration(domain.resolution_s, 3)}"
        detail += f", {domain.label}" if domain.label else ""
        detail += f"; {domain.note}" if domain.note else ""
        if domain.device.kind == "cpu" and domain.counted:
            detail += f"; of {SCOPES[domain.scope]}"
        inside = "" if domain.counted else " (inside another domain)"
        alike.setdefault((domain.basis, f"{detail}{inside}"), []).append(domain.name)
    for (basis, detail), names in alike.items():
        yield f"power of {name_several(names)}", basis, detail
    if answer.shared_by:
        yield "energy of the rows", "modelled", f"divided by {answer.shared_by}: {interval_text(answer)}"
    elif table.kernels or table.ops:
        what = "energy of kernels" if table.kernels else "energy of operators"
        fitted = "fitted to the power samples by when each ran, with an interval"
        by_time = "divided by the time of each: modelled power does not distinguish operators"
        yield what, "attributed", by_time if answer.basis == "modelled" else fitted
    if table.idle_w is not None:
        between = "kernels" if table.kernels else "operators"
        yield "idle power", "attributed", f"{format_power(table.idle_w, 3)} between {between}"
    if (known := answer.operators) is not None:
        traced = f"{known.traced_kernels:,} kernels traced with them, {known.aligned_kernels:,} aligned with those"
        rest = f"{known.unknown_kernels:,} unknown ({format_share(1.0 - known.share)} of the kernels' joules)"
        yield "operators", "attributed", f"{traced}, {rest}"
    by = {what: name for what, name in recording.facts.collectors.items() if name and what != "why"}
    if by:
        why = f"; not by CUPTI: {recording.facts.collectors['why']}" if recording.facts.collectors.get("why") else ""
        yield f"{' and '.join(by)} on the timeline", "measured", f"{_name_collectors(by)}{why}"
    if answer.tracing is not None:
        yield "slowdown by tracing", *_slowdown_source(answer.tracing)
    if readings := _device_readings(recording):
        yield readings, "measured", "read from the device"


def _name_collectors(by: Mapping[str, str]) -> str:
    names = {"cupti": "CUPTI", "kineto": "Kineto"}
    return ", ".join(f"{what} by {names.get(name, name)}" for what, name in by.items())


def _slowdown_source(tracing: Slowdown) -> tuple[str, str]:
    times = f"{tracing.slowdown:.2f}x" if tracing.slowdown is not None else "unknown"
    if tracing.basis == "steps":
        steps = f"{tracing.traced_steps:,} traced steps compared with {tracing.untraced_steps:,} untraced"
        return "measured", f"{times} ± {tracing.slowdown_error:.2f}: {steps}"
    return "modelled", f"at most {times}, by the number of events: {tracing.reason}"


def _device_readings(recording: Recording) -> str:
    """Return what the devices reported besides power, in words."""
    read: set[str] = set()
    for t in recording.telemetry:
        read |= {"clocks"} if t.clocks_mhz else set()
        read |= {"temperature"} if t.temperature_c is not None else set()
        read |= {"throttling"} if t.throttle is not None else set()
        if len(read) == len(_TELEMETRY):
            break
    return ", ".join(name for name in _TELEMETRY if name in read)


def _result_sources(results: Mapping[str, Result]) -> Iterator[Provenance]:
    roofline = results.get("roofline")
    rows = roofline.rows if roofline is not None else ()
    if roofline is not None and any(r.get("flop_per_s") for r in rows):
        yield "FLOPs", "computed", "from the recorded shapes of operators"
        if any(r.get("bytes_from") == "ncu" for r in rows):
            yield "bytes moved", "measured", "in device memory, by hardware counters"
        else:
            yield "bytes moved", "computed", "the least that the shapes require: each tensor once"
        name = roofline.facts.get("device_name")
        if name:
            show = f"run `tessera hardware show {roofline.facts['device']}` for the sources"
            yield "roofs", "catalogue", f"{name}: {show}"
    sources = {
        "stalls": "hardware counters of a second run: the same kernels, not the same run",
        "collectives": "times as traced, bytes as the collective states them",
        "memory": "PyTorch's allocator",
    }
    for kind, source in sources.items():
        if kind in results and results[kind].rows:
            yield kind, "measured", source


def _run_facts(recording: Recording) -> str:
    facts, gaps = recording.facts, recording.power.gaps if recording.power is not None else ()
    rows = [("gap", f"{gap.domain}: {gap.reason}") for gap in list(gaps)[:5]]
    rows += [(key.removesuffix("_ns"), _fact(key, value)) for key, value in sorted(facts.meta.items())]
    about = {"tessera": facts.version, "host": facts.host}
    rows += [(key, value) for key, value in about.items() if value and key not in facts.meta]
    rows.append(("file", str(facts.path)))
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    return f"<details><summary>How the run was started</summary><dl>{cells}</dl></details>"


def _fact(key: str, value: object) -> str:
    if key.endswith("_ns") and isinstance(value, int):
        return datetime.fromtimestamp(value * 1e-9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if isinstance(value, Mapping):
        return fit(", ".join(f"{k}: {v}" for k, v in value.items()), 400)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return fit(" ".join(str(v) for v in value), 400)
    return fit(str(value), 400)


# -- analyses, and what is missing ----------------------------------------------------------------------------------

_COUNTERS = "hardware counters: tessera run --counters script.py"
_SHAPES = "the shapes of operators: profile.session(record_shapes=True)"
_REMEDIES = {"dram_bytes": _COUNTERS, "stall_reasons": _COUNTERS, "flops": _SHAPES}
"""One wording for what several analyses lack."""
_CAPABILITY_REMEDIES = {NEEDS_NCU: _COUNTERS, NEEDS_SHAPES: _SHAPES}
_CATALOGUE = ("l2_pct", "ceilings")
"""What only a new figure in the catalogue would provide; it is listed last."""
_NAMES = {
    "dram_bytes": "measured bytes",
    "flops": "FLOPs and intensity",
    "l2_pct": "share of the L2's bandwidth",
    "ceilings": "the limits of the chip",
    "energy": "joules",
    "memory": "allocated memory over time",
    "stall_reasons": "what warps waited for",
    "skew_s": "stragglers among ranks",
    "path": "within or between nodes",
}
_STALLS = ("memory_stall_pct", "dependency_stall_pct", "structural_stall_pct")
_ALSO_NAMED = (*_STALLS, "flops", "shapes", "dram_read_gbps", "dram_write_gbps")
"""Fields of records that the analyses name in other words."""
_WORDS = {
    "pct": "%",
    "gbps": "GB/s",
    "tc": "tensor core",
    "sm": "SM",
    "l1": "L1",
    "l2": "L2",
    "dram": "DRAM",
    "inst": "instruction",
    "smem": "shared memory",
    "alu": "ALU",
    "eff": "efficiency",
    "util": "use",
    "c": "°C",
    "temp": "temperature",
    "pcie": "PCIe",
    "nvlink": "NVLink",
    "cp": "copies",
    "async": "asynchronous",
    "inflight": "in flight",
}


def run_analyses(recording: Recording) -> dict[str, Result]:
    """Return every analysis of the page by its kind. One that fails has no rows, and its reason in `missing`."""
    return {kind: _run_analysis(kind, recording) for kind in ANALYSES if len(recording.timeline)}


def _run_analysis(kind: str, recording: Recording) -> Result:
    try:
        result: Result = getattr(analyze, kind)(recording)
    except TesseraError as exc:  # the page is useful without this analysis
        reason = f"{exc.what}{f': {exc.fix}' if exc.fix else ''}"
        return Result(kind=kind, title=kind, columns=(), rows=(), missing={kind: reason})
    return result


def missing_fields(timeline: Timeline) -> dict[str, str]:
    """Return fields of device rows that nothing recorded, with what would provide them."""
    if not len(timeline.device_rows):
        return {}
    known = _known_fields(timeline)
    return {field: why for field, why in CAPABILITY.items() if field not in known}


def _known_fields(timeline: Timeline) -> set[str]:
    # The first rows are enough: fields are the same from kernel to kernel, and there may be millions of rows.
    extra: Iterable[Mapping[str, Any]] = islice(timeline.extra.values(), 2000)
    known = {key for fields in extra for key, value in fields.items() if value is not None}
    if timeline.energy_j is not None:
        known |= {"energy_j", "error_j", "power_w"}
    if (timeline["shapes"] >= 0).any():
        known |= {"shapes", "flops"}
    if timeline.rows("collective").size == 0:  # without collectives their path is not missing
        known |= {"collective_algorithm", "collective_path"}
    return known


def find_missing(
    results: Mapping[str, Result], timeline: Timeline, *, telemetry: bool = False
) -> list[tuple[str, str]]:
    """Return (what is missing, what would provide it), one line for each remedy; the catalogue's gaps come last."""
    on_device = len(timeline.device_rows) > 0
    by_remedy: dict[str, list[str]] = {}
    for result in results.values():
        for what, fix in result.missing.items():
            if what != "collectives":  # there were none: nothing is missing
                remedy = _REMEDIES.get(what, fix) if on_device or what == "flops" else fix
                by_remedy.setdefault(remedy, []).append(what)
    for field, why in missing_fields(timeline).items():
        if field not in _ALSO_NAMED and not (telemetry and field in ("temp_c", "throttle_reason")):
            by_remedy.setdefault(_CAPABILITY_REMEDIES.get(why, why), []).append(field)
    lines = sorted(by_remedy.items(), key=lambda line: line[1][0] in _CATALOGUE)
    return [(", ".join(dict.fromkeys(_NAMES.get(w, _spell_out(w)) for w in whats)), fix) for fix, whats in lines]


def _spell_out(field: str) -> str:
    if " " in field or not field.islower():
        return field
    words = [_WORDS.get(part, part) for part in field.split("_")]
    unit = [words.pop()] if words[-1] in ("%", "GB/s", "°C") else []
    return " ".join(words) + (f" ({unit[0]})" if unit else "")


def missing_section(lines: Sequence[tuple[str, str]]) -> str:
    """Return one line for each remedy: what it would show."""
    if not lines:
        return ""
    body = "".join(f"<dt>{prose(capitalize(what))}</dt><dd>{_show_command(fix)}</dd>" for what, fix in lines)
    return (
        "<section id='missing'><h2>What is missing, and what would provide it</h2>"
        f"<dl class='missing'>{body}</dl></section>"
    )


def _show_command(text: str) -> str:
    """Show the command or call at the end of a sentence as code."""
    before, colon, tail = text.rpartition(": ")
    is_code = colon and "`" not in tail and (tail.startswith("tessera ") or "=" in tail)
    return f"{prose(before)}: <code>{escape(tail)}</code>" if is_code else prose(text)
