"""What other tools do not give, or give at another price: the README's short table, from the same results."""

from __future__ import annotations

from goal import geometric, load, pair, pct
from schedules import compare_ways

PAGE = "benchmarks/README.md"


def compare_tools() -> list[str]:
    """Markdown rows: what, Tessera, the other tool in the same run, the script."""
    lines = ["| what you get | Tessera | another tool, same run | measured by |", "|---|---|---|---|"]
    for what, ours, theirs, script in rows():
        lines.append(f"| {what} | {ours} | {theirs} | [{script}](benchmarks/{script}) |")
    return lines


def rows() -> list[tuple[str, str, str, str]]:
    """Measuring, profiling, attributing, predicting, analysing, computing, holding a cap."""
    a = load("h200_accuracy")
    cost, steady = a["scope cost on the user's thread"], a["steady load: fp32"]
    final = load("attribution")["sets"]["final-12"]
    models, t, r, speed = (load(n) for n in ("predict_heldout", "analyze_trace", "region_cost", "predict_time"))
    second = load("predict_heldout2")
    repair_json = [load(n) for n in ("predict_heldout_after", "predict_heldout2_after")]
    peers = {k: v for k, v in speed.items() if isinstance(v, dict) and v["graphs_s"]}
    logits = next(r["ways"] for r in load("ops_gemm")["rows"] if r["name"] == "linear 8192x50257x768")
    caps = load("schedule_caps")
    held, free = caps["GPT-2 training at 0.7"], caps["GPT-2 training free"]
    tuned = {m["model"]: compare_ways(m) for m in load("tune")["models"]}
    chosen, mode, eager = (
        ", ".join(f"{tuned[m][way]['energy_j']:#.3g}" for m in ("gpt2", "bert", "resnet"))
        for way in ("chosen", "best_mode", "eager")
    )
    products = {
        (r["n"], r["precision"], r["counted"]): r["J"] for r in load("ops_precision")["rows"] if r["part"] == "joules"
    }
    fp8, bf16 = (
        ", ".join(f"{products[n, precision, counted]:.3f}" for n in (4096, 8192))
        for precision, counted in (("fp8_row fast", "bf16 operands, weight prepared"), ("bf16", "bf16 operands"))
    )
    llama = {r["way"]: r for r in load("ops_rows")["rows"] if r["op"] == "manual rms_norm" and r["training"]}
    traced = load("cupti_light")["programs"]["GPT-2 small training"]
    faster = geometric(v["graphs_s"] / v["warm_s"] for v in peers.values())
    return [
        ('GPT-2\'s training step, BERT and ResNet-50 on a batch, unchanged, under `schedule(policy="throughput_per_watt")`, J', chosen,
         f"torch.compile's best mode: {mode}; eager: {eager}", "device/tune.py"),
        ("a measured block, µs of your thread", f"{cost['tessera, launches between']['median_us']:.1f}",
         f"Zeus 0.16: {cost['zeus begin+end']['median_us']:.0f}", "device/accuracy.py"),
        ("joules of a 50 ms window on a steady load, % off, median (max)", pair(steady["tessera 50 ms"]),
         f"Zeus: {pair(steady['zeus 50 ms'])}", "device/accuracy.py"),
        ("joules of each kernel in a mixture, mean (worst) % off", f"{final['here']['mean_pct']:.1f} ({final['here']['worst_pct']:.1f})",
         f"plain least squares: {final['nnls_mean_pct']:.1f}", "measure/attribution.py"),
        ("a profiled region outside a session, ns", f"{r['region_off_ns']:.0f}", f"torch's record_function: {r['record_function_off_ns']:.0f}",
         "measure/region_cost.py"),
        (f"a step of GPT-2's training while every kernel is recorded, ms (plain: {traced['plain']['ms']:.1f})", f"{traced['light']['ms']:.1f}",
         f"torch.profiler: {traced['profiler']['ms']:.1f}", "device/cupti_light.py"),
        ("latency of two sets of models never seen, mean % off at the first look; after repairs of what it found",
         f"{pct(models['all']['latency'])}, {pct(second['all']['latency'])}; {pct(repair_json[0]['all']['latency'])}, {pct(repair_json[1]['all']['latency'])}",
         f"datasheet roofline: {pct(models['all']['roofline_latency'])}, {pct(second['all']['roofline_latency'])}", "predict/predict_models.py"),
        (f"seconds to predict {' and '.join(peers)}, from the second call on", " and ".join(f"{v['warm_s']:.2f}" for v in peers.values()),
         "branes-ai/graphs: " + " and ".join(f"{v['graphs_s']:.1f}" for v in peers.values()) + f" ({faster:.0f} times)", "predict/predict_time.py"),
        (f"a {t['megabytes']:.0f} MB trace read and broken down: CPU s, peak MiB", f"{t['tessera']['cpu_s']:.1f}, {t['tessera']['peak_mib']:.0f}",
         f"HolisticTraceAnalysis: {t['hta']['cpu_s']:.1f}, {t['hta']['peak_mib']:.0f}", "measure/analyze_trace.py"),
        ("the logits of GPT-2 (8192 x 50257 x 768, bf16) by `op.linear`, J", f"{logits['op']['J']:.2f}", f"torch: {logits['torch']['J']:.2f}",
         "device/ops_gemm.py"),
        ("Llama's RMS norm, forward and backward (8192 x 4096, bf16) by `op.rms_norm`, J", f"{llama['op']['J']:.3f}",
         f"its lines in eager torch: {llama['torch']['J']:.3f}", "device/ops_rows.py"),
        ("products of 4096³ and 8192³ in fp8, fast sums, the weight prepared, J", fp8, f"bf16: {bf16}", "device/ops_precision.py"),
        (f"GPT-2 training held at {held['cap_w']:.0f} W without root: mean off, %; J a step", f"{held['mean_off_pct']:+.1f}; {held['joules_per_call']:.1f}",
         f"free: {free['mean_w']:.0f} W, {free['joules_per_call']:.1f} J", "device/schedule_caps.py"),
    ]  # fmt: skip
