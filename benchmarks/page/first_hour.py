"""The first hour's part of benchmarks/README.md: `make run`, the self-test, soak and fuzz."""

from __future__ import annotations

from typing import Any

from goal import Goal, load, load_if_measured, where

FIRST_HOUR = "python benchmarks/measure/first_hour.py"
LINES, COLUMNS = 45, 100  # one screen


def goals() -> list[Goal]:
    f = load("first_hour")
    return [
        *first_screen(f),
        selftest(f["selftest"]),
        fuzz(load("fuzz_parsers")),
        fuzz_files(load("fuzz_files")),
        suite_under_load(load_if_measured("suite_under_load")),
        soak(load("soak")),
    ]


def first_screen(f: dict[str, Any]) -> list[Goal]:
    run, here = f["make_run"], {"where": where("first_hour"), "command": FIRST_HOUR}
    return [
        Goal(what="`make run` without a GPU, once installed, s", goal="<= 60", reached=f"{run['seconds']:.0f}", met=run["seconds"] <= 60, **here),
        Goal(what="what it prints: lines x columns", goal=f"{LINES} x {COLUMNS}", reached=f"{run['lines']} x {run['columns']}",
             met=run["lines"] <= LINES and run["columns"] <= COLUMNS, **here),
    ]  # fmt: skip


def selftest(s: dict[str, Any]) -> Goal:
    what = "`tessera selftest` on a machine without a GPU: s, checks that failed"
    return Goal(what=what, goal="<= 60, 0", reached=f"{s['seconds']:.0f}, {s['failed']} of {s['checks']}",
                met=s["seconds"] <= 60 and not s["failed"], where=where("first_hour"), command=FIRST_HOUR)  # fmt: skip


def fuzz(f: dict[str, Any]) -> Goal:
    failed, what = f["failures"], "damaged input through every other parser: crashes, hangs"
    return Goal(what=what, goal="0 of 100,000", reached=f"{failed} of {f['cases']:,}", met=failed == 0 and f["cases"] >= 100_000,
                where=where("fuzz_parsers"), command="python benchmarks/fuzz/fuzz_parsers.py 100000")  # fmt: skip


def fuzz_files(f: dict[str, Any]) -> Goal:
    what = (
        "hostile and damaged files that are neither refused nor right, or take over 5 s + 2 s for 10 MB of CPU or 1 GB"
    )
    failed = sum(f["bad"].values())
    return Goal(what=what, goal="0 of 10,000", reached=f"{failed} of {f['cases']:,}",
                met=failed == 0 if failed or f["cases"] >= 10_000 else None,  # a part without faults is a part
                where=where("fuzz_files"), command="python benchmarks/fuzz/fuzz_files.py 10000")  # fmt: skip


def suite_under_load(s: dict[str, Any] | None) -> Goal:
    what, goal = "the whole suite beside at least four busy processes: runs without a red or retried test", "10 of 10"
    command = "python benchmarks/measure/suite_under_load.py --runs 10 --together 5"
    if s is None:
        return Goal(what=what, goal=goal, command=command)
    green, runs = s["green"], len(s["runs"])
    busy = s["busy_loops"] + 2 * (s["together"] - 1)  # each of the others has two workers
    return Goal(what=what, goal=goal, reached=f"{green} of {runs}, beside {busy}", command=command,
                met=green == runs >= 10 and busy >= 4, where=where("suite_under_load"))  # fmt: skip


def soak(s: dict[str, Any]) -> Goal:
    what = "soak of sampler, run file and exporter at high load: MiB resident, descriptors, threads, first and last; failures"
    goal, command = "flat, 10 min", "python benchmarks/measure/soak.py --minutes 10"
    said = ", ".join(f"{s[k]['first']:.0f} to {s[k]['last']:.0f}" for k in ("rss_mib", "descriptors", "threads"))
    # A shorter run that stayed flat shows nothing of ten minutes, and nothing against it.
    held = False if s["failed"] or not s["flat"] else True if s["seconds"] >= 599 else None
    load_ = f"{s['seconds'] / 60:.0f} min, {s['load']['samples_per_s']:,} samples and {s['load']['rows_per_s']:,} rows a second"
    reached = f"{said}; {len(s['failed'])} ({load_})"
    return Goal(what=what, goal=goal, reached=reached, met=held, where=where("soak"), command=command)


def screen() -> list[str]:
    """What `make run` printed when it was last measured, for the README."""
    return ["```", *load("first_hour")["make_run"]["screen"], "```"]


def notes() -> list[str]:
    return ["- The README shows the screen of `make run` as it was measured."]
