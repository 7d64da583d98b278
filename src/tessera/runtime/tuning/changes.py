"""Applies a setting: each knob's change to a function, its modules and optimizers, and how the change is undone.

The first change is undone last. A change that is not possible raises `NotApplicable`, and the search continues. Torch's
global switches are set around each call and restored after it, so that code between two calls keeps its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from .compilation import compile_modules
from .parts import (
    FP8,
    REDUCE_OVERHEAD,
    TF32,
    TILE_KNOBS,
    Call,
    FunctionParts,
    NotApplicable,
    WeightCopies,
    keeps_copies,
)
from .plan import Setting

_FP8_ALIGN = 16  # cuBLAS takes fp8 matrices whose rows are multiples of 16 bytes


@contextlib.contextmanager
def apply_setting(fn: Call, parts: FunctionParts, setting: Setting, own: Mapping[str, Any]) -> Iterator[Call]:
    """Give the function under a setting, for the body.

    `own` are the knobs that are arguments of the function itself.
    """
    if setting.get("graph") and setting.get("compile") == REDUCE_OVERHEAD:
        # this mode makes graphs of its own, which cannot be part of ours; ours do the same
        setting = {**setting, "compile": "default"}
    if not keeps_copies(setting):
        with _apply_once(fn, parts, setting, own) as call:
            yield call
        return
    copies = WeightCopies(lambda now: _apply_once(fn, parts, now, own), parts, setting)
    try:
        yield copies
    finally:
        copies.close()


@contextlib.contextmanager
def _apply_once(fn: Call, parts: FunctionParts, setting: Setting, own: Mapping[str, Any]) -> Iterator[Call]:
    for knob, why in (("freeze", "the compiler freezes weights"), ("masks", "masks are read in the compiler's graph")):
        if setting.get(knob) and not setting.get("compile"):
            raise NotApplicable(f"{why}: {knob} needs compile", knob=knob)
    if setting.get("convolutions") and setting.get("compile"):
        raise NotApplicable("the compiler replaces a module's forward: fused convolutions exclude compile")
    with contextlib.ExitStack() as stack:
        arguments = {k: v for k, v in setting.items() if k in own}
        call: Call = (lambda *a, **k: fn(*a, **{**k, **arguments})) if arguments else fn
        for knob, change in _CHANGES.items():
            if setting.get(knob) not in (None, False):
                call = stack.enter_context(change(call, parts, setting))
        yield call


@contextlib.contextmanager
def _capture_graph(call: Call, parts: FunctionParts, setting: Setting) -> Iterator[Call]:
    """Capture the whole function as one CUDA graph."""
    from .cudagraph import GraphedFunction

    graphed = GraphedFunction(call, parts)
    try:
        yield graphed
    finally:
        graphed.release()


# -- modules and optimizers -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _use_channels_last(call: Call, parts: FunctionParts, setting: Setting) -> Iterator[Call]:
    """Store convolutions in channels_last, which tensor cores need; the numbers stay the same."""
    import torch

    planes = [t for t in parts.weights() if t.dim() == 4]
    changed = [t for t in planes if not t.is_contiguous(memory_format=torch.channels_last)]
    for tensor in changed:  # not module.to(), which makes new buffers: `State` keeps the old ones
        tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    try:
        yield call
    finally:
        for tensor in changed:
            tensor.data = tensor.data.contiguous()


@contextlib.contextmanager
def _pad_linears(call: Call, parts: FunctionParts, setting: Setting) -> Iterator[Call]:
    """Pad linear layers whose sizes are not a multiple of 16 bytes: by `op.linear`, or in a form for the compiler."""
    with _replace_forwards({m: _make_padded_forward(m) for m in find_unaligned(parts)}):
        yield call


def _make_padded_forward(module: Any) -> Call:
    import torch

    from ...op import linear
    from ...op.padding import linear_for_compiler

    def forward(x: Any) -> Any:
        return (linear_for_compiler if torch.compiler.is_compiling() else linear)(x, module.weight, module.bias)

    return forward


@contextlib.contextmanager
def _replace_forwards(by_module: dict[Any, Call]) -> Iterator[None]:
    """Give modules another forward for the body; they must have only their class's."""
    for module, forward in by_module.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in by_module:
            del module.forward  # then the class's forward counts again


def find_unaligned(parts: FunctionParts) -> list[Any]:
    """Return the linear layers with a size that is not a multiple of 16 bytes."""
    linears = [(m, m.weight.element_size()) for m in parts.plain_linears()]
    return [m for m, size in linears if m.in_features * size % 16 or m.out_features * size % 16]


@contextlib.contextmanager
def _fuse_convolutions(call: Call, parts: FunctionParts, setting: Setting) -> Iterator[Call]:
    """Run convolution, batch norm, sum and relu as one call of cuDNN, so that activations are written once."""
    from ...errors import RewriteError
    from ...rewrite.fused_conv import fuse

    parts.require_inference("convolutions")
    with contextlib.ExitStack() as stack:
        why, changed = "there are no convolutions", 0
        for module in parts.modules:
            try:
                changed += stack.enter_context(fuse(module)).count
            except RewriteError as exc:  # this module stays as it is
                why = exc.what
        if not changed:
            raise NotApplicable(why, knob="convolutions")

        def fused_call(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except RewriteError as exc:  # it is in training mode again, or has gradients
                raise NotApplicable(exc.what, knob="convolutions") from exc

        yield fused_call


@contextlib.contextmanager
def _fuse_optimizer(call: Call, parts: FunctionParts, setting: Setting) -> Iterator[Call]:
    """Update with one kernel instead of several passes over the weights."""
    before = [(group, group.get("fused"), group.get("foreach")) for o in parts.optimizers for group in o.param_groups]
    if not before or any("fused" not in group for group, _, _ in before):
        raise NotApplicable("the optimizer has no fused form")
    for group, _, _ in before:
        group["fused"], group["foreach"] = True, False
    moved = [o for o in parts.optimizers if move_steps(o, to_device=True)]  # fused kernels count steps on the device
    try:
        yield call
    finally:
        for group, fused, foreach in before:
            group["fused"], group["foreach"] = fused, foreach
        move_steps_back(moved)


def move_steps(optimizer: Any, *, to_device: bool) -> bool:
    """Move an optimizer's step counts to the device of their parameters, or to the host; return whether any moved."""
    import torch

    moved = False
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        target = parameter.device if to_device else torch.device("cpu")
        if torch.is_tensor(step) and step.device != target:
            state["step"], moved = step.to(target), True
    return moved


def move_steps_back(optimizers: list[Any]) -> None:
    """Move step counts to the host again, except where the optimizer needs them on the device.

    If they stayed on the device, torch would wait for each of them.
    """
    for optimizer in optimizers:
        if not any(g.get("capturable") or g.get("fused") for g in optimizer.param_groups):
            move_steps(optimizer, to_device=False)


# -- arithmetic -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lower_precision(call: Call, parts: FunctionParts, setting: Setting) -> Iterator[Call]:
    """Run products in TF32, everything in bf16 by autocast, or linear layers in fp8."""
    import torch

    if setting["precision"] == FP8:
        with _use_fp8(parts):
            yield call
        return
    before, kind = torch.get_float32_matmul_precision(), parts.device.type if parts.device is not None else "cpu"

    def call_in_tf32(*args: Any, **kwargs: Any) -> Any:
        torch.set_float32_matmul_precision("high")
        try:
            return call(*args, **kwargs)
        finally:
            torch.set_float32_matmul_precision(before)

    def call_in_bf16(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=torch.bfloat16):
            return call(*args, **kwargs)

    yield call_in_tf32 if setting["precision"] == TF32 else call_in_bf16


def find_fp8_layers(parts: FunctionParts) -> list[Any]:
    """Return the linear layers in bf16 whose sizes fp8 takes without padding."""
    import torch

    linears = [m for m in parts.plain_linears() if m.weight.dtype == torch.bfloat16]
    return [m for m in linears if not (m.in_features % _FP8_ALIGN or m.out_features % _FP8_ALIGN)]


@contextlib.contextmanager
def _use_fp8(parts: FunctionParts) -> Iterator[None]:
    """Multiply in fp8 in linear layers. Their weights are kept in fp8, so each call casts only activations."""
    from ...op import linear
    from ...op.casting import forget, prepare
    from ...op.lowprec import has_row_scaling

    parts.require_inference("precision")
    layers = find_fp8_layers(parts)
    if not layers:
        raise NotApplicable("no linear layer is in bf16 with sizes that are multiples of 16", knob="precision")
    if any(m.weight.is_inference() for m in layers):
        raise NotApplicable("torch counts no changes of weights made in inference mode", knob="precision")

    def make_forward(module: Any) -> Call:
        # Where the product itself multiplies by scales, use a scale for each row: its cast reads the activations once.
        name = "fp8_row" if has_row_scaling(module.weight.device, module.weight.dtype) else FP8
        prepare(module.weight.mT, name)
        return lambda x: linear(x, module.weight, module.bias, precision=name, accumulate="fast")

    try:
        with _replace_forwards({m: make_forward(m) for m in layers}):
            yield
    finally:
        for module in layers:
            forget(module.weight.mT)


@contextlib.contextmanager
def _benchmark_cudnn(call: Call, parts: FunctionParts, setting: Setting) -> Iterator[Call]:
    """Let cuDNN measure its algorithms for each shape instead of guessing."""
    import torch

    def call_benchmarking(*args: Any, **kwargs: Any) -> Any:
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            return call(*args, **kwargs)
        finally:
            torch.backends.cudnn.benchmark = before

    yield call_benchmarking


@contextlib.contextmanager
def _use_tile(knob: str, call: Call, parts: FunctionParts, setting: Setting) -> Iterator[Call]:
    """Use this tile in calls of one operator of `tessera.op` that name none."""
    from ...op import hints

    tile = tuple(int(side) for side in str(setting[knob]).split("x"))

    def call_with_tile(*args: Any, **kwargs: Any) -> Any:
        now = hints.current()
        with hints.use(dataclasses.replace(now, tiles={TILE_KNOBS[knob]: tile, **now.tiles})):
            return call(*args, **kwargs)

    yield call_with_tile


# Each takes the call so far, the function's parts and the whole setting, and gives the changed call.
_CHANGES: dict[str, Callable[[Call, FunctionParts, Setting], AbstractContextManager[Call]]] = {
    "layout": _use_channels_last,
    "padding": _pad_linears,
    "convolutions": _fuse_convolutions,
    "optimizer": _fuse_optimizer,
    "precision": _lower_precision,
    "cudnn_benchmark": _benchmark_cudnn,
    **{knob: functools.partial(_use_tile, knob) for knob in TILE_KNOBS},
    "compile": compile_modules,
    "graph": _capture_graph,
}
KNOBS = frozenset({*_CHANGES, "freeze", "masks"})
"""The names of all knobs; an argument of the function with one of these names cannot be searched."""
