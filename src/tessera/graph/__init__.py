"""The program as data: capture, cost, partition; and `profile(step_fn)`, what its operators took when they ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .ir import Graph as Graph
from .ir import Op as Op
from .ir import Storage as Storage
from .ir import TensorSpec as TensorSpec

if TYPE_CHECKING:
    from ..analyze.tiles import GraphProfile


def profile(step_fn: Callable[[], Any], *, steps: int = 5, warmup: int = 2, path: str | None = None) -> GraphProfile:
    """Run a step a few times and say what each operator took: latency, occupancy, tiles, joules, what was fused.

    >>> print(graph.profile(step_fn))

    The run file is kept at `path` where one is given.
    """
    from ..analyze.steps import profile_steps

    return profile_steps(step_fn, steps=steps, warmup=warmup, path=path)
