"""The governor on Ray (extra `ray`): the service and the node daemons as actors, watts as a custom resource.

::

    start_governor(policy, state)        a detached actor that Ray starts again when it dies; its leases are on disk
    start_daemons(governor, 800.0)       one actor on every node that has the resource "watts"
    with power_lease(700.0): ...         inside a task with resources={"watts": 700}: asks, waits, renews, releases

Ray places tasks by "watts", as it does by "CPU"; the governor holds the sum of what nodes may draw, across jobs and
clusters. Ray's own network and authentication are used: the actors are for a cluster that you trust. The state's folder
must be reachable from wherever Ray may start the governor again: a shared disk, or pin it to one node.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import GovernorError, GovernorRefusal, needs_extra
from ...runtime.node_lease import lease_path
from ..leases import BudgetPolicy, CapGrant, JobState, JobStatus, NodeStatus, PowerRequest
from .daemon import LeaseFile, NodeDaemon
from .service import GovernorService, open_service

NAME, NAMESPACE, RESOURCE = "tessera-governor", "tessera", "watts"
CALL_S = 5.0
"""Seconds that a call may take; the node's cap falls back in time, whatever the network does."""
_ON_HEAD = {"node:__internal_head__": 0.001}  # Ray's own mark of the head node


def import_ray() -> Any:
    """Import Ray, or raise an error that says how to install it."""
    with needs_extra("ray", "ray", "the governor on Ray"):
        import ray
    return ray


class RayGovernor:
    """The actor's class: each call is decided, written to disk, and then answered."""

    def __init__(self, policy: BudgetPolicy, state: str) -> None:
        self._service: GovernorService = open_service(policy, Path(state) / "leases.db")
        self._lock = threading.Lock()

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """Call a method of `GovernorService`. A refusal comes back as a value, so that Ray does not wrap it."""
        with self._lock:
            try:
                answer = getattr(self._service, method)(**arguments)
            except GovernorRefusal as exc:
                answer = exc
            self._service.store.write(self._service.take_changes())
        return answer


class RayCalls:
    """The calls of a daemon or a task to the actor; it has the methods of `GovernorClient`."""

    def __init__(self) -> None:
        self._ray = import_ray()
        self._governor: Any = None  # the actor's handle

    def join(self, node: str, guaranteed_w: float, *, session: str, max_w: float | None = None) -> NodeStatus:
        return self._call("join", node=node, guaranteed_w=guaranteed_w, session=session, max_w=max_w)  # type: ignore[no-any-return]

    def heartbeat(self, node: str, *, session: str, acked: int, measured_w: float | None) -> CapGrant:
        return self._call("heartbeat", node=node, session=session, acked=acked, measured_w=measured_w)  # type: ignore[no-any-return]

    def report_power(self, measured_w: float) -> None:
        self._call("report_power", measured_w=measured_w)

    def request(self, request: PowerRequest) -> JobStatus:
        return self._call("request", request=request)  # type: ignore[no-any-return]

    def renew(self, job: str, ttl_s: float | None = None) -> JobStatus:
        return self._call("renew", job=job, ttl_s=ttl_s)  # type: ignore[no-any-return]

    def release(self, job: str) -> JobStatus:
        return self._call("release", job=job)  # type: ignore[no-any-return]

    def describe(self) -> Any:
        return self._call("describe")

    def _call(self, method: str, **arguments: Any) -> Any:
        try:
            if self._governor is None:
                self._governor = self._ray.get_actor(NAME, NAMESPACE)
            answer = self._ray.get(self._governor.call.remote(method, arguments), timeout=CALL_S)
        except (self._ray.exceptions.RayError, ValueError, ConnectionError, RuntimeError) as exc:
            self._governor = None  # it may have been started anew
            raise GovernorError(
                "the governor's actor cannot be asked", why=str(exc).splitlines()[0], fix="start_governor starts it"
            ) from exc
        if isinstance(answer, GovernorRefusal):
            raise answer
        return answer


class RayDaemon:
    """The actor's class of a node: a `NodeDaemon` in a thread."""

    def __init__(self, node: str, guaranteed_w: float, lease_file: str | None, heartbeat_s: float) -> None:
        self._stop = threading.Event()
        daemon = NodeDaemon(
            governor=RayCalls(),
            node=node,
            guaranteed_w=guaranteed_w,
            heartbeat_s=heartbeat_s,
            appliers=[LeaseFile(Path(lease_file) if lease_file else lease_path())],
        )
        self._thread = threading.Thread(target=daemon.run, args=(self._stop,), daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()


def start_governor(policy: BudgetPolicy, state: Path, **options: Any) -> Any:
    """Return the governor's actor, or the one that runs already. It is on the head, unless Ray's `options` differ."""
    actor = import_ray().remote(RayGovernor)
    # max_task_retries: a call that the actor's death cut short is repeated; every call does the same twice as once.
    more = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 3, "max_concurrency": 16, "resources": _ON_HEAD}
    named = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    return actor.options(**named, **{**more, **options}).remote(policy, str(state))


def start_daemons(guaranteed_w: float, *, lease_folder: Path | None = None, heartbeat_s: float = 2.0) -> dict[str, Any]:
    """Start one daemon on every living node with the resource "watts"; return them by Ray's id of the node.

    With `lease_folder`, each node's lease is written there to a file named by its id; otherwise where schedules look
    for it.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    daemons = {}
    for node in ray.nodes():
        name = node["NodeID"]
        if node["Alive"] and RESOURCE in node["Resources"]:
            place = NodeAffinitySchedulingStrategy(name, soft=False)
            path = None if lease_folder is None else str(lease_folder / f"{name}.json")
            # Detached, because otherwise Ray would end it with the program that started it.
            named = {"name": f"tessera-node-{name}", "lifetime": "detached", "get_if_exists": True}
            more = {"namespace": NAMESPACE, "num_cpus": 0, "max_restarts": -1, "scheduling_strategy": place}
            actor = ray.remote(RayDaemon).options(**named, **more)
            daemons[name] = actor.remote(name, guaranteed_w, path, heartbeat_s)
    return daemons


@contextlib.contextmanager
def power_lease(watts: float, *, wait_s: float = 3600.0, ttl_s: float = 30.0, **more: Any) -> Iterator[JobStatus]:
    """Hold a lease on this task's node while the block runs; `more` are fields of `PowerRequest`.

    A task that dies stops renewing, and its lease ends by itself after `ttl_s`.
    """
    ray, calls = import_ray(), RayCalls()
    node = ray.get_runtime_context().get_node_id()
    job = f"ray-{socket.gethostname()[:32]}-{uuid.uuid4().hex}"
    request = PowerRequest(job=job, watts={node: watts}, ttl_s=ttl_s, **more)
    done, admitted = threading.Event(), threading.Event()
    seen: list[JobStatus] = []

    def keep() -> None:
        """Ask, which is harmless to repeat, and renew, until the block ends."""
        while not done.is_set():
            with contextlib.suppress(GovernorError):
                calls.request(request)
                status = calls.renew(job)
                if status.state is JobState.ACTIVE and not admitted.is_set():
                    seen.append(status)
                    admitted.set()
            done.wait(min(ttl_s / 4, 1.0))

    keeper = threading.Thread(target=keep, name="tessera-lease", daemon=True)
    keeper.start()
    try:
        if not admitted.wait(wait_s):
            raise GovernorError(
                f"no lease of {watts:g} W within {wait_s:g} s",
                why="the budget is full, or the governor cannot be asked",
                fix="ask for less, wait longer, or look at the governor's status",
            )
        yield seen[0]
    finally:
        done.set()
        keeper.join(timeout=2 * CALL_S)
        with contextlib.suppress(GovernorError):
            calls.release(job)
