"""Fit products, attention and fused experts of chips with public timings, and the constants that other chips share.

    python benchmarks/fit/fit_chips.py [--shared ../shared] [--chips h100,b200,...] [--first]

Needs scipy and lightgbm beside numpy; nothing of them is used at run time. Reads public_kernels/*.csv.gz (short loops
at full clock), writes src/tessera/estimate/data/CHIP_kernels.json and other_kernels.json. Constants and trees are fitted
on the fit split, half-widths found on the development split; then both are fitted. The shared constants are fitted on
all chips at once; their half-widths are the errors on each chip when it is left out (printed, and written to
results/left_out_chips.json). The final split is left alone: benchmarks/predict/public_kernels.py reads it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

import kernel_fits as fits
from fit_kernels import DATA, write
from kernel_rows import ROOT, SHARED, Row, kernel_of, read_public
from tessera.estimate import attention, gemm, moe
from tessera.estimate.kernel_time import FITTED, Chip, Trees, chip, load_fit
from tessera.estimate.power import DeviceWork, PowerModel
from tessera.hardware import lookup

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

Table = Mapping[str, tuple[float, float, float]]  # start, low, high
Constants = dict[str, Any]

GEMM: Table = {
    "launch_us.vllm": (1.4, 0.05, 4), "feed_bytes_per_cycle": (120, 20, 400), "sm_bytes_per_cycle": (80, 20, 300),
    "matrix.tile_cost": (0.8, 0.01, 12), "matrix.tile_cycles": (2650, 0, 9000), "matrix.split_cycles": (5100, 0, 16000),
    "matrix.tile_shown": (0.9, 0, 1), "overlap": (0.5, 0, 0.95), "cache_kept": (0.4, 0, 0.9), "cache_spill": (0.24, 0.1, 0.8),
    "bandwidth": (0.92, 0.6, 0.99), "cache_bytes_per_cycle": (19, 6, 60), "exponent": (1.57, 1.1, 6), "efficiency": (0.8, 0.2, 1.0),
}  # fmt: skip
CAST: Table = {"cast.us": (3, 0, 30), "cast.bytes": (3, 0, 20), "cast.row_cycles": (500, 0, 8000)}
# Tiles of quantised kernels: the narrowest, and no division of k.
TILES = ([1, 1], [16, 1], [64, 1], [128, 1])
ATTENTION: Table = {
    "efficiency": (0.6, 0.1, 1.0), "head_cost": (10, 0, 100), "score_cycles": (0.05, 0, 0.6), "convert_cycles": (0.1, 0, 2),
    "load_cycles": (0.1, 0, 2), "step_exponent": (2, 1, 8), "block_cycles": (3000, 0, 20000), "block_cycles_per_dim": (10, 0, 80),
    "split_cycles": (3000, 0, 20000), "overlap": (0.3, 0, 0.99), "launch_us": (5, 0.5, 14), "bandwidth": (0.85, 0.4, 0.99),
    "cache_bytes_per_cycle": (18, 3, 60), "cache_kept": (0.4, 0, 0.9), "cache_spill": (0.3, 0.1, 0.9), "exponent": (1.5, 1.0, 6),
}  # fmt: skip
PACKINGS = ("always", "single", "grouped")
MOE: Table = {
    "launch_us": (30, 1, 200), "expert_us": (0.1, 0, 20), "bandwidth": (0.7, 0.05, 0.99), "efficiency": (0.6, 0.05, 1),
    "pad_rows": (16, 0, 200), "row_bytes": (4, 0, 60), "exponent": (1.5, 1, 6), "reach": (0.6, 0.1, 1.5),
    "skew": (0.3, 0, 4), "wave": (0.5, 0, 6),
}  # fmt: skip
FEW = 20  # rows under which a kernel is not fitted


@dataclass(frozen=True)
class Sample:
    """Rows of one kernel on one chip, as one call of arrays."""

    of: Chip
    call: Any
    seconds: np.ndarray


@dataclass(frozen=True)
class Family:
    """How the rows of one kind are named, put together and predicted."""

    kind: str
    name: Callable[[Row], str]
    join: Callable[[Sequence[Row]], Any]
    formula: Callable[[Constants, Chip, Any], dict[str, np.ndarray]]
    features: Callable[[Any, dict[str, np.ndarray]], np.ndarray]
    table: Callable[[str], Table]
    options: Callable[[str], Sequence[Constants]]
    of_others: Constants | None = None  # the option of chips that are fitted together; None: the best
    trees_of_others: bool = False
    by_library: bool = False  # whether chips with asynchronous matrix units run another library than the others

    def predict(self, constants: Constants, s: Sample) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and features of the trees."""
        t = self.formula(constants, s.of, s.call)
        floor_s = gemm.host_floor_s(constants, s.call) if self.kind == "gemm" else 0.0
        return np.maximum(t["overhead_s"] + t["body_s"], floor_s), self.features(s.call, t)


# ---------------------------------------------------------------- the three families
def _attention_name(row: Row) -> str:
    a = row.args
    sizes = [a[n] for n in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal")]
    return attention.name_kernel(attention.AttentionCall(*sizes, a["precision"], a["kv_precision"]))


def _join_experts(rows: Sequence[Row]) -> moe.ExpertCall:
    names = ("tokens", "hidden", "width", "topk", "experts", "ranks", "skew")
    return moe.ExpertCall(*(np.array([float(r.args[n]) for r in rows]) for n in names), rows[0].args["precision"])


def _gemm_formula(c: Constants, of: Chip, p: gemm.Product) -> dict[str, np.ndarray]:
    return gemm.formula({**load_fit("h200_gemm.json")["constants"], **c}, of, p)


def _attention_formula(c: Constants, of: Chip, call: attention.AttentionCall) -> dict[str, np.ndarray]:
    return attention.formula({**load_fit("h200_attention.json")["constants"]["vllm"], **c}, of, call)


FAMILIES = (
    Family("gemm", lambda r: r.args["precision"], fits.products, _gemm_formula, gemm.features,
           lambda kernel: GEMM if kernel == "bf16" else {**GEMM, **CAST},
           lambda kernel: [{"tiles": {}}] if kernel == "bf16" else [{"tiles": {kernel: tile}} for tile in TILES],
           trees_of_others=True),
    Family("attention", _attention_name, fits.calls, _attention_formula, attention.features, lambda _: ATTENTION,
           lambda _: [{"packing": packing} for packing in PACKINGS], {"packing": "by library"}, trees_of_others=True,
           by_library=True),
    Family("moe", lambda r: r.args["precision"], _join_experts, moe.formula, moe.features, lambda _: MOE, lambda _: [{}]),
)  # fmt: skip


def samples(family: Family, rows: Sequence[Row]) -> dict[str, dict[str, Sample]]:
    """By kernel and chip."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.kind == family.kind:
            groups[family.name(row), row.device].append(row)
    found: dict[str, dict[str, Sample]] = defaultdict(dict)
    for (kernel, device), members in groups.items():
        seconds = np.array([row.seconds for row in members])
        found[kernel][device] = Sample(chip(lookup(device)), family.join(members), seconds)
    return found


def thin(s: Sample, most: int = 500) -> Sample:
    """At most so many rows, evenly taken: every chip counts the same where several are fitted together."""
    step = -(-len(s.seconds) // most)
    arrays = {f.name: v[::step] for f in fields(s.call) if isinstance(v := getattr(s.call, f.name), np.ndarray)}
    return Sample(s.of, replace(s.call, **arrays), s.seconds[::step])


# ---------------------------------------------------------------- constants
def as_constants(kernel: str, names: Sequence[str], x: np.ndarray, option: Constants) -> Constants:
    """A flat vector as the nested constants of a data file."""
    c: Constants = {}
    for name, value in zip(names, x, strict=True):
        *tables, entry = name.split(".")
        functools.reduce(lambda table, key: table.setdefault(key, {}), tables, c)[entry] = float(value)
    if "launch_us" in c and isinstance(c["launch_us"], dict):  # a product: 16-bit ones are torch's too
        c["launch_us"]["torch"] = c["launch_us"]["vllm"]
        c["efficiency"] = dict.fromkeys((kernel, "fp16") if kernel == "bf16" else (kernel,), c["efficiency"])
        c["cast"] = {kernel: c["cast"]} if "cast" in c else {}
    return {**c, **option}


def host_floors(kernel: str, members: Sequence[Sample]) -> Constants:
    """The host's time of block-scaled fp8, by how m is padded and whether n and k divide into blocks."""
    if kernel != "fp8_block" or not isinstance(members[0].call, gemm.Product):
        return {"host_floor_s": {}} if isinstance(members[0].call, gemm.Product) else {}
    m, n, k = (np.concatenate([getattr(s.call, name) for s in members]) for name in ("m", "n", "k"))
    seconds = np.concatenate([s.seconds for s in members])
    whole = (n % 64 == 0) & (k % 128 == 0)
    kinds = (whole & (m < 64), whole & (m >= 64) & (m % 4 == 0), whole & (m >= 64) & (m % 4 != 0), ~whole)
    floors = [float(np.quantile(seconds[kind], 0.35)) if kind.sum() > 5 else None for kind in kinds]
    most = max(floor for floor in floors if floor is not None)
    return {"host_floor_s": {kernel: [most if floor is None else floor for floor in floors]}}


def fit_constants(family: Family, kernel: str, members: Sequence[Sample]) -> Constants:
    """The best constants over options and two starts, by robust least squares; every chip counts the same."""
    table = family.table(kernel)
    start, low, high = np.array(list(table.values()), float).T
    floors = host_floors(kernel, members)
    weights = [np.sqrt(400.0 / len(s.seconds)) for s in members]

    def solve(option: Constants, x: np.ndarray, tries: int) -> Any:
        def errors(x: np.ndarray) -> np.ndarray:
            c, found = as_constants(kernel, list(table), x, option), []
            for s, weight in zip(members, weights, strict=True):
                found.append(weight * np.log(family.predict(c, s)[0] / s.seconds))
            return np.concatenate(found)

        inside = np.clip(x, low + 1e-4 * (high - low), high - 1e-4 * (high - low))
        return least_squares(
            errors, inside, bounds=(low, high), loss="soft_l1", f_scale=0.1, x_scale=0.1 * (high - low), diff_step=2e-3, max_nfev=tries
        )  # fmt: skip

    together = len(members) > 1 and family.of_others is not None
    options = [{**option, **floors} for option in ([family.of_others] if together else family.options(kernel))]
    option = min(options, key=lambda o: float(solve(o, start, 12).cost)) if len(options) > 1 else options[0]
    other = low + (high - low) * np.random.default_rng(1).uniform(0.05, 0.6, len(low))
    best = min((solve(option, x, 40) for x in (start, other)), key=lambda r: float(r.cost))
    return as_constants(kernel, list(table), best.x, option)


def residuals(family: Family, fitted: Mapping[str, Constants], of: Mapping[str, Sequence[Sample]]) -> tuple[Any, ...]:
    """Features, logarithms of measured over predicted, and weights."""
    xs, ys, ws = [], [], []
    for kernel, members in of.items():
        for s in members:
            seconds, x = family.predict(fitted[kernel], s)
            xs.append(x)
            ys.append(np.log(s.seconds / seconds))
            ws.append(np.full(len(seconds), np.sqrt(400.0 / len(s.seconds)) if len(members) > 1 else 1.0))
    return np.concatenate(xs), np.concatenate(ys), np.concatenate(ws)


def fit_family(family: Family, of: Mapping[str, Sequence[Sample]], *, trees: bool) -> dict[str, Any]:
    """Constants by kernel, and the trees for all of them."""
    of = {kernel: members for kernel, members in of.items() if sum(len(s.seconds) for s in members) >= FEW}
    if not of:
        return {}
    fitted = {kernel: fit_constants(family, kernel, members) for kernel, members in of.items()}
    found: dict[str, Any] = {"constants": fitted}
    if trees:
        few = {"leaf": 20} if family.trees_of_others and any(len(v) > 1 for v in of.values()) else {"leaf": 5}
        found["trees"] = fits.fit_trees(
            *residuals(family, fitted, of), rounds=100, depth=4, rate=0.12, alpha=0.15, digits=4, **few
        )
    return found


# ---------------------------------------------------------------- watts
# Watts always and of busy SMs, pJ per byte of device memory and cache, pJ per FLOP.
POWER: Table = {
    "static_w": (200, 137, 350), "active_w": (250, 0, 800), "hbm_j_per_byte": (50, 0, 150), "l2_j_per_byte": (15, 0, 60),
    "matrix.bf16": (0.3, 0, 1), "matrix.fp8": (0.2, 0, 1), "matrix.fp4": (0.1, 0, 1), "vector.fp32": (5, 0, 20),
}  # fmt: skip


def fit_power(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Constants of the power model from rows whose watts last long enough, on the times that the fits above predict.

    NVML's average over a second mixes a kernel's loop with what ran before it: like shapes differ by a factor of two. So
    the loss is robust, and the half-width is that of the development split.
    """
    base = PowerModel.from_device(lookup(name))
    trusted = [(row, DeviceWork.of(kernel_of(row))) for row in rows if row.public_w is not None]
    units = [n for n in POWER if "." in n]
    t = {
        n: np.array([getattr(w, n) for _, w in trusted])
        for n in ("clock_s", "fixed_s", "busy_s", "hbm_bytes", "l2_bytes")
    }
    flops = np.array([[w.flops.get(unit, 0.0) for unit in units] for _, w in trusted])
    measured = np.array([row.public_w * row.seconds for row, _ in trusted])
    start, low, high = np.array(list(POWER.values()), float).T

    def as_power(x: np.ndarray) -> dict[str, Any]:
        c = dict(zip(POWER, x.tolist(), strict=True))
        per_flop = {unit: c.pop(unit) * 1e-12 for unit in units}
        c |= {"hbm_j_per_byte": c["hbm_j_per_byte"] * 1e-12, "l2_j_per_byte": c["l2_j_per_byte"] * 1e-12}
        return c | {"j_per_flop": dict(base.j_per_flop) | per_flop | {"matrix.fp16": per_flop["matrix.bf16"]}}

    def joules(x: np.ndarray) -> np.ndarray:
        law = {"voltage_slope": base.voltage_slope, "voltage_floor": base.voltage_floor, "limit_w": base.limit_w}
        return fits.capped_j(as_power(x) | law, t | {"flops_j": flops @ x[4:] * 1e-12}, 1.0)

    def solve(chosen: np.ndarray) -> np.ndarray:
        return least_squares(
            lambda x: np.log(joules(x) / measured)[chosen], start, bounds=(low, high), loss="soft_l1", f_scale=0.05,
            x_scale=0.1 * (high - low), diff_step=1e-3,
        ).x  # fmt: skip

    split = np.array([row.split for row, _ in trusted])
    unseen = split == "development"
    error = measured / joules(solve(split == "fit")) - 1
    print(line(f"{name} joules, development", [(measured[unseen], error[unseen])]), flush=True)
    width = float(np.quantile(np.abs(error[unseen]), 0.9))
    return as_power(solve(split != "final")) | {"relative_error": width}


# ---------------------------------------------------------------- how good it is
def relative(family: Family, data: Mapping[str, Any], kernel: str, s: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Predicted seconds and measured over predicted - 1, as the package does it."""
    seconds, x = family.predict(data["constants"][kernel], s)
    if "trees" in data:
        seconds = seconds * np.exp(Trees.of(data["trees"])(x))
    return seconds, s.seconds / seconds - 1


def half_widths(pairs: Sequence[tuple[np.ndarray, np.ndarray]], bins: int) -> dict[str, list[float]]:
    """90% quantiles of |measured / predicted - 1| by predicted length."""
    seconds, error = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    order = np.argsort(seconds)
    parts = np.array_split(order, max(1, min(bins, len(order) // 30)))
    return {
        "log10_s": [round(float(np.log10(np.median(seconds[part]))), 3) for part in parts],
        "half_width": [
            round(max(0.03, float(np.quantile(np.abs(error[part]), 0.9)) * (1 + 3 / len(part))), 3) for part in parts
        ],
    }  # fmt: skip


def line(name: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> str:
    e = np.concatenate([1 / (1 + pair[1]) - 1 for pair in pairs])
    return f"{name:44} {len(e):5} rows, mean {np.abs(e).mean():6.1%}, median {np.median(np.abs(e)):6.1%}, bias {e.mean():+6.1%}"


def fit_chip(name: str, rows: Sequence[Row], first: bool) -> dict[str, Any]:
    """One chip's data file: half-widths from the development split, then everything fitted on both."""
    device = lookup(name)
    figures = (device.units, device.clocks.boost_hz, device.memory.bandwidth_bytes_per_s, device.caches.l2_bytes)
    data: dict[str, Any] = {
        "provenance": PROVENANCE,
        "splits": SPLITS,
        "chip": [round(f.value) if f else None for f in figures],
    }
    for family in FAMILIES:
        fit, both = (
            {kernel: [of[name]] for kernel, of in samples(family, some).items() if name in of}
            for some in ([r for r in rows if r.split == "fit"], [r for r in rows if r.split != "final"])
        )
        unseen = samples(family, [r for r in rows if r.split == "development"])
        found = fit_family(family, fit, trees=True)
        if not found:
            continue
        seen = {k: relative(family, found, k, unseen[k][name]) for k in found["constants"] if name in unseen[k]}
        for kernel, pair in seen.items():
            print(line(f"{name} {family.kind} {kernel}, development", [pair]), flush=True)
        print(line(f"{name} {family.kind}, development", list(seen.values())), flush=True)
        interval = {k: half_widths([pair], 4) for k, pair in seen.items() if len(pair[0]) >= FEW}
        interval["any"] = half_widths(list(seen.values()), 4)
        data[family.kind] = {"interval": interval, **(found if first else fit_family(family, both, trees=True))}
    return data


def find_sources(name: str, chips: Sequence[str], family: Family) -> list[str]:
    """The chips whose constants one without timings would get (chip_fits.find_fit): relatives, a library's, all."""
    of, others = chip(lookup(name)), [d for d in chips if d != name]
    relatives = [d for d in others if chip(lookup(d)).capability == of.capability]
    library = [d for d in others if chip(lookup(d)).asynchronous == of.asynchronous] if family.by_library else []
    return relatives or library or others


def leave_out(family: Family, of: Mapping[str, Mapping[str, Sample]]) -> dict[str, dict[str, Any]]:
    """By chip and kernel: predicted seconds and errors of constants that were fitted without the chip."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({device for by_chip in of.values() for device in by_chip}):
        rest = {
            k: [thin(by[d]) for d in find_sources(name, list(by), family)]
            for k, by in of.items()
            if name in by and len(by) > 1
        }
        fitted = fit_family(family, rest, trees=family.trees_of_others)
        found[name] = {k: relative(family, fitted, k, of[k][name]) for k in fitted.get("constants", {})}
    return found


FEW_CHIPS = 3  # under which the scatter between chips is taken from all kernels


def widths_from(left_out: Mapping[str, Mapping[str, Any]], chips: Sequence[str]) -> dict[str, Any]:
    """Half-widths by kernel from some of the chips that were left out, which count the same."""
    by_kernel: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for name in chips:
        for kernel, (seconds, error) in left_out[name].items():
            step = -(-len(seconds) // 300)
            for group in (kernel, "any"):
                by_kernel[group][name].append((seconds[::step], error[::step]))
    return {
        kernel: widths_between(list(of.values()))
        for kernel, of in by_kernel.items()
        if kernel == "any" or len(of) >= FEW_CHIPS
    }


def widths_between(chips: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], bins: int = 3) -> dict[str, list[float]]:
    """90% half-widths for one more chip by predicted length: chips differ from each other, and shapes within a chip.

    The first scatter is known from a few chips only, so its quantile is Student's; both add up in quadrature.
    """
    each = [[np.concatenate([pair[i] for pair in pairs]) for i in (0, 1)] for pairs in chips]
    edges = np.quantile(np.log(np.concatenate([seconds for seconds, _ in each])), np.linspace(0, 1, bins + 1))
    found: dict[str, list[float]] = {"log10_s": [], "half_width": []}
    for low, high in itertools.pairwise(edges):
        middle = [np.log1p(error)[(np.log(s) >= low) & (np.log(s) <= high)] for s, error in each]
        middle = [part for part in middle if len(part) >= FEW // 2]
        bias = np.array([np.median(part) for part in middle])
        between = float(student.ppf(0.95, len(bias)) * np.sqrt((bias**2).mean()))
        within = float(np.quantile(np.abs(np.concatenate([p - b for p, b in zip(middle, bias, strict=True)])), 0.9))
        found["log10_s"].append(round(float((low + high) / 2 / np.log(10)), 3))
        found["half_width"].append(round(max(0.03, float(np.expm1(np.hypot(between, within)))), 3))
    return found


def score_left_out(family: Family, left_out: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of each chip that was left out, and the share inside half-widths that were found without it too."""
    scores = {}
    for name, pairs in left_out.items():
        if not pairs:
            continue
        widths = widths_from(left_out, [other for other in left_out if other != name])
        inside, errors = [], []
        for kernel, (seconds, error) in pairs.items():
            table = widths.get(kernel) or widths["any"]
            inside.append(np.abs(error) <= np.interp(np.log10(seconds), table["log10_s"], table["half_width"]))
            errors.append(np.abs(1 / (1 + error) - 1))
            print(line(f"{name} {family.kind} {kernel}, left out", [(seconds, error)]), flush=True)
        share = float(np.concatenate(inside).mean())
        print(line(f"{name} {family.kind}, left out", list(pairs.values())), f"coverage {share:.0%}", flush=True)
        by_kernel = {k: float(e.mean()) for k, e in zip(pairs, errors, strict=True)}
        all_errors = np.concatenate(errors)
        scores[name] = {
            "rows": len(all_errors), "mean_abs_error": float(all_errors.mean()), "median_abs_error": float(np.median(all_errors)),
            "coverage_90": share, "by_kernel": by_kernel,
        }  # fmt: skip
    return scores


RELATED = (["h100"], ["h200"])  # the chips of one compute capability
TWO_CHIPS = (
    1.2  # a pair of chips tells roughly how much relatives differ: half-widths are a fifth wider than its errors
)


def widen(table: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Half-widths for relatives of a chip with timings."""
    return {**table, "half_width": [round(TWO_CHIPS * width, 3) for width in table["half_width"]]}


def fit_everyone(family: Family, of: Mapping[str, Mapping[str, Sample]]) -> dict[str, Any]:
    """What all chips share."""
    everyone = {kernel: [thin(s) for s in by_chip.values()] for kernel, by_chip in of.items() if by_chip}
    return fit_family(family, everyone, trees=family.trees_of_others)


def fit_others(rows: Sequence[Row]) -> dict[str, Any]:
    """What chips without timings get: fitted on all chips, half-widths from chips that were left out."""
    data: dict[str, Any] = {"provenance": PROVENANCE, "splits": "half-widths from each chip when it was left out"}
    kept, scores = [r for r in rows if r.split != "final"], {}
    for family in FAMILIES:
        # Heads of unusual sizes run on other kernels on every chip: nothing carries over.
        of = {kernel: by_chip for kernel, by_chip in samples(family, kept).items() if not kernel.endswith(".odd")}
        left_out = leave_out(family, of)
        scores[family.kind] = score_left_out(family, left_out)
        interval = widths_from(left_out, list(left_out))
        related = [n for n in left_out if find_sources(n, list(left_out), family) in RELATED]
        pairs = [pair for n in related for k, pair in left_out[n].items() if len(of[k]) > 1]
        data[family.kind] = {
            "interval": interval,
            "relatives": {"any": widen(half_widths(pairs, 3))} if pairs else interval,
            **fit_everyone(family, of),
        }
        if family.by_library:
            older = {k: {d: s for d, s in by.items() if not s.of.asynchronous} for k, by in of.items()}
            data[f"{family.kind}.synchronous"] = {"interval": interval, **fit_everyone(family, older)}
    write_result(ROOT / "benchmarks" / "results" / "left_out_chips.json", {"left_out": scores})
    return data


PROVENANCE = "benchmarks/fit/fit_chips.py on NVIDIA ai-dynamo/aiconfigurator kernel timings (vLLM, Apache-2.0): short loops at full clock"
SPLITS = "60% fit and 20% development by hash of the shape group; intervals from development before it was fitted; 20% final unseen"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder with public_kernels/")
    parser.add_argument("--chips", default=",".join((*FITTED, "other")), help="which files to write")
    parser.add_argument("--first", action="store_true", help="do not fit the development split in the end")
    given = parser.parse_args()
    rows = [row for path in sorted((given.shared / "public_kernels").glob("*.csv.gz")) for row in read_public(path)]
    if not rows:
        sys.exit("no timings: give --shared, the folder with public_kernels/")
    for name in given.chips.split(","):
        if name == "other":
            data = fit_others(rows)
        else:
            own = [row for row in rows if row.device == name]
            data = fit_chip(name, own, given.first)
            write(f"{name}_kernels.json", data)
            if any(row.public_w is not None for row in own):
                data["power"] = fit_power(name, own)
        write(f"{name}_kernels.json", data)
        print(f"{name}: {(DATA / f'{name}_kernels.json').stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
