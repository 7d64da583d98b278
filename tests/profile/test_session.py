"""Sessions, regions, schedules, modes: on the CPU, with a power sensor that plays a script."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from calls import list_calls
from tessera import monitor, profile
from tessera.analyze.answer import answer
from tessera.errors import ArgumentError, MeasurementError
from tessera.hardware import lookup
from tessera.monitor import Monitor
from tessera.profile import region as region_class
from tessera.profile import sampling, tracing
from tessera.profile.export.summary import lines as summary_lines
from tessera.profile.kineto_collector import KinetoCollector, drop_unasked
from tessera.profile.options import SessionOptions
from tessera.profile.region import current
from tessera.profile.runfile import RunFile
from tessera.profile.sampling import BUDGET, StackSampler
from tessera.profile.summary_mode import OTHER, RunSummary
from tessera.profile.torch_hooks import MainThread, ModuleRanges, inside_torch
from tessera.profile.tracing_schedule import between
from tessera.record import APART
from tessera.schema import Domain
from tessera.sensors.modelled import ModelledSensor
from tessera.sensors.processes import ProcessTree
from tessera.timeline.columns import Builder

from fakes.sensor import ScriptSensor
from waiting import wait_until


@pytest.fixture
def power():
    """100 W, every 20 ms."""
    host = Domain(name="cpu0", source="script", resolution_s=0.02)
    own = Monitor([ScriptSensor(lambda t: 100.0, clock=time.monotonic_ns, domain=host)]).start()
    monitor.use(own)
    yield own
    monitor.use(None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.tessera"


def names(session, kind):
    return [r.name for r in session.records() if r.kind == kind]


def burn(rounds=20):
    import torch

    x = torch.ones(16, 16)
    for _ in range(rounds):
        x = torch.mm(x, x) * 0.01
    return x


def test_modelled_samples_of_a_recording_are_divided_at_regions_by_cpu_time(path):
    own = Monitor([ModelledSensor(lookup("generic-cpu"), tree=ProcessTree())]).start()
    monitor.use(own)
    spent_s = 0.0
    try:
        with profile.session(["power"], path=path) as session:
            for _ in range(8):
                with profile.region("work"):
                    before_s = time.process_time()
                    while time.process_time() < before_s + 0.02:
                        pass
                    spent_s += time.process_time() - before_s
                with profile.region("sleep"):
                    time.sleep(0.05)
            time.sleep(0.15)
        assert own.sampler.cpu_edges is None
    finally:
        monitor.use(None)
    power, spent_j = session.power(), {"work": 0.0, "sleep": 0.0}
    for row in session.records():
        if row.kind == "region":
            spent_j[row.name] += power.energy("cpu0", row.start_ns, row.end_ns).energy_j
    assert spent_j["work"] == pytest.approx(lookup("generic-cpu").tdp_w.value / os.cpu_count() * spent_s, rel=0.1)
    assert spent_j["sleep"] < 0.25 * spent_j["work"]


# -- without a session -----------------------------------------------------------------------------------------------


def test_outside_a_session_everything_is_quiet():
    with profile.region("a"):
        profile.mark("x")
        profile.counter("y", 1.0)
    assert current() is None

    @profile.region("f")
    def f(x):
        return x + 1

    assert f(1) == 2 and f.__name__ == "f"


def test_importing_profile_loads_neither_torch_nor_numpy():
    code = "import sys; from tessera import profile\nwith profile.region('x'): pass\n"
    code += "assert not {'torch', 'numpy', 'rich', 'click'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_region_outside_a_session_does_next_to_nothing():
    """Its cost in time is measured by benchmarks/measure/region_cost.py."""

    def enter():
        with profile.region("x"):
            pass

    assert list_calls(enter) == ["__init__", "__enter__", "__exit__"]


# -- options ---------------------------------------------------------------------------------------------------------


def test_wrong_words_are_answered_with_the_nearest():
    with pytest.raises(ArgumentError, match="did you mean 'collective'"):
        profile.session(activities=["colective"])
    with pytest.raises(ArgumentError, match="did you mean 'operators'"):
        profile.session(mode="operator")
    with pytest.raises(ArgumentError, match="did you mean 'record_shapes'"):
        profile.session(record_shape=True)
    with pytest.raises(ArgumentError, match="a list"):
        profile.session(activities="gpu")
    with pytest.raises(ArgumentError, match="sample_interval_ms=0 is not a positive number"):
        profile.session(sample_interval_ms=0)
    with pytest.raises(ArgumentError, match="not one of ours"):
        profile.session(schedule=lambda step: 1)
    with pytest.raises(ArgumentError, match="trace nothing"):
        profile.trace_schedule(active=0)


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (["trace.json"], 'exporters=[profile.chrome("trace.json")]'),
        ([Path("all.csv")], 'exporters=[profile.summary("all.csv")]'),
        (["http://host:4318"], 'exporters=[profile.otlp("http://host:4318")]'),
        ("rows.parquet", 'exporters=[profile.parquet("rows.parquet")]'),
        (profile.chrome("a.json"), "exporters=[Chrome(path='a.json')]"),
        ([profile.chrome], 'exporters=[profile.chrome("trace.json")]'),
        ([None], 'exporters=[profile.chrome("trace.json")]'),
    ],
)  # fmt: skip
def test_what_cannot_export_is_said_before_the_work(given, fix, tmp_path):
    with pytest.raises(ArgumentError) as caught:
        profile.session(exporters=given, path=tmp_path / "run.tessera")
    assert caught.value.fix == fix


def test_an_interval_under_a_millisecond_warns():
    with pytest.warns(UserWarning, match="slow the program") as caught:
        profile.session(sample_interval_ms=0.5)
    assert caught[0].filename == __file__


def test_finer_than_the_sensor_is_said(power, path):
    with profile.session(mode="sampling", sample_interval_ms=5, path=path) as sess:
        pass
    assert any("asked for 5 ms" in note and "every 20 ms" in note for note in sess.notes)
    assert sess.power().asked_ms == 5


def test_schedules_are_torchs():
    import torch
    from torch.profiler import ProfilerAction as A

    words = {A.NONE: "wait", A.WARMUP: "warmup", A.RECORD: "active", A.RECORD_AND_SAVE: "last"}
    for arguments in ({"wait": 2, "warmup": 1, "active": 3, "repeat": 2, "skip_first": 4}, {"wait": 1, "active": 1}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = torch.profiler.schedule(**{"warmup": 0, **arguments})
        ours = profile.trace_schedule(**arguments)
        assert [ours.action(i) for i in range(40)] == [words[theirs(i)] for i in range(40)]


def test_steps_between():
    plan = between(10, 12)
    assert [plan.action(i) for i in (8, 9, 10, 11, 12)] == ["wait", "warmup", "active", "last", "wait"]
    assert not plan.over(11) and plan.over(12)
    assert between(0, 1).action(0) == "last"
    with pytest.raises(ArgumentError):
        between(3, 3)


# -- timeline --------------------------------------------------------------------------------------------------------


def test_a_session_records_operators_regions_marks_counters_steps_and_power(power, path):
    with profile.session(path=path) as sess:
        for i in range(3):
            with profile.region("forward"):
                burn()
            profile.counter(name="tokens_per_s", value=10.0 * i, unit="token/s")
            sess.step()
        sess.mark("start/step_12")
        burn(1)
        sess.mark("end/step_12")
        time.sleep(0.25)
    assert sess.path == path and current() is None
    assert names(sess, "op").count("aten::mm") == 61
    regions = names(sess, "region")
    assert regions.count("forward") == 3 and {"step_0", "step_1", "step_2", "step_12"} <= set(regions)
    assert "start/step_12" in names(sess, "mark")
    counter = [r for r in sess.records() if r.kind == "counter"]
    assert [r.value for r in counter] == [0.0, 10.0, 20.0] and counter[0].unit == "token/s"
    shapes = [r.shapes for r in sess.records() if r.name == "aten::mm"]
    assert all("16" in s for s in shapes)
    trace = sess.power()
    assert trace.mean_w == pytest.approx(100.0, rel=0.01) and trace.energy().coverage > 0.95
    total = sess.report().total
    assert total.energy_j == pytest.approx(trace.energy_j, rel=0.1)
    assert sess.energy().energy_j == pytest.approx(total.energy_j, rel=0.2)
    with RunFile(sess.path) as run:
        assert not run.crashed and run.get("mode") == "operators" and len(run.get("windows")) == 1
        assert run.get("end_ns") > run.get("start_ns")


def test_regions_lie_on_kinetos_clock(path):
    """A region brackets the operators inside it, on the same thread, to within a few microseconds."""
    import torch

    x = torch.ones(8, 8)
    with profile.session(["cpu"], path=path) as sess:
        for _ in range(200):
            with profile.region("mm"):
                torch.mm(x, x)
    rows = list(sess.records())
    regions = np.array([(r.start_ns, r.end_ns, r.thread_id) for r in rows if r.name == "mm"])
    ops = np.array([(r.start_ns, r.end_ns, r.thread_id) for r in rows if r.name == "aten::mm"])
    assert len(regions) == len(ops) == 200 and (regions[:, 2] == ops[:, 2]).all()
    before, after = ops[:, 0] - regions[:, 0], regions[:, 1] - ops[:, 1]
    assert before.min() > -5_000 and after.min() > -5_000
    assert np.median(before) < 50_000 and np.median(after) < 50_000


def test_nested_threaded_and_recursive_regions(path):
    shared = profile.region("shared")
    ready = threading.Barrier(2)

    def work():
        with shared:
            ready.wait()
            with profile.region("inner"):
                ready.wait()

    @profile.region("fib")
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    @profile.region("task")
    async def task():
        await asyncio.sleep(0.001)

    async def both():
        await asyncio.gather(task(), task())

    with profile.session([], path=path) as sess:
        threads = [threading.Thread(target=work) for _ in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        fib(3)
        asyncio.run(both())
        with shared, shared:
            pass
    rows = [r for r in sess.records() if r.kind == "region"]
    by_name = {n: [r for r in rows if r.name == n] for n in ("shared", "inner", "fib", "task")}
    assert {n: len(v) for n, v in by_name.items()} == {"shared": 4, "inner": 2, "fib": 5, "task": 2}
    assert len({r.thread_id for r in by_name["inner"]}) == 2
    for inner in by_name["inner"]:
        outer = next(r for r in by_name["shared"] if r.thread_id == inner.thread_id)
        assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    with pytest.raises(ArgumentError, match="generator"):

        @profile.region("g")
        def generator():
            yield 1


@pytest.mark.parametrize("shares_object", [False, True])
def test_regions_of_asyncio_tasks_are_a_call_each_with_their_own_times(path, shares_object):
    shared = profile.region("request")

    async def request(begun, ends):
        with shared if shares_object else profile.region("request"):
            begun.set()
            await ends.wait()

    async def serve():
        first, second, first_ends, second_ends = (asyncio.Event() for _ in range(4))
        one = asyncio.create_task(request(first, first_ends))
        await first.wait()
        await asyncio.sleep(0.02)
        two = asyncio.create_task(request(second, second_ends))
        await second.wait()
        first_ends.set()
        await one  # the first to begin is the first to end
        await asyncio.sleep(0.002)
        second_ends.set()
        await two

    with profile.session([], path=path) as sess:
        asyncio.run(serve())
    first, second = sorted((r for r in sess.records() if r.kind == "region"), key=lambda r: r.start_ns)
    assert first.end_ns < second.end_ns
    timeline = sess.recording().timeline
    assert timeline["value"][timeline.rows("region")].tolist() == [APART, APART]


def test_a_region_inside_one_of_its_name_is_no_call_in_a_task_either(path):
    async def inner():
        with profile.region("a"):
            await asyncio.sleep(0)

    async def outer():
        with profile.region("a"):
            await asyncio.gather(inner(), inner())

    with profile.session([], path=path) as sess:
        asyncio.run(outer())
    timeline = sess.recording().timeline
    values = timeline["value"][timeline.rows("region")]
    assert (len(values), np.count_nonzero(values == APART), np.count_nonzero(np.isnan(values))) == (3, 1, 2)


def test_a_region_entered_before_the_session_is_not_in_it(path):
    early = profile.region("early")
    with early, profile.session([], path=path) as sess:
        pass
    assert names(sess, "region") == []


def test_one_session_at_a_time(path, tmp_path):
    with profile.session([], path=path) as sess:
        with pytest.raises(MeasurementError, match="already running") as caught:
            profile.session([], path=tmp_path / "other.tessera").start()
        assert str(path) in str(caught.value) and not (tmp_path / "other.tessera").exists()
        assert current() is sess
    with pytest.raises(MeasurementError, match="records once"):
        sess.start()


def test_left_by_an_exception_it_writes_and_lets_it_go_on(power, path):
    with pytest.raises(ZeroDivisionError), profile.session(path=path) as sess:
        burn()
        with profile.region("bad"):
            _ = 1 / 0
    assert "bad" in names(sess, "region") and "aten::mm" in names(sess, "op")
    sess.stop()  # twice is no error
    with RunFile(sess.path) as run:
        assert not run.crashed


def test_activities_that_were_not_asked_for_are_left_out(path):
    built = Builder()
    kernel = built.add("op", "aten::mm", 0, 10)
    built.add("memcpy", "copy", 1, 2, device=0, parent=kernel)
    built.add("kernel", "gemm", 2, 9, device=0, parent=kernel)
    built.add("collective", "all_reduce", 3, 4, device=0, parent=kernel)
    kept = drop_unasked(built.build(), SessionOptions(activities=("gpu", "power")))
    assert [kept.name(i) for i in range(len(kept))] == ["aten::mm", "gemm"]
    assert kept["parent"].tolist() == [-1, 0] and "memcpy, collective" in kept.notes[-1]
    assert SessionOptions(activities=("power",)).traces is False


def test_without_torch_there_is_power_and_what_the_program_says(power, path, monkeypatch):
    monkeypatch.setattr("tessera.profile.kineto_collector.torch_installed", lambda: False)
    with profile.session(path=path) as sess, profile.region("x"):
        time.sleep(0.1)
    assert names(sess, "region") == ["x"] and sess.power().mean_w == pytest.approx(100.0, rel=0.01)
    assert any("torch is not installed" in n for n in sess.notes)


def test_a_trace_ended_by_another_thread_is_said(path):
    sess = profile.session(["cpu"], path=path).start()
    inner = sess._tracing.operators.collector
    other = threading.Thread(target=sess.stop)
    other.start()
    other.join()
    assert any("the thread that began it" in n for n in sess.notes)
    inner.stop()  # so that the next test finds Kineto at rest


def test_regions_do_not_break_torch_compile(path):
    import torch

    def double(x):
        with profile.region("inside"):
            return x * 2

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 2
    with profile.session([], path=path) as sess:
        with profile.region("around"):
            assert compiled(torch.ones(1)).item() == 2
        sess.step()
    assert names(sess, "region") == ["around", "step_0"] or names(sess, "region") == ["step_0", "around"]


def test_torchs_profiler_running_already_is_said(path):
    import torch

    prof = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    prof.start()
    try:
        with pytest.raises(MeasurementError, match="could not be started"):
            profile.session(["cpu"], path=path).start()
    finally:
        prof.stop()
    assert current() is None and not path.exists()
    with profile.session(["cpu"], path=path) as sess:
        burn(1)
    assert "aten::mm" in names(sess, "op")


def test_a_profiler_that_fails_does_not_end_the_program(path, monkeypatch):
    """Whatever torch's profiler raises when it stops: the step that it fails in is the program's."""
    stop = KinetoCollector.stop

    def fail(self):
        stop(self)
        raise AssertionError("Profiler must be initialized before stopping trace")

    monkeypatch.setattr(KinetoCollector, "stop", fail)
    with profile.session(["cpu"], path=path, mode="operators") as sess:
        burn(2)
        sess._tracing.finish("the program asked")
    assert any("tracing ended early: Profiler must be" in note for note in sess.notes)


def test_the_programs_own_profiler_goes_first(path):
    import torch

    with profile.session(["cpu"], path=path) as sess:
        burn(2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
            burn(3)
    assert names(sess, "op").count("aten::mm") == 2 and any("of its own" in n for n in sess.notes)
    assert "of its own" in sess.notes[0], "a screen shows the first"
    assert sum(e.name == "aten::mm" for e in prof.events()) == 3


def test_exporters_write_and_their_errors_come_last(power, path, tmp_path):
    seen = []

    class Good:
        def write(self, recording):
            seen.append((len(recording.timeline), recording.energy().energy_j))
            return tmp_path

    class Bad:
        def write(self, recording):
            raise ArgumentError("cannot write x")

    with (
        pytest.raises(ArgumentError, match="cannot write x"),
        profile.session(path=path, exporters=[Bad(), Good()]),
    ):
        burn()
    assert len(seen) == 1 and seen[0][0] > 0 and seen[0][1] > 0


def test_flush_brings_operators_to_the_file_while_it_runs(path):
    with profile.session(["cpu"], path=path, flush_s=0.05) as sess:
        deadline = time.monotonic() + 600.0
        while "aten::mm" not in names(sess, "op"):
            assert time.monotonic() < deadline
            with profile.region("work"):
                burn()
            time.sleep(0.02)
        burn(7)
    starts = [w[0] for w in RunFile(sess.path).get("windows")]
    assert len(starts) > 1 and starts == sorted(starts)


def test_a_schedule_traces_its_steps_only(path):
    plan = profile.trace_schedule(wait=1, warmup=1, active=2, repeat=2)
    with profile.session(["cpu"], path=path, schedule=plan) as sess:
        for _ in range(10):
            burn(1)
            sess.step()
    steps = {r.name: (r.start_ns, r.end_ns) for r in sess.records() if r.name.startswith("step_")}
    traced = {
        name for r in sess.records() if r.name == "aten::mm"
        for name, (start, end) in steps.items() if start <= r.start_ns < end
    }  # fmt: skip
    assert traced == {"step_2", "step_3", "step_6", "step_7"} and len(steps) == 10


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (0, "steps 50 to 59 never came: there were none"),
        (1, "steps 50 to 59 never came: there was one"),
        (40, "steps 50 to 59 never came: there were 40 (0 to 39)"),
        (50, "steps 50 to 59 never came: there were 50 (0 to 49)"),
        (51, "of steps 50 to 59 only step 50 came"),
        (59, "of steps 50 to 59 only steps 50 to 58 came"),
        (60, None),
        (99, None),
    ],
)
def test_steps_that_never_came_are_said(steps, said):
    assert between(50, 60).describe_missed(steps) == said
    assert profile.trace_schedule(active=2).describe_missed(steps) is None, "it began with the session"


def test_a_session_that_ends_before_its_schedule_says_so(path):
    with profile.session(["cpu"], path=path, schedule=profile.trace_schedule(wait=98, warmup=1, active=1)) as sess:
        for _ in range(3):
            burn(1)
            sess.step()
    with profile.RunFile(path) as run:
        assert "step 99 never came: there were 3 (0 to 2)" in run.notes


def test_a_schedules_joules_are_those_of_its_windows(power, path):
    plan = profile.trace_schedule(wait=3, active=1)
    with profile.session(path=path, schedule=plan) as sess:
        for _ in range(8):
            with profile.region("work"):
                burn(3)
            sess.step()
    table = sess.energy()
    windows = RunFile(sess.path).get("windows")
    assert len(windows) == 2 and table.time_s == pytest.approx(sum(b - a for a, b in windows) * 1e-9)
    assert [s.name for s in table.steps] == ["step_3", "step_7"]
    assert next(r for r in table.regions if r.name == "work").calls == 2


def test_devices_are_numbered_as_the_sensors_do(monkeypatch):
    import torch

    from tessera.profile.kineto_collector import find_sensor_numbers, renumber_devices
    from tessera.timeline import Builder

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    build = Builder()
    for device in (0, 1, -1):
        build.add("kernel" if device >= 0 else "op", "k", 0, 1, device=device)
    build.meta["deviceProperties"] = [{"id": 0, "name": "a"}, {"id": 1, "name": "b"}]
    timeline = build.build()
    renumber_devices(timeline, find_sensor_numbers() or [])
    assert timeline["device"].tolist() == [3, 1, -1]
    assert [p["id"] for p in timeline.meta["deviceProperties"]] == [3, 1]


def test_sampling_gives_joules_to_regions_and_steps_not_to_idleness(power, path):
    with profile.session(mode="sampling", path=path) as sess:
        for _ in range(3):
            with profile.region("work"):
                burn(3)
            sess.step()
    table = sess.energy()
    assert [s.name for s in table.steps] == ["step_0", "step_1", "step_2"] and math.isnan(table.idle_j)
    assert table.regions[0].name == "work" and table.regions[0].energy_j > 0


def test_a_window_that_ends_inside_a_record_function_ends_it(path):
    """Else torch would write to memory that Kineto has freed, when the range is left in the next window."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    original = torch.autograd.profiler.record_function.__enter__
    with profile.session(["cpu"], path=path, schedule=profile.trace_schedule(active=1)) as sess:
        handle = register_optimizer_step_post_hook(lambda *_: sess.step())
        with torch.profiler.record_function("whole"):
            for _ in range(4):
                parameter.grad = torch.ones(2)
                optimizer.step()
        handle.remove()
    assert torch.autograd.profiler.record_function.__enter__ is original
    regions = names(sess, "region")
    assert regions.count("whole") == 1 and regions.count("Optimizer.step#SGD.step") == 4
    assert len(RunFile(sess.path).get("windows")) == 5


def test_a_limit_ends_tracing_without_any_boundary_of_the_program(path):
    with profile.session(["cpu"], path=path, limit_s=0.05) as sess:
        wait_until(lambda: any("time limit" in n for n in sess._tracing.notes), lambda: (burn(1), time.sleep(0.001)))
        with profile.region("after"):
            burn(1)
    last = max(r.end_ns for r in sess.records() if r.name == "aten::mm")
    after = next(r.start_ns for r in sess.records() if r.name == "after")
    assert last < after and any("time limit" in n for n in sess.notes)


def test_the_main_thread_is_asked_between_operators():
    import torch

    seen = []
    main = MainThread(lambda: seen.append(threading.current_thread()))
    threading.Thread(target=main.ask).start()
    deadline = time.monotonic() + 600.0
    while not seen and time.monotonic() < deadline:
        sum(range(100))
    assert seen == [threading.main_thread()]

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            found.append(inside_torch(sys._getframe()))
            return grad * 2

    found = []
    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    torch.nn.Sequential(torch.nn.Identity()).register_forward_hook(lambda *_: None)
    layer = torch.nn.Identity()
    layer.register_forward_hook(lambda *_: found.append(inside_torch(sys._getframe())))
    layer(x)
    assert found == [True, False]


def test_a_limit_is_of_steps_too(path, monkeypatch):
    """2,480 steps of 2 ms were traced in 5 s, and stopping took 18 s of the program's time."""
    monkeypatch.setattr(tracing, "LIMIT_STEPS_PER_S", 0.01)
    with profile.session(["cpu"], path=path, limit_s=600.0) as sess:
        for _ in range(30):
            burn(1)
            sess.step()
    assert any("after 6 steps" in n for n in sess.notes)
    assert names(sess, "op").count("aten::mm") == 6


def test_an_interrupt_on_the_main_thread_is_not_lost():
    def interrupted():
        raise KeyboardInterrupt

    main = MainThread(interrupted)
    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=main.ask).start()
        deadline = time.monotonic() + 600.0
        while time.monotonic() < deadline:
            sum(range(100))


def test_modules_are_named_by_their_paths(path):
    import torch

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    block = Block()
    with profile.session(["cpu"], path=path, with_modules=True) as sess:
        block(torch.ones(2, 4))
    found = {r.module for r in sess.records() if r.name == "aten::addmm"}
    assert found == {"Block/layers.0 (Linear)", "Block/layers.1 (Linear)"}
    assert not torch.nn.modules.module._global_forward_pre_hooks


def module_calls(path, program):
    """How often each module was called in the rows of a session."""
    with profile.session(["cpu"], path=path, with_modules=True) as sess:
        program()
    called = [r.name.removeprefix("nn.Module: ") for r in sess.records() if r.name.startswith("nn.Module: ")]
    return dict(Counter(called))


def test_modules_of_one_leaf_name_are_rows_of_their_own(path):
    torch = pytest.importorskip("torch")
    nn = torch.nn
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    found = module_calls(path, lambda: [model(torch.ones(2, 4)) for _ in range(3)])
    paths = [f"{name} ({type(part).__name__})" for name, part in model.named_modules() if name]
    assert found == dict.fromkeys(["Sequential", *paths], 3) and "1.0 (Linear)" in found


def test_modules_of_two_models_are_not_one(path):
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(4, 4)
            self.loose = [torch.nn.ReLU(), torch.nn.ReLU()]  # torch does not know these

        def forward(self, x):
            x = self.body(x)
            return self.loose[1](self.loose[0](x))

    first, second = Net(), Net()

    def program():
        for _ in range(3):  # the loss is made anew each time: one row all the same
            torch.nn.MSELoss()(first(torch.ones(2, 4)), second(torch.ones(2, 4)))

    assert module_calls(path, program) == dict.fromkeys(
        ["Net", "body (Linear)", "ReLU", "ReLU#2", "Net#2", "Net#2.body (Linear)", "ReLU#3", "ReLU#4", "MSELoss"], 3
    )


def test_a_module_called_from_inside_one_its_model_does_not_list_keeps_its_path(path):
    torch = pytest.importorskip("torch")

    class Around(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = [inner]

        def forward(self, x):
            return self.inner[0](x)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(4, 4)
            self.around = [Around(self.body)]

        def forward(self, x):
            return self.around[0](x)

    net = Net()
    assert module_calls(path, lambda: net(torch.ones(2, 4))) == {"Net": 1, "Around": 1, "body (Linear)": 1}


def test_a_fork_leaves_the_parents_session_alone(path):
    with profile.session([], path=path) as sess:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
            child = os.fork()
        if child == 0:
            with profile.region("child"):
                pass
            sess.step()
            sess.stop()
            os._exit(0 if current() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        with profile.region("parent"):
            pass
    assert names(sess, "region") == ["parent"]


def test_nothing_is_recorded_under_a_replay(path, monkeypatch):
    monkeypatch.setenv("TESSERA_REPLAY", "1")
    with profile.session(path=path) as sess, profile.region("x"):
        sess.step()
        sess.mark("y")
    assert not path.exists()


def test_run_files_have_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (profile.session([]) for _ in range(2))
    with first:
        pass
    assert str(first.path) == "runs/session.tessera"
    with profile.session([]) as third:
        pass
    assert third.path.name == "session-2.tessera"
    monkeypatch.setenv("RANK", "3")
    assert profile.session([]).path.name == "session.rank3.tessera"
    assert profile.session([], path="a/b.tessera").path.name == "b.rank3.tessera"
    assert second.path == first.path


def test_a_program_may_change_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with profile.session([], path="r.tessera") as session:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        with profile.region("work"):
            pass
    assert names(session, "region") == ["work"]


def test_a_session_that_could_not_be_written_does_not_begin(tmp_path):
    with pytest.raises(ArgumentError, match="not an OTLP endpoint"):
        profile.session(exporters=[profile.otlp("o.json")], path=tmp_path / "o.tessera")
    with pytest.raises(ArgumentError, match="tensorboard_dir=5 is not a folder"):
        profile.session(tensorboard_dir=5, path=tmp_path / "t.tessera")


def test_a_counter_must_be_a_number(tmp_path):
    with (
        profile.session(["power"], path=tmp_path / "c.tessera"),
        pytest.raises(ArgumentError, match="value='x' of the counter 'loss' is not a number"),
    ):
        profile.counter(name="loss", value="x")


def test_killed_it_leaves_what_it_had(tmp_path):
    path = tmp_path / "killed.tessera"
    script = textwrap.dedent(f"""
        import os, time
        from tessera import profile
        with profile.session(["power"], path={str(path)!r}):
            with profile.region("first"):
                pass
            profile.counter("loss", 2.0)
            has_all = False
            while not has_all:
                time.sleep(0.1)
                with profile.RunFile({str(path)!r}) as run:
                    has_all = run.rows == 2 and "cpu0" in run.domains and len(run.samples("cpu0")[0]) >= 3
            os._exit(9)
    """)
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 9
    with profile.RunFile(path) as run:
        assert run.crashed
        rows = run.timeline()
        assert [rows.name(i) for i in range(len(rows))] == ["first", "loss"]
        assert len(run.samples("cpu0")[0]) >= 3


# -- sampling --------------------------------------------------------------------------------------------------------


def test_sampling_keeps_stacks_and_traces_nothing(power, path):
    def busy(sess):
        deadline = time.monotonic() + 0.4
        while time.monotonic() < deadline or sess._stacks.samples < 5:
            burn(1)

    with profile.session(mode="sampling", path=path) as sess:
        busy(sess)
    assert names(sess, "op") == []
    stacks = RunFile(sess.path).stacks()
    main = [s for s in stacks if "busy" in s.stack]
    assert main and main[0].thread == threading.get_native_id() and "test_session.py" in main[0].stack
    ours = ("Session._tick", "Sampler._run", "RunWriter._run", "StackSampler._run")
    assert not any(name in s.stack for s in stacks for name in ours)
    functions = [line.energy_j for line in summary_lines(sess.recording()) if line.kind == "function"]
    assert functions and sum(functions) == pytest.approx(sess.energy().energy_j)
    assert sess.power().mean_w == pytest.approx(100.0, rel=0.01)


def test_stacks_keep_to_their_budget():
    sampler = StackSampler(0.001)
    sampler._recent_s = 1e-4
    assert sampler.period_s == pytest.approx(1e-4 / BUDGET) and sampler.is_stretched


def _hold_the_lock(seconds):
    until_s = time.thread_time() + seconds  # a call of C that keeps the lock
    while time.thread_time() < until_s:
        pass


def _let_the_lock_go():
    time.sleep(0)


def test_samples_are_where_the_time_is_and_not_where_the_lock_is_let_go(monkeypatch):
    monkeypatch.setattr(sampling, "BUDGET", 1.0)  # never stretched
    sampler = StackSampler(0.001)
    before_s = sys.getswitchinterval()
    sampler.start()
    try:
        # Shorter than Python's 5 ms: with those, a sample comes only where the lock is let go, next to no time.
        while sampler.samples < 80:
            _hold_the_lock(0.003)
            _let_the_lock_go()
        assert sys.getswitchinterval() == pytest.approx(sampling.SWITCH_S)
    finally:
        sampler.stop()
    assert sys.getswitchinterval() == before_s
    counts = Counter()
    for _, thread, stack, count in sampler.take():
        if thread == threading.get_native_id():
            counts[stack.rsplit(" ", 1)[-1]] += count
    # Three quarters on a machine that is not busy, half on a very busy one; none without the shorter interval.
    assert counts["_hold_the_lock"] >= 0.2 * sum(counts.values()), counts


def test_the_switch_interval_is_the_programs_again_after_sampling():
    before_s = sys.getswitchinterval()
    try:
        sampling.lower_switch_interval()
        sys.setswitchinterval(0.002)  # the program's own wish, meanwhile
        sampling.restore_switch_interval()
        assert sys.getswitchinterval() == pytest.approx(0.002)
        sampling.lower_switch_interval()
        read, write = os.pipe()
        if not (child := os.fork()):
            os.write(write, f"{sys.getswitchinterval():.6f}".encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert float(os.read(read, 100)) == pytest.approx(0.002), "nothing samples in a child"
        assert sys.getswitchinterval() == pytest.approx(sampling.SWITCH_S)
        sampling.restore_switch_interval()
        assert sys.getswitchinterval() == pytest.approx(0.002)
        sys.setswitchinterval(0.0001)
        sampling.lower_switch_interval()
        assert sys.getswitchinterval() == pytest.approx(0.0001), "short enough already"
    finally:
        sampling.restore_switch_interval()
        sys.setswitchinterval(before_s)


def test_samples_that_came_rarely_are_explained():
    sampler = StackSampler(0.01)
    sampler._started_s, sampler._ended_s, sampler.samples = 100.0, 105.0, 28
    told = "28 samples of stacks in 5 s, not one every 10 ms"
    assert sampler.explain_rare() == f"{told}: the program kept Python's lock, or the machine was busy"
    sampler._recent_s = 1e-4
    assert sampler.explain_rare() == f"{told}: more would have slowed the program"
    sampler._recent_s, sampler.samples = 0.0, 490
    assert sampler.explain_rare() is None


def test_frames_of_the_users_own_code_can_be_told_from_libraries(tmp_path):
    here = Path.cwd()
    assert sampling.name_frame(f"{here}/src/train.py", 3, "step") == "./src/train.py:3 step"
    assert sampling.name_frame("/elsewhere/my;train.py", 3, "step") == "/elsewhere/my,train.py:3 step"
    assert (
        sampling.name_frame("/x/site-packages/torch/nn/modules/linear.py", 134, "forward")
        == "modules/linear.py:134 forward"
    )
    assert sampling.name_frame(threading.__file__, 5, "wait").endswith("/threading.py:5 wait")
    assert sampling.name_frame(sampling.__file__, 5, "x") == "profile/sampling.py:5 x"
    numpy_folder = Path(np.__file__).parents[1]
    assert sampling.is_library(f"{numpy_folder}/transformers/trainer.py"), "beside NumPy, whatever its folder is called"
    assert sampling.name_frame("<frozen importlib._bootstrap>", 1, "x") == "<frozen importlib._bootstrap>:1 x"


def test_frames_of_python_are_no_operators_and_those_of_our_threads_are_left_out(path, power):
    # Threads that other tests left behind are the user's, and number 0 where nothing of torch's ran on them.
    others = {0} if any(t is not threading.main_thread() for t in threading.enumerate()) else set()
    with profile.session(with_stack=True, path=path) as sess:
        burn()
        time.sleep(0.1)
    kinds = {r.name: r.kind for r in sess.records()}
    assert kinds["aten::mm"] == "op" and {k for n, k in kinds.items() if n.endswith(": burn")} == {"python"}
    assert {r.thread_id for r in sess.records() if r.kind == "python"} - others == {threading.get_native_id()}
    lines = list(summary_lines(sess.recording()))
    assert {line.kind for line in lines if line.name.endswith(": burn")} == {"python"}
    assert all(line.share_time_pct is None for line in lines if line.kind == "python")
    assert all(line.name.partition("::")[1] for line in lines if line.kind == "op")


def test_a_trace_with_stacks_has_sampled_lines_too(path, power):
    torch = pytest.importorskip("torch")
    with profile.session(mode="timeline", with_stack=True, sample_interval_ms=1, path=path) as sess:
        until = time.monotonic() + 600.0
        while sess._stacks.samples < 5 and time.monotonic() < until:
            torch.ones(64, 64) @ torch.ones(64, 64)
    found = answer(sess.recording())
    assert any(__file__ in row.name or "tests/profile/test_session.py" in row.name for row in found.lines)


def test_gpu_activity_in_sampling_mode_is_explained(path):
    with profile.session(["gpu"], mode="sampling", path=path) as sess:
        pass
    assert any("traces nothing" in n for n in sess.notes)


# -- summary ---------------------------------------------------------------------------------------------------------


def window(count, name="gemm", base=0):
    built = Builder()
    for i in range(count):
        built.add("kernel", name, base + i * 100, base + i * 100 + 10 + i, device=0)
    return built.build()


def test_a_summary_adds_windows_up():
    summary = RunSummary()
    summary.add_window(window(3), 0, 1_000)
    summary.add_window(window(2), 5_000, 6_000)
    summary.add_window(Builder().build(), 0, 10)
    summary.add_counter("loss", 2.0, "")
    summary.add_counter("loss", 4.0, "")
    found = summary.to_json()
    (row,) = found["kernels"]
    assert (row["calls"], row["total_ns"], row["min_ns"], row["max_ns"]) == (5, 54, 10, 12)
    assert found["windows"] == 3 and found["traced_s"] == pytest.approx(2.01e-6)
    assert found["counters"] == [{"name": "loss", "unit": "", "calls": 2, "mean": 3.0, "min": 2.0, "max": 4.0}]


def test_a_summarys_memory_is_bounded():
    summary = RunSummary(max_names=10)
    for i in range(1000):
        summary.add_row("region", f"step_{i}", 5)
        summary.add_row("region", f"{i}th", 5)
        summary.add_counter(f"c{i}", 1.0, "")
        summary.add_window(window(1, f"kernel<{i}>"), 0, 1)
    assert len(summary) <= 14
    found = summary.to_json()
    assert sum(r["calls"] for r in found["regions"]) == 2000
    assert next(r for r in found["regions"] if r["name"] == "step_N")["calls"] == 1000
    assert {r["name"] for r in found["kernels"]} >= {OTHER}


def test_summary_mode_forgets_events_and_keeps_totals(power, path):
    with profile.session(mode="summary", path=path) as sess:
        for _ in range(6):
            with profile.region("forward"):
                burn(5)
            sess.step()
        time.sleep(0.3)
    with RunFile(sess.path) as run:
        assert run.rows == 0
        found = run.get("summary")
        assert found["windows"] == 1
        assert next(r for r in found["ops"] if r["name"] == "aten::mm")["calls"] == 15  # of three steps
        assert next(r for r in found["regions"] if r["name"] == "forward")["calls"] == 6
        assert next(r for r in found["regions"] if r["name"] == "step_N")["calls"] == 6
        assert found["traced_steps"] == 3.0
    (mm,) = [row for row in answer(sess.recording()).ops if row.name == "aten::mm"]
    assert mm.calls == 30  # of six: tracing made those three longer, not more
    assert [r for r in sess.energy().ops if r.name == "aten::mm"] == [mm] and "aten::mm" in str(sess.energy())
    (line,) = [line for line in summary_lines(sess.recording()) if line.name == "aten::mm"]
    assert (line.kind, line.calls, line.energy_j) == ("op", 30, mm.energy_j)
    assert ("forward", "region", 6) in [line[:3] for line in summary_lines(sess.recording())]
    assert sess.power().mean_w == pytest.approx(100.0, rel=0.02)
    assert sess.power().energy_j == pytest.approx(sess.report().total.energy_j, rel=0.1)
    assert sess.energy().energy_j == pytest.approx(sess.report().total.energy_j, rel=0.2)


def test_a_window_of_a_run_without_steps_stands_for_all_that_came_after(power, path, monkeypatch):
    """The first window ends at the first look after 50 ms; the next one would come after seconds."""
    import torch

    monkeypatch.setattr(tracing, "PACED_NS", 50_000_000)
    monkeypatch.setattr(tracing, "PACED_BUDGET", 0.0001)
    monkeypatch.setattr(tracing, "OVERDUE_NS", (0, 0))
    x = torch.ones(256, 256)
    with profile.session(mode="summary", path=path) as sess:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            torch.mm(x, x)
    (mm,) = [row for row in answer(sess.recording()).ops if row.name == "aten::mm"]
    assert mm.share > 0.5


def test_nothing_of_a_session_stays_behind(path):
    before = set(threading.enumerate())
    with profile.session(["cpu", "stack"], path=path):
        burn()
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before)  # one that was told to end may need a moment
    assert current() is None
    assert region_class is profile.region


def test_allocations_are_recorded_where_asked(tmp_path):
    import torch

    from tessera import analyze

    with profile.session(activities=["cpu", "memory"], path=tmp_path / "m.tessera"):
        kept = [torch.ones(256, 1024) for _ in range(4)]
    found = analyze.memory(tmp_path / "m.tessera")
    assert len(kept) == 4 and found.rows[0]["peak_bytes"] >= 4 * 2**20
    with profile.session(activities=["cpu"], path=tmp_path / "n.tessera"):
        torch.ones(256, 1024)
    assert not analyze.memory(tmp_path / "n.tessera").rows


def test_tracing_a_program_that_compiles_nothing_does_not_import_inductor(tmp_path: Path) -> None:
    """torch.profiler would, to ask for a setting: 4 s on the host of an H200."""
    program = f"""
        import sys, torch
        from tessera import profile
        with profile.session(path={str(tmp_path / "a.tessera")!r}, activities=["gpu"]) as sess:
            torch.ones(4).sum()
        assert len(sess.timeline().rows("op"))
        assert "torch._inductor" not in sys.modules
        assert torch._inductor.config  # as ever
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


def test_our_hooks_do_not_make_torch_warn_of_compiled_modules() -> None:
    torch = pytest.importorskip("torch")
    ranges = ModuleRanges(lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranges.install()
        try:
            torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
        finally:
            ranges.remove()
