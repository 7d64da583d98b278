"""Fit what an operator costs inside a model: data-moving families, convolutions, and the host. Writes estimate/data/.

    python benchmarks/fit/fit_ops.py [--only stream,conv,models,host,gaps,folds] [--shared ../shared]

Reads the traces of all recorded models (`benchmarks/data/h200_{dev,heldout,heldout2}_*`, recorded by
device/record_models.py; the held-out sets were looked at once before they were used), lays each kernel beside the
captured operator it belongs to (align.py), and the random convolutions of device/record_convs.py. Needs torch,
torchvision, transformers, timm, scipy and lightgbm, none of them at run time. Of the public set (models_public.jsonl)
only the host's rows are read. Errors are printed for models left out of each fit in turn; `folds` does so for whole
models, with the fits of their kernels.
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

BENCHMARKS = Path(__file__).parents[1]
DATA = BENCHMARKS / "data"
OUT = BENCHMARKS.parent / "src/tessera/estimate/data"
sys.path.insert(0, str(BENCHMARKS))
import align
from device import vision
from kernel_fits import fit_trees
from tessera.estimate import conv, data_movement, data_work
from tessera.estimate.cache import CACHE_SHARE, count_traffic
from tessera.estimate.host import extras_of
from tessera.estimate.kernel_time import Trees, chip, load_fit
from tessera.estimate.power import DeviceWork
from tessera.hardware import lookup

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
    return capture(
        model, inputs, mode=case.mode, optimizer=case.optimizer, name=case.name, launch="graph" if replay else "eager"
    )


SETS = ("dev", "heldout", "heldout2", "heldout3", "heldout4", "heldout5", "operator")
WHOLE = SETS[:-1]
"""Sets of whole models; random operators (operator_cases.py) were only traced."""


def quiet() -> None:
    """No warnings of model zoos; and what torchvision lacks with a CPU torch, as its wheel is built for CUDA."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    vision.importable()


def graphs(cache: Path) -> dict[Any, Any]:
    """All cases captured; kept in a file because a fit is run many times."""
    if cache.exists():
        return pickle.loads(cache.read_bytes())
    found: dict[Any, Any] = {}
    for which in SETS:
        for name, case in align.load_cases(BENCHMARKS / f"device/{which}_cases.py").items():
            assert name not in found, name
            found[name] = captured(case)
            if case.mode == "infer":
                found[name, "replay"] = captured(case, replay=True)
    cache.write_bytes(pickle.dumps(found))
    return found


def traces() -> Any:
    """Every trace of every set."""
    for which in SETS:
        yield from (t for t in align.read(DATA / f"h200_{which}_traces.jsonl.gz") if "kernels" in t)


def recorded() -> Any:
    """Every measured row of whole models, with the set it is of."""
    for which in WHOLE:
        yield from ({**r, "set": which} for r in align.read(DATA / f"h200_{which}_models.jsonl.gz") if "ms" in r)


def measured(all_graphs: dict[Any, Any]) -> list[Measured]:
    """Every captured operator of every traced case with its microseconds."""
    rows, all_us = [], 0.0
    capacity = CACHE_SHARE * 62914560
    eager = {r["name"]: 1e3 * r["ms"] for r in recorded() if not r.get("graph_replay")}
    for trace in traces():
        graph = all_graphs[trace["name"]]
        if trace["gpu_us"] > 1.2 * eager.get(trace["name"], math.inf):
            # Under the profiler cuDNN ran the long windows of HuBERT and wav2vec 2.0 otherwise than without it.
            print(f"{trace['name']}: left out, traced kernels take longer than its iterations")
            continue
        moved = {
            op.index: t for op, t in zip(graph.kernels, count_traffic(graph, graph.kernels, capacity), strict=True)
        }
        # The sizes of einsum's operators were drawn in the order of a set, and differ where the case is built again.
        pairs = [p for p in align.align(graph, trace)[0] if align.shows_same_sizes(p, trace)]
        all_us += trace["gpu_us"]
        rows += [Measured(trace["name"], p.op, p.us, len(p.kernels), moved[p.op.index]) for p in pairs]
    print(
        f"{len(rows)} captured operators paired with kernels: {sum(r.us for r in rows) / all_us:.1%} of the GPU's time"
    )
    return rows


# ---------------------------------------------------------------- single operators of the sweep
def swept(cache: Path) -> list[tuple[dict[str, Any], Any]]:
    """(row, graph) of every operator of device/record_kernels.py that was measured."""
    if cache.exists():
        return pickle.loads(cache.read_bytes())
    sys.path.insert(0, str(BENCHMARKS / "device"))
    import kernel_case
    import record_kernels
    from tessera.errors import TesseraError
    from tessera.graph.capture import capture

    kernel_case.device = "meta"
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
                found.append((row, capture(op.make(), name=op.case, launch="graph")))
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
        moved = count_traffic(graph, graph.kernels, capacity)[0]
        us = r["ms"] * 1e3 - 0.25 * data_work.count_launches(graph.kernels[0])
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
        s = data_work.movement_of(r.op, r.hbm_bytes)
        seen.setdefault((s.family, s.elements, s.bytes, round(s.hbm_bytes / 1e4), s.blocks, r.case), []).append((s, r))
    found: dict[str, list[Point]] = collections.defaultdict(list)
    for (family, *_), same in seen.items():
        found[family].append(Point(same[0][0], float(np.median([r.us for _, r in same])), len(same), same[0][1].case))
    return found


def seconds(x: np.ndarray, p: list[Point]) -> np.ndarray:
    start, bandwidth, cache, rate = np.exp(x)
    e, b, h, blocks, alone = np.array([[q.s.elements, q.s.bytes, q.s.hbm_bytes, q.s.blocks, q.s.alone_s] for q in p]).T
    launches = np.array([q.s.kernels if q.s.family.startswith(data_movement.ALIKE) else 1 for q in p])
    parts = (h / (bandwidth * BANDWIDTH), b / (CACHE_RATE * UNITS * CLOCK_HZ * cache),
             e / (rate * UNITS * CLOCK_HZ * np.clip(blocks / UNITS, 1 / UNITS, 1)))  # fmt: skip
    return start * launches + alone + sum(t**EXPONENT for t in parts) ** (1 / EXPONENT)


def weights(cases: list[str], drawn: float) -> np.ndarray:
    """1 for the kernels of models and `drawn` for random operators: two of three points, but models are asked for."""
    return np.where([is_drawn(case) for case in cases], drawn, 1.0)


def is_drawn(case: str) -> bool:
    """Whether a case is a program of random operators."""
    return case.startswith("operators_")


def fit_family(p: list[Point], near: np.ndarray, pull: float) -> np.ndarray:
    from scipy.optimize import least_squares

    y, w = np.array([q.us * 1e-6 for q in p]), weights([q.case for q in p], 0.15)

    def errors(x: np.ndarray) -> np.ndarray:
        return np.concatenate([w * np.log(seconds(x, p) / y), pull * PULL * (x - near)])

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
        own = found.get(name, [])
        if len(own) >= 10:  # also a family of its own, not only what others descend from
            groups[name] = own
        # Kernels that are over as soon as they begin say nothing about rates: those are their parent's.
        if not parent or (len(groups[name]) >= 3 and max(q.us for q in groups[name]) >= 4.0):
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
            xs.append(data_movement.features(q.s, dict(zip(NAMES, np.exp(c), strict=True)), float(s)))
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
    left_over, weight, kinds, cases = [], [], [], []
    for k in range(5):
        part = {f: [q for q in p if fold[q.case] != k] for f, p in found.items()}
        part = {f: p for f, p in part.items() if p}
        rest = {f: [q for q in p if fold[q.case] == k] for f, p in found.items()}
        rest = {f: p for f, p in rest.items() if p}
        fitted = fit_families(part)
        trees = Trees.of(grow_trees(part, fitted))
        x, y, p, _ = tree_rows(rest, fitted)
        left_over.append(y - trees(x))
        weight.append([q.us * q.count for q in p])
        kinds += [q.s.family.partition(".")[0] for q in p]
        cases += [q.case for q in p]
    r, w = np.concatenate(left_over), np.concatenate(weight)
    kinds_array = np.array(kinds)
    print(
        f"data-moving kernels, models left out: mean {_mape(r):.1%}, by time {_by_time(r, w):.1%}, sum {_bias(r, w):.3f}"
    )
    owners = np.array(cases)
    alone = np.array([case.startswith("swept") for case in cases])
    print(
        f"  single operators of the sweep: mean {_mape(r[alone]):.1%}; in models: mean {_mape(r[~alone]):.1%}, by time {_by_time(r[~alone], w[~alone]):.1%}"
    )
    for kind in sorted({kinds[i] for i in np.flatnonzero(~alone)}):
        at = (kinds_array == kind) & ~alone
        note_level(kind, r[at], w[at], owners[at])
        print(
            f"  {kind:12s} n {at.sum():5d} mean {_mape(r[at]):6.1%} by time {_by_time(r[at], w[at]):6.1%} sum {_bias(r[at], w[at]):.3f}"
        )
    fitted = fit_families(found)
    errors = {kind: float(np.quantile(np.abs(r[kinds_array == kind]), 0.9)) for kind in set(kinds)}
    families_out = {
        name: {**{n: float(f"{v:.4g}") for n, v in zip(NAMES, np.exp(c), strict=True)},
               "relative_error": round(min(0.9, errors.get(name.partition(".")[0], 0.4)), 3)}
        for name, c in sorted(fitted.items())
    }  # fmt: skip
    write("h200_stream.json", {
        "provenance": f"{sum(len(p) for p in found.values())} kernels of {len(fold)} models traced on an H200 (benchmarks/fit/fit_ops.py)",
        "exponent": EXPONENT, "cache_bytes_per_cycle": CACHE_RATE, "families": families_out,
        "trees": grow_trees(found, fitted),
    })  # fmt: skip


def grow_trees(found: dict[str, list[Point]], fitted: dict[str, np.ndarray]) -> dict[str, Any]:
    """The correction of families whose constants are known."""
    x, y, p, _ = tree_rows(found, fitted)
    return fit_trees(x, y, weights([q.case for q in p], 0.1), rounds=320, rate=0.1, leaf=8, alpha=0.3)


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
            us = r.us - (conv._bias_time(chip(H200), r.op).seconds * 1e6 if bias else 0.0)
            if passes and us > 0.5:
                found.setdefault((passes, r.case), []).append(us)
    return {key: (list(key[0]), float(np.median(us)), len(us), key[1]) for key, us in found.items()}


class ConvFit:
    """The trees of convolutions, fitted on random ones and on those of all models but a fold of them."""

    def __init__(self, rows: list[Measured], fold: dict[str, int] | None = None) -> None:
        self.train = drawn(DATA / "h200_convs.jsonl.gz")
        self.models = in_models(rows)
        self.fold = fold or folds([m[3] for m in self.models.values()], 5, 1)
        self.singles = [(m[0][0], m[1], m[3]) for m in self.models.values() if len(m[0]) == 1]
        self.pairs = [m for m in self.models.values() if len(m[0]) == 2]

    def seconds(self, ensemble: Any, c: conv.Conv) -> float:
        floor = conv.floor(chip(H200), c)
        return floor.seconds * math.exp(ensemble(conv.features(c, floor)[None])[0])

    def _grow(self, rows: list[tuple[conv.Conv, float, str]]) -> Any:
        floors = [conv.floor(chip(H200), c) for c, _, _ in rows]
        x = np.array([conv.features(c, f) for (c, _, _), f in zip(rows, floors, strict=True)])
        y = np.array([math.log(max(us, 0.5) * 1e-6 / f.seconds) for (_, us, _), f in zip(rows, floors, strict=True)])
        # Models are what is asked for.
        weight = np.array([1.0 if case == "drawn" else 0.5 if is_drawn(case) else 2.0 for _, _, case in rows])
        return fit_trees(x, y, weight, rounds=400, rate=0.1, leaf=4, alpha=0.3)

    def without(self, out: int | None) -> Any:
        """Both gradients of a convolution are measured together: a first fit says how they share the time."""
        known = self.train + [s for s in self.singles if self.fold[s[2]] != out]
        ensemble = Trees.of(self._grow(known))
        for passes, us, _, case in self.pairs:
            if self.fold[case] != out:
                parts = [self.seconds(ensemble, c) for c in passes]
                known += [(c, us * part / sum(parts), case) for c, part in zip(passes, parts, strict=True)]
        return self._grow(known)


def fit_conv(rows: list[Measured]) -> None:
    fits = ConvFit(rows)
    r, w, cases, kinds = [], [], [], []
    for k in range(5):
        ensemble = Trees.of(fits.without(k))
        for passes, us, count, case in fits.models.values():
            if fits.fold[case] == k:
                predicted = sum(fits.seconds(ensemble, c) for c in passes)
                r.append(math.log(us * 1e-6 / predicted))
                w.append(us * count)
                cases.append(case)
                kinds.append(passes[0].kind)
    ra, wa = np.array(r), np.array(w)
    print(
        f"convolutions in models left out: n {len(ra)} mean {_mape(ra):.1%}, by time {_by_time(ra, wa):.1%}, sum {_bias(ra, wa):.3f}"
    )
    of_kind = {kind: ra[np.array(kinds) == kind] for kind in sorted(set(kinds))}
    width = {kind: round(min(0.9, float(np.quantile(np.abs(some), 0.9))), 3) for kind, some in of_kind.items()}
    print(width)
    note_level("conv", ra, wa, np.array(cases))
    write("h200_conv.json", {
        "provenance": f"{len(fits.train)} random passes and {len(fits.singles) + 2 * len(fits.pairs)} of models on an H200 (benchmarks/fit/fit_ops.py)",
        "relative_error": width, "trees": fits.without(None),
    })  # fmt: skip


# ---------------------------------------------------------------- what whole models add: levels and activity
GROUPS = ("batch_norm", "conv", "copy", "elementwise", "foreach", "gather", "norm", "pool", "random", "reduce", "rnn",
          "scatter", "softmax", "sort")  # fmt: skip
LEVELS: dict[str, float] = {}


def note_level(kind: str, r: np.ndarray, w: np.ndarray, cases: np.ndarray) -> None:
    """Medians of logarithms fall short of sums: the factor that makes the total of the middle left-out model right.

    The middle by time, not the sum: models that are alone with a family are far off when they are left out of its fit.
    """
    whole = np.array([not is_drawn(case) for case in cases], bool)
    r, w, cases = r[whole], w[whole], cases[whole]
    if len(r) < 15 or _by_time(r, w) > 0.25:  # what is that far off where it is left out says nothing of its level
        return
    names = sorted(set(cases))
    biases = np.array([_bias(r[cases == name], w[cases == name]) for name in names])
    times = np.array([w[cases == name].sum() for name in names])
    order = np.argsort(biases)
    middle = biases[order][np.searchsorted(np.cumsum(times[order]), 0.5 * times.sum())]
    LEVELS[kind] = round(float(np.clip(1.0 / middle, 0.85, 1.2)), 3)


def fit_models(all_graphs: dict[Any, Any], all_swept: list[tuple[dict[str, Any], Any]]) -> None:
    """How much busy SMs draw by kind of operator, from the joules of whole iterations that were not power-capped."""
    from scipy.optimize import lsq_linear

    from tessera.estimate.ops import OpModel
    from tessera.estimate.predict import estimate

    path = OUT / "h200_models.json"
    kept = json.loads(path.read_text()) if path.exists() else {"level": {}}
    plain = {"draw": {"other": 1.0}, "level": {**kept["level"], **LEVELS}, "provenance": "being fitted"}
    write("h200_models.json", {**plain, "family": {}})
    load_fit.cache_clear()
    family = fit_draw_families(all_swept)
    write("h200_models.json", {**plain, "family": family})
    load_fit.cache_clear()
    names = ["fixed", *GROUPS, "other"]
    model, rows, cases = OpModel(H200), [], []
    for r in recorded():
        if (
            r["throttle"]
            or r.get("capture_differs")
            or (not r.get("graph_replay") and r["set"] == "dev" and r.get("run") != 3)
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
        "provenance": f"{len(cases)} iterations of models and single operators on an H200 (benchmarks/fit/fit_ops.py)",
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
        k = model.time(op, count_traffic(graph, graph.kernels, capacity)[0])
        t = r["ms"] * 1e-3
        flops_j = sum(p.j_per_flop.get(u, 0.0) * n for u, n in DeviceWork.of(k).flops.items())
        clock = min(1.0, r["sm_mhz"] / 1980.0)  # under the power limit the SMs draw less, as power.py has it
        square = p.voltage(clock) ** 2
        rest = (
            r["J"] - p.static_w * t - p.hbm_j_per_byte * k.hbm_bytes - square * (flops_j + p.l2_j_per_byte * k.l2_bytes)
        )
        value = float(np.clip(rest / (square * clock * p.active_w * max(0.05, k.busy) * t), 0.2, 3.0))
        name = data_work.power_family(op)
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
        out["fixed"] += sum(p.j_per_flop.get(u, dearest) * n for u, n in DeviceWork.of(k).flops.items())
        out["fixed"] += p.hbm_j_per_byte * k.hbm_bytes + p.l2_j_per_byte * k.l2_bytes
    return [out[n] / r["J"] for n in names]


# ---------------------------------------------------------------- whole models that no fit has seen
def _width(shipped: dict[str, Any], family: str) -> float:
    return float(shipped.get(family.partition(".")[0], shipped["elementwise"])["relative_error"])


def fit_folds(rows: list[Measured], all_graphs: dict[Any, Any]) -> None:
    """Latency and joules of models whose kernels were left out of the fits, a fifth of them at a time; writes no fit."""
    from tessera.estimate.ops import OpModel
    from tessera.estimate.predict import estimate
    from tessera.estimate.prediction_report import _latency_error

    fold = folds([r.case for r in rows] + [r["name"] for r in recorded()], 5, 2)
    found, convs, busy = points(rows), ConvFit(rows, fold), {t["name"]: t["gpu_us"] for t in traces()}
    shipped = {name: load_fit(name) for name in ("h200_stream.json", "h200_conv.json")}
    errors: dict[str, list[tuple[float, float, float]]] = collections.defaultdict(list)
    for k in range(5):
        part = {f: [q for q in p if fold[q.case] != k] for f, p in found.items()}
        part = {f: p for f, p in part.items() if p}
        rates = fit_families(part)
        families_k = {
            name: {
                **dict(zip(NAMES, np.exp(c).tolist(), strict=True)),
                "relative_error": _width(shipped["h200_stream.json"]["families"], name),
            }
            for name, c in rates.items()
        }
        data = {
            "h200_stream.json": {
                **shipped["h200_stream.json"],
                "families": families_k,
                "trees": grow_trees(part, rates),
            },
            "h200_conv.json": {**shipped["h200_conv.json"], "trees": convs.without(k)},
        }
        data_movement.load_fit = conv.load_fit = lambda name, data=data: data.get(name) or load_fit(name)
        for cached in (data_movement._trees, data_movement.constants, conv._trees, conv._multiple):
            cached.cache_clear()
        model = OpModel(H200)
        for r in recorded():
            if fold[r["name"]] != k or (r["set"] == "dev" and not r.get("graph_replay") and r.get("run") != 3):
                continue
            replay, us = bool(r.get("graph_replay")), busy.get(r["name"])
            if not replay and (us is None or us < 0.8e3 * r["ms"]):
                continue  # bound by its host, which is another fit
            graph = (
                all_graphs[r["name"], "replay"]
                if replay and r.get("capture_differs") is not False
                else all_graphs[r["name"]]
            )
            e = estimate(graph, H200, model, launch="graph" if replay else "eager")
            ms, j = (
                float(e.solved.seconds) * 1e3,
                float((e.solved.static_j + e.solved.compute_j + e.solved.memory_j).sum()),
            )
            errors[r["set"]].append((ms / r["ms"] - 1.0, j / r["J"] - 1.0, 1e3 * _latency_error(e, H200) / r["ms"]))
    data_movement.load_fit = conv.load_fit = load_fit
    for cached in (data_movement._trees, data_movement.constants, conv._trees, conv._multiple):
        cached.cache_clear()
    for which, some in [*errors.items(), ("all", [e for v in errors.values() for e in v])]:
        a = np.abs(np.array(some))
        inside = f"{np.mean(a[:, 0] <= a[:, 2]):.0%} inside, 90% within {np.quantile(a[:, 0] / a[:, 2], 0.9):.2f} half-widths"
        print(
            f"models left out, device-bound, {which}: {len(a)} rows, latency {a[:, 0].mean():.1%}, energy {a[:, 1].mean():.1%}, {inside}"
        )


# ---------------------------------------------------------------- the host
# What one call costs by itself on an idle host (host_call rows of kernels_more.jsonl, times two: a loop over one
# operator runs from hot caches); the fit is pulled towards these.
HOST = {"kernel_s": 12, "conv": 8, "conv_bias": 10, "batch_norm": 12, "attention": 15, "conv_backward": 20,
        "batch_norm_backward": 10, "view_s": 3, "module_s": 7, "function_s": 1, "recording_s": 4, "backward_s": 18,
        "backward_view_s": 3, "foreach_s": 80, "foreach_tensor_s": 1, "iteration_s": 8}  # fmt: skip
EXTRA = ("conv", "conv_bias", "batch_norm", "attention", "conv_backward", "batch_norm_backward")


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
            n["recording_s"] += training
        for name in extras_of(op):
            if name in n:
                n[name] += 1
    return list(n.values())


def public_rows(shared: Path) -> list[tuple[str, float, Any]]:
    """Host-bound eager rows of models_public.jsonl, recorded by others on another day: (name, microseconds, graph)."""
    from predict import predict_models
    from tessera.estimate.ops import OpModel
    from tessera.estimate.predict import estimate
    from tessera.graph.capture import capture

    found, model = [], OpModel(H200)
    for r, build in predict_models.public(shared):
        if r.get("graph_replay"):
            continue
        net, inputs = build()
        graph = capture(net, inputs, mode=r["mode"], optimizer=r["optimizer"], name=r["name"])
        if r["ms"] > 1.25e3 * float(estimate(graph, H200, model, launch="graph").solved.seconds):
            found.append(("public " + r["name"], r["ms"] * 1e3, graph))
    return found


def launch_us(graph: Any) -> float:
    """What cuDNN's own launches of recurrent layers take, as host.py has it: not fitted here."""
    from tessera.estimate.host import LAUNCH_S, rnn_launches

    each = (rnn_launches(op) * (2.0 if op.phase == "backward" else 1.0) for op in graph.ops if op.kind == "rnn")
    return 1e6 * LAUNCH_S * sum(each)


@dataclass
class HostRows:
    """Eager iterations: the host's microseconds, how often each constant is paid, its recording, and what bounds it."""

    names: list[str]
    us: np.ndarray
    iteration_us: np.ndarray
    bound: np.ndarray
    rnn_us: np.ndarray
    counts: np.ndarray
    session: np.ndarray
    sessions: list[str]

    @property
    def clean(self) -> list[int]:
        """Recordings that no profiler slowed."""
        return [i for i, name in enumerate(self.sessions) if name != "profiler"]

    @property
    def share(self) -> np.ndarray:
        """What a row weighs where each recording weighs the same, and a host alone less than an iteration."""
        return np.array([1.0 / sum(self.session == i) for i in self.session]) * np.where(self.bound, 1.0, 0.25)


def host_rows(all_graphs: dict[Any, Any], shared: Path) -> HostRows:
    """Eager rows of all recordings: those that wait for the host, and those whose host was timed by itself."""
    busy = {t["name"]: t["gpu_us"] for t in traces()}
    rows = []  # (name, microseconds of the host, of the iteration, bound by its host, which recording, graph)
    for r in recorded():
        if r.get("graph_replay") or r["name"] not in busy:
            continue
        graph, bound = all_graphs[r["name"]], r["ms"] * 1e3 > 1.25 * busy[r["name"]]
        # The time of an iteration and the host's own, the queue being empty, are two readings of one thing. A host that
        # has more to launch than the queue holds waits for the device, as one does that asks it for a value.
        free = r["host_ms"] < 0.85 * r["ms"] and len(graph.kernels) < 1000 and not any(op.sync for op in graph.ops)
        if bound or free:
            # Rows after a trace in the same process are slowed by the profiler that stays attached.
            session = "profiler" if r.get("after_profiler") else r["set"]
            us = 1e3 * (math.sqrt(r["ms"] * r["host_ms"]) if bound else r["host_ms"])
            rows.append((r["name"], us, 1e3 * r["ms"], bound, session, graph))
    rows += [(name, us, us, True, "public", graph) for name, us, graph in public_rows(shared)]
    names, us, whole, bound, session, of = zip(*rows, strict=True)
    sessions = sorted(set(session))
    return HostRows(
        list(names), np.array(us), np.array(whole), np.array(bound), np.array([launch_us(g) for g in of]),
        np.array([host_counts(g) for g in of]), np.array([sessions.index(s) for s in session]), sessions,
    )  # fmt: skip


def host_constants(rows: HostRows, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of each constant, and each recording's speed beside their mean, from the rows of a mask."""
    from scipy.optimize import least_squares

    near, n, at, clean = np.array(list(HOST.values()), float), len(HOST), rows.session[mask], rows.clean
    weight = rows.share**0.5
    weight = (weight / weight.mean())[mask]
    a, rnn = rows.counts[mask] * near / rows.us[mask][:, None], (rows.rnn_us / rows.us)[mask]

    def errors(z: np.ndarray) -> np.ndarray:
        speed = z[n:] - z[n:][clean].mean()
        left = weight * np.log(np.exp(speed[at]) * (a @ np.exp(z[:n]) + rnn))
        return np.concatenate([left, 0.2 * z[:n], 0.01 * z[n:]])

    z = least_squares(errors, np.zeros(n + len(rows.sessions)), loss="soft_l1", f_scale=0.2).x
    return np.exp(z[:n]) * near, np.exp(z[n:] - z[n:][clean].mean())


def host_left_out(rows: HostRows) -> float:
    """The mean error of models left out of the fit, a fifth at a time, their recording's speed known."""
    left, names = [], sorted(set(rows.names))
    for k in range(5):
        out = np.array([names.index(name) % 5 == k for name in rows.names])
        c, speed = host_constants(rows, ~out)
        found = (rows.counts @ c + rows.rnn_us) * speed[rows.session] / rows.us
        left += np.abs(found - 1.0)[out & rows.bound & np.isin(rows.session, rows.clean)].tolist()
    return float(np.mean(left))


def host_width(rows: HostRows, c: np.ndarray, speed: np.ndarray) -> float:
    """The half-width that holds 90% of the rows, each recording one draw, predicted at the mean speed of the others."""
    kept = rows.bound & np.isin(rows.session, rows.clean)
    log = np.log(speed)
    others = [np.mean([log[j] for j in rows.clean if j != i]) for i in range(len(speed))]
    predicted = np.exp(np.array(others)[rows.session]) * (rows.counts @ c + rows.rnn_us)
    spread = np.abs(rows.iteration_us / predicted - 1.0)[kept]
    order = np.argsort(spread)
    total = np.cumsum(rows.share[kept][order]) / rows.share[kept].sum()
    return float(spread[order][np.searchsorted(total, 0.9)])


def fit_host(all_graphs: dict[Any, Any], shared: Path) -> None:
    """Constants from eager rows of all recordings, each of which found its host at a speed of its own."""
    rows = host_rows(all_graphs, shared)
    c, speed = host_constants(rows, np.ones(len(rows.names), bool))
    by_session = {name: round(float(v), 2) for name, v in zip(rows.sessions, speed, strict=True)}
    left = host_left_out(rows)
    print(
        f"host: {len(rows.names)} rows; models left out, their recording's speed known: {left:.1%}; speeds {by_session}"
    )
    # The middle of the recordings is what is shipped; the interval holds 90% of the rows of a recording not met.
    width = host_width(rows, c, speed)
    us = dict(zip(HOST, c, strict=True))
    out: dict[str, Any] = {k: float(f"{v * 1e-6:.4g}") for k, v in us.items() if k not in EXTRA}
    out["extra_s"] = {k: float(f"{us[k] * 1e-6:.4g}") for k in EXTRA}
    out["relative_error"] = round(width, 2)
    speeds = [float(speed[i]) for i in rows.clean]
    out["provenance"] = (
        f"the host's part of {len(rows.names)} eager iterations in {len(speeds)} recordings on Intel Xeons beside an H200, "
        f"torch 2.11; the same kind of host took {min(speeds):.2f} to {max(speeds):.2f} times these in them "
        "(benchmarks/fit/fit_ops.py)"
    )
    print(f"90% of rows within {width:.0%}")
    write("host.json", out)


# ---------------------------------------------------------------- between the kernels of a graph
def fit_gaps(all_graphs: dict[Any, Any]) -> None:
    """What replays take beyond their traced kernels, by launches and attentions; prints, writes nothing."""
    from scipy.optimize import nnls

    traced = {t["name"]: t for t in traces()}
    counts, left = [], []
    for r in recorded():
        t, graph = traced.get(r["name"]), all_graphs[r["name"]]
        if t is None or not r.get("graph_replay") or r["throttle"] or r.get("capture_differs"):
            continue
        # Of long kernels the gaps are less than what a traced kernel differs from a replayed one.
        if t["gpu_us"] > 12.0 * len(t["kernels"]) or any(op.kind == "rnn" for op in graph.kernels):
            continue
        half = [op for op in graph.kernels if op.kind == "attention" and op.precision in ("bf16", "fp16")]
        launches = sum(map(data_work.count_launches, graph.kernels))
        counts.append([launches, sum(op.params["q_len"] > 1 for op in half)])
        left.append((r["ms"] * 1e3 - t["gpu_us"], t["gpu_us"]))
    gap, whole = np.array(left).T
    found, _ = nnls(np.array(counts) / whole[:, None], gap / whole)
    print(f"gaps of {len(gap)} replays: {found[0]:.2f} us a launch, {found[1]:.2f} us more for 16-bit attention")


def write(name: str, data: dict[str, Any]) -> None:
    path = OUT / name
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    print(f"wrote {path.name}, {path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="stream,conv,models,host,gaps,folds")
    parser.add_argument("--shared", type=Path, default=BENCHMARKS.parent.parent / "shared")
    code = hashlib.sha256(
        b"".join(p.read_bytes() for p in sorted((BENCHMARKS.parent / "src/tessera/graph").glob("*.py")))
    )
    key = code.hexdigest()[:12]  # captures are kept for as long as the code that made them
    parser.add_argument("--cache", type=Path, default=Path(f"/tmp/tessera_graphs_{key}.pkl"))
    parser.add_argument("--swept", type=Path, default=Path(f"/tmp/tessera_swept_graphs_{key}.pkl"))
    given = parser.parse_args()
    quiet()
    all_graphs = graphs(given.cache)
    rows = measured(all_graphs)
    all_swept = swept(given.swept)
    rows += single(all_swept)
    for name in given.only.split(","):
        if name == "host":
            fit_host(all_graphs, given.shared)
        elif name == "gaps":
            fit_gaps(all_graphs)
        elif name == "folds":
            fit_folds(rows, all_graphs)
        elif name == "models":
            fit_models(all_graphs, all_swept)
        else:
            {"stream": fit_stream, "conv": fit_conv}[name](rows)
            load_fit.cache_clear()


if __name__ == "__main__":
    main()
