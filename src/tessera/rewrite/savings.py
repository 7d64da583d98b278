"""From what was seen of a compilation to rewrites: which eager operators became which kernel, and what that saves.

Both sides are solved by the model of `predict`: the program as eager torch launches it (`Watch.pieces`) and as Inductor
does (`Watch.kernels`), with the seconds their kernels took where those were seen (`sides.py`). Each kernel gets the
pieces it replaced; what it saves is their cost less its own. What the host no longer keeps waiting is one more line,
and whatever the two totals differ by beyond all lines is the line "rest", so that the lines add up to the difference
of the totals.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..graph.rewrites import Rewrite
from .lowered import after_pieces, owners
from .pieces import Piece, channels_last
from .prices import Cost, Host, Side, total, work_of
from .sides import TIMED, Looked, Sides, as_modelled, as_seen
from .watch import Found, Kernel, Watch

if TYPE_CHECKING:
    from ..device import Device
    from .seen import Seen

_CASTS = frozenset({"aten._to_copy"})
_COPIES = frozenset({"aten.clone", "aten.contiguous", "aten.copy"})
_LABEL_PARTS = 6
_HOST_ERROR = 0.5  # hosts of one kind were found at 0.83 to 1.5 times the constants (estimate/host.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What was rewritten, and both programs as the model sees them; the rewrites add up to the difference.

    With `basis` "timed" seconds and joules are measured; `looked_before` and `looked_after` say how far off the model
    was in seconds, `modelled_j` (before and after) what it has for the joules in the seconds that were seen.
    """

    rewrites: list[Rewrite]
    before_s: float | None = None
    before_j: float | None = None
    after_s: float | None = None
    after_j: float | None = None
    launches_before: int = 0
    launches_after: int = 0
    device: str = ""
    host_pace: float = 1.0
    basis: str = "modelled"
    looked_before: tuple[Looked, ...] = ()
    looked_after: tuple[Looked, ...] = ()
    modelled_j: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


def trace(
    watch: Watch,
    device: Device | None,
    *,
    replayed: bool,
    host: Host | None = None,
    eager_s: float | None = None,
    seen: tuple[Seen, Seen] | None = None,
) -> Trace:
    """The rewrites of a compilation; `replayed` says that its kernels are replayed as CUDA graphs.

    `seen` are the kernels of the program before and after, on this chip. Without them `eager_s`, what the program was
    measured to take before, tells how fast this host is, where it kept the device waiting.
    """
    if not watch.complete:
        return Trace(rewrites=[_bare(found) for found in watch.found], notes=tuple(watch.unsaid))
    after = after_pieces(watch)
    if device is None:
        return _unpriced(watch, after)
    host = host or Host()
    if seen is not None:
        sides = as_seen(watch, after, device, host, replayed, *seen)
    else:
        sides = as_modelled(watch, after, device, host, replayed, eager_s)
    before, now = sides.before, sides.after
    lines = list(_lines(watch, before.costs, sides.launched.costs, seen=sides.basis == TIMED))
    lines += _launching(sides, replayed)
    before_s, before_j = before.seconds + sides.extra.seconds, before.joules + sides.extra.joules
    lines += _in_place(watch)
    lines = [replace(r, basis=sides.basis) for r in lines] + _ours(watch, sides)
    lines += _rest(lines, before_s - now.seconds, before_j - now.joules, before_j, sides.basis)
    lines = [replace(r, device=device.id) for r in lines]
    return Trace(
        rewrites=sorted(lines, key=lambda r: -(r.saved_j or 0.0)), before_s=before_s, before_j=before_j,
        after_s=now.seconds, after_j=now.joules, launches_before=before.launches, launches_after=now.launches,
        device=device.id, host_pace=sides.pace, basis=sides.basis, looked_before=sides.looked_before,
        looked_after=sides.looked_after, modelled_j=sides.modelled_j, notes=tuple(watch.unsaid),
    )  # fmt: skip


# -- lines ---------------------------------------------------------------------------------------------------------


def _lines(watch: Watch, before: Sequence[Cost], after: Sequence[Cost], *, seen: bool = False) -> Iterable[Rewrite]:
    """One line for every kind of change, its occurrences added up.

    One operator that another kernel computes is a change only where both were `seen`: the model has one rate for both.
    """
    owned, vanished = owners(watch)
    sums: dict[tuple[str, str, str], list[Cost]] = defaultdict(list)
    for k, kernel in enumerate(watch.kernels):
        mine = [i for i in owned.get(k, []) if watch.pieces[i].launches]
        for rule, label, made, saved in _of_kernel(watch, kernel, mine, before, after[k]):
            sums[rule, label, made].append(saved)
        if seen and kernel.call is None and len(mine) == 1:
            label = label_of([watch.pieces[mine[0]]])
            sums["generated", label, "a generated kernel"].append(before[mine[0]].less(after[k]))
    for component, spent in zip(vanished, _paid(watch, vanished, after), strict=True):
        pieces = [watch.pieces[i] for i in component]
        rule, made = _vanished_rule(pieces)
        sums[rule, label_of(pieces), made].append(total(before[i] for i in component).less(spent))
    for (rule, label, made), costs in sums.items():
        yield _line(rule, label, made, costs)


def _line(rule: str, before: str, after: str, costs: Sequence[Cost], by: str = "inductor") -> Rewrite:
    found = total(costs)
    return Rewrite(
        rule=rule, before=before, after=after, by=by, times=len(costs), saved_bytes=found.nbytes,
        saved_j=found.joules, saved_error_j=found.error_j, saved_s=found.seconds,
    )  # fmt: skip


def _of_kernel(
    watch: Watch, kernel: Kernel, pieces: Sequence[int], before: Sequence[Cost], own: Cost
) -> Iterable[tuple[str, str, str, Cost]]:
    """What one kernel stands for: a fusion, and the casts and copies that vanished into it."""
    if kernel.call is not None:
        was = watch.pieces[pieces[0]] if len(pieces) == 1 else None
        if was is not None and was.kind == "conv" and channels_last(kernel.call) != channels_last(was):
            laid = "with channels last" if channels_last(kernel.call) else "with channels first"
            yield "layout", label_of([kernel.call]), laid, before[pieces[0]].less(own)
        return
    if len(pieces) < 2:
        return
    casts = [i for i in pieces if watch.pieces[i].name in _CASTS]
    copies = [i for i in pieces if watch.pieces[i].name in _COPIES]
    work = [i for i in pieces if i not in casts and i not in copies]
    if len(work) < 2:
        # One operator and the casts around it: they alone are what is saved.
        rule, gone = ("drop_cast", casts) if casts else ("drop_transpose", copies)
        saved = total(before[i] for i in pieces).less(own)
        yield rule, label_of([watch.pieces[i] for i in gone]), "inside a kernel", saved
        return
    for rule, gone in (("drop_cast", casts), ("drop_transpose", copies)):
        for i in gone:
            yield rule, label_of([watch.pieces[i]]), "inside a kernel", before[i]
    found = [watch.pieces[i] for i in work]
    rule = "fuse_reduction" if any(p.sums for p in found) else "fuse_elementwise"
    yield rule, label_of(found), "one kernel", total(before[i] for i in work).less(own)


def label_of(pieces: Sequence[Piece]) -> str:
    """Operators by name, each with how often: add + 2 layer_norm + gelu."""
    counts: dict[str, int] = {}
    for piece in pieces:
        counts[piece.short] = counts.get(piece.short, 0) + 1
    parts = [f"{n} {name}" if n > 1 else name for name, n in counts.items()]
    more = f" + {len(parts) - _LABEL_PARTS} more" if len(parts) > _LABEL_PARTS else ""
    return " + ".join(parts[:_LABEL_PARTS]) + more


def _paid(watch: Watch, vanished: Sequence[Sequence[int]], after: Sequence[Cost]) -> list[Cost]:
    """What is spent on the calls that took the place of what vanished: each is paid by those most like it in work.

    A fused attention is paid by products and softmaxes, addmm by mm and add, a padded product by the one before.
    """
    spent = [Cost() for _ in vanished]
    kinds = [_vanished_rule([watch.pieces[i] for i in component])[0] for component in vanished]
    for k, kernel in enumerate(watch.kernels):
        if kernel.call is None or any(node in graph for graph in watch.nodes for node in kernel.call.nodes):
            continue  # it was in the program as it was written
        rules = {"attention": ("flash_attention",), "gemm": ("fuse_epilogue", "pad_gemm")}.get(kernel.call.kind, ())
        payers = [c for c, rule in enumerate(kinds) if rule in rules]
        if payers:
            work = work_of([kernel.call])
            # Of equals the one that paid least so far: a layer's attention is paid by that layer's.
            nearest = min(payers, key=lambda c: (_apart(work, work_of([watch.pieces[i] for i in vanished[c]])),
                                                 spent[c].joules))  # fmt: skip
            spent[nearest] = spent[nearest] + after[k]
    return spent


def _apart(a: float, b: float) -> float:
    return round(abs(math.log(max(a, 1.0) / max(b, 1.0))), 1)


def _vanished_rule(pieces: Sequence[Piece]) -> tuple[str, str]:
    kinds = {p.kind for p in pieces}
    if "softmax" in kinds and "gemm" in kinds:
        return "flash_attention", "scaled_dot_product_attention"
    if "gemm" in kinds:
        return ("fuse_epilogue", "addmm") if len(pieces) > 1 else ("pad_gemm", "the product with padded rows")
    names = {p.name for p in pieces}
    if names <= _CASTS:
        return "drop_cast", "nothing"
    if names <= _COPIES | _CASTS:
        return "drop_transpose", "nothing"
    return "fold", "nothing"


def _launching(sides: Sides, replayed: bool) -> list[Rewrite]:
    """What the device no longer waits for the host, and in a replay no longer idles between two kernels."""
    before, after, seen = sides.before, sides.after, sides.basis == TIMED
    gaps, now = total(sides.launched.costs), total(after.costs)
    saved_s = before.wait_s - after.wait_s + (gaps.seconds - now.seconds)
    saved_j = before.wait_j - after.wait_j + (gaps.joules - now.joules)

    def told(side: Side) -> str:
        host = f"the device waits {side.wait_s * 1e3:.2f} ms" if seen else f"{side.host_s * 1e3:.2f} ms of the host"
        return f"{side.launches} launches, {host}"

    why = "" if saved_s else "the device is never kept waiting: launches cost the host's time alone"
    if saved_s and sides.pace != 1.0:
        why = f"this host takes {sides.pace:.2g} times what is shipped, by the measured eager time"
    return [
        Rewrite(
            rule="cuda_graph" if replayed else "fewer_launches", by="inductor", before=told(before),
            after="replayed" if replayed else told(after), saved_s=saved_s, saved_j=saved_j, saved_bytes=0.0,
            saved_error_j=abs(saved_j) * (before.watts_error if seen else _HOST_ERROR), why=why,
        )
    ]  # fmt: skip


def _ours(watch: Watch, sides: Sides) -> list[Rewrite]:
    """Rewrites of our own passes, those that are alike on one line."""
    found: dict[tuple[str, str, str, str, str], list[Cost]] = defaultdict(list)
    for n, (each, saved) in enumerate(zip(watch.found, sides.ours, strict=True)):
        basis = TIMED if n in sides.ours_seen else "modelled"
        found[each.rule, each.before, each.after, each.why, basis].append(saved)
    return [
        replace(_line(rule, before, after, costs, by="tessera"), why=why, basis=basis)
        for (rule, before, after, why, basis), costs in found.items()
    ]


def _bare(found: Found) -> Rewrite:
    """A rewrite of ours that cannot be priced."""
    return Rewrite(rule=found.rule, before=found.before, after=found.after, by="tessera", where=found.where,
                   why=found.why or "Inductor did not say what it fused: nothing to price")  # fmt: skip


def _in_place(watch: Watch) -> list[Rewrite]:
    if not watch.reused:
        return []
    spared = sum(nbytes for _, nbytes in watch.reused)
    return [
        Rewrite(rule="in_place", before="a new tensor", after="the memory of one that is no longer read", by="inductor",
                times=len(watch.reused), saved_bytes=0.0, saved_j=0.0, saved_error_j=0.0, saved_s=0.0,
                why=f"{spared / 1e6:.1f} MB less are allocated; the bytes moved are the same")
    ]  # fmt: skip


def _rest(lines: Sequence[Rewrite], saved_s: float, saved_j: float, before_j: float, basis: str) -> list[Rewrite]:
    rest_s = saved_s - sum(r.saved_s or 0.0 for r in lines)
    rest_j = saved_j - sum(r.saved_j or 0.0 for r in lines)
    if abs(rest_j) < 1e-3 * before_j:
        return []
    of = "library kernels, copies into and out of graphs" if basis == TIMED else "generated instead of library kernels"
    return [
        Rewrite(rule="rest", before="the same kernels", after="at another clock, from another cache", by="inductor",
                saved_s=rest_s, saved_j=rest_j, saved_bytes=0.0, saved_error_j=abs(rest_j), basis=basis,
                why=f"what the totals differ by beyond the lines: clock, cache, {of}")
    ]  # fmt: skip


def _unpriced(watch: Watch, after: Sequence[Piece]) -> Trace:
    """Bytes alone, where no chip is known to price them for."""
    before = [Cost(nbytes=float(_bytes(p))) for p in watch.pieces]
    lines = list(_lines(watch, before, [Cost(nbytes=float(_bytes(p))) for p in after]))
    lines += [_bare(found) for found in watch.found]
    why = "no joules of single rewrites: this machine's chip is not in the catalogue; name one: device='h200'"
    bare = [replace(r, saved_j=None, saved_s=None, saved_error_j=None, why=r.why or why) for r in lines]
    return Trace(
        rewrites=sorted(bare, key=lambda r: -(r.saved_bytes or 0.0)), notes=(*watch.unsaid, why),
        launches_before=sum(p.launches for p in watch.pieces), launches_after=len(after),
    )  # fmt: skip


def _bytes(piece: Piece) -> int:
    return sum(t.nbytes for _, t in (*piece.reads, *piece.writes)) if piece.launches else 0
