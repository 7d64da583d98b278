"""How far admitted jobs are filled up: by priority, slowly upwards, and less while measured power is near the limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .leases import PRIORITIES, BudgetPolicy, JobLease, round_down

# A cut shows in the measured power after the next heartbeat; before that, it must not be repeated.
SETTLE_HEARTBEATS = 2.5
# Below this share of the limit, throttling is taken back; between it and `near`, nothing changes.
RELEASE = 0.94
RACK = ""
"""The name under which the rack's own meter (a PDU) reports."""


class PowerMeters:
    """The power that nodes, and perhaps a PDU, report. A report counts for as long as a lease."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._reports: dict[str, tuple[float, float]] = {}

    def report(self, name: str, power_w: float, now_s: float) -> None:
        """Take a reading of a node, or of the whole rack."""
        self._reports[name] = (power_w, now_s)

    def forget(self, name: str) -> None:
        """Forget a node that is gone."""
        self._reports.pop(name, None)

    def read(self, name: str, now_s: float) -> float | None:
        """Return the last reading, unless it is old."""
        power_w, time_s = self._reports.get(name, (0.0, -math.inf))
        return power_w if now_s - time_s <= self._fresh_s else None

    def total_w(self, now_s: float, assumed_w: Mapping[str, float]) -> float | None:
        """Return the rack's reading, or the sum over the nodes; one without a sensor counts as `assumed_w`.

        Returns None if nothing is measured.
        """
        rack_w = self.read(RACK, now_s)
        if rack_w is not None:
            return rack_w
        powers = {name: self.read(name, now_s) for name in assumed_w}
        if all(power_w is None for power_w in powers.values()):
            return None
        return sum(assumed_w[name] if power_w is None else power_w for name, power_w in powers.items())


class PowerFill:
    """The share of the watts above their least that each priority gets, and the watts that throttling cuts."""

    def __init__(self, policy: BudgetPolicy) -> None:
        self.policy = policy
        self.levels = [1.0] * PRIORITIES
        self.cut_w = 0.0
        self._updated_s = -math.inf
        self._cut_s = -math.inf
        self._steered_s = -math.inf

    def update(self, now_s: float, spare_w: float, spread_w: Sequence[float]) -> None:
        """Fill the highest priority first. Levels fall at once, and rise no faster than a soft start."""
        rise = 1.0
        if self.policy.soft_start_s > 0 and math.isfinite(self._updated_s):
            rise = (now_s - self._updated_s) / self.policy.soft_start_s
        self._updated_s = now_s
        left_w = max(0.0, min(spare_w, sum(spread_w)) - self.cut_w)
        for priority in reversed(range(PRIORITIES)):
            wanted_w = spread_w[priority]
            goal = 1.0 if wanted_w <= left_w else left_w / wanted_w
            level = self.levels[priority]
            # A class without a job is full, because its next job has a soft start of its own.
            self.levels[priority] = goal if wanted_w <= 0.0 else min(goal, max(0.0, level + rise))
            left_w = max(0.0, left_w - wanted_w * goal)

    def share_w(self, lease: JobLease, node: str, now_s: float) -> float:
        """Return what an admitted job should draw on a node now: its share, as far as its ramp has come."""
        request = lease.request
        least_w = request.least_w(node)
        full_w = least_w + self.levels[request.priority] * (round_down(request.watts[node]) - least_w)
        ramp_s, risen_s = self.ramp_s(lease), now_s - lease.start_s[node]
        return full_w * (min(1.0, max(0.0, risen_s / ramp_s)) if ramp_s > 0 else float(risen_s >= 0))

    def ramp_s(self, lease: JobLease) -> float:
        """Return how long a job's soft start takes."""
        own_s = lease.request.soft_start_s
        return self.policy.soft_start_s if own_s is None else own_s

    def is_due(self, now_s: float) -> bool:
        """Return whether it is time to look at the measured power again."""
        return now_s - self._steered_s >= self.policy.heartbeat_s

    def steer(self, now_s: float, measured_w: float | None, spread_w: float) -> None:
        """Cut watts if measured power is near the limit, and give them back slowly if it is not.

        Without a reading nothing changes: the leases alone keep the limit.
        """
        passed_s = min(now_s - self._steered_s, self.policy.heartbeat_s)
        self._steered_s = now_s
        if measured_w is None:
            return
        near_w = self.policy.near * self.policy.limit_w
        if measured_w > near_w:
            if now_s - self._cut_s >= SETTLE_HEARTBEATS * self.policy.heartbeat_s:
                self.cut_w = min(self.cut_w + measured_w - near_w, spread_w)
                self._cut_s = now_s
        elif measured_w < RELEASE * self.policy.limit_w:
            rate = self.policy.limit_w / max(self.policy.soft_start_s, self.policy.heartbeat_s)
            self.cut_w = max(0.0, self.cut_w - rate * passed_s)
