"""The console everything is printed on: names from traces, processes and drivers cannot command the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

PIPED_COLUMNS = 100
"""What is read later, in a log or an issue: rich's own 80 would break most of our lines."""


class Console(RichConsole):
    """rich's, which styles text by sequences of its own; those inside a text (a kernel named so) are blanked."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments whose text is only text."""
        return map(_plain, super().render(renderable, options))

    def text(self, shown: RenderableType, *, crop: bool = False) -> str:
        """What it would print, with no blanks at the ends of lines."""
        with self.capture() as captured:
            self.print(shown, crop=crop)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())


def colourless(width: int) -> Console:
    """A console for plain text of this width, as `print(result)` shows it."""
    return Console(width=width, highlight=False, color_system=None)


def readable() -> Console:
    """A console for sentences: as wide as the terminal, or COLUMNS says; 100 columns in a pipe or a file."""
    found = Console(highlight=False)
    if not found.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        found.width = PIPED_COLUMNS
    return found


def _plain(segment: Segment) -> Segment:
    if segment.control or segment.text.isprintable() or segment.text == "\n":
        return segment
    return Segment("".join(map(_shown, segment.text)), segment.style)


def _shown(character: str) -> str:
    return character if character.isprintable() or character in "\n\t" else " "
