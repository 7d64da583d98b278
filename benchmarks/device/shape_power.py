"""Floor, ramp and shaper on a real GPU: the swing of a compute/communicate wave, the joules of ballast, a real training.

    PYTHONPATH=src:.carry/site python benchmarks/device/shape_power.py benchmarks/results/shape_power.json

1. A wave: GEMMs for 1.5 s, then nothing for 0.5 s, as a job that waits for an all-reduce. Without anything, then with a
   floor half-way between its high and its low, then with a ramp. Printed: lowest and highest 20 ms sample, the swing that is
   left, joules of a period, the part of ballast, and how long the same GEMMs take.
2. The shaper (jitter of 0-2 ms at microbatches) on GPT-like training, on and off in turn: rule 9.4.

Goal: the swing is halved at the cost printed; training loses at most 5%.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result
from tessera import fleet, monitor, schedule

PERIOD_S, DUTY, PERIODS, SIZE = 2.0, 0.75, 12, 8192


def wave(step: Any, count: int) -> dict[str, float]:
    """Some periods of the wave: power samples, joules, and the seconds of the work itself."""
    busy_s = 0.0
    with monitor.power_trace(interval_ms=5) as trace:
        for _ in range(PERIODS):
            began = time.monotonic()
            step(count)
            torch.cuda.synchronize()
            busy_s += time.monotonic() - began
            time.sleep(max(PERIOD_S - (time.monotonic() - began), 0.0))
    times_ns, watts = trace.total("gpu0")
    kept = watts[times_ns > times_ns[0] + 3 * PERIOD_S * 1e9]  # after the first periods, in which the level is found
    return {
        "lowest_w": float(kept.min()),
        "highest_w": float(kept.max()),
        "swing_w": float(kept.max() - kept.min()),
        "period_j": trace.energy_j / PERIODS,
        "work_s": busy_s / PERIODS,
    }


def measure_waves() -> dict[str, Any]:
    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)

    def step(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a)

    step(10)
    torch.cuda.synchronize()
    began = time.monotonic()
    step(100)
    torch.cuda.synchronize()
    count = round(DUTY * PERIOD_S / ((time.monotonic() - began) / 100))
    rows: dict[str, Any] = {"nothing": wave(step, count)}
    floor_w = (rows["nothing"]["highest_w"] + rows["nothing"]["lowest_w"]) / 2
    ramp = (rows["nothing"]["swing_w"]) / 0.4
    for name, options in {
        "floor": {"power_floor": floor_w},
        "ramp": {"max_ramp": ramp},
        "floor and ramp": {"power_floor": floor_w, "max_ramp": ramp},
    }.items():
        shaped: Any = schedule(**options)(step)
        rows[name] = wave(shaped, count)
        report = shaped.report()
        print(report)
        rows[name]["swing_left"] = rows[name]["swing_w"] / rows["nothing"]["swing_w"]
        rows[name]["joules"] = rows[name]["period_j"] / rows["nothing"]["period_j"] - 1
        rows[name]["ballast_j"] = report.ballast.energy_j / PERIODS
        rows[name]["slower"] = rows[name]["work_s"] / rows["nothing"]["work_s"] - 1
        time.sleep(3.0)  # ballast of the last one ends
    for name, row in rows.items():
        print(f"{name:16}" + "   ".join(f"{key} {value:.4g}" for key, value in row.items()))
    return rows


def measure_training() -> dict[str, Any]:
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, device="cuda", dtype=torch.bfloat16)
    model = torch.nn.TransformerEncoder(layer, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randn(8, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    with fleet.shaper({"power_shaper": {"jitter": ["0ms", "2ms"]}}) as job:

        def step() -> None:
            for part in batch.chunk(4):
                job.microbatch()
                model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()

        found = job.validate(step, steps=30, pairs=4)
    return {"off": found.off, "on": found.on, "lost": found.loss, "stalls": found.new_stalls, "passed": found.passed}


def main() -> None:
    result = {"board": torch.cuda.get_device_name(), "waves": measure_waves(), "training": measure_training()}
    if len(sys.argv) > 1:
        write_result(Path(sys.argv[1]), result)


if __name__ == "__main__":
    main()
