"""Run the whole suite several times beside load, and tell whether any test is red by chance.

    python benchmarks/measure/suite_under_load.py --runs 10 --together 5 [--busy 4] [--commit HEAD] [--venv FOLDER]

Each run is `make tests` in a clean clone of one commit. `--together` of them run at a time, each the load of the others,
which says more for its minutes than `--busy` loops do. The environment is made once, in the first clone, or is the one
of `--venv`. A run is green if make ends with 0 and no test was retried. After each run the results are written, so that
an interrupted series says how many runs it had.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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


def make_clone(folder: Path, commit: str, venv: Path | None) -> None:
    """A clean clone of this repository at the commit, with the environment."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    subprocess.run(["git", "checkout", "-q", commit], cwd=folder, check=True)
    if venv is None:
        subprocess.run(["make", ".venv/.dev"], cwd=folder, check=True)
    else:
        (folder / ".venv").symlink_to(venv)


def read_log(text: str) -> dict[str, Any]:
    """How many tests ended how, and which were red or retried."""
    last = next((line for line in reversed(text.splitlines()) if " passed" in line and " in " in line), "")
    return {"tests": {how: int(n) for n, how in _COUNT.findall(last)}, "red": sorted(set(_RED.findall(text)))}


@dataclass
class Series:
    """Runs of the suite, some at a time, and what they found."""

    clones: list[Path]
    logs: Path
    runs: list[dict[str, Any]] = field(default_factory=list)
    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, number: int) -> dict[str, Any]:
        """One run in a clone that is free; its exit code, its seconds and what its log says."""
        with self.lock:
            clone = self.clones.pop()
        begun, log = time.perf_counter(), self.logs / f"run-{number}.log"
        with log.open("w") as out, tempfile.TemporaryDirectory(prefix="suite-") as scratch:
            # The environment is installed already, perhaps from another checkout: this clone's sources come first. `-o`:
            # it is not out of date because this clone's files are newer.
            process = subprocess.Popen(
                ["make", "-o", ".venv/.dev", "tests"], cwd=clone, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, "PYTHONPATH": str(clone / "src"), "TMPDIR": scratch},
            )  # fmt: skip
            with self.lock:
                self.processes.add(process)
            code = process.wait()
        found = read_log(log.read_text(errors="replace"))
        green = code == 0 and not found["red"] and "rerun" not in found["tests"]
        load = os.getloadavg()[2]
        found = {"run": number, "green": green, "seconds": round(time.perf_counter() - begun, 1), "load": load, **found}
        with self.lock:
            self.processes.discard(process)
            self.clones.append(clone)
            self.runs.append(found)
        return found

    def stop(self) -> None:
        """End what still runs."""
        with self.lock:
            for process in self.processes:
                os.killpg(process.pid, signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--together", type=int, default=1, help="runs at a time")
    parser.add_argument("--busy", type=int, default=0, help="processes that never rest, beside the runs")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--venv", type=Path, help="an environment that is already there")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "suite_under_load")
    parser.add_argument("--save", type=Path, default=BENCHMARKS / "results" / "suite_under_load.json")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs and the busy loops end too
    given.logs.mkdir(parents=True, exist_ok=True)
    words = ["git", "rev-parse", "--short", given.commit]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="clones-") as folder, busy_loops(given.busy):
        clones = [Path(folder) / str(n) for n in range(min(given.together, given.runs))]
        venv = given.venv.absolute() if given.venv else None
        for clone in clones:
            make_clone(clone, commit, venv)
            venv = venv or clone / ".venv"
        series = Series(clones, given.logs)
        with ThreadPoolExecutor(given.together) as pool:
            try:
                for found in pool.map(series.run, range(1, given.runs + 1)):
                    counted = ", ".join(f"{n} {how}" for how, n in found["tests"].items())
                    word = "green" if found["green"] else "RED"
                    print(f"run {found['run']} of {given.runs}: {word}, {found['seconds']:.0f} s, {counted}",
                          *found["red"], flush=True)  # fmt: skip
                    write_series(given.save, series, commit, given)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                series.stop()
                raise
    green = sum(r["green"] for r in series.runs)
    print(f"{green} of {len(series.runs)} runs green, {given.together} at a time (goal: all of ten)")
    raise SystemExit(green < len(series.runs))


def write_series(path: Path, series: Series, commit: str, given: argparse.Namespace) -> None:
    """Store what is known so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with series.lock:
        runs = sorted(series.runs, key=lambda r: r["run"])
    red = sorted({name for r in runs for name in r["red"]})
    write_result(path, {"tested": commit, "together": given.together, "busy_loops": given.busy,
                        "green": sum(r["green"] for r in runs), "red": red, "runs": runs,
                        "cpu_s_a_run": round((used.ru_utime + used.ru_stime) / len(runs), 1)})  # fmt: skip


if __name__ == "__main__":
    main()
