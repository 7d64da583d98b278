"""Calibration: measure a few kernels and two networks on the GPU at hand, and say how they differ from the prediction.

::

    points ──► predicted (on meta tensors, from the catalogue) ──┐
           └─► measured (Bench) ────────────────────────────────┴──► factors by group ──► Overlay
                     `measure`                                                `fitted`

Nothing of the GPU's state is changed: no clock, no limit, no mode.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING

import msgspec

from ..device import Device
from ..errors import ArgumentError, MeasurementError, MissingExtra
from ..hardware import identify_board
from .bench import Bench, CudaBench, Machine
from .factors import Case, Measured, after, alone, case_of, fit
from .overlay import Overlay, Watts
from .predict import Launch

if TYPE_CHECKING:
    from .points import Point

Progress = Callable[[int, int, str], None]
"""Called before each step: how many are done, of how many, and which comes."""

LEAST_S = 10.0
# How often the host is looked at, between the kernels: a virtual one runs the same Python 1 to 2.7 times as long a few
# minutes later (h200_ops.jsonl.gz, case "host_speed"), and one look would take the moment for the machine.
LOOKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point, per call: as predicted for a kernel alone, as measured, and as predicted with the calibration.

    `copies` calls made up the iteration that was measured, at `clock_hz`, `capped` by the power limit or not.
    """

    name: str
    group: str
    launch: Launch
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
class Calibration:
    """What `tessera calibrate` reports: the overlay, and the points it comes from. Nothing is written yet."""

    overlay: Overlay
    rows: tuple[Row, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All that was measured, before anything is concluded: kernels, networks, the product that should reach the limit.

    `notes` say what could not be measured.
    """

    device: Device
    machine: Machine
    idle_w: Watts
    idle_context_w: Watts
    kernels: tuple[Measured, ...]
    nets: tuple[Measured, ...]
    held: Measured | None
    notes: tuple[str, ...]
    seconds: float


def calibrate(
    device_index: int = 0, seconds: float = 60.0, progress: Progress | None = None, *, force: bool = False
) -> Overlay:
    """Measure the GPU for about so many seconds. The overlay is returned; `overlay.save` writes it.

    A GPU that another process uses is refused, as its figures would be both programs'; `force` measures all the same.
    """
    with CudaBench(device_index) as bench:
        return run(bench, seconds=seconds, progress=progress, force=force).overlay


def run(bench: Bench, *, seconds: float = 60.0, progress: Progress | None = None, force: bool = False) -> Calibration:
    """Calibrate with any bench; the overlay and the points it comes from."""
    return fitted(measure(bench, seconds=seconds, progress=progress, force=force))


def measure(
    bench: Bench, *, seconds: float = 60.0, progress: Progress | None = None, force: bool = False
) -> Measurements:
    """Every point, predicted and measured."""
    try:
        from . import points
    except ImportError as exc:
        raise MissingExtra("torch", "torch", "calibrating") from exc
    if not seconds >= LEAST_S:
        raise ArgumentError(f"{seconds:g} s are too few to calibrate", fix=f"give at least {LEAST_S:g}, better 60")
    machine = bench.machine()
    device = identify_board(machine.board)
    _check_idle(bench, machine, force)
    kernels, hosts, limit = points.kernel_points(device), points.host_points(device), points.limit_point(device)
    session = _Session(bench, device, len(kernels) + LOOKS * len(hosts) + 3, progress)
    idle_s, limit_s = (min(max(share * seconds, 1.0), 10.0) for share in (0.05, 0.1))
    host_s = min(max(0.05 * seconds / LOOKS, 0.5), 3.0)
    # A quarter of what is left goes to making inputs, choosing algorithms and capturing graphs.
    left_s = 0.75 * (seconds - 2 * idle_s - limit_s - LOOKS * len(hosts) * host_s)
    each_s = max(0.2, left_s / len(kernels))
    idle = session.idle(idle_s, context=False), session.idle(idle_s, context=True)
    measured, nets = [], []
    # The first look comes after a third of the kernels: the sampler reads its counter most often in its first seconds,
    # on the same interpreter.
    for look in range(LOOKS):
        part = kernels[look * len(kernels) // LOOKS : (look + 1) * len(kernels) // LOOKS]
        measured += session.all(part, "graph", each_s)
        nets += session.all(hosts, "eager", host_s)
    held = session.all([limit], "graph", limit_s)
    if not measured:
        raise MeasurementError("no kernel could be measured", why="; ".join(session.notes[:3]), fix="tessera doctor")
    return Measurements(
        device=device, machine=machine, idle_w=idle[0], idle_context_w=idle[1], kernels=tuple(measured),
        nets=tuple(nets), held=held[0] if held else None, notes=tuple(session.notes), seconds=session.seconds,
    )  # fmt: skip


def fitted(found: Measurements) -> Calibration:
    """The overlay that follows from what was measured."""
    blank = _blank(found)
    overlay, notes = fit(blank, found.kernels, found.nets, found.held)
    overlay = msgspec.structs.replace(overlay, notes=tuple(dict.fromkeys((*found.notes, *notes))))  # said once a look
    held = (found.held,) if found.held is not None else ()
    rows = tuple(_row(m, blank, overlay) for m in (*found.kernels, *held, *found.nets))
    return Calibration(overlay=overlay, rows=rows, seconds=found.seconds)


def as_on(found: Measurements, device: Device) -> Measurements:
    """The same measurements beside what is predicted for another device, as if the chip were known as that one."""

    def again(m: Measured) -> Measured:
        return replace(m, case=case_of(device, m.case.graph, m.case.launch))

    return replace(
        found, device=device, kernels=tuple(map(again, found.kernels)), nets=tuple(map(again, found.nets)),
        held=again(found.held) if found.held is not None else None,
    )  # fmt: skip


def _blank(of: Measurements) -> Overlay:
    """An overlay that changes nothing yet."""
    unknown, machine = Watts(value=None, how="not measured"), of.machine
    return Overlay(
        device=of.device.id, board=machine.board, driver=machine.driver, torch=machine.torch,
        host_cpu=machine.host_cpu, date=date.today().isoformat(), host_scale=None, time_scale={}, energy_scale={},
        idle_w=of.idle_w, idle_context_w=of.idle_context_w, static_w=unknown, limit_w=unknown,
    )  # fmt: skip


def _row(m: Measured, blank: Overlay, found: Overlay) -> Row:
    """A point as it was measured: a kernel alone is laid beside what is predicted for it alone."""
    overlays = (alone(blank), alone(found)) if m.case.launch == "graph" else (blank, found)
    (before, then), each = (after(m.case, o) for o in overlays), 1.0 / m.copies
    return Row(
        name=m.point.name, group=m.point.group, launch=m.case.launch, copies=m.copies,
        predicted_s=before.seconds * each, measured_s=m.sample.seconds * each, after_s=then.seconds * each,
        predicted_j=before.joules * each, measured_j=None if m.sample.joules is None else m.sample.joules * each,
        after_j=then.joules * each, clock_hz=m.sample.clock_hz, capped=m.sample.capped,
    )  # fmt: skip


def _check_idle(bench: Bench, machine: Machine, force: bool) -> None:
    why = bench.busy()
    if why is not None and not force:
        raise MeasurementError(
            f"{machine.board} is busy",
            why=f"{why}: time and watts would be another program's too",
            fix="wait until it is idle (nvidia-smi), choose another (--device), or measure all the same (--force)",
        )


# -- predicting and measuring -----------------------------------------------------------------------------------


def predicted(device: Device, point: Point, launch: Launch, copies: int | None = None) -> tuple[Case, int]:
    """A point as it is predicted, and how many calls one iteration of it is; None: as many as fill a graph."""
    from ..graph.capture import capture
    from .points import copies_to_fill, repeated

    replay = launch == "graph"
    with point.switches():
        fn, inputs = point.make("meta")
        if copies is None and replay:
            once = case_of(device, capture(fn, inputs, replay=True), launch)
            copies = copies_to_fill(once.found.solved.seconds)
        many = copies or 1
        return case_of(device, capture(repeated(fn, many), inputs, replay=replay, name=point.name), launch), many


class _Session:
    """One calibration under way: counts its steps for whoever watches, and notes what could not be measured."""

    def __init__(self, bench: Bench, device: Device, steps: int, progress: Progress | None) -> None:
        self._bench, self._device = bench, device
        self._done, self._steps, self._progress = 0, steps, progress
        self._begin = time.monotonic()
        self.notes: list[str] = []

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._begin

    def _step(self, name: str) -> None:
        if self._progress is not None:
            self._progress(self._done, self._steps, name)
        self._done += 1

    def idle(self, seconds: float, *, context: bool) -> Watts:
        """The board at rest."""
        self._step("idle with a CUDA context" if context else "idle")
        return self._bench.idle(seconds, context=context)

    def all(self, points: list[Point], launch: Launch, each_s: float) -> list[Measured]:
        """The points that could be measured."""
        found = []
        for point in points:
            self._step(point.name)
            measured = self._one(point, launch, each_s)
            if measured is not None:
                found.append(measured)
        return found

    def _one(self, point: Point, launch: Launch, seconds: float) -> Measured | None:
        """A point predicted and measured; None, and a note, where this GPU or this torch cannot run it."""
        from .points import repeated

        case, copies = predicted(self._device, point, launch)
        try:
            with point.switches():
                fn, inputs = point.make(self._bench.where)
                sample = self._bench.run(repeated(fn, copies), inputs, launch=launch, seconds=seconds)
        except RuntimeError as exc:  # what torch raises: out of memory, no such kernel on this chip
            self.notes.append(f"{point.name} was left out: {str(exc).strip().splitlines()[0][:160]}")
            return None
        if not (math.isfinite(sample.seconds) and sample.seconds > 0):
            self.notes.append(f"{point.name} was left out: it took {sample.seconds} s")
            return None
        return Measured(point=point, case=case, copies=copies, sample=sample)
