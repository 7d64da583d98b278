"""Stochastic rounding: the nearer a value is to the next representable value above, the more often it is rounded up.

Its expectation is the value itself, so many small steps are not lost. Plain rounding drops every update under half a
unit in the last place, which for bf16 weights is everything below 0.2-0.4% of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..dist.compression import round_by_chance
from ..errors import ArgumentError

# Mantissa bits and the exponent of the smallest normal number (IEEE 754; e4m3: OCP 8-bit formats, 2023).
_FORMATS = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float8_e4m3fn: (3, -6)}
_SLICE_BYTES = 256 << 20


def stochastic_round(
    x: torch.Tensor, dtype: torch.dtype = torch.bfloat16, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return `x` (fp32 or fp64) in a narrower type, equal to it in expectation.

    Values that are not finite pass (e4m3 has no infinity, so they become NaN). Beyond the largest finite number there
    is no upper neighbour: the value goes to the largest (e4m3, fp16), or for bf16 to either the largest or infinity.
    """
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"op.stochastic_round: x is a {type(x).__name__}, not a tensor", fix="torch.as_tensor(x)")
    if dtype not in _FORMATS:
        raise ArgumentError(f"dtype={dtype} is not supported", fix=f"one of {', '.join(map(str, _FORMATS))}")
    if x.dtype == dtype:
        return x.clone()
    if x.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(f"x is {x.dtype}", why="it is rounded from a wider type", fix="x.float()")
    if dtype == torch.bfloat16 and x.dtype == torch.float32:
        return round_by_chance(x, **_generator_option(generator))
    return _to_grid(x, dtype, generator)


def _generator_option(generator: torch.Generator | None) -> dict[str, Any]:
    """Leave the keyword out without a generator: with it, torch.compile takes no symbolic sizes (torch 2.13)."""
    return {} if generator is None else {"generator": generator}


def _to_grid(x: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None) -> torch.Tensor:
    """Divide by the distance of the neighbours, a power of two, and round; exact to the 2^-24 of the draw."""
    mantissa, least = _FORMATS[dtype]
    exponent = torch.frexp(x)[1] - 1
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=least) - mantissa)
    draw = torch.rand(x.shape, device=x.device, dtype=x.dtype, **_generator_option(generator))
    whole = torch.floor(x / step)
    rounded = (whole + (draw < x / step - whole)) * step
    largest = torch.finfo(dtype).max
    other = torch.nan if dtype == torch.float8_e4m3fn else x
    return torch.where(torch.isfinite(x), rounded.clamp(-largest, largest), other).to(dtype)


class StochasticRounding:
    """An optimizer over bf16 parameters whose updates are computed in fp32 and rounded stochastically: no fp32 copy.

    ::

        optimizer = StochasticRounding(torch.optim.AdamW(model.parameters(), lr=1e-4))
        loss.backward(); optimizer.step(); optimizer.zero_grad()

    Parameters go through fp32 in slices of at most `slice_bytes`: the memory a step takes beside the optimizer's state,
    which is fp32. A parameter keeps its address. Other types are updated as usual. Learning-rate schedulers take the
    wrapped optimizer, `.inner`. LBFGS, whose step needs all parameters together, is refused.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, *, generator: torch.Generator | None = None, slice_bytes: int = _SLICE_BYTES
    ) -> None:
        if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, torch.optim.LBFGS):
            raise ArgumentError(
                f"inner={type(inner).__name__} cannot be stepped in slices", fix="an optimizer of torch.optim but LBFGS"
            )
        self.inner = inner
        self._generator = generator
        self._slice_bytes = slice_bytes

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the inner optimizer's parameter groups."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> Any:
        """Return the inner optimizer's state."""
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state; this one has none of its own."""
        state: dict[str, Any] = self.inner.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the inner optimizer's state, and keep its moments in fp32: torch casts them to the parameters' type."""
        wide = {
            index: {name: value.clone() for name, value in entry.items() if _is_wide(value)}
            for index, entry in state["state"].items()
        }
        self.inner.load_state_dict(state)
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        for index, entry in wide.items():
            p = parameters[index]
            for name, value in entry.items():
                self.inner.state[p][name] = value.to(p.device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; return the loss if a closure computes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.inner.param_groups
        whole = [list(group["params"]) for group in groups]
        try:
            for piece in self._slices(whole):
                for group, params in zip(groups, piece, strict=True):
                    group["params"] = params
                self._step_slice([p for params in piece for p in params])
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        return loss

    def _slices(self, groups: list[list[Any]]) -> Iterator[list[list[Any]]]:
        """Yield parameters with a gradient, group by group, cut so that a slice in fp32 stays small."""
        piece: list[list[Any]] = [[] for _ in groups]
        size = 0
        for index, params in enumerate(groups):
            for p in params:
                if p.grad is None:
                    continue
                if size and size + 4 * p.numel() > self._slice_bytes:
                    yield piece
                    piece, size = [[] for _ in groups], 0
                piece[index].append(p)
                size += 4 * p.numel()
        if size:
            yield piece

    def _step_slice(self, params: list[Any]) -> None:
        narrow = [(p, p.data, p.grad) for p in params if p.dtype == torch.bfloat16]
        for p, _, _ in narrow:
            _widen(self.inner.state.get(p, {}))
        for p, data, grad in narrow:
            p.grad = None  # a parameter may not change its type under a gradient of the old one
            p.data = data.float()
            p.grad = grad.float()
        done = False
        try:
            self.inner.step()
            done = True
        finally:
            for p, data, grad in narrow:
                if done:  # if the step raised, the weights stay as they were
                    data.copy_(stochastic_round(p.data, generator=self._generator))
                p.grad = None
                p.data = data
                p.grad = grad


def _widen(state: dict[str, Any]) -> None:
    """Convert to fp32 the moments that an optimizer made before its first step (Adagrad makes them in bf16)."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
            state[name] = value.float()


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.dim() > 0
