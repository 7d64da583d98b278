"""The cost of a search: how long a compilation will take, and after how many calls the search has paid for itself."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Protocol

# Seconds of torch.compile: its first use in a process loads the compiler, and every layer adds some; a backward pass
# doubles the layers. GPT-2's training took 14-32 s on an H200, BERT 10-21 s, ResNet-50 6-19 s, each with about 150
# layers (results/tune.json, optimize.json). A compilation cannot be stopped half-way, so it is better to guess too
# high.
_LOAD_S, _BASE_S, _LAYER_S = 4.0, 4.0, 0.08


class CallCost(Protocol):
    """The seconds and joules of a call, if they are known."""

    @property
    def time_s(self) -> float | None:
        """Return the seconds of a call."""

    @property
    def energy_j(self) -> float | None:
        """Return the joules of a call."""


def guess_compile_s(modules: Sequence[Any], *, trains: bool) -> float:
    """Return how long the first compilation of a program will take."""
    layers = sum(1 for root in modules for module in root.modules() if not any(module.children()))
    loaded = "torch._inductor.compile_fx" in sys.modules
    return (0.0 if loaded else _LOAD_S) + _BASE_S + _LAYER_S * layers * (2 if trains else 1)


def count_calls_to_pay(spent_s: float, spent_j: float | None, before: CallCost, after: CallCost) -> int | None:
    """Return after how many calls a search has saved what it took: in joules if they are known, else in seconds.

    Returns None if a call saves nothing.
    """
    spent, old, new = spent_j, before.energy_j, after.energy_j
    if spent is None or old is None or new is None:
        spent, old, new = spent_s, before.time_s, after.time_s
    return math.ceil(spent / (old - new)) if old is not None and new is not None and old > new else None
