"""Settings that keep copies of weights (frozen in compiled code, in fp8 or folded within a graph), made anew in time.

Every call looks whether torch counted a change to a weight or gave it other memory. Where it did, the weights' digest
says if they differ: a trial that puts them back as they were counts as a change, and is none. Not seen are writes that
torch does not count (through `.data`, from another library), and a parameter object that took another's place.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from .found import Reach
from .lever import FP8, Call, NotHere
from .plan import Setting

_log = logging.getLogger("tessera")

# Weights that change once were loaded; those that change again are being trained, and compiling takes a minute.
REFREEZES = 1
# Odd, so that no difference of two weights is lost: 2^64 over the golden ratio (Knuth, The Art of Computer Programming,
# vol. 3, 6.4), as a signed number.
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
_CHUNK = 1 << 22  # elements at a time: their sum takes 64 bits each


def keeps_copies(setting: Setting) -> bool:
    """Whether a change of weights would go unseen. Those in fp8 or folded are renewed by every call, but in a graph."""
    copied = setting.get("precision") == FP8 or setting.get("convolutions")
    return bool(setting.get("freeze") or (setting.get("graph") and copied))


class Copies:
    """The function under a setting that keeps copies of weights. A call sees the weights as they are."""

    seen = 0
    """Changes of weights so far: code that was frozen before one may hold memory that has changed since."""

    def __init__(
        self, enter: Callable[[Setting], AbstractContextManager[Call]], reach: Reach, setting: Setting
    ) -> None:
        self._enter = enter
        self._weights = Weights(reach)
        self._renewals = 0
        self._open(setting)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._changed():
            self._renew()
        return self._call(*args, **kwargs)

    def close(self) -> None:
        """The function as it was."""
        if self._changed():
            Copies.seen += 1
        self._stack.close()

    def _open(self, setting: Setting) -> None:
        self._setting, self._digest = setting, self._weights.digest()
        if setting.get("freeze"):  # compiled code is found by the weights in it
            setting = {**setting, "freeze": f"{Copies.seen}:{self._digest}"}
        self._stack = ExitStack()
        self._call = self._stack.enter_context(self._enter(setting))
        self._marks = self._weights.marks()  # after entering: another layout is another address

    def _changed(self) -> bool:
        marks = self._weights.marks()
        if marks == self._marks or not keeps_copies(self._setting):
            return False
        self._marks = marks
        return self._weights.digest() != self._digest

    def _renew(self) -> None:
        Copies.seen += 1
        self._stack.close()
        setting, self._renewals = self._setting, self._renewals + 1
        if setting.get("freeze") and self._renewals > REFREEZES:
            _log.warning("its weights change again: it goes on with weights that are not frozen")
            setting = {k: v for k, v in setting.items() if k != "freeze"}
        else:
            _log.info("its weights have changed: their copies are made anew")
        self._open(setting)


class Weights:
    """The parameters and buffers of a function: whether they may have changed, and what they are."""

    def __init__(self, reach: Reach) -> None:
        self._tensors = [t for m in reach.modules for t in (*m.parameters(), *m.buffers())]
        if any(t.is_inference() for t in self._tensors):
            raise NotHere("weights made in inference mode do not count their changes: a copy could go stale unseen",
                          knob="freeze")  # fmt: skip

    def marks(self) -> list[tuple[int, int]]:
        """Count of changes and address of each: equal marks, equal weights."""
        return [(t._version, t.data_ptr()) for t in self._tensors]

    def digest(self) -> str:
        """Of every bit of every weight, in the order of its elements, whatever the layout."""
        import torch

        found = hashlib.blake2b(digest_size=16)
        sums: dict[Any, list[Any]] = {}
        for tensor in self._tensors:
            found.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            sums.setdefault(tensor.device, []).append(_sum(torch, tensor))
        for on_device in sums.values():
            found.update(str(torch.stack(on_device).tolist()).encode())  # the only wait
        return found.hexdigest()


def _sum(torch: Any, tensor: Any) -> Any:
    """The bits of a tensor's elements, each times an odd number of its own, summed modulo 2^64."""
    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(by_size.get(tensor.element_size(), torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        at = torch.arange(start, start + part.numel(), device=tensor.device)
        total += (part * ((at * _MULTIPLIER) | 1)).sum()
    return total
