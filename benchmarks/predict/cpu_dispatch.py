"""What a CPU takes to dispatch an operator to itself, over what a Xeon takes to launch the same on a GPU.

    python benchmarks/predict/cpu_dispatch.py [RESULTS.json]

Small layers whose arithmetic is next to nothing, on one thread without gradients: microseconds of CPU time a call (the
least of forty rounds, as what else the machine does only adds to it), beside what the host model (`estimate/host.py`,
fitted beside an H200) gives the same call. The geometric mean of the ratios is the factor in `estimate/host.py`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tessera.estimate.host import HostModel, host_times
from tessera.graph.capture import capture

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

ROUNDS, CALLS = 40, 500


def layers() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Modules with an input of a few elements."""
    row, image = torch.randn(4, 8), torch.randn(1, 4, 4, 4)
    return {
        "ReLU": (nn.ReLU(), row),
        "ten ReLU": (nn.Sequential(*(nn.ReLU() for _ in range(10))), row),
        "Linear": (nn.Linear(8, 8), row),
        "LayerNorm": (nn.LayerNorm(8), row),
        "BatchNorm2d": (nn.BatchNorm2d(4), image),
        "Conv2d": (nn.Conv2d(4, 4, 3), image),
    }


def microseconds(call: Callable[[], Any]) -> float:
    took = []
    for _ in range(ROUNDS):
        begin = time.thread_time()  # not what other processes take
        for _ in range(CALLS):
            call()
        took.append((time.thread_time() - begin) / CALLS * 1e6)
    return min(took)


def launch_us(model: nn.Module, x: torch.Tensor) -> float:
    """What the host model says of the same call on a GPU."""
    return sum(host_times(HostModel.default(), capture(model, x).ops, training=False)) * 1e6


def processor() -> str:
    """The CPU's name, as Linux knows it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    print(f"{'us a call':14s} {'CPU':>8s} {'launch':>8s} {'ratio':>8s}")
    for name, (model, x) in layers().items():
        model.eval()
        with torch.no_grad():  # as the recordings behind the host model
            cpu = microseconds(lambda model=model, x=x: model(x))
        launch = launch_us(model, x)
        found[name] = {"cpu_us": cpu, "launch_us": launch, "ratio": cpu / launch}
        print(f"{name:14s} {cpu:8.2f} {launch:8.2f} {cpu / launch:8.3f}")
    ratios = [row["ratio"] for row in found.values()]
    mean = statistics.geometric_mean(ratios)
    print(f"{'geometric mean':32s} {mean:8.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    if len(sys.argv) > 1:
        result = {"layers": found, "ratio": mean, "least": min(ratios), "most": max(ratios)}
        result |= {"processor": processor(), "torch": torch.__version__}
        write_result(Path(sys.argv[1]), result)


if __name__ == "__main__":
    main()
