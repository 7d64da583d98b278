"""The analysing part of benchmarks/README.md: goals, figures reached, HolisticTraceAnalysis beside them."""

from __future__ import annotations

from typing import Any

from goal import Goal, load, where


def trace(t: dict[str, Any]) -> list[Goal]:
    ours, hta = t["tessera"], t["hta"]
    what = f"{t['megabytes']:.0f} MB Kineto trace: load, kernels, temporal breakdown, overlap"
    here = {"where": where("analyze_trace"), "command": "python benchmarks/measure/analyze_trace.py"}
    return [
        Goal(what=f"{what}: CPU seconds", goal=">= 12x less", reached=f"{ours['cpu_s']:.1f} ({t['cpu_ratio']:.1f}x)",
             met=t["cpu_ratio"] >= 12, beside=f"HTA {hta['cpu_s']:.1f}", **here),
        Goal(what=f"{what}: peak MiB", goal=">= 10x less", reached=f"{ours['peak_mib']:.0f} ({t['memory_ratio']:.1f}x)",
             met=t["memory_ratio"] >= 10, beside=f"HTA {hta['peak_mib']:.0f}", **here),
    ]  # fmt: skip


def ranks(r: dict[str, Any]) -> Goal:
    reached = (
        f"{r['seconds']:.0f} s, {r['main_mib']:.0f} MiB and {r['worker_mib']:.0f} MiB in each of {r['workers']} workers; clocks "
        f"recovered to {r['clock_worst_us']:.2f} µs, skew to {r['skew_worst_us']:.2f} µs"
    )
    return Goal(what=f"{r['ranks']} ranks x {r['megabytes_each']:.0f} MB, clocks skewed", goal="bounded, skew recovered",
                reached=reached, met=r["clock_within_error"] and not r["straggler_wrong"], where=where("ranks64"),
                command="python benchmarks/measure/ranks64.py")  # fmt: skip


def page(p: dict[str, Any]) -> Goal:
    limits = p["goals"]
    return Goal(what="HTML of 200k kernels in headless Chromium: size, answer painted, first plot", goal="12 MB, 500 ms, 3.5 s",
                reached=f"{p['size_mb']:.2f} MB, {p['answer_ms']:.0f} ms, {p['first_plot_ms']:.0f} ms",
                met=all(p[k] <= limit for k, limit in limits.items()), where=where("page_speed"),
                command="python benchmarks/measure/page_speed.py")  # fmt: skip


def fuzz(f: dict[str, Any]) -> Goal:
    return Goal(what="mutated traces read and analysed: crashes, hangs", goal="0", reached=f"{len(f['failed'])} of {f['cases']:,}",
                met=not f["failed"], where=where("fuzz_traces"), command="python benchmarks/fuzz/fuzz_traces.py 100000")  # fmt: skip


def alarms(found: dict[str, Any]) -> list[Goal]:
    """Identical programs that `tessera diff` calls different."""
    kinds = {
        "three measured against three, in turns": found["measure"]["in_turns"],
        "one recorded run each, by its steps": found["steps"]["once"],
    }
    return [
        Goal(what=f"identical programs called different: {what}, %", goal=f"<= {found['goal_pct']:g} (ours)",
             reached=f"{v['false_alarms_pct']:g} ({v['comparisons']} comparisons, load {found['load_before']:.0f} on {found['cpus']} cores)",
             met=v["false_alarms_pct"] <= found["goal_pct"], where=where("diff_aa"), command="python benchmarks/measure/diff_aa.py")
        for what, v in kinds.items()
    ]  # fmt: skip


def public(p: dict[str, Any]) -> list[Goal]:
    """Traces that others published."""
    here = {"where": where("public_traces"), "command": "python benchmarks/measure/public_traces.py FOLDER"}
    amd = p["amd"]
    return [
        Goal(what=f"{p['traces']} public traces, {p['commands']:,} analyses and commands: tracebacks, bad JSON", goal="0",
             reached=f"{p['tracebacks_or_bad_json']}", met=p["tracebacks_or_bad_json"] == 0, **here),
        Goal(what="their compute, communication, copies, exposed communication and idle against an independent union",
             goal="equal", reached=f"{p['figures_that_differ']} differ", met=p["figures_that_differ"] == 0, **here),
        Goal(what=f"{amd['traces']} AMD traces above 1 MB read: CPU of `json.load`", goal=f"<= {amd['goal']:g} together",
             reached=f"{amd['ratio']:.2f} together, {amd['worst']:.2f} for the worst", met=amd["ratio"] <= amd["goal"], **here),
    ]  # fmt: skip


def goals() -> list[Goal]:
    exact = Goal(what="breakdown, overlap, links against independent brute force on random traces (hypothesis)",
                 goal="exact to 1 ns", reached="exact: a test that runs with every change", met=True, where="CI",
                 command="pytest tests/analyze/test_analyses.py tests/timeline/test_timeline.py")  # fmt: skip
    return [
        *trace(load("analyze_trace")),
        ranks(load("ranks64")),
        exact,
        page(load("page_speed")),
        fuzz(load("fuzz_traces")),
        *alarms(load("diff_aa")),
        *public(load("public_traces")),
    ]


NOTES = [
    "- HTA ran in the same script on the same file. The recording has no NCCL kernels: some were inserted for the overlap.",
    "- HTA 0.5 rounds to whole microseconds, so its figures differ from ours: by 1.8% of the compute time here.",
    "- The 64 ranks are one recording with shifted clocks; only rows that run on a device are kept.",
]
