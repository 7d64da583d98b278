"""What a torch.profiler session leaves behind: the host's microseconds per launch before and after one.

    PYTHONPATH=src:.carry/site python benchmarks/device/cupti_after.py OUT.json

Kineto keeps CUPTI when it stops, unless TEARDOWN_CUPTI=1 is set. Each way runs in a process of its own: a small
addition, ResNet-50 at batch 1 launched eagerly and as a CUDA graph, before a session of three iterations and after it; medians
of five rounds. No clock or limit is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics as st
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

ROUNDS = 5


def took(call: Callable[[], Any], times: int) -> float:
    """Seconds of a call, the device being waited for at the end of all."""
    for _ in range(max(1, times // 10)):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def one() -> None:
    """A process: measured, profiled, measured again; one line of JSON."""
    import vision

    vision.importable()
    import torchvision
    from torch.profiler import ProfilerActivity, profile

    model = torchvision.models.resnet50(weights=None).cuda().bfloat16().eval()
    image = torch.randn(1, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    small = torch.randn(64, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(3):
            model(image)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            model(image)

        def look() -> dict[str, float]:
            rounds = [
                (took(lambda: torch.add(small, small), 5000), took(lambda: model(image), 40), took(graph.replay, 100))
                for _ in range(ROUNDS)
            ]
            add, eager, replay = (st.median(column) for column in zip(*rounds, strict=True))
            return {"add_us": add * 1e6, "eager_ms": eager * 1e3, "graph_ms": replay * 1e3}

        before = look()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            for _ in range(3):
                model(image)
            torch.cuda.synchronize()
        after = look()
        with profile(activities=[ProfilerActivity.CUDA]) as again:  # that it can begin once more
            graph.replay()
            torch.cuda.synchronize()
    print(json.dumps({"before": before, "after": after, "kernels_seen_again": len(again.events())}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--one", action="store_true", help="the measuring process itself")
    given = parser.parse_args()
    if given.one:
        one()
        return
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure")
    rows = []
    for teardown in ("0", "1"):
        done = subprocess.run(
            [sys.executable, __file__, str(given.out), "--one"], capture_output=True, text=True, check=False,
            env={**os.environ, "TEARDOWN_CUPTI": teardown},
        )  # fmt: skip
        if done.returncode:
            rows.append({"teardown": teardown == "1", "error": done.stderr[-400:]})
            print(f"TEARDOWN_CUPTI={teardown} failed: {done.stderr[-400:]}")
            continue
        row = {"teardown": teardown == "1", **json.loads(done.stdout.strip().splitlines()[-1])}
        rows.append(row)
        ratios = {name: row["after"][name] / value for name, value in row["before"].items()}
        told = ", ".join(f"{name} {row['before'][name]:.3f} -> x {ratio:.3f}" for name, ratio in ratios.items())
        print(f"TEARDOWN_CUPTI={teardown}: {told}; kernels seen again: {row['kernels_seen_again']}", flush=True)
    write_result(given.out, {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
