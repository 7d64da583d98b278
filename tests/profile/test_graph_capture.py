"""CUDA graphs: the operators of their capture, on the fake CUPTI, and the kernels that the driver lists."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tessera import profile
from tessera.profile import graph_capture
from tessera.profile.captured_kernels import CapturedKernel, _KernelNode, read_captured, tie_captured
from tessera.timeline.columns import NONE, Builder, Launch, Timeline

from .test_cupti_collector import fake, library  # noqa: F401  (fixtures)
from .test_kernel_tracing import cuda, kineto_takes_cupti  # noqa: F401  (fixtures)

torch = pytest.importorskip("torch")
NAMES = [ctypes.create_string_buffer(name) for name in (b"gemm", b"norm", b"add")]
SHAPES = ((4, 1, 1), (2, 1, 1), (1, 1, 1))
BLOCK = (128, 1, 1)


class FakeGraph:
    """As torch.cuda.CUDAGraph: what is launched between begin and end runs when it is replayed."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.driver.graph = []

    def capture_end(self) -> None:
        self.kernels, self.driver.graph = self.driver.graph, None
        if self.driver.fails:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        now_ns = time.time_ns()
        self.driver.correlation += 1
        self.driver.fake.fake_correlation(self.driver.correlation)
        self.driver.call(1, now_ns)  # cudaGraphLaunch
        for number, kernel in enumerate(self.kernels):
            self.driver.run(kernel, now_ns + 1_000, number + 1)


class Driver:
    """Launches kernels, or puts them into the graph that is captured, by a call of the runtime each."""

    def __init__(self, fake: Any) -> None:  # noqa: F811
        self.fake, self.correlation, self.ended_ns, self.fails = fake, 0, 0, False
        self.graph: list[int] | None = None

    def call(self, number: int, now_ns: int) -> None:
        self.fake.fake_call(5, number, now_ns, now_ns + 500, threading.get_native_id(), self.correlation)

    def run(self, kernel: int, start_ns: int, node: int) -> None:
        shape = (ctypes.c_int32 * 6)(*SHAPES[kernel], *BLOCK)
        start_ns = max(start_ns, self.ended_ns)  # one stream
        self.ended_ns = start_ns + 2_000
        self.fake.fake_kernel(ctypes.addressof(NAMES[kernel]), start_ns, start_ns + 2_000, shape, node)

    def launch(self, kernel: int) -> None:
        now_ns = time.time_ns()
        self.correlation += 1
        self.fake.fake_correlation(self.correlation)
        self.call(0, now_ns)
        if self.graph is None:
            self.run(kernel, now_ns + 1_000, 0)
        else:
            self.graph.append(kernel)

    def list_captured(self, stream: int) -> list[CapturedKernel]:
        assert self.graph is not None
        return [CapturedKernel(NAMES[k].value.decode(), Launch(grid=SHAPES[k], block=BLOCK)) for k in self.graph]


class Gemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, driver: Driver) -> Any:
        driver.launch(0)
        return x + 1


class NormAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, driver: Driver) -> Any:
        driver.launch(1)
        driver.launch(2)
        return x + 1


def work(driver: Driver) -> None:
    for operator in (Gemm, NormAdd, Gemm, Gemm):
        operator.apply(torch.ones(2), driver)
    NormAdd.apply(torch.ones(2), driver)


WORK = ["Gemm", "NormAdd", "NormAdd", "Gemm", "Gemm", "NormAdd", "NormAdd"]


@pytest.fixture
def driver(
    fake: Any,  # noqa: F811
    cuda: None,  # noqa: F811
    kineto_takes_cupti: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Driver:
    driver = Driver(fake)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(graph_capture, "read_captured", driver.list_captured)
    return driver


class Stream:
    cuda_stream = 7


def capture(driver: Driver) -> FakeGraph:
    graph = FakeGraph(driver)
    graph.capture_begin()
    work(driver)
    graph.capture_end()
    return graph


def name_operators(timeline: Timeline) -> list[str | None]:
    rows = timeline.rows("kernel")
    rows = rows[timeline["graph_node"][rows] != NONE]
    ops = timeline.linked.op[rows[np.argsort(timeline["start_ns"][rows], kind="stable")]]
    return [None if op == NONE else timeline.name(int(op)) for op in ops.tolist()]


def test_kernels_of_a_graph_have_the_operators_of_its_capture(driver: Driver, tmp_path: Path) -> None:
    original = FakeGraph.capture_begin, FakeGraph.capture_end
    with profile.session(path=tmp_path / "a.tessera") as sess:
        graph = capture(driver)
        for _ in range(12):
            graph.replay()
            sess.step()
    timeline, facts = sess.timeline(), sess.recording().facts
    assert name_operators(timeline) == 12 * WORK
    captured = np.flatnonzero(timeline["captured"] != NONE)
    assert [timeline.text("captured", row) for row in captured.tolist()] == [
        "gemm",
        "norm",
        "add",
        "gemm",
        "gemm",
        "norm",
        "add",
    ]
    assert len(facts.operator_windows) == 1  # of the three steps; a capture is none
    assert (FakeGraph.capture_begin, FakeGraph.capture_end) == original
    assert sess.notes == []


def test_a_program_that_captures_nothing_starts_kineto_for_its_steps_only(driver: Driver, tmp_path: Path) -> None:
    with profile.session(path=tmp_path / "a.tessera") as sess:
        for _ in range(12):
            work(driver)
            sess.step()
    assert (sess.timeline()["captured"] == NONE).all()
    assert sess._tracing._captures.tracing_s == 0.0  # type: ignore[union-attr]


def test_a_capture_that_fails_fails_as_without_us_and_tracing_goes_on(driver: Driver, tmp_path: Path) -> None:
    with profile.session(path=tmp_path / "a.tessera") as sess:
        driver.fails = True
        with pytest.raises(RuntimeError, match="was invalidated"):
            capture(driver)
        driver.fails = False
        graph = capture(driver)
        for _ in range(12):
            graph.replay()
            sess.step()
    assert name_operators(sess.timeline()) == 12 * WORK


def test_captures_are_traced_until_their_time_is_spent(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_capture, "MOST_S", 0.0)
    with profile.session(path=tmp_path / "a.tessera") as sess:
        capture(driver)
        capture(driver)
    assert (sess.timeline()["captured"] != NONE).sum() == 7  # of the first


def test_launches_that_are_not_all_seen_name_nothing() -> None:
    assert not tie_captured(make_calls(2), [kernel("a")])


def test_launches_inside_another_and_those_whose_kernel_ran_were_not_captured() -> None:
    timeline = make_calls(3)
    builder = Builder()
    for row in range(len(timeline)):
        builder.add("runtime", timeline.name(row), 100 * row, 100 * row + 50, thread=1, correlation=row)
    builder.add("runtime", "cuLaunchKernel", 110, 140, thread=1, correlation=9)  # of the runtime's own
    builder.add("kernel", "elsewhere", 500, 600, device=0, stream=3, correlation=2)
    timeline = builder.build()
    assert tie_captured(timeline, [kernel("a"), kernel("b")])
    assert [timeline.text("captured", row) for row in range(len(timeline))] == ["a", "b", None, None, None]
    assert timeline.launches[int(timeline["launch"][1])].grid == (3, 1, 1)


def kernel(name: str) -> CapturedKernel:
    return CapturedKernel(name, Launch(grid=(3, 1, 1), block=BLOCK))


def make_calls(count: int) -> Timeline:
    builder = Builder()
    for number in range(count):
        builder.add("runtime", "cudaLaunchKernel", 100 * number, 100 * number + 50, thread=1, correlation=number)
    return builder.build()


class FakeCuda:
    """The driver's calls that list a graph's nodes: a copy, a kernel by its handle, one by its function."""

    nodes = ((1, None), (0, (11, None)), (0, (None, 12)))
    names: ClassVar = {11: b"_Z4gemmPf", 12: b"triton_add"}

    def cuStreamGetCaptureInfo_v2(
        self, stream: Any, status: Any, number: Any, graph: Any, dependencies: Any, count: Any
    ) -> int:
        graph._obj.value = 99 if stream.value == 7 else None
        return 0

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        if nodes is not None and not self.nodes:
            return 1  # CUDA_ERROR_INVALID_VALUE, as an H200's driver says
        count._obj.value = len(self.nodes)
        for number in range(len(self.nodes) if nodes is not None else 0):
            nodes[number] = number + 1
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.nodes[node.value - 1][0]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:
        handles = self.nodes[node.value - 1][1]
        assert handles is not None
        # As cuda.h lays it out (CUDA 12 and 13): checked by compiling it.
        raw = (ctypes.c_uint8 * 72).from_address(ctypes.addressof(params._obj))
        words = np.frombuffer(raw, "<u4")
        words[2:5], words[5:8] = (5, 6, 1), (64, 2, 1)
        np.frombuffer(raw, "<u8")[[7, 0]] = [handle or 0 for handle in handles]
        return 0

    def cuKernelGetName(self, text: Any, handle: Any) -> int:
        text._obj.value = self.names[handle.value]
        return 0

    cuFuncGetName = cuKernelGetName


def test_kernels_of_a_graph_are_listed_by_the_driver() -> None:
    assert ctypes.sizeof(_KernelNode) == 72
    shape = Launch(grid=(5, 6, 1), block=(64, 2, 1))
    assert read_captured(7, FakeCuda()) == [("gemm(float*)", shape), ("triton_add", shape)]
    assert read_captured(8, FakeCuda()) == []  # is not being captured


class EmptyGraph(FakeCuda):
    nodes = ()


def test_a_graph_without_kernels_is_read() -> None:
    assert read_captured(7, EmptyGraph()) == []
