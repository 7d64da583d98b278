"""What is known about tensors while a program is captured: their storages, small values, and how full masks are.

Capture runs on meta tensors, which have shapes and no values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from .ir import Category, Op, Storage

MAX_KNOWN_FLOATS = 1 << 16
MAX_KNOWN_INTS = 1 << 21  # a boolean mask of 1024 x 1024 tokens, with room

_RANDOM = ("rand", "bernoulli", "normal", "uniform", "dropout", "exponential", "multinomial", "empty")
_CHOICES = frozenset({"argmax", "argmin", "topk", "max", "min", "multinomial"})
_COPIES = frozenset({"index", "clone", "_to_copy", "index_select"})


class StorageTracker:
    """Numbers storages in the order they are first seen, and notes when each is born and dies.

    The time of a birth or death is the number of operators recorded so far.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self._ops = ops
        self.by_id: dict[int, Storage] = {}
        self._ids: dict[int, int] = {}  # living storages by torch's own address
        self._refs: dict[int, Any] = {}

    def id_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, a new one the first time it is seen."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self._ids.get(key)
        if number is None:
            number = self._ids[key] = len(self.by_id)
            self.by_id[number] = Storage(number, storage.nbytes(), "activations", len(self._ops), None)
            self._refs[key] = weakref.ref(storage, partial(self._note_death, key, number))
        return number

    def find(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage; None if it was not seen before."""
        return self._ids.get(tensor.untyped_storage()._cdata)

    def mark(self, tensor: torch.Tensor, category: Category) -> None:
        """Say what a storage is for."""
        self._change(self.id_of(tensor), category=category)

    def adopt(self, tensor: torch.Tensor, category: Category, name: str = "") -> None:
        """Note a storage that existed before the iteration."""
        self._change(self.id_of(tensor), category=category, birth=-1, name=name)

    def retire(self, numbers: set[int]) -> None:
        """Let storages that existed before the iteration die after their last use in it."""
        last = dict.fromkeys(numbers, 0)
        for op in self._ops:
            last.update({t.storage: op.index + 1 for t in (*op.inputs, *op.outputs) if t.storage in last})
        for number, death in last.items():
            if self.by_id[number].birth < 0:
                self._change(number, death=death)

    def _note_death(self, key: int, number: int, _ref: object) -> None:
        self._ids.pop(key, None)
        self._refs.pop(key, None)
        self._change(number, death=len(self._ops))

    def _change(self, number: int, **fields: Any) -> None:
        self.by_id[number] = replace(self.by_id[number], **fields)


class KnownValues:
    """Small meta tensors whose values are known: positions, masks, lengths, counters.

    Programs ask some tensors for values (`mask.all()`, `lengths.max().item()`). Those come from integers the user gave
    or from factories such as arange, so their operators also run for real on small CPU twins. A value is forgotten when
    something unknown is written into the tensor's storage.
    """

    def __init__(self) -> None:
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._versions: dict[int, int] = {}

    def note(self, meta: torch.Tensor, value: torch.Tensor) -> None:
        """Remember what a meta tensor would hold."""
        if value.numel() <= (MAX_KNOWN_FLOATS if value.dtype.is_floating_point else MAX_KNOWN_INTS):
            key = meta.untyped_storage()._cdata
            self._values[meta] = (value, key, self._versions.get(key, 0))

    def note_small(self, twins: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Remember a model's small integers and single numbers: strides, positions, scales."""
        for real, meta in twins:
            small = real.numel() == 1 or (not real.dtype.is_floating_point and real.numel() <= MAX_KNOWN_FLOATS)
            if small and real.device.type == "cpu" and real.layout == torch.strided and not real.is_quantized:
                self.note(meta, real.detach())

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor: itself on the CPU, its twin if known, else None."""
        if tensor.device.type != "meta":
            return tensor
        value, key, version = self._values.get(tensor, (None, 0, 0))
        return value if value is not None and self._versions.get(key, 0) == version else None

    def count_longest_run(self, indices: Sequence[torch.Tensor | None]) -> int | None:
        """How often the row that they name most often is named; None where values are unknown."""
        values = [self.value(i) for i in indices if i is not None]
        known = [v for v in values if v is not None and v.numel()]
        if not known or len(known) < len(values):
            return None
        if any(value.dtype in (torch.bool, torch.uint8) for value in known):
            return 1  # a mask names a row once
        place = torch.zeros((), dtype=torch.int64)
        for value in known:
            place = place * (int(value.max() - value.min()) + 1) + (value.long() - value.min())
        return int(place.flatten().unique(return_counts=True)[1].max())

    def forget(self, tensor: torch.Tensor) -> None:
        """Something was written into this tensor's storage."""
        key = tensor.untyped_storage()._cdata
        self._versions[key] = self._versions.get(key, 0) + 1

    def follow(self, func: Any, args: Any, kwargs: Any, outs: list[torch.Tensor]) -> None:
        """After an operator ran on meta tensors: run it on the twins too if all its operands are known."""
        if not outs or any(word in func._schema.name for word in _RANDOM):
            return
        if sum(t.numel() for t in outs) > MAX_KNOWN_INTS:
            return
        if outs[0].dtype.is_floating_point and outs[0].numel() > MAX_KNOWN_FLOATS:
            return
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values: list[Any] = []
        for leaf in leaves:
            value = leaf
            if isinstance(leaf, torch.Tensor):
                value = self.value(leaf)
                if value is None:
                    return
            elif isinstance(leaf, torch.device):
                value = torch.device("cpu")
            values.append(value)
        args, kwargs = pytree.tree_unflatten(values, spec)
        try:
            real = func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return  # the program would have failed too, or not: values are a help, never a requirement
        twins = [t for t in pytree.tree_leaves(real) if isinstance(t, torch.Tensor)]
        for meta, twin in zip(outs, twins, strict=False):
            self.note(meta, twin)


class AssumedFloat(float):
    """A float whose value nobody knows: what is decided by comparing it is reported through `note`."""

    _note: Callable[[str], None]

    def __new__(cls, value: float, note: Callable[[str], None]) -> AssumedFloat:
        """The value to go on with."""
        assumed = super().__new__(cls, value)
        assumed._note = note
        return assumed

    def _compare(self, other: Any, sign: str, answer: Any) -> Any:
        if answer is not NotImplemented:
            shown = f"{other:.6g}" if isinstance(other, float) else str(other)
            self._note(f"item() {sign} {shown} is taken to be {answer}, and only that way is predicted")
        return answer

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, "<", float.__lt__(self, other))

    def __le__(self, other: Any) -> Any:
        return self._compare(other, "<=", float.__le__(self, other))

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, ">", float.__gt__(self, other))

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, ">=", float.__ge__(self, other))

    def __eq__(self, other: object) -> Any:
        return self._compare(other, "==", float.__eq__(self, other))

    def __ne__(self, other: object) -> Any:
        return self._compare(other, "!=", float.__ne__(self, other))

    def __bool__(self) -> bool:
        return bool(self._compare(0, "!=", float.__bool__(self)))

    __hash__ = float.__hash__


class MaskDensities:
    """How full masks are, and among how many an index was chosen, by storage.

    A program that sends tokens to experts asks where `indices == expert` holds. Indices from an argmax or a top-k
    over C scores are taken to be spread evenly: such a mask is 1/C full, and so is a row of a one-hot tensor. How many
    tokens each expert gets follows from that too.
    """

    def __init__(self, storages: StorageTracker) -> None:
        self._id_of = storages.id_of
        self._density: dict[int, float] = {}
        self._classes: dict[int, int] = {}
        self._asked: dict[int, int] = {}  # the index that a mask compares with

    def note_one_hot(self, tensor: torch.Tensor, classes: int) -> None:
        """A one-hot tensor of C classes is 1/C full."""
        self._density[self._id_of(tensor)] = 1.0 / max(1, classes)

    def density(self, tensor: torch.Tensor) -> float | None:
        """How full a mask is; None if nothing is known."""
        return self._density.get(self._id_of(tensor))

    def follow(self, short: str, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[torch.Tensor]) -> None:
        """After an operator: what is known of its result."""
        if not outs or not args or not isinstance(args[0], torch.Tensor):
            return
        first, out = args[0], outs[0]
        if short in _CHOICES and outs[-1].dtype == torch.int64 and first.dim():
            self._classes[self._id_of(outs[-1])] = _choices(short, first, args, kwargs)
        elif short in _COPIES and (self._density or self._classes):
            before, after = self._id_of(first), self._id_of(out)
            if before in self._density:
                self._density[after] = self._density[before]
            if before in self._classes:
                self._classes[after] = self._classes[before]
        elif short == "eq" and self._classes:
            classes = self._classes.get(self._id_of(first))
            if classes is not None and (not isinstance(args[1], torch.Tensor) or args[1].numel() in (1, classes)):
                self._density[self._id_of(out)] = 1.0 / max(1, classes)
                if isinstance(args[1], int):
                    self._asked[self._id_of(out)] = args[1]
        elif short in ("scatter", "scatter_") and self._classes and self._id_of(args[2]) in self._classes:
            if not isinstance(args[3], torch.Tensor) and args[3] == 1:  # one at each chosen index
                self._density[self._id_of(out)] = args[2].numel() / max(1, out.numel())
        elif short == "any" and self._density:
            density = self._density.get(self._id_of(first))
            if density is not None:  # one of several choices, or of all
                self._density[self._id_of(out)] = min(1.0, density * first.numel() / max(1, out.numel()))

    def count_chosen(self, short: str, args: Sequence[Any], outs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the numbers in the result of an operator that counts choices spread evenly; None of any other."""
        if short not in ("sum", "bincount", "histc") or not isinstance(args[0], torch.Tensor):
            return None
        of, entries, out = self._id_of(args[0]), args[0].numel(), outs[0]
        density = self._density.get(of) if short == "sum" else 1.0 if of in self._classes else None
        if density is None or not 0 < out.numel() <= MAX_KNOWN_INTS:
            return None
        asked = self._asked.get(of) if out.numel() == 1 else None
        if asked is None:
            entries, parts = round(density * entries), out.numel()
        else:  # the counts of all indices must add up to the choices
            parts = round(1 / density)
        each, left = divmod(entries, parts)
        counts = each + (torch.arange(parts, device="cpu") < left)
        return (counts if asked is None else counts[asked]).reshape(out.shape).to(out.dtype)


def _choices(short: str, scores: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Among how many a choice is made: the size of the dimension it reduces."""
    place = 2 if short == "topk" else 1
    dim = args[place] if len(args) > place else kwargs.get("dim", -1)
    return int(scores.shape[dim] if isinstance(dim, int) and short != "multinomial" else scores.shape[-1])
