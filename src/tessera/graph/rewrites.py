"""Rewrite: one change made to a program, and what it saves. Made by `tessera.optimize`, shown by `graph.profile`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One rewrite: what became what, where, and what that saves a step (negative where it costs).

    `rule` is its kind ("flash_attention", "fuse_elementwise", "drop_cast", "drop_transpose", "fuse_reduction",
    "spectral_conv", "in_place", "fewer_launches", "reorder", "checkpoint", "cuda_graph", "generated": one operator that
    became a kernel of Inductor's; "rest" is what changed without a rewrite of its own), `by` who made it ("inductor",
    "tessera"), `times` how often it was made. Savings are of all `times` together, modelled by `predict` unless `basis`
    says otherwise: "measured", or "timed", measured for the program and its kernels and shared out by the model. A
    rewrite read off a kernel's name is "seen". `device` is the chip they are modelled for. None where nothing is known,
    with the reason in `why`.
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


def ran(rewrites: Sequence[Rewrite]) -> None:
    """A rewritten program says that it runs; whoever profiles a step hears which rewrites were in it."""
    heard = _listener.get()
    if heard is not None and not any(known is rewrites for known in heard):
        heard.append(rewrites)


@contextlib.contextmanager
def listening() -> Iterator[list[Sequence[Rewrite]]]:
    """Collect the rewrites of all programs that run in the body."""
    heard: list[Sequence[Rewrite]] = []
    token = _listener.set(heard)
    try:
        yield heard
    finally:
        _listener.reset(token)
