"""A Pareto plot as SVG: latency against joules per sample on logarithmic axes, self-contained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..units import format_duration, format_energy

WIDTH, HEIGHT = 920, 460
LEFT, RIGHT, TOP, BOTTOM = 78, 20, 16, 50
# Okabe and Ito's colours, told apart by every kind of colour vision (https://jfly.uni-koeln.de/color/).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
_LETTER = 6.2  # width of a character at 11px
_LINE = 13.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point with its half-widths, the group that colours it, the label beside it and the text under the pointer."""

    x: float
    y: float
    error_x: float
    error_y: float
    group: str
    label: str
    title: str
    frontier: bool


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis from `low` to `high`, drawn from pixel `begin` to pixel `end`."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float) -> Axis:
        """An axis that holds the values with a margin, and at least half a decade."""
        low, high = min(values), max(values)
        margin = max(1.25, 10 ** (0.25 - 0.5 * math.log10(high / low)))
        return cls(low / margin, high * margin, begin, end)

    def at(self, value: float) -> float:
        """The pixel of a value; what lies outside is held at the edge."""
        share = math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        return self.begin + (self.end - self.begin) * min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        """Round values inside: 1, 2 and 5 of each decade, or the decades alone where there are many."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        found = [step * 10.0**decade for decade in range(first, last + 1) for step in steps]
        return [value for value in found if self.low <= value <= self.high]


def scatter(dots: Sequence[Dot]) -> str:
    """The plot as one <svg> element; "" without points."""
    if not dots:
        return ""
    x = Axis.over([d.x for d in dots], LEFT, WIDTH - RIGHT)
    y = Axis.over([d.y for d in dots], HEIGHT - BOTTOM, TOP)
    groups = list(dict.fromkeys(d.group for d in dots))
    colours = {group: COLOURS[i % len(COLOURS)] for i, group in enumerate(groups)}
    parts = [*_grid(x, y), _frontier(dots, x, y)]
    parts += [_point(d, x, y, colours[d.group]) for d in sorted(dots, key=lambda d: d.frontier)]
    parts += _labels(dots, x, y)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Latency against energy per sample">'
        f"{''.join(parts)}</svg>{_legend(colours)}"
    )


def _grid(x: Axis, y: Axis) -> list[str]:
    out = []
    for value in x.ticks():
        at = x.at(value)
        out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        label = escape(format_duration(value, 3))
        out.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    for value in y.ticks():
        at = y.at(value)
        out.append(f'<line class="grid" y1="{at:.1f}" y2="{at:.1f}" x1="{LEFT}" x2="{WIDTH - RIGHT}"/>')
        label = escape(format_energy(value, 3))
        out.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    middle = (HEIGHT - BOTTOM + TOP) / 2
    out.append(f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 10}">latency</text>')
    out.append(f'<text class="axis" transform="translate(14 {middle:.0f}) rotate(-90)">energy per sample</text>')
    return out


def _frontier(dots: Sequence[Dot], x: Axis, y: Axis) -> str:
    """A staircase through the frontier: right of and above it something is better in both."""
    points: list[tuple[float, float]] = []
    for d in sorted((d for d in dots if d.frontier), key=lambda d: (d.x, d.y)):
        if points and y.at(d.y) < points[-1][1]:
            continue  # there because of its accuracy: beaten in the two that are drawn
        if points:
            points.append((x.at(d.x), points[-1][1]))
        points.append((x.at(d.x), y.at(d.y)))
    if not points:
        return ""
    points = [(points[0][0], float(TOP)), *points, (float(WIDTH - RIGHT), points[-1][1])]
    return f'<polyline class="frontier" points="{" ".join(f"{px:.1f},{py:.1f}" for px, py in points)}"/>'


def _point(d: Dot, x: Axis, y: Axis, colour: str) -> str:
    """The point and its 90% interval in either direction."""
    left, right = x.at(d.x - d.error_x), x.at(d.x + d.error_x)
    low, high = y.at(d.y - d.error_y), y.at(d.y + d.error_y)
    px, py = x.at(d.x), y.at(d.y)
    whisker = f"M{left:.1f} {py:.1f}H{right:.1f}M{px:.1f} {low:.1f}V{high:.1f}"
    return (
        f'<g class="{"point front" if d.frontier else "point"}"><title>{escape(d.title)}</title>'
        f'<path class="whisker" stroke="{colour}" d="{whisker}"/>'
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{6 if d.frontier else 4.5}" fill="{colour}"/></g>'
    )


def _labels(dots: Sequence[Dot], x: Axis, y: Axis) -> list[str]:
    """Beside each point where there is room, the frontier's first; the rest have theirs under the pointer."""
    taken = [(x.at(d.x) - 6, y.at(d.y) - 6, x.at(d.x) + 6, y.at(d.y) + 6) for d in dots]
    out = []
    for d in sorted(dots, key=lambda d: not d.frontier):
        px, py, wide = x.at(d.x), y.at(d.y), _LETTER * len(d.label)
        for left, base in (
            (px + 9, py + 4),
            (px - 9 - wide, py + 4),
            (px - wide / 2, py - 10),
            (px - wide / 2, py + 18),
        ):
            box = (left, base - _LINE + 3, left + wide, base + 2)
            inside = box[0] >= LEFT and box[2] <= WIDTH and box[1] >= TOP and box[3] <= HEIGHT - BOTTOM
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                kind = "label front" if d.frontier else "label"
                out.append(f'<text class="{kind}" x="{left:.1f}" y="{base:.1f}">{escape(d.label)}</text>')
                break
    return out


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _legend(colours: dict[str, str]) -> str:
    keys = "".join(f'<span><i style="background:{c}"></i>{escape(group)}</span>' for group, c in colours.items())
    return f'<p class="legend">{keys}<span><i class="line"></i>Pareto frontier</span></p>'
