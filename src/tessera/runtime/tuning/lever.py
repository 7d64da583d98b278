"""What a change to a function is: a context in which it is called otherwise, or the reason why it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .found import Reach
from .plan import Setting

Call = Callable[..., Any]
Lever = Callable[[Call, Reach, Setting], AbstractContextManager[Call]]
"""Given the call as it is so far, what it works with and the whole setting: the call under the change."""

REDUCE_OVERHEAD = "reduce-overhead"
COMPILE_MODES = ("default", REDUCE_OVERHEAD, "max-autotune-no-cudagraphs")
"""torch.compile's, as its documentation names them."""
CHANNELS_LAST, FUSED, FOLDED, TF32, BF16, FP8 = "channels_last", "fused", "folded", "tf32", "bf16", "fp8"


class NotHere(Exception):
    """A change that does not apply to this function or machine; the message says why, `knob` what to do without."""

    def __init__(self, why: str, *, knob: str = "graph") -> None:
        super().__init__(why)
        self.knob = knob


def only_infers(reach: Reach, knob: str) -> None:
    """A copy of the weights is kept: no optimizer may change them, and no layer may behave as in training."""
    if reach.trains:
        raise NotHere("its weights are trained: a copy of them would go stale at every step", knob=knob)
    if not reach.modules:
        raise NotHere("it has no modules whose weights could be kept", knob=knob)
    if any(m.training for m in reach.submodules()):
        raise NotHere("a module is in training mode: eval() says that it only infers", knob=knob)
