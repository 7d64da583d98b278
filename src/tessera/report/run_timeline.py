"""The data that the timeline of a run's page draws, as JSON: columns of numbers as base64, to keep the page small."""

from __future__ import annotations

import base64
from html import escape
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..analyze.correlate import Correlation
from ..analyze.kernel_names import CATEGORIES, category, fit, region_name, short
from ..analyze.lanes import Lane
from ..analyze.overview import Overview, TrackLine
from ..timeline.columns import NONE
from ..units import format_duration, format_power

LONGEST_NAME = 300
SPIKES = 300
_ZOOM_BUTTONS = (("zoom-in", "Zoom in"), ("zoom-out", "Zoom out"), ("zoom-all", "Whole run"), ("zoom-one", "One step"))
_NO_INDEX = 0xFFFF
_FAR, _HUGE = 2**31 - 1, 3e38  # the ends of int32 and of float32


def timeline_section(view: Overview, total: str) -> str:
    """Return the section that the script draws into; `total` is the whole's figure, for readers who cannot see it."""
    if not (view.power or view.lanes):
        return ""
    buttons = "".join(
        f"<button type='button' id='{name}'>{text}</button>"
        for name, text in _ZOOM_BUTTONS
        if name != "zoom-one" or view.one is not None
    )
    title = "Power and what ran" if view.power else "What ran"
    below = f"{view.rows} kernels" if view.rows else "what ran"
    label = f"{'Power over time with ' if view.power else ''}{below}; {total}. The tables below have the same numbers."
    drawn = [f"{view.rows:,} kernels"] if view.rows else []
    if view.merged:
        short = f"{view.merged:,} of them are too short to see and are drawn together"
        drawn.append(f"{short}, except in one complete step")
    if view.hidden_lanes:
        drawn.append(f"{view.hidden_lanes} lanes with the least time are not shown")
    caption = f"{'; '.join(drawn)}. The colours are those of the bar above." if drawn else ""
    return (
        f"<section><h2>{title}</h2>"
        f"<div class='tools'>{buttons}<span class='dim'>drag to pan, Ctrl or Shift + wheel or double click to zoom; "
        "keys: ← → + − 0</span></div>"
        f"<figure><div class='plot'><canvas id='timeline' tabindex='0' role='img' aria-label='{escape(label)}'>"
        f"</canvas></div><figcaption>{escape(caption)}</figcaption></figure>"
        "</section>"
    )


def payload(view: Overview, correlation: Correlation | None = None) -> str:
    """Return the JSON of a page, safe inside a <script> element for any names."""
    # Times are whole numbers of a unit that fits 31 bits: a nanosecond up to a second, and 4 ns in a run of 4 s.
    unit_ns = max(1.0, view.span_ns / 2**30)
    names = list(view.names)[:_NO_INDEX]
    data: dict[str, Any] = {
        "unit_ns": unit_ns,
        "span_ns": view.span_ns,
        "categories": CATEGORIES,
        "names": [_name(name) for name in names],
        "power": [_line(line, unit_ns) for line in view.power],
        "telemetry": [_line(line, unit_ns) for line in view.telemetry],
        "throttle": view.throttle,
        "lanes": [_lane(lane, unit_ns) for lane in view.lanes],
        "marks": [(fit(name, 40), at) for name, at in view.marks],
        "idle_w": view.idle_w,
        "limit_w": view.limit_w,
        "one": view.one,
        "shown": view.shown,
        "spikes": _spikes(view, correlation),
    }
    return msgspec.json.encode(data).decode().replace("<", "\\u003c").replace("\u2028", " ").replace("\u2029", " ")


def _name(name: str) -> tuple[str, str, int]:
    """Return short name, full name (if it differs) and category."""
    kernel = region_name(short(name, "kernel")) if not name.startswith("aten::") else name
    full = "" if kernel == name else fit(name, LONGEST_NAME)
    return fit(kernel, 120), full, CATEGORIES.index(category(name))


def _line(line: TrackLine, unit_ns: float) -> dict[str, Any]:
    times = np.round(line.times_ns / unit_ns)
    # A reading years away, or of 1e300, comes from a faulty clock or sensor, and does not fit the page's number types.
    valid = (np.abs(times) < _FAR) & ~(np.abs(line.values) > _HUGE)
    columns = {"t": _pack(times[valid], "i4"), "v": _pack(line.values[valid], "f4")}
    return {"name": line.name, "unit": line.unit, "basis": line.basis, **columns}


def _lane(lane: Lane, unit_ns: float) -> dict[str, Any]:
    start, end = np.round(lane.start_ns / unit_ns), np.round(lane.end_ns / unit_ns)
    return {
        "label": lane.label,
        "kind": lane.kind,
        "h": lane.height,
        "longest": float((end - start).max(initial=0.0)),
        "s": _pack(start, "i4"),
        "d": _pack(end - start, "i4"),
        "n": _pack(np.minimum(lane.name, _NO_INDEX - 1), "u2"),
        "o": _pack(np.where((lane.op == NONE) | (lane.op >= _NO_INDEX), _NO_INDEX, lane.op), "u2"),
        "c": _pack(lane.count, "i4"),
        "e": _pack(lane.energy_j, "f4"),
    }


def _pack(values: NDArray[Any], kind: str) -> tuple[str, str]:
    return kind, base64.b64encode(np.ascontiguousarray(values).astype(f"<{kind}").tobytes()).decode()


def _spikes(view: Overview, correlation: Correlation | None) -> list[dict[str, Any]]:
    if correlation is None:
        return []
    highest = sorted(correlation.spikes, key=lambda s: s.peak_w, reverse=True)[:SPIKES]
    return [
        {
            "a": s.start_ns - view.start_ns,
            "b": s.end_ns - view.start_ns,
            "p": s.peak_ns - view.start_ns,
            "t": f"spike {s.number}: {format_power(s.peak_w, 3)} for {format_duration(s.time_s, 3)}",
            "k": [f"{fit(short(k.name, k.kind), 60)}: {k.share:.0%} of it" for k in s.kernels[:4]],
        }
        for s in sorted(highest, key=lambda s: s.start_ns)
    ]
