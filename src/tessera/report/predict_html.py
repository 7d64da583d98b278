"""Predictions as HTML: a card for notebooks, and one page that needs no network, light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..advice import Advice
from ..estimate.search import Sweep
from ..schema import EnergyReport
from ..units import format_duration, format_duration_error, format_energy, format_energy_error, format_power
from .html import capitalize, definitions, framed_page, number_cell, prose, table, template, tile
from .predict import (
    BOUNDS,
    chip_name,
    components,
    consumers,
    describe_setting,
    memory_text,
    million_cost,
    power_text,
    provenance,
    saving_text,
)
from .sweep import component_bar, sweep_section


def card(report: EnergyReport) -> str:
    """Return a report for a notebook: the key numbers, the components, the five most expensive subgraphs."""
    return f"<style>{template('predict.css')}</style><div class='tessera'>{_report(report, top=5)}</div>"


def page(
    content: EnergyReport | Sequence[EnergyReport] | Sweep, *, opportunities: Sequence[Advice] | None = None
) -> str:
    """Return one self-contained HTML file of a report, of several, or of a sweep."""
    if isinstance(content, Sweep):
        title, sections = content.name, [sweep_section(content)]
    else:
        reports = [content] if isinstance(content, EnergyReport) else list(content)
        title = ", ".join(dict.fromkeys(report.name for report in reports)) or "nothing"
        sections = [_report(report, top=20, kind="sort", opportunities=opportunities) for report in reports]
    body = "".join(f"<section>{section}</section>" for section in sections)
    return framed_page(f"{title} - tessera predict", body)


def _report(report: EnergyReport, *, top: int, kind: str = "", opportunities: Sequence[Advice] | None = None) -> str:
    """Return a report as HTML. `kind` is that of the tables: those of a card do not sort, because it has no script."""
    of = report.prediction
    where = f" on {chip_name(of.device)}" if of else ""
    parts = [f"<h2>{escape(report.name + where)}</h2><div class='dim'>{escape(describe_setting(report))}</div>"]
    parts += [_tiles(report), _components(report)]
    if report.descriptors:
        parts.append(_consumers(report, top, kind))
    elif report.by_domain:
        parts.append(_domains(report, kind))
    if opportunities:
        parts.append(f"<h3>Opportunities</h3><ul>{''.join(map(_opportunity, opportunities))}</ul>")
    sources = [("bound by", BOUNDS.get(of.bound, of.bound))] if of else []
    sources += [*provenance(report), *(("note", note) for note in report.notes)]
    if sources:
        summary = "<summary>Where the numbers come from</summary>"
        parts.append(f"<details>{summary}<dl>{definitions(sources)}</dl></details>")
    return "".join(parts)


def _tiles(report: EnergyReport) -> str:
    of, watts = report.prediction, report.average_power_w
    tiles = [
        tile(format_duration_error(report.total_latency_s, of.error_s if of else None), "time"),
        tile(format_energy_error(report.total_energy_j, report.total.error_j), "energy, 90% interval"),
    ]
    if watts is not None:
        tiles.append(tile(format_power(watts, 3), ", ".join(("average", *power_text(report)[1:]))))
    tiles += [tile(format_energy_error(joules, error), f"per {unit}") for unit, joules, error in report.per_work()]
    if cost := million_cost(report):
        electricity, *parts = cost[1].split("   ")
        tiles.append(tile(electricity, ", ".join((f"for {cost[0]}", *parts))))
    if of is not None:
        if of.peak_memory_bytes is not None:
            value, _, rest = memory_text(of.peak_memory_bytes, of.memory_capacity_bytes).partition(" of ")
            tiles.append(tile(value, f"of {rest}" if rest else "memory"))
        tiles.append(tile(capitalize(of.bound), f"limits it; {of.average_utilization:.0%} utilised"))
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _components(report: EnergyReport) -> str:
    parts = components(report)
    if not parts:
        return ""
    keys = "".join(
        f"<span><i class='{name.lower()}'></i>{name} ({share:.1%}): {escape(format_energy(joules, 3))}</span>"
        for name, joules, share in parts
    )
    return f"{component_bar(parts)}<p class='legend'>{keys}</p>"


def _consumers(report: EnergyReport, top: int, kind: str) -> str:
    rows = consumers(report, top)
    most = max((c.share for c in rows), default=1.0) or 1.0
    body = "".join(
        f"<tr>{number_cell(str(i), i)}<td class='name'>{escape(c.label)}</td><td>{escape(c.kind)}</td>"
        f"{number_cell(format_duration(c.latency_s, 3), c.latency_s)}"
        f"{number_cell(format_energy(c.energy_j, 3), c.energy_j)}{number_cell(f'{c.share:.1%}', c.share)}"
        f"<td>{component_bar(components(c), 100 * c.share / most)}</td></tr>"
        for i, c in enumerate(rows, 1)
    )
    columns = (("", True), ("subgraph", False), ("kind", False), ("time", True), ("energy", True), ("share", True))
    return f"<h3>Top consumers</h3>{table((*columns, ('', False)), body, kind=kind)}"


def _domains(report: EnergyReport, kind: str) -> str:
    """Return a measurement's power domains and regions: it has no subgraphs."""
    named = [*report.by_domain.items(), *((region.name, region.energy) for region in report.regions)]
    rows = "".join(
        f"<tr><td class='name'>{escape(name)}</td>{number_cell(format_energy_error(e.energy_j, e.error_j), e.energy_j)}"
        f"<td>{escape(e.source)}</td></tr>"
        for name, e in named
    )
    return f"<h3>Where</h3>{table((('where', False), ('energy', True), ('source', False)), rows, kind=kind)}"


def _opportunity(o: Advice) -> str:
    rest = prose(f"{o.action}; takes {format_duration(o.time_s or 0.0, 3)}")
    return f"<li><b>{escape(capitalize(o.kind))}</b>: {escape(saving_text(o))} <span class='dim'>- {rest}</span></li>"
