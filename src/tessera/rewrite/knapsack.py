"""One option for each item, the cheapest that fits: an exact multiple-choice knapsack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# States kept from item to item. Beyond it one is kept for each part of the budget: what is chosen fits all the same,
# and may be dearer than the best by what such parts are worth.
MOST_STATES = 20_000


@dataclass(frozen=True, slots=True)
class Option:
    """What one choice costs, and the bytes it holds."""

    cost: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class _State:
    nbytes: float
    cost: float
    picks: tuple[int, ...]


def choose(items: Sequence[Sequence[Option]], budget_bytes: float) -> list[int] | None:
    """The option of each item: the least cost whose bytes fit the budget, fewest bytes among equals; None if none does.

    States that hold more and cost more than another are dropped, so items that are alike stay few.
    """
    states = [_State(0.0, 0.0, ())]
    least = [min((o.nbytes for o in options), default=0.0) for options in items]
    for i, options in enumerate(items):
        room = budget_bytes - sum(least[i + 1 :])
        grown = [
            _State(s.nbytes + o.nbytes, s.cost + o.cost, (*s.picks, k))
            for s in states
            for k, o in enumerate(options)
            if s.nbytes + o.nbytes <= room * (1 + 1e-12)
        ]
        states = _frontier(grown)
        if len(states) > MOST_STATES:
            states = _thinned(states, budget_bytes)
    return list(min(states, key=lambda s: (s.cost, s.nbytes)).picks) if states else None


def _frontier(states: list[_State]) -> list[_State]:
    """Those that no other beats in bytes and cost at once, from few bytes to many."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda s: (s.nbytes, s.cost)):
        if not kept or state.cost < kept[-1].cost:
            kept.append(state)
    return kept


def _thinned(states: list[_State], budget_bytes: float) -> list[_State]:
    """One state for each part of the budget: the cheapest."""
    part = max(budget_bytes, 1.0) / MOST_STATES
    best: dict[int, _State] = {}
    for state in states:
        key = int(state.nbytes / part)
        if key not in best or state.cost < best[key].cost:
            best[key] = state
    return [best[key] for key in sorted(best)]
