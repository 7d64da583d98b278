"""Plots on two logarithmic axes as SVG, drawn here so that they need no script: Pareto plot and roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..units import format_duration, format_energy, format_si

# Okabe and Ito's colours, distinguishable with every kind of colour vision (https://jfly.uni-koeln.de/color/).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
MAX_DECADES = 8
"""With more decades than this, only some of them have a tick."""
_LETTER = 6.2  # width of a character at 11px
_LINE = 13.0


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A logarithmic axis from `low` to `high`, drawn from pixel `begin` to pixel `end`."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float) -> LogAxis:
        """Return an axis that holds the values with a margin, and at least half a decade."""
        low, high = min(values), max(values)
        margin = max(1.25, 10 ** (0.25 - 0.5 * math.log10(high / low)))
        return cls(low / margin, high * margin, begin, end)

    def at(self, value: float) -> float:
        """Return the pixel of a value; a value outside is drawn at the edge."""
        share = math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        return self.begin + (self.end - self.begin) * min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        """Return round values inside: 1, 2 and 5 of each decade, or only the decades if there are many."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        every = -(-(last - first) // MAX_DECADES)
        values = [step * 10.0**decade for decade in range(first, last + 1, max(every, 1)) for step in steps]
        return [value for value in values if self.low <= value <= self.high]


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of a plot and its margins."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    def axes(self, xs: Sequence[float], ys: Sequence[float]) -> tuple[LogAxis, LogAxis]:
        x = LogAxis.over(xs, self.left, self.width - self.right)
        return x, LogAxis.over(ys, self.height - self.bottom, self.top)

    def grid(self, x: LogAxis, y: LogAxis, titles: tuple[str, str], forms: tuple[Callable[[float], str], ...]) -> str:
        """Return lines and labels of the ticks, and the titles of the axes."""
        bottom, right, out = self.height - self.bottom, self.width - self.right, []
        for value in x.ticks():
            across = f"{x.at(value):.1f}"
            out.append(f"<path class='rule' d='M{across} {self.top}V{bottom}'/>")
            out.append(_label(across, bottom + 16, forms[0](value), "middle", "tick"))
        for value in y.ticks():
            at = y.at(value)
            out.append(f"<path class='rule' d='M{self.left} {at:.1f}H{right}'/>")
            out.append(_label(self.left - 8, f"{at + 4:.1f}", forms[1](value), "end", "tick"))
        out.append(_label((self.left + right) / 2, self.height - 10, titles[0], "middle", "axis"))
        turn = f"translate(14 {(self.top + bottom) / 2:.0f}) rotate(-90)"
        out.append(f"<text class='axis' transform='{turn}' text-anchor='middle'>{escape(titles[1])}</text>")
        return f"<g class='grid'>{''.join(out)}</g>"


def _label(x: object, y: object, text: str, anchor: str = "start", kind: str = "label") -> str:
    return f"<text class='{kind}' x='{x}' y='{y}' text-anchor='{anchor}'>{escape(text)}</text>"


# -- Pareto plot ----------------------------------------------------------------------------------------------------

PARETO = Frame(width=920, height=460, left=78, right=20, top=16, bottom=50)


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A point with its half-widths, the group that colours it, its label, and the text under the pointer."""

    x: float
    y: float
    error_x: float
    error_y: float
    group: str
    label: str
    title: str
    frontier: bool


def pareto_plot(points: Sequence[ParetoPoint]) -> str:
    """Return latency against joules per sample, as one <svg> element and its legend; "" without points."""
    if not points:
        return ""
    x, y = PARETO.axes([p.x for p in points], [p.y for p in points])
    groups = dict.fromkeys(p.group for p in points)
    colours = {group: COLOURS[i % len(COLOURS)] for i, group in enumerate(groups)}
    forms = (lambda v: format_duration(v, 3), lambda v: format_energy(v, 3))
    parts = [PARETO.grid(x, y, ("latency", "energy per sample"), forms), _frontier(points, x, y)]
    parts += [_point(p, x, y, colours[p.group]) for p in sorted(points, key=lambda p: p.frontier)]
    parts += _labels(points, x, y)
    keys = "".join(f'<span><i style="background:{c}"></i>{escape(group)}</span>' for group, c in colours.items())
    return (
        f'<svg viewBox="0 0 {PARETO.width} {PARETO.height}" role="img" aria-label="Latency against energy per sample">'
        f'{"".join(parts)}</svg><p class="legend">{keys}<span><i class="line"></i>Pareto frontier</span></p>'
    )


def _frontier(points: Sequence[ParetoPoint], x: LogAxis, y: LogAxis) -> str:
    """Return a staircase through the frontier: for every point above or right of it, another is better in both."""
    corners: list[tuple[float, float]] = []
    for p in sorted((p for p in points if p.frontier), key=lambda p: (p.x, p.y)):
        if corners and y.at(p.y) < corners[-1][1]:
            continue  # on the frontier only because of its accuracy: worse in the two drawn figures
        if corners:
            corners.append((x.at(p.x), corners[-1][1]))
        corners.append((x.at(p.x), y.at(p.y)))
    if not corners:
        return ""
    corners = [(corners[0][0], float(PARETO.top)), *corners, (float(PARETO.width - PARETO.right), corners[-1][1])]
    return f'<polyline class="frontier" points="{" ".join(f"{px:.1f},{py:.1f}" for px, py in corners)}"/>'


def _point(p: ParetoPoint, x: LogAxis, y: LogAxis, colour: str) -> str:
    """Return the point and its 90% interval in either direction."""
    left, right = x.at(p.x - p.error_x), x.at(p.x + p.error_x)
    low, high = y.at(p.y - p.error_y), y.at(p.y + p.error_y)
    px, py = x.at(p.x), y.at(p.y)
    whisker = f"M{left:.1f} {py:.1f}H{right:.1f}M{px:.1f} {low:.1f}V{high:.1f}"
    return (
        f'<g class="{"point front" if p.frontier else "point"}"><title>{escape(p.title)}</title>'
        f'<path class="whisker" stroke="{colour}" d="{whisker}"/>'
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{6 if p.frontier else 4.5}" fill="{colour}"/></g>'
    )


def _labels(points: Sequence[ParetoPoint], x: LogAxis, y: LogAxis) -> list[str]:
    """Return a label beside each point if there is room, the frontier's first. Others show theirs under the pointer."""
    boxes = [(x.at(p.x) - 6, y.at(p.y) - 6, x.at(p.x) + 6, y.at(p.y) + 6) for p in points]
    out = []
    for p in sorted(points, key=lambda p: not p.frontier):
        px, py, wide = x.at(p.x), y.at(p.y), _LETTER * len(p.label)
        places = (px + 9, py + 4), (px - 9 - wide, py + 4), (px - wide / 2, py - 10), (px - wide / 2, py + 18)
        for left, base in places:
            box = (left, base - _LINE + 3, left + wide, base + 2)
            inside = box[0] >= PARETO.left and box[2] <= PARETO.width
            inside = inside and box[1] >= PARETO.top and box[3] <= PARETO.height - PARETO.bottom
            if inside and not any(_overlap(box, other) for other in boxes):
                boxes.append(box)
                kind = "label front" if p.frontier else "label"
                out.append(_label(f"{left:.1f}", f"{base:.1f}", p.label, kind=kind))
                break
    return out


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# -- roofline -------------------------------------------------------------------------------------------------------

ROOFLINE = Frame(width=590, height=380, left=62, right=12, top=14, bottom=40)


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """A kernel: FLOP per byte, FLOP per second or joule, its share of the largest, its colour, and its row's id."""

    x: float
    y: float
    weight: float
    colour: int
    name: str
    text: str
    row_id: str


def roofline_plot(
    title: str, unit: str, points: Sequence[RooflinePoint], ceilings: Mapping[str, float], bandwidth: float | None
) -> str:
    """Return one <svg>: points under the ceilings; the sloped one is `bandwidth`, in bytes per second or joule."""
    ridges = [v / bandwidth for v in ceilings.values()] if bandwidth else []
    xs = [p.x for p in points] + [4 * r for r in ridges] + [r / 50 for r in ridges]
    ys = [p.y for p in points] + [1.3 * v for v in ceilings.values()]
    x, y = ROOFLINE.axes(xs, ys)
    lines, labels = _ceilings(x, y, ceilings, bandwidth, unit)
    circles = "".join(
        f"<circle class='f{p.colour}' cx='{x.at(p.x):.1f}' cy='{y.at(p.y):.1f}' r='{3 + 13 * math.sqrt(p.weight):.1f}' "
        f"data-n='{escape(p.name)}' data-t='{escape(p.text)}' data-to='{p.row_id}'/>"
        for p in points
    )
    about = f"Roofline by {title.lower()}: {len(points)} points; the table below has the same numbers"
    grid = ROOFLINE.grid(x, y, ("FLOP per byte of memory", unit), (format_si, format_si))
    return (
        f"<svg class='roof' viewBox='0 0 {ROOFLINE.width} {ROOFLINE.height}' role='group' tabindex='0' "
        f"aria-label='{escape(about)}'>{grid}<g>{lines}</g>{circles}<g class='ceil'>{labels}</g>"
        f"{_label(ROOFLINE.left + 8, ROOFLINE.top + 12, title, kind='t')}</svg>"
    )


def _ceilings(
    x: LogAxis, y: LogAxis, ceilings: Mapping[str, float], bandwidth: float | None, unit: str
) -> tuple[str, str]:
    """Return lines, and their labels, which are drawn over the points."""
    right, lines, labels = ROOFLINE.width - ROOFLINE.right, [], []
    if bandwidth and ceilings:
        top = max(ceilings.values())
        start = max(x.low, y.low / bandwidth)
        x0, y0, x1, y1 = x.at(start), y.at(start * bandwidth), x.at(top / bandwidth), y.at(top)
        lines.append(f"<path class='roofline' d='M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}'/>")
        angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
        turn = f"translate({x0 + 0.32 * (x1 - x0):.1f} {y0 + 0.32 * (y1 - y0) - 6:.1f}) rotate({angle:.1f})"
        rate = format_si(bandwidth, "B/s" if unit == "FLOP/s" else "B/J", 3)
        labels.append(f"<text transform='{turn}' text-anchor='middle'>memory {rate}</text>")
    above = -math.inf
    for name, value in sorted(ceilings.items(), key=lambda kv: -kv[1]):
        at = y.at(value)
        ridge = max(x.at(value / bandwidth), ROOFLINE.left) if bandwidth else float(ROOFLINE.left)
        lines.append(f"<path class='roofline' d='M{ridge:.1f} {at:.1f}H{right}'/>")
        # At the ridge, where no point can be above it; at the far end if there is no room.
        place, anchor = (ridge + 8, "start") if right - ridge > 160 else (right - 3.0, "end")
        above = at - 4 if at - 4 - above > 11 else above + 11
        labels.append(_label(f"{place:.1f}", f"{above:.1f}", f"{name} {format_si(value, unit, 3)}", anchor))
    return "".join(lines), "".join(labels)
