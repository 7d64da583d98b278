"""Decodes CUPTI's activity records into arrays.

One layout serves CUDA 11.8 to 13.4; only the length of a record differs. Every field used here lies at the same place
in CUpti_ActivityKernel8 to Kernel13, Memcpy5 to 7, Memset4 and 5 and MemcpyPtoP4, as compiling the headers of all 15
releases has shown. Later versions add fields at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RecordingError
from .cupti_library import CONCURRENT_KERNEL, DRIVER, EXTERNAL, MEMCPY, MEMCPY_PEER, MEMSET, RUNTIME

Buffer = bytes | memoryview
_COMMON = {"start": ("<u8", 16), "end": ("<u8", 24)}
_TRANSFER = {**_COMMON, "bytes": ("<u8", 8), "device": ("<u4", 32), "stream": ("<u4", 40)}
_COPY = {**_TRANSFER, "copy_kind": ("<u1", 4), "source": ("<u1", 5), "target": ("<u1", 6)}
_CALL = {
    "number": ("<u4", 4),
    "start": ("<u8", 8),
    "end": ("<u8", 16),
    "thread": ("<u4", 28),
    "correlation": ("<u4", 32),
}
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
    },
    MEMCPY: {**_COPY, "correlation": ("<u4", 44)},
    MEMSET: {**_TRANSFER, "target": ("<u2", 50), "correlation": ("<u4", 44)},
    MEMCPY_PEER: {**_COPY, "correlation": ("<u4", 60)},
    DRIVER: _CALL,
    RUNTIME: _CALL,
}
# Bytes of a record (kernel, copy, set, copy between GPUs) since a CUPTI_API_VERSION: sizeof() of each release.
_SIZES = (
    (18, (208, 88, 88, 96)),  # CUDA 12.0 to 12.6; 11.8 also says 18, but has 200
    (26, (208, 96, 88, 96)),  # 12.8
    (130001, (216, 96, 88, 96)),
    (130101, (224, 96, 88, 96)),
    (130301, (232, 96, 88, 96)),
    (130401, (248, 112, 104, 96)),
)
# CUpti_ActivityAPI and CUpti_ActivityExternalCorrelation (which Kineto asks for): the same from CUDA 11.8 to 13.4.
_SAME = {DRIVER: 40, RUNTIME: 40, EXTERNAL: 24}
_LOOK = 256  # records that `_count_same` compares at once
_LONG = 24
"""Records of one kind in a row after which numpy counts the rest of the run."""
MOST_THREADS, MOST_DEVICES = 1024, 1024
"""Threads of a block on every GPU so far, and more GPUs than any machine has; a record beyond is not a kernel's."""


def sizes_of_version(version: int) -> dict[int, int]:
    """Return the bytes of a record by kind, as the header of that version has it."""
    sizes = next((s for since, s in reversed(_SIZES) if version >= since), _SIZES[0][1])
    return dict(zip((CONCURRENT_KERNEL, MEMCPY, MEMSET, MEMCPY_PEER), sizes, strict=True)) | _SAME


class UnknownRecordError(RecordingError):
    """A record has a kind whose length is not known."""


Places = Mapping[int, NDArray[np.int64]]


def split_records(data: Buffer, sizes: Mapping[int, int], places: Places | None = None) -> dict[int, NDArray[Any]]:
    """Return the records of a buffer by kind, each kind as one structured array with the names of `FIELDS`."""
    whole = np.frombuffer(data, np.uint8)
    found: dict[int, NDArray[Any]] = {}
    for kind, own in (find_places(data, sizes) if places is None else places).items():
        if kind in FIELDS:
            size = sizes[kind]
            first, end = int(own[0]), int(own[-1]) + size
            if end - first == size * len(own):  # one run: nothing to copy
                found[kind] = whole[first:end].view(_dtype(kind, size))
            else:
                rows = np.lib.stride_tricks.as_strided(whole, (max(len(whole) - size + 1, 0), size), (1, 1))
                found[kind] = rows[own].view(_dtype(kind, size))[:, 0]
    return found


def find_distinct(data: Buffer, places: NDArray[np.int64], kind: int, field: str) -> list[int]:
    """Return the distinct values of a field in records of one kind."""
    dtype, offset = FIELDS[kind][field]
    width = np.dtype(dtype).itemsize
    words = np.frombuffer(data, dtype, count=len(data) // width)
    found: list[int] = np.unique(words[(places + offset) // width]).tolist()
    return found


def find_places(data: Buffer, sizes: Mapping[int, int]) -> dict[int, NDArray[np.int64]]:
    """Find where the records of each kind begin.

    Records lie one after the other, and the length of one depends on its kind. Most programs launch kernels in long
    runs, whose length numpy finds. Others copy or set a few bytes after every few kernels (a mixture of experts): there
    a plain loop, 0.2 us a record, holds the interpreter for a tenth of the time that numpy would need for short runs.
    """
    words = memoryview(data)[: len(data) // 4 * 4].cast("B").cast("I")
    parts: dict[int, list[NDArray[np.int64]]] = {}
    single: dict[int, list[int]] = {}  # places since the last long run of a kind
    at, end, before, alike = 0, len(data), -1, 0
    while at + 4 <= end:
        kind = words[at >> 2]
        size = sizes.get(kind)
        if size is None:
            raise UnknownRecordError(
                f"CUPTI wrote a record of kind {kind}, which is not known", fix="record it with mode='operators'"
            )
        if at + size > end:  # the last record may be cut off
            break
        if kind != before:
            before, alike, own = kind, 0, single.setdefault(kind, [])
        own.append(at)
        at += size
        alike += 1
        if alike == _LONG:
            kinds = np.frombuffer(data, "<u4", count=len(words))[at >> 2 :: size >> 2][: (end - at) // size]
            count, alike = _count_same(kinds, kind), 0
            parts.setdefault(kind, []).extend((np.array(own, np.int64), _steps(count) * size + at))
            own.clear()
            at += count * size
    for kind, places in single.items():
        parts.setdefault(kind, []).append(np.array(places, np.int64))
    return {kind: np.concatenate(arrays) for kind, arrays in parts.items()}


def _count_same(kinds: NDArray[np.uint32], kind: int) -> int:
    """Return how many records of `kind` begin a list. Looks at parts of it: the list is long, most runs are short."""
    done = 0
    while done < len(kinds):
        part = kinds[done : done + _LOOK]
        same = part == kind
        if not same.all():
            return done + int(same.argmin())
        done += len(part)
    return done


@functools.lru_cache(maxsize=4096)
def _steps(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64)


def are_kernels(records: NDArray[Any]) -> bool:
    """Return whether all records can be kernels; if not, their fields do not lie where we read them."""
    grid, block = records["grid"], records["block"].astype(np.int64)
    return bool(
        (grid >= 1).all()
        and (block >= 1).all()
        and (block.prod(axis=1) <= MOST_THREADS).all()
        and (records["end"] >= records["start"]).all()
        and (records["device"] < MOST_DEVICES).all()
        and (records["name"] != 0).all()
    )


@functools.cache
def _dtype(kind: int, size: int) -> Any:
    """Return the structured type of a record: `FIELDS` at their offsets in `size` bytes."""
    formats, offsets = zip(*FIELDS[kind].values(), strict=True)
    return np.dtype({"names": list(FIELDS[kind]), "formats": formats, "offsets": offsets, "itemsize": size})
