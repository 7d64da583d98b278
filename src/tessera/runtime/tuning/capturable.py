"""Optimizers inside a CUDA graph: their step counts on the device, and their settings, which a graph would freeze.

A graph repeats the numbers it was captured with. A learning rate that a schedule changes between calls is therefore
read from device memory, once it has changed; any other setting that changes is another graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .found import Reach
from .layers import steps_on
from .lever import NotHere

# These take a learning rate in device memory (torch's documentation of their `lr`); of the others it is not said.
_TENSOR_RATE = ("Adam", "AdamW")


class Capturable:
    """The optimizers of a function, made fit for capture; `release` gives them back as they were."""

    def __init__(self, reach: Reach) -> None:
        self._optimizers = reach.optimizers
        self._groups = [g for o in reach.optimizers for g in o.param_groups]
        if any("capturable" not in g for g in self._groups):
            raise NotHere("the optimizer cannot be captured: it has no `capturable`")
        self._before = [(g, g["capturable"]) for g in self._groups]
        self._moved: list[Any] = []
        self._rates: list[Any] | None = None  # in device memory, since they changed for the first time
        self._seen = self.rates()

    @property
    def ready(self) -> bool:
        """Whether they have their state: made within a graph, it would be made anew by every replay."""
        return all(o.state for o in self._optimizers)

    def settings(self) -> tuple[Any, ...]:
        """What a graph holds fast, without the learning rates."""
        return tuple(
            (k, v) for g in self._groups for k, v in g.items()
            if k not in ("params", "lr", "initial_lr", "capturable") and isinstance(v, (int, float, str, tuple))
        )  # fmt: skip

    def rates_changed(self) -> bool:
        """Whether the graphs there are have a wrong learning rate for good; else the one they read is set."""
        given = self.rates()
        if given == self._seen:
            return False
        self._seen = given
        if self._rates is None:
            if any(type(o).__name__ not in _TENSOR_RATE for o in self._optimizers):
                raise NotHere("its learning rate changes, and a graph of this optimizer would keep the old one")
            self._rates = [self._on_device(g) for g in self._groups]
            return True
        for group, rate in zip(self._groups, self._rates, strict=True):
            if rate is not None:
                rate.fill_(group["lr"])
        return False

    def rates(self) -> list[float | None]:
        """Learning rates as plain numbers; None for one that is a tensor, which a graph reads as it is."""
        return [g["lr"] if isinstance(g.get("lr"), (int, float)) else None for g in self._groups]

    def _on_device(self, group: Any) -> Any:
        import torch

        if not isinstance(group["lr"], (int, float)):
            return None
        return torch.tensor(float(group["lr"]), dtype=torch.float32, device=group["params"][0].device)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For warming up and capturing: `capturable` is set, step counts and changing rates are on the device."""
        for group in self._groups:
            group["capturable"] = True
        for optimizer in self._optimizers:
            if steps_on(optimizer, device=True) and not any(optimizer is o for o in self._moved):
                self._moved.append(optimizer)
        plain = [g.get("lr") for g in self._groups]
        for group, rate in zip(self._groups, self._rates or [None] * len(plain), strict=True):
            if rate is not None:
                group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(self._groups, plain, strict=True):
                if rate is not None:
                    group["lr"] = rate

    def release(self) -> None:
        """As they were."""
        for group, capturable in self._before:
            group["capturable"] = capturable
        for optimizer in self._moved:  # a step count on the device would be waited for, once a parameter
            if not any(g.get("capturable") or g.get("fused") for g in optimizer.param_groups):
                steps_on(optimizer, device=False)
        self._moved.clear()
