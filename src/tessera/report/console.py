"""The console that everything is printed on, and layouts that fit a narrow terminal.

Names from traces, processes and drivers cannot control the terminal: `Console` prints them, and neither rich's own
console nor its markup is used anywhere else (tests/report/test_console.py). Lines never break between a number and its
unit, and a table drops whole columns rather than cutting cells.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ..analyze.kernel_names import fit
from ..output import remove_controls

PIPED_COLUMNS = 100
"""The width of output that goes to a log or an issue: rich's default of 80 would break most of our lines."""
LEAST = 24
"""Least columns of a hanging text: if its indent leaves less, it begins further left."""
# A number and the unit after it are one word.
_WORD = re.compile(r"\d\S* (?:[kMGTµmunp]?(?:Wh?|J|s|Hz|B)|[KMGT]iB|°C)(?!\w)\S*|\S+")


_BLANKS = re.compile(r"(?<! ) +(?=\n)")


class Console(RichConsole):
    """rich's console, which prints every text as plain text.

    Control characters in a text (such as a kernel's name) are replaced by blanks, and nothing in it is markup:
    "[link=...]" and ":smile:" are printed as they are. A style is given by `Text(..., style=...)`.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Take every str that is printed: a line, a cell, a heading."""
        return super().render_str(text, **{**options, "markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with control characters removed from the text."""
        return map(_remove_controls, super().render(renderable, options))

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Return what is written; in a pipe or a file, without the blanks with which rich fills up lines."""
        text = super()._render_buffer(buffer)
        return text if self.is_terminal else _BLANKS.sub("", text)

    def on_broken_pipe(self) -> None:
        """Ignore the broken pipe of `tessera ... | head`, for which rich would exit with 1.

        `run_command` treats it as a normal end.
        """
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()  # the rest of the output goes nowhere
        raise BrokenPipeError

    def text(self, content: RenderableType, *, crop: bool = False) -> str:
        """Return what it would print, without blanks at the ends of lines."""
        with self.capture() as captured:
            self.print(content, crop=crop)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def show(self, content: RenderableType) -> None:
        """Print a screen without cropping long commands."""
        self.print(content, crop=False)


def plain_console(width: int) -> Console:
    """Return a console for plain text of this width, as `print(result)` shows it."""
    return Console(width=width, highlight=False, color_system=None)


def open_console() -> Console:
    """Return a console for sentences: as wide as the terminal or COLUMNS; 100 columns in a pipe or a file."""
    console = Console(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = PIPED_COLUMNS
    return console


def _remove_controls(segment: Segment) -> Segment:
    return segment if segment.control else Segment(remove_controls(segment.text), segment.style)


# -- texts ----------------------------------------------------------------------------------------------------------


class TextFlow:
    """Texts on one line, or on as many as they need: lines break only between two texts."""

    def __init__(self, *texts: Text | str, between: str = "   ") -> None:
        self._texts = [text if isinstance(text, Text) else Text(text) for text in texts]
        self._between = between

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for text in self._texts:
            if line and line.cell_len + cell_len(self._between) + text.cell_len > options.max_width:
                yield line.append(self._between.rstrip())
                line = Text()
            elif line:
                line.append(self._between)
            line.append_text(text)
        yield line


class HangingText:
    """One text whose second and later lines are indented by `indent` columns."""

    def __init__(self, text: Text | str, indent: int) -> None:
        self._text = text if isinstance(text, Text) else Text(text)
        self._indent = indent

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self._text.cell_len <= width:
            yield self._text
            return
        indent = self._indent if width - self._indent >= LEAST else width // 6
        for i, line in enumerate(self._text.divide(_find_breaks(self._text.plain, width, indent))):
            line.rstrip()
            yield Text(" " * indent).append_text(line) if i else line


def _find_breaks(text: str, width: int, indent: int) -> list[int]:
    """Return where the lines after the first begin: at words, and inside a word only if it is longer than a line."""
    breaks: list[int] = []
    begin, room = 0, width
    for word in _WORD.finditer(text):
        if cell_len(text[begin : word.end()]) > room and text[begin : word.start()].strip():
            begin, room = word.start(), width - indent
            breaks.append(begin)
        while cell_len(text[begin : word.end()]) > room:
            begin, room = begin + len(set_cell_size(text[begin:], max(room, 1))), width - indent
            breaks.append(begin)
    return breaks


class WidthDependent:
    """Something that is drawn when the width is known."""

    def __init__(self, draw: Callable[[int], RenderableType]) -> None:
        self._draw = draw

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        yield self._draw(options.max_width)


# -- tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """A column of a table. A narrow terminal drops the highest `drop` first; 0 is never dropped.

    Names that may be cut state how many columns they need at the `least`.
    """

    heading: str
    cells: Sequence[str | Text]
    right: bool = False
    drop: int = 0
    style: str = ""
    least: int = 0

    @property
    def width(self) -> int:
        """Return the width of the widest cell."""
        return max(cell_len(str(cell)) for cell in (self.heading, *self.cells))


def fit_columns(columns: Sequence[TableColumn], width: int, gap: int = 1) -> tuple[list[TableColumn], str]:
    """Return the columns that fit side by side, and the headings of those that do not."""
    fitting = list(columns)
    while (over := sum((min(c.width, c.least) if c.least else c.width) + gap for c in fitting) - gap - width) > 0:
        first = max(fitting, key=lambda c: c.drop)
        if not first.drop:
            break
        fitting.remove(first)
    dropped = ", ".join(c.heading.strip() for c in columns if c not in fitting)
    room = max(0, -over)  # for names, beyond their least width
    return [_cut_names(c, c.least + room) if c.least else c for c in fitting], dropped


def _cut_names(column: TableColumn, width: int) -> TableColumn:
    return replace(column, heading=fit(column.heading, width), cells=[fit(str(cell), width) for cell in column.cells])


def dropped_note(headings: str) -> Text:
    """Return what to say below a table about the columns that `fit_columns` dropped."""
    return Text(f"not shown: {headings} (use a wider terminal, or --json)", style="dim")


def note_dropped(table: Table, headings: Sequence[str]) -> Table:
    """Say below a table which of its columns a narrow terminal has no room for."""
    if headings:
        table.caption, table.caption_justify, table.caption_style = dropped_note(", ".join(headings)), "left", ""
    return table


def build_table(columns: Sequence[TableColumn], gap: int, styles: Sequence[str] = ()) -> Table:
    """Return a table of these columns; `styles` are those of the rows."""
    table = open_table(gap=gap)
    for c in columns:
        # If even these columns do not fit, a cell continues on the next line: it is never cut.
        table.add_column(c.heading, justify="right" if c.right else "left", overflow="fold", style=c.style)
    for i, cells in enumerate(zip(*(c.cells for c in columns), strict=True)):
        texts = (cell if isinstance(cell, Text) else Text(cell) for cell in cells)
        table.add_row(*texts, style=styles[i] if styles else "")
    return table


class FittedTable:
    """A table of the columns that fit the terminal; it says below which do not. `styles` are those of the rows."""

    def __init__(self, columns: Sequence[TableColumn], *, gap: int = 2, styles: Sequence[str] = ()) -> None:
        self._columns, self._gap, self._styles = columns, gap, styles

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        fitting, dropped = fit_columns(self._columns, options.max_width, self._gap)
        yield build_table(fitting, self._gap, self._styles)
        if dropped:
            yield dropped_note(dropped)


def open_table(*headings: str, gap: int = 2) -> Table:
    """Return a table without lines; the first heading's column is on the left, the other columns on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return table


def label_table() -> Table:
    """Return a table of two columns without lines: a label, and what it labels."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def next_line(command: str, width: int = 0) -> Text:
    """Return the next command to type, in one piece even on a narrow terminal, so that it can be copied."""
    line = Text(f"{'next':<{width}}  ", style="dim", no_wrap=True, overflow="ignore")
    return line.append(command, style="not dim cyan")
