"""Changes to what modules and optimizers are made of: layouts, padded products, fused convolutions and updates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .found import Reach
from .lever import Call, NotHere, only_infers
from .plan import Setting


@contextlib.contextmanager
def layout(call: Call, reach: Reach, setting: Setting) -> Iterator[Call]:
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
def padding(call: Call, reach: Reach, setting: Setting) -> Iterator[Call]:
    """Linear layers whose sizes are no multiple of 16 bytes are padded: by `op.linear`, or as the compiler takes it."""
    with forwards({m: _padded(m) for m in unaligned(reach)}):
        yield call


@contextlib.contextmanager
def forwards(by_module: dict[Any, Call]) -> Iterator[None]:
    """Modules with a forward of ours, for the body; those given have none of their own but their class's."""
    for module, forward in by_module.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in by_module:
            del module.forward  # the class's own is behind it


def _padded(module: Any) -> Call:
    import torch

    from ...op import linear
    from ...op.padding import widened

    def forward(x: Any) -> Any:
        return (widened if torch.compiler.is_compiling() else linear)(x, module.weight, module.bias)

    return forward


def plain_linears(reach: Reach) -> list[Any]:
    """Linear layers that are torch's own, without a forward that somebody gave them."""
    import torch

    return [m for m in reach.submodules() if type(m) is torch.nn.Linear and "forward" not in vars(m)]


def unaligned(reach: Reach) -> list[Any]:
    """Linear layers with a size that no 16-byte access divides."""
    return [
        m for m in plain_linears(reach)
        if m.in_features * m.weight.element_size() % 16 or m.out_features * m.weight.element_size() % 16
    ]  # fmt: skip


@contextlib.contextmanager
def convolutions(call: Call, reach: Reach, setting: Setting) -> Iterator[Call]:
    """Convolution, batch norm, sum and relu as one call of cuDNN: activations are written once."""
    from ...errors import RewriteError
    from ...rewrite.fused_conv import fuse

    only_infers(reach, "convolutions")
    with contextlib.ExitStack() as stack:
        why, changed = "there are no convolutions", 0
        for module in reach.modules:
            try:
                changed += stack.enter_context(fuse(module)).changed
            except RewriteError as exc:  # this one stays as it is
                why = exc.what
        if not changed:
            raise NotHere(why, knob="convolutions")

        def fused(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except RewriteError as exc:  # back in training, or with gradients
                raise NotHere(exc.what, knob="convolutions") from exc

        yield fused


@contextlib.contextmanager
def optimizer(call: Call, reach: Reach, setting: Setting) -> Iterator[Call]:
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
        for one, moved in zip(reach.optimizers, steps, strict=True):
            if moved and not any(g.get("capturable") or g.get("fused") for g in one.param_groups):
                steps_on(one, device=False)


def steps_on(optimizer: Any, *, device: bool) -> bool:
    """Move the step counts of an optimizer to its parameters' device, or to the host; whether any had to move."""
    import torch

    moved = False
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if torch.is_tensor(step) and step.device != (parameter.device if device else torch.device("cpu")):
            state["step"], moved = step.to(parameter.device if device else "cpu"), True
    return moved
