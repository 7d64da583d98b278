"""How much ballast: pure arithmetic between a late sensor and work that only fills what the real work leaves free.

::

    power      ████████▇▇▆▆▅▅▄▄▄▄▄▄▄▄▄▄████████      floor_w is held, and the fall is at most max_ramp
    of work    ████████                ████████
    ballast            ▇▇▆▆▅▅▄▄▄▄▄▄▄▄▄▄

The sensor shows a fall some 45 ms late. So ballast does not wait for it: its level stands ready while work runs, whose
blocks come first on the device, and takes over when there are none. The sensor then lowers the level along the ramp.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .shaping import hold_power

# The power of the device without work is the least that was seen within this time.
LOW_S = 5.0
# How much of what is missing at the floor is corrected with each reading.
TRIM = 0.3
# Ballast that ran for at least this share of its level was not held up by work: the power is its own.
FREE = 0.8
# After so many such readings the sensor's filter has forgotten the work before (11 ms, samples of 20 ms).
SETTLED = 4


@dataclass(slots=True)
class BallastControl:
    """The level of ballast (0 to 1) that holds a floor and a ramp.

    `idle_w` is what the device draws without work, and `full_w` with ballast only, at level 1: first guesses, which the
    sensor corrects.
    """

    floor_w: float | None
    max_ramp_w_per_s: float | None
    idle_w: float
    full_w: float
    level: float = 0.0
    energy_j: float = 0.0  # of ballast, so far
    _held_w: float = 0.0
    _trim: float = 0.0
    _free: int = 0
    _lows: deque[tuple[float, float]] = field(default_factory=deque)  # (time, least load), falling never back
    _now_s: float = 0.0

    def __post_init__(self) -> None:
        self._held_w = self.idle_w
        self._choose_level()

    def start_from(self, idle_w: float, full_w: float) -> None:
        """Take measured watts in place of guesses. The level for the first pause stands ready before the first work."""
        self.idle_w, self.full_w, self._held_w = idle_w, full_w, idle_w
        self._note_low(idle_w)
        self._choose_level()

    @property
    def gain_w(self) -> float:
        """What level 1 adds to a device without work."""
        return max(self.full_w - self.idle_w, 1.0)

    @property
    def low_w(self) -> float:
        """What the device draws when no work runs: idling, or waiting for others."""
        return self._lows[0][1] if self._lows else self.idle_w

    def observe(self, power_w: float, dt_s: float, worked: float) -> float:
        """Take a reading: mean power over `dt_s`, and the share of that time in which ballast worked. The new level."""
        self._now_s += dt_s
        before, aimed_w = self.level, self._target_w
        load_w = max(power_w - worked * self.gain_w, 0.0)
        self.energy_j += worked * self.gain_w * dt_s
        self._note_low(load_w)
        self._held_w = hold_power(
            load_w, self._held_w, dt_s,
            floor_w=self.floor_w, max_ramp_w_per_s=self.max_ramp_w_per_s, most_w=self.low_w + self.gain_w,
        )  # fmt: skip
        self._free = self._free + 1 if before > 0 and worked >= FREE * before else 0
        if self._free >= SETTLED:
            missing = (aimed_w - power_w) / self.gain_w
            self._trim = min(max(self._trim + TRIM * missing, -0.5), 0.5)
        self._choose_level()
        return self.level

    @property
    def _target_w(self) -> float:
        """What ballast should bring the device to once work ends: where it fell from, or only the floor."""
        return self._held_w if self.max_ramp_w_per_s is not None else self.floor_w or 0.0

    def _choose_level(self) -> None:
        wanted = (self._target_w - self.low_w) / self.gain_w
        self.level = min(max(wanted + self._trim, 0.0), 1.0) if wanted > 0 else 0.0

    def _note_low(self, load_w: float) -> None:
        lows = self._lows
        while lows and lows[-1][1] >= load_w:
            lows.pop()
        lows.append((self._now_s, load_w))
        while lows[0][0] < self._now_s - LOW_S:
            lows.popleft()
