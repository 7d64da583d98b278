"""The operators' part of benchmarks/README.md: goals, figures reached, torch and torch.compile beside them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from page_goal import DEVICE, H200, Goal, geometric, load, load_device, where

GEMM = f"{DEVICE}/ops_gemm.py benchmarks/results/ops_gemm.json"
ROWS = f"{DEVICE}/ops_rows.py benchmarks/results/ops_rows.json"
PRECISION = f"{DEVICE}/ops_precision.py benchmarks/results/ops_precision.json"
OPTIMIZE = f"{DEVICE}/optimize.py benchmarks/results/optimize.json"
FUSED = f"{DEVICE}/fused_conv.py benchmarks/results/fused_conv.json"
CHECKPOINT = f"{DEVICE}/checkpointing.py benchmarks/results/checkpointing.json"
STREAMS = f"{DEVICE}/ops_streams.py benchmarks/results/ops_streams.json"
MEAN, WORST, WIN, LEAST_SHAPES = 1.02, 1.05, 0.9, 12
Ratio = tuple[str, float, float]  # what, time, joules


def goals() -> list[Goal]:
    g, r = load_device("ops_gemm"), load_device("ops_rows")
    return [
        *against_torch(g, r), wins(g, r), host_cost(load("op_host_cost")), *tolerance(load("error_bounds"), load_device("ops_precision")),
        *optimized(load_device("optimize")), convolutions(load_device("fused_conv")), checkpointing(load_device("checkpointing")), numerics(g, r), *streams(load_device("ops_streams")),
    ]  # fmt: skip


# -- against torch -----------------------------------------------------------------------------------------------


def gemm_ratios(g: dict[str, Any], *groups: str) -> list[Ratio]:
    return [
        (row["name"], row["time_ratio"], row["joule_ratio"])
        for row in g["rows"]
        if row["group"] in groups and "joule_ratio" in row
    ]


def row_ratios(r: dict[str, Any], stage: str, op: str | None = None) -> list[Ratio]:
    """Pairs of torch's and our row of one case."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in r["rows"]:
        if row["stage"] != stage or "error" in row or (op and row["op"] != op):
            continue
        keys = ("op", "b", "h", "hk", "s", "d", "causal", "rows", "cols", "dtype", "training")
        name = " ".join(str(row[k]) if k == "op" else f"{k}={row[k]}" for k in keys if k in row)
        cases.setdefault(name, {})[row["way"]] = row
    both = [(n, ways["torch"], ways["op"]) for n, ways in cases.items() if {"torch", "op"} <= ways.keys()]
    return [(n, o["ms"] / t["ms"], o["J"] / t["J"]) for n, t, o in both if o.get("J") and t.get("J")]


def against_torch(g: dict[str, Any] | None, r: dict[str, Any] | None) -> list[Goal]:
    found: list[tuple[str, list[Ratio] | None, str, str]] = [
        ("matmul", gemm_ratios(g, "gemm") if g else None, "ops_gemm", GEMM)
    ]
    for op in ("flash_attention", "softmax", "layer_norm", "rms_norm"):
        found.append((op, row_ratios(r, "op", op) if r else None, "ops_rows", ROWS))
    rows = []
    for op, ratios, name, command in found:
        what = f"op.{op} against torch's best path: time / joules, geometric mean (worst shape)"
        goal = f"<= {MEAN} ({WORST}), {LEAST_SHAPES}+ shapes"
        if not ratios:
            rows.append(Goal(what=what, goal=goal, command=command))
            continue
        parts = [[ratio[i] for ratio in ratios] for i in (1, 2)]
        said = [f"{geometric(p):.3f} ({max(p):.3f})" for p in parts]
        met = all(geometric(p) <= MEAN and max(p) <= WORST for p in parts) and len(ratios) >= LEAST_SHAPES
        worst = max(ratios, key=lambda x: max(x[1:]))[0]
        rows.append(
            Goal(what=what, goal=goal, reached=f"{' / '.join(said)}, {len(ratios)} shapes; worst: {worst}", met=met,
                 beside="torch is 1", where=where(name, H200), command=command)
        )  # fmt: skip
    return rows


def wins(g: dict[str, Any] | None, r: dict[str, Any] | None) -> Goal:
    what, goal = "named wins of 10% in joules over what torch does", ">= 3"
    command = f"{GEMM}; {ROWS}"
    ratios = (gemm_ratios(g, "unaligned", "fused") if g else []) + (row_ratios(r, "wins") if r else [])
    if not ratios:
        return Goal(what=what, goal=goal, command=command)
    won = sorted((joules, name) for name, _, joules in ratios if joules <= WIN)
    listed = "; ".join(f"{name}: {100 * (1 - joules):.0f}% fewer" for joules, name in won[:6])
    source = "ops_gemm" if g else "ops_rows"
    return Goal(what=what, goal=goal, reached=f"{len(won)} of {len(ratios)} candidates ({listed})", met=len(won) >= 3,
                where=where(source, H200), command=command)  # fmt: skip


def host_cost(c: dict[str, Any] | None) -> Goal:
    what, goal, command = (
        "what op.* costs the host over torch's call, µs, worst",
        "<= 5",
        "python benchmarks/op_host_cost.py",
    )
    if c is None:
        return Goal(what=what, goal=goal, command=command)
    more = {name: row["op_us"] - row["torch_us"] for name, row in c["calls"].items()}
    worst = max(more, key=more.__getitem__)
    return Goal(what=what, goal=goal, reached=f"{more[worst]:.1f} ({worst}), {len(more)} operators", met=more[worst] <= 5,
                where=where("op_host_cost"), command=command)  # fmt: skip


# -- precision ---------------------------------------------------------------------------------------------------


def tolerance(e: dict[str, Any] | None, p: dict[str, Any] | None) -> list[Goal]:
    return [*bounds_here(e), *bounds_there(p), layer_joules(p), saved(p)]


def bounds_here(e: dict[str, Any] | None) -> list[Goal]:
    what, goal = "error_tolerance, random cases emulated on a CPU: bound violated", "never, 1,000 cases"
    command = "python benchmarks/error_bounds.py benchmarks/results/error_bounds.json"
    if e is None:
        return [Goal(what=what, goal=goal, command=command)]
    here = {"where": where("error_bounds"), "command": command}
    return [
        Goal(what=what, goal=goal, reached=f"{e['violations']} of {e['cases']:,}; {e['refused']} refused",
             met=e["violations"] == 0 and e["cases"] >= 1000, **here),
        Goal(what="the same: the cheapest precision that holds was chosen, %; joules above choosing by hindsight, %",
             reached=f"{e['cheapest_chosen_pct']:.1f}; {e['joules_over_cheapest_pct']:.1f} (modelled joules)", **here),
    ]  # fmt: skip


def bounds_there(p: dict[str, Any] | None) -> list[Goal]:
    rows = []
    for part, title, least in (
        ("random", "random cases", ", 1,000 cases"),
        ("layer", "layers of GPT-2, BERT and a Llama", ""),
    ):
        what, goal = f"error_tolerance on the GPU, {title}: bound violated, chosen", f"never{least}"
        s = (p or {}).get("summary", {})
        if not s.get(f"{part}_cases"):
            rows.append(Goal(what=what, goal=goal, command=PRECISION))
            continue
        picked: Counter[str] = Counter()
        for t in ("0.05", "0.01", "0.001"):
            picked.update(s.get(f"{part}_chosen_{t}", {}))
        named = ", ".join(f"{k} {n}" for k, n in picked.most_common())
        rows.append(
            Goal(what=what, goal=goal, reached=f"{s[f'{part}_violations']} of {s[f'{part}_cases']} ({named})",
                 met=s[f"{part}_violations"] == 0 and (not least or s[f"{part}_cases"] >= 1000), where=where("ops_precision"), command=PRECISION)
        )  # fmt: skip
    return rows


def layer_joules(p: dict[str, Any] | None) -> Goal:
    what = "the same layers: joules of the chosen precisions against bf16 / fp32, % fewer, by tolerance"
    rows = (p or {}).get("rows", [])
    joules = {
        (tuple(r["shape"]), r["precision"]): r["J"] for r in rows if r.get("part") == "layer joules" and r.get("J")
    }
    said = []
    for tolerance in (5e-2, 1e-2, 1e-3):
        cases = [
            (tuple(r["shape"]), r["chosen"]) for r in rows if r.get("part") == "layer" and r["tolerance"] == tolerance
        ]
        known = [(s, c) for s, c in cases if all((s, k) in joules for k in (c, "bf16", "fp32"))]
        spent = {k: sum(joules[s, k or c] for s, c in known) for k in ("", "bf16", "fp32")}
        if known:
            said.append(
                f"{tolerance:g}: " + " / ".join(f"{100 * (1 - spent[''] / spent[k]):.0f}" for k in ("bf16", "fp32"))
            )
    return Goal(what=what, reached="; ".join(said), where=where("ops_precision") if said else "", command=PRECISION)


def saved(p: dict[str, Any] | None) -> Goal:
    what, goal = "fp8 against bf16, products of 4096 and above: joules saved, %", ">= 35"
    rows = [r for r in (p or {}).get("rows", []) if r.get("part") == "joules" and r.get("J") and r["n"] >= 4096]
    joules = {(r["n"], r["precision"], r["counted"]): r["J"] for r in rows}
    found = {
        (n, f"{precision}, {counted.removeprefix('bf16 operands, ')}"): 100
        * (1 - j / joules[n, "bf16", "bf16 operands"])
        for (n, precision, counted), j in joules.items()
        if precision in ("fp8", "fp8 fast")
        and counted.startswith("bf16 operands")
        and (n, "bf16", "bf16 operands") in joules
    }
    if not found:
        return Goal(what=what, goal=goal, command=PRECISION)
    said = "; ".join(f"{n}, {how}: {v:.0f}" for (n, how), v in sorted(found.items()))
    return Goal(
        what=what,
        goal=goal,
        reached=said,
        met=min(found.values()) >= 35,
        where=where("ops_precision"),
        command=PRECISION,
    )


# -- whole models ------------------------------------------------------------------------------------------------

LOADS = {"gpt2": "GPT-2-small training", "bert": "BERT inference", "resnet50": "ResNet-50 inference"}


def optimized(o: dict[str, Any] | None) -> list[Goal]:
    rows = []
    for name, title in LOADS.items():
        what = f"optimize() on {title}: J and s over the best compile mode; share of the difference the trace explains"
        goal = f"<= {MEAN}; >= 90%"
        ways = (o or {}).get("models", {}).get(name, {})
        ours, last, eager = (ways.get(k, {}) for k in ("optimize", "optimize over best mode", "eager"))
        if "j_ratio" not in last or "explained_j" not in ours:
            rows.append(Goal(what=what, goal=goal, command=OPTIMIZE))
            continue
        rows.append(
            Goal(what=what, goal=goal, where=where("optimize", H200), command=OPTIMIZE,
                 reached=f"J {last['j_ratio']:.3f}, s {last['s_ratio']:.3f}; {100 * ours['explained_j']:.0f}% of the joules, "
                         f"{100 * ours['explained_s']:.0f}% of the time (eager {eager['ms']:.1f} ms {eager['j']:.2f} J, "
                         f"ours {ours['ms']:.1f} ms {ours['j']:.2f} J: {ours['chosen']})",
                 met=max(last["j_ratio"], last["s_ratio"]) <= MEAN and min(ours["explained_j"], ours["explained_s"]) >= 0.9,
                 beside=f"torch.compile {last['best_mode']}")
        )  # fmt: skip
    return rows


def convolutions(f: dict[str, Any] | None) -> Goal:
    """Not among the goals: what one rewrite alone does to a whole model."""
    what = "ResNet-50 inference, convolution + batch norm (+ sum) + ReLU as one cuDNN call: joules and time over bf16 eager, in turns"
    pair = (f or {}).get("model", {}).get("in turns", {})
    if "j_ratio" not in pair:
        return Goal(what=what, command=FUSED)
    eager, fused = f["model"]["eager"], f["model"]["fused"]
    return Goal(what=what, reached=f"{pair['j_ratio']:.3f}, {pair['ms_ratio']:.3f} ({fused['kernels_a_call']} kernels instead of "
                                   f"{eager['kernels_a_call']}; {eager['j']:.2f} to {fused['j']:.2f} J)",
                where=where("fused_conv"), command=FUSED)  # fmt: skip


def checkpointing(c: dict[str, Any] | None) -> Goal:
    what = "checkpointing a Llama of 1.1 G parameters, three settings: predicted against measured ms, J, peak memory, %"
    goal = "within 10"
    off = {name: row for name, row in (c or {}).get("off", {}).items() if row.get("J") is not None}
    if not off:
        return Goal(what=what, goal=goal, command=CHECKPOINT)
    said = "; ".join(
        f"{n}: {100 * r['ms']:+.0f}, {100 * r['J']:+.0f}, {100 * r['peak_bytes']:+.0f}" for n, r in off.items()
    )
    met = len(off) == 3 and all(abs(r[k]) <= 0.1 for r in off.values() for k in ("J", "peak_bytes"))
    return Goal(what=what, goal=goal, reached=said, met=met, where=where("checkpointing"), command=CHECKPOINT)


def numerics(g: dict[str, Any] | None, r: dict[str, Any] | None) -> Goal:
    what = (
        "bf16 numerics of every Triton kernel against float64, odd shapes: worst relative error, elements not written"
    )
    goal, command = "<= 1e-2, none", f"{GEMM}; {ROWS}"
    if g is None or r is None or "numerics" not in g:
        return Goal(what=what, goal=goal, command=command)
    n = g["numerics"]
    kinds = ("matmul", "conv2d", "padding")
    found = [(n[f"{kind}_worst"][0], f"{kind} {n[f'{kind}_worst'][1]}") for kind in kinds if n.get(f"{kind}_worst")]
    found += [(e, f"{row['case']} {part}") for row in r["numerics"] for part, e in row.get("errors", {}).items()]
    failed = len(n["failed"]) + sum("error" in row for row in r["numerics"])
    broken = sum(not math.isfinite(e) for e, _ in found)
    worst, case = max((e, name) for e, name in found if math.isfinite(e))
    cases = sum(n[f"{kind}_cases"] for kind in kinds) + len(r["numerics"])
    reached = f"{worst:.1e} ({case}), {broken} of {cases} cases with NaN, {failed} failed"
    return Goal(what=what, goal=goal, reached=reached, met=worst <= 1e-2 and not broken and not failed,
                where=where("ops_gemm", H200), command=command)  # fmt: skip


def streams(s: dict[str, Any] | None) -> list[Goal]:
    """Not among the goals: whether streams, copies and the spectral model do what the docs say."""
    whats = (
        "copy beside compute on named streams: share of the shorter one hidden",
        "spectral convolution: the cheaper way was picked",
    )
    if s is None:
        return [Goal(what=what, command=STREAMS) for what in whats]
    here = {"where": where("ops_streams"), "command": STREAMS}
    hidden = "; ".join(f"{r['host_memory']} {r['hidden']:.0%}" for r in s["rows"] if r["section"] == "overlap")
    known = [r for r in s["rows"] if r["section"] == "spectral" and r.get("direct_J") and r.get("spectral_J")]
    right = sum((r["spectral_J"] < r["direct_J"]) == r["model_wins"] for r in known)
    return [
        Goal(what=whats[0], reached=hidden, **here),
        Goal(what=whats[1], reached=f"{right} of {len(known)} shapes" if known else "", **here),
    ]


NOTES = [
    "- Rows without a figure wait for a session on the GPU; the commands are those that will be run, and the page takes the figures",
    "  from the files they write.",
]
