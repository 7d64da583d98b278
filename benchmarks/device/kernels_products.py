"""Operators that multiply: matrix products, attention, convolutions, recurrent nets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from kernel_case import DTYPES, LAST, Op, Pass, Row, Step, both, rand

# -- matrix products --------------------------------------------------------------------------------------------

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 197, 256, 512, 1000, 2048, 4096, 8192, 16384)
SHAPES = (
    (768, 768), (2304, 768), (768, 3072), (1024, 1024), (4096, 1024), (1024, 4096), (1152, 896), (896, 4864),
    (14336, 4096), (4096, 14336), (512, 2048), (6144, 2048), (50257, 768), (30522, 768), (128256, 2048),
    (151936, 896), (1000, 2048), (1000, 1280), (650, 650), (2600, 650), (10, 512), (384, 1536), (4097, 1023),
)  # fmt: skip


def linear(m: int, n: int, k: int, dtype: str, bias: bool, cold: bool = False) -> Op:
    shared: dict[str, torch.Tensor] = {}

    def make() -> Step:
        x = shared.setdefault("x", rand(m, k, dtype=dtype))
        w, b = rand(n, k, dtype=dtype), rand(n, dtype=dtype) if bias else None
        return lambda: F.linear(x, w, b)

    return Op("linear", {"dtype": dtype, "m": m, "n": n, "k": k, "bias": bias}, make, cold)


def fp8_linear(m: int, n: int, k: int) -> Op:
    def make() -> Step:
        x, w = rand(m, k, dtype="fp8"), rand(n, k, dtype="fp8")
        one = torch.ones((), device=x.device)
        return lambda: torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return Op("linear", {"dtype": "fp8", "m": m, "n": n, "k": k, "bias": False}, make)


def mm(m: int, n: int, k: int, dtype: str, layout: str) -> Op:
    """`layout`: nn as the gradient of an input, tn as the gradient of a weight."""

    def make() -> Step:
        a = rand(m, k, dtype=dtype) if layout == "nn" else rand(k, m, dtype=dtype).t()
        b = rand(k, n, dtype=dtype)
        return lambda: torch.mm(a, b)

    return Op("mm", {"dtype": dtype, "m": m, "n": n, "k": k, "layout": layout}, make)


def gemms() -> Iterator[Op]:
    pick = random.Random(0)
    for n, k in ((3072, 768), (4096, 4096), (2048, 8192)):
        yield from (linear(m, n, k, "bf16", bias=(i % 3 == 0)) for i, m in enumerate(ROWS))
    for n, k in SHAPES:
        yield from (linear(m, n, k, "bf16", pick.random() < 0.4) for m in sorted(pick.sample(ROWS, 4)))
    for m, n, k in (
        (1, 4096, 4096),
        (64, 3072, 768),
        (512, 1024, 4096),
        (2048, 4096, 1024),
        (8192, 4096, 4096),
        (8192, 768, 3072),
    ):
        yield linear(m, n, k, "fp16", bias=True)
    for n, k in ((3072, 768), (768, 3072), (768, 768), (30522, 768), (2048, 512), (1000, 2048), (4096, 4096)):
        yield from (linear(m, n, k, "fp32", pick.random() < 0.7) for m in sorted(pick.sample(ROWS, 5)))
    for m, n, k in ((64, 4096, 4096), (512, 3072, 768), (2048, 1024, 1024), (8192, 768, 3072), (8192, 8192, 8192)):
        yield linear(m, n, k, "tf32", bias=False)
    for n, k in ((4096, 4096), (3072, 768), (14336, 4096)):
        yield from (fp8_linear(m, n, k) for m in (16, 128, 1024, 8192))


def cold_gemms() -> Iterator[Op]:
    for n, k in ((768, 768), (3072, 768), (1024, 4096), (8192, 2048), (4096, 4096)):
        yield from (linear(m, n, k, "bf16", bias=False, cold=True) for m in (1, 8, 64, 256))
    for n, k in ((768, 768), (3072, 768), (4096, 4096)):
        yield from (linear(m, n, k, "fp32", bias=True, cold=True) for m in (1, 16, 128))
    for m, n, k in ((1, 128256, 2048), (32, 128256, 2048), (1, 14336, 4096)):
        yield linear(m, n, k, "bf16", bias=False, cold=True)


def backward_gemms() -> Iterator[Op]:
    for t, n, k in (
        (2048, 2048, 8192),
        (4096, 768, 3072),
        (8192, 768, 768),
        (8192, 3072, 768),
        (1024, 4096, 1024),
        (8192, 50257, 768),
    ):
        for dtype in ("bf16", "fp32") if n < 50000 else ("bf16",):
            yield mm(t, k, n, dtype, "nn")
            yield mm(n, k, t, dtype, "tn")


def bmms() -> Iterator[Op]:
    sizes = (
        (96, 1024, 1024, 64),
        (384, 128, 128, 64),
        (384, 128, 64, 128),
        (12, 197, 197, 64),
        (3072, 49, 49, 32),
        (3072, 49, 32, 49),
    )
    for b, m, n, k in (*sizes, (128, 512, 512, 64), (8, 4096, 4096, 128), (32, 1, 1024, 128), (64, 1024, 512, 2048)):
        for dtype in ("bf16", "fp32"):
            yield Op("bmm", {"dtype": dtype, "b": b, "m": m, "n": n, "k": k}, bmm_of(b, m, n, k, dtype))
    for b, m, n, k in ((96, 512, 512, 64), (32, 128, 128, 128)):
        yield Op("baddbmm", {"dtype": "bf16", "b": b, "m": m, "n": n, "k": k}, bmm_of(b, m, n, k, "bf16", add=True))


def bmm_of(b: int, m: int, n: int, k: int, dtype: str, add: bool = False) -> Callable[[], Step]:
    def make() -> Step:
        x, y = rand(b, m, k, dtype=dtype), rand(b, k, n, dtype=dtype)
        if not add:
            return lambda: torch.bmm(x, y)
        z = rand(b, m, n, dtype=dtype)
        return lambda: torch.baddbmm(z, x, y)

    return make


# -- attention --------------------------------------------------------------------------------------------------


def attention(
    b: int,
    h: int,
    s: int,
    d: int,
    dtype: str = "bf16",
    *,
    kv: int = 0,
    hk: int = 0,
    causal: bool = False,
    mask: bool = False,
) -> tuple[Row, Pass]:
    kv, hk = kv or s, hk or h
    params = {"dtype": dtype, "b": b, "h": h, "hk": hk, "s": s, "kv": kv, "d": d, "causal": causal, "mask": mask}

    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        q = rand(b, h, s, d, dtype=dtype, grad=grad)
        k, v = (rand(b, hk, kv, d, dtype=dtype, grad=grad) for _ in range(2))
        bias = rand(b, 1, s, kv, dtype=dtype) if mask else None
        more = {"attn_mask": bias, "is_causal": causal, "enable_gqa": hk != h}
        return lambda: F.scaled_dot_product_attention(q, k, v, **more), [q, k, v]

    return params, make


def attentions() -> Iterator[Op]:
    for args, more, backward in ATTENTION:
        yield from both("sdpa", *attention(*args, **more), backward)


CAUSAL, MASK = {"causal": True}, {"mask": True}
ATTENTION: list[tuple[tuple[Any, ...], Row, bool]] = [
    *[
        ((max(1, 16384 // s), 12, s, 64), {}, s in (128, 512, 2048))
        for s in (16, 64, 128, 197, 256, 512, 1024, 2048, 4096, 8192)
    ],
    *[((max(1, 8192 // s), 32, s, 128), CAUSAL, s in (512, 4096)) for s in (128, 512, 1024, 2048, 4096, 8192)],
    *[((max(1, 8192 // s), 32, s, 64), {**CAUSAL, "hk": 8}, s == 1024) for s in (128, 512, 1024, 2048, 4096)],
    *[((4, 16, 1024, d), CAUSAL, d in (32, 128)) for d in (32, 64, 80, 96, 128, 256)],
    *[((8, 12, 512, d), {}, False) for d in (32, 80, 96, 128, 256)],
    *[((1, h, s, 64), {}, False) for h, s in ((12, 50), (12, 128), (16, 512), (12, 2048))],
    *[((8, 12, s, 64), MASK, s == 512) for s in (128, 512, 1024)],
    ((4, 32, 1024, 64), {**MASK, "hk": 8}, False),
    ((32, 16, 128, 64), MASK, False),
    *[((8, 12, s, 64, "fp32"), {}, s == 512) for s in (128, 512, 1024)],
    ((1, 12, 128, 64, "fp32"), {}, False),
    ((8, 12, 512, 64, "fp32"), MASK, True),
    ((4, 16, 1024, 128, "fp32"), CAUSAL, False),
    *[((8, 12, 1024, 64, "fp16"), c, True) for c in ({}, CAUSAL)],
    ((64, 12, 197, 64, "fp16"), {}, False),
    *[
        ((b, 32, 1, 64), {"hk": 8, "kv": kv}, False)
        for b, kv in ((1, 1024), (8, 1024), (32, 1024), (1, 8192), (16, 4096), (64, 8192))
    ],
    *[((b, 32, 1, 128), {"kv": kv}, False) for b, kv in ((1, 1024), (16, 2048), (32, 8192))],
    *[((b, 32, 1, 128), {"kv": kv, "mask": True}, False) for b, kv in ((1, 1024), (16, 2048))],
    ((32, 32, 1, 64), {"hk": 8, "kv": 1025, "mask": True}, False),
    ((4, 6, 32, 64, "fp16"), {"kv": 1500}, False),
    ((4, 6, 1500, 64, "fp16"), {}, False),
]


# -- convolutions -----------------------------------------------------------------------------------------------

# batch, channels, size, filters, kernel, stride, groups, dilation
CONVS = (
    (1, 3, 224, 64, 7, 2, 1, 1), (64, 3, 224, 64, 7, 2, 1, 1), (64, 3, 224, 32, 3, 2, 1, 1), (1, 64, 56, 64, 3, 1, 1, 1),
    (64, 64, 56, 64, 3, 1, 1, 1), (64, 128, 28, 128, 3, 1, 1, 1), (64, 128, 56, 128, 3, 2, 1, 1), (64, 256, 14, 256, 3, 1, 1, 1),
    (1, 256, 14, 256, 3, 1, 1, 1), (64, 512, 7, 512, 3, 1, 1, 1), (1, 512, 7, 512, 3, 1, 1, 1), (64, 64, 56, 256, 1, 1, 1, 1),
    (64, 256, 56, 64, 1, 1, 1, 1), (64, 1024, 14, 256, 1, 1, 1, 1), (64, 512, 28, 1024, 1, 2, 1, 1), (1, 1024, 14, 256, 1, 1, 1, 1),
    (16, 64, 224, 64, 3, 1, 1, 1), (16, 512, 28, 512, 3, 1, 1, 1), (8, 64, 256, 64, 3, 1, 1, 1), (8, 512, 32, 512, 3, 1, 1, 1),
    (8, 1024, 32, 512, 3, 1, 1, 1), (2, 512, 64, 512, 3, 1, 1, 4), (2, 2048, 64, 256, 3, 1, 1, 12), (64, 128, 28, 128, 3, 1, 32, 1),
    (64, 256, 28, 256, 3, 1, 32, 1), (64, 1024, 14, 1024, 3, 1, 32, 1), (64, 32, 112, 32, 3, 1, 32, 1), (64, 96, 112, 96, 3, 2, 96, 1),
    (64, 144, 56, 144, 5, 2, 144, 1), (64, 672, 14, 672, 5, 1, 672, 1), (1, 672, 14, 672, 5, 1, 672, 1), (64, 96, 56, 96, 7, 1, 96, 1),
    (64, 384, 14, 384, 7, 1, 384, 1), (1, 96, 56, 96, 7, 1, 96, 1), (64, 16, 112, 96, 1, 1, 1, 1), (64, 320, 7, 1280, 1, 1, 1, 1),
    (64, 1152, 1, 48, 1, 1, 1, 1), (64, 48, 1, 1152, 1, 1, 1, 1), (64, 96, 55, 64, 1, 1, 1, 1), (64, 24, 28, 58, 1, 1, 1, 1),
    (64, 3, 224, 96, 4, 4, 1, 1), (64, 96, 56, 192, 2, 2, 1, 1), (64, 3, 224, 768, 16, 16, 1, 1), (1, 3, 224, 768, 32, 32, 1, 1),
)  # fmt: skip
CONV_BACKWARD = {1, 2, 4, 5, 6, 7, 9, 11, 13, 14, 18, 19, 23, 25, 26, 27, 28, 29, 31, 32, 35, 37, 40, 41, 42}


def conv(spec: tuple[int, ...], dtype: str, last: bool, bias: bool = False) -> tuple[Row, Pass]:
    b, c, hw, k, r, stride, groups, dilation = spec
    padding = dilation * (r // 2) if stride < r or r == 1 else 0
    names = ("b", "c", "hw", "k", "r", "stride", "groups", "dilation")
    params = {
        "dtype": dtype,
        **dict(zip(names, spec, strict=True)),
        "padding": padding,
        "channels_last": last,
        "bias": bias,
    }

    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        x, w = rand(b, c, hw, hw, dtype=dtype), rand(k, c // groups, r, r, dtype=dtype)
        if last:
            x, w = x.contiguous(memory_format=LAST), w.contiguous(memory_format=LAST)
        leaves = [x.requires_grad_(grad and c != 3), w.requires_grad_(grad)]
        bb = rand(k, dtype=dtype) if bias else None
        return lambda: F.conv2d(x, w, bb, stride, padding, dilation, groups), leaves[c == 3 :]

    return params, make


def convs() -> Iterator[Op]:
    for i, spec in enumerate(CONVS):
        for dtype, last in (("bf16", True), ("bf16", False), ("fp32", False)):
            backward = i in CONV_BACKWARD and (dtype, last) != ("bf16", i % 2 == 0)
            yield from both("conv2d", *conv(spec, dtype, last), backward)
        if i % 4 == 0:
            yield from both("conv2d", *conv(spec, "fp16", last=i % 8 == 0, bias=True), False)
        if i % 6 == 1:
            yield from both("conv2d", *conv(spec, "fp32", last=True), False)


def cold_convs() -> Iterator[Op]:
    for i in (3, 8, 10, 15, 30, 33, 9, 7):
        for dtype, last in (("bf16", True), ("fp32", False)):
            params, make = conv(CONVS[i], dtype, last)
            yield Op("conv2d", {**params, "pass": "forward"}, lambda make=make: make(False)[0], cold=True)


def other_conv(kind: str, x: tuple[int, ...], w: tuple[int, ...], dtype: str, **more: Any) -> Iterator[Op]:
    fn = getattr(F, kind)

    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        a, b = rand(*x, dtype=dtype, grad=grad), rand(*w, dtype=dtype, grad=grad)
        return lambda: fn(a, b, **more), [a, b]

    yield from both(kind, {"dtype": dtype, "shape": x, "weight": w, **more}, make, True)


def other_convs() -> Iterator[Op]:
    for dtype in ("bf16", "fp32"):
        yield from other_conv("conv_transpose2d", (8, 1024, 16, 16), (1024, 512, 2, 2), dtype, stride=2)
        yield from other_conv("conv_transpose2d", (8, 128, 128, 128), (128, 64, 2, 2), dtype, stride=2)
        yield from other_conv("conv1d", (4, 80, 3000), (384, 80, 3), dtype, padding=1)
        yield from other_conv("conv1d", (4, 384, 3000), (384, 384, 3), dtype, padding=1, stride=2)
        yield from other_conv("conv3d", (4, 64, 16, 56, 56), (64, 64, 3, 3, 3), dtype, padding=1)


# -- recurrent nets --------------------------------------------------------------------------------------------


def recurrent() -> Iterator[Op]:
    for kind in ("LSTM", "GRU"):
        for b, s, h, layers, dtype in ((32, 128, 650, 2, "fp32"), (64, 256, 512, 1, "bf16"), (1, 64, 1024, 2, "fp32")):
            params = {"dtype": dtype, "b": b, "s": s, "hidden": h, "layers": layers}
            yield from both(kind.lower(), params, rnn(kind, b, s, h, layers, dtype), b > 1)


def rnn(kind: str, b: int, s: int, h: int, layers: int, dtype: str) -> Pass:
    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        x = rand(b, s, h, dtype=dtype, grad=grad)
        with x.device:
            net = getattr(nn, kind)(h, h, layers, batch_first=True).to(DTYPES[dtype]).requires_grad_(grad)
        return lambda: net(x)[0], [x, *net.parameters()]

    return make
