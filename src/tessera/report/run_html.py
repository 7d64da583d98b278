"""A recorded run as one HTML page that needs no network: the answer, the timeline, the tables, how it was measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from html import escape

from ..analyze.answer import Answer, answer, stacks_of
from ..analyze.correlate import Correlation
from ..analyze.evidence import group_telemetry
from ..analyze.icicle import Node, icicle, stack_tree
from ..analyze.kernel_names import CATEGORIES, category, fit
from ..analyze.overview import overview
from ..analyze.result import Result
from ..analyze.spikes import format_level
from ..attribute.table import EnergyTable
from ..profile.runfile import RunFile
from ..timeline.columns import Timeline
from ..units import format_duration, format_energy, format_power, format_share
from . import run_sections as sections
from .energy import SEEN, joules
from .predict import capital
from .run import limit_cut, mode_text, outside_text, traced_text
from .run_data import payload
from .run_origin import origin
from .run_parts import note, prose
from .run_results import missing, results_of
from .run_roofline import roofline
from .run_tables import gaps, steps, tables
from .shell import SWITCH, document
from .text import ended_text, with_error

_LEVEL_PX = 26
_ROW_TOOLS = (("zoom-in", "Zoom in"), ("zoom-out", "Zoom out"), ("zoom-all", "Whole run"), ("zoom-one", "One step"))
_SECTIONS: dict[str, Callable[[Result], str]] = {
    "roofline": roofline,
    "stalls": sections.stalls,
    "collectives": sections.collectives,
    "memory": sections.memory,
}


def page(
    run: RunFile,
    table: EnergyTable,
    correlation: Correlation | None = None,
    *,
    timeline: Timeline | None = None,
    found: Answer | None = None,
    results: Mapping[str, Result] | None = None,
) -> str:
    """The page. `timeline`, `found` and `results` (analyses by kind) save reading and computing them again."""
    lines = run.timeline() if timeline is None else timeline
    said = found or answer(run, table, lines)
    if said.shared_by:
        table = dataclasses.replace(table, ops=said.ops, kernels=said.kernels)
    stacks = stacks_of(run, run.power(), table.total_j) if said.shared_by and not table.kernels else []
    results = results_of(run, table, lines) if results is None else results
    view = overview(lines, run.power(), group_telemetry(run.telemetry()), table)
    curves = sections.memory_lines(results.get("memory"), lines.start_ns - view.start_ns if len(lines) else 0)
    # A host without operators is in Python: that is no level at which it waits.
    view = dataclasses.replace(view, telemetry=[*view.telemetry, *curves], idle_w=view.idle_w if view.rows else None)
    absent = missing(results, lines, telemetry=bool(view.telemetry))
    parts = [
        _header(said),
        _findings(said),
        _timeline(view.rows, view.merged, bool(view.power or view.lanes), view.one is not None, said),
        _tree(stack_tree(stacks) if stacks else icicle(lines, table), bool(stacks), bool(view.rows)),
        tables(table, said),
        steps(table),
        *(section(results[kind]) for kind, section in _SECTIONS.items() if kind in results),
        gaps(said),
        _checklist(correlation) if correlation else "",
        sections.lacking(absent),
        origin(run, table, said, results, len(absent)),
    ]
    return document(f"{fit(said.name, 80)} - tessera", "".join(parts), data=payload(view, correlation))


# -- the answer -----------------------------------------------------------------------------------------------------


def _header(said: Answer) -> str:
    where = " · ".join(part for part in (said.device, mode_text(said), said.source) if part)
    return (
        f"<header><div class='top'><div><h1>{escape(said.name)}</h1><div class='dim'>{escape(where)}</div></div>"
        f"{SWITCH}</div>"
        f"{_warnings(said)}{_tiles(said)}{_traced(said)}{_parts(said)}</header>"
    )


def _traced(said: Answer) -> str:
    """What the pictures and tables are of, where that is not the whole run."""
    if not said.partial:
        return ""
    more = " `tessera run --limit 0` traces all." if limit_cut(said) else ""
    rest = f" {capital(outside_text(said))}." if said.outside else ""
    return f"<p class='dim' role='note'>{prose(f'{capital(traced_text(said))}.{more}{rest}')}</p>"


def _warnings(said: Answer) -> str:
    lines = []
    if said.basis != "measured":
        lines.append(f"{said.basis.upper()}, not measured: `tessera doctor` says which sensor this machine could have.")
    if said.cut:
        lines.append(f"Cut: {said.cut}.")
    if said.shared_by:
        lines.append(f"Nothing was attributed: joules are shared out by {said.shared_by}, a model without an interval.")
        lines.append(SEEN)
    if said.tracing is not None and said.tracing.text:
        lines.append(f"{capital(said.tracing.text)}.")
    if said.returncode:
        lines.append(f"The program {ended_text(said.returncode)}: these are the joules until then.")
    return "".join(f"<p class='warn' role='note'>{prose(line)}</p>" for line in lines)


def _tiles(said: Answer) -> str:
    """The whole run first; a step, and what was idle, are of what was traced."""
    whole = said.whole
    tiles = [_tile(joules(whole.energy_j, whole.error_j), "in all, 90% interval")]
    if whole.power_w is not None:
        peak = f", peak {format_power(said.peak_w, 3)}" if said.peak_w is not None else ""
        tiles.append(_tile(with_error(whole.power_w, whole.power_error_w, "W"), f"on average{peak}"))
    count = f", {whole.steps:,} step{'' if whole.steps == 1 else 's'}" if whole.steps is not None else ""
    tiles.append(_tile(format_duration(whole.seconds), f"wall time{count}"))
    for per in said.per_work:
        rate = f"{per.rate_per_s:,.0f}" if per.rate_per_s >= 100 else f"{per.rate_per_s:.3g}"
        of = f" (of {per.amount:,.0f} traced)" if said.partial and per.unit == "step" else ""
        if per.traced_j is not None:
            of = f" (of {per.amount:,.0f} untraced; {format_energy(per.traced_j, 3)} traced)"
        which = f"; {per.left_out}" if per.left_out is not None and per.unit == "step" else ""
        about = "~" if math.isnan(per.error_j) else ""
        label = f"per {per.unit}{of}, {rate} {per.unit}s/s{which}"
        tiles.append(_tile(about + joules(per.energy_j, per.error_j), label))
    if said.idle_share is not None:
        idle = f"idle: {joules(said.idle_j or 0.0, said.idle_error_j)}, {format_duration(said.idle_s or 0.0, 3)}"
        idle += " of what was traced" if said.partial else ""
        tiles.append(_tile(format_share(said.idle_share), idle))
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _tile(value: str, label: str) -> str:
    number, plus, rest = value.partition(" ± ")
    shown = f"{escape(number)} <small>± {escape(rest)}</small>" if plus else escape(value)
    return f"<div class='tile'><b>{shown}</b><span>{escape(label)}</span></div>"


def kind_class(name: str) -> str:
    """The colour of a category."""
    return "kidle" if name == "idle" else f"k{CATEGORIES.index(name)}"


def _parts(said: Answer) -> str:
    if not said.parts:
        return ""
    pieces = "".join(
        f"<i class='{kind_class(p.name)}' style='width:{100 * p.share:.2f}%'></i>" for p in said.parts if p.share > 0
    )
    shares = [format_share(p.share) for p in said.parts]
    said_of = [
        (kind_class(p.name), f"{p.name} {format_energy(p.energy_j, 3)} ({share})")
        for p, share in zip(said.parts, shares, strict=True)
    ]
    keys = "".join(f"<li><i class='{kind}'></i>{escape(text)}</li>" for kind, text in said_of)
    return f"<div class='bar' aria-hidden='true'>{pieces}</div><ul class='legend'>{keys}</ul>"


def _findings(said: Answer) -> str:
    if not said.findings:
        return ""
    first, *rest = said.findings
    more = "".join(f"<li>{prose(capital(f.text))}</li>" for f in rest)
    also = f"<ul class='also'>{more}</ul>" if more else ""
    return f"<section class='do'><b>Do this first</b><p>{prose(capital(first.text))}.</p></section>{also}"


# -- pictures -------------------------------------------------------------------------------------------------------


def _timeline(rows: int, merged: int, any_lines: bool, one: bool, said: Answer) -> str:
    if not any_lines:
        return ""
    buttons = "".join(
        f"<button type='button' id='{name}'>{text}</button>" for name, text in _ROW_TOOLS if name != "zoom-one" or one
    )
    beneath = f" with {rows} kernels beneath" if rows else ""
    label = (
        f"Power over time{beneath}; {joules(said.whole.energy_j, said.whole.error_j)} in all. "
        "The tables below have the same numbers."
    )
    drawn = f"{rows:,} kernels"
    if merged:
        drawn += f"; {merged:,} of them, too short to see, are drawn together, but for one step that is whole"
    drawn = f"{drawn}. Colours are those of the bar above." if rows else ""
    return (
        "<section><h2>Power and what ran</h2>"
        f"<div class='tools'>{buttons}<span class='dim'>drag to pan, Ctrl or Shift + wheel or double click to zoom; "
        "keys ← → + − 0</span></div>"
        f"<figure><div class='plot'><canvas id='timeline' tabindex='0' role='img' aria-label='{escape(label)}'>"
        f"</canvas></div><figcaption>{escape(drawn)}</figcaption></figure>"
        "</section>"
    )


def _tree(tree: Node, sampled: bool, kernels: bool) -> str:
    if not tree.children or not tree.energy_j > 0:
        return ""
    cells: list[str] = []
    depth = _cells(tree, 0, 0.0, tree.energy_j, cells)
    height = (depth + 1) * _LEVEL_PX
    nested = "Region, operator, kernel" if kernels else "Region, operator"
    what = "Python functions as sampled, callers on top" if sampled else nested
    return (
        "<section><h2>Where the joules went</h2>"
        f"<div class='icicle' style='height:{height}px' role='group' aria-label='Joules: {what}'>"
        f"{''.join(cells)}</div><p class='dim'>{what}; as wide as their joules. "
        "Click to look closer, click the top to come back.</p></section>"
    )


def _cells(node: Node, depth: int, left_j: float, whole_j: float, out: list[str]) -> int:
    """One button a branch, and its children below it from left to right. Returns the deepest level."""
    left, wide = 100.0 * left_j / whole_j, 100.0 * node.energy_j / whole_j
    calls = f"{node.calls:,} times" if node.calls else ""
    said = "\n".join(part for part in (f"{format_energy(node.energy_j, 3)}, {wide:.1f}%", node.kind, calls) if part)
    kind = f"k{CATEGORIES.index(category(node.name))}" if node.kind == "kernel" else node.kind
    label = "all" if node.kind == "run" else node.name
    out.append(
        f"<button type='button' class='{kind}{' thin' if wide < 2.2 else ''}' data-l='{left:.4f}' data-w='{wide:.4f}' "
        f"data-d='{depth}' data-n='{escape(fit(label, 200))}' data-t='{escape(said)}' "
        f"style='left:{left:.3f}%;width:{wide:.3f}%;top:{depth * _LEVEL_PX}px'>{escape(fit(label, 60))}</button>"
    )
    deepest = depth
    for child in node.children:
        deepest = max(deepest, _cells(child, depth + 1, left_j, whole_j, out))
        left_j += child.energy_j
    return deepest


# -- what is said beside --------------------------------------------------------------------------------------------


def _checklist(found: Correlation) -> str:
    rows = "".join(
        f"<li><span class='v {escape(a.verdict)}'>{escape(a.verdict)}</span><b>{escape(a.question)}</b>"
        f"<p class='dim'>{prose(a.evidence.rstrip('.'))}.{prose(f' Needs {a.needs}.') if a.needs else ''}</p></li>"
        for a in found.checklist
    )
    count = len(found.spikes)
    about = (
        f"{count} spike{'' if count == 1 else 's'} above {format_level(found.threshold_w)} on {found.domain} "
        f"(mean {format_power(found.mean_w, 3)}); they are shaded in the timeline."
    )
    notes = "".join(map(note, found.notes))
    return f"<section><h2>Spikes</h2><p>{escape(about)}</p><ul class='checks'>{rows}</ul>{notes}</section>"
