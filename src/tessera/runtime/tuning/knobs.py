"""Which knobs a function has: only those that can matter for it, with the reason and the expected gain.

One call of the function is watched first: a compilation takes up to a minute, a look one call. Gains order the search
and decide nothing: what measures better stays.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ArgumentError
from .changes import ATTENTIONS, KNOBS, find_fp8_layers, find_unaligned, prefer_attention
from .parts import BF16, CHANNELS_LAST, COMPILE_MODES, FOLDED, FP8, FUSED, REDUCE_OVERHEAD, TF32, FunctionParts
from .plan import Value
from .search import COMPILE, Knob

# Expected shares of the joules; the largest is tried first. Measured on an H200 (results/tune.json, fused_conv.json):
# GPT-2's training compiled 33% fewer, padded 14%; ResNet-50 with fused convolutions 42%. channels_last and cuDNN's
# search are from convolutions recorded for `predict`; graphs and fused updates are guesses (trials were disturbed).
_COMPILE, _LAYOUT, _PADDING, _GRAPH, _OPTIMIZER, _CUDNN, _PRECISION = 0.33, 0.3, 0.14, 0.1, 0.05, 0.05, 0.4
_CONVOLUTIONS = 0.4
# A guess: freezing turns three products into one and folds batch norms. Of attention's kernels torch's own choice was
# the best for 16 shapes on an H200 (results/ops_rows.json): the others are tried where there is time.
_FREEZE, _ATTENTION = 0.08, 0.01
# A third of compiled GPT-2's joules are attention with a mask that is_causal would replace (compiled_profile.json).
_MASKS = 0.12
_LAYOUT_COMPILED = 0.02  # Inductor chooses the layout of convolutions itself (its `layout_optimization`)
# GPT-2's training on an H200: 16.99 J compiled, 17.14 padded too (results/compiled_profile.json); with its masks folded
# 15.79 and 14.29 (tune.json).
_PADDING_COMPILED = 0.05
# fp8 (e4m3) rounds to 3 bits: a product of two such operands is off by some percent.
FP8_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTraits:
    """What one call showed. The defaults mean that nothing was seen.

    `infers`: its modules ran without gradients and left their weights alone. `attentions`: kernels worth preferring.
    `attends`: it calls torch's attention.
    """

    infers: bool = False
    attentions: tuple[str, ...] = ()
    attends: bool = False


def find_knobs(
    parts: FunctionParts,
    *,
    tolerance: float | None = None,
    own: Mapping[str, Sequence[Value]] | None = None,
    compile_modes: bool = True,
    traits: CallTraits | None = None,
) -> list[Knob]:
    """The knobs of a function; `own` are arguments of its own that may be varied, `traits` is what a call showed."""
    import torch

    traits = traits or CallTraits()
    cuda = parts.device is not None and parts.device.type == "cuda"
    infers = traits.infers and not parts.trains and not any(m.training for m in parts.submodules())
    knobs = [_make_own_knob(name, values) for name, values in (own or {}).items()]
    if compile_modes:
        knobs += _compile_knobs(cuda=cuda, infers=infers, attends=traits.attends)
    convolves = any(isinstance(m, torch.nn.Conv2d) for m in parts.submodules())
    if convolves:
        knobs.append(
            Knob(
                name="layout",
                values=(None, CHANNELS_LAST),
                gain=_LAYOUT,
                compiled_gain=_LAYOUT_COMPILED,
                recompiles=True,
                why="convolutions need no change of layout around them",
            )
        )
    if cuda:
        knobs += _cuda_knobs(parts, traits.attentions)
        knobs += _convolution_knobs(infers) if convolves else []
    if tolerance is not None:
        knobs += _precision_knobs(parts, tolerance, torch, infers=cuda and infers)
    return knobs


def _compile_knobs(*, cuda: bool, infers: bool, attends: bool) -> list[Knob]:
    modes = COMPILE_MODES if cuda else COMPILE_MODES[:1]
    knobs = [Knob(name=COMPILE, values=(None, *modes), gain=_COMPILE, why="fuses kernels and launches fewer")]
    extra: list[tuple[str, Value, float, str]] = []
    if infers:
        extra.append(("freeze", True, _FREEZE, "what depends only on weights is computed once"))
    if attends:
        extra.append(("masks", FOLDED, _MASKS, "a mask made of constants becomes is_causal, or nothing"))
    knobs += [
        Knob(
            name=name,
            values=(None, value),
            gain=gain,
            recompiles=True,
            needs=(COMPILE,),
            along={COMPILE: modes[0]},
            why=why,
        )
        for name, value, gain, why in extra
    ]
    return knobs


def _cuda_knobs(parts: FunctionParts, attentions: Sequence[str]) -> list[Knob]:
    knobs = [
        Knob(
            name="graph",
            values=(None, True),
            gain=_GRAPH,
            instead={COMPILE: {REDUCE_OVERHEAD: "default"}},
            why="one launch for the whole function",
        )
    ]
    if find_unaligned(parts):
        # Inductor pads too, but each product by itself, with copies.
        knobs.append(
            Knob(
                name="padding",
                values=(None, True),
                gain=_PADDING,
                compiled_gain=_PADDING_COMPILED,
                recompiles=True,
                why="products whose rows are not a multiple of 16 bytes run on slow kernels",
            )
        )
    if parts.optimizers and all("fused" in g and not g["fused"] for o in parts.optimizers for g in o.param_groups):
        knobs.append(Knob(name="optimizer", values=(None, FUSED), gain=_OPTIMIZER, why="weights are read once a step"))
    if attentions:
        why = "the kernel that torch takes is not always the best for the shape"
        knobs.append(Knob(name="attention", values=(None, *attentions), gain=_ATTENTION, recompiles=True, why=why))
    return knobs


def _convolution_knobs(infers: bool) -> list[Knob]:
    why = "cuDNN's guess of an algorithm is not always its best"
    knobs = [Knob(name="cudnn_benchmark", values=(None, True), gain=_CUDNN, why=why)]
    if infers:
        knobs.append(
            Knob(
                name="convolutions",
                values=(None, FUSED),
                gain=_CONVOLUTIONS,
                instead={COMPILE: dict.fromkeys(COMPILE_MODES)},
                along={"layout": CHANNELS_LAST, "graph": True, "cudnn_benchmark": True},
                why="batch norm, sum and relu are done where the convolution writes",
            )
        )
    return knobs


def _precision_knobs(parts: FunctionParts, tolerance: float, torch: Any, *, infers: bool) -> list[Knob]:
    """Lower precision, where the caller allows a deviation and something has a wider format."""
    from ...op.casting import has_fp8_units

    tensors = [p for m in parts.modules for p in m.parameters()] or list(parts.tensors)
    why = "within error_tolerance"
    if any(p.dtype == torch.float32 for p in tensors):
        return [Knob(name="precision", values=(None, TF32, BF16), gain=_PRECISION, recompiles=True, why=why)]
    if infers and tolerance >= FP8_TOLERANCE and find_fp8_layers(parts) and has_fp8_units(parts.device.index):
        # Frozen weights would be other tensors than those that are kept in fp8.
        instead: Mapping[str, Mapping[Value, Value]] = {"freeze": {True: None}}
        knob = Knob(name="precision", values=(None, FP8), gain=_PRECISION, recompiles=True, instead=instead, why=why)
        return [knob]
    return []


def _make_own_knob(name: str, values: Sequence[Value]) -> Knob:
    if name in KNOBS:
        raise ArgumentError(
            f"search={{{name!r}: ...}} is the name of one of the tuner's own knobs",
            fix="rename the function's argument, or wrap it in a function with another name for it",
        )
    if len(values) < 2:
        raise ArgumentError(
            f"search={{{name!r}: {list(values)!r}}} has nothing to choose from", fix="give two values or more"
        )
    return Knob(name=name, values=tuple(values), gain=1.0, why="the best of the values given")


# -- watching one call ------------------------------------------------------------------------------------------------


def watch_call(call: Callable[[], Any], parts: FunctionParts) -> CallTraits:
    """Run the function once and watch. The caller restores what the call changes."""
    weights = [t for t in parts.weights() if not t.is_inference()]
    before = [t._version for t in weights]
    try:
        with _run_eagerly(), _watch_gradients(parts) as gradients, _watch_attention() as kernels:
            call()
    except Exception:  # noqa: BLE001  (the user's function may fail in any way: the search's first trial reports it)
        return CallTraits()
    unchanged = before == [t._version for t in weights]
    infers = bool(gradients) and not any(gradients) and unchanged
    return CallTraits(infers=infers, attentions=_find_different(kernels), attends=bool(kernels[None]))


@contextlib.contextmanager
def _run_eagerly() -> Iterator[None]:
    """Run the user's compiled code as written: watched, it would be compiled once more."""
    import torch

    stance = getattr(torch.compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None  # since torch 2.6
    with stance("force_eager") if stance is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _watch_gradients(parts: FunctionParts) -> Iterator[list[bool]]:
    """Whether gradients were on, at each call of an outermost module."""
    import torch

    enabled: list[bool] = []

    def note(module: Any, args: Any) -> None:
        enabled.append(torch.is_grad_enabled())

    handles = [m.register_forward_pre_hook(note) for m in parts.modules]
    try:
        yield enabled
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _watch_attention() -> Iterator[dict[str | None, list[int]]]:
    """The kernel of each attention, by the preferred one; None for no preference."""
    from torch.nn import attention, functional
    from torch.overrides import TorchFunctionMode

    if "set_priority" not in inspect.signature(attention.sdpa_kernel).parameters:  # before torch 2.6
        yield {None: []}
        return
    kernels: dict[str | None, list[int]] = {value: [] for value in (None, *ATTENTIONS)}

    class AttentionMode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is functional.scaled_dot_product_attention:
                for value, seen in kernels.items():
                    with prefer_attention(value) if value is not None else contextlib.nullcontext():
                        seen.append(_choose_kernel(*args, **kwargs))
            return func(*args, **kwargs)

    with AttentionMode():
        yield kernels


def _choose_kernel(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """The kernel that torch chooses for these tensors."""
    import torch

    more = {"scale": scale, "enable_gqa": enable_gqa}
    return int(torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, **more))


def _find_different(kernels: dict[str | None, list[int]]) -> tuple[str, ...]:
    """Preferences that lead to other kernels than no preference does, and than one another."""
    seen, different = [kernels[None]], []
    for value, chosen in kernels.items():
        if value is not None and chosen not in seen:
            seen.append(chosen)
            different.append(value)
    return tuple(different)
