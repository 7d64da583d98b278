"""The fits behind fit_kernels.py: joules, matrix products, attention, and the trees for what the formulas leave over.

Everything is fitted on the logarithm of what was measured, by robust least squares, in the formulas of the package
itself; seconds are compared after the power limit has stretched them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from kernel_rows import Row
from tessera.estimate import attention, gemm
from tessera.estimate.kernel_time import Chip, chip
from tessera.hardware import lookup

H200: Chip = chip(lookup("h200"))
BOOST_HZ = 1.98e9
UNITS = ("matrix.bf16", "matrix.fp16", "matrix.tf32", "matrix.fp8", "vector.fp32")
Columns = dict[str, np.ndarray]


# ---------------------------------------------------------------- the power limit, for arrays
def capped_s(power: dict[str, Any], t: Columns, switching: Any) -> np.ndarray:
    """`PowerModel.estimate(...).seconds` for arrays; kernel_accuracy.py goes through power.py itself."""
    return _capped(power | {"limit_w": 700.0 * power["limit_fraction"]}, t, switching)[0]


def capped_j(power: dict[str, Any], t: Columns, switching: Any) -> np.ndarray:
    """`PowerModel.estimate(...).energy_j` for arrays."""
    seconds, watts = _capped(power, t, switching)
    # Memory traffic does not follow the clock: what is still over the limit waits.
    dynamic = (watts - power["static_w"]) * seconds
    waits = np.maximum(seconds, dynamic / (power["limit_w"] - power["static_w"]))
    return power["static_w"] * waits + dynamic


def _capped(power: dict[str, Any], t: Columns, switching: Any) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and watts at the highest clock that keeps within the limit."""
    limit = power["limit_w"]
    run_s = t["clock_s"] + t["fixed_s"]

    def watts(f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        square = np.maximum(power["voltage_floor"], 1 - power["voltage_slope"] * (1 - f)) ** 2
        seconds = t["clock_s"] / f + t["fixed_s"]
        active = power["active_w"] * t["busy_s"] * f * seconds / run_s
        joules = square * (active + switching * t["flops_j"])
        joules = joules + switching * (
            power["hbm_j_per_byte"] * t["hbm_bytes"] + square * power["l2_j_per_byte"] * t["l2_bytes"]
        )
        return power["static_w"] + joules / seconds, seconds

    low, high = np.full_like(run_s, 0.1), np.ones_like(run_s)
    over = watts(high)[0] > limit
    for _ in range(18):
        middle = 0.5 * (low + high)
        hot = watts(middle)[0] > limit
        low, high = np.where(hot, low, middle), np.where(hot, middle, high)
    watts_w, seconds = watts(np.where(over, low, 1.0))
    return seconds, watts_w


# ---------------------------------------------------------------- power
STREAM_COSTS = (
    "gelu",
    "softmax",
    "layer_norm",
    "relu",
    "silu_mul",
    "sum",
    "gelu_tanh",
    "silu",
    "sigmoid",
    "tanh",
    "exp",
    "hardswish",
)


# Bounds that the rows alone do not give: a board with clocks up and nothing to do draws 100 (with a context) to 127 W
# (shared/prediction.md); reading the cache is not free.
def fit_power(rows: Sequence[Row], constants: dict[str, Any]) -> dict[str, Any]:
    """Joules from measured seconds and clocks: watts always, watts of busy SMs, joules per FLOP and per byte."""
    table = [_power_row(row, constants) for row in rows]
    t, clock, busy_s, hbm, l2, joules = (np.array([row[i] for row in table]) for i in range(6))
    flops = np.array([row[6] for row in table])

    def energy(p: np.ndarray) -> np.ndarray:
        static, active, hbm_pj, l2_pj, slope, floor = p[:6]
        square = np.maximum(floor, 1 - slope * (1 - clock)) ** 2
        sm_j = active * busy_s * clock + flops @ p[6:] * 1e-12 + l2_pj * 1e-12 * l2
        return static * t + square * sm_j + hbm_pj * 1e-12 * hbm

    extra = len(UNITS) + 1 + len(STREAM_COSTS)
    start = np.array([110, 250, 60, 5, 0.33, 0.6, 0.6, 0.7, 1.3, 0.4, 5, 10, *[100] * len(STREAM_COSTS)], float)
    low = np.array([100, 0, 0, 3.0, 0.1, 0.4, *[0] * extra], float)
    high = np.array([127, 450, 150, 40, 1.0, 0.9, *[2] * 4, 20, 100, *[1500] * len(STREAM_COSTS)], float)
    found = least_squares(lambda p: np.log(energy(p) / joules), start, bounds=(low, high), loss="soft_l1", f_scale=0.06)
    p = found.x
    error = energy(p) / joules - 1
    per_flop = dict(zip(UNITS, (p[6 : 6 + len(UNITS)] * 1e-12).tolist(), strict=True))
    # Not measured: int8 as fp8, vector 16-bit at half of fp32's joules, fp64 by width (a product of 53 bits for 24).
    per_flop |= {"matrix.int8": per_flop["matrix.fp8"], "vector.bf16": per_flop["vector.fp32"] / 2}
    per_flop |= {"vector.fp16": per_flop["vector.fp32"] / 2, "vector.fp64": 3 * per_flop["vector.fp32"]}
    per_flop["matrix.fp64"] = 1.5 * per_flop["vector.fp32"]
    costs = p[7 + len(UNITS) :] * 1e-12 / per_flop["vector.fp32"]
    return {
        "static_w": p[0], "active_w": p[1], "hbm_j_per_byte": p[2] * 1e-12, "l2_j_per_byte": p[3] * 1e-12,
        "voltage_slope": p[4], "voltage_floor": p[5], "j_per_flop": per_flop, "limit_fraction": 0.987,
        "softmax_flops_per_score": p[6 + len(UNITS)] * 1e-12 / per_flop["vector.fp32"],
        "vector_flops_per_element": dict(zip(STREAM_COSTS, costs.round(1).tolist(), strict=True)),
        "fit": {"rows": len(rows), "mean_abs_error": float(np.mean(np.abs(error)))},
    }  # fmt: skip


def _power_row(row: Row, constants: dict[str, Any]) -> tuple[Any, ...]:
    """Seconds, relative clock, busy seconds, bytes, joules and FLOPs by unit; times are the measured ones."""
    flops = np.zeros(len(UNITS) + 1 + len(STREAM_COSTS))
    a, t = row.args, row.seconds
    if row.kind == "gemm":
        f = {name: value.ravel()[0] for name, value in gemm_columns(constants["gemm"], [row]).items()}
        flops[UNITS.index(_unit(a["precision"]))] = 2.0 * a["m"] * a["n"] * a["k"] * a["batch"]
        body_s = t - min(0.6 * t, float(f["overhead_s"]))
        busy, hbm, l2 = float(f["busy_s"] / f["body_s"]), float(f["hbm_bytes"]), float(f["l2_bytes"])
    elif row.kind == "attention":
        f = {
            name: value.ravel()[0]
            for name, value in attention.formula(constants["attention"][row.source], H200, calls([row])).items()
        }
        flops[UNITS.index(_unit(a["precision"]))] = f["flops"]
        flops[len(UNITS)] = f["scores"]
        body_s = t - min(0.6 * t, float(f["overhead_s"]))
        busy, hbm, l2 = float(f["busy_s"] / f["body_s"]), float(f["hbm_bytes"]), float(f["l2_bytes"])
    else:
        # Elementwise kernels: 1.1 us to launch (h200_ops, 4,096 elements), 2,048 elements in flight on an SM.
        body_s, busy = t - min(0.6 * t, 1.1e-6), min(1.0, a["elements"] / (132 * 2048))
        hbm, l2 = a["bytes"] * min(1.0, max(0.0, (a["held_bytes"] / H200.cache_bytes - 0.55) / 0.3)), a["bytes"]
        if a["case"] in STREAM_COSTS:
            flops[len(UNITS) + 1 + STREAM_COSTS.index(a["case"])] = a["elements"]
    return t, (row.clock_hz or BOOST_HZ) / BOOST_HZ, busy * body_s, hbm, l2, row.joules, flops


def _unit(precision: str) -> str:
    return H200.peak(precision)[1]


# ---------------------------------------------------------------- matrix products
# The cache is held to be no slower than device memory (18 bytes per SM and cycle on the H200).
GEMM_START: dict[str, tuple[float, float, float]] = {  # start, low, high
    "launch_us.torch": (1.0, 0.05, 4.0), "launch_us.vllm": (1.5, 0.05, 4.0), "feed_bytes_per_cycle": (120, 20, 400),
    "sm_bytes_per_cycle": (100, 30, 250), "matrix.tile_cost": (3.0, 0.01, 12),
    "matrix.tile_cycles": (3000, 0, 9000), "matrix.split_cycles": (5000, 0, 12000), "matrix.tile_shown": (0.8, 0.0, 1.0),
    "vector.tile_cost": (1.0, 0.01, 12), "vector.tile_cycles": (3000, 0, 20000), "vector.split_cycles": (9000, 0, 40000),
    "vector.tile_shown": (0.8, 0.0, 1.0), "misaligned_exponent": (1.0, 0.2, 2.0), "misaligned_out_exponent": (1.28, 0.2, 2.0), "overlap": (0.45, 0.0, 0.9), "cache_kept": (0.5, 0.4, 0.8), "cache_spill": (0.5, 0.2, 0.8), "bandwidth": (0.9, 0.7, 0.97),
    "cache_bytes_per_cycle": (22, 18.5, 60), "exponent": (1.75, 1.1, 6), "misaligned_flops_per_cycle": (390, 100, 1000),
    "switching_vllm": (0.85, 0.4, 1.1), "cast.fp8_block.us": (2.5, 0.0, 20.0), "cast.fp8_block.bytes": (3, 0, 12),
}  # fmt: skip
EFFICIENCIES = ("bf16", "fp16", "tf32", "fp8", "fp8_block", "fp32")


def products(rows: Sequence[Row]) -> gemm.Product:
    """Rows of one precision, layout and source as one product of arrays."""
    m, n, k, batch = (np.array([float(row.args[name]) for row in rows]) for name in ("m", "n", "k", "batch"))
    how = rows[0].args
    return gemm.Product(
        m, n, k, batch, how["precision"], how.get("layout", "nt"), rows[0].source, bias=how.get("bias", False)
    )


def gemm_columns(constants: dict[str, Any], rows: Sequence[Row]) -> Columns:
    """The formula for many rows of one precision, layout and source."""
    crossing = np.array([row.args.get("hbm_bytes", np.nan) for row in rows])
    return gemm.formula(constants, H200, products(rows), None, crossing)


def gemm_predicted_s(
    c: dict[str, Any], power: dict[str, Any], rows: Sequence[Row], f: Columns, factor: Any = 1.0
) -> np.ndarray:
    """Capped seconds as measured: through the power limit, and not under vLLM's host floor."""
    precision = rows[0].args["precision"]
    vllm = np.array([row.source == "vllm" for row in rows])
    flops = np.array([2.0 * r.args["m"] * r.args["n"] * r.args["k"] * r.args["batch"] for r in rows])
    seconds = f["overhead_s"] + f["body_s"] * factor
    clock_s = f["clock_s"] * factor
    t = {
        "clock_s": clock_s, "fixed_s": seconds - clock_s, "busy_s": f["busy_s"] * factor, "hbm_bytes": f["hbm_bytes"],
        "l2_bytes": f["l2_bytes"], "flops_j": flops * power["j_per_flop"][_unit(precision)],
    }  # fmt: skip
    found = capped_s(power, t, np.where(vllm, c["switching_vllm"], 1.0))
    found = np.where([row.in_situ for row in rows], seconds, found)
    if precision == "fp8_block":
        found = np.maximum(found, gemm.host_floor_s(c, products(rows)))
    return found


def fit_gemm(rows: Sequence[Row], power: dict[str, Any], start: dict[str, Any]) -> dict[str, Any]:
    """Constants of the formula by least squares on the logarithm of capped seconds."""
    names = [*GEMM_START, *(f"efficiency.{p}" for p in EFFICIENCIES)]
    bounds = [*(GEMM_START[name][1:] for name in GEMM_START), *((0.4, 1.0) for _ in EFFICIENCIES)]
    x0 = [functools.reduce(lambda table, key: table[key], n.split("."), start) for n in names]
    low, high = np.array(bounds, float).T
    x0 = np.clip(np.array(x0, float), low + 1e-6 * (high - low), high - 1e-6 * (high - low))
    groups = _of_one_kind(rows)

    def errors(x: np.ndarray) -> np.ndarray:
        c, found = gemm_constants(names, x), []
        for members in groups:
            predicted = gemm_predicted_s(c, power, members, gemm_columns(c, members))
            # The project's own rows are few and are what whole models resemble: they count two to five times.
            weight = np.array([1.0 if row.source == "vllm" else 1.4 if row.in_situ else 2.2 for row in members])
            found.append(weight * np.log(predicted / np.array([row.seconds for row in members])))
        return np.concatenate(found)

    scale = np.maximum(0.1 * (high - low), 1e-3)
    result = least_squares(
        errors, x0, bounds=(low, high), loss="soft_l1", f_scale=0.08, x_scale=scale, diff_step=2e-3, max_nfev=25
    )
    return gemm_constants(names, result.x)


def gemm_constants(names: Sequence[str], x: np.ndarray) -> dict[str, Any]:
    c: dict[str, Any] = {}
    for name, value in zip(names, x, strict=True):
        *tables, entry = name.split(".")
        functools.reduce(lambda table, key: table.setdefault(key, {}), tables, c)[entry] = float(value)
    e = c["efficiency"]
    # Not measured: int8 as fp8; other small formats likewise; fp64 on matrix units as tf32.
    e |= {"int8": e["fp8"], "fp6": e["fp8"], "fp4": e["fp8"], "int4": e["fp8"], "fp64": e["tf32"]}
    c["cast"]["fp8_block"]["row_cycles"] = 0.0
    return c | {"tile_exponent": 6.0, "host_floor_s": FLOORS, "tiles": {}, "flops_per_cycle": _per_cycle()}


def _per_cycle() -> dict[str, float]:
    """FLOPs of one SM of the H200 in a cycle, by precision."""
    names = [*EFFICIENCIES, "int8", "fp6", "fp4", "int4", "fp64"]
    return {n: H200.peak(n)[0] * H200.boost_over_quoted / (H200.units * H200.clock_hz) for n in names}


# Medians of the public rows that the device cannot explain (each class within 1%): host time of vLLM's fp8 path.
FLOORS = {"fp8_block": [5.2e-5, 7.48e-5, 8.4e-5, 8.4e-5]}


def _of_one_kind(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(
            (row.args["precision"], row.args.get("layout", "nt"), row.source, row.args.get("bias", False)), []
        ).append(row)
    return list(groups.values())


# ---------------------------------------------------------------- what the formula leaves over
DEPTH = 5


def fit_trees(
    x: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    rounds: int = 200,
    depth: int = DEPTH,
    rate: float = 0.25,
    leaf: int = 10,
    alpha: float = 0.1,
    digits: int = 6,
    sampled: bool = True,
) -> dict[str, Any]:
    """Boosted trees on the logarithm of measured over predicted, laid out as `kernel_time.Trees` reads them.

    `sampled`: each tree sees a part of the rows and columns, which makes the fit depend on the order of the rows.
    """
    import lightgbm

    params = {
        "objective": "huber", "alpha": alpha, "learning_rate": rate, "max_depth": depth, "num_leaves": 2**depth, "verbose": -1,
        "min_data_in_leaf": leaf, "min_data_in_bin": 1, "lambda_l2": 2.0, "bagging_fraction": 0.8, "bagging_freq": int(sampled), "feature_fraction": 0.7 if sampled else 1.0,
        "seed": 1, "num_threads": 1, "deterministic": True,
    }  # fmt: skip
    booster = lightgbm.train(params, lightgbm.Dataset(x, y, weight=weight), num_boost_round=rounds)
    inner = 2**depth - 1
    split, threshold, leaves = [], [], []
    for tree in booster.dump_model()["tree_info"]:
        s, h, v = [0] * inner, [0.0] * inner, [0.0] * (inner + 1)
        _lay_out(tree["tree_structure"], 0, s, h, v)
        h = [float(f"{limit:.{digits}g}") for limit in h]
        split.append(s)
        threshold.append(h)
        leaves.append(v)
    bound = float(np.quantile(np.abs(y), 0.995))
    return {"split": split, "threshold": threshold, "leaf": leaves, "bound": round(bound, 3)}


def _lay_out(node: dict[str, Any], at: int, split: list[int], threshold: list[float], leaf: list[float]) -> None:
    inner = len(split)
    if at >= inner:
        leaf[at - inner] = round(node["leaf_value"], 5)
    elif "leaf_value" in node:  # an early leaf: both sides of a split that never matters
        for child in (2 * at + 1, 2 * at + 2):
            _lay_out(node, child, split, threshold, leaf)
    else:
        split[at], threshold[at] = node["split_feature"], node["threshold"]
        _lay_out(node["left_child"], 2 * at + 1, split, threshold, leaf)
        _lay_out(node["right_child"], 2 * at + 2, split, threshold, leaf)


def attention_residual(
    c: dict[str, Any], power: dict[str, Any], source: str, rows: Sequence[Row], switching: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, log(measured / predicted) and weights of one source's rows of one pass."""
    xs, ys, ws = [], [], []
    for members in _alike([row for row in rows if not row.args.get("with_backward")]):
        call = calls(members, backward=bool(members[0].args.get("backward")))
        xs.append(attention.features(call, attention.formula(c, H200, call)))
        measured = np.array([row.seconds for row in members])
        ys.append(np.log(measured / attention_predicted_s(c, power, source, members, switching)))
        ws.append(np.array([row.weight for row in members]))
    return np.concatenate(xs), np.concatenate(ys), np.concatenate(ws)


def gemm_residual(
    c: dict[str, Any], power: dict[str, Any], rows: Sequence[Row]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, log(measured / predicted) and weights of the rows that the device explains (not the host's floor)."""
    xs, ys, ws = [], [], []
    for members in _of_one_kind(rows):
        f, of = gemm_columns(c, members), products(members)
        precision, torch = of.precision, np.full(len(members), of.source == "torch")
        measured = np.array([row.seconds for row in members])
        x = gemm.features(of, f)
        keep = np.ones(len(members), bool)
        if precision == "fp8_block":
            keep = torch | (measured > 1.06 * gemm.host_floor_s(c, of))
        xs.append(x[keep])
        ys.append(np.log(measured / gemm_predicted_s(c, power, members, f))[keep])
        ws.append((np.where(torch, 2.0, 1.0) * np.array([row.weight for row in members]))[keep])
    return np.concatenate(xs), np.concatenate(ys), np.concatenate(ws)


# ---------------------------------------------------------------- attention
ATTENTION_START: dict[str, tuple[float, float, float]] = {  # start, low, high
    "efficiency": (0.8, 0.3, 1.0), "head_cost": (8.0, 0.0, 60), "score_cycles": (0.06, 0.0, 0.4), "convert_cycles": (0.05, 0.0, 1.0), "load_cycles": (0.03, 0.0, 1.0),
    "step_exponent": (2.0, 1.0, 6.0), "block_cycles": (3000, 0, 20000), "block_cycles_per_dim": (15, 0, 200), "split_cycles": (4000, 0, 30000), "overlap": (0.6, 0.0, 0.98),
    "launch_us": (4.5, 1.0, 20.0), "bandwidth": (0.8, 0.5, 0.97), "cache_bytes_per_cycle": (22, 18.5, 60),
    "cache_kept": (0.5, 0.4, 0.8), "cache_spill": (0.5, 0.2, 0.8), "exponent": (2.0, 1.0, 6.0),
}  # fmt: skip
# Only PyTorch's rows have these; vLLM's constants carry the same values, unused.
TORCH_ONLY: dict[str, tuple[float, float, float]] = {
    "vector_efficiency": (0.5, 0.1, 1.0), "backward": (0.6, 0.2, 1.2), "backward_us": (8.0, 2.0, 30.0), "mask_factor": (2.0, 1.0, 6.0),
    "mask_backward": (4.0, 1.0, 12.0),
}  # fmt: skip


# FLOPs of one SM of the H200 in a cycle, 16-bit; FlashAttention-3 packs heads into a block, cuDNN for one query only.
FIXED: dict[str, dict[str, Any]] = {
    "torch": {"flops_per_cycle": 4096.0, "packing": "single"},
    "vllm": {"flops_per_cycle": 4096.0, "packing": "always"},
}


def calls(rows: Sequence[Row], *, backward: bool = False) -> attention.AttentionCall:
    """Rows of one kind (see `_alike`) as one call of arrays."""
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
    first, sizes = rows[0].args, {name: np.array([float(row.args[name]) for row in rows]) for name in names}
    return attention.AttentionCall(
        **sizes,
        causal=np.array([bool(row.args["causal"]) for row in rows]),
        window=np.array([float(row.args.get("window") or np.inf) for row in rows]),
        precision=first["precision"],
        kv_precision=first.get("kv_precision") or first["precision"],
        mask=bool(first.get("mask")),
        backward=backward,
        source=rows[0].source,
    )


def attention_predicted_s(
    c: dict[str, Any], power: dict[str, Any], source: str, rows: Sequence[Row], switching: float
) -> np.ndarray:
    """Capped seconds of rows of one kind; rows that ran forward and backward get the sum."""
    passes = (False, True) if rows[0].args.get("with_backward") else (bool(rows[0].args.get("backward")),)
    parts = [attention.formula(c, H200, calls(rows, backward=backward)) for backward in passes]
    unit = attention._rate(H200, rows[0].args["precision"])[1]
    score_j = power["softmax_flops_per_score"] * power["j_per_flop"]["vector.fp32"]
    t = {
        "clock_s": sum(f["clock_s"] for f in parts), "busy_s": sum(f["busy_s"] for f in parts),
        "fixed_s": sum(f["overhead_s"] + f["body_s"] - f["clock_s"] for f in parts),
        "flops_j": sum(f["flops"] * power["j_per_flop"][unit] + f["scores"] * score_j for f in parts),
        "hbm_bytes": sum(f["hbm_bytes"] for f in parts), "l2_bytes": sum(f["l2_bytes"] for f in parts),
    }  # fmt: skip
    found = capped_s(power, t, switching)  # type: ignore[arg-type]
    return np.where([row.in_situ for row in rows], t["clock_s"] + t["fixed_s"], found)


def _alike(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row.args.get(name) for name in ("precision", "kv_precision", "mask", "with_backward", "backward"))
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def fit_attention(rows: Sequence[Row], power: dict[str, Any], source: str, switching: float) -> dict[str, Any]:
    """Constants of one source's attention kernels by least squares on the logarithm of capped seconds."""
    table = ATTENTION_START | (TORCH_ONLY if source == "torch" else {})
    names = list(table)
    low, high = (np.array([table[name][i] for name in names], float) for i in (1, 2))
    prior = np.array([table[name][0] for name in names])
    x0 = np.clip(prior, low + 1e-4 * (high - low), high - 1e-4 * (high - low))
    groups = _alike(rows)
    # PyTorch's rows are too few for every constant: what they do not decide stays near where it started.
    stiffness = 0.15 if source == "torch" else 0.0

    def errors(x: np.ndarray) -> np.ndarray:
        c = {**{n: v[0] for n, v in TORCH_ONLY.items()}, **dict(zip(names, x, strict=True)), **FIXED[source]}
        found = [
            np.array([row.weight for row in members])
            * np.log(
                attention_predicted_s(c, power, source, members, switching) / np.array([row.seconds for row in members])
            )
            for members in groups
        ]
        return np.concatenate([*found, stiffness * (x - prior) / (high - low)])

    scale = 0.1 * (high - low)
    result = least_squares(
        errors, x0, bounds=(low, high), loss="soft_l1", f_scale=0.1, x_scale=scale, diff_step=2e-3, max_nfev=40
    )
    constants = {**{n: v[0] for n, v in TORCH_ONLY.items()}, **dict(zip(names, result.x.tolist(), strict=True))}
    return constants | FIXED[source]


def gemm_start() -> tuple[list[str], np.ndarray]:
    names = [*GEMM_START, *(f"efficiency.{p}" for p in EFFICIENCIES)]
    return names, np.array([*(GEMM_START[n][0] for n in GEMM_START), *(0.9 for _ in EFFICIENCIES)])
