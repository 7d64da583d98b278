"""The sweep: every combination a row, captured once, and the choices that come out of it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from tessera.errors import ArgumentError, CaptureError, PredictionError
from tessera.estimate.predict import predict
from tessera.estimate.search import Sweep, SweepRow, batch_for, sweep

from models import Block, Residual, mlp

IMAGE = torch.empty(1, 3, 32, 32, device="meta")


@pytest.fixture(scope="module")
def found() -> Sweep:
    return sweep(
        Residual(),
        IMAGE,
        on=("a100", "h200", "jetson-orin"),
        precisions=("fp32", "bf16", "fp8"),
        batches=(1, 8, 64),
    )


def row(**fields: float | str | int | None) -> SweepRow:
    given = {"on": "a100", "precision": "bf16", "batch": 1, "time_s": 1.0, "energy_j": 1.0, **fields}
    return SweepRow(**given)  # type: ignore[arg-type]


def of(*rows: SweepRow) -> Sweep:
    return Sweep(name="m", mode="infer", launch="eager", rows=rows)


def test_every_combination_is_a_row_in_the_order_asked(found: Sweep) -> None:
    assert len(found.rows) == 27
    assert [(r.on, r.precision, r.batch) for r in found.rows[:4]] == [
        ("a100", "fp32", 1),
        ("a100", "fp32", 8),
        ("a100", "fp32", 64),
        ("a100", "bf16", 1),
    ]
    assert found.name == "Residual"


def test_what_cannot_be_is_a_row_with_its_reason(found: Sweep) -> None:
    lacking = [r for r in found.rows if r.precision == "fp8" and r.on in ("a100", "jetson-orin")]
    assert len(lacking) == 6
    for r in lacking:
        assert not r.feasible
        assert "fp8" in (r.reason or "")
        assert r.time_s is None
        assert r.energy_per_sample_j is None
        assert r.throughput_per_s is None
    assert all(r.feasible for r in found.rows if r.on == "h200")


def test_a_row_says_what_predict_says(found: Sweep) -> None:
    report = predict(Residual(), IMAGE, on="h200", precision="bf16", batch=8)
    r = next(r for r in found.rows if (r.on, r.precision, r.batch) == ("h200", "bf16", 8))
    assert r.time_s == pytest.approx(report.total_latency_s)
    assert r.energy_j == pytest.approx(report.total_energy_j)
    assert r.error_j == pytest.approx(report.total.error_j)
    assert r.energy_per_sample_j == pytest.approx(report.total_energy_j / 8)
    assert r.throughput_per_s == pytest.approx(8 / report.total_latency_s)
    assert r.average_power_w == pytest.approx(report.average_power_w)
    assert (r.compute_energy_j or 0) + (r.memory_energy_j or 0) + (r.static_energy_j or 0) == pytest.approx(r.energy_j)
    assert r.peak_memory_bytes
    assert r.bound in ("host", "compute", "memory", "overhead", "power")


def test_captures_once_per_precision_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera.graph import capture as module

    calls = []
    real = module.capture

    def counting(*args: object, **kwargs: object) -> object:
        calls.append((kwargs["precision"], kwargs["batch"]))
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "capture", counting)
    sweep(mlp(64, 64), torch.empty(1, 64), on=("a100", "h200"), precisions=("bf16", "fp8"), batches=(1, 4))
    assert calls == [("bf16", 1), ("bf16", 4)], "fp8 runs what bf16 captured, and every chip shares it"


def test_too_large_is_a_row_that_says_how_much() -> None:
    with torch.device("meta"):
        huge = nn.Linear(200_000, 200_000)
    r = sweep(huge, torch.empty(1, 200_000, device="meta"), on=("l4", "h200"), precisions=("bf16",)).rows
    assert "does not fit" in (r[0].reason or "")
    assert (r[0].peak_memory_bytes or 0) > (r[0].memory_capacity_bytes or math.inf)
    assert r[1].feasible


def test_a_batch_that_does_not_run_is_a_row() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))  # torch refuses to normalise one value
    rows = sweep(model, torch.empty(4, 8), on=("h200",), batches=(1, 4), mode="train").rows
    assert "cannot be captured" in (rows[0].reason or "")
    assert rows[1].feasible
    with pytest.raises(CaptureError):
        sweep(model, torch.empty(4, 8), on=("h200",), batches=(1,), mode="train")


def test_wrong_words_are_errors_before_anything_is_captured() -> None:
    def never(*_: object) -> None:
        raise AssertionError("captured")

    with pytest.raises(ArgumentError, match="did you mean 'a100'"):
        sweep(never, on=("a1000",))
    with pytest.raises(ArgumentError, match="did you mean 'bf16'"):
        sweep(never, on=("a100",), precisions=("bf17",))
    with pytest.raises(ArgumentError, match="on="):
        sweep(never, on=())
    with pytest.raises(ArgumentError, match="fp16"):
        sweep(never, on=("a100",), precisions=("bf16",), accuracy={"fp16": 0.7})
    with pytest.raises(ArgumentError, match="launch"):
        sweep(mlp(8, 8), torch.empty(1, 8), on=("a100",), launch="lazy")  # type: ignore[arg-type]


def test_progress_counts_every_point() -> None:
    seen: list[tuple[int, int, str]] = []
    sweep(mlp(8, 8), torch.empty(1, 8), on=("a100", "h200"), batches=(1, 2), progress=lambda *a: seen.append(a))
    assert [done for done, _, _ in seen] == [0, 1, 2, 3, 4]
    assert seen[0] == (0, 4, "a100 batch 1")


def test_pareto_is_exactly_what_nothing_beats(found: Sweep) -> None:
    front = found.pareto()
    assert front
    for r in found.feasible:
        beaten = any(
            (f.time_s or 0) <= (r.time_s or 0) * (1 + 1e-5)
            and (f.energy_per_sample_j or 0) <= (r.energy_per_sample_j or 0) * (1 + 1e-5)
            for f in front
        )
        assert beaten, "every row is on the frontier or beaten by one that is"
    energies = [r.energy_per_sample_j or 0 for r in front]
    assert energies == sorted(energies, reverse=True), "along the frontier energy falls as latency grows"


def test_pareto_weighs_accuracy_where_it_is_given() -> None:
    fast, exact = row(precision="fp8", accuracy=0.70), row(precision="bf16", energy_j=2.0, time_s=2.0, accuracy=0.76)
    worse = row(precision="int8", energy_j=1.5, time_s=1.5, accuracy=0.69)
    assert of(fast, exact, worse).pareto() == [fast, exact]
    assert of(row(precision="fp8"), row(energy_j=2.0, time_s=2.0)).pareto() == [row(precision="fp8")]


def test_equal_to_the_last_bit_is_equal() -> None:
    cheap, dear = row(time_s=1.0 + 1e-15), row(energy_j=2.0)
    assert of(cheap, dear).pareto() == [cheap]


def test_best_batch_keeps_the_latency_bound(found: Sweep) -> None:
    loose = found.best_batch()
    assert loose is not None
    assert loose.energy_per_sample_j == min(r.energy_per_sample_j or math.inf for r in found.feasible)
    r = found.best_batch(latency_s=10.0, on="jetson-agx-orin", precision="bf16")
    assert r is not None
    assert (r.on, r.precision) == ("jetson-orin", "bf16")
    assert found.best_batch(latency_s=1e-9) is None
    one, eight = row(time_s=0.001), row(batch=8, time_s=0.005, energy_j=2.0)
    assert of(one, eight).best_batch(latency_s=0.005) == eight
    assert of(one, eight).best_batch(latency_s=0.002) == one


def test_best_precision_is_the_widest_that_keeps_the_target() -> None:
    rows = [row(precision=p, energy_j=e) for p, e in (("fp32", 4.0), ("bf16", 2.0), ("fp8", 1.0))]
    assert of(*rows).best_precision(energy_per_sample_j=5.0) == rows[0]
    assert of(*rows).best_precision(energy_per_sample_j=2.5) == rows[1]
    assert of(*rows).best_precision(energy_per_sample_j=0.5) is None
    rows = [row(precision=p, energy_j=1.0, accuracy=a) for p, a in (("bf16", 0.75), ("fp16", 0.76))]
    assert of(*rows).best_precision(energy_per_sample_j=1.0) == rows[1]


def test_best_device_is_the_fastest_within_the_budget() -> None:
    rows = [row(on="jetson-orin", time_s=2.0, energy_j=1.0), row(on="h200", time_s=1.0, energy_j=3.0)]
    assert of(*rows).best_device(energy_per_sample_j=4.0) == rows[1]
    assert of(*rows).best_device(energy_per_sample_j=2.0) == rows[0]
    assert of(*rows).best_device(energy_per_sample_j=0.1) is None


def test_json_and_frame_hold_the_rows(found: Sweep) -> None:
    data = json.loads(found.to_json())
    assert len(data["rows"]) == 27
    assert sum(r["pareto"] for r in data["rows"]) == len(found.pareto())
    assert data["rows"][0]["energy_per_sample_j"] == pytest.approx(found.rows[0].energy_per_sample_j)
    pytest.importorskip("pandas")
    frame = found.to_frame()
    assert len(frame) == 27
    assert {"on", "throughput_per_s", "pareto", "reason"} <= set(frame.columns)


def test_batch_for_doubles_up_to_the_bound() -> None:
    block, inputs = Block(256), torch.empty(1, 128, 256)
    one = sweep(block, inputs, on=("a100",), precisions=("bf16",), batches=(1,)).rows[0]
    bound = 4 * (one.time_s or 0)
    best = batch_for(block, inputs, on="a100", latency_s=bound, precision="bf16", largest=64)
    assert (best.time_s or math.inf) <= bound
    assert best.batch in (1, 2, 4, 8, 16, 32, 64)
    assert (best.energy_per_sample_j or math.inf) <= (one.energy_per_sample_j or 0)
    with pytest.raises(PredictionError, match="longer than"):
        batch_for(block, inputs, on="a100", latency_s=1e-9)
    with pytest.raises(PredictionError, match="fp8"):
        batch_for(block, inputs, on="a100", latency_s=1.0, precision="fp8")


def test_batch_as_it_is_takes_that_of_the_inputs() -> None:
    r = sweep(mlp(8, 8), torch.empty(5, 8), on=("a100",)).rows[0]
    assert r.batch == 5


def test_a_sweep_prints_its_table(found: Sweep) -> None:
    assert all(row.on in str(found) for row in found.feasible) and "<Sweep" not in str(found)
