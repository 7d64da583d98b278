"""Slowdown of GPT-2-small training by sampling mode, torch.profiler and our timeline mode, on the GPU at hand.

    PYTHONPATH=src:.carry/site python benchmarks/device/overhead_profile.py RESULTS.json [--budget-s 180]

Sampling mode beside nothing, our timeline beside torch.profiler with the same options (record_shapes, CPU and CUDA):
units of four blocks, each way twice, the order turned round from unit to unit, so that drift of clocks and temperature
falls on both alike. Each unit gives one ratio; their median stands with a 90% interval by order statistics, because a
host that a trace makes the bottleneck is noisy (single blocks of torch.profiler lay between 51 and 70 ms).

Step times are of the steps alone; what starting and stopping takes is given apart. "plain" and "torch" have no thread of
ours at all; the sampler of the others has run for `SETTLED_S`, as in every session but the first half second of a
program's first one, in which it looks for the ticks of the energy counter. Each block runs `LEAD` steps before those
that count: while a trace is read the device idles, and its first step then takes 7 to 10 ms longer, whoever traces.
Single steps of 0.65 to 0.73 s were seen too (both with overhead_why.py), in sessions and without a trace: most likely
Python's collector, at work on torch's heap or freeing the events of profilers that had ended. So it is frozen at the
start and runs between blocks.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics as st
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from tessera import monitor, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

LEAD = 6
SETTLED_S = 2.5
OURS = ("sampling", "timeline")
PAIRS = {"sampling": ("plain", 40), "timeline": ("torch", 12)}  # beside what, and the steps of a block
Step = Callable[[], None]


def timed(step: Step, steps: int) -> float:
    """Milliseconds per step."""
    for _ in range(LEAD):
        step()
    torch.cuda.synchronize()
    t0 = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - t0) / steps * 1e3


def block(how: str, step: Step, steps: int, folder: Path) -> dict[str, float]:
    """Milliseconds per step, and the seconds of starting and of ending (for ours: exported, read and written)."""
    t0 = time.perf_counter()
    if how == "plain":
        return {"ms": timed(step, steps), "start_s": 0.0, "end_s": 0.0}
    if how == "torch":
        prof = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True)
        prof.start()
        t1 = time.perf_counter()
        ms = timed(step, steps)
        t2 = time.perf_counter()
        prof.stop()
        return {"ms": ms, "start_s": t1 - t0, "end_s": time.perf_counter() - t2}
    mode = "sampling" if how == "sampling" else "timeline"
    sess = profile.session(mode=mode, record_shapes=True, path=folder / f"{time.time_ns()}.tessera")
    sess.start()
    t1 = time.perf_counter()
    ms = timed(step, steps)
    t2 = time.perf_counter()
    sess.stop()
    t3 = time.perf_counter()
    with profile.RunFile(sess.path) as run:
        found = {
            "ms": ms,
            "start_s": t1 - t0,
            "end_s": t3 - t2,
            "rows": float(run.rows),
            "joules": run.power().energy_j,
        }
    sess.path.unlink()
    return found


def settled(step: Step) -> None:
    """Our sampler, and steps until it has settled."""
    monitor.default()
    end = time.perf_counter() + SETTLED_S
    while time.perf_counter() < end:
        step()
        torch.cuda.synchronize()


def unit_of(how: str, step: Step, turned: bool, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Four blocks: one way twice, then the other."""
    beside, steps = PAIRS[how]
    found: dict[str, list[dict[str, float]]] = {}
    for way in (how, beside) if turned else (beside, how):
        if way in OURS:
            settled(step)
        found[way] = []
        for _ in range(2):
            found[way].append(block(way, step, steps, folder))
            gc.collect()  # torch's profiler is in a cycle: its events would be freed, 3 us each, in a later block
        monitor.use(None)
    return found


def middle(ratios: list[float]) -> dict[str, float]:
    """The median in percent over, and the order statistics around it that hold it nine times of ten."""
    n, sorted_pct = len(ratios), sorted(100 * (r - 1) for r in ratios)
    tail, k = 0.0, 0
    while k < n // 2 and tail + math.comb(n, k) / 2**n <= 0.05:
        tail, k = tail + math.comb(n, k) / 2**n, k + 1
    if k == 0:  # too few: the smallest and the largest
        tail, k = 1 / 2**n, 1
    low, high = k - 1, n - k
    return {
        "over_pct": st.median(sorted_pct),
        "low_pct": sorted_pct[low],
        "high_pct": sorted_pct[high],
        "covers": 1 - 2 * tail,
    }


def write_rows(out: Path, units: dict[str, list[dict[str, list[dict[str, float]]]]], seconds: float) -> None:
    """What there is so far."""
    rows: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(), "torch_version": torch.__version__,
        "model": "GPT-2 small, 8x1024, bf16, AdamW", "seconds": seconds,
    }  # fmt: skip
    for how, found in units.items():
        if not found:
            continue
        beside = PAIRS[how][0]
        means = {way: [st.mean(b["ms"] for b in u[way]) for u in found] for way in (how, beside)}
        rows[how] = {
            "beside": beside, "units": len(found), "steps": 2 * PAIRS[how][1],
            **middle([a / b for a, b in zip(means[how], means[beside], strict=True)]),
            "step_ms": st.median(means[how]), "beside_ms": st.median(means[beside]),
            "each_ms": means[how], "each_beside_ms": means[beside],
            **{key: st.median(b[key] for u in found for b in u[how]) for key in found[0][how][0] if key != "ms"},
            "beside_end_s": st.median(b["end_s"] for u in found for b in u[beside]),
        }  # fmt: skip
    write_result(out, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=180.0)
    parser.add_argument("--quick", action="store_true", help="a unit or two of each: for faults, not for figures")
    args = parser.parse_args()
    started = time.perf_counter()
    budget_s = 60.0 if args.quick else args.budget_s
    from overhead import make_step  # transformers is loaded only to run

    step = make_step()
    for _ in range(15):
        step()
    units: dict[str, list[dict[str, list[dict[str, float]]]]] = {how: [] for how in PAIRS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for how in ("torch", *OURS):  # each once: libraries are loaded, files made
            block(how, step, 3, folder)
        gc.collect()
        gc.freeze()
        turn = 0
        while time.perf_counter() < started + budget_s - 20:
            how = "sampling" if turn % 3 == 2 else "timeline"  # the noisier one twice as often
            units[how].append(found := unit_of(how, step, len(units[how]) % 2 == 1, folder))
            print(
                f"  {how} " + "  ".join(f"{w} {st.mean(b['ms'] for b in bs):.2f} ms" for w, bs in found.items()),
                flush=True,
            )
            write_rows(args.out, units, time.perf_counter() - started)
            turn += 1
    print(args.out.read_text())


if __name__ == "__main__":
    main()
