"""A placement, its relief of hot spots and what packing saves, in the terminal and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..fleet.node_floor import REFUSALS, NodeShare, RackLoad, Refusal
from ..fleet.packing import PackingSavings, PlacementEnergy
from ..fleet.placement import PlacedJob, Placement
from ..fleet.relief import HotSpot, Move, ReliefPlan
from ..units import format_count, format_duration, format_power, format_temperature, pick_energy_format
from .console import FittedTable, TableColumn, label_table, next_line

_RULES = {
    "coolest": "the coolest node that may take it",
    "fullest": "moderate: packed on the fullest node that may take it",
    "emptiest": "the emptiest node that may take it",
    "first": "the first node that may take it",
    "unknown": "temperature not known: no node of known temperature may take it",
}


def place_screen(
    placement: Placement, relief: ReliefPlan, savings: PackingSavings | None, notes: Sequence[str], next_command: str
) -> RenderableType:
    """Return a screen: who runs where and why, who waits and why, hot spots and what to do about them."""
    waits = "waits" if len(placement.waiting) == 1 else "wait"
    title = f"{format_count(len(placement.placed), 'job')} placed, {len(placement.waiting)} {waits}"
    parts: list[RenderableType] = [Text(title, style="bold")]
    if placement.placed:
        parts.append(_table(placement.placed))
    ending = label_table()
    for waiting in placement.waiting:
        ending.add_row(f"{waiting.job} waits", "; ".join(map(describe_refusal, waiting.refused)))
    for move in relief.moves:
        ending.add_row("move", Text(describe_move(move), style="yellow"))
    for spot in relief.hot_spots:
        ending.add_row("hot spot", Text(describe_spot(spot), style="red"))
    for aisle in placement.aisles:
        budget = "" if aisle.budget_w is None else f" of {format_power(aisle.budget_w, 3)} that its cooling takes"
        ending.add_row(
            f"aisle {aisle.aisle}" if aisle.aisle else "all nodes", f"{format_power(aisle.heat_w, 3)}{budget}"
        )
    for rack in placement.racks:
        if rack.limit_w is not None:
            row = Text(describe_rack(rack), style="red" if rack.over_w > 0 else "")
            ending.add_row(f"rack {rack.rack}", row)
    if savings is not None:
        ending.add_row("packing", describe_savings(savings))
    for note in notes:
        ending.add_row("note", Text(note, style="dim"))
    return Group(*parts, ending, next_line(next_command))


def _table(placed: Sequence[PlacedJob]) -> FittedTable:
    columns = [
        TableColumn(heading="job", cells=[p.job for p in placed]),
        TableColumn(heading="on", cells=[describe_shares(p.on) for p in placed]),
        TableColumn(heading="then", cells=[_temperature(p.expected_c) for p in placed], right=True),
        TableColumn(heading="why", cells=[describe_choice(p) for p in placed]),
    ]
    return FittedTable(columns)


def describe_shares(on: Iterable[NodeShare]) -> str:
    """Return nodes with their GPUs."""
    shares = list(on)
    shown = ", ".join(f"{s.node} ({s.gpus})" for s in shares[:4])
    return f"{shown} and {len(shares) - 4} more" if len(shares) > 4 else shown


def describe_choice(placed: PlacedJob) -> str:
    """Say by which rule a node was chosen, and why not an earlier node."""
    # That full nodes are not taken needs no explanation.
    refused = "; ".join(describe_refusal(r) for r in placed.refused if r.kind != "no_free_gpus")
    return _RULES[placed.rule] + (f" ({refused})" if refused else "")


def describe_refusal(refusal: Refusal) -> str:
    """Return why nodes were refused, with an example and its numbers."""
    more = f" and {refusal.count - 1} more" if refusal.count > 1 else ""
    if refusal.kind == "unavailable":
        return f"{refusal.node}{more}: {REFUSALS[refusal.kind]}"
    if not refusal.node:
        return f"{REFUSALS[refusal.kind]} ({refusal.value:,.0f}, needs {refusal.limit:,.0f})"
    if refusal.kind == "no_free_gpus":
        value, limit = f"{refusal.value:.0f}", f"needs {refusal.limit:.0f}"
    elif refusal.kind == "hot_spot":
        value, limit = format_temperature(refusal.value, 3), f"limit {format_temperature(refusal.limit, 3)}"
    else:
        value, limit = format_power(refusal.value, 3), f"limit {format_power(refusal.limit, 3)}"
    return f"{refusal.node}{more}: {REFUSALS[refusal.kind]} ({value}, {limit})"


def describe_move(move: Move) -> str:
    """Return a move in words."""
    then = "" if move.expected_c is None else f", which will be at {_temperature(move.expected_c)}"
    what = f"{move.job} ({move.gpus} GPUs, {format_power(move.power_w, 3)})"
    return f"{what} from {move.leaves} to {describe_shares(move.takes)}{then}"


def describe_spot(spot: HotSpot) -> str:
    """Return a hot spot in words, with what is left to do."""
    where = f"{spot.node} is at {_temperature(spot.temperature_c)}" if spot.over_c > 0 else spot.node
    over = f", its aisle {format_power(spot.over_w, 3)} above its cooling" if spot.over_w > 0 else ""
    left = ""
    if spot.shed_w is not None and spot.shed_w > 0:
        left = f"; shed {format_power(spot.shed_w, 3)} more (a cap of the node, or `tessera governor`)"
    why = f"; {spot.unmoved}" if spot.unmoved else ""
    return f"{where}{over}{why}{left}"


def describe_rack(rack: RackLoad) -> str:
    """Return a rack's load against what its feed carries; more than that is a warning."""
    if rack.limit_w is None:
        return format_power(rack.power_w, 3)
    text = f"{format_power(rack.power_w, 3)} of {format_power(rack.limit_w, 3)} that its feed carries"
    if rack.over_w > 0:
        over = format_power(rack.over_w, 3)
        text += f"; warning: {over} above it already, so nothing is added: shed {over} (a cap, or `tessera governor`)"
    return text


def describe_savings(savings: PackingSavings) -> str:
    """Return what packing saves, modelled."""
    word = "saves" if savings.saved_j >= 0 else "costs"
    energy = pick_energy_format(savings.spread.total_j)
    return (
        f"{word} {energy(abs(savings.saved_j), 3)} ({abs(savings.saved_share):.1%}) against spreading, "
        f"{energy(abs(savings.saved_cooling_j), 3)} of it cooling: {_describe(savings.packed, energy)} against "
        f"{_describe(savings.spread, energy)}; modelled, with a COP of {savings.cop:.2f}"
    )


def _describe(used: PlacementEnergy, energy: Callable[[float, int], str]) -> str:
    return f"{format_count(used.nodes_used, 'node')}, {energy(used.total_j, 3)}, {format_duration(used.time_s, 3)}"


def _temperature(value: float | None) -> str:
    return "-" if value is None else format_temperature(value, 3)


def place_data(placement: Placement, relief: ReliefPlan, savings: PackingSavings | None, notes: Sequence[str]) -> Any:
    """Return the placement as plain data."""
    data: dict[str, Any] = {**dataclasses.asdict(placement), "power_w": placement.power_w}
    data["relief"] = dataclasses.asdict(relief)
    if savings is not None:
        data["packing"] = {
            **dataclasses.asdict(savings),
            "saved_j": savings.saved_j,
            "saved_cooling_j": savings.saved_cooling_j,
            "saved_share": savings.saved_share,
            "basis": "modelled",
        }
    return {**data, "notes": list(notes)}
