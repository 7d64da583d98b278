"""What tests of Triton kernels share: a run in the interpreter, and what a compiled kernel spills."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

from forked import run_forked

BOUND = {"torch.float32": 2e-5, "torch.float16": 4e-3}


def check_interpreted(script: str, cases: int) -> None:
    """Run a test file as a script in Triton's interpreter: it prints errors by case, all of which must be small."""
    code = f"import runpy, warnings; warnings.simplefilter('ignore'); runpy.run_path({script!r}, run_name='__main__')"
    found = [json.loads(line) for line in run_forked(code, interpreted=True).splitlines()]
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
