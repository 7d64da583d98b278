"""How much a program that lives in Python waits for a session's threads while it launches 60,000 kernels a second.

    python benchmarks/measure/host_bound_tracing.py [OUT.json] [--turns 10]

A loop does 16 us of Python for each launch on the fake CUPTI of the tests, as a host-bound decode does; blocks of it take
turns, plain and in a session. CUPTI's own cost is not in it: that needs a GPU (device/cupti_light.py). For each block:

    over      time of a launch over that of the plain blocks beside it
    cpu       the same of the CPU time of the loop's thread, which a loaded machine disturbs less
    waited    share of the time in which the loop's thread slept, which is when another thread had the interpreter: neither
              running nor waiting for a core (/proc/self/schedstat), so a loaded machine shows in it only as far as a
              thread of ours loses its core while it has the lock
    given_up  times a second that the loop's thread slept: it gave the interpreter to another, and had to wake up again
    ours      CPU time of the session's threads, of a core

Medians, with 90% intervals by order statistics.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics as st
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "device")]
import torch

from cupti_light import find_low_rank
from result_file import write_result
from tessera import monitor, profile
from tessera.profile import kernel_tracing
from tessera.profile.cupti_collector import CuptiCollector
from tessera.profile.cupti_library import Cupti

BLOCK_S, LEAD_S = 1.2, 0.6
KERNELS = 40  # of a step, each with a name and a grid of its own
NAMES = [ctypes.create_string_buffer(f"_Z6kernelI{number}Pf".encode()) for number in range(KERNELS)]
SHAPES = [(ctypes.c_int32 * 6)(number + 1, 2, 1, 128, 1, 1) for number in range(KERNELS)]


class Block(NamedTuple):
    """Microseconds a launch, those of the thread's CPU, the share of the time that the thread slept, how often a second, and CPU of others."""

    launch_us: float
    cpu_us: float
    waited: float
    given_up: float
    ours: float


def build_fake(folder: Path) -> Any:
    """The tests' libcupti, and a torch that believes in a GPU."""
    path = folder / "libcupti.so.13"
    source = ROOT / "tests" / "fakes" / "fake_cupti.c"
    subprocess.run(["gcc", "-std=gnu11", "-shared", "-fPIC", "-O1", str(source), "-o", str(path)], check=True)
    fake = ctypes.CDLL(str(path))
    fake.fake_kernel.argtypes = [
        ctypes.c_void_p, *[ctypes.c_uint64] * 2, ctypes.POINTER(ctypes.c_int32), ctypes.c_uint64
    ]  # fmt: skip
    make = CuptiCollector.__init__
    CuptiCollector.__init__ = lambda self: make(self, Cupti(str(path)))  # type: ignore[method-assign,assignment]
    torch.version.cuda = "13.0"
    torch.cuda.device_count = lambda: 1
    torch.cuda._lazy_call = lambda call: call()
    kernel_tracing.synchronize = lambda: None  # type: ignore[attr-defined]
    return fake


def launch(fake: Any, count: int) -> None:
    """So many launches, each after some Python; the device runs them one after the other."""
    kernel, addresses = fake.fake_kernel, [ctypes.addressof(name) for name in NAMES]
    for number in range(count):
        values = [i * i for i in range(90)]
        table = {i: values[i] for i in range(60)}
        now_ns = time.time_ns()
        which = number % KERNELS
        kernel(addresses[which], now_ns, now_ns + 5_000 + len(table), SHAPES[which], 0)


def read_scheduled() -> tuple[float, int]:
    """Seconds that this thread has run or waited for a core, and how often it slept."""
    own = Path(f"/proc/self/task/{threading.get_native_id()}")
    ran, queued, _ = map(int, (own / "schedstat").read_text().split())
    sleeps = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (own / "status").read_text(), re.MULTILINE)
    assert sleeps is not None
    return (ran + queued) * 1e-9, int(sleeps[1])


def time_block(fake: Any, lead_s: float = 0.0) -> Block:
    until_s = time.perf_counter() + lead_s
    while time.perf_counter() < until_s:
        launch(fake, 100)
    begun = time.perf_counter(), *read_scheduled(), time.process_time(), time.thread_time()
    launches = 0
    while time.perf_counter() < begun[0] + BLOCK_S:
        launch(fake, 1000)
        launches += 1000
    ended = time.perf_counter(), *read_scheduled(), time.process_time(), time.thread_time()
    wall_s, scheduled_s, sleeps, process_s, own_s = (b - a for a, b in zip(begun, ended, strict=True))
    return Block(
        launch_us=wall_s / launches * 1e6,
        cpu_us=own_s / launches * 1e6,
        waited=1 - scheduled_s / wall_s,
        given_up=sleeps / wall_s,
        ours=(process_s - own_s) / wall_s,
    )


def summarise(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    low = find_low_rank(len(ordered))
    return {"median": st.median(ordered), "low": ordered[low], "high": ordered[-1 - low]}


def measure(turns: int, folder: Path) -> dict[str, Any]:
    fake = build_fake(folder)
    plain, traced, kernels = [time_block(fake, LEAD_S)], [], 0
    for _ in range(turns):
        with profile.session(path=folder / f"{time.time_ns()}.tessera", operator_steps=0) as sess:
            traced.append(time_block(fake, LEAD_S))
        kernels = len(sess.timeline().rows("kernel"))
        monitor.use(None)
        plain.append(time_block(fake))
    beside = list(zip(traced, plain, plain[1:], strict=False))
    over, cpu = (
        [getattr(t, field) / (getattr(a, field) + getattr(b, field)) * 2 - 1 for t, a, b in beside]
        for field in ("launch_us", "cpu_us")
    )
    return {
        "turns": turns,
        "kernels": kernels,
        "launch_us": st.median(b.launch_us for b in plain),
        "over": summarise(over),
        "cpu": summarise(cpu),
        "waited": summarise([b.waited for b in traced]),
        "waited_plain": summarise([b.waited for b in plain]),
        "given_up": summarise([b.given_up for b in traced]),
        "given_up_plain": summarise([b.given_up for b in plain]),
        "ours": summarise([b.ours for b in traced]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--turns", type=int, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.turns, Path(folder))
    print(f"{found['launch_us']:.1f} us a launch, {found['kernels']} kernels kept in the last session")
    for name in ("over", "cpu", "waited", "waited_plain", "ours"):
        row = found[name]
        print(f"{name:14} {row['median']:+7.2%}  ({row['low']:+.2%} to {row['high']:+.2%})")
    for name in ("given_up", "given_up_plain"):
        row = found[name]
        print(f"{name:14} {row['median']:7.1f}  ({row['low']:.1f} to {row['high']:.1f}) a second")
    if given.out is not None:
        write_result(given.out, found)


if __name__ == "__main__":
    main()
