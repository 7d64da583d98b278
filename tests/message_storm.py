"""A rack in simulated time under everything that goes wrong; checks at every event that the limit holds.

Messages are lost, late, doubled and reordered, daemons and governors die, clocks run apart and step.

Used by tests/fleet/test_message_storm.py and by benchmarks/measure/governor_storm.py, which runs a million events.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tessera.errors import GovernorRefusal
from tessera.fleet.budget import Budget
from tessera.fleet.leases import BudgetPolicy, CapGrant, GovernedNode, JobLease, JobState, PowerRequest
from tessera.fleet.node_cap import CapHolder

LOST, DOUBLED, LATE = 0.05, 0.05, 0.05
"""Shares of the messages; a late one takes up to 40 s and is overtaken by others."""


@dataclass(slots=True)
class StormNode:
    """A node with a clock of its own. Without a daemon it keeps to its guaranteed share."""

    name: str
    rate: float
    offset_s: float
    guaranteed_w: float = 0.0
    holder: CapHolder | None = None
    session: int = 0

    def may_draw_w(self, now_s: float) -> float:
        if self.holder is None:
            return self.guaranteed_w
        return self.holder.cap_w(self.offset_s + self.rate * now_s)


@dataclass(slots=True)
class StormJob:
    """A job's client: it asks until it is heard, renews, works, and releases."""

    request: PowerRequest
    work_s: float
    asked_s: float
    admitted_s: float | None = None
    done: bool = False


@dataclass(slots=True, kw_only=True)
class StormResult:
    """What happened."""

    events: int = 0
    sim_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    highest_share: float = 0.0
    longest_wait_s: float = 0.0
    jobs_admitted: int = 0
    jobs_ended: int = 0
    problems: list[str] = field(default_factory=list)


class MessageStorm:
    """Runs until `events` have happened and all jobs have ended.

    `load` is the share of the limit that jobs need together while they come: above 1 the queue grows until none comes.
    """

    def __init__(
        self, *, nodes: int = 32, jobs: int = 500, events: int = 50_000, seed: int = 1, load: float = 0.45
    ) -> None:
        self.random = random.Random(seed)
        self.policy = BudgetPolicy(cap_w=1000.0 * nodes, soft_start_s=10.0, patience_s=120.0, ageing_s=120.0)
        self.budget = Budget(self.policy)
        self.up = True
        self.now_s = 1000.0
        self.events, self.jobs_left = events, jobs
        # Heartbeats of all nodes, with their answers, are most of the events: about 3 in 2 s for each.
        self.spacing_s = events / (2.2 * nodes) / max(jobs, 1)
        # Twice the time that all work takes, where it comes faster than it can be done.
        self.longest_s = self.now_s + 2.0 * max(1.0, load) * jobs * self.spacing_s + 2000.0
        # A job needs about 1,650 W (60% of 970 W on 2.8 nodes), and keeps them some seconds longer than it works.
        self.work_s = load * self.policy.limit_w / 1650.0 * self.spacing_s
        self.result = StormResult()
        self.jobs: dict[str, StormJob] = {}
        self.ends: dict[str, str] = {}  # how each job ended: it must not change
        self.rows: dict[tuple[str, str], bytes] = {}  # what a store would have
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.nodes = {}
        for i in range(nodes):
            rate = 1.0 + self.random.uniform(-4e-4, 4e-4)
            node = self.nodes[f"n{i}"] = StormNode(f"n{i}", rate, self.random.uniform(0, 1e6))
            self.at(self.random.random(), lambda node=node: self.start_daemon(node))
        self.at(5.0, self.new_job)
        self.at(30.0, self.kill_governor)
        self.at(10.0, self.kill_daemon)

    def at(self, in_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now_s + in_s, self._order, action))

    def run(self) -> StormResult:
        """Run it all."""
        while self._heap and (self.result.events < self.events or self.jobs_left or not self.all_done()):
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
            self.result.events += 1
            if self.now_s > self.longest_s:
                self.fail(f"{sum(not j.done for j in self.jobs.values())} jobs never end: they starve")
                break
        self.result.sim_s = self.now_s - 1000.0
        return self.result

    def all_done(self) -> bool:
        return all(job.done for job in self.jobs.values()) if self.result.events % 256 == 0 else False

    def fail(self, text: str) -> None:
        self.result.problems.append(f"{self.now_s:.3f} s: {text}")

    # -- the network ----------------------------------------------------------------------------------------

    def send(self, deliver: Callable[[], None]) -> None:
        """One message, which may be lost, doubled or late."""
        for _ in range(1 + (self.random.random() < DOUBLED)):
            if self.random.random() < LOST:
                self.result.counts["lost"] += 1
                continue
            late = self.random.random() < LATE
            self.result.counts["late"] += late
            self.at(self.random.uniform(0.0, 40.0) if late else self.random.expovariate(100.0), deliver)

    def ask_governor(self, call: Callable[[Budget], Any], answer: Callable[[Any], None]) -> None:
        def arrive() -> None:
            if not self.up:
                return
            try:
                result = call(self.budget)
            except GovernorRefusal as exc:
                result = exc
            self.store()
            self.send(lambda: answer(result))

        self.send(arrive)

    # -- the governor -----------------------------------------------------------------------------------------

    def store(self) -> None:
        """What a store writes before it answers."""
        budget = self.budget
        for kind, name in budget.changed:
            if kind == "node":
                row: Any = budget.ledger.nodes.get(name)
            elif kind == "job":
                row = budget.queue.jobs.get(name) or budget.ended.get(name)
                if (
                    row is not None
                    and row.state is JobState.ENDED
                    and self.ends.setdefault(name, row.reason) != row.reason
                ):
                    self.fail(f"{name} ended twice")
            else:
                continue
            self.rows[kind, name] = msgspec.msgpack.encode(row)
        budget.changed.clear()
        if budget.ledger.total_w > self.policy.limit_w:
            self.fail(f"{budget.ledger.total_w} W are allowed")

    def kill_governor(self) -> None:
        self.up = False
        self.result.counts["governor killed"] += 1
        self.at(self.random.uniform(0.1, 2.0), self.restart_governor)

    def restart_governor(self) -> None:
        old, kinds = self.budget, {"node": GovernedNode, "job": JobLease}
        rows = {key: msgspec.msgpack.decode(data, type=kinds[key[0]]) for key, data in self.rows.items()}
        nodes = [row for (kind, _), row in rows.items() if kind == "node"]
        jobs = [row for (kind, _), row in rows.items() if kind == "job"]
        self.budget = Budget.restore(self.policy, self.now_s, nodes=nodes, jobs=jobs)
        self.up = True
        if self.budget.queue.jobs.keys() != old.queue.jobs.keys() or self.budget.ended.keys() != old.ended.keys():
            self.fail("a restart lost or found a job")
        for job, lease in self.budget.queue.jobs.items():
            if lease != old.queue.jobs[job]:
                self.fail(f"a restart changed {job}")
        if self.budget.queue.committed_w != old.queue.committed_w:
            self.fail("a restart changed what is committed")
        self.budget.advance(self.now_s - self.random.choice([0.0, 10.0, 1e6]))  # a clock that looks back
        self.result.counts["clock stepped back"] += 1
        self.at(self.random.expovariate(1 / 60.0), self.kill_governor)

    # -- nodes ------------------------------------------------------------------------------------------------

    def start_daemon(self, node: StormNode) -> None:
        node.session += 1
        session, holder = str(node.session), CapHolder(node.guaranteed_w)

        def joined(known: Any) -> None:
            if node.session != int(session) or isinstance(known, GovernorRefusal) or node.holder is holder:
                return
            node.holder = holder
            if known.joined:
                node.guaranteed_w = holder.guaranteed_w = known.guaranteed_w
            self.check()
            self.beat(node, session)

        self.ask_governor(lambda b: b.join(self.now_s, node.name, 100.0, session=session), joined)
        self.at(5.0, lambda: self.retry_join(node, session, holder))

    def retry_join(self, node: StormNode, session: str, holder: CapHolder) -> None:
        if node.session == int(session) and node.holder is not holder:
            self.start_daemon(node)

    def beat(self, node: StormNode, session: str) -> None:
        holder = node.holder
        if holder is None or node.session != int(session):
            return
        number, acked = holder.send(node.offset_s + node.rate * self.now_s), holder.acked
        power_w = node.may_draw_w(self.now_s) * self.random.uniform(0.3, 1.0)

        def answer(grant: Any) -> None:
            if node.holder is not holder:
                return
            if not isinstance(grant, CapGrant):  # a late message of an earlier daemon took over: join again
                self.result.counts["joined again"] += 1
                self.start_daemon(node)
                return
            if holder.receive(number, grant):
                node.guaranteed_w = grant.guaranteed_w
                if self.random.random() < 0.98:  # else the driver refuses: the next one will do
                    holder.confirm()
            self.check(node)

        self.ask_governor(
            lambda b: b.heartbeat(self.now_s, node.name, session=session, acked=acked, measured_w=power_w), answer
        )
        self.at(self.policy.heartbeat_s, lambda: self.beat(node, session))

    def kill_daemon(self) -> None:
        node = self.random.choice(list(self.nodes.values()))
        self.result.counts["daemon killed"] += 1
        node.holder = None
        node.session += 1
        session = node.session
        self.at(self.random.uniform(0.5, 60.0), lambda: self.start_daemon(node) if node.session == session else None)
        self.at(self.random.expovariate(1 / 20.0), self.kill_daemon)

    def check(self, changed: StormNode | None = None) -> None:
        """After anything that may let a node draw more."""
        total_w = math.fsum(node.may_draw_w(self.now_s) for node in self.nodes.values())
        self.result.highest_share = max(self.result.highest_share, total_w / self.policy.limit_w)
        if total_w > self.policy.limit_w:
            self.fail(f"nodes may draw {total_w} W of {self.policy.limit_w} W")
        if changed is not None:
            exposed_w = self.budget.ledger.exposure_w(changed.name)
            if changed.may_draw_w(self.now_s) > exposed_w:
                self.fail(f"{changed.name} may draw more than the {exposed_w} W that are counted")

    # -- jobs -------------------------------------------------------------------------------------------------

    def new_job(self) -> None:
        self.jobs_left -= 1
        name = f"j{len(self.jobs)}"
        many = self.random.choice([1, 1, 1, 2, 4, 8])
        names = self.random.sample(sorted(self.nodes), min(many, len(self.nodes)))
        request = PowerRequest(
            job=name,
            watts={n: self.random.choice([200.0, 700.0, 2000.0]) for n in names},
            priority=self.random.randrange(10),
            user=self.random.choice("abc"),
            min_share=self.random.choice([0.3, 0.5, 1.0]),
            ttl_s=60.0,
        )
        job = self.jobs[name] = StormJob(request, self.random.expovariate(1 / self.work_s), self.now_s)
        self.poll(job)
        if self.jobs_left > 0:
            self.at(self.random.expovariate(1 / self.spacing_s), self.new_job)

    def poll(self, job: StormJob) -> None:
        """The client asks again and again, which also renews, until its work is done; then it releases."""
        if job.done:
            return
        name = job.request.job
        worked = job.admitted_s is not None and self.now_s - job.admitted_s >= job.work_s

        def ask(budget: Budget) -> Any:
            if worked:
                return budget.release(self.now_s, name)
            budget.request(self.now_s, job.request)
            return budget.renew(self.now_s, name)

        def answer(status: Any) -> None:
            if isinstance(status, GovernorRefusal):
                job.done = job.done or status.code == "too_large"
                return
            if status.state is JobState.ACTIVE and job.admitted_s is None and not job.done:
                job.admitted_s = self.now_s
                self.result.jobs_admitted += 1
                self.result.longest_wait_s = max(self.result.longest_wait_s, self.now_s - job.asked_s)
            if status.state is JobState.ENDED and not job.done:
                job.done = True
                self.result.jobs_ended += 1

        self.ask_governor(ask, answer)
        self.at(5.0, lambda: self.poll(job))
