"""What a kill -9 loses of a run: a child records rows, counters, power samples and whole timelines; we kill it.

python benchmarks/measure/kill9.py [KILLS]        (20 by default; each takes 1 to 3 s)

Lost is the time between the last thing found in the file and the kill, with the time the kill itself takes included.
Kernels come in pieces, as the thread of a session brings them: of those up to a piece more is lost, which is apart.
"""

from __future__ import annotations

import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tessera.profile.runfile import RunFile

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

CHILD = """
import sys, threading, time
import numpy as np
from tessera.profile.recorder import PULL_S
from tessera.profile.runfile import RunWriter
from tessera.schema import Domain
from tessera.timeline.columns import Builder

domain = Domain(name="gpu0", source="child", resolution_s=0.02)
kernels = Builder()
n = 200_000
kernels.intern("kernel")
start = time.time_ns() + np.arange(n) * 1000
kernels.extend({"kind": np.zeros(n), "name": np.zeros(n), "start_ns": start, "end_ns": start + 500}, n)
timeline = kernels.build()
run = RunWriter(sys.argv[1], meta={"kind": "kill9"})
def bring_kernels():
    # As the thread of a session does: what ran since the last time.
    begin = time.time_ns()
    while True:
        time.sleep(PULL_S)
        end = time.time_ns()
        piece = Builder()
        piece.intern("piece")
        ends = np.linspace(begin, end, 10_001).astype(np.int64)[1:]
        piece.extend({"kind": np.zeros(10_000), "name": np.zeros(10_000), "start_ns": ends - 100, "end_ns": ends}, 10_000)
        run.add_timeline(piece.build(), may_shrink=True)
        begin = end

threading.Thread(target=bring_kernels, daemon=True).start()
print("ready", flush=True)
i = 0
while True:
    now = time.time_ns()
    run.add_row("counter", "sequence", now, now, value=float(i))
    if i % 20 == 0:
        run.add_samples(domain, [now], [float(i)])
    if i % 1000 == 0:
        run.add_timeline(timeline)
    i += 1
    time.sleep(0.001)
"""


def kill_once(path: Path, after_s: float) -> dict[str, float]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(after_s)
    killed_ns = time.time_ns()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with RunFile(path) as run:
        timeline = run.timeline()
        rows = timeline.rows("counter")
        values = timeline["value"][rows]
        assert run.crashed
        assert np.array_equal(values, np.arange(len(rows))), "a row in the middle is missing"
        times, _ = run.samples("gpu0")
        pieces = timeline["end_ns"][timeline["name"] == timeline.names.index("piece")]
        return {
            "lost_kernels_s": (killed_ns - int(pieces.max())) * 1e-9,
            "ran_s": after_s,
            "rows": len(timeline),
            "lost_rows_s": (killed_ns - int(timeline["end_ns"][rows].max())) * 1e-9,
            "lost_samples_s": (killed_ns - int(times[-1])) * 1e-9,
        }


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        found = [kill_once(Path(folder) / f"{i}.tessera", 0.6 + 2.0 * chance.random()) for i in range(kills)]
    lost = [max(f["lost_rows_s"], f["lost_samples_s"]) for f in found]
    kernels = [f["lost_kernels_s"] for f in found]
    result = {
        "kills": kills,
        "lost_kernels_s": {"mean": float(np.mean(kernels)), "max": max(kernels)},
        "lost_s": {"mean": float(np.mean(lost)), "max": max(lost)},
        "each": found,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
    }
    target = Path(__file__).parents[1] / "results" / "kill9.json"
    write_result(target, result)
    for what, name in (("rows and samples", "lost_s"), ("kernels", "lost_kernels_s")):
        lost_s = result[name]
        print(f"{kills} kills: lost {lost_s['mean']:.3f} s of {what} on average, {lost_s['max']:.3f} s at most")


if __name__ == "__main__":
    main()
