"""Energy in the log of Hugging Face's Trainer.

>>> from transformers import Trainer
>>> from tessera.integrations.huggingface import EnergyCallback
>>> Trainer(model, args, train_dataset=data, callbacks=[EnergyCallback()]).train()

Each log line gains energy_j, power_w, j_per_step and j_per_sample of the interval before it (and j_per_token if the
Trainer counts tokens: `include_num_input_tokens_seen`). `callback.report` is the whole training. The Trainer calls its
own reporters (W&B, TensorBoard) before `callbacks=`; to have the joules in them too, use `callback.attach(trainer)`.
"""

from __future__ import annotations

from typing import Any

from ..errors import MissingExtra
from ..monitor.core import Monitor
from ..schema import EnergyReport
from .training_energy import TrainingEnergy

try:
    from transformers import TrainerCallback
except ImportError as exc:  # pragma: no cover  (the tests have it)
    raise MissingExtra("transformers", "models", "tessera.integrations.huggingface") from exc


class HuggingFaceEnergyCallback(TrainerCallback):  # type: ignore[misc]
    """Adds joules to the Trainer's log; `report` is an EnergyReport after training."""

    def __init__(self, monitor: Monitor | None = None) -> None:
        self._energy = TrainingEnergy("training", monitor)
        self._tokens = 0.0
        self.report: EnergyReport | None = None

    def attach(self, trainer: Any) -> HuggingFaceEnergyCallback:
        """Add it before the callbacks that report to other tools, so that they log the joules too."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start counting."""
        self._tokens = float(getattr(state, "num_input_tokens_seen", 0) or 0)
        self._energy.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One optimizer step, with the samples it accumulated."""
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * max(args.n_gpu, 1)
        seen = float(getattr(state, "num_input_tokens_seen", 0) or 0)
        self._energy.add(step=1, sample=samples, token=seen - self._tokens if seen > self._tokens else None)
        self._tokens = seen

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the joules to a line of the training log (not to lines of evaluation)."""
        if logs is not None and "loss" in logs:
            figures = {k: round(v, 6) for k, v in self._energy.log().items()}
            logs.update(figures)
            if state.log_history:  # the Trainer has already stored a copy of the line
                state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The whole training."""
        self.report = self._energy.end()


EnergyCallback = HuggingFaceEnergyCallback
