"""`Deployment`: the GPUs of one copy of a model, how they share it, and the formats of weights and cache."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Device
from ..errors import ArgumentError

# Bytes of a stored weight with its scales: fp8 has few, nvfp4 one byte for 16 elements, mxfp4 one for 32, int4 two.
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "int4": 0.5625}
LAUNCHES = ("graph", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One copy of a model on `gpus` chips of a node.

    Attention is split over `gpus / replicas` ranks by heads (tensor parallel); `replicas` of it share the sequences
    (data parallel attention). Experts are split over `expert_ranks` by expert, the rest of the ranks by width.
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
        for name in ("weights", "experts", "cache"):
            if getattr(self, name) not in WEIGHT_BYTES:
                raise ArgumentError(
                    f"{name}={getattr(self, name)!r} is not a format", fix=f"one of: {', '.join(WEIGHT_BYTES)}"
                )
        for name in ("replicas", "expert_ranks"):
            if getattr(self, name) < 1 or self.gpus < 1 or self.gpus % getattr(self, name):
                raise ArgumentError(f"{name}={getattr(self, name)} does not divide {self.gpus} GPUs")

    @property
    def attention_ranks(self) -> int:
        """GPUs that share the heads of one attention."""
        return self.gpus // self.replicas

    @property
    def width_ranks(self) -> int:
        """GPUs that share the width of one expert."""
        return self.gpus // self.expert_ranks
