"""Calls NVIDIA's CUPTI through ctypes: the driver fills activity buffers, and they are handed over whole.

CUPTI asks for an empty buffer and gives it back full: two or three calls for ten thousand kernels. Python does nothing
per kernel, so this costs 2% of a step where Kineto with operators costs 30% (benchmarks/device/cupti_light.py).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import MeasurementError

MEMCPY, MEMSET, DRIVER, RUNTIME, CONCURRENT_KERNEL, MEMCPY_PEER, EXTERNAL = 1, 2, 4, 5, 10, 22, 39
"""Kinds of records (CUpti_ActivityKind)."""
KINDS = (MEMCPY, MEMSET, CONCURRENT_KERNEL, MEMCPY_PEER)
CALLS = (DRIVER, RUNTIME)
"""Calls of the host, and their threads. Each costs a microsecond, so they are recorded for a few steps only."""
FLUSH_FORCED = 1
_DOMAINS = {DRIVER: 1, RUNTIME: 2}  # CUpti_CallbackDomain
_BY_PTHREAD, _BY_SYSTEM = 0, 1  # CUpti_ActivityThreadIdType
_END_OF_BUFFER = 12  # CUPTI_ERROR_MAX_LIMIT_REACHED

_REQUESTED = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_COMPLETED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
# Nsight Systems and Compute set these: they load themselves into a process through the first one.
_OTHER_CLIENTS = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")


class CuptiError(MeasurementError):
    """CUPTI is missing, is used by another profiler, or refused a call."""


class Cupti:
    """The calls of CUPTI that are needed to collect its activity records."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as exc:
            raise CuptiError("CUPTI cannot be loaded", why=str(exc), fix="reinstall torch with CUDA") from exc
        self.path = path
        self._callbacks: tuple[Any, Any] | None = None
        self._library.cuptiActivityGetNextRecord.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_void_p),
        ]

    @property
    def version(self) -> int:
        """CUPTI_API_VERSION: 18 for CUDA 11.8 and 12.0, 28 for 12.9, 130001 for 13.0."""
        number = ctypes.c_uint32()
        self._call("cuptiGetVersion", ctypes.byref(number))
        return number.value

    def timestamp_ns(self) -> int:
        """Return the present time of the clock that the records use."""
        number = ctypes.c_uint64()
        self._call("cuptiGetTimestamp", ctypes.byref(number))
        return number.value

    def register(self, give_buffer: Any, take_buffer: Any) -> None:
        """Set `give_buffer() -> (address, bytes)`, which gives empty buffers, and `take_buffer(address, used bytes)`.

        CUPTI's thread calls them, or a thread that launches a kernel. A process has one such pair: when another client
        registers its own, as Kineto does, ours is not called any more.
        """

        def requested(buffer: Any, size: Any, most_records: Any) -> None:
            buffer[0], size[0] = give_buffer()
            most_records[0] = 0  # as many as fit

        def completed(_context: Any, _stream: int, buffer: int, _size: int, used: int) -> None:
            take_buffer(buffer, used)

        callbacks = (_REQUESTED(requested), _COMPLETED(completed))
        self._call("cuptiActivityRegisterCallbacks", *callbacks)
        self._callbacks = callbacks  # CUPTI keeps their addresses

    def enable(self, kind: int) -> None:
        """Record a kind of activity from now on."""
        self._call("cuptiActivityEnable", kind)

    def disable(self, kind: int) -> None:
        """Stop recording a kind of activity."""
        self._call("cuptiActivityDisable", kind)

    def flush(self, *, forced: bool = False) -> None:
        """Let CUPTI hand over the buffers whose records are all complete; `forced`: all buffers."""
        self._call("cuptiActivityFlushAll", FLUSH_FORCED if forced else 0)

    def number_threads(self, *, as_system: bool) -> None:
        """Number the threads of calls as the system does, which Kineto's operators use too; else as pthread does."""
        self._call("cuptiSetThreadIdType", _BY_SYSTEM if as_system else _BY_PTHREAD)

    def name_call(self, kind: int, number: int) -> str:
        """Return the name of a call of the driver or the runtime, without its version."""
        text = ctypes.c_char_p()
        status = self._library.cuptiGetCallbackName(_DOMAINS[kind], number, ctypes.byref(text))
        name = text.value.decode(errors="replace") if status == 0 and text.value else f"call {number}"
        return re.sub(r"(_v\d+|_ptsz|_ptds)+$", "", name)

    def count_dropped(self) -> int:
        """Return how many records were lost since the last call, because there was no buffer."""
        number = ctypes.c_size_t()
        self._call("cuptiActivityGetNumDroppedRecords", None, 0, ctypes.byref(number))
        return number.value

    def walk(self, address: int, used: int) -> Iterator[tuple[int, int]]:
        """Yield (kind, address) of each record of a buffer as CUPTI reads it. Slow; used to check our own reading."""
        record = ctypes.c_void_p()
        while True:
            status = self._library.cuptiActivityGetNextRecord(address, used, ctypes.byref(record))
            if status == _END_OF_BUFFER or status != 0 or record.value is None:
                return
            yield ctypes.c_uint32.from_address(record.value).value, record.value

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CuptiError(f"this CUPTI has no {name}", why=self.path, fix="CUDA 11.8 or newer has it") from None
        status = function(*arguments)
        if status:
            raise CuptiError(f"{name} failed", why=self._explain(status), fix="trace with mode='operators'")

    def _explain(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuptiGetResultString(status, ctypes.byref(text))
        return f"CUPTI error {status}: {text.value.decode(errors='replace') if text.value else 'unknown'}"


def open_cupti() -> Cupti:
    """Open the CUPTI of this process: the library that is loaded, else torch's or the toolkit's.

    Raise CuptiError if another profiler watches this process: it would lose its records.
    """
    for variable in _OTHER_CLIENTS:
        if os.environ.get(variable):
            raise CuptiError(
                "another profiler watches this process", why=f"{variable} is set", fix="run it without that profiler"
            )
    for path in _candidates():
        return Cupti(path)
    raise CuptiError("CUPTI was not found", why="neither torch nor a CUDA toolkit has it", fix="pip install torch")


def find_loaded(name: str) -> str | None:
    """Return the path of a library that is loaded in this process; a second copy would not know the first's state."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    match = re.search(rf"^\S+ \S+ \S+ \S+ \S+\s+(/\S*/{name}\.so[.\d]*)$", maps, re.MULTILINE)
    return match[1] if match else None


def _candidates() -> Iterator[str]:
    loaded = find_loaded("libcupti")
    if loaded is not None:
        yield loaded
    package = importlib.util.find_spec("nvidia")
    homes = [Path(place) for place in package.submodule_search_locations or ()] if package else []
    folders = [home / part / "lib" for home in homes for part in ("cu13", "cuda_cupti")]
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    for folder in [*folders, toolkit / "extras" / "CUPTI" / "lib64", toolkit / "lib64"]:
        for file in sorted(folder.glob("libcupti.so.*"), key=lambda p: len(p.name)):
            yield str(file)
