"""What the original did, and how far another run of it is off: value by value, by number format, with a verdict.

Each value is compared by its relative Frobenius error and by its largest deviation relative to its largest magnitude.
A value that is small beside all others (the gradient of a key's bias is zero but for rounding) is compared on the scale
of a thousandth of the largest. Whole numbers and truths must be the same but for a share as large as that error may be:
rounding decides an argmax now and then. Texts must be the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..graph.nested import Unreadable

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2,
}  # fmt: skip
"""Relative Frobenius error allowed by number format: 20 rounding errors (unit roundoff 2^-9 of bf16, 2^-11 of fp16),
rounded up; fp32 is wider than its rounding, since eager and compiled may use TF32 in different places."""

GRADIENTS = 5.0
"""How much larger the error of one gradient may be than that of all together: those of biases and norms are sums over
many rounded values that nearly cancel (5e-2 between eager and Inductor in bf16, four layers of GPT-2 on a CPU)."""

WORST = 10.0
"""How much larger the deviation of a single element may be, relative to the largest element."""

SAME_UPDATE = 0.3
"""How far a training step's update of all weights may be from the original's where gradients are not seen: optimizers
that divide by the gradient's size make whole steps of rounding, so this only catches what is wrong (no step is 1.0)."""

SPREADS = 4.0
"""So many times the distance between two draws of random numbers may lie between a third draw and the first."""

_SMALL = 1e-3
_LARGEST = 2**63  # of a whole number in a tensor
RESULT, ARGUMENT, OUTSIDE, GRADIENT, UPDATE = "result", "argument", "outside", "gradient of ", "update of "


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a comparison found: the errors of the value that is furthest off, where, and what was allowed there.

    `result` is the largest relative error of what was returned; of whole numbers and truths it is the share that
    differs. `checked` says whether there was anything to compare.
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
    """What the original did. `tolerance` replaces the one of each value's number format, which `retyped` lets change.

    `spread` is how far apart two draws of random numbers are, by value, and `random` whether that is more than
    rounding: then weights must move as far as the original's, not where they did. `numbers` is allowed of Python's
    floats, whose format nobody knows any more, `decided` of whole numbers and truths, of which rounding decides some.
    """

    seen: Mapping[str, Any]
    tolerance: float | None = None
    spread: Mapping[str, float] = field(default_factory=dict)
    random: bool = False
    retyped: bool = False
    numbers: float = TOLERANCE[torch.float32]
    decided: float = 0.0

    @property
    def unknown(self) -> list[str]:
        """What cannot be compared, in words."""
        return [f"the {name} {v.why}: not compared" for name, v in self.seen.items() if isinstance(v, Unreadable)]

    def compare(self, seen: Mapping[str, Any]) -> Verdict:
        """Another observation of the same program."""
        found = list(self.verdicts(seen))
        if not found:
            return Verdict(ok=True, relative=0.0, worst=0.0, allowed=0.0, why="nothing to compare", checked=False)
        worst = max(found, key=lambda v: (not v.ok, _excess(v)))
        result = max((v.relative for v in found if v.where.startswith(RESULT)), default=0.0)
        return replace(worst, result=result)

    def verdicts(self, seen: Mapping[str, Any]) -> Iterator[Verdict]:
        """Value by value, and all gradients and all updates as one vector each."""
        if odd := self._odd(seen):
            written = odd[0].startswith((ARGUMENT, OUTSIDE))
            how = "changed by one of the two only" if written else "there on one side only"
            yield _refused(odd[0], 0.0, f"{odd[0]} is {how}")
            return
        gradients, updates = (
            [(v, seen[k]) for k, v in self.seen.items() if k.startswith(kind)] for kind in (GRADIENT, UPDATE)
        )
        if gradients:
            allowed = self._allowed("all gradients", *(v for v, _ in gradients))
            yield _vector("all gradients", _apart(gradients), allowed)
        if updates:
            yield _vector("all updates", _lengths(updates) if self.random else _apart(updates), SAME_UPDATE)
        largest = max((_norm([v]) for v, _ in gradients), default=0.0)
        for name, old in self.seen.items():
            if name.startswith(GRADIENT):
                allowed = GRADIENTS * self._allowed(name, old, seen[name])
                yield _one(name, old, seen[name], allowed, floor=_SMALL * largest)
            elif not name.startswith(UPDATE):
                yield from self._value(name, old, seen.get(name))

    def beside(self, other: Mapping[str, Any]) -> Reference:
        """The same with another run of the original: what differs there is not compared any more."""
        return replace(self, seen=steady(self.seen, other))

    def _odd(self, seen: Mapping[str, Any]) -> list[str]:
        """What is on one side only. A variable outside whose names are others at every run may have further ones."""
        loose = {_variable(n) for n, v in self.seen.items() if n.startswith(OUTSIDE) and isinstance(v, Unreadable)}
        missing = (n for n in self.seen.keys() - seen.keys() if not isinstance(self.seen[n], Unreadable))
        return sorted((*missing, *(n for n in seen.keys() - self.seen.keys() if _variable(n) not in loose)))

    def _value(self, name: str, old: Any, new: Any) -> Iterator[Verdict]:
        """Of values that say nothing about a computation (None, a text), only that they are others."""
        if type(old) is type(new) is int and old != new and max(abs(old), abs(new)) < _LARGEST:
            old, new = torch.tensor([old]), torch.tensor([new])
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            if _is_exact(old) and _is_exact(new):
                allowed = max(self.tolerance or self.decided, SPREADS * self.spread.get(name, 0.0))
                yield _exact(name, old, new, allowed)
            else:
                yield _one(name, old, new, self._allowed(name, old, new), retyped=self.retyped)
        elif isinstance(old, (float, complex)) and isinstance(new, (int, float, complex)):
            allowed = max(self.tolerance or self.numbers, SPREADS * self.spread.get(name, 0.0))
            one, other = (torch.tensor([v], dtype=torch.complex128) for v in (old, new))
            yield _one(name, one, other, allowed)
        elif isinstance(old, Unreadable) or (_is_plain(old) and _is_plain(new) and _equal(old, new)):
            if isinstance(old, int):
                yield Verdict(ok=True, relative=0.0, worst=0.0, allowed=0.0, where=name)
        else:
            yield _refused(name, 0.0, f"{name}: {_shown(old)} became {_shown(new)}")

    def _allowed(self, where: str, *values: torch.Tensor) -> float:
        given = self.tolerance or max(TOLERANCE.get(v.dtype.to_real(), 1e-3) for v in values)
        return max(given, SPREADS * self.spread.get(where, 0.0))


def compare(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float | None = None) -> Verdict:
    """Two observations of a program that draws no random numbers."""
    return Reference(seen=before, tolerance=tolerance).compare(after)


def steady(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """One run's values, but those that are others at every run (a time, a count of calls): no change is to blame.

    Outside, where clocks are read and what is made once is kept, so are floats and what one of the two runs wrote.
    """
    found = dict(first)
    for name in first.keys() | other.keys():
        old, new, is_outside = first.get(name), other.get(name), name.startswith(OUTSIDE)
        if name not in first or name not in other:
            varies = is_outside
        elif is_outside and isinstance(old, (float, complex)):
            varies = not _equal(old, new)
        else:
            varies = _is_plain(old) and not (_is_plain(new) and _equal(old, new))
        if varies:
            found[name] = Unreadable("is another one at every run")
    return found


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def _apart(pairs: Pairs) -> float:
    """Relative Frobenius distance of many tensors taken as one vector; absolute where the old one is zero."""
    size, apart = _norm(old for old, _ in pairs), _norm(_real(new) - _real(old) for old, new in pairs)
    return apart / size if size else apart


def _lengths(pairs: Pairs) -> float:
    """How much longer or shorter the new vector is."""
    old, new = _norm(old for old, _ in pairs), _norm(new for _, new in pairs)
    return abs(new / old - 1.0) if old else new


def _norm(parts: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(_real(t).square().sum()) for t in parts))


def _aligned(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse ones as the values at all places where either has one: dense they may not fit anywhere."""
    if old.layout is torch.strided or new.layout is torch.strided:
        return old, new
    wide = torch.uint8 if old.dtype == torch.bool else old.dtype  # torch adds no sparse truths
    one, other = (t.detach().to_sparse_coo().to(wide).coalesce() for t in (old, new))
    places = torch.cat([one.indices(), other.indices().to(one.device)], 1)

    def at_all(t: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros((places.shape[1], *t.values().shape[1:]), dtype=t.dtype, device=places.device)
        ones = torch.sparse_coo_tensor(places, zeros, t.shape)
        return (t.to(places.device) + ones).coalesce().values()

    return at_all(one), at_all(other)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Dense and in fp64; of complex numbers both parts, so that a norm is theirs."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.to(torch.complex128).resolve_conj())
    return dense.double()


def _vector(where: str, relative: float, allowed: float) -> Verdict:
    ok = relative <= allowed
    why = "" if ok else f"{where} together: relative error {relative:.2g}, at most {allowed:.2g} is allowed"
    return Verdict(ok=ok, relative=relative, worst=relative, allowed=allowed, where=where, why=why)


def _one(
    name: str, old: torch.Tensor, new: torch.Tensor, allowed: float, *, floor: float = 0.0, retyped: bool = False
) -> Verdict:
    if old.shape != new.shape or (old.dtype != new.dtype and not retyped):
        return _refused(name, allowed, f"{list(old.shape)} {old.dtype} became {list(new.shape)} {new.dtype}")
    a, b = (_real(t) for t in _aligned(old, new))
    strange = ~(torch.isfinite(a) & torch.isfinite(b))
    if bool(strange.any()):  # what was infinite or no number must be so again
        same = torch.equal(torch.nan_to_num(a)[strange], torch.nan_to_num(b)[strange])
        if not same or not bool((torch.isnan(a) == torch.isnan(b)).all()):
            return _refused(name, allowed, f"{name}: infinities or NaNs differ")
        a, b = a[~strange], b[~strange]
    if not a.numel():
        return Verdict(ok=True, relative=0.0, worst=0.0, allowed=allowed, where=name)
    (norm, top), (gap, largest) = ([float(torch.linalg.vector_norm(t, p)) for p in (2, math.inf)] for t in (a, a - b))
    relative, worst = _over(gap, max(norm, floor)), _over(largest, max(top, floor))
    ok = relative <= allowed and worst <= WORST * allowed
    why = "" if ok else f"{name}: relative error {relative:.2g}, at most {allowed:.2g} is allowed"
    return Verdict(ok=ok, relative=relative, worst=worst, allowed=allowed, where=name, why=why)


def _exact(name: str, old: torch.Tensor, new: torch.Tensor, allowed: float) -> Verdict:
    """Whole numbers and truths are the same, unless it is allowed that a share differs, or numbers by so much."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return _refused(name, allowed, f"{list(old.shape)} {old.dtype} became {list(new.shape)} {new.dtype}")
    old, new = _aligned(old, new)
    others = int((old != new.to(old.device)).sum())
    off = others / old.numel() if others else 0.0
    if off and old.dtype != torch.bool:  # a count of what rounding decides is a little off, not a share of it
        off = min(off, _over(_norm([old.double() - new.double()]), _norm([old])))
    why = "" if off <= allowed else f"{name}: {others} of {old.numel()} values differ"
    return Verdict(ok=not why, relative=off, worst=off, allowed=allowed, where=name, why=why)


def _variable(name: str) -> str:
    """Which variable a name lies in: `outside['times'` of `outside['times'][1.25]`."""
    return name.partition("]")[0]


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (torch.Tensor, Unreadable, float, complex))


def _equal(old: Any, new: Any) -> bool:
    return type(old) is type(new) and bool(old == new)


def _shown(value: Any) -> str:
    text = value.why if isinstance(value, Unreadable) else repr(value)
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else text[:60]


def _over(off: float, size: float) -> float:
    return off / size if size > 0 else (0.0 if off == 0 else math.inf)


def _refused(where: str, allowed: float, why: str) -> Verdict:
    return Verdict(ok=False, relative=math.inf, worst=math.inf, allowed=allowed, where=where, why=why)


def _excess(found: Verdict) -> float:
    return max(found.relative, found.worst / WORST) / found.allowed if found.allowed else found.relative
