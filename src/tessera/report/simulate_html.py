"""A simulation as one page that needs no network: the feed, its spectrum, the rows over time, a map of the racks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

import numpy as np

from ..analyze.spectrum import EvenSamples, compute_spectrum
from ..fleet.simulation import RackSummary, Simulation
from ..joules import Floats
from ..units import format_duration, format_power, format_share, format_temperature, pick_energy_format
from .html import definitions, framed_page, note, number_cell, table, tile
from .simulate import (
    count_text,
    describe_judged,
    describe_size,
    describe_trips,
    format_lost,
    format_verdict,
    list_figures,
)

_WIDTH, _LEFT, _HEIGHT = 1040, 78, 210
_POINTS = 900
_MOST_RACKS, _MOST_ROWS, _MOST_EVENTS, _CLOSE_PERIODS = 4000, 40, 200, 4
# From blue over near-white to red, also by lightness (ColorBrewer's RdYlBu, reversed; safe for colour-blind readers).
_RAMP = ("#4575b4", "#74add1", "#abd9e9", "#e0f3f8", "#fee090", "#fdae61", "#f46d43", "#d73027")


def simulation_page(result: Simulation) -> str:
    """Return one self-contained HTML file."""
    facility = result.scenario.facility
    parts = [
        f"<h2>{escape(facility.name)}</h2><div class='dim'>Simulated: {escape(describe_size(result))}</div>",
        _tiles(result),
    ]
    if result.verdicts:
        parts.append(f"<h3>The utility's spec</h3>{_verdicts(result)}")
    parts += [
        f"<h3>Power of the feed</h3>{draw_power(result)}",
        f"<h3>The last seconds, closely</h3>{draw_power(result, close=True)}",
        f"<h3>What swings: the spectrum of the feed</h3>{draw_spectrum(result)}",
        f"<h3>The rows over time</h3>{draw_rows(result)}",
        f"<h3>The racks</h3>{draw_maps(result)}",
    ]
    if result.jobs:
        parts.append(f"<h3>Jobs</h3>{_jobs(result)}")
    if result.events:
        parts.append(f"<h3>What happened</h3>{_events(result)}")
    parts.append(f"<details open><summary>Figures</summary><dl>{definitions(list_figures(result))}</dl></details>")
    content = f"<section>{''.join(parts)}</section>"
    return framed_page(f"{facility.name} - tessera simulate", content, "simulate.css")


def _tiles(result: Simulation) -> str:
    q = result.quality
    lost = [job for job in result.jobs if job.lost_share is not None]
    hottest = max((rack.hottest_c for rack in result.racks), default=0.0)
    passed = {True: "met", False: "not met", None: "none given"}[result.passed]
    tiles = [
        tile(format_power(q.mean_w, 3), f"mean of the feed, from {format_duration(q.from_s, 3)} on"),
        tile(format_power(q.peak_w, 3), f"peak, crest factor {q.crest_factor:.2f}"),
        tile(format_power(q.range_w, 3), f"swing, {format_share(q.range_share)} of the mean"),
        tile(pick_energy_format(result.energy_j)(result.energy_j, 3), f"in {format_duration(result.duration_s, 3)}"),
        tile(
            format_lost(max(lost, key=lambda job: job.lost_share or 0.0)) if lost else "-", "of a job's iterations lost"
        ),
        tile(format_temperature(hottest, 3), "hottest GPU"),
        tile(describe_trips(result), "trips"),
        tile(passed, "utility spec"),
    ]
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _verdicts(result: Simulation) -> str:
    rows = ""
    for verdict in result.verdicts:
        found, allowed, word = format_verdict(verdict)
        css = "pass" if verdict.passed else "fail"
        rows += (
            f"<tr><td>{escape(verdict.what)}</td>{number_cell(found, verdict.found)}"
            f"{number_cell(allowed, verdict.limit)}<td class='{css}'>{word.lower()}</td></tr>"
        )
    return table((("limit", False), ("found", True), ("allowed", True), ("", False)), rows, kind="") + note(
        "A ramp is the largest change within one second. The band's share is the root mean square of the swing within "
        f"the band, over the mean power. Judged: {describe_judged(result)}."
    )


# -- plots over time ----------------------------------------------------------------------------------------------


def _thin(values: Floats, points: int = _POINTS) -> tuple[Floats, Floats, Floats]:
    """Return lowest, mean and highest of each of `points` stretches."""
    edges = np.unique(np.linspace(0, len(values), min(points, len(values)) + 1).astype(int))[:-1]
    count = np.diff(np.append(edges, len(values)))
    return (
        np.minimum.reduceat(values, edges),
        np.add.reduceat(values, edges) / count,
        np.maximum.reduceat(values, edges),
    )


def _scale(low: float, high: float, height: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: 8.0 + (height - 34.0) * (1.0 - (value - low) / span)


def draw_power(result: Simulation, *, close: bool = False) -> str:
    """Return watts of the feed over time: mean, lowest and highest; before storage too, if there is some."""
    feed, load, start_s = result.feed_w, result.load_w, 0.0
    if close:
        longest = max((job.period_s for job in result.scenario.jobs), default=2.0)
        steps = min(len(feed), max(round(_CLOSE_PERIODS * longest / result.step_s), 200))
        feed, load, start_s = feed[-steps:], load[-steps:], (len(feed) - steps) * result.step_s
    low, mean, high = _thin(feed)
    seconds = len(feed) * result.step_s
    has_storage = result.scenario.facility.feed.storage is not None
    top = max(float(high.max()), float(load.max()) if has_storage else 0.0)
    y, x = _scale(0.0, 1.05 * top, _HEIGHT), (_WIDTH - _LEFT - 12) / max(1, len(mean) - 1)
    at = [_LEFT + i * x for i in range(len(mean))]
    upper = " ".join(f"{a:.1f},{y(v):.1f}" for a, v in zip(at, high, strict=True))
    lower = " ".join(f"{a:.1f},{y(v):.1f}" for a, v in zip(reversed(at), low[::-1], strict=True))
    line = " ".join(f"{a:.1f},{y(v):.1f}" for a, v in zip(at, mean, strict=True))
    shapes = _grid(y, 1.05 * top, start_s, seconds) + f"<polygon class='area' points='{upper} {lower}'/>"
    legend = "<span><i style='background:#2b8fc4'></i>feed: mean, lowest to highest</span>"
    if has_storage:
        before = " ".join(f"{a:.1f},{y(v):.1f}" for a, v in zip(at, _thin(load)[1], strict=True))
        shapes += f"<polyline class='load' points='{before}'/>"
        legend += "<span><i class='line'></i>what the rows draw, before storage and UPS</span>"
    shapes += f"<polyline class='feed' points='{line}'/>"
    for event in result.trips[:_MOST_EVENTS]:
        if start_s <= event.time_s <= start_s + seconds:
            place = _LEFT + (event.time_s - start_s) / seconds * (_WIDTH - _LEFT - 12)
            title = f"{event.kind}: {event.place}{count_text(event)}"
            shapes += f"<line class='mark' x1='{place:.1f}' x2='{place:.1f}' y1='8' y2='{_HEIGHT - 26}'>"
            shapes += f"<title>{escape(title)}</title></line>"
    return _frame(shapes, _HEIGHT, "Power over time") + f"<p class='legend'>{legend}</p>"


def _frame(shapes: str, height: float, label: str) -> str:
    return (
        f"<div class='scroll'><svg class='plot' viewBox='0 0 {_WIDTH} {height:.0f}' role='img' "
        f"aria-label='{escape(label)}'>{shapes}</svg></div>"
    )


def _grid(y: Callable[[float], float], top: float, start_s: float, seconds: float) -> str:
    shapes = ""
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        shapes += (
            f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - 12}' y1='{y(part * top):.1f}' y2='{y(part * top):.1f}'/>"
            f"<text x='{_LEFT - 8}' y='{y(part * top) + 4:.1f}' text-anchor='end'>"
            f"{escape(format_power(part * top, 3))}</text>"
        )
    return shapes + _time_axis(start_s, seconds, _HEIGHT - 6)


def _time_axis(start_s: float, seconds: float, y: float) -> str:
    shapes = ""
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = "start" if part == 0.0 else "end" if part == 1.0 else "middle"
        text = format_duration(start_s + part * seconds, 4)
        place = _LEFT + part * (_WIDTH - _LEFT - 12)
        shapes += f"<text x='{place:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>"
    return shapes


def draw_spectrum(result: Simulation) -> str:
    """Return the root mean square of the swing by frequency, on a logarithmic axis from 0.05 to 50 Hz.

    The band is shaded.
    """
    steady = result.feed_w[round(result.quality.from_s / result.step_s) :]
    spectrum = compute_spectrum(EvenSamples(start_ns=0, step_s=result.step_s, watts=steady))
    if spectrum is None:
        return note("The run is too short for a spectrum.")
    edges = np.geomspace(0.05, 50.0, 181)
    level = np.array([np.sqrt(spectrum.band_w2(a, b)) for a, b in pairwise(edges)])
    share = level / result.quality.mean_w if result.quality.mean_w else level
    top = max(float(share.max()), 1e-6)
    y = _scale(0.0, top, 150.0)

    def x(hz: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 12) * math.log(hz / 0.05) / math.log(1000.0)

    low, high = (min(max(f, 0.05), 50.0) for f in result.quality.band_hz)
    shapes = f"<rect class='band' x='{x(low):.1f}' y='8' width='{x(high) - x(low):.1f}' height='116'/>"
    for part in (0.0, 0.5, 1.0):
        shapes += f"<text x='{_LEFT - 8}' y='{y(part * top) + 4:.1f}' text-anchor='end'>{part * top:.2%}</text>"
    for hz in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20):
        shapes += f"<text x='{x(hz):.1f}' y='144' text-anchor='middle'>{hz:g} Hz</text>"
    for a, b, v in zip(edges[:-1], edges[1:], share, strict=True):
        if v > 0.002 * top:
            width = max(1.5, x(float(b)) - x(float(a)) - 0.6)
            title = f"{a:.3g} to {b:.3g} Hz: {v:.2%} of the mean"
            shapes += (
                f"<rect x='{x(float(a)):.1f}' y='{y(float(v)):.1f}' width='{width:.1f}' "
                f"height='{max(0.5, y(0.0) - y(float(v))):.1f}' fill='#b3589a'><title>{title}</title></rect>"
            )
    words = note("Root mean square of the swing, over the mean power; shaded: the band that the utility watches.")
    return _frame(shapes, 150, "Spectrum") + words


def draw_rows(result: Simulation) -> str:
    """Return a lane for each class of rows: the darker, the nearer to its highest power."""
    rows = min(len(result.row_names), _MOST_ROWS)
    top = float(result.row_w.max()) or 1.0
    height = rows * 22 + 26
    shapes, columns = "", 260
    for row in range(rows):
        _, mean, high = _thin(result.row_w[:, row], columns)
        width = (_WIDTH - _LEFT - 12) / len(mean)
        count = result.row_counts[row]
        name = f"{result.row_names[row]}{f' x {count}' if count > 1 else ''}"
        shapes += f"<text x='{_LEFT - 8}' y='{row * 22 + 15}' text-anchor='end'>{escape(name)}</text>"
        for i, value in enumerate(mean):
            colour = _RAMP[min(len(_RAMP) - 1, int(value / top * len(_RAMP)))]
            time_s = i / len(mean) * result.duration_s
            watts = f"mean {format_power(float(value), 3)}, highest {format_power(float(high[i]), 3)}"
            title = f"{name}, {format_duration(time_s, 3)}: {watts}"
            shapes += (
                f"<rect x='{_LEFT + i * width:.1f}' y='{row * 22}' width='{width + 0.3:.2f}' height='19' "
                f"fill='{colour}'><title>{escape(title)}</title></rect>"
            )
    shapes += _time_axis(0.0, result.duration_s, height - 6)
    more = f" {len(result.row_names) - rows} more are not drawn." if len(result.row_names) > rows else ""
    words = f"Blue: 0 W; red: {format_power(top, 3)}. Rows that are alike share a lane.{more}"
    return _frame(shapes, height, "Rows over time") + note(words)


# -- the map ------------------------------------------------------------------------------------------------------


def draw_maps(result: Simulation) -> str:
    """Return racks by row: by the temperature of their hottest GPU, and by the highest load of their breaker."""
    slow_at = result.scenario.facility.gpu.heat.slow_at_c
    supply = result.scenario.facility.aisle.supply_c
    heat = _map(result, lambda r: (r.hottest_c - supply) / (slow_at - supply), "temperature")
    load = _map(result, lambda r: r.load, "load")
    facility = result.scenario.facility
    has_breakers = facility.rack_breaker or facility.own_breakers
    full = "its breaker's rating" if has_breakers else "the nameplate of its nodes"
    return (
        f"<div class='maps'><figure>{heat}<figcaption>Hottest GPU of each rack: blue {format_temperature(supply, 3)}, "
        f"red {format_temperature(slow_at, 3)}, where GPUs slow down</figcaption></figure>"
        f"<figure>{load}<figcaption>Highest power of each rack: blue 0, red {full}; dashed: its breaker is open"
        "</figcaption></figure></div>"
    )


def _map(result: Simulation, value: Callable[[RackSummary], float], label: str) -> str:
    facility = result.scenario.facility
    classes = list(result.rack_class)
    racks = min(facility.racks, _MOST_RACKS)
    columns = facility.row_racks
    size = max(5.0, min(30.0, 500.0 / columns))
    rows = -(-racks // columns)
    high = max(3.0, min(size, 22.0, 420.0 / rows))
    shapes = ""
    for rack in range(racks):
        summary = result.racks[classes[rack]]
        share = min(1.0, max(0.0, value(summary)))
        colour = _RAMP[min(len(_RAMP) - 1, int(share * len(_RAMP)))]
        row, column = divmod(rack, columns)
        title = (
            f"{facility.name_rack(rack)}: {format_power(summary.peak_w, 3)} peak, {summary.load:.0%} of its rating, "
            f"hottest GPU {format_temperature(summary.hottest_c, 3)}, inlet {format_temperature(summary.inlet_c, 3)}"
        )
        css = "" if summary.is_closed else " class='open'"
        shapes += (
            f"<rect{css} x='{50 + column * size:.1f}' y='{row * high:.1f}' width='{size:.1f}' height='{high:.1f}' "
            f"fill='{colour}'><title>{escape(title)}</title></rect>"
        )
    if high >= 10.0:
        shapes += "".join(
            f"<text x='44' y='{row * high + high * 0.7:.1f}' text-anchor='end' font-size='11' fill='currentColor'>"
            f"{escape(facility.name_row(row))}</text>"
            for row in range(rows)
        )
    box = f"0 0 {max(540.0, 50 + columns * size):.0f} {rows * high:.0f}"  # do not enlarge a few racks
    return f"<svg class='map' viewBox='{box}' role='img' aria-label='Racks by {escape(label)}'>{shapes}</svg>"


# -- tables -------------------------------------------------------------------------------------------------------


def _jobs(result: Simulation) -> str:
    energy = pick_energy_format(result.energy_j)
    rows = "".join(
        f"<tr><td>{escape(job.name)}</td>{number_cell(f'{job.gpus:,}', job.gpus)}<td>{escape(job.state)}</td>"
        f"{number_cell(format_duration(job.waited_s, 3), job.waited_s)}"
        f"{number_cell(f'{job.iterations:,.1f}', job.iterations)}{number_cell(format_lost(job), job.lost_share)}"
        f"{number_cell(energy(job.energy_j, 3), job.energy_j)}"
        f"{number_cell(energy(job.ballast_j, 3), job.ballast_j)}</tr>"
        for job in result.jobs
    )
    columns: Sequence[tuple[str, bool]] = (
        ("job", False),
        ("GPUs", True),
        ("state", False),
        ("waited", True),
        ("iterations", True),
        ("lost", True),
        ("energy", True),
        ("ballast", True),
    )
    return table(columns, rows)


def _events(result: Simulation) -> str:
    shown = result.events[:_MOST_EVENTS]
    rows = "".join(
        f"<tr>{number_cell(format_duration(e.time_s, 4), e.time_s)}<td>{escape(e.kind)}</td>"
        f"<td>{escape(e.place)}{escape(count_text(e))}</td></tr>"
        for e in shown
    )
    more = note(f"{len(result.events) - len(shown)} more are not listed.") if len(result.events) > len(shown) else ""
    return table((("time", True), ("what", False), ("where", False)), rows, sorted_by="") + more
