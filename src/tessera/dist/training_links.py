"""Speeds between the ranks of a training job: collectives and sends, inside the fast domain and over the network."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .cost import collective_cost, find_link, sent_share
from .training_model import TrainingJob

# Share of a network card's line rate that NCCL reaches between nodes: nccl-tests on two of them 0.84 (A100, EFA) and
# 0.65 (H100, EFA), largest messages (shared/public_comm/multi_node_sweeps).
_NETWORK = 0.70
_LINK = 0.8  # of the fast link inside a node, by sends and by the part inside of a collective between nodes
# Of expert exchange by DeepEP, whose tokens go once to each node: 43-58 GB/s over cards of 50 (its readme, 2-8 nodes).
_EXCHANGE = 0.95
_NETWORK_LATENCY_S = 20e-6
_NVL72 = ("gb200", "gb300")
# Gb/s of network per GPU of the usual servers: DGX A100 200, HGX H100 to B200 400, B300 and GB300 800 (ConnectX-8).
_CARD_GBIT = {"v100": 50, "a100": 200, "a100-40gb-sxm": 200, "a800": 200, "b300": 800, "gb300": 800}


@dataclass(frozen=True, slots=True)
class RankLinks:
    """Speeds between ranks: inside the NVLink domain and between its members' network cards."""

    job: TrainingJob
    domain: int
    network: float

    @classmethod
    def of(cls, job: TrainingJob) -> RankLinks:
        chip = job.device.id
        speed = job.network_bytes_per_s or _CARD_GBIT.get(chip, 400) * 1e9 / 8
        domain = job.domain_gpus or (72 if chip in _NVL72 else job.node_gpus)
        return cls(job, domain, speed * _NETWORK)

    def group_stride(self, *axes: str) -> int:
        """The stride at which as many ranks of a group over the axes would lie in a domain as do."""
        if self.job.placement[-1] == "pp":  # the ranks of a stage are neighbours
            return min(self.job.stride(axis) for axis in axes)
        sizes = {axis: max(1, self.domain // self.job.stride(axis)) for axis in axes}
        return self.domain // math.prod(min(getattr(self.job, axis), sizes[axis]) for axis in axes)

    @property
    def send_bytes_per_s(self) -> float:
        """Speed at which a pipeline stage sends to the next: the network's if any neighbours are in two domains."""
        inside = self.job.stride("pp") * self.job.pp <= self.domain
        return _LINK * find_link(self.job.device)[1].one_way_bytes_per_s if inside else self.network

    def collective_s(self, kind: str, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of a collective among ranks `stride` apart, inside first, then between domains."""
        if ranks < 2 or nbytes <= 0:
            return 0.0
        inside = min(ranks, max(1, self.domain // stride))
        if inside >= ranks:
            return collective_cost(kind, nbytes, ranks, on=self.job.device).time_s
        # Reduced inside first, so that every byte crosses once for each other domain; all cards inside share the work.
        domains = ranks / inside
        rails = min(self.network * inside, _LINK * find_link(self.job.device)[1].one_way_bytes_per_s)
        share = sent_share(kind, 2) * 2.0 * (domains - 1.0) / domains
        return _NETWORK_LATENCY_S * math.log2(domains + 1.0) + nbytes * share / rails

    def exchange_s(self, nbytes: float, ranks: int, topk: int, stride: int) -> float:
        """Seconds to send tokens to experts on `ranks`: once to each node that holds one of the token's experts."""
        if ranks < 2:
            return 0.0
        inside = min(ranks, max(1, self.domain // stride))
        within = collective_cost("all_to_all", nbytes * topk, max(2, inside), on=self.job.device).time_s
        nodes = ranks / inside
        if nodes <= 1:
            return within
        reached = nodes * (1 - (1 - 1 / nodes) ** topk) * (nodes - 1) / nodes
        return max(within, _NETWORK_LATENCY_S + nbytes * reached * _NETWORK / (_EXCHANGE * self.network))
