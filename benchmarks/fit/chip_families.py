"""The kernels that fit_chips.py fits: how rows of three families become arrays, and their constants.

One chip is fitted alone (`fit_family`), or several together (`fit_together`) for chips of which there are no timings.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

import kernel_fits as fits
from kernel_rows import Row
from tessera.estimate import attention, gemm, moe
from tessera.estimate.kernel_time import Chip, chip, load_fit
from tessera.estimate.kriging import covariance
from tessera.hardware import lookup

Table = Mapping[str, tuple[float, float, float]]  # start, low, high
Constants = dict[str, Any]

GEMM: Table = {
    "launch_us.vllm": (1.4, 0.05, 4), "feed_bytes_per_cycle": (120, 20, 400), "sm_bytes_per_cycle": (80, 20, 300),
    "matrix.tile_cost": (0.8, 0.01, 12), "matrix.tile_cycles": (2650, 0, 9000), "matrix.split_cycles": (5100, 0, 16000),
    "matrix.tile_shown": (0.9, 0, 1), "overlap": (0.5, 0, 0.95), "cache_kept": (0.4, 0, 0.9), "cache_spill": (0.24, 0.1, 0.8),
    "bandwidth": (0.92, 0.6, 0.99), "cache_bytes_per_cycle": (19, 6, 60), "exponent": (1.57, 1.1, 6), "efficiency": (0.8, 0.2, 1.0),
}  # fmt: skip
CAST: Table = {"cast.us": (3, 0, 30), "cast.bytes": (3, 0, 20), "cast.row_cycles": (500, 0, 8000)}
# Copies of the weights that loops go round. Inferred, not read in the collector: 5 and 6 fit alike, 1 fits worse on every
# chip that is left out (within a chip, fp4 alone fits as well with 1).
COPIES = {"weight_copies": 6.0}
# Tiles of quantised kernels: the narrowest, and no division of k.
TILES = ([1, 1], [16, 1], [64, 1], [128, 1])
ATTENTION: Table = {
    "efficiency": (0.6, 0.1, 1.0), "head_cost": (10, 0, 100), "score_cycles": (0.05, 0, 0.6), "convert_cycles": (0.1, 0, 2),
    "load_cycles": (0.1, 0, 2), "step_exponent": (2, 1, 8), "block_cycles": (3000, 0, 20000), "block_cycles_per_dim": (10, 0, 80),
    "split_cycles": (3000, 0, 20000), "overlap": (0.3, 0, 0.99), "launch_us": (5, 0.5, 14), "bandwidth": (0.85, 0.4, 0.99),
    "cache_bytes_per_cycle": (18, 3, 60), "cache_kept": (0.4, 0, 0.9), "cache_spill": (0.3, 0.1, 0.9), "exponent": (1.5, 1.0, 6),
}  # fmt: skip
# What only several chips tell together, and how far other formats are held to the constants of 16 bits.
WATTS: Table = {"watts.exponent": (0.4, 0, 1)}
FLOPS_PER_J = 1.5e12  # at which shared efficiencies hold: about that of Hopper
PULL_FIRST, LIBRARY = 2.0, 4.0  # towards the start; weight of chips that run the same attention library
PACKINGS = ("always", "single", "grouped")
MOE: Table = {
    "launch_us": (30, 1, 200), "expert_us": (0.1, 0, 20), "bandwidth": (0.7, 0.05, 0.99), "efficiency": (0.6, 0.05, 1),
    "pad_rows": (16, 0, 200), "row_bytes": (4, 0, 60), "exponent": (1.5, 1, 6), "reach": (0.6, 0.1, 1.5),
    "skew": (0.3, 0, 4), "wave": (0.5, 0, 6),
}  # fmt: skip
# The variance of a shape's own error over that which near shapes share: of one chip, of chips together. Errors over
# OUTLIER (logarithm) are those of a library that chose a slow kernel, and say little of near shapes.
NOISE, NOISE_OF_OTHERS, OUTLIER = 0.1, 1.0, 0.5
FEW = 20  # rows under which a kernel is not fitted


@dataclass(frozen=True)
class Sample:
    """Rows of one kernel on one chip, as one call of arrays."""

    of: Chip
    call: Any
    seconds: np.ndarray
    few_runs: bool = False  # timed in loops of six launches
    floors: Constants = field(default_factory=dict)  # its own host's times, whatever the constants say


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
    lengths: Mapping[
        int, float
    ]  # features by which shapes are near each other, and over how much of one errors are alike
    together: Table  # more constants where chips are fitted together
    base: Callable[[str], str] = lambda kernel: kernel  # the kernel whose shared constants hold this one's
    shortest: str = ""  # the kernel that tells best what short loops add
    pull: float = 0.0  # how firmly
    scatter: float = 0.1  # of chips that are fitted together, over which the loss is no longer quadratic
    of_others: Constants | None = None  # the option of chips that are fitted together; None: the best
    correct_others: bool = False
    points: int = 650  # of a correction: more make files larger, and errors smaller by a tenth of them at most
    by_library: bool = False  # whether chips with asynchronous matrix units run another library than the others

    def predict(self, constants: Constants, s: Sample) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and features of the correction."""
        t = self.formula(constants, s.of, s.call)
        floor_s = gemm.host_floor_s({**constants, **s.floors}, s.call) if self.kind == "gemm" else 0.0
        loop_s = constants.get("loop_us", 0.0) * 1e-6 * s.few_runs
        return np.maximum(t["overhead_s"] + t["body_s"], floor_s) + loop_s, self.features(s.call, t)


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
           lambda kernel: [{**COPIES, "tiles": {kernel: tile} if tile else {}} for tile in ([None] if kernel == "bf16" else TILES)],
           {0: 1.2, 1: 1.5, 2: 1.5, 17: 0.5, 7: 2, 8: 3, 18: 3, 9: 1, 19: 12, 20: 12, 21: 12},
           {**WATTS, "loop_us": (0.3, 0, 2)}, lambda _: "bf16", "bf16", 15.0, correct_others=True),
    Family("attention", _attention_name, fits.calls, _attention_formula, attention.features, lambda _: ATTENTION,
           lambda _: [{"packing": packing} for packing in PACKINGS],
           {0: 2.2, 2: 2.2, 3: 2.2, 5: 2.2, 6: 96, 7: 6, 8: 0.5, 11: 0.25, 14: 4.5, 15: 3, 16: 4.5}, {**WATTS, "loop_us": (2, 0, 8)},
           lambda kernel: kernel.replace("fp8", "bf16"), "decode.bf16", 30.0, 0.4, {"packing": "by library"}, correct_others=True, points=1100, by_library=True),
    Family("moe", lambda r: r.args["precision"], _join_experts, moe.formula, moe.features, lambda _: MOE, lambda _: [{}],
           {0: 2.2, 1: 2.2, 2: 2.2, 3: 6, 4: 3, 5: 3, 6: 1.5, 7: 3, 9: 3, 12: 4.5, 13: 0.75, 14: 6}, {}),
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
        sample = Sample(chip(lookup(device)), family.join(members), seconds, members[0].limit_w is None)
        found[kernel][device] = replace(sample, floors=host_floors(kernel, [sample]))
    return found


def thin(s: Sample, most: int = 500) -> Sample:
    """At most so many rows, evenly taken: every chip counts the same where several are fitted together."""
    step = -(-len(s.seconds) // most)
    arrays = {f.name: v[::step] for f in fields(s.call) if isinstance(v := getattr(s.call, f.name), np.ndarray)}
    return replace(s, call=replace(s.call, **arrays), seconds=s.seconds[::step])


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
    if "watts" in c:
        c["watts"]["flops_per_j"] = FLOPS_PER_J
    return {**c, **option}


def host_floors(kernel: str, members: Sequence[Sample], architecture: str = "") -> Constants:
    """The host's time of block-scaled fp8, by how m is padded and whether n and k divide into blocks.

    vLLM calls other kernels by architecture: from chips of this one, where there are some.
    """
    if kernel != "fp8_block" or not isinstance(members[0].call, gemm.Product):
        return {"host_floor_s": {}} if isinstance(members[0].call, gemm.Product) else {}
    near = [s for s in members if s.of.architecture == architecture] or members
    return {"host_floor_s": {kernel: np.exp(np.mean([np.log(_floors(s)) for s in near], axis=0)).tolist()}}


def _floors(s: Sample) -> list[float]:
    m, n, k = s.call.m, s.call.n, s.call.k
    whole = (n % 64 == 0) & (k % 128 == 0)
    kinds = (whole & (m < 64), whole & (m >= 64) & (m % 4 == 0), whole & (m >= 64) & (m % 4 != 0), ~whole)
    floors = [float(np.quantile(s.seconds[kind], 0.35)) for kind in kinds if kind.sum() > 5]
    most = max(floors, default=float(np.quantile(s.seconds, 0.35)))
    return [float(np.quantile(s.seconds[kind], 0.35)) if kind.sum() > 5 else most for kind in kinds]


Fitted = tuple[Constants, dict[str, float]]  # nested, and flat by name


def fit_constants(
    family: Family, kernel: str, members: Sequence[Sample], weights: Sequence[float] | None = None,
    near: Mapping[str, float] | None = None, known: Constants | None = None,
) -> Fitted:  # fmt: skip
    """The best constants over options, by robust least squares; with weights, of chips together.

    `near` are constants that hold these, `known` those that need no fit.
    """
    known, near = known or {}, near or {}
    table = {**family.table(kernel), **(family.together if weights else {})}
    table = {name: entry for name, entry in table.items() if name not in known}
    start, low, high = np.array(list(table.values()), float).T
    start = np.array([near.get(name, value) for name, value in zip(table, start, strict=True)])
    # Every chip counts the same, but for one with few rows.
    most = 1.0 if weights else np.inf
    roots = [np.sqrt(w * min(most, 400.0 / len(s.seconds))) for w, s in zip(weights or [1.0], members, strict=True)]
    pull = (family.pull if near else PULL_FIRST) if weights and family.together else 0.0

    def solve(option: Constants, x: np.ndarray, tries: int) -> Any:
        def errors(x: np.ndarray) -> np.ndarray:
            c, found = as_constants(kernel, list(table), x, option), [pull * (x - start) / (high - low)]
            for s, root in zip(members, roots, strict=True):
                found.append(root * np.log(family.predict(c, s)[0] / s.seconds))
            return np.concatenate(found)

        inside = np.clip(x, low + 1e-4 * (high - low), high - 1e-4 * (high - low))
        return least_squares(
            errors, inside, bounds=(low, high), loss="soft_l1", f_scale=family.scatter if weights else 0.1, x_scale=0.1 * (high - low),
            diff_step=2e-3, max_nfev=tries,
        )  # fmt: skip

    fixed = weights and family.of_others is not None
    options = [{**option, **known} for option in ([family.of_others] if fixed else family.options(kernel))]
    option = min(options, key=lambda o: float(solve(o, start, 12).cost)) if len(options) > 1 else options[0]
    starts = [start] if pull else [start, low + (high - low) * np.random.default_rng(1).uniform(0.05, 0.6, len(low))]
    best = min((solve(option, x, 40) for x in starts), key=lambda r: float(r.cost))
    return as_constants(kernel, list(table), best.x, option), dict(zip(table, best.x.tolist(), strict=True))


def residuals(
    family: Family, fitted: Mapping[str, Constants], of: Mapping[str, Sequence[Sample]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, logarithms of measured over predicted, and weights."""
    xs, ys, ws = [], [], []
    for kernel, members in of.items():
        for s in members:
            seconds, x = family.predict(fitted[kernel], s)
            xs.append(x)
            ys.append(np.log(s.seconds / seconds))
            ws.append(np.full(len(seconds), np.sqrt(400.0 / len(s.seconds)) if len(members) > 1 else 1.0))
    return np.concatenate(xs), np.concatenate(ys), np.concatenate(ws)


def fit_family(family: Family, of: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """One chip: constants by kernel, and the correction of all of them."""
    of = {kernel: members for kernel, members in of.items() if sum(len(s.seconds) for s in members) >= FEW}
    if not of:
        return {}
    fitted = {k: fit_constants(family, k, members, known=host_floors(k, members))[0] for k, members in of.items()}
    return {"constants": fitted, "correction": fit_correction(family, fitted, of, NOISE)}


def fit_together(
    family: Family, of: Mapping[str, Mapping[str, Sample]], *, asynchronous: bool | None, architecture: str = ""
) -> dict[str, Any]:
    """Several chips: shared constants by kernel, first those that hold others; a correction where it carries over.

    Chips whose matrix units are as asynchronous as the target's count more where that decides the library.
    """
    fitted: dict[str, Fitted] = {}
    all_members = {k: [thin(s) for s in by_chip.values()] for k, by_chip in of.items()}
    loop: Constants = {}
    for kernel in sorted(all_members, key=lambda k: (k != family.shortest, family.base(k) != k, k)):
        members = all_members[kernel]
        weights = [LIBRARY if s.of.asynchronous == asynchronous else 1.0 for s in members]
        weights = [w * len(weights) / sum(weights) for w in weights]
        base = fitted.get(family.base(kernel), ({}, {}))[1] if family.base(kernel) != kernel else {}
        known = {**host_floors(kernel, members, architecture), **loop}
        fitted[kernel] = fit_constants(family, kernel, members, weights, base, known)
        if kernel == family.shortest:
            loop = {"loop_us": fitted[kernel][0]["loop_us"]}
    constants = {kernel: c for kernel, (c, _) in fitted.items()}
    found: dict[str, Any] = {"constants": constants}
    if family.by_library:  # of keys in 16 bits on synchronous units, FlashAttention-2; others have one for each chip
        all_members = {
            kernel: alike
            for kernel, members in all_members.items()
            if family.base(kernel) == kernel
            and (alike := [s for s in members if not s.of.asynchronous and not asynchronous])
        }
    if family.correct_others and all_members:
        found["correction"] = fit_correction(family, constants, all_members, NOISE_OF_OTHERS)
    return found


def fit_correction(
    family: Family, fitted: Mapping[str, Constants], of: Mapping[str, Sequence[Sample]], noise: float
) -> dict[str, Any]:
    """What near shapes have in common of what the formulas leave over (`estimate/kriging.py`).

    All rows are fitted, by weights of the few that lie farthest from each other (subset of regressors).
    """
    x, y, weight = residuals(family, fitted, of)
    lengths = np.array(list(family.lengths.values()))
    rows = x[:, list(family.lengths)] / lengths
    tenths = np.round(10 * rows[farthest(rows, family.points)])
    near, among = covariance(rows, tenths / 10), covariance(tenths / 10, tenths / 10)
    scaled = near.T * weight**2
    found = np.linalg.solve(
        scaled @ near + noise * among + 1e-8 * np.eye(len(among)), scaled @ np.clip(y, -OUTLIER, OUTLIER)
    )
    return {
        "features": list(family.lengths),
        "lengths": lengths.tolist(),
        "points": tenths.astype(int).tolist(),
        "weights": [float(f"{w:.3g}") for w in found],
        "bound": round(float(np.quantile(np.abs(y), 0.995)), 3),
    }


def farthest(rows: np.ndarray, most: int) -> list[int]:
    """Rows of which each is the farthest from those before it."""
    chosen, left = [0], ((rows - rows[0]) ** 2).sum(1)
    while len(chosen) < most and left.max() > 0:
        chosen.append(int(left.argmax()))
        left = np.minimum(left, ((rows - rows[chosen[-1]]) ** 2).sum(1))
    return chosen
