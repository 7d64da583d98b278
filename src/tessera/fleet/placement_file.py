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

`defaults` are taken for each node that does not say otherwise. Every quantity has its unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, UnitError, did_you_mean
from ..read_limits import YAML_BYTES, parse_yaml, quote_value, read_bytes
from ..units import parse_duration, parse_power, parse_temperature, with_unit
from .node_floor import NodeShare, PlacementJob, PlacementNode

Reader = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFile:
    """The nodes and jobs of a file; `metrics` has the endpoint of each node that names one.

    `rack_limits_w` are the watts that the feeds of racks carry, where the file says so.
    """

    nodes: tuple[PlacementNode, ...]
    jobs: tuple[PlacementJob, ...] = ()
    metrics: Mapping[str, str] = field(default_factory=dict)
    rack_limits_w: Mapping[str, float] = field(default_factory=dict)


def _read_text(value: Any) -> str:
    if not isinstance(value, (str, int)) or isinstance(value, bool) or not str(value).strip():
        raise ArgumentError(f"{quote_value(value)} is not a name")
    return str(value).strip()


def _read_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ArgumentError(f"{quote_value(value)} is not a whole number of at least 0")
    return value


def _read_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"{quote_value(value)} is not true or false")
    return value


def _read_rate(value: Any) -> float:
    """Kelvin per kilowatt as degrees per watt."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e6:
        raise ArgumentError(f"{quote_value(value)} is not a positive number (degrees per kilowatt)")
    return value / 1000.0


def _read_on(value: Any) -> tuple[NodeShare, ...]:
    if not isinstance(value, dict):
        raise ArgumentError(f"{quote_value(value)} is not GPUs for each node", fix="runs_on: {n1: 8}")
    return tuple(NodeShare(node=_read_text(name), gpus=_read_count(gpus)) for name, gpus in value.items())


_NODE: dict[str, tuple[str, Reader]] = {
    "name": ("name", _read_text),
    "gpus": ("gpus", _read_count),
    "aisle": ("aisle", _read_text),
    "rack": ("rack", _read_text),
    "temperature": ("temperature_c", with_unit(parse_temperature)),
    "power": ("power_w", with_unit(parse_power)),
    "idle": ("idle_w", with_unit(parse_power)),
    "asleep": ("asleep_w", with_unit(parse_power)),
    "max": ("max_w", with_unit(parse_power)),
    "fans": ("fan_max_w", with_unit(parse_power)),
    "c_per_kw": ("c_per_w", _read_rate),
    "available": ("is_available", _read_bool),
    "metrics": ("metrics", _read_text),
}
_JOB: dict[str, tuple[str, Reader]] = {
    "name": ("name", _read_text),
    "gpus": ("gpus", _read_count),
    "power": ("power_w", with_unit(parse_power)),
    "duration": ("duration_s", with_unit(parse_duration)),
    "priority": ("priority", _read_count),
    "moderate": ("moderate", _read_bool),
    "can_migrate": ("can_migrate", _read_bool),
    "runs_on": ("on", _read_on),  # not `on`, which YAML takes for true
}
_KEYS = ("defaults", "racks", "nodes", "jobs")


def load_fleet(path: str | Path) -> FleetFile:
    """The nodes and jobs of a file. Temperatures that come from endpoints are not asked for here."""
    try:
        table = parse_yaml(read_bytes(Path(path), YAML_BYTES))
    except OSError as error:
        raise ArgumentError(f"cannot read {str(path)!r}", why=error.strerror, fix="check the path") from None
    except ValueError as error:
        raise ArgumentError(f"cannot read {str(path)!r}", why=str(error), fix=_EXAMPLE) from None
    if not isinstance(table, dict) or not table.get("nodes"):
        raise ArgumentError(f"{path} has no nodes", fix=_EXAMPLE)
    for key in table:
        _check_key(key, _KEYS, str(path))
    defaults = _read_row(table.get("defaults") or {}, _NODE, f"{path}: defaults")
    metrics: dict[str, str] = {}
    nodes = []
    for number, raw in enumerate(_list_rows(table, "nodes", path), start=1):
        row = {**defaults, **_read_row(raw, _NODE, f"{path}: node {number}")}
        _require(row, ("name", "gpus", "idle_w"), f"{path}: node {number}", "gpus: 8, idle: 1.9kW")
        endpoint = row.pop("metrics", None)
        if endpoint:
            metrics[row["name"]] = endpoint.replace("{name}", row["name"])
        nodes.append(PlacementNode(**row))
    jobs = []
    for number, raw in enumerate(_list_rows(table, "jobs", path), start=1):
        row = _read_row(raw, _JOB, f"{path}: job {number}")
        _require(row, ("name", "gpus", "power_w"), f"{path}: job {number}", "name: train, gpus: 8, power: 5.2kW")
        jobs.append(PlacementJob(**row))
    names = [job.name for job in jobs]
    if len(set(names)) != len(names):
        raise ArgumentError(f"{path}: two jobs have the same name", fix="give each job a name of its own")
    limits_w = _read_limits(table.get("racks") or {}, {node.rack for node in nodes}, f"{path}: racks")
    return FleetFile(nodes=tuple(nodes), jobs=tuple(jobs), metrics=metrics, rack_limits_w=limits_w)


_EXAMPLE = "nodes: [{name: n1, gpus: 8, idle: 1.9kW, temperature: 61C}]   (docs/howto/place-jobs.md)"


def _read_limits(raw: Any, known: set[str], where: str) -> dict[str, float]:
    if not isinstance(raw, dict):
        raise ArgumentError(f"{where}: {quote_value(raw)} is not watts for each rack", fix="racks: {r1: 40kW}")
    for name in raw:
        _check_key(name, tuple(sorted(known)), where)
    return _read_row(raw, {name: (name, with_unit(parse_power)) for name in known}, where)


def _list_rows(table: Mapping[str, Any], key: str, path: str | Path) -> list[Any]:
    rows = table.get(key) or []
    if not isinstance(rows, list):
        raise ArgumentError(f"{path}: {key} is not a list", fix=_EXAMPLE)
    return rows


def _read_row(raw: Any, keys: Mapping[str, tuple[str, Reader]], where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ArgumentError(f"{where}: {quote_value(raw)} is not a table", fix=f"keys: {', '.join(keys)}")
    row: dict[str, Any] = {}
    for key, value in raw.items():
        _check_key(key, tuple(keys), where)
        field, read = keys[key]
        try:
            row[field] = read(value)
        except UnitError as error:
            error.what = f"{where}: {key}: {error.what}"
            raise
        except ArgumentError as error:
            raise ArgumentError(f"{where}: {key}: {error.what}", fix=error.fix) from None
    return row


def _check_key(key: Any, known: tuple[str, ...], where: str) -> None:
    if key not in known:
        near = did_you_mean(key[:80], known) if isinstance(key, str) else ""
        raise ArgumentError(f"{where}: unknown key {quote_value(key)}{near}", fix=f"one of: {', '.join(known)}")


def _require(row: Mapping[str, Any], fields: tuple[str, ...], where: str, example: str) -> None:
    missing = [f.removesuffix("_w") for f in fields if f not in row]
    if missing:
        raise ArgumentError(f"{where} has no {' and no '.join(missing)}", fix=f"for example {{{example}}}")
