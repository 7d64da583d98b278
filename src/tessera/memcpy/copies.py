"""One copy on a stream."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from typing import Any

from .. import stream as streams
from ..errors import ArgumentError
from ..event import Event
from ..stream import Stream

_in_flight: deque[tuple[Event, Any]] = deque()
_warned: set[str] = set()
_lock = threading.Lock()


def async_(*, dst: Any, src: Any, stream: Stream | None = None, wait: bool = True) -> Event:
    """Copy `src` to `dst` on a stream (None: the current one) and return at once, with the event that says it is done.

    >>> done = memcpy.async_(dst=x_dev, src=x_host, stream=h2d)
    >>> done.wait(compute, x_dev)

    Shapes, dtypes and layouts must be the same: anything else would be converted on the host first. Like an operator,
    the copy waits for what the current stream was given before it: that may still read `dst`, or what lay in its memory
    before. `wait=False` leaves that out, for copies issued after the kernels they are to run beside, where you know
    better. For other streams wait by events. Memory on both sides is kept until the copy is done, though its tensors
    be gone. Gradients do not flow through it. From or to pageable memory the host waits: that is said once.
    """
    import torch

    place = _checked(torch, dst, src)
    with torch.no_grad():
        if place is None:
            with streams.on(stream, dst, src):
                dst.copy_(src)
            return Event().record(stream or Stream(name="cpu", device=torch.device("cpu")))
        where = _stream_of(stream, place, dst, src)
        host = src if not src.is_cuda else dst if not dst.is_cuda else None
        if host is not None and not host.is_pinned():
            _warn_pageable("src" if host is src else "dst")
        if wait:
            where.wait()
        with torch.cuda.stream(where.raw):
            dst.copy_(src, non_blocking=True)
    streams.keep(where, dst, src)
    done = Event().record(where)
    if host is not None and not torch.cuda.is_current_stream_capturing():
        _hold(done, host)
    return done


def _checked(torch: Any, dst: Any, src: Any) -> Any:
    """The CUDA device that copies, None for the CPU; errors name the argument."""
    for name, tensor in (("dst", dst), ("src", src)):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(tensor).__name__}, no tensor", fix="give torch tensors")
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            raise ArgumentError(f"{name} is on {tensor.device}", fix="give tensors of the CPU or of a CUDA device")
    if dst.shape != src.shape:
        raise ArgumentError(
            f"dst has the shape {tuple(dst.shape)}, src {tuple(src.shape)}",
            why="a copy moves bytes and broadcasts nothing", fix="src.expand_as(dst).contiguous(), or another dst",
        )  # fmt: skip
    if dst.dtype != src.dtype:
        raise ArgumentError(
            f"dst is {dst.dtype}, src {src.dtype}", why="converting would first copy on the host",
            fix="copy in src's dtype and convert on the device: dst.to(...)",
        )  # fmt: skip
    formats = [f for f, d in ((torch.contiguous_format, None), (torch.channels_last, 4), (torch.channels_last_3d, 5))
               if d in (None, dst.dim())]  # fmt: skip
    if not any(dst.is_contiguous(memory_format=f) and src.is_contiguous(memory_format=f) for f in formats):
        loose = "src" if dst.is_contiguous() else "dst"
        raise ArgumentError(
            f"{loose} is not laid out as the other (strides: dst {dst.stride()}, src {src.stride()})",
            why="bytes in another order are gathered by a kernel, or on the host, not copied",
            fix=f"{loose}.contiguous(), or the same memory_format for both",
        )
    if dst.device == src.device and dst.numel() and _overlap(dst, src):
        raise ArgumentError("dst and src share memory", fix="copy to memory of its own")
    return next((t.device for t in (dst, src) if t.is_cuda), None)


def _overlap(a: Any, b: Any) -> bool:
    size = a.numel() * a.element_size()
    return a.device.type != "meta" and bool(abs(a.data_ptr() - b.data_ptr()) < size)


def _stream_of(stream: Stream | None, place: Any, dst: Any, src: Any) -> Stream:
    if stream is None:
        return streams.current(place)
    streams.check(stream)
    if stream.device not in (dst.device, src.device) or stream.raw is None:
        raise ArgumentError(
            f"stream={stream.name!r} is on {stream.device}, the copy goes from {src.device} to {dst.device}",
            fix=f"stream.create(device={str(place)!r}) makes one there",
        )
    return stream


def _hold(done: Event, host: Any) -> None:
    """Keep host memory until its copy is done: torch does so for what it pinned itself, and for nothing else."""
    with _lock:
        _in_flight.append((done, host))
        while _in_flight and _in_flight[0][0].query():
            _in_flight.popleft()


def _warn_pageable(which: str) -> None:
    if which in _warned:
        return
    _warned.add(which)
    warnings.warn(
        f"memcpy.async_: {which} is in pageable memory, so the driver copies it through a buffer of its own and the "
        f"host waits: make it by memcpy.pinned(shape, dtype), or {which}.pin_memory() (said once)",
        stacklevel=3,
    )
