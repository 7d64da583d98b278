"""A model whose blocks recompute, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import RewriteError, did_you_mean
from .recompute import KEEP, Way

if TYPE_CHECKING:
    from torch import nn


class Applied:
    """A model whose blocks recompute; leaving it, or `undo()`, gives them their own forward back."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = list(modules)

    def undo(self) -> None:
        """The model as it was; once more does nothing."""
        while self._modules:
            self._modules.pop().__dict__.pop("forward", None)

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def apply_ways(model: nn.Module, ways: Mapping[str, Way]) -> Applied:
    """Replace the forward of every block that is not kept; the model is as it was when anything is refused."""
    from .selective import Checkpointed

    known = dict(model.named_modules())
    recomputed = {name: way for name, way in ways.items() if way != KEEP}
    _refuse(model, known, ways, recomputed)
    for name, way in recomputed.items():
        known[name].__dict__["forward"] = Checkpointed(known[name].forward, way.saves)
    return Applied([known[name] for name in recomputed])


def _refuse(model: Any, known: Mapping[str, Any], ways: Mapping[str, Way], recomputed: Mapping[str, Way]) -> None:
    missing = next((name for name in ways if name not in known), None)
    if missing is not None:
        raise RewriteError(
            f"the plan has a block {missing!r}, {type(model).__name__} has not{did_you_mean(missing, known)}",
            why="a plan belongs to the model it was made for",
            fix="make one for this model: checkpoint.plan(model, inputs)",
        )
    twice = next((name for name in recomputed if "forward" in known[name].__dict__), None)
    if twice is not None:
        raise RewriteError(
            f"the forward of {twice!r} has been replaced already",
            why="a block that recomputes twice would only cost twice",
            fix="undo() what was applied before",
        )
    if recomputed and getattr(model, "is_gradient_checkpointing", False):
        raise RewriteError(
            f"{type(model).__name__} checkpoints its blocks itself",
            why="both together would recompute each block twice",
            fix="model.gradient_checkpointing_disable() first",
        )
