"""What a function works with: the modules and optimizers it reaches through arguments, closure, globals and `self`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The outermost modules and the optimizers of a function; `tensors` are those among its arguments."""

    modules: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    tensors: tuple[Any, ...]

    @property
    def trains(self) -> bool:
        """Whether calling it changes weights: it has an optimizer."""
        return bool(self.optimizers)

    def submodules(self) -> Iterator[Any]:
        """Every module, outermost first."""
        for module in self.modules:
            yield from module.modules()

    @property
    def device(self) -> Any:
        """Where it runs: the device of its parameters or arguments; None where there are none."""
        for module in self.modules:
            for parameter in module.parameters():
                return parameter.device
        return next((t.device for t in self.tensors), None)


def reach(fn: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Reach:
    """Look through a function, one level of containers deep."""
    import torch

    modules: list[Any] = []
    optimizers: list[Any] = []
    tensors: list[Any] = []
    for value in _values(fn, args, kwargs or {}):
        if isinstance(value, torch.nn.Module):
            modules.append(value)
        elif isinstance(value, torch.optim.Optimizer):
            optimizers.append(value)
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
    inner = {id(sub) for m in modules for sub in m.modules() if sub is not m}
    outer = [m for m in modules if id(m) not in inner]
    return Reach(modules=_once(outer), optimizers=_once(optimizers), tensors=_once(tensors))


def _once(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple({id(v): v for v in values}.values())


def _values(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for value in (*args, *kwargs.values(), *_held(fn)):
        yield value
        if isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value
        elif hasattr(value, "__dict__") and not inspect.ismodule(value) and not inspect.isclass(value):
            yield from _attributes(value)


def _attributes(value: Any) -> Iterator[Any]:
    """What an object holds: a trainer with its model and optimizer."""
    import torch

    if not isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)) and not callable(value):
        yield from list(vars(value).values())


def _held(fn: Any) -> Iterator[Any]:
    """What a function holds on to without being given it."""
    fn = inspect.unwrap(fn) if not isinstance(fn, functools.partial) else fn
    if isinstance(fn, functools.partial):
        yield from (*fn.args, *fn.keywords.values())
        yield from _held(fn.func)
        return
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        yield owner
        yield from _attributes(owner)
    fn = getattr(fn, "__func__", fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        if owner is None:
            yield fn  # a module, or another object that is called
        return
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet filled
            continue
    yield from (fn.__defaults__ or ())
    yield from (fn.__globals__[name] for name in code.co_names if name in fn.__globals__)
