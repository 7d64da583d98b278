"""Random convolutions and batch norms on the GPU at hand, latency only: what the fits of `conv.py` are made from.

    PYTHONPATH=src:.carry/site python benchmarks/device/record_convs.py OUT.jsonl.gz [--seconds 170] [--seed 0]

Shapes are drawn from what convolutional networks are made of. Forward and each gradient are timed alone, as eight
copies in a CUDA graph. cuDNN chooses its kernels by heuristics, as it does in a program. No clock or mode is changed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Callable
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHANNELS = [16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 120, 128, 144, 160, 192, 208, 240, 256, 320, 384, 440, 480, 512, 576,
            672, 728, 768, 960, 1024, 1152, 1280, 1536, 2048]  # fmt: skip
SIZES = [7, 7, 8, 14, 14, 16, 17, 28, 28, 32, 35, 56, 56, 64, 65, 112, 112, 128, 149, 224]
COPIES = 8


def draw(rng: random.Random) -> dict[str, Any]:
    """One convolution that a network might have."""
    kind = rng.choices(["plain", "depthwise", "grouped", "stem", "patch", "transposed"], [56, 22, 9, 6, 4, 3])[0]
    case = {"b": rng.choice([1, 1, 2, 4, 8, 16, 32, 32, 64, 64, 128, 256]), "c": rng.choice(CHANNELS), "hw": rng.choice(SIZES),
            "k": rng.choice(CHANNELS), "r": rng.choices([1, 3, 5, 7], [45, 45, 5, 5])[0], "stride": rng.choices([1, 2], [78, 22])[0],
            "groups": 1, "dilation": 1, "transposed": kind == "transposed"}  # fmt: skip
    if kind == "depthwise":
        case.update(groups=case["c"], k=case["c"], r=rng.choices([3, 5, 7], [60, 25, 15])[0])
    elif kind == "grouped":
        width = rng.choice([4, 8, 16, 24, 32])
        groups = rng.choice([2, 4, 8, 16, 32])
        case.update(c=width * groups, k=width * groups, groups=groups, r=3)
    elif kind == "stem":
        case.update(
            c=3,
            hw=rng.choice([224, 256, 299, 128, 512]),
            k=rng.choice([16, 24, 32, 64, 96]),
            r=rng.choice([3, 3, 7]),
            stride=2,
        )
    elif kind == "patch":
        r = rng.choice([2, 4, 8, 14, 16, 32])
        case.update(
            c=3 if r > 2 else case["c"],
            hw=224 if r > 2 else case["hw"] // 2 * 2,
            k=rng.choice([96, 192, 384, 768, 1024]),
            r=r,
            stride=r,
        )
    elif kind == "transposed":
        case.update(r=rng.choice([2, 4]), stride=2, hw=min(case["hw"], 64))
    if kind == "plain" and case["r"] == 3 and rng.random() < 0.06:
        case.update(dilation=rng.choice([2, 4, 12]), stride=1)
    case["pad"] = 0 if kind == "patch" else (case["r"] - 1) // 2 * case["dilation"]
    case["dtype"] = rng.choices(["bf16", "fp16", "fp32"], [42, 18, 40])[0]
    case["channels_last"] = rng.random() < 0.3
    return case


def fits(c: dict[str, Any]) -> bool:
    side = c["hw"] * c["stride"] if c["transposed"] else -(-c["hw"] // c["stride"])
    out = c["b"] * c["k"] * side * side
    flops = 2 * out * (c["c"] // c["groups"]) * c["r"] ** 2
    inputs = c["b"] * c["c"] * c["hw"] ** 2
    return c["hw"] + 2 * c["pad"] > c["dilation"] * (c["r"] - 1) and flops < 6e11 and inputs < 2e8 and out < 2e8


def timed(fn: Callable[[], Any]) -> float:
    """Microseconds of one call among copies in a graph."""
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COPIES):
            fn()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    best = float("inf")
    for _ in range(2):
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        best = min(best, a.elapsed_time(b) * 1e3 / COPIES)
    return best


def convolution(c: dict[str, Any]) -> dict[str, float]:
    """Microseconds of the forward and of each gradient."""
    dtype = DTYPES[c["dtype"]]
    layout = torch.channels_last if c["channels_last"] else torch.contiguous_format
    x = torch.randn(c["b"], c["c"], c["hw"], c["hw"], device="cuda", dtype=dtype).to(memory_format=layout)
    first = (c["c"], c["k"] // c["groups"]) if c["transposed"] else (c["k"], c["c"] // c["groups"])
    w = (torch.randn(*first, c["r"], c["r"], device="cuda", dtype=dtype) * 0.05).to(memory_format=layout)
    tail = ([c["stride"]] * 2, [c["pad"]] * 2, [c["dilation"]] * 2, c["transposed"], [0, 0], c["groups"])
    y = torch.ops.aten.convolution(x, w, None, *tail)
    g = torch.randn_like(y)
    found = {"forward": timed(lambda: torch.ops.aten.convolution(x, w, None, *tail))}
    if c["b"] > 1 or c["hw"] > 28:
        for name, mask in (("data", [True, False, False]), ("weight", [False, True, False])):
            found[name] = timed(lambda mask=mask: torch.ops.aten.convolution_backward(g, x, w, None, *tail, mask))
    return found


def batch_norm(c: dict[str, Any]) -> dict[str, float]:
    dtype = DTYPES[c["dtype"]]
    layout = torch.channels_last if c["channels_last"] else torch.contiguous_format
    x = torch.randn(c["b"], c["c"], c["hw"], c["hw"], device="cuda", dtype=dtype).to(memory_format=layout)
    bn = torch.nn.BatchNorm2d(c["c"]).cuda().to(dtype)
    found = {}
    with torch.no_grad():
        found["eval"] = timed(lambda: bn.eval()(x))
        found["train"] = timed(lambda: bn.train()(x))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, begin, counts = random.Random(given.seed), time.perf_counter(), {"conv": 0, "bn": 0, "failed": 0}
    with gzip.open(given.out, "wt") as f:
        while time.perf_counter() - begin < given.seconds:
            case = draw(rng)
            kind = "bn" if rng.random() < 0.12 else "conv"
            if not fits(case):
                continue
            try:
                us = (batch_norm if kind == "bn" else convolution)(case)
            except RuntimeError as e:
                counts["failed"] += 1
                print("failed", case, str(e)[:120])
                torch.cuda.synchronize()
                continue
            counts[kind] += 1
            f.write(json.dumps({"case": kind, **case, "us": us}) + "\n")
    print(counts)


if __name__ == "__main__":
    main()
