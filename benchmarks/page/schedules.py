"""The schedules' part of benchmarks/README.md: goals, figures reached, torch.compile and fixed duty cycles beside them."""

from __future__ import annotations

from typing import Any

from goal import DEVICE, Goal, load, load_device, where

TUNE = f"{DEVICE}/tune.py benchmarks/results/tune.json"
CAPS = f"{DEVICE}/schedule_caps.py benchmarks/results/schedule_caps.json"
TOKENS = f"{DEVICE}/schedule_tokens.py benchmarks/results/schedule_tokens.json"
# model: (title, least percentage of joules saved against eager)
MODELS = {
    "gpt2": ("GPT-2-small training", 40.0),
    "bert": ("BERT-base inference", 0.0),
    "resnet": ("ResNet-50 inference", 0.0),
}
LOADS = {"gpt2 train": ("GPT-2 training", (500, 400, 300)), "gemm": ("a GEMM loop", (600, 500, 400, 300))}


def goals() -> list[Goal]:
    t, c = load_device("tune"), load_device("schedule_caps")
    return [
        *tuner_goals(t),
        regret(t),
        settings(load_device("compiled_profile")),
        *caps(c),
        *tokens(load_device("schedule_tokens")),
        *simulation_goals(load("schedule_plant")),
        node(c),
        *overhead(c, load("schedule_cost")),
        *faults(load("actuator_faults"), load("actuator_moments")),
    ]


def tuner_goals(t: dict[str, Any] | None) -> list[Goal]:
    found = {m["model"]: m for m in (t or {}).get("models", []) if "below_best_mode_pct" in m}
    rows = []
    for name, (title, least) in MODELS.items():
        what = f'policy="throughput_per_watt", {title}: % fewer J than bf16 eager; times as fast; % below the best compile mode'
        goal = f"{f'>= {least:g}; ' if least else ''}>= 1; >= 0"
        if name not in found:
            rows.append(Goal(what=what, goal=goal, command=TUNE))
            continue
        m, again = found[name], compare_ways(found[name])
        mode = again.get("best_mode", again["chosen"])  # what was chosen may be the best mode itself
        met = m["saved_pct"] >= least and m["speedup"] >= 1 and m["below_best_mode_pct"] >= 0
        said = f"{m['saved_pct']:.1f}; {m['speedup']:.2f}; {m['below_best_mode_pct']:.1f} ({describe_trial(again['chosen'])})"
        said += "; by the trials of its search, once each" if m.get("compared_by") else ""
        rows.append(
            Goal(what=what, goal=goal, reached=said, met=met,
                 beside=f"torch.compile {(mode['setting'] or {}).get('compile', '')}: {mode['energy_j']:.2f} J; eager {again['eager']['energy_j']:.2f} J",
                 where=where("tune"), command=TUNE)
        )  # fmt: skip
    far = [name for name, m in found.items() if m["below_best_mode_pct"] >= 5]
    said = f"{len(far)} of {len(found)}" + (f" ({', '.join(far)})" if far else "") if found else ""
    what = "the same: models at least 5% below the best compile mode"
    rows.append(Goal(what=what, goal=">= 2 of 3", reached=said, met=len(far) >= 2, where=where("tune"), command=TUNE))
    return rows


def compare_ways(model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was measured again after the search; of a run that was cut off the trials that it is compared by."""
    if "again" in model:
        return dict(model["again"])
    trials = [t for t in model["trials"] if t["energy_j"]]
    return {
        "eager": next(t for t in trials if not t["setting"]),
        "chosen": next(t for t in trials if t["setting"] == model["chosen"]),
        "best_mode": min((t for t in trials if set(t["setting"]) == {"compile"}), key=lambda t: t["energy_j"]),
    }


def describe_trial(trial: dict[str, Any]) -> str:
    """A setting, and its joules."""
    said = ", ".join(name if value is True else f"{name}={value}" for name, value in trial["setting"].items())
    return f"{said or 'as it is'}: {trial['energy_j']:.2f} J"


def regret(t: dict[str, Any] | None) -> Goal:
    what, goal = "regret of the search against exhaustive search on a small space, %", "<= 2"
    value = ((t or {}).get("regret") or {}).get("regret_pct")
    if value is None:
        return Goal(what=what, goal=goal, command=TUNE)
    of = t["regret"].get("of")
    said = f"{value:.1f} ({t['regret']['settings']} settings{f', {of}' if of else ''})"
    return Goal(what=what, goal=goal, reached=said, met=value <= 2,
                where=where("tune"), command=TUNE)  # fmt: skip


def settings(p: dict[str, Any] | None) -> Goal:
    """Not among the goals: what each change of the tuner's adds on GPT-2, measured by itself."""
    what = "GPT-2-small training, the tuner's settings one upon another: ms and J a step"
    command = f"{DEVICE}/compiled_profile.py benchmarks/results/compiled_profile.json"
    found = {n: row for n, row in (p or {}).get("settings", {}).items() if row.get("energy_j")}
    said = "; ".join(f"{n}: {1e3 * row['time_s']:.1f}, {row['energy_j']:.2f}" for n, row in found.items())
    return Goal(what=what, reached=said, where=where("compiled_profile") if said else "", command=command)


def find_row(c: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """A row that was neither skipped nor failed."""
    row = (c or {}).get(name)
    return row if isinstance(row, dict) and "error" not in row and "skipped" not in row else None


def caps(c: dict[str, Any] | None) -> list[Goal]:
    rows = []
    for load_name, (title, watts) in LOADS.items():
        for cap_w in watts:
            what = f"token bucket, {title} at {cap_w} W: mean off, worst 200 ms window off, throughput of the best fixed duty cycle, %"
            goal, row = "within 3; <= 5; >= 95", find_row(c, f"{load_name} capped at {cap_w} W")
            if row is None:
                rows.append(Goal(what=what, goal=goal, command=CAPS))
                continue
            share = row["of_best_fixed_duty_pct"]
            by_counter = row.get("counter_window_off_pct")
            window = f"{row['worst_window_off_pct']:+.1f}" + (
                "" if by_counter is None else f" (by the counter {by_counter:+.1f})"
            )
            said = f"{row['mean_off_pct']:+.1f}; {window}; {'not known' if share is None else f'{share:.0f}'}"
            worst = max(row["worst_window_off_pct"], by_counter or 0.0)  # whichever of the two sensors says more
            met = abs(row["mean_off_pct"]) <= 3 and worst <= 5 and (share or 0) >= 95
            free = find_row(c, f"{load_name} free")
            beside = (
                f"free: {free['mean_w']:.0f} W, {free['joules_per_unit']:.3g} J each; capped {row['joules_per_unit']:.3g} J"
                if free
                else ""
            )
            rows.append(
                Goal(
                    what=what,
                    goal=goal,
                    reached=said,
                    met=met,
                    beside=beside,
                    where=where("schedule_caps"),
                    command=CAPS,
                )
            )
    return rows


def tokens(t: dict[str, Any] | None) -> list[Goal]:
    """Caps by what our own kernels launch; not among the goals, but a cap is a cap."""
    rows = []
    kinds = ("launches", "warps", "cp_async")
    for cap_w in (500, 300):
        what = f"tokens of our kernels, products of a tile at {cap_w} W: mean off, worst 200 ms window by the ring (by the counter) off, %"
        goal = "within 3; <= 5"
        found = {kind: row for kind in kinds if (row := find_row(t, f"products capped at {cap_w} W by {kind}"))}
        if len(found) < len(kinds):
            rows.append(Goal(what=what, goal=goal, command=TOKENS))
            continue
        off = {
            kind: [row["mean_off_pct"], row["worst_window_off_pct"], 100 * (row["counter_worst_window_w"] / cap_w - 1)]
            for kind, row in found.items()
        }
        said = "; ".join(
            f"{kind} {mean:+.1f}, {ring:+.1f} ({counter:+.1f})" for kind, (mean, ring, counter) in off.items()
        )
        met = all(abs(mean) <= 3 and max(ring, counter) <= 5 for mean, ring, counter in off.values())
        rows.append(Goal(what=what, goal=goal, reached=said, met=met, where=where("schedule_tokens"), command=TOKENS))
    return rows


def simulation_goals(p: dict[str, Any] | None) -> list[Goal]:
    """The same controller on a simulated H200: what is known before the GPU is asked."""
    what = (
        "token bucket on a simulated H200, {}: mean off, worst 200 ms window off, throughput of the fixed duty cycle, %"
    )
    goal, command = (
        "within 3; <= 5; >= 95",
        "python benchmarks/measure/schedule_plant.py benchmarks/results/schedule_plant.json",
    )
    if p is None:
        return [Goal(what=what.format("all loads"), goal=goal, command=command)]
    rows = []
    for load_name in ("GEMM loop", "training-like"):
        found = {k.removeprefix(f"{load_name}, "): r for k, r in p.items() if k.startswith(f"{load_name}, ")}
        said = [
            (r["mean_off_pct"], r["worst_window_off_pct"], r["of_fixed_duty_throughput_pct"]) for r in found.values()
        ]
        rows.append(
            Goal(what=what.format(f"{load_name} at {', '.join(found)}"), goal=goal, where=f"simulated; {where('schedule_plant')}",
                 reached="; ".join(f"{m:+.1f}, {w:+.1f}, {t:.0f}" for m, w, t in said),
                 met=all(abs(m) <= 3 and w <= 5 and t >= 95 for m, w, t in said), command=command)
        )  # fmt: skip
    return [*rows, *cadence_goals(p, command)]


def cadence_goals(p: dict[str, Any], command: str) -> list[Goal]:
    """Beside a host that launches ahead, as the sensor shows it: the worst of several distances of its moments."""
    what = "the same with the real cadence of points, {}: mean off, worst 200 ms window by the ring (by the counter) off, %"
    rows = []
    for prefix, title in (
        ("launched, GEMM loop, ", "a GEMM loop at "),
        ("launched, GPT-2 training, ", "GPT-2 training at "),
        ("two processes on one GPU, ", "two processes on one GPU at "),
    ):
        found = {k.removeprefix(prefix): r for k, r in p.items() if k.startswith(prefix)}
        said = [(r["mean_off_pct"], r["ring_window_off_pct"], r["counter_window_off_pct"]) for r in found.values()]
        rows.append(
            Goal(what=what.format(title + ", ".join(found)), goal="within 3; <= 5", where=f"simulated; {where('schedule_plant')}",
                 reached="; ".join(f"{m:+.1f}, {w:+.1f} ({c:+.1f})" for m, w, c in said),
                 met=all(abs(m) <= 3 and w <= 5 for m, w, _ in said), command=command)
        )  # fmt: skip
    return rows


def node(c: dict[str, Any] | None) -> Goal:
    what = "node bucket, two processes on one GPU: sum off the cap, %; the smaller share over the larger; s until the other takes over after a kill"
    goal, row = "<= 0; >= 0.8; <= 1", find_row(c, "node: two processes, one killed")
    if row is None:
        return Goal(what=what, goal=goal, command=CAPS)
    took = row["took_over_after_s"]
    return Goal(what=what, goal=goal, reached=f"{row['mean_off_pct']:+.1f}; {row['fairness']:.2f}; {took:.1f}",
                met=row["mean_off_pct"] <= 0 and row["fairness"] >= 0.8 and took <= 1, where=where("schedule_caps"), command=CAPS)  # fmt: skip


def overhead(c: dict[str, Any] | None, h: dict[str, Any] | None) -> list[Goal]:
    what, goal = "overhead of @schedule on GPT-2 training when nothing limits, %", "< 1"
    row = find_row(c, "overhead, nothing limits")
    rows = [Goal(what=what, goal=goal, command=CAPS)]
    if row is not None:
        said = f"{row['slowdown_pct']:.2f} ± {row['error_pct']:.2f}"
        slack = find_row(c, "overhead, a cap that does not bind")
        said += (
            f"; with a cap that does not bind {slack['slowdown_pct']:.2f} ± {slack['error_pct']:.2f}" if slack else ""
        )
        rows = [
            Goal(
                what=what,
                goal=goal,
                reached=said,
                met=row["slowdown_pct"] < 1,
                where=where("schedule_caps"),
                command=CAPS,
            )
        ]
    command = "python benchmarks/measure/schedule_cost.py benchmarks/results/schedule_cost.json"
    if h is None:
        return [*rows, Goal(what="a schedule that limits nothing, µs a call", goal="<= 1", command=command)]
    free = h["schedule that limits nothing, us a call (goal 1)"]
    more = h["  under a cap that does not bind, us more"]
    mode = h["  under a dispatch mode that passes on, us more"]
    here = {"where": where("schedule_cost"), "command": command}
    return [
        *rows,
        Goal(what="a schedule that limits nothing, µs a call", goal="<= 1", reached=f"{free:.2f}", met=free <= 1, **here),
        Goal(what="an operator under a cap that does not bind, µs more", reached=f"{more:.2f}",
             beside=f"a dispatch mode that passes on {mode:.1f}", **here),
    ]  # fmt: skip


def faults(f: dict[str, Any] | None, moments: dict[str, Any] | None) -> list[Goal]:
    script = "python benchmarks/measure/actuator_faults.py"
    kinds = [
        (f, "actuator_faults", 1000, "random schedules against the fake NVML with faults injected, state restored", "1000"),
        (moments, "actuator_moments", 200, "kill -9, SIGTERM or SIGHUP at a random moment, in two of three trials after "
         "the journal or its folder was removed, against the fake NVML: limits and clocks restored", "--moments 200"),
    ]  # fmt: skip
    rows = []
    for result, name, count, what, arguments in kinds:
        row = {"what": what, "goal": f"every time, {count:,}", "command": f"{script} {arguments}"}
        if result is None:
            rows.append(Goal(**row))
            continue
        by = ", ".join(f"{k} {v}" for k, v in result["restored_by"].items())
        faulty = f", {result['with_faults']} trials with faults" if result["with_faults"] else ""
        reached = f"{result['restored']:,} of {result['trials']:,} ({result['schedules']:,} schedules{faulty}; restored by {by})"
        met = result["restored"] == result["trials"] >= count
        rows.append(Goal(**row, reached=reached, met=met, where=where(name)))
    return rows


def notes() -> list[str]:
    """The notes under the table."""
    c = load_device("schedule_caps") or {}
    fixed = [row for name in c if " fixed duty " in name and (row := find_row(c, name))]
    above = max((100 * (row["worst_window_w"] / row["ring_mean_w"] - 1) for row in fixed), default=None)
    lines = [
        "- The clocks and the power limit of the H200 are never changed: what needs permission is tested with the fake NVML.",
        "- Pacing holds a cap, and costs joules per unit of work: the rows of the token bucket show both.",
    ]
    if above is not None:
        lines += [
            f"- Windows are made of the ring's samples. Fixed duty cycles, which are perfectly periodic, have windows up to {above:.0f}% above",
            "  their own mean there (`schedule_caps.json`): part of what exceeds a cap comes from the sensor.",
        ]
    return [
        *lines,
        "- Caps: the current controller, six to eight seconds each. The fixed duty cycles and the graphs are from the day",
        "  before (`machine/of_an_earlier_run`); without a cap the board drew the same power within 1%. In another run an hour",
        "  earlier, the only window over 5% was at 400 W on the GEMM loop (+9.1 by the ring, +6.4 by the counter). Its first",
        "  cap compiled its wait kernel within the first second, so its mean was -4.0.",
        "- GPT-2's training at 300 W: a step takes 120 ms and is heavy and light in turn; a window of 200 ms contains one and a",
        "  half steps. The simulation gives the same (+5.7 by the ring, +2.5 really drawn).",
        "- By tokens: a compilation spoilt two rows of that run (`recorded`), so there is no bucket of joules at 500 W to",
        "  compare with. Products and softmax in turn every 0.3 s at 400 W: windows +20.9 by joules and +9.6 by warps, means",
        "  -23 and -31.",
        "- The simulated sensor samples every 0.3 to 0.7 ms, which is inferred from earlier caps.",
        "- Earlier controllers are in `results/earlier/schedule_caps_1.json` and `schedule_caps_2.json`, the run mentioned",
        "  above in `schedule_caps_3.json`.",
        "- The tuner's first run, before masks were folded and compiled products padded, is in `results/earlier/tune_1.json`",
        "  (31.2% on GPT-2), the second and third in `tune_2.json` and `tune_3.json`. BERT's runs ended before their turns, so",
        "  it is compared by the trials of its search (three searches on two days: 32, 35 and 37% below the best compile mode).",
        "  The regret comes from the trials of the first search, which had measured all combinations of compile and graph. All",
        "  searches ended when their time was up (`notes`).",
        "- A CUDA graph of GPT-2's whole step can be captured since 2026-11-16. It gains nothing there, because the device",
        "  never waits for the host.",
    ]
