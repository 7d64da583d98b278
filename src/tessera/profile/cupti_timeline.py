"""CUPTI's records as a `Timeline`, with the names that Kineto gives: both may be in one run."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..record import CODE
from ..timeline.columns import NONE, UNTRACED, Builder, Launch, Timeline
from ..timeline.transfers import collective_type, copy, is_collective
from .cupti_collector import RecordBytes
from .cupti_library import CONCURRENT_KERNEL, MEMSET

# CUpti_ActivityMemcpyKind and CUpti_ActivityMemoryKind, in Kineto's words.
_COPIES = ("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_MEMORIES = ("Unknown", "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
# Odd multipliers: rows that differ in one column differ in the sum (modulo 2**64) but for a chance of 1e-12.
_MIX = np.random.default_rng(0).integers(1, 2**63, 9, dtype=np.uint64) | np.uint64(1)


def read_records(pieces: Iterable[RecordBytes]) -> Timeline:
    """The rows of some buffers. Records that CUPTI could not time are left out, and counted in a note."""
    builder = Builder()
    untimed = 0
    for piece in pieces:
        for kind, found in piece.split().items():
            records = found[found["start"] != 0]
            untimed += len(found) - len(records)
            if len(records):
                columns = _kernels(builder, records, piece.names) if kind == CONCURRENT_KERNEL else None
                columns = columns or _transfers(builder, records, is_set=kind == MEMSET)
                columns |= {edge + "_ns": piece.to_epoch_ns(records[edge]) for edge in ("start", "end")}
                columns |= {name: records[name].astype(np.int64) for name in ("device", "stream", "correlation")}
                columns["external"] = np.full(len(records), UNTRACED)
                builder.extend(columns, len(records))
    if untimed:
        builder.notes.append(f"CUPTI could not time {untimed} kernels and copies: they are left out")
    return builder.build(last=True)


def _kernels(builder: Builder, records: NDArray[Any], names: Mapping[int, str]) -> dict[str, NDArray[Any]]:
    shared = records["static_shared"].astype(np.int64) + records["dynamic_shared"]
    shape = [records["registers"], *records["grid"].T, *records["block"].T, shared, records["name"]]
    keys = sum((part.astype(np.uint64) * mix for part, mix in zip(shape, _MIX, strict=True)), np.uint64(0))
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    rows = [_intern_kernel(builder, records[at], int(shared[at]), names) for at in first.tolist()]
    kind, name, launch = (np.array(part, np.int64)[which] for part in zip(*rows, strict=True))
    return {"kind": kind, "name": name, "launch": launch}


def _intern_kernel(builder: Builder, record: Any, shared: int, names: Mapping[int, str]) -> tuple[int, int, int]:
    name = demangle(names.get(int(record["name"]), "unknown kernel"))
    communicates = is_collective(name)
    launch = Launch(
        grid=tuple(record["grid"].tolist()),
        block=tuple(record["block"].tolist()),
        registers=int(record["registers"]),
        shared_bytes=shared,
        collective_type=collective_type(name.partition("(")[0]) if communicates else None,
    )
    return CODE["collective" if communicates else "kernel"], builder.intern(name), builder.intern_launch(launch)


def _transfers(builder: Builder, records: NDArray[Any], *, is_set: bool) -> dict[str, NDArray[Any]]:
    target = records["target"].astype(np.int64)
    keys = target
    if not is_set:
        keys = (records["copy_kind"].astype(np.int64) << 16) + (records["source"].astype(np.int64) << 8) + target
    found, which = np.unique(keys, return_inverse=True)
    texts = [_name_transfer(key, is_set=is_set) for key in found.tolist()]
    launches = [NONE if is_set else builder.intern_launch(copy(text)) for text in texts]
    return {
        "kind": np.full(len(records), CODE["memset" if is_set else "memcpy"], np.int64),
        "name": np.array([builder.intern(text) for text in texts], np.int64)[which],
        "launch": np.array(launches, np.int64)[which],
        "bytes": records["bytes"].astype(np.int64),
    }


def _name_transfer(key: int, *, is_set: bool) -> str:
    if is_set:
        return f"Memset ({_word(_MEMORIES, key)})"
    kind, source, target = key >> 16, key >> 8 & 0xFF, key & 0xFF
    return f"Memcpy {_word(_COPIES, kind)} ({_word(_MEMORIES, source)} -> {_word(_MEMORIES, target)})"


def _word(words: tuple[str, ...], number: int) -> str:
    return words[number] if number < len(words) else words[0]


@functools.lru_cache(maxsize=4096)
def demangle(name: str) -> str:
    """A C++ name as people write it, by the C++ library that torch has loaded; as it is where there is none."""
    library = _cxx()
    if library is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    address = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not address:
        return name
    try:
        return ctypes.string_at(address).decode(errors="replace")
    finally:
        _c().free(ctypes.c_void_p(address))


@functools.cache
def _cxx() -> Any:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    return library


@functools.cache
def _c() -> Any:
    return ctypes.CDLL(None)
