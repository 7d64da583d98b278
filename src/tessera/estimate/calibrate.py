"""Calibrate: measure a few kernels and two networks on this machine's GPU, and compare them with their predictions.

::

    points ──► predicted (on meta tensors, from the catalogue) ──┐
           └─► measured (CudaBench) ─────────────────────────────┴──► factors by group ──► Calibration
                     `measure`                                                `fit_measurements`

The GPU's state is not changed: no clock, no limit, no mode.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

import msgspec

from ..device import Device
from ..errors import ArgumentError, MeasurementError, needs_extra
from ..hardware import identify_board
from .calibration import Calibration, Watts
from .calibration_bench import CudaBench, Machine, MeasuredLaunch
from .calibration_fit import CalibrationCase, MeasuredPoint, calibrated_outcome, calibration_alone, case_of, fit

if TYPE_CHECKING:
    from .calibration_kernels import CalibrationPoint

Progress = Callable[[int, int, str], None]
"""Called before each step with the steps done, the number of steps, and the name of the next."""

LEAST_S = 10.0
# How often the host is measured, between the kernels: a virtual host runs the same Python 1 to 2.7 times as long a few
# minutes later (benchmarks/data/h200_ops.jsonl.gz, case "host_speed"), so one measurement would not be representative.
LOOKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRow:
    """One point, per call: predicted for a kernel alone, measured, and predicted with the calibration.

    `copies` calls made up the iteration that was measured, at `clock_hz`, `capped` by the power limit or not.
    """

    name: str
    group: str
    launch: MeasuredLaunch
    copies: int
    predicted_s: float
    measured_s: float
    after_s: float
    predicted_j: float
    measured_j: float | None
    after_j: float
    clock_hz: float | None
    capped: bool | None

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.measured_s / self.predicted_s

    @property
    def ratio_after(self) -> float:
        """Measured over predicted time, with the calibration."""
        return self.measured_s / self.after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """The result of `tessera calibrate`: the calibration, not yet saved, and the points it comes from."""

    calibration: Calibration
    rows: tuple[CalibrationRow, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All measurements before the fit: kernels, networks, and the product that should reach the power limit.

    `notes` name what could not be measured.
    """

    device: Device
    machine: Machine
    idle_w: Watts
    idle_context_w: Watts
    kernels: tuple[MeasuredPoint, ...]
    nets: tuple[MeasuredPoint, ...]
    limit: MeasuredPoint | None
    notes: tuple[str, ...]
    seconds: float


def calibrate(
    bench: CudaBench, *, seconds: float = 60.0, progress: Progress | None = None, force: bool = False
) -> CalibrationResult:
    """Measure the bench's GPU for about `seconds`; `calibration.save` writes the result.

    A GPU that another process uses is refused, as its figures would be both programs'; `force` measures it anyway.
    """
    return fit_measurements(measure(bench, seconds=seconds, progress=progress, force=force))


def measure(
    bench: CudaBench, *, seconds: float = 60.0, progress: Progress | None = None, force: bool = False
) -> Measurements:
    """Every point, predicted and measured."""
    with needs_extra("torch", "torch", "calibrating"):
        from .calibration_kernels import host_points, kernel_points, limit_point
    if not seconds >= LEAST_S:
        raise ArgumentError(f"{seconds:g} s are too few to calibrate", fix=f"give at least {LEAST_S:g}, better 60")
    begin, machine = time.monotonic(), bench.machine()
    device = identify_board(machine.board)
    if not force:
        _check_idle(bench, machine)
    kernels, hosts = kernel_points(device), host_points(device)
    session = _CalibrationSteps(bench, device, len(kernels) + LOOKS * len(hosts) + 3, progress)
    idle_s, limit_s = (min(max(share * seconds, 1.0), 10.0) for share in (0.05, 0.1))
    host_s = min(max(0.05 * seconds / LOOKS, 0.5), 3.0)
    # A quarter of what is left goes to making inputs, choosing algorithms and capturing graphs.
    left_s = 0.75 * (seconds - 2 * idle_s - limit_s - LOOKS * len(hosts) * host_s)
    each_s = max(0.2, left_s / len(kernels))
    idle_w, context_w = (session.measure_idle(idle_s, context=context) for context in (False, True))
    measured, nets = [], []
    # The host is first measured after a third of the kernels: the sampler reads its counter most often in its first
    # seconds, on the same interpreter.
    for look in range(LOOKS):
        part = kernels[look * len(kernels) // LOOKS : (look + 1) * len(kernels) // LOOKS]
        measured += session.measure_points(part, "graph", each_s)
        nets += session.measure_points(hosts, "eager", host_s)
    limit = session.measure_points([limit_point(device)], "graph", limit_s)
    if not measured:
        raise MeasurementError("no kernel could be measured", why="; ".join(session.notes[:3]), fix="tessera doctor")
    return Measurements(
        device=device,
        machine=machine,
        idle_w=idle_w,
        idle_context_w=context_w,
        kernels=tuple(measured),
        nets=tuple(nets),
        limit=limit[0] if limit else None,
        notes=tuple(session.notes),
        seconds=time.monotonic() - begin,
    )


def fit_measurements(measured: Measurements) -> CalibrationResult:
    """The calibration that follows from the measurements."""
    blank = _blank_calibration(measured)
    calibration, notes = fit(blank, measured.kernels, measured.nets, measured.limit)
    unique = tuple(dict.fromkeys((*measured.notes, *notes)))  # the networks are measured several times
    calibration = msgspec.structs.replace(calibration, notes=unique)
    limit = (measured.limit,) if measured.limit is not None else ()
    rows = tuple(_row(m, blank, calibration) for m in (*measured.kernels, *limit, *measured.nets))
    return CalibrationResult(calibration=calibration, rows=rows, seconds=measured.seconds)


def _blank_calibration(of: Measurements) -> Calibration:
    """A calibration that changes nothing yet."""
    unknown, machine = Watts(value=None, how="not measured"), of.machine
    return Calibration(
        device=of.device.id,
        board=machine.board,
        driver=machine.driver,
        torch=machine.torch,
        host_cpu=machine.host_cpu,
        date=date.today().isoformat(),
        host_scale=None,
        time_scale={},
        energy_scale={},
        idle_w=of.idle_w,
        idle_context_w=of.idle_context_w,
        static_w=unknown,
        limit_w=unknown,
    )


def _row(m: MeasuredPoint, blank: Calibration, calibration: Calibration) -> CalibrationRow:
    """A measured point; a kernel alone is compared with the prediction of a kernel alone."""
    pair = (blank, calibration)
    if m.case.launch == "graph":
        pair = (calibration_alone(blank), calibration_alone(calibration))
    (before, after), each = (calibrated_outcome(m.case, c) for c in pair), 1.0 / m.copies
    return CalibrationRow(
        name=m.point.name,
        group=m.point.group,
        launch=m.case.launch,
        copies=m.copies,
        predicted_s=before.seconds * each,
        measured_s=m.sample.seconds * each,
        after_s=after.seconds * each,
        predicted_j=before.joules * each,
        measured_j=None if m.sample.joules is None else m.sample.joules * each,
        after_j=after.joules * each,
        clock_hz=m.sample.clock_hz,
        capped=m.sample.capped,
    )


def _check_idle(bench: CudaBench, machine: Machine) -> None:
    why = bench.busy()
    if why is not None:
        raise MeasurementError(
            f"{machine.board} is busy",
            why=f"{why}: the measurements would include another program",
            fix="wait until it is idle (nvidia-smi), choose another GPU (--device), or measure it anyway (--force)",
        )


# -- predicting and measuring -----------------------------------------------------------------------------------


def predict_point(
    device: Device, point: CalibrationPoint, launch: MeasuredLaunch, copies: int | None = None
) -> tuple[CalibrationCase, int]:
    """The prediction of a point, and how many calls one iteration has; None: as many as fill a graph."""
    from ..graph.capture import capture
    from .calibration_kernels import copies_to_fill, repeat

    with point.set_tf32():
        fn, inputs = point.make("meta")
        if copies is None and launch == "graph":
            once = case_of(device, capture(fn, inputs, launch="graph"), launch)
            copies = copies_to_fill(once.estimate.solved.seconds)
        many = copies or 1
        return case_of(device, capture(repeat(fn, many), inputs, launch=launch, name=point.name), launch, point), many


class _CalibrationSteps:
    """The steps of one calibration: reports each to `progress`, and notes what could not be measured."""

    def __init__(self, bench: CudaBench, device: Device, steps: int, progress: Progress | None) -> None:
        self._bench, self._device = bench, device
        self._done, self._steps, self._progress = 0, steps, progress
        self.notes: list[str] = []

    def _begin_step(self, name: str) -> None:
        if self._progress is not None:
            self._progress(self._done, self._steps, name)
        self._done += 1

    def measure_idle(self, seconds: float, *, context: bool) -> Watts:
        self._begin_step("idle with a CUDA context" if context else "idle")
        return self._bench.idle(seconds, context=context)

    def measure_points(
        self, points: list[CalibrationPoint], launch: MeasuredLaunch, each_s: float
    ) -> list[MeasuredPoint]:
        """The points that could be measured."""
        measured = (self._measure_point(point, launch, each_s) for point in points)
        return [point for point in measured if point is not None]

    def _measure_point(self, point: CalibrationPoint, launch: MeasuredLaunch, seconds: float) -> MeasuredPoint | None:
        """A point predicted and measured; None, and a note, where this GPU or this torch cannot run it."""
        from .calibration_kernels import repeat

        self._begin_step(point.name)
        case, copies = predict_point(self._device, point, launch)
        try:
            with point.set_tf32():
                fn, inputs = point.make(self._bench.where)
                sample = self._bench.run(repeat(fn, copies), inputs, launch=launch, seconds=seconds)
        except RuntimeError as exc:  # what torch raises: out of memory, no such kernel on this chip
            self.notes.append(f"{point.name} was left out: {str(exc).strip().splitlines()[0][:160]}")
            return None
        if not (math.isfinite(sample.seconds) and sample.seconds > 0):
            self.notes.append(f"{point.name} was left out: it took {sample.seconds} s")
            return None
        return MeasuredPoint(point=point, case=case, copies=copies, sample=sample)
