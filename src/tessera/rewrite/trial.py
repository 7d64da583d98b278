"""Training steps predicted under one choice or another, and the search among the choices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..device import Device
from .knapsack import Option, choose
from .recompute import KEEP, RECOMPUTE, Account, Cost, Way, account, levels, mean

# Plans that are predicted as a whole before the search ends: each moves the budget by what the last one was off.
MOST_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A training step under one choice, as predicted: 90% half-widths beside joules and seconds."""

    name: str
    energy_j: float
    energy_error_j: float
    latency_s: float
    latency_error_s: float
    peak_bytes: int
    recomputed: int
    selective: int


@dataclass(frozen=True, slots=True)
class Tried:
    """A choice predicted as a whole."""

    ways: Mapping[str, Way]
    setting: Setting
    split: Account
    notes: tuple[str, ...]


@dataclass(slots=True)
class Trial:
    """Predicts the training step with blocks going one way or another."""

    model: Any
    inputs: Any
    names: tuple[str, ...]
    device: Device
    optimizer: Any
    precision: str | None
    launch: Any

    def run(self, ways: Mapping[str, Way], name: str) -> Tried:
        """Capture and predict it."""
        from ..estimate.ops import QUANTISED
        from ..estimate.predict import predict
        from ..graph.capture import capture
        from .applied import apply_ways

        with apply_ways(self.model, ways):
            graph = capture(
                self.model, self.inputs, mode="train", optimizer=self.optimizer, precision=self.precision,
                replay=self.launch == "graph",
            )  # fmt: skip
        quantised = self.precision if self.precision in QUANTISED else None  # the others are in the capture
        report = predict(graph, on=self.device, precision=quantised, launch=self.launch, check_memory=False)
        of = report.prediction
        assert of is not None and of.peak_memory_bytes is not None  # `predict` gives both
        split = account(graph, report.descriptors, self.names)
        self.names = tuple(n for n in self.names if split.counts[n])  # those that the step never calls are no blocks
        kinds = [w.name for w in ways.values()]
        setting = Setting(
            name=name, energy_j=report.total_energy_j, energy_error_j=report.total.error_j or 0.0,
            latency_s=report.total_latency_s, latency_error_s=of.latency_error_s, peak_bytes=of.peak_memory_bytes,
            recomputed=kinds.count("recompute"), selective=kinds.count("selective"),
        )  # fmt: skip
        return Tried(ways, setting, split, tuple(report.notes))


Table = Mapping[str, Sequence[tuple[Way, Cost]]]


def options_of(kept: Tried, whole: Tried, names: Sequence[str], selective: bool) -> dict[str, list[tuple[Way, Cost]]]:
    """The ways of each block with their costs against keeping it; blocks that are alike are given the same ones."""
    alike: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name in names:
        alike[_signature(kept.split, name)].append(name)
    table: dict[str, list[tuple[Way, Cost]]] = {}
    for members in alike.values():
        base = mean([kept.split.blocks[n] for n in members])
        ways: dict[Way, list[Cost]] = {RECOMPUTE: [whole.split.blocks[n] for n in members]}
        for name in members if selective else ():
            for way, cost in levels(name, kept.split, whole.split):
                ways.setdefault(way, []).append(cost)
        shared = [(KEEP, Cost(0.0, 0.0, 0.0)), *((way, mean(costs) - base) for way, costs in ways.items())]
        table.update(dict.fromkeys(members, shared))
    return {name: table[name] for name in names}


def _signature(split: Account, name: str) -> tuple[Any, ...]:
    return tuple((op.name, tuple(t.shape for t in op.outputs)) for op, _ in split.forward[name])


def search(
    trial: Trial, table: Table, kept: Tried, whole: Tried, budget: float | None, goal: Literal["energy", "latency"]
) -> Tried:
    """The best of what was predicted as a whole and fits: whole blocks only, and with selective ways."""
    fits = [t for t in (kept, whole) if budget is None or t.setting.peak_bytes <= budget]
    shared = {id(options): [o for o in options if o[0].name != "selective"] for options in table.values()}
    without = {name: shared[id(options)] for name, options in table.items()}
    for options in (table, without) if table != without else (table,):
        room = math.inf if budget is None else budget - kept.setting.peak_bytes
        for _ in range(MOST_TRIES):
            ways = _chosen(options, room, goal)
            if ways is None:
                break
            known = next((t for t in (*fits, kept, whole) if t.ways == ways), None)
            tried = known or trial.run(ways, "chosen")
            over = tried.setting.peak_bytes - (budget or math.inf)
            if over <= 0:
                fits.append(tried)
                break
            # Its bytes were thought to fit: by what they were too many, fewer are allowed the next time.
            room = sum(_cost(options, n, way).kept_bytes for n, way in ways.items()) - over
    best = min(fits, key=lambda t: t.setting.latency_s if goal == "latency" else t.setting.energy_j)
    return replace(best, setting=replace(best.setting, name="chosen"))


def _cost(table: Table, name: str, way: Way) -> Cost:
    return next(cost for known, cost in table[name] if known == way)


def _chosen(table: Table, room_bytes: float, goal: str) -> dict[str, Way] | None:
    """The cheapest ways whose bytes, against keeping everything, fit the room (which is negative under pressure).

    Among blocks that are alike the first ones are recomputed: when the last one's backward runs, the first are still
    to come, so what they free is free at the peak.
    """
    names = list(table)
    least = {n: min(c.kept_bytes for _, c in table[n]) for n in names}
    items = [
        [Option(c.seconds if goal == "latency" else c.energy_j, c.kept_bytes - least[n]) for _, c in table[n]]
        for n in names
    ]
    budget = math.inf if math.isinf(room_bytes) else room_bytes - sum(least.values())
    picks = choose(items, budget) if budget >= 0 else None
    if picks is None:
        return None
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for i, name in enumerate(names):
        groups[id(table[name])].append(i)
    for members in groups.values():
        ordered = sorted((picks[i] for i in members), key=lambda k: table[names[members[0]]][k][1].kept_bytes)
        for i, k in zip(members, ordered, strict=True):
            picks[i] = k
    return {name: table[name][k][0] for name, k in zip(names, picks, strict=True)}
