"""The numbers by which a trace knows our named streams.

Kineto writes CUPTI's stream id, which is neither torch's id nor the driver's pointer. CUPTI itself tells it for a
pointer (cuptiGetStreamIdEx), where Kineto has loaded it; else the driver does (cuStreamGetId, from CUDA 12 on), whose
number is the same. Both are asked through ctypes. Where neither answers, streams keep their numbers for names.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..stream import names
from ..timeline.columns import Timeline
from ..timeline.stream_names import KEY, key

Ask = Callable[[int], int | None]
"""A stream's pointer to its id; its device is the current one."""


def name_streams(*, known: Mapping[tuple[int, int], str] | None = None, ask: Ask | None = None) -> dict[str, str]:
    """Our streams' names by the keys of `timeline.stream_names`; asked while Kineto runs, and CUPTI with it."""
    handles = names() if known is None else known
    torch: Any = sys.modules.get("torch")
    if not handles or (ask is None and (torch is None or not torch.cuda.is_initialized())):
        return {}
    found: dict[str, str] = {}
    for (device, handle), name in handles.items():
        if ask is not None:
            number = ask(handle)
        else:
            with torch.cuda.device(device):
                number = stream_id(handle)
        if number is not None:
            found[key(device, number)] = name
    return found


def put(timeline: Timeline, found: Mapping[str, str]) -> None:
    """Put names into a timeline's meta; while its devices have Kineto's numbers."""
    if found:
        timeline.meta[KEY] = {**(timeline.meta.get(KEY) or {}), **found}


def renumber(timeline: Timeline, numbers: list[int]) -> None:
    """Follow a change of device numbers: `numbers[i]` is what device i is called now."""
    kept = timeline.meta.get(KEY)
    if not kept:
        return
    moved: dict[str, str] = {}
    for text, name in kept.items():
        device, stream = map(int, text.split("/"))
        moved[key(numbers[device] if device < len(numbers) else device, stream)] = name
    timeline.meta[KEY] = moved


def stream_id(handle: int) -> int | None:
    """What a trace calls the stream of a pointer; None where nobody says."""
    for way in (by_cupti, by_driver):
        number = way(handle)
        if number is not None:
            return number
    return None


def by_cupti(handle: int) -> int | None:
    """CUPTI's own id of a stream of the current context."""
    library = _find_loaded("libcupti")
    if library is None or not hasattr(library, "cuptiGetStreamIdEx"):
        return None
    number = ctypes.c_uint32()
    # context NULL: the current one; per-thread default streams: no
    failed = library.cuptiGetStreamIdEx(None, ctypes.c_void_p(handle), ctypes.c_uint8(0), ctypes.byref(number))
    return None if failed else int(number.value)


def by_driver(handle: int) -> int | None:
    """The driver's id of a stream."""
    library = _find_loaded("libcuda")
    if library is None or not hasattr(library, "cuStreamGetId"):
        return None
    number = ctypes.c_ulonglong()
    failed = library.cuStreamGetId(ctypes.c_void_p(handle), ctypes.byref(number))
    return None if failed else int(number.value)


@functools.lru_cache(maxsize=8)
def _open(path: str) -> Any:
    try:
        return ctypes.CDLL(path)
    except OSError:
        return None


def _find_loaded(name: str) -> Any:
    """A library this process has loaded already: a second copy of CUPTI would know nothing of the first's streams."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(rf"^\S+ \S+ \S+ \S+ \S+\s+(/\S*/{name}\.so[.\d]*)$", maps, re.MULTILINE)
    return _open(found[1]) if found else None
