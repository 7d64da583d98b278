"""Where the energy of an image goes: two common networks on a data-centre GPU and an edge module, in FP32 and FP16.

python examples/energy_estimator.py [CHIP] [OTHER CHIP]

Nothing runs on either chip: everything is predicted, on this machine's CPU, in seconds.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from rich.console import Console
from torch import nn

from tessera.cli.model_loader import InputShape, load_model
from tessera.errors import MissingExtra
from tessera.estimate.predict import predict
from tessera.estimate.search import Sweep, SweepRow, sweep
from tessera.hardware import lookup
from tessera.report.predict import prediction
from tessera.report.sweep import comparison
from tessera.schema import EnergyReport

BATCHES = (1, 64)


class Residual(nn.Module):
    """A stand-in for ResNet-18: the same kind of work, in fewer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, stride=4, padding=3)
        self.blocks = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(8))
        self.head = nn.Linear(64, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Separable(nn.Module):
    """A stand-in for MobileNet-V2: depthwise and pointwise convolutions, little arithmetic for many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, stride=4, padding=1)
        self.depthwise = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1, groups=64) for _ in range(8))
        self.pointwise = nn.ModuleList(nn.Conv2d(64, 64, 1) for _ in range(8))
        self.head = nn.Linear(64, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for deep, wide in zip(self.depthwise, self.pointwise, strict=True):
            x = x + wide(nn.functional.relu6(deep(x)))
        return self.head(x.mean((2, 3)))


def networks() -> dict[str, tuple[Any, Any]]:
    """ResNet-18 and MobileNet-V2 with one image each, or stand-ins for them."""
    try:
        found = {name: load_model(name, InputShape()) for name in ("resnet18", "mobilenet_v2")}
    except MissingExtra:
        print("torchvision is not installed: two small stand-ins of the same kind are used instead\n")
        image = torch.empty(1, 3, 224, 224, device="meta")
        return {"residual (for ResNet-18)": (Residual(), image), "separable (for MobileNet-V2)": (Separable(), image)}
    return {loaded.name: (loaded.model, loaded.inputs) for loaded in found.values()}


def pick(found: Sweep, device: str, precision: str, batch: int) -> SweepRow:
    wanted = (lookup(device).id, precision, batch)
    return next(row for row in found.rows if (row.on, row.precision, row.batch) == wanted)


def insights(name: str, found: Sweep, chips: tuple[str, str]) -> list[str]:
    """Conclusions, computed from the numbers."""
    lines = []
    for batch in BATCHES:
        rows = sorted((pick(found, chip, "fp32", batch) for chip in chips), key=lambda r: r.energy_per_sample_j or 0)
        low, high = (row.energy_per_sample_j or 0.0 for row in rows)
        lines.append(
            f"{name}, batch {batch}: {rows[0].on} spends {low * 1e3:.0f} mJ per image, "
            f"{rows[1].on} {high * 1e3:.0f} mJ ({high / low:.1f} times as much)"
        )
    one, many = (pick(found, chips[0], "fp32", batch) for batch in BATCHES)
    lines.append(
        f"{name} on {one.on}: {share(one):.0%} of the energy is static at batch 1, "
        f"{share(many):.0%} at batch {BATCHES[-1]}: a chip that waits still draws power"
    )
    lines.append(precision_insight(name, found, chips[0]))
    return lines


def share(row: SweepRow) -> float:
    return (row.static_energy_j or 0.0) / (row.energy_j or 1.0)


def precision_insight(name: str, found: Sweep, chip: str) -> str:
    wide, narrow = (pick(found, chip, precision, BATCHES[-1]) for precision in ("fp32", "fp16"))
    time = (narrow.time_s or 0.0) / (wide.time_s or 1.0) - 1
    energy = (narrow.energy_j or 0.0) / (wide.energy_j or 1.0) - 1
    before, after = wide.average_power_w or 0.0, narrow.average_power_w or 0.0
    tdp = lookup(chip).tdp_w
    limit = ""
    if tdp:
        where = "under" if max(before, after) <= tdp.value else "NOT under"
        limit = f", {where} its {tdp.value:.0f} W: the format changes the work, not the board"
    return (
        f"{name} on {wide.on}, batch {BATCHES[-1]}, FP16 for FP32: time {time:+.0%}, energy {energy:+.0%}, "
        f"power {before:.0f} W -> {after:.0f} W{limit}"
    )


def show(report: EnergyReport, console: Console) -> None:
    console.print(prediction(report, top=5, opportunities=report.opportunities()))
    console.print()


def main() -> None:
    given = [*sys.argv[1:3], *("a100", "jetson-orin")[len(sys.argv) - 1 :]]
    chips = (given[0], given[1])
    console = Console(highlight=False)
    found: list[str] = []
    for name, (model, image) in networks().items():
        show(predict(model, image, on=chips[0], precision="fp32", name=name), console)
        swept = sweep(model, image, on=chips, precisions=("fp32", "fp16"), batches=BATCHES, name=name)
        console.print(comparison(swept))
        console.print()
        found += insights(name, swept, chips)
    console.print("Insights", style="bold")
    for line in found:
        console.print(f"  - {line}")


if __name__ == "__main__":
    main()
