"""Slowdown of GPT-2-small training by a scope per step and a trace, on the GPU at hand.

    PYTHONPATH=src:.carry/site python benchmarks/device/overhead.py RESULTS.json

Blocks of steps with and without Tessera alternate, so that the drift of clocks and temperature falls on both;
"without" has no sampler thread at all. Step times are the device's (CUDA events at both ends of a block).
"""

from __future__ import annotations

import statistics as st
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tessera import monitor
from tessera.sensors.discover import discover

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

STEPS, PAIRS = 50, 10
Step = Callable[[], None]


def make_step() -> Step:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 50257, (8, 1024), device="cuda")

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def block(step: Step, scoped: bool) -> float:
    """Milliseconds per step."""
    torch.cuda.synchronize()
    t0 = time.perf_counter()
    for _ in range(STEPS):
        if scoped:
            with monitor.energy_scope("step"):
                step()
        else:
            step()
    torch.cuda.synchronize()
    return (time.perf_counter() - t0) / STEPS * 1e3


def measured_block(step: Step) -> tuple[float, float, float]:
    """Milliseconds and joules per step with a scope per step and a trace; CPU seconds of the sampler."""
    found = discover()
    own = monitor.Monitor(found.sensors, found.missing).start()
    monitor.use(own)
    with monitor.power_trace(interval_ms=5):
        ms = block(step, scoped=True)
    own.settle_all()
    region = own.regions()[0]
    monitor.use(None)
    return ms, region.energy.joules / region.calls, own.sampler.cpu_time_s


def main(out: Path) -> None:
    step = make_step()
    for _ in range(30):
        step()
    off_ms, on_ms, joules, cpu_s = [], [], [], []
    for i in range(PAIRS):
        if i % 2 == 0:
            off_ms.append(block(step, scoped=False))
        ms, joules_per_step, sampler_cpu_s = measured_block(step)
        on_ms.append(ms)
        joules.append(joules_per_step)
        cpu_s.append(sampler_cpu_s)
        if i % 2:
            off_ms.append(block(step, scoped=False))
    ratios = [on / off - 1 for on, off in zip(on_ms, off_ms, strict=True)]
    slowdown = st.mean(ratios) * 100
    half = 1.833 * st.stdev(ratios) / len(ratios) ** 0.5 * 100  # Student's t, 9 degrees of freedom, 90%
    rows = {
        "gpu": torch.cuda.get_device_name(),
        "step_ms_without": st.median(off_ms),
        "step_ms_with": st.median(on_ms),
        "slowdown_pct": slowdown,
        "slowdown_error_pct": half,
        "slowdown_of_medians_pct": 100 * (st.median(on_ms) / st.median(off_ms) - 1),
        "joules_per_step": st.median(joules),
        "sampler_cpu_s_per_block": st.mean(cpu_s),
    }
    for name, value in rows.items():
        print(f"  {name:28s} {value}")
    write_result(out, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
