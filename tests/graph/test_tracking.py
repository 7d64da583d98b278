"""The births and deaths of storages."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from tessera.graph.tracking import StorageTracker  # noqa: E402


def test_a_storage_is_born_and_dies_between_operators() -> None:
    ops: list[str] = []
    storages = StorageTracker(ops)
    weight = torch.empty(2, 8, device="meta")
    assert storages.find(weight) is None
    storages.adopt(weight, "parameters", "weight")
    assert storages.find(weight) == 0
    ops += ["one", "two"]
    made = torch.empty(10, device="meta")
    assert storages.id_of(made) == storages.id_of(made[2:]) == storages.find(made) == 1
    storages.mark(made, "gradients")
    ops.append("three")
    del made
    born, died = storages.by_id[0], storages.by_id[1]
    assert (born.birth, born.death, born.nbytes, born.category, born.name) == (-1, None, 64, "parameters", "weight")
    assert (died.birth, died.death, died.nbytes, died.category) == (2, 3, 40, "gradients")
    assert storages.id_of(torch.empty(1, device="meta")) == 2  # a number is not given twice
