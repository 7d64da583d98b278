"""Power supplies of nodes, the UPS and storage at the feed: what they lose, and when they switch off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import ArgumentError, check_choice
from ..joules import Floats

# Lowest efficiency at 10, 20, 50 and 100% of the rating, 230 V internal redundant (80 PLUS, as Tom's Hardware lists it
# in "80 PLUS PSU efficiency"). The grades below Titanium have no figure at 10%, so that of the next higher load is
# taken.
LOADS = (0.1, 0.2, 0.5, 1.0)
GRADES: dict[str, tuple[float, float, float, float]] = {
    "titanium": (0.90, 0.94, 0.96, 0.91),
    "platinum": (0.90, 0.90, 0.94, 0.91),
    "gold": (0.88, 0.88, 0.92, 0.88),
    "ideal": (1.0, 1.0, 1.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class NodeSupply:
    """The supplies of a node, which share its load. `needed` of `count` can carry it; the others are spare.

    Over-current protection, in multiples of what all of them are rated for: above `limit_at` for `limit_s` they latch
    off, above `off_at` at once.
    """

    # NVIDIA DGX H100/H200: six of 3.3 kW, four needed (user guide). Limits: SSI's ERP2U design guide has 110 to 150% of
    # the rated current; Intel's OCPRF100 holds the limit for 1.6 to 2.0 s before it latches off.
    count: int = 6
    needed: int = 4
    rating_w: float = 3300.0
    grade: str = "titanium"
    limit_at: float = 1.10
    limit_s: float = 1.6
    off_at: float = 1.50

    def __post_init__(self) -> None:
        check_choice("grade", self.grade, GRADES)
        if not 1 <= self.needed <= self.count:
            raise ArgumentError(f"{self.needed} of {self.count} power supplies cannot carry a node")
        if not (0.0 < self.rating_w < math.inf and 1.0 <= self.limit_at <= self.off_at):
            raise ArgumentError("a power supply needs a rating above 0, and 1 <= limit_at <= off_at")

    @property
    def capacity_w(self) -> float:
        """Return the watts that all supplies together are rated for."""
        return self.count * self.rating_w

    @cached_property
    def loss_terms(self) -> tuple[float, float, float, float]:
        """Return the loss over capacity as a cubic of load over capacity, through the grade's four points."""
        loads = np.array(LOADS)
        losses = loads * (1.0 / np.array(GRADES[self.grade]) - 1.0)
        a, b, c, d = np.linalg.solve(np.vander(loads, 4, increasing=True), losses)
        return float(a), float(b), float(c), float(d)

    def draw_w(self, load_w: Floats) -> Floats:
        """Return the watts at the plug for watts behind it."""
        a, b, c, d = self.loss_terms
        x = load_w / self.capacity_w
        return load_w + self.capacity_w * np.maximum(0.0, a + x * (b + x * (c + x * d)))

    def find_load(self, draw_w: Floats) -> Floats:
        """Return the watts behind the supplies for watts at the plug: the inverse of `draw_w`."""
        loads = np.linspace(0.0, 1.5 * self.capacity_w, 2049)
        return np.interp(draw_w, self.draw_w(loads), loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Battery:
    """Storage at the feed (a UPS with fast cells, a battery, capacitors) that smooths what the utility sees.

    The feed follows the load with the time constant `smoothing_s`; the storage gives and takes the difference within
    `power_w` and `energy_j`. `efficiency` is for a round trip.
    """

    power_w: float
    energy_j: float
    smoothing_s: float = 10.0
    efficiency: float = 0.9  # assumed: of a round trip, cells and converters

    def __post_init__(self) -> None:
        if not (self.power_w > 0 and self.energy_j > 0 and self.smoothing_s > 0 and 0 < self.efficiency <= 1):
            raise ArgumentError("storage needs power, energy and smoothing above 0, and an efficiency from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What connects the rows to the utility. `ups_efficiency`: 0.85 to 0.95 with double conversion, 1 without a UPS."""

    ups_efficiency: float = 0.95
    storage: Battery | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.ups_efficiency <= 1.0:
            raise ArgumentError(f"the efficiency of a UPS is from 0 to 1, not {self.ups_efficiency:g}")


class BatteryState:
    """Storage over time: how full it is, and what the utility delivers."""

    def __init__(self, storage: Battery) -> None:
        self.storage = storage
        self.stored_j = 0.5 * storage.energy_j
        self.feed_w: float | None = None
        self.lost_w = 0.0

    def smooth(self, load_w: Floats, step_s: float) -> Floats:
        """Return what the utility delivers while the rows draw `load_w`, step by step."""
        s = self.storage
        if self.feed_w is None:
            self.feed_w = float(load_w[0])
        feed_w, stored_j = self.feed_w, self.stored_j
        follow = -math.expm1(-step_s / s.smoothing_s)
        # The storage returns to half full: missing energy comes back over two time constants (a damping of 0.7), and
        # round-trip losses are bought when they occur, on average.
        home, remember = 1.0 / (2.0 * s.smoothing_s), step_s / (10.0 * s.smoothing_s)
        charge, give = math.sqrt(s.efficiency), 1.0 / math.sqrt(s.efficiency)
        out = np.empty(len(load_w))
        for i, load in enumerate(load_w.tolist()):
            target = load + self.lost_w + (0.5 * s.energy_j - stored_j) * home
            feed_w += (target - feed_w) * follow
            flow = min(max(load - feed_w, -s.power_w), s.power_w, load)  # above 0: the storage gives
            most = stored_j / (give * step_s) if flow > 0 else (s.energy_j - stored_j) / (charge * step_s)
            flow = min(flow, most) if flow > 0 else max(flow, -most)
            drawn = flow * (give if flow > 0 else charge)
            stored_j -= drawn * step_s
            self.lost_w += (drawn - flow - self.lost_w) * remember
            # if the storage is full or empty, this is not what the filter wants; the filter goes on as before
            out[i] = max(0.0, load - flow)
        self.feed_w, self.stored_j = feed_w, stored_j
        return out
