"""Energy in the log of Hugging Face's Trainer.

>>> from transformers import Trainer
>>> from tessera.integrations.huggingface import EnergyCallback
>>> Trainer(model, args, train_dataset=data, callbacks=[EnergyCallback()]).train()

A log line gains energy_j, power_w, j_per_step and j_per_sample (and j_per_token if the Trainer counts tokens:
`include_num_input_tokens_seen`). They cover the training steps since the last line that had them, and are there if
those steps took a second or more; the Trainer's last line has the rest. Evaluation and saving do not count as steps:
the next line has them as evaluation_energy_j and saving_energy_j. `callback.report` covers all the steps; evaluation
and saving are its regions. The Trainer calls its own reporters (W&B, TensorBoard) before `callbacks=`. Use
`callback.attach(trainer)` if they should have the joules too.
"""

from __future__ import annotations

from typing import Any

from ..errors import needs_extra
from ..monitor.core import Monitor
from ..schema import EnergyReport
from .training_energy import EVALUATION, LEAST_S, SAVING, STEPS, TrainingEnergy

with needs_extra("transformers", "models", "tessera.integrations.huggingface"):
    from transformers import DefaultFlowCallback, TrainerCallback


class HuggingFaceEnergyCallback(TrainerCallback):  # type: ignore[misc]
    """Adds joules to the Trainer's log; `report` is an EnergyReport after training.

    A log line has joules if its steps took at least `least_s`, because joules must wait for the sensor.
    """

    def __init__(self, monitor: Monitor | None = None, *, least_s: float = LEAST_S) -> None:
        self._energy = TrainingEnergy("training", monitor, least_s=least_s)
        self._tokens = 0.0
        self.report: EnergyReport | None = None

    def attach(self, trainer: Any) -> HuggingFaceEnergyCallback:
        """Add this callback before those that report to other tools, so that they log the joules too."""
        callbacks = trainer.callback_handler.callbacks
        # It must come after the callback that decides whether the Trainer evaluates or saves next.
        callbacks.insert(1 + next((i for i, c in enumerate(callbacks) if isinstance(c, DefaultFlowCallback)), -1), self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start counting."""
        self._tokens = float(getattr(state, "num_input_tokens_seen", 0) or 0)
        self._energy.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._energy.switch(STEPS)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count one optimizer step, with the samples that it accumulated."""
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * max(args.n_gpu, 1)
        seen = float(getattr(state, "num_input_tokens_seen", 0) or 0)
        self._energy.add(step=1, sample=samples, token=seen - self._tokens if seen > self._tokens else None)
        self._tokens = seen
        self._expect(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that evaluation or saving may come next."""
        self._expect(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a batch of an evaluation that another callback asked for."""
        self._energy.switch(EVALUATION)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._energy.switch(SAVING if control.should_save else STEPS)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._energy.switch(STEPS)

    def _expect(self, control: Any) -> None:
        """Switch to what the Trainer does next, as its flow has decided."""
        self._energy.switch(EVALUATION if control.should_evaluate else SAVING if control.should_save else STEPS)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the joules to a line of the training log (not to lines of evaluation)."""
        last = logs is not None and "train_runtime" in logs
        if logs is not None and (last or "loss" in logs):
            figures = {k: round(v, 6) for k, v in self._energy.log(last=last).items()}
            logs.update(figures)
            if state.log_history:  # the Trainer has already stored a copy of the line
                state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report all the steps, and what evaluation and saving took."""
        self.report = self._energy.end()


EnergyCallback = HuggingFaceEnergyCallback
