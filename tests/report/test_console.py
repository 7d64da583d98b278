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
from tessera.analyze.diff import diff
from tessera.attribute.table import EnergyRow, EnergyTable
from tessera.report.console import Console, HangingText, TextFlow, label_table, open_table
from tessera.report.diff import _rows as difference_rows
from tessera.report.energy import rows_table

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


@pytest.mark.parametrize("width", [50, 60, 70, 80, 100, 120])
def test_no_column_goes_without_a_word(width: int) -> None:
    """At every width each heading is in the table, or is named below it."""
    row = EnergyRow(name="aten::mm", kind="op", calls=7, time_s=1.0, energy_j=12.5, error_j=0.25, share=0.5)
    screens = {
        "power per call": rows_table([row], "ops", width=width),
        "time before after change": difference_rows(diff(table_of(row), table_of(row)), 5),
    }
    for wanted, screen in screens.items():
        shown = Console(file=io.StringIO(), width=width).text(screen)
        assert all(word in shown for word in wanted.split()), shown
        assert "…" not in shown


def table_of(row: EnergyRow) -> EnergyTable:
    return EnergyTable(
        energy_j=25.0, error_j=1.0, idle_j=0.0, idle_error_j=0.0, time_s=2.0, busy_s=2.0, kernels=(), ops=[row],
        source="x", basis="measured", coverage=1.0,
    )  # fmt: skip


def test_no_line_in_a_pipe_ends_in_blanks():
    table = open_table()
    table.add_column("kernel")
    table.add_column("note")
    table.add_row("gemm", "one")
    table.add_row("copy", "longer than the other")
    out = io.StringIO()
    Console(file=out, width=80).print(Group(Text("a text that fills a line " * 5), table))
    lines = out.getvalue().splitlines()
    assert len(lines) >= 4 and all(line == line.rstrip() for line in lines)
