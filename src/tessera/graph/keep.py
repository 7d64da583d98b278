"""What a program keeps beside its parameters, as it was before the capture: caches, counters, schedulers, leaf tensors.

A captured program runs once, on meta tensors. What it writes into dicts, lists and objects of its own on the way is
taken back afterwards, in place, so that the real program finds them as it left them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_DEEPEST = 5
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
        if isinstance(thing, (dict, list, set)) and type(thing) in (dict, list, set):
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


@contextlib.contextmanager
def leaves(program: Any, twin: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Tensors in a closure that want gradients, replaced by twins: a meta gradient cannot reach a tensor on the CPU."""
    cells = getattr(getattr(program, "__func__", program), "__closure__", None) or ()
    changed = []
    for cell in cells:
        with contextlib.suppress(ValueError):
            value = cell.cell_contents
            if (
                isinstance(value, torch.Tensor)
                and value.requires_grad
                and value.is_leaf
                and value.device.type != "meta"
            ):
                changed.append((cell, value))
    try:
        for cell, value in changed:
            cell.cell_contents = twin(value)
        yield
    finally:
        for cell, value in changed:
            cell.cell_contents = value
