"""What a callable works with besides its arguments: what it closes over, is bound to, and names in its module.

A step is mostly a function of a script: model, optimizer, scaler, schedule and average are variables around it. They
are found by name; what holds too many values, or needs a copy too large, is left as it is and named in `left`.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .leaves import arrays, bytes_of, is_within, memory_of

MOST = 20_000
"""Values under one name that are looked through at every run; more are a data set or a vocabulary, not a state."""

# Of the host's free memory, what copies may take.
_ROOM = 0.3
# What these modules hold is no program's own, nor is that of packages that were installed (and may load at a look).
_LIBRARIES = frozenset({"torch", "numpy", "tessera", "triton", *sys.stdlib_module_names})
_EMPTY = (types.ModuleType, type, types.BuiltinFunctionType)
_CODE = (types.FunctionType, types.MethodType, functools.partial)


class Outside:
    """The variables around a callable, by name. `left` are those that are not kept, with the reason."""

    def __init__(self, call: Any) -> None:
        self._cells: dict[str, types.CellType] = {}
        self._globals: dict[str, tuple[dict[str, Any], str]] = {}
        self._fixed: dict[str, Any] = {}
        self._seen: dict[int, Any] = {}
        self._variables: set[tuple[int, str]] = set()  # a cell or a module's names, and which one
        self._todo = deque([call])
        self.left: dict[str, str] = {}
        while self._todo and len(self._seen) < MOST:
            self._callable(self._todo.popleft())
        self.left |= {
            name: f"holds more than {MOST} values" for name, value in self.now().items() if not is_within(value, MOST)
        }

    def now(self) -> dict[str, Any]:
        """What each name stands for; those that stand for nothing yet are not there."""
        found = dict(self._fixed)
        found |= {name: space[key] for name, (space, key) in self._globals.items() if key in space}
        found |= {name: cell.cell_contents for name, cell in self._cells.items() if _is_filled(cell)}
        return {name: value for name, value in found.items() if name not in self.left}

    def put(self, values: Mapping[str, Any]) -> None:
        """Let names stand for these values again (`nonlocal n; n += 1`)."""
        for name, (space, key) in self._globals.items():
            if name in values and space.get(key) is not values[name]:
                space[key] = values[name]
            elif name not in values and name not in self.left:
                space.pop(key, None)
        for name, cell in self._cells.items():
            if name in values and not (_is_filled(cell) and cell.cell_contents is values[name]):
                cell.cell_contents = values[name]
            elif name not in values and name not in self.left and _is_filled(cell):
                del cell.cell_contents

    def leave_large(self, known: frozenset[int]) -> None:
        """Leave the largest, until copies of the others fit; of what lies in `known` memory others have copies."""
        room = _ROOM * _free_bytes()
        sizes = {
            name: sum(bytes_of(t) for t in arrays(value) if memory_of(t) not in known)
            for name, value in self.now().items()
        }  # fmt: skip
        for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
            if sum(sizes.values()) <= room:
                break
            self.left[name] = f"has {sizes.pop(name) / 1e9:.1f} GB, of which no copy fits"

    # -- looking -------------------------------------------------------------------------------------------------

    def _callable(self, call: Any) -> None:
        """A function, a method, a partial, or an object that can be called."""
        if id(call) in self._seen:
            return
        self._seen[id(call)] = call
        if isinstance(call, functools.partial):
            for name, value in (*((f"argument {i}", v) for i, v in enumerate(call.args)), *call.keywords.items()):
                self._fix(name, value)
            self._todo.append(call.func)
        elif isinstance(call, types.MethodType):
            self._fix("self", call.__self__)
            self._todo.append(call.__func__)
        elif isinstance(call, types.FunctionType):
            self._function(call)
        elif isinstance(type(call).__call__, types.FunctionType):
            self._fix("self", call)
            self._todo.append(type(call).__call__)
        elif (inner := _wrapped(call)) is not None:
            self._todo.append(inner)

    def _function(self, fn: types.FunctionType) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if self._is_new(cell, ""):
                self._cells[self._free(name)] = cell
                self._follow(cell.cell_contents if _is_filled(cell) else None)
        if _is_installed(fn):  # torch.no_grad()'s, around a function of ours
            return
        wanted, defaults = fn.__code__.co_varnames[: fn.__code__.co_argcount], fn.__defaults__ or ()
        for name, value in zip(wanted[len(wanted) - len(defaults) :], defaults, strict=True):
            self._fix(name, value)
        for name, value in (fn.__kwdefaults__ or {}).items():
            self._fix(name, value)
        if vars(fn):
            self._fix(fn.__name__, vars(fn))
        self._names(fn)

    def _names(self, fn: types.FunctionType) -> None:
        """Variables of its module, but for what holds no values: modules, classes, functions of C."""
        space = fn.__globals__
        for name, is_stored in _named(fn.__code__):
            if not is_stored and issubclass(type(space.get(name)), (types.NoneType, *_EMPTY)):
                continue
            if self._is_new(space, name):
                self._globals[self._free(name)] = space, name
                self._follow(space.get(name))

    def _fix(self, name: str, value: Any) -> None:
        self._fixed[self._free(name)] = value
        self._follow(value)

    def _follow(self, value: Any) -> None:
        """Functions work with more; what is no function is looked through by its values."""
        if issubclass(type(value), _CODE) or _wrapped(value) is not None:
            self._todo.append(value)

    def _is_new(self, where: Any, name: str) -> bool:
        """Whether nobody asked for this variable before."""
        known = (id(where), name) in self._variables
        self._variables.add((id(where), name))
        return not known

    def _free(self, name: str) -> str:
        """A name that nothing has yet."""
        taken, number, found = (self._cells, self._globals, self._fixed), 1, name
        while any(found in names for names in taken):
            number += 1
            found = f"{name} {number}"
        return found


def _wrapped(call: Any) -> Any:
    """What functools.cache is around. No attribute that an object makes up when it is asked: some have all."""
    found = inspect.getattr_static(call, "__wrapped__", None)
    return found if callable(found) else None


def _named(code: types.CodeType) -> Iterator[tuple[str, bool]]:
    """Globals that a function names, functions in it too; and whether it lets them stand for something else."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"):
            yield instruction.argval, instruction.opname != "LOAD_GLOBAL"
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _named(inner)


def _is_installed(fn: types.FunctionType) -> bool:
    if str(fn.__globals__.get("__name__")).partition(".")[0] in _LIBRARIES:
        return True
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(fn.__code__.co_filename).parts)


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _free_bytes() -> float:
    """What the kernel says is available; without its word, no limit."""
    try:
        found = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        return float(found["MemAvailable"].split()[0]) * 1024
    except (OSError, LookupError, ValueError):
        return float("inf")
