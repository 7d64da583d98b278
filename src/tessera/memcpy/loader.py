"""Copy the next batches to the device while the current one is used.

::

    your thread      next(loader) b3, b3 into pinned memory, its copy is queued ──► b1: the stream waits for its event
    copy stream      ... b2 ...  b3                                        beside the kernels that use b0, b1

Everything runs on your thread, `depth` batches ahead, in the loader's order: seeds and errors stay where they are
without prefetch. A loader may fill the same buffer again unless that is pinned, because then the copy reads from it.

Pinned memory is not filled on another thread, because torch may copy with one core there: a new thread gets as many
cores as were last set on any thread (ATen/ParallelOpenMP.cpp), and `DataLoader(pin_memory=True, num_workers=2)` sets 1
on its own (torch/utils/data/_utils/pin_memory.py).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .. import stream as streams
from ..errors import ArgumentError, is_integer
from ..event import Event
from ..stream import Stream
from .async_copy import async_
from .pinned_memory import empty_pinned


def prefetch(
    loader: Iterable[Any], *, device: Any = None, depth: int = 2, stream: Stream | None = None
) -> Iterator[Any]:
    """Iterate over a loader's batches on `device` (the current CUDA device), the next `depth` copied meanwhile.

    A batch is a tensor, or tuples, lists, dicts and named tuples of them to any depth; other values pass as they are.
    Host tensors that are not pinned go through pinned memory, filled on this thread before the loader is asked again.
    The current stream waits for a batch by its event, the host does not. An error of the loader comes after the batches
    before it; leaving the loop early drops the rest. Up to depth + 2 batches are on the device. On a CPU batches pass
    as they are.
    """
    import torch

    _check_arguments(loader, depth)
    where = _find_device(torch, device)
    if where.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device={device!r}", fix='device="cuda" or "cpu"')
    if where.type == "cpu":
        if stream is not None:
            streams.check(stream, torch.empty(0))
        return iter(loader)
    if not torch.cuda.is_available():
        raise ArgumentError(f"device={device!r}: torch sees no CUDA device", fix='device="cpu", or a CUDA build')
    where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
    if stream is None:
        stream = _get_stream(where)
    streams.check(stream)
    if stream.device != where:
        raise ArgumentError(
            f"stream={stream.name!r} is on {stream.device}, device={device!r}", fix="one device for both"
        )
    return _stage_ahead(loader, depth, BatchStager(torch, where, stream))


def _find_device(torch: Any, device: Any) -> Any:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise ArgumentError(f"device={device!r} is not a torch device", fix='device="cuda" or "cpu"') from e


@functools.cache
def _get_stream(device: Any) -> Stream:
    """Return the stream of all prefetches to a device: torch keeps memory by stream, so the next epoch reuses it."""
    return streams.create(name="prefetch", device=device)


def _check_arguments(loader: Any, depth: Any) -> None:
    if not is_integer(depth) or depth < 1:
        raise ArgumentError(f"depth={depth!r}", fix="depth=2: the batches copied ahead of the one in use")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ArgumentError(
            f"loader is a {type(loader).__name__}, which cannot be iterated over", fix="pass a DataLoader"
        )


class BatchStager:
    """Copies batches to a device on a stream of its own."""

    def __init__(self, torch: Any, device: Any, stream: Stream) -> None:
        self._torch = torch
        self._device = device
        self._stream = stream

    def stage(self, batch: Any) -> tuple[Any, Event]:
        """Copy a batch to the device; return it with the event after its copies."""
        torch = self._torch
        with torch.no_grad(), torch.cuda.stream(self._stream.raw):  # so that its memory belongs to that stream
            copied = map_batch(torch, batch, self._copy)
        return copied, Event().record(self._stream)

    def _copy(self, tensor: Any) -> Any:
        torch = self._torch
        if tensor.device == self._device:
            return tensor
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return tensor.to(self._device, non_blocking=True)
        source = tensor if tensor.is_pinned() else copy_to_pinned(torch, tensor)
        target = torch.empty_like(source, device=self._device)
        if source is tensor and tensor.is_pinned() and target.stride() == tensor.stride():
            async_(dst=target, src=tensor, stream=self._stream, wait=False)  # its memory belongs to that stream
        else:  # torch keeps its own block until it is copied; if we held it, it would be free one batch later
            target.copy_(source, non_blocking=True)
        return target

    def take(self, batch: Any, done: Event) -> Any:
        """Return a batch to the current stream, which waits for it."""
        tensors: list[Any] = []
        map_batch(self._torch, batch, tensors.append)
        done.wait(streams.current(self._device), *tensors)
        return batch


def copy_to_pinned(torch: Any, tensor: Any) -> Any:
    """Copy a host tensor to pinned memory; over the limit, return the tensor: a pageable copy would save nothing."""
    flat = empty_pinned(tensor.numel(), tensor.dtype)
    return copy_into(torch, flat, tensor) if flat.is_pinned() else tensor


def copy_into(torch: Any, flat: Any, tensor: Any) -> Any:
    """Copy a tensor into the memory `flat`, in the layout that `empty_like` would give it."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return flat.as_strided(tensor.shape, strides).copy_(tensor)


def map_batch(torch: Any, batch: Any, change: Callable[[Any], Any]) -> Any:
    """Change every tensor in a batch; containers keep their type where they can be built from their parts."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        parts = {k: map_batch(torch, v, change) for k, v in batch.items()}
        try:
            return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
        except TypeError:
            return parts
    if isinstance(batch, tuple):
        inside = [map_batch(torch, v, change) for v in batch]
        return type(batch)(*inside) if hasattr(batch, "_fields") else tuple(inside)
    if isinstance(batch, list):
        return [map_batch(torch, v, change) for v in batch]
    return batch


def _stage_ahead(loader: Iterable[Any], depth: int, stager: Any) -> Iterator[Any]:
    """Keep `depth` batches staged beyond the current one."""
    waiting: deque[tuple[Any, Event]] = deque()
    failed: Exception | None = None
    source: Iterator[Any] | None = iter(loader)
    while source is not None or waiting:
        while source is not None and len(waiting) <= depth:
            try:
                waiting.append(stager.stage(next(source)))
            except StopIteration:
                source = None
            except Exception as exc:  # noqa: BLE001  (raised where its batch would have come)
                failed, source = exc, None
        if waiting:
            yield stager.take(*waiting.popleft())
    if failed is not None:
        raise failed
