"""The mean step: which steps count, one ± on the screen and in a diff, watts whose joules and seconds move together."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from recordings import with_table
from report.test_diff import measured, predicted, table
from tessera import analyze
from tessera.analyze.answer import PerWork, answer
from tessera.analyze.mean_step import find_expensive, mean_of, mean_step, select_steps, spread_steps
from tessera.attribute.table import EnergyRow, EnergyTable
from tessera.estimate.prediction_errors import watts_error
from tessera.profile.runfile import RunFile
from tessera.report.console import Console
from tessera.report.diff import headline, text
from tessera.report.diff_html import diff_card as card
from tessera.report.diff_html import page
from tessera.report.run import spent_text, spread_text
from tessera.report.run import text as run_text

import synthetic_run


def step(i: int, joules: float, seconds: float = 0.1) -> EnergyRow:
    return EnergyRow(
        name=f"step_{i}", kind="step", calls=1, time_s=seconds, energy_j=joules, error_j=0.0, share=0.1,
        wall_s=seconds,
    )  # fmt: skip


def steps(*joules: float) -> list[EnergyRow]:
    return [step(i, j) for i, j in enumerate(joules)]


def stepped(joules: list[float], seconds: list[float]) -> EnergyTable:
    made = table({"mm": sum(joules) - 1.0}, steps=joules, walls=seconds, seconds=sum(seconds))
    return dataclasses.replace(made, error_j=0.0, steps=[dataclasses.replace(s, error_j=0.0) for s in made.steps])


# -- which steps count ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spent", "first"),
    [
        ([1.0] * 5, 0), ([9.0, 1.0, 1.0], 1), ([9.0, 4.0, 1.0, 1.0, 1.0], 2), ([9.0, 1.0], 0), ([9.0], 0), ([], 0),
        ([1.4, 1.0, 1.0], 0), ([1.0, 9.0, 1.0, 1.0], 0), ([9.0, 1.0, 9.0, 1.0, 1.0], 1),
        ([9.0] * 6 + [1.0] * 9, 3), ([9.0] * 20 + [1.0] * 80, 10),
    ],
)  # fmt: skip
def test_dear_steps_are_left_out_where_the_run_begins_with_them(spent: list[float], first: int) -> None:
    found = select_steps(steps(*spent))
    assert list(found.places) == list(range(first, len(spent))) and len(found.first) == first and not found.unseen
    assert (found.left_out is None) == (first == 0) == (found.names is None)


def test_it_is_said_which_and_why() -> None:
    assert select_steps(steps(9, 1, 1)).left_out == "without step_0, which cost over 1.5 times the median step (9 J)"
    assert select_steps(steps(9, 4, 1, 1, 1)).left_out == (
        "without step_0 and step_1, which cost over 1.5 times the median step (13 J together)"
    )
    assert (select_steps(steps(9, 9, 9, 1, 1, 1, 1)).names or "") == "step_0 to step_2 (3 steps)"
    unseen = select_steps(steps(9, 1, math.nan, 1))
    assert list(unseen.places) == [1, 3] and (unseen.left_out or "").endswith(
        "without step_2, whose power no sensor saw"
    )
    timed = select_steps([step(i, math.nan, s) for i, s in enumerate((0.9, 0.1, 0.1))])
    assert list(timed.places) == [1, 2] and "(900 ms)" in (timed.left_out or "")


def test_a_later_dear_step_counts_and_is_advice() -> None:
    """One rule for both: what the mean leaves out at the beginning is what advice calls uneven."""
    assert find_expensive(np.array([9.0, 1.0, 9.0, 1.0, 1.0])).tolist() == [True, False, True, False, False]
    found = analyze.diff(table({"mm": 9.0}, steps=[1, 1, 9, 1, 1]), table({"mm": 9.0}, steps=[1.0] * 5))
    assert found.total.before_j == pytest.approx(13 / 5) and not any("without step" in n for n in found.notes)


def test_steps_that_no_sensor_saw_leave_the_others_known() -> None:
    run = table({"mm": 4.0}, steps=[1.0, math.nan, 1.0, 1.0])
    found = analyze.diff(run, run)
    assert found.total.before_j == 1.0 and found.work == (3.0, 3.0) and "no sensor saw" in found.note


# -- one ± ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 3])
def test_the_screen_and_the_diff_state_one_interval(tmp_path: Path, seed: int) -> None:
    synthetic_run.make(20, seed=seed).write(tmp_path / "a.tessera").close()
    with RunFile(tmp_path / "a.tessera") as run:
        spent = run.recording().energy()
        said = answer(with_table(run, spent)).per_work[0]
        console = Console(width=100, highlight=False, color_system=None)
        with console.capture() as captured:
            console.print(run_text(with_table(run, spent)))
    found = analyze.diff(tmp_path / "a.tessera", tmp_path / "a.tessera")
    assert said.unit == "step" and (said.energy_j, said.error_j, said.amount) == (
        found.total.before_j, found.total.before_error_j, found.work[0]
    )  # fmt: skip
    shown = headline(found)[0]
    sensor_j = spent.error_j / spent.energy_j * said.energy_j
    assert said.error_j > 1.0005 * sensor_j and shown.before_error == said.error_j, "steps scatter too"
    per_step = next(line for line in captured.get().splitlines() if line.startswith("per step"))
    assert per_step.split("J")[0].split("step")[1].strip() in text(found)


def test_of_one_step_the_sensor_is_all_there_is() -> None:
    found = mean_step(steps(4.0), 0.1)
    assert found.once and found.error_j == pytest.approx(0.4) and math.isnan(found.error_s)
    assert found.error_w == pytest.approx(4.0)


# -- watts ----------------------------------------------------------------------------------------------------------


def test_watts_do_not_scatter_as_joules_and_seconds_do() -> None:
    """Steps of very different length at one power: their watts are known exactly."""
    seconds = np.random.default_rng(0).uniform(0.05, 0.2, 20)
    a, b = stepped((400.0 * seconds).tolist(), seconds.tolist()), stepped((410.0 * seconds).tolist(), seconds.tolist())
    found = analyze.diff(a, b)
    power = headline(found)[2]
    assert found.total.error_j > 0.1 * found.total.before_j and power.name == "power"
    assert (power.before, power.change) == (pytest.approx(400.0), pytest.approx(10.0))
    assert power.change_error < 1e-6 and power.before_error < 1e-6 and power.state == "more"
    assert not found.total.significant, "while the joules may be noise"
    assert found.total.to_dict()["error_w"] == found.total.error_w


def test_intervals_of_watts_hold() -> None:
    """Two runs of one program: their watts differ by less than the half-width nine times of ten."""
    rng, outside = np.random.default_rng(4), 0
    for _ in range(400):
        runs = []
        for _ in range(2):
            seconds = rng.uniform(0.05, 0.2, 20)
            runs.append(stepped((seconds * rng.normal(400.0, 8.0, 20)).tolist(), seconds.tolist()))
        outside += headline(analyze.diff(*runs))[2].state in ("more", "less")
    assert 0.03 < outside / 400 < 0.15


def test_the_sensor_s_error_stays_in_the_watts() -> None:
    seconds = np.linspace(0.05, 0.2, 12)
    found = mean_of(400.0 * seconds, seconds, own_j=1.0)
    assert found.error_w == pytest.approx(1.0 / float(seconds.mean())) and found.error_j > 1.0


def test_watts_of_several_runs_scatter_as_those_of_runs() -> None:
    """Runs of very different length at one power."""
    lengths = (8.0, 10.0, 12.0)
    runs = [
        [dataclasses.replace(measured(watts * s), total=dataclasses.replace(measured(watts * s).total, time_s=s,
                                                                           error_j=0.0)) for s in lengths]
        for watts in (400.0, 410.0)
    ]  # fmt: skip
    found = analyze.diff(*runs)
    power = headline(found)[2]
    assert power.change == pytest.approx(10.0) and power.state == "more" and power.change_error < 1e-6
    assert not found.significant
    one = headline(analyze.diff(runs[0], runs[1][0]))[2]
    assert one.state == "more", "one run beside several scatters as they do"


def test_watts_measured_once_are_unknown() -> None:
    found = analyze.diff(measured(100.0), measured(120.0))
    assert headline(found)[2].state == "unsure" and headline(found)[2].before_error == pytest.approx(0.2)


def test_a_longer_prediction_draws_its_static_joules_longer() -> None:
    guess = predicted({"fc.addmm": ("gemm", 2.0)})  # ± 10% of the joules, 10% of the time
    assert watts_error(guess) == pytest.approx(100.0 * math.hypot(0.08, 0.04))
    late = dataclasses.replace(guess, total=dataclasses.replace(guess.total, error_j=0.06 * 2.0))
    assert watts_error(late) == pytest.approx(100.0 * 0.04), "all of the joules' error is by time"
    assert watts_error(measured(1.0)) is None
    power = headline(analyze.diff(guess, guess))[2]
    assert power.state == "same" and power.change_error < 0.01 * power.before, "one model errs alike in both"
    assert power.before_error == pytest.approx(watts_error(guess))


# -- a prediction's idle --------------------------------------------------------------------------------------------


def test_the_idle_that_a_prediction_does_not_state_is_not_gone() -> None:
    run, guess = table({"aten::mm": 9.0}, steps=[1.0] * 10), predicted({"mm": ("gemm", 1.0)}, step=1.0)
    for found in (analyze.diff(run, guess), analyze.diff(guess, run)):
        idle = found.rows[-1]
        assert idle.name == "idle" and idle.state == "unstated" and not idle.significant
        data = idle.to_dict()
        assert data["change_j"] is None and data["error_j"] is None
        known = [j for j in (data["before_j"], data["after_j"]) if j is not None]
        assert known == [pytest.approx(0.1)]
        assert sum("net on h200 states no idle" in n for n in found.notes) == 1
        line = next(line for line in text(found).splitlines() if line.startswith("idle"))
        assert "not stated" in line and "gone" not in line and "new" not in line and "~" not in line
        assert "not stated on both sides" in page(found) and "nan" not in page(found) and "not stated" in card(found)
        assert all(0.0 < part <= 1.0 for part in found.matched)
    both = analyze.diff(guess, guess)
    assert all(r.state == "both" for r in both.rows) and "idle" not in both.note


# -- one step that decides the mean ---------------------------------------------------------------------------------


def per_step(*joules: float, error_j: float = 0.1) -> PerWork:
    mean_j, spread = sum(joules) / len(joules), spread_steps(steps(*joules))
    return PerWork(
        unit="step", amount=len(joules), energy_j=mean_j, error_j=error_j, rate_per_s=1.0, spread=spread
    )  # fmt: skip


def test_a_step_that_decides_the_mean_is_named_and_the_median_stands_first() -> None:
    per = per_step(*[0.2] * 12, 17.8, error_j=2.0)
    assert spent_text(per) == "median 200 mJ (mean 1.55 J: one step decides it)"
    assert spread_text(per) == "200 mJ (step_0) to 17.8 J (step_12, 89 times the median)"


def test_steps_that_scatter_have_their_mean_and_a_range() -> None:
    per = per_step(1.0, 2.0, 1.0, 1.2, 1.1, 1.0)
    assert spent_text(per).startswith("1.2") and " ± " in spent_text(per) and "median" not in spent_text(per)
    assert spread_text(per) == "1 J (step_0) to 2 J (step_1, 1.9 times the median)"
    assert spread_text(per_step(1.0, 1.2, 1.1)) == "1 J (step_0) to 1.2 J (step_1)"


def test_a_mean_with_a_wide_error_is_still_shown() -> None:
    assert spent_text(per_step(1.0, 1.0, 1.0, error_j=1.5)) == "1 J (0 to 2.5 J)"
