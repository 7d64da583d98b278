"""A file that is not there: every command answers alike, with what is there, and ends in 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tessera.cli.main import cli, main
from tessera.cli.options import SUGGESTED, missing_file, suggest_files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("report trian.tessera", "there is no file trian.tessera; did you mean 'train.tessera'?"),
        ("export trian.tessera --csv out.csv", "there is no file trian.tessera; did you mean 'train.tessera'?"),
        ("diff train.tessera trian.tessera", "there is no file trian.tessera; did you mean 'train.tessera'?"),
        ("analyze breakdown trian.tessera", "there is no file trian.tessera; did you mean 'train.tessera'?"),
    ],
)
def test_every_command_says_it_in_the_same_words(
    typed: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "train.tessera").touch()
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {said}\n  fix: one of: train.tessera\n"


@pytest.mark.parametrize("command", ["report", "diff nowhere/b.json", "merge"])
def test_a_folder_that_is_not_there_is_the_reason(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "nowhere/a.tessera"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "why: there is no folder nowhere\n  fix: check the path" in said


def test_a_broken_file_is_not_suggested_in_its_own_place(here: Path) -> None:
    for name in ("bad", "good"):
        (here / f"{name}.tessera").write_text("no")
    assert suggest_files(Path("bad.tessera"), (".tessera",)) == "one of: good.tessera"


def test_where_nothing_is_alike_the_newest_are_named(here: Path) -> None:
    for age, name in enumerate("abcdef"):
        (here / f"{name}.tessera").touch()
        os.utime(here / f"{name}.tessera", ns=(10**18 - age, 10**18 - age))
    said = missing_file(Path("1234567890123"), (".tessera",), "record one")
    assert said.fix == "one of: a.tessera, b.tessera, c.tessera, d.tessera, e.tessera"
    assert said.fix.count(",") == SUGGESTED - 1


def test_a_file_of_another_kind_is_not_what_was_meant(here: Path) -> None:
    for name in ("noop.py", "policy.yaml"):
        (here / name).touch()
    assert missing_file(Path("nope.yaml")).what == "there is no file nope.yaml"
    assert "did you mean 'policy.yaml'?" in missing_file(Path("policy.yml")).what
    assert "did you mean 'noop.py'?" in missing_file(Path("nope.py")).what


def test_runs_are_looked_for_where_runs_are_written(here: Path) -> None:
    (here / "runs").mkdir()
    (here / "runs" / "train.tessera").touch()
    assert missing_file(Path("x.tessera"), (".tessera",), "record one").fix == "one of: runs/train.tessera"
    assert missing_file(Path("x.csv"), (".csv",), "give a log").fix == "give a log"


def test_a_folder_in_place_of_a_run_is_answered_with_its_runs(here: Path) -> None:
    (here / "days").mkdir()
    (here / "days" / "monday.tessera").touch()
    (here / "days" / "monday.html").touch()
    said = missing_file(Path("days"), (".tessera",), "record one")
    assert said.why == "days is a folder" and said.fix == "one of: days/monday.tessera"
    (here / "days" / "monday.tessera").unlink()
    assert missing_file(Path("days"), (".tessera",), "record one").fix == "record one"


def test_the_limit_of_tracing_acts_at_the_end_of_a_step() -> None:
    said = " ".join(CliRunner().invoke(cli, ["run", "--help"]).output.split())
    assert "from the first step on, and the step that runs then to its end" in said
