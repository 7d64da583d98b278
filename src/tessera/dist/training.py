"""What one training step on many GPUs takes: seconds by part, bytes of memory, watts, each from the job's own layout.

Compute: the matrix products and attentions of a microbatch at boost clock (tessera.estimate), bytes of everything
between them, then the clock that the power limit leaves. Communication: collectives inside a node by dist.cost, between
nodes by the network's speed. What of it is hidden follows the framework's way: FSDP prefetches the next layer, Megatron
reduces gradients under the last backward pass. A pipeline waits (p - 1) / (m v) of its time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError
from ..estimate.attention import attention_time
from ..estimate.gemm import gemm_time
from ..estimate.power import DeviceWork, PowerModel
from .training_links import RankLinks
from .training_memory import TrainingMemory, count_local_parameters, estimate_memory
from .training_model import RECOMPUTE, MatrixProduct, TrainingJob

# Share of the peak bandwidth that chains of elementwise kernels, norms and optimizers reach (estimate: 0.83-0.87 for
# one long stream; training runs many of medium size).
_STREAM = 0.84
# Products in training run on cold operands, between other kernels: their rate over that of a benchmark's loop.
_IN_SITU = 0.80
# The same of attention kernels, which the model has at their best of 2025; Ampere's is slower than FlashAttention-2
# there already.
_ATTENTION, _ATTENTION_AMPERE = 0.74, 1.0
# Bytes that softmax, mask and dropout move for one stored score, forward.
_SCORE_BYTES = 8.5
# Bytes that each format's cast reads and writes for an operand, forward and backward, beyond a bf16 product.
_CAST_BYTES = {"fp8": 3.2, "fp4": 12.0}
# Grouped products of experts: uneven groups, padding, and tiles that no full wave fills.
_GROUPED = 0.46
# Seconds that the host needs to launch one layer's kernels, forward and backward (about 100 and 300 of them at 12 us).
_HOST_DENSE_S, _HOST_MOE_S = 1.2e-3, 5.5e-3
# Bytes of memory for each parameter that Adam updates: gradient, fp32 weight and two moments read and written, casts.
_ADAM_BYTES = 34.0
# What every step adds: gradient norm, checks for overflow, the data loader, logging.
_STEP_S = 0.04
# PyTorch's own flash attention is FlashAttention-2, written for Ampere: times longer than the chip's best kernels.
_FLASH2 = {"hopper": 2.0, "blackwell": 3.3}
# Shares of a collective that stay visible although the framework overlaps it.
_TP_SHOWS, _CP_SHOWS, _EP_SHOWS, _DP_SHOWS, _FSDP_SHOWS = 0.35, 0.28, 0.55, 0.18, 0.12
_JITTER = 0.009  # of a step, for each doubling of the number of nodes: the slowest rank sets the pace
# Matrix libraries reach less of the peak than NVIDIA's, whose kernels the model of products was fitted to: MI300X 620
# of 1307 TFLOP/s in bf16 where an H100 reaches 680-720 of 989 (SemiAnalysis, December 2024).
_LIBRARY = {"cdna3": 0.75, "cdna2": 0.75}
# Half-widths of 90% of the published steps that the constants were chosen on: dense models, those on chips whose
# software still changes from release to release, models with experts; and of what communication adds.
_ERROR_DENSE, _ERROR_YOUNG, _ERROR_EXPERTS, _ERROR_EXPOSED = 0.22, 0.27, 0.38, 0.5
_YOUNG = ("blackwell", "cdna3", "cdna4")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """One step: seconds and the half-width of their 90% interval, memory of the fullest rank, watts of one GPU.

    `parts` sum to `step_s`; those of communication are what compute does not hide.
    """

    step_s: float
    error_s: float
    tokens_per_s_per_gpu: float
    memory: TrainingMemory
    capacity_bytes: float
    power_w: float
    recompute: str
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> float:
        """Bytes that the fullest rank needs."""
        return self.memory.total

    @property
    def fits(self) -> bool:
        """Whether the memory is enough."""
        return self.memory.total <= self.capacity_bytes

    @property
    def energy_j(self) -> float:
        """Joules of one GPU in a step."""
        return self.power_w * self.step_s

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        derived = ("memory_bytes", "fits", "energy_j")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in derived}}


def _stream(job: TrainingJob, nbytes: float) -> DeviceWork:
    """Work that is bound by device memory."""
    bandwidth = job.device.memory.bandwidth_bytes_per_s
    if bandwidth is None:
        raise ArgumentError(f"the memory bandwidth of {job.device.id} is not known")
    seconds = nbytes / (bandwidth.value * _STREAM)
    return DeviceWork(fixed_s=seconds, busy_s=0.5 * seconds, hbm_bytes=nbytes)


def _scale(work: DeviceWork, factor: float) -> DeviceWork:
    flops = {unit: n * factor for unit, n in work.flops.items()}
    numbers = {f.name: getattr(work, f.name) * factor for f in dataclasses.fields(work) if f.name != "flops"}
    return DeviceWork(**numbers, flops=flops)


def _product_work(job: TrainingJob, p: MatrixProduct, tokens: float) -> tuple[DeviceWork, DeviceWork]:
    """Forward and backward of one product for a microbatch."""
    wide = p.part in ("vocabulary", "router")
    precision = "bf16" if wide and job.precision in ("fp8", "fp4") else job.precision
    m, n, k = (max(1, round(x)) for x in (tokens * p.rows_per_token, p.n, p.k))
    device = job.device
    reached = _IN_SITU * _LIBRARY.get(device.architecture or "", 1.0) * (_GROUPED if p.count > 1 else 1.0)

    def work(m: int, n: int, k: int, layout: str) -> DeviceWork:
        kernel = DeviceWork.of(gemm_time(device, m, n, k, p.count, precision, layout=layout))
        return dataclasses.replace(kernel, clock_s=kernel.clock_s / reached)

    cast = _CAST_BYTES.get(precision, 0.0) * m * p.count
    forward = work(m, n, k, "nt") + _stream(job, cast * k)
    backward = work(m, k, n, "nn") + _stream(job, cast * n)
    if not job.lora:
        backward = backward + work(n, k, m, "tn")
    return forward, backward


def _attention_work(job: TrainingJob) -> tuple[DeviceWork, DeviceWork]:
    """Forward and backward of one layer's attention for a microbatch; ranks of context share the queries evenly."""
    model = job.model
    heads, keys = max(1, model.heads // job.tp), max(1, model.key_heads // job.tp)
    precision = "fp16" if job.precision == "fp16" else "fp32" if job.precision == "fp32" else "bf16"
    sizes = (job.micro_batch, heads, min(keys, heads), job.seq, job.seq, model.head_size)
    if job.attention != "unfused":
        slower = _FLASH2.get(job.device.architecture or "", 1.0) if job.attention == "flash2" else 1.0
        slower /= _ATTENTION_AMPERE if job.device.architecture == "ampere" else _ATTENTION
        both = [attention_time(job.device, *sizes, True, precision, backward=back) for back in (False, True)]
        forward, backward = (_scale(DeviceWork.of(kernel), slower / job.cp) for kernel in both)
        return forward, backward
    # Scores in memory: written, scaled and masked, normalised, dropped out, read again; twice that backward.
    scores = float(job.micro_batch) * heads * job.seq * job.seq / job.cp
    two = [
        gemm_time(job.device, job.seq, job.seq, model.head_size, job.micro_batch * heads, precision),
        gemm_time(job.device, job.seq, model.head_size, job.seq, job.micro_batch * heads, precision, layout="nn"),
    ]
    forward = functools.reduce(lambda a, b: a + b, (DeviceWork.of(k) for k in two)) + _stream(
        job, _SCORE_BYTES * scores
    )
    return forward, _scale(forward, 2.0)


def _layer_work(job: TrainingJob, *, moe: bool) -> tuple[DeviceWork, DeviceWork, DeviceWork]:
    """Forward and backward of one layer for a microbatch on one rank, and the attention's forward alone."""
    model, tp = job.model, job.tp
    tokens = job.micro_batch * job.seq / job.cp
    outside = tp if job.sequence_parallel else 1
    scores, scores_back = _attention_work(job)
    # Norms, residuals and dropout (20 bytes for each element of h), rotary or bias (4), the activation.
    width = (model.topk + model.shared_experts) * model.moe_ffn if moe else model.ffn
    gate = 6.0 if model.gated else 4.0
    routed = 8.0 * model.topk * model.hidden / tp if moe else 0.0  # permuted and back, read and written
    sizes = 20.0 * model.hidden / outside + 4.0 * (model.heads + model.key_heads) * model.head_size / tp
    nbytes = tokens * (sizes + gate * width / tp + routed)
    forward, backward = scores + _stream(job, nbytes), scores_back + _stream(job, 1.7 * nbytes)
    for p in [*model.attention_products(tp), *model.mlp_products(tp, min(job.ep, model.experts or 1), moe=moe)]:
        ahead, back = _product_work(job, p, tokens)
        forward, backward = forward + ahead, backward + back
    return forward, backward, scores


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """Seconds of one microbatch on one stage, under the power limit, by part."""

    forward_s: float
    backward_s: float
    again_s: float
    head_s: float
    scores_s: float
    watts: float


def _time_microbatch(job: TrainingJob, recompute: str) -> _Microbatch:
    model = job.model
    kinds = [(model.layers - model.moe_layers, False), (model.moe_layers, True)]
    zero = DeviceWork()
    forward = backward = scores = zero
    for count, moe in kinds:
        if count:
            a, b, c = _layer_work(job, moe=moe)
            part = count / job.pp
            forward, backward, scores = forward + _scale(a, part), backward + _scale(b, part), scores + _scale(c, part)
    tokens = job.micro_batch * job.seq / job.cp
    ahead, back = _product_work(job, model.vocabulary_product(job.tp), tokens)
    head = ahead + back + _stream(job, 16.0 * tokens * model.vocab / job.tp)
    again = zero
    if recompute == "full":
        again = forward
    elif recompute == "selective":
        again = scores if job.attention == "unfused" else _scale(forward, 0.15)
    power = PowerModel.from_device(job.device)
    whole = forward + backward + again + _scale(head, 1.0 / job.pp)
    run = power.estimate(whole)
    slower = run.seconds / whole.seconds
    return _Microbatch(
        forward_s=forward.seconds * slower,
        backward_s=backward.seconds * slower,
        again_s=again.seconds * slower,
        head_s=head.seconds * slower,
        scores_s=scores.seconds * slower,
        watts=run.power_w,
    )


def _tensor_parallel_s(job: TrainingJob, links: RankLinks, recompute: str) -> float:
    """Seconds of the collectives of one stage and microbatch: two gathers and two scatters each way and layer."""
    if job.tp == 1:
        return 0.0
    nbytes = 2.0 * job.micro_batch * job.seq / job.cp * job.model.hidden
    passes = 2.0 + (1.0 if recompute == "full" else 0.0)
    if job.sequence_parallel:
        pair = sum(links.collective_s(kind, nbytes, job.tp) for kind in ("all_gather", "reduce_scatter"))
        again = 2.0 * links.collective_s("all_gather", nbytes, job.tp)  # inputs gathered again for weight gradients
        a_layer = 2.0 * passes * pair + (0.0 if job.lora else again)
    else:
        a_layer = 2.0 * passes * links.collective_s("all_reduce", nbytes, job.tp)
    return a_layer * job.model.layers / job.pp


def _context_parallel_s(job: TrainingJob, links: RankLinks, scores_s: float) -> float:
    """Seconds of keys and values going round, beyond what the attention of a stage hides."""
    if job.cp == 1:
        return 0.0
    model = job.model
    keys = 2.0 * model.key_heads * model.head_size / job.tp
    nbytes = 2.0 * job.micro_batch * job.seq * keys
    a_layer = 3.0 * links.collective_s("all_gather", nbytes, job.cp, job.tp)  # keys forward; keys and gradients back
    total = a_layer * model.layers / job.pp
    return max(_CP_SHOWS * total, total - 3.0 * scores_s)


def _expert_parallel_s(job: TrainingJob, links: RankLinks) -> float:
    """Seconds of sending tokens to experts and back, forward and backward, on one stage."""
    if job.ep == 1 or not job.model.experts:
        return 0.0
    nbytes = 2.0 * job.micro_batch * job.seq / job.cp / job.tp * job.model.hidden
    once = links.exchange_s(nbytes, job.ep, job.model.topk, 1)
    return 4.0 * once * job.model.moe_layers / job.pp


def _data_parallel_s(job: TrainingJob, links: RankLinks) -> tuple[float, float]:
    """Seconds to reduce the gradients and to gather the weights once."""
    parameters, experts, _ = count_local_parameters(job)
    trained = 0.01 if job.lora else 1.0  # adapters
    expert_ranks = max(1, job.gpus // (job.pp * job.ep))
    each = [(parameters - experts, job.dp * job.cp, links.group_stride("cp", "dp")), (experts, expert_ranks, job.ep)]
    if job.sharding == "zero3":
        each = each[:1]
    reduce = gather = 0.0
    for count, ranks, stride in each:
        # FSDP sends gradients in bf16, and gathers frozen weights too.
        gradients = (2.0 if job.sharding == "zero3" else job.gradient_bytes) * count * trained
        weights = 2.0 * count * (1.0 if job.sharding == "zero3" else trained)
        if job.sharding == "none":
            reduce += links.collective_s("all_reduce", gradients, ranks, stride)
            continue
        shards = min(job.shard_ranks, ranks)
        reduce += links.collective_s("reduce_scatter", gradients, shards, stride)
        # Shards that are repeated are summed over their replicas.
        reduce += links.collective_s("all_reduce", gradients / shards, ranks // shards, stride * shards)
        gather += links.collective_s("all_gather", weights, shards, stride)
    return reduce, gather


def _exposed_data_parallel_s(job: TrainingJob, links: RankLinks, one: _Microbatch, compute_s: float) -> float:
    """Seconds of a step's gradient and weight traffic that no compute hides."""
    reduce, gather = _data_parallel_s(job, links)
    if job.sharding == "zero3":  # gathered forward and backward, layer by layer under the compute of the layer before
        wire = 2.0 * gather + reduce
        times = job.microbatches if job.pp == 1 else 1  # in a pipeline weights stay gathered for the step
        return times * (max(0.0, wire - compute_s) + _FSDP_SHOWS * min(wire, compute_s))
    if not job.overlap:
        return reduce + gather
    last = min(job.microbatches, job.pp) if job.vp > 1 else 1  # chunks of layers finish one after another
    late = max(0.0, reduce - last * (one.backward_s + one.again_s)) + max(0.0, gather - last * one.forward_s)
    return late + _DP_SHOWS * (reduce + gather)


def _count_updated(job: TrainingJob) -> float:
    """Parameters that one rank's optimizer updates."""
    parameters, experts, _ = count_local_parameters(job)
    shared = job.shard_ranks if job.sharding != "none" else 1
    count = (parameters - experts) / shared + experts / max(1, min(shared, job.gpus // (job.pp * job.ep)))
    return count * (0.01 if job.lora else 1.0)


def _optimizer_s(job: TrainingJob) -> float:
    if "optimizer" in job.offload:
        return _STEP_S
    return _stream(job, _ADAM_BYTES * _count_updated(job)).seconds + _STEP_S


def _host_s(job: TrainingJob) -> float:
    """Seconds of a step that ranks wait for the host: its optimizer step and what crosses the link to it.

    The optimizer sends gradients, updates in host memory at the speed of that memory, and sends the weights back. The
    embedding sends the activations of each token and takes their gradients. None of it is taken as hidden.
    """
    seconds = 0.0
    if "optimizer" in job.offload:
        count = _count_updated(job)
        seconds += count * (
            (job.gradient_bytes + 2.0) / job.host_bytes_per_s + _ADAM_BYTES / job.host_memory_bytes_per_s
        )
    if "embedding" in job.offload:
        tokens = job.microbatches * job.micro_batch * job.seq / job.cp
        rows = 2.0 * 2.0 * tokens * job.model.hidden  # bf16, forward and backward
        seconds += rows * (1.0 / job.host_bytes_per_s + 1.0 / job.host_memory_bytes_per_s)
    return seconds


def _stage_seconds(job: TrainingJob, one: _Microbatch) -> float:
    """Seconds of one microbatch on the slowest stage: layers that divide evenly leave the vocabulary on top."""
    body = one.forward_s + one.backward_s + one.again_s
    model, again = job.model, 4.0 / 3.0 if one.again_s >= one.forward_s else 1.0
    host = (model.layers - model.moe_layers) * _HOST_DENSE_S + model.moe_layers * _HOST_MOE_S
    body = max(body, again * host / job.pp)
    if job.pp == 1:
        return body + one.head_s
    if job.model.layers % (job.pp * job.vp):
        return body + one.head_s / job.pp
    return body + one.head_s


def choose_recompute(job: TrainingJob, room: float = 1.0) -> str:
    """The job's own, or the least recomputation that fits in `room` times the memory."""
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
    return math.hypot(_ERROR_EXPERTS if job.model.experts else base, _ERROR_EXPOSED * exposed)


def estimate_training(job: TrainingJob) -> TrainingCost:
    """What one step of the job takes, by part, with the memory of the fullest rank and the watts of a GPU."""
    links = RankLinks.of(job)
    recompute = choose_recompute(job)
    one = _time_microbatch(job, recompute)
    m = job.microbatches
    compute = _stage_seconds(job, one)
    tp = _TP_SHOWS * _tensor_parallel_s(job, links, recompute)
    cp = _context_parallel_s(job, links, one.scores_s)
    ep = _EP_SHOWS * _expert_parallel_s(job, links)
    sends = 2.0 * job.micro_batch * job.seq / job.cp * job.model.hidden / job.tp  # each rank sends its part
    # Plain 1F1B waits for each send, forward and backward; interleaved stages hide nine tenths of theirs.
    hop = (2.0 if job.vp == 1 else 0.2 * job.vp) * sends / links.send_bytes_per_s if job.pp > 1 else 0.0
    dp = _exposed_data_parallel_s(job, links, one, compute)
    each = compute + tp + cp + ep + hop
    parts = {
        "compute": m * compute,
        "tensor parallel": m * tp,
        "context parallel": m * cp,
        "expert parallel": m * ep,
        "pipeline sends": m * hop,
        "pipeline bubble": (job.pp - 1) / job.vp * each,
        "data parallel": dp,
        "optimizer": _optimizer_s(job),
        "host": _host_s(job),
    }
    nodes = max(1.0, job.gpus / links.domain)
    parts["waiting"] = _JITTER * math.log2(nodes) * sum(parts.values())
    step = sum(parts.values())
    memory = estimate_memory(job, recompute)
    busy = parts["compute"] / step
    static = PowerModel.from_device(job.device).static_w
    return TrainingCost(
        step_s=step,
        error_s=step * _relative_error(job, 1.0 - parts["compute"] / step),
        tokens_per_s_per_gpu=job.global_batch * job.seq / step / job.gpus,
        memory=memory,
        capacity_bytes=_capacity(job),
        power_w=busy * one.watts + (1.0 - busy) * 1.5 * static,
        recompute=recompute,
        parts=parts,
    )
