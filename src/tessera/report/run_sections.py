"""Sections of a run's page that an analysis fills: stalls, collectives, memory; and what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from ..analyze.kernel_names import fit, short
from ..analyze.overview import Line
from ..analyze.result import Result
from ..units import format_bytes, format_duration, format_energy
from .run_parts import head, note, number, prose, si

STALLS = (("memory_stall_pct", "memory", "c3"), ("dependency_stall_pct", "dependency", "c5"),
          ("structural_stall_pct", "structural", "c1"))  # fmt: skip
KERNELS = 25
SIZES, TIMES = 14, 9
"""Cells of the heat map at most, each way."""


# -- stalls ---------------------------------------------------------------------------------------------------------


def stalls(result: Result) -> str:
    """What warps waited for, kernel by kernel, those that lose most time first."""
    if not result.rows:
        return ""
    rows = result.rows[:KERNELS]
    keys = "".join(f"<li><i style='background:var(--{c})'></i>{name}</li>" for _, name, c in STALLS)
    columns = (("kernel", False), ("stalled", True), ("", False), *((name, True) for _, name, _ in STALLS),
               ("main reason", False), ("energy", True))  # fmt: skip
    overall = ", ".join(
        f"{name} {result.facts[key]:.0f}%" for key, name, _ in STALLS if result.facts.get(key) is not None
    )
    counted = result.facts.get("counted_pct")
    about = f"Of all warp cycles: {overall}." if overall else ""
    if isinstance(counted, (int, float)) and counted < 99.5:
        about += f" Counters are known for {counted:.0f}% of the time."
    return (
        f"<section id='stalls'><h2>What warps waited for</h2><p>{escape(about)}</p><ul class='legend'>{keys}</ul>"
        f"<div class='scroll'><table class='sort'><caption class='sr'>Stalls by kernel</caption>"
        f"{head(columns, 'stalled')}<tbody>{''.join(map(_stall_row, rows))}</tbody></table></div></section>"
    )


def _stall_row(row: Mapping[str, Any]) -> str:
    name = str(row["name"])
    pieces = "".join(
        f"<i style='width:{min(row[key], 100.0):.1f}%;background:var(--{colour})'></i>"
        for key, _, colour in STALLS
        if row.get(key)
    )
    shares = "".join(number(f"{row[k]:.0f}%" if row.get(k) is not None else "-", row.get(k)) for k, _, _ in STALLS)
    meaning = row.get("main_reason_means") or ""
    energy = row.get("energy_j")
    return (
        f"<tr><td class='name' title='{escape(fit(name, 300))}'>{escape(fit(short(name, 'kernel'), 60))}</td>"
        f"{number(format_duration(row['stalled_s'], 3), row['stalled_s'])}"
        f"<td><span class='stack' aria-hidden='true'>{pieces}</span></td>{shares}"
        f"<td title='{escape(str(meaning))}'>{escape(str(row.get('main_reason') or '-').replace('_', ' '))}</td>"
        f"{number(format_energy(energy, 3) if energy else '-', energy)}</tr>"
    )


# -- collectives ----------------------------------------------------------------------------------------------------


def collectives(result: Result) -> str:
    """A heat map of bytes and duration, coloured by what hid behind kernels, and the sums by kind."""
    if not result.rows:
        return ""
    sized = [r for r in result.rows if r.get("bytes") and r.get("time_s")]
    return (
        f"<section id='collectives'><h2>Collectives</h2>{_heat(sized) if sized else ''}"
        f"{_kinds(result.facts.get('by_kind') or {})}{''.join(note(n) for n in result.notes[-1:])}</section>"
    )


def _bins(values: Sequence[float], most: int) -> tuple[list[int], int, int]:
    """Each value's bin, the exponent of two at the first bin's low edge, and how many powers of two a bin spans."""
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
    width, height = 90 + across * wide, 44 + up * high
    out = [_cell(x, up - 1 - y, wide, high, members) for (x, y), members in sorted(cells.items())]
    for x in range(across):
        size = format_bytes(2.0 ** (x_low + x * x_wide), 3)
        out.append(f"<text x='{86 + x * wide}' y='{up * high + 16}'>{escape(size)}</text>")
    for y in range(up):
        lasted = format_duration(2.0 ** (y_low + y * y_wide) * 1e-6, 3)
        out.append(f"<text x='78' y='{(up - y) * high - 3}' text-anchor='end'>{escape(lasted)}</text>")
    out.append(f"<text x='86' y='{height - 6}'>bytes from; up: time from</text>")
    label = f"{len(rows)} collectives by bytes and time; the table below has their sums"
    return (
        f"<figure class='plot scroll'><svg class='heat' viewBox='0 0 {width} {height}' role='group' tabindex='0' "
        f"style='width:{width}px' aria-label='{escape(label)}'>{''.join(out)}</svg></figure>"
        "<ul class='legend'><li><i style='background:var(--power)'></i>exposed: nothing ran beside it</li>"
        "<li><i style='background:var(--c4)'></i>hidden behind kernels</li>"
        "<li><i style='background:var(--idle)'></i>not known</li></ul>"
    )


def _cell(x: int, y: int, wide: int, high: int, members: Sequence[Mapping[str, Any]]) -> str:
    seconds = sum(float(r["time_s"]) for r in members)
    known = [(float(r["overlap_pct"]), float(r["time_s"])) for r in members if r.get("overlap_pct") is not None]
    weight = sum(s for _, s in known)
    hidden = sum(o * s for o, s in known) / weight if weight > 0 else None
    fill = "var(--idle)" if hidden is None else f"color-mix(in oklab,var(--c4) {hidden:.0f}%,var(--power))"
    kinds = ", ".join(sorted({str(r["kind"]) for r in members}))
    moved = sum(float(r["bytes"]) for r in members)
    lines = [f"{format_bytes(moved, 3)} in {format_duration(seconds, 3)}: {si(moved / seconds, 'B/s')}",
             f"{hidden:.0f}% beside kernels" if hidden is not None else "beside kernels: not known"]  # fmt: skip
    said = "\n".join(lines)
    title = f"{len(members):,} x {kinds}"
    middle = f"x='{86 + (x + 0.5) * wide - 2:.0f}' y='{(y + 0.5) * high + 3:.0f}'"
    return (
        f"<g data-n='{escape(title)}' data-t='{escape(said)}'><rect x='{86 + x * wide}' y='{y * high}' rx='3' "
        f"width='{wide - 3}' height='{high - 3}' style='fill:{fill}'/>"
        f"<text class='{'in' if hidden is not None else 'in dark'}' {middle}>{len(members):,}</text></g>"
    )


def _kinds(by_kind: Mapping[str, Mapping[str, Any]]) -> str:
    columns = (("kind", False), ("calls", True), ("time", True), ("bytes", True), ("algorithm", True), ("bus", True),
               ("beside kernels", True), ("waited", True))  # fmt: skip
    rows = sorted(by_kind.items(), key=lambda kv: -float(kv[1]["time_s"]))
    body = "".join(_kind_row(kind, r) for kind, r in rows)
    return (
        "<div class='scroll'><table class='sort'><caption class='sr'>Collectives by kind</caption>"
        f"{head(columns, 'time')}<tbody>{body}</tbody></table></div>"
    )


def _kind_row(kind: str, row: Mapping[str, Any]) -> str:
    moved, hidden, waited = row.get("bytes"), row.get("overlap_pct"), row.get("wait_s")
    cells = [
        number(f"{row['count']:,}", row["count"]),
        number(format_duration(row["time_s"], 3), row["time_s"]),
        number(format_bytes(moved, 3) if moved else "-", moved),
        *(number(si(row.get(key), "B/s"), row.get(key)) for key in ("bytes_per_s", "bus_bytes_per_s")),
        number(f"{hidden:.0f}%" if hidden is not None else "-", hidden),
        number(format_duration(waited, 3) if waited else "-", waited),
    ]
    return f"<tr><td>{escape(kind.replace('_', ' '))}</td>{''.join(cells)}</tr>"


# -- memory ---------------------------------------------------------------------------------------------------------


def memory_lines(result: Result | None, offset_ns: int) -> list[Line]:
    """The curves of allocated memory as lines of the timeline, which pans and zooms them with the power."""
    curves = (result.facts.get("timeline") or {}) if result is not None else {}
    most = max((b for points in curves.values() for _, b in points), default=0.0)
    unit, size = ("GiB", 1 << 30) if most >= 1 << 30 else ("MiB", 1 << 20) if most >= 1 << 20 else ("KiB", 1 << 10)
    return [
        Line(
            name=f"{where} allocated", unit=unit, values=np.array([b for _, b in points], np.float64) / size,
            times_ns=np.array([round(s * 1e9) + offset_ns for s, _ in points], np.int64),
        )
        for where, points in curves.items()
        if points
    ]  # fmt: skip


def memory(result: Result) -> str:
    """Peaks by device; the curve is in the timeline."""
    if not result.rows:
        return ""
    columns = (("device", False), ("peak", True), ("at", True), ("in operator", False), ("mean", True), ("last", True))
    body = "".join(
        f"<tr><td>{escape(str(r['where']))}</td>{number(format_bytes(r['peak_bytes'], 3), r['peak_bytes'])}"
        f"{number(format_duration(r['peak_at_s'], 3), r['peak_at_s'])}"
        f"<td>{escape(fit(str(r['peak_op'] or '-'), 60))}</td>"
        f"{number(format_bytes(r['mean_bytes'], 3), r['mean_bytes'])}"
        f"{number(format_bytes(r['last_bytes'], 3), r['last_bytes'])}</tr>"
        for r in result.rows
    )
    return (
        "<section id='memory'><h2>Memory</h2><div class='scroll'><table class='sort'>"
        f"<caption class='sr'>Allocated memory by device</caption>{head(columns, 'peak')}<tbody>{body}</tbody>"
        f"</table></div>{note('What PyTorch had allocated; its course is in the timeline above.')}</section>"
    )


# -- what is missing ------------------------------------------------------------------------------------------------


def lacking(lines: Sequence[tuple[str, str]]) -> str:
    """One line for each remedy: what it would show."""
    if not lines:
        return ""
    body = "".join(f"<dt>{prose(_sentence(what))}</dt><dd>{_coded(fix)}</dd>" for what, fix in lines)
    return (
        "<section id='missing'><h2>What is missing, and what would provide it</h2>"
        f"<dl class='missing'>{body}</dl></section>"
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] if text[:2] != "l2" else text


def _coded(text: str) -> str:
    """Commands and calls look like what is typed."""
    head_, colon, tail = text.rpartition(": ")
    typed = colon and "`" not in tail and (tail.startswith("tessera ") or "=" in tail)
    return f"{prose(head_)}: <code>{escape(tail)}</code>" if typed else prose(text)
