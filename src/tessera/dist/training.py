"""What one training step on many GPUs takes: seconds by part, bytes of memory, joules, from the job's layout.

Compute: `training_compute`. Collectives: `training_traffic`, by dist.cost. Memory: `training_memory`. A pipeline waits
(p - 1) / (m v) of its time. Joules: what compute and memory draw while they work, what sending bits over links and
cards takes, and what a waiting GPU draws.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError
from ..estimate.power import PowerModel
from .training_compute import MicrobatchTime, stream_work, time_microbatch
from .training_memory import TrainingMemory, estimate_memory
from .training_model import RECOMPUTE, TrainingJob
from .training_offload import ADAM_BYTES, HostCost, count_updated, estimate_host
from .training_traffic import (
    Traffic,
    context_parallel_s,
    data_parallel_s,
    expert_parallel_s,
    pipeline_sends_s,
    tensor_parallel_s,
)

# Seconds that every step adds: gradient norm, checks for overflow, the data loader, logging; fewer in a CUDA graph.
_STEP_S, _STEP_GRAPH_S = 0.04, 0.025
_JITTER = 0.009  # share of a step, for each doubling of the number of nodes: the slowest rank sets the pace
# Half-widths that include 90% of the published steps on which the constants were chosen: dense models; dense models on
# chips whose software still changes from release to release; models with experts; and of what communication adds.
_ERROR_DENSE, _ERROR_YOUNG, _ERROR_EXPERTS, ERROR_EXPOSED = 0.22, 0.28, 0.28, 0.5
_YOUNG = ("blackwell", "cdna3", "cdna4")
# Watts of a GPU that waits in a collective, over those of one with high clocks and idle SMs: its NCCL kernels spin on a
# few SMs (H200: 127 W always, 130-165 W in steps that wait for launches).
WAITING = 1.5
# Joules per byte: NVLink and PCIe cross two links of 5.5 pJ/bit (SerDes, shared/hardware.md). Between nodes, there are
# four transceivers of 9 W at 400 Gb/s (NVIDIA MMS4X00-NS400, 22.5 pJ/bit each) and six SerDes. The logic of cards and
# switches draws power all the time, and is counted with the host.
_LINK_J_PER_BYTE, _NETWORK_J_PER_BYTE = 2 * 5.5e-12 * 8, (4 * 22.5e-12 + 6 * 5.5e-12) * 8
_ERROR_POWER = 0.15  # of the watts, 90%: from six published runs with power measured at the wall


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """One step: seconds and joules with the half-widths of their 90% intervals, and memory of the fullest rank.

    `parts` sum to `step_s`; those of communication are what compute does not hide. `energy_j` is for one GPU, with its
    share of links and cards, and of the host for what is offloaded to it: see `energy_parts`.
    """

    step_s: float
    error_s: float
    tokens_per_s_per_gpu: float
    memory: TrainingMemory
    capacity_bytes: float
    recompute: str
    energy_j: float
    error_j: float
    host_bytes: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    energy_parts: dict[str, float] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> float:
        """Return bytes that the fullest rank needs."""
        return self.memory.total

    @property
    def fits(self) -> bool:
        """Return whether the memory is enough."""
        return self.memory.total <= self.capacity_bytes

    @property
    def power_w(self) -> float:
        """Return average watts of one GPU."""
        return self.energy_j / self.step_s

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        derived = ("memory_bytes", "fits", "power_w")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in derived}}


def _optimizer_s(job: TrainingJob) -> float:
    step = _STEP_GRAPH_S if job.graphs else _STEP_S
    if "optimizer" in job.offload:
        return step
    return stream_work(job, ADAM_BYTES * count_updated(job)).seconds + step


def _stage_seconds(job: TrainingJob, one: MicrobatchTime) -> float:
    """Return the seconds of one microbatch on the slowest stage; evenly divided layers have the vocabulary on top."""
    uneven = job.pp > 1 and job.model.layers % (job.pp * job.vp)
    return one.body_s + (one.head_s / job.pp if uneven else one.head_s)


def choose_recompute(job: TrainingJob, room: float = 1.0) -> str:
    """Return the job's own recomputation, or else the least that fits in `room` times the memory."""
    if job.recompute is not None:
        return job.recompute
    capacity = room * _capacity(job)
    return next((r for r in RECOMPUTE if estimate_memory(job, r).total <= capacity), "full")


def _capacity(job: TrainingJob) -> float:
    figure = job.device.memory.capacity_bytes
    if figure is None:
        raise ArgumentError(f"the memory of {job.device.id} is not known")
    return figure.value


def _relative_error(job: TrainingJob, exposed: float) -> float:
    base = _ERROR_YOUNG if job.device.architecture in _YOUNG else _ERROR_DENSE
    return math.hypot(_ERROR_EXPERTS if job.model.experts else base, ERROR_EXPOSED * exposed)


def count_waiting_s(job: TrainingJob, traffic: Traffic, step_s: float) -> float:
    """Return the seconds for which a rank waits for the slowest one, in a step of `step_s`."""
    return _JITTER * math.log2(max(1.0, job.gpus / traffic.domain)) * step_s


def split_energy(
    job: TrainingJob, one: MicrobatchTime, traffic: Traffic, host: HostCost, step_s: float
) -> dict[str, float]:
    """Return the joules of one GPU's step: its work, the bytes it sends, and the time in which it waits."""
    power = PowerModel.from_device(job.device)
    m = job.microbatches
    busy_s = min(step_s, m * (one.forward_s + one.backward_s + one.again_s + one.head_s / job.pp))
    moved = power.hbm_j_per_byte * 2.0 * traffic.link_bytes  # what is sent is read and written once each
    inside = traffic.link_bytes - traffic.network_bytes
    return {
        "compute": m * (one.static_j + one.compute_j),
        "memory": m * one.memory_j + moved,
        "links": _LINK_J_PER_BYTE * max(0.0, inside) + _NETWORK_J_PER_BYTE * traffic.network_bytes,
        "waiting": (step_s - busy_s) * WAITING * power.static_w,
        "host": host.energy_j,
    }


def estimate_training(job: TrainingJob) -> TrainingCost:
    """Return what one step of the job takes, by part, with the memory of the fullest rank and the joules of a GPU."""
    job = dataclasses.replace(job, on=job.device)  # looked up once
    traffic = Traffic(job)
    recompute = choose_recompute(job)
    one = time_microbatch(job, recompute)
    m = job.microbatches
    compute = _stage_seconds(job, one)
    host = estimate_host(job)
    tp = tensor_parallel_s(job, traffic, recompute)
    cp = context_parallel_s(job, traffic, one.scores_s)
    ep = expert_parallel_s(job, traffic, compute)
    hop = pipeline_sends_s(job, traffic)
    each = compute + tp + cp + ep + hop
    parts = {
        "compute": m * compute,
        "tensor parallel": m * tp,
        "context parallel": m * cp,
        "expert parallel": m * ep,
        "pipeline sends": m * hop,
        "pipeline bubble": (job.pp - 1) / job.vp * each,
        "data parallel": data_parallel_s(job, traffic, one, compute),
        "optimizer": _optimizer_s(job),
        "host": host.time_s,
    }
    parts["waiting"] = count_waiting_s(job, traffic, sum(parts.values()))
    step = sum(parts.values())
    energy = split_energy(job, one, traffic, host, step)
    error = _relative_error(job, 1.0 - parts["compute"] / step)
    return TrainingCost(
        step_s=step,
        error_s=step * error,
        tokens_per_s_per_gpu=job.global_batch * job.seq / step / job.gpus,
        memory=estimate_memory(job, recompute),
        capacity_bytes=_capacity(job),
        recompute=recompute,
        energy_j=sum(energy.values()),
        error_j=sum(energy.values()) * math.hypot(error, _ERROR_POWER),
        host_bytes=host.held_bytes,
        parts=parts,
        energy_parts=energy,
    )
