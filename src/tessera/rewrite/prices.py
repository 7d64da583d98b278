"""What pieces cost on a chip, by the model of `predict`: each one's seconds, joules and bytes, and the host's part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .pieces import Piece, graph_of

if TYPE_CHECKING:
    from ..device import Device
    from ..estimate.host import HostModel


# Hosts of one kind were found at 0.83 to 1.5 times the shipped constants (estimate/host.py): beyond twice, either way,
# it is not the host.
PACES = (0.5, 2.0)
_HALVINGS = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds on the device, joules with their 90% half-width, and bytes read and written, of some operators."""

    seconds: float = 0.0
    joules: float = 0.0
    error_j: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        error = math.hypot(self.error_j, other.error_j)
        return Cost(self.seconds + other.seconds, self.joules + other.joules, error, self.nbytes + other.nbytes)

    def less(self, other: Cost) -> Cost:
        """What is saved by going from this to the other; the errors of both stay."""
        error = math.hypot(self.error_j, other.error_j)
        return Cost(self.seconds - other.seconds, self.joules - other.joules, error, self.nbytes - other.nbytes)


@dataclass(frozen=True, slots=True)
class Side:
    """A program solved: the cost of each piece, and how long the device waits for the host."""

    costs: tuple[Cost, ...]
    wait_s: float
    wait_j: float
    launches: int
    host_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the iteration."""
        return sum(c.seconds for c in self.costs) + self.wait_s

    @property
    def joules(self) -> float:
        """Joules of the iteration."""
        return sum(c.joules for c in self.costs) + self.wait_j


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
        costs[op.index] = Cost(float(result.device_s[i]), joules, error, float(op.bytes_in + op.bytes_out))
    waits = float(result.wait_s.sum())
    wait_j = float((result.static_j + result.compute_j + result.memory_j).sum()) - sum(c.joules for c in costs.values())
    return Side(tuple(costs.get(i, Cost()) for i in range(len(pieces))), waits, wait_j, len(costs), result.host_s)


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
