"""What a terminal that knows only ASCII (LC_ALL=C, PYTHONIOENCODING=ascii) is shown: "84 +-51 us", not "84 ? 51 ?s".

The text is laid out when it is written, so most letters become one other. What becomes longer takes the spaces after
it, as far as there are some, so that columns stay where they are.
"""

from __future__ import annotations

import codecs
import io
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..report.screen import Console

NAME = "tessera-plain"
"""The name under which Python's codecs know it: `open(..., errors=NAME)`."""

_BARS = dict(zip("▁▂▃▄▅▆▇█░▏▎▍▌▋▊▉", "_.:=+*%#.:::####", strict=True))
_LINES = dict.fromkeys("─━═╴╶╸╺", "-") | dict.fromkeys("│┃║╵╷", "|")
_LETTERS = {
    "±": "+-", "µ": "u", "μ": "u", "°": "", "×": "x", "·": "-", "•": "*", "✓": "+", "★": "*", "→": "->", "←": "<-",
    "–": "-", "—": "-", "−": "-", "‘": "'", "’": "'", "“": '"', "”": '"', **_BARS, **_LINES,
}  # fmt: skip


def plain(text: str) -> str:
    """A text in ASCII, as near as it comes: accents go, "?" is what has nothing like it."""
    import unicodedata

    def of(letter: str) -> str:
        if letter.isascii():
            return letter
        if letter in _LETTERS:
            return _LETTERS[letter]
        if "\u2500" <= letter <= "\u257f":
            return "+"  # corners and crossings
        if unicodedata.combining(letter):
            return ""  # an accent by itself, on the letter before it
        alike = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
        return alike.strip() or "?"

    return "".join(map(of, text))


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text, end = error.object, error.end
    said = plain(text[error.start : end])
    rest = text[end:].lstrip(" ")
    spaces = len(text) - end - len(rest)
    free = spaces if text[end - 1] == "±" and rest[:1].isdigit() else spaces - 1  # "+-51", but "a -> b"
    return said, end + max(0, min(len(said) - (end - error.start), free))


def reconfigure() -> None:
    """Let standard output and error write what they can, and something readable for the rest."""
    codecs.register_error(NAME, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=NAME)


def printable(text: str) -> str:
    """A text whose letters command no terminal: a file's name may hold escape sequences."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print for a person. `click.echo` alone writes UTF-8 where it finds ASCII, which is right for JSON only."""
    click.echo(text, file=sys.stderr if err else sys.stdout, nl=nl)


def show(out: Console, shown: RenderableType, *, err: bool = False) -> None:
    """Print a screen; the next command in it stays in one piece. In a pipe or a file no line ends in blanks."""
    if out.is_terminal:
        out.print(shown, crop=False)
    else:
        say(out.text(shown), err=err)
