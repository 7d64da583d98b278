"""How far kernels lie from attribute/prior.py inside whole models on an H200: what its spread may be.

    PYTHONPATH=src python benchmarks/fit/fit_prior_spread.py [--out FILE.json]

A model's joules an iteration were measured, and each of its kernels was traced with its operator and shapes. The prior
expects joules of all of them. The logarithm of measured over expected (above a waiting board) is off by what all kernels of
a run have in common (values, clocks: attribution takes it from the samples) and by what each kernel has for itself:

    variance of a model = common^2 + own^2 * sum over kernels of share^2

Both are fitted on the development models; the held-out models then say how often an interval of 90% by them holds.
Left out are models that the power limit held, those whose device was idle for more than `IDLE` of an iteration, and
those whose kernels took longer in the trace than in the measured run (`SLOWER`).
`by family`: models in which one family has most of the joules, fitted without that family's models.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result
from tessera.attribute.activity import activity
from tessera.attribute.prior import _find_works, board_of, prior
from tessera.joules import Z90
from tessera.timeline import Builder, Timeline
from tessera.timeline.shapes import CAUSAL, compact, is_causal

DATA = Path(__file__).parents[1] / "data"
BOARD = board_of("NVIDIA H200", np.array([100.0, 700.0]))
IDLE, SLOWER = 0.3, 1.08
SETS = {"dev": ("dev",), "held out": ("heldout", "heldout2")}


class Found(NamedTuple):
    """One model: log of measured over expected joules, sum of squared shares, share of known work, largest family."""

    name: str
    off: float
    squares: float
    known: float
    family: str


def read_lines(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / name, "rt") as file:
        return [json.loads(line) for line in file]


def make_timeline(trace: dict[str, Any]) -> Timeline:
    """The kernels of a recorded iteration, each tied to its operator."""
    built = Builder()
    for number, (name, dims, types, _, concrete) in enumerate(trace["ops"], 1):
        text = compact(json.dumps(dims).encode(), json.dumps(types).encode())
        text += f" {CAUSAL}" if is_causal(name, json.dumps(concrete).encode()) else ""
        built.add("op", name, number, number + 1, thread=1, external=number, shapes=built.intern(text))
    for op, _, name, lasts_us, start_us, _ in trace["kernels"]:
        start = 10**9 + round(start_us * 1e3)
        end = start + round(lasts_us * 1e3)
        built.add("kernel", trace["names"][name], start, end, device=0, stream=7, external=op + 1)
    return built.build()


def look_at(trace: dict[str, Any], measured: dict[str, Any]) -> Found | None:
    timeline = make_timeline(trace)
    links = timeline.linked
    ran = activity(timeline, timeline.device_rows, links)
    lasted = (ran.end_ns - ran.start_ns) * 1e-9
    total_s = np.bincount(ran.cls, lasted)
    expected = prior(timeline, ran.first, total_s / np.bincount(ran.cls), links, BOARD)
    joules = total_s * (expected.watts - BOARD.static_w)
    above_j = measured["J"] - BOARD.static_w * measured["ms"] * 1e-3
    if not (1 - IDLE) <= total_s.sum() / (measured["ms"] * 1e-3) <= SLOWER or above_j <= 0:
        return None
    works = _find_works(timeline, ran.first, links)
    share = joules / joules.sum()
    families: dict[str, float] = {}
    for part, work in zip(share.tolist(), works, strict=True):
        name = work.family if work is not None else "unknown"
        families[name] = families.get(name, 0.0) + part
    return Found(
        trace["name"], math.log(above_j / joules.sum()), float(share @ share), 1 - families.get("unknown", 0.0),
        max(families, key=lambda f: families[f]),
    )  # fmt: skip


def read_set(names: tuple[str, ...]) -> Iterator[Found]:
    for name in names:
        models = [m for m in read_lines(f"h200_{name}_models.jsonl.gz") if m.get("throttle") == 0 and "J" in m]
        for trace in read_lines(f"h200_{name}_traces.jsonl.gz"):
            own = [m for m in models if m["name"] == trace.get("name")]
            if own and trace.get("case") == "model":  # the one that waits least for its host
                found = look_at(trace, min(own, key=lambda m: m["ms"]))
                if found is not None:
                    yield found


def fit(found: list[Found]) -> tuple[float, float, float]:
    """Mean, common and own standard deviation of the largest likelihood, on a grid."""
    off, squares = (np.array([getattr(f, name) for f in found]) for name in ("off", "squares"))
    best = (-math.inf, 0.0, 0.0, 0.0)
    for common in np.linspace(0.0, 0.3, 61):
        for own in np.linspace(0.0, 0.8, 81):
            variance = common**2 + own**2 * squares + 1e-4  # the measurement itself: about 1%
            mean = float(np.sum(off / variance) / np.sum(1 / variance))
            fits = -0.5 * float(np.sum(np.log(variance) + (off - mean) ** 2 / variance))
            best = max(best, (fits, mean, float(common), float(own)))
    return best[1:]


def count_held(found: list[Found], fitted: tuple[float, float, float]) -> dict[str, Any]:
    """How often 90% intervals by a fit hold on other models."""
    mean, common, own = fitted
    scores = [abs(f.off - mean) / math.sqrt(common**2 + own**2 * f.squares + 1e-4) for f in found]
    rms = math.sqrt(sum(f.off**2 for f in found) / max(len(found), 1))
    return {"models": len(found), "rms_off": rms, "held_pct": 100 * float(np.mean([s <= Z90 for s in scores]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {name: list(read_set(parts)) for name, parts in SETS.items()}
    fitted = fit(found["dev"])
    result: dict[str, Any] = {"mean": fitted[0], "common": fitted[1], "own": fitted[2]}
    print(f"dev: mean {fitted[0]:+.2f}, common {fitted[1]:.3f}, own {fitted[2]:.3f}")
    for name, models in found.items():
        result[name] = count_held(models, fitted)
        print(f"{name}: {json.dumps(result[name])}")
    everything = [*found["dev"], *found["held out"]]
    for family in sorted({f.family for f in everything}):
        without, own = fit([f for f in everything if f.family != family]), [f for f in everything if f.family == family]
        alone = fit(own) if len(own) >= 8 else None
        result[f"by {family}"] = {"without": without, "alone": alone, **count_held(own, without)}
        print(f"by {family}: {json.dumps(result[f'by {family}'])}")
    if args.out:
        write_result(args.out, result)


if __name__ == "__main__":
    main()
