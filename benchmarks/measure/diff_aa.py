"""How often `tessera diff` calls a program dearer or cheaper than itself (A/A): false alarms, which 90% allows 10% of.

    python benchmarks/measure/diff_aa.py [--seconds 140]

Small CPU programs are recorded again and again: by `tessera measure`, and by `tessera run` with its steps. All pairs of
recordings are then compared, and sets of three with three, taken in turns or in a row. What changes from minute to
minute on this machine lies between them as it does in CI. Comparisons share recordings: they are fewer than they seem.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera import analyze

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

BENCHMARKS = Path(__file__).parents[1]
SET = 3
WORK = "total = sum(i * i for i in range(3_000_000))\n"
STEPS = """
import torch
from tessera import profile

torch.set_num_threads(1)
a = torch.randn(192, 192)
for i in range(40):
    with profile.region(f"step_{i}"):
        for _ in range(6):
            a = torch.relu(a @ a) + a.sin()
            a = a / a.norm()
"""


def tessera(*words: object) -> str:
    command = [sys.executable, "-m", "tessera", *map(str, words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, text=True, check=True, capture_output=True).stdout


def record(folder: Path, deadline: float) -> tuple[list[Path], list[Path]]:
    """Recordings by `measure` and by `run`, in turns until the time is over."""
    (folder / "work.py").write_text(WORK)
    (folder / "steps.py").write_text(STEPS)
    measured: list[Path] = []
    runs: list[Path] = []
    while time.monotonic() < deadline:
        for _ in range(SET):
            measured.append(folder / f"m{len(measured)}.json")
            measured[-1].write_text(tessera("measure", "--json", "--", sys.executable, folder / "work.py"))
        runs.append(folder / f"r{len(runs)}.tessera")
        tessera("run", "--json", "--out", runs[-1], folder / "steps.py")
    return measured, runs


def pairs(found: Sequence[Path]) -> list[tuple[list[Path], list[Path]]]:
    return [([a], [b]) for a, b in itertools.combinations(found, 2)]


def in_turns(found: Sequence[Path]) -> list[tuple[list[Path], list[Path]]]:
    """A, B, A, B, A, B: as the how-to says."""
    at = range(len(found) - 2 * SET + 1)
    return [(list(found[i : i + 2 * SET : 2]), list(found[i + 1 : i + 2 * SET : 2])) for i in at]


def in_a_row(found: Sequence[Path]) -> list[tuple[list[Path], list[Path]]]:
    """A, A, A, B, B, B: what drifts in between is in no interval."""
    at = range(len(found) - 2 * SET + 1)
    return [(list(found[i : i + SET]), list(found[i + SET : i + 2 * SET])) for i in at]


WAYS = {"once": pairs, "in_turns": in_turns, "in_a_row": in_a_row}
GATE = 0.05


def alarms(compared: Sequence[tuple[list[Path], list[Path]]]) -> dict[str, Any]:
    """How many of some A/A comparisons are called more than noise, in all and by row."""
    totals = unknown = failed = rows = judged = 0
    changes = []
    for a, b in compared:
        found = analyze.diff(a, b)
        totals += found.significant
        unknown += not found.verdict().known
        failed += found.verdict(fail_above=GATE).failed
        known = [r for r in found.rows if r.error_j >= 0]
        judged += len(known)
        rows += sum(r.significant for r in known)
        changes.append(abs(found.total.share_j or 0.0))
    return {
        "comparisons": len(compared), "false_alarms": totals, "unknown": unknown, "gate_failed": failed,
        "false_alarms_pct": round(100 * totals / max(len(compared), 1), 1), "rows": judged, "rows_false": rows,
        "rows_false_pct": round(100 * rows / judged, 1) if judged else None,
        "largest_change_pct": round(100 * max(changes, default=0.0), 1),
    }  # fmt: skip


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seconds", type=float, default=140.0)
    seconds = asked.parse_args().seconds
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        measured, runs = record(Path(folder), time.monotonic() + seconds)
        found = {
            "goal_pct": 10.0, "gate_pct": 100 * GATE, "set": SET, "cpus": os.cpu_count(), "load_before": round(load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "note": "others used the machine meanwhile" if load > 0.5 else "nobody else used the machine",
            "recorded": {"measure": len(measured), "run": len(runs)},
            "measure": {n: alarms(how(measured)) for n, how in WAYS.items()},
            "steps": {n: alarms(how(runs)) for n, how in WAYS.items()},
        }  # fmt: skip
    write_result(BENCHMARKS / "results" / "diff_aa.json", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
