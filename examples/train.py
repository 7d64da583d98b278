"""A small training loop, measured step by step: the job of `make run`.

    tessera run examples/train.py
    tessera predict examples.train:job --mode train --optimizer adamw --on h200

A two-layer transformer learns to copy a sequence. It runs on the GPU where there is one.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

from tessera import monitor


class Copier(nn.Module):
    """Embedding, two transformer layers, a linear head."""

    def __init__(self, vocabulary: int = 256, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        logits: torch.Tensor = self.head(self.layers(self.embed(tokens)))
        return logits


def job() -> tuple[Copier, torch.Tensor]:
    """The model and one batch of tokens, for `tessera predict examples.train:job`."""
    return Copier(), torch.zeros((32, 64), dtype=torch.int64)


def train(steps: int, batch: int, length: int, device: str, fused: bool = False) -> float:
    """Train; return the last loss."""
    torch.manual_seed(0)
    model = Copier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    loss = torch.zeros(())
    for step in range(steps):
        tokens = torch.randint(0, 256, (batch, length), device=device)
        with monitor.energy_scope("step"):
            with monitor.energy_scope("forward"):
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            with monitor.energy_scope("backward"):
                loss.backward()
            with monitor.energy_scope("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        if sys.stderr.isatty():
            print(f"\rstep {step + 1} of {steps}", end="\n" if step + 1 == steps else "", file=sys.stderr)
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fused", action="store_true", help="update all weights in one kernel")
    args = parser.parse_args()
    loss = train(args.steps, args.batch, args.length, args.device, args.fused)
    print(f"{args.steps} steps on {args.device}, loss {loss:.3f}")


if __name__ == "__main__":
    main()
