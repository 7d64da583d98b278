"""Fit the kernel models on the H200's rows and write src/tessera/estimate/data/h200_*.json.

    python benchmarks/fit/fit_kernels.py [--shared ../shared]

Needs scipy and lightgbm beside numpy; nothing of them is used at run time. Times are fitted through the power limit:
the formula's uncapped time is stretched as power.py stretches it, and that is compared with what was measured.
Constants and trees are fitted on the fit split, intervals found on the development split; then both are fitted. The
final split is left alone: kernel_accuracy.py reads it.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kernel_fits as fits
from kernel_rows import SHARED, Row, load, predict
from tessera.estimate import attention, gemm, kernel_time
from tessera.estimate import power as power_module

DATA = Path(kernel_time.__file__).parent / "data"


GEMM_TREES: dict[str, Any] = {"sampled": False, "leaf": 4}
FEW: dict[str, Any] = {"rounds": 100, "leaf": 5}
"""PyTorch's rows of attention are few: fewer and coarser trees."""


def half_widths(rows: Sequence[Row], bins: int) -> dict[str, list[float]]:
    """The 90% quantile of |measured / predicted - 1| by predicted length, on rows the fit has not seen."""
    pairs = sorted((s, abs(row.seconds / s - 1)) for row in rows for s in (predict(row)[0],))
    parts = np.array_split(np.array(pairs), bins)
    return {
        "log10_s": [round(float(np.log10(np.median(part[:, 0]))), 3) for part in parts],
        # Few rows say little about a tenth of them: a quarter wider for a dozen. Reruns differ by 2.5% themselves.
        "half_width": [
            round(max(0.025, float(np.quantile(part[:, 1], 0.9)) * (1 + 3 / len(part))), 3) for part in parts
        ],
    }  # fmt: skip


def write(name: str, data: dict[str, Any]) -> None:
    def plain(value: Any) -> Any:
        return float(f"{float(value):.6g}") if isinstance(value, np.floating | float) else value

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list | tuple) else plain(value)

    (DATA / name).write_text(json.dumps(walk(data), separators=(",", ":")) + "\n")
    for cached in (
        kernel_time.load_fit,
        gemm._gemm,
        gemm._trees,
        attention._attention,
        attention._trees,
        power_module._fit_to_chip,
    ):
        cached.cache_clear()


def fit_files(fit: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The three data files, fitted on some rows of the H200; intervals are still to be found."""
    products = [row for row in fit if row.kind == "gemm"]
    measured = [row for row in fit if row.joules and not row.in_situ and not row.args.get("with_backward")]
    attentions = {
        source: [r for r in fit if r.kind == "attention" and r.source == source] for source in ("torch", "vllm")
    }
    c: dict[str, Any] = {"gemm": fits.gemm_constants(*fits.gemm_start())}
    start = {n: v[0] for n, v in (fits.ATTENTION_START | fits.TORCH_ONLY).items()}
    c["attention"] = {source: start | fits.FIXED[source] for source in attentions}
    power: dict[str, Any] = {}
    switching: dict[str, float] = {}
    # Watts follow from tiles and tiles from seconds, which follow from watts: twice around is enough.
    for _ in range(2):
        power = fits.fit_power(measured, c)
        c["gemm"] = fits.fit_gemm(products, power, c["gemm"])
        switching = {"torch": 1.0, "vllm": c["gemm"]["switching_vllm"]}
        c["attention"] = {s: fits.fit_attention(members, power, s, switching[s]) for s, members in attentions.items()}
    residuals = {}
    for source, members in attentions.items():
        residual = fits.attention_residual(c["attention"][source], power, source, members, switching[source])
        residuals[source] = fits.fit_trees(*residual, **(FEW if source == "torch" else {"rounds": 150}))
    return {
        "gemm": {
            "constants": c["gemm"],
            "trees": fits.fit_trees(*fits.gemm_residual(c["gemm"], power, products), **GEMM_TREES),
        },
        "attention": {"constants": c["attention"], "trees": residuals},
        "power": power | {"carried_over_error": 0.35},
    }


def find_interval(row: Row) -> str:
    """The name of a row's interval, as the models have it."""
    if row.kind == "gemm":
        return gemm.find_interval(fits.products([row]))
    backward = bool(row.args.get("backward") or row.args.get("with_backward"))
    return attention.find_interval(fits.calls([row], backward=backward))


def calibrated_widths(rows: Iterable[Row]) -> dict[str, Any]:
    """The half-widths of one kind of kernel, by what names its interval."""
    members: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        members[find_interval(row)].append(row)
    return {name: half_widths(some, max(1, min(6, len(some) // 25))) for name, some in sorted(members.items())}


def intervals(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """90% half-widths from rows that the data files now in place were not fitted on."""
    found: dict[str, dict[str, Any]] = {}
    for kind in ("gemm", "attention"):
        widths: dict[str, Any] = {
            "calibrated": calibrated_widths(r for r in rows if (r.kind, r.device) == (kind, "h200"))
        }
        widths["same_vendor"] = SAME_VENDOR[kind]
        widths["other_vendor"] = min(0.9, 1.6 * widths["same_vendor"])  # no rows: wider by judgement
        found[kind] = {"interval": widths}
    errors = [abs(row.joules / predict(row)[1] - 1) for row in rows if row.joules and row.kind != "stream"]
    unseen = {
        "rows": len(errors),
        "mean_abs_error": float(np.mean(errors)),
        "median_abs_error": float(np.median(errors)),
    }
    found["power"] = {"relative_error": float(np.quantile(errors, 0.9)), "development": unseen}
    return found


def place(files: dict[str, dict[str, Any]], widths: dict[str, dict[str, Any]]) -> None:
    """Write the data files, and forget what was read from the last ones."""
    for name, data in files.items():
        write(f"h200_{name}.json", {"provenance": PROVENANCE, "splits": SPLITS, **widths[name], **data})


# On the A100's development rows, before chips had fits of their own (fit_chips.py): now for kernels that have none.
SAME_VENDOR = {"gemm": 0.381, "attention": 0.458}
PROVENANCE = (
    "benchmarks/fit/fit_kernels.py on the project's H200 recordings (torch, graph replay and models, random operands) and "
    "NVIDIA ai-dynamo/aiconfigurator kernel timings (vLLM, Apache-2.0)"
)
SPLITS = "60% fit and 20% development by hash of the shape group; intervals from development before it was fitted; 20% final unseen"
_FLAT = {
    "calibrated": {
        name: {"log10_s": [-5.0], "half_width": [0.2]} for name in ("torch", "torch_uneven", "torch_other", "vllm")
    },
    "same_vendor": 0.4,
    "other_vendor": 0.6,
}
NO_WIDTHS: dict[str, dict[str, Any]] = {
    "gemm": {"interval": _FLAT},
    "attention": {"interval": _FLAT},
    "power": {"relative_error": 0.2},
}


def report(rows: Sequence[Row]) -> None:
    for kind in ("gemm", "attention"):
        for device, source, in_situ in (
            ("h200", "torch", False),
            ("h200", "torch", True),
            ("h200", "vllm", False),
        ):
            errors = [
                abs(predict(r)[0] / r.seconds - 1)
                for r in rows
                if (r.kind, r.device, r.source, r.in_situ) == (kind, device, source, in_situ)
            ]
            name = f"{kind} {device} {source}{' in models' if in_situ else ''}"
            print(f"{name:32} {len(errors):5} rows, mean {np.mean(errors):.1%}, median {np.median(errors):.1%}")


def fit_gemm_trees(fit: Sequence[Row], development: Sequence[Row]) -> None:
    """Learn the correction of products again, on the constants and the power model that are there."""
    power, data = (kernel_time.load_fit(f"h200_{name}.json") for name in ("power", "gemm"))
    for rows in (fit, [*fit, *development]):
        residual = fits.gemm_residual(data["constants"], power, rows)
        write("h200_gemm.json", {**data, "trees": fits.fit_trees(*residual, **GEMM_TREES)})
        if rows is fit:
            data["interval"]["calibrated"] = calibrated_widths(development)


def fit_torch_attention(fit: Sequence[Row], development: Sequence[Row]) -> None:
    """Fit torch's attention again, on the power model that is there: its interval is found before both splits are fitted."""
    power, data = (kernel_time.load_fit(f"h200_{name}.json") for name in ("power", "attention"))
    for rows in (fit, [*fit, *development]):
        constants = fits.fit_attention(rows, power, "torch", 1.0)
        residual = fits.attention_residual(constants, power, "torch", rows, 1.0)
        data["constants"]["torch"], data["trees"]["torch"] = constants, fits.fit_trees(*residual, **FEW)
        write("h200_attention.json", data)
        if rows is fit:
            data["interval"]["calibrated"] |= calibrated_widths(development)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the kernel models and write their data files.")
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder with h200/ and public_kernels/")
    parser.add_argument("--first", action="store_true", help="stop before the development split is fitted too")
    parser.add_argument(
        "--gemm-trees", action="store_true", help="only the correction of products, constants as they are"
    )
    parser.add_argument("--torch-attention", action="store_true", help="only attention by torch")
    arguments = parser.parse_args()
    rows, missing = load(arguments.shared)
    for name in missing:
        print(f"missing, left out: {name}")
    if not any(row.source == "vllm" for row in rows) or not any(row.joules for row in rows):
        sys.exit("cannot fit without the H200 recordings and the public kernel timings: give --shared")
    fit, development = ([r for r in rows if r.split == split and r.is_learned] for split in ("fit", "development"))
    if arguments.gemm_trees:
        fit_gemm_trees(*([r for r in s if (r.kind, r.device) == ("gemm", "h200")] for s in (fit, development)))
        return
    if arguments.torch_attention:
        mine = [
            [r for r in s if (r.kind, r.source, r.device) == ("attention", "torch", "h200")] for s in (fit, development)
        ]
        fit_torch_attention(*mine)
        return
    first = fit_files([row for row in fit if row.device == "h200"])
    place(first, NO_WIDTHS)
    widths = intervals(development)
    place(first, widths)
    print("development split, not fitted:")
    report(development)
    print("joules:", widths["power"])
    if not arguments.first:
        place(fit_files([row for row in fit + development if row.device == "h200"]), widths)


if __name__ == "__main__":
    main()
