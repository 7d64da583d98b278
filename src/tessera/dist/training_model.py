"""What is trained and how it is divided: a transformer's parameters, FLOPs and matrix products, and a job's layout."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..device import Device
from ..errors import ArgumentError
from ..hardware import lookup
from .cost import NETWORK_HOP_S

AXES = ("tp", "cp", "dp", "pp")
"""The axes whose sizes multiply to the number of GPUs, in their usual placement: the nearest ranks first."""
RECOMPUTE = ("none", "selective", "full")
SHARDINGS = ("none", "zero1", "zero2", "zero3")
ATTENTIONS = ("flash", "flash8", "flash2", "unfused")
EXCHANGES = ("deduplicated", "all_to_all")
# Watts of the host's chips for one GPU while they work: two Xeon 8490H (350 W each) for eight GPUs.
HOST_W = 2 * 350.0 / 8

# Multi-head latent attention as published for DeepSeek-V2/V3 and Kimi-K2: ranks of queries and of keys with values, and
# the sizes of a head's rotary, plain and value parts (arXiv 2412.19437, section 4.2).
_MLA_Q_RANK, _MLA_KV_RANK, _MLA_ROPE, _MLA_NOPE, _MLA_VALUE = 1536, 512, 64, 128, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """`count` products of (rows x k) by (k x n), where `rows` is a multiple of the tokens of a microbatch."""

    n: float
    k: float
    rows_per_token: float = 1.0
    count: int = 1
    part: str = "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder.

    `ffn` is the width of a dense MLP, `moe_ffn` of one expert; `dense_layers` of a model with experts have a dense MLP.
    `gated` MLPs (SwiGLU) have three matrices; `mla` is latent attention; `tied` shares the matrix of the embedding with
    the vocabulary projection.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = True
    experts: int = 0
    topk: int = 0
    moe_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    mla: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        needed = {"hidden": self.hidden, "layers": self.layers, "heads": self.heads, "vocab": self.vocab}
        if self.experts:
            needed |= {"topk": self.topk, "moe_ffn": self.moe_ffn}
        else:
            needed["ffn"] = self.ffn
        for name, value in needed.items():
            if value < 1:
                raise ArgumentError(f"a model needs {name} of at least 1, not {value}")

    @property
    def key_heads(self) -> int:
        """Return the heads of keys and values: as many as of queries unless they are grouped."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Return the elements of one head; the mean of its keys and values if they differ."""
        if self.mla:
            return (_MLA_NOPE + _MLA_ROPE + _MLA_VALUE) // 2
        return self.head_dim or self.hidden // self.heads

    @property
    def moe_layers(self) -> int:
        """Return layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def attention_products(self, tp: int = 1) -> list[MatrixProduct]:
        """Return the projections of one attention, on one of `tp` ranks."""
        h, heads = self.hidden, self.heads / tp
        if self.mla:
            queries = heads * (_MLA_NOPE + _MLA_ROPE)
            down = MatrixProduct(n=_MLA_Q_RANK + _MLA_KV_RANK + _MLA_ROPE, k=h, part="attention")
            ups = [
                MatrixProduct(n=queries, k=_MLA_Q_RANK, part="attention"),
                MatrixProduct(n=heads * (_MLA_NOPE + _MLA_VALUE), k=_MLA_KV_RANK, part="attention"),
            ]
            return [down, *ups, MatrixProduct(n=h, k=heads * _MLA_VALUE, part="attention")]
        size = self.head_size
        kv = max(self.key_heads / tp, 1.0)
        return [
            MatrixProduct(n=(heads + 2 * kv) * size, k=h, part="attention"),
            MatrixProduct(n=h, k=heads * size, part="attention"),
        ]

    def mlp_products(self, tp: int = 1, ep: int = 1, *, moe: bool = False) -> list[MatrixProduct]:
        """Return the products of one MLP on one rank; `ep` ranks share experts, and tokens are balanced."""
        h, gates = self.hidden, 2 if self.gated else 1
        if not moe:
            width = self.ffn / tp
            return [MatrixProduct(n=gates * width, k=h), MatrixProduct(n=h, k=width)]
        local = max(1, self.experts // ep)
        # rows of one expert for each token of a rank; a sequence shard keeps 1 / tp of them
        rows = self.topk / local / tp
        many = [
            MatrixProduct(n=gates * self.moe_ffn, k=h, rows_per_token=rows, count=local, part="experts"),
            MatrixProduct(n=h, k=self.moe_ffn, rows_per_token=rows, count=local, part="experts"),
        ]
        router = MatrixProduct(n=self.experts, k=h, rows_per_token=1 / tp, part="router")
        width = self.shared_experts * self.moe_ffn / tp
        shared = [MatrixProduct(n=gates * width, k=h), MatrixProduct(n=h, k=width)] if width else []
        return [router, *many, *shared]

    def vocabulary_product(self, tp: int = 1) -> MatrixProduct:
        """Return the projection to the vocabulary."""
        return MatrixProduct(n=self.vocab / tp, k=self.hidden, part="vocabulary")

    def layer_parameters(self, *, moe: bool = False) -> float:
        """Return parameters of one layer."""
        products = [*self.attention_products(), *self.mlp_products(moe=moe)]
        return sum(p.n * p.k * p.count for p in products) + 2 * self.hidden

    def expert_parameters(self) -> float:
        """Return the parameters of the whole model that expert parallelism divides."""
        return _count_parameters(self)[1]

    @property
    def embedding_parameters(self) -> float:
        """Return parameters of the embedding and of the projection to the vocabulary."""
        return (1.0 if self.tied else 2.0) * self.vocab * self.hidden

    @property
    def parameters(self) -> float:
        """Return all parameters."""
        return _count_parameters(self)[0]

    def forward_flops(self, seq: int, *, causal: bool = True) -> dict[str, float]:
        """Return the FLOPs of one sequence's forward pass by part; causal attention computes half of the scores."""
        totals = {"attention": 0.0, "scores": 0.0, "mlp": 0.0, "experts": 0.0, "router": 0.0, "vocabulary": 0.0}
        layers = [(self.layers - self.moe_layers, False), (self.moe_layers, True)]
        for count, moe in layers:
            for p in [*self.attention_products(), *self.mlp_products(moe=moe)] if count else []:
                totals[p.part] += count * 2.0 * seq * p.rows_per_token * p.count * p.n * p.k
        totals["scores"] = self.layers * 4.0 * seq * seq * self.heads * self.head_size * (0.5 if causal else 1.0)
        totals["vocabulary"] = 2.0 * seq * self.hidden * self.vocab
        return {part: flops for part, flops in totals.items() if flops}

    def training_flops(self, seq: int, *, causal: bool = True) -> float:
        """Return the FLOPs of one sequence's forward and backward pass, without recomputation, as an MFU has them."""
        return 3.0 * sum(self.forward_flops(seq, causal=causal).values())


@functools.lru_cache(maxsize=256)
def _count_parameters(model: ModelShape) -> tuple[float, float]:
    """Return all parameters, and those of experts; cached, because a planner asks for them thousands of times."""
    dense = model.layers - model.moe_layers
    body = dense * model.layer_parameters() if dense else 0.0
    if not model.moe_layers:
        return body + model.embedding_parameters, 0.0
    body += model.moe_layers * model.layer_parameters(moe=True)
    experts = sum(p.n * p.k * p.count for p in model.mlp_products(moe=True) if p.part == "experts")
    return body + model.embedding_parameters, model.moe_layers * experts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A training step: a model, the chips, the batch, and how the work is divided.

    `sharding`: what data-parallel ranks divide (zero1: optimizer state, zero2: gradients too, zero3: weights too, as
    FSDP does) over `shard_ranks` of them. With `recompute` None, the least that fits is taken. `attention`: "flash"
    (the chip's best kernels), "flash8" (the same in fp8), "flash2" (PyTorch's own), or "unfused" (scores in memory, as
    before flash attention).

    The cluster: `network_bytes_per_s` is one way and per GPU, `network_hop_s` what one hop adds; `domain_gpus` are
    joined by the fast link (0: an NVL72's 72, else a node); `placement` names the axes from the nearest ranks to the
    farthest. `offload` names what is on the host: "optimizer" (its state and its step) or "embedding"; the host's link
    and memory speeds, and its watts while it works, are one GPU's share.

    Experts: tokens travel once to each rank and node that needs them (`exchange` "deduplicated": DeepEP, HybridEP) or
    once for each expert ("all_to_all": NCCL); `overlap_experts` sends them under the compute of another microbatch;
    `fused_experts` runs all experts of a rank in one kernel. `graphs`: the whole step is a CUDA graph, so nothing waits
    for launches.
    """

    model: ModelShape
    on: str | Device
    gpus: int
    seq: int
    global_batch: int
    micro_batch: int = 1
    precision: str = "bf16"
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    sharding: str = "zero1"
    shard_ranks: int = 0
    recompute: str | None = None
    lora: bool = False
    attention: str = "flash"
    sequence_parallel: bool = True
    overlap: bool = True
    gradient_bytes: float = 4.0
    shard_weight_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    exchange: str = "deduplicated"
    overlap_experts: bool = False
    fused_experts: bool = False
    graphs: bool = False
    network_bytes_per_s: float | None = None
    network_hop_s: float = NETWORK_HOP_S
    node_gpus: int = 8
    domain_gpus: int = 0
    placement: tuple[str, ...] = AXES
    offload: tuple[str, ...] = ()
    host_bytes_per_s: float = 0.0
    host_memory_bytes_per_s: float = 0.0
    host_w: float = HOST_W

    def __post_init__(self) -> None:
        sizes = ("gpus", "seq", "global_batch", "micro_batch", "tp", "pp", "vp", "cp", "ep")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ArgumentError(f"a training job needs {name} of at least 1, not {getattr(self, name)}")
        if self.gpus % (self.tp * self.pp * self.cp):
            raise ArgumentError(f"{self.gpus} GPUs do not divide into tp {self.tp} x pp {self.pp} x cp {self.cp}")
        choices = {
            "recompute": (None, *RECOMPUTE),
            "sharding": SHARDINGS,
            "attention": ATTENTIONS,
            "exchange": EXCHANGES,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ArgumentError(f"no {name} {getattr(self, name)!r}", fix=f"one of: {', '.join(map(str, known))}")
        if self.offload and not (self.host_bytes_per_s > 0 and self.host_memory_bytes_per_s > 0):
            raise ArgumentError(
                f"offload={self.offload} needs the speed of the host",
                fix="give host_bytes_per_s and host_memory_bytes_per_s, or take them from a cluster: dist.plan",
            )
        if not self.shard_ranks:
            object.__setattr__(self, "shard_ranks", 1 if self.sharding == "none" else self.dp * self.cp)

    @property
    def dp(self) -> int:
        """Return data-parallel replicas."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def microbatches(self) -> int:
        """Return microbatches of a step on each replica."""
        return max(1, math.ceil(self.global_batch / (self.dp * self.micro_batch)))

    def stride(self, axis: str) -> int:
        """Return how far apart neighbours along an axis are, in ranks."""
        return math.prod(getattr(self, near) for near in self.placement[: self.placement.index(axis)])

    @property
    def device(self) -> Device:
        """Return the chip."""
        return lookup(self.on) if isinstance(self.on, str) else self.on
