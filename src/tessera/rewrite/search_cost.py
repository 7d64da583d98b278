"""What a search costs: how long a compilation will take, before it is begun, and after how many calls it has paid."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Protocol

# Seconds of torch.compile: its first use in a process loads the compiler, and every layer adds some; a backward pass
# makes it twice as many. GPT-2's training took 14-32 s on an H200, BERT 10-21 s, ResNet-50 6-19 s, each with about 150
# layers (results/tune.json, optimize.json). It cannot be stopped half-way, so a guess too high is the better one.
_LOAD_S, _BASE_S, _LAYER_S = 4.0, 4.0, 0.08


class CallCost(Protocol):
    """The seconds and joules of a call, where they are known."""

    @property
    def time_s(self) -> float | None:
        """Seconds."""

    @property
    def energy_j(self) -> float | None:
        """Joules."""


def guess_compile_s(modules: Sequence[Any], *, trains: bool) -> float:
    """How long the first compilation of a program will take."""
    layers = sum(1 for root in modules for module in root.modules() if not any(module.children()))
    loaded = "torch._inductor.compile_fx" in sys.modules
    return (0.0 if loaded else _LOAD_S) + _BASE_S + _LAYER_S * layers * (2 if trains else 1)


def count_calls_to_pay(spent_s: float, spent_j: float | None, before: CallCost, after: CallCost) -> int | None:
    """After how many calls a search has saved what it took: in joules where they are known, else in seconds.

    None where a call saves nothing.
    """
    spent, old, new = spent_j, before.energy_j, after.energy_j
    if spent is None or old is None or new is None:
        spent, old, new = spent_s, before.time_s, after.time_s
    return math.ceil(spent / (old - new)) if old is not None and new is not None and old > new else None
