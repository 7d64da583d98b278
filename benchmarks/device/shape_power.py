"""Floor, ramp and shaper on a real GPU: the swing of a compute/communicate wave, the joules of ballast, a real training.

    PYTHONPATH=src:.carry/site python benchmarks/device/shape_power.py OUT.json [--budget-s 100] [--no-training]

1. A wave: GEMMs for 0.75 s, then nothing for 0.25 s, as a job that waits for an all-reduce. Without anything, then with a
   floor for 45% of the swing, then with a ramp, then with both. Printed: lowest and highest 20 ms sample, the swing that
   is left, joules of a period, the part of ballast, and how long the same GEMMs take. Stored: the samples and the SM clock
   of two periods.
2. The shaper (jitter of up to 1 ms at microbatches of some 20 ms) on GPT-like training, on and off in turn: rule 9.4.

Goal: the swing is halved at the cost printed; training loses at most 5%. What does not fit into the budget is left out.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result
from tessera import fleet, monitor, schedule

PERIOD_S, DUTY = 1.0, 0.75
RAMP_S = 1.0  # for the whole swing
SETTLE, PERIODS = 8, 5
WAVES = ("floor", "ramp", "floor and ramp")
CUDA = torch.cuda.is_available()
DEVICE, DOMAIN, SIZE = ("cuda", "gpu0", 8192) if CUDA else ("cpu", None, 256)  # a CPU is for trying the script


def wait_for_work() -> None:
    """Until what the current stream has is done: ballast in its own stream need not be."""
    if CUDA:
        torch.cuda.current_stream().synchronize()


class ClockWatch:
    """Reads the SM clock every 5 ms while it is entered."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []  # (ns of the clock of samples, MHz)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ClockWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not self._stop.wait(0.005):
                self.seen.append((time.time_ns(), pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)))
        except Exception as exc:  # noqa: BLE001 - without the clock the watts still tell
            print(f"no SM clock: {exc}", flush=True)


def wave(step: Any, count: int) -> dict[str, Any]:
    """Some periods of the wave: power samples, joules, and the seconds of the work itself."""
    busy_s, begun_ns, starts = [], 0, []
    with monitor.power_trace(interval_ms=5) as trace, ClockWatch() as clock:
        for number in range(SETTLE + PERIODS):
            began_ns = time.time_ns()
            starts.append(began_ns)
            begun_ns = began_ns if number == SETTLE else begun_ns
            step(count)
            wait_for_work()
            busy_s.append((time.time_ns() - began_ns) * 1e-9)
            time.sleep(max(PERIOD_S - busy_s[-1], 0.0))
    times_ns, watts = trace.total(DOMAIN)
    end_ns = begun_ns + round(PERIODS * PERIOD_S * 1e9)
    kept = watts[(times_ns >= begun_ns) & (times_ns < end_ns)]  # after the periods in which the levels are found
    last = [(t, float(w)) for t, w in zip(times_ns.tolist(), watts, strict=True) if t >= starts[-2]]
    clocks = [(t, mhz) for t, mhz in clock.seen[::4] if t >= starts[-2]]
    return {
        "lowest_w": float(kept.min()),
        "highest_w": float(kept.max()),
        "swing_w": float(kept.max() - kept.min()),
        "period_j": float(kept.mean()) * PERIOD_S,
        "work_s": sum(busy_s[SETTLE:]) / PERIODS,
        # two periods: milliseconds since the first of them began (the sensor's own lag is in it), watts, MHz
        "trace_ms": [round((t - starts[-2]) * 1e-6) for t, _ in last],
        "trace_w": [round(w) for _, w in last],
        "clock_ms": [round((t - starts[-2]) * 1e-6) for t, _ in clocks],
        "clock_mhz": [mhz for _, mhz in clocks],
    }


def measure_waves(until_s: float, only: list[str]) -> dict[str, Any]:
    a = torch.randn(SIZE, SIZE, device=DEVICE, dtype=torch.bfloat16)

    def step(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a)

    step(10)
    wait_for_work()
    began = time.monotonic()
    step(100)
    wait_for_work()
    count = round(DUTY * PERIOD_S / ((time.monotonic() - began) / 100))
    rows: dict[str, Any] = {"nothing": wave(step, count)}
    show("nothing", rows["nothing"])
    # half of the swing may be left: a tenth of that is for what a floor cannot hold exactly
    floor_w = rows["nothing"]["highest_w"] - 0.45 * rows["nothing"]["swing_w"]
    ramp = rows["nothing"]["swing_w"] / RAMP_S
    for name, options in {
        "floor": {"power_floor": floor_w},
        "ramp": {"max_ramp": ramp},
        "floor and ramp": {"power_floor": floor_w, "max_ramp": ramp},
    }.items():
        if name not in only or time.monotonic() > until_s:
            print(f"{name}: left out", flush=True)
            continue
        shaped: Any = schedule(**options)(step)
        row = rows[name] = wave(shaped, count)
        report = shaped.report()
        print(report, flush=True)
        row["swing_left"] = row["swing_w"] / rows["nothing"]["swing_w"]
        row["joules"] = row["period_j"] / rows["nothing"]["period_j"] - 1
        row["floor_w"] = options.get("power_floor")
        row["ballast_share"] = report.ballast.energy_j / report.ballast.total_j
        row["slower"] = row["work_s"] / rows["nothing"]["work_s"] - 1
        show(name, row)
        time.sleep(2.5)  # ballast of the last one ends
    return rows


def show(name: str, row: dict[str, Any]) -> None:
    figures = {key: value for key, value in row.items() if isinstance(value, float)}
    print(f"{name:16}" + "   ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)


def measure_training() -> dict[str, Any]:
    width, layers, rows, tokens = (1024, 12, 32, 1024) if CUDA else (64, 1, 4, 16)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, device=DEVICE, dtype=torch.bfloat16)
    model = torch.nn.TransformerEncoder(layer, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(rows, tokens, width, device=DEVICE, dtype=torch.bfloat16)
    with fleet.shaper({"power_shaper": {"jitter": ["0ms", "1ms"]}}) as job:

        def step() -> None:
            for part in batch.chunk(4):
                job.microbatch()
                model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            wait_for_work()

        found = job.validate(step, steps=20, pairs=3)
    return {"off": found.off, "on": found.on, "lost": found.loss, "stalls": found.new_stalls, "passed": found.passed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=100.0)
    parser.add_argument("--no-training", action="store_true", help="only the waves: 60 s")
    parser.add_argument("--only", nargs="*", default=list(WAVES), choices=WAVES, help="of the waves")
    given = parser.parse_args()
    faulthandler.dump_traceback_later(given.budget_s, exit=True)  # where it was, should it hang
    began_s = time.monotonic()
    board = torch.cuda.get_device_name() if CUDA else "cpu"
    result: dict[str, Any] = {"board": board}
    if not given.no_training:
        result["training"] = measure_training()
        print("training", result["training"], flush=True)
        write_result(given.out, result)
    result["waves"] = measure_waves(began_s + given.budget_s - 25.0, given.only)
    write_result(given.out, result)


if __name__ == "__main__":
    main()
