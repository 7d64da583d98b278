"""Which knobs a function has: only those that can matter for it, with the reason and the gain to expect.

Gains order the search, they decide nothing: what stays is what measures better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ArgumentError
from .changes import BF16, CHANNELS_LAST, COMPILE_MODES, FUSED, TF32, unaligned
from .found import Reach
from .plan import Value
from .search import Knob

# Expected shares of the joules, to begin with the largest: shared/h200 (GPT-2 training: compile 34%, its unaligned
# vocabulary a sixth), channels_last and cuDNN's search from convolutions recorded for `predict`.
_COMPILE, _LAYOUT, _PADDING, _GRAPH, _OPTIMIZER, _CUDNN, _PRECISION = 0.3, 0.3, 0.15, 0.1, 0.05, 0.05, 0.4
# Measured on an H200 for GPT-2's training: 333 s to compile, and no better than the modes before it.
SLOW_COMPILE = "max-autotune-no-cudagraphs"


def knobs(
    reach: Reach, *, tolerance: float | None = None, own: Mapping[str, Sequence[Value]] | None = None,
    slow_compile: bool = False, compile_modes: bool = True,
) -> list[Knob]:  # fmt: skip
    """The knobs of a function; `own` are arguments of its own that may be varied, by name."""
    import torch

    cuda = reach.device is not None and reach.device.type == "cuda"
    found = [_own(name, values) for name, values in (own or {}).items()]
    if compile_modes:
        modes = [m for m in COMPILE_MODES if (cuda or m == "default") and (slow_compile or m != SLOW_COMPILE)]
        found.append(Knob(name="compile", values=(None, *modes), gain=_COMPILE, why="fuses, and launches less"))
    convolves = any(isinstance(m, torch.nn.Conv2d) for m in reach.submodules())
    if convolves:
        found.append(Knob(name="layout", values=(None, CHANNELS_LAST), gain=_LAYOUT,
                          why="convolutions need no change of layout around them"))  # fmt: skip
    if cuda:
        found += _on_cuda(reach, convolves)
    if tolerance is not None:
        found += _precisions(reach, torch)
    return found


def _on_cuda(reach: Reach, convolves: bool) -> list[Knob]:
    found = [Knob(name="graph", values=(None, True), gain=_GRAPH, why="one launch for the whole function")]
    if unaligned(reach):
        found.append(Knob(name="padding", values=(None, True), gain=_PADDING,
                          why="products whose rows are no multiple of 16 bytes run on slow kernels"))  # fmt: skip
    if reach.optimizers and all("fused" in g and not g["fused"] for o in reach.optimizers for g in o.param_groups):
        found.append(Knob(name="optimizer", values=(None, FUSED), gain=_OPTIMIZER, why="weights are read once a step"))
    if convolves:
        found.append(Knob(name="cudnn_benchmark", values=(None, True), gain=_CUDNN,
                          why="cuDNN's guess of an algorithm is not always its best"))  # fmt: skip
    return found


def _precisions(reach: Reach, torch: Any) -> list[Knob]:
    """Lower precision, where the caller said how much the result may differ, and something is in fp32."""
    whole = [p for m in reach.modules for p in m.parameters()] or list(reach.tensors)
    if not any(p.dtype == torch.float32 for p in whole):
        return []
    return [Knob(name="precision", values=(None, TF32, BF16), gain=_PRECISION, why="within error_tolerance")]


def _own(name: str, values: Sequence[Value]) -> Knob:
    if len(values) < 2:
        raise ArgumentError(
            f"search={{{name!r}: {list(values)!r}}} has nothing to choose from", fix="give two values or more"
        )
    return Knob(name=name, values=tuple(values), gain=1.0, why="of the values given")
