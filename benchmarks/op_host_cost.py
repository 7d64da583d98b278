"""What an operator of ours costs the host beyond torch's call, on tensors so small that nothing else counts.

    python benchmarks/op_host_cost.py [RESULTS.json]

Prints microseconds of CPU time a call of torch and of ours (the least of forty rounds taken in turn, one thread, CPU
tensors): the goal is 5 us over torch on aligned shapes. The launch of a GPU kernel would be the same on both sides.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from tessera import op

ROUNDS, CALLS = 40, 500


def cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    a, b, c = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)
    ha, hb = a.to(torch.bfloat16), b.to(torch.bfloat16)
    stack = torch.randn(4, 8, 8)
    image, filters = torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3)
    return {
        "matmul fp32": (lambda: torch.matmul(a, b), lambda: op.matmul(a, b)),
        "matmul bf16": (lambda: torch.matmul(ha, hb), lambda: op.matmul(ha, hb)),
        "matmul batched": (lambda: torch.matmul(stack, stack), lambda: op.matmul(stack, stack)),
        "linear": (lambda: F.linear(a, b, c), lambda: op.linear(a, b, c)),
        "linear bf16": (lambda: F.linear(ha, hb), lambda: op.linear(ha, hb)),
        "gemm": (lambda: torch.addmm(c, a, b), lambda: op.gemm(a, b, c)),
        "conv2d": (lambda: F.conv2d(image, filters, padding=1), lambda: op.conv2d(image, filters, padding=1)),
    }


def microseconds(fn: Callable[[], Any]) -> float:
    begin = time.thread_time()  # not what other processes take
    for _ in range(CALLS):
        fn()
    return (time.thread_time() - begin) / CALLS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    calls = {}
    print(f"{'us a call':18s} {'torch':>8s} {'ours':>8s} {'more':>8s}")
    for name, (theirs, ours) in cases().items():
        theirs(), ours()
        rounds = [(microseconds(theirs), microseconds(ours)) for _ in range(ROUNDS)]
        least = [min(column) for column in zip(*rounds, strict=True)]
        print(f"{name:18s} {least[0]:8.2f} {least[1]:8.2f} {least[1] - least[0]:8.2f}")
        calls[name] = {"torch_us": least[0], "op_us": least[1], "more_us": least[1] - least[0]}
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"calls": calls, "torch": torch.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
