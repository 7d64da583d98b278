"""What a block costs kept, recomputed, or recomputed but for some operators: joules, seconds and bytes held.

All from captures of the same training step: one with every block kept, one with every block recomputed. Their
difference, block by block, is what recomputing costs and frees; the operators' own joules say what saving one of them
would spare again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..graph.ir import Graph, Op
from ..schema import EnergyDescriptor
from .selective import Key, attention_name

# Prefixes of the operators worth saving that are offered for one block: more would differ by less than the model errs.
MOST_LEVELS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a block goes through a training step; `saves` are the operators a selective one does not run again."""

    name: Literal["keep", "recompute", "selective"] = "keep"
    saves: frozenset[Key] = field(default_factory=frozenset)


KEEP, RECOMPUTE = Way(), Way(name="recompute")


@dataclass(frozen=True, slots=True)
class Cost:
    """One block in one iteration: joules and seconds of all its kernels, bytes it holds from forward to backward."""

    energy_j: float
    seconds: float
    kept_bytes: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.energy_j - other.energy_j, self.seconds - other.seconds, self.kept_bytes - other.kept_bytes)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.energy_j + other.energy_j, self.seconds + other.seconds, self.kept_bytes + other.kept_bytes)

    def times(self, factor: float) -> Cost:
        """Scaled."""
        return Cost(self.energy_j * factor, self.seconds * factor, self.kept_bytes * factor)


ZERO = Cost(0.0, 0.0, 0.0)


def mean(costs: Sequence[Cost]) -> Cost:
    """The mean of a few."""
    return sum(costs, ZERO).times(1.0 / max(1, len(costs)))


def block_of(scope: str, names: Iterable[str]) -> str | None:
    """The block a scope lies in."""
    return next((n for n in names if scope == n or scope.startswith(f"{n}.")), None)


@dataclass(frozen=True, slots=True)
class Account:
    """A captured training step split by block. `others` is the cost of what lies outside all of them."""

    blocks: Mapping[str, Cost]
    others: Cost
    forward: Mapping[str, tuple[tuple[Op, Cost], ...]]
    counts: Mapping[str, Counter[str]]
    """Per block: the operators of its first forward with what each costs, and how many of each name ran in all."""


def account(graph: Graph, descriptors: Sequence[EnergyDescriptor], names: Sequence[str]) -> Account:
    """Split a capture and its prediction (`EnergyReport.descriptors`, one for each kernel) by block."""
    spent = {op.index: d for op, d in zip(graph.kernels, descriptors, strict=True)}
    costs = dict.fromkeys(names, ZERO)
    others = ZERO
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    forward: dict[str, list[tuple[Op, Cost]]] = {name: [] for name in names}
    where = {scope: block_of(scope, names) for scope in {op.scope for op in graph.ops}}
    last: str | None = None
    for op in graph.ops:
        name, d = where[op.scope], spent.get(op.index)
        cost = ZERO if d is None else Cost(_joules(d), d.latency_s, 0.0)
        if name is None:
            others += cost
        else:
            costs[name] += cost
            counts[name][_short(op)] += 1
            # A block that is called again later: saved operators are numbered within one call.
            if op.phase == "forward" and (last == name or not forward[name]):
                forward[name].append((op, cost))
        last = name if op.phase == "forward" else last
    for name, nbytes in _kept_bytes(graph, where).items():
        costs[name] += Cost(0.0, 0.0, nbytes)
    return Account(costs, others, {n: tuple(ops) for n, ops in forward.items()}, counts)


def _joules(d: EnergyDescriptor) -> float:
    return d.compute_energy_j + d.memory_energy_j + d.static_energy_j


def _short(op: Op) -> str:
    return attention_name(op.name.rpartition(".")[2])


def _kept_bytes(graph: Graph, where: Mapping[str, str | None]) -> dict[str, float]:
    """Bytes made in the forward of each block that are still there when backward begins."""
    turn = next((op.index for op in graph.ops if op.phase == "backward"), len(graph.ops))
    held: dict[str, float] = {}
    for s in graph.storages.values():
        if s.category != "activations" or not 0 <= s.birth < turn or (s.death is not None and s.death <= turn):
            continue
        name = where[graph.ops[s.birth].scope]
        if name is not None:
            held[name] = held.get(name, 0.0) + s.nbytes
    return held


def levels(name: str, kept: Account, recomputed: Account) -> list[tuple[Way, Cost]]:
    """Selective ways of a block with their costs: more and more of its operators saved, the dearest per byte first.

    Only what the recomputation would run again is worth saving; what is random is always run again, in order, from the
    kept state of the generator: to skip one would give the ones after it other numbers.
    """
    again = recomputed.counts[name] - kept.counts[name]
    whole = recomputed.blocks[name]
    found: list[tuple[Way, Cost]] = []
    saves: set[Key] = set()
    cost = whole
    ranked = sorted(_savable(kept, name, again), key=lambda c: -c[1].energy_j / max(c[1].kept_bytes, 1.0))
    for key, worth in ranked:
        saves.add(key)
        cost = Cost(cost.energy_j - worth.energy_j, cost.seconds - worth.seconds, cost.kept_bytes + worth.kept_bytes)
        found.append((Way(name="selective", saves=frozenset(saves)), cost))
    step = -(-len(found) // MOST_LEVELS) or 1
    return [level for i, level in enumerate(found) if (i + 1) % step == 0 or i == len(found) - 1]


def _savable(kept: Account, name: str, again: Counter[str]) -> list[tuple[Key, Cost]]:
    """Operators that may be saved, with what that spares and holds: new tensors that nothing writes into later."""
    ops = [op for op, _ in kept.forward[name] if op.kernels]  # a view's output is what it views
    writers = Counter(storage for op in ops for storage in {t.storage for t in op.outputs})
    seen: Counter[str] = Counter()
    found = []
    for op, spent in kept.forward[name]:
        short = _short(op)
        nth, seen[short] = seen[short], seen[short] + 1
        reads = {t.storage for t in op.inputs}
        plain = all(t.storage not in reads and writers[t.storage] == 1 for t in op.outputs)
        if not op.kernels or not plain or nth >= again[short] or op.kind == "random" or op.params.get("dropout"):
            continue
        nbytes = {t.storage: float(t.nbytes) for t in op.outputs}
        found.append(((short, nth), Cost(spent.energy_j, spent.seconds, sum(nbytes.values()))))
    return found
