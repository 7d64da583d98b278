"""Operators that touch each element once: elementwise, moving, indexing, optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from kernel_case import LAST, Op, Pass, Step, backward_of, both, index, ints, on, rand, t

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


# -- moving, indexing -------------------------------------------------------------------------------------------


def permutation(kind: str, fn: Callable[[torch.Tensor], Any], shape: tuple[int, ...], dtype: str = "bf16") -> Op:
    return on("permute", fn, t(*shape, dtype=dtype), kind=kind, dtype=dtype, shape=shape)


def permutations() -> Iterator[Op]:
    for shape in ((8, 1024, 12, 64), (1, 2048, 32, 64), (64, 197, 12, 64), (32, 128, 12, 64), (1, 128, 12, 64)):
        for dtype in ("bf16", "fp32"):
            yield permutation("bshd_bhsd", lambda x: x.transpose(1, 2).contiguous(), shape, dtype)
    for shape in ((4096, 4096), (64, 512, 512), (3072, 768), (8, 64, 4096)):
        for dtype in ("bf16", "fp32"):
            yield permutation("last_two", lambda x: x.transpose(-1, -2).contiguous(), shape, dtype)
    for shape in ((64, 64, 112, 112), (32, 256, 56, 56), (64, 1024, 14, 14), (64, 3, 224, 224), (1, 256, 56, 56)):
        for dtype in ("bf16", "fp32"):
            yield permutation("nchw_nhwc", lambda x: x.contiguous(memory_format=LAST), shape, dtype)
    for shape in ((64, 64, 112, 112), (64, 1024, 14, 14)):
        p = {"kind": "nhwc_nchw", "dtype": "bf16", "shape": shape}
        yield on("permute", lambda x: x.contiguous(), lambda s=shape: rand(*s).contiguous(memory_format=LAST), **p)
    for shape in ((64, 8, 7, 8, 7, 96), (64, 4, 7, 4, 7, 192)):
        yield permutation("windows", lambda x: x.transpose(2, 3).contiguous(), shape)


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
    for b in (32, 1):
        kept, new = t(b, 8, 1024, 64), t(b, 8, 1, 64)
        yield on("cat_kv", lambda x, y: torch.cat([x, y], -2), kept, new, dtype="bf16", shape=(b, 8, 1024, 64))
    yield on(
        "cat_channels",
        lambda *x: torch.cat(x, 1),
        *[t(32, 32, 28, 28) for _ in range(12)],
        dtype="bf16",
        shape=(32, 32, 28, 28),
        parts=12,
    )


def embedding(rows: int, dim: int, vocab: int) -> Pass:
    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        w, i = rand(vocab, dim, grad=grad), ints(vocab, rows)
        return lambda: F.embedding(i, w), [w]

    return make


# -- optimizers -------------------------------------------------------------------------------------------------


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
