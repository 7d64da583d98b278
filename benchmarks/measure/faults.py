"""Stops `tessera run` and `tessera measure` at random moments: signals, a full disk, a folder that vanishes.

python benchmarks/measure/faults.py [--moments 200] [--workers 3] [--seed 0]

The script under test notes each region in a log of its own when the region has ended, and exits with 7. Counted is:

  own end      the script ended as it would have without us: by itself, or by the signal that was sent
  kept         every region that ended more than SLACK_S before the moment is in the run file (`run` only)
  answered     the report was printed (not after SIGKILL, nor where the file was taken away)

A disk is full for the processes by RLIMIT_FSIZE, for a second, and then is not any more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tessera.errors import TesseraError
from tessera.profile.runfile import RunFile

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

SCRIPT = """
import os, sys, time
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
if sys.argv[2] == "run":
    from tessera.profile import region
else:
    from contextlib import nullcontext as region
for i in range(300):
    with region(f"part_{i}"):
        time.sleep(0.01)
    os.write(log, f"{i} {time.time():.6f}\\n".encode())
os.write(log, b"done\\n")
sys.exit(7)
"""
SIGNALS = {s.name: s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)}
KILLED = "script killed"
FAULTS = (*SIGNALS, KILLED, "disk full", "folder gone")
SLACK_S = 2.0
"""What a kill may cost: a commit every quarter of a second, on a machine with more to do than time."""
FULL_BYTES, FULL_S = 32_768, 1.0
RECORDED = 200
"""A run of at least so many moments is written to benchmarks/results/faults.json."""


@dataclass
class Outcome:
    command: str
    fault: str
    own_end: bool
    kept: bool | None
    answered: bool | None
    lost_s: float = 0.0
    about: str = ""


def strike(folder: Path, command: str, fault: str, after_s: float) -> Outcome:
    """Start a command, wait, let the fault happen, and look at what is left."""
    (folder / "script.py").write_text(SCRIPT)
    log, runs = folder / "own.log", folder / "out"
    runs.mkdir()
    script = [str(folder / "script.py"), str(log), command]
    own = ["run", "--json", "--mode", "sampling", "--out", str(runs / "r.tessera"), *script]
    words = own if command == "run" else ["measure", "--json", "--", sys.executable, *script]
    with (folder / "answer").open("wb") as out, (folder / "errors").open("wb") as errors:
        process = subprocess.Popen([sys.executable, "-m", "tessera", *words], stdout=out, stderr=errors)
        begun = time.monotonic()
        while not log.exists() and process.poll() is None and time.monotonic() - begun < 60:
            time.sleep(0.01)
        time.sleep(after_s)
        struck_s = time.time()
        apply_fault(process, fault, runs)
        code = process.wait(timeout=120)
    wait_for_end(log)
    return judge(folder, command, fault, code, struck_s)


def apply_fault(process: subprocess.Popen[bytes], fault: str, runs: Path) -> None:
    if fault in SIGNALS:
        process.send_signal(SIGNALS[fault])
    elif fault == KILLED:
        for pid in children_of(process.pid):
            os.kill(pid, signal.SIGKILL)
    elif fault == "folder gone":
        shutil.rmtree(runs)
    else:
        pids = [process.pid, *children_of(process.pid)]
        for limit in (FULL_BYTES, resource.RLIM_INFINITY):
            for pid in pids:
                with_limit(pid, limit)
            if limit == FULL_BYTES:
                time.sleep(FULL_S)


def with_limit(pid: int, limit: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_for_end(log: Path) -> None:
    """A command that was measured outlives `tessera measure`, where only that was killed."""
    size, quiet_s = -1, 0.0
    while quiet_s < 0.5 and "done" not in log.read_text():
        time.sleep(0.1)
        quiet_s = quiet_s + 0.1 if log.stat().st_size == size else 0.0
        size = log.stat().st_size


def judge(folder: Path, command: str, fault: str, code: int, struck_s: float) -> Outcome:
    lines = (folder / "own.log").read_text().splitlines()
    done = lines[-1:] == ["done"]
    ended = {int(i): float(at) for i, _, at in (line.partition(" ") for line in lines if line != "done")}
    number = signal.SIGKILL if fault == KILLED else SIGNALS.get(fault)
    if number is None or (command == "measure" and fault == "SIGKILL"):
        own_end = done
    else:  # by the signal, unless it came when all was over
        own_end = done or code in (128 + number, -number)
    answer = read_answer(folder / "answer")
    answered = None if fault in ("SIGKILL", "folder gone") else answer is not None
    outcome = Outcome(command, fault, own_end, None, answered, about=f"code {code}, {len(lines)} lines")
    if command == "run" and fault != "folder gone":
        wanted = [i for i, at in ended.items() if at < struck_s - SLACK_S or (fault == "disk full" and done)]
        found = read_parts(folder / "out" / "r.tessera")
        missing = [i for i in wanted if i not in found]
        outcome.kept = not missing
        before = [at for i, at in ended.items() if i not in found and at < struck_s]
        outcome.lost_s = struck_s - min(before) if before and number is signal.SIGKILL else 0.0
        outcome.about += f", {len(missing)} missing"
    return outcome


def read_answer(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def read_parts(path: Path) -> set[int]:
    try:
        with RunFile(path) as run:
            rows = run.timeline()
            names = [rows.name(i) for i in rows.rows("region").tolist()]
    except TesseraError:
        return set()
    return {int(name.removeprefix("part_")) for name in names if name.startswith("part_")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ["TESSERA_SENSORS"] = "modelled"
    chance = random.Random(asked.seed)
    plans = [
        (chance.choice(("run", "measure")), FAULTS[i % len(FAULTS)], chance.uniform(0, 3)) for i in range(asked.moments)
    ]

    def one(plan: tuple[str, str, float]) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="tessera-faults-") as folder:
            return strike(Path(folder), *plan)

    begun = time.monotonic()
    with ThreadPoolExecutor(asked.workers) as pool:
        outcomes = list(pool.map(one, plans))
    return print_counts(outcomes, time.monotonic() - begun)


def print_counts(outcomes: list[Outcome], took_s: float) -> int:
    print(f"{'command':8} {'fault':12} {'moments':>8} {'own end':>8} {'kept':>8} {'answered':>9}")
    for key in sorted({(o.command, o.fault) for o in outcomes}):
        these = [o for o in outcomes if (o.command, o.fault) == key]
        counts = [f"{sum(map(bool, v))}/{len(v)}" if (v := [x for x in c if x is not None]) else "-"
                  for c in zip(*((o.own_end, o.kept, o.answered) for o in these), strict=True)]  # fmt: skip
        print(f"{key[0]:8} {key[1]:12} {len(these):>8} {counts[0]:>8} {counts[1]:>8} {counts[2]:>9}")
    wrong = [o for o in outcomes if False in (o.own_end, o.kept, o.answered)]
    for o in wrong:
        print(f"WRONG {o.command} {o.fault}: own end {o.own_end}, kept {o.kept}, answered {o.answered}; {o.about}")
    worst_s = max(o.lost_s for o in outcomes)
    print(
        f"{len(outcomes)} moments in {took_s:.0f} s, {len(wrong)} wrong; a kill -9 lost {worst_s:.2f} s at most; ",
        end="",
    )
    faults = Counter(o.fault for o in outcomes)
    print(", ".join(f"{n} {name}" for name, n in faults.items()))
    if len(outcomes) >= RECORDED:
        result = {"moments": len(outcomes), "wrong": len(wrong), "lost_s": worst_s, "took_s": took_s, "faults": faults}
        write_result(Path(__file__).parents[1] / "results" / "faults.json", result)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
