"""The mode "light": every kernel of a program by a fake CUPTI, and operators of a few steps by the real Kineto."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tessera import profile
from tessera.analyze.answer import answer
from tessera.cli.report import write_page
from tessera.profile import kernel_tracing
from tessera.profile.cupti_collector import CuptiCollector
from tessera.profile.cupti_library import Cupti
from tessera.profile.cupti_timeline import read_records
from tessera.profile.demangle import demangle
from tessera.profile.kineto_collector import KinetoCollector
from tessera.profile.tracing_schedule import SteadySteps
from tessera.record import CODE

from .test_cupti_collector import fake, library  # noqa: F401  (fixtures)

torch = pytest.importorskip("torch")
NAMES = [ctypes.create_string_buffer(n) for n in (b"_Z4gemmPf", b"ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)")]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, library: str) -> None:  # noqa: F811
    """A torch whose CUDA starts when it is asked for, and the fake CUPTI with it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: call())
    monkeypatch.setattr(kernel_tracing, "synchronize", lambda: None)
    make = CuptiCollector.__init__

    def __init__(self: CuptiCollector) -> None:
        make(self, Cupti(library))

    monkeypatch.setattr(CuptiCollector, "__init__", __init__)


def launch(fake: Any, name: int, start_ns: int, length_ns: int) -> None:  # noqa: F811
    shape = (ctypes.c_int32 * 6)(3, 2, 1, 128, 1, 1)
    fake.fake_kernel(ctypes.addressof(NAMES[name]), start_ns, start_ns + length_ns, shape, 0)


def test_kernels_of_a_session_are_in_its_timeline(fake: Any, cuda: None, tmp_path: Path) -> None:  # noqa: F811
    with profile.session(mode="kernels", path=tmp_path / "a.tessera") as sess:
        begun_ns = time.time_ns()
        for number in range(100):
            launch(fake, number % 10 == 0, begun_ns + 10_000 * number, 4_000)
        fake.fake_copy(begun_ns + 2_000_000, begun_ns + 2_001_000, 4096, 1)
        fake.fake_set(begun_ns + 3_000_000, begun_ns + 3_000_500, 64)
    timeline = sess.timeline()
    kernels = timeline.rows("kernel")
    assert len(kernels) == 90
    row = int(kernels[0])
    assert timeline.name(row) == "gemm(float*)"
    assert timeline["start_ns"][row] == begun_ns + 10_000  # the first is a collective
    assert timeline["end_ns"][row] - timeline["start_ns"][row] == 4_000
    shape = timeline.launches[int(timeline["launch"][row])]
    assert (shape.grid, shape.block, shape.registers, shape.shared_bytes) == ((3, 2, 1), (128, 1, 1), 40, 3072)
    assert [timeline.launches[int(timeline["launch"][r])].collective_type for r in timeline.rows("collective")] == [
        "all_reduce"
    ] * 10
    copied = int(timeline.rows("memcpy")[0])
    assert timeline.name(copied) == "Memcpy HtoD (Pinned -> Device)"
    assert timeline["bytes"][copied] == 4096
    assert len(timeline.rows("memset")) == 1
    assert len(sess.recording().facts.windows) == 1


def test_rows_come_to_the_file_while_the_program_runs(
    fake: Any,  # noqa: F811
    cuda: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_tracing, "FLUSH_S", 0.0)
    with profile.session(mode="kernels", path=tmp_path / "a.tessera") as sess:
        launch(fake, 0, time.time_ns(), 1_000)
        until = time.monotonic() + 600.0
        while not len(sess.timeline().rows("kernel")):
            assert time.monotonic() < until, "no kernel came to the file"
            time.sleep(0.05)
        launch(fake, 0, time.time_ns(), 1_000)
    assert len(sess.timeline().rows("kernel")) == 2
    assert len(sess.recording().facts.windows) == 1


def test_a_session_may_begin_within_the_start_of_cuda(
    fake: Any,  # noqa: F811
    cuda: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `tessera run` does: torch holds a lock then, for which `_lazy_call` would wait for ever."""

    def wait_for_ever(call: Any) -> None:
        raise AssertionError("torch.cuda._lazy_call within torch.cuda._lazy_init")

    monkeypatch.setattr(torch.cuda, "_lazy_call", wait_for_ever)
    monkeypatch.setattr(torch.cuda._tls, "is_initializing", True, raising=False)
    with profile.session(mode="kernels", path=tmp_path / "a.tessera") as sess:
        launch(fake, 0, time.time_ns(), 1_000)
    assert len(sess.timeline().rows("kernel")) == 1


def test_records_without_a_time_are_left_out_and_said(fake: Any, library: str) -> None:  # noqa: F811
    collector = CuptiCollector(Cupti(library))
    collector.start()
    launch(fake, 0, 0, 0)
    launch(fake, 0, time.time_ns(), 10)
    collector.stop()
    taken = collector.take()
    assert taken is not None
    timeline = read_records(taken)
    assert timeline["kind"].tolist() == [CODE["kernel"]]
    assert any("could not time 1" in note for note in timeline.notes)


def test_cupti_that_refuses_does_not_stop_the_program_and_kineto_takes_a_few_steps(
    fake: Any,  # noqa: F811
    cuda: None,
    tmp_path: Path,
) -> None:
    fake.fake_reset(130001, 0, 96, 88)
    with profile.session(path=tmp_path / "a.tessera") as sess:
        for _ in range(8):
            torch.ones(4).sum()
            sess.step()
    assert any("cuptiActivityEnable failed" in note and "by Kineto" in note for note in sess.notes)
    facts = sess.recording().facts
    assert facts.scheduled and len(facts.windows) == 1 and not facts.operator_windows
    assert facts.collectors["operators"] == facts.collectors["kernels"] == "kineto"


def test_an_unknown_layout_leaves_a_few_steps_to_kineto(
    fake: Any,  # noqa: F811
    cuda: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tessera.profile.cupti_collector.are_kernels", lambda records: False)
    with profile.session(path=tmp_path / "a.tessera", schedule=profile.trace_schedule(wait=2, active=2)) as sess:
        launch(fake, 0, time.time_ns(), 1_000)
        sess._tracing.kernels._bring(CuptiCollector.flush)  # type: ignore[union-attr]
        for _ in range(5):
            torch.ones(4).sum()
            sess.step()
    assert any("not known" in note and "by Kineto" in note for note in sess.notes)
    assert len(sess.recording().facts.windows) == 1
    assert sess.recording().facts.collectors["kernels"] == "kineto"


class Launch(torch.autograd.Function):
    """An operator that launches a kernel on the fake GPU."""

    @staticmethod
    def forward(ctx: Any, x: Any, program: Any) -> Any:
        program.launch()
        return x + 1


class Program:
    """Launches kernels as torch does: a call of the runtime within an operator, and the kernel a little later."""

    def __init__(self, fake: Any) -> None:  # noqa: F811
        self.fake, self.launched = fake, 0

    def launch(self) -> None:
        now_ns = time.time_ns()
        self.launched += 1
        self.fake.fake_correlation(self.launched)
        self.fake.fake_call(5, 0, now_ns, now_ns + 500, threading.get_native_id(), self.launched)
        launch(self.fake, 0, now_ns + 1_000, 2_000)

    def step(self) -> None:
        for _ in range(10):
            Launch.apply(torch.ones(4), self)


@pytest.fixture
def kineto_takes_cupti(monkeypatch: pytest.MonkeyPatch, library: str) -> None:  # noqa: F811
    """Kineto registers callbacks of its own with CUPTI when it starts, and asks for records that we do not know."""
    cupti = Cupti(library)
    prepare = KinetoCollector.prepare

    def taking(self: KinetoCollector) -> None:
        prepare(self)
        cupti.register(lambda: (0, 0), lambda address, used: None)
        cupti.enable(39)

    monkeypatch.setattr(KinetoCollector, "prepare", taking)


@pytest.mark.parametrize("count", [None, 2])
def test_every_kernel_is_kept_and_a_few_steady_steps_have_operators(
    fake: Any,  # noqa: F811
    cuda: None,
    kineto_takes_cupti: None,
    tmp_path: Path,
    count: int | None,
) -> None:
    program = Program(fake)
    with profile.session(path=tmp_path / "a.tessera", operator_steps=count) as sess:
        for _ in range(14):
            program.step()
            sess.step()
    timeline, facts = sess.timeline(), sess.recording().facts
    kernels = timeline.rows("kernel")
    assert len(kernels) == program.launched == 140
    assert len(facts.windows) == len(facts.operator_windows) == 1
    begin_ns, end_ns = facts.operator_windows[0]
    inside = (timeline["start_ns"][kernels] >= begin_ns) & (timeline["start_ns"][kernels] < end_ns)
    assert inside.sum() == 10 * (count or 3)
    assert (timeline.linked.launch[kernels[inside]] != -1).all()
    assert (timeline.linked.launch[kernels[~inside]] == -1).all()
    # Those of the other steps have the operators of the traced ones that they repeat.
    assert {timeline.name(op) for op in timeline.linked.op[kernels].tolist()} == {"Launch"}
    assert facts.mode == "light"
    assert facts.collectors == {"kernels": "cupti", "operators": "kineto", "why": None}
    assert facts.accounted_windows == list(facts.windows)
    page = tmp_path / "page.html"
    write_page(page, sess.recording(), answer(sess.recording()))
    assert "kernels by CUPTI, operators by Kineto" in page.read_text()


def test_a_program_too_short_for_operators_says_so(fake: Any, cuda: None, tmp_path: Path) -> None:  # noqa: F811
    program = Program(fake)
    schedule = profile.trace_schedule(wait=5, active=1)
    with profile.session(path=tmp_path / "a.tessera", schedule=schedule) as sess:
        program.step()
        sess.step()
    assert any("there are no operators" in note for note in sess.notes)
    assert sess.recording().facts.collectors["operators"] is None


def test_the_programs_own_profiler_has_cupti_while_it_runs(fake: Any, cuda: None, tmp_path: Path) -> None:  # noqa: F811
    program = Program(fake)
    with profile.session(path=tmp_path / "a.tessera", operator_steps=0) as sess:
        program.step()
        with torch.profiler.profile():
            program.step()  # the fake gives these to nobody: nothing is enabled
        program.step()
    assert len(sess.timeline().rows("kernel")) == 20
    assert any("profiler of its own" in note for note in sess.notes)


def test_a_program_without_steps_has_operators_of_a_while(fake: Any, cuda: None, tmp_path: Path) -> None:  # noqa: F811
    program = Program(fake)
    with profile.session(path=tmp_path / "a.tessera") as sess:
        until = time.monotonic() + 600.0
        while not sess.recording().facts.operator_windows:
            assert time.monotonic() < until, "operators were not traced, or for ever"
            program.step()
    (window,) = sess.recording().facts.operator_windows
    assert window[1] - window[0] < 30_000_000_000
    assert len(sess.timeline().rows("kernel")) == program.launched


@pytest.mark.parametrize(
    ("seconds", "after"),
    [
        ([9.0, 0.1, 0.1], 3),  # the first compiles
        ([9.0, 5.0, 3.0, 0.1, 0.1], 5),
        ([0.1, 0.3] * 5, 10),  # never steady
    ],
)
def test_operators_are_traced_once_steps_are_steady(seconds: list[float], after: int) -> None:
    steady, now_ns, said = SteadySteps(3), 0, []
    for step_s in seconds:
        now_ns += round(1e9 * step_s)
        said.append(steady.step_ended(now_ns))
    assert said == [False] * (after - 1) + [True]


def test_a_program_with_an_optimizer_is_waited_for() -> None:
    steady = SteadySteps(3)
    steady.work_begins(0)
    assert not steady.is_due(100_000_000) and steady.is_due(600_000_000)
    steady.steps_expected = True
    assert not steady.is_due(600_000_000)
    assert steady.is_due(60_000_000_000)  # it has one, and never uses it
    assert steady.find_length_ns(10**9, 47_000) == 20_000 * 10**9 // 47_000
    assert steady.find_length_ns(10**9, 100) == 10**9


def test_names_are_demangled_as_kineto_does() -> None:
    assert demangle("_ZN2at6native6vecaddEPf") == "at::native::vecadd(float*)"
    assert demangle("triton_poi_fused_add_0") == "triton_poi_fused_add_0"


def test_kernels_are_in_the_file_before_kineto_stops_which_no_thread_outruns(
    fake: Any,  # noqa: F811
    cuda: None,
    kineto_takes_cupti: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, written, stop = Program(fake), [], KinetoCollector.stop

    def look(self: KinetoCollector) -> Any:
        with profile.RunFile(tmp_path / "a.tessera") as run:
            written.append(len(run.timeline().rows("kernel")))
        return stop(self)

    monkeypatch.setattr(KinetoCollector, "stop", look)
    schedule = profile.trace_schedule(wait=2, active=2, repeat=1)
    with profile.session(path=tmp_path / "a.tessera", schedule=schedule) as sess:
        for _ in range(6):
            program.step()
            sess.step()
    assert written == [40]  # of four steps
