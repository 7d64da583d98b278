r"""Heat: how warm GPUs, racks and aisles get, and when a GPU slows down because of heat.

::

    GPU    tau dT/dt = inlet + R x power - T                     slows down above `slow_at_c`, by `slow_per_s`
    rack   inlet = (1 - r) supply + r (inlet + rise x load)      r: the share of hot air that returns to the front
    aisle  C dT/dt = heat - cooling                              above the cooling's capacity, or with the cooling lost
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import ArgumentError
from ..joules import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHeat:
    """How warm a GPU gets. `resistance_c_per_w`: degrees above the inlet for each watt, in the long run.

    H200: 313 kernels and models, measured for about a second each, have 0.029 °C/W (`benchmarks/data`) for the chip
    alone. With the heat sink 0.055 is assumed, which is 60 to 65 °C at 700 W and an inlet of 22 to 25 °C. The GPU slows
    down at 85 °C (the energy guide's hotspot), and is cut to a third of its clock if that does not help.
    """

    resistance_c_per_w: float = 0.055
    tau_s: float = 20.0  # assumed: an air-cooled heat sink of an SXM board
    slow_at_c: float = 85.0
    slow_per_s: float = 0.05  # assumed: share of the clock, for each second above
    lowest_clock: float = 0.33

    def __post_init__(self) -> None:
        if not (self.resistance_c_per_w > 0 and self.tau_s > 0 and 0 < self.lowest_clock <= 1):
            raise ArgumentError("a GPU needs a thermal resistance, a time constant and a lowest clock above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AisleHeat:
    """The air of a row: how much heat the cooling removes, and how much hot air returns to the front of the racks.

    `heat_capacity_j_per_c` is for one rack: with 5 kW a rack, servers shut down within three minutes of the loss of
    cooling (Opengate Data Systems, in Mission Critical Magazine); if they warm by 20 °C until then, that is 45 kJ/°C.
    """

    supply_c: float = 22.0  # within ASHRAE's recommended 18 to 27 °C
    recirculation: float = 0.1  # assumed
    rise_c: float = 15.0  # assumed: of the air through a rack at full power
    cooling_w: float | None = None
    heat_capacity_j_per_c: float = 45e3
    highest_c: float = 60.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.supply_c < self.highest_c:
            raise ArgumentError(
                f"supplied air of {self.supply_c:g} °C", why=f"it is from 0 to {self.highest_c:g} °C", fix="e.g. 22C"
            )
        if not (0.0 <= self.recirculation < 1.0 and self.heat_capacity_j_per_c > 0 and self.rise_c >= 0):
            raise ArgumentError("recirculation is from 0 to 1 (without 1), heat capacity above 0, the rise not below 0")
        if self.cooling_w is not None and not self.cooling_w >= 0:
            raise ArgumentError("the cooling of a row cannot be below 0")


class HeatState:
    """Temperatures over time: of GPUs, the inlets of racks, the air of rows."""

    def __init__(self, gpu: GpuHeat, aisle: AisleHeat, *, gpus: int, racks: int, rows: int, racks_of_row: int) -> None:
        self.gpu, self.aisle = gpu, aisle
        self.supply_c = np.full(rows, aisle.supply_c)
        self.inlet_c = np.full(racks, aisle.supply_c)
        self.gpu_c = np.full(gpus, aisle.supply_c, dtype=np.float32)
        self.clock = np.ones(gpus, dtype=np.float32)
        self._racks_of_row = racks_of_row
        self.is_slow = self.is_changing = False

    def advance(
        self,
        step_s: float,
        *,
        rack_of_gpu: np.ndarray,
        row_of_rack: np.ndarray,
        gpu_w: Floats,
        rack_load: Floats,
        row_w: Floats,
        cooling: Floats,
    ) -> None:
        """Make one step: mean watts of GPUs, loads of racks, watts of rows, and the remaining share of cooling."""
        a, g = self.aisle, self.gpu
        excess_w = row_w * (1.0 - cooling) if a.cooling_w is None else row_w - a.cooling_w * cooling
        warming = excess_w / (a.heat_capacity_j_per_c * self._racks_of_row)
        self.supply_c = np.clip(self.supply_c + step_s * warming, a.supply_c, a.highest_c)
        back = a.recirculation / (1.0 - a.recirculation)
        self.inlet_c = self.supply_c[row_of_rack] + back * a.rise_c * rack_load
        # T + a (inlet + R power - T), in place, because this may be 100,000 values ten times a second.
        share = -math.expm1(-step_s / g.tau_s)
        self.gpu_c *= np.float32(1.0 - share)
        self.gpu_c += np.take((share * self.inlet_c).astype(np.float32), rack_of_gpu)
        gpu_w *= np.float32(share * g.resistance_c_per_w)
        self.gpu_c += gpu_w
        was_slow = self.is_slow
        self.is_slow = bool(self.gpu_c.max() > g.slow_at_c - 2.0 or (was_slow and self.clock.min() < 1.0))
        self.is_changing = was_slow or self.is_slow
        if self.is_changing:
            self._slow_down(step_s)

    def _slow_down(self, step_s: float) -> None:
        g = self.gpu
        change = np.where(self.gpu_c > g.slow_at_c, -g.slow_per_s * step_s, g.slow_per_s * step_s).astype(np.float32)
        # It speeds up again only two degrees cooler, because at the threshold it would flutter.
        change[(self.gpu_c > g.slow_at_c - 2.0) & (self.gpu_c <= g.slow_at_c)] = 0.0
        np.clip(self.clock + change, g.lowest_clock, 1.0, out=self.clock)
