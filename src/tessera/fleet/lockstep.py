"""The power of a job whose GPUs all work and wait together, and what a shaper makes of it: one period, exactly.

`tessera policy check` computes with this. It has one job and no racks; the simulator has everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..analyze.spectrum import BAND_HZ
from ..errors import ArgumentError
from ..policy import PowerShaper
from ..runtime.shaping import LOSS, GroupPlace, hold_power, rank_offset_s
from .engine import LIMIT_S, FleetEngine, RankTable
from .facility import STEP_S, Facility, GpuKind, NodeKind
from .power_quality import RAMP_S, PowerQuality, measure_quality
from .supplies import NodeSupply
from .waves import make_square

_POINTS = 2048
_LEAST_PERIODS, _MOST_POINTS = 8, 2**17
_SHORTEST_S = 1e-3
_FEWEST_STEPS, _MOST_STEPS = 32, 512  # steps of the simulator's engine, in one period under a cap
_SETTLE_S = 5 * LIMIT_S  # until a capped wave repeats
_LEAST_GAIN = 0.1  # the least clock, because a clock of 0 would never end a step


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepJob:
    """A job that draws `high_w` a GPU for `duty` of each step of `period_s`, and `low_w` for the rest.

    `synchronous`: its replicas wait for each other at the end of every step, as an all-reduce makes them. `host_w` is
    what a node draws besides its GPUs; 0: not known. `gpu` says what a GPU draws when idle, the limit that it keeps
    (work that wants more is held there), and how its clock follows its power.
    """

    period_s: float = 2.0
    duty: float = 0.75
    high_w: float = 650.0
    low_w: float = 200.0
    gpus: int = 64
    node_gpus: int = 8
    host_w: float = 0.0
    replicas: int = 8
    stages: int = 1
    microbatches: int = 4
    synchronous: bool = True
    gpu: GpuKind = field(default_factory=GpuKind)

    def __post_init__(self) -> None:
        for name in ("gpus", "node_gpus", "replicas", "stages", "microbatches"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}={getattr(self, name)} must be at least 1")
        if self.gpus < self.replicas * self.stages:
            raise ArgumentError(
                f"{self.gpus} GPUs cannot be {self.replicas} replicas of {self.stages} stages",
                why="each stage of each replica has at least one GPU",
                fix=f"--replicas {max(1, self.gpus // self.stages)}",
            )
        if not 0 < self.duty < 1 or not math.isfinite(self.period_s) or self.period_s < _SHORTEST_S:
            raise ArgumentError(
                f"a period of {self.period_s:g} s with a duty of {self.duty:g} is not a wave",
                fix="a period of 1 ms or more, a duty between 0 and 100%",
            )
        if not 0 <= self.host_w < math.inf:
            raise ArgumentError(f"a host of {self.host_w:g} W is none", fix="0 W or more")
        if not 0 <= self.low_w < self.high_w:
            raise ArgumentError(
                f"a wave from {self.low_w:g} W to {self.high_w:g} W does not rise", fix="low below high"
            )

    @property
    def mean_w(self) -> float:
        return self.duty * self.high_w + (1 - self.duty) * self.low_w

    @property
    def step_j(self) -> float:
        """Return the joules of one GPU for one step."""
        return self.mean_w * self.period_s

    @property
    def nodes(self) -> int:
        """Return the number of the job's nodes."""
        return -(-self.gpus // self.node_gpus)

    @property
    def node_high_w(self) -> float:
        """Return what a node draws while its GPUs work."""
        return self.node_w(min(self.high_w, self.gpu.limit_w))

    def node_w(self, gpu_w: float) -> float:
        """Return what a node draws when each of its GPUs draws `gpu_w`."""
        return self.host_w + gpu_w * min(self.node_gpus, self.gpus)

    @property
    def places(self) -> list[GroupPlace]:
        """Return one place for each group that may be shifted: a tensor-parallel group is a stage of a replica."""
        return [
            GroupPlace(
                replica=r, replicas=self.replicas, stage=s, stages=self.stages,
                tp_group=r * self.stages + s, tp_groups=self.replicas * self.stages,
            )
            for r in range(self.replicas)
            for s in range(self.stages)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedWave:
    """One period of the job's power, as the mean of its GPUs, and what shaping it cost."""

    power_w: NDArray[np.float64]
    period_s: float  # a cap makes it longer than the job's
    work_s: float  # the job's own period
    wait_s: float  # how much longer a step is, because of offsets and jitter
    ballast_w: float  # mean watts of a GPU's ballast
    waiting_w: float  # what a GPU draws while it waits

    @property
    def step_j(self) -> float:
        """Return the joules of one GPU for one step: the same work, however long the step takes."""
        return float(self.power_w.mean()) * self.period_s + self.waiting_w * self.wait_s

    @property
    def swing_w(self) -> float:
        """Return the difference of the highest and the lowest power."""
        return float(np.ptp(self.power_w))

    def measure(self, gpus: int, band_hz: tuple[float, float] = BAND_HZ, *, hosts_w: float = 0.0) -> PowerQuality:
        """Return a utility's view of so many GPUs and their hosts: the repeated wave, measured like a feed."""
        periods = max(_LEAST_PERIODS, math.ceil(2 * RAMP_S / self.period_s))
        every = 1
        while periods * len(self.power_w) // every > _MOST_POINTS and every < len(self.power_w) // 32:
            every *= 2  # steps are short, so take fewer points of each
        wave_w = np.tile(self.power_w.reshape(-1, every).mean(axis=1), periods) * gpus + hosts_w
        return measure_quality(wave_w, self.period_s * every / len(self.power_w), band_hz=band_hz)

    @property
    def loss(self) -> float:
        """Return the share of throughput lost to waits, and to slower work under a cap."""
        return 1 - self.work_s / (self.period_s + self.wait_s)


def scatter_s(job: LockstepJob, jitter_s: tuple[float, float]) -> float:
    """Return over how many seconds the ends of a step scatter: waits of microbatches add up like a random walk."""
    return (jitter_s[1] - jitter_s[0]) * math.sqrt(job.microbatches)


def jitter_cost_s(job: LockstepJob, jitter_s: tuple[float, float]) -> float:
    """Return what jitter adds to a step. Replicas that wait for each other all take as long as the slowest."""
    mean_s = job.microbatches * sum(jitter_s) / 2
    if not job.synchronous:
        return mean_s
    units = len(job.places)
    # The largest of many sums: a normal tail, and at most all waits at their longest.
    tail_s = scatter_s(job, jitter_s) / math.sqrt(12) * math.sqrt(2 * math.log(units)) if units > 1 else 0.0
    return min(mean_s + tail_s, job.microbatches * jitter_s[1])


def shape_wave(job: LockstepJob, shaper: PowerShaper) -> ShapedWave:
    """Return the job's power under a shaper: cap and ballast on each GPU, offsets between groups, jitter over all."""
    load_w, period_s = limit_wave(job, shaper.node_cap_w)
    held_w = _hold(load_w, period_s, shaper)
    most_s = LOSS * job.period_s if job.synchronous else math.inf
    offsets = [rank_offset_s(shaper.phase_shift, place, job.period_s, job.duty, most_s=most_s) for place in job.places]
    power_w = np.mean([np.roll(held_w, round(o / period_s * _POINTS)) for o in offsets], axis=0)
    width = min(round(scatter_s(job, shaper.jitter_s) / period_s * _POINTS), 64 * _POINTS)
    if width > 1:
        box = np.bincount(np.arange(width) % _POINTS, minlength=_POINTS) / width
        power_w = np.fft.irfft(np.fft.rfft(power_w) * np.fft.rfft(box), _POINTS)
    return ShapedWave(
        power_w=power_w,
        period_s=period_s,
        work_s=job.period_s,
        wait_s=jitter_cost_s(job, shaper.jitter_s) + (max(offsets) if job.synchronous else 0.0),
        ballast_w=float(np.mean(held_w - load_w)),
        waiting_w=float(held_w.min()),
    )


def limit_wave(job: LockstepJob, node_cap_w: float | None) -> tuple[NDArray[np.float64], float]:
    """Return one step of one GPU under its own limit and a cap on its node, and how long the step then takes."""
    cap_w = job.gpu.limit_w
    if node_cap_w is not None:
        cap_w = job.gpu.share_cap(node_cap_w, host_w=job.host_w, gpus=min(job.node_gpus, job.gpus))
    if cap_w >= job.high_w:
        return np.where(np.arange(_POINTS) < job.duty * _POINTS, job.high_w, job.low_w), job.period_s
    return _run_capped(job.period_s, job.duty, job.high_w, job.low_w, job.gpu, cap_w)


@lru_cache(maxsize=64)
def _run_capped(
    period_s: float, duty: float, high_w: float, low_w: float, gpu: GpuKind, cap_w: float
) -> tuple[NDArray[np.float64], float]:
    """Return a step of one GPU when it repeats, by the simulator's engine: checks and simulations agree."""
    node = NodeKind(gpus=1, host_w=0.0, supply=NodeSupply(grade="ideal"))
    step_s = period_s / min(max(_FEWEST_STEPS, math.ceil(period_s / STEP_S)), _MOST_STEPS)
    place = Facility(rows=1, row_racks=1, rack_nodes=1, gpu=gpu, node=node, step_s=step_s, decide_s=max(step_s, 0.1))
    ranks = RankTable.make_empty(1)
    ranks.job[0] = ranks.wave[0] = 0
    wave = make_square(period_s=period_s, duty=duty, high_w=high_w, low_w=low_w)
    engine = FleetEngine(place, ranks, [wave], 1, engine="numpy")
    engine.set_cap(max(cap_w, gpu.idle_w + _LEAST_GAIN * (high_w - gpu.idle_w)))
    engine.start_job(0)
    engine.settle_job(0)
    watts: list[float] = []
    ends = [0]
    settle = 1 + math.ceil(_SETTLE_S / period_s)
    while len(ends) < settle + 3:
        watts.append(float(engine.advance(1).feed_w[0]))
        if engine.arrays.groups.iterations[0] == len(ends):
            ends.append(len(watts))
    last = np.array(watts[ends[-3] : ends[-1]])  # two steps, so that their length is known to half a step of the engine
    at = (np.arange(2 * _POINTS) * len(last)) // (2 * _POINTS)
    return last[at].reshape(2, _POINTS).mean(axis=0), len(last) * step_s / 2


def _hold(load_w: NDArray[np.float64], period_s: float, shaper: PowerShaper) -> NDArray[np.float64]:
    """Return the power of one GPU with ballast when it repeats."""
    if shaper.power_floor_w is None and shaper.max_ramp_w_per_s is None:
        return load_w
    held, before = np.empty_like(load_w), float(load_w.max())
    for i in range(2 * len(load_w)):
        before = hold_power(
            float(load_w[i % len(load_w)]), before, period_s / len(load_w),
            floor_w=shaper.power_floor_w, max_ramp_w_per_s=shaper.max_ramp_w_per_s,
        )  # fmt: skip
        held[i % len(load_w)] = before
    return held
