"""The result of any analysis, and of a correlation of spikes: in the terminal, as plain text, in a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analyze.correlate import Correlation, describe_alignment
from ..analyze.kernel_names import fit, printable, short, short_name
from ..analyze.result import Result, ResultColumn
from ..analyze.spikes import Spike, format_level
from ..notes import order_notes
from ..units import (
    format_bytes,
    format_duration,
    format_energy,
    format_energy_error,
    format_error,
    format_frequency,
    format_power,
    format_si,
    format_temperature,
)
from .collectives import describe_collectives
from .console import FittedTable, TableColumn, plain_console
from .html import card, card_bar, prose

WIDTH = 100
TOP = 20
MAX_NOTES = 6
MIN_NAME = 24
"""Characters that names keep on a narrow terminal."""
_UNKNOWN = "-"
_KERNEL_NAMES = ("name", "kernel", "kernel_name")
_FORMATS = {
    "s": format_duration,
    "J": format_energy,
    "W": format_power,
    "B": format_bytes,
    "Hz": format_frequency,
    "°C": format_temperature,
    "C": format_temperature,
}
FACTS = {
    "breakdown": {
        "devices": "devices",
        "span_s": "first to last kernel",
        "compute_s": "compute",
        "communication_s": "communication",
        "exposed_communication_s": "exposed communication",
        "copies_s": "copies",
        "idle_s": "idle",
        "energy_j": "energy of the trace",
        "idle_j": "idle energy",
    },
    "overlap": {
        "communication_s": "communication",
        "communication_overlap_pct": "overlaps kernels",
        "copies_s": "copies",
        "copies_overlap_pct": "copies that overlap kernels",
    },
    "kernels": {
        "calls": "calls",
        "names": "different kernels",
        "total_s": "kernel time",
        "energy_j": "energy of the trace",
        "idle_j": "idle energy",
    },
    "launches": {"calls": "kernels, copies and collectives", "short_calls": "short ones", "short_pct": "of all"},
    "modules": {"modules": "modules", "time_s": "what they launched", "before_s": "before", "after_s": "after"},
    "phases": {"passes": "passes", "time_s": "their time"},
    "sequences": {
        "sequences": "different sequences",
        "time_s": "their time",
        "share_pct": "of all device time",
        "gap_s": "gaps in them",
    },
    "critical_path": {
        "length_s": "length",
        "traced_s": "traced",
        "recorded_s": "recorded",
        "host_s": "on the host",
        "device_s": "on the device",
        "gap_s": "gaps",
    },
    "collectives": {"count": "collectives"},
    "memcpy": {
        "calls": "copies",
        "bytes": "bytes",
        "time_s": "time",
        "overlapped_s": "overlaps kernels",
        "pinned_pct": "from or to pinned memory",
        "memsets": "memsets",
        "memset_s": "time of memsets",
    },
    "memory": {},
    "power": {
        "window_s": "first to last kernel",
        "recorded_s": "recorded",
        "recorded_mean_w": "mean of the recording",
        "recorded_j": "energy of the recording",
        "spikes": "spikes",
        "spike_threshold_w": "threshold",
        "spikes_s": "time in spikes",
        "dominant_hz": "strongest frequency",
        "dominant_is": "which is",
        "step_hz": "median step",
        "throttled_s": "throttled",
        "throttle_reasons": "because of",
    },
    "roofline": {
        "device_name": "chip",
        "hbm_bytes_per_s": "memory bandwidth",
        "best_bytes_per_j": "best bytes per joule",
        "time_s": "device time",
        "known_time_s": "with known work",
        "mfu_pct": "of the peak FLOP/s",
    },
    "stalls": {
        "time_s": "kernel time",
        "counted_pct": "of it with counters",
        "memory_stall_pct": "memory stalls",
        "dependency_stall_pct": "dependency stalls",
        "structural_stall_pct": "structural stalls",
    },
    "divergence": {
        "time_s": "kernel time",
        "counted_pct": "of it with counters",
        "threshold_pct": "threshold",
        "warp_divergence_pct": "mean divergence",
    },
    "advise": {"energy_j": "energy of the trace", "time_s": "time", "basis": "joules are"},
}
"""The single figures shown above the rows, by the kind of the analysis: key and label. JSON has all of them."""
_FACT_UNITS = {"_bytes_per_s": "B/s", "_bytes_per_j": "B/J", "_s": "s", "_j": "J", "_w": "W", "_pct": "%", "_hz": "Hz"}
_SHARES = {"host_s": "host_pct", "device_s": "device_pct", "gap_s": "gap_pct"}
_HOST_LABELS = {"device time": "time in operators"}  # if the rows are operators of the host


def format_value(value: Any, unit: str = "") -> str:
    """Return one value with its unit, short: "12.3 ms" for 0.0123 s, "1.2 TFLOP/s" for 1.2e12; "-" if unknown."""
    if value is None:
        return _UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return _one_line(value)
    if isinstance(value, float) and not math.isfinite(value):
        return _UNKNOWN if math.isnan(value) else str(value)
    if unit in _FORMATS:
        return _FORMATS[unit](value) if value >= 0 else f"-{_FORMATS[unit](-value)}"
    if unit == "%":
        return "<0.1%" if 0 < value < 0.05 else f"{value:.1f}%"
    if not unit:
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return format_si(value, unit)


def _one_line(value: Any) -> str:
    """Return text on one line, without characters that would move a terminal's cursor."""
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return printable(str(value))


def text(result: Result, *, top: int = TOP, width: int = WIDTH) -> str:
    """Return the result as plain text: what `print(result)` shows."""
    return plain_console(width).text(renderable(result, width=width, top=top), crop=True).rstrip()


def renderable(result: Result, width: int = WIDTH, *, top: int = TOP) -> RenderableType:
    """Return the result for a terminal of some width: title, figures, the first rows, notes, what is missing."""
    parts: list[RenderableType] = [Text(_one_line(result.title), style="bold")]
    facts = _facts(result)
    if facts:
        parts.append(Text("   ".join(f"{label} {figure}" for label, figure in facts)))
    if result.kind == "collectives" and result.facts.get("by_kind"):
        parts += describe_collectives(result.facts)
    if result.rows:
        parts += _paragraphs(result, top) if result.kind == "advise" else [_table(result, result.rows[:top])]
        if len(result.rows) > top:
            parts.append(Text(f"{top} of {len(result.rows)} rows", style="dim"))
    elif reason := _reason(result):
        parts.append(Text(reason, style="yellow"))
    parts += [Text(f"note  {_one_line(note)}", style="yellow") for note in _notes(result)]
    parts += [Text(f"missing  {_one_line(what)}: {_one_line(fix)}", style="yellow") for what, fix in _missing(result)]
    return Group(*parts)


def _reason(result: Result) -> str | None:
    """Return why there are no rows, if exactly one thing is missing: a sentence in place of the rows."""
    reasons = list(result.missing.values())
    return _one_line(reasons[0]) if not result.rows and len(reasons) == 1 else None


def _missing(result: Result) -> list[tuple[str, str]]:
    """Return what could not be answered, unless `_reason` has said so already."""
    return [] if _reason(result) else list(result.missing.items())


def _paragraphs(result: Result, top: int) -> list[RenderableType]:
    """Return advice as paragraphs: its evidence and fix are sentences, too long for a table."""
    parts: list[RenderableType] = []
    for row in result.rows[:top]:
        parts += [
            Text(""),
            Text(_one_line(row["kind"]), style="bold").append(f"  {_saving(row)}", style="not bold green"),
        ]
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row("  why", Text(_one_line(row["evidence"])))
        grid.add_row("  fix", Text(_one_line(row["action"]), style="bold"))
        parts.append(grid)
    key, unit = ("saves_j", "J") if result.facts.get("saves_j") else ("saves_s", "s")
    if len(result.rows) > 1 and (together := result.facts.get(key)):
        several = sum(1 for row in result.rows if row.get(key)) > 1
        why = ": less than their sum, because they overlap" if several else ""
        total = f"all together save about {format_value(together, unit)}{why}"
        parts += [Text(""), Text(total)]
    return [*parts, Text("")]


def _saving(row: Mapping[str, Any]) -> str:
    """Return what a change saves and how sure that is: "saves about 62.9 J and 151 ms (high confidence)"."""
    joules, seconds = row.get("saves_j"), row.get("saves_s")
    savings = [format_energy(joules, 3)] if joules else []
    savings += [format_duration(seconds, 3)] if seconds is not None and seconds > 0 else []
    cost = f", costs {format_duration(-seconds, 3)}" if seconds is not None and seconds < 0 else ""
    text = f"saves about {' and '.join(savings)}{cost}" if savings else "saving unknown"
    return f"{text} ({row.get('confidence')} confidence, by {row.get('by')})"


def _notes(result: Result) -> list[str]:
    """Return the notes, each once; those about events that were left out of a trace come last."""
    notes = order_notes(result.notes)
    return notes if len(notes) <= MAX_NOTES else [*notes[:MAX_NOTES], f"and {len(notes) - MAX_NOTES} more: see --json"]


def _table(result: Result, rows: Sequence[Mapping[str, Any]]) -> FittedTable:
    """Shorten the widest names first, then drop the last columns: a number that is cut would be wrong."""
    columns = [
        TableColumn(heading=c.title, cells=[_cell(c, r) for r in rows], right=not _is_text(c, rows))
        for c in _visible_columns(result)
    ]
    names = max((c for c in columns if not c.right), key=lambda c: c.width, default=None)
    others = [c for c in columns if c is not names]
    return FittedTable(
        [replace(c, least=MIN_NAME) if c is names else replace(c, drop=others.index(c)) for c in columns]
    )


def _visible_columns(result: Result) -> list[ResultColumn]:
    """Return the columns that have a value in any row; an error is shown in the column of its value."""
    keys = {c.key for c in result.columns}
    errors = {k for c in result.columns if (k := error_of(c.key)) in keys}
    return [
        c for c in result.columns if c.key not in errors and any(r.get(c.key) is not None for r in result.rows)
    ] or list(result.columns)


def error_of(key: str) -> str:
    """Return the key of the error of a column: energy_j has error_j, recorded_j has recorded_error_j."""
    stem, _, unit = key.rpartition("_")
    return f"error_{unit}" if stem in ("energy", "time", "power") else f"{stem}_error_{unit}"


def _cell(column: ResultColumn, row: Mapping[str, Any]) -> str:
    value, error = row.get(column.key), row.get(error_of(column.key))
    if column.key in _KERNEL_NAMES and isinstance(value, str) and row.get("kind", "kernel") == "kernel":
        return _one_line(short_name(value))
    if value is None or not isinstance(error, (int, float)) or not error > 0:
        return format_value(value, column.unit)
    return format_energy_error(value, error) if column.unit == "J" else format_error(value, error, column.unit)


def _is_text(column: ResultColumn, rows: Sequence[Mapping[str, Any]]) -> bool:
    return not column.unit and any(isinstance(r.get(column.key), str) for r in rows)


def _facts(result: Result) -> list[tuple[str, str]]:
    """Return the single figures that fit a line: label and value."""
    facts = []
    for key, label in FACTS.get(result.kind, {}).items():
        value, share = result.facts.get(key), result.facts.get(_SHARES.get(key, ""))
        if value is None or value == "" or _is_uninteresting(key, value) or (value == 0 and not result.rows):
            continue
        unit = next((u for ending, u in _FACT_UNITS.items() if key.endswith(ending)), {"bytes": "B"}.get(key, ""))
        column = ResultColumn(key=key, title=label, unit=unit)
        figure = _cell(column, {key: value, error_of(key): result.facts.get(error_of(key))})
        name = _HOST_LABELS.get(label, label) if result.facts.get("on_host") else label
        facts.append((name, figure if share is None else f"{figure} ({format_value(share, '%')})"))
    return facts


def _is_uninteresting(key: str, value: Any) -> bool:
    """Return whether a figure needs no line: zero seconds, joules or counters, but not zero collectives or spikes."""
    return value == 0 and not isinstance(value, bool) and key.endswith(("_s", "_j", "counted_pct", "memsets"))


# -- a notebook -----------------------------------------------------------------------------------------------------

_BARS = ("share_pct", "pct")


def html(result: Result, *, top: int = 50) -> str:
    """Return the result for a notebook."""
    parts = [f"<p><b>{escape(_one_line(result.title))}</b></p>"]
    facts = _facts(result)
    if facts:
        figures = " &nbsp; ".join(f"{escape(name)} <b>{escape(figure)}</b>" for name, figure in facts)
        parts.append(f"<p>{figures}</p>")
    if result.rows:
        parts.append(_html_table(result, result.rows[:top]))
        if len(result.rows) > top:
            parts.append(f"<p>{top} of {len(result.rows)} rows: to_frame() has all of them</p>")
    elif reason := _reason(result):
        parts.append(f"<p class='note'>{escape(reason)}</p>")
    parts += [f"<p class='note'>{escape(_one_line(note))}</p>" for note in _notes(result)]
    parts += [f"<p class='note'><b>{escape(what)}</b> {escape(_one_line(fix))}</p>" for what, fix in _missing(result)]
    return card(*parts)


def _html_table(result: Result, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = _visible_columns(result)
    texts = [_is_text(c, rows) for c in columns]
    head = "".join(
        f"<th{_css(is_text)}{_title(c.help)}>{escape(c.title)}</th>" for c, is_text in zip(columns, texts, strict=True)
    )
    lines = []
    for row in rows:
        cells = []
        for column, is_text in zip(columns, texts, strict=True):
            full = row.get(column.key) if is_text else None
            bar = (
                f"{card_bar(row[column.key] / 100)} " if column.key in _BARS and row.get(column.key) is not None else ""
            )
            cells.append(f"<td{_css(is_text)}{_title(full)}>{bar}{escape(_cell(column, row))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _css(is_text: bool) -> str:
    return " class='name'" if is_text else ""


def _title(full: Any) -> str:
    return f" title='{escape(_one_line(full))}'" if full else ""


# -- spikes ---------------------------------------------------------------------------------------------------------

SPIKES = 10
"""How many spikes the text lists: the highest, in time order. `Correlation.spikes` has all."""
_MARKS = {"yes": "yes", "no": "no ", "unknown": "?  "}


def correlation_text(correlation: Correlation) -> str:
    """Return the conclusion first, then the spikes, then the checklist."""
    lines = [_spikes_headline(correlation)]
    lines += [_describe_spike(s, correlation.start_ns) for s in _highest_spikes(correlation)]
    if len(correlation.spikes) > SPIKES:
        lines.append(f"... and {len(correlation.spikes) - SPIKES} lower ones")
    lines += ["", *(f"  {describe_alignment(a)}" for a in correlation.aligned if a.verdict == "aligned")]
    for answer in correlation.checklist:
        lines.append(f"[{_MARKS[answer.verdict]}] {answer.question} {answer.evidence}")
        lines += [f"      needs {answer.needs}"] if answer.needs else []
    lines += [f"note: {n}" for n in correlation.notes]
    return "\n".join(lines)


def correlation_html(correlation: Correlation) -> str:
    """Return a list of the spikes and the checklist, without scripts or outside resources."""
    spikes = _highest_spikes(correlation)
    items = "".join(f"<li>{escape(_describe_spike(s, correlation.start_ns))}</li>" for s in spikes)
    rows = "".join(
        f"<tr><td>{escape(a.question)}</td><td><b>{a.verdict}</b></td><td>{prose(a.evidence)}"
        f"{f'<br><i>needs {prose(a.needs)}</i>' if a.needs else ''}</td></tr>"
        for a in correlation.checklist
    )
    notes = "".join(f"<p>{prose(n)}</p>" for n in correlation.notes)
    headline = escape(_spikes_headline(correlation))
    return f"<div><p><b>{headline}</b></p><ul>{items}</ul><table>{rows}</table>{notes}</div>"


def _spikes_headline(correlation: Correlation) -> str:
    span_s = (correlation.end_ns - correlation.start_ns) * 1e-9
    where = f"{correlation.domain}, {format_duration(span_s)}, mean {format_power(correlation.mean_w)}"
    level = format_level(correlation.threshold_w)
    count = len(correlation.spikes)
    if count == 0:
        return f"no spike above {level} ({where})"
    above = format_duration(sum(s.time_s for s in correlation.spikes))
    error = f"times are accurate to {format_duration(correlation.reach_s)}"
    return f"{count} spike{'s' if count > 1 else ''} above {level}, {above} in total ({where}; {error})"


def _highest_spikes(correlation: Correlation) -> list[Spike]:
    top = sorted(correlation.spikes, key=lambda s: -s.peak_w)[:SPIKES]
    return sorted(top, key=lambda s: s.start_ns)


def _describe_spike(spike: Spike, start_ns: int) -> str:
    at = f"+{(spike.peak_ns - start_ns) * 1e-9:.3f} s"
    head = f"spike {spike.number}: {format_power(spike.peak_w)} at {at} for {format_duration(spike.time_s)}"
    if spike.rise_w_per_s is not None:
        head += f", rising {format_power(spike.rise_w_per_s)}/s"
    parts = []
    for kernel in spike.kernels[:2]:
        often = "only in spikes" if kernel.lift is None else f"{kernel.lift:.1f} times as common in spikes as outside"
        parts.append(f"{fit(short(kernel.name, kernel.kind), 60)} (overlap {kernel.share:.0%}), {often}")
    parts += [f"{b.kind} {b.offset_s * 1e3:+.0f} ms" for b in spike.boundaries[:1]]
    if spike.throttle:
        parts.append(f"then throttled: {', '.join(spike.throttle)}")
    if spike.clock_before_mhz and spike.clock_after_mhz:
        parts.append(f"clock {spike.clock_before_mhz:.0f} -> {spike.clock_after_mhz:.0f} MHz")
    return "; ".join([head, *(part if i else f"during {part}" for i, part in enumerate(parts))])
