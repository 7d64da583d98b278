"""The watcher: waits for one process to end, then puts back what it left. It sleeps in the kernel until then."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

_POLL_S = 0.2


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: a PID used again has another. None: no such process."""
    try:
        # Field 22 of /proc/PID/stat; the second field, in parentheses, may itself hold spaces and parentheses.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def wait_for(pid: int, started: int | None) -> None:
    """Return once that process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # it is gone, or the kernel is older than 5.3
        while start_time(pid) == started is not None:
            time.sleep(_POLL_S)
        return
    try:
        if start_time(pid) == started:
            select.select([fd], [], [])
    finally:
        os.close(fd)


def main(pid: str, started: str) -> None:
    """Wait, then heal every GPU that a dead process left changed; what was done goes to stderr."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # what ends the process ends its group; we are still needed then
    os.chdir("/")  # keep no folder busy
    wait_for(int(pid), None if started == "None" else int(started))
    from .outstanding import heal

    for found in heal():
        with contextlib.suppress(OSError):  # nobody may be there to read it
            sys.stderr.write(f"tessera: {found.text}\n")
