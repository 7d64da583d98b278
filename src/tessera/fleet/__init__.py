"""Power of many jobs, nodes and racks: simulate it, shape it, govern it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import load_lazily

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

load_lazily(
    __name__,
    {
        ".runtime.shaper": "shaper",
        "budget": "Budget",
        "event_log": "read_events",
        "incidents": "FleetIncidents find_incidents",
        "leases": "BudgetPolicy CapGrant PowerRequest",
        "migration": "MigratableJob Migration migratable",
        "node_cap": "CapHolder",
        "node_floor": "NodeShare PlacementJob PlacementNode",
        "packing": "PackingSavings compare_packing",
        "placement": "Placement place_jobs",
        "relief": "ReliefPlan plan_moves",
        "scenario": "Scenario load_scenario",
        "simulation": "Simulation",
        "simulator": "simulate",
    },
)
