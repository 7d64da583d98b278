"""Operators that reduce: sums, softmax and cross entropy, norms, pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from kernel_case import LAST, Op, Pass, Step, backward_of, both, ints, on, rand, t

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


def entropy(rows: int, columns: int, dtype: str) -> Pass:
    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        x, y = rand(rows, columns, dtype=dtype, grad=grad), ints(columns, rows)
        return lambda: F.cross_entropy(x, y), [x]

    return make


# -- norms ------------------------------------------------------------------------------------------------------


def row_norm(kind: str, rows: int, columns: int, dtype: str) -> Pass:
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


def image_norm(kind: str, shape: tuple[int, ...], dtype: str, last: bool) -> Pass:
    def make(grad: bool) -> tuple[Step, list[torch.Tensor]]:
        x = rand(*shape, dtype=dtype)
        x = (x.contiguous(memory_format=LAST) if last else x).requires_grad_(grad)
        w, b = (rand(shape[1], dtype=dtype, grad=grad) for _ in range(2))
        mean, var = (
            torch.zeros(shape[1], device=x.device, dtype=x.dtype),
            torch.ones(shape[1], device=x.device, dtype=x.dtype),
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


# -- pools ------------------------------------------------------------------------------------------------------


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
