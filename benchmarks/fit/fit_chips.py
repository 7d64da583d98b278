"""Fit products, attention and fused experts of chips with public timings, and the constants that other chips share.

    python benchmarks/fit/fit_chips.py [--shared ../shared] [--chips h100,b200,...] [--first]

Needs scipy beside numpy; nothing of it is used at run time. Reads public_kernels/*.csv.gz (short loops at full clock),
writes src/tessera/estimate/data/CHIP_kernels.json and other_kernels.json. Constants and corrections are fitted on the
fit split, half-widths found on the development split; then both are fitted. The shared constants are fitted on
all chips at once; their half-widths are the errors on each chip when it is left out (printed, and written to
results/left_out_chips.json). The final split is left alone: benchmarks/predict/public_kernels.py reads it.

Chips differ by more than their figures: tables without watts were timed in loops of six launches, of which the first
waits for the host (aiconfigurator's collector/helper.py). The shared fit finds what that adds ("loop_us"); nobody knows
how a new chip will be timed, so it gets half of it. The shared fit also finds how the share of the matrix peak falls
with the FLOPs that a board's peak has for a watt ("watts"), and takes other formats from 16 bits, where few chips tell.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

import kernel_fits as fits
from chip_families import (
    FAMILIES,
    FEW,
    Constants,
    Family,
    Sample,
    Table,
    fit_family,
    fit_together,
    host_floors,
    samples,
    thin,
)
from fit_kernels import DATA, write
from kernel_rows import ROOT, SHARED, Row, kernel_of, read_public
from tessera.estimate.kernel_time import FITTED, chip, load_fit
from tessera.estimate.kriging import Kriging
from tessera.estimate.power import DeviceWork, PowerModel
from tessera.hardware import lookup

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result


def move_launch(constants: Constants, by_us: float) -> Any:
    """A launch's time of constants, longer by so much."""
    own = constants["launch_us"]
    if isinstance(own, dict):
        return {name: max(0.05, us + by_us) for name, us in own.items()}
    return max(0.05, own + by_us)


def for_new_chips(data: Mapping[str, Any]) -> dict[str, Any]:
    """Shared constants for a chip of which nobody knows how it will be timed: half of what short loops add."""
    constants = {
        kernel: {**c, "launch_us": move_launch(c, 0.5 * c["loop_us"])} if "loop_us" in c else c
        for kernel, c in data["constants"].items()
    }
    return {**data, "constants": {k: {n: v for n, v in c.items() if n != "loop_us"} for k, c in constants.items()}}


def change_for_relatives(own: Constants, s: Sample, shared: Constants) -> Constants:
    """What a relative's constants become on another chip: short loops halved, the efficiency by FLOPs for a watt."""
    if "loop_us" not in shared:
        return {}
    launch = move_launch(own, (-0.5 if s.few_runs else 0.5) * shared["loop_us"])
    return {"launch_us": launch, "watts": {"exponent": shared["watts"]["exponent"], "flops_per_j": s.of.flops_per_j}}


# ---------------------------------------------------------------- watts
# Watts always and of busy SMs, pJ per byte of device memory and cache, pJ per FLOP.
POWER: Table = {
    "static_w": (200, 137, 350), "active_w": (250, 0, 800), "hbm_j_per_byte": (50, 0, 150), "l2_j_per_byte": (15, 0, 60),
    "matrix.bf16": (0.3, 0, 1), "matrix.fp8": (0.2, 0, 1), "matrix.fp4": (0.1, 0, 1), "vector.fp32": (5, 0, 20),
}  # fmt: skip


def fit_power(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Constants of the power model from rows whose watts last long enough, on the times that the fits above predict.

    NVML's average over a second mixes a kernel's loop with what ran before it: like shapes differ by a factor of two. So
    the loss is robust, rows count by how many readings they have (`count_readings`), and the half-width is that of the
    development split.
    """
    base = PowerModel.from_device(lookup(name))
    trusted = [(row, DeviceWork.of(kernel_of(row))) for row in rows if row.public_w is not None]
    weight = np.array([min(1.0, row.readings / 10) for row, _ in trusted])
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
            lambda x: (weight * np.log(joules(x) / measured))[chosen], start, bounds=(low, high), loss="soft_l1", f_scale=0.05,
            x_scale=0.1 * (high - low), diff_step=1e-3,
        ).x  # fmt: skip

    split = np.array([row.split for row, _ in trusted])
    unseen = split == "development"
    error = measured / joules(solve(split == "fit")) - 1
    long = unseen & (weight == 1)
    for label, some in (("", unseen), (", long windows", long)):
        print(line(f"{name} joules, development{label}", [(measured[some], error[some])]), flush=True)
    width = float(np.quantile(np.abs(error[unseen]), 0.9))
    return as_power(solve(split != "final")) | {"relative_error": width}


# ---------------------------------------------------------------- how good it is
def relative(family: Family, data: Mapping[str, Any], kernel: str, s: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Predicted seconds and measured over predicted - 1, as the package does it."""
    seconds, x = family.predict(data["constants"][kernel], s)
    if "correction" in data:
        seconds = seconds * np.exp(Kriging.of(data["correction"])(x))
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
        found = fit_family(family, fit)
        if not found:
            continue
        seen = {k: relative(family, found, k, untold(unseen[k][name])) for k in found["constants"] if name in unseen[k]}
        for kernel, pair in seen.items():
            print(line(f"{name} {family.kind} {kernel}, development", [pair]), flush=True)
        print(line(f"{name} {family.kind}, development", list(seen.values())), flush=True)
        interval = {k: half_widths([pair], 4) for k, pair in seen.items() if len(pair[0]) >= FEW}
        interval["any"] = half_widths(list(seen.values()), 4)
        data[family.kind] = {"interval": interval, **(found if first else fit_family(family, both))}
    return data


def find_relative(name: str, chips: Sequence[str]) -> str | None:
    """The other chip of the same compute capability (chip_fits.find_fit)."""
    of = chip(lookup(name))
    return next((d for d in chips if d != name and chip(lookup(d)).capability == of.capability), None)


def untold(s: Sample) -> Sample:
    """The rows of a chip of which nobody knows how they were timed."""
    return replace(s, few_runs=False, floors={})


def leave_out(family: Family, of: Mapping[str, Mapping[str, Sample]]) -> dict[str, dict[str, Any]]:
    """By chip and kernel: predicted seconds and errors of constants that were fitted without the chip."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({device for by_chip in of.values() for device in by_chip}):
        target = chip(lookup(name))
        rest = {k: {d: s for d, s in by.items() if d != name} for k, by in of.items() if name in by and len(by) > 1}
        how = {"asynchronous": target.asynchronous if family.by_library else None, "architecture": target.architecture}
        shared = fit_together(family, rest, **how)
        new = for_new_chips(shared)
        own = {k: [thin(by[d], 1000)] for k, by in rest.items() if (d := find_relative(name, list(by)))}
        related = fit_family(family, own)
        for kernel, c in related.get("constants", {}).items():
            c.update(change_for_relatives(c, own[kernel][0], shared["constants"][kernel]))
        found[name] = {
            k: relative(family, related if k in related.get("constants", {}) else new, k, untold(of[k][name]))
            for k in new["constants"]
        }  # fmt: skip
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
        related = find_relative(name, list(left_out))
        strangers = widths_from(left_out, [other for other in left_out if other != name])
        alike = left_out[related] if related else {}  # kernels that the relative was timed on too
        inside, errors = [], []
        for kernel, (seconds, error) in pairs.items():
            table = widen(list(alike.values())) if kernel in alike else strangers.get(kernel) or strangers["any"]
            width = np.interp(np.log10(seconds), table["log10_s"], table["half_width"])
            inside.append(np.abs(error) <= np.minimum(width, 0.95))
            errors.append(np.abs(1 / (1 + error) - 1))
            print(
                line(f"{name} {family.kind} {kernel}, left out", [(seconds, error)]),
                f"coverage {inside[-1].mean():.0%}",
                flush=True,
            )
        share = float(np.concatenate(inside).mean())
        print(line(f"{name} {family.kind}, left out", list(pairs.values())), f"coverage {share:.0%}", flush=True)
        by_kernel = {k: float(e.mean()) for k, e in zip(pairs, errors, strict=True)}
        scores[name] = {**summary(errors, inside), "by_kernel": by_kernel}
        if related:
            own = [i for i, kernel in enumerate(pairs) if kernel in alike]
            found = summary([errors[i] for i in own], [inside[i] for i in own])
            scores[name]["from_relative"] = {"chip": related, **found}
    return scores


def summary(errors: Sequence[np.ndarray], inside: Sequence[np.ndarray]) -> dict[str, Any]:
    """Rows, errors, and the share inside the half-widths."""
    all_errors = np.concatenate(errors)
    return {
        "rows": len(all_errors),
        "mean_abs_error": float(all_errors.mean()),
        "median_abs_error": float(np.median(all_errors)),
        "coverage_90": float(np.concatenate(inside).mean()),
    }


# A pair of chips tells roughly how much relatives differ: half-widths are a fifth wider than its errors.
TWO_CHIPS = 1.2


def widen(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, list[float]]:
    """Half-widths for relatives of a chip with timings: one is as likely faster as the other is slower."""
    table = half_widths([(seconds, np.expm1(np.abs(np.log1p(error)))) for seconds, error in pairs], 3)
    return {**table, "half_width": [round(TWO_CHIPS * width, 3) for width in table["half_width"]]}


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
        related = [pair for n in left_out if find_relative(n, list(left_out)) for pair in left_out[n].values()]
        shared = fit_together(family, of, asynchronous=True if family.by_library else None)
        data[family.kind] = {
            "interval": interval,
            "relatives": {"any": widen(related)} if related else interval,
            "changes": changes_by_chip(family.kind, of, shared),
            **for_new_chips(shared),
        }
        if family.kind == "gemm":
            block = list(of["fp8_block"].values())
            data["gemm"]["host_floors"] = {a: host_floors("fp8_block", block, a) for a in ("hopper", "blackwell")}
        if family.by_library:
            older = for_new_chips(fit_together(family, of, asynchronous=False))
            data[f"{family.kind}.synchronous"] = {"interval": interval, **older}
    write_result(ROOT / "benchmarks" / "results" / "left_out_chips.json", {"left_out": scores})
    return data


def changes_by_chip(kind: str, of: Mapping[str, Mapping[str, Sample]], shared: Mapping[str, Any]) -> dict[str, Any]:
    """By chip and kernel, what its own constants become on a relative."""
    found: dict[str, Any] = {}
    for name in FITTED:
        own = load_fit(f"{name}_kernels.json").get(kind, {"constants": {}})["constants"]
        found[name] = {
            k: change_for_relatives(c, of[k][name], shared["constants"][k]) for k, c in own.items() if k in of and name in of[k]
        }  # fmt: skip
    return found


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
