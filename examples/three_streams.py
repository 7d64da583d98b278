"""A training step on three named streams: copies on "h2d", products and attention on "compute", gradients on "reduce".

    python examples/three_streams.py --folder runs/three_streams
    torchrun --nproc-per-node 2 examples/three_streams.py

The session is exported to Chrome (the streams are its lanes), CSV and TensorBoard. On a CPU the same code runs in
order, and the streams are ranges on the timeline.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tessera import event, memcpy, op, profile, stream

BUFFERS = 2  # one is filled while the other is used


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of an attention layer and its batch."""

    batch: int = 8
    length: int = 256
    heads: int = 8
    head_dim: int = 64

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.heads * self.head_dim


@dataclass(kw_only=True)
class Trainer:
    """One attention layer that learns to reproduce its input, one step at a time."""

    sizes: Sizes
    device: torch.device
    rate: float = 0.5
    h2d: stream.Stream = field(init=False)
    compute: stream.Stream = field(init=False)
    reduce: stream.Stream = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        s, dtype = self.sizes, torch.bfloat16 if self.device.type == "cuda" else torch.float32
        shape = (s.batch * s.length, s.width)
        self.host = [memcpy.empty_pinned(shape, dtype).copy_(torch.randn(shape)) for _ in range(BUFFERS)]
        self.inputs = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(BUFFERS)]
        self.weights = [
            (torch.randn(rows, columns) / rows**0.5).to(self.device, dtype).requires_grad_()
            for rows, columns in ((s.width, 3 * s.width), (s.width, s.width))
        ]
        self.free: list[event.Event | None] = [None] * BUFFERS
        # Last: a new stream waits for all the work above.
        self.h2d, self.compute, self.reduce = (
            stream.create(name=name, device=self.device) for name in ("h2d", "compute", "reduce")
        )

    def step(self, number: int) -> torch.Tensor:
        """Copy, forward, backward, reduce, update; returns the loss without waiting for it."""
        slot = number % BUFFERS
        x, last_read = self.inputs[slot], self.free[slot]
        if last_read is not None:
            self.h2d.wait(last_read)  # the batch before last may still be in use
        memcpy.async_(dst=x, src=self.host[slot], stream=self.h2d).wait(self.compute, x)
        with stream.on(self.compute, x, *self.weights):
            loss = self._loss(x)
            loss.backward()
        self.free[slot] = event.create().record(self.compute)
        self.reduce.wait(self.compute)
        for weight in self.weights:
            assert weight.grad is not None
            op.all_reduce(weight.grad, op="mean", stream=self.reduce)
        self.compute.wait(self.reduce)
        with stream.on(self.compute, *self.weights), torch.no_grad():
            for weight in self.weights:
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=self.rate)
                weight.grad = None
        return loss.detach()

    def _loss(self, x: torch.Tensor) -> torch.Tensor:
        s = self.sizes
        qkv = op.gemm(x, self.weights[0], stream=self.compute)
        q, k, v = qkv.view(s.batch, s.length, 3, s.heads, s.head_dim).permute(2, 0, 3, 1, 4)
        seen = op.flash_attention(q, k, v, causal=True, stream=self.compute)
        out = op.gemm(seen.transpose(1, 2).reshape(-1, s.width), self.weights[1], stream=self.compute)
        return torch.nn.functional.mse_loss(out.float(), x.float())


def train(sizes: Sizes, device: str, steps: int, folder: Path) -> tuple[list[float], profile.Session]:
    """The losses of the steps, and the session that recorded them; its exports are in the folder."""
    trainer = Trainer(sizes=sizes, device=torch.device(device))
    trainer.step(0)  # allocation and compilation belong to no step
    losses: list[torch.Tensor] = []
    with profile.session(
        path=folder / "run.tessera",
        exporters=[
            profile.chrome(folder / "trace.json"),
            profile.summary(folder / "summary.csv"),
            profile.tensorboard(folder / "tensorboard"),
        ],
    ) as session:
        for number in range(1, steps + 1):
            losses.append(trainer.step(number))
            session.step()
    trainer.compute.synchronize()
    return [float(loss) for loss in losses], session


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path("runs/three_streams"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    folder = args.folder / f"rank{os.environ['RANK']}" if several else args.folder
    folder.mkdir(parents=True, exist_ok=True)
    losses, session = train(Sizes(batch=args.batch, length=args.length), args.device, args.steps, folder)
    print(f"{args.steps} steps on {args.device}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    print(f"{session.path}; tessera report {session.path}")
    print(f"{folder / 'trace.json'} for ui.perfetto.dev, {folder / 'summary.csv'}, tensorboard --logdir {folder}")
    if several:
        torch.distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
