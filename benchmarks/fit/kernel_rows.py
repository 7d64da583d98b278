"""Measured kernels as rows: the project's H200 recordings and the public vLLM timings, split by shape.

The recordings lie outside the repository (../shared by default); whatever is missing is named and left out. A row's
split follows from a hash of its shape group ((n, k) of a product, heads and head size of an attention), so that the same
shape is on the same side in every file and in every run: 60% fit, 20% development, 20% final.
"""

from __future__ import annotations

import csv
import functools
import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SEED = "tessera-kernels-1"
ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
OPS = ROOT / "benchmarks" / "data" / "h200_ops.jsonl.gz"
OPERATORS = ROOT / "benchmarks" / "data" / "h200_operator_traces.jsonl.gz"
SETS = ("dev", "heldout", "heldout2", "heldout3", "heldout4", "heldout5")


@dataclass(frozen=True)
class Row:
    """One measured kernel: what it computed (`args` of the model's function), how long, and the joules if trusted."""

    kind: str  # "gemm", "attention", "moe", "stream"
    device: str
    source: str  # "torch" or "vllm"
    args: dict[str, Any] = field(hash=False)
    seconds: float = 0.0
    joules: float | None = None
    clock_hz: float | None = None
    group: str = ""
    in_situ: bool = False  # a kernel's own duration within a running model, without the gap to the next one
    models: str = ""  # the set of that model
    public_w: float | None = None  # NVML's average over a second, of public timings that last long enough for it
    limit_w: float | None = None
    readings: int = 0  # of NVML in `public_w`, at least

    @property
    def is_learned(self) -> bool:
        """Whether fits take it: of later sets attention, and products of kinds that the first ones have few of.

        Fitted on the fit split, attention of the development split is then off by 9.7% instead of 13.3%. The products
        are fp32 ones, and 16-bit ones whose rows are not of whole 16 bytes. Fitted on the fit split, products of
        the development split in later sets are then off by 10.3% instead of 11.6%, in the first one by 6.6 instead of 6.9%;
        with all others as well by 10.3 and 5.8%, and vLLM's by 4.6 instead of 4.5%.
        """
        if self.models in ("", "dev", "operator") or self.kind == "attention":
            return True
        if self.kind != "gemm" or self.args["precision"] == "fp32":
            return self.kind == "gemm"
        n, rows = self.args["n"], self.args["m" if self.args["layout"] == "tn" else "k"]
        return self.args["precision"] != "tf32" and bool(n % 8 or rows % 8)

    @property
    def weight(self) -> float:
        """What a row counts in a fit: operators drawn at random less, since models are what is asked for."""
        return 0.3 if self.models == "operator" else 1.0

    @property
    def split(self) -> str:
        draw = int(hashlib.sha256(f"{SEED}:{self.kind}:{self.group}".encode()).hexdigest()[:8], 16) / 2**32
        return "fit" if draw < 0.6 else "development" if draw < 0.8 else "final"


def load(shared: Path) -> tuple[list[Row], list[str]]:
    """Every row that can be read, and the names of the files that cannot."""
    rows: list[Row] = []
    missing: list[str] = []
    for path in (shared / "h200" / "kernels.jsonl", shared / "h200" / "kernels_more.jsonl", OPS):
        if path.exists():
            rows += [row for record in _records(path) if (row := _torch(record, one_a_replay=path != OPS))]
        else:
            missing.append(str(path))
    for which in SETS:
        traces, models = (ROOT / f"benchmarks/data/h200_{which}_{what}.jsonl.gz" for what in ("traces", "models"))
        rows += [replace(row, models=which) for row in _in_situ(_records(traces), _steady(models))]
    rows += [replace(row, models="operator") for row in _in_situ(_records(OPERATORS), None)]
    found = sorted((shared / "public_kernels").glob("*.csv.gz"))
    if not found:
        missing.append(str(shared / "public_kernels"))
    return rows + [row for path in found for row in read_public(path)], missing


def read_public(path: Path) -> list[Row]:
    """The rows of one table of aiconfigurator's form; the chip is what its `device` column says."""
    rows = []
    for r in _table(path):
        row = _READERS[r["op_name"]](_catalogue_id(r["device"]), r)
        power_w, limit_w = float(r.get("power") or 0), float(r.get("power_limit") or 0)
        # An average over a second says nothing about kernels that ran for less than that with their loop.
        trusted = power_w > 0 and row.seconds >= 1e-4
        public_w = power_w if trusted else None
        readings = count_readings(power_w) if trusted else 0
        rows.append(replace(row, joules=None, public_w=public_w, limit_w=limit_w or None, readings=readings))
    return rows


MOST_READINGS = 40


def count_readings(mean_w: float) -> int:
    """The fewest readings that a mean can be of: NVML gives whole milliwatts, so the digits tell.

    The collector reads every 0.1 s while a loop runs, and each reading is the average of the second before it: few
    readings are mostly of what ran before. 1 says that all were equal, or that there was one.
    """
    whole = (n for n in range(1, MOST_READINGS) if abs(mean_w * 1e3 * n - round(mean_w * 1e3 * n)) < 1e-4 * n)
    return next(whole, MOST_READINGS)


@functools.cache
def _catalogue_id(name: str) -> str:
    from tessera.hardware import lookup

    return lookup(name.lower()).id


def _records(path: Path) -> Iterator[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return (json.loads(line) for line in text.splitlines() if line.strip())


def _table(path: Path) -> Iterator[dict[str, str]]:
    return csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines())


# The first recordings hold one kernel in a graph, h200_ops many: the same products take 0.9 us longer there (16 to 128
# x 4096 x 4096: 10.38 against 9.57, 13.59 against 12.64; fp8 8.72 against 7.82), at the watts of a waiting board.
REPLAY_S, REPLAY_W = 0.9e-6, 125.0


def _torch(r: dict[str, Any], *, one_a_replay: bool) -> Row | None:
    """A row of the project's recordings, or None for what no model here predicts."""
    if not {"ms", "J"} <= r.keys() or not r.get("graph", True):
        return None
    gap = REPLAY_S if one_a_replay else 0.0
    common: dict[str, Any] = {
        "device": "h200",
        "source": "torch",
        "seconds": r["ms"] * 1e-3 - gap,
        "joules": r["J"] - gap * REPLAY_W,
    }
    common["clock_hz"] = r["sm_mhz"] * 1e6 if "sm_mhz" in r else None
    forward = r.get("pass", "forward") == "forward"
    case = r["case"]
    if case in ("matmul", "bmm", "linear", "mm") and forward:
        return _torch_gemm(r, common)
    if case == "sdpa":
        return _torch_attention(r, forward, common)
    return _stream(r, common) if r.get("op", case) in STREAM_BYTES and forward else None


def _torch_gemm(r: dict[str, Any], common: dict[str, Any]) -> Row:
    shape = {"m": r["m"], "n": r["n"], "k": r["k"], "batch": r.get("b", 1), "precision": r["dtype"]}
    # fp8 products take the right operand contiguous along k, matmul as it lies.
    shape["layout"] = r.get("layout", "nt" if r["case"] == "linear" or r["dtype"] == "fp8" else "nn")
    if r.get("cold"):
        size = {"fp32": 4, "tf32": 4, "fp8": 1}.get(r["dtype"], 2)
        shape["hbm_bytes"] = float(size * (r["m"] * r["k"] + r["n"] * r["k"]) + max(size, 2) * r["m"] * r["n"])
    return Row(kind="gemm", args=shape, group=f"{r['n']}x{r['k']}", **common)


def _torch_attention(r: dict[str, Any], forward: bool, common: dict[str, Any]) -> Row:
    args = {
        "batch": r["b"], "heads": r["h"], "kv_heads": r.get("hk", r["h"]), "q_len": r["s"], "kv_len": r.get("kv", r["s"]),
        "head_dim": r["d"], "causal": bool(r["causal"]), "precision": r["dtype"], "with_backward": not forward,
        "mask": bool(r.get("mask", False)),
    }  # fmt: skip
    return Row(kind="attention", args=args, group=f"{r['b']}x{r['h']}x{r['s']}x{r['d']}", **common)


# Reads and writes per element of kernels whose energy is memory's and the vector units', and whose bytes are known.
STREAM_BYTES = {
    "copy": 2, "add": 3, "gelu": 2, "relu": 2, "softmax": 2, "layer_norm": 2, "sum": 1, "mul_scalar": 2, "silu_mul": 5, "cat": 2,
    "mul": 3, "add_inplace": 3, "silu": 2, "sigmoid": 2, "tanh": 2, "hardswish": 2, "gelu_tanh": 2, "exp": 2, "rsqrt": 2, "pow2": 2,
    "pow3": 2, "relu_inplace": 2,
}  # fmt: skip
_TENSORS = {"add_inplace": 2, "relu_inplace": 1}  # where fewer tensors are held than are passed over


def _stream(r: dict[str, Any], common: dict[str, Any]) -> Row | None:
    n = r.get("n") or r.get("rows", 0) * r.get("cols", 0) or r.get("b", 0) * r.get("c", 0) * r.get("hw", 0) ** 2
    size = {"fp32": 4, "bf16": 2, "fp16": 2}.get(r["dtype"])
    if not n or not size:
        return None
    name = r.get("op", r["case"])
    args = {"case": name, "elements": float(n), "bytes": float(n * size * STREAM_BYTES[name])}
    args["held_bytes"] = float(n * size * _TENSORS.get(name, STREAM_BYTES[name]))
    return Row(kind="stream", args=args, group=f"{name}x{n}", **common)


_PUBLIC_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "fp4"}


def _public_gemm(device: str, r: dict[str, str]) -> Row:
    precision = _PUBLIC_DTYPES[r["gemm_dtype"]]
    shape = {"m": int(r["m"]), "n": int(r["n"]), "k": int(r["k"]), "batch": 1, "precision": precision}
    group = f"{r['n']}x{r['k']}"
    return Row(kind="gemm", device=device, source="vllm", args=shape, seconds=float(r["latency"]) * 1e-3, group=group)


def _public_attention(device: str, r: dict[str, str], q_len: int, kv_len: int, causal: bool) -> Row:
    heads, kv_heads = int(r["num_heads"]), int(r["num_key_value_heads"])
    window = int(r.get("window_size") or 0)
    args = {
        "batch": int(r["batch_size"]), "heads": heads, "kv_heads": kv_heads or heads, "q_len": q_len, "kv_len": kv_len,
        "head_dim": int(r["head_dim"]), "causal": causal, "precision": "bf16",
        "kv_precision": "fp8" if r["kv_cache_dtype"] == "fp8" else "bf16", "window": window or None,
    }  # fmt: skip
    group = f"{heads}x{kv_heads}x{r['head_dim']}x{'decode' if q_len == 1 and not causal else 'prefill'}"
    return Row(
        kind="attention", device=device, source="vllm", args=args, seconds=float(r["latency"]) * 1e-3, group=group
    )


def _prefill(device: str, r: dict[str, str]) -> Row:
    return _public_attention(device, r, int(r["isl"]), int(r["isl"]), True)


def _decode(device: str, r: dict[str, str]) -> Row:
    return _public_attention(device, r, 1, int(r["step"]) + 1, False)


def _public_moe(device: str, r: dict[str, str]) -> Row:
    """Fused experts on one rank of `moe_ep_size`, whose experts are divided by width among `moe_tp_size`."""
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    hidden, inter, topk, experts, tp, ranks = (int(r[name]) for name in names)
    args = {
        "tokens": int(r["num_tokens"]), "hidden": hidden, "width": inter // tp, "topk": topk, "experts": experts, "ranks": ranks,
        "skew": float(r["distribution"].removeprefix("power_law_")) if r["distribution"] != "balanced" else 0.0,
        "precision": _PUBLIC_DTYPES[r["moe_dtype"]],
    }  # fmt: skip
    group = "x".join(r[name] for name in names)
    return Row(kind="moe", device=device, source="vllm", args=args, seconds=float(r["latency"]) * 1e-3, group=group)


_READERS = {
    "gemm": _public_gemm,
    "context_attention": _prefill,
    "generation_attention": _decode,
    "moe": _public_moe,
}

_DTYPES = {"c10::BFloat16": "bf16", "float": "fp32", "c10::Half": "fp16"}


def _steady(models: Path) -> set[str]:
    """The cases that kept the boost clock when they ran one after another."""
    return {r["name"] for r in _records(models) if "ms" in r and not r["graph_replay"] and r["sm_mhz"] >= 1970}


def _in_situ(traces: Iterator[dict[str, Any]], steady: set[str] | None) -> list[Row]:
    """Products and attentions inside traced programs; of models, inside those that kept the boost clock."""
    rows = []
    for trace in traces:
        if "kernels" not in trace or (steady is not None and trace["name"] not in steady):
            continue
        durations: dict[int, dict[int, list[float]]] = {}
        for op, _, name, dur_us, _, _ in trace["kernels"]:
            if op is not None and op >= 0:
                durations.setdefault(op, {}).setdefault(name, []).append(dur_us)
        for op, by_name in durations.items():
            calls = (
                min(len(v) for n, v in by_name.items() if "Memset" not in trace["names"][n]) if len(by_name) > 1 else 0
            )
            calls = calls or max(len(v) for v in by_name.values())
            seconds = sum(map(sum, by_name.values())) / calls * 1e-6
            row = _in_situ_row(trace, trace["ops"][op], seconds, [trace["names"][n] for n in by_name])
            if row:
                rows.append(row)
    return rows


def _in_situ_row(trace: dict[str, Any], op: list[Any], seconds: float, kernels: list[str]) -> Row | None:
    name, dims, types = op[0].removeprefix("aten::"), op[1], op[2]
    common: dict[str, Any] = {"device": "h200", "source": "torch", "seconds": seconds, "in_situ": True}
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        first = 0 if name in ("mm", "bmm") else 1
        a, b, precision = dims[first], dims[first + 1], _DTYPES.get(types[first])
        if precision is None or 0 in (*a, *b):
            return None
        if precision == "fp32" and any("tf32" in name or "_s1688" in name for name in kernels):  # by those names
            precision = "tf32"
        batch = a[0] if len(a) == 3 else 1
        left, right = op[3][first], op[3][first + 1]
        layout = "nt" if right[-1] != 1 else "tn" if left[-1] != 1 else "nn"
        shape: dict[str, Any] = {
            "m": a[-2],
            "n": b[-1],
            "k": a[-1],
            "batch": batch,
            "precision": precision,
            "layout": layout,
            "bias": name == "addmm",
        }
        size = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}[precision]
        if layout != "tn" and batch == 1 and trace["params"] * size > 50e6:
            shape["hbm_bytes"] = float(
                size * b[-1] * a[-1]
            )  # a model's weights do not stay in the cache, activations do
        return Row(kind="gemm", args=shape, group=f"{b[-1]}x{a[-1]}", **common)
    return _in_situ_attention(name, op, common) if name in _ATTENTION else None


# Where an operator's dimensions begin, whether heads come before positions, where it says that it is causal, and where
# its mask is.
_ATTENTION = {
    "_cudnn_attention_forward": (0, True, 10, "True", 3),
    "_efficient_attention_forward": (0, False, 9, "1", 3),
    "_cudnn_attention_backward": (1, True, 14, "True", 8),
    "_efficient_attention_backward": (1, False, 14, "1", 4),
}


def _in_situ_attention(name: str, op: list[Any], common: dict[str, Any]) -> Row | None:
    first, heads_first, where, yes, mask = _ATTENTION[name]
    dims, precision, backward = op[1], _DTYPES.get(op[2][0]), name.endswith("backward")
    q, kv = dims[first], dims[first + 1]
    if precision is None or len(q) != 4:
        return None
    if not heads_first:
        q, kv = ([x[0], x[2], x[1], x[3]] for x in (q, kv))
    (batch, heads, q_len, d), (_, kv_heads, kv_len, _) = q, kv
    args = {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len, "head_dim": d,
        "causal": op[4][where] == yes, "precision": precision, "with_backward": False, "backward": backward,
        "mask": bool(dims[mask]),
    }  # fmt: skip
    return Row(kind="attention", args=args, group=f"{batch}x{heads}x{q_len}x{d}", **common)


def kernel_of(row: Row) -> Any:
    """The `KernelTime` of a public row at full clock."""
    from tessera.estimate.attention import attention_time
    from tessera.estimate.gemm import gemm_time
    from tessera.estimate.moe import moe_time
    from tessera.hardware import lookup

    device = lookup(row.device)
    if row.kind == "moe":
        return moe_time(device, **row.args)
    return (gemm_time if row.kind == "gemm" else attention_time)(device, **row.args, source=row.source)


def predict(row: Row) -> tuple[float, float, float, float]:
    """Seconds and joules of a row under the power limit, and the 90% half-widths said for them, both relative."""
    from tessera.estimate.attention import attention_time
    from tessera.estimate.gemm import gemm_time
    from tessera.estimate.kernel_time import load_fit
    from tessera.estimate.power import DeviceWork, PowerModel
    from tessera.hardware import lookup

    device = lookup(row.device)
    if row.kind == "gemm":
        kernels = [gemm_time(device, **row.args, source=row.source)]
    else:
        args = {name: value for name, value in row.args.items() if name not in ("with_backward", "backward")}
        passes = (False, True) if row.args.get("with_backward") else (bool(row.args.get("backward")),)
        kernels = [attention_time(device, **args, backward=backward, source=row.source) for backward in passes]
    if row.in_situ:
        return sum(k.seconds for k in kernels), 0.0, max(k.relative_error for k in kernels), 0.0
    work = DeviceWork.of(kernels[0])
    for kernel in kernels[1:]:
        work += DeviceWork.of(kernel)
    switching = load_fit("h200_gemm.json")["constants"]["switching_vllm"] if row.source == "vllm" else 1.0
    found = PowerModel.from_device(device).estimate(work, switching=switching)
    return found.seconds, found.energy_j, max(kernel.relative_error for kernel in kernels), found.relative_error
