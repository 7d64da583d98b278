"""Seconds that a sweep of a served model takes: Llama-3.1-70B, 20 batches on three chips (goal: 10 s).

    python benchmarks/measure/serving_sweep.py [--write benchmarks/results/serving_sweep.json]

Processor seconds of a new process, imports included, beside the seconds of the wall clock.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

GOAL_S = 10.0
BATCHES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320]
CHIPS = ["h100", "h200", "b200"]
PROGRAM = f"""
import time
from tessera.serving.estimate import sweep_serving
rows, _ = sweep_serving("llama-3.1-70b", on={CHIPS}, dtype=["bf16"], tp=[4], batch={BATCHES}, prompt=4096, generate=512)
print(len(rows), time.process_time())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    wall_s = time.monotonic() - begin
    rows, cpu_s = done.stdout.split()
    result = {"model": "llama-3.1-70b", "rows": int(rows), "cpu_s": float(cpu_s), "wall_s": wall_s, "goal_s": GOAL_S}
    print(f"{rows} predictions: {float(cpu_s):.2f} s of processor, {wall_s:.2f} s in all (goal {GOAL_S:.0f} s)")
    if given.write:
        write_result(given.write, result)


if __name__ == "__main__":
    main()
