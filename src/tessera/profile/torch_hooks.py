"""Changes parts of torch while a session records, and restores them: open ranges, steps, calls on the main thread."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ..timeline.columns import Builder, Timeline
from ..timeline.kineto import MODULE


class OpenRanges:
    """The `record_function`s that are open on the thread that traces, so that the end of a window can end them.

    If a window ended inside one, torch would keep a pointer to memory that Kineto has freed, and leaving the
    `record_function` during the next window would write there (`onFunctionExit`, torch 2.13, seen with valgrind). Every
    optimizer step and every DDP forward is inside one.
    """

    def __init__(self, torch: Any) -> None:
        self._class = torch.autograd.profiler.record_function
        self._original = (self._class.__enter__, self._class.__exit__)
        self._open: list[Any] = []
        self._thread = threading.get_ident()

    def install(self) -> None:
        """Follow ranges that are opened from now on; Kineto does not know those that are already open."""
        enter, leave = self._original
        opened = self._open

        def __enter__(this: Any) -> Any:  # noqa: N807
            entered = enter(this)
            if threading.get_ident() == self._thread:
                opened.append(this)
            return entered

        def __exit__(this: Any, *error: Any) -> Any:  # noqa: N807
            if this in opened:
                opened.remove(this)
            return leave(this, *error)

        self._class.__enter__, self._class.__exit__ = __enter__, __exit__

    def end_open(self) -> None:
        """End all open ranges, so that their rows end with the window."""
        for each in reversed(self._open):
            self._original[1](each, None, None, None)
            each.run_callbacks_on_exit = False  # the program's own exit must not end it again
        self._open.clear()

    def remove(self) -> None:
        self._class.__enter__, self._class.__exit__ = self._original


class OtherProfilers:
    """Tells when the program starts its own torch.profiler, and when that has ended.

    Two profilers at once end in a segmentation fault (2.13), and each takes CUPTI from the one that had it.
    """

    def __init__(
        self, torch: Any, call: Callable[[], None], ours: Callable[[], bool], ended: Callable[[], None] = lambda: None
    ) -> None:
        self._class = torch.autograd.profiler.profile
        self._original = (self._class._prepare_trace, self._class.__exit__)
        self._call = call
        self._ours = ours
        self._ended = ended
        self._theirs: set[int] = set()

    def install(self) -> None:
        (prepare, leave), theirs = self._original, self._theirs

        def _prepare_trace(this: Any) -> Any:
            if not self._ours():
                theirs.add(id(this))
                self._call()
            return prepare(this)

        def __exit__(this: Any, *error: Any) -> Any:  # noqa: N807
            left = leave(this, *error)
            if id(this) in theirs:
                theirs.discard(id(this))
                self._ended()
            return left

        self._class._prepare_trace, self._class.__exit__ = _prepare_trace, __exit__

    def remove(self) -> None:
        self._class._prepare_trace, self._class.__exit__ = self._original


# -- steps of a program that does not mark them ----------------------------------------------------------------------


class ModeChanges:
    """Calls a function when the program switches a module to training or evaluation: `model.train()`, `model.eval()`.

    The function is also called for the modules inside that one.
    """

    def __init__(self, call: Callable[[bool], None]) -> None:
        self._call = call
        self._original: Any = None

    def install(self) -> None:
        import torch
        from torch.nn import Module

        self._original = original = Module.train
        call, thread, compiling = self._call, threading.get_ident(), torch.compiler.is_compiling

        @functools.wraps(original)
        def train(this: Any, mode: bool = True) -> Any:
            changed = original(this, mode)
            if not compiling() and threading.get_ident() == thread:
                call(bool(mode))
            return changed

        Module.train = train

    def remove(self) -> None:
        if self._original is not None:
            from torch.nn import Module

            Module.train = self._original
            self._original = None


class NoGradBlocks:
    """Calls a function with the times of every outermost `torch.no_grad()` or `inference_mode()` of this thread."""

    def __init__(self, call: Callable[[int, int], None]) -> None:
        self._call = call
        self._thread = threading.get_ident()
        self._depth = 0
        self._begun_ns = 0
        self._originals: list[tuple[Any, Any, Any]] = []

    def install(self) -> None:
        import torch

        for block in (torch.no_grad, torch.inference_mode):
            self._follow(block)

    def _follow(self, block: Any) -> None:
        enter, leave = block.__enter__, block.__exit__

        @functools.wraps(enter)
        def __enter__(this: Any) -> Any:  # noqa: N807
            if threading.get_ident() == self._thread:
                self._depth += 1
                if self._depth == 1:
                    self._begun_ns = time.time_ns()
            return enter(this)

        @functools.wraps(leave)
        def __exit__(this: Any, *error: Any) -> Any:  # noqa: N807
            if threading.get_ident() == self._thread and self._depth:
                self._depth -= 1
                if not self._depth:
                    self._call(self._begun_ns, time.time_ns())
            return leave(this, *error)

        block.__enter__, block.__exit__ = __enter__, __exit__
        self._originals.append((block, enter, leave))

    def remove(self) -> None:
        while self._originals:
            block, enter, leave = self._originals.pop()
            block.__enter__, block.__exit__ = enter, leave


# torch.compile warns that global hooks are called once more for the module it makes: ours work with that.
_COMPILED_WITH_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


class ModuleHooks:
    """Global hooks around every `nn.Module` call. Subclasses say what to do before and after a call."""

    _handles: Sequence[Any] = ()

    def install(self) -> None:
        from torch.nn.modules import module

        if not module._has_any_global_hook():  # a program with its own global hooks must get the warning
            warnings.filterwarnings("ignore", message=_COMPILED_WITH_HOOKS, category=UserWarning)
        self._handles = [
            module.register_module_forward_pre_hook(self._before),
            module.register_module_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def _before(self, module: Any, args: Any) -> None:
        raise NotImplementedError

    def _after(self, module: Any, args: Any, output: Any) -> None:
        raise NotImplementedError


class ModuleCalls(ModuleHooks):
    """Calls `start` (with the module) and `end` around each outermost `nn.Module` call of this thread."""

    def __init__(self, start: Callable[[Any], None], end: Callable[[], None]) -> None:
        self._start = start
        self._end = end
        self._depth = 0
        self._thread = threading.get_ident()

    def _before(self, module: Any, args: Any) -> None:
        if not _compiling() and threading.get_ident() == self._thread:
            self._depth += 1
            if self._depth == 1:
                self._start(module)

    def _after(self, module: Any, args: Any, output: Any) -> None:
        if not _compiling() and threading.get_ident() == self._thread and self._depth:
            self._depth -= 1
            if self._depth == 0:
                self._end()


def _compiling() -> bool:
    """Return whether torch.compile is tracing this code: hooks must not become part of the compiled program."""
    import torch

    return bool(torch.compiler.is_compiling())


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo is not None and dynamo.counters.get("frames"))


class ModuleRanges(ModuleHooks):
    """Records every `nn.Module` call, named by its path in the model and its class: "transformer.h.3.attn (Attention)".

    torch's own `with_modules` knows only TorchScript's modules, and the Python tracer, which knows all of them, slows
    the program several times.
    """

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._rows: deque[tuple[str, int, int, int]] = deque()  # name, start, end, thread
        self._models = ModelNames()
        self._local = threading.local()

    def _before(self, module: Any, args: Any) -> None:
        if _compiling():
            return
        stack: list[tuple[int, dict[int, str], int]] = self._local.__dict__.setdefault("stack", [])
        names = next((names_by_id for _, names_by_id, _ in reversed(stack) if id(module) in names_by_id), None)
        if names is None:  # an outermost call, or a module that its parent does not know (in a plain list)
            names = self._models.names(module)
        stack.append((id(module), names, time.time_ns()))

    def _after(self, module: Any, args: Any, output: Any) -> None:
        if _compiling():
            return
        stack = self._local.__dict__.get("stack")
        if stack and stack[-1][0] == id(module):
            _, names, start_ns = stack.pop()
            if self._wanted():
                self._rows.append((names[id(module)], start_ns, time.time_ns(), threading.get_native_id()))

    def take(self) -> Timeline:
        """Return the calls since the last time, as operator rows that are marked as modules."""
        builder = Builder()
        names = set()
        for _ in range(len(self._rows)):
            name, start_ns, end_ns, thread = self._rows.popleft()
            text = f"{MODULE}{name}"
            names.add(builder.intern(text))
            builder.add("op", text, start_ns, end_ns, thread=thread)
        builder.meta["modules"] = sorted(names)
        return builder.build()


class ModelNames:
    """Names the modules of models: their paths as in `named_modules`, with their classes.

    The model itself has no path; its name is its class. Paths of a second model begin with its class, those of another
    model of the same class with "Net#2": rows of one name are added up, so two models must not share names.
    """

    def __init__(self) -> None:
        self._places: dict[str, list[weakref.ref[Any]]] = {}  # by class, in the order of their first calls
        self._first: weakref.ref[Any] | None = None
        self._lock = threading.Lock()

    def names(self, model: Any) -> dict[int, str]:
        """Return names by `id`. They hold for one call only: a later module may have the same address."""
        with self._lock:
            own = self._own(model)
            parts = [(path, part) for path, part in model.named_modules() if path]
            # A model without parts (a loss) needs no prefix, so it does not take the short names.
            if parts and (self._first is None or self._first() is None):
                self._first = weakref.ref(model)
            prefix = "" if self._first is not None and self._first() is model else f"{own}."
        return {id(part): f"{prefix}{path} ({type(part).__name__})" for path, part in parts} | {id(model): own}

    def _own(self, model: Any) -> str:
        """Return the class, with a number if another is alive: a loss that is made in every step is one row."""
        kind = type(model).__name__
        places = self._places.setdefault(kind, [])
        at = next((i for i, place in enumerate(places) if place() is model), None)
        if at is None:
            at = next((i for i, place in enumerate(places) if place() is None), len(places))
            places[at : at + 1] = [weakref.ref(model)]
        return kind if at == 0 else f"{kind}#{at + 1}"


# -- the main thread, asked from another -----------------------------------------------------------------------------

# Parts of torch that call Python from Python: while their Python code runs, they have no operator under way.
_PLAIN = ("nn", "optim", "amp", "cuda", "utils/data", "utils/_contextlib.py", "serialization.py", "storage.py")
_LATER_S = 0.01  # by then a call that was interrupted has certainly returned to the interpreter
_PENDING = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class MainThread:
    """Runs a function on the main thread between two of its bytecodes, when no operator of torch is under way.

    Kineto can only be stopped by the thread that started it, and a program without marked steps or regions never calls
    us. Module hooks would be called, but adding and removing them makes torch.compile compile again.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._asked = False
        self._entry = _PENDING(self._run)  # keep it alive: the interpreter has only its address

    def ask(self) -> None:
        """Ask for a call soon; asking again before that call has no effect."""
        if not self._asked:
            self._asked = ctypes.pythonapi.Py_AddPendingCall(self._entry, None) == 0

    def _run(self, _: Any) -> int:
        self._asked = False
        try:
            if not inside_torch(sys._getframe(1)):
                self._call()
        except BaseException as exc:  # noqa: BLE001  (ctypes would print and swallow a Ctrl-C)
            threading.Timer(_LATER_S, _raise_in, (threading.get_ident(), type(exc))).start()
        return 0


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def model_runs(frame: FrameType | None) -> bool:
    """Return whether a stack is inside the call of an `nn.Module` that is not being compiled."""
    torch: Any = sys.modules.get("torch")
    call = torch.nn.Module._call_impl.__code__ if torch is not None and hasattr(torch, "nn") else None
    in_module = False
    while frame is not None:
        if frame.f_code.co_filename.endswith("_dynamo/convert_frame.py"):
            return False
        in_module = in_module or frame.f_code is call
        frame = frame.f_back
    return in_module


def inside_torch(frame: FrameType | None) -> bool:
    """Return whether a stack has Python code that torch's C++ may have called: then an operator is under way."""
    root = str(Path(sys.modules["torch"].__file__ or "").parent) + "/" if "torch" in sys.modules else "\0"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(root) and not name[len(root) :].startswith(_PLAIN):
            return True
        frame = frame.f_back
    return False
