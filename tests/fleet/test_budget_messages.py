"""Messages that are lost, late, doubled and out of order, nodes and governors that die: the limit always holds.

Every node has a clock of its own: it starts elsewhere and runs up to the allowed drift slower or faster. What a node
really does is what its `CapHolder` says. The governor forgets everything but what a store would have kept.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from tessera.errors import GovernorRefusal
from tessera.fleet.budget import Budget
from tessera.fleet.leases import BudgetPolicy, Emergency, GovernedNode, JobLease, JobState, PowerRequest
from tessera.fleet.node_cap import CapHolder

NODES = ("n0", "n1", "n2")
POLICY = BudgetPolicy(
    cap_w=10_000.0, breaker_margin=0.8, soft_start_s=10.0, lease_s=20.0, heartbeat_s=2.0, patience_s=30.0, ageing_s=30.0
)


class FakeNode:
    """A node: its clock, its daemon (None: dead), and what it draws at most while no daemon runs."""

    def __init__(self, name: str, share_w: float, rate: float, offset_s: float) -> None:
        self.name, self.share_w, self.rate, self.offset_s = name, share_w, rate, offset_s
        self.holder: CapHolder | None = None
        self.session = 0
        self.joined_w = 0.0  # what it was told to be guaranteed

    def clock_s(self, now_s: float) -> float:
        return self.offset_s + self.rate * now_s

    def may_draw_w(self, now_s: float) -> float:
        return self.joined_w if self.holder is None else self.holder.cap_w(self.clock_s(now_s))


class Messages(RuleBasedStateMachine):
    """Random rules over a budget and three nodes."""

    heartbeats = Bundle("heartbeats")
    answers = Bundle("answers")

    @initialize(
        shares=st.tuples(*[st.sampled_from([0.0, 500.0, 1500.0])] * 3),
        rates=st.tuples(*[st.sampled_from([1.0 - 4e-4, 1.0, 1.0 + 4e-4])] * 3),
        offset_s=st.sampled_from([0.0, 1e6]),
        ramp=st.sampled_from([None, None, 1000.0]),
    )
    def start(self, shares, rates, offset_s, ramp) -> None:
        self.policy = replace(POLICY, ramp_w_per_s=ramp, start_jitter_s=(0.0, 1.0))
        self.now_s = 1000.0
        self.budget = Budget(self.policy)
        self.nodes = {n: FakeNode(n, s, r, offset_s) for n, s, r in zip(NODES, shares, rates, strict=True)}
        self.jobs = 0
        for name in NODES:
            self.daemon_starts(name)

    # -- time, crashes ----------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.01, 1.0, 2.0, 5.0, 16.9, 19.99, 20.01, 20.03, 60.0]))
    def wait(self, seconds) -> None:
        self.now_s += seconds

    @rule(beats=st.integers(1, 8), names=st.sampled_from([NODES, NODES[:1], NODES[1:], NODES[2:]]), acks=st.booleans())
    def all_goes_well_for_a_while(self, beats, names, acks) -> None:
        for _ in range(beats):
            self.now_s += 2.0
            for name in names:
                heartbeat = self.send_heartbeat(name, None)
                answer = self.deliver_heartbeat(heartbeat) if isinstance(heartbeat, tuple) else None
                if isinstance(answer, tuple):
                    self.deliver_answer(answer, acks)

    @rule(back_s=st.sampled_from([0.0, 5.0, 1e6]))
    def clock_of_the_governor_looks_back(self, back_s) -> None:
        """A monotonic clock cannot; the budget must not believe it if it does."""
        self.budget.advance(self.now_s - back_s)

    @rule()
    def governor_dies_and_starts_again(self) -> None:
        old = self.budget
        nodes, jobs = list(old.ledger.nodes.values()), [*old.ended.values(), *old.queue.jobs.values()]
        saved = msgspec.json.encode((nodes, jobs, old.emergency))
        kinds = tuple[list[GovernedNode], list[JobLease], Emergency | None]
        nodes, jobs, emergency = msgspec.json.decode(saved, type=kinds)
        self.budget = Budget.restore(self.policy, self.now_s, nodes=nodes, jobs=jobs, emergency=emergency)

    @rule(name=st.sampled_from(NODES))
    def daemon_starts(self, name) -> None:
        """Also while another one runs: then that one is killed first."""
        node = self.nodes[name]
        node.session += 1
        try:
            known = self.budget.join(self.now_s, name, node.share_w, session=str(node.session))
        except GovernorRefusal:
            return
        node.holder = CapHolder()
        if known.joined:
            node.joined_w = node.holder.guaranteed_w = known.guaranteed_w

    @rule(name=st.sampled_from(NODES))
    def daemon_dies(self, name) -> None:
        self.nodes[name].holder = None

    # -- messages ---------------------------------------------------------------------------------------------

    @rule(
        target=heartbeats, name=st.sampled_from(NODES), measured_w=st.sampled_from([None, 0.0, 2000.0, 9000.0, 20000.0])
    )
    def send_heartbeat(self, name, measured_w):
        node = self.nodes[name]
        if node.holder is None:
            return multiple()
        return (
            node.holder,
            node.session,
            node.holder.send(node.clock_s(self.now_s)),
            node.holder.acked,
            name,
            measured_w,
        )

    @rule(target=answers, heartbeat=heartbeats)  # any of them, any number of times
    def deliver_heartbeat(self, heartbeat):
        holder, session, number, acked, name, measured_w = heartbeat
        try:
            grant = self.budget.heartbeat(self.now_s, name, session=str(session), acked=acked, measured_w=measured_w)
        except GovernorRefusal:
            return multiple()
        return holder, number, grant

    @rule(answer=answers, applied=st.booleans())
    def deliver_answer(self, answer, applied) -> None:
        holder, number, grant = answer
        if holder.receive(number, grant):
            node = self.nodes[grant.node]
            if node.holder is holder:
                node.joined_w = grant.guaranteed_w
        if applied:
            holder.confirm()

    # -- jobs -------------------------------------------------------------------------------------------------

    @rule(
        watts=st.dictionaries(st.sampled_from(NODES), st.sampled_from([300.0, 3000.0, 6000.0, 7500.0]), min_size=1),
        priority=st.integers(0, 9),
        share=st.sampled_from([0.1, 0.3, 1.0]),
        soft_start_s=st.sampled_from([None, 0.0, 0.0]),
    )
    def ask(self, watts, priority, share, soft_start_s) -> None:
        self.jobs += 1
        request = PowerRequest(
            job=f"j{self.jobs}", watts=watts, priority=priority, min_share=share, ttl_s=200.0, soft_start_s=soft_start_s
        )
        for _ in range(2):  # doubled
            with contextlib.suppress(GovernorRefusal):
                self.budget.request(self.now_s, request)

    def choose_job(self, number) -> str | None:
        jobs = sorted(self.budget.queue.jobs)
        return jobs[number % len(jobs)] if jobs else None

    @rule(number=st.integers(0, 30))
    def renew(self, number) -> None:
        if job := self.choose_job(number):
            self.budget.renew(self.now_s, job)

    @rule(number=st.integers(0, 30))
    def release(self, number) -> None:
        if job := self.choose_job(number):
            self.budget.release(self.now_s, job)

    @rule(to_w=st.sampled_from([None, 1000.0, 5000.0]), ends=st.sampled_from([True, True, False]))
    def emergency(self, to_w, ends) -> None:
        self.budget.declare_emergency(self.now_s, "test", to_w)
        if ends:
            self.all_goes_well_for_a_while(2, NODES, True)
            self.budget.end_emergency(self.now_s)

    @rule()
    def emergency_ends(self) -> None:
        self.budget.end_emergency(self.now_s)

    @rule(name=st.sampled_from(NODES))
    def remove(self, name) -> None:
        """An operator may remove a node whose power is off."""
        node = self.nodes[name]
        if node.holder is None:
            try:
                self.budget.remove(self.now_s, name)
            except GovernorRefusal:
                return
            node.joined_w = 0.0

    # -- what must hold ---------------------------------------------------------------------------------------

    @invariant()
    def nodes_never_draw_more_than_the_limit(self) -> None:
        total_w = math.fsum(node.may_draw_w(self.now_s) for node in self.nodes.values())
        assert total_w <= self.policy.limit_w

    @invariant()
    def nobody_draws_more_than_the_ledger_says(self) -> None:
        ledger = self.budget.ledger
        assert ledger.total_w <= self.policy.limit_w
        assert ledger.total_w == sum(ledger.exposure_w(n) for n in ledger.nodes)
        for name, node in self.nodes.items():
            counted_w = ledger.exposure_w(name) if name in ledger.nodes else 0.0
            assert node.may_draw_w(self.now_s) <= counted_w

    @invariant()
    def sums_are_kept(self) -> None:
        queue = self.budget.queue
        active = [j for j in queue.jobs.values() if j.state is JobState.ACTIVE]
        committed_w = 0.0
        for name, node in self.budget.ledger.nodes.items():
            least_w = sum(j.request.least_w(name) for j in active if name in j.request.watts)
            committed_w += max(node.guaranteed_w, least_w)
        assert queue.committed_w == committed_w
        waiting = [j for j in queue.jobs.values() if j.state is JobState.QUEUED]
        assert sorted(queue.position(j) for j in waiting) == list(range(1, len(waiting) + 1))
        assert not set(queue.jobs) & set(self.budget.ended)


Messages.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestMessages = Messages.TestCase
