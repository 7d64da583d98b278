"""A node's daemon: tells the governor what the node draws, and passes on what it may draw.

::

    network thread   sensors ──► heartbeat ──► governor ──► CapHolder
    main thread      CapHolder.cap_w(now) ──► lease file (schedules), driver (opted in) ──► confirmed by a heartbeat

The main thread never waits for the network: the cap falls back to the guaranteed share in time, whatever the governor
or the network do. Times are of CLOCK_BOOTTIME, which nobody can set.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...actuators import GpuHold, PowerLimit, find_gpu, hold_gpus, list_gpus
from ...clock import boot_id, read_boot_clock
from ...errors import ActuatorError, GovernorError, GovernorRefusal, TesseraError
from ...monitor.snapshot import Snapshot
from ...runtime.node_lease import NodeLease, write_lease
from ..leases import CapGrant, NodeStatus
from ..node_cap import CapHolder

TICK_S = 0.1
SETTLE_S = 1.0
"""Pacing and drivers reach a new cap within a second; it is confirmed only then."""
_RETRY_S = 1.0
NO_SHARE = "its guaranteed share is not free yet: other nodes may draw those watts until their leases or jobs end"
_FINAL = ("unauthorized", "forbidden", "too_large", "bad_request", "not_found", "full")
"""Refusals of a first join that are final until a person changes something."""


class GovernorCalls(Protocol):
    """The calls that a daemon makes to a governor: a `GovernorClient`, or an actor on Ray."""

    def join(self, node: str, guaranteed_w: float, *, session: str, max_w: float | None = None) -> NodeStatus: ...

    def heartbeat(self, node: str, *, session: str, acked: int, measured_w: float | None) -> CapGrant: ...

    def report_power(self, measured_w: float) -> None: ...


class CapApplier(Protocol):
    """Something that enforces a cap on this node."""

    def apply(self, cap_w: float, guaranteed_w: float, end_s: float) -> None:
        """Enforce `cap_w` from now on. Raises TesseraError if that fails."""

    def close(self) -> None:
        """Stop enforcing."""


class LeaseFile:
    """Passes caps to schedules: those with a `node:` cap, or with power_cap="governor"."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def apply(self, cap_w: float, guaranteed_w: float, end_s: float) -> None:
        """Write the lease. It ends by itself."""
        write_lease(self.path, NodeLease(cap_w=cap_w, guaranteed_w=guaranteed_w, end_s=end_s, boot=boot_id()))

    def close(self) -> None:
        """Leave the file: its readers fall back to the guaranteed share."""


class DriverCap:
    """Passes caps to the driver: each GPU gets an equal part of what the rest of the node (`host_w`) leaves."""

    def __init__(self, host_w: float) -> None:
        self._host_w = host_w
        self._gpus = list(list_gpus())
        if not self._gpus:
            raise ActuatorError("there is no GPU to control", fix="leave --control out: schedules then hold the cap")
        self._limits = [_read_limit(gpu) for gpu in self._gpus]
        self._hold: GpuHold | None = None  # None until the driver has once accepted a cap
        self._stack = contextlib.ExitStack()
        self.notes: set[str] = set()

    def apply(self, cap_w: float, guaranteed_w: float, end_s: float) -> None:
        """Set the limit, within what the driver accepts."""
        each_w = (cap_w - self._host_w) / len(self._gpus)
        low_w, high_w = max(x.min_w for x in self._limits), min(x.max_w for x in self._limits)
        if each_w < low_w:
            self.notes.add(f"the driver takes no limit below {low_w:g} W: {cap_w:g} W cannot be held by it alone")
        each_w = float(round(min(max(each_w, low_w), high_w)))
        if self._hold is None:
            self._hold = self._stack.enter_context(hold_gpus(self._gpus, cap_w=each_w))
        else:
            self._hold.change(cap_w=each_w)

    def close(self) -> None:
        """Restore the limits that were there before."""
        self._stack.close()


def _read_limit(gpu: str) -> PowerLimit:
    with contextlib.closing(find_gpu(gpu)) as actuator:
        return actuator.power_limit()


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonState:
    """A daemon at one moment, for people. `cap_w` is None until the governor has answered once."""

    node: str
    cap_w: float | None
    guaranteed_w: float
    leased: bool
    measured_w: float | None
    problem: str | None = None
    shed: bool = False
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _AppliedCap:
    """The cap that the appliers enforce, the grant it comes from, and since when."""

    grant: CapGrant
    cap_w: float
    since_s: float


@dataclass(slots=True, kw_only=True)
class NodeDaemon:
    """Speaks for a node. `read_power` gives (node, rack) in watts, each None where it is not measured."""

    governor: GovernorCalls
    node: str
    guaranteed_w: float
    appliers: Sequence[CapApplier]
    read_power: Callable[[], tuple[float | None, float | None]] = lambda: (None, None)
    max_w: float | None = None
    heartbeat_s: float = 2.0
    clock: Callable[[], float] = read_boot_clock
    settle_s: float = SETTLE_S
    on_change: Callable[[DaemonState], None] = lambda state: None
    refusal: GovernorRefusal | None = None
    """Why the governor will never accept this node as it is; `run` then ends."""
    _holder: CapHolder = field(default_factory=CapHolder)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _session: str = ""
    _problem: str | None = "not joined yet"
    _obstacle: str | None = None  # why an applier did not set the newest cap
    _measured_w: float | None = None
    _shown: tuple[object, ...] = ()
    _applied: _AppliedCap | None = None

    def run(self, stop: threading.Event) -> None:
        """Work until `stop`, or until a first join is refused for good. The node then keeps to its guaranteed share."""
        network = threading.Thread(target=self._talk, args=(stop,), name="tessera-governor", daemon=True)
        network.start()
        try:
            while not stop.wait(TICK_S) and self.refusal is None:
                self.enforce()
        finally:
            for applier in self.appliers:
                applier.close()
            network.join(timeout=2.0)

    def enforce(self) -> None:
        """Enforce the cap that is in force now, and confirm it when it had time to take effect."""
        now_s = self.clock()
        with self._lock:
            grant, share_w = self._holder.grant, self._holder.guaranteed_w
            cap_w, leased = self._holder.cap_w(now_s), self._holder.is_leased(now_s)
            end_s = self._holder.end_s
        was = self._applied
        if grant is not None and (was is None or (was.grant, was.cap_w) != (grant, cap_w)):
            self._obstacle = self._apply(cap_w, share_w, end_s)
            # An unchanged cap is in force already.
            since_s = was.since_s if was is not None and was.cap_w == cap_w else now_s
            # What was refused is tried again at the next tick; it is not confirmed until then.
            self._applied = was = _AppliedCap(grant, cap_w, since_s) if self._obstacle is None else None
        if was is not None and now_s - was.since_s >= self.settle_s:
            with self._lock:
                if self._holder.grant is was.grant:
                    self._holder.confirm()
        self._show(cap_w, leased)

    def _apply(self, cap_w: float, share_w: float, end_s: float) -> str | None:
        """Pass a cap to all appliers, also if one of them refuses it; return why one did."""
        obstacle = None
        for applier in self.appliers:
            try:
                applier.apply(cap_w, share_w, end_s)
            except TesseraError as exc:
                obstacle = exc.what
        return obstacle

    def _talk(self, stop: threading.Event) -> None:
        """Run the network thread: join, then send a heartbeat every `heartbeat_s`."""
        while not stop.is_set():
            began_s = time.monotonic()
            try:
                self.beat()
            except GovernorError as exc:  # refusals too
                self._problem = str(exc.what)
                # A daemon that has joined once stays: something must keep the node to its guaranteed share.
                if isinstance(exc, GovernorRefusal) and exc.code in _FINAL and self._holder.grant is None:
                    self.refusal = exc
                    return
            except TesseraError as exc:  # a sensor failed, but the lease must be renewed nevertheless
                self._problem = exc.what
            wait_s = self.heartbeat_s if self._problem is None else _RETRY_S
            stop.wait(max(0.05, wait_s - (time.monotonic() - began_s)))

    def beat(self) -> None:
        """Send one heartbeat; join first if the governor does not know this node."""
        if not self._session:
            self._join()
        node_w, rack_w = self.read_power()
        self._measured_w = node_w
        with self._lock:
            number, acked = self._holder.send(self.clock()), self._holder.acked
        try:
            grant = self.governor.heartbeat(self.node, session=self._session, acked=acked, measured_w=node_w)
        except GovernorRefusal as exc:
            if exc.code in ("conflict", "unknown_node"):  # the governor was set up anew, or an old message took over
                self._session = ""
            raise
        with self._lock:
            self._holder.receive(number, grant)
        if rack_w is not None:
            self.governor.report_power(rack_w)
        self._problem = None

    def _join(self) -> None:
        session = secrets.token_hex(8)
        known = self.governor.join(self.node, self.guaranteed_w, session=session, max_w=self.max_w)
        with self._lock:
            if known.joined:
                self._holder.guaranteed_w = known.guaranteed_w
        self._session = session

    def _show(self, cap_w: float, leased: bool) -> None:
        grant = self._holder.grant
        problem = self._obstacle or self._problem
        if problem is None and grant is not None and grant.guaranteed_w < self.guaranteed_w:
            problem = NO_SHARE
        jobs = tuple(grant.jobs) if grant is not None and leased else ()
        shed = grant is not None and grant.shed and leased
        state = DaemonState(
            node=self.node,
            cap_w=None if grant is None else cap_w,
            guaranteed_w=self._holder.guaranteed_w,
            leased=leased,
            measured_w=self._measured_w,
            problem=problem,
            shed=shed,
            jobs=jobs,
        )
        shown = (round(cap_w), leased, problem, shed, jobs)
        if shown != self._shown:
            self._shown = shown
            self.on_change(state)


def find_node_power(snapshot: Snapshot) -> tuple[float | None, float | None]:
    """Return (node, rack) watts from a machine's sensors.

    The node's is a BMC's figure for the whole node, or that of its supplies, or of GPUs and CPUs. The rack's is the sum
    of its PDUs, if a Redfish service has some.
    """
    power_w = {r.domain: r.power_w for r in snapshot.readings if r.power_w is not None}
    supplies = [w for name, w in power_w.items() if name.startswith("node.psu")]
    node_w = power_w.get("node", sum(supplies) if supplies else snapshot.power_w)
    pdus = [w for name, w in power_w.items() if name.startswith("rack.pdu.") and name.count(".") == 2]
    return node_w, sum(pdus) if pdus else None
