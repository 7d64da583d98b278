"""`import tessera` and `tessera --help` against bare Python, as users pay for them."""

from __future__ import annotations

import statistics as st
import subprocess
import sys
import time

RUNS = 15


def median_ms(*args: str) -> float:
    """Median wall time of a Python process with these arguments."""
    times = []
    for _ in range(RUNS):
        t0 = time.perf_counter()
        subprocess.run([sys.executable, *args], check=True, capture_output=True)
        times.append((time.perf_counter() - t0) * 1e3)
    return st.median(times)


def main() -> None:
    bare = median_ms("-c", "pass")
    print(f"bare Python        {bare:7.1f} ms")
    print(f"import tessera     {median_ms('-c', 'import tessera') - bare:+7.1f} ms   (goal <= 30)")
    print(f"tessera --help     {median_ms('-m', 'tessera', '--help') - bare:+7.1f} ms   (goal <= 150 in all)")
    for peer in ("click", "rich.console", "pynvml", "msgspec", "numpy"):
        print(f"  import {peer:12s}{median_ms('-c', f'import {peer}') - bare:+7.1f} ms")


if __name__ == "__main__":
    main()
