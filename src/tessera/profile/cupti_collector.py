"""Collects every kernel, copy and set of a process for the whole run, by keeping CUPTI's buffers as they are.

::

    launching thread ─► CUPTI ─► buffer full ─► deque ─► `take`: bytes + names of new kernels ─► run file
                                     ▲                      on the session's thread, a few times a second
                          empty ones ┘

Nothing else happens in the program. `cupti_records` decodes the bytes, in another process or later.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RecordingError
from .cupti_library import CALLS, CONCURRENT_KERNEL, KINDS, Cupti, CuptiError, open_cupti
from .cupti_records import (
    Places,
    UnknownRecordError,
    are_kernels,
    find_distinct,
    find_places,
    sizes_of_version,
    split_records,
)

MOST_BYTES, LEAST_BYTES = 1 << 20, 1 << 14
"""Largest and smallest size of a buffer: 5,000 and 75 kernels."""
BUFFERS_A_FLUSH = 2
"""How many buffers should become full between two flushes. CUPTI does not hand over a buffer that has a running kernel
in it, and in most programs a kernel always runs. So the size of the buffers follows the rate of the kernels."""
MOST_WAITING = 256 << 20
"""Most bytes that wait to be taken. Beyond this CUPTI gets no buffer and drops records; a note counts them."""
_NOTHING = (0, 0)  # no address, no bytes
_NO_BUFFER = np.empty(0, np.uint8)
_SAME_CLOCK_NS = 1_000_000  # CUPTI's times this close to the wall clock's are times of the wall clock


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBytes:
    """Records of some buffers, with the names that they refer to. `sizes` has the bytes of a record by kind.

    `places` is where the records of each kind begin. `names` has the kernels' names by address, `calls` the names of
    the host's calls by kind and number.

    `clock` has two moments as (CUPTI's time, epoch ns). CUPTI's time is that of the wall clock until Kineto has run in
    the process; from then on it counts ticks of the processor.
    """

    data: bytes
    names: Mapping[int, str]
    calls: Mapping[tuple[int, int], str]
    sizes: Mapping[int, int]
    places: Places
    clock: tuple[tuple[int, int], tuple[int, int]]

    def split(self) -> dict[int, NDArray[Any]]:
        """Return an array of the records of each kind (`cupti_records.FIELDS`)."""
        return split_records(self.data, self.sizes, self.places)

    def to_epoch_ns(self, times: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Convert times of records to nanoseconds of the wall clock."""
        (first, first_ns), (last, last_ns) = self.clock
        elapsed = times.astype(np.int64) - first
        if last == first or abs(last - last_ns) < _SAME_CLOCK_NS:
            return elapsed + first
        rate = (last_ns - first_ns) / (last - first)
        found: NDArray[np.int64] = first_ns + np.rint(elapsed * rate).astype(np.int64)
        return found


class CuptiCollector:
    """Keeps CUPTI's records from `start` to `stop`. Meanwhile any one thread may call `take`."""

    def __init__(self, cupti: Cupti | None = None, *, most_bytes: int = MOST_BYTES) -> None:
        self._cupti = cupti or open_cupti()
        self._most_bytes, self._buffer_bytes = most_bytes, min(LEAST_BYTES, most_bytes)
        self._waiting = self._came = 0  # bytes
        self._lent: dict[int, NDArray[np.uint8]] = {}
        self._empty: deque[NDArray[np.uint8]] = deque()
        self._full: deque[tuple[NDArray[np.uint8], int]] = deque()
        self._lock = threading.Lock()  # of `take`, which is called by the session and once more at the end
        self._sizes = sizes_of_version(self._cupti.version)
        self._is_checked = False
        self._running: tuple[int, ...] = ()
        self._calls: dict[tuple[int, int], str] = {}
        self._names: dict[int, str] = {}
        self._clock_began = self._clock_now = (0, 0)
        self.dropped = 0

    @property
    def running(self) -> bool:
        """Whether records are being collected."""
        return bool(self._running)

    def start(self, *, calls: bool = False) -> None:
        """Collect records from now on, `calls` of the host too; again, if another client had CUPTI in between."""
        kinds = (*KINDS, *CALLS) if calls else KINDS
        self._cupti.register(self._lend_buffer, self._receive_buffer)
        self._cupti.number_threads(as_system=calls)
        enabled: list[int] = []
        try:
            for kind in kinds:
                self._cupti.enable(kind)
                enabled.append(kind)
        except CuptiError:
            for kind in enabled:
                self._cupti.disable(kind)
            raise
        self._clock_began = self._clock_now = self._read_clock()
        self._running = kinds

    def stop(self) -> None:
        """Stop collecting. Synchronise the device before: kernels that have not ended are not in the records."""
        if not self._running:
            return
        kinds, self._running = self._running, ()
        for kind in kinds:
            self._cupti.disable(kind)
        self._flush(forced=True)

    def flush(self, *, forced: bool = False) -> None:
        """Let CUPTI hand over complete buffers; to be called a few times a second. `forced`: incomplete buffers too."""
        if self._running:
            self._flush(forced=forced)
            came, self._came = self._came, 0
            self._buffer_bytes = min(max(came // BUFFERS_A_FLUSH, LEAST_BYTES), self._most_bytes)

    def _flush(self, *, forced: bool) -> None:
        self._clock_now = self._read_clock()
        self._cupti.flush(forced=forced)
        self.dropped += self._cupti.count_dropped()

    def _read_clock(self) -> tuple[int, int]:
        """Return CUPTI's time and the wall clock's time at one moment."""
        before_ns = time.time_ns()
        return self._cupti.timestamp_ns(), (before_ns + time.time_ns()) // 2

    def take(self) -> RecordBytes | None:
        """Return the records that were handed over since the last call; None if there are none.

        They are joined into one piece, since each call of numpy takes the interpreter from the program being measured.
        """
        with self._lock:
            full = [self._full.popleft() for _ in range(len(self._full))]
            self._waiting = 0
            filled = [buffer[:used] for buffer, used in full if used]
            try:
                return self._keep(filled) if filled else None
            finally:
                self._empty.extend(buffer for buffer, _ in full if len(buffer) == self._buffer_bytes)

    # -- called by CUPTI, on its own thread or on one that launches a kernel ----------------------------------------

    def _lend_buffer(self) -> tuple[int, int]:
        if self._waiting > MOST_WAITING:
            return _NOTHING
        try:
            buffer = self._empty.popleft()
        except IndexError:
            buffer = _NO_BUFFER
        if len(buffer) != self._buffer_bytes:
            buffer = np.empty(self._buffer_bytes, np.uint8)
        address = buffer.ctypes.data
        self._lent[address] = buffer
        return address, len(buffer)

    def _receive_buffer(self, address: int, used: int) -> None:
        buffer = self._lent.pop(address, None)
        if buffer is not None:
            self._waiting += len(buffer)
            self._came += used
            if self._came > 2 * self._buffer_bytes:  # faster than expected: enlarge buffers before the next flush
                self._buffer_bytes = min(2 * self._buffer_bytes, self._most_bytes)
            self._full.append((buffer, used))

    # -- bytes and names -------------------------------------------------------------------------------------------

    def _keep(self, buffers: Sequence[NDArray[np.uint8]]) -> RecordBytes:
        for buffer in buffers:
            if not self._is_checked:
                self._check_layout(buffer)
        data = b"".join(buffers)  # type: ignore[arg-type]
        try:
            places = find_places(data, self._sizes)
        except UnknownRecordError:  # another client in the process has enabled other kinds of records
            for buffer in buffers:
                self._learn_sizes(buffer)
            places = find_places(data, self._sizes)
        for kind in CALLS:
            for number in find_distinct(data, places[kind], kind, "number") if kind in places else ():
                if (kind, number) not in self._calls:
                    self._calls[kind, number] = self._cupti.name_call(kind, number)
        kernels = places.get(CONCURRENT_KERNEL)
        for address in () if kernels is None else find_distinct(data, kernels, CONCURRENT_KERNEL, "name"):
            if address not in self._names:
                self._names[address] = _read_text(address) or "unknown kernel"
        return RecordBytes(
            data=data,
            names=self._names,
            calls=self._calls,
            sizes=dict(self._sizes),
            places=places,
            clock=(self._clock_began, self._clock_now),
        )

    def _check_layout(self, buffer: NDArray[np.uint8]) -> None:
        """Compare our reading of a buffer with CUPTI's own, and learn the sizes that our headers do not have."""
        data = buffer.data
        walked = self._learn_sizes(buffer)
        places = find_places(data, self._sizes)
        found = sum(map(len, places.values()))
        why = f"it reads {walked} records where {found} are found" if found != walked else ""
        kernels = split_records(data, self._sizes, places).get(CONCURRENT_KERNEL)
        if kernels is not None and not (are_kernels(kernels) and all(map(_read_text, set(kernels["name"].tolist())))):
            why = "a kernel has a grid, a block, a time or a name that none can have"
        if why:
            raise RecordingError(
                f"CUPTI {self._cupti.version} writes records in a way that is not known",
                why=why,
                fix="record it with mode='operators', and report this version",
            )
        self._is_checked = kernels is not None

    def _learn_sizes(self, buffer: NDArray[np.uint8]) -> int:
        """Take the sizes of records from CUPTI's own walk through a buffer; return the number of records."""
        address, used = buffer.ctypes.data, len(buffer)
        walked = [*self._cupti.walk(address, used), (0, address + used)]
        for (kind, at), (_, following) in itertools.pairwise(walked):
            self._sizes[kind] = following - at
        return len(walked) - 1


_LONGEST_NAME = 1 << 14  # bytes
_memory: list[int] = []  # descriptor of /proc/self/mem, once it is open


def _read_text(address: int) -> str | None:
    """Return the text at an address of this process, or None. A wrong address must not end the program."""
    if not _memory:
        try:
            _memory.append(os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:  # a container without /proc: trust the address, which is right for known layouts
            return ctypes.string_at(address).decode(errors="replace") if address else None
    try:
        text, end, _ = os.pread(_memory[0], _LONGEST_NAME, address).partition(b"\0")
    except (OSError, OverflowError):
        return None
    return text.decode(errors="replace") if end and text else None
