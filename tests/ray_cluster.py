"""A rack on a local Ray cluster of four nodes: a node is killed, then the head. For the test and for the benchmark."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.cluster_utils import Cluster

from tessera.clock import read_boot_clock
from tessera.errors import GovernorError
from tessera.fleet.governor.ray_adapter import RESOURCE, RayCalls, power_lease, start_daemons, start_governor
from tessera.fleet.leases import BudgetPolicy
from tessera.runtime.node_lease import NodeLease

POLICY = BudgetPolicy(cap_w=10_000.0, breaker_margin=0.8, soft_start_s=1.0, lease_s=6.0, heartbeat_s=0.5)
SHARE_W, ASKED_W = 500.0, 3000.0


class LeaseWatch:
    """Adds up, all the time, what the nodes' lease files allow."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.highest_w, self.looks = folder, 0.0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def allowed(self) -> dict[str, float]:
        now_s, found = read_boot_clock(), {}
        for path in self.folder.glob("*.json"):
            try:
                found[path.stem] = msgspec.json.decode(path.read_bytes(), type=NodeLease).allow_w(now_s)
            except (OSError, msgspec.DecodeError):
                continue
        return found

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.highest_w = max(self.highest_w, sum(self.allowed().values()))
            self.looks += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def wait_for(condition: Any, timeout_s: float = 180.0) -> float:
    """Wait until it holds; the seconds that took."""
    started = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - started
        except GovernorError:
            pass
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"it does not happen: {RayCalls().describe()}")
        time.sleep(0.05)


def start_cluster(nodes: int = 4) -> Cluster:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(nodes):
        cluster.add_node(num_cpus=1, resources={RESOURCE: ASKED_W})
    ray.init(address=cluster.address, namespace="tessera", log_to_driver=False)
    cluster.wait_for_nodes()
    return cluster


def hold_lease(seconds: float) -> str:
    """The task: works under a lease."""
    with power_lease(ASKED_W, min_share=0.3, ttl_s=8.0):
        time.sleep(seconds)
    return ray.get_runtime_context().get_node_id()


def run_scenario(folder: Path) -> dict[str, Any]:
    """Kill a node, then the head, and start the cluster again with the same state."""
    state, leases = folder / "state", folder / "leases"
    leases.mkdir()
    result: dict[str, Any] = {"nodes": 4, "limit_w": POLICY.limit_w, "lease_s": POLICY.lease_s}
    watch, cluster = LeaseWatch(leases), start_cluster()
    try:
        start_governor(POLICY, state)
        daemons = start_daemons(SHARE_W, lease_folder=leases, heartbeat_s=POLICY.heartbeat_s)
        calls = RayCalls()
        wait_for(lambda: len([n for n in calls.describe().nodes if n.joined]) == 4)
        task = ray.remote(hold_lease).options(num_cpus=1, resources={RESOURCE: ASKED_W}, max_retries=0)
        tasks = [task.remote(600.0) for _ in range(4)]
        wait_for(lambda: sum(j.state == "active" for j in calls.describe().jobs) == 4)
        wait_for(lambda: sum(watch.allowed().values()) > 0.97 * POLICY.limit_w)
        result["jobs_active"] = 4

        # A node dies: its watts are counted until its lease has ended, then others get them.
        victim = cluster.list_all_nodes()[1]
        name = victim.node_id
        before_w = {n.node: n.exposure_w for n in calls.describe().nodes}
        cluster.remove_node(victim, allow_graceful=False)
        exposed = {n.node: n.exposure_w for n in calls.describe().nodes}
        result["lost_node_w"] = exposed[name]
        assert exposed[name] >= 0.9 * before_w[name], "its watts were given away before its lease ended"
        others = [n for n in daemons if n != name]
        result["reclaimed_after_s"] = wait_for(
            lambda: {n.node: n.exposure_w for n in calls.describe().nodes}[name] <= SHARE_W
        )
        result["others_got_it_after_s"] = wait_for(
            lambda: sum(watch.allowed()[n] for n in others) > 0.97 * (POLICY.limit_w - SHARE_W)
        )
        result["highest_w_node_killed"] = watch.highest_w

        # The head dies, and with it the governor and in the end the cluster: nodes fall back by themselves.
        jobs_before = {j.job for j in calls.describe().jobs}
        cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        result["fell_back_after_s"] = wait_for(lambda: max(watch.allowed().values()) <= SHARE_W)
        ray.shutdown()
        cluster.shutdown()
        del tasks

        # A new head, the same state: the leases are there, new nodes join, and the watts rise again.
        for path in leases.glob("*.json"):
            path.unlink()  # the old nodes are switched off
        started = time.monotonic()
        cluster = start_cluster()
        start_governor(POLICY, state)
        calls = RayCalls()
        wait_for(calls.describe)
        status = calls.describe()
        result["restarted_after_s"] = time.monotonic() - started
        result["nodes_remembered"] = len(status.nodes)
        result["jobs_remembered_or_ended"] = len(jobs_before)
        start_daemons(SHARE_W, lease_folder=leases, heartbeat_s=POLICY.heartbeat_s)
        wait_for(lambda: len(watch.allowed()) == 4)  # the new nodes have leases
        tasks = [task.remote(600.0) for _ in range(2)]
        result["recovered_after_s"] = wait_for(
            lambda: sum(j.state == "active" and j.granted_w > 0.9 * ASKED_W * 0.3 for j in calls.describe().jobs) >= 2
        )
        del tasks
    finally:
        watch.stop()
        ray.shutdown()
        cluster.shutdown()
    result |= {"highest_w": watch.highest_w, "looks": watch.looks, "cap_held": watch.highest_w <= POLICY.limit_w}
    return result
