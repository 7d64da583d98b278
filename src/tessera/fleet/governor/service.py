"""A budget with a clock and a store: what the HTTP server and the Ray actor both serve.

The clock is CLOCK_BOOTTIME: nobody can set it, and it counts the time that a machine sleeps. After a reboot it begins
again at zero; then every lease keeps the time that remained when it was last written, counted from now, which is never
too short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...clock import boot_id, read_boot_clock
from ...errors import GovernorError, GovernorRefusal
from ...units import format_power
from ..budget import Budget
from ..leases import (
    BudgetPolicy,
    BudgetStatus,
    CapGrant,
    Emergency,
    EndedEmergency,
    GovernedNode,
    JobLease,
    JobStatus,
    NodeStatus,
    PowerRequest,
)
from .journal import GovernorJournal
from .store import ENDED, LeaseStore, Row, encode_row

MOST_JOBS, MOST_NODES = 100_000, 10_000
"""The most that one governor accepts: more would be a mistake."""
_FULL = "one governor takes no more"


class GovernorService:
    """The calls of a governor. After each, `take_changes` has what must be on disk before the answer leaves."""

    def __init__(
        self, policy: BudgetPolicy, store: LeaseStore, *, clock: Callable[[], float] = read_boot_clock
    ) -> None:
        self.policy, self.store, self._clock = policy, store, clock
        self._boot = boot_id()
        self.budget = self._load()
        self.journal = GovernorJournal()
        self.journal.learn(self.budget)
        self.store.write(self.take_changes())

    def _load(self) -> Budget:
        found, now_s = self.store.read(), self._clock()
        nodes: list[GovernedNode] = list(found["node"].values())
        jobs: list[JobLease] = sorted(found["job"].values(), key=lambda j: j.end_s)
        emergency: Emergency | None = found["emergency"].get("")
        saved = found["clock"].get("", {})
        if saved and (saved["boot"] != self._boot or saved["now_s"] > now_s):
            shift_s = now_s - saved["now_s"]
            for node in nodes:
                _shift_node(node, shift_s)
            for job in jobs:
                _shift_job(job, shift_s)
            emergency = emergency and replace(emergency, since_s=emergency.since_s + shift_s)
        guaranteed_w = sum(n.guaranteed_w for n in nodes)
        if guaranteed_w > self.policy.limit_w:
            raise GovernorError(
                f"{format_power(self.policy.limit_w)} are less than the nodes' guaranteed shares",
                why=f"{len(nodes)} nodes have {format_power(guaranteed_w)} in {self.store.path}",
                fix="raise --cap, or remove nodes first (tessera governor remove NODE)",
            )
        ended = self.store.read_ended()
        return Budget.restore(self.policy, now_s, nodes=nodes, jobs=jobs, ended=ended, emergency=emergency)

    def take_changes(self) -> list[Row]:
        """Return what differs from the disk since the last call; the caller writes it."""
        budget, rows = self.budget, []
        self.journal.compare(budget, budget.changed)
        for kind, name in budget.changed:
            if kind == "node":
                rows.append(encode_row(kind, name, budget.ledger.nodes.get(name)))
            elif kind == "job":
                rows.append(encode_row(kind, name, budget.queue.jobs.get(name)))
                if name not in budget.queue.jobs:
                    rows.append(encode_row(ENDED, name, budget.ended.get(name)))
            else:
                rows.append(encode_row(kind, name, budget.emergency))
        budget.changed.clear()
        if rows:
            rows.append(encode_row("clock", "", {"boot": self._boot, "now_s": budget.now_s}))
        return rows

    @property
    def is_changed(self) -> bool:
        """Return whether something must be written."""
        return bool(self.budget.changed)

    # -- the calls: those of `Budget`, at the time of the clock ------------------------------------------------------

    def join(self, node: str, guaranteed_w: float, max_w: float | None, session: str) -> NodeStatus:
        if node not in self.budget.ledger.nodes and len(self.budget.ledger.nodes) >= MOST_NODES:
            raise GovernorRefusal("full", f"there are {MOST_NODES} nodes", why=_FULL, fix="use a governor for each row")
        self.budget.join(self._clock(), node, guaranteed_w, max_w=max_w, session=session)
        return self.budget.describe_node(node)

    def heartbeat(self, node: str, session: str, acked: int, measured_w: float | None) -> CapGrant:
        return self.budget.heartbeat(self._clock(), node, session=session, acked=acked, measured_w=measured_w)

    def remove(self, node: str) -> None:
        self.budget.remove(self._clock(), node)

    def request(self, request: PowerRequest, owner: str = "") -> JobStatus:
        if request.job not in self.budget.queue.jobs and len(self.budget.queue.jobs) >= MOST_JOBS:
            raise GovernorRefusal("full", f"{MOST_JOBS} jobs wait or run", why=_FULL, fix="try again later")
        return self.budget.request(self._clock(), request, owner)

    def show_job(self, job: str) -> JobStatus:
        self.advance()
        return self.budget.describe_job(job)

    def renew(self, job: str, ttl_s: float | None) -> JobStatus:
        return self.budget.renew(self._clock(), job, ttl_s)

    def release(self, job: str) -> JobStatus:
        return self.budget.release(self._clock(), job)

    def report_power(self, measured_w: float) -> None:
        self.budget.report_power(self._clock(), measured_w)

    def declare_emergency(self, reason: str, to_w: float | None) -> Emergency:
        if to_w is not None and to_w > self.policy.limit_w:
            raise GovernorRefusal(
                "too_large",
                f"an emergency down to {format_power(to_w)} would shed nothing",
                why=f"all leases together have {format_power(self.policy.limit_w)} at most",
                fix="name fewer watts, or none: down to the guaranteed shares",
            )
        return self.budget.declare_emergency(self._clock(), reason, to_w)

    def end_emergency(self) -> EndedEmergency:
        return EndedEmergency(ended=self.budget.end_emergency(self._clock()))

    def describe(self) -> BudgetStatus:
        return self.budget.describe(self._clock())

    def advance(self) -> None:
        """Advance to the clock's time: what has ended makes room for what waits."""
        self.budget.advance(self._clock())

    def look_for_silence(self) -> None:
        """Report nodes that are no longer heard: silence changes nothing in the budget, so nothing else notices it."""
        self.journal.compare(self.budget, [("node", name) for name in self.budget.ledger.nodes])


def open_service(policy: BudgetPolicy, path: Path) -> GovernorService:
    """Return the governor whose state is in a file."""
    store = LeaseStore(path)
    try:
        return GovernorService(policy, store)
    except GovernorError:
        store.close()
        raise


def _shift_node(node: GovernedNode, by_s: float) -> None:
    node.outstanding = [(seq, cap_w, end_s + by_s) for seq, cap_w, end_s in node.outstanding]
    node.heard_s = None if node.heard_s is None else node.heard_s + by_s


def _shift_job(job: JobLease, by_s: float) -> None:
    job.submitted_s += by_s
    job.end_s += by_s
    job.key += by_s
    job.admitted_s = None if job.admitted_s is None else job.admitted_s + by_s
    job.start_s = {node: start_s + by_s for node, start_s in job.start_s.items()}
