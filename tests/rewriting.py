"""Fixtures of the tests of `tessera.optimize`: a fresh compiler, and variants without Inductor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tessera.rewrite import variants
from tessera.rewrite.compilation import Compilation
from tessera.rewrite.inductor import Pass, apply_passes, hold_graph


def make_recorder(compilation: Compilation, passes: Sequence[Pass] = ()) -> Any:
    """A backend that runs the program as it is after our passes and compiles nothing."""

    def run_graph(module: Any, inputs: Sequence[Any]) -> Any:
        apply_passes(module, passes, compilation)
        return hold_graph(module.forward, module, compilation)

    return run_graph


class ToldClock:
    """A clock whose time passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def measure_s(self, begin: float, end: float) -> float:
        return end - begin


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture(name="uncompiled")
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants that run our passes and then the graph as it is: everything but Inductor, in a tenth of the time."""
    monkeypatch.setattr(
        variants, "make_backend", lambda compilation, passes, options: make_recorder(compilation, passes)
    )


def in_turns(*values: Any) -> list[Any]:
    """What variants measure in turns, where each measures the same every time."""
    there, back = list(values), list(values)[::-1]
    return [*there, *back] * 2
