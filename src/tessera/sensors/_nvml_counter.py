"""The total-energy counter of one NVIDIA GPU, read in the background at its ticks, as the anchor.

One read costs ~3 ms (6 ms and more under load, H200), so it is read about once a second, in the middle between
two ticks where its value is unambiguous. Its ticks are found first by reading densely for half a second, and
watched afterwards by two reads around a tick now and then.
"""

from __future__ import annotations

from typing import Any

from ..clock import REAL, Clock
from ._tick import TickFinder

# On the H200 the counter at tick T holds the energy up to T - 8 ms: it leads the ring's 15 ms by 7 ms
# (benchmarks/fit/fit_response.py).
COUNTER_LAG_NS = 8_000_000
READ_EVERY_NS = 1_000_000_000
WATCH_EVERY_NS = 15_000_000_000
LEARN_NS = 3_000_000
# Give up looking for ticks after so many reads, seconds of them: an idle or odd counter may not tick at all. Tried
# again later. Reads, not time: while torch is imported this thread may not run for seconds.
LEARN_READS = 400
RETRY_NS = 60_000_000_000


class EnergyCounter:
    """Gives (time_ns, joules) anchors; `due_ns` says when it wants to be read next."""

    def __init__(self, nvml: Any, handle: Any, clock: Clock = REAL) -> None:
        self._clock = clock
        self._nvml = nvml
        self._handle = handle
        self.ticks = TickFinder()
        self.due_ns = 0
        self._tries = 0
        self._last: tuple[int, int, int] | None = None  # start and end of the last read, its value
        self._watch_ns = 0
        self._watching = False
        self._last_mj = -1

    @property
    def learning(self) -> bool:
        """Whether its ticks are not known and it is about to look for them (and not resting from having failed)."""
        return not self.ticks.known and self.due_ns - self._clock.monotonic_ns() < READ_EVERY_NS

    def read(self) -> list[tuple[int, float]]:
        """One read of the counter, if it is due; the anchors it gives."""
        begin = self._clock.monotonic_ns()
        if begin < self.due_ns:
            return []
        value_mj = int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        end = self._clock.monotonic_ns()
        if value_mj < self._last_mj:  # the driver restarted: its ticks are elsewhere now
            self.ticks = TickFinder()
            self._last = None
        elif self._last and value_mj != self._last[2]:
            self.ticks.saw(self._last[0], end)
        elif self._last:
            self.ticks.quiet(self._last[1], begin)
        self._last, self._last_mj = (begin, end, value_mj), value_mj
        self._plan(end)
        tick = self.ticks.last_tick_ns(begin, end)
        return [] if tick is None else [(tick - COUNTER_LAG_NS, value_mj * 1e-3)]

    def _plan(self, now: int) -> None:
        if not self.ticks.known:
            self._plan_learning(now)
            return
        self._tries = 0
        if self._watching:  # this was the read before a tick: the next one goes just after it
            self._watching = False
            self.due_ns = self.ticks.next_tick_ns(now) + round(self.ticks.uncertainty_ns) + 500_000
        elif now >= self._watch_ns:
            self._watch_ns = now + WATCH_EVERY_NS
            self._watching = True
            before = self.ticks.next_tick_ns(now + 20_000_000)
            self.due_ns = before - round(self.ticks.uncertainty_ns) - 6_000_000
        else:
            self.due_ns = self.ticks.next_quiet_ns(now + READ_EVERY_NS)

    def _plan_learning(self, now: int) -> None:
        self._tries += 1
        if self._tries < LEARN_READS:
            self.due_ns = now + LEARN_NS
        else:
            self._tries = 0
            self.due_ns = now + RETRY_NS
