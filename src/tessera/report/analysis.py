"""The result of any analysis as people see it: in the terminal, as plain text, in a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analyze.kernel_names import fit, short_name
from ..analyze.result import Result, ResultColumn
from ..units import format_bytes, format_duration, format_energy, format_frequency, format_power, format_temperature
from .screen import colourless

WIDTH = 100
TOP = 20
_UNKNOWN = "-"
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SUFFIXES = {"s": "s", "j": "J", "w": "W", "bytes": "B", "pct": "%", "hz": "Hz", "c": "°C"}
_LEAST = 24  # characters that names keep on a narrow terminal
_NOTES = 6
_KERNEL_NAMES = ("name", "kernel", "kernel_name")
# What people see above the rows, by kind: key, label, unit, and the key of the same as a share. The rest is in JSON.
FACTS: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "breakdown": (
        ("devices", "devices", "", ""), ("span_s", "first to last kernel", "s", ""), ("compute_s", "compute", "s", ""),
        ("communication_s", "communication", "s", ""), ("exposed_communication_s", "of it exposed", "s", ""),
        ("copies_s", "copies", "s", ""), ("idle_s", "idle", "s", ""), ("total_j", "energy of the trace", "J", ""),
        ("idle_j", "of it idle", "J", ""),
    ),
    "overlap": (
        ("communication_s", "communication", "s", ""), ("communication_overlap_pct", "hidden behind kernels", "%", ""),
        ("copies_s", "copies", "s", ""), ("copies_overlap_pct", "copies hidden", "%", ""),
    ),
    "kernels": (
        ("calls", "calls", "", ""), ("names", "different kernels", "", ""), ("total_s", "kernel time", "s", ""),
        ("total_j", "energy of the trace", "J", ""), ("idle_j", "of it idle", "J", ""),
    ),
    "critical_path": (
        ("length_s", "length", "s", ""), ("span_s", "of a recording of", "s", ""),
        ("host_s", "on the host", "s", "host_pct"), ("device_s", "on the device", "s", "device_pct"),
        ("gap_s", "gaps", "s", "gap_pct"),
    ),
    "collectives": (("count", "collectives", "", ""),),
    "memcpy": (
        ("calls", "copies", "", ""), ("bytes", "bytes", "B", ""), ("time_s", "time", "s", ""),
        ("overlapped_s", "beside kernels", "s", ""), ("pinned_pct", "from or to pinned memory", "%", ""),
        ("memsets", "memsets", "", ""), ("memset_s", "time of memsets", "s", ""),
    ),
    "memory": (),
    "power": (
        ("window_s", "first to last kernel", "s", ""), ("recorded_s", "recorded", "s", ""),
        ("recorded_mean_w", "mean of the recording", "W", ""), ("recorded_j", "energy of the recording", "J", ""),
        ("spikes", "spikes", "", ""), ("spike_threshold_w", "each above", "W", ""), ("spikes_s", "in spikes", "s", ""),
        ("dominant_hz", "strongest frequency", "Hz", ""), ("dominant_is", "which is", "", ""),
        ("step_hz", "median step", "Hz", ""), ("throttled_s", "throttled", "s", ""), ("throttle_reasons", "by", "", ""),
    ),
    "roofline": (
        ("device_name", "chip", "", ""), ("hbm_bytes_per_s", "memory bandwidth", "B/s", ""),
        ("best_bytes_per_j", "best bytes per joule", "B/J", ""), ("time_s", "device time", "s", ""),
        ("known_time_s", "with known work", "s", ""), ("mfu_pct", "of the peak FLOP/s", "%", ""),
    ),
    "stalls": (
        ("time_s", "kernel time", "s", ""), ("counted_pct", "of it with counters", "%", ""),
        ("memory_stall_pct", "memory stalls", "%", ""), ("dependency_stall_pct", "dependency stalls", "%", ""),
        ("structural_stall_pct", "structural stalls", "%", ""),
    ),
    "divergence": (
        ("time_s", "kernel time", "s", ""), ("counted_pct", "of it with counters", "%", ""),
        ("threshold_pct", "listed above", "%", ""), ("warp_divergence_pct", "mean divergence", "%", ""),
    ),
    "advise": (
        ("energy_j", "energy of the trace", "J", ""), ("time_s", "time", "s", ""), ("basis", "joules are", "", ""),
    ),
}  # fmt: skip

_OF_A_CPU = {"device time": "time in operators"}  # where the rows are operators of the host


def value(given: Any, unit: str = "") -> str:
    """One value with its unit, short: 0.0123 s is "12.3 ms", 1.2e12 FLOP/s "1.2 TFLOP/s"; "-" where it is unknown."""
    if given is None:
        return _UNKNOWN
    if isinstance(given, bool):
        return "yes" if given else "no"
    if not isinstance(given, (int, float)):
        return _plain(given)
    if isinstance(given, float) and not math.isfinite(given):
        return _UNKNOWN if math.isnan(given) else str(given)
    formats = {
        "s": format_duration, "J": format_energy, "W": format_power, "B": format_bytes, "Hz": format_frequency,
        "°C": format_temperature, "C": format_temperature,
    }  # fmt: skip
    if unit in formats:
        return formats[unit](given) if given >= 0 else f"-{formats[unit](-given)}"
    if unit == "%":
        return "<0.1%" if 0 < given < 0.05 else f"{given:.1f}%"
    if not unit:
        return f"{given:,}" if isinstance(given, int) else f"{given:.4g}"
    return _scaled(float(given), unit)


def _scaled(number: float, unit: str) -> str:
    """A number with a prefix of a thousand: for rates, and units we know nothing of."""
    shown = ((s, p) for s, p in _PREFIXES if abs(float(f"{number / s:.4g}")) >= 1)  # as it will be written
    size, prefix = next(shown, (1.0, ""))
    return f"{number / size:.4g} {prefix}{unit}"


def _plain(given: Any) -> str:
    """Text on one line, without what would move a terminal's cursor."""
    if isinstance(given, (list, tuple)):
        given = ", ".join(map(str, given))
    return "".join(c if c.isprintable() else " " for c in str(given))


def text(result: Result, *, top: int = TOP, width: int = WIDTH) -> str:
    """The result as plain text: what `print(result)` shows."""
    return colourless(width).text(renderable(result, width=width, top=top), crop=True).rstrip()


def renderable(result: Result, width: int = WIDTH, *, top: int = TOP) -> RenderableType:
    """The same for a terminal of some width: title, figures, the first rows, what to know, what is missing."""
    parts: list[RenderableType] = [Text(_plain(result.title), style="bold")]
    facts = _facts(result)
    if facts:
        parts.append(Text("   ".join(f"{name} {said}" for name, said in facts)))
    if result.rows:
        parts += _paragraphs(result, top) if result.kind == "advise" else [_table(result, result.rows[:top], width)]
        if len(result.rows) > top:
            parts.append(Text(f"{top} of {len(result.rows)} rows", style="dim"))
    elif reason := _reason(result):
        parts.append(Text(reason, style="yellow"))
    parts += [Text(f"note  {_plain(note)}", style="yellow") for note in _notes(result)]
    parts += [Text(f"missing  {_plain(what)}: {_plain(fix)}", style="yellow") for what, fix in _missing(result)]
    return Group(*parts)


def _reason(result: Result) -> str | None:
    """Why there is no row, where one thing that is missing says it all: a sentence that stands for the rows."""
    reasons = list(result.missing.values())
    return _plain(reasons[0]) if not result.rows and len(reasons) == 1 else None


def _missing(result: Result) -> list[tuple[str, str]]:
    """What could not be answered, but for what is said already."""
    return [] if _reason(result) else list(result.missing.items())


def _paragraphs(result: Result, top: int) -> list[RenderableType]:
    """Advice: evidence and fix are sentences, and no table has room for them."""
    parts: list[RenderableType] = []
    for row in result.rows[:top]:
        parts += [Text(""), Text(_plain(row["kind"]), style="bold").append(f"  {_saving(row)}", style="not bold green")]
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row("  why", Text(_plain(row["evidence"])))
        grid.add_row("  fix", Text(_plain(row["action"]), style="bold"))
        parts.append(grid)
    together = result.facts.get("saves_j")
    if len(result.rows) > 1 and together:
        each = "they overlap, so that is less than their sum"
        parts += [Text(""), Text(f"all of them together: about {value(together, 'J')} less ({each})")]
    return [*parts, Text("")]


def _saving(row: Mapping[str, Any]) -> str:
    """What a change saves, and how sure that is: "saves 62.9 J and 151 ms (high confidence, by prediction)"."""
    joules, seconds = row.get("saves_j"), row.get("saves_s")
    saved = [format_energy(joules, 3)] if joules else []
    saved += [format_duration(seconds, 3)] if seconds is not None and seconds > 0 else []
    cost = f", costs {format_duration(-seconds, 3)}" if seconds is not None and seconds < 0 else ""
    said = f"saves about {' and '.join(saved)}{cost}" if saved else "saving not known"
    return f"{said} ({row.get('confidence')} confidence, by {row.get('by')})"


def _notes(result: Result) -> list[str]:
    """The notes, each once; what a reader merely left out of a trace comes last, and of many only the first."""
    notes = sorted(dict.fromkeys(result.notes), key=lambda note: "left out" in note)
    return notes if len(notes) <= _NOTES else [*notes[:_NOTES], f"and {len(notes) - _NOTES} more: see --json"]


def _table(result: Result, rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    columns = _shown(result)
    cells = {c.key: [_cell(c, r) for r in rows] for c in columns}
    texts = {c.key: _is_text(c, rows) for c in columns}
    widths = {c.key: max(len(c.title), *map(len, cells[c.key])) + 2 for c in columns}
    widest = max((k for k, is_text in texts.items() if is_text), key=lambda k: widths[k], default=None)

    def taken() -> int:
        return sum(w if k != widest else min(w, _LEAST) for k, w in widths.items())

    # A number that is cut is wrong: the last columns go first. One column of names gives way before that, and is cut in
    # the middle, since names differ at their ends.
    while len(columns) > 2 and taken() > width + 2:
        last = next(c for c in reversed(columns) if c.key != widest)
        columns.remove(last)
        del widths[last.key]
    if widest is not None:
        room = max(_LEAST, width - sum(w for k, w in widths.items() if k != widest))
        cells[widest] = [fit(cell, room) for cell in cells[widest]]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.title, justify="left" if texts[column.key] else "right", no_wrap=True)
    for line in zip(*(cells[c.key] for c in columns), strict=True):
        table.add_row(*(Text(cell) for cell in line))
    return table


def _shown(result: Result) -> list[ResultColumn]:
    """The columns that have a value in any row; an error stands in the column of what it is the error of."""
    keys = {c.key for c in result.columns}
    errors = {k for c in result.columns if (k := error_of(c.key)) in keys}
    return [
        c for c in result.columns if c.key not in errors and any(r.get(c.key) is not None for r in result.rows)
    ] or list(result.columns)


def error_of(key: str) -> str:
    """The key of the error of a column: energy_j has error_j, recorded_j has recorded_error_j."""
    stem, _, unit = key.rpartition("_")
    return f"error_{unit}" if stem in ("energy", "time", "power") else f"{stem}_error_{unit}"


def _cell(column: ResultColumn, row: Mapping[str, Any]) -> str:
    given, error = row.get(column.key), row.get(error_of(column.key))
    if column.key in _KERNEL_NAMES and isinstance(given, str) and row.get("kind", "kernel") == "kernel":
        return _plain(short_name(given))
    said = value(given, column.unit)
    if given is None or not isinstance(error, (int, float)) or not error > 0:
        return said
    from .text import energy_text, with_error

    return energy_text(given, error) if column.unit == "J" else with_error(given, error, column.unit)


def _is_text(column: ResultColumn, rows: Sequence[Mapping[str, Any]]) -> bool:
    return not column.unit and any(isinstance(r.get(column.key), str) for r in rows)


def _facts(result: Result) -> list[tuple[str, str]]:
    """The single figures that fit a line: label and value, as `FACTS` has them; of other kinds by the key's ending."""
    if result.kind not in FACTS:
        return _unlabelled(result)
    found = []
    for key, label, unit, share in FACTS[result.kind]:
        given, error, of = result.facts.get(key), result.facts.get(error_of(key)), result.facts.get(share)
        if given is None or given == "" or _says_nothing(key, given) or (given == 0 and not result.rows):
            continue
        said = _cell(ResultColumn(key=key, title=label, unit=unit), {key: given, error_of(key): error})
        shown = _OF_A_CPU.get(label, label) if result.facts.get("on_host") else label
        found.append((shown, said if of is None else f"{said} ({value(of, '%')})"))
    return found


def _says_nothing(key: str, given: Any) -> bool:
    """Nought seconds, joules or counters are no news; no collective and no spike are."""
    return given == 0 and not isinstance(given, bool) and key.endswith(("_s", "_j", "counted_pct", "memsets"))


def _unlabelled(result: Result) -> list[tuple[str, str]]:
    found = []
    for key, given in result.facts.items():
        if given is None or _says_nothing(key, given) or isinstance(given, (dict, list, tuple)) or "_error_" in key:
            continue
        stem, _, suffix = key.rpartition("_")
        unit = _SUFFIXES.get(suffix, "") if stem else {"seconds": "s", "bytes": "B"}.get(key, "")
        if key.endswith("_per_s"):
            stem, unit = key.removesuffix("_per_s").removesuffix("_bytes"), "B/s" if "bytes" in key else "/s"
        name = (stem if stem and unit else key).replace("_", " ")
        found.append((name, value(given, unit)))
    return found


# -- a notebook -----------------------------------------------------------------------------------------------------

_STYLE = (
    ".tessera-a{font:14px/1.45 system-ui,sans-serif;font-variant-numeric:tabular-nums;color:inherit}"
    ".tessera-a table{border-collapse:collapse;font-size:13px}.tessera-a p{margin:4px 0}"
    ".tessera-a th,.tessera-a td{padding:3px 12px 3px 0;text-align:right;white-space:nowrap;"
    "border-bottom:1px solid rgba(128,128,128,.28)}"
    ".tessera-a .t{text-align:left;max-width:440px;overflow:hidden;text-overflow:ellipsis}"
    ".tessera-a .n{border-left:3px solid rgba(214,158,46,.8);padding-left:8px}"
    ".tessera-a i{display:inline-block;height:9px;border-radius:2px;background:#2b8fc4;vertical-align:middle}"
)
_BARS = ("share_pct", "pct")


def html(result: Result, *, top: int = 50) -> str:
    """The result for a notebook: nothing is fetched, and colours are those of the page, light or dark."""
    parts = [f"<style>{_STYLE}</style><p><b>{escape(_plain(result.title))}</b></p>"]
    facts = _facts(result)
    if facts:
        said = " &nbsp; ".join(f"{escape(name)} <b>{escape(figure)}</b>" for name, figure in facts)
        parts.append(f"<p>{said}</p>")
    if result.rows:
        parts.append(_html_table(result, result.rows[:top]))
        if len(result.rows) > top:
            parts.append(f"<p>{top} of {len(result.rows)} rows: to_frame() has all of them</p>")
    elif reason := _reason(result):
        parts.append(f"<p class='n'>{escape(reason)}</p>")
    parts += [f"<p class='n'>{escape(_plain(note))}</p>" for note in _notes(result)]
    parts += [f"<p class='n'><b>{escape(what)}</b> {escape(_plain(fix))}</p>" for what, fix in _missing(result)]
    return f"<div class='tessera-a'>{''.join(parts)}</div>"


def _html_table(result: Result, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = _shown(result)
    texts = [_is_text(c, rows) for c in columns]
    head = "".join(
        f"<th{_css(is_text)}{_title(c.help)}>{escape(c.title)}</th>" for c, is_text in zip(columns, texts, strict=True)
    )
    lines = []
    for row in rows:
        cells = []
        for column, is_text in zip(columns, texts, strict=True):
            full = row.get(column.key) if is_text else None
            bar = _bar(row[column.key]) if column.key in _BARS and row.get(column.key) is not None else ""
            cells.append(f"<td{_css(is_text)}{_title(full)}>{bar}{escape(_cell(column, row))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _bar(percent: float) -> str:
    return f"<i style='width:{max(0.0, min(100.0, float(percent))) * 0.8:.0f}px'></i> "


def _css(is_text: bool) -> str:
    return " class='t'" if is_text else ""


def _title(full: Any) -> str:
    return f" title='{escape(_plain(full))}'" if full else ""
