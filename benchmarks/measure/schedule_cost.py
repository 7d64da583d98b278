"""What a schedule costs the thread that computes, without CUDA (benchmarks/device/schedule_caps.py has it with).

    PYTHONPATH=src python benchmarks/measure/schedule_cost.py [RESULTS.json]

A schedule that limits nothing; one with a cap that does not bind, and an operator of a CPU under it; a dispatch mode
beside it; and the CPU time of the loop's thread and the sampler while a cap is held.
"""

from __future__ import annotations

import statistics as st
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessera import schedule

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

REPEATS, CALLS = 15, 4000


class Passing(TorchDispatchMode):
    """The alternative: a dispatch mode that only passes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def cost_us(run: Callable[[], object], base: Callable[[], object]) -> float:
    """Median difference of a call and its base, in microseconds: blocks in turn, so that drift falls on both."""
    differences = []
    for _ in range(REPEATS):
        times = []
        for fn in (base, run):
            t0 = time.perf_counter_ns()
            for _ in range(CALLS):
                fn()
            times.append((time.perf_counter_ns() - t0) / CALLS / 1e3)
        differences.append(times[1] - times[0])
    return st.median(differences)


def nothing() -> None:
    pass


def thread_cpu_s(name: str) -> float | None:
    """CPU seconds of one of our threads, from /proc."""
    thread = next((t for t in threading.enumerate() if t.name == name), None)
    if thread is None or thread.native_id is None:
        return None
    fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0  # user and system time in ticks of 10 ms


def main() -> None:
    torch.set_num_threads(1)
    a = torch.ones(8)

    def add() -> None:
        torch.add(a, a)

    rows: dict[str, float | None] = {}
    rows["schedule that limits nothing, us a call (goal 1)"] = cost_us(schedule()(nothing), nothing)
    capped = schedule(power_cap="1MW")(nothing)
    capped()
    time.sleep(1.0)
    rows["cap that does not bind, us a call"] = cost_us(capped, nothing)
    with schedule(power_cap="1MW"):
        add()
        time.sleep(0.2)
        inside = [0.0] * REPEATS
        for i in range(REPEATS):
            t0 = time.perf_counter_ns()
            for _ in range(CALLS):
                add()
            inside[i] = (time.perf_counter_ns() - t0) / CALLS / 1e3
        before = [thread_cpu_s(n) for n in ("tessera-pace", "tessera-sampler")]
        time.sleep(3.0)
        after = [thread_cpu_s(n) for n in ("tessera-pace", "tessera-sampler")]
    outside = []
    with Passing():
        dispatched = cost_us(add, nothing)
    for _ in range(REPEATS):
        t0 = time.perf_counter_ns()
        for _ in range(CALLS):
            add()
        outside.append((time.perf_counter_ns() - t0) / CALLS / 1e3)
    plain = st.median(outside)
    rows["an operator, us"] = plain
    rows["  under a cap that does not bind, us more"] = st.median(inside) - plain
    rows["  under a dispatch mode that passes on, us more"] = dispatched - plain
    for name, was, now in zip(("the loop's thread", "the sampler"), before, after, strict=True):
        rows[f"{name}, % of a core"] = None if was is None or now is None else (now - was) / 3.0 * 100
    for name, value in rows.items():
        print(f"{name:52s} {'-' if value is None else f'{value:8.3f}'}")
    if len(sys.argv) > 1:
        write_result(Path(sys.argv[1]), rows)


if __name__ == "__main__":
    main()
