"""Record single operators in steady state on the GPU at hand, and what calling them costs the host.

    PYTHONPATH=src:.carry/site python benchmarks/device/record_kernels.py OUT.jsonl.gz
        [--only CASE ...] [--from INDEX] [--seconds LIMIT] [--dry]

Each operator is captured many times into a CUDA graph that is replayed: about 0.15 s to settle (0.35 s at the power
limit), 0.28 s measured; joules from the driver's sample ring through `tessera.monitor`, read a few operators later
so that nobody waits for the sensor. `cold` rows go round enough buffers to leave the 60 MB L2 (for `linear` the weights
alone: activations are warm in a model). `pass` is forward or forward+backward. `host_call` rows are microseconds the
host needs to issue a call. `--dry` runs everything once on the meta device. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics as st
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record_models import JsonLines, error_row, figures, machine, nvml_state, states_of, steady, tidy
from torch import nn
from torch.nn import functional as F  # noqa: N812

Row = dict[str, Any]
Step = Callable[[], Any]
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
LAST = torch.channels_last
COLD_BYTES = 260 << 20  # more than four times the L2
MAX_SETS, MAX_COPIES, GRAPH_S = 400, 200, 0.004
SETTLE_S, CAPPED_SETTLE_S, MEASURED_S = 0.15, 0.2, 0.28
RESERVED_LIMIT = 30 << 30
device = "cuda"


@dataclass(frozen=True)
class Op:
    """`make` allocates one set of buffers and returns the call on them."""

    case: str
    params: Row
    make: Callable[[], Step]
    cold: bool = False


def rand(*shape: int, dtype: str = "bf16", grad: bool = False) -> torch.Tensor:
    x = torch.randn(shape, device=device, dtype=torch.float32 if dtype == "fp8" else DTYPES[dtype])
    return x.to(DTYPES[dtype]).requires_grad_(grad) if dtype == "fp8" else x.requires_grad_(grad)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, device=device)


def with_backward(fn: Step, leaves: list[torch.Tensor]) -> Step:
    """Forward and backward of `fn` to all leaves."""
    out = fn()
    seed = torch.randn_like(out)
    return lambda: torch.autograd.grad(fn(), leaves, seed)


def both(
    case: str, params: Row, make: Callable[[bool], tuple[Step, list[torch.Tensor]]], backward: bool
) -> Iterator[Op]:
    """The forward pass as one operator, and forward+backward as another where asked."""
    yield Op(case, {**params, "pass": "forward"}, lambda: make(False)[0])
    if backward:
        yield Op(case, {**params, "pass": "forward+backward"}, lambda: with_backward(*make(True)))


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
        one = torch.ones((), device=device)
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
) -> tuple[Row, Callable[[bool], tuple[Step, list[torch.Tensor]]]]:
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


# -- elementwise ------------------------------------------------------------------------------------------------

Maker = Callable[[int, str], Step]


def unary(fn: Callable[[torch.Tensor], Any]) -> Maker:
    def make(n: int, dtype: str) -> Step:
        x = rand(n, dtype=dtype)
        return lambda: fn(x)

    return make


def binary(fn: Callable[[torch.Tensor, torch.Tensor], Any]) -> Maker:
    def make(n: int, dtype: str) -> Step:
        x, y = rand(n, dtype=dtype), rand(n, dtype=dtype)
        return lambda: fn(x, y)

    return make


def biased(fn: Callable[[torch.Tensor, torch.Tensor], Any], columns: int = 1024) -> Maker:
    def make(n: int, dtype: str) -> Step:
        x, b = rand(n // columns, columns, dtype=dtype), rand(columns, dtype=dtype)
        return lambda: fn(x, b)

    return make


def per_channel(n: int, dtype: str) -> Step:
    x, b = rand(n // 4096, 64, 64, dtype=dtype), rand(n // 4096, 1, 1, dtype=dtype)
    return lambda: x * b


def chosen(n: int, dtype: str) -> Step:
    x, y, c = rand(n, dtype=dtype), rand(n, dtype=dtype), ints(2, n).bool()
    return lambda: torch.where(c, x, y)


def masked(n: int, dtype: str) -> Step:
    x, c = rand(n, dtype=dtype), ints(2, n).bool()
    return lambda: x.masked_fill(c, -1.0)


def cast(n: int, dtype: str) -> Step:
    x, to = rand(n, dtype=dtype), torch.float32 if dtype != "fp32" else torch.bfloat16
    return lambda: x.to(to)


SWEPT: dict[str, Maker] = {"add": binary(torch.add), "copy": unary(torch.clone), "gelu": unary(F.gelu)}
OTHERS: dict[str, Maker] = {
    "mul": binary(torch.mul),
    "mul_scalar": unary(lambda x: x * 0.5),
    "add_inplace": binary(lambda x, y: x.add_(y, alpha=1e-6)),
    "silu": unary(F.silu),
    "relu": unary(torch.relu),
    "relu_inplace": unary(torch.relu_),
    "sigmoid": unary(torch.sigmoid),
    "tanh": unary(torch.tanh),
    "hardswish": unary(F.hardswish),
    "gelu_tanh": unary(lambda x: F.gelu(x, approximate="tanh")),
    "exp": unary(torch.exp),
    "rsqrt": unary(torch.rsqrt),
    "pow2": unary(lambda x: x.pow(2)),
    "pow3": unary(lambda x: x.pow(3.0)),
    "cast": cast,
    "bias_add": biased(torch.add),
    "channel_mul": per_channel,
    "where": chosen,
    "masked_fill": masked,
    "dropout": unary(lambda x: F.dropout(x, 0.1)),
    "zero": unary(torch.Tensor.zero_),
    "eq_scalar": unary(lambda x: x == 0.5),
}


def element(name: str, maker: Maker, n: int, dtype: str, cold: bool = False) -> Op:
    return Op("elementwise", {"op": name, "dtype": dtype, "n": n}, lambda: maker(n, dtype), cold)


def elementwise() -> Iterator[Op]:
    for name, maker in SWEPT.items():
        for dtype in ("bf16", "fp32") if name == "add" else ("bf16",):
            yield from (element(name, maker, 1 << p, dtype) for p in range(12, 31, 2))
    for name, maker in OTHERS.items():
        for p, dtype in ((16, "bf16"), (22, "bf16"), (26, "bf16"), (22, "fp32"), (26, "fp32")):
            yield element(name, maker, 1 << p, dtype)


def cold_elementwise() -> Iterator[Op]:
    for name in ("add", "gelu", "bias_add", "relu_inplace", "cast"):
        maker = SWEPT.get(name) or OTHERS[name]
        yield from (element(name, maker, 1 << p, "bf16", cold=True) for p in (19, 21, 23, 25))


def activation_backwards() -> Iterator[Op]:
    for name, fn in {
        "gelu": F.gelu,
        "silu": F.silu,
        "relu": torch.relu,
        "dropout": lambda x: F.dropout(x, 0.1),
    }.items():
        for p, dtype in ((20, "bf16"), (25, "bf16"), (25, "fp32")):
            params = {"op": name, "dtype": dtype, "n": 1 << p, "pass": "forward+backward"}
            yield Op("elementwise", params, backward_of(fn, (1 << p,), dtype))


def backward_of(fn: Callable[[torch.Tensor], Any], shape: tuple[int, ...], dtype: str) -> Callable[[], Step]:
    def make() -> Step:
        x = rand(*shape, dtype=dtype, grad=True)
        return with_backward(lambda: fn(x), [x])

    return make


# -- moving, reducing, indexing ---------------------------------------------------------------------------------


def on(case: str, fn: Callable[..., Any], *tensors: Callable[[], torch.Tensor], **params: Any) -> Op:
    """An operator of tensors that are made when its turn comes."""

    def make() -> Step:
        made = [t() for t in tensors]
        return lambda: fn(*made)

    return Op(case, params, make)


def t(*shape: int, dtype: str = "bf16") -> Callable[[], torch.Tensor]:
    return lambda: rand(*shape, dtype=dtype)


def index(high: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: ints(high, *shape)


def permutations() -> Iterator[Op]:
    for shape in ((8, 1024, 12, 64), (1, 2048, 32, 64), (64, 197, 12, 64), (32, 128, 12, 64), (1, 128, 12, 64)):
        for dtype in ("bf16", "fp32"):
            yield on(
                "permute",
                lambda x: x.transpose(1, 2).contiguous(),
                t(*shape, dtype=dtype),
                kind="bshd_bhsd",
                dtype=dtype,
                shape=shape,
            )
    for shape in ((4096, 4096), (64, 512, 512), (3072, 768), (8, 64, 4096)):
        for dtype in ("bf16", "fp32"):
            yield on(
                "permute",
                lambda x: x.transpose(-1, -2).contiguous(),
                t(*shape, dtype=dtype),
                kind="last_two",
                dtype=dtype,
                shape=shape,
            )
    for shape in ((64, 64, 112, 112), (32, 256, 56, 56), (64, 1024, 14, 14), (64, 3, 224, 224), (1, 256, 56, 56)):
        for dtype in ("bf16", "fp32"):
            yield on(
                "permute",
                lambda x: x.contiguous(memory_format=LAST),
                t(*shape, dtype=dtype),
                kind="nchw_nhwc",
                dtype=dtype,
                shape=shape,
            )
    for shape in ((64, 64, 112, 112), (64, 1024, 14, 14)):
        yield on(
            "permute",
            lambda x: x.contiguous(),
            lambda s=shape: rand(*s).contiguous(memory_format=LAST),
            kind="nhwc_nchw",
            dtype="bf16",
            shape=shape,
        )
    for shape in ((64, 8, 7, 8, 7, 96), (64, 4, 7, 4, 7, 192)):
        yield on(
            "permute", lambda x: x.transpose(2, 3).contiguous(), t(*shape), kind="windows", dtype="bf16", shape=shape
        )


REDUCERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum_last": lambda x: x.sum(-1),
    "sum_first": lambda x: x.sum(0),
    "sum_all": lambda x: x.sum(),
    "mean_last": lambda x: x.mean(-1),
    "amax_last": lambda x: x.amax(-1),
    "argmax_last": lambda x: x.argmax(-1),
    "var_mean_last": lambda x: torch.var_mean(x, -1),
    "cumsum_last": lambda x: x.cumsum(-1),
}


def reductions() -> Iterator[Op]:
    for name, fn in REDUCERS.items():
        for shape, dtype in (
            ((8192, 768), "bf16"),
            ((32768, 2048), "bf16"),
            ((4096, 1024), "fp32"),
            ((64, 262144), "fp32"),
        ):
            yield on("reduce", fn, t(*shape, dtype=dtype), op=name, dtype=dtype, shape=shape)
    for shape in ((64, 256, 56, 56), (64, 1280, 7, 7), (128, 96, 56, 56)):
        yield on("reduce", lambda x: x.mean((2, 3)), t(*shape), op="mean_hw", dtype="bf16", shape=shape)
        yield on("reduce", lambda x: x.sum((0, 2, 3)), t(*shape), op="sum_nhw", dtype="bf16", shape=shape)


def softmaxes() -> Iterator[Op]:
    for columns in (49, 64, 128, 512, 1024, 2048, 4096, 8192, 32000, 50257):
        for dtype in ("bf16", "fp32"):
            shape = ((1 << 24) // columns, columns)
            yield on(
                "softmax", lambda x: x.softmax(-1), t(*shape, dtype=dtype), dtype=dtype, rows=shape[0], cols=columns
            )
    for rows, columns in ((2048, 50257), (4096, 32000), (64, 1000)):
        yield on(
            "log_softmax",
            lambda x: x.log_softmax(-1),
            t(rows, columns, dtype="fp32"),
            dtype="fp32",
            rows=rows,
            cols=columns,
        )
    for rows, columns in ((12 * 128, 128), (256, 1024), (98304, 512)):
        yield on("softmax", lambda x: x.softmax(-1), t(rows, columns), dtype="bf16", rows=rows, cols=columns)
    for rows, columns, dtype in ((98304, 512, "bf16"), (16384, 1024, "fp32")):
        params = {"dtype": dtype, "rows": rows, "cols": columns, "pass": "forward+backward"}
        yield Op("softmax", params, backward_of(lambda x: x.softmax(-1), (rows, columns), dtype))
    for rows, columns, dtype in (
        (64, 1000, "fp32"),
        (4096, 50257, "fp32"),
        (2048, 128256, "fp32"),
        (8192, 30522, "bf16"),
    ):
        yield from both(
            "cross_entropy", {"dtype": dtype, "rows": rows, "cols": columns}, entropy(rows, columns, dtype), True
        )


def entropy(rows: int, columns: int, dtype: str) -> Callable[[bool], tuple[Step, list[torch.Tensor]]]:
    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        x, y = rand(rows, columns, dtype=dtype, grad=grad), ints(columns, rows)
        return lambda: F.cross_entropy(x, y), [x]

    return make


def indexing() -> Iterator[Op]:
    for rows, dim, vocab in ((128, 768, 50257), (8192, 768, 50257), (32768, 1024, 32000), (4096, 2048, 128256)):
        yield from both(
            "embedding",
            {"dtype": "bf16", "rows": rows, "dim": dim, "vocab": vocab},
            embedding(rows, dim, vocab),
            vocab != 32000,
        )
    for n, dim in ((16384, 512), (65536, 1024)):
        p = {"dtype": "bf16", "n": n, "dim": dim}
        yield on("index_select", lambda x, i: x.index_select(0, i), t(n, dim), index(n, n), **p)
        yield on("gather", lambda x, i: x.gather(1, i), t(n, dim), index(dim, n, dim), **p)
        yield on("scatter_add", lambda x, i, y: x.scatter_add_(0, i, y), t(n, dim), index(n, n, dim), t(n, dim), **p)
        yield on("index_put", lambda x, i, y: x.index_put_((i,), y), t(n, dim), index(n, n), t(n, dim), **p)
        yield on("index_add", lambda x, i, y: x.index_add_(0, i, y), t(n, dim), index(n, n), t(n, dim), **p)
        yield on("index", lambda x, i: x[i], t(n, dim), index(n, n), **p)
        yield on("cat", lambda x, y: torch.cat([x, y], 1), t(n, dim), t(n, dim), **p)
        yield on("stack", lambda x, y: torch.stack([x, y], 1), t(n, dim), t(n, dim), **p)
        yield on("roll", lambda x: x.roll((3, 3), (0, 1)), t(n, dim), **p)
        yield on("split_contiguous", lambda x: [y.contiguous() for y in x.chunk(2, -1)], t(n, dim), **p)
        yield on("topk", lambda x: x.topk(2, -1), t(n, dim), **p, k=2)
        yield on("sort", lambda x: x.sort(-1), t(n, dim), **p)
    for n in (4096, 1 << 20):
        yield on("sort_1d", torch.sort, t(n, dtype="fp32"), dtype="fp32", n=n)
        yield on("one_hot", lambda i: F.one_hot(i, 16), index(16, n), dtype="int64", n=n, classes=16)
    yield on("topk", lambda x: x.topk(50, -1), t(16, 50257, dtype="fp32"), dtype="fp32", n=16, dim=50257, k=50)
    yield on(
        "cat_kv",
        lambda x, y: torch.cat([x, y], -2),
        t(32, 8, 1024, 64),
        t(32, 8, 1, 64),
        dtype="bf16",
        shape=(32, 8, 1024, 64),
    )
    yield on(
        "cat_kv",
        lambda x, y: torch.cat([x, y], -2),
        t(1, 8, 1024, 64),
        t(1, 8, 1, 64),
        dtype="bf16",
        shape=(1, 8, 1024, 64),
    )
    yield on(
        "cat_channels",
        lambda *x: torch.cat(x, 1),
        *[t(32, 32, 28, 28) for _ in range(12)],
        dtype="bf16",
        shape=(32, 32, 28, 28),
        parts=12,
    )


def embedding(rows: int, dim: int, vocab: int) -> Callable[[bool], tuple[Step, list[torch.Tensor]]]:
    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        w, i = rand(vocab, dim, grad=grad), ints(vocab, rows)
        return lambda: F.embedding(i, w), [w]

    return make


# -- norms ------------------------------------------------------------------------------------------------------


def row_norm(kind: str, rows: int, columns: int, dtype: str) -> Callable[[bool], tuple[Step, list[torch.Tensor]]]:
    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        x, w, b = (
            rand(rows, columns, dtype=dtype, grad=grad),
            rand(columns, dtype=dtype, grad=grad),
            rand(columns, dtype=dtype, grad=grad),
        )
        if kind == "layer_norm":
            return lambda: F.layer_norm(x, (columns,), w, b), [x, w, b]
        return lambda: F.rms_norm(x, (columns,), w), [x, w]

    return make


def image_norm(
    kind: str, shape: tuple[int, ...], dtype: str, last: bool
) -> Callable[[bool], tuple[Step, list[torch.Tensor]]]:
    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        x = rand(*shape, dtype=dtype)
        x = (x.contiguous(memory_format=LAST) if last else x).requires_grad_(grad)
        w, b = (rand(shape[1], dtype=dtype, grad=grad) for _ in range(2))
        mean, var = (
            torch.zeros(shape[1], device=device, dtype=x.dtype),
            torch.ones(shape[1], device=device, dtype=x.dtype),
        )
        if kind == "group_norm":
            return lambda: F.group_norm(x, 8, w, b), [x, w, b]
        return lambda: F.batch_norm(x, mean, var, w, b, training=kind == "batch_norm_train"), [x, w, b]

    return make


def norms() -> Iterator[Op]:
    sizes = (
        (128, 768),
        (2048, 1024),
        (8192, 768),
        (8192, 2048),
        (32768, 1024),
        (2048, 8192),
        (200704, 96),
        (50176, 192),
        (1, 4096),
    )
    for rows, columns in sizes:
        for kind in ("layer_norm", "rms_norm"):
            for dtype in ("bf16", "fp32"):
                backward = (rows, columns) in ((2048, 1024), (8192, 768), (200704, 96))
                yield from both(
                    kind,
                    {"dtype": dtype, "rows": rows, "cols": columns},
                    row_norm(kind, rows, columns, dtype),
                    backward,
                )
    for shape in (
        (64, 64, 112, 112),
        (64, 256, 56, 56),
        (64, 512, 28, 28),
        (64, 1024, 14, 14),
        (128, 96, 56, 56),
        (1, 256, 56, 56),
        (32, 32, 28, 28),
    ):
        for kind in ("batch_norm_eval", "batch_norm_train"):
            for dtype, last in (("bf16", False), ("bf16", True), ("fp32", False)):
                train = kind == "batch_norm_train"
                yield from both(
                    kind,
                    {"dtype": dtype, "shape": shape, "channels_last": last},
                    image_norm(kind, shape, dtype, last),
                    train,
                )
    for shape in ((8, 64, 256, 256), (8, 256, 64, 64), (8, 1024, 16, 16), (1, 320, 64, 64)):
        for dtype, last in (("bf16", False), ("fp32", False), ("bf16", True)):
            yield from both(
                "group_norm",
                {"dtype": dtype, "shape": shape, "channels_last": last},
                image_norm("group_norm", shape, dtype, last),
                not last,
            )


def cold_norms() -> Iterator[Op]:
    for rows, columns in ((512, 768), (2048, 1024), (8192, 768)):
        for kind in ("layer_norm", "rms_norm"):
            make = row_norm(kind, rows, columns, "bf16")
            params = {"dtype": "bf16", "rows": rows, "cols": columns, "pass": "forward"}
            yield Op(kind, params, lambda make=make: make(False)[0], cold=True)


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


def conv(
    spec: tuple[int, ...], dtype: str, last: bool, bias: bool = False
) -> tuple[Row, Callable[[bool], tuple[Step, list[torch.Tensor]]]]:
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


def picture(shape: tuple[int, ...], dtype: str, last: bool) -> Callable[[], torch.Tensor]:
    return lambda: rand(*shape, dtype=dtype).contiguous(memory_format=LAST if last else torch.contiguous_format)


def pools() -> Iterator[Op]:
    for shape in ((64, 64, 112, 112), (64, 512, 28, 28), (8, 64, 256, 256)):
        for dtype, last in (("bf16", False), ("bf16", True), ("fp32", False)):
            p = {"dtype": dtype, "shape": shape, "channels_last": last}
            image = picture(shape, dtype, last)
            yield on("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), image, **p)
            yield on("avg_pool2d", lambda x: F.avg_pool2d(x, 2, 2), image, **p)
            yield on("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1), image, **p)
    for shape, dtype in (((64, 64, 112, 112), "bf16"), ((64, 64, 112, 112), "fp32"), ((64, 512, 28, 28), "bf16")):
        params = {"dtype": dtype, "shape": shape, "pass": "forward+backward"}
        yield Op("max_pool2d", params, backward_of(lambda x: F.max_pool2d(x, 3, 2, 1), shape, dtype))
    for shape, size in (((2, 21, 64, 64), 512), ((8, 256, 32, 32), 64), ((4, 256, 65, 65), 130)):
        yield on(
            "interpolate",
            lambda x, s=size: F.interpolate(x, size=(s, s), mode="bilinear"),
            t(*shape),
            dtype="bf16",
            shape=shape,
            size=size,
        )


# -- recurrent nets, optimizers ---------------------------------------------------------------------------------


def recurrent() -> Iterator[Op]:
    for kind in ("LSTM", "GRU"):
        for b, s, h, layers, dtype in ((32, 128, 650, 2, "fp32"), (64, 256, 512, 1, "bf16"), (1, 64, 1024, 2, "fp32")):
            params = {"dtype": dtype, "b": b, "s": s, "hidden": h, "layers": layers}
            yield from both(kind.lower(), params, rnn(kind, b, s, h, layers, dtype), b > 1)


def rnn(
    kind: str, b: int, s: int, h: int, layers: int, dtype: str
) -> Callable[[bool], tuple[Step, list[torch.Tensor]]]:
    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        with torch.device(device):
            net = getattr(nn, kind)(h, h, layers, batch_first=True).to(DTYPES[dtype]).requires_grad_(grad)
        x = rand(b, s, h, dtype=dtype, grad=grad)
        return lambda: net(x)[0], [x, *net.parameters()]

    return make


def transformer_shapes(width: int, layers: int, vocab: int) -> list[tuple[int, ...]]:
    block = [
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (4 * width, width),
        (4 * width,),
        (width, 4 * width),
    ]
    return [(vocab, width), *(block + [(width,)] * 5) * layers]


def convnet_shapes(blocks: int, width: int) -> list[tuple[int, ...]]:
    block = [
        (width, 4 * width, 1, 1),
        (width,),
        (width,),
        (width, width, 3, 3),
        (width,),
        (width,),
        (4 * width, width, 1, 1),
    ]
    return (block + [(4 * width,)] * 2) * blocks


PARAMETER_SETS = {
    "transformer_124m": transformer_shapes(768, 12, 50257),
    "transformer_1b": transformer_shapes(2048, 16, 128256),
    "convnet_25m": convnet_shapes(20, 256),
    "convnet_5m": convnet_shapes(50, 64),
    "mlp_59m": [
        (4096, 1024),
        (4096,),
        (4096, 4096),
        (4096,),
        (4096, 4096),
        (4096,),
        (4096, 4096),
        (4096,),
        (1000, 4096),
        (1000,),
    ],
}


def optimizer(name: str, which: str, dtype: str, fused: bool) -> Op:
    shapes = PARAMETER_SETS[which]
    count = sum(math.prod(s) for s in shapes)
    params = {"name": name, "dtype": dtype, "tensors": len(shapes), "params": count, "which": which, "fused": fused}

    def make() -> Step:
        weights = [nn.Parameter(rand(*s, dtype=dtype)) for s in shapes]
        for w in weights:
            w.grad = torch.randn_like(w) * 1e-3
        more = {"fused": True} if fused else {"foreach": True}
        made = (
            torch.optim.AdamW(weights, **more)
            if name == "adamw"
            else torch.optim.SGD(weights, lr=1e-3, momentum=0.9, **more)
        )
        for check in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
            setattr(made, check, lambda: None)  # as eager: the step count stays on the host
        return made.step

    return Op("optimizer", params, make)


def optimizers() -> Iterator[Op]:
    for which in PARAMETER_SETS:
        for name in ("sgd", "adamw"):
            for dtype in ("bf16", "fp32") if which != "transformer_1b" else ("bf16",):
                yield optimizer(name, which, dtype, fused=False)
            yield optimizer(name, which, "fp32" if which != "transformer_1b" else "bf16", fused=True)


FAMILIES: list[Callable[[], Iterator[Op]]] = [
    gemms, cold_gemms, backward_gemms, convs, attentions, elementwise, norms, softmaxes, permutations, reductions, indexing,
    cold_elementwise, cold_norms, cold_convs, other_convs, pools, bmms, activation_backwards, optimizers, recurrent,
]  # fmt: skip


# -- measuring --------------------------------------------------------------------------------------------------


@contextmanager
def precision(dtype: str | None) -> Iterator[None]:
    """TF32 for matrix products only where the row says so: convolutions have it by default."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def quick_time(fn: Step, times: int = 3) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times * 1e-3


def buffer_sets(op: Op) -> list[Step]:
    """The call on one set of buffers, or on as many as leave the cache."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    first = op.make()
    kept = first()
    size = max(torch.cuda.memory_allocated() - before, 1)
    del kept
    if not op.cold:
        return [first]
    more = min(max(math.ceil(COLD_BYTES / size), 2), MAX_SETS) - 1
    return [first, *(op.make() for _ in range(more))]


def capture(calls: list[Step], copies: int, keep: bool) -> torch.cuda.CUDAGraph:
    """`copies` calls in one graph; with `keep` no two of them share an output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(copies):
            out = calls[i % len(calls)]()
            if keep:
                kept.append(out)
            del out
    return graph


def graph_of(op: Op) -> tuple[Step, int, Row, list[Step]]:
    """(one replay, operators in it, how it was made, the buffers to keep alive)."""
    calls = buffer_sets(op)
    for call in calls[:2]:
        call()
    each = quick_time(calls[0])
    copies = min(max(math.ceil(GRAPH_S / each), 1), MAX_COPIES)
    copies = math.ceil(copies / len(calls)) * len(calls)
    graph = capture(calls, copies, keep=op.cold)
    return graph.replay, copies, {"cold": op.cold, "sets": len(calls), "copies": copies, "graph": True}, calls


def settle(fn: Step) -> float:
    """Run until power and clock are steady; seconds per replay."""
    each = quick_time(fn)
    for seconds in (SETTLE_S, CAPPED_SETTLE_S):
        for _ in range(max(int(seconds / each), 1)):
            fn()
        state = nvml_state()
        torch.cuda.synchronize()
        if not states_of([state])["throttle"] & 4:
            break
    return quick_time(fn)


def measure(op: Op) -> tuple[Row, Any]:
    """The row so far, and what its figures will be read from."""
    with precision(op.params.get("dtype")):
        fn, copies, how, calls = graph_of(op)
        each = settle(fn)
        scope, n, state = steady(fn, each, MEASURED_S, reads=2)
    del calls
    return {"case": op.case, **op.params, **how}, (scope, n * copies, state)


class Recorder:
    """Writes a row a few operators after it was measured, when the sensor has long caught up."""

    def __init__(self, out: JsonLines, lag: int = 6) -> None:
        self._out, self._lag = out, lag
        self._waiting: deque[tuple[Row, Any]] = deque()
        self.failed: list[str] = []

    def add(self, op: Op) -> None:
        try:
            self._waiting.append(measure(op))
        except Exception:  # noqa: BLE001 - one failure must not cost the others
            self.failed.append(f"{op.case} {op.params}: {error_row('')['error'][:160]}")
            self._out.write({"case": op.case, **op.params, "cold": op.cold, **error_row("measure")})
        self.flush(self._lag)

    def flush(self, left: int = 0) -> None:
        while len(self._waiting) > left:
            row, (scope, n, state) = self._waiting.popleft()
            self._out.write({**row, **figures(scope, n, state)})


# -- what a call costs the host ---------------------------------------------------------------------------------


class Empty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def host_calls(grad: bool) -> dict[str, Step]:
    """Calls on tensors so small that the device always waits for the host."""
    with torch.device(device):
        a, b, row, image = torch.randn(64, 64), torch.randn(64, 64), torch.randn(64), torch.randn(2, 8, 8, 8)
        lin, bare, empty = nn.Linear(64, 64), nn.Linear(64, 64, bias=False), Empty()
        stack, conv, bn = (
            nn.Sequential(Empty(), Empty(), Empty(), Empty()),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        )
        ln, table, i, target = (
            nn.LayerNorm(64),
            nn.Embedding(100, 64),
            torch.randint(0, 100, (64,)),
            torch.randint(0, 64, (64,)),
        )
        q, mask = torch.randn(1, 4, 16, 16).to(torch.bfloat16), torch.randn(1, 1, 16, 16).to(torch.bfloat16)
        drop, act, frozen = nn.Dropout(0.1), nn.ReLU(inplace=True), nn.BatchNorm2d(8).eval()
    for x in (a, b, row, image, q):
        x.requires_grad_(grad)
    return {
        "add": lambda: a + b,
        "add_inplace": lambda: b.detach().add_(1.0),
        "mul_scalar": lambda: a * 0.5,
        "matmul": lambda: a @ b,
        "linear": lambda: F.linear(a, lin.weight, lin.bias),
        "linear_module": lambda: lin(a),
        "linear_module_no_bias": lambda: bare(a),
        "empty_module": lambda: empty(a),
        "sequential_of_4_empty": lambda: stack(a),
        "layer_norm": lambda: F.layer_norm(a, (64,), ln.weight, ln.bias),
        "layer_norm_module": lambda: ln(a),
        "rms_norm": lambda: F.rms_norm(a, (64,), row),
        "softmax": lambda: a.softmax(-1),
        "gelu": lambda: F.gelu(a),
        "silu": lambda: F.silu(a),
        "conv2d": lambda: F.conv2d(image, conv.weight, conv.bias, padding=1),
        "conv2d_module": lambda: conv(image),
        "batch_norm_eval": lambda: frozen(image),
        "batch_norm_train": lambda: bn(image),
        "sdpa": lambda: F.scaled_dot_product_attention(q, q, q),
        "sdpa_mask": lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        "view": lambda: a.view(32, 128),
        "transpose": lambda: a.transpose(0, 1),
        "permute": lambda: image.permute(0, 2, 3, 1),
        "unsqueeze": lambda: a.unsqueeze(0),
        "expand": lambda: row.expand(64, 64),
        "slice": lambda: a[:, :32],
        "split": lambda: a.split(32, 1),
        "chunk3": lambda: row[:63].chunk(3),
        "index": lambda: a[0],
        "index_tensor": lambda: table.weight[i],
        "transpose_contiguous": lambda: a.t().contiguous(),
        "to_dtype": lambda: a.to(torch.bfloat16),
        "to_same": lambda: a.to(torch.float32),
        "cat": lambda: torch.cat([a, b]),
        "stack": lambda: torch.stack([a, b]),
        "embedding": lambda: F.embedding(i, table.weight),
        "max_pool2d": lambda: F.max_pool2d(image, 2),
        "adaptive_avg_pool2d": lambda: F.adaptive_avg_pool2d(image, 1),
        "relu_": lambda: F.relu(a.clone(), inplace=True),
        "relu_module": lambda: act(a + 0.0),
        "dropout_train": lambda: drop(a),
        "sum": a.sum,
        "mean_last": lambda: a.mean(-1, keepdim=True),
        "pow": lambda: a.pow(2),
        "rsqrt": lambda: torch.rsqrt(a),
        "where": lambda: torch.where(a > 0, a, b),
        "arange": lambda: torch.arange(64, device=device),
        "zeros": lambda: torch.zeros(64, 64, device=device),
        "empty": lambda: torch.empty(64, 64, device=device),
        "cross_entropy": lambda: F.cross_entropy(a, target),
    }


def time_calls(fn: Step, n: int = 400) -> tuple[float, float]:
    """(host, host and device) microseconds a call: the median of five loops."""
    host, whole = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        for _ in range(n):
            fn()
        t1 = time.perf_counter()
        torch.cuda.synchronize()
        host.append((t1 - t0) / n * 1e6)
        whole.append((time.perf_counter() - t0) / n * 1e6)
    return st.median(host), st.median(whole)


def record_host_calls(out: JsonLines) -> None:
    for grad in (False, True):
        for name, fn in host_calls(grad).items():
            with torch.set_grad_enabled(grad):
                host, whole = time_calls(fn)
            out.write({"case": "host_call", "op": name, "grad": grad, "host_us": host, "with_gpu_us": whole})


def chains() -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]]:
    """Operators that can follow themselves, and the shape they keep."""
    with torch.device(device):
        lin, ln, conv, bn = nn.Linear(64, 64), nn.LayerNorm(64), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        b = torch.randn(64, 64, requires_grad=True)
        drop = nn.Dropout(0.1)
    image = (2, 8, 8, 8)
    return {
        "add": (lambda x: x + b, (64, 64)),
        "add_residual": (lambda x: x + x, (64, 64)),
        "mul": (lambda x: x * b, (64, 64)),
        "mul_scalar": (lambda x: x * 0.5, (64, 64)),
        "matmul": (lambda x: x @ b, (64, 64)),
        "linear_module": (lin, (64, 64)),
        "layer_norm_module": (ln, (64, 64)),
        "gelu": (F.gelu, (64, 64)),
        "relu": (torch.relu, (64, 64)),
        "softmax": (lambda x: x.softmax(-1), (64, 64)),
        "dropout": (drop, (64, 64)),
        "conv2d_module": (conv, image),
        "batch_norm_train_module": (bn, image),
        "sdpa_bf16": (lambda x: F.scaled_dot_product_attention(x, x, x), (1, 4, 16, 16)),
        "transpose": (lambda x: x.transpose(0, 1), (64, 64)),
        "view": (lambda x: x.view(64, 64), (64, 64)),
        "contiguous_transpose": (lambda x: x.t().contiguous(), (64, 64)),
        "rms_norm": (lambda x: F.rms_norm(x, (64,), b[0]), (64, 64)),
    }


def record_chains(out: JsonLines, length: int = 100) -> None:
    """Host microseconds per operator, forward and backward, of a chain of the same operator."""
    for name, (fn, shape) in chains().items():
        x = rand(*shape, dtype="bf16" if name.endswith("bf16") else "fp32", grad=True)
        seed, forward, backward = torch.randn_like(x), [], []
        for _ in range(9):
            torch.cuda.synchronize()
            t0 = time.perf_counter()
            y = x
            for _ in range(length):
                y = fn(y)
            t1 = time.perf_counter()
            torch.cuda.synchronize()
            t2 = time.perf_counter()
            y.backward(seed)
            t3 = time.perf_counter()
            forward.append((t1 - t0) / length * 1e6)
            backward.append((t3 - t2) / length * 1e6)
        figures_ = {"forward_us": st.median(forward), "backward_us": st.median(backward)}
        out.write({"case": "host_chain", "op": name, "length": length, **figures_})


def host_speed() -> Row:
    """How fast this host runs Python, and launches: for comparing machines and times."""

    def loop() -> None:
        for _ in range(1_000_000):
            pass

    took = []
    for _ in range(5):
        t0 = time.perf_counter()
        loop()
        took.append(time.perf_counter() - t0)
    a = torch.zeros(64, device=device)
    return {"case": "host_speed", "empty_loop_ns": st.median(took) * 1e3, "add_us": time_calls(lambda: a.add_(1.0))[0]}


# -- all of it --------------------------------------------------------------------------------------------------


def all_ops(only: list[str] | None) -> Iterator[Op]:
    for family in FAMILIES:
        yield from (op for op in family() if not only or op.case in only)


def record_ops(args: argparse.Namespace, out: JsonLines) -> None:
    begin, recorder, last = time.monotonic(), Recorder(out), ""
    for i, op in enumerate(all_ops(args.only)):
        if i < args.first:
            continue
        if time.monotonic() - begin > args.seconds:
            print(f"stopped before operator {i}: go on with --from {i}", flush=True)
            break
        if op.case != last:
            print(f"{time.monotonic() - begin:6.1f} s  [{i}] {op.case}", flush=True)
            last = op.case
        recorder.add(op)
        del op
        if torch.cuda.memory_reserved() > RESERVED_LIMIT:
            tidy()
    recorder.flush()
    print("failed:", len(recorder.failed), *recorder.failed, sep="\n  ", flush=True)


def record_all(args: argparse.Namespace) -> None:
    import pynvml

    from tessera import monitor

    pynvml.nvmlInit()
    torch.zeros(1, device="cuda")
    monitor.default()
    out = JsonLines(args.out)
    out.write({"case": "machine", **machine()})
    out.write(host_speed())
    if not args.only or "host_call" in args.only:
        record_host_calls(out)
        record_chains(out)
    record_ops(args, out)
    out.write(host_speed())
    out.close()


def dry(only: list[str] | None) -> None:
    """Run everything once on the meta device."""
    global device  # noqa: PLW0603
    device = "meta"
    seen, failed = Counter[str](), []
    for op in all_ops(only):
        seen[op.case] += 1
        try:
            op.make()()
        except Exception:  # noqa: BLE001
            failed.append(f"{op.case} {op.params}: {traceback.format_exc(limit=-1)[-300:]}")
    for name, fn in host_calls(grad=True).items():
        try:
            fn()
        except Exception as e:  # noqa: BLE001
            failed.append(f"host_call {name}: {e}")
    for fn, shape in chains().values():
        fn(torch.randn(shape, device=device))
    print(dict(seen), sum(seen.values()))
    print(len(failed), "failed", *failed, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.dry:
        dry(args.only)
    else:
        record_all(args)


if __name__ == "__main__":
    main()
