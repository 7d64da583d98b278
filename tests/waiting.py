"""Wait for a condition instead of a time: no test depends on how fast the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LONGEST_S = 600.0
"""Much longer than anything takes on a machine beside many busy loops: only a condition that never holds takes it."""


def wait_until(
    condition: Callable[[], Any], step: Callable[[], Any] | None = None, timeout_s: float = LONGEST_S
) -> None:
    """Call `step` (by default a short sleep) until the condition holds; fail if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s"
        if step is None:
            time.sleep(0.005)
        else:
            step()
