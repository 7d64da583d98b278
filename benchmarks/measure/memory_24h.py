"""Memory of the sampler over a simulated day: 8 GPUs at 50 Hz with HBM power and telemetry.

python benchmarks/measure/memory_24h.py [HOURS]
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from tessera.clock import Clock
from tessera.monitor.sampler import Sampler
from tessera.schema import Capability, Domain, Telemetry
from tessera.sensors.base import Batch

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

GPUS, HZ = 8, 50


class Day:
    """A sensor that makes a second of samples per read, on a simulated clock."""

    name, period_s = "day", 1.0

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000_000
        self._n = 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def domains(self) -> list[Domain]:
        boards = [Domain(name=f"gpu{i}", source="day", resolution_s=1 / HZ, lag_s=0.015) for i in range(GPUS)]
        return [
            *boards,
            *(Domain(name=f"gpu{i}.memory", source="day", resolution_s=1.0, counted=False) for i in range(GPUS)),
        ]

    def capabilities(self) -> list[Capability]:
        return []

    def read(self) -> Batch:
        batch = Batch()
        step = 1_000_000_000 // HZ
        start = self.now_ns - 1_000_000_000
        self._n += 1
        second = [(start + k * step, 100.0 + (self._n + k) % 600) for k in range(HZ)]
        for i in range(GPUS):
            batch.samples[f"gpu{i}"] = second
            batch.samples[f"gpu{i}.memory"] = [(start, 50.0)]
            batch.anchors[f"gpu{i}"] = [(start - 500_000_000, self._n * 400.0)]
            batch.telemetry.append(
                Telemetry(time_ns=start, domain=f"gpu{i}", temperature_c=60.0, clocks_mhz={"sm": 1980.0})
            )
        return batch


def main() -> None:
    hours = float(sys.argv[1]) if len(sys.argv) > 1 else 24.0
    day = Day()
    sampler = Sampler([day], clock=Clock(lambda: day.now_ns, lambda: day.now_ns))
    t0 = time.perf_counter()
    print(f"{'simulated':>10s}  {'arrays':>9s}  {'  resident':>11s}")
    marks = [0.25, 1, 2, 4, 8, 12, 16, 20, 24, 48, 96]
    done = 0
    rows: dict[str, float] = {}
    for hour in [m for m in marks if m <= hours]:
        while done < hour * 3600:
            day.now_ns += 1_000_000_000
            sampler.read_due()
            done += 1
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident = pages * resource.getpagesize() / 2**20
        print(f"{hour:8.2f} h  {sampler.nbytes / 2**20:6.1f} MiB  {resident:7.1f} MiB", flush=True)
        rows[f"{hour:g}"] = resident
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    samples = GPUS * HZ * done
    print(
        f"{samples / 1e6:.0f} M samples in {time.perf_counter() - t0:.0f} s; peak resident memory of the process {peak:.0f} MiB"
    )

    if hours >= 24:
        out = Path(__file__).parents[1] / "results" / "memory_24h.json"
        write_result(out, {"resident_mib": rows, "gpus": GPUS, "hz": HZ})


if __name__ == "__main__":
    main()
