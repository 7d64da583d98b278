"""Two runs compared, as a page that needs no network and as a card for notebooks: totals, paired bars, a table."""

from __future__ import annotations

import math
from html import escape

from ..analyze.diff import Difference, DiffVerdict
from ..analyze.kernel_names import fit
from ..units import format_duration
from .diff import (
    STATES,
    DiffFigure,
    RowFigure,
    about,
    all_notes,
    basis_text,
    calls_text,
    compared_unit,
    headline,
    modelled_warning,
    outside_text,
    percent,
    quantity,
    row_figures,
)
from .energy import TITLES
from .html import capitalize, card, definitions, document, filter_field, number_cell, page_header, table, tile

BARS = 14
ROWS = 400
CARD_ROWS = 10


def page(difference: Difference, *, verdict: DiffVerdict | None = None) -> str:
    """Return one self-contained HTML file."""
    conclusion = verdict or difference.verdict()
    title = fit(f"{difference.before} → {difference.after}", 80)
    parts = [
        _header(difference),
        _warning(difference),
        _verdict(difference, conclusion),
        _pairs(difference),
        _table(difference),
        _origin(difference),
    ]
    return document(f"{title} - tessera diff", "".join(parts), styles=["diff.css"])


def diff_card(difference: Difference) -> str:
    """Return a card for a notebook: the headline, and the rows that changed most."""
    figures = "".join(
        f"<p><b>{f.name}</b> {escape(quantity(f.before, f.before_error, f.unit))} → "
        f"{escape(quantity(f.after, f.after_error, f.unit))}: <span class='{f.state}'>{escape(_change_text(f))}</span> "
        f"<span class='dim'>{STATES[f.state]}</span></p>"
        for f in headline(difference)
    )
    head = "".join(f"<th>{h}</th>" for h in (TITLES[difference.by], "before", "after", "change", ""))
    rows = "".join(map(_card_row, row_figures(difference)[:CARD_ROWS]))
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
    notes = "".join(f"<p class='dim'>{escape(n)}</p>" for n in all_notes(difference))
    title = f"<p><b>{escape(difference.before)} → {escape(difference.after)}</b> {escape(about(difference))}</p>"
    warning = modelled_warning(difference)
    title += f"<p class='more'>{escape(warning)}</p>" if warning else ""
    verdict = f"<p><b>{escape(difference.verdict().text)}</b></p>"
    return card(title, figures, body, notes, verdict)


def _card_row(figure: RowFigure) -> str:
    cells = "".join(f"<td>{escape(text)}</td>" for text in figure.texts)
    kind = "" if figure.is_sure else " class='dim'"
    return f"<tr{kind}><td class='name'>{escape(fit(figure.name, 70))}</td>{cells}</tr>"


# -- the page -------------------------------------------------------------------------------------------------------


def _header(difference: Difference) -> str:
    tiles = "".join(_tile(f) for f in headline(difference))
    title = f"{difference.before} → {difference.after}"
    return page_header(title, about(difference), f"<div class='tiles'>{tiles}</div>")


def _warning(difference: Difference) -> str:
    warning = modelled_warning(difference)
    return f"<section class='do bad' role='note'><b>Modelled</b><p>{escape(warning)}.</p></section>" if warning else ""


def _change_text(f: DiffFigure) -> str:
    share = f" ({percent(f.share)})" if f.share is not None else ""
    return f"{quantity(f.change, f.change_error, f.unit, signed=True)}{share}"


def _tile(f: DiffFigure) -> str:
    before, after = quantity(f.before, f.before_error, f.unit), quantity(f.after, f.after_error, f.unit)
    change = f"<span class='now {f.state}'>{escape(_change_text(f))}</span><span>{STATES[f.state]}</span>"
    return tile(after, f"{f.name}, before {before}", change, kind="wide")


def _verdict(difference: Difference, verdict: DiffVerdict) -> str:
    kind = " bad" if verdict.failed or (verdict.significant and (verdict.share or 0.0) > 0) else ""
    kind = kind or ("" if verdict.significant else " calm")
    head = "Failed" if verdict.failed else "Verdict"
    # The other notes are further down.
    note = f"<p>Note: {escape(difference.notes[0])}.</p>" if difference.commands_differ else ""
    return f"<section class='do{kind}'><b>{head}</b><p>{escape(capitalize(verdict.text))}.</p>{note}</section>"


def _pairs(difference: Difference) -> str:
    known = [f for f in row_figures(difference) if f.row.state != "unstated"]  # both sides are needed for a bar
    shown = sorted(known, key=lambda f: -max(f.before, f.after))[:BARS]
    if not shown:
        return ""
    most = max(value + error for f in shown for _, value, error in _bars(f)) or 1.0
    bars = "".join(_pair(f, most) for f in shown)
    what = "Time" if compared_unit(difference) == "s" else "Energy"
    per = "" if difference.per == "run" else f" per {difference.per}"
    keys = (
        f"<li><i class='a'></i>before: {escape(fit(difference.before, 60))}</li>"
        f"<li><i class='b'></i>after: {escape(fit(difference.after, 60))}</li><li>faint: noise, or unknown</li>"
    )
    return (
        f"<section><h2>{what}{escape(per)} by {TITLES[difference.by]}, largest first</h2>"
        f"<div class='pairs' role='img' aria-label='{what} before and after; the table below has the same numbers'>"
        f"{bars}</div><ul class='legend'>{keys}</ul></section>"
    )


def _bars(figure: RowFigure) -> list[tuple[str, float, float]]:
    """Return the bars before ("a") and after ("b"): length and half-width, which seconds do not have."""
    errors = (figure.row.before_error_j, figure.row.after_error_j) if figure.unit == "J" else (math.nan, math.nan)
    widths = [0.0 if math.isnan(error) else error for error in errors]
    return list(zip("ab", (figure.before, figure.after), widths, strict=True))


def _pair(figure: RowFigure, most: float) -> str:
    marks = []
    for kind, value, wide in _bars(figure):
        marks.append(f"<i class='{kind}' style='width:{100 * max(value, 0.0) / most:.2f}%'></i>")
        if wide > 0:
            low, high = max(value - wide, 0.0), value + wide
            marks.append(
                f"<u class='{kind}' style='left:{100 * low / most:.2f}%;width:{100 * (high - low) / most:.2f}%'></u>"
            )
    faint = "" if figure.is_sure else " noise"
    *_, change, share = figure.texts
    return (
        f"<span class='name{faint}' title='{escape(fit(figure.row.name, 300))}'>{escape(fit(figure.name, 42))}</span>"
        f"<span class='pair{faint}'>{''.join(marks)}</span>"
        f"<span class='{figure.direction}'>{escape(f'{change} ({share})')}</span>"
    )


def _table(difference: Difference) -> str:
    if not difference.rows:
        return ""
    body = "".join(map(_row, row_figures(difference)[:ROWS]))
    unit = "time" if compared_unit(difference) == "s" else "energy"
    calls = "calls" if difference.per == "run" else f"calls per {difference.per}"
    numbers = ("before", "after", f"change of {unit}", "%", calls, "time before", "time after", "time %")
    columns = [(TITLES[difference.by], False), *((name, True) for name in numbers), ("verdict", False)]
    count = len(difference.rows)
    more = f"<p class='dim'>and {count - ROWS:,} more that changed less</p>" if count > ROWS else ""
    lines = table(columns, body, sorted_by="")
    return (
        f"<section role='tabpanel'><h2>All {count:,} rows, largest change first</h2>{filter_field('rows')}{lines}{more}"
        "</section>"
    )


def _row(figure: RowFigure) -> str:
    row, sure, (before, after, change, share) = figure.row, figure.is_sure, figure.texts
    only = {"new": "only after", "vanished": "only before", "unstated": "not stated on both sides"}.get(row.state, "")
    noise = "more than noise" if sure else "unknown" if math.isnan(figure.error) else "noise"
    noise = "" if row.state == "unstated" else STATES["same"] if figure.is_same else noise
    cells = (
        f"<td class='name' title='{escape(fit(row.name, 300))}'>{escape(fit(figure.name, 90))}</td>",
        number_cell(before, figure.before),
        number_cell(after, figure.after),
        number_cell(change, figure.change, figure.direction),
        number_cell(share, math.inf if row.state == "new" else figure.share, figure.direction),
        number_cell(calls_text(row), row.after_calls),
        number_cell(quantity(row.before_s, math.nan, "s"), row.before_s),
        number_cell(quantity(row.after_s, math.nan, "s"), row.after_s),
        number_cell(percent(row.share_s, state=row.state), row.share_s),
        f"<td>{only if only and sure else ', '.join(part for part in (only, noise) if part)}</td>",
    )
    return f"<tr{'' if sure else ' class=noise'}>{''.join(cells)}</tr>"


def _origin(difference: Difference) -> str:
    w = difference.whole
    rows = [
        ("before", f"{difference.before} ({basis_text(difference.basis[0])})"),
        ("after", f"{difference.after} ({basis_text(difference.basis[1])})"),
        ("whole, before", f"{quantity(w.before_j, w.before_error_j, 'J')} in {format_duration(w.before_s)}"),
        ("whole, after", f"{quantity(w.after_j, w.after_error_j, 'J')} in {format_duration(w.after_s)}"),
    ]
    if outside := outside_text(difference):
        rows.append(("of that", outside))
    rows += [
        (c.name, f"{quantity(c.before_j, math.nan, 'J')} → {quantity(c.after_j, math.nan, 'J')}")
        for c in difference.components
    ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in all_notes(difference))
    how = (
        "A change is noise if it is smaller than the half-width of its 90% interval: that of both sides in quadrature, "
        "without errors that the same sensor or the same model makes in both. Per step, the interval includes the "
        "scatter of the steps, and for each row its scatter from step to step. Differences between runs of one program "
        "are included only if several runs of each were given. A figure that was measured once has no scatter: its "
        "change is called unknown."
    )
    return (
        f"<section><h2>How it was compared</h2><p>{how}</p>{f'<ul>{notes}</ul>' if notes else ''}"
        f"<details open><summary>Whole runs</summary><dl>{definitions(rows)}</dl></details></section>"
    )
