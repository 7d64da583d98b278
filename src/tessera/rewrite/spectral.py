"""conv2d by Fourier transforms, where the cost model says that it wins: large kernels with stride 1, at inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..device import Device
from .inductor import Pass
from .watch import Found

_NAMES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


def spectral(device: Device | None) -> Pass:
    """A pass that replaces convolutions which `op.spectral_wins` on this chip; none where the chip is not known."""

    def run(module: fx.GraphModule) -> list[Found]:
        # The model of spectral_wins is of the forward: in training conv2d stays.
        if device is None or torch.is_grad_enabled():
            return []
        nodes = [node for node in module.graph.nodes if node.op == "call_function" and node.target is torch.conv2d]
        return [found for node in nodes if (found := _replaced(module, node, device)) is not None]

    return run


def _replaced(module: fx.GraphModule, node: fx.Node, device: Device) -> Found | None:
    call = _arguments(node)
    if call is None:
        return None
    from .. import op

    x, w = (n.meta.get("example_value") for n in (call["input"], call["weight"]))
    if x is None or w is None or x.dim() != 4 or x.dtype not in _NAMES:
        return None
    if not all(isinstance(size, int) for size in (*x.shape, *w.shape)):
        return None  # sizes that may change: what wins for one may lose for another
    how = {"padding": call["padding"], "dilation": call["dilation"], "groups": call["groups"]}
    verdict = op.spectral_wins(list(x.shape), list(w.shape), on=device, dtype=_NAMES[x.dtype], **how)
    if not verdict:
        return None
    with module.graph.inserting_before(node):
        new = module.graph.call_function(op.spectral_conv2d, (call["input"], call["weight"], call["bias"]), how)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)
    return Found(
        rule="spectral_conv", before=f"conv2d of a {w.shape[-2]}x{w.shape[-1]} kernel", after="fft, product, ifft",
        saved_s=verdict.direct_s - verdict.spectral_s, saved_j=verdict.direct_j - verdict.spectral_j,
        why=verdict.reason,
    )  # fmt: skip


def _arguments(node: fx.Node) -> dict[str, Any] | None:
    """conv2d's arguments by name where they are such that transforms can do it: stride 1, padding in numbers."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    call: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    call.update(zip(names, node.args, strict=False))
    call.update(node.kwargs)
    pairs = {name: _pair(call[name]) for name in ("stride", "padding", "dilation")}
    if pairs["stride"] != (1, 1) or None in pairs.values() or not isinstance(call["groups"], int):
        return None
    return {**call, **pairs}


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, (tuple, list)) and len(value) in (1, 2) and all(isinstance(v, int) for v in value):
        return int(value[0]), int(value[-1])
    return None
