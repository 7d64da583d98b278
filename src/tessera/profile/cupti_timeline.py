"""Makes a `Timeline` of CUPTI's records. Names are as Kineto writes them, since one run may have rows of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..record import CODE
from ..timeline.columns import NONE, UNTRACED, Builder, Launch, Timeline
from ..timeline.transfers import GRAPH_LAUNCH, collective_type, copy, is_collective
from .cupti_collector import RecordBytes
from .cupti_library import CALLS, CONCURRENT_KERNEL, DRIVER, MEMSET
from .demangle import demangle

# CUpti_ActivityMemcpyKind and CUpti_ActivityMemoryKind, in Kineto's words.
_COPIES = ("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_MEMORIES = ("Unknown", "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
# The driver's calls that Kineto shows, and the runtime's calls that it leaves out (lists in CuptiActivityProfiler).
_LAUNCHES = ("cuLaunch", "cuGraphLaunch", "cuMemcpy", "cuMemset")
_QUERIES = (
    "cudaGetDevice", "cudaSetDevice", "cudaGetLastError", "cudaPeekAtLastError", "cudaEventCreate", "cudaEventDestroy",
    "cudaEventQuery", "cudaEventRecord", "cudaStreamIsCapturing", "cudaStreamGetCaptureInfo", "cudaFuncGetAttributes",
    "cudaOccupancy", "cudaDeviceGetAttribute", "cudaPointerGetAttributes", "cudaThreadExchange",
    "cudaFuncSetAttribute", "cudaGetDriverEntryPoint", "cudaDeviceGetStreamPriorityRange",
)  # fmt: skip
# Random odd numbers: two rows that differ get the same sum (modulo 2**64) with a chance of 1e-12.
_MIX = np.random.default_rng(0).integers(1, 2**63, 9, dtype=np.uint64) | np.uint64(1)


def read_records(piece: RecordBytes) -> Timeline:
    """Return the rows of some buffers. Records that CUPTI could not time are left out; a note counts them."""
    builder = Builder()
    untimed = 0
    for kind, found in piece.split().items():
        is_timed = found["start"] != 0
        records = found if is_timed.all() else found[is_timed]
        untimed += len(found) - len(records)
        if not len(records):
            continue
        if kind in CALLS:
            records, columns = _calls(builder, records, kind, piece.calls)
        elif kind == CONCURRENT_KERNEL:
            columns = _kernels(builder, records, piece.names)
        else:
            columns = _transfers(builder, records, is_set=kind == MEMSET)
        columns |= {edge + "_ns": piece.to_epoch_ns(records[edge]) for edge in ("start", "end")}
        kept = ("thread", "correlation") if kind in CALLS else ("device", "stream", "correlation")
        columns |= {name: records[name] for name in kept}
        if kind not in CALLS:
            columns["external"] = np.array(UNTRACED)
        builder.extend(columns, len(records))
    if untimed:
        builder.notes.append(f"CUPTI could not time {untimed} kernels and copies: they are left out")
    return builder.build(last=True)


def _calls(
    builder: Builder, records: NDArray[Any], kind: int, names: Mapping[tuple[int, int], str]
) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Return the calls that Kineto would show (launch, copy, allocate, wait), as rows of the host."""
    numbers, which = np.unique(records["number"], return_inverse=True)
    texts = [names.get((kind, number), "unknown call") for number in numbers.tolist()]
    wanted = [text.startswith(_LAUNCHES) if kind == DRIVER else not text.startswith(_QUERIES) for text in texts]
    keep = np.array(wanted, bool)[which]
    kinds = [CODE["graph_launch" if text.startswith(GRAPH_LAUNCH) else "runtime"] for text in texts]
    rows = {"kind": np.array(kinds, np.int64), "name": np.array([builder.intern(t) for t in texts], np.int64)}
    return records[keep], {column: values[which][keep] for column, values in rows.items()}


def _kernels(builder: Builder, records: NDArray[Any], names: Mapping[int, str]) -> dict[str, NDArray[Any]]:
    shared = records["static_shared"].astype(np.int64) + records["dynamic_shared"]
    shape = [records["registers"], *records["grid"].T, *records["block"].T, shared, records["name"]]
    keys = np.zeros(len(records), np.uint64)
    for part, mix in zip(shape, _MIX, strict=True):
        keys += part.astype(np.uint64) * mix
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    rows = []
    for at, key, pointer in zip(first.tolist(), keys[first].tolist(), records["name"][first].tolist(), strict=True):
        mangled = names.get(pointer, "unknown kernel")
        known = _known.get((key, mangled))
        if known is None:
            if len(_known) > _MOST_KNOWN:
                _known.clear()
            known = _known[key, mangled] = _describe_kernel(records[at], int(shared[at]), demangle(mangled))
        kind, name, launch = known
        rows.append((kind, builder.intern(name), builder.intern_launch(launch)))
    columns = np.array(rows, np.int64)[which]
    node = records["graph_node"].astype(np.int64)
    return {**dict(zip(("kind", "name", "launch"), columns.T, strict=True)), "graph_node": np.where(node, node, NONE)}


_known: dict[tuple[int, str], tuple[int, str, Launch]] = {}  # (key, mangled name) -> result of `_describe_kernel`
_MOST_KNOWN = 50_000  # a program whose shapes change makes new launch sizes without end


def _describe_kernel(record: Any, shared: int, name: str) -> tuple[int, str, Launch]:
    communicates = is_collective(name)
    launch = Launch(
        grid=tuple(record["grid"].tolist()),
        block=tuple(record["block"].tolist()),
        registers=int(record["registers"]),
        shared_bytes=shared,
        collective_type=collective_type(name.partition("(")[0]) if communicates else None,
    )
    return CODE["collective" if communicates else "kernel"], name, launch


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
