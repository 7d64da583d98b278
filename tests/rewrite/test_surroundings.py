"""What a function works with besides its arguments is found by name, compared, and put back."""

from __future__ import annotations

import functools
import threading
import time
import types
from collections import Counter, deque
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import tessera
from tessera.errors import ArgumentError, RewriteError
from tessera.graph import surroundings
from tessera.graph.nested import find_containers, find_leaves, refill
from tessera.graph.surroundings import Surroundings
from tessera.rewrite.program import Program
from tessera.rewrite.state import Inputs

from rewriting import fresh_compiler, without_inductor  # noqa: F401 - fixtures

# Torch's compiler warns of itself (deprecated parts it still imports, recompilations): none of our business here.
pytestmark = pytest.mark.filterwarnings("ignore")

COUNT, SEEN, BUFFER = 0, [], torch.zeros(2)
MODEL = nn.Linear(4, 4)


def of(call: Any, *args: Any) -> Program:
    return Program.of(call, args, {}, "infer")


# -- where it is found ---------------------------------------------------------------------------------------------


def counts_in_its_module(x: Any) -> Any:
    global COUNT  # noqa: PLW0603  (as scripts do)
    COUNT += 1
    notes_elsewhere(x)
    return x + COUNT


def notes_elsewhere(x: Any) -> None:
    SEEN.append(x)
    BUFFER.add_(1.0)


def closed_over() -> tuple[Any, Any]:
    calls, total, known = 0, torch.zeros(2), {"last": None, "all": deque([1], maxlen=4)}

    def call(x: Any) -> Any:
        nonlocal calls
        calls += 1
        total.add_(x)
        known["last"] = x
        known["all"].append(calls)
        return x * calls

    return call, lambda: (calls, total, known)


def rebound() -> tuple[Any, Any]:
    best = None

    def call(x: Any) -> Any:
        nonlocal best
        best = x * 2 if best is None else best + x
        return best * 1.0

    return call, lambda: best


def defaults() -> tuple[Any, Any]:
    def call(x: Any, kept: Any = torch.zeros(2), *, more: Any = [torch.ones(1)]) -> Any:  # noqa: B006, B008
        more.append(x)
        return kept.add_(x) + more[0].add_(1.0)

    return call, lambda: (call.__defaults__, call.__kwdefaults__)


def partial() -> tuple[Any, Any]:
    cache, scale = [torch.ones(2)], {"by": torch.ones(1)}

    def call(cache: Any, x: Any, scale: Any) -> Any:
        cache.append(x)
        return x * scale["by"].add_(1.0)

    return functools.partial(call, cache, scale=scale), lambda: (cache, scale)


def bound() -> tuple[Any, Any]:
    held = Steps()
    return held.step, lambda: held


def called() -> tuple[Any, Any]:
    held = Steps()
    return held, lambda: held


def attribute() -> tuple[Any, Any]:
    def call(x: Any) -> Any:
        call.runs += 1  # type: ignore[attr-defined]
        return x * 1.0

    call.runs = 3  # type: ignore[attr-defined]
    return call, lambda: vars(call)


def decorated() -> tuple[Any, Any]:
    call, seen = closed_over()
    return torch.no_grad()(call), seen


def array() -> tuple[Any, Any]:
    sums, words, tally, names = np.zeros(3), np.array(["a", None], dtype=object), Counter("ab"), {"a"}

    def call(x: Any) -> Any:
        sums[1:] += float(x[0])
        words[1], tally["b"] = "b", 7
        names.add("b")
        return x * 1.0

    return call, lambda: (sums, words.tolist(), tally, names)


class Steps:
    """As somebody writes it who trains."""

    def __init__(self) -> None:
        self.n, self.average, self.last = 0, [torch.zeros(2)], None
        self.inner = types.SimpleNamespace(best=1.0)

    def step(self, x: Any) -> Any:
        self.n += 1
        self.last = x
        self.average[0].lerp_(x, 0.5)
        self.inner.best = 2.0
        self.made = True
        return x * self.n

    __call__ = step


PLACES = {
    "module": lambda: (counts_in_its_module, lambda: (COUNT, SEEN, BUFFER)),
    "closure": closed_over,
    "rebound": rebound,
    "defaults": defaults,
    "partial": partial,
    "method": bound,
    "object": called,
    "attribute": attribute,
    "decorated": decorated,
    "arrays": array,
}


def kept(thing: Any) -> str:
    return repr({k: v.tolist() if torch.is_tensor(v) else v for k, v in find_leaves(thing, "x").items()})


@pytest.mark.parametrize("place", PLACES)
def test_what_a_function_writes_outside_is_put_back(place: str) -> None:
    call, now = PLACES[place]()
    x = torch.ones(2)
    before = kept(now())
    with Inputs((x,), {}, Surroundings(call)) as inputs:
        assert inputs.find_changes() == {}
        call(x)
        assert kept(now()) != before
        assert inputs.find_changes()
    assert kept(now()) == before
    first = of(call, x).observe(call, (x,), {})
    assert kept(now()) == before
    assert [name for name in first if name.startswith("outside[")]
    assert of(call, x).make_reference((x,), {}).compare(of(call, x).observe(call, (x,), {})).ok


def test_models_and_optimizers_are_found_in_inner_functions_and_deep_in_objects() -> None:
    model, deep = nn.Linear(2, 2), types.SimpleNamespace(a=types.SimpleNamespace(b=types.SimpleNamespace()))
    deep.a.b.model = model
    deep.a.b.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        def inner() -> Any:
            return MODEL(x)

        return inner() + deep.a.b.model(x[:2]).sum()

    found = of(step, torch.ones(4))
    assert {id(m) for m in found.modules} == {id(MODEL), id(model)}
    assert found.optimizers == (deep.a.b.optimizer,)


def test_a_cell_that_was_empty_is_empty_again() -> None:
    def make() -> Any:
        def call(x: Any) -> Any:
            nonlocal late
            late = x
            return x

        if False:
            late = None
        return call

    call = make()
    of(call).observe(call, (torch.ones(1),), {})
    with pytest.raises(ValueError, match="empty"):
        _ = call.__closure__[0].cell_contents


# -- training ------------------------------------------------------------------------------------------------------


def test_a_whole_step_of_training_leaves_no_trace(uncompiled: None) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu")
    average = {k: v.detach().clone() for k, v in model.named_parameters()}
    batches, losses, steps = [torch.randn(2, 4) for _ in range(2)], [], 0

    def step() -> Any:
        nonlocal steps
        optimizer.zero_grad()
        for x in batches:
            loss = model(x).square().mean() / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 0.1)
        steps += 1
        losses.append(loss.item())
        return loss.detach()

    def now() -> str:
        return kept((model.state_dict(), optimizer.state_dict(), schedule, scaler.state_dict(), average, losses, steps))

    step()  # everything is there that is made late
    before = now()
    fast = tessera.optimize(step, (), budget_s=0)
    assert now() == before
    twice = [float(fast()) for _ in range(2)]
    assert (steps, len(losses), schedule.last_epoch) == (3, 3, 3)
    assert losses[1:] == twice


def test_parameters_that_only_an_optimizer_has_are_kept_and_their_gradients_compared() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=0.1)

    def step(x: Any, scale: float = 1.0) -> Any:
        optimizer.zero_grad()
        loss = (x @ w).square().mean() * scale
        loss.backward()
        optimizer.step()
        return loss.detach() / scale

    x, before = torch.randn(2, 4), w.detach().clone()
    program = of(step, x)
    reference = program.make_reference((x,), {})
    assert torch.equal(w, before) and w.grad is None and not optimizer.state
    assert {"gradient of Adam's parameter 0", "size of the update"} < set(reference.observed)
    assert not [name for name in reference.observed if name.startswith("outside")]  # but as a parameter
    assert reference.compare(program.observe(step, (x,), {"scale": 2.0})).where == "all gradients"


def test_a_generator_of_random_numbers_is_put_back_and_seen_to_be_one() -> None:
    drawn = torch.Generator().manual_seed(7)
    before = drawn.get_state()
    program = of(lambda x: x + torch.randn(2, generator=drawn), torch.ones(2))
    assert program.make_reference((torch.ones(2),), {}).random
    assert torch.equal(drawn.get_state(), before)


def test_hooks_are_not_compiled_and_may_find_no_gradient() -> None:
    """Of the generator's weights, behind detach(), compiled code says that they have none."""
    makes, judges, x = nn.Linear(4, 4), nn.Linear(4, 1), torch.randn(2, 4)

    def step() -> Any:
        loss = judges(x).mean() + judges(makes(x).detach()).square().mean()
        loss.backward()
        return loss.detach()

    program = of(step)
    found = program.observe(torch.compile(step, backend="aot_eager"), (), {})
    assert program.make_reference((), {}).compare(found).ok


def test_gradients_are_compared_under_no_grad_too() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    program = Program.of(model, (x,), {}, "train")
    with torch.no_grad():
        assert "gradient of weight" in program.observe(model, (x,), {})


# -- comparing -----------------------------------------------------------------------------------------------------


def test_a_variant_must_write_outside_alike() -> None:
    total = torch.zeros(2)
    reference = of(lambda x: total.add_(x) * 0, torch.ones(2)).make_reference((torch.ones(2),), {})

    def verdict(wrong: Any) -> Any:
        return reference.compare(of(lambda x: total.add_(x) * 0).observe(wrong, (torch.ones(2),), {}))

    assert verdict(lambda x: total.add_(x) * 0).ok
    assert verdict(lambda x: x * 0).why == "outside['total'] is changed by one of the two only"
    assert verdict(lambda x: total.add_(2 * x) * 0).where == "outside['total']"


def test_numbers_noted_outside_are_compared() -> None:
    losses: list[float] = []

    def step(x: Any, by: float = 1.0) -> Any:
        losses.append(float(x.sum()) * by)
        return x * 2

    program = of(step, torch.ones(2))
    reference = program.make_reference((torch.ones(2),), {})
    assert reference.compare(program.observe(step, (torch.ones(2),), {})).ok
    assert reference.compare(program.observe(step, (torch.ones(2),), {"by": 1.1})).where == "outside['losses'][0]"


def test_a_clock_outside_is_not_taken_for_random_numbers() -> None:
    times: list[float] = []

    def step(x: Any) -> Any:
        times.append(time.perf_counter_ns() % 1000 / 7)
        return x * 2

    program = of(step, torch.ones(2))
    reference = program.make_reference((torch.ones(2),), {})
    assert not reference.random
    assert reference.notes == ["the outside['times'][0] is another one at every run: not compared"]
    assert reference.compare(program.observe(step, (torch.ones(2),), {})).ok
    assert times == []


def test_names_that_are_others_at_every_run_are_not_compared() -> None:
    times: dict[float, Any] = {}

    def step(x: Any) -> Any:
        times[time.perf_counter()] = x.sum()
        return x * 2

    program = of(step, torch.ones(2))
    reference = program.make_reference((torch.ones(2),), {})
    assert reference.compare(program.observe(step, (torch.ones(2),), {})).ok
    assert not reference.compare(program.observe(lambda x: x * 3, (torch.ones(2),), {})).ok


def test_what_a_clock_decides_is_asked_of_the_original_again(uncompiled: None) -> None:
    class Clock:
        def __init__(self) -> None:
            self.lock, self.time = threading.Lock(), 0  # so it is not put back

    clock, shown = Clock(), []

    def step(x: Any) -> Any:
        clock.time += 1
        if clock.time > 2:
            shown.append(1)
        return x * 2

    assert tessera.optimize(step, torch.ones(2), budget_s=0).chosen == "default"
    assert shown == []


def test_what_is_made_once_and_stays_is_not_compared() -> None:
    class Once(dict[str, Any]):
        """One that cannot be put back."""

    made = Once()

    def step(x: Any) -> Any:
        made.setdefault("table", torch.ones(2))
        return x * made["table"]

    program = of(step, torch.ones(2))
    reference = program.make_reference((torch.ones(2),), {})
    assert not reference.random
    assert reference.compare(program.observe(step, (torch.ones(2),), {})).ok


# -- what is left alone --------------------------------------------------------------------------------------------


def test_what_is_large_is_left_alone_and_named(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    words, data = {str(i): i for i in range(surroundings.MAX_VALUES + 1)}, torch.zeros(1000, 1000)
    rows = [torch.ones(2)]
    monkeypatch.setattr(surroundings, "_read_free_bytes", lambda: 10e6)

    def step(x: Any) -> Any:
        data.add_(1.0)
        rows[0].add_(1.0)
        return x * len(words) + data[0, 0] * 0

    fast = tessera.optimize(step, torch.ones(2), budget_s=0)
    assert "words outside holds more than 20000 values: what is written there is not put back" in fast.notes
    assert "data outside has 0.0 GB, of which no copy fits: what is written there is not put back" in fast.notes
    assert float(data[0, 0]) > 0.0
    assert rows[0].tolist() == [1.0, 1.0]
    monkeypatch.setattr(surroundings, "_read_free_bytes", lambda: 100e6)
    assert "data" not in Surroundings(step).skipped


def test_copies_of_weights_are_not_made_twice() -> None:
    weights, step = list(MODEL.parameters()), lambda x: MODEL(x) + weights[0].sum()
    program = of(step, torch.ones(4))
    with program.restoring() as state, program.save_inputs((torch.ones(4),), {}, state) as inputs:
        assert len(inputs._tensors) == 1


def test_objects_that_others_work_with_meanwhile_are_not_touched(uncompiled: None) -> None:
    class Shared:
        def __init__(self) -> None:
            self.lock, self.n = threading.Lock(), 0

    shared, model = Shared(), nn.Linear(4, 4)
    fast = tessera.optimize(model, budget_s=0)

    def step(x: Any) -> Any:
        shared.n += 1
        return fast(x)

    program = of(step, torch.ones(4))
    program.observe(step, (torch.ones(4),), {})
    program.observe(step, (torch.ones(4),), {})
    assert shared.n == 2
    assert fast.chosen == "default"  # what was compiled stays so
    assert program.modules == (model,)


def test_the_workers_of_a_data_loader_are_left_alone() -> None:
    batches = iter(torch.utils.data.DataLoader(range(6), num_workers=1))
    step = lambda x: x + next(batches)  # noqa: E731
    of(step, torch.ones(1)).observe(step, (torch.ones(1),), {})
    assert [int(batch) for batch in batches] == [1, 2, 3, 4, 5]  # what it knows of them is as it was, or it would wait


def test_what_belongs_to_torchs_compiler_is_left_alone() -> None:
    compiled = torch.compile(lambda x: x * 2)
    found = Surroundings(lambda x: compiled(x) + 1).values()
    assert any(type(value).__module__.startswith("torch._dynamo") for value in found.values())
    assert list(find_containers(found)) == [found]


def test_no_more_is_put_back_than_was_changed() -> None:
    """A thread that reads a dictionary meanwhile does not find it empty."""

    class Watched(dict[str, int]):
        def clear(self) -> None:
            raise AssertionError

    watched = Watched(a=1, b=2, c=3)
    refill(watched, {"a": 1, "b": 0})
    assert watched == {"a": 1, "b": 0}
    turned = {"b": 1, "a": 2}
    refill(turned, {"a": 1, "b": 2})
    assert list(turned.items()) == [("a", 1), ("b", 2)]


class Everything:
    """Has whatever attribute it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return Everything()


class Nothing:
    """A proxy out of its context."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError

    @property
    def __dict__(self) -> Any:
        raise RuntimeError

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError


class Closed(dict[str, Any]):
    """A store that is shut."""

    def __len__(self) -> int:
        raise OSError

    def items(self) -> Any:
        raise OSError


ODD = {
    "everything": Everything(),
    "nothing": Nothing(),
    "closed": Closed(a=1),
    "called": mock.call,
    "masked": types.MappingProxyType({"a": [1]}),
    "lazy": nn.UninitializedParameter(),
    "classes": torch.classes,
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_profiled_is_no_error(name: str) -> None:
    odd, seen = ODD[name], []

    def step(x: Any) -> Any:
        seen.append(id(odd))
        return x

    around = Surroundings(step)
    around.skip_large(frozenset())
    with Inputs((), {}, around) as inputs:
        step(1)
        assert [*inputs.find_changes()] == ["outside['seen'][0]"]
    assert seen == []


def test_a_long_chain_of_functions_is_followed_to_its_end() -> None:
    names: dict[str, Any] = {"__name__": "chain", "END": []}
    lines = [f"def f{i}(x): return f{i + 1}(x)" for i in range(2000)]
    exec("\n".join([*lines, "def f2000(x): END.append(x)"]), names)
    assert Surroundings(names["f0"]).values()["END"] is names["END"]


def test_sparse_tensors_and_scripted_models_are_kept() -> None:
    table, model = torch.eye(3).to_sparse(), torch.jit.script(nn.BatchNorm1d(3))

    def step(x: Any) -> Any:
        table.mul_(2.0)
        return model(x) + table

    first = of(step, torch.ones(3, 3)).observe(step, (torch.ones(3, 3),), {})
    assert torch.equal(first["outside['table']"].to_dense(), 2 * torch.eye(3))
    assert torch.equal(table.to_dense(), torch.eye(3))
    assert int(model.num_batches_tracked) == 0


# -- errors that name the fix --------------------------------------------------------------------------------------


def test_a_lazy_layer_is_named() -> None:
    with pytest.raises(ArgumentError, match="lazy layer") as caught:
        tessera.optimize(nn.LazyLinear(4), torch.ones(2, 4))
    assert "call the model once" in str(caught.value.fix)


@pytest.mark.parametrize("times", [1, 4])
def test_a_step_that_cannot_run_so_often_is_named(uncompiled: None, times: int) -> None:
    batches = iter([torch.ones(2)] * times)
    with pytest.raises(RewriteError, match="failed when it was run again") as caught:
        tessera.optimize(lambda: next(batches) * 2, ())
    assert "StopIteration" in caught.value.why
    assert "one batch" in str(caught.value.fix)


def test_a_variant_that_fails_while_it_is_measured_is_dropped(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tessera.rewrite.variants import EAGER, VariantSearch

    def breaks(self: Any, call: Any) -> None:
        if call is not self.program.call:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(VariantSearch, "run_iteration", breaks)
    fast = tessera.optimize(lambda x: x.sin(), torch.ones(2))
    assert fast.chosen == EAGER
    assert fast.variants[1].why == "it failed when it was run again: RuntimeError: out of memory"


def test_a_budget_that_is_over_before_anything_compiles_is_no_error(uncompiled: None) -> None:
    def slow(x: Any) -> Any:
        time.sleep(0.01)
        return x.sin()

    fast = tessera.optimize(slow, torch.ones(2), budget_s=0.005)
    assert fast.chosen == "eager"
    assert "budget_s was over before a variant could be tried" in fast.notes
    assert torch.equal(fast(torch.ones(2)), torch.ones(2).sin())
