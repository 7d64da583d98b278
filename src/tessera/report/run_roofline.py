"""The roofline of a run's page: time and energy side by side, drawn here so that it needs no script and prints well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..analyze.kernel_names import CATEGORIES, category, fit, short
from ..analyze.result import Result
from ..units import format_duration, format_energy
from .run_parts import head, note, number, prose, si

SIZE = (590, 380)
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 14, 40
POINTS = 400
ROWS = 250
Point = tuple[float, float, float, Mapping[str, Any], int]  # x, y, weight, row, its number


def roofline(result: Result) -> str:
    """The section; nothing where no kernel has both FLOPs and bytes."""
    rows = list(enumerate(result.rows))
    drawn = [(i, r) for i, r in rows if _positive(r, "intensity") and _positive(r, "flop_per_s")]
    if not drawn:
        return ""
    facts = result.facts
    used = {str(r["unit"]) for _, r in drawn if r.get("unit")}
    panels = [_panel("Time", "FLOP/s", drawn, "flop_per_s", facts.get("ceilings_flop_per_s"),
                     facts.get("hbm_bytes_per_s"), used)]  # fmt: skip
    if any(_positive(r, "flop_per_j") for _, r in drawn):
        panels.append(_panel("Energy", "FLOP/J", drawn, "flop_per_j", facts.get("best_flop_per_j"),
                             facts.get("best_bytes_per_j"), used))  # fmt: skip
    return (
        f"<section id='roofline'><h2>Roofline</h2><p>{prose(_said(result, drawn))}</p><div class='panels'>"
        f"{''.join(panels)}</div>{note(_caption(result, len(drawn)))}{_table(rows, _row_is(result))}"
        f"{''.join(note(n) for n in result.notes[-2:])}</section>"
    )


def _positive(row: Mapping[str, Any], key: str) -> bool:
    value = row.get(key)
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _said(result: Result, drawn: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    """What holds the run back, by time."""
    total = sum(r["time_s"] for r in result.rows) or 1.0
    held: dict[str, float] = {}
    for _, r in drawn:
        if r.get("bound"):
            held[str(r["bound"])] = held.get(str(r["bound"]), 0.0) + float(r["time_s"])
    shares = sorted(held.items(), key=lambda kv: -kv[1])
    words = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares if seconds > 0.005 * total)
    mfu = result.facts.get("mfu_pct")
    time = {"kernel": "device time", "operator": "time in operators"}[_row_is(result)]
    reached = f" The whole {time} reached {mfu:.0f}% of the peak FLOP/s." if isinstance(mfu, (int, float)) else ""
    return f"What binds, by {time}: {words}.{reached}" if words else reached.strip()


def _row_is(result: Result) -> str:
    """What a row is: of a CPU there are operators only, and no column says whose they are."""
    return "kernel" if any(c.key == "op" for c in result.columns) else "operator"


def _caption(result: Result, drawn: int) -> str:
    left = len(result.rows) - drawn
    chip = result.facts.get("device_name")
    lines = (
        f"Lines are what {chip} can do at most: what memory can feed, and what each unit can compute."
        if chip
        else "There are no lines: what this chip can do at most is not known."
    )
    what = {"kernel": "a kernel", "operator": "an operator"}[_row_is(result)]
    out = (
        f"A point is {what}, its area its joules (its time where there are none), its colour as above. {lines} "
        "Hover for figures, click for the row."
    )
    return f"{out} {left:,} without FLOPs or bytes are not drawn." if left else out


# -- one panel ------------------------------------------------------------------------------------------------------


class _Axes:
    """Two logarithmic axes over everything that is to be drawn."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x0, self.x1 = _room(xs)
        self.y0, self.y1 = _room(ys)

    def x(self, value: float) -> float:
        return LEFT + (math.log10(value) - self.x0) / (self.x1 - self.x0) * (SIZE[0] - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return SIZE[1] - BOTTOM - (math.log10(value) - self.y0) / (self.y1 - self.y0) * (SIZE[1] - TOP - BOTTOM)


def _room(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = max(0.08 * (high - low), 0.15)
    return low - margin, high + margin


def _panel(
    title: str, unit: str, drawn: Sequence[tuple[int, Mapping[str, Any]]], key: str, ceilings: Any, slope: Any,
    used: set[str],
) -> str:  # fmt: skip
    points = _points(drawn, key)
    flat = {name: float(v) for name, v in (ceilings or {}).items() if name in used and v}
    ridges = [v / slope for v in flat.values()] if slope else []
    xs = [p[0] for p in points] + [4 * r for r in ridges] + [r / 50 for r in ridges]
    ys = [p[1] for p in points] + [1.3 * v for v in flat.values()]
    axes = _Axes(xs, ys)
    lines, labels = _ceilings(axes, flat, slope, unit)
    label = f"Roofline by {title.lower()}: {len(points)} points; the table below has the same numbers"
    return (
        f"<figure class='plot'><svg class='roof' viewBox='0 0 {SIZE[0]} {SIZE[1]}' role='group' tabindex='0' "
        f"aria-label='{escape(label)}'>{_grid(axes, unit)}<g>{lines}</g>"
        f"{''.join(_circle(axes, p) for p in points)}<g class='ceil'>{labels}</g>"
        f"<text class='t' x='{LEFT + 8}' y='{TOP + 12}'>{title}</text></svg>"
        f"<figcaption>{escape(_reach(points, unit, flat, slope))}</figcaption></figure>"
    )


def _points(drawn: Sequence[tuple[int, Mapping[str, Any]]], key: str) -> list[Point]:
    """The dearest ones, large first so that small ones stay visible."""
    found = [(r, i) for i, r in drawn if _positive(r, key)]
    has_joules = any(_positive(r, "energy_j") for r, _ in found)
    weigh = [(float(r.get("energy_j" if has_joules else "time_s") or 0.0), r, i) for r, i in found]
    weigh.sort(key=lambda w: -w[0])
    most = max((w for w, _, _ in weigh), default=0.0) or 1.0
    return [(float(r["intensity"]), float(r[key]), w / most, r, i) for w, r, i in weigh[:POINTS]]


def _circle(axes: _Axes, point: Point) -> str:
    x, y, weight, row, at = point
    name = str(row["name"])
    lines = [_spent(row), f"{si(x, 'FLOP/B')}, {si(row['flop_per_s'], 'FLOP/s')}", _bound(row), _joule_line(row)]
    said = "\n".join(line for line in lines if line)
    kind = CATEGORIES.index(category(name))
    return (
        f"<circle class='f{kind}' cx='{axes.x(x):.1f}' cy='{axes.y(y):.1f}' r='{3 + 13 * math.sqrt(weight):.1f}' "
        f"data-n='{escape(fit(name, 200))}' data-t='{escape(said)}' data-to='roof-{at}'/>"
    )


def _spent(row: Mapping[str, Any]) -> str:
    joules = f"{format_energy(row['energy_j'], 3)}, " if _positive(row, "energy_j") else ""
    return f"{joules}{format_duration(row['time_s'], 3)}, {row['calls']:,} calls"


def _bound(row: Mapping[str, Any]) -> str:
    if not row.get("bound"):
        return ""
    reached = f", {row['roof_pct']:.0f}% of its roof" if row.get("roof_pct") is not None else ""
    return f"bound by {row['bound']}{reached}"


def _joule_line(row: Mapping[str, Any]) -> str:
    if not _positive(row, "flop_per_j"):
        return ""
    best = f", {row['energy_pct']:.0f}% of the best known" if row.get("energy_pct") is not None else ""
    return f"{si(row['flop_per_j'], 'FLOP/J')}{best}"


def _grid(axes: _Axes, unit: str) -> str:
    bottom, right, out = SIZE[1] - BOTTOM, SIZE[0] - RIGHT, []
    for power in _decades(axes.x0, axes.x1, 7):
        x = axes.x(10.0**power)
        shown = f"{10.0**power:g}" if -4 <= power <= 0 else si(10.0**power, "")
        out.append(f"<path d='M{x:.1f} {TOP}V{bottom}'/><text x='{x:.1f}' y='{bottom + 15}' text-anchor='middle'>"
                   f"{shown}</text>")  # fmt: skip
    for power in _decades(axes.y0, axes.y1, 6):
        y = axes.y(10.0**power)
        out.append(f"<path d='M{LEFT} {y:.1f}H{right}'/><text x='{LEFT - 5}' y='{y + 4:.1f}' text-anchor='end'>"
                   f"{si(10.0**power, '')}</text>")  # fmt: skip
    middle = (LEFT + right) / 2
    out.append(f"<text x='{middle}' y='{SIZE[1] - 8}' text-anchor='middle'>FLOP per byte of memory</text>")
    out.append(f"<text transform='translate(13 {(TOP + bottom) / 2}) rotate(-90)' text-anchor='middle'>{unit}</text>")
    return f"<g class='grid'>{''.join(out)}</g>"


def _decades(low: float, high: float, most: int) -> range:
    first, last = math.ceil(low), math.floor(high)
    return range(first, last + 1, max(1, -(-(last - first + 1) // most)))


def _ceilings(axes: _Axes, flat: Mapping[str, float], slope: Any, unit: str) -> tuple[str, str]:
    """Lines, and their labels, which are drawn over the points."""
    right, lines, labels = SIZE[0] - RIGHT, [], []
    if slope and flat:
        top = max(flat.values())
        x0 = 10.0**axes.x0
        y0 = x0 * slope
        if y0 < 10.0**axes.y0:
            x0, y0 = 10.0**axes.y0 / slope, 10.0**axes.y0
        x, y, end, roof = axes.x(x0), axes.y(y0), axes.x(top / slope), axes.y(top)
        lines.append(f"<path class='roofline' d='M{x:.1f} {y:.1f}L{end:.1f} {roof:.1f}'/>")
        angle = math.degrees(math.atan2(roof - y, end - x))
        at_x, at_y = x + 0.32 * (end - x), y + 0.32 * (roof - y)
        said = si(slope, "B/s" if unit == "FLOP/s" else "B/J")
        labels.append(f"<text transform='translate({at_x:.1f} {at_y - 6:.1f}) rotate({angle:.1f})' "
                      f"text-anchor='middle'>memory {said}</text>")  # fmt: skip
    above = -math.inf
    for name, value in sorted(flat.items(), key=lambda kv: -kv[1]):
        y = axes.y(value)
        x = max(axes.x(value / slope), LEFT) if slope else LEFT
        lines.append(f"<path class='roofline' d='M{x:.1f} {y:.1f}H{right}'/>")
        # At the ridge, where no point can be above it; at the far end where there is no room for that.
        at, anchor = (x + 8, "start") if right - x > 160 else (right - 3, "end")
        text_y = y - 4 if y - 4 - above > 11 else above + 11
        above = text_y
        labels.append(
            f"<text x='{at:.1f}' y='{text_y:.1f}' text-anchor='{anchor}'>{escape(name)} {si(value, unit)}</text>"
        )
    return "".join(lines), "".join(labels)


def _reach(points: Sequence[Point], unit: str, flat: Mapping[str, float], slope: Any) -> str:
    """The dearest kernel, in words."""
    _, y, _, row, _ = points[0]
    name = fit(short(str(row["name"]), "kernel"), 50)
    roof = flat.get(str(row.get("unit") or ""))
    limit = min(roof, row["intensity"] * slope) if roof and slope else None
    share = f", {y / limit:.0%} of what its intensity allows" if limit else ""
    return f"{'Dearest' if _positive(row, 'energy_j') else 'Longest'}: {name}, {si(y, unit)}{share}."


# -- the same as a table --------------------------------------------------------------------------------------------


def _table(rows: Sequence[tuple[int, Mapping[str, Any]]], row_is: str) -> str:
    columns = ((row_is, False), ("energy", True), ("time", True), ("FLOP/B", True), ("FLOP/s", True),
               ("of its roof", True), ("bound by", False), ("FLOP/J", True), ("of the best", True),
               ("bytes", False))  # fmt: skip
    body = "".join(_row(i, r) for i, r in rows[:ROWS])
    more = note(f"and {len(rows) - ROWS:,} more") if len(rows) > ROWS else ""
    return (
        f"<details class='rows'><summary>The {row_is}s as a table</summary><div class='scroll'><table class='sort'>"
        f"<caption class='sr'>{row_is.capitalize()}s under the roofs</caption>{head(columns, 'time')}"
        f"<tbody>{body}</tbody></table></div>{more}</details>"
    )


def _row(at: int, row: Mapping[str, Any]) -> str:
    name = str(row["name"])
    kind = CATEGORIES.index(category(name))
    percent = [f"{row[key]:.0f}%" if row.get(key) is not None else "-" for key in ("roof_pct", "energy_pct")]
    return (
        f"<tr id='roof-{at}'><td class='name' title='{escape(fit(name, 300))}'><i class='k{kind}'></i>"
        f"{escape(fit(short(name, 'kernel'), 70))}</td>"
        f"{number(format_energy(row['energy_j'], 3) if _positive(row, 'energy_j') else '-', row.get('energy_j'))}"
        f"{number(format_duration(row['time_s'], 3), row['time_s'])}"
        f"{number(si(row.get('intensity'), ''), row.get('intensity'))}"
        f"{number(si(row.get('flop_per_s'), ''), row.get('flop_per_s'))}{number(percent[0], row.get('roof_pct'))}"
        f"<td>{escape(str(row.get('bound') or '-'))}</td>{number(si(row.get('flop_per_j'), ''), row.get('flop_per_j'))}"
        f"{number(percent[1], row.get('energy_pct'))}<td>{_from(row.get('bytes_from'))}</td></tr>"
    )


def _from(source: Any) -> str:
    return {"ncu": "measured", "shapes": "from shapes"}.get(str(source), "-")
