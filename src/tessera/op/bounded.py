"""The cheapest precision whose relative Frobenius error |C' - AB| / |AB| stays within a tolerance.

Candidates are tried from the fewest joules up (`product_cost.py`). One is skipped if the rounding of its operands
predicts too large an error, else run, and taken if random probes of the computed product stay under the tolerance at
their upper end (`error_bounds.py`). If none is, full precision runs; `ToleranceError` only if even that is too coarse.

A choice is kept for the shapes, layouts, type, device and tolerance, and for each `nn.Parameter` by itself. A kept
choice reads no data and waits for nothing, so it assumes that the next operands are like those that were checked. Two
things limit that. The check is repeated every `recheck_every` uses, which waits for the device. And every 16th use the
largest magnitudes are fetched without waiting; once they lie four octaves or more from those checked (or are not
finite), the next use checks again. Operands that change their character but not their size go unnoticed in between.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ToleranceError
from . import casting, error_bounds, lowprec
from .arguments import HALVES, is_number
from .casting import FULL
from .dispatch import has_no_values, with_transforms
from .product_cost import order_candidates

RECHECK_EVERY = 1000
_WATCH_EVERY = 16
_FOUR_OCTAVES = 16.0
_MOST_CHOICES = 1024  # the one checked longest ago goes first

TileOf = tuple[str, tuple[int, ...]]
"""An operator's name and the sides of its tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A precision that was considered: its predicted joules and error, the measured error, and the verdict."""

    precision: str
    accumulate: str = "fp32"
    energy_j: float
    bound: float | None = None
    sampled_error: float | None = None
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChoice:
    """What a product runs in, and why.

    `accumulate` is how it is summed, "fp32" or "fast". `bound` is the error predicted from the operands,
    `sampled_error` the upper end of the error that probes measured, None where nothing was probed. `checked` is whether
    the operands were read.
    """

    shape: tuple[int, ...]
    precision: str
    accumulate: str = "fp32"
    tolerance: float
    bound: float | None = None
    sampled_error: float | None = None
    checked: bool
    why: str
    candidates: tuple[Candidate, ...] = ()


@dataclass(slots=True)
class _KeptChoice:
    choice: PrecisionChoice
    amax: tuple[float, float]
    uses: int = 0
    watch: Any = None
    stale: bool = False


_choices: OrderedDict[Any, _KeptChoice] = OrderedDict()
_recent: deque[PrecisionChoice] = deque(maxlen=256)
_lock = threading.Lock()


def choose(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    tolerance: float,
    allowed: Sequence[str] | None = None,
    first: str | None = None,
    accumulate: str | None = None,
    out_dtype: torch.dtype | None = None,
    recheck_every: int = RECHECK_EVERY,
    costs: Mapping[str, float] | None = None,
    refuse: bool = True,
    tile: TileOf | None = None,
) -> PrecisionChoice:
    """The cheapest precision of `a @ b` within a relative Frobenius error; `lowprec.mm` runs it.

    `allowed` limits the candidates (full precision is always one). `first` is tried before the others, and then only
    finer ones are. Without `accumulate`, fp8 is tried with fast sums too, where the device has them. `costs` replaces
    the predicted joules by precision. Without `refuse`, full precision is the answer even where it is too coarse. With
    `tile`, the kernel of that tile is probed. Where values cannot be read (meta tensors, torch.compile, a CUDA graph
    under capture without a kept choice) full precision is the answer; `bounded_mm` chooses under torch.compile.
    """
    if torch.compiler.is_compiling():
        return _choose_unchecked(a, b, tolerance, accumulate)
    a, b = _check(a, b, tolerance, accumulate)
    if first is not None and first not in casting.PRECISIONS:
        raise casting.unknown_precision("precision", first)
    out = a.dtype if out_dtype is None else out_dtype
    names = None if allowed is None else tuple(allowed)
    prepared = tuple(casting.find_prepared(b, by_row) is not None for by_row in (False, True))
    kinds = (a.shape, b.shape, a.stride(), b.stride(), a.dtype, a.device, _identity(a), _identity(b), prepared)
    key = (*kinds, tolerance, out, accumulate, first, names, refuse, tile)
    kept = _choices.get(key)
    if kept is not None and _is_still_good(kept, a, b, recheck_every):
        return kept.choice
    if has_no_values(a) or _is_capturing(a):
        return _choose_unchecked(a, b, tolerance, accumulate)
    candidates = order_candidates(a, b, out, allowed=names, first=first, accumulate=accumulate, costs=costs)
    with torch.no_grad():
        operands = error_bounds.inspect_operands(a, b, each=tile is not None)
        choice = _decide(operands, tolerance, out, candidates, refuse, tile)
    with _lock:
        _choices[key] = _KeptChoice(choice, operands.amax)
        _choices.move_to_end(key)
        while len(_choices) > _MOST_CHOICES:
            _choices.popitem(last=False)
        _recent.append(choice)
    return choice


def choices() -> tuple[PrecisionChoice, ...]:
    """The most recent choices, oldest first: one for each check, not for each use."""
    with _lock:
        return tuple(_recent)


def forget() -> None:
    """Drop every kept choice and the list of recent ones."""
    with _lock:
        _choices.clear()
        _recent.clear()


# -- deciding -------------------------------------------------------------------------------------------------------


def _decide(
    operands: error_bounds.Operands, tolerance: float, out: Any, candidates: Any, refuse: bool, tile: TileOf | None
) -> PrecisionChoice:
    a, b = operands.a, operands.b
    full, shape = FULL[a.dtype], _shape(a, b)
    if not operands.is_finite:
        why = "an operand has values that are not finite: no error can be bounded, full precision runs"
        sums = candidates[-1].accumulate
        return PrecisionChoice(shape=shape, tolerance=tolerance, precision=full, accumulate=sums, checked=True, why=why)
    tried: list[Candidate] = []
    for precision, sums, energy_j in candidates:
        bound = error_bounds.predict_error(operands, precision, out, sums)
        error = None
        if bound > tolerance and precision != full:
            verdict = "predicted too coarse"
        else:
            error = error_bounds.measure_error(operands, multiply(a, b, precision, sums, out, tile)).upper
            if precision == "fp64":  # the probes are fp64 themselves: they cannot see its error
                error = max(error, bound)
            verdict = "taken" if error <= tolerance else "measured too coarse"
        tried.append(
            Candidate(
                precision=precision,
                accumulate=sums,
                energy_j=energy_j,
                bound=bound,
                sampled_error=error,
                verdict=verdict,
            )
        )
        if verdict == "taken":
            break
    last = tried[-1]
    if last.verdict == "taken":
        why = _explain(tried, full)
    else:
        refusal = _too_tight(last, tolerance, out, a.dtype)
        if refuse:
            raise refusal
        why = f"full precision runs: {refusal.what}"
    return PrecisionChoice(
        shape=shape,
        precision=last.precision,
        accumulate=last.accumulate,
        tolerance=tolerance,
        bound=last.bound,
        sampled_error=last.sampled_error,
        checked=True,
        why=why,
        candidates=tuple(tried),
    )


def multiply(a: Any, b: Any, precision: str, sums: str, out: Any, tile: TileOf | None) -> torch.Tensor:
    """The product of a choice, as it is probed and as it runs."""
    if tile is None:
        return lowprec.mm(a, b, precision, sums, out)
    from .tiled_matmul import multiply_by_tile

    result: torch.Tensor = multiply_by_tile(tile[0], a, b, tile[1], precision=precision, advise=False)
    return result.to(out)


def _explain(tried: Sequence[Candidate], full: str) -> str:
    taken, others = tried[-1], tried[:-1]
    if taken.precision == full:
        refused = [c for c in others if c.energy_j < taken.energy_j]
        if refused:
            return f"full precision runs: nothing cheaper holds ({'; '.join(map(_describe, refused))})"
        return "full precision is the cheapest here: the casts of a narrower one cost more than they save"
    text = f"error at most {taken.sampled_error:.1e}{', with fast sums' if taken.accumulate == 'fast' else ''}"
    return f"{text}; before it {'; '.join(map(_describe, others))}" if others else text


def _describe(c: Candidate) -> str:
    error = c.bound if c.sampled_error is None else c.sampled_error
    return f"{c.precision}{' with fast sums' if c.accumulate == 'fast' else ''} {c.verdict}, {error:.1e}"


def _too_tight(last: Candidate, tolerance: float, out: Any, dtype: Any) -> ToleranceError:
    if out in HALVES:
        why, fix = f"the result is rounded to {out}", "use fp32 operands (a.float(), b.float()) or a larger tolerance"
    elif dtype == torch.float64:
        why, fix = "sums of fp64 products are themselves rounded", "use a larger tolerance"
    else:
        why, fix = f"sums of {dtype} products are themselves rounded to fp32", "use fp64 operands or a larger tolerance"
    what = f"error_tolerance={tolerance:g} is below the error of {last.precision}, {last.sampled_error:.1e}"
    return ToleranceError(what, why=why, fix=fix)


def _check(a: Any, b: Any, tolerance: float, accumulate: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands as matrices, or as stacks of as many matrices."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):  # vectors, as torch.matmul takes them
        a, b = a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b
    lowprec.check(a, b, "fp32", accumulate or "fp32")
    if not (is_number(tolerance) and 0 < tolerance < math.inf):
        raise ToleranceError(
            f"error_tolerance={tolerance!r} is not a bound",
            why="it is the error of the whole result relative to it (Frobenius norms): 0.01 is one percent",
            fix="a number above 0, such as error_tolerance=1e-2",
        )
    if b.dim() == 2 and a.dim() > 2:
        a = a.reshape(a.shape[:-1].numel(), a.shape[-1])
    elif a.dim() > 2 or b.dim() > 2:
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (x.expand(*lead, *x.shape[-2:]).reshape(lead.numel(), *x.shape[-2:]) for x in (a, b))
    return a, b


def _choose_unchecked(a: Any, b: Any, tolerance: float, accumulate: str | None) -> PrecisionChoice:
    reason = "a graph is being captured, compiled or mapped"
    if a.is_meta or isinstance(a, torch._subclasses.FakeTensor):
        reason = "meta tensors have no values"
    return PrecisionChoice(
        shape=_shape(a, b),
        precision=FULL[a.dtype],
        accumulate=accumulate or "fp32",
        tolerance=tolerance,
        checked=False,
        why=f"{reason}: nothing can be checked, full precision runs",
    )


def _shape(a: Any, b: Any) -> tuple[int, ...]:
    return (*a.shape[:-1], b.shape[-1], a.shape[-1])


# -- kept choices ---------------------------------------------------------------------------------------------------


def _identity(x: Any) -> int | None:
    """Parameters are told apart, activations are not: they live at another address each time."""
    base = x if x._base is None else x._base
    return base.data_ptr() if isinstance(base, torch.nn.Parameter) and base.device.type != "meta" else None


def _is_capturing(a: Any) -> bool:
    return bool(a.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _is_still_good(kept: _KeptChoice, a: Any, b: Any, recheck_every: int) -> bool:
    kept.uses += 1
    if _is_capturing(a):
        return True
    if kept.watch is not None and (kept.watch[1] is None or kept.watch[1].query()):
        kept.stale = kept.stale or not _is_same_size(kept.watch[0].tolist(), kept.amax)
        kept.watch = None
    if kept.stale or kept.uses >= recheck_every:
        return False
    if kept.uses % _WATCH_EVERY == 0 and kept.watch is None and a.numel() and b.numel():
        kept.watch = _fetch_largest(a, b)
    return True


def _fetch_largest(a: Any, b: Any) -> tuple[Any, Any]:
    """The largest magnitudes, on their way to the host, and the event that tells when they have arrived."""
    both = torch.stack([torch.linalg.vector_norm(x.detach(), math.inf).float() for x in (a, b)])
    if a.device.type != "cuda":
        return both, None
    host = torch.empty(2, device="cpu", dtype=torch.float32, pin_memory=True)
    host.copy_(both, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def _is_same_size(now: Sequence[float], then: Sequence[float]) -> bool:
    """Whether magnitudes lie within four octaves of those that were checked."""
    for x, y in zip(now, then, strict=True):
        if x != y and not (math.isfinite(x) and min(x, y) > 0 and max(x, y) < _FOUR_OCTAVES * min(x, y)):
            return False
    return True


# -- choice and product as one operator -----------------------------------------------------------------------------


def bounded_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    tolerance: float,
    allowed: Sequence[str] | None = None,
    first: str | None = None,
    accumulate: str | None = None,
    out_dtype: torch.dtype | None = None,
    tile: TileOf | None = None,
) -> torch.Tensor:
    """`a @ b` in the cheapest precision within a relative Frobenius error; arguments as in `choose`.

    The choice is made when the operator runs, inside a compiled graph too. Gradients are bounded products themselves,
    chosen within the same tolerance; where no precision holds it, in the operands' own type.
    """
    names = ",".join(casting.PRECISIONS if allowed is None else allowed)
    out = a.dtype if out_dtype is None else out_dtype
    tile_text = "" if tile is None else " ".join((tile[0], *map(str, tile[1])))
    return _product(a, b, float(tolerance), names, first or "", accumulate or "", out, False, tile_text)


@torch.library.custom_op("tessera::bounded_mm", mutates_args=())
def bounded_mm_op(
    a: torch.Tensor,
    b: torch.Tensor,
    tolerance: float,
    allowed: str,
    first: str,
    accumulate: str,
    out_dtype: torch.dtype,
    gradient: bool = False,
    tile: str = "",
) -> torch.Tensor:
    """The operator that torch sees. `tile` is a name and sides: "matmul 128 128 64"; gradients have none."""
    name, *sides = tile.split(" ")
    tile_of = (name, tuple(map(int, sides))) if sides else None
    choice = choose(
        a,
        b,
        tolerance=tolerance,
        allowed=tuple(allowed.split(",")),
        first=first or None,
        accumulate=accumulate or None,
        out_dtype=out_dtype,
        refuse=not gradient,  # nobody can do anything about it in the middle of a backward pass
        tile=tile_of,
    )
    return multiply(a, b, choice.precision, choice.accumulate, out_dtype, tile_of)


@bounded_mm_op.register_fake
def _(a: Any, b: Any, tolerance: float, allowed: str, first: str, accumulate: str, out_dtype: Any, *_: Any) -> Any:
    lead = a.shape[:-2] if b.dim() == 2 else torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*lead, a.shape[-2], b.shape[-1]), dtype=out_dtype)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, *ctx.options = inputs[:6]
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    to_a = to_b = None
    wide = torch.promote_types(grad.dtype, a.dtype)
    grad = grad.to(wide)
    if ctx.needs_input_grad[0]:
        to_a = _product(grad, b.mT.to(wide), *ctx.options, a.dtype, True).sum_to_size(a.shape)
    if ctx.needs_input_grad[1]:
        left, right = a.mT.to(wide), grad
        if b.dim() == 2 and a.dim() > 2:  # the rows of all batches went through one matrix
            rows = a.shape[:-1].numel()
            left, right = a.reshape(rows, a.shape[-1]).mT.to(wide), grad.reshape(rows, grad.shape[-1])
        to_b = _product(left, right, *ctx.options, b.dtype, True).sum_to_size(b.shape)
    return to_a, to_b, *[None] * 7


bounded_mm_op.register_autograd(_backward, setup_context=_save)
_product = with_transforms(bounded_mm_op, _save, _backward, "matmul, gemm or linear", "error_tolerance")
