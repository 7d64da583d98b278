"""Sections of a run's page that an analysis fills: roofline, stalls, collectives, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from ..analyze.kernel_names import CATEGORIES, category, fit, short
from ..analyze.overview import TrackLine
from ..analyze.result import Result
from ..units import format_bytes, format_duration, format_energy, format_si
from .collectives import CAPTION_WIDTH, waits_section
from .html import note, number_cell, prose, table
from .job import groups_table, steps_table
from .plots import RooflinePoint, roofline_plot

STALLS = (
    ("memory_stall_pct", "memory", "c3"),
    ("dependency_stall_pct", "dependency", "c5"),
    ("structural_stall_pct", "structural", "c1"),
)
POINTS = 400
ROWS = 250
KERNELS = 25
_PERCENTS = ("roof_pct", "energy_pct")
SIZES, TIMES = 14, 9
"""The most cells of the heat map in each direction."""


# -- stalls ---------------------------------------------------------------------------------------------------------


def stalls(result: Result) -> str:
    """Return what warps waited for, by kernel, the most stalled time first."""
    if not result.rows:
        return ""
    rows = result.rows[:KERNELS]
    keys = "".join(f"<li><i style='background:var(--{c})'></i>{name}</li>" for _, name, c in STALLS)
    shares = [(name, True) for _, name, _ in STALLS]
    columns = (("kernel", False), ("stalled", True), ("", False), *shares, ("main reason", False), ("energy", True))
    overall = ", ".join(
        f"{name} {result.facts[key]:.0f}%" for key, name, _ in STALLS if result.facts.get(key) is not None
    )
    counted = result.facts.get("counted_pct")
    about = f"Of all warp cycles: {overall}." if overall else ""
    if isinstance(counted, (int, float)) and counted < 99.5:
        about += f" Counters are known for {counted:.0f}% of the time."
    return (
        f"<section id='stalls'><h2>What warps waited for</h2><p>{escape(about)}</p><ul class='legend'>{keys}</ul>"
        f"{table(columns, ''.join(map(_stall_row, rows)), caption='Stalls by kernel', sorted_by='stalled')}</section>"
    )


def _stall_row(row: Mapping[str, Any]) -> str:
    name = str(row["name"])
    pieces = "".join(
        f"<i style='width:{min(row[key], 100.0):.1f}%;background:var(--{colour})'></i>"
        for key, _, colour in STALLS
        if row.get(key)
    )
    shares = "".join(number_cell(f"{row[k]:.0f}%" if row.get(k) is not None else "-", row.get(k)) for k, _, _ in STALLS)
    meaning = row.get("main_reason_means") or ""
    energy = row.get("energy_j")
    return (
        f"<tr><td class='name' title='{escape(fit(name, 300))}'>{escape(fit(short(name, 'kernel'), 60))}</td>"
        f"{number_cell(format_duration(row['stalled_s'], 3), row['stalled_s'])}"
        f"<td><span class='stack' aria-hidden='true'>{pieces}</span></td>{shares}"
        f"<td title='{escape(str(meaning))}'>{escape(str(row.get('main_reason') or '-').replace('_', ' '))}</td>"
        f"{number_cell(format_energy(energy, 3) if energy else '-', energy)}</tr>"
    )


# -- collectives ----------------------------------------------------------------------------------------------------


def collectives(result: Result) -> str:
    """Return a heat map of bytes and duration, coloured by overlap with compute, and the sums by kind and group."""
    if not result.rows:
        return ""
    sized = [r for r in result.rows if r.get("bytes") and r.get("time_s")]
    waits = (result.facts.get("across_ranks") or {}).get("waits_s") or {}
    return (
        f"<section id='collectives'><h2>Collectives</h2>{_heat(sized) if sized else ''}"
        f"{groups_table(result.facts.get('by_group') or [])}{steps_table(result.facts.get('by_step') or [])}"
        f"{waits_section(waits)}"
        f"{''.join(note(n) for n in result.notes[-1:])}</section>"
    )


def _bins(values: Sequence[float], most: int) -> tuple[list[int], int, int]:
    """Return each value's bin, the exponent of two of the first bin's low edge, and a bin's powers of two."""
    exponents = [math.floor(math.log2(v)) for v in values]
    low, span = min(exponents), max(exponents) - min(exponents) + 1
    wide = -(-span // most)
    return [(e - low) // wide for e in exponents], low, wide


def _heat(rows: Sequence[Mapping[str, Any]]) -> str:
    xs, x_low, x_wide = _bins([float(r["bytes"]) for r in rows], SIZES)
    ys, y_low, y_wide = _bins([1e6 * float(r["time_s"]) for r in rows], TIMES)  # in microseconds: exponents above 0
    cells: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for x, y, row in zip(xs, ys, rows, strict=True):
        cells.setdefault((x, y), []).append(row)
    across, up = max(xs) + 1, max(ys) + 1
    wide, high = 74, 34
    width, height = max(90 + across * wide, CAPTION_WIDTH), 44 + up * high
    out = [_cell(x, up - 1 - y, wide, high, members) for (x, y), members in sorted(cells.items())]
    for x in range(across):
        size = format_bytes(2.0 ** (x_low + x * x_wide), 3)
        out.append(f"<text x='{86 + x * wide}' y='{up * high + 16}'>{escape(size)}</text>")
    for y in range(up):
        lasted = format_duration(2.0 ** (y_low + y * y_wide) * 1e-6, 3)
        out.append(f"<text x='78' y='{(up - y) * high - 3}' text-anchor='end'>{escape(lasted)}</text>")
    out.append(f"<text x='86' y='{height - 6}'>bytes from (across), time from (up)</text>")
    label = f"{len(rows)} collectives by bytes and time; the table below has their sums"
    return (
        f"<figure class='plot scroll'><svg class='heat' viewBox='0 0 {width} {height}' role='group' tabindex='0' "
        f"style='width:{width}px' aria-label='{escape(label)}'>{''.join(out)}</svg></figure>"
        "<ul class='legend'><li><i style='background:var(--power)'></i>exposed: nothing was computed meanwhile</li>"
        "<li><i style='background:var(--c4)'></i>overlaps compute</li>"
        "<li><i style='background:var(--idle)'></i>unknown</li></ul>"
    )


def _cell(x: int, y: int, wide: int, high: int, members: Sequence[Mapping[str, Any]]) -> str:
    seconds = sum(float(r["time_s"]) for r in members)
    known = [(float(r["overlap_pct"]), float(r["time_s"])) for r in members if r.get("overlap_pct") is not None]
    weight = sum(s for _, s in known)
    hidden = sum(o * s for o, s in known) / weight if weight > 0 else None
    fill = "var(--idle)" if hidden is None else f"color-mix(in oklab,var(--c4) {hidden:.0f}%,var(--power))"
    kinds = ", ".join(sorted({str(r["kind"]) for r in members}))
    moved = sum(float(r["bytes"]) for r in members)
    rate = f"{format_bytes(moved, 3)} in {format_duration(seconds, 3)}: {format_si(moved / seconds, 'B/s', 3)}"
    overlap = f"{hidden:.0f}% overlaps compute" if hidden is not None else "overlap with compute: unknown"
    title = f"{len(members):,} x {kinds}"
    middle = f"x='{86 + (x + 0.5) * wide - 2:.0f}' y='{(y + 0.5) * high + 3:.0f}'"
    return (
        f"<g data-n='{escape(title)}' data-t='{escape(rate)}&#10;{escape(overlap)}'>"
        f"<rect x='{86 + x * wide}' y='{y * high}' rx='3' "
        f"width='{wide - 3}' height='{high - 3}' style='fill:{fill}'/>"
        f"<text class='{'in' if hidden is not None else 'in dark'}' {middle}>{len(members):,}</text></g>"
    )


# -- memory ---------------------------------------------------------------------------------------------------------


def memory_lines(result: Result | None, offset_ns: int) -> list[TrackLine]:
    """Return allocated memory as lines of the timeline."""
    curves = (result.facts.get("timeline") or {}) if result is not None else {}
    most = max((b for points in curves.values() for _, b in points), default=0.0)
    unit, size = ("GiB", 1 << 30) if most >= 1 << 30 else ("MiB", 1 << 20) if most >= 1 << 20 else ("KiB", 1 << 10)
    return [
        TrackLine(
            name=f"{where} allocated",
            unit=unit,
            values=np.array([b for _, b in points], np.float64) / size,
            times_ns=np.array([round(s * 1e9) + offset_ns for s, _ in points], np.int64),
        )
        for where, points in curves.items()
        if points
    ]


def memory(result: Result) -> str:
    """Return peaks by device; the curve is in the timeline."""
    if not result.rows:
        return ""
    columns = (("device", False), ("peak", True), ("at", True), ("in operator", False), ("mean", True), ("last", True))
    body = "".join(
        f"<tr><td>{escape(str(r['where']))}</td>{number_cell(format_bytes(r['peak_bytes'], 3), r['peak_bytes'])}"
        f"{number_cell(format_duration(r['peak_at_s'], 3), r['peak_at_s'])}"
        f"<td>{escape(fit(str(r['peak_op'] or '-'), 60))}</td>"
        f"{number_cell(format_bytes(r['mean_bytes'], 3), r['mean_bytes'])}"
        f"{number_cell(format_bytes(r['last_bytes'], 3), r['last_bytes'])}</tr>"
        for r in result.rows
    )
    rows = table(columns, body, caption="Allocated memory by device", sorted_by="peak")
    about = note("What PyTorch had allocated; the timeline above shows it over time.")
    return f"<section id='memory'><h2>Memory</h2>{rows}{about}</section>"


# -- roofline -------------------------------------------------------------------------------------------------------


def roofline(result: Result) -> str:
    """Return the section, by time and by energy; nothing if no kernel has both FLOPs and bytes."""
    rows = list(enumerate(result.rows))
    drawn = [(i, r) for i, r in rows if _is_positive(r, "intensity") and _is_positive(r, "flop_per_s")]
    if not drawn:
        return ""
    facts, units = result.facts, {str(r["unit"]) for _, r in drawn if r.get("unit")}
    ceilings = [(facts.get("ceilings_flop_per_s"), facts.get("hbm_bytes_per_s"))]
    ceilings.append((facts.get("best_flop_per_j"), facts.get("best_bytes_per_j")))
    panels = []
    for title, unit, key, (flat, slope) in zip(
        ("Time", "Energy"), ("FLOP/s", "FLOP/J"), ("flop_per_s", "flop_per_j"), ceilings, strict=True
    ):
        shown = _most_expensive([(i, r) for i, r in drawn if _is_positive(r, key)])
        if not shown:
            continue
        limits = {name: float(v) for name, v in (flat or {}).items() if name in units and v}
        plot = roofline_plot(title, unit, _points(shown, key), limits, slope)
        caption = escape(_describe_first(shown[0][1], key, unit, limits, slope))
        panels.append(f"<figure class='plot'>{plot}<figcaption>{caption}</figcaption></figure>")
    what = "kernel" if any(c.key == "op" for c in result.columns) else "operator"  # a CPU has only operators
    return (
        f"<section id='roofline'><h2>Roofline</h2><p>{prose(_bounds_sentence(result, drawn, what))}</p>"
        f"<div class='panels'>{''.join(panels)}</div>{note(_caption(result, len(drawn), what))}"
        f"{_roofline_table(rows, what)}{''.join(note(n) for n in result.notes[-2:])}</section>"
    )


def _is_positive(row: Mapping[str, Any], key: str) -> bool:
    value = row.get(key)
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _bounds_sentence(result: Result, drawn: Sequence[tuple[int, Mapping[str, Any]]], what: str) -> str:
    """Return what limits the run, by time."""
    total = sum(r["time_s"] for r in result.rows) or 1.0
    bounds: dict[str, float] = {}
    for _, r in drawn:
        if r.get("bound"):
            bounds[str(r["bound"])] = bounds.get(str(r["bound"]), 0.0) + float(r["time_s"])
    shares = sorted(bounds.items(), key=lambda kv: -kv[1])
    words = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares if seconds > 0.005 * total)
    mfu = result.facts.get("mfu_pct")
    time = {"kernel": "device time", "operator": "time in operators"}[what]
    reached = f"The whole {time} reached {mfu:.0f}% of the peak FLOP/s." if isinstance(mfu, (int, float)) else ""
    return f"What limits the run, by {time}: {words}. {reached}".rstrip() if words else reached


def _caption(result: Result, drawn: int, what: str) -> str:
    chip = result.facts.get("device_name")
    lines = (
        f"The lines are the limits of {chip}: its memory bandwidth, and the peak of each unit."
        if chip
        else "There are no lines because the limits of this chip are unknown."
    )
    left = len(result.rows) - drawn
    rest = f" {left:,} without FLOPs or bytes are not drawn." if left else ""
    return (
        f"A point is {'an' if what == 'operator' else 'a'} {what}; its area is its energy (or its time), its colour is "
        f"as above. {lines} Hover for figures, click to see the row.{rest}"
    )


def _most_expensive(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> list[tuple[int, Mapping[str, Any], float]]:
    """Return the rows to draw with their weights, large first so that small ones stay visible."""
    key = "energy_j" if any(_is_positive(r, "energy_j") for _, r in rows) else "time_s"
    return sorted(((i, r, float(r.get(key) or 0.0)) for i, r in rows), key=lambda w: -w[2])[:POINTS]


def _points(rows: Sequence[tuple[int, Mapping[str, Any], float]], key: str) -> list[RooflinePoint]:
    most = rows[0][2] or 1.0
    points = []
    for i, row, weight in rows:
        name, x = str(row["name"]), float(row["intensity"])
        rates = f"{format_si(x, 'FLOP/B', 3)}, {format_si(row['flop_per_s'], 'FLOP/s', 3)}"
        lines = [_energy_line(row), rates, _bound_line(row), _efficiency_line(row)]
        text = "\n".join(line for line in lines if line)
        colour = CATEGORIES.index(category(name))
        points.append(RooflinePoint(x, float(row[key]), weight / most, colour, fit(name, 200), text, f"roof-{i}"))
    return points


def _energy_line(row: Mapping[str, Any]) -> str:
    joules = f"{format_energy(row['energy_j'], 3)}, " if _is_positive(row, "energy_j") else ""
    return f"{joules}{format_duration(row['time_s'], 3)}, {row['calls']:,} calls"


def _bound_line(row: Mapping[str, Any]) -> str:
    if not row.get("bound"):
        return ""
    reached = f", {row['roof_pct']:.0f}% of its roof" if row.get("roof_pct") is not None else ""
    return f"bound by {row['bound']}{reached}"


def _efficiency_line(row: Mapping[str, Any]) -> str:
    if not _is_positive(row, "flop_per_j"):
        return ""
    best = f", {row['energy_pct']:.0f}% of the best known" if row.get("energy_pct") is not None else ""
    return f"{format_si(row['flop_per_j'], 'FLOP/J', 3)}{best}"


def _describe_first(
    row: Mapping[str, Any], key: str, unit: str, limits: Mapping[str, float], bandwidth: float | None
) -> str:
    """Return the most expensive kernel, in words."""
    roof = limits.get(str(row.get("unit") or ""))
    limit = min(roof, row["intensity"] * bandwidth) if roof and bandwidth else None
    share = f", {row[key] / limit:.0%} of what its intensity allows" if limit else ""
    which = "Most expensive" if _is_positive(row, "energy_j") else "Longest"
    return f"{which}: {fit(short(str(row['name']), 'kernel'), 50)}, {format_si(row[key], unit, 3)}{share}."


def _roofline_table(rows: Sequence[tuple[int, Mapping[str, Any]]], what: str) -> str:
    columns = [(what, False)]
    columns += [(name, True) for name in ("energy", "time", "FLOP/B", "FLOP/s", "of its roof")]
    columns += [("bound by", False), ("FLOP/J", True), ("of the best", True), ("bytes", False)]
    body = "".join(_roofline_row(i, r) for i, r in rows[:ROWS])
    more = note(f"and {len(rows) - ROWS:,} more") if len(rows) > ROWS else ""
    lines = table(columns, body, caption=f"{what.capitalize()}s under the roofs", sorted_by="time")
    return f"<details class='rows'><summary>The {what}s as a table</summary>{lines}{more}</details>"


def _roofline_row(i: int, row: Mapping[str, Any]) -> str:
    name, joules = str(row["name"]), row["energy_j"] if _is_positive(row, "energy_j") else None
    colour = CATEGORIES.index(category(name))
    percents = [number_cell(f"{row[k]:.0f}%" if row.get(k) is not None else "-", row.get(k)) for k in _PERCENTS]
    rates = [number_cell(format_si(row.get(k), "", 3), row.get(k)) for k in ("intensity", "flop_per_s", "flop_per_j")]
    source = {"ncu": "measured", "shapes": "from shapes"}.get(str(row.get("bytes_from")), "-")
    return (
        f"<tr id='roof-{i}'><td class='name' title='{escape(fit(name, 300))}'><i class='k{colour}'></i>"
        f"{escape(fit(short(name, 'kernel'), 70))}</td>"
        f"{number_cell('-' if joules is None else format_energy(joules, 3), joules)}"
        f"{number_cell(format_duration(row['time_s'], 3), row['time_s'])}{rates[0]}{rates[1]}{percents[0]}"
        f"<td>{escape(str(row.get('bound') or '-'))}</td>{rates[2]}{percents[1]}<td>{source}</td></tr>"
    )
