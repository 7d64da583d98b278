"""What other tools do not give, or give at another price: the README's short table, from the same results."""

from __future__ import annotations

from page_goal import geometric, load, pair, pct

PAGE = "benchmarks/README.md"


def beside() -> list[str]:
    """Markdown rows: what, Tessera, the other tool in the same run, the script."""
    lines = ["| what you get | Tessera | beside it, same run | measured by |", "|---|---|---|---|"]
    for what, ours, theirs, script in rows():
        lines.append(f"| {what} | {ours} | {theirs} | [{script}](benchmarks/{script}) |")
    return lines


def rows() -> list[tuple[str, str, str, str]]:
    """Measuring, profiling, attributing, predicting, analysing, computing, holding a cap."""
    a = load("h200_accuracy")
    cost, steady = a["scope cost on the user's thread"], a["steady load: fp32"]
    final = load("attribution")["sets"]["final-12"]
    models, t, r, speed = (load(n) for n in ("predict_heldout", "analyze_trace", "region_cost", "predict_time"))
    peers = {k: v for k, v in speed.items() if isinstance(v, dict) and v["graphs_s"]}
    logits = next(r["ways"] for r in load("ops_gemm")["rows"] if r["name"] == "linear 8192x50257x768")
    images, caps = load("fused_conv")["model"], load("schedule_caps")
    held = caps["gpt2 train capped at 400 W"]
    faster = geometric(v["graphs_s"] / v["warm_s"] for v in peers.values())
    return [
        ("a measured block, µs of your thread", f"{cost['tessera, launches between']['median_us']:.1f}",
         f"Zeus 0.16: {cost['zeus begin+end']['median_us']:.0f}", "device/accuracy.py"),
        ("joules of a 50 ms window on a steady load, % off, median (max)", pair(steady["tessera 50 ms"]),
         f"Zeus: {pair(steady['zeus 50 ms'])}", "device/accuracy.py"),
        ("joules of each kernel in a mixture, mean (worst) % off", f"{final['here']['mean_pct']:.1f} ({final['here']['worst_pct']:.1f})",
         f"plain least squares: {final['nnls_mean_pct']:.1f}", "attribution.py"),
        ("a profiled region outside a session, ns", f"{r['region_off_ns']:.0f}", f"torch's record_function: {r['record_function_off_ns']:.0f}",
         "region_cost.py"),
        ("latency of models never seen, mean % off (all cases, first look)", pct(models["all"]["latency"]),
         f"datasheet roofline: {pct(models['all']['roofline_latency'])}", "predict_models.py"),
        (f"seconds to predict {' and '.join(peers)}", " and ".join(f"{v['warm_s']:.2f}" for v in peers.values()),
         "branes-ai/graphs: " + " and ".join(f"{v['graphs_s']:.1f}" for v in peers.values()) + f" ({faster:.0f} times)", "predict_time.py"),
        (f"a {t['megabytes']:.0f} MB trace read and broken down: CPU s, peak MiB", f"{t['tessera']['cpu_s']:.1f}, {t['tessera']['peak_mib']:.0f}",
         f"HolisticTraceAnalysis: {t['hta']['cpu_s']:.1f}, {t['hta']['peak_mib']:.0f}", "analyze_trace.py"),
        ("the logits of GPT-2 (8192 x 50257 x 768, bf16) by `op.linear`, J", f"{logits['op']['J']:.2f}", f"torch: {logits['torch']['J']:.2f}",
         "device/ops_gemm.py"),
        ("ResNet-50 on 64 images in bf16 by `rewrite.fused_conv`, J", f"{images['fused']['j']:.2f}", f"torch eager: {images['eager']['j']:.2f}",
         "device/fused_conv.py"),
        ("GPT-2 training held at 400 W without root: mean off, %; J a step", f"{held['mean_off_pct']:+.1f}; {held['joules_per_unit']:.1f}",
         f"free: {caps['gpt2 train free']['mean_w']:.0f} W, {caps['gpt2 train free']['joules_per_unit']:.1f} J", "device/schedule_caps.py"),
    ]  # fmt: skip
