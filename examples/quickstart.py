"""The three ways to measure: a scope, a trace, a benchmark. Runs anywhere; without a sensor it is modelled.

python examples/quickstart.py
"""

from __future__ import annotations

import math

from tessera import EnergyBenchmark, monitor


def work(n: int = 400_000) -> float:
    """Something to measure."""
    return sum(math.sqrt(i) for i in range(n))


def main() -> None:
    with monitor.energy_scope("work") as energy:
        for _ in range(10):
            work()
    print(f"scope: {energy.energy_j:.3g} ± {energy.error_j:.2g} J, {energy.time_s:.3g} s, {energy.source}")

    with monitor.power_trace(interval_ms=5) as pwr:
        for _ in range(10):
            work()
    print(f"trace: peak {pwr.peak_w:.4g} W, a value every {pwr.true_resolution_ms or math.nan:.3g} ms")
    for note in pwr.notes:
        print(f"       {note}")

    bench = EnergyBenchmark(target=0.05, min_s=1.0, budget_s=5.0)

    @bench.measure(work=400_000, unit="root")
    def roots() -> float:
        return work()

    roots()
    bench.print_results()


if __name__ == "__main__":
    main()
