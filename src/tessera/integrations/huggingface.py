"""Energy in the log of Hugging Face's Trainer.

>>> from transformers import Trainer
>>> from tessera.integrations.huggingface import EnergyCallback
>>> Trainer(model, args, train_dataset=data, callbacks=[EnergyCallback()]).train()

Each log line gains energy_j, power_w, j_per_step, j_per_sample (and j_per_token where the Trainer counts tokens: the
argument `include_num_input_tokens_seen`), of the stretch before it. `callback.report` is the whole training. Callbacks
that report elsewhere (W&B, TensorBoard) come before yours in the Trainer's list and have passed the line on by then:
`callback.attach(trainer)` instead of `callbacks=` puts ours in front of them.
"""

from __future__ import annotations

from typing import Any

from ..errors import MissingExtra
from ..monitor.core import Monitor
from ..schema import EnergyReport
from .tally import Tally

try:
    from transformers import TrainerCallback
except ImportError as exc:  # pragma: no cover  (the tests have it)
    raise MissingExtra("transformers", "models", "tessera.integrations.huggingface") from exc


class EnergyCallback(TrainerCallback):  # type: ignore[misc]
    """Puts joules into the Trainer's log; `report` is an EnergyReport after training."""

    def __init__(self, monitor: Monitor | None = None) -> None:
        self._tally = Tally("training", monitor)
        self._tokens = 0.0
        self.report: EnergyReport | None = None

    def attach(self, trainer: Any) -> EnergyCallback:
        """Put it before the callbacks that report to other tools, so that they see the joules too."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to count."""
        self._tokens = float(getattr(state, "num_input_tokens_seen", 0) or 0)
        self._tally.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One optimizer step, whatever it accumulated."""
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * max(args.n_gpu, 1)
        seen = float(getattr(state, "num_input_tokens_seen", 0) or 0)
        self._tally.add(step=1, sample=samples, token=seen - self._tokens if seen > self._tokens else None)
        self._tokens = seen

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the joules to a line of the training log (lines of evaluation stay as they are)."""
        if logs is not None and "loss" in logs:
            figures = {k: round(v, 6) for k, v in self._tally.line().items()}
            logs.update(figures)
            if state.log_history:  # the Trainer has put its copy of the line there already
                state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The whole training."""
        self.report = self._tally.end()
