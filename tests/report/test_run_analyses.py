"""The parts of a run's page that analyses fill, and what it says of what is missing."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recordings import with_table
from report.test_run import GPU, array, data_of
from tessera.analyze.result import Result
from tessera.profile.runfile import RunFile
from tessera.report import run_analyses as sections
from tessera.report.html import policy
from tessera.report.run_analyses import roofline
from tessera.report.run_html import page
from tessera.report.run_provenance import ANALYSES, find_missing, missing_fields, missing_section, run_analyses
from tessera.timeline.columns import Builder
from tessera.units import format_si

from places import REPOSITORY, TESTS
from rendered import check_page
from synthetic_run import EVIL, START_NS, Made, make, results


@pytest.fixture(scope="module")
def made() -> Made:
    return make(steps=6, data_ms=4.0, evil=True)


@pytest.fixture(scope="module")
def run(made: Made, tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    return made.write(tmp_path_factory.mktemp("runs") / "train.tessera")


@pytest.fixture(scope="module")
def html(run: RunFile, made: Made) -> str:
    return page(with_table(run, made.table), results=results(made))


def empty(kind: str, **more: Any) -> Result:
    return Result(kind=kind, title=kind, columns=(), rows=(), **more)


def without(result: Result, *keys: str) -> Result:
    return dataclasses.replace(result, rows=[{**r, **dict.fromkeys(keys)} for r in result.rows])


# -- the sections ---------------------------------------------------------------------------------------------------


def test_sections_are_there_when_there_is_something(html: str, run: RunFile, made: Made) -> None:
    parser = check_page(html)
    for name in ("roofline", "stalls", "collectives", "memory", "missing", "origin"):
        assert name in parser.ids
    bare = check_page(page(with_table(run, made.table), results={k: empty(k) for k in ANALYSES}))
    assert not {"roofline", "stalls", "collectives", "memory"} & set(bare.ids)


def test_the_roofline_has_every_kernel_with_work(html: str, made: Made) -> None:
    known = [r for r in results(made)["roofline"].rows if r["intensity"]]
    circles = re.findall(r"<circle class='f\d' cx='([\d.]+)' cy='([\d.]+)' r='([\d.]+)'", html)
    assert len(circles) == 2 * len(known)  # by time, by energy
    assert all(0 < float(x) < 590 and 0 < float(y) < 380 for x, y, _ in circles)
    assert float(circles[0][2]) == 16.0  # the dearest is the largest
    assert "matrix.bf16 989 TFLOP/s" in html
    assert "matrix.fp8" not in html  # nothing used it
    assert "memory 4.8 TB/s" in html
    assert "memory 6.6 GB/J" in html
    assert html.count("data-to='roof-0'") == 2
    assert "id='roof-0'" in html


def test_a_point_lies_under_its_roof(made: Made) -> None:
    """On log-log axes, a kernel at 80% of the bandwidth is log10(0.8) below the slope wherever it is."""
    drawn = roofline(results(made)["roofline"]).partition("</svg>")[0]
    path = re.search(r"<path class='roofline' d='M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)'", drawn)
    assert path
    x0, y0, x1, y1 = map(float, path.groups())
    for x, y in re.findall(r"<circle class='f[57]' cx='([\d.]+)' cy='([\d.]+)'", drawn):
        roof = y0 + (float(x) - x0) / (x1 - x0) * (y1 - y0)
        assert roof < float(y) < roof + 20


def test_a_roofline_without_joules_or_roofs(made: Made) -> None:
    full = results(made)["roofline"]
    timed = roofline(without(full, "energy_j", "flop_per_j", "energy_pct"))
    assert timed.count("<svg") == 1
    assert "Longest" in timed
    unknown = roofline(dataclasses.replace(without(full, "bound", "roof_pct", "unit"), facts={}))
    assert "class='roofline'" not in unknown
    assert unknown.count("<circle") > 0
    assert roofline(without(full, "intensity")) == ""
    assert roofline(empty("roofline")) == ""
    one = dataclasses.replace(full, rows=full.rows[:1], facts={})
    assert roofline(one).count("<circle") == 2


def test_names_are_escaped_in_plots(html: str) -> None:
    assert "<script>alert" not in html
    assert EVIL in "".join(check_page(html).text)


def test_collectives_are_binned_whole(html: str, made: Made) -> None:
    heat = html.partition("class='heat'")[2].partition("</svg>")[0]
    counts = [int(n.replace(",", "")) for n in re.findall(r"<text class='in[^>]*>([\d,]+)<", heat)]
    assert sum(counts) == len(results(made)["collectives"].rows)
    assert "overlap with compute: unknown" in heat
    assert "AllReduce[tp]" in html and "ring LL" in html
    same = [{"kind": "all_reduce", "bytes": 1024, "time_s": 1e-5, "overlap_pct": None}] * 3
    group = {"name": "AllReduce[dp]", "count": 3, "bytes": None, "time_s": 3e-5}
    alone = Result(kind="c", title="c", columns=(), rows=same, facts={"by_group": [group]})
    assert sections.collectives(alone).count("<rect") == 1


def test_memory_is_a_line_of_the_timeline(html: str) -> None:
    (line,) = [t for t in data_of(html)["telemetry"] if t["unit"] == "GiB"]
    assert line["name"] == "GPU 0 allocated"
    assert array(line["v"]).max() == pytest.approx(32, rel=0.01)
    assert (np.diff(array(line["t"])) >= 0).all()
    assert sections.memory_lines(None, 0) == []


# -- missing and known ----------------------------------------------------------------------------------------------


def test_what_is_missing_is_one_line_a_remedy(run: RunFile, made: Made) -> None:
    found = run_analyses(with_table(run, made.table))
    assert set(found) == set(ANALYSES)
    lines = find_missing(found, made.timeline, telemetry=True)
    by = {fix: what for what, fix in lines}
    assert len(by) == len(lines)
    counters = next(what for fix, what in by.items() if "tessera run --counters" in fix)
    assert "what warps waited for" in counters
    assert "SM occupancy" in counters
    assert any("record_shapes" in fix for fix in by)
    assert any("profile_memory" in fix for fix in by)
    assert not any("temperature" in what for what in by.values())
    assert not any("collective" in what for what in by.values())
    assert any("temperature" in what for what, _ in find_missing(found, made.timeline))
    html = check_page(page(with_table(run, made.table)))
    assert "What is missing, and what would provide it" in "".join(html.text)


def test_a_timeline_without_a_device_misses_no_counters() -> None:
    b = Builder()
    b.add("op", "aten::add", START_NS, START_NS + 1000, thread=1)
    assert missing_fields(b.build()) == {}


def test_an_analysis_that_fails_says_so(run: RunFile, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera import analyze
    from tessera.errors import MeasurementError

    def fails(*_: Any, **__: Any) -> Result:
        raise MeasurementError("no such luck", fix="try: again=True")

    monkeypatch.setattr(analyze, "roofline", fails, raising=False)
    found = run_analyses(with_table(run, made.table))["roofline"]
    assert found.missing == {"roofline": "no such luck: try: again=True"}
    assert "<code>again=True</code>" in missing_section(find_missing({"roofline": found}, made.timeline))


def test_every_figure_says_how_it_is_known(html: str, run: RunFile, made: Made) -> None:
    tags = re.findall(r"<td>([^<]+)</td><td><span class='tag (\w+)'", html)
    known = dict(tags)
    assert known["energy of the run"] == "measured"
    assert known["energy of kernels"] == "attributed"
    assert known["FLOPs"] == known["bytes moved"] == "computed"
    assert known["roofs"] == "catalogue"
    assert known["other figures"] == "missing"
    counted = dict(results(made))
    counted["roofline"] = dataclasses.replace(
        counted["roofline"], rows=[{**r, "bytes_from": "ncu"} for r in counted["roofline"].rows]
    )
    measured = page(with_table(run, made.table), results=counted)
    assert dict(re.findall(r"<td>([^<]+)</td><td><span class='tag (\w+)'", measured))["bytes moved"] == "measured"
    unknown = dataclasses.replace(made.table, energy_j=math.nan, kernels=(), ops=())
    said = page(with_table(run, unknown), results={})
    assert dict(re.findall(r"<td>([^<]+)</td><td><span class='tag (\w+)'", said))["energy of the run"] == "missing"


def test_only_our_own_script_may_run(html: str) -> None:
    assert policy() in html
    assert "unsafe-inline" not in policy().split("script-src")[1]
    assert html.count("<script>") == 1


# -- real recordings ------------------------------------------------------------------------------------------------


def test_a_recorded_training_run(tmp_path: Path) -> None:
    shared = REPOSITORY.parent / "shared" / "h200"
    if not (shared / "gpt2_train.kineto.json.gz").exists():
        pytest.skip("the recordings of an H200 are not beside this checkout")
    from tessera.profile.runfile import RunWriter
    from tessera.timeline import kineto

    pairs = np.array(json.loads((shared / "gpt2_train.power.json").read_text())["samples_mw"])
    with RunWriter(tmp_path / "g.tessera", meta={"command": "train_gpt2.py"}) as writer:
        writer.add_timeline(kineto.read(shared / "gpt2_train.kineto.json.gz"))
        writer.add_samples(GPU, pairs[:, 0] * 1000, pairs[:, 1] / 1000)

    with RunFile(tmp_path / "g.tessera") as run:
        rendered = page(run.recording())
    parser = check_page(rendered)
    assert "roofline" in parser.ids
    assert rendered.count("<circle") > 60
    assert "matrix.bf16" in rendered
    assert len(rendered) < 1_000_000


# -- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [(4.8e12, "B/s", "4.8 TB/s"), (989.4e12, "FLOP/s", "989.4 TFLOP/s"), (0.0, "J", "0 J"), (None, "J", "-"),
     (math.nan, "J", "-"), (0.25, "", "0.25"), (1e3, "", "1k"), (999.96, "W", "1 kW"), (1.0, "FLOP/B", "1 FLOP/B")],
)  # fmt: skip
def test_quantities_with_a_prefix(value: float | None, unit: str, said: str) -> None:
    assert format_si(value, unit) == said


# -- recordings of our own: an ncu replay on an H200, two ranks of gloo, allocations -----------------------------------


def test_stalls_of_a_recorded_replay(tmp_path: Path) -> None:

    from tessera.profile.counters import ncu
    from tessera.profile.counters.merge import merge
    from tessera.profile.runfile import RunWriter
    from tessera.timeline import Launch

    data = TESTS / "data" / "counters"
    b, now = Builder(), START_NS
    for number, k in enumerate(json.loads((data / "kineto_h200.json").read_text()), start=1):
        launch = b.intern_launch(Launch(grid=tuple(k["grid"]), block=tuple(k["block"])))
        b.add("kernel", k["name"], now, now + 100_000, device=0, stream=7, external=number, launch=launch)
        now += 101_000
    timeline = b.build()
    timeline.extra = merge(timeline, ncu.parse((data / "ncu_h200.csv").read_text())).extra
    with RunWriter(tmp_path / "r.tessera", meta={"command": "replay.py"}) as writer:
        writer.add_timeline(timeline)
    with RunFile(tmp_path / "r.tessera") as run:
        parser = check_page(page(run.recording()))
    assert "stalls" in parser.ids and "collectives" not in parser.ids
    assert any("long scoreboard" in text.lower() or "memory" in text.lower() for text in parser.text)


def test_collectives_and_memory_of_recorded_ranks(tmp_path: Path) -> None:

    from tessera.profile.ranks import merge

    with merge([TESTS / "data" / "ranks"]).write(tmp_path / "m.tessera") as run:
        rendered = page(run.recording())
    parser = check_page(rendered)
    assert {"collectives", "memory"} <= set(parser.ids)
    assert "every operator" in rendered and "AllReduce[0, 1]" in rendered and "rank 1" in rendered
