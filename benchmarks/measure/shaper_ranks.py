"""The shaper on eight real processes: their CPU time in 20 ms windows with and without it, and the simulator beside it.

    PYTHONPATH=src nice python benchmarks/measure/shaper_ranks.py [RESULTS.json]

Each process is a rank of a gloo group and a replica of a job: for 75% of a step it computes in bursts of 0.3 ms of
CPU time, one every 10 ms, then it waits. So eight in lockstep use at most a quarter of a core, and a machine that is
busy otherwise does not hide the swing; as root they also have real-time priority. Power is the CPU time itself, summed
over the ranks by their clocks.

Independent: the replicas do not wait for each other (local SGD, or jobs of their own): phases can be shifted.
Synchronous: an all-reduce ends each step: the same policy cannot work, and the validation says so.

The simulator (tessera.fleet.simulate) has the same waves on one node of eight GPUs, and the same policy by the same code
(runtime/shaping.py); twelve seconds, as one block of the processes. What is compared are ratios with and without: watts of a
GPU are not seconds of a core.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as c10d

from gloo_ranks import GlooRanks
from result_file import write_result
from tessera.fleet.lockstep import LockstepJob, shape_wave
from tessera.policy import PhaseShift, PowerShaper
from tessera.runtime.shaper import shaper
from tessera.runtime.shaper_validation import WINDOW_S, ShapedBlock, ShaperValidation

RANKS, DUTY, PERIOD_S, SEED = 8, 0.75, 0.6, 7
BURST_S, EVERY_S = 0.0003, 0.010
STEPS, PAIRS = 16, 4
SHAPER = PowerShaper(jitter_s=(0.0, 0.002), phase_shift=PhaseShift(dp_groups="auto"))
GOAL = "aggregate peak and crest factor down in both, for the independent job"


def compute(seconds: float) -> None:
    """Bursts of CPU time, one every 10 ms, until the time is over."""
    for number in range(round(seconds / EVERY_S)):
        began = time.monotonic()
        until = time.thread_time() + BURST_S
        while time.thread_time() < until:
            pass
        if number or seconds:
            time.sleep(max(EVERY_S - (time.monotonic() - began), 0.0))


def run_rank(rank: int, synchronous: bool) -> ShaperValidation:
    """The trial of one rank; every rank returns the validation of all."""
    with contextlib.suppress(PermissionError):  # as root: what else runs on the machine does not move the bursts
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    job = shaper(SHAPER, seed=SEED, synchronous=synchronous, duty=DUTY)
    gradient = torch.zeros(1)

    def step() -> None:
        job.microbatch()
        compute(DUTY * PERIOD_S)
        time.sleep((1 - DUTY) * PERIOD_S)  # waiting for data and others: low power
        if synchronous:
            c10d.all_reduce(gradient)

    return job.validate(step, steps=STEPS, pairs=PAIRS, show=False)


def measure(synchronous: bool) -> dict[str, Any]:
    with GlooRanks(RANKS) as ranks:
        found: ShaperValidation = ranks.run(functools.partial(run_rank, synchronous=synchronous))[0]
    print(found)
    off, on = found.off, found.on
    return {
        "peak_off_cpus": off["peak"],
        "peak_on_cpus": on["peak"],
        "peak_ratio": on["peak"] / off["peak"],
        "crest_off": off["crest_factor"],
        "crest_on": on["crest_factor"],
        "crest_ratio": on["crest_factor"] / off["crest_factor"],
        "step_off_s": off["step_s"],
        "step_on_s": on["step_s"],
        "throughput_lost": found.loss,
        "spikes_down": found.spikes_down,
        "new_stalls": found.new_stalls,
        "passed": found.passed,
    }


def simulate_same(synchronous: bool) -> dict[str, float]:
    """The simulator's answer, with and without the shaper."""
    from tessera.fleet import simulate
    from tessera.fleet.scenario import parse_scenario

    def run(shaped: bool) -> Any:
        wave = {"period": f"{PERIOD_S}s", "duty": f"{DUTY:.0%}", "high": "650W", "low": "80W"}
        job: dict[str, Any] = {"name": "train", "shape": wave, "scatter": False}
        if synchronous:
            job |= {"gpus": RANKS, "replicas": RANKS}
        else:  # jobs of their own: nothing brings them together again
            job |= {"gpus": 1, "copies": RANKS, "offset": "auto" if shaped else None}
        table = {
            "gpus": {"chip": "h200"},
            "nodes": {"gpus": RANKS, "host": "0W", "supplies": {"count": 6, "needed": 4, "rating": "3300W"}},
            "racks": {"nodes": 1}, "rows": {"count": 1, "racks": 1}, "feed": {}, "duration": "12s", "jobs": [job],
        }  # fmt: skip
        if shaped:
            shift = {"dp_groups": "auto"} if synchronous else {}
            table["policies"] = {"power_shaper": {"jitter": ["0ms", "2ms"], "phase_shift": shift}}
        return simulate(parse_scenario(table), seed=SEED)

    off, on = (as_windows(run(shaped)) for shaped in (False, True))
    return {
        "peak_ratio": on.peak / off.peak,
        "crest_ratio": on.crest_factor / off.crest_factor,
        "peak_off_w": off.peak,
        "peak_on_w": on.peak,
        "crest_off": off.crest_factor,
        "crest_on": on.crest_factor,
    }


def as_windows(simulation: Any) -> ShapedBlock:
    """A simulation in the same windows as the processes, judged by the same code; without its first two seconds."""
    each = round(WINDOW_S / simulation.step_s)
    power_w = np.asarray(simulation.load_w)[round(2.0 / simulation.step_s) :]
    windows = power_w[: len(power_w) // each * each].reshape(-1, each).mean(axis=1)
    return ShapedBlock.measure(False, windows, [PERIOD_S])


def predict_same(synchronous: bool) -> dict[str, float]:
    """What `tessera policy check` computes for the same job: CPU time falls to zero, so low is (almost) nothing."""
    job = LockstepJob(
        period_s=PERIOD_S, duty=DUTY, high_w=RANKS * BURST_S / EVERY_S, low_w=0.001, gpus=RANKS, replicas=RANKS,
        microbatches=1, synchronous=synchronous,
    )  # fmt: skip
    before, after = shape_wave(job, PowerShaper()), shape_wave(job, SHAPER)
    return {
        "peak_ratio": float(after.power_w.max() / before.power_w.max()),
        "crest_ratio": after.measure(1).crest_factor / before.measure(1).crest_factor,
    }


def main() -> None:
    rows = {}
    for name, synchronous in (("independent", False), ("synchronous", True)):
        row: dict[str, Any] = {"measured": measure(synchronous), "policy_check": predict_same(synchronous)}
        row["simulated"] = simulate_same(synchronous)
        for figure in ("peak_ratio", "crest_ratio"):
            row[f"{figure}_off_by"] = row["simulated"][figure] - row["measured"][figure]
        rows[name] = row
        for figure in ("peak_ratio", "crest_ratio"):
            cells = "   ".join(f"{kind} {row[kind][figure]:.3f}" for kind in ("measured", "simulated", "policy_check"))
            print(f"{name:12} {figure:12} {cells}")
    print(f"goal: {GOAL}")
    if len(sys.argv) > 1:
        write_result(Path(sys.argv[1]), {"ranks": RANKS, "period_s": PERIOD_S, "duty": DUTY, "goal": GOAL, **rows})


if __name__ == "__main__":
    main()
