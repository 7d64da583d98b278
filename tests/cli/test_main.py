"""How commands begin and end: both programs alike, and a check of a path leaves nothing behind."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import tessera
from tessera.cli import prof
from tessera.cli.main import ASCII_ERRORS, COMMANDS, main, replace_non_ascii, run_command, to_ascii
from tessera.cli.options import check_writable
from tessera.errors import ArgumentError, MeasurementError, RecordingError


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ArgumentError("no \x1b[31mfile", fix="another"), 2, "error: no  [31mfile\n  fix: another\n"),
        (PermissionError(13, "Permission denied", "x"), 1, "error: cannot use x\n  why: Permission denied\n"),
        (OSError(28, "No space left on device"), 1, "error: cannot write the output\n  why: No space left"),
        (RecordingError("no run", fix="another"), 2, "error: no run\n  fix: another\n"),
        (MeasurementError("no power", fix="another"), 1, "error: no power\n  fix: another\n"),
        (
            click.UsageError("No such thing."),
            2,
            "error: no such thing\n  fix: run `fails --help` to see how it is used\n",
        ),
        (click.exceptions.Abort(), 130, ""),
    ],
)
def test_errors_are_messages_and_codes(raised: Exception, code: int, said: str, capsys: Any) -> None:
    @click.command()
    def fails() -> None:
        raise raised

    with pytest.raises(SystemExit) as ended:
        run_command(fails, "fails", [])
    assert ended.value.code == code
    assert said in capsys.readouterr().err
    if isinstance(raised, (ArgumentError, OSError)):
        with pytest.raises(type(raised)):
            run_command(fails, "fails", ["--debug"])


@pytest.mark.parametrize("program", [main, prof.main])
def test_both_programs_end_the_same_way(program: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        program(["--nothing-like-this"])
    assert ended.value.code == 2
    assert "has no option --nothing-like-this" in capsys.readouterr().err


def test_a_wrong_command_of_a_group_is_answered_with_the_help_of_that_group(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["governor", "lease"])
    assert "did you mean 'release'?\n  fix: `tessera governor --help` lists all 10" in capsys.readouterr().err


def test_a_path_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    new, old, deep = tmp_path / "new.csv", tmp_path / "old.csv", tmp_path / "a" / "b.csv"
    old.write_text("kept")
    check_writable(new)
    check_writable(old)
    assert not new.exists() and old.read_text() == "kept"
    for path in (deep, old / "below"):
        with pytest.raises(ArgumentError) as caught:
            check_writable(path)
        assert caught.value.fix == f"mkdir -p {path.parent}"
    assert not deep.parent.exists(), "a folder that nobody asked for is not made"
    (tmp_path / "link.csv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArgumentError):
        check_writable(tmp_path / "link.csv")
    assert not (tmp_path / "elsewhere").exists(), "written through a link"


WRONG = {
    "measure": ["measure", "--json", "--", "no-such-command-here"],
    "diff": ["diff", "--json", "a.tessera", "b.tessera"],
    "an option's value": ["analyze", "no-such-analysis", "x", "--json"],
    "a missing option": ["diff", "--json", "--by"],
    "an unknown option, before --json": ["report", "--htlm", "x", "run.tessera", "--json"],
    "a group's command": ["hardware", "show", "--json", "no-such-chip"],
    "merge": ["merge", "--json", "nowhere", "--out", "x"],
}


@pytest.mark.parametrize("words", WRONG.values(), ids=list(WRONG))
def test_an_error_with_json_is_one_object(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert ended.value.code == error["exit_code"] != 0
    assert error["what"] and error["fix"] and error["kind"].endswith(("Error", "NotRun")), error
    assert "error:" not in printed.err


@pytest.mark.parametrize(("words", "code"), [(["hardware", "list", "--json"], 1), (WRONG["diff"], 2)])
def test_what_cannot_be_printed_as_json_is_told_in_words(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """To a full disk: neither the answer nor the error."""
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    monkeypatch.setattr(sys, "stdout", full)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == code
    assert capfd.readouterr().err.startswith("error: ")
    with pytest.raises(OSError):  # what it still holds
        full.close()


def test_debug_and_json_of_the_command_that_runs_are_its_own(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):  # no traceback, no JSON: both words are the script's
        main(["run", str(tmp_path / "none.py"), "--debug", "--json"])
    assert "error: there is no script" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*COMMANDS])
def test_every_command_takes_debug(name: str, capsys: Any) -> None:
    sub = {"hardware": ["list"]}.get(name, [])
    with pytest.raises(SystemExit) as ended:
        main([name, *sub, "--debug", "--help"])
    assert ended.value.code == 0 and "--debug" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("84 ± 51 µs   11.2 ± 5.0 mJ", "84 +-51 us   11.2 +-5.0 mJ"),  # as wide as it was: columns stay
        ("(±12%), ± is a half-width", "(+-12%), +- is a half-width"),
        ("a_long_na…     3 ×4   x → y", "a_long_na...   3 x4   x -> y"),
        ("45 °C — ▁▄█ ✓ · 3", "45 C - _=# + - 3"),
        ("┌─┐ naïve Straße 語 \udcff", "+-+ naive Stra?e ? ?"),
    ],
)
def test_a_terminal_without_our_letters_is_shown_others(text: str, shown: str) -> None:
    written = io.BytesIO()
    replace_non_ascii()
    stream = io.TextIOWrapper(written, encoding="ascii", errors=ASCII_ERRORS)
    stream.write(text)
    stream.flush()
    assert written.getvalue().decode() == shown


def test_every_letter_we_print_has_one_in_ascii() -> None:
    root = Path(tessera.__file__).parent
    files = [
        f
        for room in ("cli", "report")
        for f in (root / room).glob("*.py")
        if "html" not in f.name and f.name not in ("html.py", "plots.py")
    ]
    texts = [
        node.value
        for file in [*files, root / "units.py"]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    letters = {c for text in texts for c in text if not c.isascii() and c.isprintable()}
    assert "±" in letters
    assert {c for c in letters if to_ascii(c) == "?"} == set()


@pytest.mark.parametrize("setting", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_an_ascii_locale_prints_no_question_marks(setting: dict[str, str]) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONIOENCODING", "PYTHONUTF8", "LC_ALL", "LANG")}
    command = [sys.executable, "-m", "tessera", "hardware", "show", "h200"]
    ran = subprocess.run(
        command, env={**kept, "PYTHONCOERCECLOCALE": "0", **setting}, capture_output=True, check=True, timeout=300
    )
    assert ran.stdout.isascii() and b"77 W +-3 W" in ran.stdout and b"?" not in ran.stdout
    said = subprocess.run([*command[:-1], "h200µ"], env={**kept, **setting}, capture_output=True, check=False)
    assert said.stderr.startswith(b"error: no device 'h200") and said.stderr.isascii()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["analyze", "breakdown", "o'brien.json"], "o'brien.json"),
        (["predict", "resnet18", "--mode", "it's"], "it's"),
    ],
)
def test_quotes_in_what_was_typed_stay_in_the_message(typed: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tessera", *typed], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and says in done.stderr


def test_a_baseline_that_cannot_be_looked_at_is_no_regression(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tessera", "diff", "x" * 300, str(tmp_path / "b.tessera")]
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 2
