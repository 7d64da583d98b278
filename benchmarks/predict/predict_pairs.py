"""Differences of two predictions: how often the stated 90% interval holds what the H200's difference really was.

    python benchmarks/predict/predict_pairs.py [dev heldout heldout2 public] [--shared ../shared]

Every pair of cases of one set and one launch that are variants of one model, or take about the same time (within 1.4),
is predicted and compared by `analyze.diff`; the measured difference is that of the two recordings, whose own
repeatability is taken as 1% each. Prints and writes to benchmarks/results/predict_pairs.json: the share of pairs inside
the interval and its width, beside those of independent errors; how many differences of joules are called certain, and
how many of these have the wrong sign. Needs torch and the model zoos.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import math
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import tessera
from tessera import analyze

sys.path.insert(0, str(Path(__file__).parents[1]))
import predict_models
from device import vision
from result_file import write_result

NEAR = 1.4  # times as long
REPEAT = 0.01  # of a recording


@dataclasses.dataclass(frozen=True)
class Case:
    which: str
    row: predict_models.Row
    report: Any

    @property
    def model(self) -> str:
        """The name without batch, mode and format."""
        name = self.row.name.removesuffix(" graph").removeprefix("public_repeat_")
        return re.split(r"_b\d|_train|_fp|_bf| b\d", name)[0]


def cases(which: str, shared: Path) -> list[Case]:
    """A set, predicted; reports are of the whole iteration, not per sample."""
    found = []
    for r, build in predict_models.public(shared) if which == "public" else predict_models.recorded(which):
        try:
            graph, report, took = predict_models.reported(r, build)
        except tessera.TesseraError:
            continue
        row = predict_models.row_of(r, graph, report, took)
        found.append(Case(which, row, dataclasses.replace(report, work=())))
    return found


def judged(a: Case, b: Case) -> dict[str, float]:
    """One pair: shares of the dearer side, and truths as 0 and 1."""
    x, y = a.row, b.row
    total = analyze.diff(a.report, b.report).total
    out: dict[str, float] = {}
    for name, change, wide, apart, was, now in (
        ("latency", 1e3 * total.change_s, 1e3 * total.error_s, math.hypot(x.ms_error, y.ms_error), x.ms, y.ms),
        ("energy", total.change_j, total.error_j, math.hypot(x.j_error, y.j_error), x.j, y.j),
    ):
        off, noise = abs(change - (now - was)), REPEAT * math.hypot(was, now)
        for label, half in (("", wide), ("_independent", apart)):
            out[f"{name}_inside{label}"] = off <= math.hypot(half, noise)
            out[f"{name}_width{label}"] = half / max(was, now)
            out[f"{name}_certain{label}"] = abs(change) > half
        out[f"{name}_wrong_sign"] = abs(change) > wide and (change > 0) != (now > was)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=["dev", "heldout", "heldout2", "public"])
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[3] / "shared")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    vision.importable()
    groups: dict[str, list[dict[str, float]]] = {}
    for which in given.sets:
        for a, b in itertools.combinations(cases(which, given.shared), 2):
            variants = a.model == b.model
            near = 1 / NEAR < a.row.ms / b.row.ms < NEAR
            if a.report.prediction.launch != b.report.prediction.launch or a.row.name == b.row.name:
                continue
            if variants or near:
                kind = "device-bound" if a.row.kind == b.row.kind == "device" else "host-bound"
                groups.setdefault(f"{'variants' if variants else 'near'} {kind}", []).append(judged(a, b))
    found = {
        name: {"pairs": len(rows), **{k: round(sum(r[k] for r in rows) / len(rows), 4) for k in rows[0]}}
        for name, rows in sorted(groups.items())
    }
    for name, group in found.items():
        print(f"{name:24s} {group['pairs']:4d} pairs  " + "  ".join(
            f"{what}: inside {group[what + '_inside']:.0%} ({group[what + '_inside_independent']:.0%}), width "
            f"{group[what + '_width']:.0%} ({group[what + '_width_independent']:.0%}), certain "
            f"{group[what + '_certain']:.0%} ({group[what + '_certain_independent']:.0%}), wrong sign "
            f"{group[what + '_wrong_sign']:.1%}" for what in ("latency", "energy")))  # fmt: skip
    write_result(Path(__file__).parents[1].joinpath("results/predict_pairs.json"), found)


if __name__ == "__main__":
    main()
