"""Demangles C++ names with the C++ runtime. Kineto uses it too, so the names are exactly equal."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any


@lru_cache(maxsize=16384)
def demangle(name: str) -> str:
    """Return a C++ name as people write it; unchanged if it is no mangled name, or without a C++ runtime."""
    runtime = _load_runtime() if name.startswith("_Z") else None
    if runtime is None:
        return name
    function, free = runtime
    address = function(name.encode(), None, None, ctypes.byref(ctypes.c_int()))
    if not address:
        return name
    try:
        return ctypes.string_at(address).decode(errors="replace")
    finally:
        free(address)


@cache
def _load_runtime() -> tuple[Any, Any] | None:
    """Return the runtime's functions __cxa_demangle and free, or None."""
    try:
        function, free = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"], ctypes.CDLL(None)["free"]
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    function.restype = ctypes.c_void_p
    free.argtypes, free.restype = [ctypes.c_void_p], None
    return function, free
