"""Write benchmarks/README.md from benchmarks/results/*.json: every goal, the figure reached, the peer, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import page_analyze
import page_predict
import page_profile

HERE = Path(__file__).parent
RUN = "PYTHONPATH=src:.carry/site python benchmarks/device"


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((HERE / "results" / f"{name}.json").read_text())
    return data


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def pair(row: dict[str, float]) -> str:
    return f"{_short(row['median'])} ({_short(row['max'])})"


def goals(
    a: dict[str, Any], o: dict[str, Any], m: dict[str, Any], i: dict[str, Any]
) -> list[tuple[str, str, str, str]]:
    """(what, goal, reached, peer)."""
    cost, steady = a["scope cost on the user's thread"], a["steady load: fp32"]
    capped = a["against the counter: steady, power-capped GEMM"]
    rows = [
        (
            "scope enter+exit on the user's thread, µs (median)",
            "<= 20",
            f"{cost['tessera, launches between']['median_us']:.1f} between launches, "
            f"{cost['tessera, back to back']['median_us']:.1f} back to back, "
            f"{cost['tessera, asleep between']['median_us']:.0f} after a sleep of 1.2 ms (cold caches)",
            f"Zeus {cost['zeus begin+end']['median_us']:.0f}, ratio {cost['ratio zeus / tessera']:.0f}",
        )
    ]
    limits = {"50 ms": "5 (12)", "100 ms": "2 (5)", "200 ms": "1 (3)", "1000 ms": "0.5 (1)"}
    for length, goal in limits.items():
        reached = pair(steady[f"tessera {length}"])
        if length in capped:
            reached += f"; power-capped GEMM {pair(capped[length])}"
        rows.append(
            (
                f"error on a steady load, {length} windows, % median (max)",
                goal,
                reached,
                f"Zeus {pair(steady[f'zeus {length}'])}",
            )
        )
    for period in (100, 200, 400):
        wave = a[f"against the counter: square wave {period} ms"]
        reached = ", ".join(f"{k}: {pair(wave[k])}" for k in ("100 ms", "200 ms", "400 ms"))
        rows.append(
            (f"square wave of {period} ms against the counter, % median (max) by window", "5 at 200 ms", reached, "")
        )
    ten = a["integral of the unscaled trace against the counter, >= 5 s"]
    rows.append(
        ("unscaled trace against the counter, >= 5 s, ten loads, worst %", "<= 1", f"{ten['worst, %']:.2f}", "")
    )
    waves = a["the same on square waves in step with the 20 ms samples"]
    reached = ", ".join(f"{k}: {v['error_pct']:+.2f}" for k, v in waves.items() if isinstance(v, dict))
    rows.append(("the same on square waves whose half period is 2.5 or 7.5 samples (aliasing), %", "", reached, ""))
    slow = f"{o['slowdown_pct']:.2f} ± {o['slowdown_error_pct']:.2f} (step {o['step_ms_without']:.1f} ms, {o['joules_per_step']:.1f} J)"
    rows.append(("slowdown of GPT-2-small training, scope per step and trace on, %", "<= 0.3", slow, ""))
    flat = f"{m['resident_mib']['2']:.0f} MiB resident after 2 h, {m['resident_mib']['24']:.0f} MiB after 24 h"
    rows.append(("memory, simulated 24 h, 8 GPUs x 50 Hz", "flat", flat, ""))
    rows.append(("`import tessera` above bare Python, ms", "<= 30", f"{i['import_tessera_ms']:.1f}", ""))
    rows.append(("`tessera --help`, ms in all", "<= 150", f"{i['help_ms']:.0f}", ""))
    return rows


def intervals(a: dict[str, Any]) -> list[str]:
    lines = ["| load | window | median % | p90 % | max % | inside the 90% interval |", "|---|---|---|---|---|---|"]
    for title, rows in a.items():
        if not title.startswith(("against the counter", "steady load")):
            continue
        load_name = title.split(": ", 1)[1]
        for window, row in rows.items():
            if isinstance(row, dict) and "within_90pct_interval" in row:
                lines.append(
                    f"| {load_name} | {window.removeprefix('tessera ')} | {row['median']:.2f} | {row['p90']:.2f} | "
                    f"{row['max']:.2f} | {row['within_90pct_interval']:.0%} of {row['n']} |"
                )
    return lines


def spread(a: dict[str, Any]) -> str:
    """How far the figures moved from run to run: this one and the earlier ones that were kept."""
    runs = [
        a,
        *(json.loads(p.read_text()) for p in sorted((HERE / "results" / "earlier").glob("h200_accuracy_*.json"))),
    ]
    medians = [r["steady load: fp32"][f"tessera {w} ms"]["median"] for r in runs for w in (50, 100, 200, 1000)]
    waves = [
        abs(row["error_pct"])
        for r in runs
        for rows in r.values()
        for name, row in rows.items()
        if name.startswith("wave ") and isinstance(row, dict)
    ]
    return (
        f"Over {len(runs)} runs (the earlier ones with earlier code, in results/earlier/) the medians on the steady load "
        f"moved between {min(medians):.2f}% and {max(medians):.2f}%, the 5 s integrals of square waves between "
        f"{min(waves):.2f}% and {max(waves):.2f}%."
    )


def shortfalls(a: dict[str, Any]) -> list[str]:
    """What a reader should not take from the table above."""
    cost = a["scope cost on the user's thread"]["tessera, asleep between"]["median_us"]
    waves = a["the same on square waves in step with the 20 ms samples"]["worst, %"]
    low = [
        f"{title.split(': ', 1)[1]}, {window}: {row['within_90pct_interval']:.0%}"
        for title, rows in a.items()
        if title.startswith("against the counter")
        for window, row in rows.items()
        if row["within_90pct_interval"] < 0.9
    ]
    return [
        f"- A scope entered after a sleep (cold caches) costs {cost:.0f} µs, not under 20.",
        "- This run was on a slower host than the ones before: a scope between launches cost 15 µs there (results/earlier/),",
        "  and Zeus was slower by the same share. One of the ten loads (`serving`) was off by more than 1% this time.",
        f"- Square waves in step with the samples alias: up to {waves:.1f}% over 5 s unscaled. Scopes of 2 s and more use the",
        "  counter and do not.",
        "- The goal on square waves is the median; single 200 ms windows were off by the maxima in brackets.",
        f"- 90% intervals that held less than 90%: {'; '.join(low) or 'none in this run'}.",
        f"- One board, one driver. {spread(a)}",
        "- Zeus has its default settings: at 50 ms its window holds no tick of the counter, or one of 100 ms.",
    ]


def into_readme(blocks: dict[str, list[str]]) -> None:
    """Put the tables between their marks in the README."""
    readme = HERE.parent / "README.md"
    content = readme.read_text()
    for name, block in blocks.items():
        start, end = f"<!-- {name} from benchmarks/page.py -->", "<!-- end -->"
        first = content.index(start)
        last = content.index(end, first) + len(end)
        content = content[:first] + "\n".join([start, *block, end]) + content[last:]
    readme.write_text(content)


def main() -> None:
    a, o, m, i = (load(n) for n in ("h200_accuracy", "h200_overhead", "memory_24h", "import_time"))
    machine = a["machine"]
    table = ["| what | goal | reached | peer, same run |", "|---|---|---|---|"]
    table += [f"| {w} | {g} | {r} | {p} |" for w, g, r, p in goals(a, o, m, i)]
    predicted = ["| what | goal | reached | beside it |", "|---|---|---|---|"]
    predicted += [f"| {w} | {g} | {r} | {p} |" for w, g, r, p in page_predict.goals()]
    profiled = ["| what | goal | reached | beside it |", "|---|---|---|---|"]
    profiled += [f"| {w} | {g} | {r} | {p} |" for w, g, r, p in page_profile.goals()]
    analysed = ["| what | goal | reached | beside it |", "|---|---|---|---|"]
    analysed += [f"| {w} | {g} | {r} | {p} |" for w, g, r, p in page_analyze.goals()]
    text = [
        "# Proof",
        "",
        "Generated by `benchmarks/page.py` from `benchmarks/results/`; do not edit.",
        "",
        f"GPU figures: {machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, {machine['date']}, one run.",
        "The response constants (lag, blur, noise) were fitted on another recording (`benchmarks/data/`), none of these.",
        "",
        "## Measuring",
        "",
        *table,
        "",
        "## Predicting",
        "",
        *predicted,
        "",
        *page_predict.NOTES,
        "",
        "## Profiling",
        "",
        *profiled,
        "",
        *page_profile.NOTES,
        "",
        "## Analysing",
        "",
        *analysed,
        "",
        *page_analyze.NOTES,
        "",
        "## Errors and intervals, window by window",
        "",
        "Truth for `fp32` is its mean power by the counter (it does not throttle); for the others the counter between its",
        "ticks. All are the unscaled samples, without the counter's correction, except the 1 s scopes on `fp32`.",
        "",
        *intervals(a),
        "",
        "## What falls short",
        "",
        *shortfalls(a),
        "",
        "## Models, case by case",
        "",
        *page_predict.cases(),
        "",
        "## Commands",
        "",
        "- `pip install --target .carry/site msgspec`, `pip install --target .carry/zeus zeus` first, where the GPU's Python",
        "  has them not; `.carry` is ignored by git",
        f"- `{RUN}/accuracy.py OUT.json --zeus .carry/zeus` (on the GPU; Zeus 0.16 from PyPI in a folder of its own)",
        f"- `{RUN}/overhead.py OUT.json` (on the GPU)",
        f"- `{RUN}/record_sensor.py OUT.json.gz`, then `python benchmarks/fit_response.py OUT.json.gz`",
        f"- `{RUN}/record_models.py benchmarks/device/heldout_cases.py OUT` and `{RUN}/record_kernels.py OUT` (on the GPU)",
        "- `python benchmarks/fit_kernels.py`, `python benchmarks/fit_ops.py`: the fits (scipy, lightgbm, the model zoos)",
        "- `python benchmarks/predict_models.py public|heldout`, `predict_kernels.py`, `kernel_accuracy.py`, `predict_time.py`,",
        "  `flops.py` (torchvision, transformers, timm)",
        f"- `{RUN}/record_mixture.py FOLDER dev pairs final regions5 regions20 regions100` (on the GPU), then",
        "  `python benchmarks/attribution.py [FOLDER/*.json.gz]`; `--fit` for the response and the speed exponent",
        f"- `{RUN}/overhead_profile.py OUT.json`, `attach.py OUT.json`, `check_counters.py OUT.json` (on the GPU)",
        "- `python benchmarks/analyze_trace.py` (HolisticTraceAnalysis from PyPI in `.bench/hta`), `ranks64.py`, `fuzz_traces.py 100000`,",
        "  `page_speed.py` (Chromium)",
        "- `make bench`: what needs no GPU",
        "",
    ]
    (HERE / "README.md").write_text("\n".join(text))
    into_readme({"table": table, "predicting": predicted, "profiling": profiled, "analysing": analysed})


if __name__ == "__main__":
    main()
