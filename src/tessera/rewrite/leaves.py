"""What a value holds: tensors and plain values, each by where it stands, through whatever holds them.

Models return tensors, tuples, dictionaries (of transformers, too), dataclasses and objects of their authors' own. What
is in there is found without knowing the class, where all of its state can be seen; what cannot be is an `Unknown`.
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

PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, type, torch.dtype, torch.device)
"""Types whose values `==` compares; a class is itself."""

DEEPEST = 24
"""How deep values lie in others; what is deeper is not looked for (a linked list)."""

AGAIN = 10_000
"""How many values may be found under further names: what many lists share has more names than anybody can list."""

# Set by CPython for classes that C code made (Include/object.h, Py_TPFLAGS_IMMUTABLETYPE): they may hold what no
# attribute shows.
_MADE_IN_C = 1 << 8
# Models and optimizers are others' to keep (`state.State`), and nobody wants a data set copied.
_CLOSED = (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader)
# Others work with these meanwhile, or they are as far as what they stand for (a trace, a file, compiled code, workers
# that load data).
_LIVE = (
    "logging.", "threading.", "queue.", "multiprocessing.", "concurrent.", "asyncio.", "torch._", "torch.profiler.",
    "torch.autograd.", "torch.distributed.", "torch.multiprocessing.", "torch.utils.data.", "tessera.rewrite.optimize.",
    "tessera.runtime.", "tessera.monitor.", "tessera.profile.",
)  # fmt: skip
_HANDLES = (type(threading.Lock()), type(threading.RLock()), threading.Thread, threading.Condition, threading.Event,
           io.IOBase)  # fmt: skip
# Nothing but what can be taken out and put in again.
_FILLED = (list, dict, set, OrderedDict, defaultdict, Counter, deque)


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """In place of a value that cannot be compared, and why: "is a generator"."""

    why: str


def leaves(thing: Any, name: str) -> dict[str, Any]:
    """Tensors, plain values and `Unknown`s by where they stand: `result.logits`, `result['cache'][0]`.

    A thing that is itself a value is the first of one: `result[0]`.
    """
    found: dict[str, Any] = {}
    _Walk(found).into(thing, name, ())
    if found.keys() == {name} and not isinstance(found[name], Unknown):
        return {f"{name}[0]": found[name]}
    return found


def holders(thing: Any) -> Iterator[Any]:
    """Every list, set, dictionary and object's `__dict__` on the way to the leaves: what may get other contents.

    Arrays whose memory no tensor can share, too.
    """
    for met in _met(thing, {}, 0):
        if type(met) in _FILLED or (_is_array(met) and met.flags.writeable and _shared(met) is None):
            yield met
        if _is_open(met):  # not what a mapping of one's own shows, but what it keeps
            yield vars(met)


def instances(thing: Any, *kinds: type) -> list[Any]:
    """Every object of these classes in there, each once: tensors, models, optimizers, random generators."""
    return [met for met in _met(thing, {}, 0) if _is(met, kinds)]


def arrays(thing: Any) -> list[Any]:
    """Every tensor and every array of numpy in there, each once."""
    return [met for met in _met(thing, {}, 0) if _is(met, (torch.Tensor,)) or _is_array(met)]


def memory_of(array: Any) -> int:
    """Where a tensor's memory begins, which its views have too; 0 where that is not known."""
    if not isinstance(array, torch.Tensor) or array.layout is not torch.strided or array.is_nested:
        return 0
    try:
        return int(array.untyped_storage().data_ptr())
    except (RuntimeError, ValueError):  # a lazy layer's, or a tensor made of others
        return 0


def bytes_of(array: Any) -> int:
    """What a copy of a tensor or an array takes; of a sparse one what it stores."""
    if not isinstance(array, torch.Tensor) or array.layout is torch.strided:
        return int(array.nbytes)
    return sum(part.nbytes for part in stored(array))


def stored(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a sparse tensor is made of: as it is stored, never dense."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)


def is_within(thing: Any, most: int) -> bool:
    """Whether something holds at most so many values; nobody counts further."""
    opened: dict[int, Any] = {}
    todo, left = [thing], most
    while todo:
        one = todo.pop()
        if id(one) in opened or _is(one, (torch.Tensor, *_CLOSED, *PLAIN)):
            continue
        opened[id(one)] = one
        left -= _count(one)
        if left < 0:
            return False
        todo.extend(part for _, part in _parts(one) or ())
    return True


def mapped(change: Callable[[torch.Tensor], torch.Tensor], thing: Any, known: dict[int, Any] | None = None) -> Any:
    """The same thing with other tensors; what holds none is handed on as it is. `known` is what was met so far.

    Each is changed once: what was shared is shared again, and a child may know its parent.
    """
    known = {} if known is None else known
    if id(thing) in known:
        return known[id(thing)][1]
    if isinstance(thing, torch.Tensor):
        twin = change(thing)
    elif not (parts := _parts(thing)) or not _has_tensors(thing, {}):
        twin = thing
    elif isinstance(thing, tuple) or (isinstance(thing, Mapping) and not isinstance(thing, MutableMapping)):
        twin = _remade(thing, [mapped(change, part, known) for _, part in parts])
    else:
        twin = copy.copy(thing)
        known[id(thing)] = thing, twin  # before its parts, which may know it
        _fill(twin, thing, [(where, mapped(change, part, known)) for where, part in parts])
    known[id(thing)] = thing, twin  # with the thing itself, so that nobody else gets its number
    return twin


def _remade(thing: Any, values: list[Any]) -> Any:
    """A tuple or a mapping of the same class that is made of other values."""
    if isinstance(thing, Mapping):
        return type(thing)(**dict(zip(thing, values, strict=True)))
    return type(thing)(*values) if hasattr(thing, "_fields") else type(thing)(values)


def _fill(twin: Any, thing: Any, parts: list[tuple[str, Any]]) -> None:
    """Put other values in; a container of its own class may want arguments that nobody knows, so it is a copy."""
    if isinstance(thing, (Mapping, list, deque)):
        for key, (_, value) in zip(thing if isinstance(thing, Mapping) else range(len(parts)), parts, strict=True):
            twin[key] = value
        return
    for where, value in parts:
        object.__setattr__(twin, where[1:], value)  # a dataclass may be frozen


def is_exact(tensor: torch.Tensor) -> bool:
    """Whether its values are whole numbers or truths, which rounding does not touch."""
    return not (tensor.is_floating_point() or tensor.is_complex())


class _Walk:
    """Goes through what a thing holds, and keeps what was opened, so that nobody else gets its number.

    Objects are opened where they are met first: those that know each other would never end. Containers are values, and
    a compiled program may return two lists in the place of one that has two names: it is found under both, as long as
    such names are few (`AGAIN`). Lists that share lists have twice as many with every level.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found
        self._opened: dict[int, Any] = {}
        self._again = 0

    def into(self, thing: Any, name: str, above: tuple[int, ...]) -> None:
        parts = _parts(thing) if len(above) < DEEPEST else None
        if parts is None:
            self._found[name] = _leaf(thing)
            return
        if id(thing) in self._opened:
            if id(thing) in above or not _is(thing, (Mapping, list, tuple, deque)):
                return
            self._again += len(parts)
            if self._again > AGAIN:
                return
        self._opened[id(thing)] = thing
        for where, part in parts:
            self.into(part, name + where, (*above, id(thing)))


def _has_tensors(thing: Any, opened: dict[int, Any], depth: int = 0) -> bool:
    """Whether a tensor is anywhere in there; the first one found is enough."""
    if isinstance(thing, torch.Tensor):
        return True
    if id(thing) in opened or depth >= DEEPEST:
        return False
    opened[id(thing)] = thing
    return any(_has_tensors(part, opened, depth + 1) for _, part in _parts(thing) or ())


def _leaf(thing: Any) -> Any:
    if _is(thing, (torch.Tensor,)):
        strange = thing.is_nested or thing.is_quantized or thing.is_meta or is_lazy(thing)
        return Unknown("is a tensor of a kind that is not opened") if strange else thing
    if (numpy := _numpy()) is not None and _is(thing, (numpy.generic,)):
        return thing.item()
    if _is_array(thing) and thing.dtype.kind in "biufc":
        return _tensor(thing)
    if _is(thing, (set, frozenset)) and all(_is(v, PLAIN) for v in list(thing)):
        return copy.copy(thing)  # it may be added to
    return thing if _is(thing, PLAIN) else Unknown(f"is a {type(thing).__qualname__}")


def _is_array(thing: Any) -> bool:
    return (numpy := _numpy()) is not None and _is(thing, (numpy.ndarray,))


def _numpy() -> Any:
    return sys.modules.get("numpy")  # whoever has an array has imported it


def _tensor(array: Any) -> Any:
    """A tensor of the array's own memory, so that what is put back there is back in the array; else of a copy."""
    if (shared := _shared(array)) is not None:
        return shared
    if isinstance(array, _numpy().memmap):
        return Unknown("is a file in memory that cannot be written")  # and larger than anybody wants a copy of
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    except TypeError:
        return Unknown(f"is an array of {array.dtype}")


def _shared(array: Any) -> torch.Tensor | None:
    if not array.flags.writeable:
        return None
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # no number, bytes the other way round, or a view that runs backwards
        return None


def _is(thing: Any, kinds: tuple[type, ...]) -> bool:
    """By its type: what a proxy says of its class may load what it stands for, or raise."""
    return issubclass(type(thing), kinds)


def _count(thing: Any) -> int:
    try:
        return len(thing) if _is(thing, (Mapping, list, tuple, set, frozenset, deque)) else 1
    except Exception:  # noqa: BLE001  (somebody's __len__)
        return 1


def _parts(thing: Any) -> list[tuple[str, Any]] | None:
    """What something holds with where it stands in there; None of a leaf, and of what raises when it is looked at."""
    try:
        return _shown(thing)
    except Exception:  # noqa: BLE001  (somebody's property, mapping or descriptor)
        return None


def _shown(thing: Any) -> list[tuple[str, Any]] | None:
    if _is(thing, (torch.Tensor, *_CLOSED, *PLAIN)):
        return None
    if _is(thing, (Mapping,)):  # lists of all, at once: another thread may write meanwhile
        return [(f"[{_key(key, i)}]", value) for i, (key, value) in enumerate(list(thing.items()))]
    if _is(thing, (tuple,)) and hasattr(thing, "_fields"):
        return [(f".{name}", getattr(thing, name)) for name in thing._fields]
    if _is(thing, (list, tuple, deque)):
        return [(f"[{i}]", value) for i, value in enumerate(list(thing))]
    if dataclasses.is_dataclass(thing):
        named = [field.name for field in dataclasses.fields(thing)]
        return [(f".{name}", getattr(thing, name)) for name in named if hasattr(thing, name)]
    return [(f".{name}", value) for name, value in list(vars(thing).items())] if _is_open(thing) else None


def _key(key: Any, i: int) -> str:
    """A key as it is written; of what may look otherwise tomorrow (a parameter, an object), which one it is."""
    return repr(key) if _is(key, PLAIN) else f"key {i}"


def _is_open(thing: Any) -> bool:
    """Whether all that an object holds is in its `__dict__`: Python code made its class, and those it came from.

    Not of an iterator: what it has handed out is gone, whatever its count says.
    """
    kind = type(thing)
    if issubclass(kind, types.SimpleNamespace):
        return True
    if hasattr(kind, "__next__") or f"{kind.__module__}.".startswith(_LIVE):
        return False
    if any(made.__flags__ & _MADE_IN_C for made in kind.__mro__[:-1]):
        return False
    try:
        held = vars(thing)
    except Exception:  # noqa: BLE001  (slots, or somebody's property)
        return False
    return type(held) is dict and not any(_is(v, _HANDLES) for v in list(held.values()))


def _met(thing: Any, seen: dict[int, Any], depth: int) -> Iterator[Any]:
    """Everything on the way to the leaves that is no plain value, each once; models and optimizers are not opened."""
    if id(thing) in seen or depth > DEEPEST or _is(thing, PLAIN):
        return
    seen[id(thing)] = thing
    yield thing
    if _is(thing, (torch.Tensor, *_CLOSED)):
        return
    inside = list(vars(thing).values()) if _is_open(thing) else [part for _, part in _parts(thing) or ()]
    for part in inside:
        yield from _met(part, seen, depth + 1)
