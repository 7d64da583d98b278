"""Callbacks for training frameworks: joules per step, sample and token in the framework's own log.

::

    from tessera.integrations.huggingface import EnergyCallback     # transformers.Trainer(callbacks=[EnergyCallback()])
    from tessera.integrations.lightning import EnergyCallback       # Trainer(callbacks=[EnergyCallback()])
    from tessera.integrations.wandb import log_energy               # joules of a scope or a recording to W&B
    from tessera.integrations.mlflow import log_energy              # the same to MLflow
"""
