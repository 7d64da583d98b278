"""What can run at the same time in a model: branches, stages, tiles, and the critical path.

python examples/concurrency.py [CHIP]
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from tessera.estimate.concurrency import ConcurrencyAnalyzer
from tessera.graph.partition import GraphPartitioner


class Inception(nn.Module):
    """Four branches of one input side by side, as in GoogLeNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        quarter = channels // 4
        self.one = nn.Conv2d(channels, quarter, 1)
        self.three = nn.Sequential(
            nn.Conv2d(channels, quarter, 1), nn.ReLU(), nn.Conv2d(quarter, quarter, 3, padding=1)
        )
        self.five = nn.Sequential(nn.Conv2d(channels, quarter, 1), nn.ReLU(), nn.Conv2d(quarter, quarter, 5, padding=2))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, quarter, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The branches, concatenated."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1).relu()


def main() -> None:
    chip = sys.argv[1] if len(sys.argv) > 1 else "h200"
    model = nn.Sequential(Inception(64), Inception(64))
    for batch in (1, 64):
        graph = torch.fx.symbolic_trace(model)
        report = GraphPartitioner(fusion=True).partition(graph, inputs=torch.empty(batch, 64, 56, 56, device="meta"))
        found = ConcurrencyAnalyzer(chip).analyze(report)
        print(f"\nbatch {batch} on {chip}: {len(report)} subgraphs in {len(found.stages)} stages")
        print(f"  at most {found.max_width} at once, {found.mean_width:.1f} on average")
        print(f"  one after another {found.total_cost * 1e6:.0f} µs, critical path", end=" ")
        print(f"{found.critical_path_cost * 1e6:.0f} µs: at best {found.speedup_bound:.2f} times as fast")
        for tiles in sorted(found.tiles, key=lambda t: t.occupancy or 0.0)[:4]:
            print(
                f"  {tiles.subgraph_name[-32:]:32} {tiles.tiles:5} tiles on {tiles.units} units:"
                f" {tiles.waves} waves, {tiles.occupancy or 0.0:.0%} of the chip has work"
            )


if __name__ == "__main__":
    main()
