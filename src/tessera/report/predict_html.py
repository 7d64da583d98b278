"""Predictions as HTML: a card for notebooks, and one page that needs no network, light or dark as its reader likes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..advice import Advice
from ..estimate.search import Sweep, SweepRow
from ..schema import EnergyReport
from ..units import format_bytes, format_duration, format_energy, format_power
from . import predict as sweeps
from . import predict_parts as shared
from .predict import capital
from .predict_parts import components, consumers, ties, time_text
from .run_parts import prose
from .scatter import Dot, scatter
from .shell import SWITCH, document
from .text import energy_text

_STYLE = """
.tessera{--c:#2f9e6e;--m:#2b8fc4;--s:#e0a02c;--line:rgba(128,128,128,.28);--soft:rgba(128,128,128,.10);
font:14px/1.45 system-ui,sans-serif;color:inherit;font-variant-numeric:tabular-nums}
.tessera h2{font-size:20px;margin:0 0 2px}.tessera h3{font-size:15px;margin:26px 0 8px}
.tessera .dim{opacity:.68}.tessera .tiles{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}
.tessera .tile{border:1px solid var(--line);border-radius:8px;padding:8px 14px;min-width:118px}
.tessera .tile b{display:block;font-size:18px;font-weight:600;white-space:nowrap}
.tessera .tile small{opacity:.68;font-size:12px;display:block}.tessera .wide .tile{flex:1 1 0;min-width:250px}
.tessera .bar{display:flex;height:18px;border-radius:5px;overflow:hidden;background:var(--soft)}
.tessera .bar i{display:block;min-width:0}.tessera .compute{background:var(--c)}.tessera .memory{background:var(--m)}
.tessera .static{background:var(--s)}.tessera .legend{margin:6px 0 0;display:flex;flex-wrap:wrap;gap:4px 18px}
.tessera .legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
.tessera .legend i.line{height:0;width:18px;border-top:2px dashed currentColor;border-radius:0;vertical-align:middle}
.tessera table{border-collapse:collapse;width:100%;font-size:13px}
.tessera th,.tessera td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line);white-space:nowrap}
.tessera th{font-weight:600}
.tessera .n{text-align:right}.tessera td.name{white-space:normal;word-break:break-word}
.tessera td .bar{height:9px;width:110px;border-radius:3px}.tessera tr.front td{background:rgba(47,158,110,.13)}
.tessera tr:hover td{background:var(--soft)}
.tessera ul{list-style:none;padding:0;margin:0}
.tessera li{margin:3px 0}.tessera li::before{content:"✓";color:var(--c);font-weight:700;margin-right:8px}
.tessera .scroll{overflow-x:auto}.tessera svg{width:100%;height:auto;max-width:1040px;min-width:620px}
.tessera .grid{stroke:var(--line)}.tessera .tick,.tessera .label{font-size:11px;fill:currentColor;opacity:.75}
.tessera .axis{font-size:12px;fill:currentColor;text-anchor:middle}.tessera .label.front{font-weight:600;opacity:1}
.tessera .frontier{fill:none;stroke:currentColor;stroke-width:1.5;stroke-dasharray:6 4;opacity:.55}
.tessera .whisker{fill:none;stroke-width:1;opacity:.13}.tessera .front .whisker{opacity:.45}
.tessera .point:hover .whisker{opacity:1}.tessera .point:hover circle{stroke:currentColor;stroke-width:2}
.tessera .front circle{stroke:currentColor;stroke-width:1.5}
.tessera .label{paint-order:stroke;stroke:var(--paper,transparent);stroke-width:3px;stroke-linejoin:round}
.tessera details{margin-top:18px;font-size:13px}.tessera summary{cursor:pointer;opacity:.68}
.tessera dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px;margin:8px 0}
.tessera dt{opacity:.68}.tessera dd{margin:0}
"""
# The colours of a bar, as a stranger would ask for them.
_KEY = {
    "compute": "arithmetic",
    "memory": "moving data",
    "static": "power the chip draws whatever it does",
}
# Beside what the pages of runs have.
_PAGE_STYLE = """
main{max-width:1120px}.tessera #theme{float:right}.tessera .dim{opacity:1}
section+section{border-top:1px solid rgba(128,128,128,.28);margin-top:34px;padding-top:26px}
"""


def card(report: EnergyReport) -> str:
    """A report for a notebook: the key numbers, the components, the five dearest subgraphs."""
    return f"<style>{_STYLE}</style><div class='tessera'>{_report(report, top=5)}</div>"


def page(shown: EnergyReport | Sequence[EnergyReport] | Sweep, *, opportunities: Sequence[Advice] | None = None) -> str:
    """One HTML file of a report, of several, or of a sweep. It needs nothing but itself."""
    if isinstance(shown, Sweep):
        title, sections = shown.name, [_sweep(shown)]
    else:
        reports = [shown] if isinstance(shown, EnergyReport) else list(shown)
        title = ", ".join(dict.fromkeys(report.name for report in reports)) or "nothing"
        sections = [_report(report, top=20, sort=True, opportunities=opportunities) for report in reports]
    body = "".join(f"<section>{section}</section>" for section in sections)
    frame = f"<div class='tessera'>{SWITCH}{body}</div>"
    return document(f"{title} - tessera predict", frame, style=_STYLE + _PAGE_STYLE)


# -- one report -----------------------------------------------------------------------------------------------------


def _report(
    report: EnergyReport, *, top: int, sort: bool = False, opportunities: Sequence[Advice] | None = None
) -> str:
    of = report.prediction
    where = f" on {shared.chip_name(of.device)}" if of else ""
    parts = [
        f"<h2>{escape(report.name + where)}</h2><div class='dim'>{escape(shared.setting(report))}</div>",
        _tiles(report),
    ]
    parts.append(_component_bar(report))
    if report.descriptors:
        parts.append(_consumers(report, top, sort=sort))
    elif report.by_domain:
        parts.append(_domains(report, sort=sort))
    if opportunities:
        parts.append(f"<h3>Opportunities</h3><ul>{''.join(map(_opportunity, opportunities))}</ul>")
    parts.append(_origins(report))
    return "".join(parts)


def _tile(value: str, label: str) -> str:
    return f"<div class='tile'><b>{escape(value)}</b><small>{escape(label)}</small></div>"


def _tiles(report: EnergyReport) -> str:
    of, watts = report.prediction, report.average_power_w
    tiles = [
        _tile(time_text(report.total_latency_s, of.latency_error_s if of else None), "time"),
        _tile(energy_text(report.total_energy_j, report.total.error_j), "energy, 90% interval"),
    ]
    if watts is not None:
        tiles.append(_tile(format_power(watts, 3), ", ".join(("average", *shared.power_text(report)[1:]))))
    tiles += [_tile(energy_text(joules, error), f"per {unit}") for unit, joules, error in report.per_work()]
    if of is not None:
        if of.peak_memory_bytes is not None:
            used = shared.memory_text(of.peak_memory_bytes, of.memory_capacity_bytes)
            value, _, rest = used.partition(" of ")
            tiles.append(_tile(value, f"of {rest}" if rest else "memory"))
        tiles.append(_tile(capital(of.bound), f"bounds it; {of.average_utilization:.0%} utilised"))
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _component_bar(report: EnergyReport) -> str:
    parts = components(report)
    if not parts:
        return ""
    keys = "".join(
        f"<span><i class='{name.lower()}'></i>{name} ({share:.1%}): {escape(format_energy(joules, 3))}</span>"
        for name, joules, share in parts
    )
    return f"{_bar(parts)}<p class='legend'>{keys}</p>"


def _bar(parts: Sequence[tuple[str, float, float]], length_pct: float = 100.0) -> str:
    pieces = "".join(
        f"<i class='{name.lower()}' style='width:{length_pct * share:.2f}%' "
        f"title='{name} {share:.1%}, {escape(format_energy(joules, 3))}'></i>"
        for name, joules, share in parts
    )
    return f"<div class='bar'>{pieces}</div>"


def _grid(columns: Sequence[tuple[str, bool]], rows: str, *, sort: bool) -> str:
    """A table under (name, whether it holds numbers); a page sorts it by the heading clicked, a card has no script."""
    cells = "".join(
        f"<th scope='col'{' class=n' if number else ''}>"
        f"{f'<button type=button>{escape(name)}</button>' if sort and name else escape(name)}</th>"
        for name, number in columns
    )
    kind = " class='sort'" if sort else ""
    head = f"<thead><tr>{cells}</tr></thead>"
    return f"<div class='scroll'><table{kind}>{head}<tbody>{rows}</tbody></table></div>"


def _number(text: str, value: float | None) -> str:
    return f"<td class='n' data-v='{value:.6g}'>{escape(text)}</td>" if value is not None else "<td class='n'>-</td>"


def _consumers(report: EnergyReport, top: int, *, sort: bool) -> str:
    found = consumers(report, top)
    most = max((c.share for c in found), default=1.0) or 1.0
    rows = []
    for i, c in enumerate(found, 1):
        name = c.name if c.count == 1 else f"{c.name} ×{c.count}"
        numbers = (
            _number(format_duration(c.latency_s, 3), c.latency_s),
            _number(format_energy(c.energy_j, 3), c.energy_j),
            _number(f"{c.share:.1%}", c.share),
        )
        rows.append(
            f"<tr>{_number(str(i), i)}<td class='name'>{escape(name)}</td><td>{escape(c.kind)}</td>{''.join(numbers)}"
            f"<td>{_bar(components(c), 100 * c.share / most)}</td></tr>"
        )
    columns = (("", True), ("subgraph", False), ("kind", False), ("time", True), ("energy", True), ("share", True))
    return f"<h3>Top consumers</h3>{_grid((*columns, ('', False)), ''.join(rows), sort=sort)}"


def _domains(report: EnergyReport, *, sort: bool) -> str:
    """A measurement has no subgraphs: what it has are the places where power is drawn, and its regions."""
    named = [*report.by_domain.items(), *((region.name, region.energy) for region in report.regions)]
    rows = "".join(
        f"<tr><td class='name'>{escape(name)}</td>{_number(energy_text(e.joules, e.error_j), e.joules)}"
        f"<td>{escape(e.source)}</td></tr>"
        for name, e in named
    )
    columns = (("where", False), ("energy", True), ("source", False))
    return f"<h3>Where</h3>{_grid(columns, rows, sort=sort)}"


def _opportunity(o: Advice) -> str:
    saves = f"saves {energy_text(o.saves_j, o.error_j or 0.0)} per {o.unit} ({o.saves_share:.0%})"
    rest = f"{o.action}; takes {format_duration(o.time_s or 0.0, 3)}"
    return f"<li><b>{escape(capital(o.kind))}</b>: {escape(saves)} <span class='dim'>- {prose(rest)}</span></li>"


def _origins(report: EnergyReport) -> str:
    of = report.prediction
    rows = [("bound by", shared.BOUNDS.get(of.bound, of.bound))] if of else []
    rows += [*shared.origin(report), *(("note", note) for note in report.notes)]
    if not rows:
        return ""
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{prose(text)}</dd>" for name, text in rows)
    return f"<details><summary>Where the numbers come from</summary><dl>{cells}</dl></details>"


# -- a sweep --------------------------------------------------------------------------------------------------------


def _sweep(found: Sweep) -> str:
    front = set(map(id, found.pareto()))
    about = f"{found.mode}, {found.launch}; {len(found.feasible)} of {len(found.rows)} combinations are possible"
    parts = [f"<h2>{escape(found.name)}</h2><div class='dim'>{escape(about)}</div>", _choice_tiles(found)]
    parts += [
        f"<p role='note'>{escape(capital(tie))}. They differ by less than their intervals.</p>" for tie in ties(found)
    ]
    dots = [_dot(row, id(row) in front, label) for row, label in zip(found.feasible, _labels(found), strict=True)]
    if dots:
        parts.append(f"<h3>Latency against energy per sample</h3><div class='scroll'>{scatter(dots)}</div>")
    parts.append(_table(found, front))
    impossible = sweeps.reasons([row for row in found.rows if not row.feasible])
    if impossible:
        cells = "".join(f"<dt>{escape(name)}</dt><dd>{prose(reason)}</dd>" for name, reason in impossible)
        parts.append(f"<h3>Not possible</h3><dl>{cells}</dl>")
    return "".join(parts)


def _choice_tiles(found: Sweep) -> str:
    tiles: list[str] = []
    named: dict[int, tuple[SweepRow, list[str]]] = {}
    for label, row in sweeps.choices(found):
        named.setdefault(id(row), (row, []))[1].append(label)
    for row, labels in named.values():
        rate = f"{row.throughput_per_s or 0:,.0f} samples/s"
        joules = format_energy(row.energy_per_sample_j or 0.0, 3)
        detail = f"{', '.join(labels)}: {joules} per sample, {format_duration(row.time_s or 0.0, 3)}, {rate}"
        tiles.append(_tile(shared.row_name(row), detail))
    return f"<div class='tiles wide'>{''.join(tiles)}</div>"


def _labels(found: Sweep) -> list[str]:
    """What tells each point from the others: its chip, precision, batch, as far as they differ."""
    rows = found.feasible
    parts = [(row.on, row.precision or "", f"b{row.batch}" if row.batch else "") for row in rows]
    differs = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    named = [" ".join(part for part, shown in zip(of, differs, strict=True) if shown and part) for of in parts]
    return [name or row.on for name, row in zip(named, rows, strict=True)]


def _dot(row: SweepRow, frontier: bool, label: str) -> Dot:
    joules, latency = row.energy_per_sample_j or 0.0, row.time_s or 0.0
    error_j, error_s = row.error_per_sample_j or 0.0, row.error_s or 0.0
    lines = [shared.row_name(row), time_text(latency, error_s), f"{energy_text(joules, error_j)} per sample"]
    lines += [f"{row.throughput_per_s or 0:,.0f} samples/s", format_power(row.average_power_w or 0.0, 3)]
    return Dot(
        x=latency, y=joules, error_x=error_s, error_y=error_j, group=row.on, label=label,
        title="\n".join(lines), frontier=frontier,
    )  # fmt: skip


def _table(found: Sweep, front: set[int]) -> str:
    columns = (
        ("", False), ("chip", False), ("precision", False), ("batch", True), ("latency", True), ("energy/sample", True),
        ("samples/s", True), ("power", True), ("memory", True), ("bound by", False), ("joules go to", False),
    )  # fmt: skip
    rows = "".join(_row(row, id(row) in front) for row in found.feasible)
    note = (
        "Highlighted rows are on the Pareto frontier; ± is the half-width of a 90% interval. Click a heading to sort."
    )
    keys = "".join(f"<span><i class='{name}'></i>{name}: {escape(what)}</span>" for name, what in _KEY.items())
    return (
        f"<h3>All combinations</h3>{_grid(columns, rows, sort=True)}"
        f"<p class='legend'>{keys}</p><p class='dim'>{escape(note)}</p>"
    )


def _row(row: SweepRow, frontier: bool) -> str:
    joules, latency, rate = row.energy_per_sample_j, row.time_s, row.throughput_per_s
    cells = [f"<td>{'★' if frontier else ''}</td><td>{escape(row.on)}</td><td>{escape(row.precision or '-')}</td>"]
    cells.append(_number(str(row.batch), row.batch))
    cells.append(_number(time_text(latency or 0.0, row.error_s), latency))
    cells.append(_number(energy_text(joules or 0.0, row.error_per_sample_j), joules))
    cells.append(_number(f"{rate or 0:,.0f}", rate))
    cells.append(_number(f"{row.average_power_w or 0:.0f} W", row.average_power_w))
    cells.append(_number(format_bytes(row.peak_memory_bytes or 0, 3), row.peak_memory_bytes))
    cells.append(f"<td>{escape(row.bound or '-')}</td><td>{_bar(components(row))}</td>")
    return f"<tr{' class=front' if frontier else ''}>{''.join(cells)}</tr>"
