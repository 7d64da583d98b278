"""Sixty random worlds of benchmarks/actuator_faults.py: whatever fails or is killed, the GPUs are as they were."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.nvml import missing_compiler

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "actuator_faults.py"


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_every_gpu_is_as_it_was():
    # A process of its own: it forks, and this one may have threads (torch's) that do not survive that.
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "60", "--seed", "5000"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["restored"] == result["trials"] == 60
    assert {"kill", "term", "int", "hup", "return", "raise", "sys_exit", "thread", "os_exit"} == set(result["ways_out"])
    assert result["with_faults"] > 15
    assert result["restored_by"]["itself"] > 30 and result["restored_by"]["heal"] > 0
