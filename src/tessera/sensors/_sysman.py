"""Level Zero Sysman's C idiom (count, fill, check the result) as Python lists and exceptions.

Written against pyzes 0.1; tested against a fake at the ABI, untested on hardware.
"""

from __future__ import annotations

import ctypes
from typing import Any

# A call the loader is too old to have; the number is the specification's UNSUPPORTED_FEATURE.
UNSUPPORTED = 0x78000003


class ZesError(Exception):
    """A Sysman call that did not succeed, with its ze_result_t."""

    def __init__(self, function: str, code: int, meaning: str) -> None:
        self.code = code
        super().__init__(f"{function}: {meaning}")


class Sysman:
    """Calls into the binding that raise instead of returning a code."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._meanings = {
            value: name.removeprefix("ZE_RESULT_")
            for name, value in vars(module).items()
            if name.startswith("ZE_RESULT_") and isinstance(value, int)
        }

    def call(self, function: str, *args: Any) -> None:
        """Call a function; raises ZesError unless it succeeds."""
        try:
            code = int(getattr(self.module, function)(*args))
        except AttributeError as err:  # from the binding, or from a loader older than the function
            raise ZesError(function, UNSUPPORTED, str(err)) from err
        if code:
            raise ZesError(function, code, self._meanings.get(code, f"error 0x{code:08X}"))

    def enumerate(self, function: str, handle_type: Any, *parent: Any) -> list[Any]:
        """Return all handles of a kind: ask for the count, then for that many."""
        count = ctypes.c_uint32(0)
        self.call(function, *parent, ctypes.byref(count), None)
        if count.value == 0:
            return []
        handles = (handle_type * count.value)()
        self.call(function, *parent, ctypes.byref(count), handles)
        return list(handles[: count.value])

    def fill(self, function: str, handle: Any, struct: Any) -> Any:
        """Have a structure filled, and return it."""
        self.call(function, handle, ctypes.byref(struct))
        return struct

    def typed(self, name: str, stype: str) -> Any:
        """Make an empty structure that says what it is, as the specification asks of the caller."""
        struct = getattr(self.module, name)()
        struct.stype = getattr(self.module, f"ZES_STRUCTURE_TYPE_{stype}")
        return struct
