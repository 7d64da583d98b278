"""The bench of a calibration: it runs a callable in steady state and returns seconds, joules and clock per call.

It does not change the GPU's state: no clock, limit or mode. Tests of what uses it have a simulated bench with the same
methods (tests/fakes/calibration.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ArgumentError, MeasurementError, SensorError, needs_extra
from ..hardware import host_cpu
from ..monitor import Monitor, energy_scope
from ..sensors._visible import visible_boards
from ..sensors.nvml import NvmlSensor, read_boards
from .calibration import Watts

# A board at rest reads 0%; a desktop's compositor a few.
BUSY_PCT = 10
# Idle boards draw up to a fifth of their limit with a context (H200: 82-118 of 700 W), busy ones more than this share.
BUSY_SHARE = 0.35
# nvml.h: nvmlClocksEventReasonSwPowerCap, nvmlClocksEventReasonHwPowerBrakeSlowdown
_POWER_CAP = 0x4 | 0x80
# This share of a callable's time lets power and clock settle (record_kernels.py: 0.15-0.35 s of 0.6 s).
_SETTLE = 0.4
# Replays are launched in pieces of this length, two ahead: the host then reads the clock while the work runs.
_PIECE_S = 0.03
# A board that has just worked takes this long to fall back to its idle power (H200: clocks drop within 2 s).
_REST_S = 1.0


MeasuredLaunch = Literal["eager", "graph"]
"""How a calibration runs its programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call of a callable in steady state. `capped`: the power limit held the clock; None where it is not known.

    `joules` are the board's, None without a power sensor.
    """

    seconds: float
    joules: float | None = None
    clock_hz: float | None = None
    capped: bool | None = None

    @property
    def watts(self) -> float | None:
        """Mean power."""
        return self.joules / self.seconds if self.joules is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that was measured."""

    board: str
    driver: str | None
    torch: str
    host_cpu: str


class CudaBench:
    """A GPU of this machine: CUDA graphs (or eager calls), CUDA events for time, `energy_scope` and NVML.

    Nothing touches CUDA before the first `idle(context=True)` or `run`, so that idle power without a context can be
    measured first.
    """

    def __init__(self, index: int = 0) -> None:
        self._torch = _torch_with_cuda(index)
        self._index = index
        self._board = NvmlBoard.open(index)
        if self._board is not None and self._board.mig:
            self._board.close()
            raise MeasurementError(
                f"{self._board.name} is divided into MIG slices",
                why="a slice is not the chip that the catalogue describes, and power is known for the whole board only",
                fix="turn MIG off, or calibrate another GPU: --device",
            )
        self._monitor = self._start_monitor()

    def close(self) -> None:
        """Stop sampling and release NVML."""
        if self._monitor is not None:
            self._monitor.stop()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> CudaBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_monitor(self) -> Monitor | None:
        """A monitor of this board alone, without other GPUs or the CPU."""
        if self._board is None:
            return None
        sensor = NvmlSensor(environ={"CUDA_VISIBLE_DEVICES": self._board.uuid or str(self._board.number)})
        try:
            sensor.start()
        except SensorError:
            sensor.stop()
            return None
        return Monitor([sensor]).start()

    @property
    def where(self) -> str:
        """The torch device for the inputs of what is measured."""
        return f"cuda:{self._index}"

    def machine(self) -> Machine:
        name = self._board.name if self._board is not None else self._torch.cuda.get_device_name(self._index)
        driver = self._board.driver if self._board is not None else None
        # A TorchVersion is a str that msgspec does not accept as one.
        return Machine(board=name, driver=driver, torch=str(self._torch.__version__), host_cpu=host_cpu().name)

    def busy(self) -> str | None:
        """Why the GPU is busy with other work, or None."""
        if self._board is None:
            return None
        used, drawn = self._board.utilization_pct(), self._board.power_share()
        if used <= BUSY_PCT and drawn <= BUSY_SHARE:
            return None
        others = self._board.others()
        who = f" (process {', '.join(map(str, others))})" if others else ""
        if used > BUSY_PCT:
            return f"its utilisation is {used:.0f}% while this process is idle{who}"
        return f"it draws {drawn:.0%} of its power limit while this process is idle{who}"

    # -- power at rest ------------------------------------------------------------------------------------------

    def idle(self, seconds: float, *, context: bool) -> Watts:
        """The board's power at rest, with or without a CUDA context of this process."""
        if self._monitor is None:
            return Watts(value=None, how="no power sensor of this GPU is readable: tessera doctor")
        if context:
            self._open_context()
        elif self._torch.cuda.is_initialized():
            return Watts(value=None, how="this process already held a CUDA context when the calibration began")
        time.sleep(_REST_S)
        with energy_scope("calibrate.idle", monitor=self._monitor) as scope:
            time.sleep(seconds)
        energy = scope.energy
        if energy.basis != "measured" or not energy.energy_j > 0:
            return Watts(value=None, how=f"the sensor ({energy.source}) gave no joules at rest")
        held = "with a CUDA context" if context else "without a CUDA context"
        return Watts(
            value=energy.energy_j / energy.time_s,
            error_w=energy.error_j / energy.time_s,
            how=f"{held}, {seconds:.1f} s, {energy.source}",
        )

    def _open_context(self) -> None:
        torch = self._torch
        torch.zeros(1, device=self.where)
        torch.cuda.synchronize(self._index)
        uuid = str(getattr(torch.cuda.get_device_properties(self._index), "uuid", ""))
        if self._board is not None and uuid and self._board.uuid and uuid.lower() not in self._board.uuid.lower():
            raise MeasurementError(
                f"cuda:{self._index} is another board than NVML's device {self._board.number}",
                why="CUDA lists the fastest GPU first, NVML by PCI address",
                fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID and calibrate again",
            )

    # -- steady state -------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], inputs: tuple[Any, ...], *, launch: MeasuredLaunch, seconds: float) -> Sample:
        """Call `fn(*inputs)` repeatedly for about `seconds`; the cost of one call in steady state."""
        torch = self._torch
        try:
            with torch.cuda.device(self._index), torch.no_grad():
                for _ in range(3):  # loads libraries, chooses algorithms, fills the allocator
                    fn(*inputs)
                torch.cuda.synchronize()
                if launch == "graph":
                    graph = _capture_graph(torch, fn, inputs)
                    return self._steady(graph.replay, seconds, paced=True)
                return self._steady(lambda: fn(*inputs), seconds, paced=False)
        finally:
            torch.cuda.empty_cache()

    def _steady(self, call: Callable[[], Any], seconds: float, *, paced: bool) -> Sample:
        each_s = _time_quickly(self._torch, call)
        self._repeat(call, each_s, seconds * _SETTLE, paced)
        monitored = energy_scope("calibrate", monitor=self._monitor) if self._monitor else contextlib.nullcontext()
        with monitored as scope:
            measured_s, states = self._repeat(call, each_s, seconds * (1 - _SETTLE), paced)
        energy = scope.energy if scope is not None else None
        watts = None
        if energy is not None and energy.basis == "measured" and energy.coverage > 0.8 and energy.time_s > 0:
            watts = energy.energy_j / energy.time_s
        clocks = [hz for hz, _ in states if hz is not None]
        capped = [reasons & _POWER_CAP != 0 for _, reasons in states if reasons is not None]
        return Sample(
            seconds=measured_s,
            joules=watts * measured_s if watts is not None and math.isfinite(watts) and watts > 0 else None,
            clock_hz=statistics.median(clocks) if clocks else None,
            capped=sum(capped) > 0.5 * len(capped) if capped else None,
        )

    def _repeat(
        self, call: Callable[[], Any], each_s: float, seconds: float, paced: bool
    ) -> tuple[float, list[tuple[float | None, int | None]]]:
        """Seconds per call on the device's clock, and the board's states meanwhile.

        Eager calls are not paced: they measure the host, and nothing may delay it.
        """
        torch = self._torch
        piece = max(1, round(_PIECE_S / each_s))
        pieces = max(3, math.ceil(seconds / (piece * each_s)))
        ahead: deque[Any] = deque()
        states = []
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(pieces):
            for _ in range(piece):
                call()
            if paced:
                mark = torch.cuda.Event()
                mark.record()
                ahead.append(mark)
                if len(ahead) > 2:
                    ahead.popleft().synchronize()
                states.append(self._state())
        end.record()
        if not paced:
            states.append(self._state())
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / (pieces * piece), states

    def _state(self) -> tuple[float | None, int | None]:
        return self._board.state() if self._board is not None else (None, None)


class NvmlBoard:
    """One board as NVML sees it: name, clock, throttle reasons, utilisation. Reads only."""

    def __init__(self, nvml: Any, number: int, uuid: str) -> None:
        self._nvml = nvml
        self.number = number
        self.uuid = uuid
        self._handle = nvml.nvmlDeviceGetHandleByIndex(number)
        self.name = str(self._ask(lambda: nvml.nvmlDeviceGetName(self._handle)) or "")
        self.driver: str | None = self._ask(nvml.nvmlSystemGetDriverVersion)
        self.mig = bool((self._ask(lambda: nvml.nvmlDeviceGetMigMode(self._handle)) or (0,))[0])

    @classmethod
    def open(cls, index: int) -> NvmlBoard | None:
        """The board that is CUDA's device `index` for this process; None where NVML does not answer."""
        try:
            import pynvml as nvml
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return None
        try:
            visible = visible_boards(read_boards(nvml), os.environ.get("CUDA_VISIBLE_DEVICES"))
            if index < len(visible):
                return cls(nvml, visible[index].board.index, visible[index].board.uuid)
        except nvml.NVMLError:
            pass
        nvml.nvmlShutdown()
        return None

    def close(self) -> None:
        """Release NVML."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def state(self) -> tuple[float | None, int | None]:
        """The current SM clock in Hz and the bits of its throttle reasons."""
        nvml, h = self._nvml, self._handle
        mhz = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM))
        reasons = self._ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(h)))
        return (None if mhz is None else mhz * 1e6), reasons

    def utilization_pct(self, looks: int = 5, every_s: float = 0.2) -> float:
        """The highest of a few readings; the driver's own window is a sixth of a second to a second."""
        readings = [0.0]
        for _ in range(looks):
            rates = self._ask(lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle))
            readings.append(float(rates.gpu) if rates is not None else 0.0)
            time.sleep(every_s)
        return max(readings)

    def power_share(self) -> float:
        """Its current power over its limit; 0 where it does not report them."""
        nvml, h = self._nvml, self._handle
        drawn = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(h))
        limit = self._ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(h))
        return float(drawn) / float(limit) if drawn and limit else 0.0

    def others(self) -> list[int]:
        """Other processes with a context on the board, as far as this user may see them; they may be idle."""
        processes = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)) or []
        return sorted({int(p.pid) for p in processes} - {os.getpid()})

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._nvml.NVMLError:  # a value that a board does not report is None
            return None


def _torch_with_cuda(index: int) -> Any:
    """Torch if it can use this GPU, else the error that says why not."""
    with needs_extra("torch", "torch", "calibrating"):
        import torch
    if torch.version.cuda is None:
        raise MeasurementError(
            "this torch cannot use an NVIDIA GPU",
            why=f"torch {torch.__version__} was built without CUDA",
            fix="install a CUDA build of torch (pytorch.org/get-started); predictions work without one",
        )
    if not torch.cuda.is_available():
        raise MeasurementError(
            "there is no GPU to calibrate",
            why="torch.cuda.is_available() is False: no device, no driver, or CUDA_VISIBLE_DEVICES hides it",
            fix="check nvidia-smi and `tessera doctor`; predictions work without a GPU, from the catalogue",
        )
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise ArgumentError(f"no GPU {index}", fix=f"this process sees {count}: --device 0 to {count - 1}")
    return torch


def _capture_graph(torch: Any, fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """One call as a CUDA graph of this thread's calls alone: the sampler's thread records events meanwhile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        fn(*inputs)
    return graph


def _time_quickly(torch: Any, call: Callable[[], Any], times: int = 5) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return max(1e-7, float(begin.elapsed_time(end)) * 1e-3 / times)
