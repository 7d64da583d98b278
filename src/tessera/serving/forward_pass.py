"""The work of one forward pass on one GPU of a server: products, attention, experts, small kernels, exchanges.

A step of decoding sends one token of each sequence through the model, a prefill all tokens of a prompt. Products and
attentions are those of tessera.estimate at boost clock. Weights and the key-value cache are read from device memory,
because between two uses of a weight all other weights pass through the chip's cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..device import Device
from ..dist.cost import collective_cost, find_link
from ..errors import ArgumentError, PredictionError
from ..estimate.attention import attention_time
from ..estimate.gemm import gemm_time
from ..estimate.host import is_cpu, widen_for_cpu
from ..estimate.kernel_time import ELEMENT_BYTES, KernelTime, chip
from ..estimate.moe import moe_time
from ..estimate.power import DeviceWork
from .deployment import WEIGHT_BYTES, Deployment, find_computed
from .served_model import ServedModel

# Number of kernels beside products and attention, in one layer under a CUDA graph: two norms with residuals, rotary
# embedding, write to the cache, activation, casts; with experts: router, sort, gather, scatter; with latent attention:
# two more norms, its splits and joins; with linear attention: convolution, gates, norm.
_SMALL, _SMALL_EXPERTS, _SMALL_LATENT, _SMALL_LINEAR = 6, 6, 3, 4
# Elements that these kernels read and write in a layer, for each element of the hidden state (residual kept).
_SMALL_ELEMENTS = 12.0
# Shares of the bandwidth that kernels of experts reach while few tokens come to each expert (other chips as Hopper),
# and of the peak; and the power in which both times are added. Chosen on half of the published servers
# (benchmarks/measure/published_serving.py).
_EXPERT_BANDWIDTH, _EXPERT_BANDWIDTH_OTHER = {"blackwell": 0.76}, 0.62
_EXPERT_PEAK, _EXPERT_POWER = 0.5, 2.0
# Half-width if nobody timed fused experts on a chip of that kind (AMD, TPUs, CPUs): as wide as a kernel's can be.
_NO_EXPERTS = 0.95
# All GPUs wait for the one whose experts were chosen most: it takes this much longer for each further rank of experts.
_IMBALANCE = 0.02
# Time of a step's attention in a server over that in the kernels' own benchmark loop; and the latency of an exchange of
# few bytes, for which engines have their own kernels. Chosen on the same half.
_DECODE_ATTENTION = 0.6
_EXCHANGE_S = 5.9e-6


@dataclass(frozen=True, slots=True)
class UncertainWork:
    """Work, the seconds by which its kernels may be wrong (all in one direction), and its seconds by source."""

    work: DeviceWork = field(default_factory=DeviceWork)
    error_s: float = 0.0
    sources: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel: KernelTime, count: float) -> UncertainWork:
        """Return a kernel, `count` times."""
        seconds = kernel.seconds * count
        return cls(DeviceWork.of(kernel, count), kernel.relative_error * seconds, {kernel.provenance: seconds})

    def __add__(self, other: UncertainWork) -> UncertainWork:
        sources = {
            name: self.sources.get(name, 0.0) + other.sources.get(name, 0.0) for name in (*self.sources, *other.sources)
        }
        return UncertainWork(self.work + other.work, self.error_s + other.error_s, sources)

    def times(self, factor: float) -> UncertainWork:
        """Return this work, `factor` times."""
        sources = {name: seconds * factor for name, seconds in self.sources.items()}
        return UncertainWork(self.work.times(factor), self.error_s * factor, sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """One pass on one GPU: work by part, the number of small kernels, and the exchanges between GPUs."""

    products: UncertainWork
    attention: UncertainWork
    experts: UncertainWork
    small: DeviceWork
    kernels: float
    exchange: UncertainWork

    @property
    def exchange_s(self) -> float:
        """Return seconds of the exchanges."""
        return self.exchange.work.seconds

    @property
    def kernel_error(self) -> float:
        """Return the mean relative 90% half-width of kernels, weighted by their seconds."""
        return _mean_error(self.products, self.attention, self.experts)

    @property
    def relative_error(self) -> float:
        """Return the mean relative 90% half-width of kernels and exchanges."""
        return _mean_error(self.products, self.attention, self.experts, self.exchange)


def _mean_error(*parts: UncertainWork) -> float:
    seconds = sum(part.work.seconds for part in parts)
    return sum(part.error_s for part in parts) / seconds if seconds else 0.0


def decode_pass(served: ServedModel, on: Deployment, *, batch: float, context: float) -> PassWork:
    """Return the pass of one token for each of `batch` sequences that have `context` tokens in the cache."""
    return _pass(served, on, sequences=batch, queries=1, keys=max(1, round(context)))


def prefill_pass(served: ServedModel, on: Deployment, *, batch: float, prompt: int) -> PassWork:
    """Return the pass of all tokens of `batch` prompts."""
    return _pass(served, on, sequences=batch, queries=prompt, keys=prompt)


def _pass(served: ServedModel, on: Deployment, *, sequences: float, queries: int, keys: int) -> PassWork:
    s, ranks = served.shape, on.attention_ranks
    own = max(1.0, sequences / on.replicas)  # sequences of this GPU's copy of the attention
    rows, all_rows = own * queries, max(1.0, sequences) * queries
    products = _products(on, rows, served.attention_matrices(ranks), served.full_layers + served.windowed_layers)
    if served.linear is not None:
        products = products + _products(on, rows, served.linear_matrices(ranks), served.linear.layers)
    gates = 2 if s.gated else 1
    widths = [(s.layers - s.moe_layers, s.ffn), (s.moe_layers, s.shared_experts * s.moe_ffn)]
    for layers, width in widths:
        if layers and width:
            matrices = [(gates * width / on.gpus, s.hidden), (s.hidden, width / on.gpus)]
            products = products + _products(on, all_rows, matrices, layers)
    head = _product_work(on, max(1, round(own)), s.vocab / on.gpus, s.hidden, on.activations)
    kernels = s.layers * _SMALL + s.moe_layers * _SMALL_EXPERTS + 4
    kernels += served.full_layers * _SMALL_LATENT if served.latent else 0
    kernels += served.linear.layers * _SMALL_LINEAR if served.linear else 0
    return PassWork(
        products=products + head,
        attention=_attention(served, on, own, queries, keys),
        experts=_experts(served, on, all_rows),
        small=stream_work(on.device, s.layers * rows * s.hidden * _SMALL_ELEMENTS * WEIGHT_BYTES[on.activations]),
        kernels=kernels,
        exchange=_exchange(served, on, rows, all_rows),
    )


def _products(on: Deployment, rows: float, matrices: list[tuple[float, float]], layers: int) -> UncertainWork:
    work = UncertainWork()
    for n, k in matrices:
        work = work + _product_work(on, max(1, round(rows)), n, k, on.weights, float(layers))
    return work


def _product_work(on: Deployment, m: int, n: float, k: float, stored: str, count: float = 1.0) -> UncertainWork:
    """Return a product whose weights come from device memory; the kernel widens formats that the chip lacks."""
    columns, depth = max(1, round(n)), max(1, round(k))
    precision = find_computed(on, stored)
    size = ELEMENT_BYTES[precision]
    moved = WEIGHT_BYTES[stored] * columns * depth
    activations = m * (size * depth + WEIGHT_BYTES[on.activations] * columns)
    if activations > 0.5 * chip(on.device).cache_bytes:
        moved += activations
    widened = WEIGHT_BYTES[stored] if WEIGHT_BYTES[stored] < size else None  # the kernel widens them on the way
    kernel = gemm_time(on.device, m, columns, depth, 1, precision, hbm_bytes=moved, weight_bytes=widened)
    return UncertainWork.of(_on_device(on.device, kernel), count)


def _on_device(device: Device, kernel: KernelTime) -> KernelTime:
    return widen_for_cpu([kernel])[0] if is_cpu(device) else kernel


def stream_work(device: Device, nbytes: float) -> DeviceWork:
    """Return work bound by device memory, at the bandwidth share of long streams (0.83-0.87 on an H200)."""
    bandwidth = device.memory.bandwidth_bytes_per_s
    if bandwidth is None:
        raise ArgumentError(f"the memory bandwidth of {device.id} is not known")
    seconds = nbytes / (0.85 * bandwidth.value)
    return DeviceWork(fixed_s=seconds, busy_s=0.5 * seconds, hbm_bytes=nbytes)


def _attention(served: ServedModel, on: Deployment, sequences: float, queries: int, keys: int) -> UncertainWork:
    """Return attention of all layers for this GPU's sequences."""
    work = UncertainWork()
    seen = min(keys, served.index.most) if served.index else keys
    if served.full_layers:
        work = work + _attend(served, on, sequences, queries, seen if queries == 1 else keys, served.full_layers, seen)
    if served.index is not None and keys > served.index.most:
        work = work + _choose_keys(served, on, sequences, queries, keys)
    if served.windowed_layers:
        near = min(keys, served.window)
        work = work + _attend(
            served, on, sequences, queries, near if queries == 1 else keys, served.windowed_layers, near
        )
    if served.linear is not None:
        # The state is read and written once a step, or once for each chunk of 64 tokens of a prompt.
        chunks = math.ceil(queries / 64)
        moved = 2.0 * sequences * chunks * served.state_bytes(on.attention_ranks)
        work = work + UncertainWork(stream_work(on.device, moved))
    return work


def _attend(
    served: ServedModel, on: Deployment, sequences: float, queries: int, keys: int, layers: int, seen: int
) -> UncertainWork:
    s, ranks = served.shape, on.attention_ranks
    heads, key_heads = max(1, round(s.heads / ranks)), max(1, round(s.key_heads / ranks))
    size = s.head_size
    batch = max(1, round(sequences))
    cache = max(1.0, WEIGHT_BYTES[on.cache])
    nbytes = sequences * keys * served.cache_elements(ranks) * cache
    if served.latent is not None and queries == 1:
        # All heads share one compressed key of rank and rotary part, whose first part is also the value.
        key_heads, size = 1, (2 * served.latent.key_rank + served.latent.rotary) // 2
    kernel = attention_time(
        on.device,
        batch,
        heads,
        min(key_heads, heads),
        queries,
        keys,
        size,
        queries > 1,
        on.activations,
        window=seen if queries > 1 and seen < keys else None,
        hbm_bytes=nbytes
        + (2.0 * WEIGHT_BYTES[on.activations] * sequences * queries * heads * size if queries > 1 else 0.0),
        source="vllm",
    )
    # Under a CUDA graph the kernel starts as any other: its launch is one of the small ones.
    share = _DECODE_ATTENTION if queries == 1 else 1.0
    seconds, clock_s = share * (kernel.seconds - kernel.overhead_s), share * kernel.clock_s
    # No server reads its cache faster than the memory gives it, however slow the benchmark's loop was.
    seconds = max(seconds, chip(on.device).fastest_s(kernel.flops, kernel.hbm_bytes, on.activations))
    alone = dataclasses.replace(kernel, seconds=seconds, overhead_s=0.0, clock_s=min(seconds, clock_s))
    return UncertainWork.of(_on_device(on.device, alone), layers * sequences / batch)


def _choose_keys(served: ServedModel, on: Deployment, sequences: float, queries: int, keys: int) -> UncertainWork:
    """Return the index's work: small fp8 products of each query with all keys before it."""
    assert served.index is not None
    pairs = sequences * queries * (keys if queries == 1 else keys / 2)
    flops = 2.0 * pairs * served.index.heads * served.index.size * served.full_layers
    nbytes = sequences * keys * served.index.size * served.full_layers + 4.0 * pairs * served.full_layers
    return UncertainWork(_bounded_work(on.device, flops, nbytes, "fp8", 0.4, 0.8))


def _experts(served: ServedModel, on: Deployment, rows: float) -> UncertainWork:
    """Return the work of experts on this GPU: the weights of those that some token chose, and their products."""
    s = served.shape
    if not s.moe_layers:
        return UncertainWork()
    stored = served.expert_format or on.experts
    local = s.experts / on.expert_ranks
    chosen = max(min(1.0, local), local * (1.0 - (1.0 - s.topk / s.experts) ** rows)) if s.topk < s.experts else local
    width = s.moe_ffn / on.width_ranks
    matrices = 3 if s.gated else 2
    weights = matrices * s.hidden * width
    tokens = rows * s.topk / on.expert_ranks
    nbytes = chosen * weights * WEIGHT_BYTES[stored] + tokens * WEIGHT_BYTES[on.activations] * (
        2.0 * s.hidden + 3.0 * width
    )
    flops = 2.0 * weights * tokens
    reached = _EXPERT_BANDWIDTH.get(on.device.architecture or "", _EXPERT_BANDWIDTH_OTHER)
    computed = find_computed(on, stored)
    work = _bounded_work(on.device, flops, nbytes, computed, _EXPERT_PEAK, reached)
    router = _product_work(on, max(1, round(rows)), s.experts, s.hidden, on.activations)
    waits_s = _IMBALANCE * (on.expert_ranks - 1) * work.seconds
    work = work + DeviceWork(fixed_s=waits_s, busy_s=0.5 * waits_s)
    error, source = _expert_error(served, on, rows, computed)
    return (UncertainWork(work, error * work.seconds, {source: work.seconds}) + router).times(s.moe_layers)


def _expert_error(served: ServedModel, on: Deployment, rows: float, computed: str) -> tuple[float, str]:
    """Return the relative 90% half-width of experts on a chip, and where their time comes from."""
    s, by_shares = (
        served.shape,
        "shares of the chip's peaks, chosen on published servers of Hopper and Blackwell",
    )
    try:
        sizes = (max(1, round(rows)), s.hidden, max(1, round(s.moe_ffn / on.width_ranks)), s.topk, s.experts)
        kernel = moe_time(on.device, *sizes, computed, ranks=on.expert_ranks)
    except PredictionError:
        return _NO_EXPERTS, f"{by_shares}; no fused experts were timed on chips like {on.device.id}"
    return kernel.relative_error, by_shares


def _bounded_work(
    device: Device, flops: float, nbytes: float, precision: str, peak_share: float, bandwidth_share: float
) -> DeviceWork:
    """Return the work of a kernel without its own model: products against bytes, at shares of the chip's peaks."""
    of = chip(device)
    peak, unit, _ = of.peak(precision)
    compute_s, memory_s = flops / (peak * peak_share), nbytes / (of.bandwidth * bandwidth_share)
    whole = compute_s**_EXPERT_POWER + memory_s**_EXPERT_POWER
    seconds = whole ** (1 / _EXPERT_POWER)
    clocked = seconds * compute_s**_EXPERT_POWER / whole if whole else 0.0
    return DeviceWork(
        clock_s=clocked,
        fixed_s=seconds - clocked,
        busy_s=seconds,
        flops={unit: flops},
        hbm_bytes=nbytes,
        l2_bytes=nbytes,
    )


def _exchange(served: ServedModel, on: Deployment, rows: float, all_rows: float) -> UncertainWork:
    """Return the exchanges of a pass: after each attention and each MLP."""
    if on.gpus == 1:
        return UncertainWork()
    hidden = WEIGHT_BYTES[on.activations] * served.shape.hidden  # bytes of one token's state
    costs = []
    if on.attention_ranks > 1:
        costs.append(_reduce_s(on, rows * hidden, on.attention_ranks))
    if on.replicas > 1:  # tokens go to all GPUs and come back
        kinds = ("all_gather", "reduce_scatter")
        nodes = on.count_nodes(on.gpus)
        both = [collective_cost(kind, all_rows * hidden, on.gpus, on=on.device, nodes=nodes) for kind in kinds]
        costs += [(cost.time_s, cost.error_s) for cost in both]
    else:
        costs.append(_reduce_s(on, all_rows * hidden, on.gpus))
    seconds, error_s = (math.fsum(values) for values in zip(*costs, strict=True))
    return UncertainWork(DeviceWork(fixed_s=seconds), error_s).times(served.shape.layers)


def _reduce_s(on: Deployment, nbytes: float, ranks: int) -> tuple[float, float]:
    """Return seconds and their 90% half-width of an all-reduce, by the faster way.

    Inside a node, an engine has its own kernel besides NCCL's, in which each GPU reads from all others. vLLM does not
    use it on more than two GPUs that are joined only by PCIe (custom_all_reduce.py).
    """
    name, link = find_link(on.device)
    nodes = on.count_nodes(ranks)
    cost = collective_cost("all_reduce", nbytes, ranks, on=on.device, nodes=nodes)
    seconds = cost.time_s
    if nodes == 1 and (name != "pcie" or ranks == 2):
        seconds = min(seconds, _EXCHANGE_S + 2.0 * nbytes / link.one_way_bytes_per_s)
    return seconds, seconds * cost.error_s / cost.time_s
