"""The Markdown of `tessera diff --github`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from report.test_diff import table
from tessera import analyze
from tessera.cli.diff import command
from tessera.report.diff_markdown import markdown

from command_line import invoke


def write(path: Path, *joules: float) -> list[str]:
    """A report for each."""
    paths = []
    for i, j in enumerate(joules):
        one = path.with_name(f"{path.name}{i}.json")
        total = {"energy_j": j, "error_j": 0.1, "time_s": 1.0, "source": "x"}
        one.write_text(json.dumps({"report": {"name": "train", "total": total, "by_domain": {}}}))
        paths.append(str(one))
    return paths


def test_the_summary_goes_to_githubs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = write(tmp_path / "a", 10.0, 10.1, 9.9), write(tmp_path / "b", 20.0, 20.1, 19.9)
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    done = invoke(command, *a, "--", *b, "--github", "--fail-above", "5%")
    assert done.code == 1
    assert "verdict" in done.stdout or "FAILED" in done.stdout, "the screen is printed as well"
    text = summary.read_text()
    assert text.startswith("before\n### Energy: train") and ":x: failed 10 J (100%) more energy" in text
    assert "| energy | 10" in text and "| +100% | more than noise |" in text


def test_elsewhere_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    a, b = write(tmp_path / "a", 10.0), write(tmp_path / "b", 10.5)
    done = invoke(command, *a, *b, "--github")
    assert done.code == 0
    assert done.stdout.startswith("### Energy: ") and ":warning: Unknown: each was measured once" in done.stdout


def test_a_summary_that_cannot_be_written_does_not_change_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "folder"))
    a, b = write(tmp_path / "a", 10.0), write(tmp_path / "b", 10.0)
    done = invoke(command, *a, *b, "--github")
    assert done.code == 0 and "cannot write the summary" in done.stderr


def test_names_are_text_and_never_markup() -> None:
    evil = "</td>|<img src=x>`[a](javascript:x)`\n# x @everyone"
    found = analyze.diff([table({evil: 10.0})] * 3, [table({evil: 20.0})] * 3)
    text = markdown(found, found.verdict())
    assert ":warning: 10 J (90.9%) more energy" in text, "worse, but nobody gave a limit"
    assert "<img" not in text and "[a](" not in text and "@everyone" not in text
    rows = [line for line in text.splitlines() if "img src" in line]
    assert rows and all(line.count("|") == 6 for line in rows)
