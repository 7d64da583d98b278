"""What happens in a governor, one event at a time: for its log, and counted for its metrics.

Events are found by comparing states, so the code that changes a budget need not know that events are recorded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..budget import Budget
from ..leases import JobState

_GONE = ("", "removed", JobState.ENDED)
REFUSALS_APART_S = 1.0
"""Refused requests are logged at most this often: a stranger must not fill the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorEvent:
    """A new state of a job, a node, the emergency or throttling, or a refused request (`what`).

    `power_w` is what it may draw, or what is cut; `count` is above 1 if similar events were left out.
    """

    what: str
    name: str
    state: str
    text: str = ""
    power_w: float | None = None
    count: int = 1


class GovernorJournal:
    """Finds events in a budget and passes them on."""

    def __init__(self) -> None:
        self.on_event: Callable[[GovernorEvent], None] = lambda event: None
        self.counts: Counter[tuple[str, str]] = Counter()
        """Events by what and state."""
        self._states: dict[tuple[str, str], str] = {}
        self._unsaid, self._said_s = 0, float("-inf")

    def learn(self, budget: Budget) -> None:
        """Take the state after a restart as known, so that it is not news."""
        self._states |= {("job", name): lease.state for name, lease in budget.queue.jobs.items()}
        self._states |= {("node", name): _find_node_state(budget, name) for name in budget.ledger.nodes}
        self._states["emergency", ""] = str(budget.emergency or "")

    def compare(self, budget: Budget, changed: Iterable[tuple[str, str]]) -> None:
        """Report what has changed its state among `changed`, and the state of the whole budget."""
        for what, name in sorted(changed):
            if what == "job":
                lease = budget.queue.jobs.get(name)
                if self._is_new(what, name, JobState.ENDED if lease is None else lease.state):
                    status = budget.describe_job(name)
                    self._tell(what, name, status.state, status.reason, status.asked_w)
            elif what == "node" and self._is_new(what, name, state := _find_node_state(budget, name)):
                node = budget.ledger.nodes.get(name)
                self._tell(what, name, state, power_w=None if node is None else node.guaranteed_w)
        emergency = budget.emergency
        if self._is_new("emergency", "", str(emergency or "")):
            if emergency is None:
                self._tell("emergency", "", "over")
            else:
                self._tell("emergency", "", "declared", emergency.reason, emergency.to_w)
        if self._is_new("throttling", "", "on" if budget.throttled_w > 0 else ""):
            self._tell("throttling", "", "on" if budget.throttled_w > 0 else "over", power_w=budget.throttled_w)

    def _is_new(self, what: str, name: str, state: str) -> bool:
        """Return whether something was in another state; what is gone is forgotten."""
        if state in _GONE:
            return bool(self._states.pop((what, name), ""))
        before, self._states[what, name] = self._states.get((what, name)), state
        return before != state

    def refuse(self, code: str, who: str, request: str) -> None:
        """Count a refused request; report it if the last report is long enough ago."""
        self.counts["refused", code] += 1
        self._unsaid += 1
        now_s = time.monotonic()
        if code in ("unauthorized", "forbidden") and now_s - self._said_s >= REFUSALS_APART_S:
            self.on_event(GovernorEvent(what="refused", name=who, state=code, text=request, count=self._unsaid))
            self._unsaid, self._said_s = 0, now_s

    def _tell(self, what: str, name: str, state: str, text: str = "", power_w: float | None = None) -> None:
        self.counts[what, state] += 1
        self.on_event(GovernorEvent(what=what, name=name, state=state, text=text, power_w=power_w))


def _find_node_state(budget: Budget, name: str) -> str:
    node = budget.ledger.nodes.get(name)
    if node is None:
        return "removed"
    if not budget.is_heard(name):
        return "silent"
    return "joined" if node.joined else "waits"
