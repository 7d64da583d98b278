"""Host time of an eager program: per dispatched operator, view, module call and torch function.

An eager program is as slow as the slower of two clocks: the device's, and the host's, which runs ahead as far as it
can. Constants are those of hosts beside an H200 (Intel Xeons, 16 vCPU, torch 2.11), fitted on whole models
(`benchmarks/fit/fit_ops.py`). Hosts of the same kind differ from one session to the next: four recordings found them at
0.84 to 1.34 times the shipped constants, which are their geometric mean. So host-bound programs have a wide interval,
which holds 90% of the rows of a recording left out of that mean; `tessera calibrate` measures the host at hand.

A CPU runs its operators itself: it does not run ahead, and each operator waits for its dispatch. The kernel models were
fitted on a GPU and never compared with a CPU, so its times carry one wide error that all kernels share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..device import Device
from ..graph.ir import Op
from .kernel_time import KernelTime, load_fit

CPU_LATENCY_FROM = "roofline of the datasheet, at efficiencies fitted on a GPU (H200); not validated on CPUs"
CPU_NOTE = "not validated on CPUs: never compared with a measurement; take it as an order of magnitude"
NO_GRAPHS_NOTE = "has no CUDA graphs: its operators are launched one by one, as with --launch eager"

# No measurement supports a CPU's times. Nearly all of the figure, so that only zero is excluded below, and twice the
# figure is included above.
_CPU_ERROR = 0.95

# The time a CPU takes to dispatch an operator to itself, over the time a Xeon takes to launch one on a GPU
# (`host.json`): the geometric mean of six small layers on one thread of an AMD EPYC, torch 2.13, by
# benchmarks/predict/cpu_dispatch.py (results/cpu_dispatch.json, the middle one of seven runs, 0.160 to 0.174;
# nn.ReLU 0.09 to nn.Conv2d 0.24). Other processors differ, hence the wide interval.
_DISPATCH = 0.16
_DISPATCH_ERROR = 0.8

# The processor inside a system-on-chip launches more slowly than a server's: assumed, not measured.
_SOC_HOST = 2.5

# cuDNN launches about two kernels for every step of every layer and direction (535 for 2 layers of 128 steps, seen in a
# trace on the H200's host, which took 7 us for each of the 1,438 of a training step).
LAUNCH_S = 7.0e-6

# Python run by hooks on saved tensors for an operator (a checkpoint, in forward and again in backward): 8 us for one
# that saves two tensors, by benchmarks/device/checkpointing.py --host-cost (torch 2.13 on a CPU). With it the host of
# the one checkpointed step that was recorded is predicted at 46 ms instead of 42; it took 64 (h200_heldout2_models).
HOOKED_S = 8.0e-6


def rnn_launches(op: Op) -> float:
    """Kernels of a recurrent layer."""
    p = op.params
    return 2.0 * float(p["steps"] * p["layers"] * p["directions"])


def extras_of(op: Op) -> tuple[str, ...]:
    """Names in `HostModel.extra_s` that an operator may have: its kind, a bias that cuDNN leaves to another kernel."""
    if op.phase == "backward" and not op.hooked:
        return (f"{op.kind}_backward",)
    return (op.kind, "conv_bias") if op.kind == "conv" and op.params.get("bias") else (op.kind,)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostModel:
    """Host seconds by what is dispatched; `extra_s` is what operators of a kind cost above others (`extras_of`)."""

    kernel_s: float
    extra_s: Mapping[str, float]
    view_s: float
    module_s: float
    function_s: float
    recording_s: float
    backward_s: float
    backward_view_s: float
    foreach_s: float
    foreach_tensor_s: float
    iteration_s: float
    relative_error: float
    provenance: str

    @classmethod
    def default(cls) -> HostModel:
        """The constants measured beside the H200."""
        return cls.of(load_fit("host.json"))

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> HostModel:
        """From plain data."""
        return cls(**{name: data[name] for name in cls.__slots__})

    @classmethod
    def of_device(cls, device: Device) -> HostModel:
        """The assumed host of a device: a server's, a system-on-chip's own slower cores, or the CPU itself."""
        default = cls.default()
        if is_cpu(device):
            what = f"{_DISPATCH} times what a Xeon takes to launch on a GPU, measured for six small layers on one EPYC"
            return default.scale(_DISPATCH, f"assumed: {what}", _DISPATCH_ERROR)
        if device.kind == "soc":
            return default.scale(_SOC_HOST, f"assumed: {_SOC_HOST} times the Xeon's", 0.7)
        return default

    def scale(self, factor: float, provenance: str, relative_error: float) -> HostModel:
        """The same program on a host that takes `factor` times as long."""
        times = {
            name: getattr(self, name) * factor for name in self.__slots__ if name.endswith("_s") and name != "extra_s"
        }
        extra = {kind: seconds * factor for kind, seconds in self.extra_s.items()}
        return replace(self, **times, extra_s=extra, provenance=provenance, relative_error=relative_error)

    def seconds(self, op: Op, training: bool) -> float:
        """Host seconds from the operator before to this one's launch."""
        own = self.module_s * op.host_modules + self.function_s * op.host_functions
        own += sum(self.extra_s.get(name, 0.0) for name in extras_of(op))
        if op.kind == "foreach":
            return own + self.foreach_s + self.foreach_tensor_s * len(op.outputs)
        if op.kind == "rnn":
            own += LAUNCH_S * rnn_launches(op) * (2.0 if op.phase == "backward" else 1.0)
        if op.phase == "backward" and not op.hooked:  # recomputed operators are called from Python, as in forward
            return own + (self.backward_view_s if op.kind == "view" else self.backward_s)
        own += self.view_s if op.kind == "view" else self.kernel_s
        own += HOOKED_S if op.hooked and op.kernels else 0.0
        return own + (self.recording_s if training else 0.0)


def host_times(model: HostModel, ops: Sequence[Op], training: bool) -> list[float]:
    """Host seconds of every operator, views included."""
    times = [model.seconds(op, training) for op in ops]
    if times:
        times[0] += model.iteration_s
    return times


def is_cpu(device: Device) -> bool:
    """Whether the device dispatches its operators itself, with no host beside it."""
    return device.kind == "cpu"


def has_graphs(device: Device) -> bool:
    """Whether the device can replay a captured iteration: a CPU cannot, nor can Apple's GPUs (torch's mps)."""
    return not is_cpu(device) and device.vendor != "Apple"


def widen_for_cpu(kernels: Sequence[KernelTime]) -> tuple[KernelTime, ...]:
    """The kernels with the error and the provenance that they have on a CPU."""
    return tuple(
        replace(k, relative_error=max(k.relative_error, _CPU_ERROR), provenance=CPU_LATENCY_FROM) for k in kernels
    )
