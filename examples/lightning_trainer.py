"""Joules in the log of PyTorch Lightning: energy/j_per_step and energy/j_per_sample next to the loss.

pip install '.[lightning]'  # in the clone
python examples/lightning_trainer.py
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path
from typing import Any

import torch

try:
    import lightning.pytorch as pl  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    import pytorch_lightning as pl
from torch import nn

from tessera.integrations.lightning import EnergyCallback


class Reverser(pl.LightningModule):  # type: ignore[misc]
    """Learns to reverse a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The loss of a batch."""
        (x,) = batch
        loss = nn.functional.mse_loss(self.layers(x), x.flip(-1))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(samples: int, folder: str) -> tuple[EnergyCallback, list[dict[str, str]]]:
    """Train one epoch; return the callback, and the lines of the log that have joules."""
    data = torch.utils.data.TensorDataset(torch.rand(samples, 64))
    callback, logger = EnergyCallback(), pl.loggers.CSVLogger(folder)
    trainer = pl.Trainer(
        max_epochs=1, log_every_n_steps=10, callbacks=[callback], logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Reverser(), torch.utils.data.DataLoader(data, batch_size=32))
    logger.save()
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        return callback, [row for row in csv.DictReader(file) if row.get("energy/j_per_sample")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=1600)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        callback, lines = train(args.samples, folder)
    for line in lines:
        print(f"step {line['step']}: {1e3 * float(line['energy/j_per_sample']):.3f} mJ per sample")
    report = callback.report
    assert report is not None
    print(f"in total {report.total.energy_j:.2f} ± {report.total.error_j:.2f} J, {report.basis}")


if __name__ == "__main__":
    main()
