"""Small pieces of HTML that the sections of a run's page share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape

_TYPED = re.compile(r"`([^`]+)`")
_PREFIX = (
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
)


def si(value: float | None, unit: str, digits: int = 3) -> str:
    """A quantity with an SI prefix: "412 TFLOP/s"; "-" where it is not known."""
    if value is None or not math.isfinite(value):
        return "-"
    factor, prefix = next(((f, p) for f, p in _PREFIX if abs(value) >= f), (1.0, ""))
    scaled = value / factor
    places = max(0, digits - 1 - math.floor(math.log10(abs(scaled)))) if scaled else 0
    text = f"{scaled:.{places}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{text} {prefix}{unit}".rstrip() if unit else f"{text}{prefix}"


def number(text: str, value: float | None) -> str:
    """A cell that sorts by its value."""
    data = f" data-v='{value:.6g}'" if value is not None and not math.isnan(value) else ""
    return f"<td class='n'{data}>{escape(text)}</td>"


def head(columns: Sequence[tuple[str, bool]], by: str = "energy") -> str:
    """A heading row of (name, whether it holds numbers); each sorts by its column, and `by` is sorted already."""
    cells = []
    for name, numeric in columns:
        state = " aria-sort='descending'" if name == by else ""
        button = f"<button type='button'>{escape(name)}</button>" if name else ""
        cells.append(f"<th scope='col'{' class=n' if numeric else ''}{state}>{button}</th>")
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def prose(text: str) -> str:
    """A sentence, escaped; what stands between backticks is typed, and looks so."""
    return _TYPED.sub(r"<code>\1</code>", escape(text))


def note(text: str) -> str:
    """A line in small print."""
    return f"<p class='dim'>{prose(text)}</p>"
