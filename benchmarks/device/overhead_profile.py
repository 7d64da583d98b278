"""Slowdown of GPT-2-small training by sampling mode, torch.profiler and our timeline mode, on the GPU at hand.

    PYTHONPATH=src:.carry/site python benchmarks/device/overhead_profile.py RESULTS.json [--quick]

Blocks of steps go plain, torch, sampling, timeline, timeline, sampling, torch, plain, and again: drift of clocks and
temperature falls on all alike, and each unit of eight gives one slowdown of each. "torch" is torch.profiler with
record_shapes on CPU and CUDA, "timeline" our session with the same options and power beside it. Step times are of the
steps alone; what starting and stopping takes is given apart. "plain" and "torch" have no thread of ours at all; the
sampler of the others has run for `SETTLED_S`, as in every session but the first half second of a program's first one,
in which it looks for the ticks of the energy counter (a host that cannot keep up is slowed by some 5% then). Each block runs
`LEAD` steps before those that count: while a trace is read the device idles, and its first step then takes 7 to 10 ms
longer, whoever traces. Python's collector is frozen at the start: one pass over torch and transformers takes 0.7 s,
and which block it falls into is chance (both seen with overhead_why.py).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics as st
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from tessera import monitor, profile
from tessera.monitor.steady import t90

LEAD = 6
SETTLED_S = 2.5
ORDER = ("plain", "torch", "sampling", "timeline")
OURS = ("sampling", "timeline")
Step = Callable[[], None]
Unit = dict[str, list[float]]


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
    with sess.run() as run:
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


def over(units: list[Unit], how: str, base: str) -> tuple[float, float]:
    """Percent over another way, unit by unit, with the half-width of the 90% interval of the mean."""
    each = [100 * (st.mean(u[how]) / st.mean(u[base]) - 1) for u in units]
    error = t90(len(each) - 1) * st.stdev(each) / len(each) ** 0.5 if len(each) > 1 else float("nan")
    return st.mean(each), error


def slowdown(units: list[Unit], how: str) -> dict[str, float]:
    """Milliseconds, and percent over plain; of the timeline also over torch's profiler."""
    ms = [m for u in units for m in u[how]]
    found = dict(zip(("slowdown_pct", "slowdown_error_pct"), over(units, how, "plain"), strict=True))
    if how == "timeline":
        found |= zip(("over_torch_pct", "over_torch_error_pct"), over(units, how, "torch"), strict=True)
    return {"step_ms": st.median(ms), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true", help="about 100 s")
    args = parser.parse_args()
    units_count, long, short = (3, 40, 12) if args.quick else (6, 100, 20)
    started = time.perf_counter()
    from overhead import make_step  # transformers is loaded only to run

    step = make_step()
    for _ in range(15):
        step()
    units: list[Unit] = []
    ends: dict[str, list[dict[str, float]]] = {how: [] for how in ORDER}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for how in ORDER:  # each once: libraries are loaded, files made
            block(how, step, 3, folder)
        gc.collect()
        gc.freeze()
        for _ in range(units_count):
            unit: Unit = {how: [] for how in ORDER}
            for before, how in itertools.pairwise(("", *ORDER, *reversed(ORDER))):
                if how in OURS and before not in OURS:
                    settled(step)
                elif how not in OURS:
                    monitor.use(None)
                found = block(how, step, long if how in ("plain", "sampling") else short, folder)
                unit[how].append(found["ms"])
                ends[how].append(found)
            units.append(unit)
            print("  " + "  ".join(f"{h} {st.mean(unit[h]):.2f} ms" for h in ORDER), flush=True)
            write(args.out, units, ends, [long, short], time.perf_counter() - started)


def write(
    out: Path, units: list[Unit], ends: dict[str, list[dict[str, float]]], steps: list[int], seconds: float
) -> None:
    """What there is so far."""
    rows: dict[str, object] = {
        "date": str(date.today()), "gpu": torch.cuda.get_device_name(), "torch_version": torch.__version__,
        "model": "GPT-2 small, 8x1024, bf16, AdamW", "units": len(units), "steps": steps,
        "seconds": seconds,
    }  # fmt: skip
    for how in ORDER:
        rows[how] = slowdown(units, how) | {
            key: st.median(e[key] for e in ends[how]) for key in ends[how][0] if key != "ms"
        }
        print(f"  {how:9s} {json.dumps(rows[how])}")
    out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
