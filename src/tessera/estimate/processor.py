"""What a prediction for a CPU rests on: its datasheet, efficiencies of a GPU, and what PyTorch's dispatch costs.

The kernel models were fitted on a GPU and never compared with a CPU. So its times carry one wide error that all kernels
share, and say so. A CPU runs its operators itself: it does not run ahead, and each waits for what is dispatched before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..device import Device
from .host import HostModel
from .kernel_time import KernelTime

LATENCY_FROM = "roofline of the datasheet, at efficiencies fitted on a GPU (H200); not validated on CPUs"
NOTE = "not validated on CPUs: no prediction for one was compared with a measurement; take it as an order of magnitude"
NO_GRAPHS = "a CPU has no CUDA graphs: its operators are dispatched one by one, as with --launch eager"

# No measurement stands behind it. Nearly all of the figure, so that zero is all that is ruled out below, and twice it
# is within above.
RELATIVE_ERROR = 0.95

# What a CPU takes to dispatch an operator to itself, over what a Xeon takes to launch one on a GPU (`host.json`): the
# geometric mean of six small layers on one thread of an AMD EPYC, torch 2.13, by benchmarks/predict/cpu_dispatch.py
# (results/cpu_dispatch.json, the middle one of seven runs, which gave 0.160 to 0.174; nn.ReLU 0.09 to nn.Conv2d 0.24).
# Other processors differ, hence the wide interval.
_DISPATCH = 0.16
_DISPATCH_ERROR = 0.8


def runs_itself(device: Device) -> bool:
    """Whether the device dispatches its operators itself, with no host beside it."""
    return device.kind == "cpu"


def dispatch() -> HostModel:
    """What a CPU pays before each operator."""
    said = f"assumed: {_DISPATCH} times what a Xeon takes to launch on a GPU, seen for six small layers on one EPYC"
    return HostModel.default().scaled(_DISPATCH, said, _DISPATCH_ERROR)


def unvalidated(kernels: Sequence[KernelTime]) -> tuple[KernelTime, ...]:
    """The kernels with the error and the source that they have on a CPU."""
    return tuple(
        replace(k, relative_error=max(k.relative_error, RELATIVE_ERROR), provenance=LATENCY_FROM) for k in kernels
    )
