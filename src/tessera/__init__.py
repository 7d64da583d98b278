"""Tessera: measure, predict, explain and reduce the energy of PyTorch and GPU programs.

::

    from tessera import monitor, profile, EnergyBenchmark

    with monitor.energy_scope("training_epoch") as energy:
        run_training()
    print(energy.energy_j, "±", energy.error_j, "J at", energy.power_w, "W")

    report = tessera.predict(model, inputs, on="h200")      # before it runs: joules, seconds, bytes

    with profile.session() as sess:                         # while it runs: joules by kernel, operator, region
        step()
    print(sess.energy())

Names are loaded when first used: importing tessera imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import actuators as actuators
    from . import analyze as analyze
    from . import config as config
    from . import dist as dist
    from . import errors as errors
    from . import estimate as estimate
    from . import event as event
    from . import fleet as fleet
    from . import graph as graph
    from . import hardware as hardware
    from . import memcpy as memcpy
    from . import monitor as monitor
    from . import op as op
    from . import profile as profile
    from . import rewrite as rewrite
    from . import schema as schema
    from . import sensors as sensors
    from . import stream as stream
    from . import units as units
    from .errors import TesseraError as TesseraError
    from .estimate.predict import predict as predict
    from .monitor import EnergyBenchmark as EnergyBenchmark
    from .rewrite.optimize import optimize as optimize
    from .runtime.schedule import schedule as schedule
    from .schema import Energy as Energy
    from .schema import EnergyReport as EnergyReport
    from .trace import PowerTrace as PowerTrace

__version__ = "0.1.0.dev0"

_LAZY = {
    "Energy": ".schema",
    "EnergyBenchmark": ".monitor",
    "EnergyReport": ".schema",
    "PowerTrace": ".trace",
    "TesseraError": ".errors",
    "optimize": ".rewrite.optimize",
    "predict": ".estimate.predict",
    "schedule": ".runtime.schedule",
}

__all__ = [
    "Energy",
    "EnergyBenchmark",
    "EnergyReport",
    "PowerTrace",
    "TesseraError",
    "__version__",
    "actuators",
    "analyze",
    "config",
    "dist",
    "errors",
    "estimate",
    "event",
    "fleet",
    "graph",
    "hardware",
    "memcpy",
    "monitor",
    "op",
    "optimize",
    "predict",
    "profile",
    "rewrite",
    "schedule",
    "schema",
    "sensors",
    "stream",
    "units",
]
_MODULES = frozenset(__all__) - frozenset(_LAZY) - {"__version__"}


if not TYPE_CHECKING:  # otherwise a type checker would accept every misspelt name as Any

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name in _LAZY:
            value = getattr(importlib.import_module(_LAZY[name], __name__), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'tessera' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
