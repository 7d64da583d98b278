"""Which jobs run: a queue by priority, age and what a user already has, and the watts that admitted jobs need.

All jobs age alike, so a job's place is fixed when it asks. Its key is the time of the request, earlier by `ageing_s`
for each level of priority, and later by as much for a user who already asks for the whole budget. Jobs behind one that
does not fit may go first until that one has waited for `patience_s`; from then on, they get nothing that it needs.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Callable

from ..errors import GovernorRefusal
from ..units import format_power
from .leases import PRIORITIES, BudgetPolicy, Emergency, JobLease, JobState, PowerRequest, round_down

BACKFILL, LOOKS = 64, 1024
"""BACKFILL: how many waiting jobs may not fit before the search for a gap ends.

LOOKS: how many are looked at in all.
"""


class JobQueue:
    """Jobs that wait and jobs that were admitted.

    The queue knows each node's guaranteed share and its largest power.
    """

    def __init__(self, policy: BudgetPolicy) -> None:
        self.policy = policy
        self.jobs: dict[str, JobLease] = {}
        self.committed_w = 0.0
        """Sum over nodes of the guaranteed share, or of what admitted jobs need at least if that is more."""
        self.spread_w = [0.0] * PRIORITIES
        """What admitted jobs asked for beyond the committed watts, by priority."""
        self._waiting: list[tuple[float, str]] = []  # (key, job), the next one first
        self._on_node: dict[str, dict[str, JobLease]] = {}
        self._share_w: dict[str, float] = {}
        self._max_w: dict[str, float] = {}
        self._least_w: dict[str, float] = {}
        self._user_w: dict[str, float] = {}

    def set_node(self, name: str, guaranteed_w: float, max_w: float | None) -> None:
        """Add a node, or note a change of its share."""
        self.committed_w -= self._commitment_w(name)
        self._share_w[name] = guaranteed_w
        self._max_w[name] = self.policy.limit_w if max_w is None else max_w
        self._on_node.setdefault(name, {})
        self.committed_w += self._commitment_w(name)

    def remove_node(self, name: str) -> None:
        """Forget a node that has no job."""
        self.committed_w -= self._commitment_w(name)
        for table in (self._share_w, self._max_w, self._least_w, self._on_node):
            table.pop(name, None)

    def unmet_w(self, node: str) -> float:
        """Return what a node is owed beyond the least of its jobs; all while it waits for its guaranteed share."""
        return self._commitment_w(node) - self._least_w.get(node, 0.0)

    def active_on(self, node: str) -> dict[str, JobLease]:
        """Return the admitted jobs of a node."""
        return self._on_node.get(node, {})

    def check_possible(self, request: PowerRequest) -> None:
        """Refuse a request that could never be admitted."""
        least_w = sum(self._share_w.values())
        for name in request.watts:
            need_w = request.least_w(name)
            least_w += max(0.0, need_w - self._share_w[name])
            if need_w > self._max_w[name]:
                raise GovernorRefusal(
                    "too_large",
                    f"job {request.job!r} needs {format_power(need_w)} on node {name!r}",
                    why=f"that node may draw {format_power(self._max_w[name])} at most",
                    fix="ask for less there, or for a lower min_share",
                )
        if least_w > self.policy.limit_w:
            raise GovernorRefusal(
                "too_large",
                f"job {request.job!r} can never be admitted",
                why=f"with guaranteed shares it needs {format_power(least_w)} of {format_power(self.policy.limit_w)}",
                fix="ask for less, or for a lower min_share",
            )

    def submit(self, request: PowerRequest, now_s: float, owner: str = "") -> JobLease:
        held = self._user_w.get(request.user, 0.0) / self.policy.limit_w
        key = now_s + self.policy.ageing_s * (held - request.priority)
        lease = JobLease(request=request, submitted_s=now_s, end_s=now_s + request.ttl_s, key=key, owner=owner)
        self.restore(lease)
        return lease

    def restore(self, lease: JobLease) -> None:
        """Take a job back as it is: waiting, admitted or shed."""
        self.jobs[lease.request.job] = lease
        self._count_user(lease, 1.0)
        if lease.state is JobState.QUEUED:
            bisect.insort(self._waiting, (lease.key, lease.request.job))
        elif lease.state is JobState.ACTIVE:
            self._count_active(lease, 1.0)

    def end(self, lease: JobLease, reason: str) -> None:
        self._leave(lease)
        self._count_user(lease, -1.0)
        lease.state, lease.reason = JobState.ENDED, reason
        del self.jobs[lease.request.job]

    def shed(self, lease: JobLease, reason: str) -> None:
        """Take the watts of an admitted job away."""
        self._leave(lease)
        lease.state, lease.reason, lease.admitted_s = JobState.SHED, reason, None

    def requeue(self, lease: JobLease) -> None:
        """Let a job that was admitted or shed wait again, at its old place."""
        self._leave(lease)
        lease.state, lease.reason, lease.admitted_s = JobState.QUEUED, "", None
        bisect.insort(self._waiting, (lease.key, lease.request.job))

    def admit(self, now_s: float, is_heard: Callable[[str], bool]) -> list[JobLease]:
        """Admit what fits, in order. Jobs of a silent node wait without delaying others."""
        admitted: list[JobLease] = []
        reserved_w, reserved, misses = 0.0, set[str](), 0
        for _, name in self._waiting[:LOOKS]:
            lease = self.jobs[name]
            nodes = lease.request.watts.keys()
            if not reserved.isdisjoint(nodes) or not all(map(is_heard, nodes)):
                continue
            more_w = self._more_w(lease.request)
            roomy = self.committed_w + reserved_w + more_w <= self.policy.limit_w
            if roomy and self._fits_nodes(lease.request):
                self._activate(lease, now_s)
                admitted.append(lease)
                continue
            misses += not roomy
            if misses >= BACKFILL:
                break
            if now_s - lease.submitted_s > self.policy.patience_s:
                reserved_w += more_w
                reserved |= nodes
        return admitted

    def explain_wait(self, lease: JobLease, is_heard: Callable[[str], bool], emergency: Emergency | None) -> str:
        """Return why a job waits, as far as the job itself shows it; for another job, why it is where it is."""
        request = lease.request
        if lease.state is not JobState.QUEUED:
            return lease.reason
        if emergency is not None:
            return f"emergency: {emergency.reason}"
        silent = [node for node in request.watts if not is_heard(node)]
        if silent:
            return f"node {silent[0]} is silent"
        free_w, more_w = max(0.0, self.policy.limit_w - self.committed_w), self._more_w(request)
        if more_w > free_w:
            return f"it needs {format_power(more_w)}, {format_power(free_w)} are free"
        full = next((node for node in request.watts if not self._fits_node(request, node)), None)
        if full is not None:
            return f"node {full} has no room for {format_power(request.least_w(full))} more beside its other jobs"
        return "jobs before it wait for the same watts"

    def position(self, lease: JobLease) -> int | None:
        """Return the place in the queue, from 1; None for a job that does not wait."""
        if lease.state is not JobState.QUEUED:
            return None
        return bisect.bisect_left(self._waiting, (lease.key, lease.request.job)) + 1

    def _leave(self, lease: JobLease) -> None:
        if lease.state is JobState.ACTIVE:
            self._count_active(lease, -1.0)
            lease.start_s = {}
        elif lease.state is JobState.QUEUED:
            del self._waiting[bisect.bisect_left(self._waiting, (lease.key, lease.request.job))]

    def _activate(self, lease: JobLease, now_s: float) -> None:
        self._leave(lease)
        low, high = self.policy.start_jitter_s
        jitter_s = low + (high - low) * zlib.crc32(lease.request.job.encode()) / 2**32
        lease.state, lease.admitted_s = JobState.ACTIVE, now_s
        lease.start_s = dict.fromkeys(lease.request.watts, now_s + jitter_s)
        self._count_active(lease, 1.0)

    def _more_w(self, request: PowerRequest) -> float:
        """Return how many watts admitting a job adds to the committed ones."""
        total_w = 0.0
        for name in request.watts:
            before_w = self._least_w.get(name, 0.0)
            share_w = self._share_w.get(name, 0.0)
            total_w += max(share_w, before_w + request.least_w(name)) - max(share_w, before_w)
        return total_w

    def _fits_nodes(self, request: PowerRequest) -> bool:
        return all(self._fits_node(request, name) for name in request.watts)

    def _fits_node(self, request: PowerRequest, name: str) -> bool:
        return self._least_w.get(name, 0.0) + request.least_w(name) <= self._max_w.get(name, 0.0)

    def _count_active(self, lease: JobLease, sign: float) -> None:
        request = lease.request
        for name, power_w in request.watts.items():
            least_w = request.least_w(name)
            self.spread_w[request.priority] += sign * (round_down(power_w) - least_w)
            self.committed_w -= self._commitment_w(name)
            self._least_w[name] = self._least_w.get(name, 0.0) + sign * least_w
            self.committed_w += self._commitment_w(name)
            jobs = self._on_node.setdefault(name, {})
            if sign > 0:
                jobs[request.job] = lease
            else:
                jobs.pop(request.job, None)

    def _commitment_w(self, name: str) -> float:
        return max(self._share_w.get(name, 0.0), self._least_w.get(name, 0.0))

    def _count_user(self, lease: JobLease, sign: float) -> None:
        user = lease.request.user
        power_w = self._user_w.get(user, 0.0) + sign * sum(map(round_down, lease.request.watts.values()))
        if power_w > 0.0:
            self._user_w[user] = power_w
        else:
            self._user_w.pop(user, None)
