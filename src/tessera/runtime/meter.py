"""What a schedule held: joules, the mean, and the worst window, from readings as they come. Bounded memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# The controller needs this long to find the load's duty; windows before it are counted apart.
FIRST_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Mean power over a span that ends at `time_ns`."""

    time_ns: int
    seconds: float
    power_w: float

    @property
    def start_ns(self) -> int:
        """When the span begins."""
        return self.time_ns - round(self.seconds * 1e9)


class Meter:
    """Adds up readings and slides a window of `window_s` over them; a gap between readings starts the window anew."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.energy_j = 0.0
        self.seconds = 0.0
        self.windows = 0
        self.settled_j = 0.0
        self.settled_s = 0.0
        self.peak_w: float | None = None
        self.first_peak_w: float | None = None
        self._sums: deque[tuple[int, float]] = deque()  # (time_ns, joules so far), within one window and one before

    def add(self, reading: Reading) -> None:
        """Take the next reading."""
        joules = reading.power_w * reading.seconds
        self.energy_j += joules
        self.seconds += reading.seconds
        if self.seconds > FIRST_S:
            self.settled_j += joules
            self.settled_s += reading.seconds
        self._slide(reading, joules)

    def _slide(self, reading: Reading, joules: float) -> None:
        sums = self._sums
        if not sums or abs(reading.start_ns - sums[-1][0]) > 1_000_000:
            sums.clear()
            sums.append((reading.start_ns, 0.0))
        sums.append((reading.time_ns, sums[-1][1] + joules))
        edge = reading.time_ns - round(self.window_s * 1e9)
        while len(sums) > 2 and sums[1][0] <= edge:
            sums.popleft()
        (t0, j0), (t1, j1) = sums[0], sums[1]
        if t0 > edge:
            return  # not yet a whole window
        at_edge = j0 + (j1 - j0) * (edge - t0) / (t1 - t0)
        self._note((sums[-1][1] - at_edge) / self.window_s)

    def _note(self, mean_w: float) -> None:
        self.windows += 1
        if self.seconds - self.window_s < FIRST_S:
            self.first_peak_w = max(self.first_peak_w or 0.0, mean_w)
        else:
            self.peak_w = max(self.peak_w or 0.0, mean_w)

    @property
    def mean_w(self) -> float | None:
        """Mean power after the first second; of everything where there was no more."""
        if self.settled_s > 0.2:
            return self.settled_j / self.settled_s
        return self.energy_j / self.seconds if self.seconds > 0 else None
