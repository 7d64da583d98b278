"""The power of a job whose GPUs all work and wait at the same time, and what a shaper makes of it: one period, exactly.

This is what `tessera policy check` computes with. It has one job and no racks; the simulator has everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..analyze.spectrum import BAND_HZ
from ..errors import ArgumentError
from ..policy import PowerShaper
from ..runtime.shaping import LOSS, GroupPlace, hold_power, rank_offset_s
from .power_quality import RAMP_S, PowerQuality, measure_quality

_POINTS = 2048
_LEAST_PERIODS, _MOST_POINTS = 8, 2**17
_SHORTEST_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepJob:
    """A job that draws `high_w` a GPU for `duty` of each step of `period_s`, and `low_w` for the rest.

    `synchronous`: its replicas wait for each other at the end of every step, as an all-reduce makes them. `host_w` is
    what a node draws beside its GPUs; 0: not known.
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
        """Joules of one GPU for one step."""
        return self.mean_w * self.period_s

    @property
    def node_high_w(self) -> float:
        """What a node draws while its GPUs work."""
        return self.node_w(self.high_w)

    def node_w(self, gpu_w: float) -> float:
        """What a node draws when each of its GPUs draws `gpu_w`."""
        return self.host_w + gpu_w * min(self.node_gpus, self.gpus)

    @property
    def places(self) -> list[GroupPlace]:
        """One place for each group that may be shifted: a tensor-parallel group is a stage of a replica."""
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
    """One period of the job's power, the mean of its GPUs, and what shaping it cost."""

    power_w: NDArray[np.float64]
    period_s: float
    wait_s: float  # longer step, from offsets and jitter
    ballast_w: float  # mean power of a GPU that does no work
    waiting_w: float  # what a GPU draws while it waits

    @property
    def step_j(self) -> float:
        """Joules of one GPU for one step: the same work, whatever the step takes."""
        return float(self.power_w.mean()) * self.period_s + self.waiting_w * self.wait_s

    @property
    def swing_w(self) -> float:
        """From the lowest to the highest power."""
        return float(np.ptp(self.power_w))

    def measure(self, gpus: int, band_hz: tuple[float, float] = BAND_HZ) -> PowerQuality:
        """What a utility sees of so many GPUs: the wave repeated, measured as the simulator measures a feed."""
        periods = max(_LEAST_PERIODS, math.ceil(2 * RAMP_S / self.period_s))
        every = 1
        while periods * len(self.power_w) // every > _MOST_POINTS and every < len(self.power_w) // 32:
            every *= 2  # short steps: fewer points of each
        wave_w = np.tile(self.power_w.reshape(-1, every).mean(axis=1), periods) * gpus
        return measure_quality(wave_w, self.period_s * every / len(self.power_w), band_hz=band_hz)

    @property
    def loss(self) -> float:
        """The share of throughput that waiting costs."""
        return self.wait_s / (self.period_s + self.wait_s)


def scatter_s(job: LockstepJob, jitter_s: tuple[float, float]) -> float:
    """Over how long the ends of a step scatter: the waits of its microbatches add up like a random walk."""
    return (jitter_s[1] - jitter_s[0]) * math.sqrt(job.microbatches)


def jitter_cost_s(job: LockstepJob, jitter_s: tuple[float, float]) -> float:
    """What jitter adds to a step. Replicas that wait for each other all take as long as the unluckiest."""
    mean_s = job.microbatches * sum(jitter_s) / 2
    if not job.synchronous:
        return mean_s
    units = len(job.places)
    # The largest of many sums: a normal tail, and never more than all waits at their longest.
    tail_s = scatter_s(job, jitter_s) / math.sqrt(12) * math.sqrt(2 * math.log(units)) if units > 1 else 0.0
    return min(mean_s + tail_s, job.microbatches * jitter_s[1])


def shape_wave(job: LockstepJob, shaper: PowerShaper) -> ShapedWave:
    """The job's power under a shaper: ballast on each GPU, offsets between groups, jitter over all of them."""
    at = np.arange(_POINTS) / _POINTS
    load_w = np.where(at < job.duty, job.high_w, job.low_w)
    held_w = _hold(load_w, job.period_s, shaper)
    most_s = LOSS * job.period_s if job.synchronous else math.inf
    offsets = [rank_offset_s(shaper.phase_shift, place, job.period_s, job.duty, most_s=most_s) for place in job.places]
    power_w = np.mean([np.roll(held_w, round(o / job.period_s * _POINTS)) for o in offsets], axis=0)
    width = min(round(scatter_s(job, shaper.jitter_s) / job.period_s * _POINTS), 64 * _POINTS)
    if width > 1:
        box = np.bincount(np.arange(width) % _POINTS, minlength=_POINTS) / width
        power_w = np.fft.irfft(np.fft.rfft(power_w) * np.fft.rfft(box), _POINTS)
    return ShapedWave(
        power_w=power_w,
        period_s=job.period_s,
        wait_s=jitter_cost_s(job, shaper.jitter_s) + (max(offsets) if job.synchronous else 0.0),
        ballast_w=float(np.mean(held_w - load_w)),
        waiting_w=float(held_w.min()),
    )


def _hold(load_w: NDArray[np.float64], period_s: float, shaper: PowerShaper) -> NDArray[np.float64]:
    """The power of one GPU with ballast, once it repeats."""
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
