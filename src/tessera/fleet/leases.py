"""The values of a power budget: what is asked for, what is leased, what a node may draw.

All times are seconds of one monotonic clock. Powers are watts, rounded to 1/1024 W so that sums of floats are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from ..errors import ArgumentError, check_positive

if TYPE_CHECKING:
    from ..policy import RackPowerGovernor

PRIORITIES = 10
"""Priorities are 0 (lowest) to 9 (highest)."""
_STEPS_PER_W = 1024.0


def round_down(power_w: float) -> float:
    """Return the next lower multiple of 1/1024 W. Up to 2**43 W such floats add up without any rounding."""
    return math.floor(power_w * _STEPS_PER_W) / _STEPS_PER_W


def round_up(power_w: float) -> float:
    """Return the next higher multiple of 1/1024 W."""
    return math.ceil(power_w * _STEPS_PER_W) / _STEPS_PER_W


SENSOR_ERROR = 0.05
"""A reading above a lease by at most this share may be the sensor's error (NVML: within 5%)."""


def find_excess_w(power_w: float | None, leased_w: float | None) -> float:
    """Return what is drawn above a lease; 0 if that is within a sensor's error, or not known."""
    if power_w is None or leased_w is None or power_w <= (1 + SENSOR_ERROR) * leased_w:
        return 0.0
    return power_w - leased_w


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPolicy:
    """How a budget is divided. Leases together never exceed `limit_w`, the breaker's margin of the cap."""

    cap_w: float
    breaker_margin: float = 0.8
    """NEC (NFPA 70) 210.20(A): a continuous load of more than 80% of its rating may trip a breaker."""
    soft_start_s: float = 60.0
    """A job's watts rise from nothing to all of them over this time: 30 to 120 s by the energy guide, 9.3 F."""
    start_jitter_s: tuple[float, float] = (0.0, 0.0)
    ramp_w_per_s: float | None = None
    """The fastest rise of all leases together; None: limited only by the soft starts."""
    lease_s: float = 20.0
    heartbeat_s: float = 2.0
    near: float = 0.97
    """Measured power above this share of `limit_w` throttles."""
    ageing_s: float = 300.0
    """Waiting for this many seconds is worth one level of priority."""
    patience_s: float = 300.0
    """After this many seconds, nothing that a waiting job needs is given to jobs behind it."""
    drift: float = 1e-3
    """Clocks of two machines may differ in speed by this share.

    Linux slews by 5e-4 at most, and crystals err by 1e-4.
    """

    def __post_init__(self) -> None:
        low, high = self.start_jitter_s
        for name in ("cap_w", "lease_s", "heartbeat_s", "ageing_s"):
            check_positive(name, getattr(self, name))
        if not 0 < self.breaker_margin <= 1 or not 0 < self.near <= 1:
            raise ArgumentError("breaker_margin and near are shares from 0 to 1", fix="breaker_margin=0.8")
        if not 0 <= self.soft_start_s < math.inf or not 0 <= low <= high < math.inf or not 0 <= self.drift < 0.1:
            raise ArgumentError("soft start, jitter and drift of a budget must not be negative")
        if self.ramp_w_per_s is not None:
            check_positive("ramp_w_per_s", self.ramp_w_per_s)
        if self.lease_s < 3 * self.heartbeat_s:
            raise ArgumentError(
                f"a lease of {self.lease_s:g} s is too short for a heartbeat every {self.heartbeat_s:g} s",
                why="one lost message would end it",
                fix="make the lease at least three heartbeats long",
            )

    @property
    def limit_w(self) -> float:
        """Return what all nodes together may draw."""
        return round_down(self.cap_w * self.breaker_margin)

    @classmethod
    def from_rack(cls, rack: RackPowerGovernor) -> BudgetPolicy:
        """Return the budget of a `rack_power_governor:` section."""
        return cls(
            cap_w=rack.rack_cap_w,
            soft_start_s=rack.soft_start_s,
            start_jitter_s=rack.per_rack_jitter_s,
            breaker_margin=rack.breaker_margin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerRequest:
    """A job's request for watts on nodes: on all of them, or none.

    `min_share` is the share of its watts that the job needs to be useful: throttling goes no lower. `ttl_s` is how long
    the lease lasts without being renewed, also while the job waits.
    """

    job: str
    watts: Mapping[str, float]
    priority: int = 5
    user: str = ""
    min_share: float = 0.5
    ttl_s: float = 60.0
    soft_start_s: float | None = None

    def __post_init__(self) -> None:
        if not self.job or not self.watts:
            raise ArgumentError("a request names a job, and at least one node with its watts")
        for node, power_w in self.watts.items():
            check_positive(f"watts[{node!r}]", power_w)
        if not 0 <= self.priority < PRIORITIES:
            raise ArgumentError(f"priority={self.priority!r} must be from 0 to {PRIORITIES - 1}")
        if not 0 < self.min_share <= 1:
            raise ArgumentError(f"min_share={self.min_share!r} must be above 0, and 1 at most")
        check_positive("ttl_s", self.ttl_s)
        if self.soft_start_s is not None and not 0 <= self.soft_start_s < math.inf:
            raise ArgumentError(f"soft_start_s={self.soft_start_s!r} must not be negative")

    def least_w(self, node: str) -> float:
        """Return the watts that the job needs on a node."""
        return min(round_up(self.watts[node] * self.min_share), round_down(self.watts[node]))


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    ACTIVE = "active"
    SHED = "shed"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True)
class JobLease:
    """A job of a budget. `key` orders the queue; `start_s` is when its watts begin to rise on each node."""

    request: PowerRequest
    submitted_s: float
    end_s: float
    key: float
    state: JobState = JobState.QUEUED
    admitted_s: float | None = None
    start_s: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    owner: str = ""
    """The name of the token that asked: only this token and operators may renew or end the job. Empty: anybody may."""


@dataclass(frozen=True, slots=True)
class CapGrant:
    """A node may draw `cap_w` for `lease_s` from when it *sent* the heartbeat that this answers; then `guaranteed_w`.

    Among several grants, a node obeys the one with the highest `seq`.
    """

    node: str
    seq: int
    cap_w: float
    guaranteed_w: float
    lease_s: float
    shed: bool = False
    jobs: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class GovernedNode:
    """A node of a budget. `outstanding` has every grant that it may still obey: (seq, watts, end)."""

    name: str
    guaranteed_w: float
    max_w: float | None = None
    sessions: list[str] = field(default_factory=list)
    """The daemons that have spoken for the node; the last one does now."""
    joined: bool = False
    """Whether its guaranteed share is free by now; until then, the node may draw nothing."""
    seq: int = 0
    acked: int = 0
    outstanding: list[tuple[int, float, float]] = field(default_factory=list)
    heard_s: float | None = None

    def exposure_w(self, now_s: float) -> float:
        """Return the most that the node may draw now; forget grants that ended or were replaced."""
        self.outstanding = [g for g in self.outstanding if g[0] >= self.acked and g[2] > now_s]
        return max([self.guaranteed_w if self.joined else 0.0, *(g[1] for g in self.outstanding)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Emergency:
    """All leases together are brought down to `to_w`; jobs of the lowest priority lose their watts first."""

    to_w: float
    reason: str
    since_s: float
    automatic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEmergency:
    """The emergency that was ended; None if there was none."""

    ended: Emergency | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What a job is told. `granted_w` is what its nodes may draw for it now; `position` is its place in the queue."""

    job: str
    state: JobState
    asked_w: float
    granted_w: float
    ends_in_s: float
    position: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node as the budget sees it. `measured_w` is None if no sensor has reported lately."""

    node: str
    guaranteed_w: float
    exposure_w: float
    measured_w: float | None
    jobs: tuple[str, ...]
    heard_s_ago: float | None
    joined: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStatus:
    """The whole budget at one moment. `exposure_w` is the most that all nodes may draw; it never exceeds `limit_w`."""

    cap_w: float
    limit_w: float
    exposure_w: float
    measured_w: float | None
    throttled_w: float
    emergency: Emergency | None
    nodes: tuple[NodeStatus, ...]
    jobs: tuple[JobStatus, ...]
