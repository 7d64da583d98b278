"""The program as data: capture, cost, partition. `profile(step_fn)` measures its operators; `optimize` rewrites it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .ir import Graph as Graph
from .ir import Op as Op
from .ir import Storage as Storage
from .ir import TensorSpec as TensorSpec
from .rewrites import Rewrite as Rewrite

if TYPE_CHECKING:
    from ..analyze.graph_profile import GraphProfile
    from ..rewrite.optimize import optimize as optimize


def profile(step_fn: Callable[[], Any], *, steps: int = 5, warmup: int = 2, path: str | None = None) -> GraphProfile:
    """Run a step a few times and report each operator's latency, occupancy, tiles, joules and fusion.

    >>> print(graph.profile(step_fn))

    For programs made by `tessera.optimize` it lists the rewrites and what they save; for others, what the names of
    kernels show. The run file is kept at `path` if one is given.
    """
    from ..analyze.graph_profile import profile_steps

    return profile_steps(step_fn, steps=steps, warmup=warmup, path=path)


def __getattr__(name: str) -> Any:
    if name == "optimize":  # the same as tessera.optimize, which is in a later room
        from ..rewrite.optimize import optimize

        return optimize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
