"""What a narrow terminal gets: texts that are never cut between a number and its unit, tables without a lost column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text


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
