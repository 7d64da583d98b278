"""Named streams: `s = stream.create(name="h2d")`, then `op.matmul(a, b, stream=s)`.

On a CUDA device a stream is torch's own, with a name that appears on the profiler's timeline. On a CPU it is only a
name: work on it runs at once, in order.

What waits for what:

* a new stream waits for the work queued on the current stream (the tensors made so far);
* an operator or a copy on a stream waits for the work queued on the current stream, which may make its operands
  (`memcpy.async_(..., wait=False)` does not);
* nothing waits for a stream unless asked: `other.wait(s)`, `event.create().record(s).wait(...)`, `s.synchronize()`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import ArgumentError, MissingExtra

POOL = 32
"""Streams that torch has for a device and priority; it hands them out in turn (CUDAStream.h: kStreamsPerPool)."""

_names: dict[tuple[int, int], str] = {}  # by (device, handle): torch never destroys its streams, so handles stay valid
_live: weakref.WeakValueDictionary[tuple[int, int], Stream] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_numbers = itertools.count()
_here = threading.local()
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class _Waitable(Protocol):
    """`event.Event`; it cannot be named here, since that module imports this one."""

    def wait(self, stream: Stream | None = None) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Stream:
    """A stream of one device; `raw` is torch's, or None on a CPU."""

    name: str
    device: Any
    raw: Any = None

    @property
    def handle(self) -> int | None:
        """The driver's pointer to the stream; None on a CPU."""
        return None if self.raw is None else int(self.raw.cuda_stream)

    def synchronize(self) -> None:
        """Block this thread until everything on the stream has run."""
        if self.raw is not None:
            self.raw.synchronize()

    def query(self) -> bool:
        """Return whether everything on the stream has run."""
        return True if self.raw is None else bool(self.raw.query())

    def wait(self, other: Stream | _Waitable | None = None) -> Stream:
        """Let later work on this stream wait for another stream, an event, or (None) the current stream; return self.

        The host does not wait.
        """
        if other is None:
            if self.raw is not None:
                torch: Any = sys.modules["torch"]
                current = torch.cuda.current_stream(self.device)
                if current != self.raw:
                    self.raw.wait_stream(current)
        elif isinstance(other, Stream):
            if self.raw is not None and other.raw is not None and other.raw != self.raw:
                self.raw.wait_stream(other.raw)
        elif hasattr(other, "record") and hasattr(other, "wait"):
            other.wait(self)
        else:
            raise ArgumentError(f"{self.name!r} cannot wait for {other!r}", fix="pass a tessera stream or event")
        return self


def create(name: str | None = None, *, device: Any = None, priority: int = 0) -> Stream:
    """Make a stream on `device` (the current CUDA device, else the CPU); a negative `priority` goes first.

    torch has 32 streams for each device and priority. One that no living stream of ours uses is taken; a 33rd is
    shared.
    """
    try:
        import torch
    except ModuleNotFoundError as exc:
        raise MissingExtra("torch", "torch", "stream.create") from exc

    where = _find_device(torch, device)
    checked_name = _check_name(name)
    if not isinstance(priority, int):
        raise ArgumentError(f"priority={priority!r}", fix="an int: 0, or -1 to go first")
    if where.type == "cpu":
        return Stream(name=checked_name, device=where)
    if where.type != "cuda":
        raise ArgumentError(
            f"device={device!r} has no streams",
            why="streams exist on CUDA devices, and as names on a CPU",
            fix='device="cuda"',
        )
    if not torch.cuda.is_available():
        raise ArgumentError(
            f"device={device!r}: torch sees no CUDA device", fix='device="cpu", or a CUDA build of torch'
        )
    with _lock:
        raw = _take_unused(torch, where, priority)
        stream = Stream(name=checked_name, device=raw.device, raw=raw)
        _names[key_of(stream)] = checked_name
        _live.setdefault(key_of(stream), stream)
    return stream.wait()


def _find_device(torch: Any, device: Any) -> Any:
    """Return the device asked for, else the current CUDA device or the CPU."""
    try:
        return torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError) as e:
        raise ArgumentError(f"device={device!r} is not a torch device", fix='"cuda", "cuda:1" or "cpu"') from e


def _check_name(name: Any) -> str:
    if name is None:
        return f"stream{next(_numbers)}"
    if not isinstance(name, str) or not name.strip():
        raise ArgumentError(f"name={name!r} is not a name", fix='stream.create(name="h2d")')
    return name


def current(device: Any = None) -> Stream:
    """Return the stream that work goes to now, to wait for it; only streams of ours have a name."""
    import torch

    where = _find_device(torch, device)
    if where.type != "cuda":
        return Stream(name="current", device=where)
    raw = torch.cuda.current_stream(where)
    return Stream(name=_names.get((int(raw.device.index), int(raw.cuda_stream)), "current"), device=raw.device, raw=raw)


def key_of(stream: Stream) -> tuple[int, int]:
    """Return device number and handle of a CUDA stream."""
    return int(stream.device.index), int(stream.raw.cuda_stream)


def _take_unused(torch: Any, where: Any, priority: int) -> Any:
    """Return a stream of torch's pool that no living stream of ours uses; if all are used, the next one."""
    first = raw = torch.cuda.Stream(device=where, priority=priority)
    for _ in range(POOL - 1):
        if (int(raw.device.index), int(raw.cuda_stream)) not in _live:
            return raw
        raw = torch.cuda.Stream(device=where, priority=priority)
    return first


def names() -> dict[tuple[int, int], str]:
    """Return the names of the CUDA streams made so far, by device and handle; a reused handle has its last name."""
    with _lock:
        return dict(_names)


def on(stream: Stream | None, *tensors: Any) -> AbstractContextManager[None]:
    """Run the block on a stream, and keep the memory of `tensors` until it has run; None changes nothing.

    The stream first waits for the current stream, where the tensors may have been made. The stream must be on the
    tensors' device. On a CPU the block is a range "stream NAME" of a running profiler.
    """
    return _NOTHING if stream is None else _enter_stream(stream, tensors)


@contextlib.contextmanager
def _enter_stream(stream: Stream, tensors: tuple[Any, ...]) -> Iterator[None]:
    check(stream, *tensors)
    torch: Any = sys.modules["torch"]
    if stream.raw is None:
        with _mark_range(torch, stream.name):
            yield
        return
    stream.wait()
    try:
        with torch.cuda.stream(stream.raw):
            yield
    finally:
        keep(stream, *tensors)


@contextlib.contextmanager
def _mark_range(torch: Any, name: str) -> Iterator[None]:
    """Mark a CPU stream on a profiler's timeline; only once if it is entered inside itself."""
    outer = getattr(_here, "name", None)
    if outer == name or not getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        yield
        return
    _here.name = name
    try:
        with torch.profiler.record_function(f"stream {name}"):
            yield
    finally:
        _here.name = outer


def check(stream: Any, *tensors: Any) -> None:
    """Raise ArgumentError unless `stream` is a stream on the tensors' device."""
    if not isinstance(stream, Stream):
        raise ArgumentError(f"stream={stream!r} is not a tessera stream", fix='stream.create(name="compute") makes one')
    for tensor in tensors:
        if tensor is not None and tensor.device != stream.device and tensor.device.type != "meta":
            raise ArgumentError(
                f"stream={stream.name!r} is on {stream.device}, a tensor on {tensor.device}",
                why="work on one device's stream cannot touch another's memory",
                fix=f"stream.create(device={str(tensor.device)!r}) makes one there",
            )


def keep(stream: Stream | None, *tensors: Any) -> None:
    """Keep the device memory of tensors from being reused before the stream (None: the current one) is done."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            torch: Any = sys.modules["torch"]
            tensor.record_stream(torch.cuda.current_stream(tensor.device) if stream is None else stream.raw)
