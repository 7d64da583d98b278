"""Predict what activation checkpointing costs and frees: plans for several memory sizes, the rule, larger batches.

python examples/checkpointing.py [CHIP]
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import tessera
from tessera.estimate.power import PowerModel
from tessera.graph.capture import capture
from tessera.hardware import lookup
from tessera.rewrite import checkpoint

GIB = float(1 << 30)


class Block(nn.Module):
    """Norm, attention, norm, perceptron."""

    def __init__(self, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4).unbind()
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, w))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Words in, scores of words out."""

    def __init__(self, layers: int = 12, width: int = 1024, words: int = 32_000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def by_memory(model: nn.Module, ids: torch.Tensor, chip: str) -> None:
    free = checkpoint.plan(model, ids, on=chip, optimizer="adamw")
    print(free)
    low, high = free.settings["all"].peak_bytes, free.settings["none"].peak_bytes
    for share in (0.75, 0.5, 0.25):
        plan = checkpoint.plan(model, ids, on=chip, optimizer="adamw", memory_bytes=low + share * (high - low))
        print(f"\nwithin {(plan.memory_bytes or 0) / GIB:.1f} GiB:\n{plan}")


def the_rule(model: nn.Module, ids: torch.Tensor, chip: str) -> None:
    """Joules to recompute each operator of a block, compared with writing and reading its result once."""
    graph = capture(model, ids, mode="train")
    report = tessera.predict(graph, on=chip, check_memory=False)
    power = PowerModel.from_device(lookup(chip))
    print(f"\n{'operator':34} {'again':>10} {'its bytes':>10}  ratio")
    for op, d in zip(graph.kernels, report.descriptors, strict=True):
        if op.phase != "forward" or not f"{op.scope}.".startswith("layers.1."):
            continue
        again = d.compute_energy_j + d.memory_energy_j + d.static_energy_j
        kept = 2.0 * op.bytes_out * power.hbm_j_per_byte
        print(f"{op.label:34} {1e3 * again:7.2f} mJ {1e3 * kept:7.2f} mJ {again / kept:6.1f}")
        if op.kind == "attention":
            # The scores: the fused kernel recomputes them in its backward pass instead of writing them.
            p = op.params
            scores = p["batch"] * p["heads"] * p["q_len"] * p["kv_len"] * (0.5 if p["causal"] else 1.0)
            again = 2.0 * scores * p["head_dim"] * power.j_per_flop["matrix.bf16"]
            kept = 2.0 * 2.0 * scores * power.hbm_j_per_byte
            print(
                f"{'  its scores, within the kernel':34} {1e3 * again:7.2f} mJ {1e3 * kept:7.2f} mJ {again / kept:6.1f}"
            )


def larger_batches(model: nn.Module, chip: str, memory_bytes: float) -> None:
    """Joules per sample at the largest batch that fits, with and without checkpointing."""
    print(f"\nwithin {memory_bytes / GIB:.0f} GiB of {chip}:")
    for title, ways in (("none", {}), ("all blocks", checkpoint.every(model))):
        best = None
        with checkpoint.apply(model, ways):
            for batch in (1, 2, 4, 8, 16, 32, 64):
                ids = torch.empty(batch, 1024, dtype=torch.int64, device="meta")
                report = tessera.predict(model, ids, on=chip, mode="train", optimizer="adamw", check_memory=False)
                peak = report.prediction.peak_memory_bytes if report.prediction else None
                if peak is None or peak > memory_bytes:
                    break
                best = (batch, report.total_energy_j / batch, peak)
        if best is not None:
            print(f"  {title:10} batch {best[0]:3}: {best[1]:.2f} J/sample, peak {best[2] / GIB:.1f} GiB")


def main() -> None:
    chip = sys.argv[1] if len(sys.argv) > 1 else "h200"
    with torch.device("meta"):
        model = Model().to(torch.bfloat16)
        ids = torch.empty(16, 1024, dtype=torch.int64)
    by_memory(model, ids, chip)
    the_rule(model, ids, chip)
    larger_batches(model, chip, 12 * GIB)


if __name__ == "__main__":
    main()
