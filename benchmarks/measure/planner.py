"""Compare the planner with brute force on 20 small problems, and time it on large ones.

    python benchmarks/measure/planner.py --seed 1 --write benchmarks/results/planner.json

Brute force asks the same cost function for every layout of the space, with no bound, no order and no rule about which
setting can help; its loops are written from the description of the space in dist/plan_search.py, not from its code.
Problems (model, cluster, batch, goal, how much of the memory may be filled) follow from the seed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tessera.device import Figure
from tessera.dist.cluster import Cluster, load_cluster
from tessera.dist.layout import Layout
from tessera.dist.plan_cost import PlanCandidate, evaluate_layout
from tessera.dist.plan_search import PlanProblem
from tessera.dist.planner import plan
from tessera.dist.training_model import ModelShape
from tessera.errors import TesseraError

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

GOALS = ("time", "energy", "energy, time<=1.05")
CLUSTERS = (
    "dgx-h100",
    "dgx-h200",
    "dgx-a100-40gb",
    "dgx-b200",
    "mi300x",
    "pcie-l40s",
    "pcie-a100:2",
    "pcie-a100",
    "dgx-h100:2",
    "pcie-l40s:2",
)
LARGE = {
    "Llama 3 405B on 16,384 H100": ("llama405b", "dgx-h100:2048", 8192, 2048),
    "Llama 3 405B on 1,152 GB200": ("llama405b", "gb200-nvl72:16", 8192, 2048),
    "DeepSeek-V3 on 2,048 H100": ("deepseek", "dgx-h100:256", 4096, 15360),
}
MODELS = {
    "llama405b": ModelShape(hidden=16384, layers=126, heads=128, kv_heads=8, ffn=53248, vocab=128256),
    "deepseek": ModelShape(
        hidden=7168,
        layers=61,
        heads=128,
        vocab=129280,
        ffn=18432,
        experts=256,
        topk=8,
        moe_ffn=2048,
        shared_experts=1,
        dense_layers=3,
        mla=True,
    ),
}


def draw_problem(rng: random.Random) -> PlanProblem:
    """A small problem; a small share of the memory makes recomputation, sharding and the host matter."""
    heads = rng.choice([8, 12, 16])
    sizes: dict[str, Any] = {
        "hidden": heads * rng.choice([64, 128]),
        "heads": heads,
        "kv_heads": rng.choice([heads, 4]),
        "layers": rng.choice([4, 6, 7, 8, 12, 16]),
        "vocab": rng.choice([32000, 128256]),
        "tied": rng.random() < 0.3,
    }
    sizes["ffn"] = 4 * sizes["hidden"]
    if rng.random() < 0.3:
        sizes |= {"experts": 8, "topk": 2, "moe_ffn": sizes["ffn"]}
    name = rng.choice(CLUSTERS)
    cluster = load_cluster(name)
    return PlanProblem(
        model=ModelShape(**sizes),
        cluster=cluster,
        seq=rng.choice([1024, 2048, 4096]),
        global_batch=rng.choice([8, 16, 24] if cluster.gpus > 8 else [8, 12, 16, 32]),
        precision=rng.choice(["bf16", "bf16", "fp8" if "a100" not in name else "bf16"]),
        memory_limit=rng.choice([0.08, 0.12, 0.2, 0.4, 0.95]),
    )


def balanced(layers: int, stages: int) -> bool:
    """Whether stages divide the layers, or the layers and up to three (5%) more."""
    return any((layers + more) % stages == 0 for more in range(4) if more <= 0.05 * layers)


def all_layouts(problem: PlanProblem) -> Iterator[Layout]:
    """Every layout of the space."""
    model, cluster, batch, seq = problem.model, problem.cluster, problem.global_batch, problem.seq
    counts = {cluster.gpus, 2 ** int(math.log2(cluster.gpus))}
    settings = list(
        itertools.product(
            ("none", "zero1", "zero2", "zero3"),
            ("none", "selective", "full"),
            (("tp", "cp", "dp", "pp"), ("tp", "cp", "pp", "dp")),
            ((), ("optimizer",), ("embedding",), ("optimizer", "embedding")),
        )
    )
    for gpus in counts:
        everything = range(1, gpus + 1)
        for tp, pp, cp in itertools.product(everything, everything, everything):
            dp, rest = divmod(gpus, tp * pp * cp)
            if rest or batch % dp or tp > cluster.domain or pp > model.layers or not balanced(model.layers, pp):
                continue
            if any(size % tp for size in (model.heads, model.hidden, model.ffn)):
                continue
            if model.key_heads % tp and tp % model.key_heads:
                continue
            if cp > 1 and (seq % (2 * cp) or seq / cp < 1024):
                continue
            for micro, ep, vp in itertools.product((1, 2, 4, 8, 16), range(1, max(1, model.experts) + 1), range(1, 17)):
                if batch // dp % micro or tp * cp * dp % ep or (model.experts and model.experts % ep):
                    continue
                many = batch // dp // micro
                if vp > 1 and (pp == 1 or many % pp or pp * vp > model.layers or not balanced(model.layers, pp * vp)):
                    continue
                for sharding, recompute, placement, offload in settings:
                    if sharding != "none" and dp * cp == 1:
                        continue
                    if placement[-1] == "dp" and (pp == 1 or dp == 1 or ep > 1 or gpus <= cluster.domain):
                        continue
                    if "embedding" in offload and (pp > 1 or model.tied):
                        continue
                    yield Layout(
                        tp=tp,
                        pp=pp,
                        dp=dp,
                        cp=cp,
                        ep=ep,
                        vp=vp,
                        micro_batch=micro,
                        microbatches=many,
                        sharding=sharding,
                        recompute=recompute,
                        placement=placement,
                        offload=offload,
                    )


def fits(problem: PlanProblem, one: PlanCandidate) -> bool:
    """Whether a GPU and a host have room."""
    host = problem.cluster.host_memory_bytes
    room = host is None or one.host_bytes <= problem.memory_limit * host.value
    return room and one.memory_bytes <= problem.memory_limit * one.capacity_bytes


def search_brutally(problem: PlanProblem) -> tuple[dict[str, PlanCandidate], int]:
    """The best layout by each goal, or nothing, and how many were evaluated."""
    tried = [evaluate_layout(problem, layout) for layout in all_layouts(problem)]
    fitting = [one for one in tried if fits(problem, one)]
    if not fitting:
        return {}, len(tried)
    fastest = min(fitting, key=lambda one: one.time_s)
    near = [one for one in fitting if one.time_s <= 1.05 * fastest.time_s]
    frugal = min(fitting, key=lambda one: one.energy_j)
    best = (fastest, frugal, min(near, key=lambda one: one.energy_j))
    return dict(zip(GOALS, best, strict=True)), len(tried)


def compare(problem: PlanProblem, goal: str) -> dict[str, Any]:
    """The planner and brute force on one problem."""
    start = time.perf_counter()
    try:
        found = plan(
            problem.model,
            cluster=problem.cluster,
            goal=goal,
            seq=problem.seq,
            global_batch=problem.global_batch,
            precision=problem.precision,
            memory_limit=problem.memory_limit,
        )
    except TesseraError as error:
        found, why = None, str(error).splitlines()[0]
    seconds = time.perf_counter() - start
    best, tried = search_brutally(problem)
    row: dict[str, Any] = {
        "cluster": f"{problem.cluster.id}:{problem.cluster.nodes}",
        "experts": problem.model.experts,
        "goal": goal,
        "memory_limit": problem.memory_limit,
        "plan_s": seconds,
        "brute_s": time.perf_counter() - start - seconds,
        "brute_evaluations": tried,
    }
    if found is None or not best:
        row |= {"fits": False, "agree": found is None and not best, "why": why if found is None else ""}
        return row
    metric = found.metric
    row |= {"evaluations": found.evaluations, "planned": str(found.best.layout), "brute": str(best[goal].layout)}
    row |= {"fits": True, "recompute": found.best.layout.recompute, "offload": list(found.best.layout.offload)}
    row["excess"] = getattr(found.best, metric) / getattr(best[goal], metric) - 1.0
    return row


def compare_published(path: Path, most: int) -> list[dict[str, Any]]:
    """The layouts that experts chose against the planner's, both by the cost model, each on the row's own cluster.

    One row of each model, chip, number of GPUs and batch. A published layout that is called twice as slow as ours would
    mean that the cost model, or the memory, misses what the experts knew.
    """
    import published_training as published

    rows: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    for _, row in published.read_rows(path):
        if row is None or row.get("oom") is True:
            continue
        try:
            score = published.score_row(row)
        except published.RowSkipped:
            continue
        job = score.job
        if score.step_s and score.error is not None and abs(score.error) < 0.3 and not job.lora and job.gpus > 1:
            key = (job.model, job.device.id, job.gpus, job.precision, job.seq, job.global_batch)
            known = rows.get(key)
            if known is None or score.step_s < known[1].step_s:  # the best of those that were tried
                rows[key] = (row, score)
    chosen = sorted(rows.values(), key=lambda pair: hashlib.sha256(repr(pair[0]).encode()).hexdigest())[:most]
    compared = []
    for row, score in chosen:
        compared.append(compare_row(row, score))
        print(json.dumps(compared[-1]), file=sys.stderr, flush=True)
    return compared


def compare_row(row: Any, score: Any) -> dict[str, Any]:
    """One published layout against the planner's for the same job."""
    job = score.job
    nodes = -(-job.gpus // job.node_gpus)
    figure = {"source": "the published row"}
    cluster = Cluster(
        id="published",
        name="published",
        device=job.device,
        nodes=nodes,
        link=next(iter(job.device.interconnect)),
        host_link="",
        node_gpus=Figure(value=job.gpus / nodes, **figure),
        domain_gpus=Figure(value=72 if job.device.id in ("gb200", "gb300") else job.node_gpus, **figure),
        network_bytes_per_s=Figure(value=job.network_bytes_per_s, **figure) if job.network_bytes_per_s else None,
    )
    names = ("attention", "sequence_parallel", "overlap", "gradient_bytes", "shard_weight_bytes", "optimizer_bytes")
    names += ("exchange", "overlap_experts", "fused_experts", "graphs")
    try:
        found = plan(
            job.model,
            cluster=cluster,
            seq=job.seq,
            global_batch=job.global_batch,
            precision=job.precision,
            gpus=job.gpus,
            memory_limit=1.0,
            options={name: getattr(job, name) for name in names},
        )
    except TesseraError as error:
        return {"source": row.get("source"), "model": row.get("model"), "why": str(error).splitlines()[0]}
    return {
        "source": row.get("source"),
        "model": row.get("model"),
        "gpus": f"{job.gpus} {job.device.id}",
        "published": f"{Layout.from_job(job, score.cost.recompute)} mb{job.micro_batch} {job.sharding} {score.cost.recompute}",
        "planned": f"{found.best.layout} mb{found.best.layout.micro_batch} {found.best.layout.sharding} "
        f"{found.best.layout.recompute}",
        "published_over_planned": score.cost.step_s / found.best.time_s,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--published", type=Path, help="also compare with the layouts of this file")
    parser.add_argument("--most", type=int, default=60, help="published layouts to compare with")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    rows = []
    for i in range(args.problems):
        problem = draw_problem(rng)
        rows.append(compare(problem, GOALS[i % len(GOALS)]))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    large = {}
    for name, (model, cluster, seq, batch) in LARGE.items():
        start = time.process_time()  # of the processor: the machine may be shared
        found = plan(MODELS[model], cluster=cluster, seq=seq, global_batch=batch)
        seconds = time.process_time() - start
        large[name] = {"layout": str(found.best.layout), "cpu_s": seconds, "evaluations": found.evaluations}
    scored = [row["excess"] for row in rows if row["fits"]]
    result = {
        "seed": args.seed,
        "problems": len(rows),
        "that_fit": len(scored),
        "agree_that_nothing_fits": sum(row.get("agree", False) for row in rows),
        "worst_excess": max(scored, default=None),
        "within_2_percent": sum(excess <= 0.02 for excess in scored),
        "evaluations": sum(row.get("evaluations", 0) for row in rows),
        "brute_evaluations": sum(row["brute_evaluations"] for row in rows),
        "rows": rows,
        "large": large,
    }
    if args.published:
        against = compare_published(args.published, args.most)
        ratios = sorted(row["published_over_planned"] for row in against if "published_over_planned" in row)
        result["published"] = {
            "layouts": len(ratios),
            "median_ratio": statistics.median(ratios),
            "highest_ratio": ratios[-1],
            "above_1.5": sum(ratio > 1.5 for ratio in ratios),
            "below_0.98": sum(ratio < 0.98 for ratio in ratios),
            "rows": against,
        }
    if args.write:
        write_result(args.write, result)
    print(json.dumps({key: value for key, value in result.items() if key not in ("rows", "published")}, indent=1))
    if args.published:
        print(json.dumps({key: value for key, value in result["published"].items() if key != "rows"}, indent=1))


if __name__ == "__main__":
    main()
