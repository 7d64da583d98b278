"""What a microbatch takes on one GPU: matrix products, attentions, the bytes between them, and the power limit.

Products and attentions are those of tessera.estimate at boost clock, slowed by what a training step loses against a
benchmark's loop. The constants were chosen on one half of the published runs
(benchmarks/measure/published_training.py).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from ..device import Device
from ..errors import ArgumentError
from ..estimate.attention import attention_time
from ..estimate.gemm import gemm_time
from ..estimate.power import DeviceWork, PowerModel
from .training_model import MatrixProduct, TrainingJob

# Share of the peak bandwidth that chains of elementwise kernels, norms and optimizers reach (estimate: 0.83-0.87 for
# one long stream; training has many streams of medium size).
_STREAM = 0.84
# In training, products run on cold operands, between other kernels: their rate over that of a benchmark's loop.
_IN_SITU = 0.80
# The same factor for attention kernels. The model has their best speed of 2025 and, for chips without data, Hopper's
# ratio to the peak. For Ampere the model already has a slower kernel than FlashAttention-2; CDNA3's kernels do not
# reach that ratio.
_ATTENTION = {"ampere": 1.0, "cdna3": 0.55}
_ATTENTION_OTHER = 0.74
# Bytes that softmax, mask and dropout move for one stored score, in the forward pass.
_SCORE_BYTES = 8.5
# Bytes that each format's cast reads and writes for an operand, forward and backward, more than a bf16 product.
_CAST_BYTES = {"fp8": 3.2, "fp4": 12.0}
# Rate of the products of experts, one after another: uneven groups, padding, and tiles that do not fill a wave; and in
# one fused kernel for all groups with activation and cast (Megatron-Bridge from 26.06 on, by its recipes).
_GROUPED, _GROUPED_FUSED = 0.46, 0.85
# PyTorch's own flash attention is FlashAttention-2, written for Ampere: how many times longer it takes than the chip's
# best kernels. On AMD's chips it is AOTriton: 1.2 to 1.6 times longer forward
# (midiareshadi.github.io/blog/attn-dsl-bench) and four times backward with grouped keys (24% of the best, HipKittens,
# arXiv 2511.08083).
_FLASH2 = {"hopper": 2.0, "blackwell": 3.3, "cdna3": 3.0, "cdna4": 3.0}
# Blackwell Ultra has twice the exponentials a second, which limit attention besides the products (NVIDIA, 2025).
_ULTRA, _ULTRA_CHIPS = 0.75, ("b300", "gb300")
# Time of attention in fp8 over bf16: products are twice as fast, the softmax is the same. Hopper's gains nothing in
# training.
_FLASH8 = {"blackwell": 0.8, "cdna4": 0.8}
# Other vendors' matrix libraries reach less of the peak than NVIDIA's, to whose kernels the model of products was
# fitted: MI300X 620 of 1307 TFLOP/s in bf16, 990 of 2615 in fp8, where an H100 reaches 680-720 of 989 (SemiAnalysis,
# December 2024).
_LIBRARY = {"cdna3": 0.73, "cdna2": 0.73}
# The same for PyTorch's own stack (cuBLAS by its defaults, torch.compile) on chips that are new to it, against NVIDIA's
# frameworks: two groups of torchao's runs of 2025 on B200, dense and with experts.
_LIBRARY_NATIVE = {"blackwell": 0.55}
# Seconds that the host needs to launch one layer's kernels, forward and backward: for a dense layer (about 100 kernels
# of 12 us), for one with experts, and for each expert on the GPU, whose products and casts are launched one by one.
_HOST_DENSE_S, _HOST_MOE_S = 1.2e-3, 4.0e-3
_HOST_EXPERT_S = {"fp8": 0.25e-3, "fp4": 0.25e-3}
_HOST_EXPERT_WIDE_S = 0.1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTime:
    """Seconds of one microbatch on one pipeline stage under the power limit, by part, and a GPU's joules for it."""

    forward_s: float
    backward_s: float
    again_s: float
    head_s: float
    scores_s: float
    host_s: float
    static_j: float
    compute_j: float
    memory_j: float

    @property
    def body_s(self) -> float:
        """Return the seconds of the layers: the GPU's or, if it waits for launches, the host's."""
        return max(self.forward_s + self.backward_s + self.again_s, self.host_s)


def stream_work(job: TrainingJob, nbytes: float) -> DeviceWork:
    """Return work that is bound by device memory."""
    bandwidth = job.device.memory.bandwidth_bytes_per_s
    if bandwidth is None:
        raise ArgumentError(f"the memory bandwidth of {job.device.id} is not known")
    seconds = nbytes / (bandwidth.value * _STREAM)
    return DeviceWork(fixed_s=seconds, busy_s=0.5 * seconds, hbm_bytes=nbytes)


def _product_work(job: TrainingJob, p: MatrixProduct, tokens: float) -> tuple[DeviceWork, DeviceWork]:
    """Return forward and backward of one product for a microbatch."""
    wide = p.part in ("vocabulary", "router")
    precision = "bf16" if wide and job.precision in ("fp8", "fp4") else job.precision
    m, n, k = (max(1, round(x)) for x in (tokens * p.rows_per_token, p.n, p.k))
    device = job.device
    reached = _IN_SITU * _LIBRARY.get(device.architecture or "", 1.0)
    if job.attention == "flash2":  # PyTorch's own kernels
        reached *= _LIBRARY_NATIVE.get(device.architecture or "", 1.0)
    if p.part == "experts":
        reached *= _GROUPED_FUSED if job.fused_experts else _GROUPED

    def work(m: int, n: int, k: int, layout: str) -> DeviceWork:
        kernel = DeviceWork.of(gemm_time(device, m, n, k, p.count, precision, layout=layout))
        return dataclasses.replace(kernel, clock_s=kernel.clock_s / reached)

    cast = _CAST_BYTES.get(precision, 0.0) * m * p.count
    forward = work(m, n, k, "nt") + stream_work(job, cast * k)
    backward = work(m, k, n, "nn") + stream_work(job, cast * n)
    if not job.lora:
        backward = backward + work(n, k, m, "tn")
    return forward, backward


def _attention_work(job: TrainingJob) -> tuple[DeviceWork, DeviceWork]:
    """Return forward and backward of one layer's attention for a microbatch; context ranks share the queries evenly."""
    model = job.model
    heads, keys = max(1, model.heads // job.tp), max(1, model.key_heads // job.tp)
    precision = "fp16" if job.precision == "fp16" else "fp32" if job.precision == "fp32" else "bf16"
    sizes = (job.micro_batch, heads, min(keys, heads), job.seq, job.seq, model.head_size)
    if job.attention != "unfused":
        slower = _FLASH2.get(job.device.architecture or "", 1.0) if job.attention == "flash2" else 1.0
        slower *= _ULTRA if job.device.id in _ULTRA_CHIPS else 1.0
        slower *= _FLASH8.get(job.device.architecture or "", 1.0) if job.attention == "flash8" else 1.0
        slower /= _ATTENTION.get(job.device.architecture or "", _ATTENTION_OTHER)
        both = [attention_time(job.device, *sizes, True, precision, backward=back) for back in (False, True)]
        forward, backward = (DeviceWork.of(kernel).times(slower / job.cp) for kernel in both)
        return forward, backward
    # Scores in memory: written, scaled and masked, normalised, dropped out, read again; twice that backward.
    scores = float(job.micro_batch) * heads * job.seq * job.seq / job.cp
    two = [
        gemm_time(job.device, job.seq, job.seq, model.head_size, job.micro_batch * heads, precision),
        gemm_time(job.device, job.seq, model.head_size, job.seq, job.micro_batch * heads, precision, layout="nn"),
    ]
    forward = functools.reduce(lambda a, b: a + b, (DeviceWork.of(k) for k in two)) + stream_work(
        job, _SCORE_BYTES * scores
    )
    return forward, forward.times(2.0)


# The settings on which the work of a layer depends: a planner asks for the same layer in many pipelines and shardings.
_LAYER_KEYS = ("model", "micro_batch", "seq", "cp", "tp", "ep", "precision", "attention", "sequence_parallel", "lora")
_Works = tuple[DeviceWork, DeviceWork, DeviceWork]
# the chip is kept alive, so that its id is not used again
_layers: dict[tuple[object, ...], tuple[Device, _Works]] = {}


def _find_work(job: TrainingJob, part: str) -> _Works:
    """Return forward and backward of a "dense" layer, one with "experts" or the "vocabulary", for a microbatch.

    All are for one rank. The third value is the forward of a layer's attention alone; for the vocabulary, its loss.
    """
    device = job.device
    key = (id(device), part, job.fused_experts, *(getattr(job, name) for name in _LAYER_KEYS))
    if key not in _layers:
        if len(_layers) > 10_000:
            _layers.clear()
        moe = part == "experts"
        work = _count_vocabulary_work(job) if part == "vocabulary" else _count_layer_work(job, moe=moe)
        _layers[key] = device, work
    return _layers[key][1]


def _count_vocabulary_work(job: TrainingJob) -> _Works:
    tokens = job.micro_batch * job.seq / job.cp
    ahead, back = _product_work(job, job.model.vocabulary_product(job.tp), tokens)
    return ahead, back, stream_work(job, 16.0 * tokens * job.model.vocab / job.tp)


def _count_layer_work(job: TrainingJob, *, moe: bool) -> _Works:
    model, tp = job.model, job.tp
    tokens = job.micro_batch * job.seq / job.cp
    outside = tp if job.sequence_parallel else 1
    scores, scores_back = _attention_work(job)
    # Bytes: norms, residuals and dropout (20 for each element of h), rotary or bias (4), the activation.
    width = (model.topk + model.shared_experts) * model.moe_ffn if moe else model.ffn
    gate = 6.0 if model.gated else 4.0
    routed = 8.0 * model.topk * model.hidden / tp if moe else 0.0  # permuted and back, read and written
    sizes = 20.0 * model.hidden / outside + 4.0 * (model.heads + model.key_heads) * model.head_size / tp
    nbytes = tokens * (sizes + gate * width / tp + routed)
    forward, backward = scores + stream_work(job, nbytes), scores_back + stream_work(job, 1.7 * nbytes)
    for p in [*model.attention_products(tp), *model.mlp_products(tp, min(job.ep, model.experts or 1), moe=moe)]:
        ahead, back = _product_work(job, p, tokens)
        forward, backward = forward + ahead, backward + back
    return forward, backward, scores


def time_microbatch(job: TrainingJob, recompute: str) -> MicrobatchTime:
    """Return what one microbatch takes on one stage."""
    model = job.model
    kinds = {"dense": model.layers - model.moe_layers, "experts": model.moe_layers}
    zero = DeviceWork()
    forward = backward = scores = zero
    for kind, count in kinds.items():
        if count:
            a, b, c = _find_work(job, kind)
            part = count / job.pp
            forward, backward, scores = forward + a.times(part), backward + b.times(part), scores + c.times(part)
    ahead, back, loss = _find_work(job, "vocabulary")
    head = ahead + back + loss
    again = zero
    if recompute == "full":
        again = forward
    elif recompute == "selective":
        again = scores if job.attention == "unfused" else forward.times(0.15)
    power = PowerModel.from_device(job.device)
    whole = forward + backward + again + head.times(1.0 / job.pp)
    run = power.estimate(whole)
    slower = run.seconds / whole.seconds
    launches = 0.0 if job.graphs else _host_seconds(job) * (4.0 / 3.0 if recompute == "full" else 1.0)
    return MicrobatchTime(
        forward_s=forward.seconds * slower,
        backward_s=backward.seconds * slower,
        again_s=again.seconds * slower,
        head_s=head.seconds * slower,
        scores_s=scores.seconds * slower,
        host_s=launches,
        static_j=run.static_j,
        compute_j=run.compute_j,
        memory_j=run.memory_j,
    )


def _host_seconds(job: TrainingJob) -> float:
    """Return seconds that the host needs to launch the layers of one stage, forward and backward."""
    model = job.model
    experts = max(1, model.experts // job.ep) if model.experts and not job.fused_experts else 0
    each = _HOST_MOE_S + experts * _HOST_EXPERT_S.get(job.precision, _HOST_EXPERT_WIDE_S)
    return ((model.layers - model.moe_layers) * _HOST_DENSE_S + model.moe_layers * each) / job.pp
