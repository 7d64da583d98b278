"""What a power shaper decides: when groups start, how long a microbatch waits, how much ballast is added.

Pure arithmetic: no clock, no thread, no device. The shaper of a real job and the simulator call the same functions.
Where it makes sense they take numpy arrays as well, one value for each device.

::

    power of one group   ▄▄▄▄▄▄__▄▄▄▄▄▄__      high for `duty` of a period
    a second one later   __▄▄▄▄▄▄__▄▄▄▄▄▄      where groups x duty is a whole number, as many groups are high at
    a third ...                                 every moment: the sum is flat. Else it swings by one group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from ..policy import GroupShift, PhaseShift

Watts = TypeVar("Watts", float, NDArray[np.float64])
WHOLE = 0.02
"""Groups x duty counts as a whole number when it is this near to one: a duty is not known better than to a percent."""
LOSS = 0.05
"""The share of a period that waiting may cost a job whose groups wait for each other: the guide's 2-5%."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Where a rank is: its replica, its tensor-parallel group (among all those of the job) and its pipeline stage."""

    replica: int = 0
    replicas: int = 1
    tp_group: int = 0
    tp_groups: int = 1
    stage: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        for at, of in ((self.replica, self.replicas), (self.tp_group, self.tp_groups), (self.stage, self.stages)):
            if not 0 <= at < of:
                raise ArgumentError(f"group {at} of {of} does not exist", fix=f"0 to {of - 1}")

    @property
    def jitter_unit(self) -> int:
        """Return the number that ranks share if they wait equally long: tensor-parallel groups meet in every layer."""
        return self.tp_group if self.tp_groups > 1 else self.replica * self.stages + self.stage


# -- phases ---------------------------------------------------------------------------------------------------------


def choose_phases(groups: int, duty: float | None) -> int:
    """Return how many different phases flatten the sum of this many groups: the fewest that do, or one for each group.

    With fewer phases, the last group starts less late. Without a known duty, every group has its own phase.
    """
    if duty is not None:
        for phases in range(2, groups):
            if groups % phases == 0 and is_whole(phases * duty):
                return phases
    return groups


def is_whole(value: float) -> bool:
    """Return whether the number of groups that are high at a time is a whole number (and not zero)."""
    return round(value) >= 1 and abs(value - round(value)) <= WHOLE


def group_offsets(groups: int, shift: GroupShift, period_s: float, duty: float | None = None) -> NDArray[np.float64]:
    """Return how many seconds later than the first group each group starts."""
    number = np.arange(groups, dtype=np.float64)
    if shift is None or groups <= 1:
        return number * 0.0
    if not isinstance(shift, str):
        return number * shift
    phases = choose_phases(groups, duty) if shift == "auto" else groups
    return (number % phases) / phases * period_s


def rank_offset_s(
    shift: PhaseShift, place: GroupPlace, period_s: float, duty: float | None = None, *, most_s: float = math.inf
) -> float:
    """Return how many seconds later than the first rank this rank starts.

    Stages divide the time between two replicas among themselves. Tensor-parallel groups are numbered over the whole
    job, so their shift replaces the others. All offsets of the job shrink by the same factor so that none exceeds
    `most_s`: the groups of a synchronous job wait for each other, and a later start is a later end.
    """
    offset_s, largest_s = 0.0, 0.0
    if shift.tp_groups is not None:
        offsets = group_offsets(place.tp_groups, shift.tp_groups, period_s, duty)
        offset_s, largest_s = float(offsets[place.tp_group]), float(offsets.max())
    else:
        slot_s = period_s
        for at, of, how in (
            (place.replica, place.replicas, shift.dp_groups),
            (place.stage, place.stages, shift.pp_stages),
        ):
            offsets = group_offsets(of, how, slot_s, duty if slot_s == period_s else None)
            offset_s, largest_s = offset_s + float(offsets[at]), largest_s + float(offsets.max())
            if how is not None and of > 1:
                slot_s = float(np.unique(offsets)[1]) if offsets.any() else slot_s
    return offset_s * min(1.0, most_s / largest_s) if largest_s > 0 else 0.0


def phase_wait_s(now_s: float, offset_s: float, period_s: float, most_s: float) -> float:
    """Return how long a group that starts its step at `now_s` waits to stay at its offset of a shared clock.

    A group that is early waits, at most `most_s` at a time. A late group does not wait: the shared period is a little
    longer than its own, so it catches up by itself.
    """
    if period_s <= 0:
        return 0.0
    late_s = (now_s - offset_s + period_s / 2) % period_s - period_s / 2  # -period/2 (early) to period/2 (late)
    return min(max(-late_s, 0.0), most_s)


# -- jitter ---------------------------------------------------------------------------------------------------------


def draw_jitter_s(jitter_s: tuple[float, float], seed: int, unit: Any, microbatch: Any) -> Any:
    """Return a unit's wait before a microbatch: uniform in the range, and always the same for the same three numbers.

    This is a hash and not a generator, because ranks need not have drawn the same number of times, and numpy arrays
    (uint64) of units or microbatches must give what single numbers give.
    """
    low_s, high_s = jitter_s
    mixed = _mix(_mix(_mix(seed & _MASK) + unit & _MASK) + microbatch & _MASK)
    return low_s + (high_s - low_s) * ((mixed >> 11) * 2.0**-53)


def _mix(x: Any) -> Any:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


# -- floor, ramp and cap --------------------------------------------------------------------------------------------


def hold_power(
    load_w: Watts,
    before_w: Watts,
    dt_s: float,
    *,
    floor_w: float | None = None,
    max_ramp_w_per_s: float | None = None,
    most_w: float = math.inf,
) -> Watts:
    """Return the power that ballast should hold: not below the floor, and not falling faster than the ramp.

    `before_w` is what this returned `dt_s` ago. The part above `load_w` is ballast, which can bring a device to at most
    `most_w`. Ballast cannot slow a rise; a cap does that.
    """
    wanted: Any = load_w
    if floor_w is not None:
        wanted = np.maximum(wanted, floor_w)
    if max_ramp_w_per_s is not None:
        wanted = np.maximum(wanted, before_w - max_ramp_w_per_s * dt_s)
    return cast("Watts", np.maximum(load_w, np.minimum(wanted, most_w)))
