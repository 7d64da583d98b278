"""Count events that a call should not repeat: compiling code and recording CUDA graphs.

Torch calls back when Dynamo compiles a frame or a backward pass, and when reduce-overhead records a graph
(`torch._dynamo.callback`, the same in 2.11 and 2.13). Tessera's own graphs are counted where they are recorded.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CompileEvents:
    """How often code was compiled and CUDA graphs were recorded; true if either happened.

    `allocations`: how often torch asked the driver for memory, which ends when the largest inputs have been seen.
    """

    compilations: int = 0
    recordings: int = 0
    allocations: int = 0

    def __sub__(self, other: CompileEvents) -> CompileEvents:
        return CompileEvents(
            self.compilations - other.compilations,
            self.recordings - other.recordings,
            self.allocations - other.allocations,
        )

    def __add__(self, other: CompileEvents) -> CompileEvents:
        return CompileEvents(
            self.compilations + other.compilations,
            self.recordings + other.recordings,
            self.allocations + other.allocations,
        )

    def __bool__(self) -> bool:
        return bool(self.compilations or self.recordings)


_lock = threading.Lock()
_counts: Counter[bool] = Counter()  # by whether a graph was recorded


def count_events() -> CompileEvents:
    """Return the counts since this process first asked; only the difference of two answers has a meaning."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    # torch._dynamo.reset() forgets the callback
    if handler is not None and _note_compilation not in handler.start_callbacks:
        handler.register_start_callback(_note_compilation)
    return CompileEvents(_counts[False], _counts[True], _count_allocations())


def _count_allocations() -> int:
    """Return how often torch's allocator called cudaMalloc; 0 without CUDA, or if this torch does not count that."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    stats = torch._C._cuda_memoryStats(torch.cuda.current_device())
    return int(stats.get("num_device_alloc", 0))


def note_recording() -> None:
    """Count a CUDA graph that Tessera recorded."""
    _add(recorded=True)


def _note_compilation(args: Any) -> None:
    _add(recorded=args.callback_trigger.name == "CUDAGRAPH_RECORDING")


def _add(*, recorded: bool) -> None:
    with _lock:  # compilation may run on any thread
        _counts[recorded] += 1
