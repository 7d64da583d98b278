"""Predict the peak memory of a training step: by category, over time, and whether it fits.

python examples/memory.py [CHIP ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from tessera.estimate.memory import MemoryEstimator
from tessera.graph.capture import capture

GIB = float(1 << 30)


def transformer() -> nn.Module:
    """Twelve layers of width 1024, on the meta device: nothing is allocated."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(1024, nhead=16, dim_feedforward=4096, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, num_layers=12), nn.Linear(1024, 32_000))


def sparkline(values: Sequence[int], width: int = 64) -> str:
    """The timeline as a line of blocks."""
    step = max(1, len(values) // width)
    tops = [max(values[i : i + step]) for i in range(0, len(values), step)]
    return "".join("▁▂▃▄▅▆▇█"[round(7 * top / max(tops))] for top in tops)


def main() -> None:
    chips = sys.argv[1:] or ["l4", "a100", "h200"]
    model, x = transformer(), torch.empty(8, 512, 1024, device="meta")
    for mode, optimizer in (("infer", "sgd"), ("train", "sgd"), ("train", "adamw")):
        graph = capture(model, x, mode=mode, optimizer=optimizer, precision="bf16")  # type: ignore[arg-type]
        reports = [MemoryEstimator(chip).estimate(graph) for chip in chips]
        report = reports[-1]
        print(f"\n{mode}{f' with {optimizer}' if mode == 'train' else ''}: {report.peak_bytes / GIB:.2f} GiB", end="")
        print(f" at {report.peak_op}")
        print(f"  {sparkline(report.timeline)}")
        for name, nbytes in sorted(report.by_category.items(), key=lambda item: -item[1]):
            print(f"  {name:12} {nbytes / GIB:6.2f} GiB {nbytes / report.peak_bytes:5.0%}")
        for found in reports:
            room = (found.headroom_bytes or 0) / GIB
            print(f"  {found.on:12} {'fits, ' if found.fits else 'does not fit, '}{room:+.1f} GiB left")


if __name__ == "__main__":
    main()
