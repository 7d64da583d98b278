"""Finds which traced launch each untraced kernel repeats, so that a few traced steps give operators for a whole run.

::

    traced, a stream      a b c d e | a b c d e        names of kernels in launch order
    untraced              a b c d e   a b x d e   a b d e   a b c c d e
    repeats               0 1 2 3 4   0 1 2 3 4   0 1 3 4   0 1 2 2 3 4

A cursor goes through the traced launches round and round, as the program does. If the next kernel has another name, the
cursor continues at the nearest place from which the next names agree; the farther away, the more names must agree
(`NAMES_BY_REACH`). Launches skipped on both sides are paired: a product of another shape runs as another kernel in the
same place.

Names decide; grids and blocks then tell whether the shapes are the traced ones too. A kernel whose name, grid and block
belong to only one operator gets that operator in any case.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..record import KINDS
from .columns import NONE, UNTRACED, Ints, Timeline
from .distinct import rank_combinations

Bools = NDArray[np.bool_]

NAMES_BY_REACH = ((1, 2), (2, 8), (4, 512), (8, 2**62))
"""(names, reach): how many names must agree if at most so many launches are left out. Reaches are for: another kernel
in one's place, a missing call, the experts of one layer, another part of the program."""
LOST, LOST_NAMES = 64, 4
"""After `LOST` launches that were never traced, count only the traced launches that are left out, if at least
`LOST_NAMES` names agree."""
MOST_BACK = 512
"""How far a cursor goes back at most: one more expert than was traced repeats the launches of the one before."""
_PIECE = 4096
"""Launches whose names are looked up at once."""
_MIX = np.random.default_rng(0).integers(1, 2**63, 16, dtype=np.uint64) | np.uint64(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAlignment:
    """By row of the timeline. `twin`: the traced row that a device row repeats; itself if it was traced, or `NONE`.

    `is_same`: the twin has the same grid, block and bytes too, so its operator's shapes are also right for this row.
    `in_order`: the twin was found by its place among its neighbours, not by its name alone. `repeats` are the rows
    whose twin is another row. `lanes` are the rows of each stream in launch order, for devices with such rows.
    `by_key` are the rows whose twin stands for all traced rows with their key, and the keys by row: the operator is
    right, but not which of its calls.
    """

    twin: Ints
    repeats: Ints
    is_same: Bools
    in_order: Bools
    lanes: tuple[Ints, ...]
    by_key: tuple[tuple[Ints, Ints], ...] = ()


def align_launches(timeline: Timeline, device: Ints, op: Ints, launch: Ints) -> LaunchAlignment:
    """Find the twins of the device rows for which no operator was traced.

    `op` has the operator of every traced row, `launch` the host call that launched it.
    """
    counts = timeline.columns.get("count")
    is_sum = np.zeros(len(device), bool) if counts is None else counts[device] != NONE  # stands for many launches
    untraced = is_sum | (timeline["external"][device] == UNTRACED) & (launch[device] == NONE)
    twin = np.full(len(timeline), NONE, np.int64)
    twin[device[~untraced]] = device[~untraced]
    if not untraced.any():
        known = twin != NONE
        return LaunchAlignment(twin=twin, repeats=device[:0], is_same=known, in_order=known, lanes=())
    name, exact = _name_launches(timeline, device)
    lanes = tuple(_split_lanes(timeline, device[~is_sum]))
    is_untraced = np.zeros(len(timeline), bool)
    is_untraced[device] = untraced
    for lane in lanes:
        pick = is_untraced[lane]
        reference, rows = lane[~pick], lane[pick]
        if len(reference) and len(rows):
            before = np.cumsum(~pick)[pick]  # how many traced launches came before
            places = _follow_from_windows(name[reference], name[rows], before)
            places = _fill_gaps(places, before, op[reference], timeline["name"])
            twin[rows] = np.where(places == NONE, NONE, reference[places])
    in_order = twin != NONE
    traced, rows = device[~untraced], device[untraced]
    placed = twin[rows]
    by_exact = find_by_key(twin, rows, traced, exact, op, timeline["name"], override=True)
    by_name = find_by_key(twin, rows, traced, name, op, timeline["name"], override=False)
    in_order[rows] &= twin[rows] == placed
    has = (twin != NONE) & is_untraced
    is_same = np.zeros(len(timeline), bool)
    is_same[traced] = True
    is_same[has] = exact[has] == exact[twin[has]]
    return LaunchAlignment(
        twin=twin, repeats=np.flatnonzero(has), is_same=is_same, in_order=in_order, lanes=lanes,
        by_key=((by_exact, exact), (by_name, name)),
    )  # fmt: skip


def _name_launches(timeline: Timeline, device: Ints) -> tuple[Ints, Ints]:
    """Return by row a number for the rank, kind and name of a launch, and one for these with grid, block and bytes."""
    shapes: dict[object, int] = {}
    shape = np.array(
        [shapes.setdefault((launch_shape.grid, launch_shape.block), len(shapes)) for launch_shape in timeline.launches]
        + [NONE],
        np.int64,
    )
    names, exact = (np.full(len(timeline), NONE, np.int64) for _ in range(2))
    number = timeline["rank"][device] * len(KINDS) + timeline["kind"][device]
    of_name = rank_combinations(number, timeline["name"][device])[0]
    names[device] = of_name
    exact[device] = rank_combinations(of_name, shape[timeline["launch"][device]], timeline["bytes"][device])[0]
    return names, exact


def _split_lanes(timeline: Timeline, device: Ints) -> Iterator[Ints]:
    """Yield rows of each stream of each device (and rank) in the order they ran, which is that of their launches."""
    columns = [timeline[name][device] for name in ("rank", "device", "stream")]
    order = np.lexsort((timeline["start_ns"][device], *columns[::-1]))
    ordered = device[order]
    changes = np.zeros(len(ordered), bool)
    for column in columns:
        changes[1:] |= np.diff(column[order]) != 0
    if len(ordered):  # empty if all rows are sums
        yield from np.split(ordered, np.flatnonzero(changes))


def _follow_from_windows(reference: Ints, sequence: Ints, before: Ints) -> Ints:
    """Return places in the reference, beginning at what was traced: onwards from there, and backwards from the first.

    `before` tells for each launch how many launches of the reference came before it.
    """
    lead = int(np.searchsorted(before, 1))
    backwards = follow_launches(reference[::-1], sequence[:lead][::-1], np.zeros(lead, np.int64))[::-1]
    backwards = np.where(backwards == NONE, NONE, len(reference) - 1 - backwards)
    return np.concatenate((backwards, follow_launches(reference, sequence[lead:], before[lead:])))


def follow_launches(reference: Ints, sequence: Ints, before: Ints) -> Ints:
    """Return for each launch of a sequence its place in the reference, or `NONE`. Both are numbers of names.

    Where `before` changes, the cursor continues at that place of the reference.
    """
    size, count = len(reference), len(sequence)
    places = np.full(count, NONE, np.int64)
    if not count:
        return places
    grams = [(_Grams(reference, sequence, length), reach) for length, reach in NAMES_BY_REACH]
    begins = np.flatnonzero(np.diff(before, prepend=-1))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), count], strict=True):
        at, cursor = begin, int(before[begin]) % size
        while at < end:
            length = _common_length(reference, sequence[:end], cursor, at)
            places[at : at + length] = np.arange(cursor, cursor + length)
            at, cursor = at + length, cursor + length
            if length and cursor == size:
                cursor = 0
            elif at < end:
                found = _resume(grams, at, cursor, size, end)
                at, cursor = found or (end, 0)
    return places


def _common_length(reference: Ints, sequence: Ints, cursor: int, at: int) -> int:
    """Return how many launches agree from there on."""
    step, length = 64, 0
    while True:
        a, b = reference[cursor + length : cursor + length + step], sequence[at + length : at + length + step]
        n = min(len(a), len(b))
        if not n:
            return length
        differs = np.flatnonzero(a[:n] != b[:n])
        if len(differs):
            return length + int(differs[0])
        length, step = length + n, step * 4


def _resume(grams: list[tuple[_Grams, int]], at: int, cursor: int, size: int, end: int) -> tuple[int, int] | None:
    """Return where sequence and reference agree again, with the fewest launches left out on both sides together."""
    best, found = 2 * (size + end), None
    any_name = grams[0][0]
    ahead = any_name.next_known(at)
    while ahead < end and ahead - at < best:
        for gram, reach in grams:
            moved, place = gram.nearest_place(ahead, cursor, size)
            left_out = ahead - at + moved
            if place == NONE or left_out >= best:
                break  # a match of more names cannot be nearer
            is_lost = ahead - at >= LOST and gram.length >= LOST_NAMES
            if (moved if is_lost else left_out) <= reach:
                best, found = left_out, (ahead, place)
                break
        ahead = any_name.next_known(ahead + 1)
    return found


class _Grams:
    """Finds where each run of a few names of a sequence occurs in the reference, which is repeated at its end.

    The sequence is handled in pieces, and only if somebody asks: a program that just repeats its steps never does.
    """

    def __init__(self, reference: Ints, sequence: Ints, length: int) -> None:
        self.length = length
        self._sequence = sequence
        wrapped = np.resize(reference, len(reference) + length - 1)
        self._known, number = np.unique(_hash_grams(wrapped, length), return_inverse=True)
        order = np.argsort(number, kind="stable")
        parts = np.split(order, np.cumsum(np.bincount(number))[:-1])
        self._places: list[list[int]] = [part.tolist() for part in parts]
        self._pieces: dict[int, tuple[list[int], list[int]]] = {}

    def _look(self, piece: int) -> tuple[list[int], list[int]]:
        """Return the grams of a piece of the sequence, and for each launch the place of the next known gram."""
        found = self._pieces.get(piece)
        if found is None:
            begin = piece * _PIECE
            count = min(_PIECE, len(self._sequence) - begin)
            asked = _hash_grams(self._sequence[begin : begin + _PIECE + self.length - 1], self.length)
            at = np.searchsorted(self._known, asked).clip(max=len(self._known) - 1)
            grams = np.full(count, NONE, np.int64)  # the last few launches of the sequence have no gram
            grams[: len(asked)] = np.where(self._known[at] == asked, at, NONE)
            following = np.minimum.accumulate(np.where(grams == NONE, count, np.arange(count))[::-1])[::-1]
            found = self._pieces[piece] = grams.tolist(), following.tolist()
        return found

    def next_known(self, at: int) -> int:
        """Return the next launch whose names occur in the reference; the end of the sequence if there is none."""
        while at < len(self._sequence):
            piece, inside = divmod(at, _PIECE)
            following = self._look(piece)[1]
            if following[inside] < len(following):
                return piece * _PIECE + following[inside]
            at = (piece + 1) * _PIECE
        return len(self._sequence)

    def nearest_place(self, at: int, cursor: int, size: int) -> tuple[int, int]:
        """Return how far the nearest place of a launch's names is from the cursor (on, or a little back), and it."""
        gram = self._look(at // _PIECE)[0][at % _PIECE]
        if gram == NONE:
            return size, NONE
        places = self._places[gram]
        found = bisect_left(places, cursor)
        place = places[found] if found < len(places) else places[0]
        onwards = (place - cursor) % size
        back = cursor - places[found - 1] if found else size
        return (back, places[found - 1]) if back <= min(onwards, MOST_BACK) else (onwards, place)


def _hash_grams(names: Ints, length: int) -> NDArray[np.uint64]:
    """Return a hash for each few names in a row; two different ones collide with a chance of 1e-12 in a run."""
    count = max(len(names) - length + 1, 0)
    mixed = np.zeros(count, np.uint64)
    for i in range(length):
        part = (names[i : i + count].astype(np.uint64) + np.uint64(1)) * _MIX[i]
        mixed = (mixed ^ part) * _MIX[(i + 1) % len(_MIX)] + (part >> np.uint64(29))
    return mixed


def _fill_gaps(places: Ints, traced_before: Ints, op: Ints, names: Ints) -> Ints:
    """Fill in places of skipped launches if those before and after leave no doubt about the operator.

    If equally many were skipped on both sides, pair them one by one. Otherwise fill in only if all candidates have one
    operator, or if the next launches from either side have the same operator.
    """
    lost, known = np.flatnonzero(places == NONE), np.flatnonzero(places != NONE)
    after = np.searchsorted(known, lost)
    inside = (after > 0) & (after < len(known))
    lost, after = lost[inside], after[inside]
    if not len(lost):
        return places
    before, behind = known[after - 1], known[after]
    # Only if no traced window lies between them.
    together = traced_before[behind] == traced_before[before]
    lost, before, behind = lost[together], before[together], behind[together]
    first, last = places[before], places[behind]
    onwards = last > first
    one_by_one = last - first == behind - before
    # All launches between, or all between including the edges, have one operator.
    changes = np.concatenate(([0], np.cumsum(op[1:] != op[:-1])))
    inner = first + 1
    alike = onwards & (last - first > 1) & (changes[np.maximum(last - 1, 0)] == changes[np.minimum(inner, len(op) - 1)])
    around = onwards & (changes[last] == changes[first]) & (op[first] != NONE)
    next_one = np.minimum(first + lost - before, len(op) - 1)
    one_before = np.maximum(last - (behind - lost), 0)
    agree = (op[next_one] != NONE) & (op[one_before] != NONE) & (names[op[next_one]] == names[op[one_before]])
    out = places.copy()
    out[lost] = np.select([one_by_one, alike, around, agree], [next_one, inner, first, one_before], NONE)
    return out


def find_by_key(twin: Ints, rows: Ints, traced: Ints, keys: Ints, op: Ints, names: Ints, *, override: bool) -> Ints:
    """Set twins of rows whose key belongs to only one operator, and return these rows.

    With `override`, also if another twin was found. The twin is any of the traced rows with that key.
    """
    traced = traced[op[traced] != NONE]
    if not len(traced) or not len(rows):
        return rows[:0]
    order = traced[np.argsort(keys[traced], kind="stable")]
    found, first, count = np.unique(keys[order], return_index=True, return_counts=True)
    op_name = names[op[order]]
    only = np.minimum.reduceat(op_name, first) == np.maximum.reduceat(op_name, first)
    at = np.searchsorted(found, keys[rows]).clip(max=len(found) - 1)
    fits = (found[at] == keys[rows]) & only[at]
    now = twin[rows]
    now_op = np.where(now == NONE, NONE, op[now])
    has = now_op != NONE
    wrong = has & (names[now_op] != op_name[first[at]]) if override else np.zeros(len(rows), bool)
    chosen = fits & (~has | wrong)
    found_rows: Ints = rows[chosen]
    twin[found_rows] = order[(first + count // 2)[at[chosen]]]
    return found_rows
