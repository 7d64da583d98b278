"""Fit the time of NCCL's collectives inside a node: latency, efficiency and ramp by collective and number of GPUs.

    python benchmarks/fit/fit_collectives.py FOLDER        # with a100_sxm_nccl.csv.gz, ... (nccl-tests timings)

Writes src/tessera/dist/data/nccl.json, and prints the errors: of sizes that were kept out of the fit (every second one)
and of systems that were kept out of it. The model is `tessera.dist.cost`'s.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import make_stamp, write_result
from tessera.dist.cost import KINDS, find_link, mean_figures, sent_share
from tessera.hardware import lookup

SYSTEMS = {"a100_sxm": "a100", "h100_sxm": "h100", "b200_sxm": "b200", "l40s": "l40s"}
BYTES = {"half": 2, "int8": 1, "float": 4}
ROOT = Path(__file__).parents[2]
Curve = list[tuple[float, float]]


def read(folder: Path) -> dict[tuple[str, str, int], Curve]:
    """(chip, collective, GPUs) -> (bytes, seconds)."""
    curves: dict[tuple[str, str, int], Curve] = {}
    for name, chip in SYSTEMS.items():
        with gzip.open(folder / f"{name}_nccl.csv.gz", "rt") as file:
            for row in csv.DictReader(file):
                kind = {"alltoall": "all_to_all"}.get(row["op_name"], row["op_name"])
                point = int(row["message_size"]) * BYTES[row["nccl_dtype"]], float(row["latency"]) * 1e-3
                curves.setdefault((chip, kind, int(row["num_gpus"])), []).append(point)
    return {key: sorted(curve) for key, curve in curves.items()}


def fit(curve: Curve) -> tuple[float, float, float]:
    """A + b S + c sqrt(S), none negative, with the least relative error: three terms, so all subsets are tried."""
    size, time_s = np.array(curve).T
    columns = np.stack([np.ones_like(size), size, np.sqrt(size)], 1) / time_s[:, None]
    best, least = (0.0, 0.0, 0.0), math.inf
    for count in (1, 2, 3):
        for chosen in itertools.combinations(range(3), count):
            x, *_ = np.linalg.lstsq(columns[:, chosen], np.ones(len(size)), rcond=None)
            error = float(np.sum((columns[:, chosen] @ x - 1) ** 2))
            if np.all(x >= 0) and error < least:
                whole = np.zeros(3)
                whole[list(chosen)] = x
                best, least = (float(whole[0]), float(whole[1]), float(whole[2])), error
    return best


def describe(chip: str, kind: str, ranks: int, curve: Curve) -> tuple[float, float, float]:
    """Latency (s), efficiency of the link, and ramp: what is the same on other chips, nearly."""
    a, b, c = fit(curve)
    efficiency = sent_share(kind, ranks) / (b * link_bytes_per_s(chip))
    return a, efficiency, c / math.sqrt(a * b)


def link_bytes_per_s(chip: str) -> float:
    return find_link(lookup(chip))[1].one_way_bytes_per_s


def predict(figures: Sequence[float], chip: str, kind: str, ranks: int, size: float) -> float:
    a, efficiency, ramp = figures
    b = sent_share(kind, ranks) / (efficiency * link_bytes_per_s(chip))
    return a + b * size + ramp * math.sqrt(a * b * size)


def main() -> None:
    curves = read(Path(sys.argv[1]))
    kept_out, left_out = [], {chip: [] for chip in SYSTEMS.values()}
    table: dict[str, dict[str, dict[int, list[float]]]] = {}
    for (chip, kind, ranks), curve in curves.items():
        half = describe(chip, kind, ranks, curve[::2])
        kept_out += [abs(predict(half, chip, kind, ranks, s) / t - 1) for s, t in curve[1::2]]
        figures = describe(chip, kind, ranks, curve)
        table.setdefault(chip, {}).setdefault(kind, {})[ranks] = [float(f"{v:.4g}") for v in figures]
    for chip in SYSTEMS.values():
        for kind in KINDS:
            mean = mean_figures({c: table[c][kind] for c in SYSTEMS.values() if c != chip})
            for ranks, figures in mean.items():
                points = curves[chip, kind, ranks]
                left_out[chip] += [abs(predict(figures, chip, kind, ranks, s) / t - 1) for s, t in points]
    errors = {
        "sizes_kept_out": {"median": float(np.median(kept_out)), "mean": float(np.mean(kept_out)), "p90": float(np.quantile(kept_out, 0.9))},
        "system_left_out": {c: {"median": float(np.median(e)), "p90": float(np.quantile(e, 0.9))} for c, e in left_out.items()},
    }  # fmt: skip
    print(json.dumps(errors, indent=1))
    data = {"source": "NCCL 2.27-2.29, 2 to 8 GPUs of one node", "systems": table, "stamp": make_stamp()}
    (ROOT / "src/tessera/dist/data/nccl.json").write_text(json.dumps(data, indent=1) + "\n")
    write_result(ROOT / "benchmarks/results/fit_collectives.json", errors)


if __name__ == "__main__":
    main()
