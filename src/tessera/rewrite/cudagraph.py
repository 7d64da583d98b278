"""Record a call as a CUDA graph: warm it up beside the current stream, capture it, and clean up where that fails.

A graph holds addresses and repeats the numbers it was captured with, so its callers must know what it may be used for:
`ReplayedProgram` replays an inference, the tuner's graph replays a training step with its optimizer.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ..graph.nested import PLAIN_TYPES, map_tensors
from .compile_events import note_recording

if TYPE_CHECKING:
    from .program import Program

# torch's notes on CUDA graphs ask for some eager iterations on a side stream first: allocations, cuBLAS workspaces.
WARM_UP = 3


def make_key(leaf: Any) -> Any:
    """Return what an argument must have in common with the captured one; for a plain value, the value itself."""
    if torch.is_tensor(leaf):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return leaf


def warm_up(call: Callable[[], Any]) -> None:
    """Let libraries choose algorithms and allocate memory, which a capture forbids.

    The call does its work each time.
    """
    # Autograd's last nodes belong to the stream in which they were made, and live as long as a backward pass that
    # reference cycles keep alive. With such nodes of the default stream, a capture fails, says torch's warning (on an
    # H200, torch 2.11).
    gc.collect()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)


def record_graph(call: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the graph of a call, which is not run, and the call's result: memory that a replay writes.

    Raises the RuntimeError of a call that cannot be captured; nothing of the attempt remains.
    """
    here, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    gc.collect()  # torch no longer collects here: cycles left by earlier trials hold device memory
    graph = torch.cuda.CUDAGraph()
    try:
        # "thread_local": calls of other threads (a data loader, a watchdog) do not fail the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = call()
    except RuntimeError:
        abandon_capture(here, pool)
        raise
    note_recording()
    return graph, result


def abandon_capture(stream: Any, pool: tuple[int, int]) -> None:
    """Clean up after a capture that failed.

    If ending the capture raises, torch (2.11 to 2.13, cuda/graphs.py and CUDAGraph::capture_end) leaves the capture's
    stream current, its allocator filling the graph's pool, and the random generator in its captured state.
    """
    torch.cuda.set_stream(stream)
    device = torch.cuda.current_device()
    older = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    end_allocation = getattr(torch._C, "_cuda_endAllocateToPool", older)
    if end_allocation is not None:
        # RuntimeError: the capture had ended in order, so nothing records, and it keeps its pool
        with contextlib.suppress(RuntimeError):
            end_allocation(device, pool)
            torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    if hasattr(generator, "graphsafe_set_state"):  # since torch 2.4
        generator.graphsafe_set_state(generator.clone_state())


class ReplayedProgram:
    """An eager inference in a CUDA graph: inputs are copied in, results copied out. Other calls run eagerly.

    The graph is used only while the inputs have the shapes it was captured with, the parameters have the same
    addresses, and the modules are in the same mode.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._graph: Any = None
        self._inputs: list[Any] = []
        self._outputs: Any = None
        self._key: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = self._make_key(leaves, spec)
        if self._graph is None:
            self._capture(leaves, spec, key)
        if key != self._key:
            with torch.no_grad():
                return self._program.call(*args, **kwargs)
        for buffer, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                buffer.copy_(leaf)
        self._graph.replay()
        return map_tensors(torch.clone, self._outputs)

    def _make_key(self, leaves: Sequence[Any], spec: Any) -> Any:
        modules = self._program.modules
        addresses = tuple(t.data_ptr() for m in modules for t in (*m.parameters(), *m.buffers()))
        return spec, tuple(map(make_key, leaves)), addresses, tuple(m.training for m in modules)

    def _capture(self, leaves: Sequence[Any], spec: Any, key: Any) -> None:
        for leaf in leaves:
            # for other objects, the graph would keep reading today's contents
            if not isinstance(leaf, (torch.Tensor, *PLAIN_TYPES)):
                raise TypeError(f"a graph cannot be given another {type(leaf).__qualname__}")
        self._inputs = [v.clone() if isinstance(v, torch.Tensor) else v for v in leaves]
        args, kwargs = pytree.tree_unflatten(self._inputs, spec)

        def run_once() -> Any:
            with torch.no_grad():
                return self._program.call(*args, **kwargs)

        warm_up(run_once)
        self._graph, self._outputs = record_graph(run_once)
        self._key = key
