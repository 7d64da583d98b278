"""What tests of Triton kernels share: a run in the interpreter, and what a compiled kernel spills."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from places import TESTS

BOUND = {"torch.float32": 2e-5, "torch.float16": 4e-3}


def check_interpreted(script: str, cases: int) -> None:
    """Run a test file as a script in Triton's interpreter: it prints errors by case, all of which must be small."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), env.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == cases
    wrong = [
        (row["case"], row["errors"])
        for row in found
        if not all(e < BOUND[row["dtype"]] for e in row["errors"].values())
    ]
    assert not wrong


def spilled_bytes(found: object) -> int:
    """What a kernel keeps on its stack instead of in registers."""
    import triton

    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(found.asm["cubin"])  # type: ignore[attr-defined]
        text = subprocess.run([dump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(stack) for stack in re.findall(r"STACK:(\d+)", text))
