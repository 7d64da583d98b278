"""The bench on a GPU, as far as it can be tested without one."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from tessera.errors import ArgumentError, MeasurementError, MissingExtra
from tessera.estimate import calibration
from tessera.estimate import calibration_bench as benches
from tessera.estimate.calibration_bench import NvmlBoard

from fakes.by_hand import TimeByHand
from fakes.calibration import config as config
from fakes.calibration import make_calibration
from fakes.nvml import FakeNvml, Scenario
from fakes.sensor import ScriptSensor

pytestmark = pytest.mark.usefixtures("config")


@pytest.fixture
def board(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NvmlBoard]]:
    """Opens the first board of a fake NVML."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    opened: list[NvmlBoard] = []

    def open_board(index: int = 0, **scenario: Any) -> NvmlBoard:
        fake_nvml.set(Scenario(**scenario))
        found = NvmlBoard.open(index)
        assert found is not None
        opened.append(found)
        return found

    yield open_board
    for one in opened:
        one.close()


def test_the_board_says_name_driver_and_clock(board: Callable[..., NvmlBoard]) -> None:
    found = board(clock_sm=1500)
    assert (found.name, found.driver, found.mig) == ("NVIDIA H200", "580.95.05", False)
    hz, reasons = found.state()
    assert hz == 1500e6
    assert isinstance(reasons, int)


def test_what_a_board_does_not_say_is_not_known(board: Callable[..., NvmlBoard]) -> None:
    assert board(clocks="off").state()[0] is None


def test_utilisation_is_looked_at_a_few_times(board: Callable[..., NvmlBoard]) -> None:
    assert board(utilization_pct=83).utilization_pct(looks=2, every_s=0.0) == 83


def test_visible_devices_are_respected(board: Callable[..., NvmlBoard], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert board(gpus=2).number == 1
    assert NvmlBoard.open(1) is None


def test_a_working_board_is_busy(board: Callable[..., NvmlBoard]) -> None:
    found = board(utilization_pct=0, wave="const:500", before_w=500.0)
    assert found.power_share() == pytest.approx(500 / 700, rel=0.05)
    assert found.others() == [] or all(isinstance(pid, int) for pid in found.others())


class FakeCuda:
    """`torch.cuda` as far as the bench uses it: work takes time by hand on the calling thread, events note when."""

    class Event:
        time: TimeByHand

        def __init__(self, enable_timing: bool = False) -> None:
            self.at_s = math.nan

        def record(self) -> None:
            self.at_s = self.time.seconds()

        def synchronize(self) -> None:
            assert not math.isnan(self.at_s), "waited for an event nobody recorded"

        def elapsed_time(self, end: Any) -> float:
            return (end.at_s - self.at_s) * 1e3

    class Stream:
        def wait_stream(self, _other: Any) -> None: ...

    class CUDAGraph:
        time: TimeByHand

        def __init__(self) -> None:
            self.captured: Callable[[], Any] | None = None
            self.replays = 0

        def replay(self) -> None:
            self.replays += 1
            self.time.go(2)

    def __init__(self, time: TimeByHand) -> None:
        self.Event.time = self.CUDAGraph.time = self.time = time
        self.initialized = False
        self.emptied = 0
        self.graphs: list[Any] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def synchronize(self, _device: int | None = None) -> None: ...

    def empty_cache(self) -> None:
        self.emptied += 1

    def current_stream(self) -> Any:
        return self.Stream()

    def stream(self, _stream: Any) -> Any:
        return contextlib.nullcontext()

    def device(self, _index: int) -> Any:
        return contextlib.nullcontext()

    def graph(self, graph: Any, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local"
        self.graphs.append(graph)
        return contextlib.nullcontext()

    def get_device_properties(self, _index: int) -> Any:
        return SimpleNamespace(uuid="00000000-0000-0000-0000-000000000000")


class FakeBoard:
    name, driver, number, mig = "NVIDIA H200", "580.95.05", 0, False
    uuid = "GPU-00000000-0000-0000-0000-000000000000"

    def __init__(self) -> None:
        self.looks = 0
        self.reasons = 0x4

    def state(self) -> tuple[float, int]:
        self.looks += 1
        return 1.5e9, self.reasons

    def utilization_pct(self) -> float:
        return 0.0

    def power_share(self) -> float:
        return 0.5

    def others(self) -> list[int]:
        return [4711]

    def close(self) -> None: ...


@pytest.fixture
def cuda_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[benches.CudaBench, FakeCuda, FakeBoard]]:
    """The real bench on a torch whose work takes time by hand, and a board of a constant 300 W."""
    time = TimeByHand(monkeypatch)
    cuda, board = FakeCuda(time), FakeBoard()

    def zeros(*_: Any, **__: Any) -> None:
        cuda.initialized = True

    import torch as real

    torch = SimpleNamespace(cuda=cuda, no_grad=contextlib.nullcontext, zeros=zeros, __version__=real.__version__)
    monitor = time.monitor(ScriptSensor(lambda _t: 300.0, clock=time.clock, step_ms=1.0))
    monkeypatch.setattr(benches, "time", SimpleNamespace(sleep=lambda seconds: time.go(round(seconds * 1e3))))
    monkeypatch.setattr(benches, "_torch_with_cuda", lambda _index: torch)
    monkeypatch.setattr(benches, "_REST_S", 0.0)
    monkeypatch.setattr(NvmlBoard, "open", lambda _index: board)
    monkeypatch.setattr(benches.CudaBench, "_start_monitor", lambda _self: monitor)
    with benches.CudaBench(0) as bench:
        yield bench, cuda, board


def test_the_bench_replays_a_graph(cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard]) -> None:
    bench, cuda, board = cuda_bench
    sample = bench.run(lambda x: x, (1,), launch="graph", seconds=0.5)
    assert sample.seconds == pytest.approx(0.002)
    assert sample.watts == pytest.approx(300)
    assert sample.clock_hz == 1.5e9 and sample.capped is True
    assert cuda.graphs[0].replays * 0.002 == pytest.approx(0.5, rel=0.2) and board.looks > 1 and cuda.emptied == 1


def test_the_bench_leaves_the_host_alone_in_eager_runs(
    cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard],
) -> None:
    bench, cuda, board = cuda_bench
    board.reasons = 0
    calls: list[int] = []
    sample = bench.run(lambda x: (calls.append(x), cuda.time.go(1)), (7,), launch="eager", seconds=0.3)
    assert sample.seconds == pytest.approx(0.001)
    assert sample.capped is False
    assert board.looks == 2, "once after settling, once after measuring"
    assert cuda.graphs == [] and set(calls) == {7}


def test_the_bench_measures_idle_before_and_with_a_context(
    cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard],
) -> None:
    bench, cuda, _ = cuda_bench
    bare = bench.idle(0.3, context=False)
    assert bare.value == pytest.approx(300) and "without" in bare.how
    held = bench.idle(0.3, context=True)
    assert held.value == pytest.approx(300) and cuda.initialized
    late = bench.idle(0.3, context=False)
    assert late.value is None and "already held" in late.how


def test_the_bench_refuses_another_board_than_nvmls(
    cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard],
) -> None:
    bench, _, board = cuda_bench
    board.uuid = "GPU-11111111-0000-0000-0000-000000000000"
    with pytest.raises(MeasurementError, match="another board"):
        bench.idle(0.1, context=True)


def test_the_bench_names_who_is_busy(cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard]) -> None:
    bench, _, _ = cuda_bench
    assert bench.busy() == "it draws 50% of its power limit while this process is idle (process 4711)"
    assert bench.machine().board == "NVIDIA H200" and bench.where == "cuda:0"


def test_the_machine_can_be_written_down(cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard]) -> None:
    """`torch.__version__` is a TorchVersion, which msgspec refuses."""

    machine = cuda_bench[0].machine()
    assert type(machine.torch) is str and machine.torch == torch.__version__
    calibration.save(make_calibration(torch=machine.torch))
    found = calibration.find("h200")
    assert found is not None and found.torch == str(torch.__version__)


def test_torch_without_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(MeasurementError, match="NVIDIA GPU") as error:
        benches.CudaBench(0)
    assert "built without CUDA" in str(error.value)


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeasurementError, match="no GPU to calibrate") as error:
        benches.CudaBench(0)
    assert "nvidia-smi" in str(error.value)


def test_no_such_gpu(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ArgumentError, match="no GPU 5"):
        benches.CudaBench(5)


def test_no_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match="torch"):
        benches.CudaBench(0)
