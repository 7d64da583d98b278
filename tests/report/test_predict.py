"""A prediction, a sweep and a comparison as people see them: in the terminal and as one HTML file."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from torch import nn

from tessera.estimate.predict import predict
from tessera.estimate.search import Sweep, SweepRow, sweep
from tessera.report import predict as shown
from tessera.report import sweep as sweeps
from tessera.report.console import TableColumn, TextFlow, fit_columns
from tessera.report.plots import LogAxis, ParetoPoint, pareto_plot
from tessera.report.predict_html import card, page
from tessera.schema import Advice, Energy, EnergyReport

from models import Block, Residual
from rendered import check_page, text_of

IMAGE = torch.empty(1, 3, 32, 32, device="meta")
EVIL = "<script>alert('x')</script>&\"net\""


@pytest.fixture(scope="module")
def report() -> EnergyReport:
    return predict(Residual(), IMAGE, on="a100", precision="bf16", batch=8, name="residual")


@pytest.fixture(scope="module")
def found() -> Sweep:
    return sweep(Residual(), IMAGE, on=("a100", "h200"), precisions=("bf16", "fp8"), batches=(1, 8), name=EVIL)


def saving(name: str = "quantise") -> Advice:
    return Advice(
        kind=name, action="run in fp8", saves_j=0.012, saves_share=0.3, error_j=0.002, time_s=0.004, unit="sample"
    )


# -- terminal -------------------------------------------------------------------------------------------------------


def test_a_prediction_says_everything_on_one_screen(report: EnergyReport) -> None:
    out = text_of(shown.prediction(report, top=5, opportunities=[saving()], next_command="tessera predict x"))
    assert "residual on NVIDIA A100" in out
    assert "bf16, infer, eager, batch 8" in out
    assert re.search(r"\d ± \d.*[mµ]s .*\d ± \d.* mJ .*W average, .*W peak of 20 ms", out)
    assert re.search(r"per sample +\S+ ± \S+ [mµ]?J", out)
    assert re.search(r"memory +\S+ MiB of 80 GiB", out)
    assert "bound by" in out
    assert "✓  Quantise" in out
    assert "saves 12.0 ± 2.0 mJ/sample (30%)" in out
    assert "next  tessera predict x" in out
    assert len(out.splitlines()) <= 40


def test_a_cpu_is_not_told_a_share_that_is_a_gpus() -> None:
    shares = {on: text_of(shown.prediction(predict(nn.ReLU(), torch.empty(1, 8), on=on))) for on in ("h200", "grace")}
    assert "of the tighter roof" in shares["h200"] and "of the tighter roof" not in shares["grace"]
    assert "PyTorch's own work before each operator" in shares["grace"]


def test_the_bars_are_the_shares(report: EnergyReport) -> None:
    out = text_of(shown.prediction(report))
    lines = {name: re.search(rf"{name} +\((\d+\.\d)%\): +(█*)", out) for name in ("Compute", "Memory", "Static")}
    shares = []
    for name, found in lines.items():
        assert found, name
        shares.append(float(found[1]))
        assert len(found[2]) == pytest.approx(float(found[1]) / 100 * shown.BAR, abs=1.0)
    assert sum(shares) == pytest.approx(100, abs=0.2)


def test_blocks_are_exact_to_an_eighth() -> None:
    assert shown.blocks(0.0, 40) == ""
    assert shown.blocks(1.0, 40) == "█" * 40
    assert shown.blocks(0.5 / 40, 40) == "▌"
    assert shown.blocks(2.0, 10) == "█" * 10


def test_top_consumers_are_numbered_and_grouped(report: EnergyReport) -> None:
    found = shown.consumers(report, 100)
    assert sum(c.energy_j for c in found) == pytest.approx(report.total_energy_j)
    assert sum(c.share for c in found) == pytest.approx(1.0)
    assert [c.energy_j for c in found] == sorted((c.energy_j for c in found), reverse=True)
    out = text_of(shown.prediction(report, top=3))
    assert re.search(r"1\. +\S+ .*%", out)
    assert re.findall(r"^ *(\d+)\. ", out, re.MULTILINE) == ["1", "2", "3"]


def test_layers_alike_are_one_line() -> None:
    deep = predict(nn.Sequential(*(Block() for _ in range(6))), torch.empty(1, 16, 64), on="h200")
    found = shown.consumers(deep, 100)
    assert [c.count for c in found if "qkv" in c.name] == [6]
    assert sum(c.energy_j for c in found) == pytest.approx(deep.total_energy_j)
    assert all(c.count >= shown.STACK for c in found if "*" in c.name)


def test_no_opportunity_is_said(report: EnergyReport) -> None:
    assert "none of those tried" in text_of(shown.prediction(report, opportunities=[]))
    assert "Opportunities" not in text_of(shown.prediction(report))


def test_real_opportunities_are_shown(report: EnergyReport) -> None:
    found = report.opportunities()
    out = text_of(shown.prediction(report, opportunities=found))
    assert out.count("✓") == len(found)


def test_a_sweep_says_what_a_million_samples_cost(found: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1M samples" not in text_of(sweeps.comparison(found), width=120)
    monkeypatch.setenv("TESSERA_PRICE_PER_KWH", "0.3")
    monkeypatch.setenv("TESSERA_CURRENCY", "EUR")
    best = found.best_batch()
    assert best is not None and best.million_cost is not None and best.energy_per_sample_j is not None
    assert best.million_cost.cost == pytest.approx(0.3 * 1e6 * best.energy_per_sample_j / 3.6e6)
    assert f"1M samples: {best.million_cost.text}" in text_of(sweeps.comparison(found), width=120)
    assert f"1M samples: {best.million_cost.text}" in sweeps.sweep_section(found)
    assert best.to_dict()["million_cost"]["currency"] == "EUR"


def test_a_sweep_marks_the_frontier_and_says_what_cannot_be(found: Sweep) -> None:
    out = text_of(sweeps.comparison(found, next_command="tessera predict y"), width=120)
    assert "6 of 8 combinations are possible" in out
    assert len(re.findall(r"^\* (?:a100|h200)", out, re.MULTILINE)) == len(found.pareto())
    assert "a100 fp8 batch 1, 8: a100 has no fp8 units" in out
    for words in ("least energy", "fastest", "most throughput", "next"):
        assert words in out
    assert "memory" not in text_of(sweeps.comparison(found), width=80).splitlines()[1]


UNITS = re.compile(r"±\s+[\d.]+\s(?:[mµ]?s|[mµ]?J)\b")


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 100, 140])
def test_a_narrow_terminal_loses_no_unit_no_chip_and_no_star(found: Sweep, width: int) -> None:
    out = text_of(sweeps.comparison(found), width=width)
    assert "…" not in out
    assert all(len(line) <= width for line in out.splitlines())
    table = out[: out.index("* on the")]
    assert len(re.findall(r"^\* (?:a100|h200)", table, re.MULTILINE)) == len(found.pareto())
    assert len(re.findall(r"^[* ] (?:a100|h200) ", table, re.MULTILINE)) == len(found.feasible)
    if width >= 50:  # below, a cell goes on in the next line
        assert len(UNITS.findall(table)) == 2 * len(found.feasible)
        figures = out.partition("\nnote")[0]  # a tie names batches, which have no unit
        assert not re.search(r"\d$", figures, re.MULTILINE), "a figure stands apart from its unit"
    gone = re.search(r"not shown: (.*?) \(", " ".join(out.split()))
    for heading in ("samples/s", "W", "memory", "bound by"):
        shown_here = re.search(rf"(?m)^.*chip .*{heading}", out) is not None
        assert shown_here != (gone is not None and heading in gone[1].split(", "))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_screen_keeps_figures_whole(report: EnergyReport, width: int) -> None:
    long = dataclasses.replace(report, name="a" * 50)
    out = text_of(shown.prediction(long, top=5, opportunities=[saving(), saving("raise utilisation")]), width=width)
    assert all(len(line) <= width for line in out.splitlines())
    rows = re.findall(r"^ *\d\. .*\S", out, re.MULTILINE)
    assert len(rows) == 5
    assert all(re.search(r"\d [mµ]?s +[\d.]+ [mµ]?J +[\d.]+%$", row) for row in rows)
    assert out.count("saves 12.0 ± 2.0 mJ/sample (30%)") == 2
    assert out.count("run in fp8; takes 4 ms") == 2


def test_pieces_break_only_between_each_other() -> None:
    pieces = TextFlow("5.86 mJ per sample", "5.28 ms", "12,129 samples/s", between=", ")
    assert text_of(pieces, width=60) == "5.86 mJ per sample, 5.28 ms, 12,129 samples/s\n"
    assert text_of(pieces, width=30) == "5.86 mJ per sample, 5.28 ms,\n12,129 samples/s\n"


def test_columns_leave_in_their_order_and_some_never() -> None:
    columns = [TableColumn(heading=name, cells=["12345"], drop=n) for name, n in (("a", 0), ("b", 2), ("c", 1))]
    assert [c.heading for c in fit_columns(columns, 17)[0]] == ["a", "b", "c"]
    assert [c.heading for c in fit_columns(columns, 16)[0]] == ["a", "c"]
    assert [c.heading for c in fit_columns(columns, 3)[0]] == ["a"]


def _waiting(device: str, joules: float, *, late: float = 1.0) -> SweepRow:
    """A row bound by the host: as long on every chip, but for the last bit of the sum."""
    return SweepRow(on=device, precision=None, batch=32, time_s=0.00637 * late, energy_j=joules, bound="host")


@pytest.mark.parametrize("late", [1.0, 1 + 2e-16, 1 - 2e-16])
@pytest.mark.parametrize("order", [("h200", "a100"), ("a100", "h200")])
def test_of_equals_the_cheaper_is_chosen_for_everything(order: tuple[str, str], late: float) -> None:
    joules = {"h200": 0.9, "a100": 0.7}
    rows = [_waiting(order[0], joules[order[0]]), _waiting(order[1], joules[order[1]], late=late)]
    tied = Sweep(name="m", mode="train", launch="eager", rows=rows)
    assert {row.on for _, row in sweeps.choices(tied)} == {"a100"}
    best = tied.best_device(energy_per_sample_j=1.0)
    assert best is not None and best.on == "a100"


def _row(device: str, time: tuple[float, float], joules: tuple[float, float]) -> SweepRow:
    return SweepRow(
        on=device, precision=None, batch=1, time_s=time[0], error_s=time[1], energy_j=joules[0],
        error_j=joules[1], compute_energy_j=0.1, memory_energy_j=0.1, static_energy_j=0.1,
    )  # fmt: skip


def test_a_tie_is_said_and_what_is_apart_is_not() -> None:
    rows = [_row("h200", (6.4, 3.8), (30, 1)), _row("a100", (6.4, 3.8), (24, 1)), _row("t4", (60, 9), (90, 20))]
    tied = Sweep(name="m", mode="train", launch="eager", rows=rows)
    sentence = "tied for lowest latency within 90%: a100 and h200"
    assert sweeps.ties(tied) == [sentence]
    assert [label for label, _ in sweeps.choices(tied)] == ["least energy", "fastest (tied)", "most throughput"]
    assert "fastest (tied)" in text_of(sweeps.comparison(tied)) and "fastest (tied)" in page(tied)
    assert f"<p role='note'>T{sentence[1:]}. They differ by less than their intervals.</p>" in page(tied)
    assert sentence in " ".join(text_of(sweeps.comparison(tied)).split()), "the terminal says what the page says"
    apart = dataclasses.replace(tied, rows=rows[1:])
    assert sweeps.ties(apart) == [] and "tied" not in f"{page(apart)}{sweeps.choices(apart)}".lower()
    many = dataclasses.replace(tied, rows=[_row(f"chip{i}", (6.4, 3.8), (24, 9)) for i in range(6)])
    assert all(said.endswith(" and 3 more") for said in sweeps.ties(many)) and len(sweeps.ties(many)) == 2
    assert (
        sweeps.ties(dataclasses.replace(tied, rows=rows[:1])) == sweeps.ties(dataclasses.replace(tied, rows=[])) == []
    )


def test_the_page_of_chips_says_what_its_colours_are(found: Sweep) -> None:
    html = page(found).partition("All combinations")[2]
    for colour in ("compute", "memory", "static"):
        assert f"<i class='{colour}'></i>{colour}: " in html


def test_a_power_mode_is_named_once() -> None:
    assert shown.chip_name("jetson-orin@30W").count("30W") == 1
    assert shown.chip_name("no such chip") == "no such chip"


def test_a_report_as_text() -> None:
    energy = Energy(energy_j=12.0, error_j=0.5, time_s=1.0, source="nvml-samples")
    measured = EnergyReport(name="train", total=energy, by_domain={"gpu0": energy}, peak_w=400.0)
    assert "peak 400 W" in shown.text(measured)
    assert "of 20 ms" not in shown.text(measured)  # a measured peak is the sensor's, whatever that is


def test_a_sweep_of_nothing_possible_still_says_why() -> None:
    rows = (SweepRow(on="a100", precision="fp8", batch=1, reason="a100 has no fp8 units"),)
    out = text_of(sweeps.comparison(Sweep(name="m", mode="infer", launch="eager", rows=rows)))
    assert "0 of 1" in out
    assert "a100 has no fp8 units" in out
    check_page(page(Sweep(name="m", mode="infer", launch="eager", rows=rows)))


def test_json_has_the_summary_and_the_report(report: EnergyReport) -> None:
    data = json.loads(shown.report_json(report, [saving()]))
    assert data["summary"]["total_energy_j"] == pytest.approx(report.total_energy_j)
    assert data["report"]["prediction"]["device"] == "a100"
    assert len(data["report"]["descriptors"]) == len(report.descriptors)
    assert data["opportunities"][0]["saves_j"] == 0.012
    assert "opportunities" not in json.loads(shown.report_json(report))


# -- HTML -----------------------------------------------------------------------------------------------------------


def test_a_page_needs_nothing_but_itself(report: EnergyReport) -> None:
    html = page(report, opportunities=[saving()])
    parser = check_page(html)
    assert html.startswith("<!doctype html>")
    assert html.count("id='theme'") == 1 and "script-src 'sha256-" in html
    assert "residual on NVIDIA A100" in html
    assert "Quantise" in html
    assert parser.tags.count("tr") >= 5
    assert parser.tags.count("section") == 1
    assert check_page(page([report, report])).tags.count("section") == 2
    assert page([report, report]).count("id='theme'") == 1 and "id='theme'" not in card(report)
    assert "<table class='sort'>" in html and "<button" not in card(report)  # page.js sorts; a card has no script


def test_every_string_is_escaped(report: EnergyReport, found: Sweep) -> None:
    descriptor = dataclasses.replace(report.descriptors[0], subgraph_name=EVIL, kind=EVIL)
    evil = dataclasses.replace(report, name=EVIL, descriptors=(descriptor,), notes=(EVIL,))
    opportunity = dataclasses.replace(saving(EVIL), action=EVIL, unit=EVIL)
    bad = SweepRow(on=EVIL, precision="bf16", batch=1, reason=EVIL)
    rows = (*found.rows, bad, dataclasses.replace(found.rows[0], on=EVIL, bound=EVIL))
    for html in (page(evil, opportunities=[opportunity]), card(evil), page(dataclasses.replace(found, rows=rows))):
        assert "alert(" in html
        assert "<script>alert" not in html
        check_page(html)


def test_a_sweeps_page_has_the_plot_and_the_table(found: Sweep) -> None:
    parser = check_page(page(found))
    assert parser.tags.count("svg") == 1
    assert parser.tags.count("circle") == len(found.feasible)
    assert parser.tags.count("title") == 1 + len(found.feasible), "the page's own and one under each point"
    assert parser.tags.count("polyline") == 1


def test_points_are_named_by_what_tells_them_apart(found: Sweep) -> None:
    svg = page(found).partition("<svg")[2].partition("</svg>")[0]
    assert re.search(r">(?:a100|h200) (?:bf16|fp8) batch [18]<", svg)
    one = dataclasses.replace(found, rows=[r for r in found.rows if r.precision == "bf16" and r.batch == 8])
    assert re.search(r">h200<", page(one).partition("<svg")[2].partition("</svg>")[0])


def test_a_card_works_for_a_measurement_too(report: EnergyReport) -> None:
    check_page(card(report))
    assert report._repr_html_() == card(report)
    energy = Energy(energy_j=12.0, error_j=0.5, time_s=1.0, source="nvml-samples")
    measured = EnergyReport(name="train", total=energy, by_domain={"gpu0": energy})
    html = card(measured)
    check_page(html)
    assert "12.00 ± 0.50 J" in html
    assert "gpu0" in html


def test_axes_hold_every_point_and_round_ticks() -> None:
    axis = LogAxis.over([0.002, 0.08], 0, 100)
    assert 0 < axis.at(0.002) < axis.at(0.08) < 100
    assert axis.at(0.0) == 0
    assert axis.at(1e9) == 100
    assert [f"{t:g}" for t in axis.ticks()] == ["0.002", "0.005", "0.01", "0.02", "0.05", "0.1"]
    assert LogAxis.over([1.0], 0, 100).at(1.0) == pytest.approx(50)
    assert pareto_plot([]) == ""


def test_labels_do_not_lie_on_each_other() -> None:
    dots = [
        ParetoPoint(x=1.0, y=1.0, error_x=0, error_y=0, group="g", label="same place", title="t", frontier=i == 0)
        for i in range(9)
    ]
    svg = pareto_plot(dots)
    assert svg.count("<circle") == 9
    assert 1 <= svg.count("class='label") <= 4
