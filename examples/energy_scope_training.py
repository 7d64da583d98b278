"""Joules in a training loop: one scope per epoch, one per step, and the joules per sample next to the loss.

    python examples/energy_scope_training.py

Leaving a scope waits for nothing. Reading its joules does: the sensor needs a moment to catch up. So a loop reads the
epoch before, or everything at its end.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from tessera import monitor


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, batch: int, device: str) -> float:
    """Run some steps; return the last loss."""
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.rand(batch, 64, device=device)
        with monitor.energy_scope("step"):
            loss = nn.functional.mse_loss(model(x), x.flip(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    done: list[tuple[float, monitor.EnergyScope]] = []
    for number in range(args.epochs):
        with monitor.energy_scope(f"epoch {number}") as scope:
            loss = epoch(model, optimizer, args.steps, args.batch, args.device)
        done.append((loss, scope))

    samples = args.steps * args.batch
    for number, (loss, scope) in enumerate(done):
        energy = scope.energy
        print(
            f"epoch {number}: loss {loss:.4f}, {energy.energy_j:.2f} ± {energy.error_j:.2f} J {energy.basis}, "
            f"{1e3 * energy.energy_j / samples:.3f} ± {1e3 * energy.error_j / samples:.3f} mJ per sample"
        )
    monitor.default().settle_all()  # the last steps wait for the sensor
    for region in monitor.default().regions():  # scopes of the same name are summed
        if region.name == "step":
            each_j = region.energy.energy_j / region.calls
            print(f"step: {region.calls} passes, {each_j:.4f} J each, {region.energy.source}")


if __name__ == "__main__":
    main()
