"""Every figure that README.md and docs/ quote is one that was measured, and is today's.

A figure is a number with a unit of ours (%, J, W, ms, µs, times ...). It must be found in the block's sources:

    <!-- from: attribution.json#sets/final-12/loads/0, region_cost.json; given: 50 ms; 12% = 1 - alone_j / burst_j -->
    The paragraph, list or table that follows, up to the next empty line.

`from` names files of benchmarks/results/ (or a part of one, after #): every figure, and every other decimal number of
the block, must stand there, rounded as it is quoted, or be computed as the mark says from the names of the first part.
`given` are settings and constants of the code, no results; a block with `<!-- given: ... -->` alone has none. Blocks
without a mark may quote the H200's facts (benchmarks/data/h200_facts.json), what the README's sweep and attribution
print, and what GIVEN and ALLOWED explain, nothing else. Tables of benchmarks/page/build.py: tests/test_readme.py.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import quoted
from quoted import MARK, NUMBER, RESULTS, ROOT, Block, Figure, blocks_of, numbers_of, pairs, texts_of, value

SHARED = ROOT.parent / "shared" / "h200"
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if not p.name.startswith("_part_"))]

# Figures that are no measurements, wherever they stand.
GIVEN = {
    "90%": "the interval of every uncertainty here",
    "5%": "NVIDIA's documented accuracy of older boards",
    "200 ms": "the default cap_window_ms of a schedule",
    "5 ms": "an interval somebody asks for",
}
# (page, figure): why it may stand there without a source among the results.
RULE = "a rule of thumb for the reader, not a measurement"
ELSEWHERE = "quoted from another page, where it has its source"
ALLOWED = {
    ("docs/guides/counters.md", "65%"): RULE,
    ("docs/guides/counters.md", "95%"): RULE,
    ("docs/guides/counters.md", "35%"): RULE,
    ("docs/guides/energy.md", "12%"): ELSEWHERE,
    ("docs/guides/energy.md", "17%"): ELSEWHERE,
    ("docs/guides/energy.md", "20 times"): "20 over 1.03 pJ/FLOP, both beside it",
    ("docs/guides/energy.md", "2 times"): "a claim that is quoted",
    ("docs/guides/energy.md", "4 times"): "a claim that is quoted",
    ("docs/guides/energy.md", "12.8 times"): "13.2 over 1.03 pJ/FLOP, both beside it",
    ("docs/guides/energy.md", "38%"): "0.194 over 0.141 J, both beside it",
    ("docs/howto/power-spike.md", "25 ms"): ELSEWHERE,
    ("docs/howto/power-spike.md", "16 ms"): ELSEWHERE,
    ("docs/howto/power-spike.md", "2%"): ELSEWHERE,
    ("docs/howto/power-spike.md", "3x"): "an example of a crest factor",
    ("docs/operators.md", "15%"): "a constant of op/padding.py",
    ("docs/operators.md", "20 µs"): "a constant of op/padding.py",
    ("docs/operators.md", "75%"): "a constant of op/spectral_cost.py",
    ("docs/operators.md", "6 µs"): "the upper end of several runs of op_host_cost.py, rounded up",
    ("docs/precision.md", "100,000 times"): "a constant of op/error_bounds.py",
    ("docs/precision.md", "9%"): "what examples/precision.py prints",
    ("docs/precision.md", "64 times"): "a constant of examples/precision.py",
    ("docs/rewrites.md", "7 µs"): "a constant of estimate/host.py",
    ("docs/rewrites.md", "17 us"): "the difference of two rows of checkpoint_plan.json, about",
    ("docs/rewrites.md", "2.51 J"): "what examples/checkpointing.py prints: a prediction",
    ("docs/rewrites.md", "9.9%"): "227.4 over 206.9 J, in the table above it",
    ("docs/rewrites.md", "25.8%"): "260.2 over 206.9 J, in the table above it",
    ("docs/rewrites.md", "64 ms"): "the host's share of that recording's step",
    ("docs/rewrites.md", "450 W"): "an example in the tests",
}
# Pages whose blocks without a mark may quote these results: a mark is better, since it says which block.
PAGE_SOURCES = {
    "docs/operators.md": ("op_host_cost.json",),
    "docs/precision.md": ("error_bounds.json",),
    "docs/rewrites.md": ("checkpoint_plan.json", "checkpoint_reorder.json", "predict_heldout2_after.json"),
    "docs/schedules.md": ("schedule_plant.json", "schedule_cost.json"),
    "docs/schedules-internals.md": ("schedule_plant.json", "actuator_faults.json", "actuator_moments.json"),
}
SWEEP, ATTRIBUTE = "$ tessera predict resnet18 ", "$ tessera attribute gpt2_train.kineto.json.gz "
SHOWN_IN = {SWEEP: ROOT / "docs" / "predicting.md", ATTRIBUTE: ROOT / "docs" / "profiling.md"}


@functools.cache
def facts() -> frozenset[tuple[str, str]]:
    """(number, unit) of what is known without a results file."""
    known = json.loads((ROOT / "benchmarks" / "data" / "h200_facts.json").read_text())["facts"]
    text = ". ".join([*known.values(), *printed(SWEEP), *printed(ATTRIBUTE)])
    return frozenset(pairs(text))


def printed(command: str) -> list[str]:
    """What a page shows after a command, up to the end of its block."""
    _, found, rest = SHOWN_IN[command].read_text().partition(command)
    return [line.rstrip() for line in rest.partition("```")[0].split("\n")[1:-1]] if found else []


def unfounded(block: Block) -> list[str]:
    """The figures of a block that stand nowhere."""
    sources = block.mark.files if block.mark else PAGE_SOURCES.get(block.page, ())
    values = [v for s in sources for v in numbers_of(s)]
    texts = {pair for s in sources for pair in texts_of(s)}
    given = block.mark.given if block.mark else frozenset()
    return [
        str(f)
        for f in block.figures()
        if not (
            str(f) in given
            or str(f) in GIVEN
            or (block.page, str(f)) in ALLOWED
            or (block.mark and block.mark.comes_out(f))
            or f.is_said(facts() | texts)
            or f.is_among(values)
        )
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_figure_quoted_is_measured(page: Path) -> None:
    wrong = []
    for block in blocks_of(page):
        missing = unfounded(block)
        if missing:
            source = f"not in {', '.join(block.mark.files)}" if block.mark else "no `<!-- from: FILE.json -->` above it"
            wrong.append(f"{block.page}:{block.line}: {', '.join(missing)}: {source}; begins {block.text[:60]!r}")
    assert not wrong, "\n".join(["figures without a source:", *wrong])


def test_what_is_allowed_is_still_quoted() -> None:
    quoted = {(b.page, str(f)) for page in PAGES for b in blocks_of(page) for f in b.figures()}
    assert not set(ALLOWED) - quoted, "no longer quoted: take them out of ALLOWED"


def test_every_mark_stands_above_a_block_with_figures() -> None:
    for page in PAGES:
        marks = len([line for line in page.read_text().split("\n") if MARK.fullmatch(line.strip())])
        used = [b for b in blocks_of(page) if b.mark]
        assert len(used) == marks, f"{page}: a mark belongs directly above its block"
        for block in used:
            assert block.figures(), f"{block.page}:{block.line}: nothing is quoted here"
            assert block.mark is not None and (block.mark.files or block.mark.given)


# -- what pages say commands print -------------------------------------------------------------------------


def run(command: str) -> list[str]:
    """What a command prints today."""
    argv = [sys.executable, "-m", "tessera", *shlex.split(command)[1:]]
    done = subprocess.run(argv, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def alike(a: str, b: str) -> bool:
    """The same words, and numbers within 2%: the last digit may differ between processors."""
    words = list(zip(a.split(), b.split(), strict=False))
    return len(a.split()) == len(b.split()) and all(x == y or _near(x, y) for x, y in words)


def _near(x: str, y: str) -> bool:
    numbers = [re.fullmatch(rf"({NUMBER})(\D*)", w) for w in (x, y)]
    if not (numbers[0] and numbers[1]) or numbers[0][2] != numbers[1][2]:
        return False
    values = [value(n[1]) for n in numbers if n]
    return abs(values[0] - values[1]) <= 0.02 * abs(values[1])


def unlike(shown: list[str], now: list[str]) -> list[str]:
    return [line for line in shown if not any(alike(line, other) for other in now)]


def command_of(start: str) -> str:
    line = next(line for line in SHOWN_IN[start].read_text().split("\n") if line.startswith(start))
    return line.removeprefix("$ ")


@pytest.mark.skipif(not printed(SWEEP), reason="no page shows the sweep")
def test_the_sweep_is_what_the_command_prints(tmp_path: Path) -> None:
    command = command_of(SWEEP).replace("sweep.html", str(tmp_path / "sweep.html"))
    assert unlike(printed(SWEEP), run(command)) == []


@pytest.mark.skipif(not printed(ATTRIBUTE), reason="no page shows an attribution")
@pytest.mark.skipif(not SHARED.exists(), reason="the shared recording is not here")
def test_the_attribution_is_what_the_command_prints(tmp_path: Path) -> None:
    samples = json.loads((SHARED / "gpt2_train.power.json").read_text())["samples_mw"]
    (tmp_path / "power.csv").write_text(
        "\n".join(["epoch_us,domain,watts", *(f"{t},gpu0,{mw / 1e3}" for t, mw in samples)])
    )
    command = command_of(ATTRIBUTE).replace("gpt2_train.kineto.json.gz", str(SHARED / "gpt2_train.kineto.json.gz"))
    assert unlike(printed(ATTRIBUTE), run(command.replace("power.csv", str(tmp_path / "power.csv")))) == []


# -- that the check itself can fail ------------------------------------------------------------------------------


def of(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is unfounded in a page with this text, beside a results file."""
    monkeypatch.setattr(quoted, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    return [f for block in blocks_of(page) for f in unfounded(block)]


STALE = """
<!-- from: region_cost.json; given: 5 s -->
| a region | {ns} ns |
|---|---|
| over 5 s | {other} ns |
"""


def test_a_stale_figure_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts()
    true = json.loads((RESULTS / "region_cost.json").read_text())["region_off_ns"]
    assert of(STALE.format(ns=f"{true:.0f}", other=f"{true:.1f}"), tmp_path, monkeypatch) == []
    stale = STALE.format(ns=f"{true + 2:.0f}", other="12345")
    assert of(stale, tmp_path, monkeypatch) == [f"{true + 2:.0f} ns", "12345 ns"]


def test_a_figure_without_a_mark_is_found_and_facts_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts()
    assert of("It draws 689 W, and 82-118 W idle; 90% intervals.\n", tmp_path, monkeypatch) == []
    assert of("It draws 690.5 W and saves 7.5%.\n\n```\n99 W\n```\n", tmp_path, monkeypatch) == ["690.5 W", "7.5%"]
    assert of("The shape 64 x 128 of tf32, 3 steps, `99 W`, x86.\n", tmp_path, monkeypatch) == []
    assert of("It moved by -1.6 / -7.37% and 3 ± 4 mJ.\n", tmp_path, monkeypatch) == ["-1.6%", "-7.37%", "3 mJ", "4 mJ"]


def test_a_computed_figure_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts()
    true = json.loads((RESULTS / "region_cost.json").read_text())
    ratio = true["record_function_off_ns"] / true["region_off_ns"]
    text = "<!-- from: region_cost.json; {0} times = record_function_off_ns / region_off_ns -->\n{0} times faster\n"
    assert of(text.format(f"{ratio:.1f}"), tmp_path, monkeypatch) == []
    assert of(text.format(f"{ratio + 1:.1f}"), tmp_path, monkeypatch) == [f"{ratio + 1:.1f} times"]


def test_units_are_kept_apart() -> None:
    values = [("s", 0.25), ("", 0.12), ("j", 3.0)]
    assert Figure("250", "ms").is_among(values) and not Figure("250", "µs").is_among(values)
    assert Figure("12", "%").is_among(values) and not Figure("25", "%").is_among(values)
    assert Figure("3", "J").is_among(values) and not Figure("3", "W").is_among(values)
    assert Figure("0.25", "").is_among(values)


def test_a_mark_counts_for_one_block_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts()
    true = json.loads((RESULTS / "region_cost.json").read_text())["region_off_ns"]
    text = f"<!-- from: region_cost.json -->\n{true:.0f} ns\n\n{true:.0f} ns\n"
    assert of(text, tmp_path, monkeypatch) == [f"{true:.0f} ns"]
