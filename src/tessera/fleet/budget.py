"""Who may draw how much: the decisions of a governor, without a clock, a network or a disk.

::

    request, renew, release ──► JobQueue ──► admitted jobs ──► PowerFill, soft start ──► what a node should draw
    heartbeat of a node ──────────────────────────────────────► ExposureLedger.grant ──► CapGrant: what it may draw

Two levels keep this simple. Jobs are demand: they wait, are admitted, rise on a ramp, are throttled or shed. Nodes are
supply: each obeys grants that end by themselves. Only the ledger (exposure.py) keeps the sum of what nodes may draw
below the limit, even if messages are lost, late, doubled or out of order, and even if the jobs' level is wrong.

Every method takes `now_s` of a monotonic clock; a time before the last one counts as the last one. The same calls give
the same answers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, MutableMapping

from ..errors import GovernorRefusal, did_you_mean
from ..units import format_power
from .admission import JobQueue
from .exposure import ExposureLedger
from .leases import (
    BudgetPolicy,
    BudgetStatus,
    CapGrant,
    Emergency,
    GovernedNode,
    JobLease,
    JobState,
    JobStatus,
    NodeStatus,
    PowerRequest,
    round_down,
    round_up,
)
from .throttle import RACK, RELEASE, PowerFill, PowerMeters

ENDED_KEPT = 100_000
"""How many ended jobs are remembered, so that a late copy of a request does not start one again."""
SESSIONS_KEPT = 16
"""How many daemons of a node are remembered, so that a late message of an earlier one does not speak for it again."""


class Budget:
    """The budget of one rack or row.

    `changed` has what differs since it was last cleared, for a store: ("job", name) and ("node", name).
    """

    def __init__(self, policy: BudgetPolicy) -> None:
        self.policy = policy
        self.queue = JobQueue(policy)
        self.ledger = ExposureLedger(policy.limit_w)
        self.ended: MutableMapping[str, JobLease] = {}
        self.emergency: Emergency | None = None
        self.changed: set[tuple[str, str]] = set()
        self.now_s = -math.inf
        self._fill = PowerFill(policy)
        self._meters = PowerMeters(policy.lease_s)
        self._job_ends: list[tuple[float, str]] = []
        self._calm_s = math.inf  # since when measured power has been low in an automatic emergency
        self._rise_w, self._rise_s = 0.0, math.inf

    @classmethod
    def restore(
        cls,
        policy: BudgetPolicy,
        now_s: float,
        *,
        nodes: Iterable[GovernedNode],
        jobs: Iterable[JobLease],
        ended: MutableMapping[str, JobLease] | None = None,
        emergency: Emergency | None = None,
    ) -> Budget:
        """Return the budget as it was saved, on the same clock. Leases keep their remaining time."""
        budget = cls(policy)
        budget.ended = {} if ended is None else ended
        budget.now_s, budget.emergency = now_s, emergency
        for node in nodes:
            budget.queue.set_node(node.name, node.guaranteed_w, node.max_w)
            budget.ledger.add(node, now_s)
        for lease in jobs:
            if lease.state is JobState.ENDED:
                budget.ended[lease.request.job] = lease
            else:
                budget.queue.restore(lease)
                heapq.heappush(budget._job_ends, (lease.end_s, lease.request.job))
        budget._requeue_beyond_limit()
        budget._update_fill(now_s)
        return budget

    def _requeue_beyond_limit(self) -> None:
        """Let jobs wait again, the lowest first, whose least watts no longer fit after a restart with a smaller cap."""
        waiting_w = sum(self.queue.unmet_w(n.name) for n in self.ledger.nodes.values() if not n.joined)
        for lease in self._list_active():
            if self.queue.committed_w - waiting_w <= self.policy.limit_w:
                break
            self.queue.requeue(lease)
            self.changed.add(("job", lease.request.job))

    # -- nodes ----------------------------------------------------------------------------------------------

    def join(
        self, now_s: float, name: str, guaranteed_w: float, *, max_w: float | None = None, session: str = ""
    ) -> GovernedNode:
        """Add a node, or let another daemon speak for it. Its guaranteed share is its own once `joined` is set."""
        now_s = self.advance(now_s)
        node = self.ledger.nodes.get(name) or GovernedNode(name=name, guaranteed_w=0.0)
        if session in node.sessions[:-1]:
            raise _refuse_session(name)
        # A share never becomes smaller here: a late copy of an older message must not take away what a node relies on.
        share_w, limit_w = max(round_up(guaranteed_w), node.guaranteed_w), self.policy.limit_w
        others_w = sum(n.guaranteed_w for n in self.ledger.nodes.values() if n.name != name)
        if not 0 <= share_w <= min(limit_w - others_w, limit_w if max_w is None else max_w):
            raise GovernorRefusal(
                "too_large",
                f"node {name!r} cannot have a guaranteed share of {format_power(guaranteed_w)}",
                why=f"{format_power(others_w)} of {format_power(limit_w)} are guaranteed to other nodes",
                fix="ask for less, or remove a node that is gone",
            )
        if node.joined and share_w > self.ledger.free_w(node):
            raise GovernorRefusal(
                "busy",
                f"the guaranteed share of node {name!r} cannot grow to {format_power(share_w)} now",
                why="other nodes may still draw these watts",
                fix=f"try again in {self.policy.lease_s:g} s, or release some jobs",
            )
        if session not in node.sessions:
            node.sessions = [*node.sessions, session][-SESSIONS_KEPT:]
        node.guaranteed_w, node.max_w, node.heard_s = share_w, max_w, now_s
        self.queue.set_node(name, share_w, max_w)
        self.ledger.add(node, now_s)
        self.ledger.settle(node, now_s)
        self.changed.add(("node", name))
        self._admit(now_s)
        return node

    def remove(self, now_s: float, name: str) -> None:
        """Remove a node for good, so that its guaranteed share is free. Refused while the node may draw more."""
        now_s = self.advance(now_s)
        node = self._find_node(name)
        if any(name in lease.request.watts for lease in self.queue.jobs.values()) or (
            self.ledger.update(node, now_s) > node.guaranteed_w
        ):
            raise GovernorRefusal(
                "busy",
                f"node {name!r} still has jobs or a lease",
                why="its watts are free only once they have ended",
                fix=f"release its jobs, stop its daemon, and try again in {self.policy.lease_s:g} s",
            )
        self.queue.remove_node(name)
        self.ledger.remove(name)
        self._meters.forget(name)
        self.changed.add(("node", name))
        self._admit(now_s)

    def heartbeat(
        self, now_s: float, name: str, *, session: str = "", acked: int = 0, measured_w: float | None = None
    ) -> CapGrant:
        """Take which grant a node obeys and what it draws; return its next grant."""
        now_s = self.advance(now_s)
        node = self._find_node(name)
        if session != node.sessions[-1]:
            raise _refuse_session(name)
        was_heard = self.is_heard(name)
        silent_s, node.heard_s = 0.0 if node.heard_s is None else now_s - node.heard_s, now_s
        node.acked = min(max(node.acked, acked), node.seq)
        self.ledger.update(node, now_s)
        self.ledger.settle(node, now_s)
        if measured_w is not None:
            self._meters.report(name, measured_w, now_s)
        self._steer(now_s)
        self._update_fill(now_s)
        if not was_heard:
            self._admit(now_s)
        if not node.outstanding:
            self._restart_ramps(node, now_s)
        self._delay_ramps(node, now_s, silent_s - 2 * self.policy.heartbeat_s)
        shares_w = {job: self._fill.share_w(lease, name, now_s) for job, lease in self.queue.active_on(name).items()}
        target_w = max(sum(shares_w.values()), node.guaranteed_w)
        target_w = min(target_w, target_w if node.max_w is None else node.max_w)
        last_w = node.outstanding[-1][1] if node.outstanding else node.guaranteed_w
        cap_w = self.ledger.grant(node, self._limit_rise(target_w, last_w, now_s), now_s, now_s + self._hold_s)
        self._rise_w -= max(0.0, cap_w - last_w)
        if cap_w < target_w - 1.0:  # less than it should have, so its jobs do not rise meanwhile
            self._delay_ramps(node, now_s, min(silent_s, 2 * self.policy.heartbeat_s))
        self.changed.add(("node", name))
        return CapGrant(
            node=name,
            seq=node.seq,
            cap_w=cap_w,
            guaranteed_w=node.guaranteed_w if node.joined else 0.0,
            lease_s=self.policy.lease_s,
            shed=self.emergency is not None,
            jobs={job: round_down(w) for job, w in shares_w.items()},
        )

    @property
    def _hold_s(self) -> float:
        """Return how long a grant counts: its time on a clock that runs slow."""
        return self.policy.lease_s * (1.0 + self.policy.drift)

    def _restart_ramps(self, node: GovernedNode, now_s: float) -> None:
        """Let a node's jobs rise again from its guaranteed share, from which the node comes back."""
        for name, lease in self.queue.active_on(node.name).items():
            if lease.start_s[node.name] < now_s:
                lease.start_s[node.name] = now_s
                self.changed.add(("job", name))

    def _delay_ramps(self, node: GovernedNode, now_s: float, by_s: float) -> None:
        """Delay jobs that still rise, because their node was silent or got less than it should."""
        for name, lease in self.queue.active_on(node.name).items():
            start_s = lease.start_s[node.name]
            if by_s > 0 and 0 < now_s - start_s < self._fill.ramp_s(lease):
                lease.start_s[node.name] = min(start_s + by_s, now_s)
                self.changed.add(("job", name))

    def _limit_rise(self, cap_w: float, last_w: float, now_s: float) -> float:
        """Return the cap as far as `ramp_w_per_s` allows: the rises of all nodes share one bucket of watts."""
        rate = self.policy.ramp_w_per_s
        if rate is None:
            return cap_w
        self._rise_w = min(self._rise_w + rate * max(0.0, now_s - self._rise_s), rate * self.policy.heartbeat_s)
        self._rise_s = now_s
        return min(cap_w, last_w + max(0.0, self._rise_w))

    # -- jobs -----------------------------------------------------------------------------------------------

    def request(self, now_s: float, request: PowerRequest, owner: str = "") -> JobStatus:
        """Ask for watts. The same request again gives the same lease; a job that has ended does not start again."""
        now_s = self.advance(now_s)
        known = self.queue.jobs.get(request.job) or self.ended.get(request.job)
        if known is None:
            for node in request.watts:
                self._find_node(node)
            self.queue.check_possible(request)
            lease = self.queue.submit(request, now_s, owner)
            heapq.heappush(self._job_ends, (lease.end_s, request.job))
            self.changed.add(("job", request.job))
            self._admit(now_s)
        elif known.request != request:
            raise GovernorRefusal(
                "conflict",
                f"job {request.job!r} has asked for something else before",
                why="a name stands for one request: the same message twice must be one job",
                fix="release it, and ask under a new name",
            )
        return self.describe_job(request.job)

    def renew(self, now_s: float, job: str, ttl_s: float | None = None) -> JobStatus:
        """Let a lease last `ttl_s` from now; this never makes it shorter."""
        now_s = self.advance(now_s)
        lease = self.find_job(job)
        end_s = now_s + (lease.request.ttl_s if ttl_s is None else ttl_s)
        if lease.state is not JobState.ENDED and end_s > lease.end_s:
            lease.end_s = end_s
            heapq.heappush(self._job_ends, (end_s, job))
            self.changed.add(("job", job))
        return self.describe_job(job)

    def release(self, now_s: float, job: str) -> JobStatus:
        """End a job; a second call does nothing."""
        now_s = self.advance(now_s)
        lease = self.find_job(job)
        if lease.state is not JobState.ENDED:
            self._end(lease, "released")
            self._admit(now_s)
        return self.describe_job(job)

    def _end(self, lease: JobLease, reason: str) -> None:
        self.queue.end(lease, reason)
        self.ended[lease.request.job] = lease
        self.changed.add(("job", lease.request.job))
        if len(self.ended) > ENDED_KEPT:
            oldest = next(iter(self.ended))
            del self.ended[oldest]
            self.changed.add(("job", oldest))

    # -- measured power, throttling, emergencies --------------------------------------------------------------

    def report_power(self, now_s: float, measured_w: float) -> None:
        """Take a reading of the rack's own meter, which replaces the sum of the nodes' readings."""
        now_s = self.advance(now_s)
        self._meters.report(RACK, measured_w, now_s)
        self._steer(now_s)
        self._update_fill(now_s)

    def measured_w(self, now_s: float) -> float | None:
        """Return what all nodes draw, as far as it is measured; None if nothing is measured."""
        # A node without a sensor is assumed to keep its lease, with the same room below `near` as others.
        return self._meters.total_w(now_s, {n: self.policy.near * self.ledger.exposure_w(n) for n in self.ledger.nodes})

    def _steer(self, now_s: float) -> None:
        if not self._fill.is_due(now_s):
            return
        measured_w = self.measured_w(now_s)
        self._fill.steer(now_s, measured_w, sum(self.queue.spread_w))
        if measured_w is None:
            return
        limit_w, emergency = self.policy.limit_w, self.emergency
        if measured_w > self.policy.cap_w and emergency is None:
            text = f"{measured_w:.0f} W are drawn, more than the cap of {self.policy.cap_w:.0f} W"
            self._shed(Emergency(to_w=limit_w * limit_w / measured_w, reason=text, since_s=now_s, automatic=True))
        elif emergency is not None and emergency.automatic:
            self._calm_s = min(self._calm_s, now_s) if measured_w < RELEASE * limit_w else math.inf
            if now_s - self._calm_s >= max(self.policy.soft_start_s, self.policy.lease_s):
                self.end_emergency(now_s)

    def declare_emergency(self, now_s: float, reason: str, to_w: float | None = None) -> Emergency:
        """Bring all leases down to `to_w` (default: the guaranteed shares); the lowest priorities are shed first."""
        now_s = self.advance(now_s)
        emergency = Emergency(to_w=0.0 if to_w is None else max(0.0, to_w), reason=reason, since_s=now_s)
        self._shed(emergency)
        return emergency

    def _shed(self, emergency: Emergency) -> None:
        self.emergency, self._calm_s = emergency, math.inf
        self.changed.add(("emergency", ""))
        for lease in self._list_active():
            if self.queue.committed_w <= emergency.to_w:
                break
            self.queue.shed(lease, emergency.reason)
            self.changed.add(("job", lease.request.job))

    def _list_active(self) -> list[JobLease]:
        """Return the admitted jobs in the order in which they lose their watts."""
        active = [lease for lease in self.queue.jobs.values() if lease.state is JobState.ACTIVE]
        return sorted(active, key=lambda a: (a.request.priority, -(a.admitted_s or 0.0), a.request.job))

    def end_emergency(self, now_s: float) -> Emergency | None:
        """Let jobs that were shed wait for admission again, and start softly; return the emergency that ended."""
        now_s, was = max(self.now_s, now_s), self.emergency
        self.emergency = None
        self.changed.add(("emergency", ""))
        for lease in self.queue.jobs.values():
            if lease.state is JobState.SHED:
                self.queue.requeue(lease)
                self.changed.add(("job", lease.request.job))
        self._admit(now_s)
        return was

    # -- time -----------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> float:
        """Advance to a time, and end what has ended by then."""
        now_s = self.now_s = max(self.now_s, now_s)
        ended = False
        while self._job_ends and self._job_ends[0][0] <= now_s:
            lease = self.queue.jobs.get(heapq.heappop(self._job_ends)[1])
            if lease is not None and lease.end_s <= now_s:
                self._end(lease, "expired")
                ended = True
        self.ledger.expire(now_s)
        if ended:
            self._admit(now_s)
        return now_s

    def _admit(self, now_s: float) -> None:
        if self.emergency is None:
            for lease in self.queue.admit(now_s, self.is_heard):
                self.changed.add(("job", lease.request.job))

    def is_heard(self, name: str) -> bool:
        """Return whether a node has sent a message within the time of a lease."""
        node = self.ledger.nodes.get(name)
        return node is not None and node.heard_s is not None and self.now_s - node.heard_s <= self.policy.lease_s

    @property
    def throttled_w(self) -> float:
        """Return the watts that are cut because measured power is near the limit."""
        return self._fill.cut_w

    def _update_fill(self, now_s: float) -> None:
        to_w = self.policy.limit_w if self.emergency is None else min(self.policy.limit_w, self.emergency.to_w)
        self._fill.update(now_s, to_w - self.queue.committed_w, self.queue.spread_w)

    # -- looking --------------------------------------------------------------------------------------------

    def _find_node(self, name: str) -> GovernedNode:
        node = self.ledger.nodes.get(name)
        if node is None:
            # did_you_mean compares with all names, which takes long in a large fleet
            near = did_you_mean(name, self.ledger.nodes) if len(self.ledger.nodes) < 256 else ""
            fix, why = f"on that node: tessera governor join --node {name}", "no daemon has joined for it"
            raise GovernorRefusal("unknown_node", f"there is no node {name!r}{near}", why=why, fix=fix)
        return node

    def find_job(self, name: str) -> JobLease:
        """Return a job that waits, runs or has ended."""
        lease = self.queue.jobs.get(name) or self.ended.get(name)
        if lease is None:
            fix, why = "`tessera governor status` lists the jobs", "it never asked for watts, or ended long ago"
            raise GovernorRefusal("unknown_job", f"there is no job {name!r}", why=why, fix=fix)
        return lease

    def describe_job(self, name: str) -> JobStatus:
        """Where a job stands."""
        lease, now_s = self.find_job(name), self.now_s
        granted_w = 0.0
        if lease.state is JobState.ACTIVE:
            granted_w = sum(round_down(self._fill.share_w(lease, node, now_s)) for node in lease.request.watts)
        return JobStatus(
            job=name,
            state=lease.state,
            asked_w=sum(lease.request.watts.values()),
            granted_w=granted_w,
            ends_in_s=max(0.0, lease.end_s - now_s) if lease.state is not JobState.ENDED else 0.0,
            position=self.queue.position(lease),
            reason=self.queue.explain_wait(lease, self.is_heard, self.emergency),
        )

    def describe_node(self, name: str) -> NodeStatus:
        """Where a node stands."""
        node, now_s = self._find_node(name), self.now_s
        return NodeStatus(
            node=name,
            guaranteed_w=node.guaranteed_w,
            exposure_w=self.ledger.exposure_w(name),
            measured_w=self._meters.read(name, now_s),
            jobs=tuple(self.queue.active_on(name)),
            heard_s_ago=None if node.heard_s is None else now_s - node.heard_s,
            joined=node.joined,
        )

    def describe(self, now_s: float) -> BudgetStatus:
        """Return the whole budget."""
        now_s = self.advance(now_s)
        return BudgetStatus(
            cap_w=self.policy.cap_w,
            limit_w=self.policy.limit_w,
            exposure_w=self.ledger.total_w,
            measured_w=self.measured_w(now_s),
            throttled_w=self.throttled_w,
            emergency=self.emergency,
            nodes=tuple(map(self.describe_node, self.ledger.nodes)),
            jobs=tuple(map(self.describe_job, self.queue.jobs)),
        )


def _refuse_session(node: str) -> GovernorRefusal:
    return GovernorRefusal(
        "conflict",
        f"another daemon speaks for node {node!r}",
        why="it joined later",
        fix="stop one of the two daemons",
    )
