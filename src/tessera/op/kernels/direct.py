"""A kernel launched again, straight by what Triton compiled for it.

`kernel[grid](...)` looks at every argument each time: it binds, specialises and hashes them, and its launcher asks the
driver about every pointer. A launch whose arguments are of a kind seen before needs none of that: the compiled kernel
is kept by the kind, and gets pointers as numbers. Whatever Triton would look at that a kind does not hold (hooks, its
debug switch, a pointer that is not aligned) makes it Triton's own launch again.
"""

from __future__ import annotations

import os
from typing import Any

from ...errors import MissingExtra

try:
    import triton
    from triton.runtime import driver
except ImportError as e:
    raise MissingExtra("triton", "triton", "Tessera's own GPU kernels") from e

# CompiledKernel.run takes (grid x 3, stream, function, packed metadata, launch metadata, two hooks, *arguments) in
# these, and its launcher takes numbers for pointers (triton/runtime/jit.py, backends/nvidia/driver.{py,c}).
KNOWN = triton.__version__.startswith(("3.6.", "3.7."))
# Off until a GPU has run it: Triton 3.6's and 3.7's launchers were given these arguments in front of a stub of the
# driver only.
ASKED = os.environ.get("TESSERA_DIRECT_LAUNCH", "0") == "1"
BACKEND = "cuda"  # AMD's specialises on how large a tensor's storage is, too
MOST = 1024  # kinds kept of a kernel; shapes that never come back must not fill the memory
ALIGNED = 16  # bytes; what Triton specialises pointers on (its "tt.divisibility")

_runtime: Any = triton.knobs.runtime if KNOWN else None


class Kernel:
    """A `@triton.jit` kernel whose parameters are tensors, then integers, then floats, then constants.

    `jit` is Triton's own, to compile or to launch by.
    """

    __slots__ = ("_known", "jit")

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._known: dict[Any, tuple[Any, Any, Any]] = {}

    def launch(
        self, blocks: int, tensors: tuple[Any, ...], numbers: tuple[int, ...], floats: tuple[float, ...],
        constants: tuple[Any, ...], *, warps: int, stages: int | None = None,
    ) -> None:  # fmt: skip
        """Launch `blocks` programs on the current device, where the first of the tensors (None may be among them) is.

        Floats are never specialised, so that any of them goes with what was compiled for others.
        """
        options = {"num_warps": warps} if stages is None else {"num_warps": warps, "num_stages": stages}
        if not (ASKED and KNOWN):  # then nothing is kept, and nothing need be looked at
            self.jit[(blocks,)](*tensors, *numbers, *floats, *constants, **options)
            return
        pointers: list[int | None] = []
        kind: list[Any] = []  # with the numbers it decides all that Triton specialises on, but for alignment
        bits = 0
        for t in tensors:
            if t is None:
                kind.append(None)
                pointers.append(None)
            else:
                kind += t.dtype, t.get_device()
                at = t.data_ptr()
                bits |= at
                pointers.append(at)
        key = (*kind, numbers, constants, warps, stages)
        known = self._known.get(key)
        same = not bits % ALIGNED and not _watched(self.jit)
        if known is not None and same:
            run, function, packed = known
            stream = driver.active.get_current_stream(kind[1])
            run(blocks, 1, 1, stream, function, packed, None, None, None, *pointers, *numbers, *floats, *constants)
            return
        made = self.jit[(blocks,)](*tensors, *numbers, *floats, *constants, **options)
        if same and made is not None and made.metadata.target.backend == BACKEND:  # the interpreter makes none
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = made.run, made.function, made.packed_metadata


def _watched(jit: Any) -> bool:
    """Whether Triton has something to do at a launch beside launching."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(
        _runtime.debug
        or jit.pre_run_hooks
        or (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
        or getattr(_runtime, "add_stages_inspection_hook", None) is not None
    )
