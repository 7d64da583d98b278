"""Copy a tensor on a stream."""

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
    """Copy `src` to `dst` on a stream (None: the current one); return at once, with the event that marks its end.

    >>> done = memcpy.async_(dst=x_dev, src=x_host, stream=h2d) >>> done.wait(compute, x_dev)

    Shapes, dtypes and layouts must be the same: anything else would be converted on the host first. Like an operator,
    the copy waits for the work queued on the current stream, which may still read `dst`. `wait=False` does not wait:
    for copies issued after the kernels they should run beside. For other streams wait by events. Memory on both sides
    is kept until the copy is done, even if its tensors are gone. Gradients do not flow through the copy. From or to
    pageable memory, the host waits; a warning says so once.
    """
    import torch

    place = _check_tensors(torch, dst, src)
    with torch.no_grad():
        if place is None:
            with streams.on(stream, dst, src):
                dst.copy_(src)
            return Event().record(stream or Stream(name="cpu", device=torch.device("cpu")))
        where = _choose_stream(stream, place, dst, src)
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
        _keep_until(done, host)
    return done


def _check_tensors(torch: Any, dst: Any, src: Any) -> Any:
    """Return the CUDA device that copies, None for the CPU; an error names the argument."""
    for name, tensor in (("dst", dst), ("src", src)):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(tensor).__name__}, not a tensor", fix="pass torch tensors")
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            raise ArgumentError(f"{name} is on {tensor.device}", fix="pass tensors of the CPU or of a CUDA device")
    if dst.shape != src.shape:
        raise ArgumentError(
            f"dst has the shape {tuple(dst.shape)}, src {tuple(src.shape)}",
            why="a copy moves bytes and broadcasts nothing",
            fix="src.expand_as(dst).contiguous(), or another dst",
        )
    if dst.dtype != src.dtype:
        raise ArgumentError(
            f"dst is {dst.dtype}, src {src.dtype}",
            why="converting would first copy on the host",
            fix="copy in src's dtype and convert on the device: dst.to(...)",
        )
    if src.is_meta and not dst.is_meta:
        raise ArgumentError("src is a meta tensor, dst is not", why="it has a shape and no values", fix="a real src")
    dimensions = {torch.contiguous_format: dst.dim(), torch.channels_last: 4, torch.channels_last_3d: 5}
    formats = [memory_format for memory_format, dim in dimensions.items() if dim == dst.dim()]
    if not any(dst.is_contiguous(memory_format=f) and src.is_contiguous(memory_format=f) for f in formats):
        loose = "src" if dst.is_contiguous() else "dst"
        raise ArgumentError(
            f"{loose} does not have the other's layout (strides: dst {dst.stride()}, src {src.stride()})",
            why="bytes in another order are gathered by a kernel, or on the host, not copied",
            fix=f"{loose}.contiguous(), or the same memory_format for both",
        )
    if dst.device == src.device and dst.numel() and _overlap(dst, src):
        raise ArgumentError("dst and src share memory", fix="copy to memory that does not overlap")
    return next((t.device for t in (dst, src) if t.is_cuda), None)


def _overlap(a: Any, b: Any) -> bool:
    size = a.numel() * a.element_size()
    return a.device.type != "meta" and bool(abs(a.data_ptr() - b.data_ptr()) < size)


def _choose_stream(stream: Stream | None, place: Any, dst: Any, src: Any) -> Stream:
    if stream is None:
        return streams.current(place)
    streams.check(stream)
    if stream.device not in (dst.device, src.device) or stream.raw is None:
        raise ArgumentError(
            f"stream={stream.name!r} is on {stream.device}, the copy goes from {src.device} to {dst.device}",
            fix=f"stream.create(device={str(place)!r}) makes one there",
        )
    return stream


def _keep_until(done: Event, host: Any) -> None:
    """Keep host memory until its copy is done: torch does so only for memory that it pinned itself."""
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
        f"host waits: make it with memcpy.empty_pinned(shape, dtype), or {which}.pin_memory() (shown once)",
        stacklevel=3,
    )
