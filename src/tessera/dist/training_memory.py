"""Bytes of device memory that a training step needs: weights, gradients, optimizer state, activations, logits.

Activations follow Korthikanti et al. (arXiv 2205.05198) part by part, so that grouped keys, gated MLPs and experts are
counted too. Flash attention keeps no scores. The fullest pipeline stage counts: the first holds the activations of most
microbatches, the last the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .training_model import TrainingJob

GIB = 1024.0**3
# What a rank holds before the first weight: the CUDA context, NCCL's channels and cuBLAS workspaces.
CONTEXT_BYTES = 2.5 * GIB
# PyTorch's reserved memory over its allocated memory: the caching allocator holds blocks that no tensor fills.
_FRAGMENTATION = 1.05
_LOGIT_BYTES = 8.0  # bytes of one logit: bf16, its softmax in fp32, the gradient in bf16
# Share that a selective policy keeps if no scores are stored (flash attention): it recomputes norms, activations and
# every second matrix product (torchtitan's per-op policy).
_SELECTIVE_KEEPS = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes by part on the fullest rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    other: float

    @property
    def total(self) -> float:
        """Return all bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.other


def count_local_parameters(job: TrainingJob) -> tuple[float, float, float]:
    """Return the parameters on one rank of the first and of the last pipeline stage, and how many are experts'."""
    model = job.model
    experts = model.expert_parameters() / (job.pp * min(job.ep, model.experts)) if model.experts else 0.0
    body = (model.parameters - model.embedding_parameters - model.expert_parameters()) / (job.pp * job.tp)
    ends = model.vocab * model.hidden / job.tp * (2.0 if job.pp == 1 and not model.tied else 1.0)
    return body + experts + ends, experts, ends


def count_layer_activations(job: TrainingJob, recompute: str, *, moe: bool) -> float:
    """Return the bytes that one layer keeps for its backward pass, for one microbatch."""
    model, tp = job.model, job.tp
    tokens = job.micro_batch * job.seq / job.cp
    outside = tp if job.sequence_parallel else 1  # otherwise norms and residuals are on every rank
    if recompute == "full":
        return 2.0 * model.hidden * tokens / outside
    heads, keys, size = model.heads, model.key_heads, model.head_size
    # Norms; before flash attention, models also had dropout, whose masks are kept.
    norms = 4.0 * model.hidden / outside + (2.0 * model.hidden / outside if job.attention == "unfused" else 0.0)
    inputs = 4.0 * model.hidden / outside
    attention = 2.0 * (heads + 2.0 * keys + heads) * size / tp
    if model.mla:
        attention = 2.0 * heads * (192 + 192 + 128 + 128) / tp
    if job.attention == "unfused" and recompute == "none":
        attention += 5.0 * heads * job.seq / tp
    gates = 2.0 if model.gated else 1.0
    if moe:
        mlp = model.topk * (2.0 * gates * model.moe_ffn + 2.0 * model.moe_ffn + 4.0 * model.hidden) / tp
        mlp += model.shared_experts * (2.0 * gates + 2.0) * model.moe_ffn / tp
    else:
        mlp = (2.0 * gates + 2.0) * model.ffn / tp
    if job.lora:  # inputs of frozen products are not needed again
        inputs, mlp = 0.5 * inputs, mlp * gates / (gates + 1.0)
    if job.precision in ("fp8", "fp4"):
        mlp, inputs = mlp * 0.75, inputs * 0.75  # inputs of products are kept in 8 bits
    kept = norms + inputs + attention + mlp
    if recompute == "selective" and job.attention != "unfused":
        kept *= _SELECTIVE_KEEPS
    return kept * tokens


def estimate_memory(job: TrainingJob, recompute: str) -> TrainingMemory:
    """Return what the fullest rank holds."""
    model = job.model
    parameters, experts, ends = count_local_parameters(job)
    # the projection stays on the GPU; so does that of a last stage
    if "embedding" in job.offload and job.pp == 1 and not model.tied:
        parameters -= 0.5 * ends
    shared = job.shard_ranks
    expert_ranks = max(1, job.gpus // (job.pp * min(job.ep, model.experts))) if model.experts else 1
    dense = parameters - experts
    share = dense / shared + experts / min(shared, expert_ranks) if shared > 1 else parameters
    trained = 0.02 if job.lora else 1.0  # adapters of rank 16 have under 1% of the parameters, plus their states
    layers = model.layers / job.pp
    if job.sharding == "zero3":
        # gathered at once: a layer, or a matrix
        biggest = max(parameters / layers, model.vocab * model.hidden / job.tp)
        weights = job.shard_weight_bytes * share + 2.0 * 2.0 * biggest
        gradients = job.shard_weight_bytes * share * trained + 2.0 * biggest * trained
        optimizer = (job.optimizer_bytes - min(job.shard_weight_bytes, 4.0)) * share * trained
        if job.pp > 1:  # weights and gradients stay whole during the step
            weights, gradients = weights + 2.0 * parameters, gradients + 4.0 * parameters * trained
    else:
        copies = {"fp8": 1.0, "fp4": 1.0}.get(job.precision, 0.0) if not job.lora else 0.0
        weights = (1.0 if job.lora and job.precision in ("fp8", "fp4") else 2.0 + copies) * parameters
        gradients = job.gradient_bytes * (share if job.sharding == "zero2" else parameters) * trained
        optimizer = job.optimizer_bytes * share * trained
    if "optimizer" in job.offload:
        optimizer = 0.0
    kept, working = _stage_activations(job, recompute)
    flight = job.pp * (1.0 + (job.pp - 1) / (job.pp * job.vp)) if job.vp > 1 else job.pp
    first = kept * min(flight, job.microbatches) + working
    logits = _LOGIT_BYTES * job.micro_batch * job.seq / job.cp * model.vocab / job.tp
    # The first stage holds the activations of most microbatches, the last stage those of one, and the logits.
    activations, logits = (first, 0.0) if job.pp > 1 and first > kept + working + logits else (kept + working, logits)
    return TrainingMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        other=CONTEXT_BYTES + (_FRAGMENTATION - 1.0) * (activations + logits),
    )


def _stage_activations(job: TrainingJob, recompute: str) -> tuple[float, float]:
    """Return the bytes that a stage keeps for one microbatch, and those of the one layer that is recomputed."""
    model = job.model
    kinds = [(model.layers - model.moe_layers, False), (model.moe_layers, True)]
    kept = sum(n * count_layer_activations(job, recompute, moe=moe) for n, moe in kinds if n)
    again = max(count_layer_activations(job, "none", moe=moe) for n, moe in kinds if n) if recompute == "full" else 0.0
    return kept / model.layers * math.ceil(model.layers / job.pp), again
