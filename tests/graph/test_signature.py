"""What torch's operators read and write, from their schemas."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tessera.graph.signature import signature_of  # noqa: E402

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
