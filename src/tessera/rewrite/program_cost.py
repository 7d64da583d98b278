"""What the operators of a program cost on a chip, by the model of `predict`: seconds, joules, bytes, the host's share.

If the kernels were profiled, `set_kernel_times` sets their measured seconds, and `share_measured_joules` their joules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..device import Device
from ..errors import TesseraError
from ..hardware import identify_board, lookup
from .eager_ops import EagerOp, make_graph
from .kernel_times import KernelGroup

if TYPE_CHECKING:
    from ..estimate.host import HostModel
    from ..estimate.kernel_time import KernelTime
    from ..estimate.power import PowerModel


# Hosts of one kind were found at 0.84 to 1.34 times the shipped constants (estimate/host.py). If a program takes more
# than this many times its estimate, the device is not waiting for the host.
MAX_RATIO = 2.0
# What waiting adds, as a share of what the board draws while it waits: 105 to 109 W of 127 W, for ResNet-50's
# convolutions with 0, 6 and 30 us behind each (`gaps` of benchmarks/device/trace_lines.py). Kernels that follow closely
# are hotter, and leak more.
WAIT_SHARE = 0.85
# Bounds of the kernels' joules over the model's. The model is off by 15% in the mean (benchmarks/README.md), not by
# this much.
FACTORS = (0.4, 2.5)
# How much of the model's error is common to an operator's kernel and to the kernel that replaces it: assumed, between
# the same kernel (1) and any other (0).
COMMON_ERROR = 0.5


def find_chip(on: str | Device | None, cuda: bool) -> Device | None:
    """Return the chip that savings are priced for: the named one, else this machine's if the catalogue has it."""
    if isinstance(on, Device):
        return on
    if on is not None:
        return lookup(on)
    if not cuda:
        return None
    import torch

    try:
        return identify_board(torch.cuda.get_device_name())
    except TesseraError:
        return None


@dataclass(frozen=True, slots=True)
class OpCost:
    """Seconds on the device, joules with their 90% half-width, and bytes read and written, of some operators.

    `lasting_j` are the joules that grow with the seconds (the board's, and those of SMs that hold work). The other
    joules belong to the work: operations and bytes.
    """

    time_s: float = 0.0
    energy_j: float = 0.0
    error_j: float = 0.0
    nbytes: float = 0.0
    lasting_j: float = 0.0

    def __add__(self, other: OpCost) -> OpCost:
        return OpCost(
            self.time_s + other.time_s,
            self.energy_j + other.energy_j,
            math.hypot(self.error_j, other.error_j),
            self.nbytes + other.nbytes,
            self.lasting_j + other.lasting_j,
        )

    def __sub__(self, other: OpCost) -> OpCost:
        """Return the saving of `other` against this; errors add up."""
        negative = OpCost(-other.time_s, -other.energy_j, other.error_j, -other.nbytes, -other.lasting_j)
        return self + negative

    def scale_joules(self, factor: float) -> OpCost:
        """Return the same cost with joules scaled by a factor."""
        joules, error_j, lasting_j = (factor * j for j in (self.energy_j, self.error_j, self.lasting_j))
        return replace(self, energy_j=joules, error_j=error_j, lasting_j=lasting_j)

    def set_seconds(self, seconds: float, limit_w: float) -> OpCost:
        """Return the same work in other seconds; the relative error of its joules stays."""
        if not self.time_s or not self.energy_j:
            return replace(self, time_s=seconds)
        lasting = self.lasting_j * seconds / self.time_s
        joules = min(lasting + self.energy_j - self.lasting_j, limit_w * seconds)
        error_j = self.error_j * joules / self.energy_j
        return replace(self, time_s=seconds, energy_j=joules, error_j=error_j, lasting_j=min(lasting, joules))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """The cost of each operator of an iteration, and how long the device waits for the host.

    `other` are kernels that were profiled and belong to no operator. The model's watts are those of a board that waits
    (`static_w`) and the most it sustains (`limit_w`), with their relative error.
    """

    costs: tuple[OpCost, ...]
    wait_s: float
    wait_j: float
    launches: int
    host_s: float
    static_w: float
    limit_w: float
    watts_error: float
    other: OpCost = OpCost()

    @property
    def time_s(self) -> float:
        """Return the seconds of the iteration."""
        return sum(c.time_s for c in self.costs) + self.other.time_s + self.wait_s

    @property
    def energy_j(self) -> float:
        """Return the joules of the iteration."""
        return sum(c.energy_j for c in self.costs) + self.other.energy_j + self.wait_j

    def set_time(self, measured_s: float) -> ProgramCost:
        """Take the rest of a measured time, beyond the kernels, as waits for the host, if that is plausible."""
        wait_s = self.wait_s + measured_s - self.time_s
        if wait_s <= 0 or measured_s > MAX_RATIO * self.time_s:
            return self
        return replace(self, wait_s=wait_s, wait_j=self.static_w * wait_s)

    def scale_joules(self, chosen: frozenset[int], factor: float, other_factor: float) -> ProgramCost:
        """Scale the joules of the chosen operators by one factor, those of the others by another."""
        factors = (factor if i in chosen else other_factor for i in range(len(self.costs)))
        return replace(self, costs=tuple(c.scale_joules(f) for c, f in zip(self.costs, factors, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """The work of eager Python besides dispatching: module calls and torch functions of one iteration."""

    modules: int = 0
    functions: int = 0


def count_host_work(fn: Callable[..., Any], inputs: Any, mode: Literal["infer", "train"], *, is_step: bool) -> HostWork:
    """Count eager Python's work besides dispatching, in a capture on meta tensors; a step has its own optimizer."""
    from ..graph.capture import capture

    graph = capture(fn, inputs, mode="infer" if is_step else mode)
    ops = [op for op in graph.ops if op.phase != "optimizer" or is_step]
    return HostWork(modules=sum(op.host_modules for op in ops), functions=sum(op.host_functions for op in ops))


def add_up(costs: Iterable[OpCost]) -> OpCost:
    """Return all costs added up."""
    return sum(costs, OpCost())


def estimate_program(
    ops: Sequence[EagerOp], device: Device, host: HostWork | None = None, *, replayed: bool = False
) -> ProgramCost:
    """Estimate an iteration: launched by eager Python (`host` given), by compiled code, or replayed."""
    from ..estimate.calibration import find
    from ..estimate.ops import OpModel
    from ..estimate.predict import estimate

    graph = make_graph("rewritten", ops)
    if host is not None and graph.ops:
        first = replace(graph.ops[0], host_modules=host.modules, host_functions=host.functions)
        graph = replace(graph, ops=(first, *graph.ops[1:]))
    solution = estimate(
        graph,
        device,
        OpModel(device),
        launch="graph" if replayed else "eager",
        host=_make_compiled_host() if host is None and not replayed else None,  # None: the shipped or calibrated host
        calibration=find(device.id),
    )
    result, power, costs = solution.solved, solution.power, {}
    for i, (op, kernel) in enumerate(zip(solution.ops, solution.kernels, strict=True)):
        whole = float(result.device_s[i] + result.wait_s[i])
        static = float(result.static_j[i]) * (float(result.device_s[i]) / whole if whole else 1.0)
        joules = static + float(result.compute_j[i]) + float(result.memory_j[i])
        error = joules * math.hypot(power.relative_error, 0.6 * kernel.relative_error)
        lasting = static + float(result.compute_j[i]) * _compute_holding_share(kernel, power, result.clock)
        costs[op.index] = OpCost(float(result.device_s[i]), joules, error, float(op.bytes_in + op.bytes_out), lasting)
    total_j = float((result.static_j + result.compute_j + result.memory_j).sum())
    return ProgramCost(
        costs=tuple(costs.get(i, OpCost()) for i in range(len(ops))),
        wait_s=float(result.wait_s.sum()),
        wait_j=total_j - sum(c.energy_j for c in costs.values()),
        launches=len(costs),
        host_s=result.host_s,
        static_w=power.static_w,
        limit_w=power.limit_w,
        watts_error=power.relative_error,
    )


def _compute_holding_share(kernel: KernelTime, power: PowerModel, clock: float) -> float:
    """Return the share of a kernel's compute joules that its SMs draw for holding work (see `estimate.iteration`)."""
    from ..estimate.power import DeviceWork

    work = DeviceWork.of(kernel)
    stretch = (work.clock_s / clock + work.fixed_s) / work.seconds if work.seconds else 1.0
    holding_j = power.active_w * work.busy_s * clock * stretch
    flops_j = power.flops_j(work)
    return holding_j / (holding_j + flops_j) if holding_j else 0.0


def set_kernel_times(program: ProgramCost, groups: Iterable[KernelGroup], iteration_s: float) -> ProgramCost:
    """Set the seconds that each group of kernels took, in an iteration of `iteration_s`.

    Within a group, the model divides them among the operators. Joules are the model's watts for those seconds and the
    joules that the model gives to the work itself, but no more than the board sustains. In the rest of the iteration,
    the device waited.
    """
    costs, other_s = list(program.costs), 0.0
    for group in groups:
        modelled_s = sum(costs[i].time_s for i in group.members)
        if not modelled_s:
            other_s += group.time_s
            continue
        for i in group.members:
            costs[i] = costs[i].set_seconds(costs[i].time_s * group.time_s / modelled_s, program.limit_w)
    other = OpCost(other_s, program.static_w * other_s, program.static_w * other_s * program.watts_error)
    wait_s = max(0.0, iteration_s - other_s - sum(c.time_s for c in costs))
    return replace(program, costs=tuple(costs), other=other, wait_s=wait_s, wait_j=program.static_w * wait_s)


def share_measured_joules(
    before: ProgramCost,
    after: ProgramCost,
    same: Iterable[tuple[int, int]],
    before_j: float | None,
    after_j: float | None,
) -> tuple[ProgramCost, ProgramCost]:
    """Give two programs the joules that were measured, shared out among their kernels.

    `same` are the places, before and after, of kernels that run in both programs. Such a kernel takes the same joules
    in both: the model's, times a common factor. The other kernels of each program have a factor of their own; half of
    its error is common to both programs (it is the same work, priced by the same model). The factors are as near to 1
    as the two totals allow. Waits are not shared out: they have `WAIT_SHARE` of the board's watts.
    """
    if not (before_j and after_j and before.energy_j and after.energy_j):
        return before, after
    pairs = list(same)
    places = frozenset(i for i, _ in pairs), frozenset(k for _, k in pairs)
    programs = [replace(program, wait_j=WAIT_SHARE * program.wait_j) for program in (before, after)]
    alike = [sum(p.costs[i].energy_j for i in chosen) for p, chosen in zip(programs, places, strict=True)]
    apart = [sum(c.energy_j for c in p.costs) - j for p, j in zip(programs, alike, strict=True)]
    lacking = [measured_j - p.energy_j for measured_j, p in zip((before_j, after_j), programs, strict=True)]
    factors = _fit_factors(alike, apart, lacking)
    if factors is None:  # no such factors fit the totals: scale each program by itself, waits included
        return _scale_all(before, before_j / before.energy_j), _scale_all(after, after_j / after.energy_j)
    common, own_before, own_after = factors
    return (
        programs[0].scale_joules(places[0], common, own_before),
        programs[1].scale_joules(places[1], common, own_after),
    )


def _fit_factors(
    alike: Sequence[float], apart: Sequence[float], lacking: Sequence[float]
) -> tuple[float, float, float] | None:
    """Return factors for common kernels and for each program's own, nearest to 1, that reach both totals.

    Returns None if there are none, or none within `FACTORS`.
    """
    rows = np.array([[alike[0], apart[0], 0.0], [alike[1], 0.0, apart[1]]])
    covariance = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, COMMON_ERROR], [0.0, COMMON_ERROR, 1.0]])
    system = rows @ covariance @ rows.T
    if np.linalg.det(system) <= 1e-9 * system[0, 0] * system[1, 1]:
        return None
    common, own_before, own_after = (1.0 + covariance @ rows.T @ np.linalg.solve(system, lacking)).tolist()
    low, high = FACTORS
    in_range = low <= min(common, own_before, own_after) and max(common, own_before, own_after) <= high
    return (common, own_before, own_after) if in_range else None


def _scale_all(program: ProgramCost, factor: float) -> ProgramCost:
    scaled = program.scale_joules(frozenset(), factor, factor)
    return replace(scaled, other=program.other.scale_joules(factor), wait_j=factor * program.wait_j)


def _make_compiled_host() -> HostModel:
    """Return a host for compiled code, which launches from C++ for `LAUNCH_S`, without Python and torch's dispatch."""
    from ..estimate.host import LAUNCH_S, HostModel

    default = HostModel.default()
    nothing = {n: 0.0 for n in HostModel.__slots__ if n.endswith("_s") and n not in ("extra_s", "iteration_s")}
    launch = dict.fromkeys(("kernel_s", "backward_s", "foreach_s"), LAUNCH_S)
    return replace(default, **{**nothing, **launch}, extra_s={}, provenance="7 us a launch (estimate/host.py)")


def count_flops(ops: Sequence[EagerOp]) -> float:
    """Return the FLOPs of operators."""
    return float(make_graph("work", ops).flops)
