"""Tell a user who waits for a first call that it searches, and how long that may take."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

AFTER_S = 3.0
"""Seconds after which a search announces itself: a line for shorter searches is not worth it."""


@contextlib.contextmanager
def announce_if_long(line: str | None, after_s: float = AFTER_S) -> Iterator[threading.Timer | None]:
    """Write a line to stderr, once, if the body takes longer than `after_s`; do nothing for None."""
    if line is None:
        yield None
        return

    def announce() -> None:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed, or nobody reads it
            sys.stderr.write(f"tessera: {line}\n")
            sys.stderr.flush()

    timer = threading.Timer(after_s, announce)
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()
