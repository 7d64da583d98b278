"""The nodes and jobs of a YAML file, for the commands that place jobs and watch a fleet.

::

    defaults: {gpus: 8, idle: 1.9kW, max: 10.2kW, asleep: 150W, c_per_kw: 4.5}
    racks: {r1: 40kW}
    nodes:
      - {name: n1, aisle: aisle1, rack: r1, temperature: 61C, power: 4.1kW}
      - {name: n2, aisle: aisle1, rack: r1, metrics: "http://n2:9400/metrics"}     # asked now
    jobs:
      - {name: train, gpus: 8, power: 5.2kW, duration: 2h}
      - {name: old, gpus: 4, power: 2kW, runs_on: {n1: 4}, can_migrate: true}

`defaults` apply to each node that does not state its own. Every quantity has its unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, is_number
from ..read_limits import quote_value
from ..units import parse_duration, parse_power, parse_temperature, with_unit
from .node_floor import NodeShare, PlacementJob, PlacementNode
from .yaml_tables import (
    Keys,
    check_keys,
    check_names,
    list_tables,
    load_yaml,
    prefix_error,
    read_bool,
    read_count,
    read_section,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFile:
    """The nodes and jobs of a file; `metrics` has the endpoint of each node that names one.

    `rack_limits_w` are the watts that the feeds of racks can carry, if the file states them.
    """

    nodes: tuple[PlacementNode, ...]
    jobs: tuple[PlacementJob, ...] = ()
    metrics: Mapping[str, str] = field(default_factory=dict)
    rack_limits_w: Mapping[str, float] = field(default_factory=dict)


def _read_name(value: Any) -> str:
    if not isinstance(value, (str, int)) or isinstance(value, bool) or not str(value).strip():
        raise ArgumentError(f"{quote_value(value)} is not a name")
    return str(value).strip()


def _read_rate(value: Any) -> float:
    """Return kelvin per kilowatt as degrees per watt."""
    if not (is_number(value) and 0 < value < 1e6):
        raise ArgumentError(f"{quote_value(value)} is not a positive number (degrees per kilowatt)")
    return value / 1000.0


def _read_on(value: Any) -> tuple[NodeShare, ...]:
    if not isinstance(value, dict):
        raise ArgumentError(f"{quote_value(value)} is not GPUs for each node", fix="runs_on: {n1: 8}")
    return tuple(NodeShare(node=_read_name(name), gpus=read_count(gpus)) for name, gpus in value.items())


_NODE: Keys = {
    "name": ("name", _read_name),
    "gpus": ("gpus", read_count),
    "aisle": ("aisle", _read_name),
    "rack": ("rack", _read_name),
    "temperature": ("temperature_c", with_unit(parse_temperature)),
    "power": ("power_w", with_unit(parse_power)),
    "idle": ("idle_w", with_unit(parse_power)),
    "asleep": ("asleep_w", with_unit(parse_power)),
    "max": ("max_w", with_unit(parse_power)),
    "fans": ("fan_max_w", with_unit(parse_power)),
    "c_per_kw": ("c_per_w", _read_rate),
    "available": ("is_available", read_bool),
    "metrics": ("metrics", _read_name),
}
_JOB: Keys = {
    "name": ("name", _read_name),
    "gpus": ("gpus", read_count),
    "power": ("power_w", with_unit(parse_power)),
    "duration": ("duration_s", with_unit(parse_duration)),
    "priority": ("priority", read_count),
    "moderate": ("moderate", read_bool),
    "can_migrate": ("can_migrate", read_bool),
    "runs_on": ("on", _read_on),  # not `on`, which YAML reads as true
}
_KEYS = ("defaults", "racks", "nodes", "jobs")


def load_fleet(path: str | Path) -> FleetFile:
    """Return the nodes and jobs of a file, without asking endpoints for temperatures."""
    table = load_yaml(Path(path), _EXAMPLE)
    try:
        return _parse_fleet(table)
    except ArgumentError as error:
        raise prefix_error(path, error) from None


_EXAMPLE = "nodes: [{name: n1, gpus: 8, idle: 1.9kW, temperature: 61C}]   (docs/howto/place-jobs.md)"


def _parse_fleet(table: Any) -> FleetFile:
    if not isinstance(table, dict) or not table.get("nodes"):
        raise ArgumentError("it has no nodes", fix=_EXAMPLE)
    check_keys(table, _KEYS, "the file")
    defaults = read_section(table.get("defaults") or {}, _NODE, "defaults")
    metrics: dict[str, str] = {}
    nodes = []
    for row in _read_rows(table, "nodes", _NODE, ("name", "gpus", "idle_w"), "{gpus: 8, idle: 1.9kW}", defaults):
        endpoint = row.pop("metrics", None)
        if endpoint:
            metrics[row["name"]] = endpoint.replace("{name}", row["name"])
        nodes.append(PlacementNode(**row))
    rows = _read_rows(table, "jobs", _JOB, ("name", "gpus", "power_w"), "{name: train, gpus: 8, power: 5.2kW}")
    jobs = [PlacementJob(**row) for row in rows]
    check_names(job.name for job in jobs)
    racks = {node.rack: (node.rack, with_unit(parse_power)) for node in nodes}
    limits_w = read_section(table.get("racks") or {}, racks, "racks")
    return FleetFile(nodes=tuple(nodes), jobs=tuple(jobs), metrics=metrics, rack_limits_w=limits_w)


def _read_rows(
    table: Mapping[str, Any],
    key: str,
    keys: Keys,
    needed: tuple[str, ...],
    example: str,
    defaults: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    rows = []
    for number, raw in enumerate(list_tables(table.get(key) or [], key, example), 1):
        row = {**(defaults or {}), **read_section(raw, keys, f"{key}[{number}]")}
        if missing := [f.removesuffix("_w") for f in needed if f not in row]:
            raise ArgumentError(f"{key}[{number}] has no {' and no '.join(missing)}", fix=f"for example {example}")
        rows.append(row)
    return rows
