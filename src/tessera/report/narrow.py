"""What a narrow terminal gets: texts that are never cut between a number and its unit, tables without a lost column."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

LEAST = 24
"""Columns that a hanging text needs: beside a lead that leaves less, it begins further left."""
# A number and the unit after it are one word.
_WORD = re.compile(r"\d\S* (?:[kMGTµmunp]?(?:W|J|s|Hz|B)|[KMGT]iB|°C)(?!\w)\S*|\S+")


class Pieces:
    """Texts in one line, or in as many as they need: a line ends between two of them only."""

    def __init__(self, *texts: Text | str, between: str = "   ") -> None:
        self._texts = [text if isinstance(text, Text) else Text(text) for text in texts]
        self._between = between

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for text in self._texts:
            if line and line.cell_len + cell_len(self._between) + text.cell_len > options.max_width:
                yield line.append(self._between.rstrip())
                line = Text()
            elif line:
                line.append(self._between)
            line.append_text(text)
        yield line


class Hanging:
    """One text: what does not fit into its line goes on `hang` columns to the right in the next."""

    def __init__(self, text: Text | str, hang: int) -> None:
        self._text = text if isinstance(text, Text) else Text(text)
        self._hang = hang

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._text.cell_len <= options.max_width:
            yield self._text
            return
        width = options.max_width
        hang = self._hang if width - self._hang >= LEAST else width // 6
        for i, line in enumerate(self._text.divide(_breaks(self._text.plain, width, hang))):
            line.rstrip()
            yield Text(" " * hang).append_text(line) if i else line


def _breaks(text: str, width: int, hang: int) -> list[int]:
    """Where the lines after the first begin: at words, and within one only if it is longer than a line."""
    breaks: list[int] = []
    begin, room = 0, width
    for word in _WORD.finditer(text):
        if cell_len(text[begin : word.end()]) > room and text[begin : word.start()].strip():
            begin, room = word.start(), width - hang
            breaks.append(begin)
        while cell_len(text[begin : word.end()]) > room:
            begin, room = begin + len(set_cell_size(text[begin:], max(room, 1))), width - hang
            breaks.append(begin)
    return breaks


class Fitted:
    """What is drawn once the width is known."""

    def __init__(self, draw: Callable[[int], RenderableType]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._draw(options.max_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: its cells, and when it goes. The highest `leaves` goes first, 0 never."""

    heading: str
    cells: Sequence[str]
    right: bool = False
    leaves: int = 0
    style: str = ""

    @property
    def width(self) -> int:
        """Of its widest cell."""
        return max(map(cell_len, (self.heading, *self.cells)))


def fitting(columns: Sequence[Column], width: int, gap: int = 1) -> tuple[list[Column], list[Column]]:
    """(columns that fit side by side, those that had to leave)."""
    kept = list(columns)
    while sum(c.width + gap for c in kept) - gap > width:
        first = max(kept, key=lambda c: c.leaves)
        if not first.leaves:
            break
        kept.remove(first)
    return kept, [c for c in columns if c not in kept]


def table_of(columns: Sequence[Column], gap: int = 1, styles: Sequence[str] = ()) -> Table:
    """A table of these columns; `styles` are of the rows."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for c in columns:
        # Where even these do not fit, a cell goes on in the next line: it is never cut.
        table.add_column(c.heading, justify="right" if c.right else "left", overflow="fold", style=c.style)
    for i, cells in enumerate(zip(*(c.cells for c in columns), strict=True)):
        table.add_row(*map(Text, cells), style=styles[i] if styles else "")
    return table
