"""The program as data: capture, cost, partition; `profile(step_fn)`, what its operators took; `optimize`, rewritten."""

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
    from ..rewrite.optimize import Optimized


def profile(step_fn: Callable[[], Any], *, steps: int = 5, warmup: int = 2, path: str | None = None) -> GraphProfile:
    """Run a step a few times and say what each operator took: latency, occupancy, tiles, joules, what was fused.

    >>> print(graph.profile(step_fn))

    Rewrites of programs made by `tessera.optimize` are listed with what they save; of others, what kernels' names tell.
    The run file is kept at `path` where one is given.
    """
    from ..analyze.steps import profile_steps

    return profile_steps(step_fn, steps=steps, warmup=warmup, path=path)


def optimize(model_or_step: Callable[..., Any], inputs: Any = None, **options: Any) -> Optimized:
    """`tessera.optimize`: apply the rewrites that pay, check them, and explain them."""
    from ..rewrite.optimize import optimize as run

    return run(model_or_step, inputs, **options)
