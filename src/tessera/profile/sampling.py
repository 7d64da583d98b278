"""Samples the Python stacks of all threads from a thread of its own: shows what runs without tracing anything.

Reading a stack holds the interpreter's lock, so the program pays for it. The cost is measured, and the period is
stretched until the cost is at most `BUDGET` of the time.

A sample can only be taken where the program gives up the interpreter's lock: at a call that releases it, or anywhere
after Python's switch interval. With Python's default of 5 ms, a program that calls torch every few milliseconds would
be seen only at those calls. So the interval is `SWITCH_S` while stacks are sampled.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
import threading
import time
from pathlib import Path, PurePath
from types import CodeType, FrameType

# Part of the half percent that sampling mode may cost; the file, the feed and the power sampler take the rest.
BUDGET = 0.002
LONGEST_S = 0.25
DEEPEST = 128
SWITCH_S = 0.0005
"""Python's switch interval while stacks are sampled. Chosen to be short compared with functions a user looks for."""
OWN = "tessera-"
"""How the names of our own threads begin."""
RARELY = 1.5
"""If samples come this many times more rarely than asked, a note says so. The value is chosen."""
# Names are kept per line of code; the limit is for programs that make new code without end.
MAX_NAMES = 100_000
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", f"{Path(__file__).parents[1]}/")
Key = tuple[int, tuple[CodeType | int, ...]]
"""A thread, and its stack: for each frame the code object and the position in it, innermost first."""
Stacks = list[tuple[int, int | str, str, int]]
"""Rows of (epoch_ns, thread, "outermost;...;innermost", number of samples)."""


_switch_before_s: float | None = None


def lower_switch_interval() -> None:
    """Set Python's switch interval to `SWITCH_S`, unless it is already as short."""
    global _switch_before_s  # noqa: PLW0603  (Python has one)
    now_s = sys.getswitchinterval()
    if now_s > SWITCH_S and not math.isclose(now_s, SWITCH_S):
        _switch_before_s = now_s
        sys.setswitchinterval(SWITCH_S)


def restore_switch_interval() -> None:
    """Restore the program's switch interval, unless the program has set another one meanwhile."""
    global _switch_before_s
    before_s, _switch_before_s = _switch_before_s, None
    if before_s is not None and math.isclose(sys.getswitchinterval(), SWITCH_S):
        sys.setswitchinterval(before_s)


os.register_at_fork(after_in_child=restore_switch_interval)  # no thread samples in the child


class StackSampler:
    """Counts stacks by thread; `take` returns the counts."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.samples = 0
        self._recent_s = 0.0
        self._own: set[int | None] = set()
        self._counts: dict[Key, int] = {}
        self._waiting: dict[int, tuple[tuple[int, int], Key]] = {}
        self._names: dict[tuple[CodeType, int], str] = {}
        self._since_ns = time.time_ns()
        self._started_s = self._ended_s = time.monotonic()
        self._stopping = False
        self._thread: threading.Thread | None = None
        _first_folder()

    def start(self) -> None:
        self._started_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="tessera-stacks", daemon=True)
        self._thread.start()
        self.take()

    def stop(self) -> None:
        """End sampling; safe to call twice."""
        if not self._stopping:
            self._ended_s = time.monotonic()
        self._stopping = True
        if self._thread is not None:
            self._thread.join()

    @property
    def is_stretched(self) -> bool:
        """Whether sampling at the asked interval would cost too much, so that the period was stretched."""
        return self.period_s > RARELY * self.interval_s

    def explain_rare(self) -> str | None:
        """Return why samples came much more rarely than asked; None if they did not."""
        sampled_s = self._ended_s - self._started_s
        mean_s = sampled_s / self.samples if self.samples else math.inf
        if sampled_s < self.interval_s or not (mean_s > RARELY * self.interval_s or self.is_stretched):
            return None
        came = f"{self.samples:,} samples of stacks in {sampled_s:.3g} s, not one every {self.interval_s * 1e3:g} ms"
        if self.is_stretched:
            return f"{came}: more would have slowed the program"
        return f"{came}: the program kept Python's lock, or the machine was busy"

    @property
    def period_s(self) -> float:
        """The time between two samples that keeps to the budget."""
        return min(max(self.interval_s, self._recent_s / BUDGET), max(self.interval_s, LONGEST_S))

    def _run(self) -> None:
        lower_switch_interval()
        try:
            self._sample_all()
        finally:
            restore_switch_interval()

    def _sample_all(self) -> None:
        # Use the thread's own CPU time, including waking up: waiting for the interpreter's lock costs nothing.
        used_s = time.thread_time()
        while not self._stopping:
            time.sleep(self.period_s)  # waiting for an Event would cost as much again
            if not self._stopping:
                self.sample()
            before_s, used_s = used_s, time.thread_time()
            # Limit each cost to what the longest period pays for, so that a burst (imports) does not count for long.
            self._recent_s += 0.1 * (min(used_s - before_s, BUDGET * LONGEST_S) - self._recent_s)

    def sample(self) -> None:
        """Count the stack of every thread except our own."""
        own_threads, counts, main = self._own, self._counts, threading.main_thread().ident
        for thread, top in sys._current_frames().items():
            if thread in own_threads:
                continue
            # A thread that still waits at the same place has the same stack. The main thread may reach a line by
            # several ways, so its stack is always read.
            place = (id(top), top.f_lasti)
            before = self._waiting.get(thread)
            if before is not None and before[0] == place and thread != main:
                counts[before[1]] = counts.get(before[1], 0) + 1
                continue
            stack: list[CodeType | int] = []
            frame: FrameType | None = top
            while frame is not None and len(stack) < 2 * DEEPEST:
                stack.append(frame.f_code)
                stack.append(frame.f_lasti)  # not the line: finding that takes time in proportion to the code
                frame = frame.f_back
            key = (thread, tuple(stack))
            self._waiting[thread] = (place, key)
            counts[key] = counts.get(key, 0) + 1
        self.samples += 1

    def take(self) -> Stacks:
        """Return what was counted since the last call."""
        counts, self._counts = self._counts, {}
        since_ns, self._since_ns = self._since_ns, time.time_ns()
        threads = threading.enumerate()
        self._own = {t.ident for t in threads if t.name.startswith(OWN)}
        natives = {t.ident: t.native_id for t in threads}
        self._waiting = {t: before for t, before in list(self._waiting.items()) if t in natives}
        return [
            (since_ns, natives.get(thread) or thread, self._fold_stack(stack), count)
            for (thread, stack), count in list(counts.items())
        ]

    def _fold_stack(self, stack: tuple[CodeType | int, ...]) -> str:
        if len(self._names) > MAX_NAMES:
            self._names.clear()
        names = self._names
        parts = []
        for code, at in zip(stack[::2], stack[1::2], strict=True):
            key = (code, at)
            name = names.get(key)  # type: ignore[arg-type]
            if name is None:
                name = names[key] = _name(code, at)  # type: ignore[arg-type, index]
            parts.append(name)
        return ";".join(reversed(parts))


def _name(code: CodeType, at: int) -> str:
    line = next((n for start, end, n in code.co_lines() if start <= at < end and n), code.co_firstlineno)
    return name_frame(code.co_filename, line, code.co_qualname)


def name_frame(file: str, line: int, function: str) -> str:
    """Return `./train.py:31 step` for the user's own code, `modules/linear.py:134 forward` for a library's."""
    path = PurePath(file)
    if is_library(file):
        where = f"{path.parent.name}/{path.name}".lstrip("/")
    else:
        folder = _first_folder()
        where = f"./{path.relative_to(folder)}" if path.is_relative_to(folder) else str(path)
    # A semicolon separates frames, so it must not be in a name.
    return f"{where}:{line} {function}".replace(";", ",")


@functools.cache
def _first_folder() -> Path:
    """Return the working folder at the first call; a script may change it later."""
    try:
        return Path.cwd()
    except OSError:  # it was deleted
        return Path("/dev/null")


@functools.cache
def is_library(file: str) -> bool:
    """Return whether a file is not the user's: of Python, an installed package or Tessera, or not a file."""
    return not file.endswith(".py") or any(part in file for part in (*_LIBRARIES, *_installed_folder()))


@functools.cache
def _installed_folder() -> tuple[str, ...]:
    """Return where packages are installed if that has another name (`pip install --target`), by where NumPy is."""
    found = importlib.util.find_spec("numpy")
    folder = Path(found.origin).parents[1] if found is not None and found.origin else None
    return (f"{folder}/",) if folder is not None and not _first_folder().is_relative_to(folder) else ()
