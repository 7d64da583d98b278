"""EnergyBenchmark: the measuring on a script sensor, the figures by hand."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from monitor.test_sampler import SimulatedClock, drive
from tessera.config import Config
from tessera.errors import ArgumentError, SensorLost
from tessera.monitor import EnergyBenchmark, Monitor, benchmark
from tessera.monitor.benchmark import BenchmarkResult, _note_convergence
from tessera.monitor.core import Window
from tessera.monitor.cuda import DeviceClocks, Edge
from tessera.monitor.sampler import Sampler
from tessera.monitor.steady_state import MeasuredBatch, Uncertain, find_steady_state
from tessera.schema import Domain, Energy, Telemetry, Work
from tessera.sensors.base import Batch

from fakes.sensor import ScriptSensor

MS = 1_000_000

# -- figures -------------------------------------------------------------------------------------------------


def result(**kwargs: object) -> BenchmarkResult:
    default = BenchmarkResult(
        name="matmul",
        calls=100,
        time_per_call_s=Uncertain(0.5, 0.01),
        energy_per_call_j=Uncertain(200.0, 4.0),
        power_w=Uncertain(400.0, 8.0),
        utilization_pct=97.0,
        work={"FLOP": Work(amount=1e15, unit="FLOP"), "sample": Work(amount=64, unit="sample")},
        by_domain={"gpu0": Uncertain(180.0, 3.0)},
        converged=True,
        target=0.02,
        basis="measured",
        source="script",
        factors=Config(price_per_kwh=0.30, gco2e_per_kwh=350.0),
        nodes=4,
    )
    return dataclasses.replace(default, **kwargs)  # type: ignore[arg-type]


def pair(u: Uncertain | None) -> tuple[float, float | None]:
    assert u is not None
    return u.value, u.error


def test_every_figure_by_hand() -> None:
    r = result()
    assert pair(r.tflops) == pytest.approx((2000.0, 40.0))  # 1e15 in half a second
    assert pair(r.tflops_per_w) == pytest.approx((5.0, 0.1))  # 1e15 by 200 J
    assert pair(r.samples_per_j) == pytest.approx((0.32, 0.0064))
    assert r.tokens_per_j is None
    assert pair(r.kwh_per_call) == pytest.approx((200 / 3.6e6, 4 / 3.6e6))
    assert pair(r.node_hours_per_call) == pytest.approx((4 * 0.5 / 3600, 4 * 0.01 / 3600))
    assert pair(r.gco2e_per_call) == pytest.approx((350 * 200 / 3.6e6, 350 * 4 / 3.6e6))
    assert pair(r.cost_per_call) == pytest.approx((0.30 * 200 / 3.6e6, 0.30 * 4 / 3.6e6))


def test_a_result_is_one_short_line_in_a_repl() -> None:
    shown = repr(result())
    assert shown.startswith("<BenchmarkResult ") and " J in " in shown and len(shown) < 120


def test_what_was_not_given_is_none_not_zero() -> None:
    r = result(work={}, factors=Config(), nodes=None)
    assert r.tflops is None and r.tflops_per_w is None and r.samples_per_j is None
    assert r.gco2e_per_call is None and r.cost_per_call is None
    assert not {"tflops", "cost_per_call", "gco2e_per_call"} & set(r.measures())
    assert r.node_hours_per_call.value == pytest.approx(0.5 / 3600)


def test_own_units() -> None:
    r = result(work={"image": Work(amount=100, unit="image")})
    assert pair(r.per_joule("image")) == pytest.approx((0.5, 0.01))
    assert r.measures()["image_per_j"].value == pytest.approx(0.5)


def test_uncertain_arithmetic() -> None:
    u = Uncertain(100.0, 3.0)
    assert u.relative == pytest.approx(0.03)
    assert u.with_level(0.04).error == pytest.approx(5.0)
    assert pair(u.times(2)) == (200.0, 6.0)
    assert pair(u.inverse(200.0)) == pytest.approx((2.0, 0.06))
    unknown = Uncertain(100.0, None)
    assert unknown.relative == math.inf
    assert unknown.with_level(0.1).error is None
    assert unknown.times(3) == Uncertain(300.0, None)
    assert unknown.inverse().error is None
    zero = Uncertain(0.0, 1.0)
    assert zero.relative == math.inf
    assert math.isnan(zero.inverse().value)


def test_a_row_is_flat_and_a_dict_is_json() -> None:
    r = result(notes=["careful"])
    row = r.to_row()
    assert row["name"] == "matmul" and row["calls"] == 100
    assert (row["energy_per_call_j"], row["energy_per_call_j_error"]) == (200.0, 4.0)
    assert row["utilization_pct"] == 97.0
    assert not any(isinstance(v, (dict, list)) for v in row.values())
    nested = json.loads(json.dumps(r.to_dict()))
    assert nested["by_domain"]["gpu0"] == {"energy_per_call_j": 180.0, "error_j": 3.0}
    assert nested["notes"] == ["careful"]


# -- measuring -----------------------------------------------------------------------------------------------


class BusySensor(ScriptSensor):
    """Says how busy it is, too."""

    def read(self) -> Batch:
        batch = super().read()
        batch.telemetry.append(Telemetry(time_ns=self.clock(), domain="gpu0", utilization_pct=80.0))
        return batch


@dataclasses.dataclass
class SimulatedBench:
    """Benchmarks in simulated time: what a function takes is what it naps, however busy the machine is."""

    time: SimulatedClock
    patch: pytest.MonkeyPatch
    samplers: list[Sampler] = dataclasses.field(default_factory=list)

    def nap(self, seconds: float) -> None:
        drive(self.samplers[-1], self.time, seconds)

    def seconds(self) -> float:
        return self.time.now_ns * 1e-9

    def monitor(self, *sensors: ScriptSensor) -> Monitor:
        made = Monitor([])
        made.sampler = sampler = Sampler(list(sensors), clock=self.time.clock)
        self.samplers.append(sampler)

        def read(window: Window, **_: object) -> dict[str, Energy]:
            domains = [d.name for d in sampler.domains]
            if not window.settle(sampler, DeviceClocks(), domains):
                self.nap(0.06)
                window.settle(sampler, DeviceClocks(), domains, force=True)
            return window.energies

        self.patch.setattr(made, "open", lambda name: Window(name, Edge(self.time.now_ns)))
        self.patch.setattr(made, "close", lambda window: setattr(window, "end", Edge(self.time.now_ns)))
        self.patch.setattr(made, "read", read)
        return made

    def __call__(self, power_w: Callable[[float], float] = lambda t: 300.0, **kwargs: object) -> EnergyBenchmark:
        """With batches of 20 ms on a sensor of 2 ms and 300 W."""
        self.patch.setattr(benchmark, "BATCH_S", 0.02)
        domain = Domain(name="gpu0", source="script", resolution_s=0.002, gain_error=0.01)
        sensor = BusySensor(power_w, clock=self.time, step_ms=2.0, period_s=0.02, domain=domain)
        hbm = Domain(name="gpu0.memory", source="script", resolution_s=0.002, counted=False)
        memory = ScriptSensor(lambda t: 30.0, clock=self.time, step_ms=2.0, period_s=0.02, domain=hbm)
        limits = {"target": 0.2, "min_s": 0.15, "budget_s": 3.0}
        monitor = self.monitor(sensor, memory)
        self.nap(0.1)
        return EnergyBenchmark(**{**limits, **kwargs}, monitor=monitor)  # type: ignore[arg-type]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimulatedBench:
    made = SimulatedBench(SimulatedClock(), monkeypatch)
    monkeypatch.setattr(benchmark, "random", random.Random(1))
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(monotonic=made.seconds, sleep=made.nap))
    return made


def test_bare_decorator(bench: SimulatedBench) -> None:
    b = bench()
    calls = 0

    @b.measure
    def nap(x: int, *, y: int = 0) -> int:
        """Naps."""
        nonlocal calls
        calls += 1
        bench.nap(0.003)
        return x + y

    assert nap(2, y=3) == 5
    assert nap.__doc__ == "Naps."
    (r,) = b.results
    assert r.name == "nap"
    assert r.converged
    assert 0 < r.calls < calls
    assert r.time_per_call_s.value == pytest.approx(0.003)
    assert r.power_w.value == pytest.approx(300.0, rel=1e-3)
    assert r.energy_per_call_j.value == pytest.approx(300.0 * r.time_per_call_s.value, rel=0.01)
    assert r.energy_per_call_j.error == pytest.approx(0.009), "the sensor's level error stays"
    assert r.by_domain["gpu0"].value == pytest.approx(r.energy_per_call_j.value, rel=0.02)
    assert r.by_domain["gpu0.memory"].value == pytest.approx(0.1 * r.energy_per_call_j.value, rel=0.02)
    assert r.utilization_pct == 80.0
    assert (r.basis, r.source) == ("measured", "script")


def test_decorator_with_work_and_several_results(bench: SimulatedBench, capsys: pytest.CaptureFixture[str]) -> None:
    b = bench(price_per_kwh=0.25, gco2e_per_kwh=400.0, nodes=2)

    @b.measure(flops=3e9, samples=8, tokens=100, work=2, unit="image", name="mine")
    def work() -> str:
        bench.nap(0.002)
        return "done"

    @b.measure()
    def other() -> None:
        bench.nap(0.002)

    assert work() == "done"
    assert other() is None
    work()
    assert [r.name for r in b.results] == ["mine", "other", "mine"]
    r = b.results[0]
    assert r.tflops_per_w is not None
    assert r.tflops_per_w.value == pytest.approx(3e9 * 1e-12 / r.energy_per_call_j.value)
    images = r.per_joule("image")
    assert images is not None and images.value == pytest.approx(2 / r.energy_per_call_j.value)
    assert r.tokens_per_j is not None and r.samples_per_j is not None
    decoded = json.loads(b.to_json())
    assert [d["name"] for d in decoded] == ["mine", "other", "mine"]
    assert decoded[0]["cost_per_call"] == pytest.approx(0.25 * r.energy_per_call_j.value / 3.6e6)
    frame = b.to_frame()
    assert len(frame) == 3
    assert frame.energy_per_call_j[0] == r.energy_per_call_j.value
    assert math.isnan(frame.tflops_per_w[1])
    b.print_results()
    assert "mine" in capsys.readouterr().out


def test_the_first_calls_are_not_counted(bench: SimulatedBench) -> None:
    """The first call compiles, the first batches are slow: the result is the steady state, and says so."""
    b = bench(target=0.1, budget_s=4.0)
    born = bench.seconds()

    @b.measure
    def warming() -> None:
        bench.nap(0.2 if bench.seconds() - born < 1.2 else 0.003)

    warming()
    (r,) = b.results
    assert r.time_per_call_s.value < 0.15
    assert any("before the steady state" in n for n in r.notes)


def test_a_slow_function_is_called_one_by_one_until_the_time_is_over(bench: SimulatedBench) -> None:
    b = bench(min_s=0.1, budget_s=0.2)
    calls = []

    @b.measure
    def slow() -> None:
        calls.append(bench.nap(0.15))

    slow()
    assert len(calls) == 2, "the first, and one that is measured"
    (r,) = b.results
    assert not r.converged
    assert r.energy_per_call_j.value == pytest.approx(300.0 * r.time_per_call_s.value, rel=0.05)
    assert r.time_per_call_s.error is None and r.spread_j is None, "how well it repeats is not known"
    assert r.energy_per_call_j.error is not None and r.power_w.error is not None
    assert r.energy_per_call_j.relative >= 0.01 * (1 - 1e-9), "the sensor's level is"
    assert any("only one batch" in n for n in r.notes) and not any("repeat within" in n for n in r.notes)
    assert json.loads(b.to_json())[0]["energy_per_call_j_error"] == pytest.approx(r.energy_per_call_j.error)


def test_a_noisy_function_that_does_not_converge_says_so(bench: SimulatedBench) -> None:
    b = bench(lambda t: 300.0 + 250.0 * math.sin(40 * t), target=0.001, budget_s=0.4)

    @b.measure
    def noisy() -> None:
        bench.nap(0.002)

    begin = bench.seconds()
    noisy()
    took_s = 1.1 * (bench.seconds() - begin)  # it is said in two digits
    (r,) = b.results
    assert not r.converged
    (said,) = (n for n in r.notes if "does not repeat within 0.1%" in n)
    spent_s = float(said.split("after ")[1].split(" s ")[0])
    assert 0.0 < spent_s <= took_s, "what was spent, not what was allowed"


@pytest.mark.parametrize(("target", "said"), [(0.9, []), (0.005, ["does not repeat within 0.5%", "known to ±1%"])])
def test_repeating_is_told_from_the_level(target: float, said: list[str]) -> None:
    rng = np.random.default_rng(1)
    joules = (1 + 0.03 * rng.normal(size=9)).tolist()
    found = find_steady_state([MeasuredBatch(calls=10, time_s=0.1, energy_j=10 * j) for j in joules])
    notes = benchmark._note_convergence(found, target, 0.01, 2.4)
    assert len(notes) == len(said) and all(s in n for s, n in zip(said, notes, strict=True))
    known = benchmark._note_convergence(found, 0.05, 0.3, 2.4)
    assert known == [
        "repeats within 5%; the level is known to ±30% (the sensor's own error, which no repetition makes smaller)"
    ]


def test_a_slow_sensor_that_is_unsure_is_not_repeated_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What repeats at once is known after five batches of three samples; no repetition would tell its level."""
    now_s = [0.0]
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda _: None))

    class Slow:
        note_steps = staticmethod(lambda start, end, period_s: [])
        sampler = SimpleNamespace(
            domains=[Domain(name="cpu0", source="script", resolution_s=0.25, gain_error=0.3)], telemetry={}
        )

        def open(self, name: str) -> Any:
            start, end = SimpleNamespace(host_ns=0), SimpleNamespace(host_ns=1)
            return SimpleNamespace(start=start, end=end, since=now_s[0], settle_again=lambda sampler: None)

        def close(self, window: Any) -> None:
            window.seconds = now_s[0] - window.since

        def read(self, window: Any, **_: object) -> dict[str, Energy]:
            return {}

        def total(self, window: Any) -> Energy:
            seconds = window.seconds
            error_j = 2.4 * seconds
            return Energy(
                energy_j=8 * seconds, error_j=error_j, common_error_j=error_j, time_s=seconds, source="script"
            )

    b = EnergyBenchmark(target=0.02, monitor=Slow())  # type: ignore[arg-type]

    @b.measure
    def work() -> None:
        now_s[0] += 0.01

    work()
    assert now_s[0] < 5.0, "of thirty"
    (r,) = b.results
    assert r.converged and r.calls == 5 * 75
    assert r.energy_per_call_j.relative == pytest.approx(0.3)
    assert r.level_error == pytest.approx(0.3) and "repeats within 2%; the level is known to ±30%" in r.notes[0]


class InStepSensor(ScriptSensor):
    """Looks every 20 ms at a mean of 16 ms, beside a counter. A call begins with 10 ms at 640 W; else it is 110 W."""

    def __init__(self, calls_s: list[float], **kwargs: object) -> None:
        domain = Domain(
            name="gpu0", source="ring", resolution_s=0.02, lag_s=0.008, blur_s=0.012, sample_noise=0.012,
            gain_error=0.005,
        )  # fmt: skip
        super().__init__(lambda t: (self.joules(t) - self.joules(t - 0.016)) / 0.016, domain=domain, **kwargs)  # type: ignore[arg-type]
        self.calls_s = calls_s
        self._tick_s = 0.0

    def joules(self, until_s: float) -> float:
        begun = bisect.bisect_right(self.calls_s, until_s)
        last_s = min(until_s - self.calls_s[begun - 1], 0.01) if begun else 0.0
        return 110.0 * until_s + 530.0 * (max(begun - 1, 0) * 0.01 + last_s)

    def read(self) -> Batch:
        batch = super().read()
        if self.clock() * 1e-9 >= self._tick_s + 1.1:
            self._tick_s = self.clock() // (100 * MS) / 10
            batch.anchors["gpu0"] = [(round(self._tick_s * 1e9), self.joules(self._tick_s))]
        return batch


def test_calls_in_step_with_the_sensor_have_the_power_of_the_counter(bench: SimulatedBench) -> None:
    """Calls of 20 ms at 375 W: their samples are all alike, and the benchmark said 304.5 ± 5.6 W of a load of 370 W."""
    calls_s = list[float]()
    b = EnergyBenchmark(monitor=bench.monitor(InStepSensor(calls_s, clock=bench.time)))

    @b.measure
    def work() -> None:
        calls_s.append(bench.seconds())
        bench.time.now_ns += 20 * MS
        bench.samplers[-1].read_due()

    work()
    (r,) = b.results
    assert r.power_w.error is not None
    assert abs(r.power_w.value - 375.0) <= r.power_w.error < 20.0
    assert r.source == "ring+counter"


def test_a_dead_sensor_gives_a_result_that_says_what_was_not_seen(bench: SimulatedBench) -> None:
    b = bench(budget_s=0.4)
    monitor = b._monitor
    assert monitor is not None
    for slot in monitor.sampler._slots:
        slot.sensor.fail = SensorLost("gone")  # type: ignore[attr-defined]
    bench.nap(0.1)
    assert len(monitor.sampler.gaps) == 2

    @b.measure
    def blind() -> None:
        bench.nap(0.002)

    blind()
    (r,) = b.results
    assert not r.converged
    assert math.isnan(r.energy_per_call_j.value), "unknown is not zero"
    assert any("saw only 0%" in n for n in r.notes)
    json.loads(b.to_json())


def test_an_error_in_the_function_is_the_callers(bench: SimulatedBench) -> None:
    b = bench()

    @b.measure
    def bad() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bad()
    assert b.results == []


def test_a_partial_has_no_name_but_is_measured(bench: SimulatedBench) -> None:
    b = bench()
    measured = b.measure(functools.partial(bench.nap, 0.002))
    measured()
    assert b.results[0].name
    b.measure(name="napping")(functools.partial(bench.nap, 0.002))()
    assert b.results[1].name == "napping"


@pytest.mark.parametrize(
    ("resolution_s", "gain_error", "budget_s", "wanted_s"),
    [
        (0.002, 0.01, 30.0, 0.25),  # ten samples are sooner over than the shortest batch
        (0.1, 0.01, 30.0, 1.0),
        (0.1, 0.3, 30.0, 0.3),  # its level is less sure than the target: three are enough
        (0.1, 0.01, 3.0, 0.5),  # five batches and the first call
        (0.25, 0.01, 1.0, 0.75),  # no fewer than three
    ],
)
def test_batches_are_as_long_as_the_sensor_needs(
    resolution_s: float, gain_error: float, budget_s: float, wanted_s: float
) -> None:
    domain = Domain(name="gpu0", source="script", resolution_s=resolution_s, gain_error=gain_error)
    monitor: Any = SimpleNamespace(sampler=SimpleNamespace(domains=[domain]))
    assert benchmark._batch_size(monitor, 0.001, 0.02, budget_s) == round(wanted_s / 0.001)
    assert benchmark._batch_size(monitor, 10.0, 0.02, budget_s) == 1


def test_a_small_budget_needs_no_min_s() -> None:
    assert EnergyBenchmark(budget_s=1).min_s == 1 and EnergyBenchmark().min_s == 2.0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"target": 0},
        {"target": 1.5},
        {"target": -0.1},
        {"min_s": 0},
        {"min_s": 5, "budget_s": 1},
    ],
)
def test_wrong_limits(kwargs: dict[str, float]) -> None:
    with pytest.raises(ArgumentError) as caught:
        EnergyBenchmark(**kwargs)  # type: ignore[arg-type]
    assert caught.value.fix


@pytest.mark.parametrize(
    "kwargs",
    [
        {"unit": "image"},
        {"flops": 0},
        {"samples": -1},
        {"tokens": math.nan},
        {"work": 0, "unit": "image"},
        {"samples": 8, "work": 2, "unit": "sample"},
    ],
)
def test_wrong_work(kwargs: dict[str, float]) -> None:
    with pytest.raises(ArgumentError):
        EnergyBenchmark().measure(**kwargs)  # type: ignore[call-overload]


async def coroutine() -> None:
    pass


@pytest.mark.parametrize("wrong", [64, "name", coroutine])
def test_what_cannot_be_measured_is_refused_at_once(wrong: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        EnergyBenchmark().measure(wrong)  # type: ignore[call-overload]
    assert caught.value.fix


@pytest.mark.parametrize("drifts", [False, True])
def test_what_drifts_is_not_said_to_repeat(drifts: bool) -> None:
    joules = (1.0 + np.linspace(0, 0.06 if drifts else 0.0, 40)).tolist()
    steady = find_steady_state([MeasuredBatch(calls=1, time_s=0.01, energy_j=j) for j in joules], warm=True)
    notes = "; ".join([*steady.notes, *_note_convergence(steady, 0.05, 0.1, 1.0)])
    assert steady.drifts is drifts and steady.within(0.05)
    assert ("not at a steady state" in notes) is drifts and ("repeats within 5%" in notes) is not drifts
    assert "the level is known to ±10%" in notes
