"""The program before and after, priced: by the model alone, or with the seconds their kernels were seen to take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .lowered import owners
from .pieces import Piece, channels_last
from .prices import Cost, Host, Side, paced, sharing, solved, taking, timed, total
from .seen import Group, Seen, by_kernel, by_operator
from .watch import Found, Watch

if TYPE_CHECKING:
    from ..device import Device

TIMED = "timed"
"""The basis of savings whose seconds were measured kernel by kernel, and whose joules are shared out by the model."""

# What tells one attention from another.
_SHAPE = ("batch", "heads", "q_len", "kv_len", "head_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """Some kernels of a program: what the model says they take, and what they were seen to take."""

    name: str
    pieces: int
    modelled_s: float
    seen_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Both programs priced; `launched` is the one after without a replay.

    `ours` is what each place that our passes changed saves, `ours_seen` the numbers of those whose kernels were seen,
    `extra` what `before` lacks because our passes came first. `modelled_j` are the joules of both, before and after, as
    the model has them for the seconds that were seen, where what is here was measured and shared out.
    """

    before: Side
    launched: Side
    after: Side
    ours: Sequence[Cost]
    extra: Cost
    pace: float = 1.0
    ours_seen: frozenset[int] = frozenset()
    looked_before: tuple[Looked, ...] = ()
    looked_after: tuple[Looked, ...] = ()
    modelled_j: tuple[float, float] | None = None

    @property
    def basis(self) -> str:
        """What the seconds are: "timed" where the kernels were seen, else "modelled"."""
        return TIMED if self.looked_before else "modelled"


def as_modelled(
    watch: Watch, after: Sequence[Piece], device: Device, host: Host, replayed: bool, eager_s: float | None
) -> Sides:
    """Both programs by the model alone; `eager_s` is what the first was measured to take."""
    if eager_s is not None:
        host = paced(watch.pieces, device, host, eager_s)
    launched = solved(after, device)
    ours = [_alone_saves(found, device) for found in watch.found]
    return Sides(
        before=solved(watch.pieces, device, host), launched=launched, ours=ours, extra=total(ours), pace=host.pace,
        after=solved(after, device, replayed=True) if replayed else launched,
    )  # fmt: skip


def _alone_saves(found: Found, device: Device) -> Cost:
    """What a pass of ours saved: the operators it replaced against those it put there, each solved apart."""
    if found.saved_j is not None:
        return Cost(found.saved_s or 0.0, found.saved_j, 0.5 * abs(found.saved_j))
    if found.pieces_before and found.pieces_after:
        return _alone(found.pieces_before, device).less(_alone(found.pieces_after, device))
    return Cost()


def _alone(pieces: Sequence[Piece], device: Device) -> Cost:
    return total(solved(pieces, device, replayed=True).costs)


def as_seen(
    watch: Watch, after: Sequence[Piece], device: Device, host: Host, replayed: bool, then: Seen, now: Seen
) -> Sides:
    """Both programs with the seconds their kernels took, and the joules of an iteration shared out among them.

    Eager torch ran what our passes found there, not what they put in its place: those pieces are exchanged, and for
    Inductor's lines cost what they cost now.
    """
    put = _stand_ins(watch)
    gone = {i for indices in put.values() for i in indices}
    kept = [i for i in range(len(watch.pieces)) if i not in gone]
    eager, spans = [watch.pieces[i] for i in kept], {}
    for n in put:
        spans[n] = range(len(eager), len(eager) + len(watch.found[n].pieces_before))
        eager += [_apart(piece, n) for piece in watch.found[n].pieces_before]
    before, looked_before = _looked(
        solved(eager, device, host), by_operator(dict(enumerate(eager)), then.launches), then.iteration_s
    )
    made = by_kernel(watch.kernels, watch.pieces, now.launches, replayed=replayed)
    later, looked_after = _looked(solved(after, device, replayed=replayed), made, now.iteration_s)
    owned, _ = owners(watch)
    later = _same_work(watch, owned, dict(zip(kept, before.costs, strict=False)), later)
    modelled_j = before.joules, later.joules
    before, later = sharing(before, later, _in_both(watch, owned, kept), then.iteration_j, now.iteration_j)
    costs = dict(zip(kept, before.costs, strict=False))  # those our passes found come behind
    costs |= {i: later.costs[k] for k, indices in owned.items() for i in indices if i in gone}
    ours, extra = [_alone_saves(found, device) for found in watch.found], []
    for n, indices in put.items():
        ours[n] = total(before.costs[i] for i in spans[n]).less(total(costs.get(i, Cost()) for i in indices))
        extra.append(ours[n])
    own = tuple(costs.get(i, Cost()) for i in range(len(watch.pieces)))
    return Sides(
        before=replace(before, costs=own), launched=later, after=later, ours=ours, extra=total(extra),
        ours_seen=frozenset(put), looked_before=looked_before, looked_after=looked_after, modelled_j=modelled_j,
    )  # fmt: skip


def _apart(piece: Piece, n: int) -> Piece:
    """Names of its memory apart: each place was traced alone, and all have their own mul_1."""
    reads, writes = (tuple((f"found {n}/{name}", t) for name, t in side) for side in (piece.reads, piece.writes))
    return replace(piece, reads=reads, writes=writes)


def _same_work(watch: Watch, owned: Mapping[int, Sequence[int]], before: Mapping[int, Cost], after: Side) -> Side:
    """A generated kernel of one operator does what that operator did: its work takes the same joules.

    What a generated kernel computes is not known to the model otherwise: it knows the bytes alone.
    """
    costs = list(after.costs)
    for k, indices in owned.items():
        mine = [i for i in indices if watch.pieces[i].launches]
        if watch.kernels[k].call is None and len(mine) == 1 and mine[0] in before:
            same = taking(before[mine[0]], costs[k].seconds, after.limit_w)
            costs[k] = replace(same, nbytes=costs[k].nbytes)
    return replace(after, costs=tuple(costs))


def _in_both(watch: Watch, owned: Mapping[int, Sequence[int]], kept: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Places of the operators that are still called as they were: among those eager torch ran, and among kernels."""
    place = {i: n for n, i in enumerate(kept)}
    for k, indices in owned.items():
        mine, call = [i for i in indices if watch.pieces[i].launches], watch.kernels[k].call
        if (
            call is not None
            and len(mine) == 1
            and mine[0] in place
            and channels_last(call) == channels_last(watch.pieces[mine[0]])
        ):
            yield place[mine[0]], k


def _looked(side: Side, groups: Sequence[Group], iteration_s: float) -> tuple[Side, tuple[Looked, ...]]:
    rows = (
        Looked(
            name=group.name, pieces=len(group.members), seen_s=group.seconds,
            modelled_s=sum(side.costs[i].seconds for i in group.members),
        )
        for group in groups
    )  # fmt: skip
    return timed(side, groups, iteration_s), tuple(sorted(rows, key=lambda row: -row.seen_s))


def _stand_ins(watch: Watch) -> dict[int, list[int]]:
    """By the number of what a pass of ours found, the pieces it put there; left out where they cannot be told."""
    free = [i for i, piece in enumerate(watch.pieces) if piece.launches]
    put: dict[int, list[int]] = {}
    for n, found in enumerate(watch.found):
        if not (found.pieces_before and found.pieces_after):
            continue
        mine: list[int] = []
        for piece in found.pieces_after:
            mine += [i for i in free if i not in mine and _same(watch.pieces[i], piece)][:1]
        if len(mine) == len(found.pieces_after):
            put[n] = mine
            free = [i for i in free if i not in mine]
    return put


def _same(a: Piece, b: Piece) -> bool:
    shapes = [tuple(p.params.get(key) for key in _SHAPE) for p in (a, b)]
    return (a.kind, a.backward) == (b.kind, b.backward) and shapes[0] == shapes[1]
