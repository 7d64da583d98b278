"""What a region costs: outside a session beside torch.profiler.record_function with no profiler, and inside one.

    python benchmarks/measure/region_cost.py [RESULTS.json]

Blocks of both alternate; the figure is the median block.
"""

from __future__ import annotations

import statistics as st
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torch.profiler import record_function

from tessera import profile

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

BLOCKS, CALLS = 60, 5_000


def ns(make: Callable[[str], object]) -> float:
    """Nanoseconds for one `with make(name): pass`, the empty loop taken off."""
    t0 = time.perf_counter_ns()
    for _ in range(CALLS):
        with make("forward/attention"):  # type: ignore[attr-defined]
            pass
    t1 = time.perf_counter_ns()
    for _ in range(CALLS):
        pass
    return (t1 - t0 - (time.perf_counter_ns() - t1)) / CALLS


def decorated_ns() -> float:
    plain, decorated = (lambda: None), profile.region("f")(lambda: None)
    t0 = time.perf_counter_ns()
    for _ in range(CALLS):
        decorated()
    t1 = time.perf_counter_ns()
    for _ in range(CALLS):
        plain()
    return (t1 - t0 - (time.perf_counter_ns() - t1)) / CALLS


def main() -> None:
    off: dict[str, list[float]] = {"region": [], "record_function": [], "decorated": []}
    for _ in range(BLOCKS):
        off["region"].append(ns(profile.region))
        off["record_function"].append(ns(record_function))
        off["decorated"].append(decorated_ns())
    with tempfile.TemporaryDirectory() as folder, profile.session([], path=Path(folder) / "run.tessera"):
        on = [ns(profile.region) for _ in range(10)]
    rows = {
        "region_off_ns": st.median(off["region"]),
        "decorator_off_ns": st.median(off["decorated"]),
        "record_function_off_ns": st.median(off["record_function"]),
        "region_on_ns": st.median(on),
    }
    for name, value in rows.items():
        print(f"  {name:24s} {value:8.0f}")
    print(
        f"  without a session a region costs 1/{rows['record_function_off_ns'] / rows['region_off_ns']:.0f} of record_function (goal: under 1000 ns)"
    )
    if len(sys.argv) > 1:
        write_result(Path(sys.argv[1]), rows)


if __name__ == "__main__":
    main()
