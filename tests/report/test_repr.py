"""What a plain REPL shows for each result: one short line, and the joules in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera import analyze
from tessera.analyze.answer import answer
from tessera.estimate.search import Sweep, SweepRow
from tessera.profile.open_recording import open_recording
from tessera.recording import Recording
from tessera.schema import Energy, EnergyReport, Prediction

import synthetic_run

LONGEST = 300


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path: Path = tmp_path_factory.mktemp("repr") / "x.tessera"
    synthetic_run.make(3, 3).write(path).close()
    return open_recording(path)


def test_a_recording_is_not_read_to_be_shown(recording: Recording) -> None:
    with open_recording(recording.facts.path) as fresh:
        assert repr(fresh) == "<Recording x.tessera: not read yet>"
        assert "timeline" not in fresh.__dict__


def test_results_of_a_run(recording: Recording) -> None:
    table = recording.energy()
    assert repr(recording).startswith("<Recording x.tessera: ") and repr(recording).endswith(" J>")
    assert repr(recording.timeline).startswith("<Timeline ") and " rows over " in repr(recording.timeline)
    assert repr(table).startswith("<EnergyTable ") and "9 kernels" in repr(table) and "3 steps" in repr(table)
    for result in (answer(recording), analyze.breakdown(recording), analyze.advise(recording)):
        assert repr(result).startswith(f"<{type(result).__name__} ")
        assert len(repr(result)) < LONGEST and "\n" not in repr(result)
    found = analyze.diff(recording.facts.path, recording.facts.path)
    assert repr(found).endswith(f"{found.verdict().text}>") and len(repr(found)) < LONGEST
    assert repr(recording.timeline.correlate(recording.power)).startswith("<Correlation of ")


def test_reports_and_predictions() -> None:
    total = Energy(energy_j=412.3, error_j=1.8, time_s=1.0, source="nvml-samples")
    assert str(total) == "412.3 ± 1.8 J, 412 W, 1 s, nvml-samples"
    assert (
        repr(EnergyReport(name="step", total=total, by_domain={}))
        == f"<EnergyReport step: {total}; print() shows more>"
    )
    of = Prediction(
        device="h200", precision="bf16", mode="train", launch="eager", batch=8, error_s=0, device_s=0, host_s=0,
        clock=1, bound="host", average_utilization=0, wasted_energy_j=0, flops=0, hbm_bytes=0,
    )  # fmt: skip
    assert repr(of) == "<Prediction for h200: train, eager, bf16, batch 8, bound by host>"
    assert "on h200" in repr(EnergyReport(name="step", total=total, by_domain={}, prediction=of))
    unknown = Energy(energy_j=float("nan"), error_j=float("nan"), time_s=0.1, source="", coverage=0.0)
    assert str(unknown).startswith("unknown J, 100 ms")
    sweep = Sweep(name="m", mode="infer", launch="eager", rows=[SweepRow(on="h200", precision=None, batch=1)])
    assert repr(sweep) == "<Sweep of m: 1 of 1 combinations are possible>"
