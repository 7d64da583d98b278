"""Changes to how arithmetic is done: precision, the kernels of attention and convolutions, our own kernels' pipelines.

Switches of torch's are set around each call and put back after it: what runs between two calls keeps its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .found import Reach
from .layers import forwards, plain_linears
from .lever import FP8, TF32, Call, NotHere, only_infers
from .plan import Setting

ATTENTIONS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
"""Fused kernels of scaled_dot_product_attention, by torch's names of them."""
MATH = "math"
_FP8_ALIGN = 16  # cuBLAS takes fp8 matrices whose rows are multiples of 16 bytes


@contextlib.contextmanager
def precision(call: Call, reach: Reach, setting: Setting) -> Iterator[Call]:
    """Products in TF32, everything in bf16 by autocast, or linear layers in fp8."""
    import torch

    if setting["precision"] == FP8:
        with _fp8(reach):
            yield call
        return
    if setting["precision"] == TF32:
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


def fp8_layers(reach: Reach) -> list[Any]:
    """Linear layers in 16 bits whose sizes fp8 takes as they are."""
    import torch

    return [
        m for m in plain_linears(reach)
        if m.weight.dtype == torch.bfloat16 and not (m.in_features % _FP8_ALIGN or m.out_features % _FP8_ALIGN)
    ]  # fmt: skip


@contextlib.contextmanager
def _fp8(reach: Reach) -> Iterator[None]:
    """Linear layers multiply in fp8; their weights are kept in it, so that only activations are cast at each call."""
    from ...op import linear
    from ...op.prepared import forget, prepare

    only_infers(reach, "precision")
    layers = fp8_layers(reach)
    if not layers:
        raise NotHere("no linear layer is in bf16 with sizes that are multiples of 16", knob="precision")
    if any(m.weight.is_inference() for m in layers):
        raise NotHere("weights made in inference mode do not count their changes", knob="precision")
    for module in layers:
        prepare(module.weight.mT, _fp8_of(module))
    try:
        with forwards({m: _in_fp8(linear, m) for m in layers}):
            yield
    finally:
        for module in layers:
            forget(module.weight.mT)


def _in_fp8(linear: Any, module: Any) -> Call:
    name = _fp8_of(module)
    return lambda x: linear(x, module.weight, module.bias, precision=name, accumulate="fast")


def _fp8_of(module: Any) -> str:
    """With a scale a row, whose cast reads activations once, where the product multiplies by the scales itself."""
    from ...op.lowprec import rows_in_product

    return "fp8_row" if rows_in_product(module.weight.device, module.weight.dtype) else FP8


@contextlib.contextmanager
def attention(call: Call, reach: Reach, setting: Setting) -> Iterator[Call]:
    """One fused kernel of attention before the others, which stay behind it for what it cannot do."""
    value = str(setting["attention"])

    def preferring(*args: Any, **kwargs: Any) -> Any:
        with preferred(value):
            return call(*args, **kwargs)

    yield preferring


def preferred(value: str) -> contextlib.AbstractContextManager[Any]:
    """Attention by a kernel where it can: then by the other fused ones, and math last. "math" allows nothing else."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    first = [] if value == MATH else [value, *(v for v in ATTENTIONS if v != value)]
    order = [*(getattr(SDPBackend, ATTENTIONS[v]) for v in first), SDPBackend.MATH]
    found: contextlib.AbstractContextManager[Any] = sdpa_kernel(order, set_priority=True)  # since torch 2.6
    return found


@contextlib.contextmanager
def cudnn_benchmark(call: Call, reach: Reach, setting: Setting) -> Iterator[Call]:
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
def hints(call: Call, reach: Reach, setting: Setting) -> Iterator[Call]:
    """Pipeline depth of our own kernels."""
    import dataclasses

    from ...op import hints as given

    depth = int(setting["cp_async_depth"] or 0)

    def hinted(*args: Any, **kwargs: Any) -> Any:
        with given.use(dataclasses.replace(given.current(), cp_async_depth=depth)):
            return call(*args, **kwargs)

    yield hinted
