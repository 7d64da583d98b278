"""Find tensors and plain values inside tuples, dictionaries, dataclasses and objects of any class.

Nothing needs to be registered: an object is opened where all of its state is in its `__dict__`. A value that cannot be
opened is an `Unreadable`.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import io
import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_BUILTIN_TYPES = (type(None), bool, int, float, complex, str, bytes, range, slice)
PLAIN_TYPES = (*_BUILTIN_TYPES, enum.Enum, type, torch.dtype, torch.device)
"""Types whose values can be compared with `==`."""

MAX_DEPTH = 24
"""Values that lie deeper (a linked list) are not looked for."""

MAX_ALIASES = 10_000
"""Values reported under more than one name: lists that share lists have more names than anybody can list."""

# Set by CPython for classes made by C code (Include/object.h, Py_TPFLAGS_IMMUTABLETYPE): they may hide state.
_MADE_IN_C = 1 << 8
# Not opened: models and optimizers are saved elsewhere (`rewrite.state.State`), and data sets are not copied.
_CLOSED = (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader)
# Objects that other threads use meanwhile, or that stand for something outside this process (a trace, a file).
_LIVE_NAMES = """
    logging. threading. queue. multiprocessing. concurrent. asyncio. torch._ torch.profiler. torch.autograd.
    torch.distributed. torch.multiprocessing. torch.utils.data. tessera.rewrite.optimize. tessera.runtime.
    tessera.monitor. tessera.profile."""
_LIVE_MODULES = tuple(_LIVE_NAMES.split())
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
_HANDLES = (*_LOCKS, threading.Thread, io.IOBase)
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
# How deep objects are searched that hold more than their attributes show.
_SEARCH_DEPTH = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a value that cannot be compared; `why` continues a sentence: "is a generator"."""

    why: str


def find_leaves(thing: Any, name: str) -> dict[str, Any]:
    """Return tensors, plain values and `Unreadable`s by where they are: `result.logits`, `result['cache'][0]`.

    A thing that is itself a value is returned as the first of one: `result[0]`.
    """
    leaves: dict[str, Any] = {}
    _LeafWalk(leaves).visit(thing, name, ())
    if leaves.keys() == {name} and not isinstance(leaves[name], Unreadable):
        return {f"{name}[0]": leaves[name]}
    return leaves


def find_containers(thing: Any, *, search: bool = False) -> Iterator[Any]:
    """Yield every list, set, dictionary and object's `__dict__` in there: all that may get other contents.

    Also numpy arrays whose memory no tensor can share. `search` also opens objects that hold more than they show.
    """
    for item in _walk(thing, search=search):
        if type(item) in _CONTAINERS or (_is_array(item) and item.flags.writeable and _share_array(item) is None):
            yield item
        if _is_open(item):  # not what a mapping class shows, but what it keeps
            yield vars(item)
        elif search and (attributes := _read_attributes(item)) is not None:
            yield attributes


def find_instances(thing: Any, *classes: type) -> list[Any]:
    """Return every object of these classes in there, each once."""
    return [item for item in _walk(thing, search=True) if _is(item, classes)]


def find_arrays(thing: Any) -> list[Any]:
    """Return every tensor and numpy array in there, each once."""
    return [item for item in _walk(thing) if _is(item, (torch.Tensor,)) or _is_array(item)]


def holds_at_most(thing: Any, count: int) -> bool:
    """Tell whether a thing holds at most so many values, without counting further."""
    left = count
    for item in _walk(thing):
        left -= _length(item)
        if left < 0:
            return False
    return True


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], thing: Any, done: dict[int, Any] | None = None) -> Any:
    """Return the same thing with every tensor changed, each once; what holds no tensor is returned as it is."""
    done = {} if done is None else done
    if id(thing) in done:
        return done[id(thing)][1]
    if isinstance(thing, torch.Tensor):
        twin = change(thing)
    elif not (parts := _list_parts(thing)) or not any(_is(item, (torch.Tensor,)) for item in _walk(thing)):
        twin = thing
    elif isinstance(thing, tuple) or (isinstance(thing, Mapping) and not isinstance(thing, MutableMapping)):
        twin = _rebuild(thing, [map_tensors(change, part, done) for _, part in parts])
    else:
        twin = copy.copy(thing)
        done[id(thing)] = thing, twin  # before its parts, which may refer to it
        _fill(twin, thing, [(where, map_tensors(change, part, done)) for where, part in parts])
    done[id(thing)] = thing, twin  # with the thing itself, so that its id is not used again
    return twin


def refill(container: Any, contents: Any) -> None:
    """Give a list, set, dictionary or array its former contents back, the same objects.

    Only what differs is touched: other threads may read meanwhile, and would find the container empty.
    """
    if hasattr(container, "dtype"):
        container[...] = contents
    elif isinstance(container, dict):
        _refill_dict(container, contents)
    elif not _are_identical(list(container), list(contents)):
        if isinstance(container, list):
            container[:] = contents
        else:
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(contents)


def storage_address(array: Any) -> int:
    """Return where a tensor's memory begins, which its views share; 0 where that is not known."""
    if not isinstance(array, torch.Tensor) or array.layout is not torch.strided or array.is_nested:
        return 0
    try:
        return int(array.untyped_storage().data_ptr())
    except (RuntimeError, ValueError):  # a lazy layer's, or a tensor made of others
        return 0


def count_bytes(array: Any) -> int:
    """Return what a copy of a tensor or an array takes."""
    if not isinstance(array, torch.Tensor) or array.layout is torch.strided:
        return int(array.nbytes)
    return sum(part.nbytes for part in sparse_parts(array))


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors a sparse tensor is stored as."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)


class _LeafWalk:
    """Visits what a thing holds, and keeps what was opened, so that no id is used again.

    Objects are opened once: those that refer to each other would never end. Containers are values, and a compiled
    program may return two lists in place of one that has two names: both names are reported, up to `MAX_ALIASES`.
    """

    def __init__(self, leaves: dict[str, Any]) -> None:
        self._leaves = leaves
        self._opened: dict[int, Any] = {}
        self._aliases = 0

    def visit(self, thing: Any, name: str, above: tuple[int, ...]) -> None:
        parts = _list_parts(thing) if len(above) < MAX_DEPTH else None
        if parts is None:
            self._leaves[name] = _to_leaf(thing)
            return
        if id(thing) in self._opened:
            if id(thing) in above or not _is(thing, (Mapping, list, tuple, deque)):
                return
            self._aliases += len(parts)
            if self._aliases > MAX_ALIASES:
                return
        self._opened[id(thing)] = thing
        for where, part in parts:
            self.visit(part, name + where, (*above, id(thing)))


def _walk(thing: Any, seen: dict[int, Any] | None = None, depth: int = 0, *, search: bool = False) -> Iterator[Any]:
    """Yield everything in there that is not a plain value, each once; models and optimizers are not opened."""
    seen = {} if seen is None else seen
    if id(thing) in seen or depth > MAX_DEPTH or _is(thing, PLAIN_TYPES):
        return
    seen[id(thing)] = thing
    yield thing
    if _is(thing, (torch.Tensor, *_CLOSED)):
        return
    if _is_open(thing):
        parts = list(vars(thing).values())
    else:
        parts = [part for _, part in _list_parts(thing) or ()]
        if search and not parts and depth < _SEARCH_DEPTH:
            parts = list((_read_attributes(thing) or {}).values())
    for part in parts:
        yield from _walk(part, seen, depth + 1, search=search)


def _rebuild(thing: Any, values: list[Any]) -> Any:
    """Make a tuple or mapping of the same class from other values."""
    if isinstance(thing, Mapping):
        return type(thing)(**dict(zip(thing, values, strict=True)))
    return type(thing)(*values) if hasattr(thing, "_fields") else type(thing)(values)


def _fill(twin: Any, thing: Any, parts: list[tuple[str, Any]]) -> None:
    """Put other values into a copy: the constructor of a container class may want arguments that are not known."""
    if isinstance(thing, (Mapping, list, deque)):
        for key, (_, value) in zip(thing if isinstance(thing, Mapping) else range(len(parts)), parts, strict=True):
            twin[key] = value
        return
    for where, value in parts:
        object.__setattr__(twin, where[1:], value)  # a dataclass may be frozen


def _refill_dict(container: dict[Any, Any], contents: dict[Any, Any]) -> None:
    keys = list(container)
    if not _are_identical(keys[: len(contents)], list(contents)):  # a key was removed, or the order changed
        container.clear()
        container.update(contents)
        return
    for key in keys[len(contents) :]:
        container.pop(key, None)
    for key, value in contents.items():
        if container.get(key, container) is not value:
            container[key] = value


def _are_identical(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _to_leaf(thing: Any) -> Any:
    if _is(thing, (torch.Tensor,)):
        strange = thing.is_nested or thing.is_quantized or thing.is_meta or is_lazy(thing)
        return Unreadable("is a tensor of a kind that is not opened") if strange else thing
    if (numpy := _numpy()) is not None and _is(thing, (numpy.generic,)):
        return thing.item()
    if _is_array(thing) and thing.dtype.kind in "biufc":
        return _to_tensor(thing)
    if _is(thing, (set, frozenset)) and all(_is(v, PLAIN_TYPES) for v in list(thing)):
        return copy.copy(thing)  # it may be added to
    return thing if _is(thing, PLAIN_TYPES) else Unreadable(f"is a {type(thing).__qualname__}")


def _is_array(thing: Any) -> bool:
    return (numpy := _numpy()) is not None and _is(thing, (numpy.ndarray,))


def _numpy() -> Any:
    return sys.modules.get("numpy")  # whoever has an array has imported it


def _to_tensor(array: Any) -> Any:
    """Return a tensor on the array's own memory, so that a write to one is a write to the other; else a copy."""
    if (shared := _share_array(array)) is not None:
        return shared
    if isinstance(array, _numpy().memmap):
        return Unreadable("is a file in memory that cannot be written")  # too large to copy
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    except TypeError:
        return Unreadable(f"is an array of {array.dtype}")


def _share_array(array: Any) -> torch.Tensor | None:
    if not array.flags.writeable:
        return None
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # not numbers, another byte order, or negative strides
        return None


def _is(thing: Any, classes: tuple[type, ...]) -> bool:
    """`isinstance` by the type alone: a proxy's `__class__` may load what it stands for, or raise."""
    return issubclass(type(thing), classes)


def _length(thing: Any) -> int:
    try:
        return len(thing) if _is(thing, (Mapping, list, tuple, set, frozenset, deque)) else 1
    except Exception:  # noqa: BLE001 - a user's __len__
        return 1


def _list_parts(thing: Any) -> list[tuple[str, Any]] | None:
    """Return what a thing holds, with where; None for a leaf, and for what raises when it is looked at."""
    try:
        return _read_parts(thing)
    except Exception:  # noqa: BLE001 - a user's property, mapping or descriptor
        return None


def _read_parts(thing: Any) -> list[tuple[str, Any]] | None:
    if _is(thing, (torch.Tensor, *_CLOSED, *PLAIN_TYPES)):
        return None
    if _is(thing, (Mapping,)):  # as a list, at once: another thread may write meanwhile
        return [(f"[{_format_key(key, i)}]", value) for i, (key, value) in enumerate(list(thing.items()))]
    if _is(thing, (tuple,)) and hasattr(thing, "_fields"):
        return [(f".{name}", getattr(thing, name)) for name in thing._fields]
    if _is(thing, (list, tuple, deque)):
        return [(f"[{i}]", value) for i, value in enumerate(list(thing))]
    if dataclasses.is_dataclass(thing):
        names = [field.name for field in dataclasses.fields(thing)]
        return [(f".{name}", getattr(thing, name)) for name in names if hasattr(thing, name)]
    return [(f".{name}", value) for name, value in list(vars(thing).items())] if _is_open(thing) else None


def _format_key(key: Any, i: int) -> str:
    """Show a key as it is written, or its position where its text may differ between runs (an object)."""
    return repr(key) if _is(key, PLAIN_TYPES) else f"key {i}"


def _is_open(thing: Any) -> bool:
    """Tell whether all that an object holds is in its `__dict__`: its classes are Python code, and it is no iterator.

    What an iterator has handed out is gone, whatever its attributes say.
    """
    kind = type(thing)
    if issubclass(kind, types.SimpleNamespace):
        return True
    if hasattr(kind, "__next__") or f"{kind.__module__}.".startswith(_LIVE_MODULES):
        return False
    if any(base.__flags__ & _MADE_IN_C for base in kind.__mro__[:-1]):
        return False
    try:
        attributes = vars(thing)
    except Exception:  # noqa: BLE001 - slots, or a property of that name
        return False
    return type(attributes) is dict and not any(_is(v, _HANDLES) for v in list(attributes.values()))


def _read_attributes(thing: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of any class but modules, classes, functions and models."""
    kind = type(thing)
    if kind.__module__ == "builtins" or issubclass(kind, (type, types.ModuleType, *_CLOSED, torch.Tensor)):
        return None
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except Exception:  # noqa: BLE001 - no attributes, or a property of that name, which may raise anything
        return None
    return attributes if type(attributes) is dict else None
