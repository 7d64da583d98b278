"""Ranges for the vendors' own tools (Nsight Systems, rocprof, VTune), so that our regions show there too.

Nothing is loaded that the program does not have: torch's own bindings where torch is imported, else the vendor's
library. Without a listening tool a range costs these libraries a few nanoseconds.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

Push = Callable[[str], object]
Pop = Callable[[], object]

# The stub libraries tools hook into: NVTX 2 (CUDA 10-12) and rocTX. NVTX 3 is headers only, and torch has it built in.
_LIBRARIES = (
    ("libnvToolsExt.so.1", "nvtxRangePushA", "nvtxRangePop"),
    ("libroctx64.so.4", "roctxRangePushA", "roctxRangePop"),
)


def ranges() -> tuple[Push | None, Pop | None]:
    """What opens and closes a range in every tool that is there; (None, None) where there is none."""
    found = [*_torch(), *_libraries()] if "torch" in sys.modules else _libraries()
    if not found:
        return None, None
    if len(found) == 1:
        return found[0]
    pushes, pops = [p for p, _ in found], [p for _, p in found]

    def push(name: str) -> None:
        for each in pushes:
            each(name)

    def pop() -> None:
        for each in pops:
            each()

    return push, pop


def _torch() -> list[tuple[Push, Pop]]:
    """NVTX of torch (rocTX in a ROCm build) where it has a device, and ITT where Intel's collector is attached."""
    torch: Any = sys.modules["torch"]
    found: list[tuple[Push, Pop]] = []
    nvtx = getattr(torch._C, "_nvtx", None)
    if nvtx is not None and torch.cuda.is_available():
        found.append((nvtx.rangePushA, nvtx.rangePop))
    itt = getattr(torch._C, "_itt", None)
    if itt is not None and itt.is_available():
        found.append((itt.rangePush, itt.rangePop))
    return found


def _libraries() -> list[tuple[Push, Pop]]:
    """The vendor's library, where torch's binding is not."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch._C, "_nvtx"):
        return []
    for name, push_name, pop_name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            push, pop = getattr(library, push_name), getattr(library, pop_name)
        except (OSError, AttributeError):
            continue
        push.argtypes, pop.argtypes = [ctypes.c_char_p], []
        return [(_encode_names(push), pop)]
    return []


def _encode_names(push: Callable[[bytes], object]) -> Push:
    return lambda text: push(text.encode())
