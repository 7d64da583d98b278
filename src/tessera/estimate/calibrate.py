"""Calibration: measure a few kernels and two networks on the GPU at hand, and say how they differ from the prediction.

::

    points ──► predicted (on meta tensors, from the catalogue) ──┐
           └─► measured (Bench) ────────────────────────────────┴──► factors by group ──► Overlay

Nothing of the GPU's state is changed: no clock, no limit, no mode.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

import msgspec

from ..device import Device
from ..errors import ArgumentError, MeasurementError, MissingExtra
from ..hardware import catalogue, user_folder
from .bench import Bench, CudaBench, Machine
from .factors import Measured, after, case_of, fit
from .overlay import Overlay, Watts
from .predict import Launch

if TYPE_CHECKING:
    from .points import Point

Progress = Callable[[int, int, str], None]
"""Called before each step: how many are done, of how many, and which comes."""

LEAST_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point, per call: as predicted, as measured, and as predicted with the calibration."""

    name: str
    group: str
    launch: Launch
    predicted_s: float
    measured_s: float
    after_s: float
    predicted_j: float
    measured_j: float | None
    after_j: float

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
    try:
        from . import points
    except ImportError as exc:
        raise MissingExtra("torch", "torch", "calibrating") from exc
    if not seconds >= LEAST_S:
        raise ArgumentError(f"{seconds:g} s are too few to calibrate", fix=f"give at least {LEAST_S:g}, better 60")
    machine = bench.machine()
    device = identify(machine.board)
    _check_idle(bench, machine, force)
    kernels, hosts, limit = points.kernel_points(device), points.host_points(device), points.limit_point(device)
    session = _Session(bench, device, len(kernels) + len(hosts) + 3, progress)
    idle_s, limit_s, host_s = (min(max(share * seconds, 1.0), 10.0) for share in (0.05, 0.1, 0.05))
    # A quarter of what is left goes to making inputs, choosing algorithms and capturing graphs.
    left_s = 0.75 * (seconds - 2 * idle_s - limit_s - len(hosts) * host_s)
    idle = session.idle(idle_s, context=False), session.idle(idle_s, context=True)
    measured = session.all(kernels, "graph", max(0.2, left_s / len(kernels)))
    held = session.all([limit], "graph", limit_s)
    # The host comes last: the sampler reads its counter most often in its first seconds, on the same interpreter.
    nets = session.all(hosts, "eager", host_s)
    if not measured:
        raise MeasurementError("no kernel could be measured", why="; ".join(session.notes[:3]), fix="tessera doctor")
    blank = _blank(device, machine, *idle)
    found, notes = fit(blank, measured, nets, held[0] if held else None)
    found = msgspec.structs.replace(found, notes=(*session.notes, *notes))
    return Calibration(overlay=found, rows=tuple(_row(m, found) for m in (*measured, *nets)), seconds=session.seconds)


def _blank(device: Device, machine: Machine, idle_w: Watts, idle_context_w: Watts) -> Overlay:
    """An overlay that changes nothing yet."""
    unknown = Watts(value=None, how="not measured")
    return Overlay(
        device=device.id, board=machine.board, driver=machine.driver, torch=machine.torch, host_cpu=machine.host_cpu,
        date=date.today().isoformat(), host_scale=None, time_scale={}, energy_scale={}, idle_w=idle_w,
        idle_context_w=idle_context_w, static_w=unknown, limit_w=unknown,
    )  # fmt: skip


def _row(m: Measured, found: Overlay) -> Row:
    then, each = after(m.case, found), 1.0 / m.copies
    return Row(
        name=m.point.name, group=m.point.group, launch=m.case.launch,
        predicted_s=m.case.found.solved.seconds * each, measured_s=m.sample.seconds * each, after_s=then.seconds * each,
        predicted_j=m.case.joules * each, measured_j=None if m.sample.joules is None else m.sample.joules * each,
        after_j=then.joules * each,
    )  # fmt: skip


# -- which board ------------------------------------------------------------------------------------------------


def identify(board: str) -> Device:
    """The catalogued device of a board's name ("NVIDIA A100-SXM4-80GB"); a clear error for one nobody described."""
    name = _plain(board)
    for device in catalogue().values():
        if any(name == _plain(alias) for alias in (device.id, device.name, *device.aliases)):
            return device
    for device in catalogue().values():  # "Tesla V100-SXM2-32GB": a known name, and what memory it has
        for alias in (device.id, *device.aliases):
            rest = name.removeprefix(_plain(alias) + " ")
            if rest != name and _is_memory_of(device, rest):
                return device
    raise ArgumentError(
        f"the catalogue does not know the GPU {board!r}",
        why="a calibration is laid over a device's figures, and this one has none",
        fix=f"describe it in {user_folder()}/my-gpu.toml with aliases = [{board.lower()!r}] "
        "(peaks, memory, clocks, tdp_w, as `tessera hardware show h200 --json` has them), then calibrate again",
    )


def _plain(name: str) -> str:
    words = re.split(r"[\s\-_]+", name.strip().lower())
    return " ".join(word for word in words if word not in ("nvidia", "tesla", "geforce", "amd", ""))


def _is_memory_of(device: Device, rest: str) -> bool:
    """Whether the words after a known name only say its memory, and say it rightly."""
    for word in rest.split():
        size = re.fullmatch(r"(\d+)gb", word)
        if size is None and not word.startswith("hbm"):
            return False
        capacity = device.memory.capacity_bytes
        if size is not None and (capacity is None or abs(capacity.value / (int(size[1]) * 1e9) - 1) > 0.15):
            return False
    return True


def _check_idle(bench: Bench, machine: Machine, force: bool) -> None:
    why = bench.busy()
    if why is not None and not force:
        raise MeasurementError(
            f"{machine.board} is busy",
            why=f"{why}: time and watts would be another program's too",
            fix="wait until it is idle (nvidia-smi), choose another (--device), or measure all the same (--force)",
        )


# -- predicting and measuring -----------------------------------------------------------------------------------


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
        from ..graph.capture import capture
        from .points import copies_to_fill, repeated

        replay, copies = launch == "graph", 1
        with point.switches():
            fn, inputs = point.make("meta")
            if replay:
                once = case_of(self._device, capture(fn, inputs, replay=True), launch)
                copies = copies_to_fill(once.found.solved.seconds)
            graph = capture(repeated(fn, copies), inputs, replay=replay, name=point.name)
            case = case_of(self._device, graph, launch)
            try:
                fn, inputs = point.make(self._bench.where)
                sample = self._bench.run(repeated(fn, copies), inputs, launch=launch, seconds=seconds)
            except RuntimeError as exc:  # what torch raises: out of memory, no such kernel on this chip
                self.notes.append(f"{point.name} was left out: {str(exc).strip().splitlines()[0][:160]}")
                return None
        if not (math.isfinite(sample.seconds) and sample.seconds > 0):
            self.notes.append(f"{point.name} was left out: it took {sample.seconds} s")
            return None
        return Measured(point=point, case=case, copies=copies, sample=sample)
