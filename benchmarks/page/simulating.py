"""The part of benchmarks/README.md about the simulator of a data centre: goals, figures reached."""

from __future__ import annotations

from typing import Any

from goal import Goal, load, where


def speed(f: dict[str, Any]) -> list[Goal]:
    here = {"where": where("fleet_speed"), "command": "python benchmarks/measure/fleet_speed.py"}
    alike, distinct, plain, plain_distinct = f["rows"]
    most = max(row["memory_bytes"] for row in f["rows"])
    return [
        Goal(what="100,000 GPUs at 5 ms, decisions every 100 ms, GPUs that are alike together (numba): times real time, one thread",
             goal=">= 100", reached=f"{alike['speed']:.0f}; numpy alone {plain['speed']:.0f}", met=alike["speed"] >= 100, **here),
        Goal(what="the same, every GPU by itself", goal=">= 12", reached=f"{distinct['speed']:.1f}; numpy alone {plain_distinct['speed']:.1f}",
             met=distinct["speed"] >= 12, **here),
        Goal(what="the same: memory, MiB", goal="printed", reached=f"{most / 2**20:.0f}", **here),
    ]  # fmt: skip


def lockstep(f: dict[str, Any]) -> list[Goal]:
    here = {"where": where("fleet_lockstep"), "command": "python benchmarks/measure/fleet_lockstep.py"}
    rows = {row["case"]: row for row in f["rows"]}

    def show(case: str) -> str:
        row = rows[case]
        return f"{case}: swing {row['swing']:.1%}, band {row['band']:.1%}, joules {row['joules']:+.1%}, lost {row['lost']:.1%}"

    one_job = [c for c in f["met"] if "jobs" not in c]
    return [
        Goal(what="a job in lockstep on 100,000 GPUs (650/200 W, 2 s, 75%), simulated: the best mitigations", goal="swing <= 10%, band <= 20%, joules <= +5%",
             reached="; ".join(show(case) for case in ("none", *f["met"])), met=bool(f["met"]), **here),
        Goal(what="the same, one synchronous job, software alone (no storage)", goal="swing <= 10%, band <= 20%, joules <= +5%",
             reached=show("floor 600 W"), met=any("storage" not in case for case in one_job), **here),
    ]  # fmt: skip


def starting(f: dict[str, Any]) -> list[Goal]:
    rows = f["rows"]
    texts = [
        f"{'at once' if r['soft_start_s'] is None else format(r['soft_start_s'], 'g') + ' s'}: {r['ramp_w_per_s'] / 1e3:.0f} kW/s, {r['lost_s']:.0f} s lost"
        for r in rows
    ]
    soft = [r for r in rows if r["soft_start_s"] is not None]
    return [
        Goal(what=f"soft start of a {f['gpus']}-GPU job by the governor's own code, simulated: ramp and time lost",
             goal=f"<= {f['limit_w_per_s'] / 1e3:.0f} kW/s", reached="; ".join(texts), met=all(r["within"] for r in soft),
             where=where("fleet_soft_start"), command="python benchmarks/measure/fleet_soft_start.py"),
    ]  # fmt: skip


def servers(f: dict[str, Any]) -> list[Goal]:
    return [
        Goal(what="servers under one rack budget with the governor, recorded H200 traces, simulated: more than by nameplate (more than by their GPUs' limits), %",
             goal="printed", reached=f"{100 * f['gain']:.0f} ({100 * f['gain_over_limits']:.0f}): {f['servers']} instead of {f['by_nameplate']} ({f['by_limits']})",
             beside=f"POLCA: {100 * f['polca']:.0f}, inference", where=where("fleet_oversubscribe"),
             command="python benchmarks/measure/fleet_oversubscribe.py --waves FOLDER"),
    ]  # fmt: skip


def waves(f: dict[str, Any]) -> list[Goal]:
    return [
        Goal(what=f"joules of {f['unseen']} recorded H200 power waves that the model did not see: mean (worst) error, %", goal="printed",
             reached=f"{100 * f['unseen_mean_error']:.1f} ({100 * f['unseen_worst_error']:.1f})", where=where("fleet_waves", "NVIDIA H200"),
             command="python benchmarks/measure/fleet_waves.py FOLDER/waves.json"),
    ]  # fmt: skip


def goals() -> list[Goal]:
    """All of them."""
    return [
        *speed(load("fleet_speed")),
        *lockstep(load("fleet_lockstep")),
        *starting(load("fleet_soft_start")),
        *servers(load("fleet_oversubscribe")),
        *waves(load("fleet_waves")),
    ]


NOTES = [
    "- Speeds are simulated seconds for each CPU second of one thread: the machine was busy with other work, so that the wall clock said less.",
    "- The swing is highest less lowest over the mean; the band is the root mean square of the swing in 0.1-20 Hz over the mean. FOLDER is the recordings "
    "that the project was given (`../shared/h200`).",
]
