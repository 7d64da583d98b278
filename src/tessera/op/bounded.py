"""`choose`: the cheapest precision whose relative Frobenius error |C' - AB| / |AB| stays within a tolerance.

Candidates are tried from the fewest joules up, by the energy model of `predict` for the chip at hand (an H200's figures
on a CPU), casts included. One is skipped if its operands' rounding foretells too large an error, run if not, and taken
if random probes of the computed product stay under the tolerance at their upper end (`bounds.py` has both). If none is,
full precision runs and the `Choice` says so; `ToleranceError` only if even that is too coarse. Unless `accumulate` is
given, fp8 is tried with the tensor core's fast sums too, where there are such.

A choice is kept for the shapes, layouts, type, device and tolerance, and for each `nn.Parameter` by itself (a layer's
product and its gradients differ in layout). A kept choice costs no look at the data and no wait, so it can be wrong: it
assumes that the next operands are like those that were checked. Two things limit that. The whole check is made again
every `recheck_every` uses, which waits for the device. And every 16th use the largest magnitudes are fetched without
waiting; once they lie four octaves or more from those checked (or are not finite), the next use checks anew. Operands
that change their character but not their size in between go unseen.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ArgumentError, ToleranceError
from . import bounds, lowprec, prepared
from .arguments import HALVES, number
from .candidates import Way, order
from .eager import valueless

RECHECK_EVERY = 1000
_WATCH_EVERY = 16
_BUCKET = 16.0  # four octaves
_KEPT = 1024  # choices; the one checked longest ago goes first

_choices: OrderedDict[Any, _Kept] = OrderedDict()
_recent: deque[Choice] = deque(maxlen=256)
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A precision that was considered: what it was predicted to cost and err, what was found, and the verdict."""

    precision: str
    accumulate: str = "fp32"
    energy_j: float
    bound: float | None = None
    sampled_error: float | None = None
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a product runs in, and why.

    `accumulate` is how it is summed, "fp32" or "fast". `bound` is the error foretold from the operands, `sampled_error`
    the upper end of what probes of the computed product say, None where nothing was probed. `checked` is whether the
    operands were looked at.
    """

    kind: str
    shape: tuple[int, ...]
    precision: str
    accumulate: str = "fp32"
    tolerance: float
    bound: float | None
    sampled_error: float | None
    checked: bool
    why: str
    candidates: tuple[Candidate, ...] = ()


@dataclass(slots=True)
class _Kept:
    choice: Choice
    amax: tuple[float, float]
    uses: int = 0
    watch: Any = None
    stale: bool = False


def choose(
    kind: str,
    *operands: torch.Tensor,
    tolerance: float,
    allowed: Sequence[str] | None = None,
    first: str | None = None,
    accumulate: str | None = None,
    out_dtype: torch.dtype | None = None,
    recheck_every: int = RECHECK_EVERY,
    costs: Mapping[str, float] | None = None,
    refuse: bool = True,
    tile: tuple[str, tuple[int, ...]] | None = None,
) -> Choice:
    """The cheapest precision of `a @ b` within a relative Frobenius error; `lowprec.mm` runs it.

    With `tile`, an operator's name and a tile's sides, our kernel of that tile runs it, and is what is probed.

    `kind` is "matmul". `allowed` limits the candidates (full precision always is one). `first` is the precision that
    was asked for by name: it is tried before cheaper or dearer ones, then only finer ones are. `accumulate` is kept to
    where it is given. `costs` replaces the predicted joules by precision. Without `refuse`
    full precision is the answer too where it is too coarse itself. Where values cannot be looked at (meta
    tensors, a CUDA graph under capture without a kept choice, torch.compile) full precision is the answer;
    `bounded_product.bounded_mm` chooses under torch.compile.
    """
    if torch.compiler.is_compiling():
        return _unchecked(kind, operands[0], operands[1], tolerance, accumulate)
    a, b = _checked(kind, operands, tolerance, accumulate)
    if first is not None and first not in lowprec.PRECISIONS:
        raise lowprec.unknown("precision", first)
    out = a.dtype if out_dtype is None else out_dtype
    key = (
        a.shape, b.shape, a.stride(), b.stride(), a.dtype, a.device, tolerance, out, accumulate, first,
        None if allowed is None else tuple(allowed), _identity(a), _identity(b), prepared.which(b), refuse, tile,
    )  # fmt: skip
    kept = _choices.get(key)
    if kept is not None and _still_good(kept, a, b, recheck_every):
        return kept.choice
    if valueless(a) or _capturing(a):
        return _unchecked(kind, a, b, tolerance, accumulate)
    ways = order(a, b, out, allowed=allowed, first=first, accumulate=accumulate, costs=costs)
    with torch.no_grad():
        choice, amax = _decide(kind, a, b, tolerance, out, ways, refuse, tile)
    with _lock:
        _choices[key] = _Kept(choice, amax)
        _choices.move_to_end(key)
        while len(_choices) > _KEPT:
            _choices.popitem(last=False)
        _recent.append(choice)
    return choice


def choices() -> tuple[Choice, ...]:
    """The choices made lately, oldest first: one for each check, not for each use."""
    with _lock:
        return tuple(_recent)


def forget() -> None:
    """Drop every kept choice and the list of recent ones."""
    with _lock:
        _choices.clear()
        _recent.clear()


# -- deciding ------------------------------------------------------------------------------------------------------


def _decide(
    kind: str, a: Any, b: Any, tolerance: float, out: Any, ways: Sequence[Way], refuse: bool, tile: Any
) -> tuple[Choice, tuple[float, float]]:
    look, full = bounds.operands(a, b, each=tile is not None), lowprec.FULL[a.dtype]
    common: dict[str, Any] = {"kind": kind, "shape": _shape(a, b), "tolerance": tolerance}
    if not look.finite:
        why = "an operand has values that are not finite: no error can be bounded, full precision runs"
        sums = ways[-1].accumulate
        found = Choice(**common, precision=full, accumulate=sums, bound=None, sampled_error=None, checked=True, why=why)
        return found, look.amax
    seen: list[Candidate] = []
    for precision, sums, joules in ways:
        bound = bounds.foretold(look, precision, out, sums)
        way: dict[str, Any] = {"precision": precision, "accumulate": sums, "bound": bound}
        if bound > tolerance and precision != full:
            seen.append(Candidate(**way, energy_j=joules, verdict="foretold too coarse"))
            continue
        error = bounds.found(look, multiplied(a, b, precision, sums, out, tile)).upper
        if precision == "fp64":  # the probes are fp64 themselves: they cannot see its error
            error = max(error, bound)
        verdict = "taken" if error <= tolerance else "found too coarse"
        seen.append(Candidate(**way, energy_j=joules, sampled_error=error, verdict=verdict))
        if verdict == "taken":
            why = _why(seen, full)
            return Choice(
                **common, **way, sampled_error=error, checked=True, why=why, candidates=tuple(seen)
            ), look.amax  # fmt: skip
    refusal = _too_tight(seen[-1], tolerance, out, a.dtype)
    if refuse:
        raise refusal
    last = seen[-1]
    return Choice(
        **common, precision=last.precision, accumulate=last.accumulate, bound=last.bound, checked=True,
        sampled_error=last.sampled_error, why=f"full precision runs: {refusal.what}", candidates=tuple(seen),
    ), look.amax  # fmt: skip


def multiplied(a: Any, b: Any, precision: str, sums: str, out: Any, tile: Any) -> torch.Tensor:
    """The product of a choice, probed and run: a tile's scales each matrix of a stack by itself, and sums otherwise."""
    if tile is None:
        return lowprec.mm(a, b, precision, sums, out)
    from . import tiled

    found: torch.Tensor = tiled.product(tile[0], a, b, tile[1], precision=precision, advise=False)
    return found.to(out)


def _why(seen: Sequence[Candidate], full: str) -> str:
    taken = seen[-1]
    if taken.precision == full:
        refused = [c for c in seen[:-1] if c.energy_j < taken.energy_j]
        if refused:
            return f"full precision runs: nothing cheaper holds ({'; '.join(_refusal(c) for c in refused)})"
        return "full precision is the cheapest here: the casts of a narrower one cost more than they save"
    text = f"error at most {taken.sampled_error:.1e}{', with fast sums' if taken.accumulate == 'fast' else ''}"
    return text if len(seen) == 1 else f"{text}; before it {'; '.join(_refusal(c) for c in seen[:-1])}"


def _refusal(c: Candidate) -> str:
    error = c.bound if c.sampled_error is None else c.sampled_error
    return f"{c.precision}{' with fast sums' if c.accumulate == 'fast' else ''} {c.verdict}, {error:.1e}"


def _too_tight(last: Candidate, tolerance: float, out: Any, dtype: Any) -> ToleranceError:
    if out in HALVES:
        why, fix = f"the result is rounded to {out}", "operands in fp32 (a.float(), b.float()), or a larger tolerance"
    elif dtype == torch.float64:
        why, fix = "sums of fp64 products are rounded themselves", "a larger tolerance"
    else:
        why, fix = f"sums of {dtype} products are rounded to fp32 themselves", "fp64 operands, or a larger tolerance"
    what = f"error_tolerance={tolerance:g} is finer than {last.precision} gives: {last.sampled_error:.1e}"
    return ToleranceError(what, why=why, fix=fix)


def _checked(
    kind: str, operands: Sequence[Any], tolerance: float, accumulate: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if kind != "matmul" or len(operands) != 2:
        raise ArgumentError(f"kind={kind!r} with {len(operands)} operands", fix='"matmul" of two matrices is bounded')
    a, b = operands
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):  # vectors, as torch.matmul takes them
        a, b = a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b
    lowprec.check(a, b, "fp32", accumulate or "fp32")
    if not (number(tolerance) and 0 < tolerance < math.inf):
        raise ToleranceError(
            f"error_tolerance={tolerance!r} is no bound",
            why="it is the error of the whole result relative to it (Frobenius norms): 0.01 is one percent",
            fix="a number above 0, such as error_tolerance=1e-2",
        )
    if b.dim() == 2 and a.dim() > 2:
        a = a.reshape(a.shape[:-1].numel(), a.shape[-1])
    elif a.dim() > 2 or b.dim() > 2:
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (x.expand(*lead, *x.shape[-2:]).reshape(lead.numel(), *x.shape[-2:]) for x in (a, b))
    return a, b


def _unchecked(kind: str, a: Any, b: Any, tolerance: float, accumulate: str | None) -> Choice:
    reason = "a graph is being captured, compiled or mapped"
    if a.is_meta or isinstance(a, torch._subclasses.FakeTensor):
        reason = "meta tensors have no values"
    return Choice(
        kind=kind, shape=_shape(a, b), precision=lowprec.FULL[a.dtype], accumulate=accumulate or "fp32",
        tolerance=tolerance, bound=None, sampled_error=None, checked=False,
        why=f"{reason}: nothing can be checked, full precision runs",
    )  # fmt: skip


def _shape(a: Any, b: Any) -> tuple[int, ...]:
    return (*a.shape[:-1], b.shape[-1], a.shape[-1])


# -- what is kept --------------------------------------------------------------------------------------------------


def _identity(x: Any) -> int | None:
    """Parameters are told apart, activations are not: they live at another address each time."""
    base = x if x._base is None else x._base
    return base.data_ptr() if isinstance(base, torch.nn.Parameter) and base.device.type != "meta" else None


def _capturing(a: Any) -> bool:
    return bool(a.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _still_good(kept: _Kept, a: Any, b: Any, recheck_every: int) -> bool:
    kept.uses += 1
    if _capturing(a):
        return True
    if kept.watch is not None and _arrived(kept):
        kept.stale = kept.stale or not _same_bucket(kept)
        kept.watch = None
    if kept.stale or kept.uses >= recheck_every:
        return False
    if kept.uses % _WATCH_EVERY == 0 and kept.watch is None and a.numel() and b.numel():
        kept.watch = _fetch(a, b)
    return True


def _fetch(a: Any, b: Any) -> tuple[Any, Any]:
    """The largest magnitudes, on their way to the host, and the event that says they are there."""
    both = torch.stack([torch.linalg.vector_norm(x.detach(), math.inf).float() for x in (a, b)])
    if a.device.type != "cuda":
        return both, None
    host = torch.empty(2, device="cpu", dtype=torch.float32, pin_memory=True)
    host.copy_(both, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def _arrived(kept: _Kept) -> bool:
    return kept.watch[1] is None or bool(kept.watch[1].query())


def _same_bucket(kept: _Kept) -> bool:
    for now, then in zip(kept.watch[0].tolist(), kept.amax, strict=True):
        if now == then:
            continue
        if not (math.isfinite(now) and min(now, then) > 0 and max(now, then) < _BUCKET * min(now, then)):
            return False
    return True
