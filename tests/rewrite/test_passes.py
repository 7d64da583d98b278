"""Masks that say what `is_causal` says, or nothing: found in a Dynamo graph, and only where they are that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tessera.rewrite.compilation import Compilation
from tessera.rewrite.passes import drop_known_masks
from tessera.runtime.tuning.changes import apply_setting
from tessera.runtime.tuning.knobs import CallTraits, find_knobs, watch_call
from tessera.runtime.tuning.parts import NotApplicable, find_parts

from rewriting import make_recorder

LENGTH = 12

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*script_method:DeprecationWarning"
)


@pytest.fixture(autouse=True)
def anew() -> None:
    """One code, many masks: dynamo keeps eight of them."""
    torch._dynamo.reset()


def index(length: int = LENGTH) -> Any:
    return torch.arange(length)


def compared(x: Any) -> Any:
    """As transformers makes it: positions compared, repeated for every sequence."""
    return (index()[None, None, None, :] <= index()[None, None, :, None]).expand(x.shape[0], -1, LENGTH, LENGTH)


MASKS = {
    "compared": (compared, "causal"),
    "a triangle": (lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), "causal"),
    "added": (lambda x: torch.full((LENGTH, LENGTH), -torch.inf).triu(1), "causal"),
    "all true": (lambda x: torch.ones(x.shape[0], 1, 1, LENGTH, dtype=torch.bool), ""),
    "all zero": (lambda x: torch.zeros(LENGTH, LENGTH), ""),
    "a window": (lambda x: compared(x) & (index()[:, None] - index()[None, :] < 4), None),
    "strictly below": (lambda x: index()[None, :] < index()[:, None] + (index()[:, None] == 0), None),
    "a bias": (lambda x: -(index()[:, None] - index()[None, :]).abs().float(), None),
    "one of two sequences": (lambda x: torch.stack([compared(x)[0, 0], compared(x)[0, 0].T])[:, None], None),
    "of the input": (lambda x: compared(x) & (x[:, None, None, :, 0] > -9), None),
    "blocks": (lambda x: index()[None, :] // 4 <= index()[:, None] // 4, None),
}


@pytest.mark.parametrize("by_place", [False, True], ids=["by name", "by place"])
@pytest.mark.parametrize("case", MASKS)
def test_only_masks_that_are_known_are_taken_out(case: str, by_place: bool) -> None:
    make, says = MASKS[case]

    def attend(x: Any) -> Any:
        heads, mask = x[:, None], make(x)
        if by_place:
            return functional.scaled_dot_product_attention(heads, heads, heads, mask, 0.0, False)
        return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)

    torch.manual_seed(0)
    x, watch = torch.randn(2, LENGTH, 8), Compilation()
    found = torch.compile(attend, backend=make_recorder(watch, [drop_known_masks]), fullgraph=True, dynamic=False)(x)
    torch.testing.assert_close(found, attend(x))
    named = f"scaled_dot_product_attention{' (causal)' if says else ''}"
    assert [f.after for f in watch.replacements] == ([] if says is None else [named])


def written(write: Any) -> Any:
    def attend(x: Any) -> Any:
        mask, heads = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), x[:, None]
        write(mask)
        return functional.scaled_dot_product_attention(heads, heads, heads, mask)

    return attend


def set_column(mask: Any) -> None:
    mask[:, 3] = False


WRITES = {
    "setitem": set_column,
    "a view": lambda mask: mask[:, 3].fill_(False),
    "masked_fill_": lambda mask: mask.masked_fill_(index()[None, :] == 3, False),
    "logical_and_": lambda mask: mask.logical_and_(index()[None, :] != 3),
    ".data": lambda mask: mask.data.logical_and_(index()[None, :] != 3),
    "out=": lambda mask: torch.logical_and(mask, index()[None, :] != 3, out=mask),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_mask_that_is_written_into_is_not_known(how: str) -> None:
    attend, x, watch = written(WRITES[how]), torch.randn(2, LENGTH, 8), Compilation()
    found = torch.compile(attend, backend=make_recorder(watch, [drop_known_masks]), dynamic=False)(x)
    torch.testing.assert_close(found, attend(x))
    assert not watch.replacements


def test_chance_and_strange_masks_are_left_alone() -> None:
    cases: list[Any] = [
        lambda x: torch.rand(LENGTH, LENGTH) < 2.0,  # all true today, and who knows tomorrow
        lambda x: torch.empty(LENGTH, LENGTH).zero_(),
        lambda x: torch.ones(9000, 9000, dtype=torch.bool).tril()[:LENGTH, :LENGTH],  # too large to look at
    ]
    for make in cases:
        torch._dynamo.reset()

        def attend(x: Any, make: Any = make) -> Any:
            return functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], make(x))

        x, watch = torch.randn(2, LENGTH, 8), Compilation()
        torch.testing.assert_close(
            torch.compile(attend, backend=make_recorder(watch, [drop_known_masks]), dynamic=False)(x), attend(x)
        )
        assert not watch.replacements


def test_lengths_that_differ_keep_the_upper_left_triangle() -> None:
    def attend(q: Any, k: Any, offset: int) -> Any:
        return functional.scaled_dot_product_attention(q, k, k, index(9)[None, :] <= index(5)[:, None] + offset)

    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 9, 8)
    for offset, expected in ((0, 1), (4, 0)):  # 4: the last query sees the last key, which is_causal does not mean
        watch = Compilation()
        found = torch.compile(attend, backend=make_recorder(watch, [drop_known_masks]), dynamic=False)(q, k, offset)
        torch.testing.assert_close(found, attend(q, k, offset))
        assert len(watch.replacements) == expected


def test_sizes_that_are_not_known_keep_their_mask() -> None:
    def attend(x: Any) -> Any:
        heads, at = x[:, None], torch.arange(x.shape[1])
        return functional.scaled_dot_product_attention(heads, heads, heads, at[None, :] <= at[:, None])

    watch = Compilation()
    compiled = torch.compile(attend, backend=make_recorder(watch, [drop_known_masks]), dynamic=True)
    for length in (6, 9):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(compiled(x), attend(x))
    assert not watch.replacements


class Masked(torch.nn.Module):
    """Makes its mask where it is compiled, and leaves it out elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        heads = self.project(x)[:, None]
        if torch.compiler.is_compiling():
            return functional.scaled_dot_product_attention(heads, heads, heads, compared(x))
        return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def test_the_tuner_takes_masks_out_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as config

    if not hasattr(config, "fallback_by_default"):
        pytest.skip("this Inductor has no fallback_by_default")
    from tessera.rewrite import inductor

    given: list[Any] = []
    made = inductor.apply_passes

    def noted(module: Any, passes: Any, watch: Any) -> None:
        made(module, passes, watch)
        given.extend(n.kwargs for n in module.graph.nodes if "scaled_dot" in str(n.target))

    monkeypatch.setattr(inductor, "apply_passes", noted)
    torch.manual_seed(0)
    model, x = Masked().eval(), torch.randn(2, LENGTH, 8)

    def infer() -> Any:
        with torch.no_grad():
            return model(x)

    known = find_parts(infer)
    assert watch_call(infer, known) == CallTraits(infers=True, attends=True)
    space = {k.name: k for k in find_knobs(known, traits=CallTraits(attends=True))}
    assert space["masks"].needs == ("compile",) and "masks" not in {
        k.name for k in find_knobs(known, traits=CallTraits())
    }
    with config.patch(fallback_by_default=True):
        for _ in range(2):  # the second time the code is there
            with apply_setting(infer, known, {"compile": "default", "masks": "folded"}, {}) as call:
                torch.testing.assert_close(call(), infer())
    assert given == [{"attn_mask": None, "is_causal": True}] or given == [{"is_causal": True}]
    with (
        pytest.raises(NotApplicable, match="masks needs compile"),
        apply_setting(infer, known, {"masks": "folded"}, {}),
    ):
        pass
