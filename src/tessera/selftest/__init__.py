"""Is Tessera true on this machine? Each check says how far off it is from a truth it can know here.

::

    integral      samples against the energy counter          where a sensor has a counter
    scope, sampler   what measuring costs                      everywhere
    simulated     joules to kernels on a board made up here    everywhere: the arithmetic
    mixture       joules to kernels against each kernel alone  on a CUDA device with a sensor: the physics
    prediction    predicted against measured kernels           on a CUDA device the catalogue knows
"""

from __future__ import annotations

from .checks import Check as Check
from .checks import run as run

__all__ = ["Check", "run"]
