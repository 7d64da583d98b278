"""The prediction part of benchmarks/README.md: goals, figures reached, the datasheet roofline and peers beside them."""

from __future__ import annotations

from typing import Any

from goal import H200, Goal, load, load_if_measured, pct, where

MODELS = "python benchmarks/predict/predict_models.py {}"
# kind of case: (goal in words, most latency, most energy), as shares
KINDS = {
    "all": ("12 / 12", 0.12, 0.12),
    "device-bound": ("8 latency", 0.08, None),
    "host-bound": ("15 latency", 0.15, None),
}


def met(found: dict[str, Any], kind: str) -> bool:
    _, latency, energy = KINDS[kind]
    return found[kind]["latency"] <= latency and (energy is None or found[kind]["energy"] <= energy)


def both(found: dict[str, Any], kind: str) -> str:
    return f"{pct(found[kind]['latency'])} / {pct(found[kind]['energy'])}"


def models(first: dict[str, Any], after: dict[str, Any], public: dict[str, Any]) -> list[Goal]:
    """Whole models: the blind look at the held-out set (it decides), the same after repairs, and the public set."""
    here = {"where": where("predict_heldout", H200), "command": MODELS.format("heldout")}
    rows = []
    for kind, (goal, *_) in KINDS.items():
        roof = first[kind]["roofline_latency"]
        reached = f"{both(first, kind)} ({first[kind]['cases']} cases); after repairs {both(after, kind)}; public set {both(public, kind)}"
        rows.append(
            Goal(what=f"models never used in fitting, {kind}: mean error of latency / energy, %", goal=goal, reached=reached,
                 met=met(first, kind), beside=f"roofline {pct(roof)}, ratio {roof / first[kind]['latency']:.1f}", **here)
        )  # fmt: skip
    f = first["all"]
    within = (
        f"{pct(f['latency_within_10'])}% / {pct(f['energy_within_10'])}%, {f['worst']} {100 * f['worst_latency']:+.0f}%"
    )
    inside = f"{pct(f['inside_latency'])} latency, {pct(f['inside_energy'])} energy"
    m = first["memory"]
    return [
        *rows,
        Goal(what="the same: share within 10% (latency / energy), worst case", goal="printed", reached=within, **here),
        Goal(what="models inside the stated 90% interval, %", goal=">= 80", reached=inside,
             met=min(f["inside_latency"], f["inside_energy"]) >= 0.8, **here),
        Goal(what="peak memory against max_memory_allocated, mean error %", goal="<= 10", met=m["error"] <= 0.1, **here,
             reached=f"{pct(m['error'])} over {m['cases']} cases, worst {100 * m['worst']:+.0f}"),
    ]  # fmt: skip


def servers(f: dict[str, Any]) -> list[Goal]:
    """Published servers: the half of the groups that the constants were not chosen on decides."""
    command = "python benchmarks/measure/published_serving.py LATENCY.csv.gz ENERGY.jsonl.gz --write benchmarks/results/published_serving.json"
    here = {"where": where("published_serving"), "command": command}
    kept, chosen = f["kept_apart"], f["chosen_on"]

    def pair(key: str, what: str) -> str:
        return f"{pct(kept[key][what])} ({pct(chosen[key][what])})"

    rows = []
    for key, words, goal in (
        ("tpot", "time per output token", 0.15),
        ("joules_per_token", "joules per output token", 0.20),
    ):
        count = (
            f"{kept[key]['rows']} rows of groups kept apart ({chosen[key]['rows']} that the constants were chosen on)"
        )
        rows.append(Goal(what=f"published servers, {words}, {count}: median error, %", goal=f"<= {100 * goal:.0f}",
                         reached=pair(key, "median_error"), met=kept[key]["median_error"] <= goal, **here))  # fmt: skip
        rows.append(Goal(what="the same: in the stated 90% interval, %", goal="said", reached=pair(key, "coverage"), **here))  # fmt: skip
    first = Goal(
        what="the same, time to the first token: median error, %",
        goal="said",
        reached=pair("ttft", "median_error"),
        **here,
    )
    return [*rows, first]


def later(words: str, which: str) -> list[Goal]:
    """A further set: the one look before it was used decides; beside it, what became of it where it was used since."""
    blind = load(f"predict_{which}")
    after = load_if_measured(f"predict_{which}_after")  # none of a set by which nothing was chosen or mended yet
    rows = []
    for kind, (goal, *_) in KINDS.items():
        roof, inside = blind[kind]["roofline_latency"], f"{pct(blind[kind]['inside_latency'])}%"
        reached = f"blind {both(blind, kind)} ({blind[kind]['cases']} cases)"
        if after is not None:
            reached += f"; after repairs {both(after, kind)}"
            inside += f" and then {pct(after[kind]['inside_latency'])}%"
        rows.append(
            Goal(what=f"a {words} set of models, {kind}: mean error of latency / energy, %", goal=goal, met=met(blind, kind),
                 reached=f"{reached}; {inside} in the interval", beside=f"roofline {pct(roof)}",
                 where=where(f"predict_{which}", H200), command=MODELS.format(which))
        )  # fmt: skip
    return rows


GOALS = {
    "gemm seconds, H200, vLLM": 6, "gemm seconds, H200, torch alone": 6, "gemm seconds, H200, torch in models": 6,
    "gemm seconds, H200, torch in models of later sets": 6, "gemm seconds, H200, torch, random shapes": 6,
    "attention seconds, H200, vLLM": 9, "attention seconds, H200, torch alone": 9,
    "attention seconds, H200, torch in models": 9, "attention seconds, H200, torch in models of later sets": 9,
    "attention seconds, H200, torch, random shapes": 9,
    "gemm joules, H200, torch alone": 10, "attention joules, H200, torch alone": 10,
}  # fmt: skip


def kernels(k: dict[str, Any], rest: dict[str, Any]) -> list[Goal]:
    """Single kernels: held out by shape."""
    rows = []
    for name, goal in GOALS.items():
        v = k["figures"][name]
        board = f"{H200} (public timings)" if "vLLM" in name else H200
        rows.append(
            Goal(what=f"{name}: mean error %", goal=f"<= {goal}", met=v["mean_abs_error"] <= goal / 100,
                 reached=f"{pct(v['mean_abs_error'])} ({v['rows']} rows; {pct(v['coverage_90'])}% in the 90% interval)",
                 beside=f"roofline {pct(v['roofline_mean_abs_error'])}, ratio {v['roofline_over_model']:.1f}",
                 where=where("kernel_accuracy", board), command="python benchmarks/predict/kernel_accuracy.py")
        )  # fmt: skip
    s, c = rest["summary"], [f["coverage_90"] for n, f in k["figures"].items() if n in GOALS]
    inside = (
        f"{pct(min(c))} to {pct(max(c))} by kind; the rest {pct(s['inside'])} latency, {pct(s['inside_energy'])} energy"
    )
    return [
        *rows,
        Goal(what="the rest of the H200 kernels (convolutions, norms, elementwise...): latency / energy, mean error %",
             goal="12 / 10", met=s["latency"] <= 0.12 and s["energy"] <= 0.1,
             reached=f"{both({'': s}, '')} ({s['rows']} rows; {pct(s['inside'])}% / {pct(s['inside_energy'])}% in the interval)",
             beside=f"roofline {pct(s['roofline'])}, ratio {s['roofline'] / s['latency']:.1f}",
             where=where("predict_kernels", H200), command="python benchmarks/predict/predict_kernels.py"),
        Goal(what="held-out kernels inside the stated 90% interval, %", goal="85-95", reached=inside,
             met=all(0.85 <= x <= 0.95 for x in (*c, s["inside"], s["inside_energy"])),
             where=where("kernel_accuracy", H200), command="python benchmarks/predict/kernel_accuracy.py"),
    ]  # fmt: skip


def operators(found: dict[str, Any]) -> list[Goal]:
    """Operators with shapes drawn at random, kept apart from the fits."""
    return [
        Goal(what=f"random operators kept apart, {kind} ({f['operators']} calls, {f['programs']} programs): mean error of one; of a program's kernels, %",
             goal="printed", reached=f"{pct(f['mean_abs_error'])} (median {pct(f['median_abs_error'])}; {pct(f['coverage_90'])}% in the 90% interval); {pct(f['program_mean_abs_error'])}",
             beside=f"roofline {pct(f['roofline_mean_abs_error'])}", where=where("operator_kept", H200),
             command="python benchmarks/predict/operator_accuracy.py")
        for kind, f in found["kinds"].items()
    ]  # fmt: skip


KERNEL_FAMILIES = {"gemm": "products", "attention": "attention", "moe": "fused experts"}


def chips(public: dict[str, Any], left_out: dict[str, Any]) -> list[Goal]:
    """Public timings of vLLM's kernels: chips that were fitted, on shapes that were not; and chips that were left out."""
    rows = []
    for chip, kinds in public["chips"].items():
        for kind, v in kinds.items():
            beside = f"roofline {pct(v['roofline_mean_abs_error'])}" if "roofline_mean_abs_error" in v else ""
            rows.append(
                Goal(what=f"{KERNEL_FAMILIES[kind]}, {chip}, full clock: mean error %", goal=f"<= {100 * v['goal']:.0f}", met=v["mean_abs_error"] <= v["goal"],
                     reached=f"{pct(v['mean_abs_error'])} ({v['rows']} rows; {pct(v['coverage_90'])}% in the 90% interval)", beside=beside,
                     where=where("public_kernels"), command="python benchmarks/predict/public_kernels.py")
            )  # fmt: skip
            if "joules" in v and chip == "b200":
                j = v["joules"]
                rows.append(
                    Goal(what=f"{KERNEL_FAMILIES[kind]}, {chip}, over 0.1 ms: mean error of joules, %", goal=f"<= {100 * j['goal']:.0f}",
                         met=j["mean_abs_error"] <= j["goal"], reached=f"{pct(j['mean_abs_error'])} ({j['rows']} rows)",
                         where=where("public_kernels"), command="python benchmarks/predict/public_kernels.py")
                )  # fmt: skip
    for kind, goal in (("gemm", 0.15), ("attention", 0.20), ("moe", None)):
        for chip, v in left_out["left_out"][kind].items():
            formats = ", ".join(f"{name} {pct(error)}" for name, error in v["by_kernel"].items())
            rows.append(
                Goal(what=f"{KERNEL_FAMILIES[kind]}, {chip} left out of the fit: mean error %", goal=f"<= {100 * goal:.0f}" if goal else "printed",
                     met=v["mean_abs_error"] <= goal if goal else None,
                     reached=f"{pct(v['mean_abs_error'])} ({formats}; {pct(v['coverage_90'])}% in the 90% interval)",
                     where=where("left_out_chips"), command="python benchmarks/fit/fit_chips.py --chips other")
            )  # fmt: skip
    return rows


def speed(t: dict[str, Any], flops: list[dict[str, Any]]) -> list[Goal]:
    rows = []
    for name, v in t.items():
        if not isinstance(v, dict):
            continue
        peer = f"branes-ai/graphs {v['graphs_s']:.1f}, ratio {v['graphs_s'] / v['warm_s']:.0f}" if v["graphs_s"] else ""
        rows.append(
            Goal(what=f"time to predict {name}, warm, s", goal=f"<= {v['goal_s']}", reached=f"{v['warm_s']:.2f}", beside=peer,
                 met=v["warm_s"] <= v["goal_s"], where=where("predict_time"), command="python benchmarks/predict/predict_time.py")
        )  # fmt: skip
    equal = sum(r["why"] == "equal" for r in flops)
    rest = "; the others: causal attention at its lower half, grouped products counted"
    rows.append(
        Goal(what="FLOPs against torch's flop_counter", goal="equal or explained", reached=f"{equal} of {len(flops)} equal{rest}",
             met=all(r["why"] for r in flops), where=where("flops"), command="python benchmarks/predict/flops.py")
    )  # fmt: skip
    return rows


def pairs(found: dict[str, dict[str, float]]) -> list[Goal]:
    """Differences of two predictions of one chip, whose errors are mostly shared: no issue's goal, ours."""
    return [
        Goal(what=f"difference of two predictions, {kind}: in the 90% interval, latency / energy, %", goal=">= 85 (ours)",
             reached=f"{pct(v['latency_inside'])} / {pct(v['energy_inside'])} ({v['pairs']} pairs); "
             f"energy called certain {pct(v['energy_certain'])}, of wrong sign {pct(v['energy_wrong_sign'])}",
             met=min(v["latency_inside"], v["energy_inside"]) >= 0.85,
             beside=f"errors as independent: certain {pct(v['energy_certain_independent'])}",
             where=where("predict_pairs", H200), command="python benchmarks/predict/predict_pairs.py")
        for kind, v in found.items() if isinstance(v, dict) and "pairs" in v
    ]  # fmt: skip


def compiled(found: dict[str, Any]) -> list[Goal]:
    """Programs that torch.compile compiled: three were recorded, none was fitted on."""
    rows = [r for r in found["rows"] if r["launch"] == "compile"]
    each = "; ".join(
        f"{r['program']} {100 * r['latency']:+.0f} / {100 * r['energy']:+.0f} ({r['bound']})" for r in rows
    )
    inside = sum(abs(r["predicted_ms"] - r["ms"]) <= r["error_ms"] for r in rows)
    return [
        Goal(what="torch.compile, default mode: error of latency / energy, %", goal="printed",
             reached=f"{each}; {inside} of {len(rows)} latencies in the interval",
             where=where("predict_compiled", H200), command="python benchmarks/predict/predict_compiled.py")
    ]  # fmt: skip


def calibrated(found: dict[str, Any]) -> list[Goal]:
    """Models that wait for their host, after `tessera calibrate` beside it."""
    host = found["host"]
    shipped, after = host["shipped"], host["calibrated"]

    def both_of(view: dict[str, float]) -> str:
        return f"{pct(view['latency'])} / {pct(view['energy'])}"

    reached = f"{both_of(after)} ({host['cases']} cases; {pct(after['inside_latency'])}% in the 90% interval)"
    return [
        Goal(what="host-bound models of the seventh set, after `tessera calibrate`: mean error of latency / energy, %",
             goal="15 latency", met=after["latency"] <= 0.15, reached=reached,
             beside=f"as shipped {both_of(shipped)}", where=where("calibrated_models", H200),
             command="benchmarks/device/calibrated_models.py benchmarks/device/heldout7_cases.py OUT.json")
    ]  # fmt: skip


def goals() -> list[Goal]:
    """Every goal of the prediction with the figure reached."""
    first, after, public = (load(f"predict_{n}") for n in ("heldout", "heldout_after", "public"))
    return [
        *models(first, after, public),
        *later("second", "heldout2"),
        *later("third", "heldout3"),
        *later("fourth", "heldout4"),
        *later("fifth", "heldout5"),
        *later("sixth", "heldout6"),
        *later("seventh", "heldout7"),
        *calibrated(load("calibrated_models")),
        *operators(load("operator_kept")),
        *kernels(load("kernel_accuracy"), load("predict_kernels")),
        *chips(load("public_kernels"), load("left_out_chips")),
        *speed(load("predict_time"), load("flops")["models"]),
        *pairs(load("predict_pairs")),
        *servers(load("published_serving")),
        *compiled(load("predict_compiled")),
    ]


def cases() -> list[str]:
    """Every case of the public and the held-out set, as first predicted."""
    lines = ["| case | bound | ms | predicted | error | J | predicted | error |", "|---|---|---|---|---|---|---|---|"]
    for which in ("public", "heldout", "heldout2"):
        for r in load(f"predict_{which}")["rows"]:
            lines.append(
                f"| {r['name']} | {r['bound']} | {r['ms']:.3g} | {r['predicted_ms']:.3g} ± {r['ms_error']:.2g} | {100 * r['latency']:+.0f}% "
                f"| {r['j']:.3g} | {r['predicted_j']:.3g} ± {r['j_error']:.2g} | {100 * r['energy']:+.0f}% |"
            )
    return lines


NOTES = [
    "- The held-out set (53 models, `device/heldout_cases.py`) was chosen and recorded by somebody who did not build the",
    "  predictor. It was looked at once, after everything was fitted. That look found two errors of the capture (attention",
    "  with broadcast keys was treated as fused; the backward pass of `EmbeddingBag` had no family) and one of the host",
    "  model (cuDNN launches kernels for each step of a recurrent layer). 'After repairs' is with these fixed, and with the",
    "  host's speed set by a rule from the development set, so it is no longer blind.",
    "- The second set (36 models, `device/heldout2_cases.py`) was again chosen and recorded by somebody else, after those",
    "  repairs, and scored once: 31 / 23%. It found that the capture missed TF32 switched on inside a model and autocast",
    "  around attention; that group norms, operands with crossed layouts, embeddings and grouped convolutions of odd width",
    "  were predicted wrongly; and its host was 1.6 times slower than the earlier ones. 'After repairs' is fitted on all",
    "  recordings, so it is not blind. In a cross-validation that leaves out the kernels of whole models (`fit_ops.py",
    "  --only folds`, 5 folds), device-bound models have errors of 6.6% in latency and 6.8% in energy. The form of the",
    "  model was chosen with all sets in view.",
    "- The third set (35 models) was chosen the same way, and has since been used to choose between fits. The fourth (39",
    "  models, `device/heldout4_cases.py`) was scored once. 86% of its device-bound cases were within 10%; the mean was made",
    "  by HuBERT, whose grouped convolution over 128 samples runs without matrix units in fp16 (-64 and -70%), and by batch",
    "  norms without planes in a small recommender (+89%). 'After repairs' has these families mended, and is fitted on the",
    "  fourth set too.",
    "- The fifth set (48 models, `device/heldout5_cases.py`) was chosen by somebody who had not seen the predictor, recorded",
    "  after those repairs, and scored once; 68% of its device-bound cases were within 10%. Furthest off were kernels whose",
    "  time does not go by bytes: gradients of look-ups (`hash_grid_train`, +150%) and of a table of relative positions that",
    "  is named 80,200 times in one row (`hstu_autocast_train`, -85%), sums of columns, products of rows that are not of whole",
    "  16 bytes. 'After repairs' has these families mended, and is fitted on the fifth set too. What is left: cuBLAS takes a",
    "  kernel of MAGMA's for `mla_8layers_decode` and one for 12 rows in fp32 that takes eight times the prediction (`moonshine_tiny`).",
    "- The sixth set (47 models, `device/heldout6_cases.py`) was chosen by somebody who had not seen the predictor, recorded",
    "  after random operators had been added to the fits, and scored once; 77% of its device-bound cases were within 10%.",
    "  One case makes the mean of all: 4-bit weights that are looked up in a table of 16 numbers (+460%), which were costed",
    "  as rows; and a scan did not know its dimension (`min_gru`, -26%). 'After repairs' has these two mended, nothing fitted.",
    "- The seventh set (40 models, `device/heldout7_cases.py`: what people try first, at ordinary sizes) was chosen by",
    "  somebody who had not seen the predictor and scored once. Loops of LSTM cells make the mean (+371, +188 and +184%):",
    "  on a GPU a cell is two products and one kernel, and was captured as 18 operators. 'After repairs' has that mended,",
    "  nothing fitted. Left: sampling from 152,000 words (sort, cumsum and scatter of long rows, -35%), and its host, which",
    "  was a quarter faster than the shipped one in every lease of that day.",
    "- The random operators (`device/operator_cases.py`) are what models seldom use: odd shapes, masks, scans, gradients of",
    "  everything. 197 programs are fitted on, 54 others were scored once. At the commit before, they were off by 96% in the",
    "  mean (median 23%), with 63% in the interval (results/earlier/operator_kept_1.json). Left: convolutions for which cuDNN",
    "  falls back to kernels without matrix units (up to 50 times as slow, by no rule that was found), 16-bit additions that",
    "  meet in few places, and einsum's cases, whose sizes had been drawn in the order of a set (only those that agree count).",
    "- Host-bound cases: hosts of the same kind differ by a factor of two between sessions. Four recordings were at 0.83 to",
    "  1.5 of the shipped value, which is their geometric mean. So 15% is not reached without calibrating.",
    "- The final split of GEMM and attention kernels was read once before three changes (see results/kernel_accuracy.json),",
    "  so those rows are not a single blind look. Public timings of other chips: the final split was read after everything",
    "  was fitted, but the A100's final rows had been scored before, with the H200's constants.",
    "- `tessera calibrate` on the H200 (`device/check_calibrate.py`, results/calibrate_check.json) improved two eager",
    "  models that it had not measured from 23.7% to 11.7% in latency. Kernels stay as they are on this chip, which ships",
    "  calibrated (12.4 to 12.2%). With the datasheet's figures a third too high or too low, it improved them from 16.6 to",
    "  11.6% and from 27.0 to 11.8%.",
    "- The worst cases: bidirectional GRU (cuDNN runs both directions at once, the predictor adds them), fp32 products of",
    "  197 rows (cuBLAS chooses erratically there), grouped convolutions, and host-bound CNNs at batch 1.",
]
