"""Seconds to a complete Kineto trace of a small GPU training loop, by `tessera-prof`, and what is in it.

    PYTHONPATH=src:.carry/site python benchmarks/device/attach.py RESULTS.json           about 75 s
    PYTHONPATH=src:.carry/site python benchmarks/device/attach.py RESULTS.json --why     about 40 s

The loops and the timing are those of benchmarks/measure/attach.py. `--why` looks into traces by time that have launches and no
kernels: the plain loop with other recordings, and libkineto's own count of what it dropped.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAUSES_S = (0.3, 2.0, 4.0)
VARIANTS = {
    "as it is": (),
    "longer": ("--trace-ms", "1000"),
    "warm-up of 1 s": ("--warmup-s", "1"),
    "warm-up of 1 s, longer": ("--warmup-s", "1", "--trace-ms", "1000"),
}


def speed(shared: dict[str, Any], results: Path) -> None:
    found = shared["measure"](sys.executable, "cuda", PAUSES_S)
    shared["write"](results, "h200", found)
    summary = results.with_name("perf.csv")
    with shared["target"](sys.executable, "cuda", "optimizer", {}) as pid:
        command = [sys.executable, "-m", "tessera.cli.prof", "--pid", str(pid), "--duration", "2s"]
        screen = subprocess.run([*command, "--summary", str(summary)], capture_output=True, text=True, check=False)
    found["screen"] = screen.stdout.splitlines()
    found["summary"] = summary.read_text().splitlines()
    print(screen.stdout, screen.stderr, *found["summary"], sep="\n")
    shared["write"](results, "h200", found)


def why(shared: dict[str, Any], results: Path) -> None:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        log = Path(name) / "log"
        with shared["target"](sys.executable, "cuda", "plain", {"KINETO_LOG_LEVEL": "0"}, log) as pid:
            for variant, options in VARIANTS.items():
                figures = shared["run"](pid, Path(name), "--steps", "0", *options)["answer"]["kineto"]["figures"]
                time.sleep(0.2)  # the log comes after the trace
                counts = [line for line in log.read_text().splitlines() if "Out-of-range" in line]
                found[variant] = {k: figures[k] for k in ("launches", "kernels", "seconds")} | {"log": counts[-1:]}
                print(variant, found[variant], flush=True)
    shared["write"](results, "h200 kernels by time", found)


def main() -> None:
    shared = runpy.run_path(str(Path(__file__).parent.parent / "measure/attach.py"))
    (why if "--why" in sys.argv else speed)(shared, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
