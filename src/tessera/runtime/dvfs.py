"""`dvfs=`: lower SM clocks where they cost little, by the name of a region or an operator.

    "auto"                                   the ops and clocks that the plan's hints name
    "shape:sm_down_200MHz@flash_attention"   200 MHz below the highest clock while that op runs
    "shape:sm_at_1200MHz@decode*"            at most 1200 MHz in regions whose name fits the pattern

A lock holds for the whole GPU, and a switch takes a time that differs much between GPUs and frequencies (Velicka,
Vysocky, Riha, "Methodology for GPU Frequency Switching Latency Measurement", arXiv:2502.20075, 2025, on GH200, A100 and
RTX Quadro 6000; not measured on our H200, whose clocks we never change). Operators of a millisecond are therefore not
followed one by one: names only say what is wanted now, and every `DWELL_S` a thread looks which clock was wanted for
most of that time and sets it, if it is another. Names are followed on the host, where kernels are launched, a little
before the GPU runs them.
"""

from __future__ import annotations

import fnmatch
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, UnitError, did_you_mean
from ..units import parse_frequency

# Our choice: long against a driver call (a few milliseconds with the journal), short enough to follow phases (prefill
# and decode, forward and optimizer).
DWELL_S = 0.1

_FORMS = "'auto', 'shape:sm_down_200MHz@flash_attention' or 'shape:sm_at_1200MHz@decode*', several joined by ';'"
_RULES = ("sm_down", "sm_at")
_RULE = re.compile(r"(?P<rule>[a-z_]+?)_(?P<clock>\d.*)$", re.IGNORECASE)
# What torch calls the operators that we call otherwise.
_ALIASES = {"scaled_dot_product_attention": "flash_attention", "linear": "matmul", "mm": "matmul", "bmm": "matmul"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One rule: `rule` "sm_down" or "sm_at", `clock_mhz`, and the pattern of names it holds for."""

    rule: str
    clock_mhz: int
    target: str

    def __str__(self) -> str:
        return f"{self.rule}_{self.clock_mhz}MHz@{self.target}"

    def ceiling_mhz(self, supported_mhz: Sequence[int]) -> int:
        """The highest clock it allows: a supported one at or below what it says, or the lowest there is."""
        highest = max(supported_mhz)
        wanted = highest - self.clock_mhz if self.rule == "sm_down" else self.clock_mhz
        return max((c for c in supported_mhz if c <= wanted), default=min(supported_mhz))

    def matches(self, name: str) -> bool:
        """Whether it holds for a region ("step/decode": the whole name or its last part) or an operator."""
        last = name.rpartition("/")[2]
        return any(fnmatch.fnmatchcase(n, self.target) for n in (name, last, _ALIASES.get(last, last)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dvfs:
    """What `dvfs=` asked for."""

    auto: bool = False
    shapes: tuple[Shape, ...] = ()

    def __bool__(self) -> bool:
        return self.auto or bool(self.shapes)

    def __str__(self) -> str:
        shapes = [f"shape:{s}" for s in self.shapes]
        return ";".join(["auto", *shapes] if self.auto else shapes)


def parse(dvfs: str | Sequence[str] | Dvfs | None) -> Dvfs:
    """Read `dvfs=`: text, several texts, or None."""
    if dvfs is None:
        return Dvfs()
    if isinstance(dvfs, Dvfs):
        return dvfs
    texts = [dvfs] if isinstance(dvfs, str) else list(dvfs)
    parts = [part.strip() for text in texts for part in _split(text)]
    if not parts or not all(parts):
        raise ArgumentError(f"dvfs={dvfs!r} names nothing to do", fix=_FORMS)
    shapes = tuple(_shape(part) for part in parts if part != "auto")
    return Dvfs(auto="auto" in parts, shapes=shapes)


def _split(text: str) -> list[str]:
    if not isinstance(text, str):
        raise ArgumentError(f"dvfs={text!r} is not text", fix=_FORMS)
    return text.split(";")


def _shape(text: str) -> Shape:
    kind, colon, rest = text.partition(":")
    if not colon or kind != "shape":
        near = did_you_mean(kind, ["auto", "shape"])
        raise ArgumentError(f"dvfs={text!r} is neither 'auto' nor 'shape:...'{near}", fix=_FORMS)
    rule_text, at, target = rest.partition("@")
    if not at or not target.strip():
        raise ArgumentError(f"dvfs={text!r} does not say where", why="no operator or region after '@'", fix=_FORMS)
    match = _RULE.match(rule_text.strip())
    if match is None or match["rule"] not in _RULES:
        rule = match["rule"] if match else rule_text.strip()
        why = "clocks cannot be raised above what the driver gives" if rule == "sm_up" else None
        raise ArgumentError(f"dvfs={text!r}: no rule {rule!r}{did_you_mean(rule, _RULES)}", why=why, fix=_FORMS)
    try:
        clock_mhz = round(parse_frequency(match["clock"]) / 1e6)
    except UnitError as exc:
        raise ArgumentError(f"dvfs={text!r}: {exc.what}", fix=_FORMS) from exc
    if clock_mhz <= 0:
        raise ArgumentError(f"dvfs={text!r}: a clock of 0 MHz", fix=_FORMS)
    return Shape(rule=match["rule"], clock_mhz=clock_mhz, target=target.strip())


def from_hints(clock_hints: Mapping[str, int]) -> tuple[Shape, ...]:
    """The plan's clock hints (name of an operator -> MHz) as shapes: what "auto" comes to."""
    return tuple(Shape(rule="sm_at", clock_mhz=mhz, target=name) for name, mhz in clock_hints.items())


class Shaper:
    """Follows names as they are entered and left, and asks `apply` for a ceiling in MHz (None: no ceiling)."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        supported_mhz: Sequence[int],
        apply: Callable[[int | None], None],
        *,
        dwell_s: float = DWELL_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.switches = 0
        self._ceilings = [(s, s.ceiling_mhz(supported_mhz)) for s in shapes]
        self._apply, self._dwell_s, self._now_s = apply, dwell_s, now_s
        self._known: dict[str, int | None] = {}
        self._mutex = threading.Lock()
        self._active: list[int] = []
        self._spent_s: dict[int | None, float] = {}
        self._since_s = now_s()
        self._applied: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def ceiling_mhz(self, name: str) -> int | None:
        """The ceiling that holds for a name; of several rules the lowest."""
        if name not in self._known:
            fits = [mhz for shape, mhz in self._ceilings if shape.matches(name)]
            self._known[name] = min(fits, default=None)
        return self._known[name]

    def enter(self, name: str) -> None:
        """A region or operator begins."""
        ceiling = self.ceiling_mhz(name)
        if ceiling is not None:
            with self._mutex:
                self._account()
                self._active.append(ceiling)

    def leave(self, name: str) -> None:
        """It has ended; one that began before the shaper did is nothing to it."""
        ceiling = self.ceiling_mhz(name)
        if ceiling is not None:
            with self._mutex:
                self._account()
                if ceiling in self._active:
                    self._active.remove(ceiling)

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """A region as a block."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def decide(self) -> int | None:
        """Set the ceiling that was wanted most since the last decision, if it is another; what holds now."""
        with self._mutex:
            self._account()
            spent, self._spent_s = self._spent_s, {}
        wanted = max(spent, key=lambda ceiling: spent[ceiling], default=self._applied)
        if wanted != self._applied:
            self._apply(wanted)
            self._applied = wanted
            self.switches += 1
        return self._applied

    def _account(self) -> None:
        now_s = self._now_s()
        wanted = min(self._active, default=None)
        self._spent_s[wanted] = self._spent_s.get(wanted, 0.0) + now_s - self._since_s
        self._since_s = now_s

    def start(self) -> None:
        """Decide every `dwell_s` on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="tessera-dvfs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what it set is its owner's to put back."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._dwell_s):
            self.decide()


def operators(shaper: Shaper) -> AbstractContextManager[Any]:
    """A mode under which torch's functions called on this thread are names for the shaper. Backward passes are not."""
    from torch.overrides import TorchFunctionMode

    class Operators(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            import torch

            if torch.compiler.is_compiling():  # what it compiles to is one thing, named by the region around it
                return func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            shaper.enter(name)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                shaper.leave(name)

    return Operators()
