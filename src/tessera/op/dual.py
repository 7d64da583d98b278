"""Dual-precision autodiff: forward products in bf16 or fp8, backward products and all sums in fp32.

::

    with dual_precision(model, forward="fp8"):      # the nn.Linear layers of a model, put back afterwards
        loss = model(x).sum()
    loss.backward()                                 # its products run in fp32, inside or outside

    @dual_precision(forward="bf16")                 # every product that a function makes
    def step(x): ...

Parameters and gradients keep their type: fp32 weights get fp32 gradients. What is rounded is the copy of the operands
that a forward product multiplies; backward products use the operands as they were, so the gradient is that of the
function with exact products at this point, not of the rounding (a straight-through estimate).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, overload

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.overrides import TorchFunctionMode

from ..errors import ArgumentError
from . import lowprec

_PRODUCTS = {
    torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.bmm,
}  # fmt: skip
_ADDED = {torch.addmm, torch.Tensor.addmm}


class Dual:
    """A pair of precisions, as a context, a decorator, or for the layers of a module; `forward` may be changed.

    Entering it for a module replaces the `forward` of its `nn.Linear` layers (not of subclasses, which may do more),
    leaving puts them back; `names` lists them. Without a module it takes every product of torch in the body: linear,
    matmul, mm, bmm, addmm. A product of other types than fp32, fp16, bf16, fp64 stays as it is.
    """

    def __init__(self, module: Any, forward: str, backward: str, accumulate: str) -> None:
        self.forward, self.backward, self.accumulate = forward, backward, accumulate
        self._module = module
        self._layers: list[tuple[Any, Any]] = []
        self._modes: list[_Products] = []
        self.names: tuple[str, ...] = ()

    @property
    def forward(self) -> str:
        """The precision of forward products; "fp32" and such turn the rounding off."""
        return self._forward

    @forward.setter
    def forward(self, precision: str) -> None:
        if precision not in lowprec.PRECISIONS:
            raise lowprec.unknown("forward", precision)
        self._forward = precision

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """`a @ b`, forward in one precision, backward in the other."""
        return lowprec.mm(a, b, self.forward, self.accumulate, backward=self.backward)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias`; a vector is a matrix of one row."""
        y = self.product(x if x.dim() > 1 else x[None], weight.mT)
        y = y if x.dim() > 1 else y[0]
        return y if bias is None else y + bias

    def __enter__(self) -> Dual:
        if self._module is None:
            self._modes.append(_Products(self))
            self._modes[-1].__enter__()
            return self
        if self._layers:
            raise ArgumentError("this module is already in dual precision", fix="leave the first scope before a second")
        found = [(name, layer) for name, layer in self._module.named_modules() if type(layer) is nn.Linear]
        self.names = tuple(name for name, _ in found)
        for _, layer in found:
            self._layers.append((layer, layer.__dict__.get("forward")))
            layer.forward = functools.partial(_linear_of, self, layer)
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
        """The function with its products in these precisions."""

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with Dual(self._module, self.forward, self.backward, self.accumulate):
                return fn(*args, **kwargs)

        return wrapped


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
    """Forward products in `forward`, backward ones in `backward`, sums in `accumulate`.

    Of a module: a context for its linear layers. Of a function: the function, all its products so. Of nothing: a
    context and decorator for all products.
    """
    if backward not in lowprec.PRECISIONS:
        raise lowprec.unknown("backward", backward)
    if accumulate not in lowprec.ACCUMULATES:
        raise ArgumentError(f"accumulate={accumulate!r}", fix='"fp32" or "fast"')
    if target is None or isinstance(target, nn.Module):
        return Dual(target, forward, backward, accumulate)
    if not callable(target):
        raise ArgumentError(
            f"{target!r} is neither a module nor a function", fix="dual_precision(model) or @dual_precision"
        )
    return Dual(None, forward, backward, accumulate)(target)


def _linear_of(dual: Dual, layer: Any, x: torch.Tensor) -> torch.Tensor:
    if not _ours(x, layer.weight):
        return F.linear(x, layer.weight, layer.bias)
    return dual.linear(x, layer.weight, layer.bias)


def _ours(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and a.dtype in lowprec.FULL and a.dtype == b.dtype and a.device == b.device


class _Products(TorchFunctionMode):
    """Takes the products that torch is asked for in a scope."""

    def __init__(self, dual: Dual) -> None:
        super().__init__()
        self._dual = dual

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs.keys() - {"bias"} and _ours(args[0], args[1]):
            return self._dual.linear(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias"))
        if func in _PRODUCTS and not kwargs and _ours(*args[:2]) and min(args[0].dim(), args[1].dim()) >= 2:
            return self._dual.product(*args[:2])
        if func in _ADDED and not kwargs and _ours(*args[1:3]):
            return args[0] + self._dual.product(*args[1:3])
        return func(*args, **kwargs)
