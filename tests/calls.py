"""What a call does, by the functions that it calls: the same on every machine, however busy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def list_calls(call: Callable[[], Any]) -> list[str]:
    """The names of the functions, of Python and of C, that a call calls, without itself."""
    names: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            names.append(frame.f_code.co_name if event == "call" else arg.__name__)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names[1:-1]  # without the call itself and `setprofile`
