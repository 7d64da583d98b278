"""`Deployment`: the GPUs of one copy of a model, how they share it, and the formats of weights and cache."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Device
from ..dist.cluster import list_clusters
from ..dist.cost import card_bytes_per_s
from ..errors import ArgumentError
from ..estimate.kernel_time import chip

# Bytes of a stored weight with its scales: fp8 has few, nvfp4 one byte for 16 elements, mxfp4 one for 32, int4 two.
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "int4": 0.5625}
# GPUs of a node: HGX boards, and servers for PCIe cards; more if a cluster of `dist` has more (NVL72).
_NODE_GPUS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One copy of a model on `gpus` chips of a node, or of several nodes if a node has fewer.

    Attention is split over `gpus / replicas` ranks by heads (tensor parallel); its `replicas` share the sequences (data
    parallel attention). Experts are split over `expert_ranks` by expert, and over the other ranks by width.
    """

    device: Device
    gpus: int = 1
    replicas: int = 1
    expert_ranks: int = 1
    weights: str = "bf16"
    experts: str = "bf16"
    cache: str = "bf16"
    launch: str = "graph"
    engine: str = "vllm"

    def __post_init__(self) -> None:
        for name, option in (("weights", "dtype"), ("experts", "experts_dtype"), ("cache", "cache_dtype")):
            if getattr(self, name) not in WEIGHT_BYTES:
                alone = getattr(self, name).removesuffix("wo")
                raise ArgumentError(
                    f"{option}={getattr(self, name)!r} is not a format",
                    why=f"{alone} is that of weights alone here" if alone == "int4" else None,
                    fix=f"one of: {', '.join(WEIGHT_BYTES)}",
                )
        for name, option in (("replicas", "--attention-dp"), ("expert_ranks", "--ep")):
            if getattr(self, name) < 1 or self.gpus < 1 or self.gpus % getattr(self, name):
                sizes = ", ".join(str(n) for n in range(1, self.gpus + 1) if self.gpus % n == 0)
                raise ArgumentError(
                    f"{option} {getattr(self, name)} does not divide {self.gpus} GPUs",
                    fix=f"one of: {sizes}" if sizes else "at least one GPU",
                )

    @property
    def activations(self) -> str:
        """Return the format of activations: that of the weights, or 16 bits if weights are narrower."""
        return self.weights if self.weights in ("fp32", "bf16", "fp16") else choose_sixteen_bits(self.device)

    def count_nodes(self, ranks: int) -> int:
        """Return the number of nodes over which so many ranks are spread."""
        return -(-ranks // find_node_gpus(self.device))

    @property
    def attention_ranks(self) -> int:
        """Return GPUs that share the heads of one attention."""
        return self.gpus // self.replicas

    @property
    def width_ranks(self) -> int:
        """Return GPUs that share the width of one expert."""
        return self.gpus // self.expert_ranks


def find_node_gpus(device: Device) -> int:
    """Return the most GPUs of such a chip that one node joins by its own links."""
    name = device.id.partition("@")[0]
    sizes: list[int] = [
        round(table["node_gpus"]["value"]) for table in list_clusters().values() if table["chip"] == name
    ]
    return max([_NODE_GPUS, *sizes])


def note_nodes(on: Deployment) -> list[str]:
    """Return a note where a copy does not fit into a node."""
    nodes = on.count_nodes(on.gpus)
    if nodes == 1:
        return []
    gbit = card_bytes_per_s(on.device) * 8e-9
    size = find_node_gpus(on.device)
    return [
        f"{on.gpus} x {on.device.id} are {nodes} nodes of {size}: exchanges cross the network, {gbit:.0f} Gb/s a GPU"
    ]


def choose_sixteen_bits(device: Device) -> str:
    """Return the 16-bit format for which a chip has units: bf16, or fp16 if it has only that (V100, T4, P100)."""
    of = chip(device)
    return "fp16" if of.peak("fp16")[2] and not of.peak("bf16")[2] else "bf16"


def find_computed(on: Deployment, stored: str) -> str:
    """Return the format in which a product is computed: its weights' if the chip has units for it, or 16 bits."""
    if stored in ("fp4", "fp8", "int8"):
        return stored if stored in on.device.matrix else choose_sixteen_bits(on.device)
    return choose_sixteen_bits(on.device) if stored == "int4" else stored


def note_formats(on: Deployment, *stored: str) -> list[str]:
    """Return notes for formats of weights that the chip has no units for."""
    notes = []
    for name in dict.fromkeys(stored):
        computed = find_computed(on, name)
        _, unit, native = chip(on.device).peak(computed)
        if not native:
            kind, _, runs_as = unit.partition(".")
            notes.append(
                f"{on.device.id} has no {computed} units: {computed} products run on its {runs_as} {kind} units"
            )
        elif name not in (computed, "int4"):  # it is well known that int4 is for weights only
            notes.append(f"{name} weights are widened: their products run on {on.device.id}'s {computed} units")
    return notes
