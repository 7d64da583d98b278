"""Public timings of single kernels beside our predictions at full clock (`state="burst"`), chip by chip.

    python benchmarks/predict/public_kernels.py [--shared ../shared] [--split final|development|all] [--json]
    python benchmarks/predict/public_kernels.py FILE.csv.gz ... --split all --json

Takes any tables of aiconfigurator's form: gemm, context_attention, generation_attention, moe; the chip is what their
`device` column says. Mean absolute error and coverage of the 90% intervals stand beside the goals (8, 12 and 15% for
products, attention and fused experts of a chip that was fitted; 15 and 20% for others) and the datasheet's roofline.
Where the table has watts, joules of kernels over 0.1 ms are scored too (goal 12%): NVML's average over a second times
the latency, against the prediction under the power limit. Loops shorter than that second are read with what ran before
them, so rows with readings enough are scored apart. The final split was not used in any fit (fit_chips.py).
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


LONG_READINGS = 11  # a reading every 0.1 s: from here on the last ones are of this loop alone


def score_joules(rows: list[Row]) -> dict[str, Any] | None:
    """Joules of kernels over 0.1 ms, and apart those whose loop lasted as long as NVML's average."""
    pairs = []
    for row in rows:
        if row.public_w is not None:
            found = PowerModel.from_device(lookup(row.device)).estimate(DeviceWork.of(kernel_of(row)))
            pairs.append((row.public_w * row.seconds, found.energy_j, found.relative_error, row.readings))
    if not pairs:
        return None
    measured, predicted, width, readings = np.array(pairs).T

    def score_rows(some: np.ndarray) -> dict[str, Any]:
        error = (predicted / measured - 1)[some]
        return {
            "rows": int(some.sum()),
            "mean_abs_error": float(np.abs(error).mean()) if len(error) else None,
            "bias": float(error.mean()) if len(error) else None,
            "coverage_90": float((np.abs(measured / predicted - 1) <= width)[some].mean()) if len(error) else None,
        }

    return score_rows(readings > 0) | {"long_windows": score_rows(readings >= LONG_READINGS)}


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
                    joules = line["joules"]
                    print(f"    joules over 0.1 ms {joules['rows']:24} {joules['mean_abs_error']:6.1%} {'':6} {joules['bias']:+6.1%}"
                          f" {joules['coverage_90']:5.0%}  goal {GOAL_JOULES:.0%}")  # fmt: skip
                    long = joules["long_windows"]
                    if long["rows"]:
                        print(f"    joules, windows of a second {long['rows']:15} {long['mean_abs_error']:6.1%} {'':6} {long['bias']:+6.1%}"
                              f" {long['coverage_90']:5.0%}")  # fmt: skip
    if given.split == "final" and not given.files:
        write_result(ROOT / "benchmarks" / "results" / "public_kernels.json", {"split": "final", "chips": found})


if __name__ == "__main__":
    main()
