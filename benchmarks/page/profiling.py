"""The profiling part of benchmarks/README.md: goals, figures reached, peers beside them."""

from __future__ import annotations

import statistics as st
from typing import Any

from goal import DEVICE, H200, Goal, load, load_device, load_if_measured, where

ATTRIBUTION = "python benchmarks/measure/attribution.py"


def overhead(o: dict[str, Any] | None) -> list[Goal]:
    command = f"{DEVICE}/overhead_profile.py benchmarks/results/overhead_profile.json"
    sampling = Goal(what="slowdown of GPT-2-small training in sampling mode, %", goal="<= 0.5", command=command)
    timeline = Goal(what="the same in timeline mode, % over torch.profiler", goal="<= 2", command=command)
    if o is None:
        return [sampling, timeline]
    here = {"where": where("overhead_profile"), "command": command}
    s, t = o["sampling"], o["timeline"]
    return [
        Goal(what=goal.what, goal=goal.goal, met=row["over_pct"] <= most, **here, beside=f"{row['beside']} {row['beside_ms']:.1f} ms",
             reached=f"{row['over_pct']:+.2f} ({row['low_pct']:+.1f} to {row['high_pct']:+.1f}{interval_text(row)}), {row['step_ms']:.1f} ms, median of {row['units']} units")
        for goal, row, most in ((sampling, s, 0.5), (timeline, t, 2.0))
    ]  # fmt: skip


def interval_text(row: dict[str, Any]) -> str:
    """How surely the interval holds the median: the extremes of three units do it three times of four."""
    return f": {row['covers']:.0%} sure" if "covers" in row else ""


def modes(m: dict[str, Any] | None) -> Goal:
    """Not among the goals: in which modes `tessera run` has run there, and whether what it printed sums to the whole."""
    what = "`tessera run` on GPT-2 training, by mode: launches traced, their joules over the measured sum; a session with exporters"
    command = f"{DEVICE}/run_modes.py benchmarks/results/run_modes.json"
    if m is None:
        return Goal(what=what, command=command)
    said = [
        f"{name}: {row['launches']:,}, {row['parts_over_total']:.3f}"
        if row["launches"]
        else f"{name}: power alone, {row.get('energy_j', row.get('total_j')) / 1e3:.2f} kJ"
        for name, row in m["ways"].items()
    ]
    if "session" in m:
        said.append(
            f"exporters: {m['session']['events']:,} events as Chrome JSON, {m['session']['csv_lines']} lines of CSV"
        )
    return Goal(what=what, reached="; ".join(said), where=where("run_modes", H200), command=command)


LIGHT_GOALS = {
    "GPT-2 small training": 3.0,
    "MoE decoder training": 3.0,
    "decode, 1.1B, batch 16, eager": 10.0,
    "decode, 1.1B, batch 16, CUDA graph": 3.5,
}


def light(c: dict[str, Any] | None, w: dict[str, Any] | None, d: dict[str, Any] | None) -> list[Goal]:
    """The default mode: what it costs on four programs, from start to exit, when killed, and over a day."""
    command = f"{DEVICE}/cupti_light.py benchmarks/results/cupti_light.json"
    rows = []
    for program, most in LIGHT_GOALS.items():
        found = ((c or {}).get("programs") or {}).get(program)
        if found is None:
            rows.append(
                Goal(what=f"{program}, every kernel recorded: longer steps, %", goal=f"<= {most:g}", command=command)
            )
            continue
        traced, peer = found["light"], found["profiler"]["over_pct"]
        between = (
            f" ({traced['over_low_pct']:+.1f} to {traced['over_high_pct']:+.1f}, {traced['turns']} turns)"
            if "turns" in traced
            else ""
        )
        alone = f"; CUPTI alone {found['raw']['over_pct']:+.1f}" if "raw" in found else ""
        rows.append(
            Goal(what=f"{program}, every kernel recorded: longer steps, %", goal=f"<= {most:g}", met=traced["over_pct"] <= most,
                 reached=f"{traced['over_pct']:+.1f}{between}{alone}; of the kernels in the steps with operators {traced['tied']:.0%} have one",
                 beside=f"torch.profiler {peer:+.0f}, {found['profiler']['stop_s']:.1f} s to stop", where=where("cupti_light", H200),
                 command=command)
        )  # fmt: skip
    runs = f"{DEVICE}/run_modes.py benchmarks/results/light_run.json --only wall killed"
    if w is not None and "wall" in w:
        wall = w["wall"]
        rows.append(
            Goal(what=f"`tessera run` of a training of {wall['plain_s']:.0f} s: longer from start to exit, %; its end delayed; page after",
                 goal="<= 10; 0.3 s; 10 s", met=wall["script_over_pct"] <= 10 and wall["end_delayed_s"] <= 0.3 and wall["page_after_s"] <= 10,
                 reached=f"{wall['script_over_pct']:+.1f} (a step {wall['step_over_pct']:+.1f}); {wall['end_delayed_s']:.2f} s; {wall['page_after_s']:.1f} s",
                 where=where("light_run", H200), command=runs)
        )  # fmt: skip
    if w is not None and "killed" in w:
        killed = w["killed"]
        rows.append(
            Goal(what=f"kill -9 of a training, {killed['kills']} times: seconds of kernels lost, worst; files readable", goal="<= 1; all",
                 met=killed["most_missing_s"] <= 1 and killed["readable"] == killed["kills"] >= 20, where=where("light_run", H200),
                 reached=f"{killed['most_missing_s']:.2f}; {killed['readable']}", command=runs)
        )  # fmt: skip
    if d is not None:
        hours = d["hours"]
        rows.append(
            Goal(what="light mode, simulated 24 h at 30,000 kernels/s: memory and file", goal="flat",
                 met=hours["24"]["resident_mib"] <= 1.1 * hours["2"]["resident_mib"] and hours["24"]["file_mib"] <= 1.1 * hours["2"]["file_mib"],
                 reached=", ".join(f"{hours[h]['resident_mib']:.0f} and {hours[h]['file_mib']:.0f} MiB after {h} h" for h in ("2", "24")),
                 where=where("light_24h"), command="python benchmarks/measure/summary_24h.py --light")
        )  # fmt: skip
    return rows


def launches(c: dict[str, Any] | None) -> Goal:
    """A program that only launches small kernels: what being recorded costs it, against a process that nobody traced."""
    what = "a loop of small kernels (64,000 launches a second), under `tessera run`: longer iterations, %"
    command = f"{DEVICE}/launch_cost.py benchmarks/results/launch_cost.json"
    if c is None:
        return Goal(what=what, goal="<= 10", command=command)
    plain, light, kernels = (c["runs"][name] for name in ("plain", "light", "kernels"))
    over = [100 * (a / b - 1) for a, b in zip(light, plain, strict=True)]
    alone = [100 * (a / b - 1) for a, b in zip(kernels, plain[-len(kernels) :], strict=True)]
    row, after = c["ways"]["operators"], c["ways"]["operators"]["after"]
    return Goal(what=what, goal="<= 10", met=st.median(over) <= 10,
                reached=f"{', '.join(f'{o:+.0f}' for o in over)}; --operator-steps 0 {', '.join(f'{o:+.0f}' for o in alone)}",
                beside=f"after torch.profiler (CPU) has ended {100 * (after['iteration_ms'] / row['before']['iteration_ms'] - 1):+.0f}",
                where=where("launch_cost", H200), command=command)  # fmt: skip


def after_profile(c: dict[str, Any] | None) -> Goal:
    """Not among the goals: what any session of torch.profiler leaves behind."""
    what = "after a session of torch.profiler has ended: times as long as before it"
    command = f"{DEVICE}/cupti_after.py benchmarks/results/cupti_after.json"
    known = [row for row in (c or {}).get("rows", []) if "after" in row]
    if not known:
        return Goal(what=what, command=command)
    said = []
    for row in known:
        add, eager, graph = (row["after"][k] / row["before"][k] for k in ("add_us", "eager_ms", "graph_ms"))
        named = f"{'TEARDOWN_CUPTI=1: ' if row['teardown'] else ''}"
        said.append(f"{named}an addition {add:.2f}, ResNet-50 at batch 1 {eager:.2f}, as a CUDA graph {graph:.2f}")
    return Goal(what=what, reached="; ".join(said), where=where("cupti_after", H200), command=command)


def attribution(a: dict[str, Any]) -> list[Goal]:
    sets = a["sets"]
    final, memsets = sets["final-12"], sets["dev-11"]
    here = {"where": where("attribution", H200), "command": ATTRIBUTION}
    worst = max(abs(s["conserved_pct"]) for s in sets.values())
    seen = [s["here"] for s in sets.values() if s["here"]]
    count = sum(h["n"] for h in seen)
    inside = sum(h["inside_pct"] * h["n"] for h in seen) / count

    def errors(of: dict[str, float]) -> dict[str, Any]:
        return {
            "goal": "<= 5 (15)", "reached": f"{of['mean_pct']:.1f} ({of['worst_pct']:.1f})",
            "met": of["mean_pct"] <= 5 and of["worst_pct"] <= 15, **here,
        }  # fmt: skip

    return [
        Goal(what=f"sum of attributed joules against the counter's scope, unscaled, worst of {len(sets)} recordings, %", goal="<= 1",
             reached=f"{worst:.2f}", met=worst <= 1, **here),
        Goal(what="joules per kernel of a mixture not used in fitting, 5 s, against the same kernels alone at the same speed: mean (worst) %",
             **errors(final["here"])),
        Goal(what="the same against steady state, where the power limit holds clocks that it does not hold in the mixture",
             beside=f"plain non-negative least squares {final['nnls_mean_pct']:.1f}; on the mixture with memsets "
                    f"{memsets['nnls_mean_pct']:.0f} (ours {memsets['alone']['mean_pct']:.1f})", **errors(final["alone"])),
        Goal(what=f"kernels inside the stated 90% interval, {len(seen)} recordings, %", goal=">= 90", reached=f"{inside:.0f} of {count}",
             met=inside >= 90, **here),
    ]  # fmt: skip


def regions(a: dict[str, Any]) -> list[Goal]:
    rows = []
    for region in sorted(a["regions"], key=lambda r: r["attributed_j"]):
        length = region["set"].removeprefix("regions")
        off = 100 * (region["attributed_j"] / (region["here_j"] or region["alone_j"]) - 1)
        alone = 100 * (region["attributed_j"] / region["alone_j"] - 1)
        goal = {"5": 10, "20": 5, "100": 3}[length]
        said = f"{off:+.1f} (interval ± {100 * region['error_j'] / region['attributed_j']:.1f}); against steady state {alone:+.1f}"
        rows.append(
            Goal(what=f"a region of {length} ms, 50 times: joules per pass, %", goal=f"<= {goal}", reached=said,
                 met=abs(off) <= goal, where=where("attribution", H200), command=ATTRIBUTION)
        )  # fmt: skip
    return rows


def files(e: dict[str, Any], k: dict[str, Any], s: dict[str, Any]) -> list[Goal]:
    p, m = e["parts"], s["resident_mib"]
    return [
        Goal(what="1 M kernels: to the run file / Chrome JSON / CSV", goal="printed", where=where("export_million"),
             reached=f"{p['write']['seconds']:.1f} s / {p['chrome']['seconds']:.1f} s, {p['chrome']['peak_mib']:.0f} MiB / "
                     f"{p['csv']['seconds']:.2f} s", command="python benchmarks/measure/export_million.py"),
        Goal(what=f"kill -9, {k['kills']} times: seconds of regions, marks, counters and power lost, worst", goal="<= 1",
             reached=f"{k['lost_s']['max']:.2f}", met=k["lost_s"]["max"] <= 1, where=where("kill9"), command="python benchmarks/measure/kill9.py"),
        fault_goal(load("faults")),
        Goal(what="summary mode, simulated 24 h, 8 GPUs x 50 Hz: memory", goal="flat", met=m["24"] <= 1.1 * m["2"],
             reached=f"{m['2']:.0f} MiB after 2 h, {m['24']:.0f} MiB after 24 h", where=where("summary_24h"),
             command="python benchmarks/measure/summary_24h.py"),
    ]  # fmt: skip


def fault_goal(f: dict[str, Any]) -> Goal:
    what = "`tessera run` and `measure` struck at a random moment by a signal, a full disk or a folder that vanishes: the script "
    what += "ends as without us, what was recorded is kept, the report is printed"
    goal, command = "every time, 200", "python benchmarks/measure/faults.py"
    kinds = ", ".join(f"{name} {n}" for name, n in f["faults"].items())
    reached = f"{f['moments'] - f['wrong']} of {f['moments']} ({kinds})"
    met = f["wrong"] == 0 and f["moments"] >= 200
    return Goal(what=what, goal=goal, reached=reached, met=met, where=where("faults"), command=command)


def attach(a: dict[str, Any]) -> list[Goal]:
    cpu, gpu = a["cpu"], a.get("h200") or a.get("gpu") or {}
    rows = []
    for kind, goal in (("plain", 8), ("optimizer", 5)):
        said = f"CPU {cpu[kind]['median_s']:.1f} (worst {cpu[kind]['max_s']:.1f}, {100 * cpu[kind]['within_goal']:.0f}% within)"
        if kind in gpu:
            said += f"; H200 {gpu[kind]['median_s']:.1f}"
        rows.append(
            Goal(what=f"attach by PID, {kind} loop: seconds to the first trace", goal=f"<= {goal}", reached=said,
                 met=cpu[kind]["within_goal"] == 1.0, where=where("attach"),
                 command=f"python benchmarks/measure/attach.py; {DEVICE}/attach.py OUT.json")
        )  # fmt: skip
    return rows


def region(r: dict[str, Any]) -> Goal:
    off, peer = r["region_off_ns"], r["record_function_off_ns"]
    return Goal(what="a region outside a session, ns", goal="<= 1000", reached=f"{off:.0f}", met=off <= 1000,
                beside=f"torch's record_function {peer:.0f}, ratio {peer / off:.0f}", where=where("region_cost"),
                command="python benchmarks/measure/region_cost.py")  # fmt: skip


def goals() -> list[Goal]:
    a = load("attribution")
    return [
        *overhead(load_device("overhead_profile")), after_profile(load_device("cupti_after")), launches(load_device("launch_cost")), modes(load_if_measured("run_modes")),
        *light(load_device("cupti_light"), load_device("light_run"), load("light_24h")),
        *attribution(a), *regions(a),
        *files(load("export_million"), load("kill9"), load("summary_24h")), region(load("region_cost")), *attach(load("attach")),
    ]  # fmt: skip


NOTES = [
    "- A steady load and a mixture differ. Alone for seconds, a 4096^3 bf16 GEMM runs at 1.5 GHz under the power limit; in",
    "  bursts of 2-60 ms it runs at nearly full clock, 15% faster, and takes 12-15% more energy per call.",
    "  `record_mixture.py` measures both; the true value at the mixture's own speed is interpolated between them by the",
    "  duration of a call.",
    "- One of the two recordings of a 5 ms region is older and has no burst reference: its figure is against the steady",
    "  load.",
    "- Kineto hands out its events only when it stops: the kernels of a process killed with -9 are lost unless `flush_s` is",
    "  set.",
    "- When attached by time (no optimizer), an earlier trace of the H200 had runtime calls but no kernels. Four later",
    "  ones, of two lengths and with and without a warm-up, all had kernels (`attach.json`).",
    "- Tracing makes GPT-2's training wait for its host: 45.5 ms a step without, 50 to 67 ms under torch.profiler or",
    "  Tessera (`overhead_profile.json`, `overhead_why.json`). Steps of one way differ by a fifth from unit to unit, so the",
    "  two ways run in turns. An earlier recording gave +12%: most likely the events of ended profilers were freed within",
    "  later blocks; now they are freed between them. The row leaves out the end of a session: ours exports and writes, and",
    "  takes longer than torch's `stop` (`end_s`, `beside_end_s`).",
    "- The plain steps beside the four programs above are of a process in which Kineto has recorded operators before,",
    "  and that makes every launch slower (`launch_cost.json`: 7.2 to 9.8 us of a small addition). So the row of eager",
    "  decode leaves out what operators leave behind; the loop of small kernels, whose plain runs are processes of their",
    "  own, has it. cuptiFinalize takes it back, but ends a program whose other threads launch meanwhile: not used.",
    "- Kineto keeps CUPTI loaded when a session ends, so every later launch of the process costs more. TEARDOWN_CUPTI=1",
    "  should unload it; in one run here it made no difference that could be told from the host's own variation. Kernels in",
    "  a CUDA graph are not affected.",
    "- `run_modes.json` has the rows of two runs; its `recorded` says which mode comes from which. `--counters` has not run",
    "  on the H200.",
]
