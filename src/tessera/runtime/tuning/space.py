"""Which knobs a function has: only those that can matter for it, with the reason and the gain to expect.

Gains order the search, they decide nothing: what stays is what measures better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ArgumentError
from .arithmetic import fp8_layers
from .changes import BF16, CHANNELS_LAST, COMPILE_MODES, FOLDED, FP8, FUSED, REDUCE_OVERHEAD, TF32, TURNED, unaligned
from .found import Reach
from .plan import Value
from .search import COMPILE, Knob
from .seen import Seen

# Expected shares of the joules, to begin with the largest. Measured on an H200 (results/tune.json, fused_conv.json):
# GPT-2's training compiled 33% fewer, padded 14%; ResNet-50 with fused convolutions 42%. channels_last and cuDNN's
# search are from convolutions recorded for `predict`; graphs and fused updates are guesses (trials were disturbed).
_COMPILE, _LAYOUT, _PADDING, _GRAPH, _OPTIMIZER, _CUDNN, _PRECISION = 0.33, 0.3, 0.14, 0.1, 0.05, 0.05, 0.4
_CONVOLUTIONS = 0.4
# A guess: freezing makes three products one and folds batch norms. Of attention's kernels torch's own choice was the
# best for 16 shapes on an H200 (results/ops_rows.json): the others are tried where there is time.
_FREEZE, _ATTENTION = 0.08, 0.01
# A third of compiled GPT-2's joules are attention with a mask that is_causal would do without (compiled_profile.json).
_MASKS = 0.12
_LAYOUT_COMPILED = 0.02  # Inductor lays convolutions out itself (its `layout_optimization`)
# GPT-2's training on an H200: 16.99 J compiled, 17.14 padded too (results/compiled_profile.json); with its masks folded
# 15.79 and 14.29 (tune.json).
_PADDING_COMPILED = 0.05
# Measured on an H200 for GPT-2's training: 333 s to compile, and no better than the modes before it.
SLOW_COMPILE = "max-autotune-no-cudagraphs"
# fp8 (e4m3) rounds to 3 bits: a product of two such operands errs by some percent.
FP8_TOLERANCE = 5e-2


def knobs(
    reach: Reach, *, tolerance: float | None = None, own: Mapping[str, Sequence[Value]] | None = None,
    slow_compile: bool = False, compile_modes: bool = True, seen: Seen | None = None,
) -> list[Knob]:  # fmt: skip
    """The knobs of a function; `own` are arguments of its own that may be varied, `seen` is what a call showed."""
    import torch

    seen = seen or Seen()
    cuda = reach.device is not None and reach.device.type == "cuda"
    infers = seen.infers and not reach.trains and not any(m.training for m in reach.submodules())
    found = [_own(name, values) for name, values in (own or {}).items()]
    if compile_modes:
        found += _compiled(cuda=cuda, infers=infers, slow=slow_compile, attends=seen.attends)
    convolves = any(isinstance(m, torch.nn.Conv2d) for m in reach.submodules())
    if convolves:
        found.append(Knob(name="layout", values=(None, CHANNELS_LAST), gain=_LAYOUT, compiled_gain=_LAYOUT_COMPILED,
                          recompiles=True, why="convolutions need no change of layout around them"))  # fmt: skip
    if cuda:
        found += _on_cuda(reach, seen.attentions)
        found += _of_convolutions(infers) if convolves else []
    if tolerance is not None:
        found += _precisions(reach, tolerance, torch, infers=cuda and infers)
    return found


def _compiled(*, cuda: bool, infers: bool, slow: bool, attends: bool) -> list[Knob]:
    modes = [m for m in COMPILE_MODES if (cuda or m == "default") and (slow or m != SLOW_COMPILE)]
    found = [Knob(name=COMPILE, values=(None, *modes), gain=_COMPILE, why="fuses, and launches less")]
    if infers:
        found.append(Knob(name="freeze", values=(None, True), gain=_FREEZE, recompiles=True, needs=(COMPILE,),
                          along={COMPILE: modes[0]}, why="what depends on weights alone is computed once"))  # fmt: skip
    if attends:
        found.append(Knob(name="masks", values=(None, FOLDED), gain=_MASKS, recompiles=True, needs=(COMPILE,),
                          along={COMPILE: modes[0]},
                          why="a mask made of constants becomes is_causal, or nothing"))  # fmt: skip
    return found


def _on_cuda(reach: Reach, attentions: Sequence[str]) -> list[Knob]:
    found = [Knob(name="graph", values=(None, True), gain=_GRAPH, why="one launch for the whole function",
                  instead={COMPILE: {REDUCE_OVERHEAD: "default"}})]  # fmt: skip
    if unaligned(reach):
        # Inductor pads too, but each product by itself, with copies.
        found.append(Knob(name="padding", values=(None, True), gain=_PADDING, compiled_gain=_PADDING_COMPILED,
                          recompiles=True,
                          why="products whose rows are no multiple of 16 bytes run on slow kernels"))  # fmt: skip
    if reach.optimizers and all("fused" in g and not g["fused"] for o in reach.optimizers for g in o.param_groups):
        found.append(Knob(name="optimizer", values=(None, FUSED), gain=_OPTIMIZER, why="weights are read once a step"))
    if attentions:
        found.append(Knob(name="attention", values=(None, *attentions), gain=_ATTENTION, recompiles=True,
                          why="the kernel that torch takes is not always the best for the shape"))  # fmt: skip
    return found


def _of_convolutions(infers: bool) -> list[Knob]:
    found = [Knob(name="cudnn_benchmark", values=(None, True), gain=_CUDNN,
                  why="cuDNN's guess of an algorithm is not always its best")]  # fmt: skip
    if infers:
        found.append(Knob(name="convolutions", values=(None, FUSED), gain=_CONVOLUTIONS,
                          instead={COMPILE: dict.fromkeys(COMPILE_MODES)},
                          along={"layout": CHANNELS_LAST, "graph": True, "cudnn_benchmark": True},
                          why="batch norm, sum and relu are done where the convolution writes"))  # fmt: skip
    return found


def _precisions(reach: Reach, tolerance: float, torch: Any, *, infers: bool) -> list[Knob]:
    """Lower precision, where the caller said how much the result may differ, and something is wider."""
    whole = [p for m in reach.modules for p in m.parameters()] or list(reach.tensors)
    if any(p.dtype == torch.float32 for p in whole):
        return [Knob(name="precision", values=(None, TF32, BF16), gain=_PRECISION, recompiles=True,
                     why="within error_tolerance")]  # fmt: skip
    if infers and tolerance >= FP8_TOLERANCE and fp8_layers(reach) and _multiplies_fp8(reach):
        # Frozen, the weights would be other tensors than those that are kept in fp8.
        return [Knob(name="precision", values=(None, FP8), gain=_PRECISION, recompiles=True,
                     instead={"freeze": {True: None}}, why="within error_tolerance")]  # fmt: skip
    return []


def _multiplies_fp8(reach: Reach) -> bool:
    from ...op.lowprec import fp8_units

    return fp8_units(reach.device.index)


def _own(name: str, values: Sequence[Value]) -> Knob:
    if name in TURNED:
        raise ArgumentError(
            f"search={{{name!r}: ...}} is the name of a knob that the tuner turns itself",
            fix="rename the function's argument, or wrap it in a function with another name for it",
        )
    if len(values) < 2:
        raise ArgumentError(
            f"search={{{name!r}: {list(values)!r}}} has nothing to choose from", fix="give two values or more"
        )
    return Knob(name=name, values=tuple(values), gain=1.0, why="of the values given")
