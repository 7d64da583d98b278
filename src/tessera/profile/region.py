"""`region`, `mark`, `counter`: put names on the timeline, and cost next to nothing while no session records.

Outside a session, a region reads one variable of this module. Inside, it reads the clock twice, queues one row, and
opens a range for any vendor's tool that may listen (NVTX, rocTX, ITT).
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .recorder import Session

Push = Callable[[str], object]
Pop = Callable[[], object]

# The stub libraries that tools hook into: NVTX 2 (CUDA 10-12) and rocTX. NVTX 3 is headers only; torch has it built in.
_LIBRARIES = (
    ("libnvToolsExt.so.1", "nvtxRangePushA", "nvtxRangePop"),
    ("libroctx64.so.4", "roctxRangePushA", "roctxRangePop"),
)


def ranges() -> tuple[Push | None, Pop | None]:
    """Return functions that open and close a range in every vendor's tool; (None, None) if there is none."""
    pairs = [*_torch_ranges(), *_library_ranges()] if "torch" in sys.modules else _library_ranges()
    if not pairs:
        return None, None
    if len(pairs) == 1:
        return pairs[0]
    pushes, pops = [p for p, _ in pairs], [p for _, p in pairs]

    def push(name: str) -> None:
        for each in pushes:
            each(name)

    def pop() -> None:
        for each in pops:
            each()

    return push, pop


def _torch_ranges() -> list[tuple[Push, Pop]]:
    """Return torch's NVTX (rocTX in a ROCm build) if it has a device, and ITT if Intel's collector is attached."""
    torch: Any = sys.modules["torch"]
    pairs: list[tuple[Push, Pop]] = []
    nvtx = getattr(torch._C, "_nvtx", None)
    if nvtx is not None and torch.cuda.is_available():
        pairs.append((nvtx.rangePushA, nvtx.rangePop))
    itt = getattr(torch._C, "_itt", None)
    if itt is not None and itt.is_available():
        pairs.append((itt.rangePush, itt.rangePop))
    return pairs


def _library_ranges() -> list[tuple[Push, Pop]]:
    """Return the vendor's library if torch's binding is missing."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch._C, "_nvtx"):
        return []
    for name, push_name, pop_name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            push, pop = getattr(library, push_name), getattr(library, pop_name)
        except (OSError, AttributeError):
            continue
        push.argtypes, pop.argtypes = [ctypes.c_char_p], []
        return [(_encode_names(push), pop)]
    return []


def _encode_names(push: Callable[[bytes], object]) -> Push:
    return lambda text: push(text.encode())


P = ParamSpec("P")
R = TypeVar("R")

_session: Session | None = None
"""The session that records now. It is kept here, so that a region outside a session reads nothing else."""
_since_ns = 0
"""When that session began, by the monotonic clock."""


class Follower(Protocol):
    """Is told of every region, with or without a session: a schedule that sets clocks by a region's name."""

    def enter(self, name: str) -> None:
        """A region begins."""

    def leave(self, name: str) -> None:
        """The region has ended."""


_follower: Follower | None = None


class _Pass:
    """One entered region. `session` is None once it has ended."""

    __slots__ = ("is_nested", "of", "session", "start_ns", "thread")

    def __init__(self, of: region, session: Session, thread: int, *, is_nested: bool) -> None:
        self.of, self.thread, self.is_nested = of, thread, is_nested
        self.start_ns = time.time_ns()
        self.session: Session | None = session


_around: ContextVar[tuple[_Pass, ...]] = ContextVar("tessera_regions_around", default=())
"""The open passes around the running code. Tasks of asyncio share a thread, but each has its own context."""


def _in_task() -> bool:
    asyncio: Any = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


class region:  # noqa: N801  (used like a function: `with profile.region("forward"):`)
    """A named part of the program: a context manager, and a decorator that opens a region for each call.

    >>> with profile.region("forward/attention"):
    ...     y = attention(x)

    Regions nest by time and thread. In asyncio tasks, regions of one name that are open at the same time count as one
    call each. What is launched meanwhile counts for the region that was opened last, since nothing tells which task
    launched it. Outside a session a region does nothing.
    """

    __slots__ = ("_open", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        # None until entered. The same object may be entered again inside itself, or by several threads and tasks.
        self._open: list[_Pass] | None = None

    def __enter__(self) -> region:
        session = _session
        if session is not None:
            self._begin(session)
        if _follower is not None:
            _follower.enter(self.name)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if _follower is not None:
            _follower.leave(self.name)
        if self._open:
            self._end(self._open)

    def _begin(self, session: Session) -> None:
        if session.compiling():
            return  # code that torch.compile makes of a function has no regions: put them around it
        if session.push is not None:
            session.push(self.name)
        around = tuple(p for p in _around.get() if p.session is not None)
        is_nested = any(p.of.name == self.name for p in around)
        session.note_edge()
        begun = _Pass(self, session, threading.get_native_id(), is_nested=is_nested)
        _around.set((*around, begun))
        if self._open is None:
            self._open = []
        self._open.append(begun)

    def _end(self, entered: list[_Pass]) -> None:
        if _session is not None:
            _session.note_edge()
        end_ns = time.time_ns()
        thread = threading.get_native_id()
        own = [p for p in _around.get() if p.of is self and p.session is not None]
        own = own or [p for p in entered if p.thread == thread]  # the region was entered in another task
        if not own:
            return  # it was entered on this thread before the session began
        ended = own[-1]
        entered.remove(ended)
        session, ended.session = ended.session, None
        assert session is not None
        if session.pop is not None:
            session.pop()
        session.add_region(self.name, ended.start_ns, end_ns, thread, is_apart=not ended.is_nested and _in_task())

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function or coroutine function: open a region of this name around every call."""
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise ArgumentError(
                f"profile.region cannot decorate the generator {fn.__name__!r}",
                why="its body runs between its caller's steps, not in the call",
                fix="open the region inside it: with profile.region(...):",
            )
        name = self.name
        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def around(*args: Any, **kwargs: Any) -> Any:
                with region(name):
                    return await fn(*args, **kwargs)

            return around  # type: ignore[return-value]

        @functools.wraps(fn)
        def measure_call(*args: P.args, **kwargs: P.kwargs) -> R:
            if _session is None and _follower is None:
                return fn(*args, **kwargs)
            with region(name):
                return fn(*args, **kwargs)

        return measure_call


def mark(name: str) -> None:
    """Put a moment on the timeline; `mark("start/x")` and `mark("end/x")` make a region x. Needs a session."""
    if _session is not None:
        _session.mark(name)


def counter(name: str, value: float, unit: str = "") -> None:
    """Put a number on the timeline, such as tokens per second. Needs a session."""
    if _session is not None:
        _session.counter(name, value, unit)


def current() -> Session | None:
    """Return the session that records now, if any."""
    return _session


def follow(follower: Follower | None) -> Follower | None:
    """Tell `follower` of every region from now on; return the follower that it replaces, to be put back later."""
    global _follower
    before, _follower = _follower, follower
    return before


def install(session: Session | None) -> None:
    """Send regions, marks and counters to this session from now on; None: to no session."""
    global _session, _since_ns
    _session, _since_ns = session, time.monotonic_ns()
    if session is None and "tessera.monitor.scope" not in sys.modules:
        return
    from ..monitor import scope

    scope.on_close = None if session is None else _scope_closed


def _scope_closed(name: str, start_ns: int, end_ns: int, nested: bool) -> None:
    """Add a closed `monitor.energy_scope` (monotonic times) as a region, unless it began before the session."""
    session = _session
    if session is None or start_ns < _since_ns or session.compiling():
        return
    offset_ns = time.time_ns() - time.monotonic_ns()
    thread = threading.get_native_id()
    session.add_region(name, start_ns + offset_ns, end_ns + offset_ns, thread, is_apart=not nested)


def _after_fork() -> None:
    """Forget the session in a forked child (a DataLoader's worker): it has neither its threads nor its file."""
    if _session is not None:
        _session.abandon()
    install(None)
    follow(None)


os.register_at_fork(after_in_child=_after_fork)
