"""`tessera governor` in the terminal: the budget as a table of nodes and one of jobs, and one line for each change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fleet.leases import BudgetPolicy, BudgetStatus, JobState, JobStatus, find_excess_w
from ..units import format_duration, format_power

if TYPE_CHECKING:
    from ..fleet.governor.daemon import DaemonState
    from ..fleet.governor.journal import GovernorEvent
    from .console import Console, TableColumn  # rich: a governor that starts again must not wait for it

SHOWN = 40
"""Rows of a table; --json has all."""


def describe_policy(policy: BudgetPolicy) -> str:
    """Return what a governor will hold, in one line."""
    return (
        f"cap {format_power(policy.cap_w)}, breaker margin {policy.breaker_margin:.0%}: "
        f"{format_power(policy.limit_w)} to give; soft start {format_duration(policy.soft_start_s)}, "
        f"leases of {format_duration(policy.lease_s)}"
    )


def describe_target(to_w: float) -> str:
    """Return the level to which an emergency brings the leases."""
    return f"to {format_power(to_w)}" if to_w else "to the guaranteed shares"


def describe_job(status: JobStatus) -> str:
    """Return a job's answer in one line."""
    text = f"job {status.job}: {status.state}"
    if status.state is JobState.ACTIVE:
        text += f", {format_power(status.granted_w)} of {format_power(status.asked_w)} now"
    if status.position is not None:
        text += f", place {status.position} in the queue"
    if status.reason:
        text += f" ({status.reason})"
    return text if status.state is JobState.ENDED else f"{text}; ends in {format_duration(status.ends_in_s, 3)}"


def describe_daemon(state: DaemonState) -> str:
    """Return a change of a node in one line."""
    measured = "not measured" if state.measured_w is None else f"draws {format_power(state.measured_w)}"
    if state.cap_w is None:
        return f"{state.node}: waits for the governor ({state.problem}), {measured}"
    held = "by lease" if state.leased else "guaranteed share: no lease"
    text = f"{state.node}: may draw {format_power(state.cap_w)} ({held}), {measured}"
    if state.shed:
        text += "; EMERGENCY: shed what can wait"
    if state.jobs:
        text += f"; jobs {', '.join(state.jobs[:4])}{' ...' if len(state.jobs) > 4 else ''}"
    return f"{text}; {state.problem}" if state.problem else text


def describe_event(event: GovernorEvent) -> str:
    """Return an event of a governor's log in one line."""
    if event.what == "refused":
        more = f" ({event.count} since the last line)" if event.count > 1 else ""
        return f"refused {event.name}: {event.text}: {event.state}{more}"
    subject = f"{event.what} {event.name}".strip()
    power = (
        ""
        if event.power_w is None
        else {
            "job": f", asks for {format_power(event.power_w)}",
            "node": f", guaranteed {format_power(event.power_w)}",
            "emergency": f" {describe_target(event.power_w)}",
            "throttling": f" by {format_power(event.power_w)}" if event.power_w else "",
        }[event.what]
    )
    return f"{subject}: {event.state}{power}" + (f" ({event.text})" if event.text else "")


def print_status(status: BudgetStatus, console: Console) -> None:
    """Print the whole budget."""
    from rich.text import Text

    from .console import FittedTable

    measured = "not measured" if status.measured_w is None else f"{format_power(status.measured_w)} drawn"
    console.print(
        Text(f"{format_power(status.exposure_w)} of {format_power(status.limit_w)} allowed, {measured}", style="bold"),
        soft_wrap=True,
    )
    if status.throttled_w > 0:
        console.print(Text(f"throttled by {format_power(status.throttled_w)}: power is near the limit", style="yellow"))
    if status.emergency is not None:
        to = describe_target(status.emergency.to_w)
        console.print(Text(f"EMERGENCY, {to}: {status.emergency.reason}", style="red"), soft_wrap=True)
    if status.nodes:
        console.print()
        console.print(FittedTable(_node_columns(status)), crop=False)
        for node in status.nodes:
            if find_excess_w(node.measured_w, node.exposure_w):
                drawn, allowed = format_power(node.measured_w or 0.0), format_power(node.exposure_w)
                text = f"{node.node} draws {drawn}, above the {allowed} it may: something on it follows no lease"
                console.print(Text(text, style="red"), soft_wrap=True)
    if status.jobs:
        console.print()
        console.print(FittedTable(_job_columns(status)), crop=False)
    more = max(0, len(status.nodes) - SHOWN) + max(0, len(status.jobs) - SHOWN)
    if more:
        console.print(Text(f"{more} more rows: --json has all", style="dim"))
    if not status.nodes:
        console.print(Text("next, on each node: tessera governor join --guaranteed 300W", style="cyan"), soft_wrap=True)


def _node_columns(status: BudgetStatus) -> list[TableColumn]:
    from .console import TableColumn

    nodes = status.nodes[:SHOWN]
    heard = ["-" if n.heard_s_ago is None else f"{format_duration(n.heard_s_ago, 2)} ago" for n in nodes]
    return [
        TableColumn(heading="node", cells=[n.node if n.joined else f"{n.node} (waits)" for n in nodes]),
        TableColumn(heading="may draw", cells=[format_power(n.exposure_w) for n in nodes], right=True),
        TableColumn(
            heading="draws",
            cells=["-" if n.measured_w is None else format_power(n.measured_w) for n in nodes],
            right=True,
        ),
        TableColumn(heading="guaranteed", cells=[format_power(n.guaranteed_w) for n in nodes], right=True, drop=2),
        TableColumn(heading="heard", cells=heard, right=True, drop=1),
        TableColumn(heading="jobs", cells=[str(len(n.jobs)) for n in nodes], right=True, drop=3),
    ]


def _job_columns(status: BudgetStatus) -> list[TableColumn]:
    from .console import TableColumn

    jobs = sorted(status.jobs, key=lambda j: (j.position or 0, j.job))[:SHOWN]
    return [
        TableColumn(heading="job", cells=[j.job for j in jobs]),
        TableColumn(heading="state", cells=[j.state.value for j in jobs]),
        TableColumn(heading="has", cells=[format_power(j.granted_w) for j in jobs], right=True),
        TableColumn(heading="asked", cells=[format_power(j.asked_w) for j in jobs], right=True, drop=2),
        TableColumn(
            heading="place", cells=["-" if j.position is None else str(j.position) for j in jobs], right=True, drop=1
        ),
        TableColumn(heading="ends in", cells=[format_duration(j.ends_in_s, 3) for j in jobs], right=True, drop=3),
        TableColumn(heading="why", cells=[j.reason for j in jobs], drop=4),
    ]
