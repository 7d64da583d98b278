"""Every kernel, copy and set of a process, for the whole run: CUPTI's buffers kept as they are, names beside them.

::

    launching thread ─► CUPTI ─► buffer full ─► deque ─► `take`: bytes + names of new kernels ─► run file
                                     ▲                      on the session's thread, a few times a second
                          empty ones ┘

Nothing else happens in the program. `cupti_records` makes arrays of the bytes, in another process or later.
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
"""Of a buffer: 5,000 kernels, and 75."""
BUFFERS_A_FLUSH = 2
"""CUPTI hands over no buffer with a running kernel in it, and in most programs one runs always: so the size follows the
kernels that come, that a buffer is full (and its kernels safe) before the next flush."""
MOST_WAITING = 256 << 20
"""Bytes that nobody has taken. Beyond that CUPTI gets no buffer and drops records; a note counts them."""
_NOTHING = (0, 0)  # no address, no bytes
_NO_BUFFER = np.empty(0, np.uint8)
_SAME_CLOCK_NS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBytes:
    """Records of some buffers, and the names that their kernels point to. `sizes`: bytes of a record by kind.

    `places` is where the records of each kind begin, `calls` names the host's calls by kind and number.

    `clock` has two moments as (CUPTI's time, epoch ns). CUPTI tells the time of the wall clock, unless Kineto has run
    in the process: from then on it counts ticks of the processor.
    """

    data: bytes
    names: Mapping[int, str]
    calls: Mapping[tuple[int, int], str]
    sizes: Mapping[int, int]
    places: Places
    clock: tuple[tuple[int, int], tuple[int, int]]

    def split(self) -> dict[int, NDArray[Any]]:
        """Arrays by kind (`cupti_records.FIELDS`)."""
        return split_records(self.data, self.sizes, self.places)

    def to_epoch_ns(self, times: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Times of records as nanoseconds of the wall clock."""
        (first, first_ns), (last, last_ns) = self.clock
        elapsed = times.astype(np.int64) - first
        if last == first or abs(last - last_ns) < _SAME_CLOCK_NS:
            return elapsed + first
        rate = (last_ns - first_ns) / (last - first)
        found: NDArray[np.int64] = first_ns + np.rint(elapsed * rate).astype(np.int64)
        return found


class CuptiCollector:
    """Keeps CUPTI's records from `start` to `stop`. `take` may be called from any one thread meanwhile."""

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
        """Whether records are being kept."""
        return bool(self._running)

    def start(self, *, calls: bool = False) -> None:
        """Keep records from now on, `calls` of the host too; also after another client has had CUPTI in between."""
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
        """Keep no more. What was launched and has not ended is not in the records: synchronise the device before."""
        if not self._running:
            return
        kinds, self._running = self._running, ()
        for kind in kinds:
            self._cupti.disable(kind)
        self._flush(forced=True)

    def flush(self, *, forced: bool = False) -> None:
        """Have CUPTI hand over what is complete; to be called a few times a second. `forced`: what is not, too."""
        if self._running:
            self._flush(forced=forced)
            came, self._came = self._came, 0
            self._buffer_bytes = min(max(came // BUFFERS_A_FLUSH, LEAST_BYTES), self._most_bytes)

    def _flush(self, *, forced: bool) -> None:
        self._clock_now = self._read_clock()
        self._cupti.flush(forced=forced)
        self.dropped += self._cupti.count_dropped()

    def _read_clock(self) -> tuple[int, int]:
        """CUPTI's time and that of the wall clock, at one moment."""
        before_ns = time.time_ns()
        return self._cupti.timestamp_ns(), (before_ns + time.time_ns()) // 2

    def take(self) -> RecordBytes | None:
        """What has been handed over since the last call, in one piece; None where there is nothing.

        One, however many buffers: each call of numpy takes the interpreter from a program that launches kernels.
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
            if self._came > 2 * self._buffer_bytes:  # more than was thought: no need to wait for the next flush
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
        except UnknownRecordError:  # of another client in the process, which has enabled more
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
        """Compare with how CUPTI itself walks the first buffer, and learn lengths that no header of ours has."""
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
        """The lengths of records as CUPTI itself walks them; returns their number."""
        address, used = buffer.ctypes.data, len(buffer)
        walked = [*self._cupti.walk(address, used), (0, address + used)]
        for (kind, at), (_, following) in itertools.pairwise(walked):
            self._sizes[kind] = following - at
        return len(walked) - 1


_LONGEST_NAME = 1 << 14
_memory: list[int] = []  # this process's own, once open


def _read_text(address: int) -> str | None:
    """The text at an address of this process; None where there is none. A wrong address does not end the program."""
    if not _memory:
        try:
            _memory.append(os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:  # a container without /proc: the layouts that are known have right addresses
            return ctypes.string_at(address).decode(errors="replace") if address else None
    try:
        text, end, _ = os.pread(_memory[0], _LONGEST_NAME, address).partition(b"\0")
    except (OSError, OverflowError):
        return None
    return text.decode(errors="replace") if end and text else None
