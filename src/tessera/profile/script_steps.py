"""Finds the steps of a script that `tessera run` runs unchanged, by its optimizer or its modules."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import itertools
import logging
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..errors import TesseraError
from ..notes import Note
from ..recording import COMPILATION, EVALUATION
from .compilations import Compilations
from .optimizer_steps import OptimizerSteps
from .recorder import Session
from .torch_hooks import ModeChanges, ModuleCalls, NoGradBlocks

WITHOUT_STEPS = (
    "nothing was traced: the script came neither to a GPU nor to an optimizer step; steps of a model on the CPU are "
    "found with --steps"
)
WITHOUT_TORCH = Note(
    "nothing was traced: the script did not import torch; `tessera run --mode sampling` shows which of its functions "
    "and lines use the energy",
    "no_torch",
)
BEFORE_TORCH = "nothing was traced: the script was ended before it had imported torch"
_log = logging.getLogger("tessera")

_CALLBACKS = "torch._dynamo.callback"
_RECENT, _FEWEST, _OFTEN, _MOST_BLOCKS = 32, 2, 6, 10_000
_STOPPED = 3
_LONG_NS = 5_000_000  # the end of a longer block is noted in the power samples
_LONG = 0.5  # evaluation lasts at least this share of a step; shorter blocks hardly change joules


class ScriptSteps:
    """Begins tracing and counts steps: by the optimizer, or, in a script without one, by calls of an outermost module.

    In a program with an optimizer, evaluation is a region of its own and part of no step. Evaluation is what the
    program does between `eval()` and `train()`, and long blocks without gradients that not every step has. Compilation
    is a region too, wherever it happens.

    Module calls are counted only if steps were asked for (`by_modules`): the hooks cost two microseconds per module.
    """

    def __init__(self, session: Session, *, by_modules: bool) -> None:
        self._session = session
        self._by_modules = by_modules
        self._optimizer = OptimizerSteps(self._optimizer_stepped, self._optimizer_made, self._steps_changed)
        self._modules: ModuleCalls | None = None
        self._modes = ModeChanges(self._mode_changed)
        self._evaluated_ns = 0  # begin of evaluation; 0: the program does not evaluate
        self._gradless = GradlessBlocks()
        self._no_grad = NoGradBlocks(self._gradless_ended)
        self._finder = AfterImport("torch", self._torch_came)
        self._compilations = Compilations(self._compiled)
        self._compiler_finder = AfterImport(_CALLBACKS, self._compilations.install)
        self._begun = False
        self._calls = RecurringCalls()
        self._called_ns = 0  # start of the call that began the last step
        self._returned_ns = 0  # end of the last outermost call
        self._has_optimizer = False
        self._optimized = False

    def install(self) -> None:
        if "torch" in sys.modules:
            self._torch_came(sys.modules["torch"])
        else:
            sys.meta_path.insert(0, self._finder)

    def remove(self, *, interrupted: bool = False) -> None:
        """Undo all changes to Python and torch, and end the last step of a script without an optimizer.

        `interrupted`: a signal ended the script, so what it would have imported is unknown.
        """
        for finder in (self._finder, self._compiler_finder):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        self._compilations.remove()
        self._optimizer.remove()
        self._modes.remove()
        self._no_grad.remove()
        self._mode_changed(True)
        self._evaluated_without_gradients(is_last=True)
        if self._modules is not None:
            self._modules.remove()
        if self._session.options.traces and not self._session.tracing:
            without = BEFORE_TORCH if interrupted else WITHOUT_TORCH
            self._session.notes.append(WITHOUT_STEPS if "torch" in sys.modules else without)
        if self._by_modules and not self._optimized and self._returned_ns > self._called_ns > 0:
            self._session.end_step(self._returned_ns)

    # -- torch ---------------------------------------------------------------------------------------------------

    def _torch_came(self, torch: Any) -> None:
        self._session.compiling = torch.compiler.is_compiling
        self._optimizer.install()
        self._modes.install()
        self._no_grad.install()
        if _CALLBACKS in sys.modules:
            self._compilations.install(sys.modules[_CALLBACKS])
        else:
            sys.meta_path.insert(0, self._compiler_finder)
        if self._by_modules:
            # Until the end: removing hooks would make torch.compile compile again.
            self._modules = ModuleCalls(self._module_called, self._module_returned)
            self._modules.install()
        else:
            self._session.next_step_begins(None)
        devices = [torch.cuda] + ([torch.xpu] if hasattr(torch, "xpu") else [])
        if not self._session.sees_gpu:
            if self._session.options.with_stack:
                _import_compiler()
            self._begin()
            return
        for device in devices:
            # Runs once the device is initialised: to ask for it now would fix CUDA_VISIBLE_DEVICES and forbid forks.
            if hasattr(device, "_lazy_call"):
                device._lazy_call(self._begin)

    def _begin(self) -> None:
        if self._begun or threading.current_thread() is not threading.main_thread():
            return  # Kineto belongs to the thread that starts it, and the main thread has more to show
        self._begun = True
        try:
            self._session.begin_tracing()
        except (TesseraError, RuntimeError) as exc:
            self._session.notes.append(f"nothing was traced: {exc}")

    # -- steps ---------------------------------------------------------------------------------------------------

    def _module_called(self, module: Any) -> None:
        now_ns = time.time_ns()
        if not self._called_ns:
            self._begin()  # needed for a script that uses only the CPU of a machine with GPUs
            self._session.next_step_begins(now_ns)
            self._called_ns = now_ns
        begun_ns = self._calls.add(module, now_ns)
        if begun_ns is None or self._optimized or self._accumulates():
            return
        if not self._session.steps:
            self._session.next_step_begins(begun_ns)  # modules that were called only once before are in no step
        self._session.end_step(now_ns)
        self._called_ns = now_ns

    def _accumulates(self) -> bool:
        """Return whether a call is a part of the first step of an optimizer, which adds up the gradients of several."""
        return self._has_optimizer and bool(sys.modules["torch"].is_grad_enabled())

    def _module_returned(self) -> None:
        self._returned_ns = time.time_ns()

    def _optimizer_made(self) -> None:
        self._has_optimizer = True
        if self._session._tracing is not None:
            self._session._tracing.expect_steps()

    def _steps_changed(self) -> None:
        """Forget the known blocks: another optimizer ends the steps, so lengths of former steps tell nothing."""
        self._gradless = GradlessBlocks()

    def _mode_changed(self, trains: bool) -> None:
        """Begin evaluation after a step, end it with training. A frozen module stays in it (`_optimizer_stepped`)."""
        self._session.note_edge()
        now_ns = time.time_ns()
        if not trains and self._optimized:
            self._evaluated_ns = self._evaluated_ns or now_ns
        elif trains and self._evaluated_ns:
            self._session.add_region(EVALUATION, self._evaluated_ns, now_ns, threading.get_native_id())
            self._session.next_step_begins(now_ns)
            self._evaluated_ns = 0
            self._gradless.clear()

    def _gradless_ended(self, start_ns: int, end_ns: int) -> None:
        if self._optimizer.is_stepping:
            return  # `@torch.no_grad()` around the step itself, as L-BFGS has it
        self._gradless.add(start_ns, end_ns)
        if end_ns - start_ns > _LONG_NS:
            self._session.note_edge()

    def _compiled(self, start_ns: int, end_ns: int) -> None:
        self._session.add_region(COMPILATION, start_ns, end_ns, threading.get_native_id())

    def _evaluated_without_gradients(self, *, is_last: bool) -> None:
        found = self._gradless.end_step(time.time_ns(), is_last=is_last)
        if found is not None and self._optimized:
            self._session.add_region(EVALUATION, *found, threading.get_native_id())
            self._session.next_step_begins(found[1])

    def _optimizer_stepped(self) -> None:
        self._evaluated_without_gradients(is_last=False)
        self._optimized = True
        self._evaluated_ns = 0  # the program trains, so the module in evaluation mode is a frozen part of the model
        self._begin()
        self._session.end_step(time.time_ns())


def _import_compiler() -> None:
    """Import what torch imports with the first optimizer: a hundred thousand Python calls that are not the program's.

    They take two seconds, but twenty if they are traced with their stacks.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")


class RecurringCalls:
    """Finds the outermost module whose calls begin the steps of a program without an optimizer.

    It is the first module that is called again. If an embedding and an encoder take turns, that is the embedding; a
    module that is called only once is never chosen. Modules without parameters (a ReLU between two layers) count only
    if there are no others. If another module is called `_STOPPED` times in between, it is chosen instead: a warm-up has
    ended.
    """

    def __init__(self) -> None:
        self._found: weakref.ref[Any] | None = None
        self._learns = False
        self._first_ns: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._between: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # calls since a step began

    def add(self, module: Any, now_ns: int) -> int | None:
        """Note a call of a module. If it ends a step, return when the module was first called, else None."""
        learns = any(True for _ in module.parameters())
        if learns and not self._learns:
            self._learns, self._found = True, None
        first_ns = self._first_ns.setdefault(module, now_ns)
        found = None if self._found is None else self._found()
        if found is not module:
            self._between[module] = calls = self._between.get(module, 0) + 1
            if first_ns == now_ns or learns < self._learns or (found is not None and calls < _STOPPED):
                return None
            self._found = weakref.ref(module)
        self._between.clear()
        return first_ns


class GradlessBlocks:
    """Finds evaluation among the blocks without gradients between two steps.

    Blocks that most steps have (a teacher's forward pass, an accuracy, clipping, a mean of the weights) are part of the
    steps. Evaluation consists of further blocks in a row that only some steps have and that last at least half as long
    as a step. If half of the steps have them (a rollout before every two updates), they are not evaluation.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int]] = []
        self._begun_ns = 0
        self._plain: deque[tuple[int, int]] = deque(maxlen=_RECENT)  # duration and number of blocks of usual steps
        self._had_more: deque[bool] = deque(maxlen=_OFTEN)  # whether each of the last steps had possible evaluation

    def add(self, start_ns: int, end_ns: int) -> None:
        """Add a block without gradients that has ended."""
        if len(self._blocks) < _MOST_BLOCKS:
            self._blocks.append((start_ns, end_ns))

    def clear(self) -> None:
        """Forget the blocks since the last step: they have been counted otherwise."""
        self._blocks.clear()
        self._begun_ns = 0

    def end_step(self, now_ns: int, *, is_last: bool = False) -> tuple[int, int] | None:
        """End a step; return the begin and end of its evaluation, or None. `is_last`: the program ended instead."""
        blocks, self._blocks = self._blocks, []
        begun_ns, self._begun_ns = self._begun_ns, now_ns
        if len(self._plain) >= _FEWEST:
            usual = 0 if is_last else statistics.median_low(count for _, count in self._plain)
            apart = _longest_run(blocks, len(blocks) - usual)
            step_ns = statistics.median(lasts for lasts, _ in self._plain)
            has_more = bool(apart) and apart[-1][1] - apart[0][0] >= _LONG * step_ns
            self._had_more.append(has_more)
            if has_more and (is_last or 2 * sum(self._had_more) < _OFTEN):
                return apart[0][0], apart[-1][1]
        if begun_ns:
            self._plain.append((now_ns - begun_ns, len(blocks)))
        return None


def _longest_run(blocks: Sequence[tuple[int, int]], count: int) -> Sequence[tuple[int, int]]:
    """Return the `count` consecutive blocks that last longest together."""
    if count <= 0:
        return ()
    until_ns = list(itertools.accumulate((end - start for start, end in blocks), initial=0))
    begin = max(range(len(blocks) - count + 1), key=lambda at: until_ns[at + count] - until_ns[at])
    return blocks[begin : begin + count]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once, right after the module was imported."""

    def __init__(self, name: str, call: Callable[[Any], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec from the other finders, with a loader that calls us back."""
        if fullname != self._name:
            return None
        # Stay until the module is executed: many libraries only ask whether torch exists, and import it later.
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        spec = next((s for f in others if (s := f.find_spec(fullname, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_call(module: ModuleType) -> None:
            execute(module)
            if self not in sys.meta_path:
                return  # already called, or removed
            sys.meta_path.remove(self)
            try:
                self._call(module)
            except Exception:  # noqa: BLE001  (the program's import has succeeded, and must not fail because of us)
                _log.exception("tessera cannot follow %s", self._name)

        spec.loader.exec_module = then_call  # type: ignore[method-assign]
        return spec
