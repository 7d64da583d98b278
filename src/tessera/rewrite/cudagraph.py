"""A call recorded as one CUDA graph: warmed up beside the current stream, captured, and tidied up where that fails.

A graph holds addresses and repeats the numbers it was captured with. What it may be used for is for its callers to
know: `ways.Replayed` replays an inference, the tuner's `Captured` a training step with its optimizer.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch

# torch's notes on CUDA graphs ask for some eager iterations on a side stream first: allocations, cuBLAS workspaces.
WARM_UP = 3


def key(leaf: Any) -> Any:
    """What an argument must have in common with the one that was captured; of a plain one, its value."""
    if torch.is_tensor(leaf):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return leaf


def warm_up(call: Callable[[], Any]) -> None:
    """Lets libraries choose and allocate, which may not happen in a capture. The call does its work each time."""
    # Autograd's last nodes live as long as a backward pass that is kept in cycles, and belong to the stream they were
    # made in: with those of the default stream a capture fails, says torch's warning (on an H200, torch 2.11).
    gc.collect()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)


def recorded(call: Callable[[], Any]) -> tuple[Any, Any]:
    """The graph of a call, which is not run, and what it returned: memory that a replay writes.

    Raises the RuntimeError of a call that cannot be captured, with nothing of the attempt left behind.
    """
    here, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    gc.collect()  # torch no longer does: what earlier trials left in cycles holds device memory
    graph = torch.cuda.CUDAGraph()
    try:
        # Only this thread's calls are held against the capture: others' (a data loader's, a watchdog's) are not.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            return graph, call()
    except RuntimeError:
        abandon(here, pool)
        raise


def abandon(stream: Any, pool: tuple[int, int]) -> None:
    """Tidy up after a capture that failed.

    When ending it raises, torch (2.11 to 2.13, cuda/graphs.py and CUDAGraph::capture_end) leaves the capture's stream
    current, its allocator filling the graph's pool, and the random generator as if it were still captured.
    """
    torch.cuda.set_stream(stream)
    device = torch.cuda.current_device()
    older = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    ended = getattr(torch._C, "_cuda_endAllocateToPool", older)
    if ended is not None:
        with contextlib.suppress(RuntimeError):  # not recording: the capture had ended in order, and keeps its pool
            ended(device, pool)
            torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    if hasattr(generator, "graphsafe_set_state"):  # since torch 2.4
        generator.graphsafe_set_state(generator.clone_state())
