"""Joules of short scopes on a machine without a power sensor, against the CPU time that each block really used.

    modelled joules of a block = full power / CPUs x CPU seconds of the process and its children in the block

Every case opens scopes one after the other, without a gap between them: their sum must be the scope around all.
`worst` is the block whose joules are furthest from its CPU time, as a share of a whole busy core for as long;
`within` is the share of the blocks whose 90% interval holds the truth: without the model's error of the level, and with
the 50 us that this script uses itself between two scopes.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result
from tessera import monitor
from tessera.hardware import host_cpu

_ROUNDS = 40
_SCRIPT_S = 5e-5
_A = torch.randn(256, 256)
_CHILD = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"


def multiply(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(_A, _A)


def multiply_in_threads(seconds: float) -> None:
    threads = [threading.Thread(target=multiply, args=(seconds,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_child(seconds: float) -> None:
    subprocess.run([sys.executable, "-S", "-c", _CHILD.format(seconds)], check=True)


def cpu_s() -> float:
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + waited.ru_utime + waited.ru_stime


def measure(blocks: dict[str, Callable[[], object]], rounds: int) -> dict[str, object]:
    """Run the blocks in turns, a scope around each; joules against CPU time."""
    device = host_cpu()
    assert device.tdp_w is not None
    core_w = device.tdp_w.value / (os.cpu_count() or 1)
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in blocks}
    scopes = []
    with monitor.energy_scope("all") as whole:
        for _ in range(rounds):
            for name, block in blocks.items():
                before = cpu_s()
                with monitor.energy_scope(name) as scope:
                    block()
                scopes.append((name, scope, core_w * (cpu_s() - before)))
    for name, scope, truth_j in scopes:
        energy = scope.energy
        own_j = math.sqrt(max(energy.error_j**2 - energy.common_error_j**2, 0.0))
        found[name].append((energy.energy_j, truth_j, own_j, core_w * energy.time_s))
    rows = {}
    for name, each in found.items():
        joules, truth = (sum(row[k] for row in each) for k in (0, 1))
        rows[name] = {
            "joules": joules,
            "truth_j": truth,
            "off_pct": 100 * (joules / truth - 1),
            "worst_pct": 100 * max(abs(j - t) / busy for j, t, _, busy in each),
            "within": sum(abs(j - t) <= own + core_w * _SCRIPT_S for j, t, own, _ in each) / len(each),
        }
    total_j = sum(scope.energy_j for _, scope, _ in scopes)
    return {"blocks": rows, "sum_pct": 100 * (total_j / whole.energy_j - 1), "rounds": rounds}


CASES: dict[str, tuple[dict[str, Callable[[], object]], int]] = {
    "mm 30 ms, sleep 60 ms": ({"mm": lambda: multiply(0.03), "sleep": lambda: time.sleep(0.06)}, _ROUNDS),
    "mm 2 ms, sleep 5 ms": ({"mm": lambda: multiply(0.002), "sleep": lambda: time.sleep(0.005)}, 10 * _ROUNDS),
    "mm in two threads 30 ms, sleep 60 ms": (
        {"mm": lambda: multiply_in_threads(0.03), "sleep": lambda: time.sleep(0.06)},
        _ROUNDS,
    ),
    "a child with 30 ms of work, sleep 60 ms": (
        {"child": lambda: run_child(0.03), "sleep": lambda: time.sleep(0.06)},
        _ROUNDS,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="?")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with monitor.energy_scope("warm"):
        multiply(0.2)
        run_child(0.0)
    results = {case: measure(*blocks) for case, blocks in CASES.items()}
    for case, result in results.items():
        print(f"{case}: the sum of all scopes is off the scope around them by {result['sum_pct']:+.2f}%")
        for name, row in result["blocks"].items():  # type: ignore[attr-defined]
            print(
                f"  {name:6} {row['joules']:8.3f} J, by its CPU time {row['truth_j']:8.3f} J: {row['off_pct']:+8.1f}%; "
                f"worst {row['worst_pct']:5.1f}% of a core, {row['within']:.0%} within their intervals"
            )
    if arguments.out:
        write_result(arguments.out, results)


if __name__ == "__main__":
    main()
