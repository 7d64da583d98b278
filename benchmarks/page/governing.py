"""The part of benchmarks/README.md about the governor: goals, figures reached."""

from __future__ import annotations

from goal import Goal, load, where


def goals() -> list[Goal]:
    """The rows, in the order of the issue's table."""
    return [*storm(), *kills(), *server(), *on_ray()]


def storm() -> list[Goal]:
    command = "python benchmarks/measure/governor_storm.py --write benchmarks/results/governor_storm.json"
    found = load("governor_storm")
    what = "governor: random events with crashes, lost daemons, clock steps, lost, late, doubled and reordered messages"
    counts = found["counts"]
    return [
        Goal(what=f"{what}: {found['jobs']:,} jobs on {found['nodes']} nodes, {counts['governor killed']} governors and {counts['daemon killed']} daemons killed: highest share of the limit",
             goal="<= 1, nothing lost or doubled, nobody starves",
             reached=f"{found['highest_share_of_limit']:.3f} in {found['events']:,} events; {found['jobs_ended']:,} jobs served, {len(found['problems'])} violations",
             met=found["highest_share_of_limit"] <= 1 and not found["problems"] and not found["jobs_unfinished"],
             where=where("governor_storm"), command=command),
        Goal(what="the same: longest wait of a job, s (simulated); decisions per CPU second", goal="printed",
             reached=f"{found['longest_wait_s']:.0f}; {found['events_per_cpu_s']:,.0f}", where=where("governor_storm"), command=command),
    ]  # fmt: skip


def kills() -> list[Goal]:
    command = "python benchmarks/measure/governor_kills.py --write benchmarks/results/governor_kills.json"
    found = load("governor_kills")
    what = "the real governor killed (SIGKILL) under load"
    here = {"where": where("governor_kills"), "command": command}
    return [
        Goal(what=f"{what}, {found['kills']} times: back after, median (longest), s", goal="<= 2",
             reached=f"{found['restart_s_median']:.2f} ({found['restart_s_max']:.2f}); CPU time {found['restart_cpu_s_max']:.2f}",
             met=found["restart_s_max"] <= 2, **here),
        Goal(what=f"the same: jobs lost or changed of {found['jobs']:,}, over {found['answers']:,} answers", goal="0",
             reached=str(found["jobs_lost"] + len(found["problems"])), met=not found["jobs_lost"] and not found["problems"], **here),
        Goal(what="the same: the most that nodes were allowed, W", goal=f"<= {found['limit_w']:,.0f}",
             reached=f"{found['highest_w']:,.0f}", met=found["highest_w"] <= found["limit_w"], **here),
    ]  # fmt: skip


def server() -> list[Goal]:
    command = "python benchmarks/measure/governor_load.py --write benchmarks/results/governor_load.json"
    found = load("governor_load")
    here = {"where": where("governor_load"), "command": command}
    one, many, attack = found["one_client"], found["load"], found["attack"]
    return [
        Goal(what="heartbeats a second of the real governor, each on disk before its answer; p50 and p99, ms: one node", goal="printed",
             reached=f"{one['requests_per_s']:,.0f}; {one['p50_ms']:.1f} and {one['p99_ms']:.1f}", **here),
        Goal(what=f"the same: {many['nodes']} nodes at once, clients on the same two cores", goal="printed",
             reached=f"{many['requests_per_s']:,.0f}; {many['p50_ms']:.1f} and {many['p99_ms']:.1f}", **here),
        Goal(what=f"the same under {found['slow_connections']} slow connections and {found['malformed_requests']:,} malformed requests: heartbeats refused; p99, ms; jobs changed by the attack",
             goal="0; printed; 0", reached=f"{attack['failed']}; {attack['p99_ms']:,.0f}; {found['jobs_changed_by_attack']}",
             met=attack["failed"] == 0 and found["jobs_changed_by_attack"] == 0, **here),
    ]  # fmt: skip


def on_ray() -> list[Goal]:
    command = "python benchmarks/measure/governor_ray.py --write benchmarks/results/governor_ray.json"
    found = load("governor_ray")
    what = "governor on a local Ray cluster of four nodes, a node killed, the head killed"
    here = {"where": where("governor_ray"), "command": command}
    return [
        Goal(what=f"{what}: the most that nodes were allowed, W", goal=f"<= {found['limit_w']:,.0f}",
             reached=f"{found['highest_w']:,.0f} in {found['looks']:,} looks", met=found["cap_held"], **here),
        Goal(what=f"the same: s until the lost node's watts were free (lease {found['lease_s']:g} s), nodes fell back without the head, a new head had the leases",
             goal="printed", reached=f"{found['reclaimed_after_s']:.1f}, {found['fell_back_after_s']:.1f}, {found['restarted_after_s']:.1f}", **here),
    ]  # fmt: skip


NOTES = [
    "The governor's machine had two cores and a load average of 20 to 30 from other work, before which the kills were run",
    "(`nice -n -10`); without that, the same 100 kills lost nothing either, and took as long as `beside_other_work` says.",
]
