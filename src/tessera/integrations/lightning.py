"""Energy in the log of PyTorch Lightning.

>>> from lightning.pytorch import Trainer
>>> from tessera.integrations.lightning import EnergyCallback
>>> Trainer(callbacks=[EnergyCallback()]).fit(model, data)

Every `log_every_n_steps` it logs energy/energy_j, energy/power_w, energy/j_per_step and (if the batch size is known)
energy/j_per_sample of the training steps since it last did, if those took a second or more; at the end, of the rest.
A step is one of the optimizer, as `trainer.global_step` counts them, with all batches that it accumulates.
Evaluation and saving are not the steps': energy/evaluation_energy_j and energy/saving_energy_j. `callback.report` is
all the steps; evaluation and saving are its regions.
"""

from __future__ import annotations

import functools
from typing import Any

from ..errors import needs_extra
from ..monitor.core import Monitor
from ..schema import EnergyReport
from .training_energy import EVALUATION, LEAST_S, SAVING, STEPS, TrainingEnergy

try:
    from lightning.pytorch import Callback  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    with needs_extra("lightning", "lightning", "tessera.integrations.lightning"):
        from pytorch_lightning import Callback


class LightningEnergyCallback(Callback):  # type: ignore[misc]
    """Logs joules through the trainer's own loggers; `report` is an EnergyReport after fitting.

    Joules are logged if the steps took at least `least_s`, because joules must wait for the sensor.
    """

    def __init__(self, monitor: Monitor | None = None, *, least_s: float = LEAST_S) -> None:
        super().__init__()
        self._energy = TrainingEnergy("training", monitor, least_s=least_s)
        self._global_step = 0
        self.report: EnergyReport | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start counting; what writes a checkpoint is timed."""
        self._global_step = trainer.global_step
        self._energy.begin()
        save = trainer.save_checkpoint

        @functools.wraps(save)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            with self._energy.phase(SAVING):
                return save(*args, **kwargs)

        trainer.save_checkpoint = save_checkpoint

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """One batch; its first tensor gives the number of samples. Only the last one of those accumulated is a step."""
        is_step = trainer.global_step > self._global_step
        self._global_step = trainer.global_step
        self._energy.add(step=float(is_step), sample=_count_samples(batch))
        every = max(int(trainer.log_every_n_steps or 0), 1)
        if (batch_idx + 1) % every == 0:
            self._log(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Note that validation begins, which does not count as steps."""
        self._energy.switch(EVALUATION)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._energy.switch(STEPS)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report all the steps, and what evaluation and saving took."""
        vars(trainer).pop("save_checkpoint", None)
        self._log(trainer, last=True)
        self.report = self._energy.end()

    def _log(self, trainer: Any, *, last: bool = False) -> None:
        figures = self._energy.log(last=last)
        if figures and trainer.loggers:
            trainer.logger.log_metrics({f"energy/{k}": v for k, v in figures.items()}, step=trainer.global_step)


def _count_samples(batch: Any) -> float | None:
    if hasattr(batch, "shape"):
        return float(batch.shape[0]) if batch.ndim else None
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((n for value in values if (n := _count_samples(value)) is not None), None)


EnergyCallback = LightningEnergyCallback
