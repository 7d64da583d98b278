"""A recorded run as one HTML page that needs no network: the answer, the timeline, the tables, how it was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from html import escape

from ..analyze.answer import Answer, answer
from ..analyze.correlate import Correlation, correlate_recording
from ..analyze.evidence import group_telemetry
from ..analyze.kernel_names import CATEGORIES, category, fit
from ..analyze.overview import EnergyNode, build_energy_tree, build_stack_tree, overview
from ..analyze.result import Result
from ..analyze.run_energy import stacks_of
from ..analyze.spikes import format_level
from ..config import find_cost
from ..recording import Recording
from ..units import format_duration, format_energy, format_energy_error, format_error, format_power, format_share
from . import run_analyses as analyses
from .energy import SUMMARY_NOTE
from .html import advice_section, capitalize, category_bar, document, note, page_header, prose, tile
from .job import job_section
from .measure import busy_text, describe_exit
from .predict import format_rate
from .run import (
    basis_text,
    children_text,
    interval_text,
    limit_cut,
    mode_text,
    outside_text,
    spent_text,
    spread_text,
    threads_text,
    traced_text,
)
from .run_provenance import find_missing, missing_section, provenance, run_analyses
from .run_tables import gaps, steps, tables
from .run_timeline import payload, timeline_section

_LEVEL_PX = 26
SECTIONS: dict[str, Callable[[Result], str]] = {
    "roofline": analyses.roofline,
    "stalls": analyses.stalls,
    "collectives": analyses.collectives,
    "memory": analyses.memory,
}


def page(
    recording: Recording,
    *,
    result: Answer | None = None,
    results: Mapping[str, Result] | None = None,
) -> str:
    """Return the page. `result` (the answer) and `results` (analyses by kind) are computed if not given."""
    lines, table = recording.timeline, recording.energy()
    result = result or answer(recording)
    correlation = correlate_recording(recording)
    if result.shared_by:
        table = dataclasses.replace(table, ops=result.ops, kernels=result.kernels)
    stacks = stacks_of(recording, table.energy_j) if result.shared_by and not table.kernels else []
    results = run_analyses(recording) if results is None else results
    view = overview(lines, recording.power, group_telemetry(recording.telemetry), table)
    curves = analyses.memory_lines(results.get("memory"), lines.start_ns - view.start_ns if len(lines) else 0)
    # A host without operators is busy in Python, so its power is not idle power.
    view = dataclasses.replace(view, telemetry=[*view.telemetry, *curves], idle_w=view.idle_w if view.rows else None)
    absent = find_missing(results, lines, telemetry=bool(view.telemetry))
    parts = [
        _header(result),
        advice_section([advice.text for advice in result.advice]),
        job_section(result.job) if result.job is not None else "",
        timeline_section(view, f"{format_energy_error(result.whole.energy_j, result.whole.error_j)} in total"),
        _tree(build_stack_tree(stacks) if stacks else build_energy_tree(lines, table), bool(stacks), bool(view.rows)),
        tables(table, result),
        steps(table),
        *(section(results[kind]) for kind, section in SECTIONS.items() if kind in results),
        gaps(result),
        _checklist(correlation) if correlation else "",
        missing_section(absent),
        provenance(recording, table, result, results, len(absent)),
    ]
    return document(f"{fit(result.name, 80)} - tessera", "".join(parts), data=payload(view, correlation))


# -- the answer -----------------------------------------------------------------------------------------------------


def _header(result: Answer) -> str:
    where = " · ".join(part for part in (result.device, mode_text(result), result.source) if part)
    figures = f"{_warnings(result)}{_tiles(result)}{_traced_note(result)}{_parts(result)}"
    return page_header(result.name, where, figures)


def _traced_note(result: Answer) -> str:
    """Return what the plots and tables cover, if that is not the whole run."""
    if not result.partial:
        return ""
    more = " `tessera run --limit 0` traces everything." if limit_cut(result) else ""
    rest = f" {capitalize(outside_text(result))}." if result.outside else ""
    return f"<p class='dim' role='note'>{prose(f'{capitalize(traced_text(result))}.{more}{rest}')}</p>"


def _warnings(result: Answer) -> str:
    lines = []
    if result.basis != "measured":
        lines.append(f"{basis_text(result)}.")
    if busy := busy_text(result.cpu_use):
        lines.append(f"{capitalize(busy)}.")
    if result.cut:
        lines.append(f"Incomplete: {result.cut}.")
    if result.shared_by:
        lines.append(f"Nothing was attributed: joules are divided by {result.shared_by}, {interval_text(result)}.")
        lines.append(SUMMARY_NOTE)
    if result.tracing is not None and result.tracing.text:
        lines.append(f"{capitalize(result.tracing.text)}.")
    if children := children_text(result):
        lines.append(f"Child processes: {children}.")
    if threads := threads_text(result):
        lines.append(f"Threads {threads}.")
    if result.returncode:
        lines.append(f"The program {describe_exit(result.returncode)}; the energy is up to then.")
    return "".join(f"<p class='warn' role='note'>{prose(line)}</p>" for line in lines)


def _tiles(result: Answer) -> str:
    """Return the whole run first; then a step and idle time of the traced part."""
    whole = result.whole
    tiles = [tile(format_energy_error(whole.energy_j, whole.error_j), "in total, 90% interval")]
    if whole.power_w is not None:
        peak = f", peak {format_power(result.peak_w, 3)}" if result.peak_w is not None else ""
        tiles.append(tile(format_error(whole.power_w, whole.error_w, "W"), f"on average{peak}"))
    count = f", {whole.steps:,} step{'' if whole.steps == 1 else 's'}" if whole.steps is not None else ""
    tiles.append(tile(format_duration(whole.time_s), f"wall time{count}"))
    if cost := find_cost(whole.energy_j, whole.error_j):
        electricity, *rest = cost.text.split("   ")
        tiles.append(tile(electricity, ", ".join(rest) or "electricity"))
    for per in result.per_work:
        rate = format_rate(per.rate_per_s)
        of = f" (of {per.amount:,.0f} traced)" if result.partial and per.unit == "step" else ""
        if per.traced_j is not None:
            of = f" (of {per.amount:,.0f} untraced; {format_energy(per.traced_j, 3)} traced)"
        if per.traced_steps is not None:
            of = f" (of {per.amount:,.0f} steps, {per.traced_steps:,} traced)"
        which = f"; {per.left_out}" if per.left_out is not None and per.unit == "step" else ""
        which = f"; {spread_text(per)}{which}" if per.spread is not None else which
        label = f"per {per.unit}{of}, {rate} {per.unit}s/s{which}"
        tiles.append(tile(spent_text(per), label))
    if result.idle_share is not None:
        idle_j = format_energy_error(result.idle_j or 0.0, result.idle_error_j)
        idle = f"{result.idle_name}: {idle_j}, {format_duration(result.idle_s or 0.0, 3)}"
        idle += " of the traced part" if result.partial else ""
        tiles.append(tile(format_share(result.idle_share), idle))
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _parts(result: Answer) -> str:
    parts = [(p.name, format_energy(p.energy_j, 3), p.share) for p in result.parts]
    return category_bar(parts) if parts else ""


# -- plots ----------------------------------------------------------------------------------------------------------


def _tree(tree: EnergyNode, sampled: bool, kernels: bool) -> str:
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
        f"{''.join(cells)}</div><p class='dim'>{what}; the width is the energy. "
        "Click to zoom in, click the top to zoom out.</p></section>"
    )


def _cells(node: EnergyNode, depth: int, left_j: float, whole_j: float, out: list[str]) -> int:
    """Add one button per node, with its children below it from left to right; return the deepest level."""
    left, wide = 100.0 * left_j / whole_j, 100.0 * node.energy_j / whole_j
    calls = f"{node.calls:,} times" if node.calls else ""
    lines = (f"{format_energy(node.energy_j, 3)}, {wide:.1f}%", node.kind, calls)
    text = "\n".join(line for line in lines if line)
    kind = f"k{CATEGORIES.index(category(node.name))}" if node.kind == "kernel" else node.kind
    label = "all" if node.kind == "run" else node.name
    out.append(
        f"<button type='button' class='{kind}{' thin' if wide < 2.2 else ''}' data-l='{left:.4f}' data-w='{wide:.4f}' "
        f"data-d='{depth}' data-n='{escape(fit(label, 200))}' data-t='{escape(text)}' "
        f"style='left:{left:.3f}%;width:{wide:.3f}%;top:{depth * _LEVEL_PX}px'>{escape(fit(label, 60))}</button>"
    )
    deepest = depth
    for child in node.children:
        deepest = max(deepest, _cells(child, depth + 1, left_j, whole_j, out))
        left_j += child.energy_j
    return deepest


# -- spikes ---------------------------------------------------------------------------------------------------------


def _checklist(correlation: Correlation) -> str:
    rows = "".join(
        f"<li><span class='v {escape(a.verdict)}'>{escape(a.verdict)}</span><b>{escape(a.question)}</b>"
        f"<p class='dim'>{prose(a.evidence.rstrip('.'))}.{prose(f' Needs {a.needs}.') if a.needs else ''}</p></li>"
        for a in correlation.checklist
    )
    count = len(correlation.spikes)
    about = (
        f"{count} spike{'' if count == 1 else 's'} above {format_level(correlation.threshold_w)} on "
        f"{correlation.domain} "
        f"(mean {format_power(correlation.mean_w, 3)}); they are shaded in the timeline."
    )
    notes = "".join(map(note, correlation.notes))
    return f"<section><h2>Spikes</h2><p>{escape(about)}</p><ul class='checks'>{rows}</ul>{notes}</section>"
