"""Fit the time of NCCL's collectives inside a node: latency, efficiency and ramp by collective and number of GPUs.

    python benchmarks/fit/fit_collectives.py FOLDER        # with a100_sxm_nccl.csv.gz, ... (nccl-tests timings)

Writes src/tessera/dist/data/nccl.json, and prints the errors: of sizes that were kept out of the fit (every second one)
and of systems that were kept out of it. Between nodes (multi_node_sweeps.csv.gz) it prints what two constants of the
network (efficiency of the cards, seconds of a hop) fit best on every second size of a system, the errors on the others,
and the errors of each system with the constants of the other one. The model is `tessera.dist.cost`'s.
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
from tessera.dist import cost
from tessera.dist.cost import KINDS, collective_cost, find_link, mean_figures, sent_share, share_pcie
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


def read_nodes(path: Path) -> dict[str, list[tuple[float, float, int, float]]]:
    """System -> (bytes, GPUs, nodes, seconds) of all_reduce over several nodes."""
    systems: dict[str, list[tuple[float, float, int, float]]] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row["collective"] == "all_reduce" and int(row["nodes"]) > 1 and row["time_us"] and float(row["bytes"]):
                found = float(row["bytes"]), float(row["gpus"]), int(row["nodes"]), float(row["time_us"]) * 1e-6
                systems.setdefault(f"{row['gpu']}, {row['notes']}", []).append(found)
    return systems


def node_errors(
    system: str, points: list[tuple[float, float, int, float]], efficiency: float, hop_s: float
) -> list[float]:
    chip, gbit = ("a100", 400) if system.startswith("a100") else ("h100", 3200)
    cost.NETWORK_EFFICIENCY = efficiency
    card = gbit * 1e9 / 8 / 8
    return [
        collective_cost("all_reduce", size, int(gpus), on=chip, nodes=nodes, network_bytes_per_s=card, network_hop_s=hop_s).time_s / t - 1
        for size, gpus, nodes, t in points
    ]  # fmt: skip


def fit_nodes(path: Path) -> dict[str, object]:
    """Constants of each network and their errors on sizes kept out, and with the constants of the other systems."""
    systems = {name: points for name, points in read_nodes(path).items() if len(points) > 10}
    grid = [(e / 100, h * 1e-6) for e in range(50, 100, 2) for h in (5, 7, 10, 14, 20, 28, 40, 56, 80)]
    best, result = {}, {}
    for name, points in systems.items():
        best[name] = min(grid, key=lambda c: float(np.mean(np.abs(node_errors(name, points[::2], *c)))))
        kept = np.abs(node_errors(name, points[1::2], *best[name]))
        result[name] = {"efficiency": best[name][0], "hop_s": best[name][1], "kept_out_median": float(np.median(kept)), "kept_out_mean": float(np.mean(kept))}  # fmt: skip
    for name, points in systems.items():
        others = [best[other] for other in systems if other != name]
        mean = tuple(math.exp(float(np.mean([math.log(c[i]) for c in others]))) for i in (0, 1))
        result[name]["left_out_median"] = float(np.median(np.abs(node_errors(name, points, *mean))))
    return result


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
            mean = share_pcie(mean, "host") if find_link(lookup(chip))[0] == "pcie" else mean
            for ranks, figures in mean.items():
                points = curves[chip, kind, ranks]
                left_out[chip] += [abs(predict(figures, chip, kind, ranks, s) / t - 1) for s, t in points]
    errors = {
        "sizes_kept_out": {"median": float(np.median(kept_out)), "mean": float(np.mean(kept_out)), "p90": float(np.quantile(kept_out, 0.9))},
        "system_left_out": {c: {"median": float(np.median(e)), "mean": float(np.mean(e)), "p90": float(np.quantile(e, 0.9))} for c, e in left_out.items()},
    }  # fmt: skip
    errors["between_nodes"] = fit_nodes(Path(sys.argv[1]) / "multi_node_sweeps.csv.gz")
    print(json.dumps(errors, indent=1))
    data = {"source": "NCCL 2.27-2.29, 2 to 8 GPUs of one node", "systems": table, "stamp": make_stamp()}
    (ROOT / "src/tessera/dist/data/nccl.json").write_text(json.dumps(data, indent=1) + "\n")
    write_result(ROOT / "benchmarks/results/fit_collectives.json", errors)


if __name__ == "__main__":
    main()
