"""What it costs to keep optimizer state or the embedding on the host: bytes over PCIe or C2C, and the CPU's work.

Gradients are sent to the host, the optimizer updates in host memory at the speed of that memory (as ZeRO-Offload's
fused Adam, arXiv 2101.06840), and the weights are sent back. The embedding sends the activations of each token and
receives their gradients. None of this is assumed to be hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from .training_memory import count_local_parameters
from .training_model import TrainingJob

# Bytes of memory for each parameter that Adam updates: gradient, fp32 weight and two moments read and written, and
# casts.
ADAM_BYTES = 34.0
_STATE_BYTES = 16.0  # bytes kept for each parameter: weight, two moments and gradient in fp32
# Joules per byte of a link to the host: 5.5 pJ/bit at the SerDes of each of its ends (shared/hardware.md).
_LINK_J_PER_BYTE = 5.5e-12 * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """The host's part of a step for one GPU: seconds that nothing hides, joules, and bytes of its memory."""

    time_s: float = 0.0
    energy_j: float = 0.0
    held_bytes: float = 0.0


def count_updated(job: TrainingJob) -> float:
    """Return parameters that one rank's optimizer updates."""
    parameters, experts, _ = count_local_parameters(job)
    shared = job.shard_ranks if job.sharding != "none" else 1
    count = (parameters - experts) / shared + experts / max(1, min(shared, job.gpus // (job.pp * job.ep)))
    return count * (0.01 if job.lora else 1.0)


def estimate_host(job: TrainingJob) -> HostCost:
    """Return what the host's part of one step takes."""
    sent = moved = held = 0.0
    if "optimizer" in job.offload:
        count = count_updated(job)
        sent, moved, held = count * (job.gradient_bytes + 2.0), count * ADAM_BYTES, count * _STATE_BYTES
    if "embedding" in job.offload:
        tokens = job.microbatches * job.micro_batch * job.seq / job.cp
        rows = 2.0 * 2.0 * tokens * job.model.hidden  # bf16, forward and backward
        sent, moved = sent + rows, moved + rows
        held += (2.0 + _STATE_BYTES) * job.model.vocab * job.model.hidden / job.tp
    if not sent:
        return HostCost()
    working_s = moved / job.host_memory_bytes_per_s
    return HostCost(
        time_s=sent / job.host_bytes_per_s + working_s,
        energy_j=job.host_w * working_s + _LINK_J_PER_BYTE * sent,
        held_bytes=held,
    )
