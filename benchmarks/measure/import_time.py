"""`import tessera` and `tessera --help` against bare Python, as users pay for them."""

from __future__ import annotations

import statistics as st
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

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
    imported = median_ms("-c", "import tessera") - bare
    help_ms = median_ms("-m", "tessera", "--help")
    print(f"bare Python        {bare:7.1f} ms")
    print(f"import tessera     {imported:+7.1f} ms   (goal <= 30)")
    print(f"tessera --help     {help_ms:7.1f} ms   (goal <= 150)")
    rows = {"bare_ms": bare, "import_tessera_ms": imported, "help_ms": help_ms}
    write_result(Path(__file__).parents[1] / "results" / "import_time.json", rows)
    for peer in ("click", "rich.console", "pynvml", "msgspec", "numpy"):
        print(f"  import {peer:12s}{median_ms('-c', f'import {peer}') - bare:+7.1f} ms")


if __name__ == "__main__":
    main()
