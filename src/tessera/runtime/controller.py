"""The token bucket of joules and the controller that corrects it. Pure arithmetic: no clock, no thread, no device.

A device draws `burst_w` while it works and `idle_w` while it waits. After work of `b` seconds, a bucket that is
refilled at the cap is full again when ::

    burst_w b + idle_w w = cap_w (b + w)        so    w = b (burst_w - cap_w) / (cap_w - idle_w)

Pacers get the ratio `w / b` (`PaceCommand`): they time the work themselves and wait that many times as long. The sensor
corrects `burst_w`. Work larger than the bucket runs alone and pays afterwards, so that every wait ends.

Power is not proportional to duty: on an H200, clocks rise to fill short pauses, and a duty of 0.75 draws as much as
1.0. `burst_w` is therefore the secant from (0, idle_w) to the point just measured. For any concave power curve, the
duty that this gives approaches the cap's own duty from one side and never passes it (tests/runtime/test_controller.py).
The level of the bucket corrects the remaining error.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

# The constants were searched against the H200 as tests/fakes/plant.py simulates it (GEMM loop and training at 300 to
# 600 W, loads that change every 50 ms to 1 s); benchmarks/device/schedule_caps.py checks them on the board.

# The mean is held at this share of the cap, so that ripple stays under the cap: half of the 3% that the mean may be
# off.
TARGET = 0.985
# A window may exceed the mean by this share, because work comes in slices. This limits how long a slice may be. Three
# times as much would still be little, but an H200's ring shows a multiple of the true ripple: it samples every 20 ms
# through a filter of 11 ms, which beats with slices and waits of milliseconds (docs/schedules-internals.md).
RIPPLE = 0.003
# Slices are at least SHORT_S where a slice and its wait take less than PERIOD_S: the filter takes its input about every
# half millisecond (inferred: tests/fakes/plant.py), which beats with slices of that length.
SHORT_S = 0.0007
PERIOD_S = 0.0055
# Slices where processes share a GPU. They take turns of milliseconds, and the work measured for each process includes
# the turns of the others: the sum depends on how their waits overlap, which changes slowly. It changes least with
# slices this long: windows of +3% on average in 27 runs of the plant (tests/fakes/programs.py), +6% with 2.5 ms, +4%
# with 4 ms.
SHARED_S = 0.0035
USUAL_WINDOW_S = 0.2  # for shorter windows, SHORT_S and SHARED_S are the same share of the window
# The level of the bucket acts within this time, many round trips of the sensor (15 ms lag, 20 ms samples, a tick).
SETTLE_S = 0.9
# The power of working is a running mean since the load last changed, over at most LEARN_S: training swings within its
# steps, and following each swing would add to it. The load has changed once the mean over QUICK_S is off by JUMP, or
# once two readings in a row are above by SURGE.
LEARN_S = 2.0
QUICK_S = 0.08
JUMP = 0.25
SURGE = 0.35
# A secant belongs to its duty: a program that waits for its host draws hardly less at half the duty. So when the duty
# has moved by MOVED, the mean covers the last AGREED_S at most. Where processes take turns this does not apply, because
# their duty changes all the time.
MOVED = 0.2
AGREED_S = 0.25
# With fewer readings, a load that swings shows neither the mean of a window nor a change.
FEW = 4
# A reading below QUIET of what the load draws is a pause: the host had nothing to launch, or another process was taken
# off the GPU. If the controller learnt from a pause, the work after it could burst. A reading that stays low for
# PAUSE_S is a lighter load.
QUIET = 0.25
PAUSE_S = 1.0
# Whatever the mean allows, the next AHEAD of a window may not bring it above TOP x cap, given what was measured before.
TOP = 1.03
AHEAD = 0.3
# Unspent joules are saved for this many seconds of the cap: a minute of idling must not allow a minute's burst.
DEPTH_S = 0.015
# Overspending is remembered for this long. So a cap that could not be held for a while does not stop work once it can
# be held again.
DEBT_S = 0.08
# A bucket of tokens also saves for DEPTH_S, but for at most this many slices, which are shorter for shorter windows.
SAVED = 4
MIN_DUTY = 0.02
# If power is above the cap for this long, at the lowest duty or while all our work waits, then what others draw is
# above the cap. While all our work waits, fewer readings are enough, because none of our work is in them.
FLOOR_S = 1.0
FLOOR_RESTED_S = 0.5
# All processes share the CPUs, and we cannot save what others draw. Working half of the time saves half of what waiting
# could save, and takes twice the time; working 2% of the time would save the rest, and take fifty times as long. Every
# AGAIN_S the controller checks whether the others have ended.
STUCK_DUTY = 0.5
# A board draws its idle power however long our work waits. With 2% of the time at work, the work would take fifty times
# as long, and a host-bound program might need many seconds to end a call.
STUCK_GPU_DUTY = 0.05
AGAIN_S = 10.0
SLICE_S = (0.0005, 0.025)
# A slice and its wait take at least this long. To launch a pause, a thread needs the interpreter's lock: 900 pauses a
# second slowed a host-bound program on an H200 by half, 470 cost nothing. Also, the running blocks must end before each
# pause: GEMMs at half of the time gave 2% fewer results per joule with 470 pauses a second than with 275 (2026-11-18).
FASTEST_S = 0.0037
# Readings in the first START_S after a start are taken as they are: nothing is known yet to judge them by.
START_S = 0.1


@dataclass(frozen=True, slots=True)
class Cap:
    """Watts, and the window over which their mean is held."""

    power_w: float
    window_s: float


@dataclass(frozen=True, slots=True)
class PaceCommand:
    """What a pacer does: after at least `slice_s` of work, wait `ratio` times as long as it took.

    Where tokens are spent, one token takes `token_s` of work, and the bucket regains one every `token_ns`.
    """

    ratio: float = 0.0
    slice_s: float = SLICE_S[0]
    token_s: float = 0.0

    @property
    def duty(self) -> float:
        """Return the share of time at work."""
        return 1.0 / (1.0 + self.ratio)

    @property
    def saved_s(self) -> float:
        """Return how many seconds of refilling a bucket of tokens may hold when work begins."""
        return min(SAVED * self.slice_s, DEPTH_S)

    @property
    def token_ns(self) -> float:
        """Return the nanoseconds in which the bucket regains one token; 0 where nothing has to wait."""
        return self.token_s * (1.0 + self.ratio) * 1e9 if self.ratio > 0 else 0.0

    def cost_s(self, tokens: int, busy_s: float) -> float:
        """Return the seconds to refill the bucket after work that spent tokens; before any are counted, by `busy_s`."""
        return tokens * self.token_ns * 1e-9 if self.token_s or not self.ratio else busy_s * (1.0 + self.ratio)


class Bucket:
    """Joules that may be spent: refilled at `rate_w`, with at most `depth_j` saved and at most `debt_j` owed."""

    def __init__(self, rate_w: float, *, depth_j: float, debt_j: float = math.inf) -> None:
        self.rate_w, self.depth_j, self.debt_j = rate_w, depth_j, debt_j
        self.level_j = 0.0

    def pass_time(self, seconds: float, spent_j: float = 0.0) -> float:
        """Refill for some time in which joules were spent; return the new level.

        A clock that steps back refills nothing.
        """
        level = self.level_j + self.rate_w * max(seconds, 0.0) - spent_j
        self.level_j = min(max(level, -self.debt_j), self.depth_j)
        return self.level_j


class Controller:
    """Holds the mean power of one zone at a cap by choosing the duty of its work."""

    def __init__(
        self, cap: Cap, *, idle_w: float, burst_w: float, blur_s: float = 0.0, stuck_duty: float = MIN_DUTY
    ) -> None:
        """`burst_w`: what work is expected to draw. `stuck_duty`: the lowest duty while the cap cannot be held."""
        self.idle_w, self._blur_s, self.stuck_duty = idle_w, blur_s, stuck_duty
        self.burst_w = max(burst_w, idle_w + 1.0)
        self._quick_w = self._last_w = self.burst_w
        self._unchanged_s = self._learnt_s = self._quiet_s = 0.0
        self._learnt_duty = 1.0  # where the mean began
        self._usual_s = QUICK_S / FEW  # the time of a reading
        self._slow = (0.0, 0.0, 0.0)  # seconds, joules, seconds x duty since a wait last ended
        self._past: deque[tuple[float, float]] = deque()  # (seconds, watts) of one window, newest last
        self.shared = False  # whether processes take turns on a GPU
        self.fastest_s = FASTEST_S  # 0 where waits are the program's own
        self.set_cap(cap)

    def set_cap(self, cap: Cap) -> None:
        """Hold another cap from now on; keep what was learnt of the load."""
        self.cap = cap
        self.floor_w: float | None = None
        self._stuck = (0.0, 0.0)  # seconds and joules above the cap with hardly any work of ours
        self._lowest, self._stuck_until_s, self._now_s = MIN_DUTY, 0.0, 0.0
        self.target_w = cap.power_w * TARGET
        self.bucket = Bucket(self.target_w, depth_j=cap.power_w * DEPTH_S, debt_j=cap.power_w * DEBT_S)
        self.command = self._command_for(self.target_w)  # the waits for the old cap end now

    def continue_from(self, command: PaceCommand) -> None:
        """Take over another controller's duty, assuming that the load meets the target at this duty."""
        room_w = max((self.target_w - self.idle_w) / command.duty, 1.0)
        self.burst_w = self._quick_w = self.idle_w + room_w
        # the other controller has learnt it; the GPU may stand still for a while as the other process ends
        self._learnt_s = PAUSE_S
        self.command = self._command_for(self.target_w)

    def rescale(self, factor: float) -> None:
        """Convert what is known of the load, because a duty of 1 now means `factor` times what it meant."""
        self.burst_w, self._quick_w, self._last_w = (
            self.idle_w + (w - self.idle_w) * factor for w in (self.burst_w, self._quick_w, self._last_w)
        )
        span_s, joules, duty_s = self._slow
        self._slow = (span_s, joules, duty_s / factor)

    def observe(
        self,
        power_w: float,
        seconds: float,
        *,
        duty: float,
        active: bool = True,
        moved: bool = True,
        rested: bool = False,
    ) -> PaceCommand:
        """Take the mean power measured over some seconds in which work had `duty`; return what to do next.

        `active` is False without work: the bucket fills, and nothing is learnt of the load. `moved` is False when no
        point ended in that time: work longer than a reading is judged together with its wait. `rested`: all our work
        waited during the whole reading.
        """
        if not (seconds > 0 and math.isfinite(power_w)):
            return self.command
        seconds = min(seconds, 1.0)  # after a sampler could not run, a reading counts as one second at most
        level = self.bucket.pass_time(seconds, power_w * seconds)
        self._past.append((seconds, power_w))
        was_s, was_j, was_duty_s = self._slow if active else (0.0, 0.0, 0.0)
        self._slow = (was_s + seconds, was_j + power_w * seconds, was_duty_s + duty * seconds)
        if active and self._is_pause(power_w, seconds, duty):
            self._slow = (0.0, 0.0, 0.0)
        elif active and moved:
            span_s, joules, duty_s = self._slow
            self._slow = (0.0, 0.0, 0.0)
            self._learn(joules / span_s, span_s, duty_s / span_s)
            self._find_floor(joules / span_s, span_s, lowest=duty_s / span_s <= 1.2 * MIN_DUTY)
        self._look_for_others(power_w, seconds, rested=rested)
        lately_w = self._mean_of_window_w()
        self.command = self._command_for(min(self.target_w + level / SETTLE_S, self._window_allows_w(lately_w)))
        return self.command

    def predict(self) -> PaceCommand:
        """Without a sensor: hold the cap from what is known of the load."""
        self._past.clear()
        self.command = self._command_for(self.target_w)
        return self.command

    def _is_pause(self, power_w: float, seconds: float, duty: float) -> bool:
        """Return whether nothing worked for a while.

        Only for a load that is known and whose slices fit in a reading.
        """
        certain = self._learnt_s >= PAUSE_S and self._usual_s <= 2 * QUICK_S / FEW
        quiet = power_w - self.idle_w < QUIET * (self.burst_w - self.idle_w) * duty
        self._quiet_s = self._quiet_s + seconds if quiet else 0.0
        return certain and quiet and self._quiet_s < PAUSE_S

    def _learn(self, power_w: float, seconds: float, duty: float) -> None:
        seen_w = self.idle_w + max(power_w - self.idle_w, 0.0) / max(duty, MIN_DUTY)
        self._usual_s += 0.1 * (seconds - self._usual_s)
        quick_s = max(QUICK_S, FEW * self._usual_s)
        self._quick_w += (seen_w - self._quick_w) * -math.expm1(-seconds / quick_s)
        both_w, self._last_w = min(seen_w, self._last_w), seen_w
        if not self.shared and abs(duty - self._learnt_duty) > MOVED * self._learnt_duty:
            self._unchanged_s, self._learnt_duty = min(self._unchanged_s, AGREED_S), duty
        self._unchanged_s, self._learnt_s = self._unchanged_s + seconds, self._learnt_s + seconds
        if self._learnt_s <= START_S and quick_s <= 2 * QUICK_S:
            self.burst_w = self._quick_w = seen_w
        elif both_w > (1.0 + SURGE) * self.burst_w and quick_s <= 2 * QUICK_S:
            # too much at once is worse than too little
            self.burst_w, self._quick_w, self._unchanged_s = both_w, both_w, 0.0
        elif abs(self._quick_w - self.burst_w) > JUMP * self.burst_w:
            self.burst_w, self._unchanged_s = self._quick_w, 0.0
        else:
            within_s = min(max(self._unchanged_s, quick_s), LEARN_S)  # the running mean since the load changed
            self.burst_w += (seen_w - self.burst_w) * -math.expm1(-seconds / within_s)

    def _mean_of_window_w(self) -> float | None:
        """Return the mean of a window except its last AHEAD; None where too little is known."""
        if self._blur_s > AHEAD * self.cap.window_s:  # a reading shows older work, which would be paid for twice
            self._past.clear()
            return None
        span_s = (1.0 - AHEAD) * self.cap.window_s
        joules, seen_s, count = 0.0, 0.0, 0
        for seconds, power_w in reversed(self._past):
            used_s = min(seconds, span_s - seen_s)
            joules, seen_s, count = joules + used_s * power_w, seen_s + used_s, count + 1
            if seen_s >= span_s:
                break
        while len(self._past) > count:
            self._past.popleft()
        if count < FEW:  # a few samples of a training step may all be its peaks
            return None
        return (joules + (span_s - seen_s) * self.idle_w) / span_s  # before the first reading there was no work

    def _window_allows_w(self, lately_w: float | None) -> float:
        """Return the most watts that the rest of a window may draw after what was measured before it."""
        return math.inf if lately_w is None else (TOP * self.cap.power_w - (1.0 - AHEAD) * lately_w) / AHEAD

    def _find_floor(self, power_w: float, seconds: float, *, lowest: bool, after_s: float = FLOOR_S) -> None:
        """Note what is drawn whatever we do: power above the cap for `after_s` at the lowest duty."""
        stuck_s, joules = self._stuck
        above = lowest and power_w > self.cap.power_w * 1.03
        self._stuck = (stuck_s + seconds, joules + power_w * seconds) if above else (0.0, 0.0)
        if above and self._stuck[0] >= after_s:
            self.floor_w = self._stuck[1] / self._stuck[0]
            self._stuck = (0.0, 0.0)
            self._lowest, self._stuck_until_s = self.stuck_duty, self._now_s + AGAIN_S

    def _look_for_others(self, power_w: float, seconds: float, *, rested: bool) -> None:
        """Find what others draw, while all our work waits; the first wait already shows it."""
        self._now_s += seconds
        if self._now_s >= self._stuck_until_s and self.floor_w is not None:
            self._lowest, self.floor_w = MIN_DUTY, None  # until it is found again
        if rested:
            self._find_floor(power_w, seconds, lowest=True, after_s=FLOOR_RESTED_S)

    def _command_for(self, power_w: float) -> PaceCommand:
        """Return the duty at which the load, as it is known, draws `power_w`, with the longest slice for the window."""
        room_w = max(self.burst_w - self.idle_w, 1e-3)
        duty = min(max((power_w - self.idle_w) / room_w, self._lowest), 1.0)
        return PaceCommand((1.0 - duty) / duty, self._slice_s(duty, room_w))

    def _slice_s(self, duty: float, room_w: float) -> float:
        """Return the length of a slice.

        After a slice of s comes a wait of s x ratio: the worst window is room_w (1 - duty) s / window_s above the mean.
        """
        above_w = room_w * (1.0 - duty)
        longest = RIPPLE * self.cap.power_w * self.cap.window_s / above_w if above_w > 0 else math.inf
        whole_s = max(PERIOD_S * duty, SLICE_S[0])  # the work within PERIOD_S
        part = min(1.0, self.cap.window_s / USUAL_WINDOW_S)  # ripple is proportional to a slice's share of the window
        usual = max(longest, self.fastest_s * duty, part * (SHARED_S if self.shared else min(SHORT_S, whole_s)))
        return min(usual, SLICE_S[1])
