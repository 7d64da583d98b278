"""Run the whole suite several times beside busy loops, and tell whether any test is red by chance.

    python benchmarks/measure/suite_under_load.py --runs 10 --busy 4 [--commit HEAD] [--clone FOLDER]

Each run is `make test` in a clean clone at one commit, one run after the other; the first one also installs. `--clone`
names a clone that is already there and installed. A run is green if make ends with 0 and no test was retried. After each
run the results are written, so that an interrupted series says how many runs it had.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import ROOT, write_result

BENCHMARKS = Path(__file__).resolve().parents[1]
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|rerun)")
_RED = re.compile(r"^(?:FAILED|ERROR|RERUN) (\S+)", re.MULTILINE)


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that never rest, for as long as the block lasts."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def make_clone(folder: Path, commit: str) -> None:
    """A clean clone of this repository at the commit."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    subprocess.run(["git", "checkout", "-q", commit], cwd=folder, check=True)


def read_log(text: str) -> dict[str, Any]:
    """How many tests ended how, and which were red or retried."""
    last = next((line for line in reversed(text.splitlines()) if " passed" in line and " in " in line), "")
    return {"tests": {how: int(n) for n, how in _COUNT.findall(last)}, "red": sorted(set(_RED.findall(text)))}


def run_suite(clone: Path, log: Path) -> dict[str, Any]:
    """One `make test`; its exit code, its seconds and what its log says."""
    begun = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(
            ["make", "test"], cwd=clone, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    found = read_log(log.read_text(errors="replace"))
    green = code == 0 and not found["red"] and "rerun" not in found["tests"]
    return {"green": green, "seconds": round(time.perf_counter() - begun, 1), "load": os.getloadavg()[1], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", type=int, default=4, help="processes that never rest, beside each run")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--clone", type=Path, help="a clone that is already there, at the commit to test")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "suite_under_load")
    parser.add_argument("--save", type=Path, default=BENCHMARKS / "results" / "suite_under_load.json")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run and the busy loops end too
    given.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        clone = given.clone or Path(folder) / "clone"
        if given.clone is None:
            make_clone(clone, given.commit)
        words = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(words, cwd=clone, capture_output=True, text=True, check=True).stdout.strip()
        runs: list[dict[str, Any]] = []
        for number in range(1, given.runs + 1):
            with busy_loops(given.busy):
                found = run_suite(clone, given.logs / f"{commit}-{number}.log")
            runs.append(found)
            counted = ", ".join(f"{n} {how}" for how, n in found["tests"].items())
            word = "green" if found["green"] else "RED"
            print(
                f"run {number} of {given.runs}: {word}, {found['seconds']:.0f} s, {counted}", *found["red"], flush=True
            )
            green = sum(r["green"] for r in runs)
            write_result(given.save, {"tested": commit, "busy_loops": given.busy, "green": green, "runs": runs})
    print(f"{green} of {len(runs)} runs green beside {given.busy} busy loops (goal: all of ten)")
    raise SystemExit(green < len(runs))


if __name__ == "__main__":
    main()
