"""The prediction part of benchmarks/README.md: goals, figures reached, the datasheet roofline and peers beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Line = tuple[str, str, str, str]


def load(name: str) -> Any:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def pct(value: float) -> str:
    return f"{100 * value:.1f}"


def second(blind: dict[str, Any], after: dict[str, Any]) -> list[Line]:
    """The second blind set, recorded after the repairs the first one asked for."""
    rows = []
    for kind, goal in {"all": "12 / 12", "device-bound": "8 latency", "host-bound": "15 latency"}.items():
        shown = [f"{pct(d[kind]['latency'])} / {pct(d[kind]['energy'])}" for d in (blind, after)]
        inside = f"{pct(blind[kind]['inside_latency'])}% and then {pct(after[kind]['inside_latency'])}% in the interval"
        peer = f"roofline {pct(blind[kind]['roofline_latency'])}, ratio {blind[kind]['roofline_latency'] / after[kind]['latency']:.1f} after"
        what = f"a second set of models, {kind}: mean error of latency / energy, %"
        rows.append(
            (what, goal, f"blind {shown[0]} ({blind[kind]['cases']} cases); after repairs {shown[1]}; {inside}", peer)
        )
    return rows


def models(first: dict[str, Any], after: dict[str, Any], public: dict[str, Any]) -> list[Line]:
    """Whole models: the blind look at the held-out set, the same after repairs, and the public set."""

    def both(data: dict[str, Any], kind: str) -> str:
        return f"{pct(data[kind]['latency'])} / {pct(data[kind]['energy'])}"

    rows = []
    goals = {"all": "12 / 12", "device-bound": "8 latency", "host-bound": "15 latency"}
    for kind, goal in goals.items():
        peer = f"roofline {pct(first[kind]['roofline_latency'])}, ratio {first[kind]['roofline_latency'] / first[kind]['latency']:.1f}"
        reached = f"{both(first, kind)} ({first[kind]['cases']} cases); after repairs {both(after, kind)}; public set {both(public, kind)}"
        rows.append((f"models never used in fitting, {kind}: mean error of latency / energy, %", goal, reached, peer))
    inside, worst = first["all"], first["all"]["worst_latency"]
    rows.append(
        ("the same: share within 10% (latency / energy), worst case", "",
         f"{pct(inside['latency_within_10'])}% / {pct(inside['energy_within_10'])}%, {inside['worst']} {100 * worst:+.0f}%", "")
    )  # fmt: skip
    shown = f"{pct(inside['inside_latency'])} latency, {pct(inside['inside_energy'])} energy"
    rows.append(("models inside the stated 90% interval, %", ">= 80", shown, ""))
    memory = f"{pct(first['memory']['error'])} over {first['memory']['cases']} cases, worst {100 * first['memory']['worst']:+.0f}"
    rows.append(("peak memory against max_memory_allocated, mean error %", "<= 10", memory, ""))
    return rows


def kernels(k: dict[str, Any], rest: dict[str, Any]) -> list[Line]:
    """Single kernels: held out by shape."""
    rows = []
    goals = {
        "gemm seconds, H200, vLLM": "6", "gemm seconds, H200, torch alone": "6", "gemm seconds, H200, torch in models": "6",
        "attention seconds, H200, vLLM": "9", "attention seconds, H200, torch alone": "9",
        "attention seconds, H200, torch in models": "9", "gemm joules, H200, torch alone": "10",
        "attention joules, H200, torch alone": "10", "gemm seconds, A100 from its datasheet": "16",
        "attention seconds, A100 from its datasheet": "25",
    }  # fmt: skip
    for name, goal in goals.items():
        v = k["figures"][name]
        rows.append(
            (f"{name}: mean error %", f"<= {goal}",
             f"{pct(v['mean_abs_error'])} ({v['rows']} rows; {pct(v['coverage_90'])}% in the 90% interval)",
             f"roofline {pct(v['roofline_mean_abs_error'])}, ratio {v['roofline_over_model']:.1f}")
        )  # fmt: skip
    s = rest["summary"]
    rows.append(
        ("the rest of the H200 kernels (convolutions, norms, elementwise...): latency / energy, mean error %", "12 / 10",
         f"{pct(s['latency'])} / {pct(s['energy'])} ({s['rows']} rows; {pct(s['inside'])}% / {pct(s['inside_energy'])}% in the interval)",
         f"roofline {pct(s['roofline'])}, ratio {s['roofline'] / s['latency']:.1f}")
    )  # fmt: skip
    return rows


def speed(t: dict[str, Any], flops: list[dict[str, Any]]) -> list[Line]:
    rows = []
    for name, v in t.items():
        if isinstance(v, dict):
            peer = (
                f"branes-ai/graphs {v['graphs_s']:.1f}, ratio {v['graphs_s'] / v['warm_s']:.0f}"
                if v["graphs_s"]
                else ""
            )
            rows.append((f"time to predict {name}, warm, s", f"<= {v['goal_s']}", f"{v['warm_s']:.2f}", peer))
    equal = sum(r["why"] == "equal" for r in flops)
    rest = "; the others: causal attention at its lower half, grouped products counted"
    rows.append(
        ("FLOPs against torch's flop_counter", "equal or explained", f"{equal} of {len(flops)} equal{rest}", "")
    )
    return rows


def goals() -> list[Line]:
    """Every goal of the prediction with the figure reached."""
    first, after, public = (load(f"predict_{n}") for n in ("heldout", "heldout_after", "public"))
    return [
        *models(first, after, public),
        *second(load("predict_heldout2"), load("predict_heldout2_after")),
        *kernels(load("kernel_accuracy"), load("predict_kernels")),
        *speed(load("predict_time"), load("flops")),
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
    "  predictor, and looked at once, after everything was fitted. That look found two errors of capture (attention whose",
    "  keys must be broadcast was taken as fused; the backward of `EmbeddingBag` had no family) and one of the host (cuDNN",
    "  launches per step of a recurrent layer); 'after repairs' is with those mended and the host's level moved by a rule",
    "  from the development set: no longer blind.",
    "- The second set (36 models, `device/heldout2_cases.py`) was again chosen and recorded by somebody else, after the repairs of",
    "  the first look, and scored once: 31 / 23%. What it found: TF32 switched on inside a model and autocast around attention",
    "  were not seen by the capture, group norms, operands laid out across each other, embeddings and grouped convolutions of odd",
    "  width were priced wrongly, and its host was 1.6 times slower than the ones before. 'After repairs' is fitted on all",
    "  recordings, so it is not blind; with the kernels of whole models left out (`fit_ops.py --only folds`, 5 folds) device-bound",
    "  models come out at 6.6% latency and 6.8% energy. The physics was chosen with all sets in view.",
    "- Host-bound cases: hosts of the same kind differ by a factor of two from session to session (four recordings at 0.83 to 1.5",
    "  of what is shipped, their geometric mean), so 15% is not held without calibrating.",
    "- The kernel split of GEMM and attention was read once before three changes (see results/kernel_accuracy.json): those",
    "  rows are not a single blind look. On the A100 no constant was fitted, but rules were chosen with part of its rows",
    "  in view.",
    "- `tessera calibrate` on the H200 (`device/check_calibrate.py`, results/calibrate_check.json): two eager models not measured by",
    "  it from 23.7% to 11.7% latency; kernels stay as they are on this chip, which ships calibrated (12.4 to 12.2%); with the",
    "  datasheet's figures a third too high or too low 16.6 to 11.6% and 27.0 to 11.8%.",
    "- Worst and why: bidirectional GRU (cuDNN runs both directions at once, we add them); fp32 products of 197 rows",
    "  (cuBLAS's choices are erratic there); grouped convolutions; host-bound CNNs at batch 1.",
]
