"""Fit what a kernel of known work draws, for attribute/prior.py: watts above a waiting board by family of operators.

    PYTHONPATH=src python benchmarks/fit/fit_prior.py [--shared ../shared/h200]

    watts = active * (share of the kernel that is not latency) + flop * FLOPs/s + hbm or l2 * bytes/s

each relative to the constants of the chip's power model, so that they carry over to other chips. Fitted to the kernels of
`benchmarks/data/h200_ops.jsonl.gz`; those that the power limit held count as "at least the limit". Checked on kernels that
were recorded apart (`kernels.jsonl`, `kernels_more.jsonl` of the shared folder) and on loads in bursts beside other loads
(`h200_mixture_*.json.gz`: joules of a call over its duration in the mixture). Printed: factors, and the error on all three.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera.attribute.prior import HALF_S, UNITS, board_of

DATA = Path(__file__).parents[1] / "data"
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
NAMES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "fp64": "f64"}
BOARD = board_of("NVIDIA H200", np.array([100.0, 700.0]))
ROOM_W = BOARD.limit_w - BOARD.static_w
LEAST_S = 5e-6  # shorter ones spend little of any run
L2_BYTES = 40e6
SHORT = 256


class Case(NamedTuple):
    family: str
    seconds: float
    flops: float
    bytes: float
    dtype: str
    watts: float
    in_memory: bool
    name: str


def work_of_case(d: dict[str, Any]) -> tuple[str, float, float] | None:
    """Family, FLOPs and least bytes of a recorded forward kernel; None where it is several, or not of these."""
    case, each = d["case"], BYTES.get(d.get("dtype", ""))
    if each is None or d.get("pass", "forward") != "forward":
        return None
    if case in ("linear", "mm", "matmul", "bmm"):
        b, m, n, k = d.get("b", 1), d["m"], d["n"], d["k"]
        return "gemm", 2.0 * b * m * n * k, float(b * (m * k + k * n + m * n) * each)
    if case == "sdpa":
        kv = d.get("kv", d["s"])
        if d["s"] < SHORT:  # decoding, and windows of 16 or 49: other kernels
            return None
        heads = d["b"] * d["h"] * d["d"]
        done = 0.5 if d.get("causal") else 1.0
        return "attention", 4.0 * done * heads * d["s"] * kv, float(2 * heads * (d["s"] + kv) * each)
    if case in ("softmax", "log_softmax", "layer_norm", "rms_norm"):
        count = d["rows"] * d["cols"]
        return "softmax" if "softmax" in case else "norm", 0.0, 2.0 * count * each
    if case in ("permute", "reduce"):
        count = prod(d["shape"])
        return ("copy", 0.0, 2.0 * count * each) if case == "permute" else ("reduce", 0.0, float(count * each))
    op = d.get("op", case)
    if case in ("elementwise", "add", "gelu", "relu", "mul_scalar"):
        shape = (d["n"],) if "n" in d else (d["rows"], d["cols"]) if "rows" in d else (d["b"], d["c"], d["hw"], d["hw"])
        return "elementwise", 0.0, float((3 if op in ("add", "mul", "sub", "div") else 2) * prod(shape) * each)
    if case == "copy":  # of device memory, by the driver
        return "memcpy", 0.0, 2.0 * d["n"] * each
    return None


def read_cases(path: Path) -> Iterator[Case]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    for line in text.splitlines():
        d = json.loads(line)
        work = work_of_case(d) if "W" in d and "ms" in d else None
        if work is None or d["ms"] * 1e-3 < LEAST_S or d["W"] < BOARD.static_w + 10:
            continue
        in_memory = bool(d.get("cold")) or work[2] > L2_BYTES
        yield Case(work[0], d["ms"] * 1e-3, work[1], work[2], d["dtype"], d["W"], in_memory, d["case"])


MIXTURES = {
    "dev": {
        "gemm": ("gemm", 2 * 4096.0**3, 6 * 4096.0**2, "bf16"),
        "attention": ("attention", 2 * 8 * 16 * 64 * 2048.0**2, 8.0 * 8 * 16 * 64 * 2048, "bf16"),
        "copy": ("memcpy", 0.0, 2.0 * (256 << 20), "fp32"), "softmax": ("softmax", 0.0, 4.0 * 16384 * 4096, "bf16"),
    },
    "final": {
        "gemm": ("gemm", 2.0 * 8192 * 2048 * 4096, 2.0 * (8192 * 4096 + 4096 * 2048 + 8192 * 2048), "fp16"),
        "attention": ("attention", 4 * 2 * 32 * 64 * 4096.0**2, 8.0 * 2 * 32 * 64 * 4096, "bf16"),
        "copy": ("memcpy", 0.0, 2.0 * (512 << 20), "fp32"), "softmax": ("softmax", 0.0, 8.0 * 8192 * 8192, "fp32"),
        "rms_norm": ("norm", 0.0, 4.0 * 16384 * 4096, "bf16"),
    },
}  # fmt: skip


def read_bursts() -> Iterator[Case]:
    for path in sorted(DATA.glob("h200_mixture_*.json.gz")):
        with gzip.open(path, "rt") as file:
            found = json.load(file)
        loads = MIXTURES.get("final" if found["set"] == "final" else "dev", {})
        for name, burst in (found.get("bursts") or {}).items():
            if name in loads:
                family, flops, moved, dtype = loads[name]
                seconds = found["each_s"][name]
                watts = burst["joules"] / seconds
                yield Case(family, seconds, flops, moved, dtype, watts, True, f"{found['set']} {name}")


def predict_w(factors: np.ndarray[Any, Any], cases: list[Case], most_w: float) -> np.ndarray[Any, Any]:
    """Watts above a waiting board."""
    model = BOARD.model
    assert model is not None
    active, flop, hbm, l2 = np.abs(factors)
    rows = []
    for c in cases:
        rate = min(c.bytes / c.seconds, BOARD.bandwidth or np.inf) if c.in_memory else c.bytes / c.seconds
        per_byte = hbm * model.hbm_j_per_byte if c.in_memory else l2 * model.l2_j_per_byte
        per_flop = flop * model.j_per_flop[UNITS[NAMES[c.dtype]]]
        latency = c.seconds / (c.seconds + HALF_S)
        rows.append(active * model.active_w * latency + per_flop * c.flops / c.seconds + per_byte * rate)
    return np.clip(np.array(rows), 5.0, most_w)


def minimise(cost: Callable[[np.ndarray[Any, Any]], float], start: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A few numbers by coordinate search: no other package is needed."""
    found, best, steps = start.copy(), cost(start), np.full(len(start), 0.3)
    while steps.max() > 1e-3:
        improved = False
        for i in range(len(found)):
            for way in (1.0, -1.0):
                tried = found.copy()
                tried[i] = abs(tried[i] + way * steps[i])
                value = cost(tried)
                if value < best - 1e-9:
                    best, found, improved = value, tried, True
        if not improved:
            steps *= 0.6
    return found


def fit(cases: list[Case]) -> np.ndarray[Any, Any]:
    """Robust in the logarithm, drawn towards 1: a family may not say which part it is."""
    seen = np.array([c.watts for c in cases]) - BOARD.static_w

    def cost(factors: np.ndarray[Any, Any]) -> float:
        off = np.log(seen / predict_w(factors, cases, 1.02 * ROOM_W)) / 0.15
        return float(np.sum(np.sqrt(1 + off**2) - 1) + 0.2 * np.sum((factors - 1.0) ** 2))

    return minimise(cost, np.ones(4))


def describe(factors: np.ndarray[Any, Any], cases: list[Case], most_w: float) -> str:
    if not cases:
        return "none"
    off = np.log((np.array([c.watts for c in cases]) - BOARD.static_w) / predict_w(factors, cases, most_w))
    rms = float(np.sqrt(np.mean(off**2)))
    return f"{len(off):3} of median {np.median(off):+.2f}, rms {rms:.2f}, 90% within {np.quantile(abs(off), 0.9):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[3] / "shared" / "h200")
    shared = parser.parse_args().shared
    fitted = list(read_cases(DATA / "h200_ops.jsonl.gz"))
    apart = [c for name in ("kernels.jsonl", "kernels_more.jsonl") for c in read_cases(shared / name)]
    bursts = list(read_bursts())
    for family in ("gemm", "attention", "elementwise", "norm", "softmax", "copy", "reduce", "memcpy"):
        own, others, mixed = ([c for c in part if c.family == family] for part in (fitted, apart, bursts))
        if not own:
            own, others = others, []  # the driver's copies were recorded apart only
        factors = fit(own)
        print(f"{family:12} active {factors[0]:.2f}, flop {factors[1]:.2f}, hbm {factors[2]:.2f}, l2 {factors[3]:.2f}")
        print(f"    fitted   {describe(factors, own, 1.02 * ROOM_W)}")
        print(f"    apart    {describe(factors, others, 1.02 * ROOM_W)}")
        print(f"    bursts   {describe(factors, mixed, 1.5 * ROOM_W)}")


if __name__ == "__main__":
    main()
