"""Sixty random worlds of benchmarks/measure/actuator_faults.py: after any failure or kill the GPUs are as before."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from fakes.nvml import missing_compiler
from places import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "measure" / "actuator_faults.py"


pytestmark = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))


def run_trials(*arguments: str) -> dict:
    # A process of its own: it forks, and this one may have threads (torch's) that do not survive that.
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it forked would go on for ever
    assert process.returncode == 0, said
    result = json.loads(said.splitlines()[-1])
    assert result["restored"] == result["trials"]
    return result


def test_every_gpu_is_as_it_was():
    result = run_trials("60", "--seed", "5000")
    assert result["trials"] == 60
    assert {"kill", "term", "int", "hup", "return", "raise", "sys_exit", "thread", "os_exit"} == set(result["ways_out"])
    assert result["with_faults"] > 15
    assert result["restored_by"]["itself"] > 30 and result["restored_by"]["heal"] > 0


def test_limits_are_restored_after_a_kill_and_a_removed_folder():
    result = run_trials("--moments", "10", "--seed", "5000")
    assert result["restored_by"]["only the watcher"] > 2
    assert {"kill", "term"} <= set(result["ways_out"]) and {"folder", "journal", "nothing"} == set(result["removed"])
