"""`Rewrite`: one change made to a program, and what it saves. Made by `tessera.optimize`, shown by `graph.profile`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One rewrite: what became what, where, and what it saves in each step (negative if it costs).

    `rule` is its kind ("flash_attention", "fuse_elementwise", "drop_cast", "drop_transpose", "fuse_reduction",
    "spectral_conv", "in_place", "fewer_launches", "reorder", "checkpoint", "cuda_graph", "generated": one operator that
    became a kernel of Inductor's; "rest" is what changed without a rewrite of its own), `by` who made it ("inductor",
    "tessera"), `times` how often. Savings are for all `times` together. They are modelled by `predict` for the chip
    `device`, unless `basis` is "measured", or "timed": measured for the program and its kernels and shared out by the
    model. "seen" is a rewrite read from a kernel's name. A saving is None if it is not known; `why` gives the reason.
    """

    rule: str
    before: str
    after: str
    by: str
    where: str = ""
    times: int = 1
    saved_bytes: float | None = None
    saved_j: float | None = None
    saved_error_j: float | None = None
    saved_s: float | None = None
    basis: str = "modelled"
    device: str = ""
    why: str = ""


_listener: ContextVar[list[Sequence[Rewrite]] | None] = ContextVar("tessera_rewrites", default=None)


def announce_rewrites(rewrites: Sequence[Rewrite]) -> None:
    """Called by a rewritten program when it runs, for whoever profiles the step."""
    announced = _listener.get()
    if announced is not None and not any(r is rewrites for r in announced):
        announced.append(rewrites)


@contextlib.contextmanager
def collect_rewrites() -> Iterator[list[Sequence[Rewrite]]]:
    """Collect the rewrites of all programs that run in the body."""
    announced: list[Sequence[Rewrite]] = []
    token = _listener.set(announced)
    try:
        yield announced
    finally:
        _listener.reset(token)
