"""Every way to all-reduce, on 1 to 8 Gloo ranks and random tensors: exact, or within the bound that it states.

    python benchmarks/measure/dist_sums.py [--cases 40]       (for each number of ranks; about two minutes)

Shapes may be empty, uneven or not contiguous, types are those of gradients and integers. The truth is the sum in
float64 by one process. What is not compressed may differ from it by the rounding of its own type, once for each rank.
The tests (tests/dist/test_collectives.py) draw such cases by hypothesis; these are others.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]
from gloo_ranks import GlooRanks
from result_file import write_result
from tessera import dist

OUT = Path(__file__).parents[1] / "results" / "dist_sums.json"
WAYS: dict[str, dict[str, Any]] = {
    "flat": {}, "two_step": {"algorithm": "two_step"}, "hierarchical": {"algorithm": "hierarchical", "node_size": 2},
    "rank_order": {"deterministic": True}, "chunks": {"chunks": 3}, "sparse": {"sparse": True},
    "rank_order, hierarchical": {"deterministic": True, "algorithm": "hierarchical", "node_size": 2},
    "fp16": {"compress": "fp16"}, "bf16": {"compress": "bf16"}, "bf16-stochastic": {"compress": "bf16-stochastic"},
    "fp8": {"compress": "fp8"}, "fp8, feedback": {"compress": "fp8"},
}  # fmt: skip
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def draw(choose: random.Random) -> dict[str, Any]:
    """One case, the same on all ranks."""
    way = choose.choice(list(WAYS))
    lossy = "compress" in WAYS[way]
    sizes = [choose.choice([0, 1, 2, 7, 33, 300]), choose.choice([1, 3, 64])]
    return {
        "way": way, "dtype": choose.choice(FLOATS[:1] if lossy else (*FLOATS, *INTEGERS)),
        "shape": sizes[: choose.randint(1, 2)], "strided": choose.random() < 0.3, "seed": choose.randrange(2**31),
        "op": choose.choice(["sum", "sum", "mean"] if lossy or way == "sparse" else ["sum", "max", "min"]),
    }  # fmt: skip


def make(case: dict[str, Any], rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case["seed"] + rank)
    x = torch.randn(*case["shape"], generator=generator) * 10.0 ** (rank % 4 - 1)
    x = (10 * x).round().to(case["dtype"]) if case["dtype"] in INTEGERS else x.to(case["dtype"])
    return torch.stack([x, x], -1)[..., 0] if case["strided"] else x


def find_truth(case: dict[str, Any], ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reduction in float64, and the largest sum of magnitudes, by which rounding is judged."""
    parts = torch.stack([make(case, r).double() for r in range(ranks)])
    kind = {"sum": parts.sum(0), "mean": parts.mean(0)}
    truth = kind[case["op"]] if case["op"] in kind else getattr(parts, f"a{case['op']}")(0)
    magnitude = parts.abs().sum(0).amax() if parts.numel() else torch.zeros(())
    return truth, magnitude


def run_rank(rank: int, ranks: int, cases: int, seed: int) -> tuple[list[Any], list[bool]]:
    """(way, error, bound, digest of the bits) of each case, and whether all ranks have the same bits."""
    choose, rows = random.Random(1000 * seed + ranks), []
    for _ in range(cases):
        case = draw(choose)
        if case["op"] == "mean" and case["dtype"] in INTEGERS:
            case["op"] = "sum"
        options = dict(WAYS[case["way"]])
        if "feedback" in case["way"]:
            options["feedback"] = dist.ErrorFeedback()
        with dist.record_collectives() as records:
            out = dist.all_reduce(make(case, rank), case["op"], **options)
        truth, magnitude = find_truth(case, ranks)
        is_float = case["dtype"] not in INTEGERS
        bound = (records[-1].error_bound if records else 0.0) / (ranks if case["op"] == "mean" else 1)
        own = ranks * torch.finfo(case["dtype"]).eps * float(magnitude) if is_float else 0.0
        error = float((out.double() - truth).abs().max()) if out.numel() else 0.0
        digest = hash(out.numpy(force=True).tobytes() if out.dtype != torch.bfloat16 else out.float().numpy().tobytes())
        rows.append((case["way"], error, bound + own, digest))
    same: list[Any] = [None] * ranks
    c10d.all_gather_object(same, [row[3] for row in rows])
    return rows, [len({one[i] for one in same}) == 1 for i in range(cases)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    _ = dist.all_reduce  # imported here, not by every rank
    ways: dict[str, dict[str, float]] = defaultdict(lambda: {"cases": 0, "over": 0, "differ": 0, "worst_share": 0.0})
    for ranks in range(1, 9):
        with GlooRanks(ranks) as group:
            rows, alike = group.run(run_rank, ranks, args.cases, args.seed)[0]
        for (way, error, bound, _), is_alike in zip(rows, alike, strict=True):
            one = ways[way]
            one["cases"] += 1
            one["over"] += not error <= bound
            one["differ"] += not is_alike
            one["worst_share"] = max(one["worst_share"], error / bound if bound else math.inf if error else 0.0)
    for way, one in ways.items():
        print(f"{way:26} {one['cases']:4.0f} cases, {one['over']:.0f} over the bound, largest error {one['worst_share']:.2f} "
              f"of it, {one['differ']:.0f} with other bits on other ranks")  # fmt: skip
    total = {key: sum(one[key] for one in ways.values()) for key in ("cases", "over", "differ")}
    write_result(args.out, {"ranks": [1, 8], **total, "ways": dict(ways)})


if __name__ == "__main__":
    main()
