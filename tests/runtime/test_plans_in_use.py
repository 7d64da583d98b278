"""The benchmark of plans in use compares ways soundly: as many blocks each, of whole rounds of shapes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device" / "plans_in_use.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("TESSERA_CONTROL", "0")  # the script sets it: taken back afterwards
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("plans_in_use", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plans_in_use", module)
    spec.loader.exec_module(module)
    return module


def test_a_compiled_model_without_a_length_runs_in_the_models_place(script: ModuleType) -> None:
    """torch 2.11's OptimizedModule has `__len__`, which raises where the model has none: it has no truth."""

    class Compiled:
        called = 0

        def __len__(self) -> int:
            raise TypeError("Recommender does not support len()")

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.called += 1
            return model(x)

    model, compiled = torch.nn.Linear(2, 1), Compiled()
    loop = script.TrainedStep(model, [(torch.ones(3, 2), torch.ones(3, 1))], torch.nn.functional.mse_loss)
    loop.compiled = compiled
    loop.iterate(loop.step)
    assert compiled.called == 1


def test_every_way_has_as_many_blocks_of_whole_rounds(script: ModuleType) -> None:
    class Rounds(script.Loop):  # type: ignore[name-defined, misc]  # of a module that was loaded here
        period = 5

        def __init__(self) -> None: ...

        def iterate(self, call: Any) -> None:
            call()

    ready = {"eager": (Rounds(), lambda: None), "default": (Rounds(), lambda: sum(range(100_000)))}
    seen = script.measure_in_turns(ready, seconds=0.0, rounds=4)
    assert [len(blocks.ms) for blocks in seen.values()] == [4, 4]
    assert all(count % 5 == 0 for blocks in seen.values() for _, count in blocks.windows)


def test_a_search_has_paid_only_by_what_is_more_than_noise(script: ModuleType) -> None:
    ours = {"calls_before_s": 60.0, "calls_before": 50, "search_j": 1100.0, "chosen": {"compile": "default"}}
    eager = {"ms": 12.0, "j": 2.5}
    over = {"ms": -0.5, "ms_error": 0.01, "j": -0.4, "j_error": 0.01}
    assert script.count_calls_until_paid(ours, eager, over) == {"ms": 9900, "j": 1100}
    assert script.count_calls_until_paid(ours, eager, over | {"j_error": 0.5})["j"] is None
    assert script.count_calls_until_paid(ours | {"chosen": {}}, eager, over) == {"ms": None, "j": None}
    assert script.count_calls_until_paid(ours | {"search_j": None}, eager, over) == {"ms": 9900}
