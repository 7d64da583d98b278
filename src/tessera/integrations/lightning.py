"""Energy in the log of PyTorch Lightning.

>>> from lightning.pytorch import Trainer
>>> from tessera.integrations.lightning import EnergyCallback
>>> Trainer(callbacks=[EnergyCallback()]).fit(model, data)

Logs energy/energy_j, energy/power_w, energy/j_per_step and (if the batch size is known) energy/j_per_sample of the
interval before, every `log_every_n_steps`. `callback.report` is the whole training.
"""

from __future__ import annotations

from typing import Any

from ..errors import MissingExtra
from ..monitor.core import Monitor
from ..schema import EnergyReport
from .training_energy import TrainingEnergy

try:
    from lightning.pytorch import Callback  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as exc:  # pragma: no cover  (the tests have it)
        raise MissingExtra("lightning", "lightning", "tessera.integrations.lightning") from exc


class LightningEnergyCallback(Callback):  # type: ignore[misc]
    """Logs joules through the trainer's own loggers; `report` is an EnergyReport after fitting."""

    def __init__(self, monitor: Monitor | None = None) -> None:
        super().__init__()
        self._energy = TrainingEnergy("training", monitor)
        self.report: EnergyReport | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start counting."""
        self._energy.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """One batch; its first tensor gives the number of samples."""
        self._energy.add(step=1, sample=_count_samples(batch))
        every = max(int(trainer.log_every_n_steps or 0), 1)
        if (batch_idx + 1) % every == 0:
            figures = self._energy.log()
            if figures and trainer.loggers:
                trainer.logger.log_metrics({f"energy/{k}": v for k, v in figures.items()}, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The whole training."""
        self.report = self._energy.end()


def _count_samples(batch: Any) -> float | None:
    if hasattr(batch, "shape"):
        return float(batch.shape[0]) if batch.ndim else None
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((n for value in values if (n := _count_samples(value)) is not None), None)


EnergyCallback = LightningEnergyCallback
