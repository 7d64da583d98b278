"""Incidents of a fleet in the terminal: the checklist first, then each event with what ran on each node."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.text import Text

from ..analyze.kernel_names import short_name
from ..fleet.incidents import FleetIncidents, Incident, NodeWork
from ..units import format_count, format_duration, format_power
from .console import HangingText, label_table, next_line

_STYLES = {"yes": "bold red", "no": "green", "unknown": "yellow"}


def incidents_screen(found: FleetIncidents, *, next_command: str, top: int) -> RenderableType:
    """Return the screen of the incidents."""
    count = len(found.incidents)
    hosts = f"{format_count(len(found.hosts), 'node')} recorded"
    figures = "" if found.mean_w is None else f", {format_power(found.mean_w, 3)} mean"
    crest = "" if found.crest_factor is None else f", crest factor {found.crest_factor:.2f}"
    outside = sum(incident.outside for incident in found.incidents)
    beyond = f" ({outside} outside the recording)" if outside else ""
    title = f"{format_count(count, 'power event')}{beyond}, {hosts}{figures}{crest}"
    checklist: list[RenderableType] = []
    for answer in found.checklist:
        text = Text("  ").append(f"{answer.verdict:<8}", style=_STYLES[answer.verdict])
        text.append(answer.evidence + (f" (needs: {answer.needs})" if answer.needs else ""))
        checklist += [Text(answer.question, style="dim"), HangingText(text, 10)]
    ending = label_table()
    for note in found.notes:
        ending.add_row("note", Text(str(note), style="dim"))
    shown = [_incident(i) for i in found.incidents[:top]]
    if count > top:
        shown.append(Text(f"{count - top} more events: --top {count}, or --json", style="dim"))
    return Group(Text(title, style="bold"), *checklist, Text(""), *shown, ending, next_line(next_command))


def _incident(incident: Incident) -> RenderableType:
    event = incident.event
    when = datetime.fromtimestamp(event.start_ns * 1e-9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    unsure = event.time_ns - event.start_ns
    within = f" (within {format_duration(unsure * 1e-9, 3)})" if unsure else ""
    head = Text(f"{when} UTC{within}  ", style="dim").append(f"{event.domain}: {event.kind}", style="bold not dim")
    head.append(f"  {event.message}", style="not dim")
    rows = label_table()
    if incident.outside:
        rows.add_row("", "outside the time that was recorded")
    elif incident.peak_w is not None and incident.power_w is not None:
        rows.add_row("power", f"{format_power(incident.power_w, 3)}, up to {format_power(incident.peak_w, 3)}")
    for node in incident.nodes if not incident.outside else ():
        rows.add_row(node.host or "this node", describe_node(node))
    return Group(head, rows)


def describe_node(node: NodeWork) -> str:
    """Return what a node did, in words."""
    if not node.work:
        return "nothing ran"
    parts = [f"{short_name(w.name) if w.kind == 'kernel' else w.name} {w.share:.0%}" for w in node.work]
    shares = [("collectives", node.collective_share), ("copies", node.copy_share)]
    told = [f"{name} {share:.0%}" for name, share in shares if share > 0]
    clock = "; its clock is not tied to the others'" if node.clock_error_s is None else ""
    if node.clock_error_s:
        clock = f"; clock within {format_duration(node.clock_error_s, 2)}"
    return f"{', '.join(parts)}" + (f" ({', '.join(told)})" if told else "") + clock
