"""The storages that tensors of an iteration lie in: each has a birth and a death, from which memory has a timeline."""

from __future__ import annotations

import weakref
from collections.abc import Sized
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .ir import Category, Storage


class Storages:
    """Numbers storages as they are first seen. The time of a birth or death is how many operators there were so far."""

    def __init__(self, ops: Sized) -> None:
        self._ops = ops
        self.by_id: dict[int, Storage] = {}
        self._ids: dict[int, int] = {}  # of those that are alive, by torch's own address
        self._refs: dict[int, Any] = {}

    def id_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, a new one where it was not seen before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self.by_id)
            self.by_id[found] = Storage(found, storage.nbytes(), "activations", len(self._ops), None)
            self._refs[key] = weakref.ref(storage, partial(self._died, key, found))
        return found

    def seen(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage; None where it was not seen before."""
        return self._ids.get(tensor.untyped_storage()._cdata)

    def mark(self, tensor: torch.Tensor, category: Category) -> None:
        """Say what a storage is for."""
        self._change(self.id_of(tensor), category=category)

    def adopt(self, tensor: torch.Tensor, category: Category, name: str = "") -> int:
        """Note a storage that existed before the iteration."""
        found = self.id_of(tensor)
        self._change(found, category=category, birth=-1, name=name)
        return found

    def _died(self, key: int, number: int, _ref: object) -> None:
        self._ids.pop(key, None)
        self._refs.pop(key, None)
        self._change(number, death=len(self._ops))

    def _change(self, number: int, **fields: Any) -> None:
        self.by_id[number] = replace(self.by_id[number], **fields)
