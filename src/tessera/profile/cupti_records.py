"""CUPTI's activity records as arrays: one layout for CUDA 11.8 to 13.4, in which only the length of a record differs.

Every field used here lies at the same place in CUpti_ActivityKernel8 to Kernel13, Memcpy5 to 7, Memset4 and 5 and
MemcpyPtoP4: checked by compiling the headers of all 15 releases. Later ones add fields at the end.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RecordingError
from .cupti_library import CONCURRENT_KERNEL, MEMCPY, MEMCPY_PEER, MEMSET

Buffer = bytes | memoryview
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
        "target": ("<u2", 50),
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
_kind_at = struct.Struct("<I").unpack_from


def sizes_of_version(version: int) -> dict[int, int]:
    """Bytes of each kind's record as that version's header has it."""
    sizes = next((s for since, s in reversed(_SIZES) if version >= since), _SIZES[0][1])
    return dict(zip((CONCURRENT_KERNEL, MEMCPY, MEMSET, MEMCPY_PEER), sizes, strict=True))


def split_records(data: Buffer, sizes: Mapping[int, int]) -> dict[int, NDArray[Any]]:
    """The records of a buffer by kind, each kind as one structured array with the names of `FIELDS`."""
    whole = np.frombuffer(data, np.uint8)
    return {
        kind: whole[np.array(places)[:, None] + np.arange(sizes[kind])].view(_dtype(kind, sizes[kind]))[:, 0]
        for kind, places in find_places(data, sizes).items()
    }


def find_names(data: Buffer, sizes: Mapping[int, int]) -> list[int]:
    """The addresses of the names of a buffer's kernels, each once: all that must be looked at in the process itself."""
    places = find_places(data, sizes).get(CONCURRENT_KERNEL, [])
    words = np.frombuffer(data, "<u8", count=len(data) // 8)
    found = np.unique(words[(np.array(places, np.int64) + FIELDS[CONCURRENT_KERNEL]["name"][1]) >> 3])
    return [address for address in found.tolist() if address]


def find_places(data: Buffer, sizes: Mapping[int, int]) -> dict[int, list[int]]:
    """Where the records of each kind begin.

    They lie one after the other, and how long one is depends on its kind. A loop in Python takes 0.2 us a record: numpy
    is slower here, as copies and sets lie between the kernels and runs of one kind are short.
    """
    places: dict[int, list[int]] = {}
    at, end = 0, len(data)
    shortest = min(sizes.values())
    while at + shortest <= end:
        (kind,) = _kind_at(data, at)
        size = sizes.get(kind)
        if size is None:
            raise RecordingError(
                f"CUPTI wrote a record of kind {kind}, which was not asked for", fix="record it with mode='timeline'"
            )
        if at + size > end:
            break  # cut off within a record
        try:
            places[kind].append(at)
        except KeyError:
            places[kind] = [at]
        at += size
    return places


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
