"""Power of many jobs, nodes and racks: simulate it, shape it, govern it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.shaper import shaper as shaper
    from .budget import Budget as Budget
    from .event_log import read_events as read_events
    from .incidents import FleetIncidents as FleetIncidents
    from .incidents import find_incidents as find_incidents
    from .leases import BudgetPolicy as BudgetPolicy
    from .leases import CapGrant as CapGrant
    from .leases import PowerRequest as PowerRequest
    from .migration import MigratableJob as MigratableJob
    from .migration import Migration as Migration
    from .migration import migratable as migratable
    from .node_cap import CapHolder as CapHolder
    from .node_floor import NodeShare as NodeShare
    from .node_floor import PlacementJob as PlacementJob
    from .node_floor import PlacementNode as PlacementNode
    from .packing import PackingSavings as PackingSavings
    from .packing import compare_packing as compare_packing
    from .placement import Placement as Placement
    from .placement import place_jobs as place_jobs
    from .relief import ReliefPlan as ReliefPlan
    from .relief import plan_moves as plan_moves
    from .scenario import Scenario as Scenario
    from .scenario import load_scenario as load_scenario
    from .simulation import Simulation as Simulation
    from .simulator import simulate as simulate

_LAZY: dict[str, str] = {
    "Budget": "budget",
    "BudgetPolicy": "leases",
    "CapGrant": "leases",
    "CapHolder": "node_cap",
    "PowerRequest": "leases",
    "FleetIncidents": "incidents",
    "MigratableJob": "migration",
    "Migration": "migration",
    "NodeShare": "node_floor",
    "PackingSavings": "packing",
    "Placement": "placement",
    "PlacementJob": "node_floor",
    "PlacementNode": "node_floor",
    "ReliefPlan": "relief",
    "Scenario": "scenario",
    "Simulation": "simulation",
    "compare_packing": "packing",
    "find_incidents": "incidents",
    "load_scenario": "scenario",
    "migratable": "migration",
    "place_jobs": "placement",
    "plan_moves": "relief",
    "shaper": ".runtime.shaper",
    "simulate": "simulator",
    "read_events": "event_log",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module 'tessera.fleet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_LAZY)
