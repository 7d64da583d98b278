"""Settings made real: each knob's change to a function, its modules and optimizers, and how it is taken back.

What is applied first is undone last. A change that cannot be made here raises `NotHere`, and the search goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from .arithmetic import attention, cudnn_benchmark, hints, precision
from .compiling import compiled
from .copies import Copies, keeps_copies
from .found import Reach
from .layers import convolutions, layout, optimizer, padding, steps_on, unaligned
from .lever import (
    BF16,
    CHANNELS_LAST,
    COMPILE_MODES,
    FOLDED,
    FP8,
    FUSED,
    REDUCE_OVERHEAD,
    TF32,
    Call,
    Lever,
    NotHere,
)  # fmt: skip
from .plan import Setting

__all__ = [
    "BF16", "CHANNELS_LAST", "COMPILE_MODES", "FOLDED", "FP8", "FUSED", "REDUCE_OVERHEAD", "TF32", "TURNED", "NotHere",
    "applied", "steps_on", "unaligned",
]  # fmt: skip


@contextlib.contextmanager
def applied(fn: Call, reach: Reach, setting: Setting, given: Mapping[str, Any]) -> Iterator[Call]:
    """The function under a setting, for the body. `given` are the knobs that are arguments of the function itself."""
    if setting.get("graph") and setting.get("compile") == REDUCE_OVERHEAD:
        setting = {**setting, "compile": "default"}  # that mode's graphs cannot be part of ours, which does the same
    if not keeps_copies(setting):
        with _once(fn, reach, setting, given) as call:
            yield call
        return
    copies = Copies(lambda now: _once(fn, reach, now, given), reach, setting)
    try:
        yield copies
    finally:
        copies.close()


@contextlib.contextmanager
def _once(fn: Call, reach: Reach, setting: Setting, given: Mapping[str, Any]) -> Iterator[Call]:
    if setting.get("freeze") and not setting.get("compile"):
        raise NotHere("weights are frozen by the compiler: freeze needs compile", knob="freeze")
    if setting.get("masks") and not setting.get("compile"):
        raise NotHere("masks are read in the graph that the compiler is given: masks needs compile", knob="masks")
    if setting.get("convolutions") and setting.get("compile"):
        raise NotHere("the compiler makes its own of a module's forward: fused convolutions exclude compile")
    with contextlib.ExitStack() as stack:
        own = {k: v for k, v in setting.items() if k in given}
        call: Call = (lambda *a, **k: fn(*a, **{**k, **own})) if own else fn
        for knob, change in _CHANGES.items():
            if setting.get(knob) not in (None, False):
                call = stack.enter_context(change(call, reach, setting))
        yield call


@contextlib.contextmanager
def _graph(call: Call, reach: Reach, setting: Setting) -> Iterator[Call]:
    """The whole function as one CUDA graph."""
    from .cudagraph import Captured

    captured = Captured(call, reach)
    try:
        yield captured
    finally:
        captured.release()


_CHANGES: dict[str, Lever] = {
    "layout": layout,
    "padding": padding,
    "convolutions": convolutions,
    "optimizer": optimizer,
    "precision": precision,
    "attention": attention,
    "cudnn_benchmark": cudnn_benchmark,
    "cp_async_depth": hints,
    "compile": compiled,
    "graph": _graph,
}
TURNED = frozenset({*_CHANGES, "freeze", "masks"})
"""Every knob's name; an argument of the function cannot have one of them and be searched too."""
