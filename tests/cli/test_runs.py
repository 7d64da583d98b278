"""`tessera runs`: lists what a folder has, agrees with `tessera report`, and deletes only what it may."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tessera.analyze import run_list
from tessera.analyze.answer import answer
from tessera.cli import report, runs
from tessera.errors import ArgumentError, MeasurementError
from tessera.profile.open_recording import open_recording
from tessera.report.console import plain_console
from tessera.report.runs import renderable

import synthetic_run
from command_line import invoke

DAY_S = 86400


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, and what is not a run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    where = tmp_path / "runs"
    where.mkdir()
    newest = synthetic_run.START_NS
    for age, name in enumerate(("new", "middle", "old")):  # each a day before the one before
        monkeypatch.setattr(synthetic_run, "START_NS", newest - age * DAY_S * 1_000_000_000)
        synthetic_run.make(2, 2).write(where / f"{name}.tessera").close()
    (where / "notes.txt").write_text("mine")
    (where / "fake.tessera").write_text("not a run")
    sqlite3.connect(where / "other.tessera").execute("CREATE TABLE mine (x)").connection.close()
    (where / "old.html").write_text("<p>")
    return where


def listed(folder: Path, *words: str) -> list[dict[str, Any]]:
    done = invoke(runs.command, folder, "--json", *words)
    assert done.code == 0
    return json.loads(done.stdout)


def test_newest_first_with_the_joules_of_the_report(folder: Path) -> None:
    rows = listed(folder)
    assert [Path(r["path"]).stem for r in rows[:3]] == ["new", "middle", "old"]
    with open_recording(folder / "new.tessera") as recording:
        expected = answer(recording)
    assert rows[0]["energy_j"] == expected.whole.energy_j
    assert rows[0]["step_j"] == next(p.energy_j for p in expected.per_work if p.unit == "step")
    assert rows[0]["command"] == "python train.py --model gpt2" and rows[0]["state"] == "ended"
    assert {Path(r["path"]).stem: r["state"] for r in rows[3:]} == {"fake": "unreadable", "other": "unreadable"}


def test_joules_are_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = listed(folder)
    monkeypatch.setattr(run_list, "answer", None)  # calling it would fail
    assert listed(folder) == first
    os.utime(folder / "new.tessera", ns=(1, 1))  # changed since: what is kept is of another file
    monkeypatch.setattr(runs, "READ_BYTES", 0)
    assert [r["energy_j"] is None for r in listed(folder)[:3]] == [True, False, False]


def test_a_run_whose_joules_cannot_be_computed_is_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise MeasurementError("no power was seen")

    monkeypatch.setattr(run_list, "answer", fail)
    row = listed(folder)[0]
    assert (row["state"], row["energy_j"], row["problem"]) == ("ended", None, "no power was seen")


def test_a_report_makes_the_list_know(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "READ_BYTES", 0)
    assert listed(folder)[0]["energy_j"] is None
    assert invoke(report.command, folder / "new.tessera", "--json").code == 0
    assert listed(folder)[0]["energy_j"] is not None
    assert invoke(runs.command, folder).stdout.splitlines()[-1].endswith("--read")


def test_the_screen_fits_and_names_what_it_drops(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = invoke(runs.command, folder).stdout.splitlines()
    assert any("not shown" in line for line in lines)
    assert any("fake.tessera: " in line for line in lines)


def test_a_killed_run_and_a_running_one(folder: Path) -> None:
    made = synthetic_run.make(2, 2)
    made.write(folder / "live.tessera", close=False).close()
    assert run_list.describe_run(folder / "live.tessera").state == "running"  # by this very process


def test_prune_shows_before_it_deletes(folder: Path) -> None:
    before = sorted(p.name for p in folder.iterdir())
    done = invoke(runs.command, "prune", folder, "--keep", "1")
    assert "\nwould delete 2 of 5 runs" in done.stdout and "--yes" in done.stdout
    assert sorted(p.name for p in folder.iterdir()) == before


def test_prune_deletes_only_old_runs_and_their_side_files(folder: Path) -> None:
    (folder / "old.tessera-shm").write_bytes(b"x")
    (folder / "link.tessera").symlink_to(folder / "old.tessera")
    done = invoke(runs.command, "prune", folder, "--keep", "1", "--yes")
    assert done.code == 0 and "\ndeleted 2 of 5 runs" in done.stdout, done.stderr
    left = {p.name for p in folder.iterdir()}
    assert left == {"new.tessera", "notes.txt", "fake.tessera", "other.tessera", "old.html", "link.tessera"}


def test_prune_prints_no_controls_of_a_name(folder: Path) -> None:
    (folder / "old.tessera").rename(folder / "o\x1b]0;x\x07\n9 of 9 runs.tessera")
    done = invoke(runs.command, "prune", folder, "--keep", "1")
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout
    assert len(done.stdout.splitlines()) == 3 and "9 of 9 runs.tessera (" in done.stdout


def test_prune_deletes_no_link_and_no_side_file_of_what_stays(folder: Path) -> None:
    old, gone, linked = (run_list.describe_run(folder / f"{n}.tessera") for n in ("old", "middle", "new"))
    (folder / "old.tessera-journal").symlink_to(folder / "notes.txt")
    gone.path.unlink()
    linked.path.rename(folder / "moved")
    linked.path.symlink_to(folder / "moved")
    for run in (gone, linked):
        run.path.with_name(f"{run.path.name}-wal").write_bytes(b"another's")
    freed = run_list.delete_runs([old, gone, linked])
    left = {p.name for p in folder.iterdir()}
    assert "old.tessera" not in left
    assert left >= {"old.tessera-journal", "middle.tessera-wal", "new.tessera-wal", "new.tessera", "moved", "notes.txt"}
    assert freed == old.size_bytes


def test_a_run_that_cannot_be_deleted_keeps_its_side_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = run_list.describe_run(folder / "old.tessera")
    (folder / "old.tessera-wal").write_bytes(b"x")
    real = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == old.path:
            raise PermissionError(1, "Operation not permitted", str(path))
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PermissionError):
        run_list.delete_runs([old])
    assert (folder / "old.tessera-wal").exists()


def test_both_conditions_must_hold(folder: Path) -> None:
    summaries = [run_list.describe_run(p) for p in run_list.find_runs(folder)]
    newest = max(s.start_ns for s in summaries)

    def chosen(**conditions: Any) -> list[str]:
        return [s.path.stem for s in run_list.choose_old_runs(summaries, now_ns=newest, **conditions)]

    assert chosen(older_than_s=1.5 * DAY_S) == ["old"]
    assert chosen(keep=2, older_than_s=0.5 * DAY_S) == ["old"]
    assert chosen(keep=3, older_than_s=0.5 * DAY_S) == []


def test_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "which runs to delete" in str(invoke(runs.command, "prune").code)
    assert "'30d'" in str(invoke(runs.command, "prune", "--older-than", "1x").code)
    missing = invoke(runs.command, "prun").code
    assert isinstance(missing, ArgumentError) and "did you mean 'prune'" in str(missing)
    assert "no run in" in invoke(runs.command).stderr
    assert "one file was given" in invoke(runs.command, "diff", "a.tessera").stderr


def test_the_next_command_compares_runs_of_one_script_only(folder: Path) -> None:
    def ended(name: str, command: str) -> run_list.ListedRun:
        joules = run_list.RunJoules(energy_j=1.0, error_j=0.1, step_j=None, step_error_j=None, basis="measured")
        return run_list.ListedRun(path=Path(name), size_bytes=1, state="ended", command=command, joules=joules)

    found = [ended("a2", "python a.py -n 2"), ended("b", "python b.py"), ended("a1", "python a.py -n 1")]
    assert runs._next_command(found, folder) == "tessera diff a1 a2"
    assert runs._next_command(found[:2], folder) == "tessera report a2"


def test_a_narrow_list_says_which_runs_failed() -> None:
    run = run_list.ListedRun(path=Path("crash.tessera"), size_bytes=1, state="failed", command="python crash.py " * 9)
    console = plain_console(40)
    with console.capture() as shown:
        console.print(renderable([run], next_command=None))
    assert "failed" in shown.get()
