"""A `FleetStatus` as Prometheus metrics, with the alert rules and the Grafana board that go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any

from ..fleet.event_log import KINDS
from ..fleet.leases import JobState
from ..fleet.status import FleetStatus
from .metrics import Sample, make_families

FLEET_METRICS: Mapping[str, tuple[str, str]] = {
    "tessera_fleet_node_up": ("gauge", "1 while a node's metrics answer, else 0; absent for a node that has none."),
    "tessera_fleet_node_power_watts": (
        "gauge",
        "Power of a node: its meter, or its counted domains together. basis: measured, modelled, file or governor.",
    ),
    "tessera_fleet_node_energy_joules_total": (
        "counter",
        "Energy of a node's counted domains since its sampler began.",
    ),
    "tessera_fleet_node_cap_watts": ("gauge", "What the limits of a node's boards allow together."),
    "tessera_fleet_node_temperature_celsius": ("gauge", "Hottest device of a node."),
    "tessera_fleet_node_crest_factor": ("gauge", "Highest crest factor of a node's domains over 15 s."),
    "tessera_fleet_node_throttled": ("gauge", "1 while any device of a node is throttled, else 0."),
    "tessera_fleet_node_events_total": ("counter", "Over-current, near trips and faults that a node's feeds reported."),
    "tessera_fleet_node_leased_watts": ("gauge", "The most that the governor lets a node draw."),
    "tessera_fleet_rack_power_watts": ("gauge", "Power of the nodes of a rack that are known."),
    "tessera_fleet_rack_limit_watts": ("gauge", "What the feed of a rack carries, as the fleet's file says."),
    "tessera_fleet_rack_temperature_celsius": ("gauge", "Hottest device of a rack."),
    "tessera_fleet_rack_known_ratio": ("gauge", "Share of the nodes of a rack whose power is known."),
    "tessera_fleet_budget_limit_watts": ("gauge", "What the governor may give out."),
    "tessera_fleet_budget_leased_watts": ("gauge", "The most that all nodes may draw under their leases."),
    "tessera_fleet_budget_throttled_watts": ("gauge", "What the governor takes back now because the meter is high."),
    "tessera_fleet_emergency": ("gauge", "1 while the governor sheds jobs, else 0."),
    "tessera_fleet_jobs": ("gauge", "Jobs of the governor by state."),
    "tessera_fleet_job_granted_watts": ("gauge", "What the nodes of a job may draw for it."),
    "tessera_fleet_governor_up": ("gauge", "1 while the governor answers, 0 if it was asked for and does not."),
}
"""Every metric of a fleet with its type and help; tests check that the board and the alerts use these names."""


def fleet_dashboard() -> str:
    """Return the Grafana board (JSON) of a fleet."""
    return (resources.files(__package__) / "grafana_fleet.json").read_text(encoding="utf-8")


def alert_rules() -> str:
    """Return the alert rules (YAML) of a fleet, for `rule_files` of Prometheus."""
    return (resources.files(__package__) / "fleet_alerts.yml").read_text(encoding="utf-8")


class FleetCollector:
    """Turns the newest status into metric families; `has_governor` says whether one was asked for."""

    def __init__(self, look: Callable[[], FleetStatus | None], *, has_governor: bool = False) -> None:
        self._look, self._has_governor = look, has_governor

    def collect(self) -> Iterator[Any]:
        """Yield the families that have samples now."""
        status = self._look()
        if status is not None:
            yield from make_families(FLEET_METRICS, self._samples(status))

    def _samples(self, status: FleetStatus) -> Iterator[Sample]:
        for node in status.nodes:
            labels = {"node": node.name, "rack": node.rack, "aisle": node.aisle}
            yield "tessera_fleet_node_up", labels, None if node.is_up is None else float(node.is_up)
            yield "tessera_fleet_node_power_watts", {**labels, "basis": node.basis}, node.power_w
            yield "tessera_fleet_node_energy_joules_total", labels, node.energy_j
            yield "tessera_fleet_node_cap_watts", labels, node.cap_w
            yield "tessera_fleet_node_temperature_celsius", labels, node.temperature_c
            yield "tessera_fleet_node_crest_factor", labels, node.crest_factor
            yield "tessera_fleet_node_throttled", labels, float(bool(node.throttled)) if node.is_up else None
            yield "tessera_fleet_node_leased_watts", labels, node.leased_w
            # Zeros too, because `increase` does not see the first event of a series that begins with it.
            for kind, count in (dict.fromkeys(KINDS, 0) | dict(node.events)).items() if node.is_up else ():
                yield "tessera_fleet_node_events_total", {**labels, "kind": kind}, float(count)
        for rack in status.racks:
            labels = {"rack": rack.name, "aisle": rack.aisle}
            yield "tessera_fleet_rack_power_watts", labels, rack.power_w
            yield "tessera_fleet_rack_limit_watts", labels, rack.limit_w
            yield "tessera_fleet_rack_temperature_celsius", labels, rack.hottest_c
            yield "tessera_fleet_rack_known_ratio", labels, rack.known / rack.nodes
        yield from self._budget(status)

    def _budget(self, status: FleetStatus) -> Iterator[Sample]:
        if self._has_governor:
            yield "tessera_fleet_governor_up", {}, float(status.budget is not None)
        if status.budget is None:
            return
        yield "tessera_fleet_budget_limit_watts", {}, status.budget.limit_w
        yield "tessera_fleet_budget_leased_watts", {}, status.budget.exposure_w
        yield "tessera_fleet_budget_throttled_watts", {}, status.budget.throttled_w
        yield "tessera_fleet_emergency", {}, float(bool(status.budget.emergency))
        for state in JobState:
            yield "tessera_fleet_jobs", {"state": str(state)}, float(sum(j.state == state for j in status.jobs))
        for job in status.jobs:
            yield "tessera_fleet_job_granted_watts", {"job": job.job, "state": str(job.state)}, job.granted_w
