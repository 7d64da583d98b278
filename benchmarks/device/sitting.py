"""The device scripts one after the other, in the order of what is still unmeasured, within the seconds there are.

    PYTHONPATH=src:.carry/site python benchmarks/device/sitting.py OUT_DIR --until-s 590 [--only NAME ...] [--quick]

Every script runs in a process of its own with its own limit; what it printed and wrote is packed into
OUT_DIR/sitting.tar.gz after each, so that a sitting that is cut short keeps what was finished. A script that would not
end in time is not begun, and named. `--list` prints the names with their seconds. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
# Name: the seconds it takes, then its command; OUT is the JSON it writes, FOLDER a folder of its own.
SCRIPTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "selftest": (75, ("-m", "tessera", "selftest", "--json")),
    "run_modes": (220, ("run_modes.py", "OUT")),
    "schedule_caps": (210, ("schedule_caps.py", "OUT", "--budget-s", "200")),
    "overhead_why": (110, ("overhead_why.py", "OUT")),
    "overhead_profile": (190, ("overhead_profile.py", "OUT", "--budget-s", "180")),
    "attach": (45, ("attach.py", "OUT", "--why")),
    "after_script": (45, ("after_script.py", "OUT")),
    "fused_conv": (65, ("fused_conv.py", "OUT", "--budget-s", "60")),
    "compiled_profile": (160, ("compiled_profile.py", "OUT", "--budget-s", "140")),
    "tune": (430, ("tune.py", "OUT", "--budget-s", "420")),
    "ops_gemm": (205, ("ops_gemm.py", "OUT", "--budget-s", "200")),
    "ops_rows": (260, ("ops_rows.py", "OUT", "--budget-s", "250")),
    "ops_precision": (160, ("ops_precision.py", "OUT", "--budget-s", "150")),
    "checkpointing": (120, ("checkpointing.py", "OUT", "--budget-s", "110")),
    "optimize": (300, ("optimize.py", "OUT", "--budget-s", "290")),
    "schedule_tokens": (95, ("schedule_tokens.py", "OUT", "--budget-s", "90")),
    "regions5": (30, ("record_mixture.py", "FOLDER", "regions5")),
    "ops_streams": (80, ("ops_streams.py", "OUT", "--budget-s", "75")),
}
OVER_S = 30  # what a script may take beyond its seconds before it is stopped
LINES = 25  # of each script's output that are printed at its end


def ran(name: str, folder: Path, limit_s: float, quick: bool) -> str:
    """One script to its end or its limit; how it ended."""
    own = folder / name
    own.mkdir(exist_ok=True)
    places = {"OUT": str(own / f"{name}.json"), "FOLDER": str(own)}
    command = [str(HERE / part) if part.endswith(".py") else places.get(part, part) for part in SCRIPTS[name][1]]
    if quick and "selftest" not in command:
        command.append("--quick")
    with (own / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", *command], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return f"exit {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # what it changed or holds is put back by its own handlers
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            return f"stopped after {limit_s:.0f} s"


def packed(work: Path, folder: Path) -> None:
    """Everything so far in one file: few files come back from the device."""
    part = folder / "sitting.part"
    with tarfile.open(part, "w:gz") as tar:
        tar.add(work, arcname=".")
    part.replace(folder / "sitting.tar.gz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--until-s", type=float, default=590.0)
    parser.add_argument("--only", nargs="*", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if given.list or given.folder is None:
        print("\n".join(f"{name:18}{seconds:5} s" for name, (seconds, _) in SCRIPTS.items()))
        return
    os.environ |= {"TESSERA_CONTROL": "0", "PYTHONUNBUFFERED": "1"}
    end = time.monotonic() + given.until_s
    work = Path(tempfile.mkdtemp(prefix="sitting-"))
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.only:
        left, seconds = end - time.monotonic(), SCRIPTS[name][0]
        if seconds > left and not given.quick:
            print(f"== {name}: not begun, {seconds} s needed, {left:.0f} s left", flush=True)
            continue
        begun = time.monotonic()
        how = ran(name, work, min(seconds + OVER_S, left), given.quick)
        print(f"== {name}: {how}, {time.monotonic() - begun:.0f} s", flush=True)
        lines = (work / name / "log.txt").read_text(errors="replace").splitlines()
        print("\n".join(line[:200] for line in lines[-LINES:]), flush=True)
        packed(work, given.folder)


if __name__ == "__main__":
    main()
