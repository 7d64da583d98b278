"""Settings made real: each knob's change to a function, its modules and optimizers, and how it is taken back.

What is applied first is undone last. A change that cannot be made here raises `NotHere`, and the search goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .found import Reach
from .plan import Setting

Call = Callable[..., Any]

REDUCE_OVERHEAD = "reduce-overhead"
COMPILE_MODES = ("default", REDUCE_OVERHEAD, "max-autotune-no-cudagraphs")
"""torch.compile's, as its documentation names them."""
# Every mode, layout or padding tried is one more version of the same code, and dynamo keeps 8: beyond, it runs eagerly.
RECOMPILES = 256
CHANNELS_LAST, FUSED, TF32, BF16 = "channels_last", "fused", "tf32", "bf16"


class NotHere(Exception):
    """A change that does not apply to this function or machine; the message says why."""


@contextlib.contextmanager
def applied(fn: Call, reach: Reach, setting: Setting, given: Mapping[str, Any]) -> Iterator[Call]:
    """The function under a setting, for the body. `given` are the knobs that are arguments of the function itself."""
    if setting.get("graph") and setting.get("compile") == REDUCE_OVERHEAD:
        setting = {
            **setting,
            "compile": "default",
        }  # that mode's own graphs cannot be part of ours, which does the same
    with contextlib.ExitStack() as stack:
        own = {k: v for k, v in setting.items() if k in given}
        call: Call = (lambda *a, **k: fn(*a, **{**k, **own})) if own else fn
        for knob, change in _CHANGES.items():
            value = setting.get(knob)
            if value not in (None, False):
                call = stack.enter_context(change(call, reach, value))
        yield call


# -- what modules and optimizers are made of ---------------------------------------------------------------------------


@contextlib.contextmanager
def _layout(call: Call, reach: Reach, value: Any) -> Iterator[Call]:
    """Convolutions read and write channels_last, which tensor cores want; the numbers are the same."""
    import torch

    planes = [t for m in reach.modules for t in (*m.parameters(), *m.buffers()) if t.dim() == 4]
    changed = [t for t in planes if not t.is_contiguous(memory_format=torch.channels_last)]
    for tensor in changed:  # not module.to(), which makes new buffers: `State` holds on to the old ones
        tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    try:
        yield call
    finally:
        for tensor in changed:
            tensor.data = tensor.data.contiguous()


@contextlib.contextmanager
def _padding(call: Call, reach: Reach, value: Any) -> Iterator[Call]:
    """Linear layers whose sizes are no multiple of 16 bytes go through `op.linear`, which pads them."""
    from ...op import linear

    changed = []
    for module in unaligned(reach):
        module.forward = _forward(linear, module)
        changed.append(module)
    try:
        yield call
    finally:
        for module in changed:
            del module.forward  # the class's own is behind it


def _forward(linear: Any, module: Any) -> Call:
    return lambda x: linear(x, module.weight, module.bias)


def unaligned(reach: Reach) -> list[Any]:
    """Linear layers with a size that no 16-byte access divides, and without a forward of their own."""
    import torch

    return [
        m for m in reach.submodules()
        if type(m) is torch.nn.Linear and "forward" not in vars(m)
        and (m.in_features * m.weight.element_size() % 16 or m.out_features * m.weight.element_size() % 16)
    ]  # fmt: skip


@contextlib.contextmanager
def _optimizer(call: Call, reach: Reach, value: Any) -> Iterator[Call]:
    """One kernel for the whole update instead of several passes over the weights."""
    kept = [(group, group.get("fused"), group.get("foreach")) for o in reach.optimizers for group in o.param_groups]
    if not kept or any("fused" not in group for group, _, _ in kept):
        raise NotHere("the optimizer has no fused form")
    for group, _, _ in kept:
        group["fused"], group["foreach"] = True, False
    steps = [steps_on(o, device=True) for o in reach.optimizers]  # fused kernels keep the step count on the device
    try:
        yield call
    finally:
        for group, fused, foreach in kept:
            group["fused"], group["foreach"] = fused, foreach
        for optimizer, moved in zip(reach.optimizers, steps, strict=True):
            if moved and not any(g.get("capturable") or g.get("fused") for g in optimizer.param_groups):
                steps_on(optimizer, device=False)


def steps_on(optimizer: Any, *, device: bool) -> bool:
    """Move the step counts of an optimizer to its parameters' device, or to the host; whether any had to move."""
    import torch

    moved = False
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if torch.is_tensor(step) and step.device != (parameter.device if device else torch.device("cpu")):
            state["step"], moved = step.to(parameter.device if device else "cpu"), True
    return moved


# -- how arithmetic is done --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _precision(call: Call, reach: Reach, value: Any) -> Iterator[Call]:
    import torch

    if value == TF32:
        before = torch.get_float32_matmul_precision()

        def with_tf32(*args: Any, **kwargs: Any) -> Any:
            torch.set_float32_matmul_precision("high")
            try:
                return call(*args, **kwargs)
            finally:
                torch.set_float32_matmul_precision(before)

        yield with_tf32
        return
    kind = reach.device.type if reach.device is not None else "cpu"

    def lower(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=torch.bfloat16):
            return call(*args, **kwargs)

    yield lower


@contextlib.contextmanager
def _cudnn(call: Call, reach: Reach, value: Any) -> Iterator[Call]:
    """Let cuDNN measure its algorithms for each shape instead of guessing."""
    import torch

    def measured(*args: Any, **kwargs: Any) -> Any:
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            return call(*args, **kwargs)
        finally:
            torch.backends.cudnn.benchmark = before

    yield measured


@contextlib.contextmanager
def _hints(call: Call, reach: Reach, value: Any) -> Iterator[Call]:
    """Pipeline depth of our own kernels."""
    import dataclasses

    from ...op import hints

    def hinted(*args: Any, **kwargs: Any) -> Any:
        with hints.use(dataclasses.replace(hints.current(), cp_async_depth=int(value))):
            return call(*args, **kwargs)

    yield hinted


# -- how it is launched ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _compiled(call: Call, reach: Reach, value: Any) -> Iterator[Call]:
    """torch.compile of the modules, or of the function where it has none of its own."""
    import torch

    mode = None if value == "default" else str(value)
    if not reach.modules:
        with _many_versions():
            yield torch.compile(call, mode=mode)
        return
    before = [(m, m._compiled_call_impl) for m in reach.modules]
    for module in reach.modules:
        module.compile(mode=mode)
    marking = getattr(torch.compiler, "cudagraph_mark_step_begin", None)

    def stepped(*args: Any, **kwargs: Any) -> Any:
        if marking is not None and mode == REDUCE_OVERHEAD:
            marking()  # what the last call returned may be overwritten from here on
        return call(*args, **kwargs)

    try:
        with _many_versions():
            yield stepped
    finally:
        for module, compiled in before:
            module._compiled_call_impl = compiled


@contextlib.contextmanager
def _many_versions() -> Iterator[None]:
    """Let dynamo keep as many versions of one code as are tried."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before torch 2.6
    before = getattr(config, name)
    setattr(config, name, max(before, RECOMPILES))
    try:
        yield
    finally:
        setattr(config, name, before)


@contextlib.contextmanager
def _graph(call: Call, reach: Reach, value: Any) -> Iterator[Call]:
    """The whole function as one CUDA graph."""
    from .cudagraph import Captured

    captured = Captured(call, reach)
    try:
        yield captured
    finally:
        captured.release()


_CHANGES: dict[str, Callable[[Call, Reach, Any], contextlib.AbstractContextManager[Call]]] = {
    "layout": _layout,
    "padding": _padding,
    "optimizer": _optimizer,
    "precision": _precision,
    "cudnn_benchmark": _cudnn,
    "cp_async_depth": _hints,
    "compile": _compiled,
    "graph": _graph,
}
