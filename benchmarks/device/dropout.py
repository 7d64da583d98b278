"""Attention with dropout: our kernel by how it is cut, beside torch's, on the GPU at hand; and that it is right.

    PYTHONPATH=src:.carry/site python benchmarks/device/dropout.py RESULTS.json [--quick]

Microseconds of our kernel with each launch (median of CUDA-graph replays), torch's forward and backward with and without
dropout beside them. Numerics: outputs and gradients against float64 with the very mask that the operator's
stand-in for CPUs computes, on odd shapes; the share dropped. Workers compile first, side by side. `--quick` runs the
numerics alone, on a CPU. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from tessera import op
from tessera.op import attention, attention_ops

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

P = 0.1
WORKERS = 8
# batch, heads, sequence, dim, causal
SHAPES = [(8, 12, 1024, 64, True), (32, 12, 512, 64, False), (4, 16, 2048, 128, True)]
FORWARD = {64: [(128, 64, 2, 4), (64, 64, 2, 4), (64, 64, 3, 4), (128, 64, 2, 8), (128, 128, 2, 8), (64, 128, 2, 4)],
           128: [(128, 64, 2, 8), (64, 64, 2, 4), (128, 128, 2, 8)]}  # fmt: skip
# batch, heads, key heads, queries, keys, dim, causal, probability
ODD = [(2, 4, 4, 128, 128, 64, True, 0.1), (1, 4, 2, 197, 131, 64, False, 0.5), (2, 2, 1, 333, 77, 128, True, 0.2),
       (1, 2, 2, 67, 1000, 80, False, 0.1), (3, 1, 1, 1, 40, 32, False, 0.9), (1, 3, 3, 515, 515, 64, True, 0.01)]  # fmt: skip


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


def ways(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Callable[[], Any]]]:
    """(launch, call) of our kernel at a shape."""
    from tessera.op.kernels import attention as kernel

    *sizes, causal = shape
    q, k, v = operands(*sizes)
    out = torch.empty_like(q)
    scale, drop = 1 / math.sqrt(sizes[3]), kernel.Dropout(P, torch.randint(attention.SEEDS, (1,), device="cuda"))
    for cut in FORWARD[sizes[3]]:
        launch = kernel.AttentionLaunch(*cut)
        yield cut, lambda how=launch: kernel.run_attention(q, k, v, None, out, scale, causal, how, drop)


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


def numerics(device: str) -> list[dict[str, Any]]:
    found = []
    for b, h, hk, sq, sk, d, causal, p in ODD:
        make = torch.Generator(device).manual_seed(1)
        q, k, v = (
            torch.randn(b, s, n, d, generator=make, device=device).bfloat16().transpose(1, 2).requires_grad_()
            for s, n in ((sq, h), (sk, hk), (sk, hk))
        )
        torch.manual_seed(7)
        out = op.flash_attention(q, k, v, causal=causal, enable_gqa=True, dropout_p=p, tile_shape=(64, 64))
        torch.manual_seed(7)
        seed = torch.randint(attention.SEEDS, (1,), device=device)
        leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
        scores = leaves[0] @ leaves[1].repeat_interleave(h // hk, 1).mT / math.sqrt(d)
        if causal:
            scores = scores.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=device).tril(), -math.inf)
        rows = torch.arange(b * h * sq, device=device)
        kept = attention_ops.dropout_factors(seed, p, rows, sk, torch.float64).reshape(scores.shape)
        true = (scores.softmax(-1) * kept) @ leaves[2].repeat_interleave(h // hk, 1)
        dout = torch.randn_like(out)
        got = (out, *torch.autograd.grad(out, (q, k, v), dout))
        wanted = (true, *torch.autograd.grad(true, leaves, dout.double()))
        true, size = true.detach(), float(true.detach().norm())
        wanted = (true, *wanted[1:])
        errors = {
            n: round(float((a.detach().double() - t).norm() / t.norm().clamp_min(1e-2 * size)), 6)
            for n, a, t in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True)
        }
        row = {
            "case": (b, h, hk, sq, sk, d, causal, p),
            "dropped": float((kept == 0).double().mean()),
            "errors": errors,
        }
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.share is not None:
        jobs = [(shape, i) for shape in SHAPES for i in range(len(FORWARD[shape[3]]))]
        mine = jobs[given.share :: WORKERS]
        for shape in SHAPES:
            for i, (_, call) in enumerate(ways(shape)):
                if (shape, i) in mine:
                    call()
        return
    found: dict[str, Any] = {"p": P, "shapes": []}
    if given.quick:
        found["numerics"] = numerics("cpu")
        write_result(given.out, found)
        return
    running = [subprocess.Popen([sys.executable, __file__, str(given.out), "--share", str(i)]) for i in range(WORKERS)]
    found |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "numerics": numerics("cuda")}
    for each in running:
        each.wait(timeout=90)
    for shape in SHAPES:
        row: dict[str, Any] = {"shape": shape, "torch_us": torchs(shape), "ours_us": {}}
        print(shape, {k: round(v, 1) for k, v in row["torch_us"].items()}, flush=True)
        for cut, call in ways(shape):
            try:
                row["ours_us"][f"forward {cut}"] = replayed_us(call)
            except Exception as exc:  # noqa: BLE001 - one launch that fails must not cost the others
                row["ours_us"][f"forward {cut}"] = None
                print(f"   forward {cut}: {type(exc).__name__}: {str(exc)[:120]}")
        print("  ", {k: round(v, 1) for k, v in row["ours_us"].items() if v}, flush=True)
        found["shapes"].append(row)
        write_result(given.out, found)


if __name__ == "__main__":
    main()
