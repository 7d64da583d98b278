"""Decide how much ballast runs beside real work. Pure arithmetic, corrected by a sensor that is late.

::

    power      ████████▇▇▆▆▅▅▄▄▄▄▄▄▄▄▄▄████████      floor_w is held, and the fall is at most max_ramp
    of work    ████████                █ ██ ████     its first tenth of a second has pauses, ever shorter
    ballast            ▇▇▆▆▅▅▄▄▄▄▄▄▄▄▄▄              levels by the time since the work ended: one for each BIN_S

The sensor shows a fall some 45 ms late, and pauses are often no longer than that. So the levels for a whole pause are
chosen before the pause begins, and what the sensor shows of one pause corrects the next. A chip that was slowed down to
stay within its power limit takes tens of milliseconds to speed up again; in that time the same ballast draws less.

Work that begins after a pause finds high clocks, and draws more than usual until the board lowers them. The watts that
it may draw beyond its usual watts grow by the ramp. Pauses of the GPU hold back the rest, as much as the last starts
drew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BIN_S = 0.02  # seconds, the interval of an H200's samples
BINS = 128
"""Number of levels of a pause, one for each `BIN_S`; the last level holds for the rest of the pause."""
# Each reading corrects these shares of the watts that are missing: TRIM for its own time in the next pause, TRIM_LATER
# for later times in this pause. TRIM_LATER must be small: by the time a correction shows, three more readings have
# asked for the same one.
TRIM, TRIM_LATER = 0.25, 0.05
# Ballast that ran for less than this share of its level was held up by work: a higher level would not help.
FREE = 0.8
# A reading tells too little of the pause if, by the sensor's blur, more than this share of it is of the work before the
# pause.
MOST_OF_WORK = 0.3
# A ramp falls from the watts of the work: a mean over about so many readings.
WORK_READINGS = 5
LEAST_DUTY = 0.3
"""The smallest share of its time for which work may run when it begins, so that the program goes on however much the
last start drew.
"""
START_S = 0.1
"""How long work draws more than usual after a pause: 60 to 90 ms on an H200 (benchmarks/results/shape_power.json)."""


@dataclass(slots=True)
class BallastControl:
    """The levels of ballast (0 to 1) that hold a floor and a ramp.

    `idle_w` is what the device draws without work, and `full_w` what it draws with ballast only, at level 1. Both are
    first guesses, which the sensor corrects. `blur_s` is the standard deviation, in seconds, of the time that one
    sample of the sensor averages.
    """

    floor_w: float | None
    max_ramp_w_per_s: float | None
    idle_w: float
    full_w: float
    blur_s: float = 0.0
    energy_j: float = 0.0  # of ballast, so far
    levels: list[float] = field(default_factory=list)
    start_w: float | None = None  # the most that work drew in its first START_S, without pauses
    _work_w: float = 0.0
    _usual_w: float = 0.0  # _work_w when the work began that runs now
    _highest_w: float = 0.0  # of this start
    _trims: list[float] = field(default_factory=lambda: [0.0] * BINS)

    def __post_init__(self) -> None:
        self.start_from(self.idle_w, self.full_w)

    def start_from(self, idle_w: float, full_w: float) -> None:
        """Take measured watts in place of the guesses, and choose the levels for the first pause."""
        self.idle_w, self.full_w, self._work_w = idle_w, full_w, full_w
        self._choose_levels()

    @property
    def gain_w(self) -> float:
        """Return the watts that level 1 adds to a device without work."""
        return max(self.full_w - self.idle_w, 1.0)

    def get_target_w(self, since_s: float) -> float:
        """Return the watts that the device should draw at a time since the work ended."""
        ramp = self.max_ramp_w_per_s
        falling_w = 0.0 if ramp is None else self._work_w - ramp * since_s
        return max(self.floor_w or 0.0, falling_w)

    def begin_work(self) -> None:
        """Note that work begins after a pause, and what the last start drew, which is known by now."""
        if self._highest_w > 0:
            self.start_w = self._highest_w if self.start_w is None else (self.start_w + self._highest_w) / 2
        self._usual_w, self._highest_w = self._work_w, 0.0

    def get_start_duty(self, began_s: float) -> float:
        """Return the share of its time for which work may run that began `began_s` ago."""
        if self.max_ramp_w_per_s is None or self.start_w is None:
            return 1.0
        allowed_w = self._usual_w + self.max_ramp_w_per_s * began_s
        return min(max((allowed_w - self.idle_w) / max(self.start_w - self.idle_w, 1.0), LEAST_DUTY), 1.0)

    def observe(
        self, power_w: float, dt_s: float, worked: float, since_s: float | None, began_s: float | None = None
    ) -> list[float]:
        """Take a reading, and return the new levels.

        A reading is the mean power over `dt_s`, and `worked` the share of that time in which ballast worked. `since_s`
        is the time from the end of the work to the middle of the reading, None where work ran. `began_s` is the time
        since work began after a pause, None where the work ran before the pause.
        """
        self.energy_j += worked * self.gain_w * dt_s
        if since_s is None and began_s is not None and began_s < START_S:
            alone_w = self.idle_w + (power_w - self.idle_w) / self.get_start_duty(began_s)
            self._highest_w = max(self._highest_w, alone_w)
        elif since_s is None:
            self._work_w += (power_w - self._work_w) / WORK_READINGS
        else:
            blur_s = math.hypot(self.blur_s, dt_s / math.sqrt(12.0))
            of_work = 0.5 * math.erfc(since_s / blur_s / math.sqrt(2.0))
            if of_work < MOST_OF_WORK:
                self._correct((power_w - of_work * self._work_w) / (1.0 - of_work), worked, since_s)
        self._choose_levels()
        return self.levels

    def _correct(self, power_w: float, worked: float, since_s: float) -> None:
        at = _find_bin(since_s)
        level, missing = self.levels[at], (self.get_target_w(since_s) - power_w) / self.gain_w
        held_up = level > 0 and worked < FREE * level
        if (missing > 0 and (held_up or level >= 1.0)) or (missing < 0 and level <= 0.0):
            return
        for each in range(max(at - 1, 0), BINS):  # a reading mostly covers two bins
            trim = TRIM if each <= at else TRIM_LATER
            self._trims[each] = min(max(self._trims[each] + trim * missing, -1.0), 1.0)

    def _choose_levels(self) -> None:
        wanted = [(self.get_target_w((at + 0.5) * BIN_S) - self.idle_w) / self.gain_w for at in range(BINS)]
        self.levels = [
            min(max(level + trim, 0.0), 1.0) if level > 0 else 0.0
            for level, trim in zip(wanted, self._trims, strict=True)
        ]


def _find_bin(since_s: float) -> int:
    return min(max(int(since_s / BIN_S + 1e-9), 0), BINS - 1)
