"""A small GPT trained on four Gloo ranks: compressed gradients against plain ones, by held-out loss and bytes.

The text is the language reference that comes with Python (pydoc_data.topics), by characters; its last tenth is kept
out. All ways have the same seeds and batches; plain training with another seed shows how much chance alone changes.
Rows of embeddings are not sent alone (`sparse`) here: with a hundred characters every row has a gradient in every step.

    python benchmarks/measure/dist_compressed_gpt.py [--steps 400]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]
from gloo_ranks import GlooRanks
from result_file import write_result
from tessera import dist

RESULT = Path(__file__).resolve().parents[1] / "results" / "dist_compressed_gpt.json"
RANKS, CONTEXT, BATCH, WIDTH, LAYERS, HEADS = 4, 64, 8, 96, 3, 4
GOAL_PCT = 1.0
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"compress": "bf16", "feedback": False},
    "fp8 with feedback": {"compress": "fp8"},
    "fp8 without feedback": {"compress": "fp8", "feedback": False},
    "PowerSGD rank 8": {"power_sgd_rank": 8},
    "PowerSGD rank 16": {"power_sgd_rank": 16},
    "plain, another seed": {},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3 * HEADS, -1).transpose(1, 2).chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The loss of each next character."""
        x = self.token(text[:, :-1]) + self.place.weight
        scores = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def read_text() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Training and held-out characters as numbers, and how many there are."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    numbers = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([numbers[c] for c in text])
    edge = len(data) * 9 // 10
    return data[:edge], data[edge:], len(numbers)


def cut(data: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return data[starts[:, None] + torch.arange(CONTEXT + 1)]


def train(rank: int, way: str, steps: int) -> dict[str, Any]:
    seed = 1 if way.endswith("another seed") else 0
    torch.manual_seed(seed)
    train_data, held_out, characters = read_text()
    model = GPT(characters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01)
    )
    options = WAYS[way] | ({"power_sgd_start": max(steps // 10, 2)} if "power_sgd_rank" in WAYS[way] else {})
    chance = torch.Generator().manual_seed(1000 * seed + rank)
    with dist.overlap_gradients(model, bucket_mb=0.5, **options) as sync:
        begun = time.perf_counter()
        for _ in range(steps):
            starts = torch.randint(len(train_data) - CONTEXT - 1, (BATCH,), generator=chance)
            optimizer.zero_grad()
            model(cut(train_data, starts)).backward()
            optimizer.step()
            schedule.step()
        time_s = time.perf_counter() - begun
        report = sync.report()
    starts = torch.arange(0, len(held_out) - CONTEXT - 1, CONTEXT)[rank::RANKS]
    with torch.no_grad():
        losses = torch.stack([model(cut(held_out, part)) for part in starts[: 40 * BATCH].split(BATCH)])
    loss = dist.all_reduce(losses.mean(), "mean").item()
    return {
        "loss": loss,
        "steps_per_s": steps / time_s,
        "parameters": sum(p.numel() for p in model.parameters()),
        "saved_pct": 100 * report.saved_bytes / (report.saved_bytes + report.sent_bytes),
        **report.to_dict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--save", type=Path, default=RESULT)
    given = parser.parse_args()
    found = {}
    for way in given.ways:
        with GlooRanks(RANKS, wait_s=3600.0) as group:
            found[way] = group.run(train, way, given.steps)[0]
    plain = found["plain"]
    print(f"{RANKS} ranks, {plain['parameters']:,} parameters, {given.steps} steps; goal: loss within {GOAL_PCT:g}%")
    print(f"{'way':24} {'held-out loss':>13} {'against plain':>14} {'bytes saved':>12} {'steps/s':>8}")
    for way, row in found.items():
        row["loss_pct"] = 100 * (row["loss"] / plain["loss"] - 1)
        print(
            f"{way:24} {row['loss']:13.4f} {row['loss_pct']:+13.2f}% {row['saved_pct']:11.1f}% {row['steps_per_s']:8.2f}"
        )
    write_result(given.save, {"ranks": RANKS, "steps": given.steps, "goal_pct": GOAL_PCT, "ways": found})


if __name__ == "__main__":
    main()
