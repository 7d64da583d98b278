"""The cheapest precision whose relative Frobenius error |C' - AB| / |AB| stays within a tolerance.

Candidates are tried from the fewest joules up (`product_cost.py`). Each one runs, and its product is the answer if its
error is within the tolerance (`error_bounds.py`). If no candidate is, full precision runs; `ToleranceError` is raised
only if even that is too coarse.

For each set of shapes, layouts, type, device and tolerance (and for each `nn.Parameter` separately), the candidate that
was taken last is kept, and the next call starts there. Every product is checked before it is returned, so the bound
holds however the data change from call to call; on a GPU, the host waits for the check. Cheaper candidates are tried
again every `recheck_every` uses.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ToleranceError, check_choice, is_number
from . import casting, error_bounds, lowprec
from .arguments import HALVES
from .casting import FULL
from .dispatch import READS_VALUES, has_no_values, is_unobserved, make_differentiable, needs_gradient
from .product_cost import PricedPrecision, order_candidates

RECHECK_EVERY = 1000
_MOST_CHOICES = 1024  # the least recently made one is dropped first

TileOf = tuple[str, tuple[int, ...]]
"""An operator's name and the sides of its tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A precision that was tried: its predicted joules, an upper bound of its error, and the verdict."""

    precision: str
    accumulate: str = "fp32"
    energy_j: float
    sampled_error: float
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChoice:
    """The precision that a product runs in, and why.

    `accumulate` is how it is summed, "fp32" or "fast". `sampled_error` is an upper bound of the error when the
    precision was chosen, no sharper than the tolerance needs (for full precision often the bound by norms, far above
    the error); None if it is not known. `checked` is whether the operands were read.
    """

    shape: tuple[int, ...]
    precision: str
    accumulate: str = "fp32"
    tolerance: float
    sampled_error: float | None = None
    checked: bool
    why: str
    candidates: tuple[Candidate, ...] = ()


@dataclass(slots=True)
class _KeptChoice:
    choice: PrecisionChoice
    candidates: list[PricedPrecision]
    at: int
    uses: int = 0


_choices: OrderedDict[Any, _KeptChoice] = OrderedDict()
_recent: deque[PrecisionChoice] = deque(maxlen=256)
_lock = threading.Lock()


def multiply_within(
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
) -> tuple[torch.Tensor, PrecisionChoice]:
    """Return `a @ b` in the cheapest precision within a relative Frobenius error, and the choice.

    `allowed` limits the candidates (full precision is always one). `first` is tried before the others; after it, only
    finer ones are tried. Without `accumulate`, fp8 is tried with fast sums too, if the device has them. `costs`
    replaces the predicted joules by precision; without it, a CPU tries nothing narrower than the operands except
    `first`, because narrower formats are slower there. Without `refuse`, full precision is the answer even if it is too
    coarse. With `tile`, the kernel of that tile runs. If values cannot be read (meta tensors, a CUDA graph under
    capture), full precision runs unchecked.
    """
    left, right = _check(a, b, tolerance, accumulate)
    if first is not None:
        check_choice("precision", first, casting.PRECISIONS)
    out = a.dtype if out_dtype is None else out_dtype
    if has_no_values(left) or _is_capturing(left):
        choice = _choose_unchecked(left, right, tolerance, accumulate)
        return _multiply(a, b, choice.precision, choice.accumulate, out, tile), choice
    names = None if allowed is None else tuple(allowed)
    prepared = tuple(casting.find_prepared(right, by_row) is not None for by_row in (False, True))
    operands = ((x.shape, x.stride(), _identity(x)) for x in (left, right))
    asked = (tolerance, out, accumulate, first, names, refuse, tile, costs is None)
    key = (*operands, left.dtype, left.device, prepared, *asked)
    kept = _choices.get(key)
    start = 0
    if kept is None:
        ordered = order_candidates(left, right, out, allowed=names, first=first, accumulate=accumulate, costs=costs)
    else:
        kept.uses += 1
        ordered, start = kept.candidates, kept.at if kept.uses % recheck_every else 0
    with torch.no_grad():
        product, tried = _try_in_turn(left, right, ordered[start:], tolerance, out, tile)
    product = product.reshape(*_batch_shape(a, b), a.shape[-2], b.shape[-1])
    holds = tried[-1].verdict == "taken"
    if kept is not None and holds and start + len(tried) - 1 == kept.at:
        return product, kept.choice
    choice = _conclude(left, right, tolerance, out, tried, refuse)
    with _lock:
        if holds:
            _choices[key] = _KeptChoice(choice, ordered, start + len(tried) - 1, 0 if kept is None else kept.uses)
            _choices.move_to_end(key)
            while len(_choices) > _MOST_CHOICES:
                _choices.popitem(last=False)
        _recent.append(choice)
    return product, choice


def choices() -> tuple[PrecisionChoice, ...]:
    """Return the most recent choices, oldest first: one for each change, not for each use."""
    with _lock:
        return tuple(_recent)


def forget() -> None:
    """Drop every kept choice and the list of recent ones."""
    with _lock:
        _choices.clear()
        _recent.clear()


# -- deciding -------------------------------------------------------------------------------------------------------


def _try_in_turn(
    a: Any, b: Any, ordered: Sequence[PricedPrecision], tolerance: float, out: Any, tile: TileOf | None
) -> tuple[torch.Tensor, list[Candidate]]:
    """Return the product of the first candidate within the tolerance, or of the last one; and the candidates tried."""
    tried: list[Candidate] = []
    for precision, sums, energy_j in ordered:
        product = _multiply(a, b, precision, sums, out, tile)
        # our own kernels are always checked by probes
        lossless = precision == FULL[a.dtype] and sums == "fp32" and tile is None
        error = error_bounds.bound_error(a, b, product, tolerance, lossless=lossless)
        verdict = "taken" if error <= tolerance else "too coarse"
        shown: Any = {"precision": precision, "accumulate": sums, "energy_j": energy_j, "sampled_error": error}
        tried.append(Candidate(**shown, verdict=verdict))
        if verdict == "taken":
            break
    return product, tried


def _conclude(a: Any, b: Any, tolerance: float, out: Any, tried: list[Candidate], refuse: bool) -> PrecisionChoice:
    last = tried[-1]
    error: float | None = last.sampled_error
    if last.verdict == "taken":
        why = _explain(tried, FULL[a.dtype])
    elif not all(bool(x.isfinite().all()) for x in (a, b)):
        why, error = "an operand has values that are not finite: no error can be bounded, full precision runs", None
    else:
        refusal = _too_tight(last, tolerance, out, a.dtype)
        if refuse:
            raise refusal
        why = f"full precision runs: {refusal.what}"
    shape, sums = _shape(a, b), last.accumulate
    found: Any = {"precision": last.precision, "accumulate": sums, "sampled_error": error, "candidates": tuple(tried)}
    return PrecisionChoice(shape=shape, tolerance=tolerance, checked=True, why=why, **found)


def _multiply(a: Any, b: Any, precision: str, sums: str, out: Any, tile: TileOf | None) -> torch.Tensor:
    if tile is None:
        return lowprec.mm(a, b, precision, sums, out)
    from .tiled_matmul import multiply_by_tile

    result: torch.Tensor = multiply_by_tile(tile[0], a, b, tile[1], precision=precision)
    return result.to(out)


def _explain(tried: Sequence[Candidate], full: str) -> str:
    taken, others = tried[-1], tried[:-1]
    if taken.precision == full:
        refused = [c for c in others if c.energy_j < taken.energy_j]
        if refused:
            return f"full precision runs: nothing cheaper holds ({'; '.join(map(_describe, refused))})"
        return "full precision is the cheapest here: a narrower one costs more than it saves"
    text = f"error at most {taken.sampled_error:.1e}{', with fast sums' if taken.accumulate == 'fast' else ''}"
    return f"{text}; before it {'; '.join(map(_describe, others))}" if others else text


def _describe(c: Candidate) -> str:
    return f"{c.precision}{' with fast sums' if c.accumulate == 'fast' else ''} {c.verdict}, {c.sampled_error:.1e}"


def _too_tight(last: Candidate, tolerance: float, out: Any, dtype: Any) -> ToleranceError:
    if out in HALVES:
        why, fix = f"the result is rounded to {out}", "use fp32 operands (a.float(), b.float()) or a larger tolerance"
    elif dtype == torch.float64:
        why, fix = "sums of fp64 products are themselves rounded", "use a larger tolerance"
    else:
        why, fix = f"sums of {dtype} products are themselves rounded to fp32", "use fp64 operands or a larger tolerance"
    what = f"error_tolerance={tolerance:g} is below the error of {last.precision}, {last.sampled_error:.1e}"
    return ToleranceError(what, why=why, fix=fix)


def check_tolerance(tolerance: Any) -> None:
    """Raise ToleranceError for a tolerance that is not a positive number."""
    if not (is_number(tolerance) and 0 < tolerance < math.inf):
        raise ToleranceError(
            f"error_tolerance={tolerance!r} is not a bound",
            why="it is the error of the whole result relative to it (Frobenius norms): 0.01 is one percent",
            fix="a number above 0, such as error_tolerance=1e-2",
        )


def _check(a: Any, b: Any, tolerance: float, accumulate: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operands as matrices, or as stacks of equally many matrices."""
    lowprec.check(a, b, "fp32", accumulate or "fp32")
    check_tolerance(tolerance)
    if b.dim() == 2 and a.dim() > 2:
        a = a.reshape(a.shape[:-1].numel(), a.shape[-1])
    elif a.dim() > 2 or b.dim() > 2:
        lead = _batch_shape(a, b)
        a, b = (x.expand(*lead, *x.shape[-2:]).reshape(lead.numel(), *x.shape[-2:]) for x in (a, b))
    return a, b


def _choose_unchecked(a: Any, b: Any, tolerance: float, accumulate: str | None) -> PrecisionChoice:
    reason = "a graph is being captured or mapped"
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


def _batch_shape(a: Any, b: Any) -> torch.Size:
    lead: torch.Size = a.shape[:-2] if b.dim() == 2 else torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return lead


def _identity(x: Any) -> int | None:
    """Return an identity for parameters; None for activations, which have another address each time."""
    base = x if x._base is None else x._base
    return base.data_ptr() if isinstance(base, torch.nn.Parameter) else None


def _is_capturing(a: Any) -> bool:
    return bool(a.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


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
    """Return `a @ b` in the cheapest precision within a relative Frobenius error; arguments as in `multiply_within`.

    The choice is made when the operator runs, inside a compiled graph too. Gradients are bounded products themselves,
    chosen within the same tolerance; if no precision is within it, they run in the operands' own type.
    """
    names = ",".join(casting.PRECISIONS if allowed is None else allowed)
    out = a.dtype if out_dtype is None else out_dtype
    tile_text = "" if tile is None else " ".join((tile[0], *map(str, tile[1])))
    # an operator's first call imports the compiler, so plain calls avoid it
    plain = is_unobserved(a, b) and not needs_gradient(a, b)
    run = _multiply_bounded if plain else _product
    result: torch.Tensor = run(a, b, tolerance, names, first or "", accumulate or "", out, False, tile_text)
    return result


def _multiply_bounded(
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
    """Run the product as torch's operator. `tile` is a name and sides: "matmul 128 128 64"; gradients have none."""
    name, *sides = tile.split(" ")
    product, _ = multiply_within(
        a,
        b,
        tolerance=tolerance,
        allowed=tuple(allowed.split(",")),
        first=first or None,
        accumulate=accumulate or None,
        out_dtype=out_dtype,
        refuse=not gradient,  # nobody can react to an error in the middle of a backward pass
        tile=(name, tuple(map(int, sides))) if sides else None,
    )
    return product


bounded_mm_op = torch.library.custom_op("tessera::bounded_mm", _multiply_bounded, mutates_args=(), **READS_VALUES)


@bounded_mm_op.register_fake
def _(a: Any, b: Any, tolerance: float, allowed: str, first: str, accumulate: str, out_dtype: Any, *_: Any) -> Any:
    return a.new_empty((*_batch_shape(a, b), a.shape[-2], b.shape[-1]), dtype=out_dtype)


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


_product = make_differentiable(bounded_mm_op, _save, _backward, "matmul, gemm or linear", "error_tolerance")
