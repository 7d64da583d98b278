"""The measuring part of benchmarks/README.md: goals, figures reached, Zeus beside them."""

from __future__ import annotations

from typing import Any

from goal import DEVICE, RESULTS, Goal, load, pair, read_result, where, within

ACCURACY = f"{DEVICE}/accuracy.py OUT.json --zeus .carry/zeus"
LIMITS = {"50 ms": (5, 12), "100 ms": (2, 5), "200 ms": (1, 3), "1000 ms": (0.5, 1)}


def goals() -> list[Goal]:
    a = load("h200_accuracy")
    return [*scope(a), *steady(a), *waves(a), *whole_runs(a), *coverage(), *host()]


def scope(a: dict[str, Any]) -> list[Goal]:
    cost = a["scope cost on the user's thread"]
    median = {k: cost[f"tessera, {k}"]["median_us"] for k in ("launches between", "back to back", "asleep between")}
    return [
        Goal(
            what="scope enter+exit on the user's thread, µs (median)", goal="<= 20",
            reached=f"{median['launches between']:.1f} between launches, {median['back to back']:.1f} back to back, "
                    f"{median['asleep between']:.0f} after a sleep of 1.2 ms (cold caches)",
            met=max(median.values()) <= 20,
            beside=f"Zeus {cost['zeus begin+end']['median_us']:.0f}, ratio {cost['ratio zeus / tessera']:.0f}",
            where=where("h200_accuracy"), command=ACCURACY,
        )
    ]  # fmt: skip


def steady(a: dict[str, Any]) -> list[Goal]:
    load_, capped = a["steady load: fp32"], a["against the counter: steady, power-capped GEMM"]
    rows = []
    for length, (median, largest) in LIMITS.items():
        reached = pair(load_[f"tessera {length}"])
        met = within(load_[f"tessera {length}"], median, largest)
        if length in capped:
            reached += f"; power-capped GEMM {pair(capped[length])}"
            met = met and within(capped[length], median, largest)
        rows.append(
            Goal(
                what=f"error on a steady load, {length} windows, % median (max)", goal=f"{median:g} ({largest:g})", met=met,
                reached=reached, beside=f"Zeus {pair(load_[f'zeus {length}'])}", where=where("h200_accuracy"), command=ACCURACY,
            )
        )  # fmt: skip
    return rows


def waves(a: dict[str, Any]) -> list[Goal]:
    rows = []
    for period in (100, 200, 400):
        wave = a[f"against the counter: square wave {period} ms"]
        reached = ", ".join(f"{k}: {pair(wave[k])}" for k in ("100 ms", "200 ms", "400 ms"))
        rows.append(
            Goal(
                what=f"square wave of {period} ms against the counter, % median (max) by window", goal="5 at 200 ms",
                reached=reached, met=wave["200 ms"]["median"] <= 5, where=where("h200_accuracy"), command=ACCURACY,
            )
        )  # fmt: skip
    return rows


def whole_runs(a: dict[str, Any]) -> list[Goal]:
    here = {"where": where("h200_accuracy"), "command": ACCURACY}
    worst = a["integral of the unscaled trace against the counter, >= 5 s"]["worst, %"]
    waves = a["the same on square waves in step with the 20 ms samples"]
    moved = ", ".join(f"{k}: {v['error_pct']:+.2f}" for k, v in waves.items() if isinstance(v, dict))
    o = load("h200_overhead")
    slow = f"{o['slowdown_pct']:.2f} ± {o['slowdown_error_pct']:.2f} (step {o['step_ms_without']:.1f} ms, {o['joules_per_step']:.1f} J)"
    return [
        Goal(what="unscaled trace against the counter, >= 5 s, ten loads, worst %", goal="<= 1", reached=f"{worst:.2f}",
             met=worst <= 1, **here),
        Goal(what="the same on square waves whose half period is 2.5 or 7.5 samples (aliasing), %", reached=moved, **here),
        Goal(what="slowdown of GPT-2-small training, scope per step and trace on, %", goal="<= 0.3", reached=slow,
             met=o["slowdown_pct"] <= 0.3, where=where("h200_overhead"), command=f"{DEVICE}/overhead.py OUT.json"),
    ]  # fmt: skip


def coverage() -> list[Goal]:
    """How often 90% intervals held in the worst class of load, with sensors of known truth."""
    here = {"where": where("coverage"), "command": "python benchmarks/measure/interval_coverage.py"}
    rows = []
    for what, classes in load("coverage").items():
        worst, best = (choose(classes, key=lambda row: row["coverage_pct"]) for choose in (min, max))
        rows.append(
            Goal(
                what=f"90% intervals of {what} that hold the truth, worst of {len(classes)} classes of simulated load, %",
                goal=">= 85", met=worst["coverage_pct"] >= 85, **here,
                reached=f"{worst['coverage_pct']:.0f} ({worst['class']}, half-width {worst['half_width_pct']:.1f}%); "
                        f"up to {best['coverage_pct']:.0f}",
            )
        )  # fmt: skip
    return rows


def host() -> list[Goal]:
    m, i = load("memory_24h")["resident_mib"], load("import_time")
    started = {"where": where("import_time"), "command": "python benchmarks/measure/import_time.py"}
    return [
        Goal(what="memory, simulated 24 h, 8 GPUs x 50 Hz", goal="flat", met=m["24"] <= 1.1 * m["2"], where=where("memory_24h"),
             reached=f"{m['2']:.0f} MiB resident after 2 h, {m['24']:.0f} MiB after 24 h", command="python benchmarks/measure/memory_24h.py"),
        Goal(what="`import tessera` above bare Python, ms", goal="<= 30", reached=f"{i['import_tessera_ms']:.1f}",
             met=i["import_tessera_ms"] <= 30, **started),
        Goal(what="`tessera --help`, ms in all", goal="<= 150", reached=f"{i['help_ms']:.0f}", met=i["help_ms"] <= 150, **started),
    ]  # fmt: skip


# -- window by window --------------------------------------------------------------------------------------------


def intervals() -> list[str]:
    """Errors by load and window, and how often the stated interval held."""
    lines = ["| load | window | median % | p90 % | max % | inside the 90% interval |", "|---|---|---|---|---|---|"]
    for title, rows in load("h200_accuracy").items():
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
    """How much the figures varied from run to run."""
    runs = [a, *(read_result(p) for p in sorted((RESULTS / "earlier").glob("h200_accuracy_*.json")))]
    medians = [r["steady load: fp32"][f"tessera {w} ms"]["median"] for r in runs for w in (50, 100, 200, 1000)]
    waves = [
        abs(row["error_pct"])
        for r in runs
        for rows in r.values()
        for name, row in rows.items()
        if name.startswith("wave ") and isinstance(row, dict)
    ]
    return (
        f"Over {len(runs)} runs (the earlier ones, with earlier code, are in results/earlier/), the medians on the steady "
        f"load were between {min(medians):.2f}% and {max(medians):.2f}%, and the errors of 5 s of square waves between "
        f"{min(waves):.2f}% and {max(waves):.2f}%."
    )


def notes() -> list[str]:
    """The limits of the table."""
    a = load("h200_accuracy")
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
        "- The response constants (lag, blur, noise) were fitted on another recording (`benchmarks/data/`).",
        f"- A scope entered after a sleep (cold caches) costs {cost:.0f} µs, not under 20.",
        "- This run was on a slower host than the earlier ones, where a scope between launches cost 15 µs (results/earlier/).",
        "  Zeus was slower by the same share. One of the ten loads (`serving`) was off by more than 1% this time.",
        f"- Square waves in step with the samples alias: the error is up to {waves:.1f}% over 5 s unscaled. Scopes of 2 s and",
        "  more use the counter and do not alias.",
        "- The goal on square waves is for the median. The maxima in brackets are the errors of single windows.",
        f"- 90% intervals that held the truth less often than 90%: {'; '.join(low) or 'none in this run'}.",
        f"- One board, one driver. {spread(a)}",
        "- Zeus has its default settings: at 50 ms its window contains no tick of the counter, or one of 100 ms.",
    ]
