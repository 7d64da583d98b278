"""`dvfs=`: lower SM clocks where they cost little, by the name of a region or an operator.

    "auto"                                   the operators that the plan marks as memory-bound
    "shape:sm_down_200MHz@flash_attention"   200 MHz below the highest clock while that operator runs
    "shape:sm_at_1200MHz@decode*"            at most 1200 MHz in regions whose name matches the pattern

A locked clock applies to the whole GPU, and the time of a switch differs much between GPUs and frequencies (Velicka,
Vysocky, Riha, "Methodology for GPU Frequency Switching Latency Measurement", arXiv:2502.20075, 2025, on GH200, A100 and
RTX Quadro 6000; not measured on our H200, whose clocks we never change). So operators of a millisecond are not followed
one by one: every `DWELL_S` a thread sets the clock that was wanted for most of that time. Names are followed on the
host, where kernels are launched, a little before the GPU runs them.
"""

from __future__ import annotations

import fnmatch
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, UnitError, did_you_mean
from ..units import parse_frequency

# Our choice: long compared with a driver call (a few milliseconds with the journal), and short enough to follow phases
# (prefill and decode, forward and optimizer).
DWELL_S = 0.1

_FORMS = "'auto', 'shape:sm_down_200MHz@flash_attention' or 'shape:sm_at_1200MHz@decode*', several joined by ';'"
_RULES = ("sm_down", "sm_at")
_RULE = re.compile(r"(?P<rule>[a-z_]+?)_(?P<clock>\d.*)$", re.IGNORECASE)
# Torch's names of operators that have another name here.
_ALIASES = {"scaled_dot_product_attention": "flash_attention", "linear": "matmul", "mm": "matmul", "bmm": "matmul"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRule:
    """One rule: `rule` is "sm_down" or "sm_at", `target` is the pattern of names it applies to."""

    rule: str
    clock_mhz: int
    target: str

    def __str__(self) -> str:
        return f"{self.rule}_{self.clock_mhz}MHz@{self.target}"

    def ceiling_mhz(self, supported_mhz: Sequence[int]) -> int:
        """Return the highest clock that the rule allows: the next supported one at or below it, or else the lowest."""
        highest = max(supported_mhz)
        wanted = highest - self.clock_mhz if self.rule == "sm_down" else self.clock_mhz
        return max((c for c in supported_mhz if c <= wanted), default=min(supported_mhz))

    def matches(self, name: str) -> bool:
        """Return whether the rule applies to a region ("step/decode": whole name or last part) or an operator."""
        last = name.rpartition("/")[2]
        return any(fnmatch.fnmatchcase(n, self.target) for n in (name, last, _ALIASES.get(last, last)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dvfs:
    """What `dvfs=` asks for."""

    auto: bool = False
    rules: tuple[ClockRule, ...] = ()


def parse_dvfs(dvfs: str | Sequence[str] | None) -> Dvfs:
    """Read `dvfs=`: text, several texts, or None."""
    if dvfs is None:
        return Dvfs()
    texts: list[object] = list(dvfs) if isinstance(dvfs, (list, tuple)) else [dvfs]
    parts: list[str] = []
    for text in texts:
        if not isinstance(text, str):
            raise ArgumentError(f"dvfs={text!r} is not text", fix=_FORMS)
        parts += map(str.strip, text.split(";"))
    if not parts or not all(parts):
        raise ArgumentError(f"dvfs={dvfs!r} names nothing to do", fix=_FORMS)
    return Dvfs(auto="auto" in parts, rules=tuple(_parse_rule(part) for part in parts if part != "auto"))


def _parse_rule(text: str) -> ClockRule:
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
    return ClockRule(rule=match["rule"], clock_mhz=clock_mhz, target=target.strip())


class ClockShaper:
    """Follows names as they are entered and left, and calls `apply` with a ceiling in MHz (None: no ceiling)."""

    def __init__(
        self,
        rules: Sequence[ClockRule],
        supported_mhz: Sequence[int],
        apply: Callable[[int | None], None],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.switches = 0
        self._ceilings = [(rule, rule.ceiling_mhz(supported_mhz)) for rule in rules]
        self._apply, self._now_s = apply, now_s
        self._by_name: dict[str, int | None] = {}
        self._mutex = threading.Lock()
        self._active: list[int] = []
        self._spent_s: dict[int | None, float] = {}
        self._since_s = now_s()
        self._current: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def ceiling_mhz(self, name: str) -> int | None:
        """Return the ceiling for a name: the lowest of all rules that match."""
        if name not in self._by_name:
            self._by_name[name] = min((mhz for rule, mhz in self._ceilings if rule.matches(name)), default=None)
        return self._by_name[name]

    def enter(self, name: str) -> None:
        """Note that a region or operator begins."""
        ceiling = self.ceiling_mhz(name)
        if ceiling is not None:
            with self._mutex:
                self._account()
                self._active.append(ceiling)

    def leave(self, name: str) -> None:
        """Note that a region or operator has ended; one that began before the shaper is ignored."""
        ceiling = self.ceiling_mhz(name)
        if ceiling is not None:
            with self._mutex:
                self._account()
                if ceiling in self._active:
                    self._active.remove(ceiling)

    def decide(self) -> int | None:
        """Set the ceiling that was wanted most since the last decision, if it differs; return the current one."""
        with self._mutex:
            self._account()
            spent, self._spent_s = self._spent_s, {}
        wanted = max(spent, key=lambda ceiling: spent[ceiling], default=self._current)
        if wanted != self._current:
            self._apply(wanted)
            self._current = wanted
            self.switches += 1
        return self._current

    def _account(self) -> None:
        now_s = self._now_s()
        wanted = min(self._active, default=None)
        self._spent_s[wanted] = self._spent_s.get(wanted, 0.0) + now_s - self._since_s
        self._since_s = now_s

    def start(self) -> None:
        """Decide every `DWELL_S` on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="tessera-dvfs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; its owner restores the clocks."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(DWELL_S):
            self.decide()


def follow_operators(shaper: ClockShaper) -> AbstractContextManager[Any]:
    """Return a mode that tells the shaper which torch functions this thread calls. It does not see backward passes."""
    from torch.overrides import TorchFunctionMode

    class Operators(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            import torch

            if torch.compiler.is_compiling():  # the region around compiled code names it, not its operators
                return func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            shaper.enter(name)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                shaper.leave(name)

    return Operators()
