"""Logs joules to MLflow, beside the losses.

>>> from tessera.integrations.mlflow import log_energy
>>> with mlflow.start_run(), monitor.energy_scope("epoch") as energy:
...     train_epoch()
>>> log_energy(energy, step=epoch)           # the metrics energy/energy_j, energy/power_w ...
>>> log_energy("runs/train.tessera")         # a recording: its totals, and every step
"""

from __future__ import annotations

from ..errors import needs_extra
from .log_figures import Source, list_figures, list_steps

with needs_extra("mlflow", "mlflow", "tessera.integrations.mlflow"):
    import mlflow


def log_energy(
    source: Source, *, step: int | None = None, prefix: str = "energy/", run_id: str | None = None
) -> dict[str, float]:
    """Log the joules of a scope, a report or a recording as metrics (of the active run). Return what was logged.

    A scope or a report is one point, at `step`. A recording gives its totals, and a point for each of its steps.
    """
    figures = list_figures(source, prefix)
    mlflow.log_metrics(figures, step=step, run_id=run_id)
    for number, values in list_steps(source, prefix):
        mlflow.log_metrics(values, step=number, run_id=run_id)
    return figures
