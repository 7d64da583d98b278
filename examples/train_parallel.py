"""Plan how to divide a small GPT over some ranks, divide it, and train it; the loop knows nothing of the layout.

    torchrun --nproc-per-node 4 examples/train_parallel.py
    torchrun --nproc-per-node 4 examples/train_parallel.py --layout tp=2,pp=2,microbatches=4
    tessera run --nproc 4 examples/train_parallel.py

The plan is made for GPUs of one DGX H200 (`--cluster`), and carried out on the ranks that torchrun started: on GPUs
with NCCL, else on the CPU with Gloo.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as c10d
from torch import nn

from tessera import dist

WORDS, SEQ = 256, 32


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next hidden state."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """Words and places, blocks, a head."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(SEQ, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits for every place."""
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_fn(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """How badly each next word is foretold."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def choose_layout(text: str, model: nn.Module, batch: int, cluster: str) -> dist.Layout:
    """The layout that the user typed, or the planner's."""
    if text:
        settings = dict(part.split("=") for part in text.split(","))
        return dist.Layout.from_dict({k: int(v) if v.isdigit() else v for k, v in settings.items()})
    ranks = c10d.get_world_size()
    return dist.plan(model, cluster=cluster, gpus=ranks, seq=SEQ, global_batch=batch).best.layout


def main() -> None:
    """Train for some steps; rank 0 prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step, of all ranks together")
    parser.add_argument("--layout", default="", help="tp=2,pp=2,microbatches=4 instead of a plan")
    parser.add_argument("--cluster", default="dgx-h200")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start me with torchrun --nproc-per-node 4 examples/train_parallel.py")
    c10d.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = GPT()
    layout = choose_layout(args.layout, model, args.batch, args.cluster)
    parallel = dist.apply_layout(model, layout)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=3e-3)
    is_first = c10d.get_rank() == 0
    if is_first:
        print(parallel, flush=True)
    for step in range(args.steps):
        # Sequences that count upwards from a random word: every rank makes all, and takes those of its replica.
        starts = torch.randint(0, WORDS, (args.batch, 1), generator=torch.Generator().manual_seed(step))
        words = parallel.local_batch((starts + torch.arange(SEQ)) % WORDS).to(parallel.device)
        optimizer.zero_grad()
        loss = parallel.step(words, words, loss_fn)
        optimizer.step()
        if is_first and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)
    c10d.destroy_process_group()


if __name__ == "__main__":
    main()
