"""The console: a text is only text, whoever wrote it."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Group, RenderableType
from rich.text import Text

import tessera
from tessera.report.console import Console, HangingText, TextFlow, label_table, open_table

SOURCE = Path(tessera.__file__).parent
MARKUP = [
    "load [/data/x]",
    "mm[bf16]",
    "[link=http://evil]click[/link]",
    ":smile:",
    "[bold",
    "\\[x]",
    "[/]",
    "[@click=a]b",
]
HOSTILE = st.text(st.sampled_from("ab[]/=:\\\x1b\x07\x9b\u202e;#'@ ")) | st.sampled_from(MARKUP) | st.text()


def render(content: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=200).print(content)
    return out.getvalue()


def every_form(text: str) -> RenderableType:
    """A text in each place where one may stand: a line, a heading, a cell, a label."""
    table, labels = open_table(text, text), label_table()
    table.add_row(text, text)
    labels.add_row(text, text)
    return Group(text, table, labels, TextFlow(text), HangingText(text, 4))


@given(HOSTILE)
@settings(deadline=None, max_examples=300)
def test_no_text_controls_the_terminal(text: str) -> None:
    shown = render(every_form(text))
    for sequence in shown.split("\x1b")[1:]:  # rich's own styles: CSI, numbers, m
        assert sequence.startswith("[") and sequence[1:].split("m")[0].replace(";", "").isdigit()
    assert not set("\x07\x9b\u202e") & set(shown)


@pytest.mark.parametrize("text", MARKUP)
def test_a_text_is_printed_as_it_is(text: str) -> None:
    out = Console(file=io.StringIO(), width=200, highlight=False)
    table = open_table(text)
    table.add_row(text)
    for content in (text, table, Text(text)):
        assert text in out.text(content)
    assert text in out.text(text, crop=True)
    with out.capture() as captured:
        out.print(text, markup=True, emoji=True)
    assert captured.get().strip() == text


def test_nothing_prints_past_our_console() -> None:
    """Neither rich's own console nor its markup is used anywhere else."""
    for path in SOURCE.rglob("*.py"):
        if path.name == "console.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich"):
                wrong = {n.name for n in node.names} & {
                    "Console",
                    "print",
                    "escape",
                    "Prompt",
                    "Markdown",
                    "Panel",
                    "Spinner",
                }
                assert not wrong, f"{path}: {wrong} of rich"
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("from_markup", "render_markup"), f"{path}:{node.lineno}"
