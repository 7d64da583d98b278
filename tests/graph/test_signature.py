"""What torch's operators read and write, from their schemas; and the births and deaths of storages."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tessera.graph.signature import signature_of  # noqa: E402
from tessera.graph.tracking import StorageTracker  # noqa: E402

aten = torch.ops.aten
A, B, OUT = (torch.empty(4, 4, device="meta") for _ in range(3))


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "reads", "writes"),
    [
        (aten.add.Tensor, (A, B), {}, [A, B], []),
        (aten.add_.Tensor, (A, B), {}, [A, B], [A]),
        (aten.copy_.default, (A, B), {}, [B], [A]),  # what was there is not read
        (aten.zero_.default, (A,), {}, [], [A]),
        (aten.add.out, (A, B), {"out": OUT}, [A, B], [OUT]),
        (aten._foreach_add_.List, ([A, B], [B, A]), {}, [A, B, B, A], [A, B]),
    ],
    ids=str,
)
def test_what_is_read_and_written(func: Any, args: Any, kwargs: Any, reads: list[Any], writes: list[Any]) -> None:
    made = [torch.empty(4, 4, device="meta")]
    read, wrote = signature_of(func).find_moved(args, kwargs, made)
    assert [id(t) for t in read] == [id(t) for t in reads]
    assert [id(t) for t in wrote] == [id(t) for t in writes or made]


def test_a_copy_that_copies_nothing_is_a_view() -> None:
    x = torch.empty(4, 4, device="meta")
    clone = signature_of(aten.clone.default)
    assert clone.kind == "copy" and clone.is_view([x], [x.view(16)]) and not clone.is_view([x], [x.clone()])
    assert signature_of(aten.view.default).is_view([x], [x.clone()])
    assert not signature_of(aten.add_.Tensor).is_view([x], [x])  # it wrote


def test_nothing_runs_for_an_allocation() -> None:
    assert [signature_of(f).silent for f in (aten.empty.memory_format, aten.zeros.default)] == [True, False]


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
