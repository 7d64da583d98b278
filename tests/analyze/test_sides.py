"""Two predictions by one model: what they err alike is no error of their difference, what a kernel errs alone is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera
from tessera import analyze
from tessera.analyze import compare
from tessera.estimate.prediction_errors import SMALLEST_ERROR, PredictionErrors, difference_errors
from tessera.estimate.prediction_report import SHARED
from tessera.report.predict import report_json
from tessera.schema import EnergyReport

torch = pytest.importorskip("torch")
nn = torch.nn


def net(*widths: int) -> Any:
    layers = [nn.Linear(a, b, device="meta", dtype=torch.bfloat16) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


def predicted(*widths: int, on: str = "h200", launch: Any = "graph", rows: int = 4096) -> EnergyReport:
    inputs = torch.empty(rows, widths[0], device="meta", dtype=torch.bfloat16)
    return tessera.predict(net(*widths), inputs, on=on, launch=launch, calibration=None)


def apart(a: EnergyReport, b: EnergyReport) -> float:
    """The half-width of a difference whose sides err independently, relative to the first."""
    return math.hypot(a.total.error_j, b.total.error_j)


@pytest.fixture(scope="module")
def twenty() -> EnergyReport:
    return predicted(*[2048] * 21)


def test_one_layer_of_twenty_is_found(twenty: EnergyReport, tmp_path: Path) -> None:
    fewer = predicted(*[2048] * 20)
    found = analyze.diff(twenty, fewer)
    assert found.total.share_j == pytest.approx(-0.05, abs=0.01)
    assert abs(found.total.change_j) < apart(twenty, fewer)  # independent errors would call it noise
    assert found.total.significant and found.total.significant_s and "one model" in found.notes[0]
    assert [r.name for r in found.rows if r.significant] == ["19.addmm"]
    assert found.rows[0].state == "vanished" and found.rows[1].error_j < 0.002 * found.rows[1].before_j
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report in zip(paths, (twenty, fewer), strict=True):
        path.write_text(report_json(report))
    stored = analyze.diff(*paths)
    assert stored.total.error_j == found.total.error_j and stored.total.significant


def test_another_shape_within_the_scatter_is_noise(twenty: EnergyReport) -> None:
    """All layers a little narrower: other kernels, and a fit knows two shapes' ratio no better than its scatter."""
    narrower = predicted(2048, *[2000] * 19, 2048)  # 2056 would need a ninth column of tiles
    found = analyze.diff(twenty, narrower)
    assert 0.001 < abs(found.total.share_j or 0.0) < 0.1
    assert not found.total.significant and not found.total.significant_s
    assert found.total.error_j < apart(twenty, narrower)


def test_the_same_prediction_twice_differs_by_nothing(twenty: EnergyReport) -> None:
    found = analyze.diff(twenty, twenty)
    assert found.total.error_j == pytest.approx(SMALLEST_ERROR * twenty.total.energy_j) and not found.significant
    assert not any(r.significant or r.significant_s for r in found.rows)
    assert "no change" in found.verdict().text and "cannot see" not in found.verdict().text


def test_a_larger_batch_of_the_same_layers_shares_the_level_of_its_kind(twenty: EnergyReport) -> None:
    found = analyze.diff(twenty, predicted(*[2048] * 21, rows=8192))
    kind = SHARED * (found.whole.after_error_j - found.whole.before_error_j)
    assert found.per == "sample" and found.whole.significant
    assert kind < found.whole.error_j < math.hypot(found.whole.before_error_j, found.whole.after_error_j)


@pytest.mark.parametrize("other", [{"on": "a100"}, {"launch": "eager"}])
def test_another_chip_or_launch_errs_on_its_own(twenty: EnergyReport, other: dict[str, Any]) -> None:
    theirs = predicted(*[2048] * 20, **other)
    found = analyze.diff(twenty, theirs)
    assert found.total.error_j == pytest.approx(apart(twenty, theirs))
    assert not any("one model" in note for note in found.notes)


def test_a_calibration_of_this_machine_is_another_model(twenty: EnergyReport) -> None:
    assert twenty.prediction is not None
    said = {**twenty.prediction.provenance, "power": "calibrated here"}
    theirs = dataclasses.replace(twenty, prediction=dataclasses.replace(twenty.prediction, provenance=said))
    assert analyze.diff(twenty, theirs).total.error_j == pytest.approx(apart(twenty, theirs))


def test_host_bound_predictions_share_their_host() -> None:
    """Small kernels launched one by one: the host's level is in both, the operators of one side scatter."""
    many, few = predicted(*[64] * 41, launch="eager", rows=8), predicted(*[64] * 37, launch="eager", rows=8)
    assert many.prediction is not None and many.prediction.bound == "host"
    found = analyze.diff(many, few)
    assert found.total.share_s == pytest.approx(-0.1, abs=0.02) and found.total.significant_s
    assert abs(found.total.change_s) < many.prediction.error_s
    assert analyze.diff(many, many).total.error_s == pytest.approx(SMALLEST_ERROR * many.total.time_s)


KERNELS = st.dictionaries(
    st.tuples(st.sampled_from(["gemm", "norm", "copy"]), st.sampled_from(["mm", "add"]),
              st.sampled_from([1.0, 2.0]), st.integers(0, 3)),
    st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=8,
)  # fmt: skip


@given(a=KERNELS, b=KERNELS, common=KERNELS)
def test_a_difference_knows_no_order_and_nothing_of_what_both_have(a: Any, b: Any, common: Any) -> None:
    one, two, both = (
        PredictionErrors(a),
        PredictionErrors(b),
        PredictionErrors(common),
    )
    wide = difference_errors(one, two)
    assert difference_errors(two, one) == pytest.approx(wide)
    assert difference_errors(one + both, two + both) == pytest.approx(wide, abs=1e-12)
    assert difference_errors(one, one) == (0.0, 0.0)
    for which in (0, 1):  # each kind all alike, and of a sign, is the widest there is
        widest = sum(e[which] for e in (*a.values(), *b.values()))
        assert wide[which] <= widest * (1 + 1e-9) + 1e-12


def test_a_report_that_is_a_bomb_or_cut_is_refused(tmp_path: Path) -> None:
    import gzip

    from tessera.analyze.compare import _is_json, _read_json
    from tessera.errors import RecordingError

    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b'{"report":' + b" " * (20 << 20)))
    with pytest.raises(RecordingError, match="bytes of JSON"):
        _read_json(path)
    path.write_bytes(path.read_bytes()[:500])
    assert _is_json(path)  # its start can be read
    with pytest.raises(RecordingError, match="cannot read"):
        _read_json(path)


def _set(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    return {**data, key: _set(data[key], rest, value) if rest else value}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("run.energy_j", {}),
        ("run.error_j", []),
        ("run.time_s", 5e-324),
        ("answer.name", 5e-324),
        ("answer.per_work", [{"unit": 1, "amount": "x"}]),
        ("answer.per_work", [{"unit": "token", "amount": 5e-324}]),
        ("answer", [1]),
        ("time_s", 5e-324),
        ("time_s", -1),
        ("time_s", 0),
        ("energy_j", 1e308),
    ],
)
def test_json_of_a_report_with_impossible_values_is_refused(path: str, value: Any) -> None:
    from tessera.errors import RecordingError

    joules = {"energy_j": 2.0, "error_j": 0.1, "time_s": 1.0}
    row = {"name": "k", "kind": "kernel", "calls": 1, "share": 1.0, **joules}
    table = {**joules, "idle_j": 0.0, "idle_error_j": 0.0, "busy_s": 1.0, "kernels": [row]}
    good = {**table, "run": {**joules, "time_s": 3.0}, "answer": {"name": "python a.py", "per_work": []}}
    assert analyze.diff(good, good).total.change_j == 0
    with pytest.raises(RecordingError, match="is not a report"):
        analyze.diff(good, _set(good, path, value))


def test_a_command_of_half_a_megabyte_is_not_copied_for_each_letter(monkeypatch):
    monkeypatch.setattr("shlex.split", lambda text: pytest.fail(f"{len(text)} letters"))
    assert compare._words("python " + "x" * 500_000) == ["python", "x" * 500_000]
