"""What a value holds: tensors and plain values, each by where it stands, through whatever holds them.

Models return tensors, tuples, dictionaries (of transformers, too), dataclasses and objects of their authors' own. What
is in there is found without knowing the class, where all of its state can be seen; what cannot be is an `Unknown`.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, type, torch.dtype, torch.device)
"""Types whose values `==` compares; a class is itself."""

DEEPEST = 24
"""How deep values lie in others; what is deeper is not looked for (a linked list)."""

# Set by CPython for classes that C code made (Include/object.h, Py_TPFLAGS_IMMUTABLETYPE): they may hold what no
# attribute shows.
_MADE_IN_C = 1 << 8
# Models and optimizers are others' to keep (`state.State`), and nobody wants a data set copied.
_CLOSED = (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader)
_FILLED = (list, dict, OrderedDict, defaultdict, deque)  # nothing but what can be taken out and put in again


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """In place of a value that cannot be compared, and why: "is a generator"."""

    why: str


def leaves(thing: Any, name: str) -> dict[str, Any]:
    """Tensors, plain values and `Unknown`s by where they stand: `result.logits`, `result['cache'][0]`.

    A thing that is itself a value is the first of one: `result[0]`.
    """
    found: dict[str, Any] = {}
    _walk(thing, name, found, {}, ())
    if found.keys() == {name} and not isinstance(found[name], Unknown):
        return {f"{name}[0]": found[name]}
    return found


def holders(thing: Any) -> Iterator[Any]:
    """Every list, dictionary and object's `__dict__` on the way to the leaves: what may get other contents."""
    yield from _holders(thing, set(), 0)


def mapped(change: Callable[[torch.Tensor], torch.Tensor], thing: Any, known: dict[int, Any] | None = None) -> Any:
    """The same thing with other tensors; what holds none is handed on as it is. `known` are objects made so far."""
    if isinstance(thing, torch.Tensor):
        return change(thing)
    known = {} if known is None else known
    if id(thing) in known:  # a child that knows its parent
        return known[id(thing)]
    parts = _parts(thing)
    if not parts:
        return thing
    if isinstance(thing, (Mapping, list, tuple, deque)):
        values = [mapped(change, part, known) for _, part in parts]
        if all(new is old for new, (_, old) in zip(values, parts, strict=True)):
            return thing
        return _refilled(thing, values)
    if not _has_tensors(thing, {}):
        return thing
    twin = known[id(thing)] = copy.copy(thing)
    for name, part in parts:
        object.__setattr__(twin, name[1:], mapped(change, part, known))  # a dataclass may be frozen
    return twin


def _refilled(thing: Any, values: list[Any]) -> Any:
    """A container of the same class with other contents; a class of its own may want arguments that nobody knows."""
    if isinstance(thing, tuple):
        return type(thing)(*values) if hasattr(thing, "_fields") else type(thing)(values)
    if isinstance(thing, Mapping) and not isinstance(thing, MutableMapping):
        return type(thing)(**dict(zip(thing, values, strict=True)))
    twin: Any = copy.copy(thing)
    for key, value in zip(thing if isinstance(thing, Mapping) else range(len(values)), values, strict=True):
        twin[key] = value
    return twin


def is_exact(tensor: torch.Tensor) -> bool:
    """Whether its values are whole numbers or truths, which rounding does not touch."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _walk(thing: Any, name: str, found: dict[str, Any], opened: dict[int, Any], above: tuple[int, ...]) -> None:
    """Objects that several know are opened where they are met first: else those that know each other never end.

    They are kept in `opened`, so that nobody else gets their number. Containers are values: one that has two names is
    found under both.
    """
    parts = _parts(thing) if len(above) < DEEPEST else None
    if parts is None:
        found[name] = _leaf(thing)
        return
    if id(thing) in above or id(thing) in opened:
        return
    if not isinstance(thing, (Mapping, list, tuple, deque)):
        opened[id(thing)] = thing
    for where, part in parts:
        _walk(part, name + where, found, opened, (*above, id(thing)))


def _has_tensors(thing: Any, opened: dict[int, Any], depth: int = 0) -> bool:
    """Whether a tensor is anywhere in there; the first one found is enough."""
    if isinstance(thing, torch.Tensor):
        return True
    if id(thing) in opened or depth >= DEEPEST:
        return False
    opened[id(thing)] = thing
    return any(_has_tensors(part, opened, depth + 1) for _, part in _parts(thing) or ())


def _leaf(thing: Any) -> Any:
    numpy = sys.modules.get("numpy")  # whoever returns an array has imported it
    if numpy is not None and isinstance(thing, numpy.generic):
        return thing.item()
    if numpy is not None and isinstance(thing, numpy.ndarray) and thing.dtype.kind in "biufc":
        return torch.from_numpy(thing.copy())
    if isinstance(thing, torch.Tensor):
        strange = thing.is_nested or thing.is_quantized or thing.is_meta
        return Unknown("is a tensor of a kind that is not opened") if strange else thing
    if isinstance(thing, PLAIN) or (isinstance(thing, (set, frozenset)) and all(isinstance(v, PLAIN) for v in thing)):
        return thing
    return Unknown(f"is a {type(thing).__qualname__}")


def _parts(thing: Any) -> list[tuple[str, Any]] | None:
    """What something holds with where it stands in there; None of a leaf."""
    if isinstance(thing, (torch.Tensor, *_CLOSED, *PLAIN)):
        return None
    if isinstance(thing, Mapping):
        return [(f"[{_key(key, i)}]", value) for i, (key, value) in enumerate(thing.items())]
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return [(f".{name}", getattr(thing, name)) for name in thing._fields]
    if isinstance(thing, (list, tuple, deque)):
        return [(f"[{i}]", value) for i, value in enumerate(thing)]
    if dataclasses.is_dataclass(thing):
        named = [field.name for field in dataclasses.fields(thing)]
        return [(f".{name}", getattr(thing, name)) for name in named if hasattr(thing, name)]
    return [(f".{name}", value) for name, value in vars(thing).items()] if _is_open(thing) else None


def _key(key: Any, i: int) -> str:
    """A key as it is written; of what may look otherwise tomorrow (a parameter, an object), which one it is."""
    return repr(key) if isinstance(key, PLAIN) else f"key {i}"


def _is_open(thing: Any) -> bool:
    """Whether all that an object holds is in its `__dict__`: Python code made its class, and those it came from."""
    if isinstance(thing, types.SimpleNamespace):
        return True
    return hasattr(thing, "__dict__") and not any(made.__flags__ & _MADE_IN_C for made in type(thing).__mro__[:-1])


def _holders(thing: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if id(thing) in seen or depth > DEEPEST or isinstance(thing, (torch.Tensor, *_CLOSED, *PLAIN)):
        return
    seen.add(id(thing))
    if type(thing) in _FILLED:
        yield thing
    if _is_open(thing):  # not what a mapping of one's own shows, but what it keeps
        yield vars(thing)
        inside: Any = list(vars(thing).values())
    else:
        inside = [part for _, part in _parts(thing) or ()]
    for part in inside:
        yield from _holders(part, seen, depth + 1)
