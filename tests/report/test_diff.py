"""What changed and whether it is noise: tables, runs, reports, their JSON, predictions, the screen, the page."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recordings import with_table
from tessera import analyze
from tessera.analyze.compare import side_of
from tessera.analyze.diff import Difference
from tessera.analyze.diff_rows import RowChange, plain_operator
from tessera.analyze.sides import DiffSide
from tessera.attribute.table import EnergyRow, EnergyTable
from tessera.cli.diff import command
from tessera.errors import ArgumentError, RecordingError
from tessera.monitor.scope import EnergyScope
from tessera.report.diff import calls_text, percent, quantity, text
from tessera.report.diff_html import diff_card as card
from tessera.report.diff_html import page
from tessera.report.predict import report_json
from tessera.schema import Energy, EnergyDescriptor, EnergyReport, Prediction, RegionEnergy, Work

import synthetic_run
from command_line import invoke
from rendered import check_page

EVIL = "<script>alert('x')</script>&\"op\""


def row(name: str, joules: float, error: float = 0.1, *, kind: str = "op", calls: int = 10, seconds: float = 0.1,
        wall: float | None = None) -> EnergyRow:  # fmt: skip
    return EnergyRow(
        name=name, kind=kind, calls=calls, time_s=seconds, energy_j=joules, error_j=error, share=0.1, wall_s=wall
    )


def table(ops: dict[str, float], *, steps: list[float] = [], error: float = 0.1, idle: float = 1.0,  # noqa: B006
          seconds: float = 1.0, walls: list[float] | None = None) -> EnergyTable:  # fmt: skip
    total = sum(ops.values()) + idle
    rows = [row(n, j, error) for n, j in ops.items()]
    times = walls or [seconds / max(len(steps), 1)] * len(steps)
    each = [row(f"step_{i}", j, 0.01, kind="step", calls=1, wall=w)
            for i, (j, w) in enumerate(zip(steps, times, strict=True))]  # fmt: skip
    return EnergyTable(
        energy_j=total, error_j=0.01 * total, idle_j=idle, idle_error_j=error, time_s=seconds, busy_s=0.8,
        kernels=[dataclasses.replace(r, kind="kernel", name=f"k_{r.name}") for r in rows], ops=rows, steps=each,
        source="test",
    )  # fmt: skip


def thrice(given: Any) -> list[Any]:
    """Three runs that do not scatter: what is left of an interval is the sensor's."""
    return [given] * 3


def predicted(
    ops: dict[str, tuple[str, float]], *, error: float = 0.01, device: str = "h200", **work: float
) -> EnergyReport:
    parts = [
        EnergyDescriptor(
            subgraph_name=name, compute_energy_j=0.5 * j, memory_energy_j=0.3 * j, static_energy_j=0.2 * j,
            latency_s=0.01, error_j=error, device_s=0.01, error_s=0.001, kind=kind,
        )
        for name, (kind, j) in ops.items()
    ]  # fmt: skip
    total = sum(j for _, j in ops.values())
    of = Prediction(
        device=device, precision="bf16", mode="train", launch="eager", batch=8, error_s=0.002, device_s=0.01,
        host_s=0.01, clock=1.0, bound="compute", average_utilization=0.5, wasted_energy_j=0.1, flops=1e9, hbm_bytes=1e9,
    )  # fmt: skip
    energy = Energy(
        energy_j=total, error_j=0.1 * total, time_s=0.02, source=f"predicted for {device}", basis="predicted"
    )
    return EnergyReport(
        name="net", total=energy, by_domain={"gpu0": energy}, descriptors=parts, prediction=of,
        work=[Work(amount=n, unit=u) for u, n in work.items()],
    )  # fmt: skip


def measured(joules: float, *, regions: dict[str, float] = {}, **work: float) -> EnergyReport:  # noqa: B006
    energy = Energy(energy_j=joules, error_j=0.02 * joules, time_s=10.0, source="nvml-samples")
    return EnergyReport(
        name="python train.py",
        total=energy,
        by_domain={"gpu0": energy},
        work=[Work(amount=n, unit=u) for u, n in work.items()],
        regions=[
            RegionEnergy(name=n, calls=3, energy=dataclasses.replace(energy, energy_j=j)) for n, j in regions.items()
        ],
    )


# -- what changed ---------------------------------------------------------------------------------------------------


def test_rows_and_total_of_the_same_run_say_no_change() -> None:
    one = table({"aten::mm": 6.0, "aten::add": 3.0})
    found = analyze.diff(one, one)
    screen = text(found)
    assert len(re.findall(r"aten::\S+ .* no change", screen)) == 2 and "0% ~" not in screen
    assert "<td>no change</td>" in page(found) and "<td>noise</td>" not in page(found)


def test_the_same_twice_is_noise_and_nothing_changed() -> None:
    same = table({"mm": 5.0, "add": 1.0})
    found = analyze.diff(same, same)
    assert isinstance(found, Difference) and not found.significant and found.total.change_j == 0.0
    assert [r.state for r in found.rows] == ["both"] * 3 and found.matched == (1.0, 1.0)
    assert not any(r.significant for r in found.rows) and found.verdict().text.startswith("no change: 7 J in both")


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.0, 50.0), max_size=5),
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.0, 50.0), max_size=5),
    st.floats(0.01, 2.0),
)
def test_rows_and_idle_account_for_the_whole_change(a: dict[str, float], b: dict[str, float], error: float) -> None:
    runs = [thrice(table(ops, error=error)) for ops in (a, b)]
    found, back = analyze.diff(*runs), analyze.diff(*runs[::-1])
    if a and b:
        assert sum(r.change_j for r in found.rows) == pytest.approx(found.total.change_j, abs=1e-9)
        assert {r.name for r in found.rows} == {*a, *b, "idle"}
    for one in (*found.rows, found.total):
        assert one.error_j == pytest.approx(math.hypot(*(e for e in (one.before_error_j, one.after_error_j))))
        assert one.significant == (abs(one.change_j) > one.error_j)
        assert one.state == "both" or (one.before_j == 0.0) == (one.state == "new") or one.before_j == one.after_j
    assert back.total.change_j == pytest.approx(-found.total.change_j)
    assert back.significant == found.significant


def test_an_error_that_both_have_is_not_in_their_difference() -> None:
    def modelled(joules: float, source: str = "cpu model") -> EnergyTable:
        whole = table({"mm": joules})
        error = math.hypot(0.3 * whole.energy_j, 0.1)
        return dataclasses.replace(whole, basis="modelled", source=source, error_j=error)

    found = analyze.diff(thrice(modelled(10.0)), thrice(modelled(11.5)))
    level = math.hypot(0.3 * 12.5, 0.1) / 12.5  # the lesser of both, all of which is the model's
    own = math.sqrt(math.hypot(0.3 * 11.0, 0.1) ** 2 - (11.0 * level) ** 2)
    assert found.total.error_j == pytest.approx(own) and found.significant
    assert found.total.before_error_j == pytest.approx(math.hypot(0.3 * 11.0, 0.1)) and found.common == level
    assert "common error of 30.0%" in found.notes[0] and "MODELLED" in text(found)
    assert "MODELLED" in page(found) and "MODELLED" in card(found)
    other = analyze.diff(thrice(modelled(10.0)), thrice(modelled(11.5, "another model")))
    assert not other.significant and other.common == 0.0
    assert "changes under 45.4% cannot be detected" in other.verdict().text
    assert "MODELLED" not in page(analyze.diff(table({"mm": 1.0}), table({"mm": 2.0})))


@pytest.mark.parametrize("level", [0.0, 0.3, 0.814])
def test_a_factor_that_both_share_changes_no_verdict(level: float) -> None:
    """A common error of 81% was in the ± of the change: 13% more energy was noise, and passed a limit of 5%."""

    def modelled(joules: float) -> EnergyTable:
        whole = table({"mm": joules})
        return dataclasses.replace(whole, basis="modelled", source="cpu model", error_j=level * whole.energy_j)

    before, dearer = ([modelled(joules * scatter) for scatter in (0.95, 1.0, 1.05)] for joules in (10.0, 11.4))
    found, back = analyze.diff(before, dearer), analyze.diff(dearer, before)
    by_runs = 2.353 * math.hypot(0.5, 0.57) / math.sqrt(3.0)  # Student's t of 3 degrees of freedom, as Welch has it
    assert found.significant and back.significant and found.total.error_j == pytest.approx(by_runs, rel=0.001)
    assert found.verdict(fail_above=0.05).failed and not back.verdict(fail_above=0.05).failed
    assert "repeat" not in found.verdict().text
    noisy = [modelled(10.0 * scatter) for scatter in (0.7, 1.0, 1.3)]
    assert not analyze.diff(noisy, dearer).significant  # what differs between runs is still in it
    said = " ".join(found.notes)
    assert ("The ± of a change does not" in said) == ("contains their common error" in said) == (level > 0)


def test_steps_of_different_size_are_told_apart() -> None:
    found = analyze.diff(measured(10.0, step=10, sample=80), measured(20.0, step=10, sample=160))
    assert any("a step has 8 samples before and 16 after" in n for n in found.notes)
    dearer = analyze.diff(measured(10.0, step=10, sample=80), measured(22.0, step=10, sample=160))
    assert "per sample 125 mJ before and 138 mJ after (+10.0%)" in dearer.notes[0]
    assert not any("a step has" in n for n in analyze.diff(measured(10.0, step=10, sample=80),
                                                          measured(20.0, step=20, sample=160)).notes)  # fmt: skip


def ran(command: str, factors: list[float], *, calls: int = 10) -> DiffSide:
    """A run of a command whose operators take so many times 10 ms, in steps that do not scatter."""
    given = table({f"op{i}": f for i, f in enumerate(factors)}, steps=[sum(factors)] * 4)
    rows = [dataclasses.replace(r, time_s=0.01 * r.energy_j, calls=calls) for r in given.ops]
    side = side_of(dataclasses.replace(given, ops=rows))
    return dataclasses.replace(side, command=command.split(), name=command)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("python t.py --batch 32", "python t.py --batch 64", "--batch 32 before, --batch 64 after"),
        ("python t.py --batch=32", "python t.py --batch 64 -v", "--batch 32 before, --batch 64 -v after"),
        ("python t.py", "python t.py --batch 64", "only --batch 64 after"),
        ("python t.py -v --batch 32", "python t.py --batch=32 -v", None),
        ("", "python t.py --batch 64", None),
        ("t.py", "t.py --batch 64", "only --batch 64 after"),
        ("/usr/bin/python3.12 t.py --x", "t.py --x", None),
        ("t.py --amp data.txt", "t.py data.txt --amp", None),
    ],
)
def test_arguments_that_differ_are_named_first(before: str, after: str, said: str | None) -> None:
    found = analyze.diff(ran(before, [1.0] * 9), ran(after, [2.0] * 9))
    assert found.commands_differ == (said is not None) == ("the commands differ" in found.verdict().text)
    assert said is None or f"the commands differ: {said}. " in found.notes[0]
    assert said is None or found.notes[0].replace("'", "&#x27;") in page(found).split("largest first")[0]


def test_the_command_of_a_run_file_is_known(tmp_path: Path) -> None:
    assert side_of(table({"mm": 1.0})).command == ()
    synthetic_run.make(4).write(tmp_path / "c.tessera", command=["python", "t.py", "--batch", "64"]).close()
    assert side_of(tmp_path / "c.tessera").command == ["python", "t.py", "--batch", "64"]


def test_a_machine_that_changed_is_told_from_a_program_that_did() -> None:
    def notes(before: list[float], after: list[float], **more: int) -> list[str]:
        found = analyze.diff(ran("python t.py", before), ran("python t.py", after, **more))
        return [n for n in found.notes if "the machine" in n]

    slow = [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 18.0, 1.0]  # nearly all
    (said,) = notes([1.0] * 9, slow)
    assert "8 of 9 ops were slower, half of them 5 to 8 times" in said
    assert "faster" in notes(slow, [1.0] * 9)[0]
    assert not notes([1.0] * 9, [4.0] * 3 + [1.0] * 6)  # some operators: that is the program
    assert not notes([1.0] * 9, slow, calls=20)  # it calls them more often
    assert not notes([1.0] * 3, [4.0] * 3)  # too few to tell


def test_the_verdict_of_a_row_is_not_cut_and_large_shares_are_factors() -> None:
    shown = page(analyze.diff(table({"mm": 1.0}), table({"mm": 2.0})))
    assert ".sort td:last-child { white-space: normal" in shown
    assert percent(1.6) == "+160%" and percent(1307.8) == "1,309 x"


@pytest.mark.parametrize(
    ("calls", "said"), [((84.0, 84.0), "84"), ((12_000.0, 6.0), "12,000 → 6"), ((84.5, 1 / 3), "84.5 → 0.33")]
)
def test_calls_are_whole_numbers_or_have_a_point(calls: tuple[float, float], said: str) -> None:
    change = analyze.diff(table({"mm": 1.0}), table({"mm": 1.0})).rows[0]
    assert calls_text(dataclasses.replace(change, before_calls=calls[0], after_calls=calls[1])) == said


def test_kernels_are_offered_only_where_both_have_them(run: Callable[..., Any], tmp_path: Path) -> None:
    for kernels in (True, False):
        files = []
        for name, joules in (("a", 5.0), ("b", 9.0)):
            found = table({"mm": joules})
            found = found if kernels else dataclasses.replace(found, kernels=[])
            files.append(saved(tmp_path / f"{name}.json", found.to_json()))
        a, b = files
        assert ("--by kernels" in run(a, a, a, "--", b, b, b).output) == kernels


def test_new_and_vanished_rows_and_the_order() -> None:
    found = analyze.diff(thrice(table({"mm": 5.0, "old": 2.0})), thrice(table({"mm": 5.05, "new": 9.0})))
    assert [(r.name, r.state) for r in found.rows][:3] == [("new", "new"), ("old", "vanished"), ("mm", "both")]
    assert not found.rows[2].significant and found.rows[0].significant and found.rows[0].share_j is None
    assert found.matched == (pytest.approx(6 / 8), pytest.approx(6.05 / 15.05))


def test_steps_are_compared_by_the_step_and_scatter_counts() -> None:
    rng = np.random.default_rng(0)
    few = table(
        {"mm": 9.0},
        steps=(1.0 + 0.02 * rng.normal(size=10)).tolist(),
        walls=(0.1 + 0.001 * rng.normal(size=10)).tolist(),
    )
    many = table({"mm": 39.0}, steps=(1.0 + 0.02 * rng.normal(size=40)).tolist(), seconds=4.0)
    found = analyze.diff(few, many)
    assert found.per == "step" and found.work == (10.0, 40.0)
    assert not found.significant and found.total.after_j == pytest.approx(1.0, abs=0.02)
    assert found.whole.after_j == 40.0 and math.isnan(found.whole.error_j), "whole runs were measured once"
    assert (
        found.rows[0].before_calls == pytest.approx(1.0, abs=0.01) and abs(found.total.change_s) <= found.total.error_s
    )
    calm = analyze.diff(table({"mm": 9.0}, steps=[1.0] * 10), table({"mm": 9.0}, steps=[1.03] * 10))
    wild = analyze.diff(table({"mm": 9.0}, steps=[0.5, 1.5] * 5), table({"mm": 9.0}, steps=[0.53, 1.53] * 5))
    assert calm.significant and not wild.significant and wild.total.error_j > 5 * calm.total.error_j


def exact(given: EnergyTable) -> EnergyTable:
    steps = [dataclasses.replace(s, error_j=0.0) for s in given.steps]
    return dataclasses.replace(given, error_j=0.0, steps=steps)


def test_intervals_of_steps_hold() -> None:
    """Two runs of one program differ by less than the half-width nine times of ten."""
    rng, outside = np.random.default_rng(4), 0
    for _ in range(400):
        # The scatter alone: a sensor without error of its own.
        runs = [table({"mm": 19.0}, steps=rng.normal(1.0, 0.05, 20).tolist()) for _ in range(2)]
        outside += analyze.diff(*map(exact, runs)).significant
    assert 0.03 < outside / 400 < 0.15  # half-widths in quadrature are a little wide for t-intervals


def test_a_dear_first_step_is_left_out_and_said() -> None:
    found = analyze.diff(table({"mm": 9.0}, steps=[30.0, *[1.0] * 9]), table({"mm": 9.0}, steps=[1.0] * 10))
    assert found.total.before_j == 1.0 and any("without step_0" in note for note in found.notes)


def test_numbered_steps_are_no_regions() -> None:
    a = dataclasses.replace(table({"mm": 9.0}, steps=[1.0] * 3), regions=[row("step_0", 1.0), row("forward", 2.0)])
    assert [r.name for r in analyze.diff(a, a, by="regions").rows] == ["forward"]


def test_views_and_what_is_missing() -> None:
    a, b = table({"mm": 5.0}), table({"mm": 6.0})
    assert [r.name for r in analyze.diff(a, b, by="kernels").rows] == ["k_mm", "idle"]
    assert analyze.diff(a, b, by="modules").by == "ops"
    assert "neither side has modules: rows are ops" in analyze.diff(a, b, by="modules").note
    only = analyze.diff(a, measured(5.0))
    assert not only.rows and "only the total can be compared" in only.note
    with pytest.raises(ArgumentError, match="by='colour' is not known"):
        analyze.diff(a, b, by="colour")


# -- reports and predictions ----------------------------------------------------------------------------------------


def test_reports_diff_as_before() -> None:
    a = predicted({"conv1.convolution": ("conv", 1.0), "fc.addmm": ("gemm", 2.0)})
    b = predicted({"conv1.convolution": ("conv", 0.5), "fc.addmm": ("gemm", 2.0)}, device="b200")
    found = a.diff(b)
    assert found.before == "net on h200" and found.after == "net on b200"
    assert [c.name for c in found.components] == ["compute", "memory", "static"]
    assert found.components[0].change_j == pytest.approx(-0.25)
    assert found.subgraphs[0].name == "conv1.convolution" and found.subgraphs[0].significant
    assert not found.subgraphs[1].significant and not found.note
    runs = measured(100.0, regions={"fwd": 60.0}).diff(measured(120.0, regions={"fwd": 80.0}))
    assert runs.subgraphs[0].name == "fwd" and not runs.total.significant and not runs.components


def test_work_both_did_is_the_unit() -> None:
    found = measured(100.0, sample=10.0).diff(measured(400.0, sample=40.0, token=1e6))
    assert found.per == "sample" and found.total.before_j == 10.0 and not found.significant  # type: ignore[attr-defined]
    whole = analyze.diff(measured(100.0), measured(100.0, sample=40.0))
    assert whole.per == "run" and "no steps" in whole.note


def test_a_prediction_is_matched_with_a_run_by_operator_then_kind() -> None:
    guess = predicted(
        {"a.addmm": ("gemm", 1.0), "a.mm_backward": ("gemm", 2.0), "sdpa": ("attention", 1.0),
         "x.gelu": ("elementwise", 0.5), "n.rms_norm": ("norm", 0.2), "fft": ("fft", 0.3)}, step=1.0,
    )  # fmt: skip
    run = table(
        {"aten::addmm": 10.0, "aten::mm": 21.0, "aten::_scaled_dot_product_flash_attention": 9.0, "aten::mul": 4.0,
         "aten::native_layer_norm": 2.0, "aten::sort": 1.0}, steps=[4.8] * 10,
    )  # fmt: skip
    found = analyze.diff(guess, run)
    rows = {r.name: r for r in found.rows}
    assert found.per == "step" and found.basis == ("predicted", "measured")
    assert rows["mm"].before_j == 2.0 and rows["mm"].after_j == pytest.approx(2.1) and rows["mm"].state == "both"
    assert rows["sdpa"].after_j == pytest.approx(0.9)
    assert rows["other elementwise"].before_j == 0.5 and rows["other norm"].after_j == pytest.approx(0.2)
    assert rows["fft"].state == "vanished" and rows["sort"].state == "new" and rows["idle"].state == "unstated"
    assert found.matched == (pytest.approx(4.7 / 5.0), pytest.approx(4.6 / 4.8))
    back = analyze.diff(run, guess)
    turned = {r.name: -r.change_j for r in found.rows}
    assert {r.name: r.change_j for r in back.rows} == pytest.approx(turned, nan_ok=True)
    assert "rows that both runs have contain 94.0% of the joules" in text(found)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("aten::mm", "mm"), ("aten::add_", "add"), ("aten::_foreach_add_", "_foreach_add_"),
        ("aten::_cudnn_attention_backward", "sdpa_backward"), ("aten::_cudnn_attention_forward", "sdpa"),
        ("aten::_scaled_dot_product_flash_attention_backward", "sdpa_backward"), ("sdpa", "sdpa"),
        ("aten::cudnn_convolution", "convolution"), ("aten::convolution_backward", "convolution_backward"),
    ],
)  # fmt: skip
def test_operators_have_one_name(name: str, plain: str) -> None:
    assert plain_operator(name) == plain


# -- what can be given ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    synthetic_run.make(60).write(folder / "a.tessera").close()
    synthetic_run.make(50, data_ms=14.0, seed=3).write(folder / "b.tessera").close()
    return folder / "a.tessera", folder / "b.tessera"


def saved(path: Path, data: Any) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else msgspec.json.encode(data))
    return path


def test_run_files_are_read(files: tuple[Path, Path]) -> None:
    found = analyze.diff(*files)
    assert found.per == "step" and found.work == (60.0, 50.0) and "a.tessera" in found.before
    assert found.significant and found.total.change_j > 0.5  # 8 ms more at 118 W
    assert next(r for r in found.rows if r.name == "idle").significant
    assert found.total.significant_s and found.total.change_s == pytest.approx(8e-3, rel=0.15)


def test_what_our_commands_print_is_read(files: tuple[Path, Path], tmp_path: Path) -> None:

    from tessera.analyze.answer import answer
    from tessera.profile.runfile import RunFile

    with RunFile(files[0]) as run:
        spent = run.recording().energy()
        told = {"run": "a", "crashed": False, **spent.to_json(), "answer": answer(with_table(run, spent)).to_dict()}
    found = analyze.diff(saved(tmp_path / "report.json", told), files[0])
    assert found.total.change_j == pytest.approx(0.0, abs=1e-6) and "python train.py" in found.before
    assert not any(r.significant for r in found.rows) and len(found.rows) > 5
    bare = saved(tmp_path / "attribute.json", json.dumps(spent.to_json(), indent=1, default=float).encode())
    assert analyze.diff(bare, spent).total.change_j == pytest.approx(0.0, abs=1e-6)

    guess = predicted({"a.addmm": ("gemm", 1.0)}, step=1.0)
    stored = saved(tmp_path / "predict.json", report_json(guess).encode())
    assert analyze.diff(stored, guess).total.change_j == 0.0
    assert analyze.diff(stored, guess).rows[0].kind == "gemm"
    run_json = {"returncode": 0, "report": measured(100.0, step=10.0)}
    assert analyze.diff(saved(tmp_path / "measure.json", run_json), guess).total.before_j == 10.0
    unknown = measured(math.nan)
    assert math.isnan(analyze.diff(saved(tmp_path / "nan.json", {"report": unknown}), unknown).total.change_j)


def test_scopes_and_dictionaries_are_read() -> None:
    class Scope(EnergyScope):
        def __init__(self) -> None:
            pass

        def report(self) -> EnergyReport:
            return measured(100.0)

    assert analyze.diff(thrice(Scope()), thrice(measured(130.0))).significant
    assert analyze.diff({"report": msgspec.to_builtins(measured(100.0))}, measured(100.0)).total.change_j == 0.0


def test_a_trace_without_power_is_compared_by_time(files: tuple[Path, Path]) -> None:
    slow, fast = synthetic_run.make(12).timeline, synthetic_run.make(12, data_ms=1.0).timeline
    found = analyze.diff(slow, fast)
    assert math.isnan(found.total.change_j) and not found.significant
    assert found.total.significant_s and found.total.share_s == pytest.approx(-0.24, abs=0.05)
    verdict = found.verdict()
    assert verdict.metric == "time" and "less time per step, more than noise" in verdict.text
    assert "joules are not known" in found.verdict("energy").text
    assert found.rows[0].name == "idle" and "only time is known" in found.note
    mixed = analyze.diff(slow, synthetic_run.make(12).table)
    assert math.isnan(mixed.total.change_j) and {r.state for r in mixed.rows} == {"both"}
    assert "unknown" in text(mixed) and check_page(page(mixed))
    assert found.to_dict()["total"]["change_j"] is None
    assert found.basis == ("timed", "timed"), "nothing was measured but time"
    assert "time only, no power" in text(found) and "; measured;" not in text(found)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"name": "x", "mode": "infer", "launch": "eager", "schema_version": 1, "rows": []}, "sweep"),
        ({"report": {"name": "x", "total": 3}}, "not a report"),
        ({"report": {"schema_version": 99, "total": {}}}, "newer Tessera"),
        ({"summary": {}}, "neither a report nor a table"),
        ({"model": "llama-3.1-8b", "time_per_output_token_s": {}}, r"predict llama-3\.1-8b --serve --on h100,h200"),
        ({"goal": "time", "best": {}, "candidates": []}, "it is a plan"),
        ({"energy_j": 1.0, "kernels": 3}, "not a report"),
        (b'{"report": ', "cannot read"),
    ],
)
def test_files_that_are_none_of_ours(data: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(RecordingError) as caught:
        analyze.diff(saved(tmp_path / "x.json", data), measured(1.0))
    said = caught.value
    assert re.search(match, f"{said.what}; {said.why}; {said.fix}")


def test_anything_else_is_refused() -> None:
    with pytest.raises(ArgumentError, match="int is not a recording"):
        analyze.diff(3, measured(1.0))


# -- shown ----------------------------------------------------------------------------------------------------------


def test_json_and_frame() -> None:
    found = analyze.diff(table({"mm": 5.0}), table({"mm": 9.0, "new": 1.0}))
    data = json.loads(found.to_json())
    assert data["total"]["change_j"] == 5.0 and data["rows"][0]["name"] == "mm" and data["rows"][1]["state"] == "new"
    assert data["total"]["error_s"] is None, "one run each has no interval in time"
    frame = found.to_frame()
    assert len(frame) == 3 and {"name", "change_j", "error_j", "significant", "share_s"} <= set(frame.columns)


def test_numbers_in_one_prefix() -> None:
    assert quantity(-0.486, 0.111, "J", signed=True) == "-486 ± 111 mJ"
    assert quantity(0.0001, 1.2, "J", signed=True) == "0.0 ± 1.2 J"
    assert quantity(1.5, math.nan, "s") == "1.5 s" and quantity(math.nan, 1.0, "J") == "unknown"
    assert quantity(600.0, 3.0, "s") == "10 min 00 s"
    assert quantity(-3e-18, 3e-18, "s", signed=True) == "0 s", "rounding is no change"
    assert quantity(-3e-18, 1e-6, "s", signed=True) == "0.0 ± 1.0 µs"
    assert (
        percent(0.5) == "+50.0%"
        and percent(0.012) == "+1.2%"
        and percent(None) == "-"
        and percent(None, state="new") == "new"
    )


def test_the_screen_ends_with_the_verdict() -> None:
    found = analyze.diff(thrice(table({"mm": 5.0, "add": 1.0})), thrice(table({"mm": 9.0, "add": 1.01})))
    shown = text(found)
    assert (
        "before, 3 runs  →  after, 3 runs" in shown
        and "+4.00 ± 0.14 J" in shown
        and shown.splitlines()[-1].startswith("verdict")
    )
    assert "more energy, more than noise" in shown.splitlines()[-1]
    assert str(found) == shown
    assert all(len(line) <= 60 for line in text(found, width=60).splitlines() if "→" in line)


@pytest.mark.parametrize("width", [40, 50, 60, 72, 80])
def test_no_figure_is_cut_on_a_narrow_screen(width: int) -> None:
    found = analyze.diff(thrice(table({"mm": 125.0})), thrice(table({"mm": 125.001})))
    lines = text(found, width=width).splitlines()
    figures = lines[lines.index("") + 1 :]
    figures = figures[: figures.index("")]
    assert not [line for line in figures if "…" in line or "..." in line or len(line) > width], figures
    told = " ".join(figures).split()
    assert {"noise:", "within", "interval"} <= set(told)
    assert "before" in told or any(line.startswith("not shown: before") for line in figures)


def test_pages_need_nothing_but_themselves() -> None:
    evil = table({EVIL: 5.0, "aten::add": 1.0}, steps=[3.0] * 4)
    for by in ("ops", "kernels"):
        found = analyze.diff(evil, table({"aten::add": 3.0}, steps=[2.0] * 5), by=by)
        for html in (page(found), f"<html>{card(found)}</html>", f"<html>{found._repr_html_()}</html>"):
            check_page(html)
            assert "<script>alert" not in html and "alert(" in html
    assert "<tr class=noise>" in page(analyze.diff(evil, evil))


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run() -> Callable[..., Any]:
    return functools.partial(invoke, command)


def test_exit_codes_tell_a_regression_from_noise(run: Callable[..., Any], files: tuple[Path, Path]) -> None:
    worse = run(*files, "--fail-above", "5%")
    assert worse.code == 1 and "FAILED" in worse.output and "above the limit of 5.0%" in worse.output
    assert worse.output.rstrip().splitlines()[-1].startswith("next     tessera diff")
    assert run(*files).code == 0
    assert run(*files, "--fail-above", "90%").code == 0
    assert run(files[1], files[0], "--fail-above", "5%").code == 0, "better is no failure"
    assert run(files[0], files[0], "--fail-above", "0%").code == 0
    slower = run(*files, "--fail-above", "5%", "--metric", "time")
    assert slower.code == 1 and "more time per step" in slower.output


def test_noise_above_the_limit_does_not_fail(run: Callable[..., Any], tmp_path: Path) -> None:
    a, b = measured(100.0), measured(102.0)
    paths = [saved(tmp_path / f"{i}.json", {"returncode": 0, "report": r}) for i, r in enumerate((a, b))]
    found = run(*paths, "--fail-above", "1%")
    assert found.code == 0 and "noise" in found.output
    undecided = run(*paths, "--fail-above", "0%", "--metric", "time")
    assert undecided.code == 0


def test_measured_commands_that_differ_are_told(tmp_path: Path) -> None:
    a, b = (
        saved(tmp_path / f"{n}.json", {"returncode": 0, "command": ["a.py", "--n", n], "report": measured(100.0)})
        for n in "12"
    )
    assert any(note.startswith("the commands differ: --n 1 before, --n 2 after") for note in analyze.diff(a, b).notes)


def test_json_and_page_of_the_command(run: Callable[..., Any], files: tuple[Path, Path], tmp_path: Path) -> None:
    found = run(*files, "--by", "kernels", "--json", "--fail-above", "5%", "--html", tmp_path / "d.html")
    data = json.loads(found.output[found.output.index("{") : found.output.rindex("}") + 1])
    assert found.code == 1 and data["verdict"]["failed"] and data["by"] == "kernels"
    check_page((tmp_path / "d.html").read_text())


def test_usage_errors_are_2(run: Callable[..., Any], files: tuple[Path, Path], tmp_path: Path) -> None:
    broken = saved(tmp_path / "broken.json", b'{"report": ')
    assert run(broken, files[0]).code == 2
    assert run(*files, "--html", tmp_path / "no" / "where.html").code == 2
    near = run(files[0], files[0].with_name("b.tesser"))
    assert near.code == 2 and "did you mean 'b.tessera'?" in near.output and "Usage:" not in near.output
    lacking = run(*files, "--power-a", tmp_path / "none.csv")
    assert lacking.code == 2 and "there is no file" in lacking.output and "power log" in lacking.output
    for words in ((*files, "--by", "colour"), (*files, "--fail-above", "much"),
                  (*files, "--fail-above", "5")):  # fmt: skip
        assert isinstance(run(*words).code, ArgumentError)


def test_power_logs_beside_traces(run: Callable[..., Any], tmp_path: Path) -> None:
    made = synthetic_run.make(12)
    with made.write(tmp_path / "a.tessera") as recorded:
        recorded.power().to_csv(tmp_path / "a.csv")
    events = [
        {"ph": "X", "cat": "kernel", "name": f"k{i % 2}", "pid": 0, "tid": 7,
         "ts": synthetic_run.START_NS / 1000 + i * 1000, "dur": 900.0,
         "args": {"device": 0, "stream": 7}} for i in range(100)
    ]  # fmt: skip
    trace = saved(tmp_path / "t.json", {"schemaVersion": 1, "traceEvents": events})
    found = run(trace, trace, "--by", "kernels", "--power-a", tmp_path / "a.csv", "--power-b", tmp_path / "a.csv")
    assert found.code == 0 and "no change: " in found.output and "--power-a" in found.output
    assert analyze.diff(trace, trace, by="kernels").verdict().metric == "time"
    for before, said in ((tmp_path / "a.tessera", "its own power samples"), (measured(1.0), "states its joules")):
        with pytest.raises(ArgumentError, match=said):
            analyze.diff(before, before, power_a=tmp_path / "a.csv")


def test_a_change_is_a_line_of_the_old_kind() -> None:
    line = analyze.diff(measured(1.0), measured(2.0)).total
    assert isinstance(line, RowChange) and line.change_j == 1.0 and line.share_j == 1.0


@pytest.mark.parametrize("by_step", [True, False])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_idle_of_a_trace_is_that_of_all_its_devices(tmp_path: Path, devices: int, by_step: bool) -> None:
    """Each device computes 60 of every 100 ms, on two streams at once for 20 of them; the steps follow each other."""
    events: list[dict[str, object]] = []
    for step in range(4):
        at = 100e3 * step
        if by_step:
            row = {"name": f"ProfilerStep#{step}", "cat": "user_annotation", "ts": at, "dur": 100e3, "pid": 9, "tid": 9}
            events.append({"ph": "X", **row})
        for device in range(devices):
            for stream, (begin, end) in enumerate([(0, 40e3), (20e3, 60e3)], 7):
                launch = len(events) + 1
                call = {
                    "name": "cudaLaunchKernel",
                    "cat": "cuda_runtime",
                    "ts": at + begin,
                    "dur": 1,
                    "pid": 9,
                    "tid": 9,
                }
                kernel = {"name": f"k{stream}", "cat": "kernel", "ts": at + begin, "dur": end - begin, "pid": device}
                args = {"correlation": launch, "device": device, "stream": stream}
                events += [
                    {"ph": "X", **call, "args": {"correlation": launch}},
                    {"ph": "X", **kernel, "tid": stream, "args": args},
                ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    idle = next(row for row in analyze.diff(path, path).rows if row.name == "idle")
    gaps = 3  # without steps, the trace ends with its last kernel
    if by_step:
        gaps = 1 if devices > 1 else 0.75  # of one device, a step lasts until its next one begins
    assert idle.before_s == pytest.approx(gaps * 0.04 * devices, rel=0.01)
