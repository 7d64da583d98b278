"""Predict training steps with blocks kept, recomputed, or recomputed in part, and search among the choices.

The cost of a block is the difference between two captures of the same step: one with every block kept, one with every
block recomputed. The joules of a single operator tell what saving it would spare in the second run. An exact
multiple-choice knapsack then finds the cheapest choices for all blocks that fit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..device import Device
from ..graph.ir import Graph, Op
from ..schema import EnergyDescriptor
from .checkpoint_forward import apply_choices, unify_attention_name

# The search predicts at most so many plans as a whole. Each corrects the budget by the error of the last one.
MAX_TRIES = 4
# At most so many levels of saved operators are offered for one block: more levels would differ by less than the model's
# error.
MAX_LEVELS = 12
# With more states of the knapsack than this, one state is kept for each part of the budget. The choice then still fits,
# but may cost more than the best, by what one such part is worth.
MAX_STATES = 20_000

OpKey = tuple[str, int]
"""An operator of a block: its name without namespace and overload, and its number among operators of that name, from 0.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChoice:
    """How a block goes through a training step; a selective block does not run the operators in `saves` again."""

    name: Literal["keep", "recompute", "selective"] = "keep"
    saves: frozenset[OpKey] = field(default_factory=frozenset)


KEEP, RECOMPUTE = BlockChoice(), BlockChoice(name="recompute")


@dataclass(frozen=True, slots=True)
class BlockCost:
    """A block in one iteration: joules and seconds of all its kernels, and bytes it holds from forward to backward."""

    energy_j: float = 0.0
    time_s: float = 0.0
    kept_bytes: float = 0.0

    def __add__(self, other: BlockCost) -> BlockCost:
        energy_j, time_s = self.energy_j + other.energy_j, self.time_s + other.time_s
        return BlockCost(energy_j, time_s, self.kept_bytes + other.kept_bytes)

    def __sub__(self, other: BlockCost) -> BlockCost:
        return self + other * -1.0

    def __mul__(self, factor: float) -> BlockCost:
        return BlockCost(self.energy_j * factor, self.time_s * factor, self.kept_bytes * factor)


def _average(costs: Sequence[BlockCost]) -> BlockCost:
    return sum(costs, BlockCost()) * (1.0 / max(1, len(costs)))


# -- a training step split by block ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepSplit:
    """A captured training step split by block.

    `forward` are the operators of a block's first forward, each with its cost; `counts` is how often each name ran.
    """

    blocks: Mapping[str, BlockCost]
    forward: Mapping[str, tuple[tuple[Op, BlockCost], ...]]
    counts: Mapping[str, Counter[str]]


def split_step(graph: Graph, descriptors: Sequence[EnergyDescriptor], names: Sequence[str]) -> StepSplit:
    """Split a capture and its prediction (`EnergyReport.descriptors`, one for each kernel) by block."""
    spent = {op.index: d for op, d in zip(graph.kernels, descriptors, strict=True)}
    costs = dict.fromkeys(names, BlockCost())
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    forward: dict[str, list[tuple[Op, BlockCost]]] = {name: [] for name in names}
    block_of = {scope: _find_block(scope, names) for scope in {op.scope for op in graph.ops}}
    last: str | None = None
    for op in graph.ops:
        name, d = block_of[op.scope], spent.get(op.index)
        cost = BlockCost() if d is None else BlockCost(_sum_joules(d), d.latency_s)
        if name is not None:
            costs[name] += cost
            counts[name][_short_name(op)] += 1
            # A block may be called again later: saved operators are numbered within one call.
            if op.phase == "forward" and (last == name or not forward[name]):
                forward[name].append((op, cost))
        last = name if op.phase == "forward" else last
    for name, nbytes in _count_kept_bytes(graph, block_of).items():
        costs[name] += BlockCost(kept_bytes=nbytes)
    return StepSplit(costs, {n: tuple(ops) for n, ops in forward.items()}, counts)


def _find_block(scope: str, names: Iterable[str]) -> str | None:
    return next((n for n in names if scope == n or scope.startswith(f"{n}.")), None)


def _sum_joules(d: EnergyDescriptor) -> float:
    return d.compute_energy_j + d.memory_energy_j + d.static_energy_j


def _short_name(op: Op) -> str:
    return unify_attention_name(op.name.rpartition(".")[2])


def _count_kept_bytes(graph: Graph, block_of: Mapping[str, str | None]) -> dict[str, float]:
    """Return the bytes made in the forward of each block that are still there when backward begins."""
    turn = next((op.index for op in graph.ops if op.phase == "backward"), len(graph.ops))
    kept: dict[str, float] = {}
    for s in graph.storages.values():
        if s.category != "activations" or not 0 <= s.birth < turn or (s.death is not None and s.death <= turn):
            continue
        name = block_of[graph.ops[s.birth].scope]
        if name is not None:
            kept[name] = kept.get(name, 0.0) + s.nbytes
    return kept


# -- the choices of a block -----------------------------------------------------------------------------------------


def list_levels(name: str, kept: StepSplit, recomputed: StepSplit) -> list[tuple[BlockChoice, BlockCost]]:
    """Return selective choices of a block: more and more operators saved, the most joules per byte first.

    Only operators that the recomputation would run again are worth saving. Random operators always run again, in order,
    from the saved state of the generator: to skip one would give other numbers to those after it.
    """
    again = recomputed.counts[name] - kept.counts[name]
    cost = recomputed.blocks[name]
    levels: list[tuple[BlockChoice, BlockCost]] = []
    saves: set[OpKey] = set()
    ranked = sorted(_list_savable(kept, name, again), key=lambda c: -c[1].energy_j / max(c[1].kept_bytes, 1.0))
    for key, worth in ranked:
        saves.add(key)
        time_s = cost.time_s - worth.time_s
        cost = BlockCost(cost.energy_j - worth.energy_j, time_s, cost.kept_bytes + worth.kept_bytes)
        levels.append((BlockChoice(name="selective", saves=frozenset(saves)), cost))
    step = -(-len(levels) // MAX_LEVELS) or 1
    return [level for i, level in enumerate(levels) if (i + 1) % step == 0 or i == len(levels) - 1]


def _list_savable(kept: StepSplit, name: str, again: Counter[str]) -> list[tuple[OpKey, BlockCost]]:
    """Return operators that may be saved, with their costs: they make new tensors which nothing writes into later."""
    ops = [op for op, _ in kept.forward[name] if op.kernels]  # a view's output is what it views
    writers = Counter(storage for op in ops for storage in {t.storage for t in op.outputs})
    counts: Counter[str] = Counter()
    savable = []
    for op, spent in kept.forward[name]:
        short = _short_name(op)
        number, counts[short] = counts[short], counts[short] + 1
        reads = {t.storage for t in op.inputs}
        unwritten = all(t.storage not in reads and writers[t.storage] == 1 for t in op.outputs)
        if not op.kernels or not unwritten or number >= again[short] or op.kind == "random" or op.params.get("dropout"):
            continue
        nbytes = {t.storage: float(t.nbytes) for t in op.outputs}
        savable.append(((short, number), BlockCost(spent.energy_j, spent.time_s, sum(nbytes.values()))))
    return savable


# -- predicting -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSetting:
    """A training step under one plan, as predicted: 90% half-widths beside joules and seconds."""

    name: str
    energy_j: float
    error_j: float
    time_s: float
    error_s: float
    peak_bytes: int
    recomputed: int
    selective: int


@dataclass(frozen=True, slots=True)
class PredictedPlan:
    """A plan predicted as a whole."""

    choices: Mapping[str, BlockChoice]
    setting: CheckpointSetting
    split: StepSplit
    notes: tuple[str, ...]


@dataclass(slots=True)
class StepPredictor:
    """Predicts the training step under different plans."""

    model: Any
    inputs: Any
    names: tuple[str, ...]
    device: Device
    optimizer: Any
    precision: str | None
    launch: Any

    def predict(self, choices: Mapping[str, BlockChoice], name: str) -> PredictedPlan:
        """Capture and predict the step."""
        from ..estimate.ops import QUANTISED
        from ..estimate.predict import predict
        from ..graph.capture import capture

        with apply_choices(self.model, choices):
            graph = capture(
                self.model,
                self.inputs,
                mode="train",
                optimizer=self.optimizer,
                precision=self.precision,
                launch=self.launch,
            )
        quantised = self.precision if self.precision in QUANTISED else None  # other precisions are in the capture
        report = predict(graph, on=self.device, precision=quantised, launch=self.launch, check_memory=False)
        prediction = report.prediction
        assert prediction is not None and prediction.peak_memory_bytes is not None  # `predict` gives both of them
        split = split_step(graph, report.descriptors, self.names)
        self.names = tuple(n for n in self.names if split.counts[n])  # drop those that the step never calls
        kinds = [choice.name for choice in choices.values()]
        setting = CheckpointSetting(
            name=name,
            energy_j=report.total_energy_j,
            error_j=report.total.error_j or 0.0,
            time_s=report.total_latency_s,
            error_s=prediction.error_s,
            peak_bytes=prediction.peak_memory_bytes,
            recomputed=kinds.count("recompute"),
            selective=kinds.count("selective"),
        )
        return PredictedPlan(choices, setting, split, tuple(report.notes))


# -- searching ------------------------------------------------------------------------------------------------------

ChoiceTable = Mapping[str, Sequence[tuple[BlockChoice, BlockCost]]]


def list_choices(
    kept: PredictedPlan, whole: PredictedPlan, names: Sequence[str], selective: bool
) -> dict[str, list[tuple[BlockChoice, BlockCost]]]:
    """Return the choices of each block with their costs against keeping it; equal blocks get the same list."""
    alike: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name in names:
        signature = tuple((op.name, tuple(t.shape for t in op.outputs)) for op, _ in kept.split.forward[name])
        alike[signature].append(name)
    table: dict[str, list[tuple[BlockChoice, BlockCost]]] = {}
    for members in alike.values():
        base = _average([kept.split.blocks[n] for n in members])
        costs: dict[BlockChoice, list[BlockCost]] = {RECOMPUTE: [whole.split.blocks[n] for n in members]}
        for name in members if selective else ():
            for choice, cost in list_levels(name, kept.split, whole.split):
                costs.setdefault(choice, []).append(cost)
        shared = [(KEEP, BlockCost()), *((choice, _average(each) - base) for choice, each in costs.items())]
        table.update(dict.fromkeys(members, shared))
    return {name: table[name] for name in names}


def search(
    predictor: StepPredictor,
    table: ChoiceTable,
    kept: PredictedPlan,
    whole: PredictedPlan,
    budget: float | None,
    goal: Literal["energy", "latency"],
) -> PredictedPlan:
    """Return the best plan that was predicted as a whole and fits, among plans with and without selective choices."""
    fits = [plan for plan in (kept, whole) if budget is None or plan.setting.peak_bytes <= budget]
    shared = {id(options): [o for o in options if o[0].name != "selective"] for options in table.values()}
    without = {name: shared[id(options)] for name, options in table.items()}
    for options in (table, without) if table != without else (table,):
        room = math.inf if budget is None else budget - kept.setting.peak_bytes
        for _ in range(MAX_TRIES):
            choices = _choose(options, room, goal)
            if choices is None:
                break
            known = next((plan for plan in (*fits, kept, whole) if plan.choices == choices), None)
            plan = known or predictor.predict(choices, "chosen")
            over = plan.setting.peak_bytes - (budget or math.inf)
            if over <= 0:
                fits.append(plan)
                break
            # The plan was expected to fit, but exceeds the budget. Next time, allow that many bytes fewer.
            costs = [dict(options[name])[choice] for name, choice in choices.items()]
            room = sum(cost.kept_bytes for cost in costs) - over
    best = min(fits, key=lambda plan: plan.setting.time_s if goal == "latency" else plan.setting.energy_j)
    return replace(best, setting=replace(best.setting, name="chosen"))


def _choose(table: ChoiceTable, room_bytes: float, goal: str) -> dict[str, BlockChoice] | None:
    """Return the cheapest choices whose bytes, compared with keeping all, fit the room (negative under pressure).

    Among equal blocks, the first ones are recomputed. When the backward of the last block runs, the backward of the
    first blocks is still to come, so what they free is free at the peak.
    """
    names = list(table)
    least = {n: min(c.kept_bytes for _, c in table[n]) for n in names}
    items = [
        [(c.kept_bytes - least[n], c.time_s if goal == "latency" else c.energy_j) for _, c in table[n]] for n in names
    ]
    budget = math.inf if math.isinf(room_bytes) else room_bytes - sum(least.values())
    picks = solve_knapsack(items, budget) if budget >= 0 else None
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


def solve_knapsack(items: Sequence[Sequence[tuple[float, float]]], budget_bytes: float) -> list[int] | None:
    """Return which option (bytes, cost) of each item makes the least cost that fits; None if none does.

    States that hold more and cost more than another are dropped, so the number of states stays small for items that are
    alike.
    """
    states: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    least = [min(nbytes for nbytes, _ in options) for options in items]
    for i, options in enumerate(items):
        room = (budget_bytes - sum(least[i + 1 :])) * (1 + 1e-12)
        grown = [
            (held + nbytes, spent + cost, (*picks, k))
            for held, spent, picks in states
            for k, (nbytes, cost) in enumerate(options)
            if held + nbytes <= room
        ]
        states, part = [], max(budget_bytes, 1.0) / MAX_STATES if len(grown) > MAX_STATES else 0.0
        for state in sorted(grown):
            if not states or state[1] < states[-1][1]:
                if part and states and state[0] // part == states[-1][0] // part:
                    states.pop()  # the cheapest for each part of the budget stays
                states.append(state)
    return list(states[-1][2]) if states else None
