"""Reads the Python stacks of a running process that cannot trace itself, by means of py-spy.

py-spy, an optional program, reads the target's memory without stopping it (`--nonblocking`). It needs a debugger's
permission.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

import msgspec

from ...recording import Stack
from ..sampling import name_frame

RATE_HZ = 20
_STOP_S = 10.0
_INSTALL = "pip install py-spy, or in the clone: pip install '.[attach]'"


def find_py_spy() -> str | None:
    """Return the path of py-spy: in this Python environment, else on PATH."""
    own = Path(sys.executable).parent / "py-spy"
    return str(own) if own.exists() else shutil.which("py-spy")


class PySpy:
    """Samples stacks during a `with` block. Afterwards `stacks` has them, or `why_not` says why there are none."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="tessera-stacks-")
        self._output = Path(self._folder.name) / "stacks.json"
        self.stacks: list[Stack] = []
        self.why_not: str | None = None

    def __enter__(self) -> Self:
        program = find_py_spy()
        if program is None:
            self.why_not = f"py-spy is not installed: {_INSTALL}"
            return self
        options = ["--idle", "--nonblocking", "--rate", str(RATE_HZ), "--format", "speedscope"]
        try:
            self._process = subprocess.Popen(
                [program, "record", "--pid", str(self._pid), *options, "--output", str(self._output)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        except OSError as exc:
            self.why_not = f"py-spy cannot be started: {exc}"
        return self

    def __exit__(self, *_: object) -> None:
        with self._folder:
            if self._process is not None:
                self._finish(self._process)

    def _finish(self, process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)  # py-spy writes its file then
        try:
            _, errors = process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self.why_not = f"py-spy did not stop within {_STOP_S:g} s"
            return
        try:
            profile = msgspec.json.decode(self._output.read_bytes())
            self.stacks = parse_speedscope(profile, self._output.stat().st_mtime_ns)
        except (OSError, msgspec.DecodeError, KeyError, TypeError, IndexError) as exc:
            last = [line for line in errors.splitlines() if line.strip()][-1:] or [str(exc)]
            self.why_not = f"py-spy could not read its stacks: {last[0].removeprefix('Error: ')}"


def parse_speedscope(profile: dict[str, Any], end_ns: int) -> list[Stack]:
    """Return the samples of all threads. Their times are counted back from `end_ns` by the weights of the samples."""
    frames = [name_frame(f["file"], f["line"], f["name"]) for f in profile["shared"]["frames"]]
    stacks = []
    for thread in profile["profiles"]:
        number = int(thread["name"].split()[1])  # "Thread 4711 "MainThread""
        at_s = float(thread["endValue"])
        for sample, weight_s in zip(reversed(thread["samples"]), reversed(thread["weights"]), strict=True):
            at_s -= weight_s
            time_ns = end_ns - round((thread["endValue"] - at_s) * 1e9)
            stacks.append(Stack(time_ns, number, ";".join(frames[i] for i in sample), 1))
    return stacks[::-1]
