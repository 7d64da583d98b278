"""Attention with dropout by torch, on the GPU at hand: microseconds of forward and backward, with and without dropout.

    PYTHONPATH=src:.carry/site python benchmarks/device/dropout.py RESULTS.json

Medians of CUDA-graph replays. No clock, limit or mode is changed. (Results before 2026-11-16 hold a kernel of our own with
dropout too, which was removed: it was slower backward.)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

P = 0.1
# batch, heads, sequence, dim, causal
SHAPES = [(8, 12, 1024, 64, True), (32, 12, 512, 64, False), (4, 16, 2048, 128, True)]


def operands(b: int, h: int, s: int, d: int) -> list[Any]:
    """Queries, keys and values as a projection leaves them: the heads of a token side by side."""
    rows = torch.randn(b, s, 3, h, d, device="cuda", dtype=torch.bfloat16)
    return [rows[:, :, i].transpose(1, 2) for i in range(3)]


def replayed_us(fn: Callable[[], Any], calls: int = 10, times: int = 12) -> float:
    """Median microseconds of a call, in a graph of some of them."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    graph.replay()
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / calls)
    return statistics.median(found)


def torchs(shape: tuple[int, ...]) -> dict[str, float]:
    *sizes, causal = shape
    q, k, v = (x.requires_grad_() for x in operands(*sizes))
    found = {}
    for name, p in (("dropout", P), ("no dropout", 0.0)):

        def forward(p: float = p) -> Any:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal)

        dout = torch.randn_like(forward())
        found[f"forward, {name}"] = replayed_us(forward)
        both = replayed_us(lambda: torch.autograd.grad(forward(), (q, k, v), dout))  # noqa: B023
        found[f"backward, {name}"] = both - found[f"forward, {name}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"p": P, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "shapes": []}
    for shape in SHAPES:
        found["shapes"].append({"shape": shape, "torch_us": torchs(shape)})
        print(shape, {k: round(v, 1) for k, v in found["shapes"][-1]["torch_us"].items()}, flush=True)
        write_result(given.out, found)


if __name__ == "__main__":
    main()
