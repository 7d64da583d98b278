"""A parallel plan in the terminal, and the words that its page shares."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from ..dist.cluster import Cluster, list_clusters, load_cluster
from ..dist.layout import Layout
from ..dist.plan_cost import PlanCandidate
from ..dist.plan_neighbours import PlanNeighbour, find_growth
from ..dist.planner import ParallelPlan
from ..units import (
    format_bytes,
    format_duration,
    format_duration_error,
    format_energy_error,
    format_joules,
    format_power,
    format_share,
)
from .console import FittedTable, TableColumn, TextFlow, label_table, next_line, open_table, plain_console

_LISTED, _NEIGHBOURS = 6, 8


def plan_text(plan: ParallelPlan) -> str:
    """Return the screen of a plan as plain text."""
    return plain_console(100).text(plan_screen(plan))


def plan_screen(plan: ParallelPlan, *, next_command: str | None = None) -> RenderableType:
    """Return one screen: the best layout and its figures, the ranked others, why the neighbours lost, what to type."""
    best = plan.best
    figures = [
        format_duration_error(best.time_s, best.error_s),
        format_energy_error(best.energy_j, best.error_j, show=format_joules),
    ]
    each = f"{format_joules(best.energy_per_token_j, 3)} per {name_unit(plan)}"
    figures += [format_power(best.power_w, 3), each]
    facts = label_table()
    for name, text in list_facts(plan):
        facts.add_row(name, text)
    ending = label_table()
    for neighbour in worth_telling(plan.neighbours)[:_NEIGHBOURS]:
        ending.add_row(f"not {name_setting(neighbour.setting)} {neighbour.value}", describe_neighbour(plan, neighbour))
    ending.add_row("least sure", describe_least_sure(plan))
    ending.add_row("searched", Text(describe_search(plan), style="dim"))
    for text in plan.notes:
        ending.add_row("note", text)
    return Group(
        TextFlow(Text(describe_title(plan), style="bold"), Text(describe_problem(plan), style="dim")),
        TextFlow(*(Text(figure, style="bold") for figure in figures), Text("a step, 90% intervals", style="dim")),
        facts,
        Text(""),
        _rank(plan),
        Text(""),
        ending,
        *([next_line(next_command)] if next_command else []),
    )


def describe_title(plan: ParallelPlan) -> str:
    """Return the model and the cluster."""
    cluster, model = plan.problem.cluster, plan.problem.model
    nodes = f"{cluster.nodes} x " if cluster.nodes > 1 else ""
    count = model.parameters
    size = f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"
    return f"{size} parameters on {nodes}{cluster.name}"


def name_unit(plan: ParallelPlan) -> str:
    """Return the unit in which a batch is counted."""
    return "token" if plan.problem.work is None else "sample"


def describe_problem(plan: ParallelPlan) -> str:
    """Return the batch, the format and the goal."""
    problem = plan.problem
    batch = (
        f"{problem.global_batch} x {problem.seq} tokens" if problem.work is None else f"{problem.global_batch} samples"
    )
    return f"{plan.best.layout.gpus} of {problem.cluster.gpus} GPUs, {batch}, {problem.precision}, goal: {plan.goal}"


def describe_layout(layout: Layout) -> str:
    """Return the settings of a layout besides its axes."""
    words = [f"{layout.microbatches} microbatch{'es' * (layout.microbatches > 1)} of {layout.micro_batch}"]
    words.append({"none": "nothing sharded"}.get(layout.sharding, layout.sharding))
    words.append({"none": "no recomputation"}.get(layout.recompute, f"{layout.recompute} recomputation"))
    if layout.pp > 1:
        words.append(layout.schedule)
    if layout.offload:
        words.append(f"{' and '.join(layout.offload)} on the host")
    return ", ".join(words)


def list_facts(plan: ParallelPlan) -> list[tuple[str, str]]:
    """Return what the best layout is and where its time and joules go."""
    best = plan.best
    order = [axis for axis in best.layout.placement if getattr(best.layout, axis) > 1]
    near = f"; {order[0]} on the nearest GPUs, {order[-1]} on the farthest" if len(order) > 1 else ""
    room = f"{best.memory_bytes / best.capacity_bytes:.0%} of {format_bytes(best.capacity_bytes, 3)}"
    return [
        ("layout", f"{best.layout}: {describe_layout(best.layout)}{near}"),
        ("time", _list_shares(best.parts, best.time_s)),
        ("energy", _list_shares(best.energy_parts, best.energy_j) + ("" if "host" in best.energy_parts else _NO_HOST)),
        ("memory", f"{format_bytes(best.memory_bytes, 3)} on the fullest GPU, {room}"),
    ]


_NO_HOST = "; without the host, whose watts the cluster's file does not give"


def _list_shares(parts: dict[str, float], whole: float) -> str:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    shown = [f"{name} {format_share(value / whole)}" for name, value in ordered if value >= 0.005 * whole]
    return ", ".join(shown)


def _rank(plan: ParallelPlan) -> FittedTable:
    """Return the best layout of each division, best first."""
    rows = plan.candidates[:_LISTED]
    layouts = [row.layout for row in rows]
    columns = [
        TableColumn(heading="", cells=["*" if row is plan.best else "" for row in rows]),
        TableColumn(heading="layout", cells=[str(layout) for layout in layouts]),
        TableColumn(
            heading="micro", cells=[f"{x.microbatches} x {x.micro_batch}" for x in layouts], right=True, drop=3
        ),
        TableColumn(heading="shards", cells=[layout.sharding for layout in layouts], drop=2),
        TableColumn(heading="recompute", cells=[layout.recompute for layout in layouts], drop=1),
        TableColumn(heading="time", cells=[format_duration(row.time_s, 4) for row in rows], right=True),
        TableColumn(heading="energy", cells=[format_joules(row.energy_j, 4) for row in rows], right=True),
        TableColumn(heading="memory", cells=[format_bytes(row.memory_bytes, 3) for row in rows], right=True, drop=4),
        TableColumn(heading="more than the best", cells=[describe_loss(plan, row) for row in rows]),
    ]
    if any(layout.offload for layout in layouts):
        cells = ["+".join(layout.offload) for layout in layouts]
        columns.insert(5, TableColumn(heading="on the host", cells=cells, drop=5))
    return FittedTable(columns)


def describe_loss(plan: ParallelPlan, row: PlanCandidate) -> str:
    """Return what a candidate has more of than the best."""
    if row is plan.best:
        return ""
    part, grown = find_growth(plan.best, row, plan.metric)
    change = getattr(row, plan.metric) / getattr(plan.best, plan.metric) - 1.0
    if change < 0:
        reason = "but uses the host" if len(row.layout.offload) > len(plan.best.layout.offload) else "but more axes"
        return f"{format_share(change, signed=True)}, {reason}"
    return f"{format_share(change, signed=True)}: {part} {_format_more(plan.metric, grown)}"


def _format_more(metric: str, amount: float) -> str:
    return "+" + (format_duration(amount, 3) if metric == "time_s" else format_joules(amount, 3))


def name_setting(setting: str) -> str:
    """Return a setting of a layout in people's words."""
    return {"micro_batch": "microbatch", "offload": "on the host:"}.get(setting, setting)


def worth_telling(neighbours: Iterable[PlanNeighbour]) -> list[PlanNeighbour]:
    """Return the neighbours that lost for a reason."""
    return [n for n in neighbours if n.verdict not in ("as good", "better")]


def describe_neighbour(plan: ParallelPlan, neighbour: PlanNeighbour) -> str:
    """Return why a neighbour lost."""
    if neighbour.over_bytes is not None:
        return f"does not fit: {format_bytes(neighbour.over_bytes, 3)} too much"
    if not neighbour.change:
        return "no difference"
    metric = "time_s" if neighbour.verdict == "too slow" else plan.metric
    change = format_share(neighbour.change, signed=True)
    words = f"{change} {'time' if metric == 'time_s' else 'energy'}"
    if neighbour.verdict == "too slow":
        words += ", over the limit"
    if neighbour.part is not None and neighbour.part_change is not None:
        words += f": {neighbour.part} {_format_more(metric, neighbour.part_change)}"
    recompute = neighbour.layout.recompute
    if neighbour.setting != "recompute" and recompute != plan.best.layout.recompute:
        words += f", with {recompute} recomputation" if recompute != "none" else ", without recomputation"
    return words


def describe_least_sure(plan: ParallelPlan) -> str:
    """Return the figure that adds most to the error, and why."""
    least = plan.least_sure
    amount = format_duration(least.error, 2) if least.unit == "s" else format_joules(least.error, 2)
    return f"{least.name} (± {amount}): {least.why}"


def describe_search(plan: ParallelPlan) -> str:
    """Return how many layouts were evaluated, and what did not fit."""
    words = f"{plan.evaluations} evaluations in {format_duration(plan.search_s, 2)}"
    if not plan.misfits:
        return words
    nearest = plan.misfits[0]
    over = format_bytes(nearest.over_bytes, 3)
    return f"{words}; {len(plan.misfits)} divisions do not fit, the nearest ({nearest.layout}) by {over}"


def clusters_table() -> RenderableType:
    """Return the clusters that have a name."""
    table = open_table("cluster", "GPUs", "chip", "network", "host", gap=2)
    for key in list_clusters():
        cluster = load_cluster(key)
        network, host = cluster.network_bytes_per_s, cluster.host_w
        speed = f"{network.value * 8 / 1e9:.0f} Gb/s" if network else "-"
        watts = format_power(host.value, 3) if host else "-"
        table.add_row(key, str(cluster.gpus), cluster.device.id, speed, watts)
    return Group(table, Text("`NAME:4` is four nodes; a .toml, .yaml or .json file describes your own", style="dim"))


def list_sources(cluster: Cluster) -> list[tuple[str, str]]:
    """Return the figures of a cluster with their sources."""
    return [(name, f"{f.value:.6g}: {f.source}") for name, f in cluster.list_figures().items()]
