"""The measuring code on recorded H200 data, without a GPU: joules against the counter, by load and window.

    python benchmarks/fit/replay_accuracy.py

Plays the project's recording (benchmarks/data/) through the same integral as a live sensor, with the counter read about
once a second; the truth are all its ticks, every 100 ms. The response was fitted
on this recording's mixture, so this is a check of the code, not of the fit: benchmarks/device/accuracy.py is that.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fit_response import RECORDING, load, tick_times
from tessera.joules import DomainSamples
from tessera.sensors._nvml_counter import COUNTER_LEAD_NS
from tessera.sensors._nvml_power import RING_LAG_S, RingReader
from tessera.trace import PowerTrace


def main() -> None:
    data = load(RECORDING)
    domain = RingReader(None, None).domain("NVIDIA H200", "")
    ring = data["ring"]
    ticks = np.round(tick_times(data["ticks"])[0] * 1e6).astype(np.int64) - (round(RING_LAG_S * 1e9) - COUNTER_LEAD_NS)
    joules = data["ticks"][:, 2]
    read = np.cumsum(np.resize([10, 11, 8, 12, 9], len(ticks)))  # as EnergyCounter does
    read = read[read < len(ticks)]
    column = DomainSamples.of(domain, np.round(ring[:, 0] * 1e6).astype(np.int64), ring[:, 1])
    column = dataclasses.replace(column, ticks_ns=ticks[read], ticks_j=joules[read])
    trace = PowerTrace({"gpu0": column}, start_ns=int(ring[0, 0] * 1e6), end_ns=int(ring[-1, 0] * 1e6))
    print(
        f"{'load':22s} {'window':>8s} {'n':>4s} {'median %':>9s} {'p90 %':>7s} {'max %':>7s} {'in 90% interval':>16s}"
    )
    for name, marks in data["phases"].items():
        inside = np.flatnonzero((ticks > (marks[0][1] + 400) * 1e6) & (ticks < marks[-1][2] * 1e6))
        for count in (1, 2, 10, max(len(inside) - 2, 1)):
            errors, held = [], []
            for i in inside:
                if (
                    i + count >= len(ticks)
                    or i + count > inside[-1]
                    or abs(ticks[i + count] - ticks[i] - count * 1e8) > 1e6
                ):
                    continue
                e = trace.energy("gpu0", int(ticks[i]), int(ticks[i + count]))
                truth = joules[i + count] - joules[i]
                errors.append(abs(e.energy_j / truth - 1) * 100)
                held.append(abs(e.energy_j - truth) <= e.error_j)
            if errors:
                p90 = np.percentile(errors, 90)
                print(
                    f"{name:22s} {count * 0.1:6.1f} s {len(errors):4d} {np.median(errors):9.2f} {p90:7.2f} {max(errors):7.2f} {np.mean(held):16.0%}"
                )


if __name__ == "__main__":
    main()
