"""CUPTI's activity records as arrays: one layout for CUDA 11.8 to 13.4, in which only the length of a record differs.

Every field used here lies at the same place in CUpti_ActivityKernel8 to Kernel13, Memcpy5 to 7, Memset4 and 5 and
MemcpyPtoP4: checked by compiling the headers of all 15 releases. Later ones add fields at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RecordingError
from .cupti_library import CONCURRENT_KERNEL, MEMCPY, MEMCPY_PEER, MEMSET

_COMMON = {"start": ("<u8", 16), "end": ("<u8", 24)}
FIELDS: Mapping[int, Mapping[str, tuple[Any, int]]] = {
    CONCURRENT_KERNEL: {
        **_COMMON,
        "registers": ("<u2", 6),
        "device": ("<u4", 40),
        "stream": ("<u4", 48),
        "grid": (("<i4", 3), 52),
        "block": (("<i4", 3), 64),
        "static_shared": ("<i4", 76),
        "dynamic_shared": ("<i4", 80),
        "correlation": ("<u4", 92),
        "name": ("<u8", 104),
        "graph_node": ("<u8", 144),
        "graph": ("<u4", 156),
    },
    MEMCPY: {
        **_COMMON,
        "copy_kind": ("<u1", 4),
        "source": ("<u1", 5),
        "target": ("<u1", 6),
        "bytes": ("<u8", 8),
        "device": ("<u4", 32),
        "stream": ("<u4", 40),
        "correlation": ("<u4", 44),
        "graph_node": ("<u8", 64),
        "graph": ("<u4", 72),
    },
    MEMSET: {
        **_COMMON,
        "bytes": ("<u8", 8),
        "device": ("<u4", 32),
        "stream": ("<u4", 40),
        "correlation": ("<u4", 44),
        "graph_node": ("<u8", 64),
        "graph": ("<u4", 72),
    },
    MEMCPY_PEER: {
        **_COMMON,
        "copy_kind": ("<u1", 4),
        "source": ("<u1", 5),
        "target": ("<u1", 6),
        "bytes": ("<u8", 8),
        "device": ("<u4", 32),
        "stream": ("<u4", 40),
        "correlation": ("<u4", 60),
        "graph_node": ("<u8", 72),
        "graph": ("<u4", 80),
    },
}
# Bytes of a record (kernel, copy, set, copy between GPUs) from a CUPTI_API_VERSION on: sizeof() of each release.
_SIZES = (
    (18, (208, 88, 88, 96)),  # CUDA 12.0 to 12.6; 11.8 says 18 too, and has 200
    (26, (208, 96, 88, 96)),  # 12.8
    (130001, (216, 96, 88, 96)),
    (130101, (224, 96, 88, 96)),
    (130301, (232, 96, 88, 96)),
    (130401, (248, 112, 104, 96)),
)
NEWEST = 130401
_FIRST_LOOK = 32


def sizes_of_version(version: int) -> dict[int, int]:
    """Bytes of each kind's record as that version's header has it."""
    sizes = next((s for since, s in reversed(_SIZES) if version >= since), _SIZES[0][1])
    return dict(zip((CONCURRENT_KERNEL, MEMCPY, MEMSET, MEMCPY_PEER), sizes, strict=True))


def split_records(data: NDArray[np.uint8], sizes: Mapping[int, int]) -> dict[int, NDArray[Any]]:
    """The records of a buffer by kind, each kind as one structured array with the names of `FIELDS`."""
    parts: dict[int, list[NDArray[Any]]] = {}
    for kind, at, count in find_runs(data, sizes):
        parts.setdefault(kind, []).append(data[at : at + count * sizes[kind]].view(_dtype(kind, sizes[kind])))
    return {kind: runs[0] if len(runs) == 1 else np.concatenate(runs) for kind, runs in parts.items()}


def find_names(data: NDArray[np.uint8], sizes: Mapping[int, int]) -> list[int]:
    """The addresses of the names of a buffer's kernels, each once: all that must be looked at in the process itself."""
    place, step = FIELDS[CONCURRENT_KERNEL]["name"][1] >> 3, sizes[CONCURRENT_KERNEL] >> 3
    words = data[: len(data) & ~7].view("<u8")
    runs = [(at >> 3, count) for kind, at, count in find_runs(data, sizes) if kind == CONCURRENT_KERNEL]
    parts = [words[at + place : at + (count - 1) * step + place + 1 : step] for at, count in runs]
    found: list[int] = np.unique(np.concatenate(parts)).tolist() if parts else []
    return [address for address in found if address]


def find_runs(data: NDArray[np.uint8], sizes: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """(kind, place, count) of records of one kind that follow one another.

    Records lie one after the other and their lengths differ by kind: as long as the kind is the same, the next one
    begins one length further.
    """
    runs: list[tuple[int, int, int]] = []
    at, end = 0, len(data) & ~7
    words = data[:end].view("<u4")
    while at < end:
        kind = int(words[at >> 2])
        size = sizes.get(kind)
        if size is None:
            raise RecordingError(
                f"CUPTI wrote a record of kind {kind}, which was not asked for", fix="record it with mode='timeline'"
            )
        count = _count_run(words, at >> 2, size >> 2, kind)
        if count == 0:
            break  # cut off within a record
        runs.append((kind, at, count))
        at += count * size
    return runs


def _count_run(words: NDArray[np.uint32], at: int, stride: int, kind: int) -> int:
    """How many whole records of a kind follow one another; most runs are short, so look a little further each time."""
    most, look, count = (len(words) - at) // stride, _FIRST_LOOK, 0
    while count < most:
        ahead = min(look, most - count)
        begin = at + count * stride
        differ = words[begin : begin + (ahead - 1) * stride + 1 : stride] != kind
        first = int(differ.argmax())
        if differ[first]:
            return count + first
        count, look = count + ahead, look * 4
    return count


_dtypes: dict[tuple[int, int], Any] = {}


def _dtype(kind: int, size: int) -> Any:
    """The structured type of a record: `FIELDS` at their places in `size` bytes."""
    known = _dtypes.get((kind, size))
    if known is None:
        fields = FIELDS[kind]
        known = np.dtype({
            "names": list(fields),
            "formats": [kind_and_place[0] for kind_and_place in fields.values()],
            "offsets": [kind_and_place[1] for kind_and_place in fields.values()],
            "itemsize": size,
        })  # fmt: skip
        _dtypes[kind, size] = known
    return known
