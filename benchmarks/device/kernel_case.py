"""One operator to be recorded, and how its tensors are made: what the `kernels_*.py` sweeps are written in.

`device` is where tensors are made: "meta" for whoever wants the operators and not their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Row = dict[str, Any]
Step = Callable[[], Any]
Pass = Callable[[bool], tuple[Step, list[torch.Tensor]]]
"""With or without gradients: the call, and the leaves they go to."""
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
LAST = torch.channels_last
device = "cuda"


@dataclass(frozen=True)
class Op:
    """`make` allocates one set of buffers and returns the call on them."""

    case: str
    params: Row
    make: Callable[[], Step]
    cold: bool = False


def rand(*shape: int, dtype: str = "bf16", grad: bool = False) -> torch.Tensor:
    x = torch.randn(shape, device=device, dtype=torch.float32 if dtype == "fp8" else DTYPES[dtype])
    return x.to(DTYPES[dtype]).requires_grad_(grad) if dtype == "fp8" else x.requires_grad_(grad)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, device=device)


def with_backward(fn: Step, leaves: list[torch.Tensor]) -> Step:
    """Forward and backward of `fn` to all leaves."""
    out = fn()
    seed = torch.randn_like(out)
    return lambda: torch.autograd.grad(fn(), leaves, seed)


def both(case: str, params: Row, make: Pass, backward: bool) -> Iterator[Op]:
    """The forward pass as one operator, and forward+backward as another where asked."""
    yield Op(case, {**params, "pass": "forward"}, lambda: make(False)[0])
    if backward:
        yield Op(case, {**params, "pass": "forward+backward"}, lambda: with_backward(*make(True)))


def backward_of(fn: Callable[[torch.Tensor], Any], shape: tuple[int, ...], dtype: str) -> Callable[[], Step]:
    def make() -> Step:
        x = rand(*shape, dtype=dtype, grad=True)
        return with_backward(lambda: fn(x), [x])

    return make


def on(case: str, fn: Callable[..., Any], *tensors: Callable[[], torch.Tensor], **params: Any) -> Op:
    """An operator of tensors that are made when its turn comes."""

    def make() -> Step:
        made = [t() for t in tensors]
        return lambda: fn(*made)

    return Op(case, params, make)


def t(*shape: int, dtype: str = "bf16") -> Callable[[], torch.Tensor]:
    return lambda: rand(*shape, dtype=dtype)


def index(high: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: ints(high, *shape)
