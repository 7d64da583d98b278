"""Limits numpy's linear algebra to one thread, since the matrices of an attribution have only some tens of columns.

OpenBLAS divides them among all cores and waits for the slowest: on 2 loaded cores, an attribution of a million kernels
took 17 s of CPU instead of 5.5 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The names in numpy's own wheels (with 64-bit integers), and in others.
_NAMES = tuple(
    (f"{prefix}get_num_threads{suffix}", f"{prefix}set_num_threads{suffix}")
    for prefix in ("scipy_openblas_", "openblas_")
    for suffix in ("64_", "")
)


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let OpenBLAS use one thread in the block; another library, or none, is not changed."""
    calls = _find_calls()
    if calls is None:
        yield
        return
    get, put = calls
    before = get()
    put(1)
    try:
        yield
    finally:
        put(before)


@functools.cache
def _find_calls() -> tuple[Any, Any] | None:
    """Return the calls of the OpenBLAS that numpy has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for path in dict.fromkeys(re.findall(r"\s(/\S*openblas\S*\.so\S*)$", maps, re.MULTILINE)):
        library = ctypes.CDLL(path)
        for get, put in _NAMES:
            if hasattr(library, get) and hasattr(library, put):
                return getattr(library, get), getattr(library, put)
    return None
