"""Compare what a changed program did with what the original did, value by value.

Each value is compared by its relative Frobenius error, and by its largest deviation relative to its largest magnitude.
A gradient that is small compared with the others (a key's bias has only rounding errors) is compared on the scale of a
thousandth of the largest. Integers and booleans may differ in as large a share as that error, because rounding
sometimes decides an argmax. Strings must be the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..graph.nested import Unreadable

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
"""Relative Frobenius error allowed by number format: 20 rounding errors (unit roundoff 2^-9 of bf16, 2^-11 of fp16),
rounded up; fp32 has more than its rounding, because eager and compiled code may use TF32 in different places."""

GRADIENT_FACTOR = 5.0
"""How much larger the error of one gradient may be than that of all gradients together.

Gradients of biases and norms are sums over many rounded values that nearly cancel (5e-2 between eager and Inductor in
bf16, four layers of GPT-2 on a CPU).
"""

ELEMENT_FACTOR = 10.0
"""How much larger the deviation of a single element may be than the allowed error, relative to the largest element."""

UPDATE_TOLERANCE = 0.3
"""How far a training step's update of all weights may be from the original's, if the gradients are not seen.

Optimizers that divide by the gradient's size turn rounding errors into whole steps, so this only catches real errors
(no step is 1.0).
"""

SPREAD_FACTOR = 4.0
"""A third draw of random numbers may be this many times as far from the first as the second was."""

_SMALL = 1e-3
_MAX_INTEGER = 2**63  # in a tensor
RESULT, ARGUMENT, OUTSIDE, GRADIENT, UPDATE = "result", "argument", "outside", "gradient of ", "update of "


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The value that differs most: its errors, where it is, and what was allowed there.

    `result` is the largest relative error of the returned values; for integers and booleans, the share that differs.
    `checked` tells whether there was anything to compare.
    """

    ok: bool
    relative: float
    worst: float
    allowed: float
    where: str = ""
    why: str = ""
    result: float = 0.0
    checked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the original did.

    `tolerance` replaces the tolerance of each value's number format; with `retyped`, formats may change. `spread` is
    how far apart two draws of random numbers are, by value. `random` tells whether that is more than rounding: then
    weights must move as far as the original's, not to the same place. `float_tolerance` is for Python's floats, whose
    original format is unknown. `exact_tolerance` is for integers and booleans, some of which are decided by rounding.
    """

    observed: Mapping[str, Any]
    tolerance: float | None = None
    spread: Mapping[str, float] = field(default_factory=dict)
    random: bool = False
    retyped: bool = False
    float_tolerance: float = TOLERANCE[torch.float32]
    exact_tolerance: float = 0.0

    @property
    def notes(self) -> list[str]:
        """Return what cannot be compared, in words."""
        return [f"the {name} {v.why}: not compared" for name, v in self.observed.items() if isinstance(v, Unreadable)]

    def compare(self, observed: Mapping[str, Any]) -> Comparison:
        """Compare another observation of the same program."""
        every = list(self.compare_each(observed))
        if not every:
            return Comparison(ok=True, relative=0.0, worst=0.0, allowed=0.0, why="nothing to compare", checked=False)
        worst = max(every, key=lambda c: (not c.ok, _excess(c)))
        result = max((c.relative for c in every if c.where.startswith(RESULT)), default=0.0)
        return replace(worst, result=result)

    def compare_each(self, observed: Mapping[str, Any]) -> Iterator[Comparison]:
        """Yield a comparison of each value, and of all gradients and all updates as one vector each."""
        if unmatched := self._find_unmatched(observed):
            written = unmatched[0].startswith((ARGUMENT, OUTSIDE))
            how = "changed by one of the two only" if written else "there on one side only"
            yield _fail(unmatched[0], 0.0, f"{unmatched[0]} is {how}")
            return
        gradients, updates = (
            [(v, observed[k]) for k, v in self.observed.items() if k.startswith(kind)] for kind in (GRADIENT, UPDATE)
        )
        if gradients:
            allowed = self._tolerance_of("all gradients", *(v for v, _ in gradients))
            yield _compare_vector("all gradients", _distance(gradients), allowed)
        if updates:
            distance = _length_difference(updates) if self.random else _distance(updates)
            yield _compare_vector("all updates", distance, UPDATE_TOLERANCE)
        largest = max((_norm([v]) for v, _ in gradients), default=0.0)
        for name, old in self.observed.items():
            if name.startswith(GRADIENT):
                allowed = GRADIENT_FACTOR * self._tolerance_of(name, old, observed[name])
                yield _compare_tensors(name, old, observed[name], allowed, floor=_SMALL * largest)
            elif not name.startswith(UPDATE):
                yield from self._compare_value(name, old, observed.get(name))

    def without_variations(self, other: Mapping[str, Any]) -> Reference:
        """Return the same without the values that differ in another run of the original."""
        return replace(self, observed=drop_variations(self.observed, other))

    def _find_unmatched(self, observed: Mapping[str, Any]) -> list[str]:
        """Return what is on one side only, except outside variables whose names differ at every run."""
        unreadable = {name for name, value in self.observed.items() if isinstance(value, Unreadable)}
        varying = {_variable_of(name) for name in unreadable if name.startswith(OUTSIDE)}
        missing = self.observed.keys() - observed.keys() - unreadable
        extra = (name for name in observed.keys() - self.observed.keys() if _variable_of(name) not in varying)
        return sorted((*missing, *extra))

    def _compare_value(self, name: str, old: Any, new: Any) -> Iterator[Comparison]:
        """Compare two values; None and strings are reported only if they differ."""
        if type(old) is type(new) is int and old != new and max(abs(old), abs(new)) < _MAX_INTEGER:
            old, new = torch.tensor([old]), torch.tensor([new])
        spread = SPREAD_FACTOR * self.spread.get(name, 0.0)
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            if _is_exact(old) and _is_exact(new):
                yield _compare_exact(name, old, new, max(self.tolerance or self.exact_tolerance, spread))
            else:
                yield _compare_tensors(name, old, new, self._tolerance_of(name, old, new), retyped=self.retyped)
        elif isinstance(old, (float, complex)) and isinstance(new, (int, float, complex)):
            one, other = (torch.tensor([v], dtype=torch.complex128) for v in (old, new))
            yield _compare_tensors(name, one, other, max(self.tolerance or self.float_tolerance, spread))
        elif isinstance(old, Unreadable) or (_is_plain(old) and _is_plain(new) and _is_same(old, new)):
            if isinstance(old, int):
                yield Comparison(ok=True, relative=0.0, worst=0.0, allowed=0.0, where=name)
        else:
            yield _fail(name, 0.0, f"{name}: {_describe(old)} became {_describe(new)}")

    def _tolerance_of(self, where: str, *values: torch.Tensor) -> float:
        tolerance = self.tolerance or max(TOLERANCE.get(v.dtype.to_real(), 1e-3) for v in values)
        return max(tolerance, SPREAD_FACTOR * self.spread.get(where, 0.0))


def compare(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float | None = None) -> Comparison:
    """Compare two observations of a program that draws no random numbers."""
    return Reference(observed=before, tolerance=tolerance).compare(after)


def drop_variations(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return one run's values without those that differ at every run (a time, a count of calls).

    Outside variables may hold clocks, and things that are made only once. So among them, floats that differ, and values
    that only one of the runs wrote, are dropped too.
    """
    steady = dict(first)
    for name in first.keys() | other.keys():
        old, new, is_outside = first.get(name), other.get(name), name.startswith(OUTSIDE)
        if name not in first or name not in other:
            varies = is_outside
        elif is_outside and isinstance(old, (float, complex)):
            varies = not _is_same(old, new)
        else:
            varies = _is_plain(old) and not (_is_plain(new) and _is_same(old, new))
        if varies:
            steady[name] = Unreadable("is another one at every run")
    return steady


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def _distance(pairs: Pairs) -> float:
    """Return the relative Frobenius distance of many tensors taken as one vector; absolute if the old one is zero."""
    size, distance = _norm(old for old, _ in pairs), _norm(_to_real(new) - _to_real(old) for old, new in pairs)
    return distance / size if size else distance


def _length_difference(pairs: Pairs) -> float:
    """Return how much longer or shorter the new vector is, relative to the old one."""
    old, new = _norm(old for old, _ in pairs), _norm(new for _, new in pairs)
    return abs(new / old - 1.0) if old else new


def _norm(parts: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(_to_real(t).square().sum()) for t in parts))


def _align(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn two sparse tensors into their values at all places where either has one; dense, they may not fit."""
    if old.layout is torch.strided or new.layout is torch.strided:
        return old, new
    wide = torch.uint8 if old.dtype == torch.bool else old.dtype  # torch cannot add sparse booleans
    one, other = (t.detach().to_sparse_coo().to(wide).coalesce() for t in (old, new))
    places = torch.cat([one.indices(), other.indices().to(one.device)], 1)

    def at_all(t: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros((places.shape[1], *t.values().shape[1:]), dtype=t.dtype, device=places.device)
        everywhere = torch.sparse_coo_tensor(places, zeros, t.shape)
        return (t.to(places.device) + everywhere).coalesce().values()

    return at_all(one), at_all(other)


def _to_real(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor dense and fp64; complex numbers become two parts, so that the norm is the same."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.to(torch.complex128).resolve_conj())
    return dense.double()


def _compare_vector(where: str, relative: float, allowed: float) -> Comparison:
    ok = relative <= allowed
    why = "" if ok else f"{where} together: relative error {relative:.2g}, at most {allowed:.2g} is allowed"
    return Comparison(ok=ok, relative=relative, worst=relative, allowed=allowed, where=where, why=why)


def _compare_tensors(
    name: str, old: torch.Tensor, new: torch.Tensor, allowed: float, *, floor: float = 0.0, retyped: bool = False
) -> Comparison:
    if old.shape != new.shape or (old.dtype != new.dtype and not retyped):
        return _fail(name, allowed, f"{list(old.shape)} {old.dtype} became {list(new.shape)} {new.dtype}")
    a, b = (_to_real(t) for t in _align(old, new))
    strange = ~(torch.isfinite(a) & torch.isfinite(b))
    if bool(strange.any()):  # infinities and NaNs must be in the same places
        same = torch.equal(torch.nan_to_num(a)[strange], torch.nan_to_num(b)[strange])
        if not same or not bool((torch.isnan(a) == torch.isnan(b)).all()):
            return _fail(name, allowed, f"{name}: infinities or NaNs differ")
        a, b = a[~strange], b[~strange]
    if not a.numel():
        return Comparison(ok=True, relative=0.0, worst=0.0, allowed=allowed, where=name)
    (norm, top), (gap, largest) = ([float(torch.linalg.vector_norm(t, p)) for p in (2, math.inf)] for t in (a, a - b))
    relative, worst = _divide(gap, max(norm, floor)), _divide(largest, max(top, floor))
    ok = relative <= allowed and worst <= ELEMENT_FACTOR * allowed
    why = "" if ok else f"{name}: relative error {relative:.2g}, at most {allowed:.2g} is allowed"
    return Comparison(ok=ok, relative=relative, worst=worst, allowed=allowed, where=name, why=why)


def _compare_exact(name: str, old: torch.Tensor, new: torch.Tensor, allowed: float) -> Comparison:
    """Compare integers or booleans: the allowed share of them may differ, or integers by that much."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return _fail(name, allowed, f"{list(old.shape)} {old.dtype} became {list(new.shape)} {new.dtype}")
    old, new = _align(old, new)
    others = int((old != new.to(old.device)).sum())
    error = others / old.numel() if others else 0.0
    # a count that depends on rounding is off by a little, and is not judged by the share of values that differ
    if error and old.dtype != torch.bool:
        error = min(error, _divide(_norm([old.double() - new.double()]), _norm([old])))
    why = "" if error <= allowed else f"{name}: {others} of {old.numel()} values differ"
    return Comparison(ok=not why, relative=error, worst=error, allowed=allowed, where=name, why=why)


def _variable_of(name: str) -> str:
    """Return which variable a name is in: `outside['times'` for `outside['times'][1.25]`."""
    return name.partition("]")[0]


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (torch.Tensor, Unreadable, float, complex))


def _is_same(old: Any, new: Any) -> bool:
    return type(old) is type(new) and bool(old == new)


def _describe(value: Any) -> str:
    text = value.why if isinstance(value, Unreadable) else repr(value)
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else text[:60]


def _divide(error: float, size: float) -> float:
    return error / size if size > 0 else (0.0 if error == 0 else math.inf)


def _fail(where: str, allowed: float, why: str) -> Comparison:
    return Comparison(ok=False, relative=math.inf, worst=math.inf, allowed=allowed, where=where, why=why)


def _excess(comparison: Comparison) -> float:
    error = max(comparison.relative, comparison.worst / ELEMENT_FACTOR)
    return error / comparison.allowed if comparison.allowed else comparison.relative
