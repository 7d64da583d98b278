"""What the host pays to launch a program eagerly: per dispatched operator, view, module call and torch function.

An eager program is as slow as the slower of two clocks: the device's, and the host's, which runs ahead as far as it
can. Constants are those of hosts beside an H200 (Intel Xeons, 16 vCPU, torch 2.11), fitted on whole models
(`benchmarks/fit/fit_ops.py`). Hosts of the same kind differ from one session to the next: four recordings found them at
0.83 to 1.5 times what is shipped here, which is their geometric mean, each recording one draw. So what is bound by the
host is predicted with a wide interval, which holds 90% of the rows of those recordings; `tessera calibrate` measures
the host at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..graph.ir import Op
from .residual import fitted

# cuDNN launches about two kernels for every step of every layer and direction (535 for 2 layers of 128 steps, seen in a
# trace on the H200's host, which took 7 us for each of the 1,438 of a training step).
LAUNCH_S = 7.0e-6

# Python that hooks on saved tensors run for an operator (a checkpoint, in forward and again in backward): 8 us for one
# that saves two tensors, by benchmarks/device/checkpointing.py --host-cost (torch 2.13 on a CPU). With it the host of
# the one checkpointed step that was recorded is predicted at 47 ms instead of 37; it took 64 (h200_heldout2_models).
HOOKED_S = 8.0e-6


def rnn_launches(op: Op) -> float:
    """Kernels of a recurrent layer."""
    p = op.params
    return 2.0 * float(p["steps"] * p["layers"] * p["directions"])


@dataclass(frozen=True, slots=True, kw_only=True)
class HostModel:
    """Host seconds by what is dispatched; `extra_s` is what an operator of a kind costs above any other."""

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
        return cls.of(fitted("host.json"))

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> HostModel:
        """From plain data."""
        return cls(**{name: data[name] for name in cls.__slots__})

    def scaled(self, factor: float, provenance: str, relative_error: float) -> HostModel:
        """The same program on a host that takes `factor` times as long."""
        times = {
            name: getattr(self, name) * factor for name in self.__slots__ if name.endswith("_s") and name != "extra_s"
        }
        extra = {kind: seconds * factor for kind, seconds in self.extra_s.items()}
        return replace(self, **times, extra_s=extra, provenance=provenance, relative_error=relative_error)

    def seconds(self, op: Op, training: bool) -> float:
        """Host seconds from the operator before to this one's launch."""
        python = self.module_s * op.host_modules + self.function_s * op.host_functions
        if op.kind == "foreach":
            return python + self.foreach_s + self.foreach_tensor_s * len(op.outputs)
        if op.phase == "backward" and op.kind == "rnn":
            return python + self.backward_s + 2.0 * LAUNCH_S * rnn_launches(op)
        if op.phase == "backward" and not op.hooked:  # what is recomputed is called from Python, as forward is
            return python + (self.backward_view_s if op.kind == "view" else self.backward_s)
        own = self.view_s if op.kind == "view" else self.kernel_s + self.extra_s.get(op.kind, 0.0)
        if op.kind == "rnn":
            own += LAUNCH_S * rnn_launches(op)
        own += HOOKED_S if op.hooked and op.kernels else 0.0
        return python + own + (self.recording_s if training else 0.0)


def host_times(model: HostModel, ops: Sequence[Op], training: bool) -> list[float]:
    """Host seconds of every operator, views included."""
    times = [model.seconds(op, training) for op in ops]
    if times:
        times[0] += model.iteration_s
    return times
