r"""The engine: GPUs that draw, ranks that wait, supplies and breakers that switch off, in steps of 5 ms.

A rank's place in its iteration is one number, `place_s`. It rises with time (slower where the clock is lower) up to the
synchronisation, and falls back by a period, and by the delay of its next start, once the slowest rank has arrived:

::

    -(period - sync) - delay        -delay            0                     sync
    |── collective of the last one ──|── delayed start ──|── compute ─────────|  waits here for the slowest

A power limit takes effect with a time constant of 50 ms, as power waves of an H200 show (docs/fleet.md). The remaining
share of the dynamic power sets the clock: power falls as f V(f)^2, with the voltage of `estimate.power`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingExtra, check_choice
from .arrays import (
    SPEEDS,
    BlockResult,
    BreakerArrays,
    FleetArrays,
    GpuArrays,
    GroupArrays,
    NodeArrays,
    StepSettings,
    WaveTable,
    make_breakers,
)
from .breakers import Breaker
from .cohorts import build_tree
from .facility import Facility
from .waves import Wave

COMPILE_S = 15.0
"""Seconds that numba takes to compile the engine, the first time."""
_NUMPY_STEP_S, _NUMPY_CLASS_S = 80e-6, 10e-9  # seconds of a step in numpy: in all, and for each class of GPUs
LIMIT_S = 0.05
"""Seconds: the time constant with which a GPU's power limit takes effect (benchmarks/results/fleet_waves.json#limit_s).
"""
ENGINES = ("auto", "numba", "numpy")
_UNLIMITED = 3.0e38


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """What each GPU of the facility runs: job (-1: none), wave, replica, and the unit that has its own jitter.

    `unplaced` are jobs that no node may take.
    """

    job: NDArray[np.int32]
    wave: NDArray[np.int32]
    replica: NDArray[np.int32]
    unit: NDArray[np.int32]
    unplaced: set[int] = field(default_factory=set)

    @classmethod
    def make_empty(cls, gpus: int) -> RankTable:
        """Return a table in which nothing runs."""
        return cls(
            job=np.full(gpus, -1, dtype=np.int32),
            wave=np.full(gpus, -1, dtype=np.int32),
            replica=np.zeros(gpus, dtype=np.int32),
            unit=np.zeros(gpus, dtype=np.int32),
        )

    def find_keys(self, *, distinct: bool) -> NDArray[np.int64]:
        """Return numbers that are equal for GPUs that are alike."""
        if distinct:
            return np.arange(len(self.job), dtype=np.int64)
        stacked = np.stack([self.job, self.wave, self.replica, self.unit], axis=1)
        return np.unique(stacked, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


class FleetEngine:
    """A facility whose GPUs run waves. It decides nothing: its caller starts jobs and sets caps between blocks."""

    def __init__(
        self,
        facility: Facility,
        ranks: RankTable,
        waves: Sequence[Wave],
        jobs: int,
        *,
        distinct: bool = False,
        marks: dict[str, dict[int, object]] | None = None,
        engine: str = "auto",
        steps: int = 0,
    ) -> None:
        self.facility, self.waves = facility, list(waves)
        self.tree = build_tree(
            ranks.find_keys(distinct=distinct),
            node_gpus=facility.node.gpus,
            rack_nodes=facility.rack_nodes,
            row_racks=facility.row_racks,
            marks=marks or {},
        )
        first = self.tree.gpus.first
        self.job, self.wave = ranks.job[first], ranks.wave[first]
        self.replica, self.unit = ranks.replica[first], ranks.unit[first]
        self.unplaced = ranks.unplaced
        self.step_s = facility.step_s
        self.cap_w = facility.gpu.limit_w
        """What the shaper allows a GPU. A governor's lease may be lower, not higher."""
        self.advance_block, self.engine = choose_engine(engine, len(self.tree.gpus), steps)
        self._bases: list[int] = []
        self._was_limited = False
        self._gains, self._speeds = facility.gpu.tabulate_speed(SPEEDS)
        self.arrays = self._make_arrays(jobs)
        self.is_shaped = False  # whether floors or ramps are set: otherwise they need not be looked at
        self._highest_w = max((wave.peak_w for wave in self.waves), default=0.0)

    # -- building -----------------------------------------------------------------------------------------------

    def _make_arrays(self, jobs: int) -> FleetArrays:
        facility, tree = self.facility, self.tree
        gpus, nodes = len(tree.gpus), len(tree.nodes)

        def fill(value: float) -> NDArray[np.float32]:
            return np.full(gpus, value, dtype=np.float32)

        racks = make_breakers(tree.racks.parent, tree.racks.count)
        rows = make_breakers(tree.rows.parent, tree.rows.count)
        for number, first in enumerate(tree.racks.first.tolist()):
            _set_breaker(racks, number, facility.find_breaker(first), facility.step_s)
        _set_breaker(rows, slice(None), facility.row_breaker, facility.step_s)
        return FleetArrays(
            gpus=GpuArrays(
                place_s=np.full(gpus, 0.0),
                delay_s=np.full(gpus, 0.0),
                next_delay_s=np.full(gpus, 0.0),
                gain=fill(1.0),
                last_w=fill(facility.gpu.idle_w),
                idle_w=fill(facility.gpu.idle_w),
                cap_w=fill(facility.gpu.limit_w),
                gain_limit=fill(1.0),
                floor_w=fill(0.0),
                most_w=fill(facility.gpu.limit_w),
                up_w=fill(_UNLIMITED),
                down_w=fill(_UNLIMITED),
                base=np.zeros(gpus, dtype=np.int32),
                cells=np.ones(gpus, dtype=np.int32),
                cells_per_s=np.full(gpus, 1.0),
                period_s=np.full(gpus, 1.0),
                sync_s=np.full(gpus, 1.0),
                group=np.full(gpus, -1, dtype=np.int32),
                node=tree.gpus.parent,
                copies=tree.gpus.count.astype(np.float32),
                alive=np.ones(gpus, dtype=np.bool_),
                sum_w=np.zeros(gpus),
                ballast_w=np.zeros(gpus),
                work_s=np.zeros(gpus),
            ),
            nodes=NodeArrays(
                rack=tree.nodes.parent,
                copies=tree.nodes.count,
                host_w=np.full(nodes, facility.node.host_w),
                over_s=np.zeros(nodes),
                alive=np.ones(nodes, dtype=np.bool_),
                load_w=np.zeros(nodes),
                draw_w=np.zeros(nodes),
            ),
            racks=racks,
            rows=rows,
            groups=GroupArrays(
                sync_s=np.full(jobs, np.nan),  # no rank waits: no place is beyond NaN
                lowest_s=np.zeros(jobs),
                iterations=np.zeros(jobs, dtype=np.int64),
            ),
            waves=self._make_table(),
        )

    def _make_table(self) -> WaveTable:
        """Return all waves in one table; the first is an idle GPU's."""
        watts: list[NDArray[np.float32]] = [np.full(2, self.facility.gpu.idle_w, dtype=np.float32)]
        compute: list[NDArray[np.float32]] = [np.zeros(2, dtype=np.float32)]
        at = 2
        for wave in self.waves:
            self._bases.append(at)
            watts.append(np.concatenate([[wave.wait_w], wave.watts]).astype(np.float32))
            compute.append(np.concatenate([[0.0], wave.compute]).astype(np.float32))
            at += len(wave.watts) + 1
        return WaveTable(watts=np.concatenate(watts), compute=np.concatenate(compute), speed=self._speeds)

    # -- changing, between blocks -------------------------------------------------------------------------------

    def set_cap(self, cap_w: float) -> None:
        """Let no GPU draw more than `cap_w` for longer than its limit takes to take effect."""
        self.cap_w = cap_w
        np.minimum(self.arrays.gpus.cap_w, np.float32(cap_w), out=self.arrays.gpus.cap_w)

    def start_job(self, number: int, *, at_s: float = 0.0) -> None:
        """Let a job's ranks begin, `at_s` into their first iteration."""
        gpus = self.arrays.gpus
        for index in np.unique(self.wave[self.job == number]):
            chosen = (self.job == number) & (self.wave == index)
            wave = self.waves[int(index)]
            gpus.base[chosen] = self._bases[int(index)]
            gpus.cells[chosen] = len(wave.watts)
            gpus.cells_per_s[chosen] = len(wave.watts) / wave.period_s
            gpus.period_s[chosen] = wave.period_s
            gpus.sync_s[chosen] = wave.period_s if wave.sync_s is None else wave.sync_s
            gpus.group[chosen] = -1 if wave.sync_s is None else number
            if wave.sync_s is not None:
                self.arrays.groups.sync_s[number] = wave.sync_s
            gpus.delay_s[chosen] = gpus.next_delay_s[chosen]
            gpus.place_s[chosen] = at_s - gpus.delay_s[chosen]

    def settle_job(self, number: int) -> None:
        """Set the power and the clocks of a job's GPUs to what an iteration before this one would have left."""
        gpus, chosen = self.arrays.gpus, self.job == number
        before_s = np.mod(gpus.place_s[chosen] - self.step_s, gpus.period_s[chosen])
        cell = np.minimum((before_s * gpus.cells_per_s[chosen]).astype(np.int32), gpus.cells[chosen] - 1)
        idle_w = gpus.idle_w[chosen]
        dynamic_w = self.arrays.waves.watts[gpus.base[chosen] + 1 + cell] - idle_w
        gpus.gain[chosen] = np.clip((gpus.cap_w[chosen] - idle_w) / np.maximum(1.0, dynamic_w), 0.0, 1.0)
        gpus.last_w[chosen] = idle_w + dynamic_w * gpus.gain[chosen]

    def end_job(self, number: int) -> None:
        """Leave a job's GPUs idle."""
        gpus = self.arrays.gpus
        chosen = self.job == number
        for values, value in (
            (gpus.base, 0),
            (gpus.cells, 1),
            (gpus.cells_per_s, 1.0),
            (gpus.period_s, 1.0),
            (gpus.sync_s, 1.0),
            (gpus.group, -1),
            (gpus.place_s, 0.0),
            (gpus.delay_s, 0.0),
            (gpus.next_delay_s, 0.0),
            (gpus.floor_w, 0.0),
        ):
            values[chosen] = value
        self.arrays.groups.sync_s[number] = np.nan

    def kill_nodes(self, chosen: NDArray[np.bool_]) -> None:
        self.arrays.nodes.alive[chosen] = False
        self.arrays.gpus.alive[chosen[self.arrays.gpus.node]] = False

    def slow_gpus(self, clock: NDArray[np.float32]) -> None:
        """Hold clocks down to these shares, by heat."""
        self.arrays.gpus.gain_limit[:] = np.interp(clock, self._speeds, self._gains)

    # -- advancing ----------------------------------------------------------------------------------------------

    def advance(self, steps: int) -> BlockResult:
        """Run one block of steps; the sums of watts over it begin at 0."""
        fleet, facility = self.arrays, self.facility
        for values in (fleet.gpus.sum_w, fleet.racks.sum_w, fleet.racks.max_w, fleet.rows.sum_w, fleet.rows.max_w):
            values[:] = 0.0
        gpus = fleet.gpus
        supply = facility.node.supply
        settings = StepSettings(
            step_s=self.step_s,
            follow=-math.expm1(-self.step_s / LIMIT_S),
            limited=self._is_limited(),
            ramped=self.is_shaped and bool(gpus.floor_w.any() or gpus.down_w.min() < 1e38 or gpus.up_w.min() < 1e38),
            supply_w=supply.capacity_w,
            loss=supply.loss_terms,
            limit_at=supply.limit_at,
            limit_s=supply.limit_s,
            off_at=supply.off_at,
        )
        return self.advance_block(fleet, steps, settings)

    def _is_limited(self) -> bool:
        gpus = self.arrays.gpus
        if gpus.cap_w.min() < self._highest_w or gpus.gain_limit.min() < 1.0:
            self._was_limited = True
        elif self._was_limited:
            self._was_limited = bool(gpus.gain.min() < 0.999)
        return self._was_limited


def _set_breaker(level: BreakerArrays, which: int | slice, breaker: Breaker | None, step_s: float) -> None:
    if breaker is None:
        return
    level.rating_w[which] = breaker.rating_w
    level.hold[which] = breaker.holds**2
    level.follow[which] = -math.expm1(-step_s / breaker.tau_s)
    level.magnetic[which] = breaker.magnetic_at


def choose_engine(
    name: str, classes: int, steps: int
) -> tuple[Callable[[FleetArrays, int, StepSettings], BlockResult], str]:
    """Return the engine of a name. "auto": numba's, if installed and worth the seconds that compiling takes."""
    check_choice("engine", name, ENGINES)
    from .step_numpy import advance_block

    numpy_s = steps * (_NUMPY_STEP_S + classes * _NUMPY_CLASS_S)
    if name == "numpy" or (name == "auto" and numpy_s < COMPILE_S):
        return advance_block, "numpy"
    try:
        from .step_numba import advance_block as compiled
    except ImportError:
        if name == "numba":
            raise MissingExtra("numba", "numba", "the compiled engine of the simulator") from None
        return advance_block, "numpy"
    return compiled, "numba"
