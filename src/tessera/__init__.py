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

from typing import TYPE_CHECKING

from .lazy_names import load_lazily

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

__all__ = [  # noqa: PLE0604 - strings, which the linter cannot see
    "__version__",
    *load_lazily(
        __name__,
        {
            "errors": "TesseraError",
            "estimate.predict": "predict",
            "monitor": "EnergyBenchmark",
            "rewrite.optimize": "optimize",
            "runtime.schedule": "schedule",
            "schema": "Energy EnergyReport",
            "trace": "PowerTrace",
        },
        modules="actuators analyze config dist errors estimate event fleet graph hardware memcpy monitor op profile "
        "rewrite schema sensors stream units",
    ),
]
