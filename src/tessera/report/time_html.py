"""A recording without power as one HTML page: time by device, kind of work, operator, region, module and kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

from ..analyze.kernel_names import CATEGORIES, category, fit, fit_all
from ..analyze.overview import overview
from ..analyze.time_answer import VIEWS, DeviceTime, TimeAnswer, TimeRow
from ..recording import Recording
from ..units import format_duration, format_share
from . import run_analyses as analyses
from .energy import TITLES, display_names
from .html import (
    FOLDED,
    advice_section,
    capitalize,
    category_bar,
    document,
    folding_table,
    number_cell,
    page_header,
    prose,
    tabs_section,
    tile,
)
from .job import job_section
from .run_html import SECTIONS
from .run_provenance import find_missing, missing_section, run_analyses
from .run_timeline import payload, timeline_section
from .time_text import PARTS, headline

ROWS = 250
_NAME = 90
_TABS = {"ops": "Operators", "kernels": "Kernels", "regions": "Regions", "modules": "Modules", "functions": "Functions"}
_COLOURS = {"compute_s": "c1", "communication_s": "power", "copies_s": "c4", "idle_s": "idle"}
_COLUMNS = [("time", True), ("", False), ("share", True), ("each", True), ("calls", True)]


def time_page(recording: Recording, result: TimeAnswer) -> str:
    """Return the page of a trace without power."""
    lines = recording.timeline
    results = run_analyses(recording)
    view = overview(lines, None, {}, None)
    curves = analyses.memory_lines(results.get("memory"), lines.start_ns - view.start_ns if len(lines) else 0)
    view = dataclasses.replace(view, telemetry=curves)
    absent = find_missing(results, lines)
    notes = "".join(f"<li>{prose(str(note))}</li>" for note in result.notes)
    parts = [
        _header(result),
        advice_section([advice.text for advice in result.advice]),
        _devices(result.devices),
        job_section(result.job) if result.job is not None else "",
        timeline_section(view, headline(result)),
        _tables(result),
        *(section(results[kind]) for kind, section in SECTIONS.items() if kind in results),
        missing_section(absent),
        f"<section><h2>Notes</h2><ul>{notes}</ul></section>" if notes else "",
    ]
    return document(f"{fit(result.name, 80)} - tessera", "".join(parts), data=payload(view))


def _header(result: TimeAnswer) -> str:
    warning = f"<p class='warn' role='note'>{prose(capitalize(result.missing))}.</p>" if result.missing else ""
    where = " · ".join(part for part in (result.device, "time only: no power was recorded") if part)
    return page_header(result.name, where, f"{warning}{_tiles(result)}{_bar(result)}")


def _tiles(result: TimeAnswer) -> str:
    steps = f", {result.steps:,} step{'' if result.steps == 1 else 's'}" if result.steps else ""
    tiles = [tile(format_duration(result.time_s, 4), f"traced{steps}")]
    several = f" of {len(result.devices)} devices" if len(result.devices) > 1 else ""
    for key, name in PARTS:
        share = result.share(key)
        if result.on_device and (share > 0 or key == "idle_s"):
            spent = format_duration(share * result.device_s, 3)
            tiles.append(tile(format_share(share), f"{name}: {spent}{several}"))
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _bar(result: TimeAnswer) -> str:
    """Return a bar of kinds of work by seconds, and idle."""
    parts = dict(result.parts)
    if result.on_device and (idle_s := result.share("idle_s") * result.device_s) > 0:
        parts["idle"] = idle_s
    whole = sum(parts.values())
    if not whole > 0:
        return ""
    return category_bar([(name, format_duration(seconds, 3), seconds / whole) for name, seconds in parts.items()])


def _devices(devices: Sequence[DeviceTime]) -> str:
    """Return a row for each device: what it did with its time."""
    if len(devices) < 2:
        return ""
    keys = "".join(f"<li><i style='background:var(--{_COLOURS[key]})'></i>{name}</li>" for key, name in PARTS)
    columns = [("device", False), ("span", True), ("", False), *((name, True) for _, name in PARTS)]
    many = len(devices) > FOLDED  # then only the first rows are visible at once: those that compute most
    shown = sorted(devices, key=lambda device: -device.compute_s) if many else devices
    body = [_device_row(device) for device in shown]
    caption = "Where the time of each device went"
    rows = folding_table(columns, body, caption=caption, sorted_by="compute" if many else "device")
    return f"<section id='devices'><h2>Each device</h2><ul class='legend'>{keys}</ul>{rows}</section>"


def _device_row(device: DeviceTime) -> str:
    whole = device.span_s or 1.0
    shares = [(key, getattr(device, key) / whole) for key, _ in PARTS]
    pieces = "".join(f"<i style='width:{100 * s:.1f}%;background:var(--{_COLOURS[k]})'></i>" for k, s in shares)
    cells = "".join(number_cell(format_share(share), share) for _, share in shares)
    return (
        f"<tr><td>{escape(device.where)}</td>{number_cell(format_duration(device.span_s, 4), device.span_s)}"
        f"<td><span class='stack' aria-hidden='true'>{pieces}</span></td>{cells}</tr>"
    )


def _tables(result: TimeAnswer) -> str:
    views = {view: rows for view in VIEWS if (rows := result.rows(view))}
    return tabs_section("Time", [(v, _TABS[v], len(rows), _view(result, rows, v)) for v, rows in views.items()])


def _view(result: TimeAnswer, rows: Sequence[TimeRow], view: str) -> str:
    listed = rows[:ROWS]
    display = display_names(listed, view)
    cut = fit_all(display.values(), _NAME, view)
    most = max((r.time_s for r in listed), default=0.0) or 1.0
    body = [_row(r, cut[display[r.name]], most, view) for r in listed]
    hidden = len(rows) - len(listed)
    rest = format_duration(sum(r.time_s for r in rows[ROWS:]), 3)
    more = f"<p class='dim'>and {hidden:,} more, {escape(rest)} together</p>" if hidden > 0 else ""
    said = f"<p class='dim'>{prose(capitalize(result.region_time))}.</p>" if view == "regions" else ""
    heads = [(TITLES[view], False), *_COLUMNS]
    return f"{folding_table(heads, body, caption=f'Time by {TITLES[view]}', sorted_by='time')}{more}{said}"


def _row(row: TimeRow, name: str, most_s: float, view: str) -> str:
    kind = f"k{CATEGORIES.index(category(row.name, row.kind))}"
    dot = f"<i class='{kind}'></i>" if view in ("kernels", "ops") else ""
    wide = 100 * row.time_s / most_s
    each = row.time_s / row.calls if row.calls else None
    cells = [
        f"<td class='name' title='{escape(fit(row.name, 300))}'>{dot}{escape(name)}</td>",
        number_cell(format_duration(row.time_s, 4), row.time_s),
        f"<td><span class='meter' aria-hidden='true'><i class='{kind}' style='width:{wide:.1f}%'></i></span></td>",
        number_cell(format_share(row.share), row.share),
        number_cell(format_duration(each, 3) if each is not None else "-", each),
        number_cell(f"{row.calls:,}", row.calls),
    ]
    return f"<tr>{''.join(cells)}</tr>"
