"""One thread for numpy's linear algebra: the matrices of an attribution have some tens of columns.

OpenBLAS divides them among all cores and waits for the slowest: on 2 loaded cores an attribution of a million kernels
took 17 s of CPU instead of 5.5.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As numpy's own wheels call them (64-bit integers), and others.
_NAMES = tuple(
    (f"{prefix}get_num_threads{suffix}", f"{prefix}set_num_threads{suffix}")
    for prefix in ("scipy_openblas_", "openblas_")
    for suffix in ("64_", "")
)


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Inside, OpenBLAS uses one thread; another library, or none that is found, is left as it is."""
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
    """The calls of the OpenBLAS that numpy has loaded."""
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
