"""How commands begin and end: both programs alike, and a check of a path leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from tessera.cli import prof
from tessera.cli.entry import check_writable, enter
from tessera.cli.main import main
from tessera.errors import ArgumentError


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ArgumentError("no \x1b[31mfile", fix="another"), 1, "error: no  [31mfile\n  fix: another\n"),
        (PermissionError(13, "Permission denied", "x"), 1, "error: x could not be used: Permission denied\n"),
        (OSError(28, "No space left on device"), 1, "error: the output could not be written: No space left"),
        (click.UsageError("no such thing"), 2, "Error: no such thing"),
        (click.exceptions.Abort(), 130, ""),
    ],
)
def test_errors_are_messages_and_codes(raised: Exception, code: int, said: str, capsys: Any) -> None:
    @click.command()
    @click.option("--debug", is_flag=True)
    def fails(debug: bool) -> None:
        raise raised

    with pytest.raises(SystemExit) as ended:
        enter(fails, "fails", [])
    assert ended.value.code == code
    assert said in capsys.readouterr().err
    if isinstance(raised, (ArgumentError, OSError)):
        with pytest.raises(type(raised)):
            enter(fails, "fails", ["--debug"])


@pytest.mark.parametrize("program", [main, prof.main])
def test_both_programs_end_the_same_way(program: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        program(["--nothing-like-this"])
    assert ended.value.code == 2
    assert "No such option" in capsys.readouterr().err


def test_a_path_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    new, old, deep = tmp_path / "new.csv", tmp_path / "old.csv", tmp_path / "a" / "b.csv"
    old.write_text("kept")
    check_writable(new)
    check_writable(old)
    assert not new.exists() and old.read_text() == "kept"
    with pytest.raises(ArgumentError) as caught:
        check_writable(deep, "--html")
    assert caught.value.fix == "give --html a path you may write"
    with pytest.raises(ArgumentError) as caught:
        check_writable(old / "below", parents=True)
    assert caught.value.fix == "give a path you may write"
    check_writable(deep, parents=True)
    assert deep.parent.is_dir() and not deep.exists()
