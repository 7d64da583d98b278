"""What a whole fleet does now: every node's `tessera metrics` and the governor, asked at the same time and combined."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ..errors import TesseraError
from ..sums import sum_known
from .leases import BudgetStatus, JobStatus, find_excess_w
from .node_floor import PlacementNode
from .node_metrics import NodeReading, ask_endpoint
from .placement_file import FleetFile

# Endpoints that are asked at the same time: an answer takes milliseconds, a node that is down its whole timeout.
AT_ONCE = 32
EVENTS_KEPT = 200
# Kinds that mean that a feed was near or beyond its limit.
NEAR_TRIPS = ("breaker_near_trip", "over_current", "breaker_tripped")


class Governor(Protocol):
    """The method of a governor that is used here: `GovernorClient` of tessera.fleet.governor."""

    def describe(self) -> BudgetStatus: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNode(NodeReading):
    """A node now, with what its endpoint says; None: not known.

    `is_up` says whether its endpoint answers; None: it has no endpoint. `basis` is that of `power_w`: "measured" or
    "modelled" by its endpoint, "file" for a fixed figure of the fleet's file, "governor" for what its daemon told the
    governor. `leased_w` is the most that the governor lets it draw, `guaranteed_w` its share without the governor,
    `cap_w` what the limits of its boards together allow.
    """

    name: str
    rack: str
    aisle: str
    is_up: bool | None = None
    leased_w: float | None = None
    guaranteed_w: float | None = None
    jobs: tuple[str, ...] = ()

    @property
    def near_trips(self) -> int:
        """Return how often its feeds were near or beyond a limit, since its sampler started."""
        return sum(count for kind, count in self.events.items() if kind in NEAR_TRIPS)

    @property
    def over_lease_w(self) -> float:
        """Return what the node draws above its lease, if that is more than a sensor's error; else 0."""
        return find_excess_w(self.power_w, self.leased_w)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRack:
    """The nodes of a rack together. `known` of `nodes` answered; the watts are those of the nodes that answered."""

    name: str
    aisle: str
    nodes: int
    known: int
    power_w: float | None
    limit_w: float | None
    hottest_c: float | None
    crest_factor: float | None
    near_trips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent:
    """Events of one kind that a node reported between two polls."""

    epoch_s: float
    node: str
    kind: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetBudget:
    """What a governor says about its watts."""

    cap_w: float
    limit_w: float
    exposure_w: float
    measured_w: float | None
    throttled_w: float
    emergency: str = ""
    emergency_to_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """A fleet at one moment."""

    epoch_s: float
    nodes: tuple[FleetNode, ...]
    racks: tuple[FleetRack, ...]
    jobs: tuple[JobStatus, ...] = ()
    budget: FleetBudget | None = None
    events: tuple[FleetEvent, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def power_w(self) -> float | None:
        """Return the watts of all nodes whose power is known."""
        return sum_known(n.power_w for n in self.nodes)

    @property
    def unmeasured_w(self) -> float:
        """Return the part of the power that is modelled, or a fixed figure of the fleet's file."""
        return sum(n.power_w for n in self.nodes if n.power_w is not None and n.basis not in ("measured", "governor"))

    @property
    def asked_nodes(self) -> int:
        """Return the number of nodes with an endpoint."""
        return sum(n.is_up is not None for n in self.nodes)

    @property
    def answering_nodes(self) -> int:
        """Return the number of nodes whose endpoint answers."""
        return sum(n.is_up is True for n in self.nodes)

    @property
    def known_nodes(self) -> int:
        """Return the number of nodes whose power is known."""
        return sum(n.power_w is not None for n in self.nodes)


class FleetPoller:
    """Asks all nodes and the governor. `ask` is replaced in tests and simulations."""

    def __init__(
        self,
        fleet: FleetFile,
        governor: Governor | None = None,
        *,
        ask: Callable[[str], NodeReading] = ask_endpoint,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.fleet = fleet
        self._governor, self._ask, self._clock_s = governor, ask, clock_s
        self._counted: dict[str, Mapping[str, int]] = {}
        self._events: deque[FleetEvent] = deque(maxlen=EVENTS_KEPT)

    def poll(self) -> FleetStatus:
        """Ask all nodes and the governor once."""
        metrics = self.fleet.metrics
        with ThreadPoolExecutor(max_workers=max(min(AT_ONCE, len(metrics)), 1)) as pool:
            answers = dict(zip(metrics, pool.map(self._ask, metrics.values()), strict=True))
        budget, problems = self._ask_governor()
        leases = {n.node: n for n in budget.nodes} if budget is not None else {}
        now_s = self._clock_s()
        nodes = []
        for node in self.fleet.nodes:
            reading = answers.get(node.name) or _read_file(node)
            lease = leases.get(node.name)
            self._note_events(node.name, reading, now_s)
            if reading.power_w is None and lease is not None:
                reading = dataclasses.replace(reading, power_w=lease.measured_w, basis="governor")
            nodes.append(
                FleetNode(
                    name=node.name,
                    rack=node.rack,
                    aisle=node.aisle,
                    is_up=not reading.problem if node.name in answers else None,
                    leased_w=lease.exposure_w if lease else None,
                    guaranteed_w=lease.guaranteed_w if lease else None,
                    jobs=lease.jobs if lease else (),
                    **{f.name: getattr(reading, f.name) for f in dataclasses.fields(reading)},
                )
            )
        return FleetStatus(
            epoch_s=now_s,
            nodes=tuple(nodes),
            racks=_sum_racks(nodes, self.fleet.rack_limits_w),
            jobs=budget.jobs if budget is not None else (),
            budget=_describe_budget(budget),
            events=tuple(self._events),
            problems=tuple(problems),
        )

    def _ask_governor(self) -> tuple[BudgetStatus | None, list[str]]:
        if self._governor is None:
            return None, []
        try:
            return self._governor.describe(), []
        except TesseraError as error:  # the nodes are worth showing without the governor
            return None, [error.what + (f": {error.why}" if error.why else "")]

    def _note_events(self, node: str, reading: NodeReading, now_s: float) -> None:
        """Note what was counted since the last poll; a count that went back belongs to a restarted sampler."""
        if reading.problem:
            return
        before = self._counted.get(node)
        self._counted[node] = reading.events
        for kind, count in reading.events.items():
            old = 0 if before is None else before.get(kind, 0)
            new = count - old if count >= old else count
            if before is not None and new > 0:
                self._events.appendleft(FleetEvent(epoch_s=now_s, node=node, kind=kind, count=new))


def _read_file(node: PlacementNode) -> NodeReading:
    """Return what the fleet's file says about a node without an endpoint."""
    known = node.power_w is not None or node.temperature_c is not None
    problem = "" if known else "it has no endpoint: `metrics:` in the fleet's file"
    return NodeReading(
        power_w=node.power_w, basis="file", temperature_c=node.temperature_c, cap_w=node.max_w, problem=problem
    )


def _describe_budget(budget: BudgetStatus | None) -> FleetBudget | None:
    if budget is None:
        return None
    return FleetBudget(
        cap_w=budget.cap_w,
        limit_w=budget.limit_w,
        exposure_w=budget.exposure_w,
        measured_w=budget.measured_w,
        throttled_w=budget.throttled_w,
        emergency=budget.emergency.reason if budget.emergency is not None else "",
        emergency_to_w=None if budget.emergency is None else budget.emergency.to_w,
    )


def _sum_racks(nodes: Sequence[FleetNode], limits_w: Mapping[str, float]) -> tuple[FleetRack, ...]:
    by_rack: dict[str, list[FleetNode]] = {}
    for node in nodes:
        by_rack.setdefault(node.rack, []).append(node)
    return tuple(
        FleetRack(
            name=name,
            aisle=own[0].aisle,
            nodes=len(own),
            known=sum(n.power_w is not None for n in own),
            power_w=sum_known(n.power_w for n in own),
            limit_w=limits_w.get(name),
            hottest_c=max((n.temperature_c for n in own if n.temperature_c is not None), default=None),
            crest_factor=max((n.crest_factor for n in own if n.crest_factor is not None), default=None),
            near_trips=sum(n.near_trips for n in own),
        )
        for name, own in by_rack.items()
    )
