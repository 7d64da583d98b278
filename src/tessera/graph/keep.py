"""What a program keeps beside its parameters, as it was before the capture: caches, counters, schedulers, leaf tensors.

A captured program runs once, on meta tensors. What it writes into dicts, lists and objects of its own on the way is
taken back afterwards, in place, so that the real program finds them as it left them.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch

_DEEPEST = 5
_CONTAINERS = (dict, list, set, OrderedDict)  # a module keeps its hooks in ordered ones
_MOST = 20_000  # containers: a program's own caches are few, a data set in a list is not one


class Kept:
    """Copies of containers and objects, and the way back."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()

    def note(self, thing: Any, depth: int = 0) -> None:
        """Remember a container or an object, and what it holds."""
        if id(thing) in self._seen or depth > _DEEPEST or len(self._saved) > _MOST:
            return
        if type(thing) in _CONTAINERS:
            inner = list(thing.values()) if isinstance(thing, dict) else list(thing)
            self._remember(thing, thing.copy(), inner, depth)
        elif _plain_object(thing):
            self._remember(thing, dict(vars(thing)), list(vars(thing).values()), depth)

    def _remember(self, thing: Any, copy: Any, inner: list[Any], depth: int) -> None:
        self._seen.add(id(thing))
        self._saved.append((thing, copy))
        for item in inner[:_MOST]:
            self.note(item, depth + 1)

    def put_back(self) -> None:
        """Everything as it was."""
        for thing, copy in self._saved:
            if isinstance(thing, list):
                thing[:] = copy
            else:
                held = thing if isinstance(thing, (dict, set)) else vars(thing)
                held.clear()
                held.update(copy)


def _plain_object(thing: Any) -> bool:
    """An object of the program's own: no tensor, module, function, class, and nothing of Python's or numpy's."""
    if isinstance(thing, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type)) or callable(thing):
        return False
    module = type(thing).__module__.partition(".")[0]
    known = ("builtins", "numpy", "collections", "threading", "_thread", "torch", "logging", "pathlib", "enum")
    own = module not in known or isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
    return own and isinstance(getattr(thing, "__dict__", None), dict)


@contextlib.contextmanager
def kept(modules: list[torch.nn.Module], program: Callable[..., Any]) -> Iterator[None]:
    """The containers of modules and of a callable's surroundings, put back at the end."""
    found = Kept()
    for module in (m for root in modules for m in root.modules()):
        for name, value in module.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                found.note(value)
    if not isinstance(program, torch.nn.Module):
        for value in surroundings(program):
            found.note(value)
    try:
        yield
    finally:
        found.put_back()


def surroundings(program: Any) -> list[Any]:
    """What a callable holds on to: its object and its closure."""
    held = [program.__self__] if hasattr(program, "__self__") else []
    plain = getattr(program, "__func__", program)
    for cell in getattr(plain, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            held.append(cell.cell_contents)
    if not hasattr(plain, "__code__") and not isinstance(program, type):
        held.append(program)  # an object with __call__
    return held


class _Leaves:
    """Tensors that want gradients, wherever a callable finds them: closures, globals, and what those hold."""

    def __init__(self, twin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._twin = twin
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()

    def visit(self, thing: Any, depth: int = 0) -> None:
        """Replace the leaves within a function, a container or an object of the program's own."""
        if id(thing) in self._seen or depth > _DEEPEST or len(self._seen) > _MOST:
            return
        self._seen.add(id(thing))
        if isinstance(thing, functools.partial):
            self._partial(thing, depth)
        elif type(thing) in (dict, OrderedDict):
            self._items(thing, list(thing), depth)
        elif type(thing) is list:
            self._items(thing, range(len(thing)), depth)
        elif isinstance(getattr(thing, "__func__", thing), FunctionType):
            self._function(thing, depth)
        elif _plain_object(thing) or (callable(thing) and not isinstance(thing, (torch.nn.Module, type))):
            self._items(getattr(thing, "__dict__", {}), list(getattr(thing, "__dict__", {})), depth)

    def _partial(self, thing: functools.partial[Any], depth: int) -> None:
        self.visit(thing.func, depth + 1)
        self.visit(thing.keywords, depth + 1)

        def put(args: tuple[Any, ...]) -> None:  # arguments of a partial are read-only but for its state
            thing.__setstate__((thing.func, args, thing.keywords, thing.__dict__))  # type: ignore[attr-defined]

        self._one(thing.args, put, depth)

    def put_back(self) -> None:
        """Everything as it was."""
        for undo in reversed(self._undo):
            with contextlib.suppress(IndexError):  # a list that the program has shortened: `Kept` knows what it was
                undo()

    def _function(self, thing: Any, depth: int) -> None:
        self.visit(getattr(thing, "__self__", None), depth + 1)
        plain = getattr(thing, "__func__", thing)
        for cell in plain.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                self._one(cell.cell_contents, functools.partial(setattr, cell, "cell_contents"), depth)
        around = plain.__globals__
        self._items(around, [n for n in plain.__code__.co_names if _own(around.get(n), around)], depth)

    def _items(self, held: Any, keys: Iterable[Any], depth: int) -> None:
        for key in list(keys)[:_MOST]:
            self._one(held[key], functools.partial(held.__setitem__, key), depth)

    def _one(self, value: Any, put: Callable[[Any], None], depth: int) -> None:
        found = self._replaced(value, depth)
        if found is not value:
            put(found)
            self._undo.append(functools.partial(put, value))

    def _replaced(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            wanted = value.requires_grad and value.is_leaf and value.device.type != "meta"
            return self._twin(value) if wanted else value
        if type(value) is tuple:
            found = tuple(self._replaced(item, depth + 1) for item in value)
            return value if all(a is b for a, b in zip(found, value, strict=True)) else found
        self.visit(value, depth + 1)
        return value


def _own(value: Any, around: Any) -> bool:
    """Of a module's names only what the program made there: not the functions and classes of libraries."""
    if issubclass(type(value), types.FunctionType):  # by its type: a stranger's __getattr__ may do anything
        return value.__globals__ is around
    return issubclass(type(value), (torch.Tensor, dict, list, tuple))


@contextlib.contextmanager
def leaves(program: Any, twin: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Tensors of a callable that want gradients, replaced by twins: a meta gradient cannot reach one on the CPU."""
    found = _Leaves(twin)
    try:
        if not isinstance(program, torch.nn.Module):
            found.visit(program)
        yield
    finally:
        found.put_back()
