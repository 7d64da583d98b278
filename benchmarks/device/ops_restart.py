"""What ops_gemm.py and ops_rows.py do when a kernel has killed the CUDA context: start anew, without what was tried.

A context that met an illegal address answers every later call with the same error: nothing more can be measured in the
process. The results lie in the file; the new process reads them (`--resume`) and skips every row that is in it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result


def dead() -> str:
    """Why the context answers no more; empty while it does."""
    if not torch.cuda.is_available():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as e:
        return str(e).splitlines()[0]
    return ""


def again(out: Path, budget_s: float) -> None:
    """Replace this process by a new one that goes on with what is not yet in the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [a for a in sys.argv[1:] if a != "--resume"]
    for i, word in enumerate(kept):
        if word == "--budget-s":
            del kept[i : i + 2]
            break
    print(f"the CUDA context is dead: starting anew with {budget_s:.0f} s", flush=True)
    os.execv(sys.executable, [sys.executable, sys.argv[0], *kept, "--budget-s", f"{budget_s:.1f}", "--resume"])


def replace_result(path: Path, content: dict[str, Any]) -> None:
    """Write a result file whole or not at all."""
    part = path.with_suffix(".part")
    write_result(part, content)
    part.replace(path)
