"""op.flash_attention, softmax, layer_norm and rms_norm against torch's best on the GPU at hand: time, joules, numerics.

    PYTHONPATH=src:.carry/site python benchmarks/device/ops_rows.py RESULTS.json [--budget-s 200] [--quick]

1. Workers side by side: bf16 numerics of every Triton kernel against float64 on odd shapes, unwritten memory being NaN;
   they also run each case once, which fills Triton's cache. 2. Every case by torch and by our kernel (attention by each
   of torch's backends). 3. The rules of `op/normalize.py` refitted, printed, and put in force.
4. The public op.* under these rules beside torch, measured anew, shape by shape. 5. Named wins. 6. Host microseconds.
Each case is replayed from a CUDA graph in steady state (record_kernels.py); joules are the driver's samples through
`tessera.monitor`. A kernel that kills the CUDA context costs its row: the script starts anew. `--quick` runs the script's
logic on a CPU with tiny shapes: its times mean nothing. What the budget leaves out is named. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from ops_restart import again, dead, replace_result
from tessera import op
from tessera.op import normalize

Row = dict[str, Any]
Step = Callable[[], Any]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
WIN = 0.98  # ours must save this much, in time and in joules, to be chosen
LEAST_ROWS = 1024  # fewer are over before the host has issued the next call: torch's launch is the cheaper one
AGAIN = 1.03  # ratios above it are measured a second time
WORKERS = 6
TOLERANCE = 1e-2
device = "cuda"

# rows, columns, dtype: the widths of GPT-2, BERT, ViT, Llama 1B to 70B, and a few odd or short ones
NORM_SHAPES = [
    (8192, 768, "bf16"), (32768, 768, "bf16"), (8192, 1024, "bf16"), (65536, 1024, "bf16"), (8192, 2048, "bf16"),
    (4096, 4096, "bf16"), (16384, 4096, "bf16"), (64, 4096, "bf16"), (8192, 5120, "bf16"), (8192, 8192, "bf16"),
    (2048, 16384, "bf16"), (25216, 384, "bf16"), (8192, 1023, "bf16"), (8192, 4096, "fp16"), (8192, 4096, "fp32"),
    (32768, 1024, "fp32"),
]  # fmt: skip
SOFTMAX_SHAPES = [
    (98304, 128, "bf16"), (116427, 197, "bf16"), (196608, 512, "bf16"), (98304, 1024, "bf16"), (65536, 2048, "bf16"),
    (4096, 4096, "bf16"), (65536, 4096, "bf16"), (64, 4096, "bf16"), (16384, 8192, "bf16"), (8192, 16384, "bf16"),
    (4096, 32768, "bf16"), (8192, 1023, "bf16"), (16384, 4096, "fp16"), (32768, 1024, "fp32"), (8192, 8192, "fp32"),
]  # fmt: skip
TRAINED = {(8192, 768, "bf16"), (65536, 1024, "bf16"), (8192, 2048, "bf16"), (16384, 4096, "bf16"), (98304, 1024, "bf16"),
           (65536, 4096, "bf16"), (8192, 4096, "fp32")}  # fmt: skip
# batch, heads, key heads, sequence, dim, causal, with the backward pass too
ATTENTION_SHAPES = [
    (8, 12, 12, 1024, 64, True, True), (32, 12, 12, 512, 64, False, True), (64, 12, 12, 128, 64, False, False),
    (1, 12, 12, 197, 64, False, False), (8, 16, 16, 577, 64, False, False), (2, 16, 16, 4096, 64, False, False),
    (4, 32, 32, 2048, 128, True, True), (8, 32, 32, 4096, 128, True, False), (8, 32, 32, 4096, 128, False, False),
    (1, 32, 32, 8192, 128, True, False), (4, 32, 8, 2048, 128, True, True), (1, 32, 8, 8192, 128, True, False),
    (16, 16, 16, 1024, 80, True, False), (2, 8, 8, 2048, 256, True, False),
]  # fmt: skip
TINY_ROWS, TINY_ATTENTION = (
    [(16, 24, "bf16"), (8, 33, "fp32")],
    [(1, 2, 2, 16, 16, True, True), (1, 4, 2, 9, 16, False, False)],
)
NUMERIC_COLS = [17, 100, 257, 768, 1023, 2048, 4096, 5000, 20000]
# batch, heads, key heads, queries, keys, dim, causal
NUMERIC_ATTENTION = [
    (2, 4, 4, 128, 128, 64, True), (1, 4, 2, 197, 197, 64, False), (2, 2, 1, 333, 77, 64, True),
    (1, 8, 2, 513, 513, 128, True), (2, 4, 4, 100, 259, 128, False), (1, 2, 2, 129, 129, 80, True),
    (1, 2, 2, 200, 200, 256, True), (1, 2, 2, 67, 67, 32, False), (1, 2, 1, 130, 70, 64, False),
    (1, 2, 2, 130, 190, 128, True), (1, 1, 1, 1, 1, 64, False), (3, 2, 2, 64, 1000, 64, False),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One comparison: `ways` make their buffers and return the call on them."""

    op: str
    params: Row
    ways: dict[str, Callable[[], Step]] = field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.op} " + " ".join(f"{k}={v}" for k, v in self.params.items())


def rand(*shape: int, dtype: str = "bf16", grad: bool = False) -> Any:
    return torch.randn(shape, device=device, dtype=DTYPES[dtype]).requires_grad_(grad)


def stepped(call: Step, leaves: list[Any], training: bool) -> Step:
    """The forward pass, or forward and backward to all leaves."""
    if not training:

        def forward() -> Any:
            with torch.no_grad():
                return call()

        return forward  # fmt: skip
    out = call()
    outs = list(out) if isinstance(out, tuple) else [out]
    seeds = [torch.randn_like(o) for o in outs]
    del out, outs

    def both() -> Any:
        out = call()
        return torch.autograd.grad(list(out) if isinstance(out, tuple) else [out], leaves, seeds)

    return both


# -- the cases ---------------------------------------------------------------------------------------------------


def row_case(name: str, rows: int, cols: int, dtype: str, training: bool) -> Case:
    def way(kind: str) -> Callable[[], Step]:
        def make() -> Step:
            x = rand(rows, cols, dtype=dtype, grad=training)
            w, b = (rand(cols, dtype=dtype, grad=training) for _ in range(2))
            calls: dict[str, dict[str, Step]] = {
                "softmax": {
                    "torch": lambda: F.softmax(x, -1),
                    "ours": lambda: normalize.softmax_rows(x),
                    "op": lambda: op.softmax(x),
                },
                "layer_norm": {
                    "torch": lambda: F.layer_norm(x, (cols,), w, b),
                    "ours": lambda: normalize.norm_rows("layer_norm", x, w, b, 1e-5, None, cols),
                    "op": lambda: op.layer_norm(x, None, w, b),
                },
                "rms_norm": {
                    "torch": lambda: F.rms_norm(x, (cols,), w, 1e-6),
                    "ours": lambda: normalize.norm_rows("rms_norm", x, w, None, 1e-6, None, cols),
                    "op": lambda: op.rms_norm(x, w, 1e-6),
                },
            }
            leaves = {"softmax": [x], "layer_norm": [x, w, b], "rms_norm": [x, w]}[name]
            return stepped(calls[name][kind], leaves, training)

        return make

    params = {"rows": rows, "cols": cols, "dtype": dtype, "training": training}
    return Case(name, params, {kind: way(kind) for kind in ("torch", "ours", "op")})


def attention_case(
    b: int, h: int, hk: int, s: int, d: int, causal: bool, training: bool, dropout_p: float = 0.0
) -> Case:
    def way(kind: str) -> Callable[[], Step]:
        def make() -> Step:
            q = rand(b, h, s, d, grad=training)
            k, v = (rand(b, hk, s, d, grad=training) for _ in range(2))
            gqa: Row = {"enable_gqa": True} if h != hk else {}
            gqa |= {"dropout_p": dropout_p} if dropout_p else {}

            def torchs() -> Any:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, **gqa)

            def forced() -> Any:
                with sdpa_kernel(BACKENDS[kind]):
                    return torchs()

            def ours() -> Any:
                return op.flash_attention(q, k, v, causal=causal, tile_shape=(128, 64) if d <= 128 else (64, 64), **gqa)

            def public() -> Any:
                return op.flash_attention(q, k, v, causal=causal, **gqa)

            call = {"torch": torchs, "ours": ours, "op": public}.get(kind, forced)
            return stepped(call, [q, k, v], training)

        return make

    params = {"b": b, "h": h, "hk": hk, "s": s, "d": d, "causal": causal, "dtype": "bf16", "training": training}
    name = f"attention, dropout {dropout_p}" if dropout_p else "flash_attention"
    return Case(name, params, {kind: way(kind) for kind in ("torch", "ours", *BACKENDS, "op")})


def llama_norm(x: Any, w: Any) -> Any:
    """RMS norm as transformers' LlamaRMSNorm writes it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def win_case(name: str, rows: int, cols: int, training: bool, dtype: str = "bf16") -> Case:
    def way(ours: bool) -> Callable[[], Step]:
        def make() -> Step:
            x, r = (rand(rows, cols, dtype=dtype, grad=training) for _ in range(2))
            w, b = (rand(cols, dtype=dtype, grad=training) for _ in range(2))
            w32 = rand(cols, dtype="fp32", grad=training)

            def separate(norm: Callable[[Any], Any]) -> Any:
                summed = x + r
                return norm(summed), summed

            calls: dict[str, tuple[Step, Step, list[Any]]] = {
                "manual rms_norm": (lambda: llama_norm(x, w), lambda: op.rms_norm(x, w, 1e-6), [x, w]),
                "rms_norm, fp32 weight": (lambda: F.rms_norm(x, (cols,), w32, 1e-6), lambda: op.rms_norm(x, w32, 1e-6), [x, w32]),
                "residual + manual rms_norm": (
                    lambda: separate(lambda s: llama_norm(s, w)), lambda: op.rms_norm(x, w, 1e-6, residual=r), [x, r, w],
                ),
                "residual + rms_norm": (
                    lambda: separate(lambda s: F.rms_norm(s, (cols,), w, 1e-6)),
                    lambda: op.rms_norm(x, w, 1e-6, residual=r), [x, r, w],
                ),
                "residual + layer_norm": (
                    lambda: separate(lambda s: F.layer_norm(s, (cols,), w, b)),
                    lambda: op.layer_norm(x, None, w, b, residual=r), [x, r, w, b],
                ),
            }  # fmt: skip
            theirs, mine, leaves = calls[name]
            return stepped(mine if ours else theirs, leaves, training)

        return make

    params = {"rows": rows, "cols": cols, "dtype": dtype, "training": training}
    return Case(name, params, {"torch": way(False), "op": way(True)})


def row_cases(quick: bool) -> Iterator[Case]:
    for name in ("softmax", "layer_norm", "rms_norm"):
        shapes = TINY_ROWS if quick else SOFTMAX_SHAPES if name == "softmax" else NORM_SHAPES
        yield from (row_case(name, *shape, training=False) for shape in shapes)
    for name in ("softmax", "layer_norm", "rms_norm"):
        shapes = TINY_ROWS if quick else SOFTMAX_SHAPES if name == "softmax" else NORM_SHAPES
        yield from (row_case(name, *shape, training=True) for shape in shapes if quick or shape in TRAINED)


def attention_cases(quick: bool) -> Iterator[Case]:
    shapes = TINY_ATTENTION if quick else ATTENTION_SHAPES
    yield from (attention_case(*shape[:-1], training=False) for shape in shapes)
    yield from (attention_case(*shape[:-1], training=True) for shape in shapes if shape[-1])


def win_cases(quick: bool) -> Iterator[Case]:
    for *shape, trained in TINY_ATTENTION[:1] if quick else [s for s in ATTENTION_SHAPES if s[-1]]:
        for training in {False, trained}:
            yield attention_case(*shape, training=training, dropout_p=0.1)
    for name in (
        "manual rms_norm",
        "residual + rms_norm",
        "residual + layer_norm",
        "residual + manual rms_norm",
        "rms_norm, fp32 weight",
    ):
        for rows, cols, training in (
            [(16, 24, True)] if quick else [(8192, 4096, False), (8192, 4096, True), (8192, 2048, False)]
        ):
            yield win_case(name, rows, cols, training)


# -- numerics ----------------------------------------------------------------------------------------------------


def relative(found: Any, true: Any) -> float:
    """Relative Frobenius error; NaN and infinity stay visible."""
    found, true = found.detach().double(), true.detach()
    return float((found - true).norm() / true.norm().clamp_min(1e-12))


def numeric_rows(cols: int, rows: int) -> Iterator[tuple[str, dict[str, float]]]:
    x, dy, r, dr = (rand(rows, cols) for _ in range(4))
    w, b = rand(cols), rand(cols)
    leaf = x.double().requires_grad_()
    true = leaf.softmax(-1)
    mine = x.clone().requires_grad_()
    y = normalize.softmax_rows(mine)
    gradients = torch.autograd.grad(y, mine, dy)[0], torch.autograd.grad(true, leaf, dy.double())[0]
    yield f"softmax {rows}x{cols}", {"y": relative(y, true), "dx": relative(*gradients)}
    for name, residual in (("layer_norm", None), ("rms_norm", None), ("layer_norm", r), ("rms_norm", r)):
        given = [x, w, b] if name == "layer_norm" else [x, w]
        mine_ = [t.clone().requires_grad_() for t in given]
        out = normalize.norm_rows(name, mine_[0], mine_[1], mine_[2] if len(mine_) > 2 else None, 1e-5, residual, cols)
        y, summed = out if residual is not None else (out, None)
        # The norm is of the stored, rounded sum: so is the truth's.
        seen = x if residual is None else x + r
        leaves = [t.double().requires_grad_() for t in (seen, *given[1:])]
        true = (
            F.layer_norm(leaves[0], (cols,), *leaves[1:])
            if name == "layer_norm"
            else F.rms_norm(leaves[0], (cols,), leaves[1], 1e-5)
        )
        theirs = list(torch.autograd.grad(true, leaves, dy.double()))
        if residual is not None:
            theirs[0] = theirs[0] + dr.double()
        found = torch.autograd.grad([y] if summed is None else [y, summed], mine_, [dy] if summed is None else [dy, dr])
        errors = {"y": relative(y, true)} | {
            f"d{n}": relative(f, t) for n, f, t in zip("xwb", found, theirs, strict=False)
        }
        if summed is not None:
            errors["sum"] = relative(summed, x.double() + r.double())
        yield f"{name} {'with residual ' if residual is not None else ''}{rows}x{cols}", errors


def numeric_attention(b: int, h: int, hk: int, sq: int, sk: int, d: int, causal: bool) -> dict[str, float]:
    q, k, v = (rand(b, n, s, d, grad=True) for n, s in ((h, sq), (hk, sk), (hk, sk)))
    out = op.flash_attention(q, k, v, causal=causal, enable_gqa=True, tile_shape=(64, 64))
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].repeat_interleave(h // hk, 1).mT / math.sqrt(d)
    if causal:
        scores = scores.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=device).tril(), -math.inf)
    true = scores.softmax(-1) @ leaves[2].repeat_interleave(h // hk, 1)
    dout = torch.randn_like(out)
    pairs = zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(true, leaves, dout.double()), strict=True
    )
    errors = {"out": relative(out, true)}
    # A gradient that is zero in truth (one key: nothing to choose) has no relative error: the scale is the output's.
    return errors | {
        f"d{n}": float((f.double() - t).detach().norm() / t.norm().clamp_min(1e-2 * float(true.norm())))
        for n, (f, t) in zip("qkv", pairs, strict=True)
    }


def numeric_cases(quick: bool) -> list[tuple[str, Callable[[], Any]]]:
    cols = NUMERIC_COLS[:2] if quick else NUMERIC_COLS
    found: list[tuple[str, Callable[[], Any]]] = []
    for i, c in enumerate(cols):
        found.append((f"rows of {c}", lambda c=c, i=i: list(numeric_rows(c, 3 + 131 * i))))
    for shape in NUMERIC_ATTENTION[:2] if quick else NUMERIC_ATTENTION:
        found.append(
            (f"flash_attention {shape}", lambda shape=shape: [(f"flash_attention {shape}", numeric_attention(*shape))])
        )
    return found


def work(share: int, shares: int, quick: bool, out: Path, until_s: float) -> None:
    """A worker: its share of the numerics, then its share of all cases once, to fill Triton's cache."""
    with out.open("w") as file:

        def write(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with NaN
        filled = bool(torch.empty(4, device=device).isnan().all())
        write({"case": f"unwritten memory is NaN (worker {share})", "errors": {"filled": 0.0 if filled else math.nan}})
        for name, run in numeric_cases(quick)[share::shares]:
            if time.time() > until_s:
                write({"case": name, "error": "no time left"})
                continue
            try:
                for case, errors in run():
                    write({"case": case, "errors": errors})
            except Exception:  # noqa: BLE001 - one failure must not cost the others
                write({"case": name, "error": traceback.format_exc(limit=-3)[-600:]})
        torch.use_deterministic_algorithms(False)
        if quick:
            return
        kept = [*row_cases(quick), *attention_cases(quick), *win_cases(quick)]
        for case in kept[share::shares]:
            if time.time() > until_s:
                return
            for kind in ("ours", "op"):
                try:
                    if kind in case.ways:
                        case.ways[kind]()()
                        torch.cuda.empty_cache()
                except Exception:  # noqa: BLE001 - workers share the memory: it is tried again when it is measured
                    write({"warm_up": f"{case.name} {kind}", "error": traceback.format_exc(limit=-3)[-600:]})


# -- measuring ---------------------------------------------------------------------------------------------------


class Bench:
    """Measures cases, keeps the file up to date, and knows when to stop."""

    def __init__(self, out: Path, budget_s: float, quick: bool) -> None:
        self._out, self._end, self._quick = out, time.monotonic() + budget_s, quick
        self._begin = time.monotonic()
        self._waiting: deque[tuple[Row, Any]] = deque()
        self.results: Row = {"quick": quick, "rows": [], "skipped": [], "numerics": []}

    def save(self) -> None:
        replace_result(self._out, self.results)

    def resume(self) -> None:
        """Take over what a process before this one measured."""
        if self._out.exists():
            self.results = json.loads(self._out.read_text())
            self.results["skipped"] = []

    def _has(self, row: Row) -> bool:
        """Whether a row was tried, here or before this process began."""
        return any(all(known.get(key) == value for key, value in row.items()) for known in self.results["rows"])

    def _restart(self, row: Row) -> None:
        """Go on in a new process where this one's context is dead; the row that killed it is not tried again."""
        why = dead()
        if why:
            if not self._has(row):
                self.results["rows"].append({**row, "error": why})
            self.save()  # rows that wait for their joules are measured again
            again(self._out, max(self.left_s(), 5.0))

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begin:6.1f} s  {text}", flush=True)

    def run(self, stage: str, case: Case, kinds: tuple[str, ...], reserve_s: float = 0.0, turn: int = 0) -> None:
        for kind in kinds:
            if kind not in case.ways:
                continue
            if self.left_s() < reserve_s + 1.0:
                self.results["skipped"].append(f"{stage}: {case.name} {kind}")
                continue
            row = {"stage": stage, "op": case.op, "way": kind, **case.params, **({"turn": turn} if turn else {})}
            if self._has(row):
                continue
            try:
                self._waiting.append((row, self._measured(case, kind)))
            except Exception:  # noqa: BLE001 - one failure must not cost the others
                self._add({**row, "error": traceback.format_exc(limit=-2)[-500:]})
                self.say(f"failed: {case.name} {kind}: {traceback.format_exc(limit=-1).strip().splitlines()[-1][:160]}")
            self._restart(row)
            self.flush(6)  # the sensor is some operators behind
            if not self._quick and torch.cuda.memory_reserved() > 40 << 30:
                torch.cuda.empty_cache()

    def _measured(self, case: Case, kind: str) -> Any:
        if self._quick:
            step = case.ways[kind]()
            step()
            begin = time.perf_counter()
            step()
            return {"ms": (time.perf_counter() - begin) * 1e3, "J": None}
        from kernel_case import Op
        from record_kernels import measure

        return measure(Op(case.op, {"dtype": case.params["dtype"]}, case.ways[kind]))[1]

    def flush(self, left: int = 0) -> None:
        while len(self._waiting) > left:
            row, found = self._waiting.popleft()
            if isinstance(found, dict):
                self._add({**row, **found})
                continue
            from record_models import figures

            try:
                self._add({**row, **figures(*found)})
            except Exception:  # noqa: BLE001 - a sensor that fails must not cost the other rows
                self._add({**row, "error": traceback.format_exc(limit=-2)[-500:]})

    def _add(self, row: Row) -> None:
        self.results["rows"].append(row)
        self.save()

    def found(self, stage: str, case_op: str | None = None) -> list[tuple[Row, dict[str, Row]]]:
        """(parameters, rows by way) of a stage, in the order measured."""
        groups: dict[str, tuple[Row, dict[str, Row]]] = {}
        for row in self.results["rows"]:
            if row["stage"] != stage or "error" in row or (case_op and row["op"] != case_op):
                continue
            keys = ("op", "rows", "cols", "b", "h", "hk", "s", "d", "causal", "dtype", "training")
            params = {k: row[k] for k in keys if k in row}
            ways = groups.setdefault(json.dumps(params), (params, {}))[1]
            ways[row["way"]] = averaged(ways[row["way"]], row) if row["way"] in ways else row
        return list(groups.values())


def averaged(one: Row, other: Row) -> Row:
    """Of two turns the mean of both figures."""
    both = {k: (one[k] + other[k]) / 2 for k in ("ms", "J") if one.get(k) and other.get(k)}
    return {**one, **both}


def ratio(ways: dict[str, Row], kind: str, figure: str, base: str = "torch") -> float:
    """NaN where one of the two is not known."""
    a, b = ways.get(kind, {}).get(figure), ways.get(base, {}).get(figure)
    return a / b if a and b else math.nan


def worst(ways: dict[str, Row], kind: str) -> float:
    """The larger of the ratios of time and joules (of the time alone where joules are not known)."""
    return max(r for r in (ratio(ways, kind, "ms"), ratio(ways, kind, "J"), 0.0) if not math.isnan(r)) or math.nan


# -- the rules, refitted -----------------------------------------------------------------------------------------


def row_rules(bench: Bench, name: str) -> list[normalize.RowRule]:
    """Widths at which ours wins for every number of rows from `least_rows` up, as intervals of what was measured."""
    rules = []
    for training in (False, True):
        for dtype, exact in DTYPES.items():
            points = [
                (p["cols"], p["rows"], worst(ways, "ours") <= WIN)
                for p, ways in bench.found("kernels", name)
                if p["training"] is training and p["dtype"] == dtype and "ours" in ways and "torch" in ways
            ]
            covered: set[int] = set()
            for least in (LEAST_ROWS, 16384):
                known = {c: [won for cols, rows, won in points if cols == c and rows >= least] for c, _, _ in points}
                widths = sorted(c for c, wins in known.items() if wins)
                for group in runs(widths, [all(known[c]) and c not in covered for c in widths]):
                    covered.update(group)
                    rules.append(normalize.RowRule(group[0], group[-1], exact, training, least))
    return rules


def runs(values: list[int], kept: list[bool]) -> Iterator[list[int]]:
    """Stretches of neighbours that are all kept."""
    group: list[int] = []
    for value, keep in zip(values, kept, strict=True):
        if keep:
            group.append(value)
        elif group:
            yield group
            group = []
    if group:
        yield group


# -- all of it ---------------------------------------------------------------------------------------------------


def numerics(bench: Bench, quick: bool) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        files = [Path(folder) / f"{i}.jsonl" for i in range(1 if quick else WORKERS)]
        until = time.time() + min(60.0, bench.left_s() / 3)
        if quick:
            work(0, 1, True, files[0], until)
        else:
            running = [
                subprocess.Popen(
                    [sys.executable, __file__, str(f), "--share", f"{i}/{WORKERS}", "--until", str(until)],
                    env=os.environ,
                )
                for i, f in enumerate(files)
            ]
            for i, each in enumerate(running):
                try:
                    code = each.wait(timeout=max(until + 25 - time.time(), 1))
                except subprocess.TimeoutExpired:
                    each.kill()
                    code = "no end"  # killed, and not waited for: the driver may hold it
                if code:
                    bench.results["numerics"].append({"case": f"worker {i}", "error": f"ended with {code}"})
        for f in files:
            lines = f.read_text().splitlines() if f.exists() else []
            rows = [json.loads(line) for line in lines if line.endswith("}")]
            bench.results["numerics"] += [row for row in rows if "warm_up" not in row]
            bench.results.setdefault("warm_up_errors", []).extend(row for row in rows if "warm_up" in row)
    bench.save()


def blind_rows(bench: Bench) -> None:
    """What a plain call gives a query that may see no key, and one without keys: zeros are what the documents say."""
    q, none = rand(1, 2, 8, 64), rand(1, 2, 0, 64)
    mask = torch.ones(8, 8, dtype=torch.bool, device=device)
    mask[3] = False
    calls: dict[str, Step] = {
        "bool mask": lambda: op.flash_attention(q, q, q, attn_mask=mask)[:, :, 3],
        "no keys": lambda: op.flash_attention(q, none, none),
        "tile, no keys": lambda: op.flash_attention(q, none, none, tile_shape=(64, 64)),
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = float(call().abs().max())
        except Exception as e:  # noqa: BLE001 - told in the table
            found[name] = f"{type(e).__name__}: {str(e)[:120]}"
    bench.results["blind_rows"] = found


def host_costs(bench: Bench, quick: bool) -> None:
    """Microseconds of the host for a call on tensors so small that the device waits for it."""
    x, w = rand(64, 64), rand(64)
    q = rand(1, 4, 16, 64)
    calls: dict[str, tuple[Step, Step]] = {
        "softmax": (lambda: F.softmax(x, -1), lambda: op.softmax(x)),
        "layer_norm": (lambda: F.layer_norm(x, (64,), w, w), lambda: op.layer_norm(x, None, w, w)),
        "rms_norm": (lambda: F.rms_norm(x, (64,), w, 1e-6), lambda: op.rms_norm(x, w, 1e-6)),
        "rms_norm by our kernel": (
            lambda: F.rms_norm(x, (64,), w, 1e-6), lambda: normalize.norm_rows("rms_norm", x, w, None, 1e-6, None, 64),
        ),
        "flash_attention": (lambda: F.scaled_dot_product_attention(q, q, q), lambda: op.flash_attention(q, q, q)),
        "flash_attention by our kernel": (
            lambda: F.scaled_dot_product_attention(q, q, q), lambda: op.flash_attention(q, q, q, tile_shape=(64, 64)),
        ),
    }  # fmt: skip
    bench.results["host"] = []
    for name, (theirs, ours) in calls.items():
        try:
            row = {"op": name, "torch_us": host_us(theirs, quick), "op_us": host_us(ours, quick)}
        except Exception:  # noqa: BLE001 - one failure must not cost the others
            row = {"op": name, "error": traceback.format_exc(limit=-2)[-400:]}
        bench.results["host"].append(row)
    bench.save()


def host_us(fn: Step, quick: bool) -> float:
    if not quick:
        from host_calls import time_calls

        return time_calls(fn)[0]
    fn()
    begin = time.perf_counter()
    for _ in range(100):
        fn()
    return (time.perf_counter() - begin) / 100 * 1e6


def changed(case: Case) -> bool:
    """Whether a refitted rule sends such a case elsewhere than torch would."""
    p = case.params
    known = normalize.RULES.get(case.op, ())
    return any(rule.covers(p["rows"], p["cols"], DTYPES[p["dtype"]], p["training"]) for rule in known)


def measure_all(bench: Bench, quick: bool) -> None:
    if not bench.results["numerics"]:
        bench.say("numerics, and every kernel once")
        numerics(bench, quick)
    bench.say("torch's kernels and ours")
    for case in row_cases(quick):
        bench.run("kernels", case, ("torch", "ours"), reserve_s=0.0 if quick else 70.0)
    for case in attention_cases(quick):
        backends = () if quick or case.params["s"] < 512 else tuple(BACKENDS)
        bench.run("kernels", case, ("torch", "ours", *backends), reserve_s=0.0 if quick else 30.0)
    bench.flush()
    normalize.RULES.update({name: tuple(row_rules(bench, name)) for name in normalize.RULES})
    bench.results["rules"] = {n: [repr(r) for r in rules] for n, rules in normalize.RULES.items()}
    bench.save()
    bench.say("named wins")
    for case in win_cases(quick):
        bench.run("wins", case, ("torch", "op"), reserve_s=0.0 if quick else 10.0)
    bench.say("op.* under the refitted rules")
    cases = [*row_cases(quick), *attention_cases(quick)]
    cases.sort(key=lambda case: not changed(case))  # where the rule is torch's own choice the kernels are the same
    for case in cases:
        bench.run("op", case, ("torch", "op"), reserve_s=3)
    bench.flush()
    # What seems slower is measured once more and averaged: most of it is torch's own kernel on both sides.
    over = {json.dumps(p) for p, ways in bench.found("op") if worst(ways, "op") > AGAIN}
    for case in cases:
        if json.dumps({"op": case.op, **case.params}) in over:
            bench.run("op", case, ("op", "torch"), reserve_s=3, turn=1)
    bench.flush()
    blind_rows(bench)
    host_costs(bench, quick)


def label(params: Row) -> str:
    if "s" in params:
        heads = f"{params['h']}" if params["h"] == params["hk"] else f"{params['h']}/{params['hk']}"
        size = f"{params['b']}x{heads}x{params['s']}x{params['d']}{' causal' if params['causal'] else ''}"
    else:
        size = f"{params['rows']}x{params['cols']}"
    return f"{size} {params['dtype']}{' fwd+bwd' if params['training'] else ''}"


def show_table(bench: Bench, stage: str, name: str, ways: tuple[str, ...]) -> None:
    found = bench.found(stage, name)
    if not found:
        return
    print(f"\n== {name} ({stage}): torch, then ratios of time / joules to it")
    for params, rows in found:
        torchs = rows.get("torch", {})
        text = "  ".join(f"{w} {ratio(rows, w, 'ms'):.3f} / {ratio(rows, w, 'J'):.3f}" for w in ways if w in rows)
        print(
            f"  {label(params):34s} {torchs.get('ms') or math.nan:9.4f} ms {torchs.get('J') or math.nan:9.5f} J   {text}"
        )
    for w in ways:
        for figure, unit in (("ms", "time"), ("J", "joules")):
            all_ = [r for _, rows in found if not math.isnan(r := ratio(rows, w, figure))]
            if all_:
                mean = math.exp(sum(map(math.log, all_)) / len(all_))
                print(
                    f"  {w:8s} {unit:7s} geometric mean {mean:.3f}, worst {max(all_):.3f}, best {min(all_):.3f}, n {len(all_)}"
                )


def show(bench: Bench) -> None:
    known = [(row["case"], name, e) for row in bench.results["numerics"] for name, e in row.get("errors", {}).items()]
    bad = [k for k in known if not k[2] <= TOLERANCE]
    failed = [row for row in bench.results["numerics"] if "error" in row]
    most = max(known, key=lambda k: math.inf if math.isnan(k[2]) else k[2], default=None)
    print(f"\n== numerics: {len(known)} results, worst {most}, over {TOLERANCE}: {len(bad)}, failed: {len(failed)}")
    for row in (*bad, *(f"{r['case']}: {r['error'].strip().splitlines()[-1]}" for r in failed)):
        print("  ", row)
    for row in bench.results.get("warm_up_errors", []):
        print(f"   first call of {row['warm_up']}: {row['error'].strip().splitlines()[-1]}")
    for name in (*normalize.RULES, "flash_attention"):
        show_table(bench, "kernels", name, ("ours", *BACKENDS))
        show_table(bench, "op", name, ("op",))
    for name in dict.fromkeys(row["op"] for row in bench.results["rows"] if row["stage"] == "wins"):
        show_table(bench, "wins", name, ("op",))
    print("\n== refitted rules (into op/normalize.py)")
    for name, rules in bench.results.get("rules", {}).items():
        print(f"  {name}:", *rules or ["none: torch's own choice stands"], sep="\n    ")
    print("\n== host microseconds a call (64 x 64): torch, op")
    for row in bench.results.get("host", []):
        print(f"  {row['op']:32s}", row.get("error") or f"{row['torch_us']:7.1f} {row['op_us']:7.1f}")
    print("\n== largest element where a query sees no key:", bench.results.get("blind_rows"))
    errors = sum("error" in row for row in bench.results["rows"])
    print(
        f"\n{len(bench.results['rows'])} rows, {errors} failed, {len(bench.results['skipped'])} skipped",
        *bench.results["skipped"],
        sep="\n  ",
    )


def main() -> None:
    global device  # noqa: PLW0603
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on with what RESULTS.json lacks")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.share:
        share, shares = map(int, args.share.split("/"))
        work(share, shares, False, args.out, args.until)
        return
    if args.quick:
        device = "cpu"
    bench = Bench(args.out, args.budget_s, args.quick)
    if args.resume:
        bench.resume()
    if not args.quick:
        import pynvml

        from record_models import machine
        from tessera import monitor

        pynvml.nvmlInit()
        torch.zeros(1, device="cuda")
        monitor.default()
        bench.results["machine"] = machine()
    try:
        measure_all(bench, args.quick)
    except Exception:  # noqa: BLE001 - what was measured is shown whatever happens
        bench.results["stopped"] = traceback.format_exc(limit=-4)
        print(bench.results["stopped"])
        bench.flush()
    show(bench)
    bench.save()


if __name__ == "__main__":
    main()
