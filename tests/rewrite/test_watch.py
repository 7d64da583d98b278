"""Variants in use: what keeps its promise stays, what does not is compared with the others, within 50 calls."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tessera
from tessera.report.rewrite import search_line, use_line
from tessera.rewrite import call_clock
from tessera.rewrite.compile_events import CompileEvents, count_events, note_recording
from tessera.rewrite.notice import announce_if_long
from tessera.rewrite.other_inputs import OtherInputs
from tessera.rewrite.search_cost import count_calls_to_pay, guess_compile_s
from tessera.rewrite.use_report import UseReport, find_best_in_use
from tessera.rewrite.variants import Variant
from tessera.rewrite.watch import WatchedCall, WatchedVariant, describe_inputs

from rewriting import ToldClock, fresh_compiler, without_inductor  # noqa: F401 - fixtures


class Loop:
    """A program in three variants whose calls take what `costs` say, in the order of their promises."""

    def __init__(self, costs: dict[str, Callable[[], float]], promises: dict[str, float], **options: Any) -> None:
        self.clock, self.costs, self.entered = ToldClock(), costs, list[str]()
        self.reports: list[UseReport] = []
        candidates = [
            WatchedVariant(name=n, enter=lambda n=n: self.enter(n), promise=SimpleNamespace(time_s=s, energy_j=None))
            for n, s in promises.items()
        ]
        choose = lambda figures: find_best_in_use(figures, by=("energy", "time"))  # noqa: E731
        options.setdefault("inputs", ())
        self.call = WatchedCall(candidates, choose, self.reports.append, clock=self.clock, **options)

    def enter(self, name: str) -> Any:
        self.entered.append(name)

        def call(*args: Any) -> str:
            self.clock.now_s += self.costs[name]()
            return name

        return call

    def run(self, calls: int, *args: Any, pause_s: float = 0.0) -> list[str]:
        names = []
        for _ in range(calls):
            names.append(self.call(*args))
            self.clock.now_s += pause_s
        return names


PROMISES = {"reduce-overhead": 0.0218, "default": 0.0272, "eager": 0.0352}


def fixed(**more: Callable[[], float]) -> dict[str, Callable[[], float]]:
    return {n: (lambda s=s: s) for n, s in PROMISES.items()} | more


def test_what_keeps_its_promise_is_confirmed_and_watched_no_more() -> None:
    loop = Loop(fixed(), PROMISES)
    assert set(loop.run(60)) == {"reduce-overhead"} and loop.entered == ["reduce-overhead"]
    (report,) = loop.reports
    assert report.outcome == "confirmed" and not report.fell_back
    assert use_line(report) == "in use: as promised, 21.8 ms, promised 21.8 ms"


def test_graphs_that_are_recorded_again_make_it_fall_back_to_the_best_in_use_within_50_calls() -> None:
    def record() -> float:
        note_recording()
        return 0.069

    loop = Loop(fixed(**{"reduce-overhead": record}), PROMISES)
    names = loop.run(50)
    assert names[-1] == "default" and set(loop.run(10)) == {"default"}
    (report,) = loop.reports
    assert (report.chosen, report.runs, report.outcome) == ("reduce-overhead", "default", "compared")
    assert report.variants[0].recordings == 5
    line = use_line(report)
    assert "reduce-overhead took 69 ms, promised 21.8 ms, 5 graphs recorded again in 5 calls" in line
    assert line.endswith("default runs now: 27.2 ms, promised 27.2 ms")


def test_the_first_compilation_for_a_new_shape_is_not_held_against_it() -> None:
    calls = iter(range(1000))

    def compile_twice() -> float:
        if next(calls) in (4, 6):
            watch_events(1)
            return 30.0
        return 0.0218

    loop = Loop(fixed(**{"reduce-overhead": compile_twice}), PROMISES)
    loop.run(50)
    assert loop.reports[0].outcome == "confirmed" and loop.reports[0].variants[0].time_s == pytest.approx(0.0218)


def watch_events(count: int) -> None:
    from tessera.rewrite import compile_events

    for _ in range(count):
        compile_events._add(recorded=False)


def test_slower_than_eager_in_use_is_eager_at_last() -> None:
    loop = Loop(fixed(**{"reduce-overhead": lambda: 0.05, "default": lambda: 0.0353}), PROMISES)
    assert loop.run(50)[-1] == "eager"
    assert loop.reports[0].runs == "eager"


def test_slower_than_promised_but_still_the_best_stays() -> None:
    loop = Loop({n: (lambda s=s: 1.5 * s) for n, s in PROMISES.items()}, PROMISES)
    assert loop.run(50)[-1] == "reduce-overhead"
    assert loop.reports[0].outcome == "compared" and "still the best of 3" in use_line(loop.reports[0])


def test_where_everything_is_faster_than_in_the_trial_the_promise_says_nothing() -> None:
    loop = Loop({"reduce-overhead": lambda: 0.018, "default": lambda: 0.017, "eager": lambda: 0.015}, PROMISES)
    assert loop.run(50)[-1] == "eager" and loop.reports[0].outcome == "compared"


def test_a_promise_says_nothing_of_other_shapes() -> None:
    x = torch.zeros(4, 2)
    loop = Loop(fixed(), PROMISES, inputs=describe_inputs((x,), {}))
    loop.run(20, torch.zeros(5, 2))
    assert loop.entered[:2] == ["reduce-overhead", "default"] and not loop.reports
    loop.run(30, x)
    assert loop.reports[0].outcome == "compared" and loop.reports[0].runs == "reduce-overhead"


def test_calls_with_more_data_may_take_longer() -> None:
    """Turns that happened to get the long batches are not blamed for them."""
    loop = Loop({n: (lambda s=s: s * loop_rows[0] / 8) for n, s in PROMISES.items()}, PROMISES)
    loop_rows = [8]
    for at in range(50):
        loop_rows[0] = 40 if at < 12 else 8
        loop.call(torch.zeros(loop_rows[0], 3))
    assert loop.reports[0].runs == "reduce-overhead"


def test_a_training_loop_is_measured_from_call_to_call_and_pauses_count_little() -> None:
    """The backward pass is outside of the call: here it is what the chosen variant is slow at."""
    loop = Loop(fixed(), PROMISES, between=True)
    behind = {"reduce-overhead": 0.05, "default": 0.01, "eager": 0.02}
    for at in range(50):
        loop.clock.now_s += behind[loop.call()]
        if at == 5:
            loop.clock.now_s += 60.0  # an evaluation
    report = loop.reports[0]
    assert report.runs == "default"
    assert report.variants[0].time_s < 1.3 * (0.0218 + 0.05)


def test_a_call_that_was_interrupted_once_is_no_reason_to_fall_back() -> None:
    calls = iter(range(1000))
    loop = Loop(fixed(**{"reduce-overhead": lambda: 0.3 if next(calls) == 7 else 0.0218}), PROMISES)
    loop.run(50)
    assert loop.reports[0].runs == "reduce-overhead" and loop.reports[0].variants[0].time_s < 0.0272


def test_a_pause_between_calls_is_not_the_variants() -> None:
    loop = Loop(fixed(), PROMISES)
    loop.run(20, pause_s=3.0)
    assert loop.reports[0].outcome == "confirmed"


def test_chance_does_not_decide() -> None:
    def noisy(seconds: float) -> Iterator[float]:
        while True:
            yield from (0.5 * seconds, 1.5 * seconds)

    costs = {n: noisy(s).__next__ for n, s in (("reduce-overhead", 0.036), ("default", 0.035), ("eager", 0.0352))}
    loop = Loop(costs, PROMISES)
    loop.run(50)
    assert loop.reports[0].runs == "reduce-overhead"


def test_joules_decide_where_they_are_known() -> None:
    class Sensor:
        """A monitor whose board draws 700 W in the first variant and 300 W in the others."""

        def open(self, name: str, *, nested: bool) -> Any:
            return SimpleNamespace(begin=loop.clock.now_s, watts=700.0 if loop.entered[-1] == "default" else 300.0)

        def close(self, window: Any) -> None:
            window.seconds = loop.clock.now_s - window.begin

        def read(self, window: Any, timeout_s: float) -> None:
            pass

        def total(self, window: Any) -> Any:
            joules = window.watts * window.seconds
            return SimpleNamespace(joules=joules, error_j=0.01 * joules, time_s=window.seconds, basis="measured")

    promises = {"default": 0.0272, "eager": 0.0272}
    loop = Loop({n: (lambda s=s: 1.2 * s) for n, s in promises.items()}, promises, monitor=Sensor())
    loop.run(50)
    report = loop.reports[0]
    assert report.runs == "eager" and report.variants[0].energy_j == pytest.approx(700 * 1.2 * 0.0272)


def test_threads_that_share_a_program_are_not_switched() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait_once() -> float:
        if not inside.is_set():
            inside.set()
            go_on.wait(600)
        return 0.5

    loop = Loop(fixed(**{"reduce-overhead": wait_once}), PROMISES)
    other = threading.Thread(target=loop.call)
    other.start()
    inside.wait(600)
    loop.call()
    go_on.set()
    other.join()
    assert set(loop.run(40)) == {"reduce-overhead"}
    assert loop.reports[0].outcome == "shared" and "several threads" in use_line(loop.reports[0])


def test_an_error_of_the_program_passes_through_and_counts_for_nothing() -> None:
    def fail() -> float:
        raise KeyError("the program's own")

    loop = Loop(fixed(**{"reduce-overhead": fail}), PROMISES)
    for _ in range(30):
        with pytest.raises(KeyError):
            loop.call()
    assert not loop.reports


# -- events and inputs -------------------------------------------------------------------------------------------------


def test_compilations_are_counted_after_a_reset_too() -> None:
    model = torch.nn.Linear(4, 4)
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        before = count_events()
        compiled(torch.ones(2, 4))
        assert (count_events() - before).compilations == 1
        compiled(torch.ones(2, 4))
        assert count_events() - before == CompileEvents(1, 0)
        compiled(torch.ones(5, 4))
        assert (count_events() - before).compilations == 2


def test_other_inputs_have_the_same_shapes_layouts_and_ranges() -> None:
    tokens = torch.tensor([[90, 5], [91, 6], [92, 7], [93, 8]])
    images = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    fixed_ones = {"mask": torch.ones(4, 2).long(), "edges": torch.tensor([[0, 9], [9, 0]]), "at": torch.arange(4)}
    fixed_ones["expanded"] = torch.randn(4, 1).expand(4, 3)
    others = OtherInputs((tokens, images[..., :5]), fixed_ones)
    seen = set()
    for _ in range(8):
        (ids, pixels), kept = others.make()
        assert sorted(ids[:, 1].tolist()) == [5, 6, 7, 8] and sorted(ids[:, 0].tolist()) == [90, 91, 92, 93]
        assert pixels.stride() == images.stride()
        assert pixels.sum().item() == pytest.approx(images[..., :5].sum().item(), abs=1e-3)
        assert all(kept[name] is value for name, value in fixed_ones.items())
        seen.add(str(ids.tolist()))
    assert len(seen) > 1
    assert not OtherInputs((torch.ones(3, dtype=torch.bool), "text"), {})


def test_a_trial_meets_other_data(uncompiled: None) -> None:
    """Code that depends on the data is compiled again with each batch: its trial says so, and pays for it."""

    class Routed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(int(1000 * x[0, 0].abs().item()) % 97):  # so many are compiled into the code
                x = x + 1.0
            return x

    fast = tessera.optimize(Routed(), torch.randn(8, 8), explain=False, budget_s=30)
    tried = {v.name: v for v in fast.variants}
    assert tried["default"].unsettled and not tried["eager"].unsettled
    assert "compiles or records again with other data" in str(fast)


# -- what a search costs -----------------------------------------------------------------------------------------------


def test_what_a_search_took_is_paid_after_so_many_calls() -> None:
    eager, fast = SimpleNamespace(time_s=2.0, energy_j=20.0), SimpleNamespace(time_s=1.5, energy_j=16.0)
    assert count_calls_to_pay(60.0, 4000.0, eager, fast) == 1000
    assert count_calls_to_pay(60.0, None, eager, fast) == 120
    assert count_calls_to_pay(60.0, 4000.0, fast, eager) is None
    assert search_line(60.0, 4000.0, 1000) == "the search took 60 s and 4 kJ: paid after 1,000 calls"
    assert search_line(60.0, None, None) == "the search took 60 s: nothing is saved"


def test_a_compilation_that_does_not_fit_the_budget_is_not_begun(uncompiled: None) -> None:
    deep = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(200)))
    assert guess_compile_s([deep], trains=True) > 30 > guess_compile_s([deep], trains=False) > 15
    fast = tessera.optimize(deep, torch.randn(2, 4), budget_s=6)
    assert fast.chosen == "eager" and [v.why[:26] for v in fast.variants[1:]] == ["not tried: compiling may t"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
@pytest.mark.parametrize("mode", ["train", "step"])
def test_a_trial_leaves_nothing_that_every_later_backward_pass_would_ask(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    # Of such hooks torch keeps a list that stays, empty, when they are removed.
    monkeypatch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", None)
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    for node in nodes:
        node.metadata["made before the trial"] = True

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    fast = tessera.optimize(*((step, x) if mode == "step" else (model, x)), mode="train", explain=False, budget_s=20)
    del node, nodes, fast
    gc.collect()
    edges = [torch.autograd.graph.get_gradient_edge(p) for p in model.parameters()]
    assert not any(edge.node.metadata for edge in edges)  # no backward pass of a trial is kept


# -- the whole, with a compiler ----------------------------------------------------------------------------------------


class Chain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x) + x.sin()
        return x


def optimize_as(monkeypatch: pytest.MonkeyPatch, times: dict[str, float], mode: str) -> Any:
    """An optimized chain whose trials measured what `times` says; in use every compilation takes 5 s."""
    from tessera.rewrite.variants import VariantSearch

    def measure(self: Any, variant: Variant) -> None:
        variant.time_s = times[variant.name]

    monkeypatch.setattr(VariantSearch, "_measure", measure)
    monkeypatch.setattr(call_clock, "HostClock", CompilingClock)
    return tessera.optimize(Chain(), torch.randn(4, 8), mode=mode, explain=False)


class CompilingClock(ToldClock):
    """Each mark is 10 ms after the one before, and 5 s more for each compilation between them."""

    def mark(self) -> float:
        self.now_s += 0.01
        return self.now_s + 5.0 * count_events().compilations


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_real_recompilations_of_changing_shapes_end_in_eager(
    monkeypatch: pytest.MonkeyPatch, uncompiled: None, mode: str
) -> None:
    """Dynamo compiles anew for shapes that it may not treat as dynamic; the loop is back in eager mode soon."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64):
        fast = optimize_as(monkeypatch, {"eager": 0.02, "default": 0.01}, mode)
        assert fast.chosen == "default"
        _call_with_more_rows(fast, mode)
    assert fast.chosen == "eager" and fast.in_use.variants[0].compilations == fast.in_use.variants[0].calls
    assert "eager runs now" in str(fast) and not fast.rewrites


def _call_with_more_rows(fast: Any, mode: str) -> None:
    for rows in range(5, 55):
        x = torch.randn(rows, 8, requires_grad=mode == "train")
        y = fast(x)
        torch.testing.assert_close(y, fast.original(x))


def test_real_code_that_settles_is_kept(monkeypatch: pytest.MonkeyPatch, uncompiled: None) -> None:
    fast = optimize_as(monkeypatch, {"eager": 0.02, "default": 0.01}, "infer")
    for rows in range(5, 55):  # dynamic after the second shape
        fast(torch.randn(rows, 8))
    assert fast.chosen == "default" and fast.in_use.runs == "default" and not fast.in_use.variants[0].compilations
    assert fast.spent_s > 0


# -- in turns ----------------------------------------------------------------------------------------------------------


def test_a_fallback_that_compiles_for_new_shapes_is_judged_once_it_has() -> None:
    """A decoding loop on an H200: reduce-overhead recorded at each length, and took the calls default needed."""
    left = iter((0.0, 10.0, 0.0, 12.0))

    def record() -> float:
        note_recording()
        return 0.052

    def compile_first() -> float:
        seconds = next(left, 0.0)
        watch_events(1 if seconds else 0)
        return seconds + 0.0033

    costs = {"reduce-overhead": record, "default": compile_first, "eager": lambda: 0.005}
    loop = Loop(costs, {"reduce-overhead": 0.0014, "default": 0.0028, "eager": 0.0048})
    assert loop.run(50)[-1] == "default"
    assert loop.reports[0].variants[1].time_s == pytest.approx(0.0033)


def test_one_long_call_among_few_does_not_decide() -> None:
    """Decoding on an H200: one call of 0.3 s, in which nothing was compiled, made default seem slower than eager."""
    calls = iter(range(1000))
    costs = {"default": lambda: 0.33 if next(calls) == 20 else 0.002, "eager": lambda: 0.003}
    loop = Loop(costs, {"default": 0.0015, "eager": 0.0031})
    assert loop.run(50)[-1] == "default" and loop.reports[0].outcome == "compared"


@pytest.mark.parametrize("drift", [0.3, -0.3])
def test_a_host_that_becomes_slower_or_faster_does_not_decide(drift: float) -> None:
    """All ways drift by 30% over the loop, of which one block each would blame the last one, or the first."""
    calls = iter(range(1000))
    costs = {
        name: (lambda s=s: s * (1.0 + drift * next(calls) / 50))
        for name, s in (("reduce-overhead", 0.0231), ("default", 0.022), ("eager", 0.0225))
    }
    loop = Loop(costs, dict.fromkeys(costs, 0.01))
    loop.run(50)
    report = loop.reports[0]
    assert report.runs == "default"
    slower, best, eager = (v.time_s for v in report.variants)
    assert slower / best == pytest.approx(1.05, abs=0.01) and eager / best == pytest.approx(1.023, abs=0.01)


def test_what_all_of_a_round_share_cancels() -> None:
    from tessera.rewrite.turns import compare_rounds, order_turns

    paces = [1.0, 1.3, 0.8, 1.1]
    fast, slow = compare_rounds([[[2.0 * pace, 2.0 * pace], [3.0 * pace]] for pace in paces])
    assert slow.mean / fast.mean == pytest.approx(1.5) and fast.error == pytest.approx(0.0, abs=1e-12)
    assert order_turns(3, 2) == [[0, 1, 2], [2, 1, 0]]


def test_calls_that_had_to_get_memory_are_not_held_against_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding on an H200: inputs grow, and code that needs more memory than there was gets some at each call."""
    from tessera.rewrite import compile_events

    got = [0]
    monkeypatch.setattr(compile_events, "_count_allocations", lambda: got[0])

    def get_memory() -> float:
        got[0] += 1
        return 0.041

    costs = {"default": get_memory, "eager": lambda: 0.0029}
    loop = Loop(costs, {"default": 0.0020, "eager": 0.0031})
    assert loop.run(50)[-1] == "default"
    default, eager = loop.reports[0].variants
    assert default.estimated and default.time_s == pytest.approx(0.0020 * 29 / 31) and not eager.estimated
    assert "1.871 ms by its trial, since each call here had to get memory" in use_line(loop.reports[0])


def test_a_few_calls_that_had_to_get_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera.rewrite import compile_events

    got, calls = [0], iter(range(1000))
    monkeypatch.setattr(compile_events, "_count_allocations", lambda: got[0])

    def get_memory_at_first() -> float:
        got[0] += next(calls) < 20
        return 0.041 if got[0] < 20 else 0.0035

    loop = Loop({"default": get_memory_at_first, "eager": lambda: 0.0029}, {"default": 0.0020, "eager": 0.0031})
    assert loop.run(50)[-1] == "eager"  # by what it took afterwards
    default = loop.reports[0].variants[0]
    assert not default.estimated and default.time_s == pytest.approx(0.0035)


def test_a_variant_that_is_far_from_the_best_is_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera.monitor.iteration import IterationMeasurement
    from tessera.rewrite.variants import EAGER, VariantSearch

    seconds = {EAGER: 4.0, "default": 1.1, "reduce-overhead": 1.0}
    count: dict[str, int] = dict.fromkeys(seconds, 0)

    def measure(self: Any, variant: Variant) -> None:
        count[variant.mode] += 1
        took = seconds[variant.mode]
        variant.turns.append(IterationMeasurement(time_s=took, energy_j=2 * took, error_j=0.0))

    monkeypatch.setattr(VariantSearch, "_measure", measure)
    variants = [Variant(mode=mode, call=lambda: None) for mode in seconds]
    options: dict[str, Any] = {"program": None, "args": (), "kwargs": {}, "tolerance": None, "say": lambda _: None}
    VariantSearch(**options, budget_s=1e9, observe=False)._measure_in_turns(variants)
    assert count == {EAGER: 2, "default": 4, "reduce-overhead": 4}
    assert [v.time_s for v in variants] == pytest.approx(list(seconds.values()))
    assert [v.energy_j for v in variants] == pytest.approx([2 * s for s in seconds.values()])
    VariantSearch(**options, budget_s=1e9, observe=True)._measure_in_turns(variants)
    assert count[EAGER] == 6  # a trace begins with what eager takes
    seconds |= {"default": 3.0}
    VariantSearch(**options, budget_s=1e9, observe=False)._measure_in_turns(variants)
    assert count == {EAGER: 8, "default": 10, "reduce-overhead": 10}  # nothing is left to compare


# -- shapes that are new, and come again -------------------------------------------------------------------------------


class Decoding(Loop):
    """Lengths grow by one at each call, and begin anew after `period` of them.

    A length costs a library's plan at a variant's first call of it; "reduce-overhead" records at its second.
    """

    def __init__(self, steady: dict[str, float], promises: dict[str, float], period: int) -> None:
        super().__init__({}, promises, inputs=describe_inputs((torch.zeros(8, 2),), {}))
        self.steady, self.period, self.at, self.had = steady, period, 0, dict[tuple[str, int], int]()
        self.names: list[str] = []

    def enter(self, name: str) -> Any:
        def call(x: torch.Tensor) -> str:
            times = self.had[name, len(x)] = self.had.get((name, len(x)), 0) + 1
            records = name == "reduce-overhead" and times == 2
            if records:
                note_recording()
            self.clock.now_s += self.steady[name] + (0.04 if times == 1 or records else 0.0)
            return name

        return call

    def decode(self, calls: int) -> list[str]:
        names = []
        for _ in range(calls):
            names.append(self.call(torch.zeros(8 + self.at % self.period, 2)))
            self.at += 1
        return names


DECODING = {"reduce-overhead": 0.0014, "default": 0.0022, "eager": 0.0026}


def test_what_shapes_cost_at_first_does_not_decide_once_they_come_again() -> None:
    """A decoder on an H200 was left in eager mode by calls that all had a new length."""
    loop = Decoding(DECODING, DECODING, period=64)
    for length in range(8, 72):
        loop.had["eager", length] = 1  # it ran there before the others, so that new lengths cost it nothing
    assert loop.decode(50)[-1] == "eager"
    (first,) = loop.reports
    assert first.provisional and first.runs == "eager" and first.after_calls < 50
    assert use_line(first).endswith("to be compared again when shapes come again: most were new")
    assert set(loop.decode(10)) == {"eager"}  # and nothing is tried until shapes come again
    loop.decode(600)
    last = loop.reports[-1]
    assert len(loop.reports) == 2 and not last.provisional and last.runs == "reduce-overhead"
    assert [v.time_s for v in last.variants] == pytest.approx(list(DECODING.values()), rel=0.1)
    assert set(loop.decode(100)) == {"reduce-overhead"}


def test_shapes_that_never_come_again_cost_what_they_cost() -> None:
    loop = Decoding(DECODING | {"default": 0.05}, DECODING, period=10_000)
    loop.decode(1500)
    assert [r.provisional for r in loop.reports] == [True, False]
    assert loop.reports[0].runs == loop.reports[1].runs and loop.reports[1].variants[0].time_s > 0.04


def test_the_same_shape_at_every_call_is_decided_at_once() -> None:
    loop = Decoding(DECODING | {"reduce-overhead": 0.005}, DECODING, period=1)
    loop.decode(50)
    (report,) = loop.reports
    assert not report.provisional and report.runs == "default" and report.after_calls < 50


def test_a_provisional_choice_keeps_the_other_variants(monkeypatch: pytest.MonkeyPatch, uncompiled: None) -> None:
    fast = optimize_as(monkeypatch, {"eager": 0.02, "default": 0.01}, "infer")
    for rows in range(5, 55):
        fast(torch.randn(rows, 8))
    assert fast.in_use.provisional and isinstance(fast._call, WatchedCall)
    for rows in 8 * [*range(5, 55)]:
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), fast.original(x))
    assert not fast.in_use.provisional and not isinstance(fast._call, WatchedCall)


def test_a_long_search_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    with announce_if_long("tuning step: at most 60 s", after_s=0.0) as timer:
        assert timer is not None
        timer.join()
    assert capsys.readouterr().err == "tessera: tuning step: at most 60 s\n"
    with announce_if_long("not this one", after_s=3600.0) as timer:
        pass
    assert timer is not None
    timer.join()
    assert not capsys.readouterr().err
