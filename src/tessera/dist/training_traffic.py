"""Seconds and bytes of a training step's collectives, by axis, and the part that compute does not hide.

What is hidden depends on the framework: FSDP prefetches the next layer, Megatron reduces gradients under the last
backward pass, tensor parallel gathers run under products. Each collective is `collective_cost`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .cost import NETWORK_EFFICIENCY, card_bytes_per_s, collective_cost, find_link
from .training_compute import MicrobatchTime
from .training_memory import count_local_parameters
from .training_model import TrainingJob

# Share of the card's rate in expert exchange by DeepEP, which sends a token once to each node: 43-58 GB/s over cards of
# 50 GB/s (its readme, 2-8 nodes).
_EXCHANGE = 0.95
# Shares of a collective that stay visible although the framework overlaps it.
_TP_SHOWS, _CP_SHOWS, _EP_SHOWS, _DP_SHOWS, _FSDP_SHOWS = 0.35, 0.28, 0.3, 0.18, 0.12
_LINK = 0.8  # share of the fast link's rate that sends inside a domain reach
_NVL72 = ("gb200", "gb300")
_BUCKET = 40e6  # parameters whose gradients Megatron and DDP reduce together, and at least a million for each rank


@dataclass(slots=True)
class Traffic:
    """The ranks of a job on their links; counts the bytes that each rank sends in a step, over links and network."""

    job: TrainingJob
    link_bytes: float = 0.0
    network_bytes: float = 0.0
    network: float = field(init=False)
    domain: int = field(init=False)

    def __post_init__(self) -> None:
        job = self.job
        self.network = job.network_bytes_per_s or card_bytes_per_s(job.device)
        self.domain = job.domain_gpus or (72 if job.device.id in _NVL72 else job.node_gpus)

    def group_stride(self, *axes: str) -> int:
        """Return the stride at which as many ranks of a group over the axes are in a domain as really are."""
        if self.job.placement[-1] == "pp":  # the ranks of a stage are neighbours
            return min(self.job.stride(axis) for axis in axes)
        sizes = {axis: max(1, self.domain // self.job.stride(axis)) for axis in axes}
        return self.domain // math.prod(min(getattr(self.job, axis), sizes[axis]) for axis in axes)

    def collective_s(self, kind: str, nbytes: float, ranks: int, stride: int = 1, times: float = 1.0) -> float:
        """Return the seconds of a collective among ranks `stride` apart; its bytes are counted `times`."""
        if ranks < 2 or nbytes <= 0:
            return 0.0
        inside = min(ranks, max(1, self.domain // stride))
        cost = collective_cost(
            kind,
            nbytes,
            ranks,
            on=self.job.device,
            nodes=math.ceil(ranks / inside),
            network_bytes_per_s=self.network,
            network_hop_s=self.job.network_hop_s,
        )
        self.count(cost.sent_bytes * times, cost.network_bytes * times)
        return cost.time_s

    def count(self, sent_bytes: float, network_bytes: float = 0.0) -> None:
        """Add bytes that a rank sends, and the part of them that leaves its NVLink domain."""
        self.link_bytes += sent_bytes
        self.network_bytes += network_bytes

    def exchange_s(self, nbytes: float, times: float) -> float:
        """Return the seconds to send the tokens of a rank (`nbytes`) to their experts."""
        job = self.job
        ranks, topk = job.ep, job.model.topk
        if job.exchange == "all_to_all":  # a copy for each expert
            return self.collective_s("all_to_all", nbytes * topk, ranks, times=times)
        # A token goes once to each rank of its node, and once to each other node, that holds one of its experts.
        inside = min(ranks, self.domain)
        nodes = math.ceil(ranks / inside)
        copies = _distinct(ranks, topk)
        within = collective_cost("all_to_all", nbytes * copies, max(2, inside), on=job.device).time_s
        leaves = nbytes * _distinct(nodes, topk) * (nodes - 1) / nodes
        self.count(nbytes * copies * times, leaves * times)
        return max(within, self.job.network_hop_s + leaves / (_EXCHANGE * self.network)) if nodes > 1 else within


def _distinct(places: int, draws: int) -> float:
    """Return how many of `places` are hit by `draws` of equal chance."""
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)


def tensor_parallel_s(job: TrainingJob, traffic: Traffic, recompute: str) -> float:
    """Return the visible seconds of one stage and microbatch: two gathers and two scatters per direction and layer."""
    if job.tp == 1:
        return 0.0
    nbytes = 2.0 * job.micro_batch * job.seq / job.cp * job.model.hidden
    passes = 2.0 + (1.0 if recompute == "full" else 0.0)
    layers = job.model.layers / job.pp
    if job.sequence_parallel:
        counts = {"all_gather": 2.0 * passes + (0.0 if job.lora else 2.0), "reduce_scatter": 2.0 * passes}
    else:
        counts = {"all_reduce": 2.0 * passes}
    m = job.microbatches
    once = sum(n * traffic.collective_s(kind, nbytes, job.tp, times=n * layers * m) for kind, n in counts.items())
    return _TP_SHOWS * once * layers


def context_parallel_s(job: TrainingJob, traffic: Traffic, scores_s: float) -> float:
    """Return the seconds of passing keys and values around, beyond what the attention of a stage hides."""
    if job.cp == 1:
        return 0.0
    model = job.model
    keys = 2.0 * model.key_heads * model.head_size / job.tp
    nbytes = 2.0 * job.micro_batch * job.seq * keys
    many = 3.0 * model.layers / job.pp  # keys forward; keys and gradients backward
    total = many * traffic.collective_s("all_gather", nbytes, job.cp, job.stride("cp"), times=many * job.microbatches)
    return max(_CP_SHOWS * total, total - 3.0 * scores_s)


def expert_parallel_s(job: TrainingJob, traffic: Traffic, body_s: float) -> float:
    """Return the visible seconds of sending tokens to experts and back, forward and backward, on one stage."""
    if job.ep == 1 or not job.model.experts:
        return 0.0
    nbytes = 2.0 * job.micro_batch * job.seq / job.cp / job.tp * job.model.hidden
    many = 4.0 * job.model.moe_layers / job.pp
    total = many * traffic.exchange_s(nbytes, many * job.microbatches)
    # Overlapped: the tokens of one microbatch travel under the compute of another.
    return max(_EP_SHOWS * total, total - body_s) if job.overlap_experts else total


def pipeline_sends_s(job: TrainingJob, traffic: Traffic) -> float:
    """Return the visible seconds of one microbatch's sends to the next stage and back."""
    if job.pp == 1:
        return 0.0
    sends = 2.0 * job.micro_batch * job.seq / job.cp * job.model.hidden / job.tp  # each rank sends its part
    inside = job.stride("pp") * job.pp <= traffic.domain
    total = 2.0 * sends * job.vp * job.microbatches
    traffic.count(total, 0.0 if inside else total)
    link = find_link(job.device)[1].one_way_bytes_per_s
    speed = _LINK * link if inside else NETWORK_EFFICIENCY * traffic.network
    # Plain 1F1B waits for each send, forward and backward; interleaved stages hide nine tenths of theirs.
    return (2.0 if job.vp == 1 else 0.2 * job.vp) * sends / speed


def _data_parallel_s(job: TrainingJob, traffic: Traffic) -> tuple[float, float]:
    """Return seconds to reduce the gradients and to gather the weights once."""
    parameters, experts, _ = count_local_parameters(job)
    trained = 0.01 if job.lora else 1.0  # adapters
    expert_ranks = max(1, job.gpus // (job.pp * job.ep))
    each = [(parameters - experts, job.dp * job.cp, traffic.group_stride("cp", "dp")), (experts, expert_ranks, job.ep)]
    full = job.sharding == "zero3"
    reduce = gather = 0.0
    times = job.microbatches if (full and job.pp == 1) or job.sharding == "zero2" else 1
    for count, ranks, stride in each:
        # FSDP sends gradients in bf16, and gathers frozen weights too.
        gradients = (2.0 if full else job.gradient_bytes) * count * trained
        weights = 2.0 * count * (1.0 if full else trained)
        calls = job.model.layers / job.pp if full else math.ceil(count * trained / max(_BUCKET, 1e6 * ranks))

        def call(kind: str, nbytes: float, ranks: int, stride: int, n: float = calls, again: int = times) -> float:
            return n * traffic.collective_s(kind, nbytes / max(n, 1), ranks, stride, times=n * again)

        if job.sharding == "none":
            reduce += call("all_reduce", gradients, ranks, stride)
            continue
        shards = min(job.shard_ranks, ranks)
        reduce += call("reduce_scatter", gradients, shards, stride)
        # Shards that are repeated are summed over their replicas.
        reduce += call("all_reduce", gradients / shards, ranks // shards, stride * shards)
        gather += call("all_gather", weights, shards, stride, again=2 * times if full else 1)
    return reduce, gather


def data_parallel_s(job: TrainingJob, traffic: Traffic, one: MicrobatchTime, compute_s: float) -> float:
    """Return the seconds of a step's gradient and weight traffic that no compute hides."""
    reduce, gather = _data_parallel_s(job, traffic)
    if job.sharding == "zero3":  # gathered forward and backward, layer by layer, under the compute of the layer before
        wire = 2.0 * gather + reduce
        times = job.microbatches if job.pp == 1 else 1  # in a pipeline, weights stay gathered during the step
        return times * (max(0.0, wire - compute_s) + _FSDP_SHOWS * min(wire, compute_s))
    # Sharded gradients (zero2) leave after each microbatch, others after the last one.
    many = job.microbatches if job.sharding == "zero2" else 1
    if not job.overlap:
        return many * reduce + gather
    last = min(job.microbatches, job.pp) if job.vp > 1 else 1  # chunks of layers finish one after another
    late = max(0.0, reduce - last * (one.backward_s + one.again_s))
    return many * (late + _DP_SHOWS * reduce) + max(0.0, gather - last * one.forward_s) + _DP_SHOWS * gather
