"""What pieces cost on a chip, by the model of `predict`: each one's seconds, joules and bytes, and the host's part.

Where their kernels were seen, `timed` puts the seconds in that they took, and leaves the model the joules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .pieces import Piece, graph_of
from .seen import Group

if TYPE_CHECKING:
    from ..device import Device
    from ..estimate.host import HostModel
    from ..estimate.kernel_time import KernelTime
    from ..estimate.power import PowerModel


# Hosts of one kind were found at 0.83 to 1.5 times the shipped constants (estimate/host.py): beyond twice, either way,
# it is not the host.
PACES = (0.5, 2.0)
# What a wait adds, of what the board draws while it waits: 105 to 109 W of 127, for ResNet-50's convolutions with 0, 6
# and 30 us behind each (`gaps` of benchmarks/device/trace_lines.py). Kernels that follow closely are hotter, and leak.
WAITS = 0.85
# Of kernels' joules over the model's, which is off by 15% in the mean (benchmarks/README.md): not by so much.
FACTORS = (0.4, 2.5)
# How much of the model's error is common to an operator's kernel and to the one that takes its place: assumed, between
# the same kernel (1) and any other (0).
COMMON = 0.5
_HALVINGS = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds on the device, joules with their 90% half-width, and bytes read and written, of some operators.

    `lasting_j` are those of the joules that go with the seconds (the board, and SMs that hold work); the others go with
    the work, operations and bytes.
    """

    seconds: float = 0.0
    joules: float = 0.0
    error_j: float = 0.0
    nbytes: float = 0.0
    lasting_j: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds, self.joules + other.joules, math.hypot(self.error_j, other.error_j),
            self.nbytes + other.nbytes, self.lasting_j + other.lasting_j,
        )  # fmt: skip

    def less(self, other: Cost) -> Cost:
        """What is saved by going from this to the other; the errors of both stay."""
        return Cost(
            self.seconds - other.seconds, self.joules - other.joules, math.hypot(self.error_j, other.error_j),
            self.nbytes - other.nbytes, self.lasting_j - other.lasting_j,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """A program solved: the cost of each piece, and how long the device waits for the host.

    `other` are kernels that were seen and are no piece's. The model's watts: the board that waits (`static_w`), the
    most it sustains (`limit_w`), and how far they may be off (relative).
    """

    costs: tuple[Cost, ...]
    wait_s: float
    wait_j: float
    launches: int
    host_s: float
    static_w: float
    limit_w: float
    watts_error: float
    other: Cost = Cost()

    @property
    def seconds(self) -> float:
        """Seconds of the iteration."""
        return sum(c.seconds for c in self.costs) + self.other.seconds + self.wait_s

    @property
    def joules(self) -> float:
        """Joules of the iteration."""
        return sum(c.joules for c in self.costs) + self.other.joules + self.wait_j


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What eager Python does beside dispatching: module calls and torch functions of one iteration.

    `pace` is how many times as long as the shipped constants the host takes.
    """

    modules: int = 0
    functions: int = 0
    pace: float = 1.0


def total(costs: Iterable[Cost]) -> Cost:
    """All of them together."""
    found = Cost()
    for cost in costs:
        found = found + cost
    return found


def solved(pieces: Sequence[Piece], device: Device, host: Host | None = None, *, replayed: bool = False) -> Side:
    """Pieces as an iteration: launched by eager Python (`host` given), by compiled code, or replayed."""
    from ..estimate.ops import OpModel
    from ..estimate.overlay import find
    from ..estimate.predict import estimate

    graph = graph_of("rewritten", pieces)
    if host is not None and graph.ops:
        first = replace(graph.ops[0], host_modules=host.modules, host_functions=host.functions)
        graph = replace(graph, ops=(first, *graph.ops[1:]))
    found = estimate(
        graph, device, OpModel(device), launch="graph" if replayed else "eager",
        host=_host_of(device, host) if not replayed else None, calibration=find(device.id),
    )  # fmt: skip
    result, costs = found.solved, {}
    for i, (op, kernel) in enumerate(zip(found.ops, found.kernels, strict=True)):
        whole = float(result.device_s[i] + result.wait_s[i])
        static = float(result.static_j[i]) * (float(result.device_s[i]) / whole if whole else 1.0)
        joules = static + float(result.compute_j[i]) + float(result.memory_j[i])
        error = joules * math.hypot(found.power.relative_error, 0.6 * kernel.relative_error)
        lasting = static + float(result.compute_j[i]) * _occupied(kernel, found.power, result.clock)
        nbytes = float(op.bytes_in + op.bytes_out)
        costs[op.index] = Cost(float(result.device_s[i]), joules, error, nbytes, lasting)
    waits = float(result.wait_s.sum())
    wait_j = float((result.static_j + result.compute_j + result.memory_j).sum()) - sum(c.joules for c in costs.values())
    power = found.power
    return Side(
        tuple(costs.get(i, Cost()) for i in range(len(pieces))), waits, wait_j, len(costs), result.host_s,
        power.static_w, power.limit_w, power.relative_error,
    )  # fmt: skip


def _occupied(kernel: KernelTime, power: PowerModel, clock: float) -> float:
    """The part of a kernel's compute joules that its SMs draw for holding work, as `estimate.timeline` adds them up."""
    from ..estimate.power import Work

    work = Work.of(kernel)
    stretch = (work.clock_s / clock + work.fixed_s) / work.seconds if work.seconds else 1.0
    holding_j = power.active_w * work.busy_s * clock * stretch
    dearest = max(power.j_per_flop.values(), default=0.0)
    flops_j = sum(power.j_per_flop.get(unit, dearest) * n for unit, n in work.flops.items())
    return holding_j / (holding_j + flops_j) if holding_j else 0.0


def timed(side: Side, groups: Iterable[Group], iteration_s: float) -> Side:
    """A program with the seconds that each group of its kernels was seen to take, of an iteration of `iteration_s`.

    Within a group the model says whose they are. Joules are the model's watts for those seconds and what it says the
    work itself takes, but no more than the board sustains. What the device was not busy, it waited.
    """
    costs, other_s = list(side.costs), 0.0
    for group in groups:
        modelled_s = sum(costs[i].seconds for i in group.members)
        if not modelled_s:
            other_s += group.seconds
            continue
        for i in group.members:
            costs[i] = taking(costs[i], costs[i].seconds * group.seconds / modelled_s, side.limit_w)
    other = Cost(other_s, side.static_w * other_s, side.static_w * other_s * side.watts_error)
    wait_s = max(0.0, iteration_s - other_s - sum(c.seconds for c in costs))
    return replace(side, costs=tuple(costs), other=other, wait_s=wait_s, wait_j=side.static_w * wait_s)


def sharing(
    before: Side, after: Side, same: Iterable[tuple[int, int]], before_j: float | None, after_j: float | None
) -> tuple[Side, Side]:
    """Two programs with the joules that were measured, shared out among their kernels.

    `same` are the places, before and after, of kernels that both run, and such a kernel takes the same joules in both:
    the model's with one factor on them. What else each program runs has another factor, half of it common to both (it
    is the same work, priced by the same model), and the factors are as near to 1 as the two totals allow. Waits are
    not shared out: they have `WAITS` of the board's watts.
    """
    if not (before_j and after_j and before.joules and after.joules):
        return before, after
    pairs = list(same)
    places = frozenset(i for i, _ in pairs), frozenset(k for _, k in pairs)
    sides = tuple(replace(side, wait_j=WAITS * side.wait_j) for side in (before, after))
    alike = [sum(side.costs[i].joules for i in mine) for side, mine in zip(sides, places, strict=True)]
    apart = [sum(c.joules for c in side.costs) - j for side, j in zip(sides, alike, strict=True)]
    lacking = [total_j - side.joules for total_j, side in zip((before_j, after_j), sides, strict=True)]
    found = _nearest_to_one(alike, apart, lacking)
    if found is None:  # the totals say nothing that these factors could: each program by itself, waits and all
        return _scaled(before, before_j / before.joules), _scaled(after, after_j / after.joules)
    one, own, later = found
    return _factored(sides[0], places[0], one, own), _factored(sides[1], places[1], one, later)


def _nearest_to_one(
    alike: Sequence[float], apart: Sequence[float], lacking: Sequence[float]
) -> tuple[float, float, float] | None:
    """Factors for what is alike and for each program's own, least squares from 1, with which nothing is lacking.

    None where there are none, or none within `FACTORS`.
    """
    a, b = (alike[i] ** 2 + apart[i] ** 2 for i in (0, 1))
    both = alike[0] * alike[1] + COMMON * apart[0] * apart[1]
    size = a * b - both**2
    if size <= 1e-9 * a * b:
        return None
    push = ((b * lacking[0] - both * lacking[1]) / size, (a * lacking[1] - both * lacking[0]) / size)
    moved = [apart[i] * push[i] for i in (0, 1)]
    found = (
        1.0 + alike[0] * push[0] + alike[1] * push[1],
        1.0 + moved[0] + COMMON * moved[1],
        1.0 + moved[1] + COMMON * moved[0],
    )
    low, high = FACTORS
    return found if all(low <= factor <= high for factor in found) else None


def _times(cost: Cost, factor: float) -> Cost:
    return replace(cost, joules=factor * cost.joules, error_j=factor * cost.error_j, lasting_j=factor * cost.lasting_j)


def _factored(side: Side, places: frozenset[int], there: float, elsewhere: float) -> Side:
    """A program whose kernels have other joules, by one factor in some places and by another in the rest."""
    costs = tuple(_times(cost, there if i in places else elsewhere) for i, cost in enumerate(side.costs))
    return replace(side, costs=costs)


def _scaled(side: Side, factor: float) -> Side:
    """A program with other joules throughout."""
    every = _factored(side, frozenset(), factor, factor)
    return replace(every, other=_times(side.other, factor), wait_j=factor * side.wait_j)


def taking(cost: Cost, seconds: float, limit_w: float) -> Cost:
    """The same work in other seconds; the relative error of its joules stays."""
    if not cost.seconds or not cost.joules:
        return replace(cost, seconds=seconds)
    lasting = cost.lasting_j * seconds / cost.seconds
    joules = min(lasting + cost.joules - cost.lasting_j, limit_w * seconds)
    return replace(
        cost,
        seconds=seconds,
        joules=joules,
        error_j=cost.error_j * joules / cost.joules,
        lasting_j=min(lasting, joules),
    )


def paced(pieces: Sequence[Piece], device: Device, host: Host, measured_s: float) -> Host:
    """The host at the pace that makes the program take what it was measured to take, within `PACES`.

    A device that is itself slower than that says nothing of its host, and one that never waits for it hardly anything.
    """

    def solved_s(pace: float) -> float:
        return solved(pieces, device, replace(host, pace=pace)).seconds

    low, high = PACES
    if not solved_s(low) < measured_s <= solved_s(high):
        return host
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if solved_s(middle) >= measured_s else (middle, high)
    return replace(host, pace=high)


def _host_of(device: Device, host: Host | None) -> HostModel | None:
    """The host that launches: None for the one that is shipped or calibrated, as `estimate` finds it by itself."""
    if host is None:
        return _compiled_host()
    if host.pace == 1.0:
        return None
    from ..estimate import overlay
    from ..estimate.predict import host_of

    usual = overlay.host(host_of(device), overlay.find(device.id))
    return usual.scaled(host.pace, "by the measured time of the eager program", usual.relative_error)


def _compiled_host() -> HostModel:
    """Compiled code launches without Python's modules and torch's dispatch: a launch from C++ costs `LAUNCH_S`."""
    from ..estimate.host import LAUNCH_S, HostModel

    default = HostModel.default()
    nothing = {n: 0.0 for n in HostModel.__slots__ if n.endswith("_s") and n not in ("extra_s", "iteration_s")}
    launch = dict.fromkeys(("kernel_s", "backward_s", "foreach_s"), LAUNCH_S)
    return replace(default, **{**nothing, **launch}, extra_s={}, provenance="7 us a launch (estimate/host.py)")


def work_of(pieces: Sequence[Piece]) -> float:
    """FLOPs of pieces."""
    return float(graph_of("work", pieces).flops)
