"""A governor's state as Prometheus text (exposition format 0.0.4), without a package of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..leases import BudgetStatus, JobState, find_excess_w

Samples = Iterable[tuple[Mapping[str, str], float | None]]


def expose(status: BudgetStatus, counts: Mapping[tuple[str, str], int]) -> str:
    """Return the metrics of a budget, and how often events happened (`GovernorJournal.counts`)."""
    return "".join(_family(*family) for family in _list_families(status, counts))


def _list_families(
    status: BudgetStatus, counts: Mapping[tuple[str, str], int]
) -> Iterator[tuple[str, str, str, Samples]]:
    gauge = "gauge"
    yield "tessera_governor_cap_watts", gauge, "Rating of the breaker or feed.", [({}, status.cap_w)]
    yield "tessera_governor_limit_watts", gauge, "What is given out at most.", [({}, status.limit_w)]
    yield "tessera_governor_leased_watts", gauge, "The most that all nodes may draw now.", [({}, status.exposure_w)]
    yield "tessera_governor_measured_watts", gauge, "What is drawn; absent: not measured.", [({}, status.measured_w)]
    yield "tessera_governor_throttled_watts", gauge, "What is taken off: power is high.", [({}, status.throttled_w)]
    emergency = float(status.emergency is not None)
    yield "tessera_governor_emergency", gauge, "1 while jobs are shed, else 0.", [({}, emergency)]
    states = [({"state": s.value}, float(sum(j.state is s for j in status.jobs))) for s in JobState]
    yield "tessera_governor_jobs", gauge, "Jobs by state.", states
    nodes = [({"node": n.node}, n) for n in status.nodes]
    leased: Samples = [(labels, n.exposure_w) for labels, n in nodes]
    yield "tessera_governor_node_leased_watts", gauge, "The most that a node may draw.", leased
    drawn: Samples = [(labels, n.measured_w) for labels, n in nodes]
    yield "tessera_governor_node_measured_watts", gauge, "What a node says that it draws.", drawn
    over: Samples = [(labels, find_excess_w(n.measured_w, n.exposure_w)) for labels, n in nodes]
    yield "tessera_governor_node_over_lease_watts", gauge, "What a node draws above its lease.", over
    joined: Samples = [(labels, float(n.joined)) for labels, n in nodes]
    yield "tessera_governor_node_joined", gauge, "1 once a node has its guaranteed share, else 0.", joined
    # zeros too, because a rate does not see an event that begins its series
    known = dict.fromkeys(_KINDS, 0) | dict(counts)
    refused: Samples = [({"code": state}, n) for (what, state), n in sorted(known.items()) if what == "refused"]
    yield "tessera_governor_refused_total", "counter", "Requests that were refused.", refused
    told: Samples = [
        ({"what": what, "state": state}, n) for (what, state), n in sorted(known.items()) if what != "refused"
    ]
    yield "tessera_governor_events_total", "counter", "Jobs, nodes and emergencies that changed their state.", told


_KINDS = (
    ("refused", "unauthorized"), ("refused", "forbidden"), ("emergency", "declared"), ("job", "shed"),
    ("node", "silent"), ("throttling", "on"),
)  # fmt: skip


def _family(name: str, kind: str, text: str, samples: Samples) -> str:
    """Format one family. Names of nodes have no character that must be escaped (messages.NAME)."""
    lines = [f"{name}{_label(labels)} {float(value)!r}\n" for labels, value in samples if value is not None]
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{''.join(lines)}" if lines else ""


def _label(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
