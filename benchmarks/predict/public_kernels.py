"""Public timings of single kernels beside our predictions at full clock (`state="burst"`), chip by chip.

    python benchmarks/predict/public_kernels.py [--shared ../shared] [--split final|development|all] [--json]
    python benchmarks/predict/public_kernels.py FILE.csv.gz ... --split all --json

Takes any tables of aiconfigurator's form: gemm, context_attention, generation_attention, moe; the chip is what their
`device` column says. Mean absolute error and coverage of the 90% intervals stand beside the goals (8, 12 and 15% for
products, attention and fused experts of a chip that was fitted; 15 and 20% for others) and the datasheet's roofline.
Where the table has watts, joules of kernels over 0.1 ms are scored too (goal 12%): NVML's average over a second times
the latency, against the prediction under the power limit. Loops shorter than that second are read with what ran before
them, so errors are given by the number of readings too, and beside them how far readings of like kernels lie from each
other. Those are alike by this model, so that its own faults count there too: no floor of the error. The final split was not used in any fit (fit_chips.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from kernel_accuracy import roofline_s
from tessera.estimate.kernel_time import CALIBRATED, FITTED
from tessera.estimate.power import DeviceWork, PowerModel
from tessera.hardware import lookup

sys.path.insert(0, str(Path(__file__).parents[1]))
from fit.kernel_rows import ROOT, SHARED, Row, kernel_of, predict, read_public
from result_file import write_result

GOALS = {"gemm": 0.08, "attention": 0.12, "moe": 0.15}
GOALS_OTHER = {"gemm": 0.15, "attention": 0.20}
GOAL_JOULES = 0.12


def predict_row(row: Row) -> tuple[float, float]:
    """Seconds and their relative half-width; the H200's constants were fitted through its power limit, so it applies."""
    if row.device == CALIBRATED and row.kind != "moe":
        seconds, _, width, _ = predict(row)
        return seconds, width
    kernel = kernel_of(row)
    return kernel.seconds, kernel.relative_error


def score(rows: list[Row]) -> dict[str, Any]:
    """Errors and coverage of some rows of one kind and chip."""
    pairs = [predict_row(row) for row in rows]
    measured, (predicted, width) = np.array([r.seconds for r in rows]), np.array(pairs).T
    error = predicted / measured - 1
    found: dict[str, Any] = {
        "rows": len(rows),
        "mean_abs_error": float(np.abs(error).mean()),
        "median_abs_error": float(np.median(np.abs(error))),
        "bias": float(error.mean()),
        "coverage_90": float((np.abs(measured / predicted - 1) <= width).mean()),
    }
    if rows[0].kind != "moe":
        roofline = np.array([roofline_s(row) for row in rows])
        found["roofline_mean_abs_error"] = float(np.abs(roofline / measured - 1).mean())
    return found


# By the fewest readings a mean can be of; one every 0.1 s, so from 11 on the last ones are of this loop alone.
READINGS = ((1, 4), (5, 8), (9, 10), (11, 40))


def score_joules(rows: list[Row]) -> dict[str, Any] | None:
    """Joules of kernels over 0.1 ms, in all and by how many readings their watts have."""
    pairs = []
    for row in rows:
        if row.public_w is not None:
            found = PowerModel.from_device(lookup(row.device)).estimate(DeviceWork.of(kernel_of(row)))
            pairs.append((row.public_w * row.seconds, found.energy_j, found.relative_error, row.readings, row.seconds))
    if not pairs:
        return None
    measured, predicted, width, readings, seconds = np.array(pairs).T

    def score_rows(some: np.ndarray) -> dict[str, Any]:
        error = (predicted / measured - 1)[some]
        return {
            "rows": int(some.sum()),
            "mean_abs_error": float(np.abs(error).mean()),
            "bias": float(error.mean()),
            "coverage_90": float((np.abs(measured / predicted - 1) <= width)[some].mean()),
        }

    parts = {f"{low}-{high}": (low <= readings) & (readings <= high) for low, high in READINGS}
    return score_rows(readings > 0) | {
        "noise": scatter_of_like_rows(np.log(seconds), np.log(predicted / seconds), np.log(measured / seconds)),
        "by_readings": {name: score_rows(some) for name, some in parts.items() if some.any()},
    }


def scatter_of_like_rows(log_s: np.ndarray, log_w: np.ndarray, log_measured_w: np.ndarray) -> float | None:
    """How far readings lie from each other that this model takes for alike: length and predicted watts within 10%.

    Over the root of two, as two rows with one truth differ by that much more than each of them from it. Kernels whose
    watts differ in ways the model does not know count as well: noise and its own faults together.
    """
    off = np.maximum(np.abs(log_s[:, None] - log_s), np.abs(log_w[:, None] - log_w))
    np.fill_diagonal(off, np.inf)
    nearest = off.argmin(axis=1)
    alike = off.min(axis=1) < 0.1
    if not alike.any():
        return None
    return float(np.abs(log_measured_w - log_measured_w[nearest])[alike].mean() / np.sqrt(2))


def table(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """By chip and kind, with the formats apart, and joules."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.device, row.kind].append(row)
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for (device, kind), members in sorted(groups.items()):
        formats: dict[str, list[Row]] = defaultdict(list)
        for row in members:
            formats[name_format(row)].append(row)
        goals = GOALS if device in (*FITTED, CALIBRATED) else GOALS_OTHER
        line = score(members) | {"goal": goals.get(kind), "formats": {n: score(some) for n, some in formats.items()}}
        if joules := score_joules(members):
            line["joules"] = joules | {"goal": GOAL_JOULES}
        found[device][kind] = line
    return found


def name_format(row: Row) -> str:
    a = row.args
    if row.kind != "attention":
        return str(a["precision"])
    return f"{'prefill' if a['causal'] else 'decode'}.{a['kv_precision']}"


def show(name: str, line: dict[str, Any]) -> str:
    text = (
        f"{name:38} {line['rows']:5} {line['mean_abs_error']:6.1%} {line['median_abs_error']:6.1%} {line['bias']:+6.1%}"
    )
    text += f" {line['coverage_90']:5.0%}"
    if "roofline_mean_abs_error" in line:
        text += f"  roofline {line['roofline_mean_abs_error']:6.1%}"
    return text + (f"  goal {line['goal']:.0%}" if line.get("goal") else "")


def print_joules(joules: dict[str, Any]) -> None:
    noise = f"  like rows differ by {joules['noise']:.0%}" if joules["noise"] is not None else ""
    parts = {"over 0.1 ms": joules} | {f"{n} readings": part for n, part in joules["by_readings"].items()}
    for name, part in parts.items():
        text = f"    joules, {name:26} {part['rows']:5} {part['mean_abs_error']:6.1%} {'':6} {part['bias']:+6.1%} {part['coverage_90']:5.0%}"
        print(text + (f"  goal {GOAL_JOULES:.0%}{noise}" if part is joules else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="tables; default: all of --shared")
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder with public_kernels/")
    parser.add_argument("--split", choices=("final", "development", "all"), default="final")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    paths = given.files or sorted((given.shared / "public_kernels").glob("*.csv.gz"))
    rows = [row for path in paths for row in read_public(path) if given.split in ("all", row.split)]
    if not rows:
        sys.exit("no rows: give tables, or --shared, the folder with public_kernels/")
    found = table(rows)
    if given.json:
        print(json.dumps({"split": given.split, "chips": found}, indent=1))
    else:
        print(f"{given.split + ' split, full clock':38}  rows   mean median   bias in 90%")
        for device, kinds in found.items():
            for kind, line in kinds.items():
                print(show(f"{device} {kind}", line))
                for name, part in line["formats"].items():
                    print(show(f"    {name}", part))
                if "joules" in line:
                    print_joules(line["joules"])
    if given.split == "final" and not given.files:
        write_result(ROOT / "benchmarks" / "results" / "public_kernels.json", {"split": "final", "chips": found})


if __name__ == "__main__":
    main()
