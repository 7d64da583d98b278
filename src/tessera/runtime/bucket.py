"""The token bucket of joules, and the loop that keeps it honest. Pure arithmetic: no clock, no thread, no device.

A device that works draws `burst_w`, one that waits `idle_w`. After work of `b` seconds the bucket, refilled at the cap,
is whole again when ::

    burst_w b + idle_w w = cap_w (b + w)        so    w = b (burst_w - cap_w) / (cap_w - idle_w)

`w / b` is the ratio the pace points are given (`Command`): they time the work themselves and wait so much longer. What
one slice of work spends is therefore predicted as its own device time x `burst_w`, and `burst_w` is what the sensor
corrects. Work larger than the bucket runs alone and pays afterwards, so nothing can wait for ever.

The plant is not linear: on an H200 clocks rise to fill short pauses, and a duty of 0.75 draws as much as 1.0. `burst_w`
is therefore the secant from (0, idle_w) to the point just measured. For any concave power curve the duty it gives comes
nearer from one side, never past the cap's own duty (tests/runtime/test_bucket.py); the bucket's level removes the rest.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

# The constants of the loop were searched against the H200 as tests/fakes/plant.py has it (GEMM loop and training at 300
# to 600 W, loads that change every 50 ms to 1 s); benchmarks/device/schedule_caps.py checks them on the board.

# The mean is held this far below the cap, so that ripple stays under it: half of the 3% the mean may be off.
TARGET = 0.985
# A window may exceed the mean by this much because work comes in slices: sets how long a slice may be. Three times as
# much would still be little, but an H200's ring shows a multiple of it: it looks every 20 ms through a filter of 11 ms,
# and beats with slices and waits of milliseconds (docs/schedules.md).
RIPPLE = 0.003
# Nor are slices shorter than SHORT_S where a slice and its wait take less than PERIOD_S: what the filter is given are
# moments about half a millisecond apart (inferred: tests/fakes/plant.py), which beat with slices of that length.
SHORT_S = 0.0007
PERIOD_S = 0.004
# Processes that share a GPU take turns of milliseconds, and what each times as its work has the others' turns in it:
# what they draw together depends on how their waits lie to each other, which wanders. Least so with slices this long.
SHARED_S = 0.0025
USUAL_WINDOW_S = 0.2  # of shorter windows both are the same part
# A beat is slow: for the length of a window everything seems to draw more, or less. Where the mean is off by BEAT
# slices are made longer, by up to LONGER, in steps that do not come back soon: the beat is then another. A load that
# really draws more is braked all the same.
BEAT = 0.025
LONGER = 1.5
STEP = 0.618
# The level of the bucket acts within this time, many round trips of the sensor (15 ms lag, 20 ms samples, a tick).
SETTLE_S = 0.9
# The power of working is the mean since the load last changed, of at most LEARN_S: training swings within its steps,
# and following that would only add to it. Once the mean over QUICK_S is off by JUMP, or two readings in a row are above
# by SURGE, the load has changed.
LEARN_S = 2.0
QUICK_S = 0.08
JUMP = 0.25
SURGE = 0.35
# So few readings say nothing of a load that swings: neither of a window, nor that it has changed.
FEW = 4
# A reading of less than QUIET of what the load draws is of a pause: the host had nothing to launch, another process was
# taken off the GPU. Learning from it would let the work after it burst. What lasts for PAUSE_S is a lighter load.
QUIET = 0.25
PAUSE_S = 1.0
# Whatever the mean allows, the next AHEAD of a window may not bring it above TOP x cap by what was measured before.
TOP = 1.03
AHEAD = 0.3
# Unspent joules are kept for so many seconds of the cap: idling for a minute must not allow a minute's burst.
DEPTH_S = 0.015
# What was overspent is remembered for so long, so that a cap that cannot be held does not stop work after it can be.
DEBT_S = 0.08
# A bucket of tokens saves as much, and no more than so many slices, which are shorter where windows are.
SAVED = 4
MIN_DUTY = 0.02
# More than the cap for so long, at the least duty or while all of our work waits: what others draw is above the cap.
# Waits alone need fewer readings, for nothing of ours is in them.
FLOOR_S = 1.0
FLOOR_RESTED_S = 0.5
# CPUs are everybody's, and what others draw is not ours to save. Half of the time saves half of what waiting could, for
# twice the time; 2% would save the rest for fifty times. Whether the others have gone is looked at every AGAIN_S.
STUCK_DUTY = 0.5
AGAIN_S = 10.0
SLICE_S = (0.0005, 0.025)
# Before anything was measured: an H200 limited to 700 W draws 918 W in short bursts (shared/design.md: 510 W at a duty
# of 0.5 and 304 W at 0.25 both lie on 100 W + 818 W x duty).
FIRST_BURST = 1.31


@dataclass(frozen=True, slots=True)
class Cap:
    """Watts, and the window over which their mean is held."""

    power_w: float
    window_s: float


@dataclass(frozen=True, slots=True)
class Command:
    """What pace points do: after at least `slice_s` of work, wait `ratio` times as long as it took.

    Where tokens are spent (tokens.py) `token_s` is the work of one, and the next comes `token_ns` after it.
    """

    ratio: float = 0.0
    slice_s: float = SLICE_S[0]
    token_s: float = 0.0

    @property
    def duty(self) -> float:
        """The share of time that is worked."""
        return 1.0 / (1.0 + self.ratio)

    @property
    def saved_s(self) -> float:
        """Seconds of refilling that a bucket of tokens may hold when work begins."""
        return min(SAVED * self.slice_s, DEPTH_S)

    @property
    def token_ns(self) -> float:
        """Nanoseconds in which the bucket is refilled by one token; 0 where nothing has to wait."""
        return self.token_s * (1.0 + self.ratio) * 1e9 if self.ratio > 0 else 0.0

    def cost_s(self, tokens: int, busy_s: float) -> float:
        """Seconds in which the bucket is refilled after work that spent tokens; by its time before any were counted."""
        return tokens * self.token_ns * 1e-9 if self.token_s or not self.ratio else busy_s * (1.0 + self.ratio)


class Bucket:
    """Joules that may be spent: refilled at `rate_w`, at most `depth_j` saved, at most `debt_j` owed."""

    def __init__(self, rate_w: float, *, depth_j: float, debt_j: float = math.inf) -> None:
        self.rate_w, self.depth_j, self.debt_j = rate_w, depth_j, debt_j
        self.level_j = 0.0

    def pass_time(self, seconds: float, spent_j: float = 0.0) -> float:
        """Refill for some time in which joules were spent; the new level. A clock that steps back refills nothing."""
        level = self.level_j + self.rate_w * max(seconds, 0.0) - spent_j
        self.level_j = min(max(level, -self.debt_j), self.depth_j)
        return self.level_j

    def wait_s(self, *, idle_w: float = 0.0) -> float:
        """How long to idle until nothing is owed; infinite where idling alone spends the refill."""
        if self.level_j >= 0:
            return 0.0
        return -self.level_j / (self.rate_w - idle_w) if self.rate_w > idle_w else math.inf


class Controller:
    """Holds the mean power of one zone at a cap by the duty of its work."""

    def __init__(
        self, cap: Cap, *, idle_w: float, burst_w: float, blur_s: float = 0.0, stuck_duty: float = MIN_DUTY
    ) -> None:
        """`stuck_duty` is worked at least while the cap cannot be held, whatever we do."""
        self.idle_w, self._blur_s, self.stuck_duty = idle_w, blur_s, stuck_duty
        self.burst_w = max(burst_w, idle_w + 1.0)
        self._quick_w = self._last_w = self.burst_w
        self._known_s = self._learnt_s = self._quiet_s = 0.0
        self._usual_s = QUICK_S / FEW  # the time of a reading
        self._slow = (0.0, 0.0, 0.0)  # seconds, joules, seconds x duty since a pace point last ended
        self._past: deque[tuple[float, float]] = deque()  # (seconds, watts), newest last, a window of them
        self._longer, self._same_s = 0.0, 0.0  # by how much slices are longer, and since when
        self.shared = False  # whether processes take turns on a GPU
        self.set_cap(cap)
        self.command = self._command(self.target_w)

    def set_cap(self, cap: Cap) -> None:
        """Hold another cap from now on; what was learnt of the load stays."""
        self.cap = cap
        self.floor_w: float | None = None
        self._stuck = (0.0, 0.0)  # seconds and joules above the cap without work of ours to speak of
        self._least, self._stuck_until_s, self._now_s = MIN_DUTY, 0.0, 0.0
        self.target_w = cap.power_w * TARGET
        self.bucket = Bucket(self.target_w, depth_j=cap.power_w * DEPTH_S, debt_j=cap.power_w * DEBT_S)

    def go_on_from(self, command: Command) -> None:
        """Take the duty another controller had found: the load is such that it meets the target."""
        room_w = max((self.target_w - self.idle_w) / command.duty, 1.0)
        self.burst_w = self._quick_w = self.idle_w + room_w
        self._learnt_s = PAUSE_S  # by the other: the GPU may stand for a while as its process ends
        self.command = self._command(self.target_w)

    def rescale(self, factor: float) -> None:
        """A duty of 1 is so many times what it was: what is known of the load is told in the new units."""
        self.burst_w, self._quick_w, self._last_w = (
            self.idle_w + (w - self.idle_w) * factor for w in (self.burst_w, self._quick_w, self._last_w)
        )
        span_s, joules, duty_s = self._slow
        self._slow = (span_s, joules, duty_s / factor)

    def observe(
        self, power_w: float, seconds: float, *, duty: float, active: bool = True, moved: bool = True,
        rested: bool = False,
    ) -> Command:  # fmt: skip
        """Take a measured mean over so many seconds, in which work had `duty`; what to do next.

        `active` is False when there was no work: the bucket fills, and nothing is learnt of the load. `moved` is False
        when no pace point ended meanwhile: work longer than a reading is judged together with its wait. `rested`: all
        of our work waited, from the reading's first moment to its last.
        """
        if not (seconds > 0 and math.isfinite(power_w)):
            return self.command
        seconds = min(seconds, 1.0)  # a sampler that was kept from running: one reading is no more than one
        level = self.bucket.pass_time(seconds, power_w * seconds)
        self._past.append((seconds, power_w))
        was_s, was_j, was_duty_s = self._slow if active else (0.0, 0.0, 0.0)
        self._slow = (was_s + seconds, was_j + power_w * seconds, was_duty_s + duty * seconds)
        if active and self._pauses(power_w, seconds, duty):
            self._slow = (0.0, 0.0, 0.0)
        elif active and moved:
            span_s, joules, duty_s = self._slow
            self._slow = (0.0, 0.0, 0.0)
            self._learn(joules / span_s, span_s, duty_s / span_s)
            self._find_floor(joules / span_s, span_s, least=duty_s / span_s <= 1.2 * MIN_DUTY)
        self._look_for_others(power_w, seconds, rested=rested)
        lately_w = self._lately_w()
        self._leave_beat(lately_w, seconds)
        self.command = self._command(min(self.target_w + level / SETTLE_S, self._window_allows_w(lately_w)))
        return self.command

    def predict(self) -> Command:
        """Without a sensor: hold the cap by what is known of the load."""
        self._past.clear()
        self.command = self._command(self.target_w)
        return self.command

    def _pauses(self, power_w: float, seconds: float, duty: float) -> bool:
        """Whether nothing worked, for a while; only told of a load that is known, and whose slices end in a reading."""
        known = self._learnt_s >= PAUSE_S and self._usual_s <= 2 * QUICK_S / FEW
        quiet = power_w - self.idle_w < QUIET * (self.burst_w - self.idle_w) * duty
        self._quiet_s = self._quiet_s + seconds if quiet else 0.0
        return known and quiet and self._quiet_s < PAUSE_S

    def _learn(self, power_w: float, seconds: float, duty: float) -> None:
        seen_w = self.idle_w + max(power_w - self.idle_w, 0.0) / max(duty, MIN_DUTY)
        self._usual_s += 0.1 * (seconds - self._usual_s)
        quick_s = max(QUICK_S, FEW * self._usual_s)
        self._quick_w += (seen_w - self._quick_w) * -math.expm1(-seconds / quick_s)
        both_w, self._last_w = min(seen_w, self._last_w), seen_w
        self._known_s, self._learnt_s = self._known_s + seconds, self._learnt_s + seconds
        if (
            both_w > (1.0 + SURGE) * self.burst_w and quick_s <= 2 * QUICK_S
        ):  # twice in a row: too much at once is worse than too little
            self.burst_w, self._quick_w, self._known_s = both_w, both_w, 0.0
        elif abs(self._quick_w - self.burst_w) > JUMP * self.burst_w:
            self.burst_w, self._known_s = self._quick_w, 0.0
        else:
            within_s = min(max(self._known_s, quick_s), LEARN_S)  # the running mean since the load changed
            self.burst_w += (seen_w - self.burst_w) * -math.expm1(-seconds / within_s)

    def _lately_w(self) -> float | None:
        """The mean of a window but for its last AHEAD; None where too little is known of it."""
        if self._blur_s > AHEAD * self.cap.window_s:  # what a reading tells is older: it would be paid for twice
            self._past.clear()
            return None
        span_s = (1.0 - AHEAD) * self.cap.window_s
        joules, seen_s, kept = 0.0, 0.0, 0
        for seconds, power_w in reversed(self._past):
            used_s = min(seconds, span_s - seen_s)
            joules, seen_s, kept = joules + used_s * power_w, seen_s + used_s, kept + 1
            if seen_s >= span_s:
                break
        while len(self._past) > kept:
            self._past.popleft()
        # a few samples of a training step may be its peaks
        return joules / seen_s if seen_s >= span_s and kept >= FEW else None

    def _window_allows_w(self, lately_w: float | None) -> float:
        """The most that the rest of a window may draw after what was measured before it."""
        return math.inf if lately_w is None else (TOP * self.cap.power_w - (1.0 - AHEAD) * lately_w) / AHEAD

    def _leave_beat(self, lately_w: float | None, seconds: float) -> None:
        """Slices of another length where windows are off; one length for half a window at least."""
        self._same_s += seconds
        if lately_w is not None and abs(lately_w / self.target_w - 1.0) > BEAT and self._same_s > self.cap.window_s / 2:
            self._longer, self._same_s = (self._longer + STEP) % 1.0, 0.0

    def _find_floor(self, power_w: float, seconds: float, *, least: bool, after_s: float = FLOOR_S) -> None:
        """So long at the `least` duty and still above the cap: that is what is drawn whatever we do."""
        stuck_s, joules = self._stuck
        above = least and power_w > self.cap.power_w * 1.03
        self._stuck = (stuck_s + seconds, joules + power_w * seconds) if above else (0.0, 0.0)
        if above and self._stuck[0] >= after_s:
            self.floor_w = self._stuck[1] / self._stuck[0]
            self._stuck = (0.0, 0.0)
            self._least, self._stuck_until_s = self.stuck_duty, self._now_s + AGAIN_S

    def _look_for_others(self, power_w: float, seconds: float, *, rested: bool) -> None:
        """While we rest, what is drawn is not ours; told by the first wait, before a slice and its wait have ended."""
        self._now_s += seconds
        if self._now_s >= self._stuck_until_s and self.floor_w is not None:
            self._least, self.floor_w = MIN_DUTY, None  # until it is found again
        if rested:
            self._find_floor(power_w, seconds, least=True, after_s=FLOOR_RESTED_S)

    def _command(self, power_w: float) -> Command:
        """The duty at which the load, as it is known, draws `power_w`; the longest slice the window bears."""
        room_w = max(self.burst_w - self.idle_w, 1e-3)
        duty = min(max((power_w - self.idle_w) / room_w, self._least), 1.0)
        return Command((1.0 - duty) / duty, self._slice_s(duty, room_w))

    def _slice_s(self, duty: float, room_w: float) -> float:
        """Slices of s, then s x ratio of waiting: the worst window is room_w (1 - duty) s / window_s above the mean."""
        above_w = room_w * (1.0 - duty)
        longest = RIPPLE * self.cap.power_w * self.cap.window_s / above_w if above_w > 0 else math.inf
        whole_s = max(PERIOD_S * duty, SLICE_S[0])  # of work in PERIOD_S
        part = min(1.0, self.cap.window_s / USUAL_WINDOW_S)  # ripple is in proportion to a slice's part of the window
        usual = max(longest, part * (SHARED_S if self.shared else min(SHORT_S, whole_s)))
        return min(usual * math.pow(LONGER, self._longer), max(usual, whole_s), SLICE_S[1])
