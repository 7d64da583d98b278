"""Fit what an operator costs inside a model: data-moving families, convolutions, and the host. Writes estimate/data/.

    python benchmarks/fit_ops.py [--only stream,conv,host]

Reads the development models' traces (`benchmarks/data/h200_dev_*`, recorded by device/record_models.py), lays each
kernel beside the captured operator it belongs to (align.py), and the random convolutions of device/record_convs.py.
Needs torch, torchvision, transformers, scipy and lightgbm, none of them at run time. No model of the public set
(models_public.jsonl) nor of the held-out set is read. Errors are printed for models left out of each fit in turn.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import logging
import math
import pickle
import random
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
DATA = HERE / "data"
OUT = HERE.parent / "src/tessera/estimate/data"
sys.path.insert(0, str(HERE))
from kernel_fits import fit_trees  # noqa: E402
from tessera.estimate import conv, families, residency, stream  # noqa: E402
from tessera.estimate.kernel_time import chip  # noqa: E402
from tessera.estimate.power import Work  # noqa: E402
from tessera.estimate.residency import CACHE_SHARE  # noqa: E402
from tessera.estimate.residual import fitted  # noqa: E402
from tessera.hardware import lookup  # noqa: E402

import align  # noqa: E402

H200 = lookup("h200")
UNITS, CLOCK_HZ, BANDWIDTH = 132, 1.98e9, 4.8e12
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MATRIX = ("gemm", "conv", "attention", "rnn")


@dataclass
class Measured:
    case: str
    op: Any
    us: float
    kernels: int
    hbm_bytes: float


# ---------------------------------------------------------------- captured operators and their kernels
def captured(case: Any, replay: bool = False) -> Any:
    """One case as a graph, on the meta device."""
    import torch

    from tessera.graph.capture import capture

    model, inputs = case.factory("meta", getattr(torch, DTYPES[case.dtype]))
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs = tuple(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs)
    return capture(model, inputs, mode=case.mode, optimizer=case.optimizer, name=case.name, replay=replay)


def graphs(cases: str, cache: Path) -> dict[Any, Any]:
    """All cases captured; kept in a file because a fit is run many times."""
    if cache.exists():
        return pickle.loads(cache.read_bytes())
    import torch

    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    for name in ("nms", "qnms"):  # torchvision's wheel is built for CUDA: with a CPU torch these are missing
        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
    found: dict[Any, Any] = {}
    for name, case in align.load_cases(HERE / "device" / cases).items():
        found[name] = captured(case)
        if case.mode == "infer":
            found[name, "replay"] = captured(case, replay=True)
    cache.write_bytes(pickle.dumps(found))
    return found


def measured(all_graphs: dict[Any, Any], traces: Path) -> list[Measured]:
    """Every captured operator of every traced case with its microseconds."""
    rows, all_us = [], 0.0
    capacity = CACHE_SHARE * 62914560
    for trace in align.read(traces):
        if "kernels" not in trace:
            continue
        graph = all_graphs[trace["name"]]
        moved = {
            op.index: t for op, t in zip(graph.kernels, residency.traffic(graph, graph.kernels, capacity), strict=True)
        }
        pairs, _, _ = align.align(graph, trace)
        all_us += trace["gpu_us"]
        rows += [Measured(trace["name"], p.op, p.us, len(p.kernels), moved[p.op.index].hbm_bytes) for p in pairs]
    print(
        f"{len(rows)} captured operators paired with kernels: {sum(r.us for r in rows) / all_us:.1%} of the GPU's time"
    )
    return rows


# ---------------------------------------------------------------- single operators of the sweep
def swept(cache: Path) -> list[tuple[dict[str, Any], Any]]:
    """(row, graph) of every operator of device/record_kernels.py that was measured."""
    if cache.exists():
        return pickle.loads(cache.read_bytes())
    sys.path.insert(0, str(HERE / "device"))
    import record_kernels

    from tessera.errors import TesseraError
    from tessera.graph.capture import capture

    record_kernels.device = "meta"
    rows: dict[str, dict[str, Any]] = {}
    for r in align.read(DATA / "h200_ops.jsonl.gz"):
        if "ms" in r:
            rows[_identity(r["case"], r, bool(r.get("cold")))] = r
    found, lost = [], 0
    for op in record_kernels.all_ops(None):
        row = rows.get(_identity(op.case, op.params, op.cold))
        if row is None:
            continue
        try:
            with record_kernels.precision(op.params.get("dtype")):
                found.append((row, capture(op.make(), name=op.case, replay=True)))
        except (TesseraError, RuntimeError, TypeError, AttributeError, NotImplementedError):
            lost += 1
    print(f"{len(found)} operators of the sweep, {lost} not captured, {len(rows)} rows")
    cache.write_bytes(pickle.dumps(found))
    return found


_MEASURED = {
    "ms",
    "W",
    "J",
    "J_error",
    "sm_mhz",
    "throttle",
    "temp_c",
    "span_s",
    "iterations",
    "run",
    "sets",
    "copies",
    "graph",
    "cold",
    "case",
}


def _identity(case: str, params: dict[str, Any], cold: bool) -> str:
    return json.dumps([case, cold, {k: v for k, v in sorted(params.items()) if k not in _MEASURED}], default=str)


def single(all_swept: list[tuple[dict[str, Any], Any]]) -> list[Measured]:
    """Operators of the sweep that are one kernel and were not held back by the power limit."""
    rows = []
    for i, (r, graph) in enumerate(all_swept):
        if len(graph.kernels) != 1 or r["throttle"]:
            continue
        capacity = 1.0 if r["cold"] else CACHE_SHARE * 62914560
        moved = residency.traffic(graph, graph.kernels, capacity)[0].hbm_bytes
        us = r["ms"] * 1e3 - 0.25 * families.launches(graph.kernels[0])
        rows.append(Measured(f"swept {i % 40}", graph.kernels[0], max(us, 0.3), 1, moved))
    return rows


# ---------------------------------------------------------------- data-moving families
LOW, HIGH = np.log([0.5e-6, 0.6, 0.02, 0.01]), np.log([60e-6, 1.0, 3.0, 40.0])
START = np.log([1.2e-6, 0.85, 1.0, 6.0])
PULL = np.array([1.0, 5.0, 1.0, 1.0])  # few kernels in models come from device memory: its share is held on to
NAMES = ("start_s", "bandwidth", "cache", "elements_per_cycle")
EXPONENT, CACHE_RATE = 3.0, 22.0


@dataclass
class Point:
    s: Any
    us: float
    count: int
    case: str


def points(rows: list[Measured]) -> dict[str, list[Point]]:
    """Distinct data-moving kernels by family, with the median of their times."""
    seen: dict[Any, list[tuple[Any, Measured]]] = {}
    for r in rows:
        if r.op.kind in MATRIX or r.us <= 0:
            continue
        s = families.stream_of(r.op, r.hbm_bytes)
        seen.setdefault((s.family, s.elements, s.bytes, round(s.hbm_bytes / 1e4), s.blocks, r.case), []).append((s, r))
    found: dict[str, list[Point]] = collections.defaultdict(list)
    for (family, *_), same in seen.items():
        found[family].append(Point(same[0][0], float(np.median([r.us for _, r in same])), len(same), same[0][1].case))
    return found


def seconds(x: np.ndarray, p: list[Point]) -> np.ndarray:
    start, bandwidth, cache, rate = np.exp(x)
    e, b, h, blocks = np.array([[q.s.elements, q.s.bytes, q.s.hbm_bytes, q.s.blocks] for q in p]).T
    parts = (h / (bandwidth * BANDWIDTH), b / (CACHE_RATE * UNITS * CLOCK_HZ * cache),
             e / (rate * UNITS * CLOCK_HZ * np.clip(blocks / UNITS, 1 / UNITS, 1)))  # fmt: skip
    return start + sum(t**EXPONENT for t in parts) ** (1 / EXPONENT)


def fit_family(p: list[Point], near: np.ndarray, pull: float) -> np.ndarray:
    from scipy.optimize import least_squares

    y = np.array([q.us * 1e-6 for q in p])

    def errors(x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(seconds(x, p) / y), pull * PULL * (x - near)])

    first = np.clip(near, LOW + 1e-6, HIGH - 1e-6)
    return least_squares(errors, first, bounds=(LOW, HIGH), loss="soft_l1", f_scale=0.2).x


def fit_families(found: dict[str, list[Point]]) -> dict[str, np.ndarray]:
    """Constants of every family, from the general to the particular, each pulled towards its parent's."""
    groups: dict[str, list[Point]] = collections.defaultdict(list)
    for family, p in found.items():
        parts = family.split(".")
        for i in range(1, len(parts) + 1):
            groups[".".join(parts[:i])] += p
    fitted: dict[str, np.ndarray] = {}
    for name in sorted(groups, key=lambda n: n.count(".")):
        parent = name.rpartition(".")[0]
        if len(groups[name]) >= 3 or not parent:
            fitted[name] = fit_family(groups[name], fitted.get(parent, START), 0.15 if parent else 0.1)
    return fitted


def constants_of(fitted: dict[str, np.ndarray], family: str) -> np.ndarray:
    while family not in fitted and "." in family:
        family = family.rpartition(".")[0]
    return fitted.get(family, fitted["elementwise"])


def tree_rows(
    found: dict[str, list[Point]], fitted: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, list[Point], np.ndarray]:
    xs, ys, all_points, base = [], [], [], []
    for family, p in found.items():
        c = constants_of(fitted, family)
        for q, s in zip(p, seconds(c, p), strict=True):
            xs.append(stream.features(q.s, dict(zip(NAMES, np.exp(c), strict=True)), float(s)))
            ys.append(math.log(q.us * 1e-6 / s))
            all_points.append(q)
            base.append(s)
    return np.array(xs), np.array(ys), all_points, np.array(base)


def folds(cases: list[str], count: int, seed: int) -> dict[str, int]:
    names = sorted(set(cases))
    random.Random(seed).shuffle(names)
    return {name: i % count for i, name in enumerate(names)}


def fit_stream(rows: list[Measured]) -> None:
    found = points(rows)
    fold = folds([r.case for r in rows], 5, 0)
    left_over, weight, kinds, whose = [], [], [], []
    for k in range(5):
        part = {f: [q for q in p if fold[q.case] != k] for f, p in found.items()}
        part = {f: p for f, p in part.items() if p}
        rest = {f: [q for q in p if fold[q.case] == k] for f, p in found.items()}
        rest = {f: p for f, p in rest.items() if p}
        fitted = fit_families(part)
        x, y, p, _ = tree_rows(part, fitted)
        trees = stream.trees(fit_trees(x, y, rounds=160, rate=0.08, leaf=8, alpha=0.3))
        x, y, p, _ = tree_rows(rest, fitted)
        left_over.append(y - trees(x))
        weight.append([q.us * q.count for q in p])
        kinds += [q.s.family.partition(".")[0] for q in p]
        whose += [q.case.startswith("swept") for q in p]
    r, w = np.concatenate(left_over), np.concatenate(weight)
    kinds_array = np.array(kinds)
    print(
        f"data-moving kernels, models left out: mean {_mape(r):.1%}, by time {_by_time(r, w):.1%}, sum {_bias(r, w):.3f}"
    )
    alone = np.array(whose)
    print(
        f"  single operators of the sweep: mean {_mape(r[alone]):.1%}; in models: mean {_mape(r[~alone]):.1%}, by time {_by_time(r[~alone], w[~alone]):.1%}"
    )
    for kind in sorted({kinds[i] for i in np.flatnonzero(~alone)}):
        at = (kinds_array == kind) & ~alone
        note_level(kind, _bias(r[at], w[at]), int(at.sum()))
        print(
            f"  {kind:12s} n {at.sum():5d} mean {_mape(r[at]):6.1%} by time {_by_time(r[at], w[at]):6.1%} sum {_bias(r[at], w[at]):.3f}"
        )
    fitted = fit_families(found)
    x, y, p, _ = tree_rows(found, fitted)
    ensemble = fit_trees(x, y, rounds=160, rate=0.08, leaf=8, alpha=0.3)
    errors = {kind: float(np.quantile(np.abs(r[kinds_array == kind]), 0.9)) for kind in set(kinds)}
    families_out = {
        name: {**{n: float(f"{v:.4g}") for n, v in zip(NAMES, np.exp(c), strict=True)},
               "relative_error": round(min(0.9, errors.get(name.partition(".")[0], 0.4)), 3)}
        for name, c in sorted(fitted.items())
    }  # fmt: skip
    write("h200_stream.json", {
        "provenance": f"{sum(len(p) for p in found.values())} kernels of {len(fold)} models traced on an H200 (benchmarks/fit_ops.py)",
        "exponent": EXPONENT, "cache_bytes_per_cycle": CACHE_RATE, "families": families_out,
        "trees": ensemble,
    })  # fmt: skip


def _mape(r: np.ndarray) -> float:
    return float(np.mean(np.abs(np.exp(-r) - 1)))


def _by_time(r: np.ndarray, w: np.ndarray) -> float:
    return float(np.sum(w * np.abs(np.exp(-r) - 1)) / w.sum())


def _bias(r: np.ndarray, w: np.ndarray) -> float:
    return float(np.sum(w * np.exp(-r)) / w.sum())


# ---------------------------------------------------------------- convolutions
def drawn(path: Path) -> list[tuple[conv.Conv, float, str]]:
    """The random convolutions: (pass, microseconds, "drawn")."""
    found = []
    for r in align.read(path):
        if r["case"] != "conv":
            continue
        side = (
            (r["hw"] - 1) * r["stride"] - 2 * r["pad"] + r["r"]
            if r["transposed"]
            else (r["hw"] + 2 * r["pad"] - r["dilation"] * (r["r"] - 1) - 1) // r["stride"] + 1
        )
        x, out = (r["b"], r["c"], r["hw"], r["hw"]), (r["b"], r["k"], side, side)
        w = (
            (r["c"], r["k"] // r["groups"], r["r"], r["r"])
            if r["transposed"]
            else (r["k"], r["c"] // r["groups"], r["r"], r["r"])
        )
        precision = "tf32" if r["dtype"] == "fp32" else r["dtype"]
        for which, us in r["us"].items():
            c = conv.Conv(
                x,
                w,
                out,
                which,
                r["groups"],
                r["stride"],
                r["dilation"],
                r["transposed"],
                r["channels_last"],
                precision,
            )
            found.append((c, us - 0.25, "drawn"))
    return found


def in_models(rows: list[Measured]) -> dict[Any, tuple[list[conv.Conv], float, int, str]]:
    """Convolutions of the models: their passes, microseconds without the bias kernel, how often, in which model."""
    found: dict[Any, list[Any]] = {}
    for r in rows:
        if r.op.kind == "conv":
            p = r.op.params
            which = (
                ["forward"]
                if not p["backward"]
                else [n for n, w in zip(("data", "weight"), p["needs"], strict=False) if w]
            )
            passes = tuple(conv.conv_of(r.op, n, r.op.precision) for n in which)
            bias = p.get("bias") or (p["backward"] and p["needs"][2])
            us = r.us - (conv._bias(chip(H200), r.op).seconds * 1e6 if bias else 0.0)
            if passes and us > 0.5:
                found.setdefault((passes, r.case), []).append(us)
    return {key: (list(key[0]), float(np.median(us)), len(us), key[1]) for key, us in found.items()}


def fit_conv(rows: list[Measured]) -> None:
    train = drawn(DATA / "h200_convs.jsonl.gz")
    models = in_models(rows)
    fold = folds([m[3] for m in models.values()], 6, 1)
    floor: dict[conv.Conv, Any] = {}

    def of(c: conv.Conv) -> Any:
        return floor.setdefault(c, conv.floor(chip(H200), c))

    singles = [(m[0][0], m[1], m[3]) for m in models.values() if len(m[0]) == 1]

    def fit(rows_: list[tuple[conv.Conv, float, str]]) -> Any:
        x = np.array([conv.features(c, of(c)) for c, _, _ in rows_])
        y = np.array([math.log(max(us, 0.5) * 1e-6 / of(c).seconds) for c, us, _ in rows_])
        return fit_trees(x, y, rounds=260, rate=0.1, leaf=4, alpha=0.3)

    r, w = [], []
    for k in range(6):
        ensemble = conv.trees(fit(train + [s for s in singles if fold[s[2]] != k]))
        for passes, us, count, case in models.values():
            if fold[case] == k:
                predicted = sum(of(c).seconds * math.exp(ensemble(conv.features(c, of(c))[None])[0]) for c in passes)
                r.append(math.log(us * 1e-6 / predicted))
                w.append(us * count)
    ra, wa = np.array(r), np.array(w)
    print(
        f"convolutions in models left out: n {len(ra)} mean {_mape(ra):.1%}, by time {_by_time(ra, wa):.1%}, sum {_bias(ra, wa):.3f}"
    )
    half = float(np.quantile(np.abs(ra), 0.9))
    note_level("conv", _bias(ra, wa), len(ra))
    write("h200_conv.json", {
        "provenance": f"{len(train)} random passes and {len(singles)} of models on an H200 (benchmarks/fit_ops.py)",
        "relative_error": round(min(0.9, half), 3), "trees": fit(train + singles),
    })  # fmt: skip


# ---------------------------------------------------------------- what whole models add: levels and activity
GROUPS = ("batch_norm", "conv", "copy", "elementwise", "foreach", "gather", "norm", "pool", "random", "reduce", "rnn",
          "scatter", "softmax", "sort")  # fmt: skip
LEVELS: dict[str, float] = {}


def note_level(kind: str, bias: float, count: int) -> None:
    """Medians of logarithms fall short of sums: the factor that makes the total of left-out models right."""
    if count >= 15:
        LEVELS[kind] = round(float(np.clip(1.0 / bias, 0.85, 1.2)), 3)


def fit_models(all_graphs: dict[Any, Any], all_swept: list[tuple[dict[str, Any], Any]]) -> None:
    """How much busy SMs draw by kind of operator, from the joules of whole iterations that were not power-capped."""
    from scipy.optimize import lsq_linear

    from tessera.estimate.ops import OpModel
    from tessera.estimate.predict import estimate

    path = OUT / "h200_models.json"
    kept = json.loads(path.read_text()) if path.exists() else {"level": {}}
    plain = {"draw": {"other": 1.0}, "level": {**kept["level"], **LEVELS}, "provenance": "being fitted"}
    write("h200_models.json", {**plain, "family": {}})
    fitted.cache_clear()
    family = fit_draw_families(all_swept)
    write("h200_models.json", {**plain, "family": family})
    fitted.cache_clear()
    names = ["fixed", *GROUPS, "other"]
    model, rows, cases = OpModel(H200), [], []
    for r in align.read(DATA / "h200_dev_models.jsonl.gz"):
        if (
            "ms" not in r
            or r["throttle"]
            or r.get("capture_differs")
            or (not r.get("graph_replay") and r.get("run") != 3)
        ):
            continue
        found = estimate(all_graphs[r["name"]], H200, model, launch="graph" if r.get("graph_replay") else "eager")
        rows.append(_shares(found, r, names))
        cases.append(r["name"])
    for i, (r, graph) in enumerate(all_swept):
        if r["throttle"] or r["cold"] or r["ms"] < 0.004 or not any(op.kind in GROUPS for op in graph.kernels):
            continue
        rows.append(_shares(estimate(graph, H200, model, launch="graph"), {**r, "graph_replay": True}, names))
        cases.append(f"swept {i % 20}")
    a = np.array(rows)
    # A model weighs as much as ten single operators: models are what is asked for.
    weight = np.array([0.3 if case.startswith("swept") else 1.0 for case in cases])[:, None]

    def fit(mask: np.ndarray) -> np.ndarray:
        rest = np.vstack([(a * weight)[mask][:, 1:], 0.3 * np.eye(len(names) - 1)])
        want = np.concatenate([((1.0 - a[:, :1]) * weight)[mask][:, 0], 0.3 * np.ones(len(names) - 1)])
        return lsq_linear(rest, want, bounds=(0.2, 3.0)).x

    left, alone = [], []
    for case in sorted(set(cases)):
        mask = np.array([c != case for c in cases])
        (alone if case.startswith("swept") else left).extend(a[~mask][:, 0] + a[~mask][:, 1:] @ fit(mask) - 1.0)
    every = dict(zip(names[1:], fit(np.ones(len(cases), bool)), strict=True))
    print(
        f"joules (times known) of models left out: mean {np.mean(np.abs(left)):.1%}, bias {np.mean(left):+.1%}; of single operators left out: mean {np.mean(np.abs(alone)):.1%}"
    )
    draw = {kind: round(float(v), 3) for kind, v in every.items()}
    draw.update(gemm=1.0, attention=1.0)
    print(draw)
    write("h200_models.json", {
        "provenance": f"{len(cases)} iterations of models and single operators on an H200 (benchmarks/fit_ops.py)",
        "draw": draw, "family": family, "level": {**kept["level"], **LEVELS}, "relative_error": round(float(np.quantile(np.abs(left), 0.9)), 3),
    })  # fmt: skip


def fit_draw_families(all_swept: list[tuple[dict[str, Any], Any]]) -> dict[str, float]:
    """What busy SMs draw by family, relative to a matrix product's, from single operators; few rows count for little."""
    from tessera.estimate.ops import OpModel
    from tessera.estimate.power import PowerModel

    p, model = PowerModel.from_device(H200), OpModel(H200)
    seen: dict[str, list[float]] = collections.defaultdict(list)
    for r, graph in all_swept:
        if len(graph.kernels) != 1 or r["ms"] < 0.006:
            continue
        op = graph.kernels[0]
        if op.kind in ("gemm", "attention", "rnn"):
            continue
        capacity = 1.0 if r["cold"] else CACHE_SHARE * 62914560
        k = model.time(op, residency.traffic(graph, graph.kernels, capacity)[0].hbm_bytes)
        t = r["ms"] * 1e-3
        flops_j = sum(p.j_per_flop.get(u, 0.0) * n for u, n in Work.of(k).flops.items())
        clock = min(1.0, r["sm_mhz"] / 1980.0)  # under the power limit the SMs draw less, as power.py has it
        square = p.voltage(clock) ** 2
        rest = (
            r["J"] - p.static_w * t - p.hbm_j_per_byte * k.hbm_bytes - square * (flops_j + p.l2_j_per_byte * k.l2_bytes)
        )
        value = float(np.clip(rest / (square * clock * p.active_w * max(0.05, k.busy) * t), 0.2, 3.0))
        name = families.power_family(op)
        while name:
            seen[name].append(value)
            name = name.rpartition(".")[0]
    out: dict[str, float] = {}
    for name in sorted(seen, key=lambda n: n.count(".")):
        parent, n = out.get(name.rpartition(".")[0], 1.0), len(seen[name])
        out[name] = round(float((np.median(seen[name]) * n + parent * 2.0) / (n + 2.0)), 3)
    return out


def _shares(found: Any, r: dict[str, Any], names: list[str]) -> list[float]:
    """Predicted joules over measured ones: those that stay, and those of busy SMs by group."""
    device_s = float(found.solved.device_s.sum())
    busy_gpu = r.get("graph_replay") or r["ms"] * 1e-3 < 1.25 * device_s
    stretch = float(np.clip(r["ms"] * 1e-3 / device_s, 0.75, 1.3)) if busy_gpu else 1.0
    p, out = found.power, dict.fromkeys(names, 0.0)
    dearest = max(p.j_per_flop.values())
    out["fixed"] = p.static_w * r["ms"] * 1e-3
    for op, k in zip(found.ops, found.kernels, strict=True):
        group = "fixed" if op.kind in ("gemm", "attention") else op.kind if op.kind in GROUPS else "other"
        out[group] += p.active_w * k.busy * k.draw * k.seconds * stretch
        out["fixed"] += sum(p.j_per_flop.get(u, dearest) * n for u, n in Work.of(k).flops.items())
        out["fixed"] += p.hbm_j_per_byte * k.hbm_bytes + p.l2_j_per_byte * k.l2_bytes
    return [out[n] / r["J"] for n in names]


def fit_few_rows(rows: list[Measured]) -> None:
    """fp32 products of at most 256 rows: cuBLAS's choices there are erratic, and slower than the smooth fit in sum."""
    from tessera.estimate.ops import FEW_ROWS, OpModel, few_rows

    model, name = OpModel(H200), FEW_ROWS
    some = [r for r in rows if few_rows(r.op) == 1.0 and not r.case.startswith("swept")]
    now = float(fitted("h200_models.json")["level"].get(name, 1.0))
    predicted = sum(model.time(r.op, r.hbm_bytes).seconds * 1e6 for r in some) / now
    LEVELS[name] = round(float(np.clip(sum(r.us for r in some) / predicted, 0.85, 1.3)), 3)
    print(f"{name}: {len(some)} rows, level {LEVELS[name]}")


# ---------------------------------------------------------------- the host
# What one call costs by itself on an idle host (host_call rows of kernels_more.jsonl, times two: a loop over one
# operator runs from hot caches); the fit is pulled towards these.
HOST = {"kernel_s": 12, "gemm": 4, "conv": 8, "batch_norm": 12, "norm": 6, "attention": 15, "view_s": 3, "module_s": 7,
        "function_s": 1, "recording_s": 4, "backward_s": 18, "backward_view_s": 3, "foreach_s": 80, "foreach_tensor_s": 1,
        "iteration_s": 8}  # fmt: skip
EXTRA = ("gemm", "conv", "batch_norm", "norm", "attention")


def host_counts(graph: Any) -> list[float]:
    """How often each constant is paid in an iteration."""
    n = dict.fromkeys(HOST, 0.0)
    training = any(op.phase == "backward" for op in graph.ops)
    n["iteration_s"] = 1.0
    for op in graph.ops:
        n["module_s"] += op.host_modules
        n["function_s"] += op.host_functions
        if op.kind == "foreach":
            n["foreach_s"] += 1
            n["foreach_tensor_s"] += len(op.outputs)
        elif op.phase == "backward":
            n["backward_view_s" if op.kind == "view" else "backward_s"] += 1
        else:
            n["view_s" if op.kind == "view" else "kernel_s"] += 1
            if op.kind in EXTRA:
                n[op.kind] += 1
            n["recording_s"] += training
    return list(n.values())


def fit_host(all_graphs: dict[Any, Any]) -> None:
    """Constants from host-bound eager rows."""
    from scipy.optimize import least_squares

    busy = {t["name"]: t["gpu_us"] for t in align.read(DATA / "h200_dev_traces.jsonl.gz") if "kernels" in t}
    rows = []
    for r in align.read(DATA / "h200_dev_models.jsonl.gz"):
        # Rows after a trace in the same process are slowed by the profiler that stays attached: by one factor, fitted.
        if "ms" in r and not r.get("graph_replay"):
            rows.append((r["name"], r["ms"] * 1e3, int(r.get("run") != 3)))
    rows = [r for r in rows if r[1] > 1.25 * busy[r[0]]]
    x = np.array([host_counts(all_graphs[name]) for name, _, _ in rows])
    y, slow, near = (
        np.array([us for _, us, _ in rows]),
        np.array([s for *_, s in rows]),
        np.array(list(HOST.values()), float),
    )

    def fit(mask: np.ndarray) -> tuple[np.ndarray, float]:
        a = x[mask] * near / y[mask][:, None]

        def errors(z: np.ndarray) -> np.ndarray:
            return np.concatenate([np.exp(z[-1] * slow[mask]) * (a @ np.exp(z[:-1])) - 1.0, 0.1 * z[:-1]])

        z = least_squares(errors, np.append(np.zeros(len(near)), 0.4), loss="soft_l1", f_scale=0.2).x
        return np.exp(z[:-1]) * near, float(np.exp(z[-1]))

    left = []
    for name in sorted({n for n, _, _ in rows}):
        mask = np.array([n != name for n, _, _ in rows])
        c, factor = fit(mask)
        left += [abs(float(x[i] @ c / y[i]) - 1) for i in np.flatnonzero(~mask & (slow == 0))]
    c, slowed = fit(np.ones(len(rows), bool))
    spread = np.log(y / (x @ c))[slow == 0]
    # A host's speed is about log-normal; what errs least in percent lies below its median by the variance.
    sigma = float(np.subtract(*np.quantile(spread, [0.75, 0.25]))) / 1.349
    factor = math.exp(float(np.median(spread)) - sigma**2)
    print(
        f"host: {len(rows)} rows, clean rows of models left out {np.mean(left):.1%}; 90% of |log| {np.quantile(np.abs(spread), 0.9):.2f}; profiler x{slowed:.2f}, level {factor:.2f}"
    )
    us = dict(zip(HOST, c * factor, strict=True))
    out: dict[str, Any] = {k: float(f"{v * 1e-6:.4g}") for k, v in us.items() if k not in EXTRA}
    out["extra_s"] = {k: float(f"{us[k] * 1e-6:.4g}") for k in EXTRA}
    # Beside the scatter within a recording, hosts differ between recordings: BERT-base, batch 1, took 8.6 ms in the
    # public one and 4.4 ms in ours. Half of that distance, 30%, is added.
    out["relative_error"] = round(float(np.hypot(np.quantile(np.abs(np.exp(spread) / factor - 1), 0.9), 0.3)), 2)
    out["provenance"] = (
        f"{len(rows)} host-bound eager iterations on an Intel Xeon beside an H200, torch 2.11 (benchmarks/fit_ops.py)"
    )
    write("host.json", out)


def write(name: str, data: dict[str, Any]) -> None:
    path = OUT / name
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    print(f"wrote {path.name}, {path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="stream,conv,models,host")
    code = hashlib.sha256(b"".join(p.read_bytes() for p in sorted((HERE.parent / "src/tessera/graph").glob("*.py"))))
    key = code.hexdigest()[:12]  # captures are kept for as long as the code that made them
    parser.add_argument("--cache", type=Path, default=Path(f"/tmp/tessera_dev_graphs_{key}.pkl"))
    parser.add_argument("--swept", type=Path, default=Path(f"/tmp/tessera_swept_graphs_{key}.pkl"))
    given = parser.parse_args()
    all_graphs = graphs("dev_cases.py", given.cache)
    rows = measured(all_graphs, DATA / "h200_dev_traces.jsonl.gz")
    all_swept = swept(given.swept)
    rows += single(all_swept)
    for name in given.only.split(","):
        if name == "host":
            fit_host(all_graphs)
        elif name == "models":
            fit_few_rows(rows)
            fit_models(all_graphs, all_swept)
        else:
            {"stream": fit_stream, "conv": fit_conv}[name](rows)
            fitted.cache_clear()


if __name__ == "__main__":
    main()
