"""What entering and leaving a scope costs the user's thread, without CUDA (benchmarks/device/ has it with)."""

from __future__ import annotations

import statistics as st
import time

from tessera import monitor


def main() -> None:
    with monitor.energy_scope("warm"):
        pass
    times = []
    for i in range(20_000):
        t0 = time.perf_counter_ns()
        with monitor.energy_scope("cost"):
            pass
        times.append((time.perf_counter_ns() - t0) / 1e3)
        if i % 500 == 0:
            time.sleep(0.01)
    times.sort()
    print(
        f"scope enter+exit on the user's thread: median {st.median(times):.2f} us, p99 {times[19_800]:.2f} us (goal 20 us)"
    )


if __name__ == "__main__":
    main()
