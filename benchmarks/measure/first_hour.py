"""The first hour of a new user, timed: `make run` once installed, and `tessera selftest`.

    python benchmarks/measure/first_hour.py

Runs both in this checkout, on a terminal of 100 columns that is none, and keeps what `make run` printed for the README.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
COLUMNS = 100


def timed(command: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    begin = time.perf_counter()
    env = {**os.environ, "COLUMNS": str(COLUMNS), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return time.perf_counter() - begin, done


def make_run() -> dict[str, Any]:
    seconds, done = timed(["make", "-s", "run"])
    if done.returncode:
        sys.exit(f"make run failed:\n{done.stdout}")
    screen = [line.rstrip() for line in done.stdout.splitlines()]
    return {"seconds": seconds, "lines": len(screen), "columns": max(map(len, screen)), "screen": screen}


def selftest() -> dict[str, Any]:
    seconds, done = timed(["tessera", "selftest", "--json"])
    checks = json.loads(done.stdout[done.stdout.index("{") if "{" in done.stdout else 0 :])["checks"]
    verdicts = [c["verdict"] for c in checks]
    return {
        "seconds": seconds, "checks": len(checks), "failed": verdicts.count("fail"), "passed": verdicts.count("pass"),
    }  # fmt: skip


def main() -> None:
    load = os.getloadavg()[0]
    found = {"load_before": round(load, 2), "cpus": os.cpu_count(), "make_run": make_run(), "selftest": selftest()}
    write_result(BENCHMARKS / "results" / "first_hour.json", found)
    print("\n".join(found["make_run"]["screen"]))
    print({k: v if k != "make_run" else {x: y for x, y in v.items() if x != "screen"} for k, v in found.items()})


if __name__ == "__main__":
    main()
