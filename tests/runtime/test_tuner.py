"""The tuner: what it searches, what it refuses, that it leaves no trace, and that it finds the best."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera import schedule
from tessera.errors import ArgumentError, RecordingError, ScheduleError
from tessera.rewrite.compare import compare
from tessera.rewrite.state import State
from tessera.runtime.options import ScheduleOptions
from tessera.runtime.tuning.changes import apply_setting, find_unaligned
from tessera.runtime.tuning.knobs import find_knobs
from tessera.runtime.tuning.parts import NotApplicable, find_parts
from tessera.runtime.tuning.plan import Plan, TuningTrial, plan_key
from tessera.runtime.tuning.search import Knob, TuningGoal, count_settings, search
from tessera.runtime.tuning.trial import TrialBench
from tessera.runtime.tuning.tuner import TunedFunction, make_goal

from rewriting import ToldClock

ENERGY = TuningGoal(policy="energy")


def trial(energy_j: float | None = 1.0, seconds: float = 1.0, *, error: float = 0.0, **more: Any) -> TuningTrial:
    more.setdefault("setting", {})
    return TuningTrial(energy_j=energy_j, error_j=error, time_s=seconds, error_s=error, **more)


# -- searching ---------------------------------------------------------------------------------------------------------


def test_a_small_space_is_measured_whole() -> None:
    space = [Knob(name="a", values=(None, 1, 2)), Knob(name="b", values=(None, True))]
    costs = {(None, None): 5.0, (1, None): 6.0, (2, None): 6.0, (None, True): 6.0, (1, True): 6.0, (2, True): 1.0}

    def measure(setting: dict[str, Any]) -> TuningTrial:
        return trial(costs[setting.get("a"), setting.get("b")], setting=setting)

    found = search(space, measure, ENERGY)
    assert len(found.trials) == count_settings(space) == 6
    assert found.best.setting == {"a": 2, "b": True}  # pays only together: knob by knob would have missed it


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_regret_against_exhaustive_search(data: Any) -> None:
    """Knobs that mostly pay on their own, with some interaction: within 2% of the best nearly always."""
    space = [Knob(name=n, values=(None, 1, 2, 3)) for n in "abc"]
    alone = {(k.name, v): data.draw(st.floats(0.7, 1.15)) if v else 1.0 for k in space for v in k.values}
    pair = data.draw(st.floats(0.97, 1.03))

    def cost(setting: dict[str, Any]) -> float:
        base = math.prod(alone[k.name, setting.get(k.name)] for k in space)
        return base * (pair if setting.get("a") and setting.get("b") else 1.0)

    found = search(space, lambda s: trial(cost(s), setting=s), ENERGY)
    every = [dict(zip("abc", v, strict=True)) for v in itertools.product((None, 1, 2, 3), repeat=3)]
    assert cost(found.best.setting) <= 1.02 * min(cost(s) for s in every)
    assert len(found.trials) <= 30 < len(every)


def test_what_was_far_from_the_best_is_not_tried_again() -> None:
    """A recommender on an H200: eager 2.6 J, default 1.9 J, reduce-overhead 1.6 J, and 1.06 J padded and fused."""
    space = [
        Knob(name="compile", values=(None, "default", "reduce-overhead"), gain=0.33),
        Knob(name="graph", values=(None, True), gain=0.1, instead={"compile": {"reduce-overhead": "default"}}),
        Knob(name="padding", values=(None, True), gain=0.05, recompiles=True),
        Knob(name="optimizer", values=(None, "fused"), gain=0.05),
    ]
    share = {"compile=default": 0.73, "compile=reduce-overhead": 0.62, "graph=True": 0.95}
    share |= {"padding=True": 0.85, "optimizer=fused": 0.77}

    def measure(setting: dict[str, Any]) -> TuningTrial:
        return trial(2.6 * math.prod(share[f"{k}={v}"] for k, v in setting.items()), setting=setting)

    found = search(space, measure, ENERGY)
    assert found.best.setting == {"compile": "reduce-overhead", "optimizer": "fused", "padding": True}
    assert [t.setting for t in found.trials if "compile" not in t.setting] == [{}]  # eager was told by its first trial


def test_noise_does_not_decide() -> None:
    assert not ENERGY.is_better(trial(0.99, error=0.02), trial(1.0, error=0.02))
    assert ENERGY.is_better(trial(0.9, error=0.02), trial(1.0, error=0.02))
    assert not ENERGY.is_better(trial(None), trial(1.0))
    assert TuningGoal(policy="latency").is_better(trial(1.0, seconds=0.5), trial(1.0))


def test_what_breaks_a_promise_is_not_used() -> None:
    space = [Knob(name="a", values=(None, "slow", "hot", "good"))]
    measured = {None: trial(1.0), "slow": trial(0.2, 1.5), "hot": trial(0.1, temp_c=90.0), "good": trial(0.7)}
    goal = TuningGoal(policy="throughput_per_watt", max_slowdown=0.02, max_temp_c=85.0)

    def measure(setting: dict[str, Any]) -> TuningTrial:
        from msgspec.structs import replace

        return replace(measured[setting.get("a")], setting=setting)

    found = search(space, measure, goal)
    assert found.best.setting == {"a": "good"}
    refused = {t.setting.get("a"): t.refused for t in found.trials}
    assert "slower" in refused["slow"] and "°C" in refused["hot"] and not refused["good"]


def measure_in_turn(*figures: tuple[Any, float]) -> Any:
    """Trials whose joules are told in the order of the calls: (the value of knob a, joules)."""
    told = iter(figures)

    def measure(setting: dict[str, Any]) -> TuningTrial:
        value, energy_j = next(told)
        assert setting.get("a") == value
        return trial(energy_j, energy_j, error=0.01 * energy_j, setting=setting)

    return measure


def test_a_machine_that_became_faster_between_two_trials_is_no_gain() -> None:
    space = [Knob(name="a", values=(None, "same", "good"))]
    measure = measure_in_turn((None, 5.0), ("same", 1.4), ("good", 1.5), ("same", 1.6), (None, 1.5), ("good", 1.5))
    found = search(space, measure, ENERGY)
    assert found.best.setting == {} and not found.why
    first = found.trials[0]
    assert first.energy_j == 3.25 and first.error_j is not None and first.error_j > 1.645 * 1.75


def test_a_gain_that_two_trials_agree_on_stays() -> None:
    space = [Knob(name="a", values=(None, "lucky", "good"))]
    figures = (None, 5.0), ("lucky", 2.0), ("good", 3.0), ("lucky", 5.5), (None, 5.1), ("good", 3.1)
    found = search(space, measure_in_turn(*figures), ENERGY)
    assert found.best.setting == {"a": "good"} and found.best.energy_j == pytest.approx(3.05)
    assert len(found.trials) == 3


def test_what_does_not_run_a_second_time_is_not_taken() -> None:
    space = [Knob(name="a", values=(None, "once"))]
    runs = {None: 0, "once": 0}

    def measure(setting: dict[str, Any]) -> TuningTrial:
        runs[setting.get("a")] += 1
        refused = "it failed" if runs["once"] > 1 and setting else ""
        return trial(None if refused else 0.5 if setting else 1.0, setting=setting, refused=refused)

    found = search(space, measure, ENERGY)
    assert found.best.setting == {} and found.trials[1].refused == "it failed"


def test_without_time_for_a_second_trial_the_first_one_counts() -> None:
    space = [Knob(name="a", values=(None, "good"))]
    left = iter([9.0, 8.0, 8.0, 8.0, 7.0])
    found = search(space, measure_in_turn((None, 5.0), ("good", 3.0)), ENERGY, seconds_left=lambda: next(left, 0.0))
    assert found.best.setting == {"a": "good"} and found.best.energy_j == 3.0


def test_the_budget_ends_the_search() -> None:
    space = [Knob(name=n, values=(None, 1, 2)) for n in "abcd"]
    left = iter([2.0, 1.0, 0.0])
    found = search(space, lambda s: trial(1.0, setting=s), ENERGY, seconds_left=lambda: next(left, 0.0))
    assert found.cut and len(found.trials) <= 3


# -- what a function works with ----------------------------------------------------------------------------------------


def test_modules_and_optimizers_are_found_wherever_they_are_held() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any, extra: Any = None) -> Any:
        return model(x), optimizer

    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = model, optimizer

        def step(self, x: Any) -> Any:
            return self.model(x)

    for fn, args in ((step, ()), (Trainer().step, ()), (model, ()), (lambda m, o: None, (model, [optimizer]))):
        found = find_parts(fn, args)
        assert found.modules == (model,), fn
    assert find_parts(step).optimizers == (optimizer,) and find_parts(Trainer().step).trains
    assert [m.out_features for m in find_unaligned(find_parts(model))] == [3, 5]  # 12 and 20 bytes a row


def test_changes_are_taken_back() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 7)).eval()
    x = torch.randn(2, 3, 8, 8)
    found, wanted = find_parts(model), model(x)
    setting = {"layout": "channels_last", "padding": True, "precision": "bf16"}
    with apply_setting(model, found, setting, {}) as call:
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert compare({"result": wanted}, {"result": call(x).float()}, 3e-2).ok
    assert model[0].weight.is_contiguous() and "forward" not in vars(model[2])
    assert torch.equal(model(x), wanted)
    with pytest.raises(NotApplicable, match="fused"), apply_setting(model, found, {"optimizer": "fused"}, {}):
        pass
    if not torch.cuda.is_available():
        with pytest.raises(NotApplicable, match="CUDA"), apply_setting(model, found, {"graph": True}, {}):
            pass


def test_only_knobs_that_can_matter() -> None:
    plain = {k.name for k in find_knobs(find_parts(torch.nn.Linear(16, 16)))}
    assert plain == {"compile"}
    assert {k.name for k in find_knobs(find_parts(torch.nn.Conv2d(3, 8, 3)), tolerance=1e-2)} == {
        "compile",
        "layout",
        "precision",
    }
    with pytest.raises(ArgumentError, match="nothing to choose"):
        find_knobs(find_parts(torch.nn.Linear(4, 4)), own={"batch": [8]})


# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trials of a tenth of a second, plans in a folder of the test's own."""
    import tessera.runtime.tuning.tuner as module

    monkeypatch.setattr(module, "TRIAL_S", 0.1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def slow_and_fast(x: Any, *, way: str = "slow") -> Any:
    for _ in range(400 if way == "slow" else 1):
        y = x @ x
    return y


def test_the_best_of_a_functions_own_arguments(quick: None, tmp_path: Path) -> None:
    seen: list[TuningTrial] = []
    wish = ScheduleOptions(policy="energy", search={"way": ["slow", "fast"]}, compile_modes=False, budget_s=30)
    fn = TunedFunction(slow_and_fast, wish, progress=lambda done, total, t: seen.append(t))
    with pytest.raises(ScheduleError, match="no plan yet"):
        fn.plan()
    x = torch.randn(64, 64)
    assert torch.equal(fn(x), slow_and_fast(x))
    plan = fn.plan()
    assert plan.setting == {"way": "fast"} and len(seen) == 2
    assert plan.best.time_s < plan.baseline.time_s / 10 and plan.best.energy_j < plan.baseline.energy_j / 2
    again = TunedFunction(
        slow_and_fast, wish, progress=lambda *a: pytest.fail("the plan was kept: nothing is to be measured")
    )
    again(x)
    assert again.plan() == plan
    assert "way" in str(plan)
    other = Plan.load(plan.save(tmp_path / "p.json"))
    assert other == plan
    fn.close()


def test_the_report_of_a_tuned_function_and_its_progress(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One line on a terminal from the first moment on, with the most that it takes; none in a pipe, but a log."""
    import tessera.runtime.tuning.tuner as module

    # a search of more than three seconds says so in a pipe too, and how long this one takes is the machine's
    monkeypatch.setattr(module, "announce_if_long", functools.partial(module.announce_if_long, after_s=600.0))
    options: dict[str, Any] = {"policy": "energy", "search": {"way": ["slow", "fast"]}, "compile_modes": False}
    step = schedule(**options, budget_s=30)(slow_and_fast)
    assert str(step.report()) == "no cap\n0 calls"
    x = torch.randn(64, 64)
    with caplog.at_level("INFO", logger="tessera"):
        step(x)
    assert capsys.readouterr().err == ""
    said = [r.message for r in caplog.records if r.message.startswith("tun")]
    assert said[0] == "tuning slow_and_fast for energy: at most 30 s" and "2/2, at most" in said[2]
    for _ in range(20):
        step(x)
    report = step.report()
    assert report.calls == 21 and report.plan == step.plan()
    text = str(report)
    assert text.startswith("tuned for energy: way=fast\n") and "21 calls" in text and "no cap" not in text
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    schedule(**options, budget_s=30, cache=False)(slow_and_fast)(x)
    line = capsys.readouterr().err
    assert line.startswith("\r\033[Ktessera: tuning slow_and_fast for energy: at most 30 s")
    assert line.count("\n") == 1 and line.endswith("\n")


def test_training_goes_on_as_if_nothing_had_happened(quick: None) -> None:
    def make() -> tuple[Any, Any]:
        torch.manual_seed(3)
        model = torch.nn.Linear(8, 8)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def stepper(model: Any, optimizer: Any) -> Any:
        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    x = torch.randn(4, 8)
    plain = stepper(*make())
    fn = TunedFunction(stepper(*make()), ScheduleOptions(policy="latency", compile_modes=False, cache=False))
    assert [fn(x).item() for _ in range(4)] == [plain(x).item() for _ in range(4)]
    assert fn.plan().setting == {}


def test_a_setting_that_changes_the_result_is_refused(quick: None) -> None:
    model = torch.nn.Linear(64, 64)

    def infer(x: Any) -> Any:
        with torch.no_grad():
            return model(x)

    fn = TunedFunction(infer, ScheduleOptions(policy="energy", compile_modes=False, error_tolerance=1e-7, cache=False))
    fn(torch.randn(8, 64))
    by = {t.setting.get("precision"): t for t in fn.plan().trials}
    assert "changed the result: result[0]" in by["bf16"].refused and by["bf16"].deviation > 1e-4
    assert not by[None].refused and by["bf16"].time_s is None


def test_a_function_that_fails_says_so(quick: None) -> None:
    calls = iter(range(100))

    def once(x: Any) -> Any:
        if next(calls):
            raise RuntimeError("only once")
        return x

    fn = TunedFunction(once, ScheduleOptions(policy="energy", cache=False))
    with pytest.raises(ScheduleError, match="cannot be measured") as caught:
        fn(torch.ones(2))
    assert "only once" in (caught.value.why or "")
    assert isinstance(caught.value.__cause__, RuntimeError)  # its traceback shows the line


@pytest.mark.parametrize("interrupted", [2, 3, 4])
def test_ctrl_c_in_the_search_leaves_the_state_of_one_call(quick: None, interrupted: int) -> None:
    """The first call runs as it is, the second is watched, then come the trials."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    calls = itertools.count(1)
    states: list[Any] = []

    def read_state() -> Any:
        moments = [list(optimizer.state[p].values()) for p in model.parameters()]
        return [*(v.clone() for v in model.state_dict().values()), *(v.clone() for m in moments for v in m)]

    def step(x: Any) -> Any:
        call = next(calls)
        if call == 2:
            states.extend([torch.get_rng_state(), *read_state()])
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        if call == interrupted:
            raise KeyboardInterrupt
        optimizer.step()
        return loss.detach()

    fn = TunedFunction(step, ScheduleOptions(policy="energy", compile_modes=False, cache=False))
    with pytest.raises(KeyboardInterrupt):
        fn(torch.randn(8, 4))
    after = [torch.get_rng_state(), *read_state()]
    assert all(torch.equal(old, new) for old, new in zip(states, after, strict=True))


def test_wishes_are_checked() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'energy'"):
        ScheduleOptions(policy="enrgy")
    with pytest.raises(ArgumentError, match="budget_s"):
        ScheduleOptions(policy="energy", budget_s=0)
    for tolerance in (-1.0, 0.0, math.nan, "1%"):
        with pytest.raises(ArgumentError, match="error_tolerance"):
            ScheduleOptions(policy="energy", error_tolerance=tolerance)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no policy"):
        ScheduleOptions(search={"batch": [8, 16]})
    with pytest.raises(ArgumentError, match="per="):
        ScheduleOptions(policy="energy", per="batch")
    assert make_goal(ScheduleOptions(policy="throughput_per_watt")).max_slowdown == 0.01


def test_files_that_are_not_plans_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(RecordingError, match="is not a plan"):
        Plan.load(tmp_path / "x.json")
    with pytest.raises(RecordingError, match="cannot read"):
        Plan.load(tmp_path / "none.json")


def test_a_plan_of_version_1_still_opens(tmp_path: Path) -> None:
    old = {"setting": {}, "seconds": 2.0, "seconds_error": 0.1, "energy_j": 3.0, "energy_error_j": 0.2}
    op = {"op": "gemm", "calls": 1, "share_pct": 90.0, "tile": [128, 128, 64], "stages": 3}
    plan = {"function": "f", "policy": "energy", "setting": {}, "why": {}, "trials": [old], "ops": [op]}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(plan))
    trial = Plan.load(path).baseline
    assert (trial.time_s, trial.error_s, trial.energy_j, trial.error_j) == (2.0, 0.1, 3.0, 0.2)


def test_another_function_or_shape_is_another_plan() -> None:
    x, found = torch.ones(2, 2), find_parts(slow_and_fast)
    key = plan_key(slow_and_fast, found, (x,), {}, {"policy": "energy"})
    assert key == plan_key(slow_and_fast, found, (torch.zeros(2, 2),), {}, {"policy": "energy"})
    for other in (
        plan_key(slow_and_fast, found, (torch.ones(2, 3),), {}, {"policy": "energy"}),
        plan_key(slow_and_fast, found, (x,), {}, {"policy": "latency"}),
        plan_key(lambda y: y, found, (x,), {}, {"policy": "energy"}),
    ):
        assert other != key


def test_dropout_is_no_reason_to_refuse_and_no_excuse() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(32, 64)
    step(x)
    program = bench(step, x).program
    reference = program.make_reference((x,), {})
    assert reference.random and reference.spread["result[0]"] > 0
    assert reference.compare(program.observe(step, (x,), {}, seed=5)).ok  # masks of another generator
    idle = program.observe(lambda x: (model(x) - x).square().mean(), (x,), {})
    assert "all updates together: relative error 1," in reference.compare(idle).why
    assert reference.compare(program.observe(lambda x: step(x) * 1.5, (x,), {})).where == "result[0]"


def bench(fn: Any, *args: Any, **options: Any) -> TrialBench:
    found = find_parts(fn, args)
    return TrialBench(fn=fn, args=args, kwargs={}, parts=found, state=State(found), own={}, trial_s=0.05, **options)


def test_a_step_that_forgets_the_weights_is_not_hidden_by_buffers() -> None:
    """A norm's running statistics move a thousand times as far as weights do."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = 10 + 5 * torch.randn(32, 8)

    def step(*, updates: bool = True) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if updates:
            optimizer.step()
        return loss.detach()

    step()
    program = bench(step).program
    reference = program.make_reference((), {})
    assert not reference.random and reference.compare(program.observe(step, (), {})).ok
    assert reference.compare(program.observe(step, (), {"updates": False})).where == "all updates"


def test_another_number_format_comes_only_with_a_tolerance() -> None:
    model, x = torch.nn.Linear(16, 16).eval(), torch.randn(4, 16)
    setting = {"precision": "bf16"}
    assert "float32 became" in bench(model, x)(setting).refused
    assert "relative error" in bench(model, x, tolerance=1e-6)(setting).refused
    done = bench(model, x, tolerance=2e-2)(setting)
    assert not done.refused and 0 < done.deviation < 2e-2 and done.time_s > 0


def test_the_function_as_it_is_is_the_reference_whatever_is_tried_first() -> None:
    model, x = torch.nn.Linear(16, 16).eval(), torch.randn(4, 16)
    tried = bench(model, x, tolerance=1e-6)
    assert tried({"precision": "bf16"}).refused and not tried({}).refused


# -- the budget --------------------------------------------------------------------------------------------------------


class Budget:
    """Seconds that are left, of which each trial takes what it says."""

    def __init__(self, seconds: float, costs: dict[Any, tuple[float, float]]) -> None:
        self.left_s, self.costs, self.tried = seconds, costs, list[Any]()

    def measure(self, setting: dict[str, Any]) -> TuningTrial:
        value = setting.get("compile")
        prepared_s, measured_s = self.costs[value]
        self.left_s -= prepared_s + measured_s
        self.tried.append(value)
        return trial(1.0, setting=setting, prepared_s=prepared_s)


def test_a_trial_that_does_not_fit_the_budget_is_not_begun() -> None:
    space = [Knob(name="compile", values=(None, "default", "reduce-overhead"))]
    costs = {None: (0.5, 1.0), "default": (10.0, 1.0), "reduce-overhead": (10.0, 1.0)}
    for seconds, tried in ((8.0, 1), (14.0, 2), (40.0, 3)):
        budget = Budget(seconds, costs)
        found = search(space, budget.measure, ENERGY, seconds_left=lambda b=budget: b.left_s, compile_s=9.0)
        assert len(budget.tried) == tried and budget.left_s >= 0 and found.cut == (tried < 3)


def test_a_trial_that_lasts_longer_than_what_is_left_is_not_begun() -> None:
    space = [Knob(name="compile", values=(None, "a", "b"))]
    budget = Budget(8.0, dict.fromkeys((None, "a", "b"), (0.0, 3.0)))
    assert search(space, budget.measure, ENERGY, seconds_left=lambda: budget.left_s).cut
    assert len(budget.tried) == 2 and budget.left_s == 2.0


# -- heat --------------------------------------------------------------------------------------------------------------


def test_a_trial_that_is_known_badly_is_taken_neither_for_fast_nor_for_better() -> None:
    """Figures of a product on an H200: 1.5% less power for 52% more time and 47% more joules was kept."""
    goal = make_goal(ScheduleOptions(policy="temperature"))
    plain = TuningTrial(setting={}, time_s=37e-6, error_s=1e-6, energy_j=15.97e-3, error_j=0.36e-3, power_w=432.2)
    noisy = {"error_s": 16e-6, "error_j": 2.3e-3}
    graph = TuningTrial(setting={"graph": True}, time_s=56e-6, energy_j=23.5e-3, power_w=425.6, **noisy)
    assert "slower, max_slowdown=0.1" in goal.violation(graph, plain)
    assert not goal.is_better(graph, plain)
    cooler = TuningTrial(setting={"graph": True}, time_s=40e-6, energy_j=12e-3, error_j=0.1e-3, power_w=300.0)
    assert not goal.violation(cooler, plain) and goal.is_better(cooler, plain)


def test_another_mode_of_compiled_code_is_expected_to_take_less() -> None:
    from tessera.runtime.tuning.search import _guess_compile_s

    took = {frozenset({("compile", "default")}): 10.0, frozenset({("compile", "default"), ("layout", "last")}): 6.0}
    assert _guess_compile_s(frozenset({("compile", "reduce-overhead")}), took) == pytest.approx(7.0)
    assert _guess_compile_s(frozenset({("compile", "default"), ("masks", True)}), took) == pytest.approx(8.0)


def test_the_least_heat_within_the_slowdown() -> None:
    """A chip settles at a temperature that follows its mean power: the coolest is the one that draws least."""
    goal = make_goal(ScheduleOptions(policy="temperature", max_slowdown="5%", max_temp_c="85C"))
    measured = {
        None: trial(2.0, power_w=600.0, temp_c=60.0),
        "slow": trial(1.5, 1.5, power_w=300.0, temp_c=50.0),
        "cool": trial(2.1, 1.04, power_w=450.0, temp_c=55.0),
        "frugal": trial(1.0, power_w=500.0, temp_c=58.0),
        "hot": trial(1.0, power_w=400.0, temp_c=90.0),
    }

    def measure(setting: dict[str, Any]) -> TuningTrial:
        from msgspec.structs import replace

        return replace(measured[setting.get("a")], setting=setting)

    found = search([Knob(name="a", values=tuple(measured))], measure, goal)
    assert found.best.setting == {"a": "cool"}
    plan = Plan(function="f", policy="temperature", setting=found.best.setting, why={}, trials=found.trials)
    assert "450 W" in str(plan) and "55 °C" in str(plan)


# -- tiles -------------------------------------------------------------------------------------------------------------


def test_tiles_are_tried_where_an_operator_of_ours_has_none() -> None:
    from types import SimpleNamespace

    from tessera import op
    from tessera.op import hints
    from tessera.runtime.tuning.knobs import watch_call
    from tessera.runtime.tuning.operators import follow_setting
    from tessera.runtime.tuning.parts import FunctionParts
    from tessera.runtime.tuning.plan import OpPlan

    x, images, filters = torch.randn(64, 64), torch.randn(1, 16, 8, 8), torch.randn(16, 16, 3, 3)
    seen = []

    def step(x: Any) -> Any:
        op.conv2d(images, filters, tile_shape=(64, 64, 32))
        seen.append(dict(hints.current().tiles))
        return op.matmul(x, x)

    traits = watch_call(lambda: step(x), find_parts(step, (x,)))
    assert traits.tiled == {"matmul"}  # the convolution has a tile
    assert watch_call(lambda: x @ x, find_parts(step, (x,))).tiled == frozenset()
    gpu = FunctionParts(modules=(), optimizers=(), tensors=(SimpleNamespace(device=torch.device("cuda")),))
    knob = next(k for k in find_knobs(gpu, traits=traits) if k.name == "tile_matmul")
    assert knob.values[0] is None and "128x128x64" in knob.values
    assert not [k for k in find_knobs(find_parts(step, (x,)), traits=traits) if k.name.startswith("tile")]
    with apply_setting(step, find_parts(step, (x,)), {"tile_matmul": "64x64x64"}, {}) as call:
        torch.testing.assert_close(call(x), x @ x)
    assert seen[-1] == {"matmul": (64, 64, 64)} and not hints.current().tiles
    rows = [OpPlan(op="gemm", calls=1, share_pct=60.0), OpPlan(op="conv", calls=1, share_pct=40.0)]
    rows = follow_setting(rows, {"tile_matmul": "64x64x64"})
    assert [r.tile for r in rows] == ["64x64x64", None]
    plan = Plan(function="f", policy="energy", setting={}, why={}, trials=[trial()], ops=rows)
    assert "tile 64x64x64" in str(plan)


# -- in use ------------------------------------------------------------------------------------------------------------


def make_laid_out(monkeypatch: pytest.MonkeyPatch, costs: dict[bool, float], **options: Any) -> tuple[Any, Any, Any]:
    """A tuned convolution whose plan is channels_last, promised in 5 ms instead of 10, and what a call takes."""
    from tessera.runtime.tuning import tuner

    clock, model = ToldClock(), torch.nn.Conv2d(8, 8, 3)
    monkeypatch.setattr(tuner, "HostClock", lambda: clock)

    def infer(x: Any) -> Any:
        clock.now_s += costs[not model.weight.is_contiguous()]
        with torch.no_grad():
            return model(x)

    fn = TunedFunction(infer, ScheduleOptions(policy="energy", **options))
    trials = [trial(1.0, 0.010), trial(0.5, 0.005, setting={"layout": "channels_last"})]
    plan = Plan(function="infer", policy="energy", setting=trials[1].setting, why={}, trials=trials, spent_s=1.0)
    return fn, plan, model


def test_a_plan_that_is_slower_in_use_than_as_it_was_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, plan, model = make_laid_out(monkeypatch, {False: 0.010, True: 0.012}, cache=False)
    x = torch.randn(2, 8, 8, 8)
    fn.use(plan, x)
    results = [fn(x) for _ in range(50)]
    assert all(torch.allclose(r, results[0], atol=1e-5) for r in results)
    now = fn.plan()
    assert now.setting == {} and now.in_use.fell_back and model.weight.is_contiguous()
    line = "in use: layout=channels_last took 12 ms, promised 5 ms; unchanged runs now: 10 ms, promised 10 ms"
    assert line in str(now) and now.paid_after_calls is None and "nothing is saved" in str(now)
    fn.close()


def test_a_plan_that_keeps_its_promise_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fn, plan, model = make_laid_out(monkeypatch, {False: 0.010, True: 0.005}, cache=False)
    x = torch.randn(2, 8, 8, 8)
    fn.use(plan, x)
    for _ in range(50):
        fn(x)
    now = fn.plan()
    assert now.setting == plan.setting and now.in_use.outcome == "confirmed" and not model.weight.is_contiguous()
    assert "in use: as promised, 5 ms" in str(now) and now.paid_after_calls == 200  # 1 s, 5 ms a call
    assert Plan.load(now.save(tmp_path / "p.json")) == now
    fn.close()


def test_the_next_process_begins_with_what_was_best_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tessera.runtime.tuning.plan import load_plan, store_plan

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fn, plan, _ = make_laid_out(monkeypatch, {False: 0.010, True: 0.012})
    from msgspec.structs import replace

    key = {"function": "infer"}
    store_plan(replace(plan, key=key))
    x = torch.randn(2, 8, 8, 8)
    fn.use(load_plan(key), x)
    for _ in range(50):
        fn(x)
    assert load_plan(key).setting == {} and load_plan(key).in_use.fell_back
    fn.close()


def test_slower_than_allowed_is_not_taken_for_its_joules_in_use() -> None:
    from tessera.rewrite.use_report import VariantInUse
    from tessera.runtime.tuning.tuner import find_best_in_goal

    frugal = VariantInUse(variant="frugal", calls=10, time_s=1.2, energy_j=1.0)
    middle = VariantInUse(variant="middle", calls=10, time_s=1.0, energy_j=1.5)
    as_it_was = VariantInUse(variant="unchanged", calls=10, time_s=1.0, energy_j=2.0)

    def best(**options: Any) -> int:
        return find_best_in_goal(make_goal(ScheduleOptions(**options)), [frugal, middle, as_it_was])

    assert best(policy="throughput_per_watt") == 1 and best(policy="energy") == 0
    assert best(policy="latency") == 1 and best(policy="peak_power") == 1


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_search_is_no_call_of_the_report(quick: None) -> None:
    options: dict[str, Any] = {"policy": "energy", "search": {"way": ["slow", "fast"]}, "compile_modes": False}
    step = schedule(**options, power_cap="500W", budget_s=30)(slow_and_fast)
    x = torch.randn(64, 64)
    step(x)
    assert "no call since the first one, which tuned\n0 calls" in str(step.report())
    step(x)
    assert re.search(r"^1 call(,|$)", str(step.report()), re.MULTILINE)
    for _ in range(2):
        step(x)
    report, plan = step.report(), step.plan()
    assert report.calls == 3
    assert report.energy_j < plan.spent_j and plan.spent_s > 0.2
    assert f"paid after {plan.paid_after_calls:,} calls" in str(report)


def test_without_a_gpu_a_plan_has_no_hints_for_clocks():
    torch = pytest.importorskip("torch")
    from tessera.runtime.tuning.operators import plan_operators

    args = (torch.ones(64, 64), torch.ones(64, 64))
    here, _ = plan_operators(torch.mm, args, {}, "cpu")
    board, _ = plan_operators(torch.mm, args, {}, "NVIDIA H200")
    assert [(op.clock, op.why) for op in here] == [(None, "")] and [op.clock for op in board] in (["low"], ["high"])
