"""Holds that outlive their block for a moment, so that a function called in a loop finds its cap still set."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

_CHECK_S = 0.05


@dataclass(slots=True)
class _Parked:
    held: Any
    stack: contextlib.ExitStack
    until_s: float


@dataclass(slots=True)
class _Lot:
    mutex: threading.Lock = field(default_factory=threading.Lock)
    parked: dict[Hashable, _Parked] = field(default_factory=dict)
    reaper: threading.Thread | None = None


_lot = _Lot()


def take(key: Hashable) -> tuple[Any, contextlib.ExitStack] | None:
    """What was parked under this key, if it still is: it is the caller's now."""
    if not _lot.parked:
        return None
    with _lot.mutex:
        found = _lot.parked.pop(key, None)
    return None if found is None else (found.held, found.stack)


def park(key: Hashable, held: Any, stack: contextlib.ExitStack, linger_s: float) -> None:
    """Keep it for `linger_s`, then close its stack; at once where that is 0 or another of its kind is kept already."""
    with _lot.mutex:
        kept = linger_s > 0 and key not in _lot.parked
        if kept:
            _lot.parked[key] = _Parked(held, stack, time.monotonic() + linger_s)
            if _lot.reaper is None:
                _lot.reaper = threading.Thread(target=_reap, name="tessera-linger", daemon=True)
                _lot.reaper.start()
    if not kept:
        stack.close()


def _reap() -> None:
    while True:
        time.sleep(_CHECK_S)
        now_s = time.monotonic()
        with _lot.mutex:
            due = [key for key, parked in _lot.parked.items() if parked.until_s <= now_s]
            over = [_lot.parked.pop(key) for key in due]
        for parked in over:
            parked.stack.close()
        with _lot.mutex:
            if not _lot.parked:
                _lot.reaper = None
                return


def _after_fork() -> None:
    """A forked child has neither the holds nor the thread."""
    _lot.mutex, _lot.parked, _lot.reaper = threading.Lock(), {}, None


os.register_at_fork(after_in_child=_after_fork)
