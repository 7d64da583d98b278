"""`Facility`: GPUs, nodes, racks, rows and the feed, as a YAML file describes them.

::

    gpus:  {chip: h200}                     or {limit: 700W, idle: 77W}
    nodes: {gpus: 8, host: 1450W, supplies: {count: 6, needed: 4, rating: 3300W, grade: titanium}}
    racks: {nodes: 4, breaker: {rating_a: 80, voltage: 415, curve: C}, breakers: {row1/rack3: {rating_a: 50}}}
    rows:  {count: 2, racks: 16, breaker: {rating_a: 1600}, cooling: 800kW, supply: 22C, recirculation: 10%}
    feed:  {ups_efficiency: 95%, storage: {power: 300kW, energy: 3MJ, smoothing: 10s}}

Everything except the sizes has a default, with its source beside it. Rows, racks and nodes are numbered from 1:
row1/rack3/node2.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from ..hardware import lookup
from ..units import parse_duration, parse_energy, parse_fraction, parse_power, parse_temperature, with_unit
from .breakers import Breaker
from .heat import AisleHeat, GpuHeat
from .supplies import Battery, Feed, NodeSupply
from .yaml_tables import Keys, build, keep, read_number, read_section, read_text, read_whole

STEP_S, DECIDE_S = 0.005, 0.1
"""Length of a step, and time between two decisions of governors, shapers and heat."""
MOST_GPUS = 4_000_000
# The H200's values, as fitted by estimate/calibration: relative to the voltage at the boost clock.
_VOLTAGE_SLOPE, _VOLTAGE_FLOOR = 0.446315, 0.728593
_PLACE = re.compile(r"row(\d+)(?:/rack(\d+)(?:/node(\d+))?)?")


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """The GPUs of a facility: their idle watts, their power limit, and how warm they get.

    `smooth_up_w_per_s`, `smooth_down_w_per_s`, `smooth_floor_w`: the board's own power smoothing, as GB200 has it.
    """

    name: str = "h200"
    idle_w: float = 77.0
    limit_w: float = 700.0
    heat: GpuHeat = field(default_factory=GpuHeat)
    voltage_slope: float = _VOLTAGE_SLOPE
    voltage_floor: float = _VOLTAGE_FLOOR
    smooth_up_w_per_s: float | None = None
    smooth_down_w_per_s: float | None = None
    smooth_floor_w: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.idle_w < self.limit_w < math.inf:
            raise ArgumentError(f"a GPU that idles at {self.idle_w:g} W cannot have a limit of {self.limit_w:g} W")

    def share_cap(self, node_w: float, *, host_w: float, gpus: int) -> float:
        """Return what each of a node's GPUs may draw under a cap on the node: GPUs cannot save the host's watts."""
        return min(self.limit_w, max(self.idle_w, (node_w - host_w) / gpus))

    def tabulate_speed(self, steps: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return shares of the dynamic power from 0 to 1, and the share of the clock for each: power is f V(f)^2."""
        clock = np.linspace(0.0, 1.0, 1001)
        voltage = np.maximum(self.voltage_floor, 1.0 - self.voltage_slope * (1.0 - clock))
        gain = np.linspace(0.0, 1.0, steps + 1)
        return gain.astype(np.float32), np.interp(gain, clock * voltage**2, clock).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """The nodes: how many GPUs, and what the host draws besides (dist/clusters: 1450 W of an H100 node at the wall)."""

    gpus: int = 8
    host_w: float = 1450.0
    supply: NodeSupply = field(default_factory=NodeSupply)

    def __post_init__(self) -> None:
        if self.gpus < 1 or not 0.0 <= self.host_w < math.inf:
            raise ArgumentError("a node has at least one GPU, and a host that draws 0 W or more")

    def plug_w(self, gpus_w: float) -> float:
        """Return the watts at the plug of a node whose GPUs together draw `gpus_w`."""
        return float(self.supply.draw_w(np.array([gpus_w + self.host_w]))[0])


@dataclass(frozen=True, kw_only=True)
class Facility:
    """Equal rows of equal racks of equal nodes, and the feed. `own_breakers` are those of racks that differ."""

    name: str = "facility"
    rows: int = 1
    row_racks: int = 8
    rack_nodes: int = 4
    gpu: GpuKind = field(default_factory=GpuKind)
    node: NodeKind = field(default_factory=NodeKind)
    rack_breaker: Breaker | None = None
    own_breakers: Mapping[int, Breaker] = field(default_factory=dict)
    row_breaker: Breaker | None = None
    aisle: AisleHeat = field(default_factory=AisleHeat)
    feed: Feed = field(default_factory=Feed)
    step_s: float = STEP_S
    decide_s: float = DECIDE_S

    def __post_init__(self) -> None:
        if min(self.rows, self.row_racks, self.rack_nodes) < 1 or self.gpus > MOST_GPUS:
            raise ArgumentError(f"a facility has at least one row, rack and node, and at most {MOST_GPUS:,} GPUs")
        if not 0.0 < self.step_s <= self.decide_s:
            raise ArgumentError("a step is longer than 0 s, and not longer than the time between decisions")

    @property
    def racks(self) -> int:
        """Return the number of racks."""
        return self.rows * self.row_racks

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return self.racks * self.rack_nodes

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.nodes * self.node.gpus

    @cached_property
    def node_limit_w(self) -> float:
        """Return the watts at the plug of a node with all GPUs at their limit: its nameplate."""
        return self.node.plug_w(self.node.gpus * self.gpu.limit_w)

    def find_breaker(self, rack: int) -> Breaker | None:
        """Return the breaker of a rack, from its number (0 first)."""
        return self.own_breakers.get(rack, self.rack_breaker)

    def rack_full_w(self, rack: int) -> float:
        """Return the watts that a rack is built for: its breaker's rating, or else the nameplate of its nodes."""
        breaker = self.find_breaker(rack)
        return breaker.rating_w if breaker else self.rack_nodes * self.node_limit_w

    def name_row(self, row: int) -> str:
        """Return the name of a row, from its number (0 first)."""
        return f"row{row + 1}"

    def name_rack(self, rack: int) -> str:
        """Return the name of a rack."""
        return f"{self.name_row(rack // self.row_racks)}/rack{rack % self.row_racks + 1}"

    def name_node(self, node: int) -> str:
        """Return the name of a node."""
        return f"{self.name_rack(node // self.rack_nodes)}/node{node % self.rack_nodes + 1}"

    def find_place(self, name: str) -> tuple[str, int]:
        """Return the level ("row", "rack", "node") and number of a name such as row1/rack3/node2."""
        match = _PLACE.fullmatch(name.strip())
        numbers = [int(n) - 1 for n in match.groups() if n is not None] if match else []
        sizes = (self.rows, self.row_racks, self.rack_nodes)
        if not numbers or any(not 0 <= n < size for n, size in zip(numbers, sizes, strict=False)):
            raise ArgumentError(
                f"there is no place {name!r} in this facility",
                why=f"it has {self.rows} rows of {self.row_racks} racks of {self.rack_nodes} nodes",
                fix="row1, row1/rack3 or row1/rack3/node2",
            )
        number = numbers[0]
        for n, size in zip(numbers[1:], sizes[1:], strict=False):
            number = number * size + n
        return ("row", "rack", "node")[len(numbers) - 1], number

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**dataclasses.asdict(self), "gpus": self.gpus, "racks": self.racks, "nodes": self.nodes}


# -- reading ------------------------------------------------------------------------------------------------------

_power, _duration, _energy, _temperature = map(
    with_unit, (parse_power, parse_duration, parse_energy, parse_temperature)
)
_BREAKER: Keys = {
    "rating_a": ("rating_a", read_number),
    "voltage": ("voltage_v", read_number),
    "phases": ("phases", read_whole),
    "power_factor": ("power_factor", parse_fraction),
    "curve": ("curve", read_text),
    "standard": ("standard", read_text),
}
_SUPPLY: Keys = {
    "count": ("count", read_whole),
    "needed": ("needed", read_whole),
    "rating": ("rating_w", _power),
    "grade": ("grade", read_text),
    "limit_at": ("limit_at", parse_fraction),
    "limit_time": ("limit_s", _duration),
    "off_at": ("off_at", parse_fraction),
}
_STORAGE: Keys = {
    "power": ("power_w", _power),
    "energy": ("energy_j", _energy),
    "smoothing": ("smoothing_s", _duration),
    "efficiency": ("efficiency", parse_fraction),
}
_FEED: Keys = {
    "ups_efficiency": ("ups_efficiency", parse_fraction),
    "storage": ("storage", lambda table: build(Battery, table, _STORAGE, "feed.storage")),
}
_NODES: Keys = {
    "gpus": ("gpus", read_whole),
    "host": ("host_w", _power),
    "supplies": ("supply", lambda table: build(NodeSupply, table, _SUPPLY, "nodes.supplies")),
}
_RACKS: Keys = {
    "nodes": ("rack_nodes", read_whole),
    "breaker": ("rack_breaker", lambda table: build(Breaker, table, _BREAKER, "racks.breaker")),
    "breakers": ("breakers", keep),
}
_ROWS: Keys = {
    "count": ("rows", read_whole),
    "racks": ("row_racks", read_whole),
    "breaker": ("row_breaker", lambda table: build(Breaker, table, _BREAKER, "rows.breaker")),
}
_AISLE: Keys = {
    "cooling": ("cooling_w", _power),
    "supply": ("supply_c", _temperature),
    "recirculation": ("recirculation", parse_fraction),
    "rise": ("rise_c", _temperature),
    "heat_capacity_kj_per_c": ("heat_capacity_j_per_c", lambda value: 1e3 * read_number(value)),
}
_GPU: Keys = {
    "chip": ("name", read_text),
    "idle": ("idle_w", _power),
    "limit": ("limit_w", _power),
    "smooth_floor": ("smooth_floor_w", _power),
    "smooth_up_w_per_s": ("smooth_up_w_per_s", read_number),
    "smooth_down_w_per_s": ("smooth_down_w_per_s", read_number),
    "heat": ("heat", lambda table: build(GpuHeat, table, _HEAT, "gpus.heat")),
}
_HEAT: Keys = {
    "resistance_c_per_w": ("resistance_c_per_w", read_number),
    "time_constant": ("tau_s", _duration),
    "slow_at": ("slow_at_c", _temperature),
    "slow_per_s": ("slow_per_s", read_number),
    "lowest_clock": ("lowest_clock", parse_fraction),
}
SECTIONS = ("name", "gpus", "nodes", "racks", "rows", "feed")
"""The keys of a file that describe the facility."""


def read_gpu(table: Any) -> GpuKind:
    """Return the GPUs: a chip of the catalogue, given watts, or both."""
    values = read_section(table, _GPU, "gpus")
    if "name" in values:
        device = lookup(values["name"])
        values["name"] = device.id
        for name, figure in (("limit_w", device.tdp_w), ("idle_w", device.idle_w)):
            if name not in values:
                if figure is None:
                    key = name.removesuffix("_w")
                    raise ArgumentError(f"gpus.{key} of {device.id} is not known", fix=f"give it: {key}: 90W")
                values[name] = figure.value
    elif "limit_w" not in values or "idle_w" not in values:
        raise ArgumentError("gpus needs a chip, or its watts", fix="{chip: h200} or {limit: 700W, idle: 77W}")
    values.setdefault("name", "GPU")
    return GpuKind(**values)


def read_facility(table: Mapping[str, Any]) -> Facility:
    """Return a facility from the tables of a file."""
    values: dict[str, Any] = {"name": read_text(table.get("name", "facility"))}
    if "gpus" in table:
        values["gpu"] = read_gpu(table["gpus"])
    if "nodes" in table:
        values["node"] = build(NodeKind, table["nodes"], _NODES, "nodes")
    own: Any = {}
    if "racks" in table:
        values |= read_section(table["racks"], _RACKS, "racks")
        own = values.pop("breakers", {})
    if "rows" in table:
        rows = read_section(table["rows"], {**_ROWS, **_AISLE}, "rows")
        air = {name: rows.pop(name) for name, _ in _AISLE.values() if name in rows}
        values |= rows
        values["aisle"] = AisleHeat(**air)
    if "feed" in table:
        values["feed"] = build(Feed, table["feed"], _FEED, "feed")
    facility = Facility(**values)
    return dataclasses.replace(facility, own_breakers=_read_own_breakers(own, facility)) if own else facility


def _read_own_breakers(table: Any, facility: Facility) -> dict[int, Breaker]:
    """Return the breakers of single racks, or of all racks of a row; missing keys are as in the other breakers."""
    if not isinstance(table, Mapping):
        raise ArgumentError("racks.breakers is not a table of places", fix="breakers: {row1/rack3: {rating_a: 50}}")
    found: dict[int, Breaker] = {}
    for place, settings in table.items():
        level, number = facility.find_place(str(place))
        if level == "node":
            raise ArgumentError(f"racks.breakers: {place} is a node", fix="row1/rack3, or row1 for all of its racks")
        values = read_section(settings, _BREAKER, f"racks.breakers.{place}")
        if facility.rack_breaker is None and "rating_a" not in values:
            raise ArgumentError(f"racks.breakers.{place} has no rating_a", fix=f"{place}: {{rating_a: 50}}")
        breaker = dataclasses.replace(facility.rack_breaker or Breaker(rating_a=values["rating_a"]), **values)
        size = facility.row_racks if level == "row" else 1
        found |= {number * size + i: breaker for i in range(size)}
    return found
