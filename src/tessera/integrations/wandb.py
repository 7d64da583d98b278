"""Logs joules to Weights & Biases, beside the losses.

>>> from tessera.integrations.wandb import log_energy
>>> with monitor.energy_scope("epoch") as energy:
...     train_epoch()
>>> log_energy(energy, step=epoch)           # energy/energy_j, energy/power_w ... of the active run
>>> log_energy("runs/train.tessera")         # a recording: its totals in the summary, and every step

Hugging Face's and Lightning's own W&B loggers get joules from `EnergyCallback`.
"""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentError, needs_extra
from .log_figures import Source, list_figures, list_steps

with needs_extra("wandb", "wandb", "tessera.integrations.wandb"):
    import wandb


def log_energy(
    source: Source, *, step: int | None = None, prefix: str = "energy/", run: Any = None
) -> dict[str, float]:
    """Log the joules of a scope, a report or a recording to a run (the active one). Return what was logged.

    A scope or a report is one point, at `step`. A recording's totals go to the run's summary, and each of its steps is
    a point over the axis PREFIX + "step".
    """
    target = run or wandb.run
    if target is None:
        raise ArgumentError("no W&B run is active", fix="call wandb.init(...) first, or give run=")
    figures, steps = list_figures(source, prefix), list(list_steps(source, prefix))
    if not steps:
        target.log(figures, **({} if step is None else {"step": step}))
        return figures
    target.define_metric(f"{prefix}step_*", step_metric=f"{prefix}step")
    for number, values in steps:
        target.log({f"{prefix}step": number, **values})
    target.summary.update(figures)
    return figures
