"""Find the variables a callable works with besides its arguments: closure, bound object, defaults, globals.

A training step is mostly a function of a script: model, optimizer, scaler and schedule are variables around it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .nested import count_bytes, find_arrays, find_instances, holds_at_most, storage_address

MAX_VALUES = 20_000
"""A variable that holds more values is a data set or a vocabulary, not state: it is left as it is."""

# The part of the host's free memory that copies may take.
_COPY_SHARE = 0.3
# Modules whose globals are not the program's own; those of installed packages are not either.
_LIBRARIES = frozenset({"torch", "numpy", "tessera", "triton", *sys.stdlib_module_names})
_STATELESS = (types.ModuleType, type, types.BuiltinFunctionType)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_UNSET: Any = object()


@dataclass(frozen=True, slots=True)
class _Variable:
    """A place that holds a value; `_UNSET` where it holds none."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


def _make_cell(cell: types.CellType) -> _Variable:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return _UNSET

    def write(value: Any) -> None:
        if value is _UNSET:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    return _Variable(read, write)


def _make_global(namespace: dict[str, Any], name: str) -> _Variable:
    def write(value: Any) -> None:
        if value is _UNSET:
            namespace.pop(name, None)
        else:
            namespace[name] = value

    return _Variable(lambda: namespace.get(name, _UNSET), write)


def _make_partial_argument(call: functools.partial[Any], index: int) -> _Variable:
    def write(value: Any) -> None:
        args = (*call.args[:index], value, *call.args[index + 1 :])
        # The arguments of a partial are read-only but for its state.
        call.__setstate__((call.func, args, call.keywords, call.__dict__))  # type: ignore[attr-defined]

    return _Variable(lambda: call.args[index], write)


def _make_constant(value: Any) -> _Variable:
    """Cannot be given another value: a bound object, a default, a keyword of a partial."""
    return _Variable(lambda: value, lambda _value: None)


class Surroundings:
    """The variables around a callable, by name. `skipped` are those that are not restored, with the reason."""

    def __init__(self, call: Any) -> None:
        self._variables: dict[str, _Variable] = {}
        self._visited: dict[int, Any] = {}
        self._places: set[tuple[int, str]] = set()  # a cell or a namespace, and the name in it
        self._todo = deque([call])
        self.skipped: dict[str, str] = {}
        while self._todo and len(self._visited) < MAX_VALUES:
            self._visit(self._todo.popleft())
        for name, value in self.values().items():
            if not holds_at_most(value, MAX_VALUES):
                self.skipped[name] = f"holds more than {MAX_VALUES} values"

    def values(self) -> dict[str, Any]:
        """Return the value of each variable that has one."""
        values = {name: variable.read() for name, variable in self._variables.items() if name not in self.skipped}
        return {name: value for name, value in values.items() if value is not _UNSET}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Give the variables these values again (`nonlocal n; n += 1`)."""
        for name, variable in self._variables.items():
            value = values.get(name, _UNSET)
            if name not in self.skipped and variable.read() is not value:
                variable.write(value)

    def skip_large(self, copied: frozenset[int]) -> None:
        """Skip the largest variables until copies of the others fit; memory in `copied` needs no copy."""
        room = _COPY_SHARE * _read_free_bytes()
        sizes = {
            name: sum(count_bytes(t) for t in find_arrays(value) if storage_address(t) not in copied)
            for name, value in self.values().items()
        }
        for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
            if sum(sizes.values()) <= room:
                break
            self.skipped[name] = f"has {sizes.pop(name) / 1e9:.1f} GB, of which no copy fits"

    def _visit(self, call: Any) -> None:
        """Look at a function, a method, a partial, or an object that can be called."""
        if id(call) in self._visited:
            return
        self._visited[id(call)] = call
        if isinstance(call, functools.partial):
            for i in range(len(call.args)):
                self._add(f"argument {i}", _make_partial_argument(call, i))
            for name, value in call.keywords.items():
                self._add(name, _make_constant(value))
            self._todo.append(call.func)
        elif isinstance(call, types.MethodType):
            self._add("self", _make_constant(call.__self__))
            self._todo.append(call.__func__)
        elif isinstance(call, types.FunctionType):
            self._visit_function(call)
        elif isinstance(type(call).__call__, types.FunctionType):
            self._add("self", _make_constant(call))
            self._todo.append(type(call).__call__)
        elif (inner := _unwrap(call)) is not None:
            self._todo.append(inner)

    def _visit_function(self, fn: types.FunctionType) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if self._is_new(cell, ""):
                self._add(name, _make_cell(cell))
        if _is_installed(fn):  # torch.no_grad()'s, around a function of the program
            return
        names, defaults = fn.__code__.co_varnames[: fn.__code__.co_argcount], fn.__defaults__ or ()
        for name, value in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            self._add(name, _make_constant(value))
        for name, value in (fn.__kwdefaults__ or {}).items():
            self._add(name, _make_constant(value))
        if vars(fn):
            self._add(fn.__name__, _make_constant(vars(fn)))
        for name, is_stored in _list_globals(fn.__code__):
            stateless = issubclass(type(fn.__globals__.get(name)), (types.NoneType, *_STATELESS))
            if (is_stored or not stateless) and self._is_new(fn.__globals__, name):
                self._add(name, _make_global(fn.__globals__, name))

    def _add(self, name: str, variable: _Variable) -> None:
        """Add a variable under a name that is free, and follow the functions in its value."""
        number, free = 1, name
        while free in self._variables:
            number += 1
            free = f"{name} {number}"
        self._variables[free] = variable
        value = variable.read()
        if issubclass(type(value), _FUNCTIONS) or _unwrap(value) is not None:
            self._todo.append(value)
        elif holds_at_most(value, MAX_VALUES):
            self._todo.extend(find_instances(value, *_FUNCTIONS))

    def _is_new(self, place: Any, name: str) -> bool:
        known = (id(place), name) in self._places
        self._places.add((id(place), name))
        return not known


def find_models(*things: Any) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    """Return the models and optimizers that callables, their surroundings and other things hold.

    Objects are judged by their type and never asked for an attribute: a `__getattr__` may raise, import, or wait.
    """
    calls = [thing for thing in things if callable(thing)] + find_instances(things, *_FUNCTIONS)
    everything = [things, *(Surroundings(call).values() for call in calls)]
    return find_instances(everything, torch.nn.Module), find_instances(everything, torch.optim.Optimizer)


def _unwrap(call: Any) -> Any:
    """Return what functools.cache wraps, without asking for attributes that an object makes up."""
    inner = inspect.getattr_static(call, "__wrapped__", None)
    return inner if callable(inner) else None


def _list_globals(code: types.CodeType) -> Iterator[tuple[str, bool]]:
    """Yield the globals that a function and the functions in it name, and whether it assigns them."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"):
            yield instruction.argval, instruction.opname != "LOAD_GLOBAL"
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _list_globals(inner)


def _is_installed(fn: types.FunctionType) -> bool:
    if str(fn.__globals__.get("__name__")).partition(".")[0] in _LIBRARIES:
        return True
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(fn.__code__.co_filename).parts)


def _read_free_bytes() -> float:
    """Return the memory that Linux calls available; infinity where it does not say."""
    with contextlib.suppress(OSError, LookupError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        return float(lines["MemAvailable"].split()[0]) * 1024
    return float("inf")
