"""The parts of a function: its modules, optimizers and weights; and copies of weights that follow changes.

Some settings keep copies of weights (frozen in compiled code, in fp8, or folded within a graph). Every call checks
whether torch counted a change to a weight or gave it other memory. If so, a digest tells whether the values differ
(after a trial that restores the weights, they do not). Two changes are not seen: writes that torch does not count
(through `.data`, from another library), and a parameter object that replaced another.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from .plan import Setting

_log = logging.getLogger("tessera")

REDUCE_OVERHEAD = "reduce-overhead"
COMPILE_MODES = ("default", REDUCE_OVERHEAD)
"""Modes of torch.compile that are tried. Not max-autotune: for GPT-2's training on an H200 it compiled for 333 s and
was no better."""
TILE_KNOBS = {f"tile_{op}": op for op in ("matmul", "linear", "gemm", "conv2d")}
"""Knobs that set a tile, each with the operator of `tessera.op` that it applies to in calls that name no tile."""
CHANNELS_LAST, FUSED, FOLDED, TF32, BF16, FP8 = "channels_last", "fused", "folded", "tf32", "bf16", "fp8"
# Weights that change this many times were loaded; if they change again, they are being trained, and compiling takes a
# minute each time.
REFREEZES = 1
# The multiplier is odd, so that no difference of two weights is lost: 2^64 over the golden ratio (Knuth, The Art of
# Computer Programming, vol. 3, 6.4), as a signed number.
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
_CHUNK = 1 << 22  # elements at a time, to bound memory: each takes 64 bits in the sum

Call = Callable[..., Any]


class NotApplicable(Exception):
    """Raised for a change that this function or machine does not allow.

    The message says why, `knob` which setting to drop.
    """

    def __init__(self, why: str, *, knob: str = "graph") -> None:
        super().__init__(why)
        self.knob = knob


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionParts:
    """The outermost modules and the optimizers of a function, and the tensors among its arguments."""

    modules: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    tensors: tuple[Any, ...]

    @property
    def trains(self) -> bool:
        """Return whether calling the function changes weights: it has an optimizer."""
        return bool(self.optimizers)

    def submodules(self) -> Iterator[Any]:
        """Yield every module, outermost first."""
        for module in self.modules:
            yield from module.modules()

    def weights(self) -> list[Any]:
        """Return every parameter and buffer."""
        return [t for m in self.modules for t in (*m.parameters(), *m.buffers())]

    @property
    def device(self) -> Any:
        """Return the device of the parameters or arguments; None where there are none."""
        for module in self.modules:
            for parameter in module.parameters():
                return parameter.device
        return next((t.device for t in self.tensors), None)

    def plain_linears(self) -> list[Any]:
        """Return the linear layers that are torch's own and whose forward nobody replaced."""
        import torch

        return [m for m in self.submodules() if type(m) is torch.nn.Linear and "forward" not in vars(m)]

    def require_inference(self, knob: str) -> None:
        """Raise NotApplicable unless the function only infers: a copy of the weights must stay valid."""
        if self.trains:
            raise NotApplicable("its weights are trained: a copy of them would be stale after every step", knob=knob)
        if not self.modules:
            raise NotApplicable("it has no modules whose weights could be kept", knob=knob)
        if any(m.training for m in self.submodules()):
            raise NotApplicable("a module is in training mode: call eval() for inference", knob=knob)


def find_parts(fn: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> FunctionParts:
    """Find the parts that a call works with, in the function and in its arguments, as a capture finds them."""
    import torch

    from ...graph.surroundings import find_models

    kwargs = dict(kwargs or {})
    modules, optimizers = find_models(fn, args, kwargs)
    inner = {id(sub) for m in modules for sub in m.modules() if sub is not m}
    tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)]
    outer = tuple(m for m in modules if id(m) not in inner)
    return FunctionParts(modules=outer, optimizers=tuple(optimizers), tensors=tuple(tensors))


def keeps_copies(setting: Setting) -> bool:
    """Return whether a change of weights could go unseen.

    Without a graph, every call renews copies in fp8 or folded copies.
    """
    copied = setting.get("precision") == FP8 or setting.get("convolutions")
    return bool(setting.get("freeze") or (setting.get("graph") and copied))


class WeightCopies:
    """The function under a setting that keeps copies of weights; each call sees the current weights."""

    changes = 0
    """How often weights changed so far: code frozen before a change may contain memory that has changed since."""

    def __init__(
        self, enter: Callable[[Setting], AbstractContextManager[Call]], parts: FunctionParts, setting: Setting
    ) -> None:
        self._enter = enter
        self._weights = WeightDigest(parts)
        self._renewals = 0
        self._open(setting)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._have_changed():
            self._renew()
        return self._call(*args, **kwargs)

    def close(self) -> None:
        """Restore the function."""
        if self._have_changed():
            WeightCopies.changes += 1
        self._stack.close()

    def _open(self, setting: Setting) -> None:
        self._setting, self._digest = setting, self._weights.digest()
        if setting.get("freeze"):  # compiled code is identified by the weights in it
            setting = {**setting, "freeze": f"{WeightCopies.changes}:{self._digest}"}
        self._stack = ExitStack()
        self._call = self._stack.enter_context(self._enter(setting))
        self._marks = self._weights.marks()  # after entering: another layout has another address

    def _have_changed(self) -> bool:
        marks = self._weights.marks()
        if marks == self._marks or not keeps_copies(self._setting):
            return False
        self._marks = marks
        return self._weights.digest() != self._digest

    def _renew(self) -> None:
        WeightCopies.changes += 1
        self._stack.close()
        setting, self._renewals = self._setting, self._renewals + 1
        if setting.get("freeze") and self._renewals > REFREEZES:
            _log.warning("its weights changed again: they are no longer frozen")
            setting = {k: v for k, v in setting.items() if k != "freeze"}
        else:
            _log.info("its weights have changed: their copies are made again")
        self._open(setting)


class WeightDigest:
    """Tells whether the parameters and buffers of a function may have changed, and digests their values."""

    def __init__(self, parts: FunctionParts) -> None:
        self._tensors = parts.weights()
        if any(t.is_inference() for t in self._tensors):
            why = "torch counts no changes of weights made in inference mode: a copy could become stale unseen"
            raise NotApplicable(why, knob="freeze")

    def marks(self) -> list[tuple[int, int]]:
        """Return each tensor's count of changes and its address: where these are equal, the weights are equal."""
        return [(t._version, t.data_ptr()) for t in self._tensors]

    def digest(self) -> str:
        """Return a digest of every bit of every weight, in the order of its elements, independent of the layout."""
        import torch

        digest = hashlib.blake2b(digest_size=16)
        sums: dict[Any, list[Any]] = {}
        for tensor in self._tensors:
            digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            sums.setdefault(tensor.device, []).append(_sum_bits(torch, tensor))
        for on_device in sums.values():
            digest.update(str(torch.stack(on_device).tolist()).encode())  # the only wait for the device
        return digest.hexdigest()


def _sum_bits(torch: Any, tensor: Any) -> Any:
    """Sum the bits of a tensor's elements, each times an odd number of its own, modulo 2^64."""
    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(by_size.get(tensor.element_size(), torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        at = torch.arange(start, start + part.numel(), device=tensor.device)
        total += (part * ((at * _MULTIPLIER) | 1)).sum()
    return total
