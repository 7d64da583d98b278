"""A training step of a module that is not a decoder: data parallel, with `predict`'s figures for a microbatch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ..device import Device
from ..errors import ArgumentError
from ..estimate.predict import predict
from .training import ERROR_EXPOSED, TrainingCost, count_waiting_s, split_energy
from .training_compute import MicrobatchTime
from .training_memory import CONTEXT_BYTES, TrainingMemory
from .training_model import ModelShape, TrainingJob
from .training_offload import HostCost
from .training_traffic import Traffic, data_parallel_s

if TYPE_CHECKING:
    from torch import nn

_FORWARD = 1.0 / 3.0  # share of a microbatch: the backward pass has two products for each one of the forward pass
_NO_PARTS = ("tensor parallel", "context parallel", "expert parallel", "pipeline sends", "pipeline bubble", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShape(ModelShape):
    """What data parallelism needs to know of a module: how many parameters it has."""

    count: float

    @property
    def parameters(self) -> float:
        return self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Microbatch:
    """Predicted figures of one microbatch on one GPU, and of the update after the last one."""

    pass_s: float
    update_s: float  # on the device; a shard needs less
    launch_s: float  # what the host adds to that
    error: float  # relative, of both
    static_j: float
    compute_j: float
    memory_j: float
    activations: float
    gradients: float
    weights: float
    optimizer: float


class ModuleWork:
    """Predicts the steps of a module; predictions are made once for each size of the microbatch."""

    def __init__(self, module: nn.Module, inputs: Any, device: Device, precision: str) -> None:
        self._module, self._inputs, self._device, self._precision = module, inputs, device, precision
        self.blocks = _count_blocks(module)
        count = sum(p.numel() for p in module.parameters())
        if not count:
            raise ArgumentError(f"{type(module).__name__} has no parameters to train")
        self.shape = ModuleShape(hidden=1, layers=1, heads=1, vocab=1, ffn=1, tied=True, count=float(count))
        # Gradients are sent in the module's own format, without an extra copy in fp32.
        self.options = {"gradient_bytes": 4.0 if precision in ("fp32", "tf32") else 2.0}
        self._predict = cache(self._predict_microbatch)

    def estimate(self, job: TrainingJob) -> TrainingCost:
        """Return what one step of the job takes, as `estimate_training` does for a decoder."""
        one, m, traffic = self._predict(job.micro_batch), job.microbatches, Traffic(job)
        timed = MicrobatchTime(
            forward_s=_FORWARD * one.pass_s,
            backward_s=(1.0 - _FORWARD) * one.pass_s,
            again_s=0.0,
            head_s=0.0,
            scores_s=0.0,
            host_s=0.0,
            static_j=one.static_j,
            compute_j=one.compute_j,
            memory_j=one.memory_j,
        )
        parts = dict.fromkeys(_NO_PARTS, 0.0)
        parts["compute"] = m * one.pass_s
        parts["data parallel"] = data_parallel_s(job, traffic, timed, one.pass_s)
        parts["optimizer"] = one.launch_s + one.update_s / job.shard_ranks
        parts["waiting"] = count_waiting_s(job, traffic, sum(parts.values()))
        step_s = sum(parts.values())
        energy = split_energy(job, timed, traffic, HostCost(), step_s)
        error = math.hypot(one.error, ERROR_EXPOSED * (1.0 - parts["compute"] / step_s))
        capacity = self._device.memory.capacity_bytes
        assert capacity is not None  # the planner checks it first
        return TrainingCost(
            step_s=step_s,
            error_s=step_s * error,
            tokens_per_s_per_gpu=job.global_batch * job.seq / step_s / job.gpus,
            memory=self.estimate_memory(job),
            capacity_bytes=capacity.value,
            recompute="none",
            energy_j=sum(energy.values()),
            error_j=sum(energy.values()) * error,
            parts=parts,
            energy_parts=energy,
        )

    def estimate_memory(self, job: TrainingJob) -> TrainingMemory:
        """Return what every rank holds."""
        one, shards = self._predict(job.micro_batch), job.shard_ranks
        largest = 1.0 / self.blocks  # FSDP2 gathers one block at a time
        return TrainingMemory(
            weights=one.weights * (min(1.0, 1.0 / shards + largest) if job.sharding == "zero3" else 1.0),
            gradients=one.gradients * (1.0 if job.sharding in ("none", "zero1") else min(1.0, 1.0 / shards + largest)),
            optimizer=one.optimizer / shards,
            activations=one.activations,
            logits=0.0,
            other=CONTEXT_BYTES,
        )

    def _predict_microbatch(self, size: int) -> _Microbatch:
        report = predict(
            self._module,
            self._inputs,
            on=self._device,
            precision=self._precision,
            mode="train",
            optimizer="adamw",
            batch=size,
            calibration=None,
            check_memory=False,
        )
        told = report.prediction
        assert told is not None and told.peak_memory_bytes is not None
        update = [d for d in report.descriptors if d.kind == "foreach"]
        passes = [d for d in report.descriptors if d.kind != "foreach"]
        held = {name: float(told.memory_bytes.get(name, 0)) for name in ("weights", "gradients", "optimizer")}
        return _Microbatch(
            pass_s=sum(d.latency_s for d in passes),
            update_s=sum(d.device_s for d in update),
            launch_s=sum(d.latency_s - d.device_s for d in update),
            error=told.error_s / report.total_latency_s,
            static_j=sum(d.static_energy_j for d in passes),
            compute_j=sum(d.compute_energy_j for d in passes),
            memory_j=sum(d.memory_energy_j for d in passes),
            activations=told.peak_memory_bytes - sum(held.values()),
            **held,
        )


def _count_blocks(module: nn.Module) -> int:
    """Count the like blocks of the module's stack, which are sharded one by one; 1 without a stack."""
    from .block_stack import find_stack

    stack = find_stack(module)
    return len(stack) if stack is not None else 1
