"""Record what NVML really says on the GPU at hand, beside marks of what really ran.

    python benchmarks/device/record_sensor.py OUT.json.gz

The recording is raw: every ring sample, every energy-counter poll with the time before and after the call, and
the host times at which loads began and ended. `benchmarks/fit/fit_response.py` fits the sensor's response from it.
No clock, limit or mode is changed.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pynvml
import torch

from loads import Loads

POLL_S = 0.004
TOTAL_ENERGY_FIELD = pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION


def now_us() -> int:
    return time.time_ns() // 1000


class Recorder:
    """Two threads: the counter polled densely (to see its ticks), the ring drained twice a second."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.ring: dict[int, int] = {}
        self.counter: list[tuple[int, int, int, int]] = []
        self.poll = True
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._counter_loop, self._ring_loop)]

    def __enter__(self) -> Recorder:
        for t in self._threads:
            t.start()
        return self

    def __exit__(self, *exc: object) -> None:
        time.sleep(1.0)
        self._stop.set()
        for t in self._threads:
            t.join()

    def _counter_loop(self) -> None:
        while not self._stop.wait(POLL_S):
            if not self.poll:
                continue
            t0 = now_us()
            field = pynvml.nvmlDeviceGetFieldValues(self.handle, [TOTAL_ENERGY_FIELD])[0]
            t1 = now_us()
            self.counter.append((t0, t1, int(field.value.ullVal), int(field.timestamp)))

    def _ring_loop(self) -> None:
        last = 0
        while not self._stop.is_set():
            try:
                _, samples = pynvml.nvmlDeviceGetSamples(self.handle, pynvml.NVML_TOTAL_POWER_SAMPLES, last)
            except pynvml.NVMLError_NotFound:
                samples = []
            for s in samples:
                if s.timeStamp:
                    self.ring[int(s.timeStamp)] = int(s.sampleValue.uiVal)
                    last = max(last, int(s.timeStamp))
            self._stop.wait(0.4)


def timed(loads: Loads, kind: str, seconds: float) -> tuple[int, int, int]:
    """Start and end (after the device is done) in epoch microseconds, and how many kernels ran."""
    start = now_us()
    count = loads.run(kind, seconds)
    return start, now_us(), count


def call_costs(handle: Any) -> dict[str, dict[str, float]]:
    support = pynvml.nvmlGpmQueryDeviceSupport(handle)
    gpm = pynvml.nvmlGpmSampleAlloc() if support.isSupportedDevice else None
    calls: dict[str, Callable[[], object]] = {
        "total_energy": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        "field_83": lambda: pynvml.nvmlDeviceGetFieldValues(handle, [TOTAL_ENERGY_FIELD]),
        "field_186": lambda: pynvml.nvmlDeviceGetFieldValues(handle, [186]),
        "power_usage": lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
        "ring_all": lambda: pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_TOTAL_POWER_SAMPLES, 0),
        "temperature": lambda: pynvml.nvmlDeviceGetTemperature(handle, 0),
        "sm_clock": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "throttle": lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        "utilization": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle),
        "hbm_power": lambda: pynvml.nvmlDeviceGetFieldValues(handle, [(185, 2)]),
    }
    if gpm is not None:
        calls["gpm_sample"] = lambda: pynvml.nvmlGpmSampleGet(handle, gpm)
    out = {}
    for name, call in calls.items():
        times = []
        try:
            for _ in range(60):
                t0 = time.perf_counter_ns()
                call()
                times.append((time.perf_counter_ns() - t0) / 1e3)
                time.sleep(0.002)
        except pynvml.NVMLError as exc:
            out[name] = {"error": str(exc)}  # type: ignore[dict-item]
            continue
        times.sort()
        out[name] = {"median_us": statistics.median(times), "p90_us": times[int(0.9 * len(times))], "max_us": times[-1]}
    return out


def sample_types(handle: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in range(8):
        try:
            typ, s = pynvml.nvmlDeviceGetSamples(handle, kind, 0)
            stamps = sorted(int(x.timeStamp) for x in s)
            gaps = [b - a for a, b in itertools.pairwise(stamps)]
            found[str(kind)] = {
                "value_type": typ,
                "n": len(s),
                "median_gap_us": statistics.median(gaps) if gaps else None,
                "last_values": [int(x.sampleValue.uiVal) for x in s[-4:]],
            }
        except pynvml.NVMLError as exc:
            found[str(kind)] = str(exc)
    return found


def event_clock() -> list[tuple[int, float]]:
    """Host monotonic ns at which an event was seen complete, and its elapsed ms since the first."""
    first = torch.cuda.Event(enable_timing=True)
    first.record()
    first.synchronize()
    base = time.monotonic_ns()
    rows = []
    for _ in range(200):
        ev = torch.cuda.Event(enable_timing=True)
        t0 = time.monotonic_ns()
        ev.record()
        ev.synchronize()
        t1 = time.monotonic_ns()
        rows.append(((t0 + t1) // 2 - base, t1 - t0, first.elapsed_time(ev)))
        time.sleep(0.01)
    return rows  # type: ignore[return-value]


def record(handle: Any, loads: Loads, data: dict[str, Any]) -> Recorder:
    """Run the loads with both threads recording; the marks of what ran go to data["phases"]."""
    rng = random.Random(7)

    def phase(name: str, marks: list[Any]) -> None:
        data["phases"].append({"name": name, "marks": marks})
        print(name, len(marks), flush=True)

    with Recorder(handle) as rec:
        t = now_us()
        time.sleep(3.0)
        phase("idle", [("idle", t, now_us(), 0)])
        for kind, secs in (("gemm", 12.0), ("copy", 6.0), ("fp32", 6.0), ("small", 5.0)):
            phase(f"steady-{kind}", [(kind, *timed(loads, kind, secs))])
            time.sleep(1.5)
        rec.poll = False
        phase("steady-gemm-nopoll", [("gemm", *timed(loads, "gemm", 4.0))])
        rec.poll = True
        phase("steady-gemm-poll", [("gemm", *timed(loads, "gemm", 4.0))])
        time.sleep(1.0)
        for period in (0.05, 0.1, 0.2, 0.4):
            marks = []
            end = time.perf_counter() + 6.0
            while time.perf_counter() < end:
                marks.append(("gemm", *timed(loads, "gemm", period / 2)))
                time.sleep(period / 2)
            phase(f"wave-{period}", marks)
        marks = []
        end = time.perf_counter() + 8.0
        while time.perf_counter() < end:
            kind = rng.choice(["gemm", "copy", "fp32", "small", "pause"])
            secs = rng.uniform(0.002, 0.06)
            if kind == "pause":
                time.sleep(secs)
            else:
                marks.append((kind, *timed(loads, kind, secs)))
        phase("mixture", marks)
        stop = threading.Event()
        t = threading.Thread(target=lambda: [timed(loads, "gemm", 0.2) for _ in iter(lambda: not stop.is_set(), False)])
        t.start()
        time.sleep(0.5)
        data["costs_busy"] = call_costs(handle)
        stop.set()
        t.join()
    return rec


def main(path: str) -> None:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    data: dict[str, Any] = {
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "name": pynvml.nvmlDeviceGetName(handle),
        "phases": [],
    }
    data["limit_mw"] = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
    loads = Loads()
    timed(loads, "gemm", 0.3)
    data["costs_idle"] = call_costs(handle)
    data["sample_types"] = sample_types(handle)
    data["event_clock"] = event_clock()

    rec = record(handle, loads, data)
    data["ring"] = sorted(rec.ring.items())
    data["counter"] = rec.counter
    with gzip.open(path, "wt") as f:
        json.dump(data, f)
    for key in ("costs_idle", "costs_busy"):
        print(key)
        for name, row in data[key].items():
            print(f"  {name:14s}", row)
    print(json.dumps(data["sample_types"]))
    for p in data["phases"]:
        if p["name"].startswith("steady"):
            _, a, b, n = p["marks"][0]
            print(f"{p['name']:22s} {n} kernels, {(b - a) / 1e3 / n:.5f} ms each")


if __name__ == "__main__":
    main(sys.argv[1])
