"""The decisions of a governor: what is admitted, in which order, how it rises, and what it falls back to."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tessera.errors import ArgumentError, GovernorRefusal
from tessera.fleet.budget import Budget
from tessera.fleet.leases import BudgetPolicy, GovernedNode, JobLease, JobState, PowerRequest
from tessera.fleet.node_cap import CapHolder

POLICY = BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, soft_start_s=60.0)


class Rack:
    """A budget with nodes whose messages all arrive."""

    def __init__(self, nodes: int = 4, policy: BudgetPolicy = POLICY, guaranteed_w: float = 500.0) -> None:
        self.budget, self.now_s = Budget(policy), 100.0
        self.caps: dict[str, float] = {}
        self.measured: dict[str, float] = {}
        self.acked: dict[str, int] = {}
        for i in range(nodes):
            self.budget.join(self.now_s, f"n{i}", guaranteed_w, session="a")
        self.beat()

    def beat(self, *names: str) -> None:
        for name in names or list(self.budget.ledger.nodes):
            grant = self.budget.heartbeat(
                self.now_s, name, session="a", acked=self.acked.get(name, 0), measured_w=self.measured.get(name)
            )
            self.caps[name], self.acked[name] = grant.cap_w, grant.seq

    def run(self, seconds: float, *names: str) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 2.0
            self.beat(*names)

    def ask(self, job: str, **watts: float) -> JobState:
        return self.request(PowerRequest(job=job, watts=watts, ttl_s=1e6))

    def request(self, request: PowerRequest) -> JobState:
        return self.budget.request(self.now_s, request).state


def test_a_job_rises_on_a_ramp_and_falls_when_it_ends() -> None:
    rack = Rack()
    assert rack.ask("a", n0=6000.0) is JobState.ACTIVE
    seen = []
    for _ in range(35):
        rack.run(2.0)
        seen.append(rack.caps["n0"])
    assert seen == sorted(seen)
    assert seen[0] == 500.0  # 2 s of 60 s are less than the guaranteed share
    assert seen[14] == pytest.approx(3000.0, abs=1.0)
    assert seen[-1] == 6000.0
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 6000.0 / 60.0 * 2.0 + 1.0
    rack.budget.release(rack.now_s, "a")
    rack.run(2.0)
    assert rack.caps["n0"] == 500.0


def test_what_does_not_fit_waits_and_comes_in_when_there_is_room() -> None:
    rack = Rack()
    rigid = {"min_share": 1.0, "ttl_s": 1e6}
    assert rack.request(PowerRequest(job="a", watts={"n0": 6000.0}, **rigid)) is JobState.ACTIVE
    assert rack.request(PowerRequest(job="b", watts={"n1": 3001.0}, **rigid)) is JobState.QUEUED
    assert rack.budget.describe_job("b").position == 1
    rack.budget.release(rack.now_s, "a")
    assert rack.budget.describe_job("b").state is JobState.ACTIVE


def test_a_request_twice_is_one_lease_and_an_ended_job_does_not_start_again() -> None:
    rack = Rack()
    rack.ask("a", n0=1000.0)
    before = rack.budget.queue.committed_w
    rack.ask("a", n0=1000.0)
    assert rack.budget.queue.committed_w == before
    with pytest.raises(GovernorRefusal, match="something else") as refused:
        rack.ask("a", n0=2000.0)
    assert refused.value.code == "conflict"
    rack.budget.release(rack.now_s, "a")
    assert rack.budget.release(rack.now_s, "a").state is JobState.ENDED
    assert rack.ask("a", n0=1000.0) is JobState.ENDED  # a late copy of the first message


def test_a_lease_that_nobody_renews_ends() -> None:
    rack = Rack()
    rack.request(PowerRequest(job="a", watts={"n0": 1000.0}, ttl_s=30.0))
    rack.run(20.0)
    rack.budget.renew(rack.now_s, "a")
    rack.run(28.0)
    assert rack.budget.describe_job("a").state is JobState.ACTIVE
    rack.run(4.0)
    ended = rack.budget.describe_job("a")
    assert (ended.state, ended.reason) == (JobState.ENDED, "expired")


def test_a_lost_node_keeps_its_watts_until_its_lease_ends() -> None:
    rack = Rack(2, BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, soft_start_s=0.0))
    rack.ask("a", n0=9000.0)
    rack.beat()
    assert rack.caps["n0"] == 9000.0
    rack.budget.release(rack.now_s, "a")  # n0 does not hear of it
    rack.ask("b", n1=9000.0)
    rack.run(18.0, "n1")
    assert rack.caps["n1"] == 1000.0  # what n0 does not have
    rack.run(4.0, "n1")
    assert rack.caps["n1"] == 9000.0


def test_a_node_that_obeys_a_smaller_grant_frees_the_difference_at_once() -> None:
    rack = Rack(2, BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, soft_start_s=0.0))
    rack.ask("a", n0=9000.0)
    rack.beat()
    rack.budget.release(rack.now_s, "a")
    rack.ask("b", n1=9000.0)
    rack.beat("n0")  # is told 500 W
    rack.beat("n1")
    assert rack.caps["n1"] == 1000.0
    rack.beat("n0")  # says that it obeys
    rack.beat("n1")
    assert rack.caps["n1"] == 9000.0


def test_the_highest_priority_is_filled_first_and_throttling_takes_from_the_lowest() -> None:
    rack = Rack(3, BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, soft_start_s=0.0), guaranteed_w=0.0)
    for node, priority in (("n0", 9), ("n1", 5), ("n2", 1)):
        rack.request(PowerRequest(job=node, watts={node: 4000.0}, priority=priority, ttl_s=1e6))
    rack.run(40.0)
    assert rack.caps == {"n0": 4000.0, "n1": 4000.0, "n2": 2000.0}
    rack.budget.release(rack.now_s, "n1")
    rack.run(40.0)
    assert rack.caps == {"n0": 4000.0, "n1": 0.0, "n2": 4000.0}
    rack.measured = {"n0": 5500.0, "n1": 0.0, "n2": 4400.0}  # 200 W above 97% of the limit
    rack.run(4.0)
    assert (rack.caps["n0"], rack.caps["n2"]) == (4000.0, 3800.0)
    rack.measured = {"n0": 4500.0, "n1": 0.0, "n2": 4000.0}
    rack.run(40.0)
    assert rack.caps["n2"] == 4000.0


def test_an_emergency_sheds_the_lowest_priority_and_ends_with_a_soft_start() -> None:
    rack = Rack(2, POLICY)
    rack.request(PowerRequest(job="low", watts={"n0": 4000.0}, priority=1, ttl_s=1e6))
    rack.request(PowerRequest(job="high", watts={"n1": 4000.0}, priority=8, ttl_s=1e6))
    rack.run(80.0)
    rack.budget.declare_emergency(rack.now_s, "feed lost", 3000.0)
    rack.run(2.0)
    assert rack.caps["n0"] == 500.0
    assert rack.caps["n1"] <= 2500.0
    assert rack.budget.describe_job("low").state is JobState.SHED
    assert rack.budget.describe_job("low").reason == "feed lost"
    rack.budget.end_emergency(rack.now_s)
    rack.run(2.0)
    assert rack.caps["n0"] == 500.0  # rises again from there
    rack.run(80.0)
    assert rack.caps == {"n0": 4000.0, "n1": 4000.0}


def test_measured_power_above_the_cap_is_an_emergency_until_it_is_low_again() -> None:
    rack = Rack(2, BudgetPolicy(cap_w=10_000.0, breaker_margin=0.8, soft_start_s=30.0))
    rack.request(PowerRequest(job="a", watts={"n0": 7000.0}, min_share=1.0, ttl_s=1e6))
    rack.run(40.0)
    rack.measured = {"n0": 10_500.0}  # it does not keep its cap
    rack.run(4.0)
    assert rack.budget.emergency is not None
    assert rack.budget.emergency.automatic
    assert rack.caps["n0"] == 500.0
    rack.measured = {"n0": 500.0}
    rack.run(40.0)
    assert rack.budget.emergency is None
    assert rack.budget.describe_job("a").state is JobState.ACTIVE


def test_the_rack_meter_counts_instead_of_the_nodes() -> None:
    rack = Rack(1, BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, soft_start_s=0.0))
    rack.ask("a", n0=8000.0)
    rack.measured = {"n0": 1000.0}
    rack.run(2.0)
    rack.budget.report_power(rack.now_s, 9900.0)  # a switch, fans, a server without a daemon
    rack.run(2.0)
    assert rack.caps["n0"] == pytest.approx(8000.0 - 200.0)


def test_a_large_job_does_not_starve_behind_small_ones() -> None:
    rack = Rack(4, BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, patience_s=100.0, soft_start_s=0.0), 0.0)
    rigid = {"min_share": 1.0}
    count = 0

    def small() -> None:
        nonlocal count
        rack.request(PowerRequest(job=f"s{count}", watts={f"n{count % 3}": 2500.0}, ttl_s=40.0, **rigid))
        count += 1

    for _ in range(4):
        small()
        rack.run(10.0)
    assert rack.request(PowerRequest(job="large", watts={"n3": 9000.0}, ttl_s=1e6, **rigid)) is JobState.QUEUED
    while rack.budget.describe_job("large").state is JobState.QUEUED:
        rack.run(10.0)
        small()
        assert rack.now_s < 1000.0, "it starves"
    assert count > 10  # others went first for a while


def test_waiting_is_worth_priority_and_a_user_who_has_much_comes_later() -> None:
    rack = Rack(2, BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, ageing_s=100.0), 0.0)
    rack.request(PowerRequest(job="all", watts={"n0": 10_000.0}, min_share=1.0, user="u", ttl_s=1e6))
    for job, user, priority in (("again", "u", 5), ("other", "v", 5), ("low", "v", 4)):
        rack.request(PowerRequest(job=job, watts={"n1": 5000.0}, user=user, priority=priority, ttl_s=1e6))
    places = {job: rack.budget.describe_job(job).position for job in ("again", "other", "low")}
    assert places["other"] == 1
    rack.now_s += 500.0
    rack.request(PowerRequest(job="late", watts={"n1": 5000.0}, user="w", priority=8, ttl_s=1e6))
    assert rack.budget.describe_job("late").position == 4


def test_what_can_never_fit_is_refused() -> None:
    rack = Rack()
    with pytest.raises(GovernorRefusal, match="never") as refused:
        rack.request(PowerRequest(job="a", watts={"n0": 9000.0}, min_share=1.0))
    assert refused.value.code == "too_large"
    with pytest.raises(GovernorRefusal, match="no node 'n9'"):
        rack.ask("a", n9=1.0)
    with pytest.raises(GovernorRefusal, match="guaranteed"):
        rack.budget.join(rack.now_s, "big", 8500.0)
    with pytest.raises(GovernorRefusal, match="no job"):
        rack.budget.renew(rack.now_s, "nothing")
    with pytest.raises(ArgumentError, match="min_share"):
        PowerRequest(job="a", watts={"n0": 1.0}, min_share=0.0)
    with pytest.raises(ArgumentError, match="too short for a heartbeat"):
        BudgetPolicy(cap_w=1.0, lease_s=2.0)


def test_a_node_that_joins_a_full_rack_waits_for_its_share() -> None:
    rack = Rack(1, BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, soft_start_s=0.0))
    rack.ask("a", n0=10_000.0)
    rack.beat()
    node = rack.budget.join(rack.now_s, "new", 2000.0, session="a")
    assert not node.joined
    rack.beat("new")
    assert rack.caps["new"] == 0.0
    rack.run(4.0)
    assert node.joined
    assert rack.caps == {"n0": 8000.0, "new": 2000.0}


def test_an_earlier_daemon_no_longer_speaks_for_a_node() -> None:
    rack = Rack(1)
    rack.budget.join(rack.now_s, "n0", 500.0, session="b")
    with pytest.raises(GovernorRefusal, match="another daemon"):
        rack.beat("n0")
    with pytest.raises(GovernorRefusal, match="another daemon"):
        rack.budget.join(rack.now_s, "n0", 500.0, session="a")


def test_a_node_can_be_removed_once_it_holds_nothing() -> None:
    rack = Rack(2)
    rack.ask("a", n0=4000.0)
    rack.run(60.0)
    with pytest.raises(GovernorRefusal, match="jobs or a lease"):
        rack.budget.remove(rack.now_s, "n0")
    rack.budget.release(rack.now_s, "a")
    rack.run(4.0)
    rack.budget.remove(rack.now_s, "n0")
    assert rack.budget.describe(rack.now_s).exposure_w == 500.0
    assert rack.budget.queue.committed_w == 500.0


def test_all_rises_share_one_ramp() -> None:
    rack = Rack(4, BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, soft_start_s=0.0, ramp_w_per_s=50.0), 0.0)
    rack.ask("a", n0=2000.0, n1=2000.0, n2=2000.0, n3=2000.0)
    before = 0.0
    for _ in range(90):
        rack.run(2.0)
        total = sum(rack.caps.values())
        assert total - before <= 100.0 + 1.0
        before = total
    assert before == 8000.0


def test_a_saved_budget_goes_on_as_before() -> None:
    rack = Rack()
    rack.ask("a", n0=6000.0, n1=1000.0)
    rack.ask("b", n2=9000.0)
    rack.ask("c", n3=9000.0)
    rack.run(30.0)
    budget = rack.budget
    nodes = msgspec.json.decode(msgspec.json.encode(list(budget.ledger.nodes.values())), type=list[GovernedNode])
    jobs = msgspec.json.decode(msgspec.json.encode(list(budget.queue.jobs.values())), type=list[JobLease])
    again = Budget.restore(budget.policy, rack.now_s, nodes=nodes, jobs=jobs)
    assert again.ledger.total_w == budget.ledger.total_w
    assert again.queue.committed_w == budget.queue.committed_w
    assert again.queue.spread_w == budget.queue.spread_w
    assert {j: again.describe_job(j).state for j in "abc"} == {j: budget.describe_job(j).state for j in "abc"}


def test_a_node_falls_back_before_its_lease_ends_and_ignores_older_answers() -> None:
    budget, holder = Budget(POLICY), CapHolder()
    budget.join(0.0, "n", 500.0)
    budget.request(0.0, PowerRequest(job="a", watts={"n": 3000.0}, soft_start_s=0.0, ttl_s=1e6))
    first, second = holder.send(1000.0), holder.send(1002.0)  # the node has a clock of its own
    one, two = budget.heartbeat(1.0, "n"), budget.heartbeat(3.0, "n")
    assert holder.receive(second, two)
    assert not holder.receive(first, one)
    assert not holder.receive(second, two)
    assert holder.acked == 0
    holder.confirm()
    assert (holder.acked, holder.cap_w(1003.0)) == (2, 3000.0)
    assert holder.cap_w(1002.0 + 20.0 - 3.0) == 500.0
    assert not holder.is_leased(1020.0)


def restart(rack: Rack, cap_w: float) -> None:
    """The governor starts again with another cap, and all nodes go on."""
    was = rack.budget
    policy = BudgetPolicy(cap_w=cap_w, breaker_margin=1.0, soft_start_s=60.0)
    rack.budget = Budget.restore(
        policy, rack.now_s, nodes=was.ledger.nodes.values(), jobs=was.queue.jobs.values(), emergency=was.emergency
    )


def test_a_smaller_cap_after_a_restart_leaves_no_job_below_its_least() -> None:
    rack = Rack(nodes=2)
    for name, node, priority in (("low", "n0", 3), ("high", "n1", 7)):
        rack.request(PowerRequest(job=name, watts={node: 4000.0}, priority=priority, min_share=0.8, ttl_s=1e6))
    rack.run(80.0)
    restart(rack, 5000.0)  # 3.2 kW each, where 500 W stay with the other node: one fits
    rack.run(80.0)
    low, high = (rack.budget.describe_job(name) for name in ("low", "high"))
    assert (low.state, high.state) == (JobState.QUEUED, JobState.ACTIVE)
    assert low.reason == "it needs 2.7 kW, 1.3 kW are free"
    assert high.granted_w >= 3200.0 and rack.caps["n1"] >= 3200.0
    restart(rack, 10_000.0)
    rack.run(80.0)
    rack.budget.release(rack.now_s, "high")  # what is free is given out
    rack.run(80.0)
    assert rack.budget.describe_job("low").granted_w == 4000.0


def test_a_restart_with_the_same_cap_takes_nothing_away_though_a_node_waits() -> None:
    rack = Rack(nodes=2)
    rack.request(PowerRequest(job="a", watts={"n0": 9500.0}, min_share=1.0, ttl_s=1e6))
    rack.run(80.0)
    rack.budget.join(rack.now_s, "late", 500.0, session="a")  # nothing is free for it
    restart(rack, 10_000.0)
    assert rack.budget.describe_job("a").state is JobState.ACTIVE
    assert not rack.budget.describe_node("late").joined


@pytest.mark.parametrize(
    ("watts", "reason"),
    [
        ({"n1": 9000.0}, "it needs 8.5 kW, 3 kW are free"),
        ({"n0": 400.0, "n9": 400.0}, "node n9 is silent"),
    ],
)
def test_a_job_that_waits_says_why(watts: dict[str, float], reason: str) -> None:
    rack = Rack(nodes=2)
    rack.budget.join(rack.now_s, "n9", 0.0, session="a")
    rack.request(PowerRequest(job="a", watts={"n0": 6500.0}, min_share=1.0, ttl_s=1e6))
    rack.run(30.0, "n0", "n1")
    rack.request(PowerRequest(job="b", watts=watts, min_share=1.0, ttl_s=1e6))
    status = rack.budget.describe_job("b")
    assert (status.state, status.reason) == (JobState.QUEUED, reason)
    rack.budget.declare_emergency(rack.now_s, "feed B lost")
    assert rack.budget.describe_job("b").reason == "emergency: feed B lost"
