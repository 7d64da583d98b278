"""Precision in training: forward and backward products in two precisions, and a precision for each step.

::

    with dual_precision(model, forward="fp8"):      # the nn.Linear layers of a model, restored afterwards
        loss = model(x).sum()
    loss.backward()                                 # its products run in fp32, inside or outside

    schedule = precision_schedule("fp32 until 100, bf16 until 1000, then fp8")
    for x, y in batches:
        with schedule.apply():                      # forward products of this step
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.observe(loss)                      # counts the step; NaN or a jump steps back up
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, overload

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.overrides import TorchFunctionMode

from ..errors import ArgumentError, check_choice, is_integer
from . import hints, lowprec
from .casting import FULL, PRECISIONS

_TENSOR_PRODUCTS = {torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.bmm}
_PRODUCTS = {torch.matmul, torch.mm, torch.bmm, *_TENSOR_PRODUCTS}
_ADDMM = {torch.addmm, torch.Tensor.addmm}
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_LEAST_LOSSES = 8  # losses that the guard needs before it raises an alarm
# bf16 and fp16 have the same height, one because of its range and the other because of its mantissa; so have both
# scalings of fp8.
_HEIGHT = {"fp64": 4, "fp32": 3, "tf32": 2, "bf16": 1, "fp16": 1, "fp8": 0, "fp8_row": 0}
_OPS = ("matmul", "gemm", "linear")


class Dual:
    """A pair of precisions, as a context, a decorator, or for the layers of a module; `forward` may be changed.

    Entering it for a module replaces the `forward` of its `nn.Linear` layers (not of subclasses, which may do more);
    leaving restores them; `names` lists them. Without a module, it takes every product of torch in the body: linear,
    matmul, mm, bmm, addmm. A product of types other than fp32, fp16, bf16, fp64 stays as it is.

    Parameters and gradients keep their type. Backward products use the unrounded operands, so the gradient is that of
    the function with exact products at this point (a straight-through estimate).
    """

    def __init__(self, module: Any, forward: str, backward: str, accumulate: str) -> None:
        self.forward, self.backward, self.accumulate = forward, backward, accumulate
        self._module = module
        self._layers: list[tuple[Any, Any]] = []
        self._modes: list[_ProductMode] = []
        self.names: tuple[str, ...] = ()

    @property
    def forward(self) -> str:
        """Return the precision of forward products; "fp32" and wider turn the rounding off."""
        return self._forward

    @forward.setter
    def forward(self, precision: str) -> None:
        check_choice("forward", precision, PRECISIONS)
        self._forward = precision

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return `a @ b`, forward in one precision and backward in the other."""
        return lowprec.mm(a, b, self.forward, self.accumulate, backward=self.backward)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ weight.T + bias`; a vector is a matrix of one row."""
        y = self.product(x if x.dim() > 1 else x[None], weight.mT)
        y = y if x.dim() > 1 else y[0]
        return y if bias is None else y + bias

    def __enter__(self) -> Dual:
        if self._module is None:
            self._modes.append(_ProductMode(self))
            self._modes[-1].__enter__()
            return self
        if self._layers:
            raise ArgumentError("this module is already in dual precision", fix="leave the first scope before a second")
        layers = {name: layer for name, layer in self._module.named_modules() if type(layer) is nn.Linear}
        self.names = tuple(layers)
        for layer in layers.values():
            self._layers.append((layer, layer.__dict__.get("forward")))
            layer.forward = functools.partial(_run_layer, self, layer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._module is None:
            self._modes.pop().__exit__(kind, error, trace)
            return
        for layer, before in self._layers:
            if before is None:
                del layer.forward
            else:
                layer.forward = before
        self._layers.clear()

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its products in these precisions."""

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with Dual(self._module, self.forward, self.backward, self.accumulate):
                return fn(*args, **kwargs)

        return run


@overload
def dual_precision(
    target: nn.Module | None = None, *, forward: str = ..., backward: str = ..., accumulate: str = ...
) -> Dual: ...
@overload
def dual_precision(
    target: Callable[..., Any], *, forward: str = ..., backward: str = ..., accumulate: str = ...
) -> Callable[..., Any]: ...
def dual_precision(
    target: Any = None, *, forward: str = "bf16", backward: str = "fp32", accumulate: str = "fp32"
) -> Any:
    """Run forward products in `forward`, backward products in `backward`, and sum in `accumulate`.

    For a module: a context for its linear layers. For a function: the function, with all its products in these
    precisions. Without a target: a context and decorator for all products.
    """
    check_choice("backward", backward, PRECISIONS)
    check_choice("accumulate", accumulate, lowprec.ACCUMULATES)
    if target is None or isinstance(target, nn.Module):
        return Dual(target, forward, backward, accumulate)
    if not callable(target):
        fix = "dual_precision(model) or @dual_precision"
        if isinstance(target, str) and target in PRECISIONS:
            fix = f'dual_precision(forward="{target}")'
        raise ArgumentError(f"{target!r} is neither a module nor a function", fix=fix)
    return Dual(None, forward, backward, accumulate)(target)


def _run_layer(dual: Dual, layer: Any, x: torch.Tensor) -> torch.Tensor:
    run = dual.linear if _can_multiply(x, layer.weight) else F.linear
    return run(x, layer.weight, layer.bias)


def _can_multiply(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and a.dtype in FULL and a.dtype == b.dtype and a.device == b.device


class _ProductMode(TorchFunctionMode):
    """Takes the products that torch is called for in a scope."""

    def __init__(self, dual: Dual) -> None:
        super().__init__()
        self._dual = dual

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs.keys() - {"bias"} and _can_multiply(args[0], args[1]):
            return self._dual.linear(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias"))
        if func in _PRODUCTS and not kwargs and _can_multiply(*args[:2]) and min(args[0].dim(), args[1].dim()) >= 2:
            return self._dual.product(*args[:2])
        if func in _ADDMM and not kwargs and _can_multiply(*args[1:3]):
            return args[0] + self._dual.product(*args[1:3])
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class PrecisionStage:
    """A precision, and the step until which it is used (None: to the end)."""

    precision: str
    until: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChange:
    """A step at which the precision changed, and why."""

    step: int
    before: str
    after: str
    why: str


class PrecisionSchedule:
    """A precision for each step of a training run, higher early and lower later, with a guard on the loss.

    `stages` is a text ("fp32 until 100, bf16 until 1000, then fp8"), or `PrecisionStage`s or pairs; the last one has no
    end. `apply()` is for torch's products (through `dual_precision`, with `backward`) and for `op.matmul`, `gemm`
    and `linear` (through hints). `attach` sets the `forward` of a `Dual` instead, whose scope is the caller's. With
    `autocast=True` bf16 and fp16 stages are torch.autocast, which also takes convolutions.

    The guard compares each loss with the median of the last `window`. When it is not finite, or more than `band` robust
    deviations above (1.48 times the median absolute deviation), the run steps up one precision for `hold` steps, twice
    as long each time it happens again. Reading a loss from a GPU waits for it: it is read every `observe_every` steps.
    """

    def __init__(
        self,
        stages: str | Sequence[PrecisionStage | tuple[str, int | None]],
        *,
        backward: str = "fp32",
        band: float = 6.0,
        window: int = 32,
        hold: int = 50,
        observe_every: int = 1,
        autocast: bool = False,
    ) -> None:
        self.stages = _check_stages(parse_stages(stages) if isinstance(stages, str) else _to_stages(stages))
        if not (band > 0 and window >= _LEAST_LOSSES and hold >= 1 and observe_every >= 1):
            raise ArgumentError(
                f"band={band}, window={window}, hold={hold}, observe_every={observe_every}",
                fix=f"band > 0, window >= {_LEAST_LOSSES}, hold >= 1, observe_every >= 1",
            )
        self.step, self.changes = 0, list[PrecisionChange]()
        self._backward, self._autocast = backward, autocast
        self._band, self._hold, self._every = band, hold, observe_every
        self._losses: deque[float] = deque(maxlen=window)
        self._up, self._until, self._alarms = 0, 0, 0
        self._duals: list[Dual] = []
        self._now = self._plan()

    def __repr__(self) -> str:
        plan = ", ".join(s.precision if s.until is None else f"{s.precision} until {s.until}" for s in self.stages)
        guard = ", kept higher by the guard" if self.is_guarded else ""
        return f"PrecisionSchedule({plan!r}: step {self.step} in {self._now}{guard})"

    @property
    def precision(self) -> str:
        """Return the precision of the next step."""
        return self._now

    @property
    def is_guarded(self) -> bool:
        """Return whether the guard keeps a higher precision than planned."""
        return self._up > 0

    def attach(self, dual: Dual) -> None:
        """Set the forward precision of a dual scope from now on."""
        self._duals.append(dual)
        dual.forward = self._now

    @contextlib.contextmanager
    def apply(self, device: str | None = None) -> Iterator[str]:
        """Run the body's products in this step's precision; `device` is autocast's, by default "cuda" if available."""
        hinted = hints.current()
        precisions = {**hinted.precisions, **dict.fromkeys(_OPS, self._now)}
        with contextlib.ExitStack() as scopes:
            if self._autocast and self._now in ("bf16", "fp16"):
                dtype = torch.bfloat16 if self._now == "bf16" else torch.float16
                where = device or ("cuda" if torch.cuda.is_available() else "cpu")
                scopes.enter_context(torch.autocast(where, dtype=dtype))
            else:
                scopes.enter_context(hints.use(replace(hinted, precisions=precisions)))
                scopes.enter_context(dual_precision(forward=self._now, backward=self._backward))
            yield self._now

    def observe(self, loss: Any) -> PrecisionChange | None:
        """Count a step and look at its loss (a number or a tensor); return the change it led to."""
        self.step += 1
        alarm = None
        if self.step % self._every == 0:
            alarm = self._find_alarm(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
        if alarm is not None:
            return self._step_up(alarm)
        if self._up and self.step >= self._until:
            self._up = 0
            return self._change(f"{self._hold_steps()} steps without alarm are over")
        return self._change(f"planned at step {self.step}")

    def _find_alarm(self, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        alarm = None
        if len(self._losses) >= _LEAST_LOSSES:
            middle = statistics.median(self._losses)
            spread = _MAD_TO_DEVIATION * statistics.median(abs(x - middle) for x in self._losses)
            spread = max(spread, 1e-3 * abs(middle))  # a constant loss has no spread of its own
            if loss > middle + self._band * spread:
                above = f"{(loss - middle) / spread:.0f} deviations above the median {middle:.4g}"
                alarm = f"the loss is {loss:.4g}, {above}"
        self._losses.append(loss)
        return alarm

    def _step_up(self, why: str) -> PrecisionChange | None:
        if self._now == self.stages[0].precision:
            return None  # it is the highest precision
        if self.step >= self._until or not self._up:
            self._alarms += 1
        self._up += 1
        self._until = self.step + self._hold_steps()
        self._losses.clear()  # losses of the precision that failed tell nothing about the next precision
        return self._change(f"{why}: one precision up for {self._hold_steps()} steps")

    def _hold_steps(self) -> int:
        return int(self._hold * 2 ** min(max(self._alarms - 1, 0), 10))

    def _change(self, why: str) -> PrecisionChange | None:
        planned = self._plan()
        if planned == self._now:
            return None
        change = PrecisionChange(step=self.step, before=self._now, after=planned, why=why)
        self.changes.append(change)
        self._now = planned
        for dual in self._duals:
            dual.forward = planned
        return change

    def _plan(self) -> str:
        """Return the plan's precision for this step, or as many stages earlier as the guard asks for."""
        stage = next(i for i, s in enumerate(self.stages) if s.until is None or self.step < s.until)
        return self.stages[max(0, stage - self._up)].precision


precision_schedule = PrecisionSchedule
"""`op.precision_schedule("fp32 until 100, bf16 until 1000, then fp8")`."""


def parse_stages(text: str) -> tuple[PrecisionStage, ...]:
    """Parse stages from words: "fp32 until 100, then bf16 until 500, then fp8"."""
    stages = []
    for part in text.split(","):
        words = re.fullmatch(r"\s*(?:then\s+)?(\w+)(?:\s+until\s+(\d+))?\s*", part)
        if words is None:
            fix = '"fp32 until 100, bf16 until 500, then fp8"'
            raise ArgumentError(f"cannot read {part.strip()!r} of {text!r}", fix=fix)
        stages.append(PrecisionStage(words[1], None if words[2] is None else int(words[2])))
    return tuple(stages)


def _to_stages(given: Any) -> tuple[PrecisionStage, ...]:
    stages: tuple[Any, ...] = ()
    with contextlib.suppress(TypeError):  # there is nothing to iterate over, or an item has more than two parts
        stages = tuple(s if isinstance(s, PrecisionStage) else PrecisionStage(*s) for s in given)
    if not stages or not all(isinstance(s.precision, str) and (s.until is None or is_integer(s.until)) for s in stages):
        why = "each stage is a precision and the step at which it ends; None means never"
        fix = '"fp32 until 100, then fp8", or [("fp32", 100), ("fp8", None)]'
        raise ArgumentError(f"stages={given!r}", why=why, fix=fix)
    return stages


def _check_stages(stages: tuple[PrecisionStage, ...]) -> tuple[PrecisionStage, ...]:
    names, ends = [s.precision for s in stages], [s.until for s in stages]
    for name in names:
        check_choice("stages", name, PRECISIONS)
    steps = [end for end in ends if end is not None]
    if len(steps) != len(ends) - 1 or ends[-1] is not None or any(x >= y for x, y in itertools.pairwise(steps)):
        why = "each ends later than the one before, the last never"
        raise ArgumentError(f"stages end at {ends}", why=why, fix='[("bf16", 100), ("fp8", None)]')
    if len(set(names)) != len(names):
        raise ArgumentError(f"stages name a precision twice: {', '.join(names)}", fix="each once, higher before lower")
    if any(_HEIGHT[low] > _HEIGHT[high] for high, low in itertools.pairwise(names)):
        why = "the guard answers an alarm with the stage before, which must not be a lower precision"
        raise ArgumentError(f"stages go up: {', '.join(names)}", why=why, fix="higher before lower")
    return stages
