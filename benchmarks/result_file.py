"""Result files: JSON that carries the machine, the date and the commit it was measured with."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINE = 500  # values that fit in this many characters stay on one line


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write `content` and its stamp."""
    plain = json.loads(json.dumps({**content, "stamp": make_stamp()}, default=str))
    path.write_text(_layout(plain) + "\n")


def read_result(path: Path) -> Any:
    """What a script wrote, without the stamp."""
    content = json.loads(path.read_text())
    content.pop("stamp", None)
    return content


@functools.cache
def make_stamp() -> dict[str, str | None]:
    """Machine, date and commit of this process."""
    return {"machine": describe_machine(), "date": str(date.today()), "commit": find_commit()}


def describe_machine() -> str:
    """The GPU's name, or the processor's where there is no GPU."""
    gpu = _run("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if gpu:
        return gpu.splitlines()[0]
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = re.sub(r"\(R\)|\(TM\)| Processor| CPU", "", cpu.group(1)).strip() if cpu else "CPU"
    return f"{name}, {os.cpu_count()} cores"


def find_commit() -> str | None:
    """The commit that is checked out; None outside a git repository."""
    commit = _run("git", "rev-parse", "--short", "HEAD")
    if commit and _run("git", "diff", "HEAD", "--name-only", "--", "src", "*.py"):
        return f"{commit} with local changes"
    return commit


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _layout(value: Any, depth: int = 0) -> str:
    """JSON with short values on one line each."""
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or (depth and len(text) + depth <= LINE):
        return text
    if isinstance(value, dict):
        parts = [f"{json.dumps(k, ensure_ascii=False)}: {_layout(v, depth + 1)}" for k, v in value.items()]
    else:
        parts = [_layout(v, depth + 1) for v in value]
    indent, (opening, closing) = " " * (depth + 1), "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{indent}" + f",\n{indent}".join(parts) + f"\n{' ' * depth}{closing}"
