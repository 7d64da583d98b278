"""What reductions of gradients sent and how long they took, and how much of that the program did not wait for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch

from ..timeline.intervals import covered_ns, union
from .reduction import Sent, ring_bytes

WAIT_RANGE = "wait for gradients"
"""The name of the waits on a profiler's timeline."""
NO_BOUND = "PowerSGD does not bound its error"
DRY = "a dry run has no values"
ON_GPU = "on GPUs the profile has it: tessera run, then analyze.collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReport:
    """What the reductions of gradients did on this rank, in one step or several.

    `saved_bytes` is compared with plain reductions; `error_bound` is for every element of a mean. `time_s` is the sum
    over reductions, and `hidden_s` the part of it in which the program did not wait. `missing` says why a value is
    None.
    """

    steps: int = 0
    reductions: int = 0
    gradient_bytes: int = 0
    sent_bytes: float = 0.0
    saved_bytes: float = 0.0
    error_bound: float | None = 0.0
    time_s: float = 0.0
    wait_s: float = 0.0
    hidden_s: float | None = 0.0
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def overlap_pct(self) -> float | None:
        """Return the share of the reductions' time that was hidden, 0 to 100."""
        return 100.0 * self.hidden_s / self.time_s if self.hidden_s is not None and self.time_s else None

    def __add__(self, other: GradientReport) -> GradientReport:
        total = {f.name: _add(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)[:-1]}
        if total["error_bound"] is not None:
            total["error_bound"] = max(self.error_bound or 0.0, other.error_bound or 0.0)
        return GradientReport(**total, missing=self.missing | other.missing)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self) | {"overlap_pct": self.overlap_pct}


def _add(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b


@dataclass(slots=True)
class TimedReduction:
    """One reduction of a flat tensor; `plain_bytes` is what it would send without compression."""

    flat: torch.Tensor
    plain_bytes: float
    sent: Sent
    begin_ns: int = 0
    end_ns: int = 0

    def stamp_end(self) -> None:
        """Note that the reduction is over, unless an end was noted before."""
        self.end_ns = self.end_ns or time.monotonic_ns()


class GradientLedger:
    """The reductions and the waits of a step, which are summed up when the step is closed."""

    def __init__(self, *, has_bound: bool = True) -> None:
        self._has_bound = has_bound
        self._finished: list[TimedReduction] = []
        self._waits: list[tuple[int, int]] = []
        self.last_step = GradientReport()
        self.total = GradientReport()

    def add(self, reduction: TimedReduction) -> None:
        """Note that a reduction of this step is over."""
        self._finished.append(reduction)

    @contextlib.contextmanager
    def mark_waiting(self) -> Iterator[None]:
        """Measure the time of this block as a wait of the program."""
        begin_ns = time.monotonic_ns()
        try:
            with torch.profiler.record_function(WAIT_RANGE):
                yield
        finally:
            self._waits.append((begin_ns, time.monotonic_ns()))

    def close_step(self) -> None:
        """Sum up what was added since the last call."""
        done, waits = self._finished, np.array(self._waits, np.int64).reshape(-1, 2)
        self._finished, self._waits = [], []
        if not done:
            return
        starts = np.array([r.begin_ns for r in done], np.int64)
        ends = np.maximum([r.end_ns for r in done], starts)
        exposed = covered_ns(union(waits[:, 0], waits[:, 1]), starts, ends)
        sent = sum(r.sent.bytes for r in done)
        on_gpu = done[0].flat.is_cuda  # then the times are the host's, which only queues the work
        bounds = [r.sent.error_bound for r in done if r.sent.error_bound is not None]
        has_bound = self._has_bound and len(bounds) == len(done)
        missing = {} if has_bound else {"error_bound": DRY if self._has_bound else NO_BOUND}
        self.last_step = GradientReport(
            steps=1,
            reductions=len(done),
            gradient_bytes=sum(r.flat.numel() * r.flat.element_size() for r in done),
            sent_bytes=sent,
            saved_bytes=sum(r.plain_bytes for r in done) - sent,
            error_bound=max(bounds) if has_bound else None,
            time_s=float((ends - starts).sum()) * 1e-9,
            wait_s=float((waits[:, 1] - waits[:, 0]).sum()) * 1e-9,
            hidden_s=None if on_gpu else float((ends - starts - exposed).sum()) * 1e-9,
            missing=missing | ({"hidden_s": ON_GPU} if on_gpu else {}),
        )
        self.total = self.total + self.last_step


def make_timed(flat: torch.Tensor, ranks: int) -> TimedReduction:
    """Return the record of an all-reduce that is about to start."""
    nbytes = ring_bytes(flat.numel() * flat.element_size(), ranks)
    return TimedReduction(flat, nbytes, Sent(nbytes))
