"""The parts that all our pages share: the document, cells and headings of tables, sentences.

A page is one file with its style and its script; the browser fetches nothing. The plots are hand-written SVG and
canvas: a page of 200 000 kernels is under a megabyte and drawn in a fraction of a second, where a plotting library
alone would be four megabytes of script.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources

from ..analyze.kernel_names import CATEGORIES
from ..attribute.table import IDLE_NAMES
from ..units import format_share

THEME_BUTTON = "<button id='theme' type='button' aria-label='Switch between light and dark'>◐</button>"
"""Switches the theme; every page has it once, and page.js does the rest."""
_SCRIPTS = ("page.js", "timeline.js")
_CODE = re.compile(r"`([^`]+)`")


def document(title: str, body: str, *, data: str = "{}", styles: Sequence[str] = ()) -> str:
    """Return a whole page. `data` is the JSON that the timeline draws; `styles` are templates beside the common one."""
    css = "".join(map(template, ("run.css", *styles)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head>"
        f'<body><main>{body}</main><div id="tip" role="status" hidden></div>'
        f'<script type="application/json" id="data">{data}</script><script>{_script()}</script></body></html>\n'
    )


def framed_page(title: str, content: str, *styles: str) -> str:
    """Return a page of sections that look like the card of a prediction."""
    frame = f"<div class='tessera'>{THEME_BUTTON}{content}</div>"
    return document(title, frame, styles=["predict.css", "framed.css", *styles])


def policy() -> str:
    """Return what the browser lets a page do: run this one script, and fetch nothing."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


@cache
def _script() -> str:
    """Return all scripts as one, in its own scope."""
    parts = "\n".join(template(name) for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


@cache
def template(name: str) -> str:
    """Return a file of the folder templates."""
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


# -- notebooks ------------------------------------------------------------------------------------------------------


def card(*parts: str) -> str:
    """Return a result for a notebook: it fetches nothing, and has the notebook's colours, light or dark."""
    return f"<style>{template('card.css')}</style><div class='tessera-card'>{''.join(parts)}</div>"


def card_bar(share: float) -> str:
    """Return a bar in a cell of a card, 80 pixels at most."""
    return f"<i style='width:{80 * max(0.0, min(1.0, share)):.0f}px'></i>"


# -- sentences ------------------------------------------------------------------------------------------------------


def capitalize(text: str) -> str:
    """Return the text with its first letter in upper case, unless it begins with a name such as aten::mm."""
    return text if "::" in text.partition(" ")[0] else text[:1].upper() + text[1:]


def prose(text: str) -> str:
    """Return a sentence, escaped; text between backticks is shown as code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def note(text: str) -> str:
    """Return a line in small print."""
    return f"<p class='dim'>{prose(text)}</p>"


def tile(value: str, label: str, more: str = "", kind: str = "") -> str:
    """Return a headline figure: the value, its error in small print, and its label."""
    number, plus, rest = value.partition(" ± ")
    text = f"{escape(number)} <small>± {escape(rest)}</small>" if plus else escape(value)
    return f"<div class='{f'tile {kind}'.rstrip()}'><b>{text}</b><span>{escape(label)}</span>{more}</div>"


def definitions(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and what they mean, side by side."""
    return "".join(f"<dt>{escape(name)}</dt><dd>{prose(text)}</dd>" for name, text in rows)


def page_header(title: str, about: str, content: str) -> str:
    """Return the head of a page: its title, what it is about, the button of the theme; and the first figures."""
    words = f"<div><h1>{escape(title)}</h1><div class='dim'>{escape(about)}</div></div>"
    return f"<header><div class='top'>{words}{THEME_BUTTON}</div>{content}</header>"


def advice_section(texts: Sequence[str]) -> str:
    """Return what to do first, and what else."""
    if not texts:
        return ""
    first, *rest = texts
    more = "".join(f"<li>{prose(capitalize(text))}</li>" for text in rest)
    also = f"<ul class='also'>{more}</ul>" if more else ""
    return f"<section class='do'><b>Do this first</b><p>{prose(capitalize(first))}.</p></section>{also}"


def category_bar(parts: Sequence[tuple[str, str, float]]) -> str:
    """Return a bar of categories of work and its legend: (category, its figure in words, its share of the bar)."""
    pieces = "".join(
        f"<i class='{category_class(name)}' style='width:{100 * share:.2f}%'></i>"
        for name, _, share in parts
        if share > 0
    )
    keys = "".join(
        f"<li><i class='{category_class(name)}'></i>{escape(f'{name} {figure} ({format_share(share)})')}</li>"
        for name, figure, share in parts
    )
    return f"<div class='bar' aria-hidden='true'>{pieces}</div><ul class='legend'>{keys}</ul>"


def category_class(name: str) -> str:
    """Return the colour of a category."""
    return "kidle" if name in IDLE_NAMES else f"k{CATEGORIES.index(name)}"


# -- tables ---------------------------------------------------------------------------------------------------------


def number_cell(text: str, value: float | None, kind: str = "") -> str:
    """Return a cell that sorts by its value."""
    data = "" if value is None or math.isnan(value) else f" data-v='{value:.6g}'".replace("inf", "Infinity")
    return f"<td class='{f'n {kind}'.rstrip()}'{data}>{escape(text)}</td>"


FOLDED = 15
"""Rows of a long table that are shown at first; the same number is in run.css."""


def folding_table(columns: Sequence[tuple[str, bool]], rows: Sequence[str], *, caption: str, sorted_by: str) -> str:
    """Return a table that shows its first rows, and a button for the others where there are many."""
    fold = " fold" if len(rows) > FOLDED + 3 else ""
    button = f"<button type='button' class='unfold'>Show all {len(rows)}</button>" if fold else ""
    return f"{table(columns, ''.join(rows), caption=caption, sorted_by=sorted_by, kind=f'sort{fold}')}{button}"


def heading_row(columns: Sequence[tuple[str, bool]], sorted_by: str, *, sortable: bool) -> str:
    """Return a heading row of (name, whether the column has numbers); on a page, a click sorts by the column."""
    cells = []
    for name, numeric in columns:
        state = " aria-sort='descending'" if name == sorted_by and sortable else ""
        content = f"<button type='button'>{escape(name)}</button>" if name and sortable else escape(name)
        cells.append(f"<th scope='col'{' class=n' if numeric else ''}{state}>{content}</th>")
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def table(
    columns: Sequence[tuple[str, bool]], rows: str, *, caption: str = "", sorted_by: str = "energy", kind: str = "sort"
) -> str:
    """Return a table under its headings, which scrolls if it is too wide; `kind` "" does not sort."""
    title = f"<caption class='sr'>{escape(caption)}</caption>" if caption else ""
    head = heading_row(columns, sorted_by, sortable=bool(kind))
    css = f" class='{kind}'" if kind else ""
    return f"<div class='scroll'><table{css}>{title}{head}<tbody>{rows}</tbody></table></div>"


def tabs_section(what: str, tabs: Sequence[tuple[str, str, int, str]]) -> str:
    """Return tables behind tabs (view, title, number of rows, table); the first one is shown. "" without any."""
    heads, panels = "", ""
    for i, (view, title, count, content) in enumerate(tabs):
        state = "aria-selected='false' tabindex='-1'" if i else "aria-selected='true' tabindex='0'"
        heads += (
            f"<button type='button' role='tab' id='tab-{view}' aria-controls='panel-{view}' {state}>"
            f"{title} ({count:,})</button>"
        )
        panels += (
            f"<div role='tabpanel' id='panel-{view}' aria-labelledby='tab-{view}' data-title='{title}'"
            f"{' hidden' if i else ''}>{filter_field(title.lower())}{content}</div>"
        )
    tab_list = f"<div role='tablist' aria-label='{what} by'>{heads}</div>"
    return f"<section><h2>{what} by row</h2>{tab_list}{panels}</section>" if tabs else ""


def filter_field(what: str) -> str:
    """Return a field that filters the rows of the table after it by their names."""
    return (
        f"<div class='tools'><input type='search' placeholder='filter by name' aria-label='Filter {what}'>"
        "<span class='dim' role='status'></span></div>"
    )
