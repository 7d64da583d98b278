"""Where every number of a run's page comes from: measured, attributed, computed from shapes, modelled, or missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from ..analyze.answer import Answer
from ..analyze.kernel_names import fit
from ..analyze.result import Result
from ..analyze.slowdown import Slowdown
from ..attribute.table import EnergyTable
from ..profile.runfile import RunFile
from ..units import format_duration, format_power
from .run_parts import prose

_TELEMETRY = ("clocks", "temperature", "throttling")

Known = tuple[str, str, str]  # what, how it is known, from where

_HOW = (
    "Joules are {known} over the {span}; each kernel's share is what fits the power samples best, "
    "given when each ran. A kernel's joules contain the board's static power while it ran; idle is what was drawn "
    "while none did, and all rows sum to the total. ± is the half-width of a 90% interval. Kernels with the same "
    "letter always ran together, so that only their sum is known well."
)
_HOW_MODELLED = (
    "Joules are {known} over the {span}: power modelled by the host's utilisation, which cannot tell what ran apart. "
    "So each row has its share by the time it ran; idle is what was drawn while nothing did, and all rows sum to the "
    "total. ± is the half-width of a 90% interval."
)
_HOW_SHARED = (
    "Joules of the whole run, of regions and of steps are {known}. Nothing was traced, so what is below "
    "them is shared out, as if everything drew the same watts at the same time. ± is the half-width of a 90% interval."
)


def origin(run: RunFile, table: EnergyTable, said: Answer, results: Mapping[str, Result], lacking: int) -> str:
    """The section: how each figure is known, then the facts of the run as it stated them."""
    rows = [*_joules(run, table, said), *_results(results)]
    if lacking:
        rows.append(("the rest", "missing", f"{lacking} things, each with what would provide it: see above"))
    body = "".join(
        f"<tr><td>{escape(what)}</td><td><span class='tag {how.split()[0]}'>{escape(how)}</span></td>"
        f"<td class='wrap'>{prose(where)}</td></tr>"
        for what, how, where in rows
    )
    notes = "".join(f"<li>{prose(note)}</li>" for note in said.notes)
    known = "measured by the sensor" if said.basis == "measured" else f"{said.basis}, not measured by any sensor,"
    how = _HOW_SHARED if said.shared_by else _HOW_MODELLED if said.basis == "modelled" else _HOW
    how = how.format(known=known, span="part that was traced" if said.partial else "whole run")
    how = how.replace(",.", ".")
    return (
        f"<section id='origin'><h2>How it was measured</h2><p>{escape(how)}</p>"
        f"{f'<ul>{notes}</ul>' if notes else ''}<div class='scroll'><table><caption class='sr'>How each figure is known"
        "</caption><thead><tr><th scope='col'>what</th><th scope='col'>known by</th><th scope='col'>from</th></tr>"
        f"</thead><tbody>{body}</tbody></table></div>{_facts(run)}</section>"
    )


def _joules(run: RunFile, table: EnergyTable, said: Answer) -> Iterator[Known]:
    if table.total_j >= 0:
        yield "energy of the run", said.basis, f"{said.source}, {said.coverage:.1%} of the time seen"
    else:
        yield "energy of the run", "missing", "no power was recorded"
    for domain in run.power().domains:
        detail = f"{domain.source}, every {format_duration(domain.resolution_s, 3)}"
        detail += f", {domain.label}" if domain.label else ""
        detail += f"; {domain.note}" if domain.note else ""
        yield f"power of {domain.name}", domain.basis, f"{detail}{'' if domain.counted else ' (in another domain)'}"
    if said.shared_by:
        yield "energy of what ran", "modelled", f"shared out by {said.shared_by}, without an interval"
    elif table.kernels or table.ops:
        what = "energy of kernels" if table.kernels else "energy of operators"
        fitted = "fitted to the power samples by when each ran, with an interval"
        by_time = "shared out by the time of each: modelled power knows no operators"
        yield what, "attributed", by_time if said.basis == "modelled" else fitted
    if table.idle_w is not None:
        between = "kernels" if table.kernels else "operators"
        yield "idle power", "attributed", f"{format_power(table.idle_w, 3)} between {between}"
    if said.tracing is not None:
        yield "what tracing did", *_tracing(said.tracing)
    if told := _told(run):
        yield told, "measured", "the device's own readings"


def _tracing(found: Slowdown) -> tuple[str, str]:
    times = f"{found.slowdown:.2f}x" if found.slowdown is not None else "unknown"
    if found.basis == "steps":
        steps = f"{found.traced_steps:,} traced steps against {found.untraced_steps:,} untraced"
        return "measured", f"{times} ± {found.slowdown_error:.2f}: {steps}"
    return "modelled", f"{times} at most, by the number of events: {found.reason}"


def _told(run: RunFile) -> str:
    """What the devices said of themselves beside power, in words; nothing of a host that only counts its load."""
    found: dict[str, bool] = {}
    for t in run.telemetry():
        found |= {"clocks": True} if t.clocks_mhz else {}
        found |= {"temperature": True} if t.temperature_c is not None else {}
        found |= {"throttling": True} if t.throttle is not None else {}
        if len(found) == len(_TELEMETRY):
            break
    return ", ".join(name for name in _TELEMETRY if name in found)


def _results(results: Mapping[str, Result]) -> Iterator[Known]:
    roofline = results.get("roofline")
    rows = roofline.rows if roofline is not None else ()
    if roofline is not None and any(r.get("flop_per_s") for r in rows):
        yield "FLOPs", "computed", "from the recorded shapes of operators"
        counted = any(r.get("bytes_from") == "ncu" for r in rows)
        where = (
            "in device memory, by hardware counters" if counted else "the least that shapes ask for: each tensor once"
        )
        yield "bytes moved", "measured" if counted else "computed", where
        name = roofline.facts.get("device_name")
        if name:
            yield "roofs", "catalogue", f"{name}: `tessera hardware show {roofline.facts['device']}` has the sources"
    stalls = results.get("stalls")
    if stalls is not None and stalls.rows:
        yield "stalls", "measured", "hardware counters of a replay: the same kernels, not the same run"
    collectives = results.get("collectives")
    if collectives is not None and collectives.rows:
        yield "collectives", "measured", "times as traced, bytes as the collective states them"
    memory = results.get("memory")
    if memory is not None and memory.rows:
        yield "memory", "measured", "PyTorch's allocator"


def _facts(run: RunFile) -> str:
    rows = [("gap", f"{gap.domain}: {gap.reason}") for gap in list(run.power().gaps)[:5]]
    rows += [(key.removesuffix("_ns"), _fact(key, value)) for key, value in sorted(run.meta.items())]
    rows += [(key, run.about[key]) for key in ("tessera", "host") if key in run.about and key not in run.meta]
    rows.append(("file", str(run.path)))
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    return f"<details><summary>The run as it was started</summary><dl>{cells}</dl></details>"


def _fact(key: str, value: object) -> str:
    if key.endswith("_ns") and isinstance(value, int):
        return datetime.fromtimestamp(value * 1e-9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if isinstance(value, Mapping):
        return fit(", ".join(f"{k}: {v}" for k, v in value.items()), 400)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return fit(" ".join(str(v) for v in value), 400)
    return fit(str(value), 400)
