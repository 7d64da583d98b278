"""What each part of a session costs GPT-2-small training: parts taken away one by one, step by step.

    PYTHONPATH=src:.carry/site python benchmarks/device/overhead_why.py RESULTS.json [--quick]

Every variant runs some steps first (a device that has idled while a trace was read needs time for its clocks), then
`STEPS` that count: the host's and the device's milliseconds of each, and the CPU time of each thread meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import statistics as st
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from tessera import monitor, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

FIRST, STEPS = 8, 16
Step = Callable[[], None]
TRACED = ("cpu", "gpu", "memcpy", "collective")


def torch_profile() -> AbstractContextManager[Any]:
    return torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True)


def of_session(folder: Path, **options: Any) -> AbstractContextManager[Any]:
    return profile.session(record_shapes=True, path=folder / f"{time.time_ns()}.tessera", **options)


def monitored(inner: AbstractContextManager[Any] | None = None) -> AbstractContextManager[Any]:
    """The sampler's thread, and a trace of power beside."""
    stack = ExitStack()
    stack.enter_context(monitor.power_trace(interval_ms=5))
    if inner is not None:
        stack.enter_context(inner)
    return stack


VARIANTS: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "plain": lambda _: ExitStack(),
    "monitor alone": lambda _: monitored(),
    "sampling": lambda f: of_session(f, mode="sampling"),
    "sampling, stacks alone": lambda f: of_session(f, mode="sampling", activities=["stack"]),
    "sampling, power alone": lambda f: of_session(f, mode="sampling", activities=["power"]),
    "torch": lambda _: torch_profile(),
    "torch and the monitor": lambda _: monitored(torch_profile()),
    "timeline": lambda f: of_session(f, mode="operators"),
    "timeline without power": lambda f: of_session(f, mode="operators", activities=list(TRACED)),
    "torch again": lambda _: torch_profile(),
    "plain again": lambda _: ExitStack(),
}


def cpu_s() -> dict[str, float]:
    """CPU seconds by thread so far, named where Python knows it."""
    names = {t.native_id: t.name for t in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        name = names.get(int(task.name), "other")
        found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / 100
    return found


def measured(step: Step, how: AbstractContextManager[Any], cuda: bool) -> dict[str, Any]:
    t0 = time.perf_counter()
    how.__enter__()
    start_s = time.perf_counter() - t0
    host = [time.perf_counter()]
    events = []
    for i in range(FIRST + STEPS):
        if i == FIRST:
            used = cpu_s()
        if cuda:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
        step()
        host.append(time.perf_counter())
    if cuda:
        torch.cuda.synchronize()
    after = cpu_s()
    t0 = time.perf_counter()
    how.__exit__(None, None, None)
    stop_s = time.perf_counter() - t0
    monitor.use(None)
    device = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    each = [1e3 * (b - a) for a, b in itertools.pairwise(host)]
    return {
        "start_s": start_s, "stop_s": stop_s, "host_ms": each, "device_ms": device,
        "step_ms": st.mean((device or each)[FIRST:]), "median_ms": st.median((device or each)[FIRST:]),
        "cpu_s": {k: round(after[k] - used.get(k, 0.0), 3) for k in after if after[k] - used.get(k, 0.0) > 0.004},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.quick:
        layer = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(50)))
        step: Step = lambda: layer(torch.randn(8, 64)).sum().backward()  # noqa: E731
    else:
        from overhead import make_step

        step = make_step()
    for _ in range(15):
        step()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(2):
            for what, make in VARIANTS.items():
                row = measured(step, make(Path(name)), not given.quick)
                rows[f"{what} {turn}"] = row
                values = row["device_ms"] or row["host_ms"]
                print(
                    f"{what + ' ' + str(turn):26s} {row['step_ms']:7.2f} median {row['median_ms']:7.2f} ms  start "
                    f"{row['start_s']:.2f} stop {row['stop_s']:.2f} s  first "
                    f"{' '.join(f'{v:.0f}' for v in values[:FIRST])}  {row['cpu_s']}",
                    flush=True,
                )
                write_result(given.out, rows)


if __name__ == "__main__":
    main()
