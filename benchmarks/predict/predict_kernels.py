"""Single operators measured on the H200 (shared/h200/kernels*.jsonl) beside `tessera.predict` of the same call.

    python benchmarks/predict/predict_kernels.py [--shared ../shared] [--all]

The times of these rows were not used to fit convolutions or data-moving operators (those come from traces and sweeps of
our own), so they are held out for "the rest"; the joules of four fifths of them went into the power constants
(fit_kernels.py). GEMM and attention rows are held out by kernel_accuracy.py's split, not here.
Every row is a CUDA graph of one call, replayed: predicted with launch="graph". Prints the errors of latency and energy
by family, interval coverage, the worst rows, and the datasheet roofline beside; writes results/predict_kernels.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import tessera
from predict_models import roofline_ms
from tessera.graph.capture import capture

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

BENCHMARKS = Path(__file__).parents[1]
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def t(*shape: int, dtype: str = "bf16", grad: bool = False, last: bool = False) -> torch.Tensor:
    x = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    x = x.to(memory_format=torch.channels_last) if last else x
    return x.requires_grad_(grad)


def backward(fn: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> Callable[[], Any]:
    seed = torch.empty_like(fn())
    return lambda: torch.autograd.grad(fn(), leaves, seed)


def simple(r: dict[str, Any]) -> Callable[[], Any] | None:
    """Operators on one flat tensor or on rows."""
    case, d = r["case"], r["dtype"] if r["dtype"] in DTYPES else "bf16"
    if "n" in r and "rows" not in r:
        x, y = t(r["n"], dtype=d), t(r["n"], dtype=d)
        out = torch.empty_like(x)
        ops: dict[str, Callable[[], Any]] = {
            "copy": lambda: out.copy_(x), "add": lambda: torch.add(x, y, out=out), "gelu": lambda: F.gelu(x),
            "relu": lambda: torch.relu(x), "mul_scalar": lambda: x * 2.0, "cast": x.float,
            "silu_mul": lambda: F.silu(x) * y,
            "dropout": lambda: torch.native_dropout(x, 0.1, True),
            "cat": lambda: torch.cat([x[: r["n"] // 2], y[: r["n"] // 2]]),
        }  # fmt: skip
        return ops.get(case)
    return None


def rows_of(r: dict[str, Any]) -> Callable[[], Any] | None:
    case, both = r["case"], r.get("pass") == "forward+backward"
    rows, cols = r["rows"], r.get("cols", r.get("vocab", r.get("dim", 1)))
    x = t(rows, cols, grad=both)
    w, b = t(cols, grad=both), t(cols, grad=both)
    if case == "embedding":
        table, ids = t(30522, cols), torch.empty(rows, dtype=torch.int64, device="meta")
        return lambda: F.embedding(ids, table)
    if case == "cross_entropy_fp32":
        target = torch.empty(rows, dtype=torch.int64, device="meta")
        fn: Callable[[], Any] = lambda: F.cross_entropy(x.float(), target)  # noqa: E731
        return backward(fn, x) if both else fn
    if case == "rms_norm_manual":

        def fn() -> Any:  # as in Hugging Face's LlamaRMSNorm
            wide = x.float()
            return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

        return backward(fn, x, w) if both else fn
    table_of = {
        "softmax": (lambda: torch.softmax(x, -1), (x,)), "layer_norm": (lambda: F.layer_norm(x, (cols,), w, b), (x, w, b)),
        "sum": (lambda: x.sum(-1), (x,)), "transpose_copy": (lambda: x.t().contiguous(), (x,)), "gelu": (lambda: F.gelu(x), (x,)),
    }  # fmt: skip
    if case not in table_of:
        return None
    fn, leaves = table_of[case]
    return backward(fn, *leaves) if both else fn


def picture(r: dict[str, Any]) -> Callable[[], Any] | None:
    case, d, both = r["case"], r["dtype"], r.get("pass") == "forward+backward"
    if case in ("conv2d", "conv2d_nchw"):
        last = bool(r.get("channels_last"))
        x = t(r["b"], r["c"], r["hw"], r["hw"], dtype=d, grad=both, last=last)
        w = t(r["k"], r["c"] // r["groups"], r["r"], r["r"], dtype=d, grad=both, last=last)
        fn: Callable[[], Any] = lambda: F.conv2d(x, w, None, r["stride"], (r["r"] - 1) // 2, 1, r["groups"])  # noqa: E731
        return backward(fn, x, w) if both else fn
    x = t(r["b"], r["c"], r["hw"], r["hw"], dtype=d, grad=both)
    stats = [t(r["c"], dtype=d, grad=both and i < 2) for i in range(4)]
    weight, bias, mean, var = stats
    table = {
        "batch_norm_eval": (lambda: F.batch_norm(x, mean, var, weight, bias), (x,)),
        "batch_norm_train": (lambda: F.batch_norm(x, mean, var, weight, bias, training=True), (x, weight, bias)),
        "max_pool2d": (lambda: F.max_pool2d(x, 3, 2, 1), (x,)), "relu": (lambda: torch.relu(x), (x,)),
        "adaptive_avg_pool2d": (lambda: F.adaptive_avg_pool2d(x, 1), (x,)),
    }  # fmt: skip
    if case not in table:
        return None
    fn, leaves = table[case]
    return backward(fn, *leaves) if both else fn


def matrix(r: dict[str, Any]) -> Callable[[], Any] | None:
    case, both, d = r["case"], r.get("pass") == "forward+backward", r["dtype"]
    if d == "fp8" or case not in ("matmul", "bmm", "linear", "sdpa"):
        return None
    if case == "sdpa":
        q, k, v = (t(r["b"], r["h"], r["s"], r["d"], dtype=d, grad=both) for _ in range(3))
        fn: Callable[[], Any] = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=r["causal"])  # noqa: E731
        return backward(fn, q, k, v) if both else fn
    if case == "bmm":
        a, b = t(r["b"], r["m"], r["k"], dtype=d), t(r["b"], r["k"], r["n"], dtype=d)
        return lambda: a @ b
    if case == "linear":
        x, w = t(r["m"], r["k"], dtype=d, grad=both), t(r["n"], r["k"], dtype=d, grad=both)
        fn = lambda: F.linear(x, w)  # noqa: E731
        return backward(fn, x, w) if both else fn
    a, b = t(r["m"], r["k"], dtype=d), t(r["k"], r["n"], dtype=d)
    return lambda: a @ b


def call_of(r: dict[str, Any], everything: bool) -> Callable[[], Any] | None:
    if everything and (found := matrix(r)):
        return found
    if "hw" in r:
        return picture(r)
    return rows_of(r) if "rows" in r else simple(r)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=BENCHMARKS.parent.parent / "shared")
    parser.add_argument("--all", action="store_true", help="GEMM and attention rows too")
    given = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name in ("kernels", "kernels_more"):
        for line in (given.shared / f"h200/{name}.jsonl").read_text().splitlines():
            r = json.loads(line)
            if "ms" not in r or not r.get("graph") or (call := call_of(r, given.all)) is None:
                continue
            torch.backends.cuda.matmul.allow_tf32 = r["dtype"] == "tf32"
            graph = capture(call, name=r["case"], launch="graph")
            torch.backends.cuda.matmul.allow_tf32 = False
            p = tessera.predict(graph, launch="graph", check_memory=False, calibration=None)
            found[r["case"]].append({
                "row": {k: v for k, v in r.items() if k not in ("temp_c", "span_s", "graph", "throttle")},
                "latency": p.total_latency_s * 1e3 / r["ms"] - 1, "energy": p.total_energy_j / r["J"] - 1,
                "inside": abs(p.total_latency_s * 1e3 - r["ms"]) <= p.prediction.error_s * 1e3,
                "inside_energy": abs(p.total_energy_j - r["J"]) <= p.total.error_j,
                "roofline": roofline_ms(graph) / r["ms"] - 1,
            })  # fmt: skip
    every = [x for rows in found.values() for x in rows]
    for case, rows in sorted(found.items()):
        print(line_of(case, rows))
    print(line_of("all of these", every))
    for x in sorted(every, key=lambda x: -abs(x["latency"]))[:8]:
        print(f"  worst {x['latency']:+.0%} {x['row']}")
    out = {"summary": summary(every), "by_case": {c: summary(rows) for c, rows in found.items()}}
    write_result(BENCHMARKS / "results/predict_kernels.json", out)


def mean(rows: list[dict[str, Any]], key: str) -> float:
    return sum(abs(float(x[key])) for x in rows) / len(rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "rows": len(rows),
        **{k: mean(rows, k) for k in ("latency", "energy", "inside", "inside_energy", "roofline")},
    }


def line_of(name: str, rows: list[dict[str, Any]]) -> str:
    s = summary(rows)
    return (
        f"{name:22s} n {s['rows']:3d} latency {s['latency']:6.1%} energy {s['energy']:6.1%} inside {s['inside']:5.0%}"
        f" / {s['inside_energy']:5.0%} roofline {s['roofline']:6.1%}"
    )


if __name__ == "__main__":
    main()
