"""What `tessera fleet watch` shows: racks, nodes, leases and events, as a screen, as plain lines or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.text import Text

from ..fleet.leases import JobStatus
from ..fleet.status import FleetNode, FleetRack, FleetStatus
from ..units import format_duration, format_power, format_temperature
from .console import FittedTable, TableColumn
from .governor import describe_target

_ROWS_OF_NODES = 24
_JOBS_FIRST = 6  # rows of jobs that are shown before nodes without problems
_BASES = {"modelled": "power modelled", "file": "power from the file", "governor": "power by the governor"}
HOT_C = 85.0
"""Without a policy, a node above this temperature is shown as hot: the guide's own hot-spot threshold."""


def json_line(status: FleetStatus) -> bytes:
    """Return one line of JSON."""
    import msgspec

    tree = msgspec.to_builtins(status)
    for row, node in zip(tree["nodes"], status.nodes, strict=True):
        row["near_trips"] = node.near_trips
        row["over_lease_w"] = node.over_lease_w
        row["notes"] = node_notes(node)
    if tree["budget"] is not None:
        tree["budget"]["emergency_text"] = emergency_text(status)
    names = ("power_w", "unmeasured_w", "asked_nodes", "answering_nodes", "known_nodes")
    return msgspec.json.encode({**tree, **{name: getattr(status, name) for name in names}})


def node_notes(node: FleetNode) -> list[str]:
    """Return what a reader should know of a node: why it is unknown, watts above its lease, throttling."""
    notes = [node.problem] if node.problem else []
    if node.over_lease_w:
        notes.append(f"{format_power(node.over_lease_w, 3)} above its lease")
    if node.power_w is not None and node.basis in _BASES:
        notes.append(_BASES[node.basis])
    return [*notes, *node.throttled]


def emergency_text(status: FleetStatus) -> str:
    """Return why jobs are shed, and down to what; empty without an emergency."""
    b = status.budget
    if b is None or not b.emergency:
        return ""
    return f"{b.emergency}, {describe_target(b.emergency_to_w or 0.0)}"


def plain_lines(status: FleetStatus) -> Iterator[str]:
    """Yield lines of name=value pairs: racks, nodes that do not answer, and a governor's budget, leases and jobs."""
    when = datetime.fromtimestamp(status.epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for rack in status.racks:
        values = {
            "rack": rack.name or "-",
            "power_w": _number(rack.power_w),
            "limit_w": _number(rack.limit_w),
            "hottest_c": _number(rack.hottest_c),
            "crest_factor": "-" if rack.crest_factor is None else f"{rack.crest_factor:.2f}",
            "near_trips": str(rack.near_trips),
            "known_nodes": f"{rack.known}/{rack.nodes}",
        }
        yield f"{when} " + " ".join(f"{k}={v}" for k, v in values.items())
    for node in status.nodes:
        lease = "" if node.leased_w is None else f" leased_w={_number(node.leased_w)} jobs={','.join(node.jobs) or '-'}"
        over = f" over_lease_w={_number(node.over_lease_w)}" if node.over_lease_w else ""
        basis = f" basis={node.basis}" if node.power_w is not None and node.basis != "measured" else ""
        problem = f" problem={node.problem!r}" if node.problem else ""
        if lease or basis or problem:
            yield f"{when} node={node.name} power_w={_number(node.power_w)}{lease}{over}{basis}{problem}"
    if status.budget is not None:
        b = status.budget
        emergency = f" emergency={b.emergency!r} to_w={_number(b.emergency_to_w)}" if b.emergency else ""
        yield (
            f"{when} budget leased_w={_number(b.exposure_w)} limit_w={_number(b.limit_w)} "
            f"throttled_w={_number(b.throttled_w)}{emergency}"
        )
    for job in status.jobs:
        watts = f"granted_w={_number(job.granted_w)} asked_w={_number(job.asked_w)} ends_in_s={_number(job.ends_in_s)}"
        reason = f" reason={job.reason!r}" if job.reason else ""
        yield f"{when} job={job.job} state={job.state} {watts}{reason}"
    for text in status.problems:
        yield f"{when} problem={text!r}"


def fleet_screen(
    status: FleetStatus, *, height: int | None = None, hot_c: float = HOT_C, keys: bool = False
) -> RenderableType:
    """Return one screen: totals, racks, the nodes worth looking at first, leases, events."""
    parts: list[RenderableType] = [_title(status)]
    parts += [Text(problem, style="red") for problem in status.problems]
    racks = FittedTable(_rack_columns(status.racks), styles=[_rack_style(r, hot_c) for r in status.racks])
    parts += [Text(""), racks]
    room = 2 * _ROWS_OF_NODES if height is None else max(height - len(status.racks) - 14, 4)
    # Nodes with a problem come first: unknown, above the lease, or hot.
    nodes = sorted(status.nodes, key=lambda n: (not n.problem, not n.over_lease_w, -(n.temperature_c or 0.0), n.name))
    shown = nodes[: max(room - min(len(status.jobs), _JOBS_FIRST), 4)]
    styles = [_node_style(n, hot_c) for n in shown]
    parts += [Text(""), FittedTable(_node_columns(shown), styles=styles)]
    if len(nodes) > len(shown):
        parts.append(Text(f"and {len(nodes) - len(shown)} cooler nodes (--json shows all)", style="dim"))
    if status.jobs:
        jobs = status.jobs[: max(room - len(shown), _JOBS_FIRST)]
        parts += [Text(""), FittedTable(_job_columns(jobs))]
        if len(status.jobs) > len(jobs):
            parts.append(Text(f"and {len(status.jobs) - len(jobs)} more jobs (--json shows all)", style="dim"))
    if status.events:
        parts.append(Text(""))
        parts += [
            Text(f"{_clock(e.epoch_s)}  {e.node}: {e.count} x {e.kind}", style="yellow") for e in status.events[:5]
        ]
    if keys:
        parts.append(Text("q quits", style="dim"))
    return Group(*parts)


def _title(status: FleetStatus) -> Text:
    """Return a title: watts, how much of the fleet is known, the governor's budget."""
    power = "unknown power" if status.power_w is None else format_power(status.power_w, 4)
    answers = f"{status.answering_nodes} of {status.asked_nodes} nodes answer"
    if status.known_nodes != status.answering_nodes or status.asked_nodes != len(status.nodes):
        answers += f", the power of {status.known_nodes} of {len(status.nodes)} is known"
    title = Text(f"{power}  ", style="bold")
    if status.unmeasured_w:
        title.append(f"{format_power(status.unmeasured_w, 3)} of it not measured  ", style="not bold yellow")
    title.append(answers, style="not bold dim")
    if status.budget is not None:
        b = status.budget
        leased = f"  leased {format_power(b.exposure_w, 3)} of {format_power(b.limit_w, 3)}"
        title.append(leased, style="not bold")
        if b.throttled_w > 0:
            title.append(f"  throttled by {format_power(b.throttled_w, 3)}", style="yellow")
        if b.emergency:
            title.append(f"  EMERGENCY: {emergency_text(status)}", style="bold red")
    return title


def _rack_columns(racks: Sequence[FleetRack]) -> list[TableColumn]:
    loads = ["-" if r.power_w is None or not r.limit_w else f"{r.power_w / r.limit_w:.0%}" for r in racks]
    return [
        TableColumn(heading="rack", cells=[r.name or "-" for r in racks]),
        TableColumn(heading="power", cells=[_power(r.power_w) for r in racks], right=True),
        TableColumn(heading="of limit", cells=loads, right=True),
        TableColumn(heading="hottest", cells=[_temperature(r.hottest_c) for r in racks], right=True),
        TableColumn(heading="crest", cells=[_crest(r.crest_factor) for r in racks], right=True, drop=2),
        TableColumn(heading="near trips", cells=[str(r.near_trips) for r in racks], right=True, drop=1),
        TableColumn(heading="nodes", cells=[f"{r.known}/{r.nodes}" for r in racks], right=True, drop=3),
        TableColumn(heading="aisle", cells=[r.aisle for r in racks], drop=4),
    ]


def _node_columns(nodes: Sequence[FleetNode]) -> list[TableColumn]:
    return [
        TableColumn(heading="node", cells=[n.name for n in nodes]),
        TableColumn(heading="power", cells=[_power(n.power_w) for n in nodes], right=True),
        TableColumn(heading="cap", cells=[_power(n.cap_w) for n in nodes], right=True, drop=3),
        TableColumn(heading="lease", cells=[_power(n.leased_w) for n in nodes], right=True, drop=2),
        TableColumn(heading="temp", cells=[_temperature(n.temperature_c) for n in nodes], right=True),
        TableColumn(heading="crest", cells=[_crest(n.crest_factor) for n in nodes], right=True, drop=4),
        TableColumn(heading="near trips", cells=[str(n.near_trips) for n in nodes], right=True, drop=5),
        TableColumn(heading="jobs", cells=[", ".join(n.jobs[:3]) for n in nodes], drop=6),
        TableColumn(heading="notes", cells=[", ".join(node_notes(n)) for n in nodes], drop=1),
    ]


def _job_columns(jobs: Sequence[JobStatus]) -> list[TableColumn]:
    return [
        TableColumn(heading="job", cells=[j.job for j in jobs]),
        TableColumn(heading="state", cells=[str(j.state) for j in jobs]),
        TableColumn(heading="granted", cells=[_power(j.granted_w) for j in jobs], right=True),
        TableColumn(heading="asked", cells=[_power(j.asked_w) for j in jobs], right=True, drop=2),
        TableColumn(heading="ends in", cells=[format_duration(j.ends_in_s, 3) for j in jobs], right=True, drop=1),
        TableColumn(heading="why", cells=[j.reason for j in jobs], drop=3),
    ]


def _rack_style(rack: FleetRack, hot_c: float) -> str:
    is_full = rack.limit_w is not None and rack.power_w is not None and rack.power_w > 0.8 * rack.limit_w
    return "red" if (rack.hottest_c or 0.0) > hot_c else "yellow" if is_full or rack.near_trips else ""


def _node_style(node: FleetNode, hot_c: float) -> str:
    if node.over_lease_w:
        return "red"
    if node.problem:
        return "dim"
    return "red" if (node.temperature_c or 0.0) > hot_c else "yellow" if node.throttled else ""


def _clock(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s).astimezone().strftime("%H:%M:%S")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _power(value: float | None) -> str:
    return "-" if value is None else format_power(value, 3)


def _temperature(value: float | None) -> str:
    return "-" if value is None else format_temperature(value, 3)


def _crest(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
