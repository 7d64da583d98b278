"""A step run a few times under a session: what `graph.profile` does."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, MeasurementError
from ..graph.rewrites import collect_rewrites
from ..profile.session import session
from .graph_profile import GraphProfile, joined, operators
from .mean_step import mean_step


def profile_steps(step_fn: Callable[[], Any], *, steps: int, warmup: int, path: str | None) -> GraphProfile:
    """Run and look; see `tessera.graph.profile`."""
    if not callable(step_fn):
        raise ArgumentError(
            f"step_fn is a {type(step_fn).__name__}, which cannot be called",
            fix="graph.profile(step): a function without arguments that does one step",
        )
    if steps < 1 or warmup < 0:
        raise ArgumentError(f"steps={steps}, warmup={warmup} are no numbers of steps", fix="steps=5, warmup=2")
    for _ in range(warmup):
        step_fn()
    _wait()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(path) if path is not None else Path(folder, "steps.tessera")
        with collect_rewrites() as heard, session(record_shapes=True, path=target) as sess:
            for _ in range(steps):
                step_fn()
                sess.step()
            _wait()
        timeline, notes, table = sess.timeline(), [], None
        try:
            table = sess.energy()
        except MeasurementError as exc:
            notes.append(f"no joules: {exc.what}")
    found = operators(timeline, steps=steps)
    told = [rewrite for program in heard for rewrite in program]
    found = dataclasses.replace(found, rewrites=joined(found.rewrites, told))
    if table is None or not table.steps:
        return dataclasses.replace(found, notes=notes)
    # Of all steps, as its operators are: the first ones were run before.
    mean = mean_step(table.steps, table.total_error_j / table.total_j if table.total_j > 0 else 0.0)
    return dataclasses.replace(
        found, step_s=mean.seconds, step_j=mean.energy_j, step_error_j=mean.error_j, basis=table.basis, notes=notes
    )


def _wait() -> None:
    """Until the device has done what was launched, so that no step runs into the next one's account."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
