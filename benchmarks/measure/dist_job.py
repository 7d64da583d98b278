"""A GPT planned for four ranks, divided, trained over Gloo, profiled, merged and reported: the seconds of the whole.

python benchmarks/measure/dist_job.py        (tests/test_planned_job.py does the same in CI)
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

OUT = Path(__file__).parents[1] / "results" / "dist_job.json"
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_parallel.py"
RANKS, STEPS = 4, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    command = [sys.executable, "-m", "tessera", "run", "--nproc", str(RANKS), "--html", "job.html", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        done = subprocess.run(
            [*command, str(EXAMPLE), "--steps", str(STEPS)], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        wall_s = time.perf_counter() - begun
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        page_bytes = (Path(folder) / "job.html").stat().st_size
    job = json.loads(done.stdout)["job"]
    result = {
        "ranks": len(job["ranks"]), "steps": STEPS, "collectives": sum(row["count"] for row in job["collectives"]),
        "wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime, "load_average": os.getloadavg()[0],
        "page_bytes": page_bytes,
    }  # fmt: skip
    print(f"{result['ranks']} ranks, {STEPS} steps, {result['collectives']} collectives matched: {wall_s:.0f} s by the "
          f"clock, {result['cpu_s']:.0f} s of processors, load average {result['load_average']:.1f}")  # fmt: skip
    write_result(args.out, result)


if __name__ == "__main__":
    main()
