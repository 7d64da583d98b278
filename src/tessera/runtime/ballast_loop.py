"""The thread that holds a floor and a ramp: it reads the sensor, and sets the ballast and the pauses of a start."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import monitor
from ..errors import ScheduleError
from .ballast import Ballast, make_ballast
from .ballast_control import BINS, BallastControl
from .cap_report import MeanPower
from .controller import PaceCommand
from .pacer import Pacer
from .power_zone import PowerZone, guess_power

# Between calls in a loop, the ballast must go on; it ends when no call came for this many seconds.
LINGER_S = 2.0
TICK_S = 0.02
# Before the first work, the power of the device is measured idle and with ballast only, each over CALIBRATE_S. Ballast
# runs for SETTLE_S before its measurement. A measurement gives up after GIVE_UP_S without enough readings.
CALIBRATE_S, SETTLE_S, GIVE_UP_S = 0.2, 0.1, 1.0
# Work that comes sooner after the last work is not a start: clocks change after 20 ms at the earliest.
PAUSE_S = 0.02
# Seconds of work between two pauses of a start. Kernels drain before each pause: with 3 ms of work between two pauses,
# a start on an H200 drew 500 W where 660 W were allowed (2026-11-18).
SLICE_S = 0.006
# The report's lowest and highest power leave out the first second, in which the level is found.
FIRST_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BallastReport:
    """What a floor and a ramp did, and what that cost. None: there is no sensor, or the time was too short to tell.

    `energy_j` is the energy of ballast: its measured seconds times the watts that the sensor showed for it. `paused_s`
    is how long the GPU was paused when work began after a pause.
    """

    floor_w: float | None
    max_ramp_w_per_s: float | None
    where: str
    ran_s: float
    energy_j: float
    total_j: float
    lowest_w: float | None
    highest_w: float | None
    paused_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def cost(self) -> float | None:
        """Return the joules of ballast as a share of those of the work."""
        work_j = self.total_j - self.energy_j
        return self.energy_j / work_j if work_j > 0 else None


class BallastLoop:
    """Ballast on this process's device while calls run, and for `LINGER_S` after them. Threads may share it."""

    def __init__(
        self,
        floor_w: float | None,
        max_ramp_w_per_s: float | None,
        *,
        make: Callable[[int], Ballast] = make_ballast,
        make_pacer: Callable[..., Pacer] | None = None,
        sampler: Any = None,
    ) -> None:
        self.floor_w, self.max_ramp_w_per_s = floor_w, max_ramp_w_per_s
        self._make, self._make_pacer, self._given_sampler = make, make_pacer, sampler
        self._lock = threading.Lock()
        self._running, self._until_s = 0, 0.0
        self._thread: threading.Thread | None = None
        self._ballast: Ballast | None = None
        self._control: BallastControl | None = None
        self._ran: deque[tuple[int, float]] = deque(maxlen=512)  # (monotonic ns, seconds that ballast worked)
        self._total_j = self._energy_j = self._ran_s = self._seen_s = 0.0
        # between work: start, end (None: the pause lasts)
        self._pauses: deque[tuple[int, int | None]] = deque(maxlen=8)
        self._began_ns = 0  # when the last call began
        self._pacer: Pacer | None = None
        self._start_ns = 0  # when work last began after a pause
        self._extremes: tuple[float, float] | None = None
        self._zone: PowerZone = PowerZone("floor", [], [])
        self._where = ""
        self._notes: dict[str, str] = {}

    # -- what a schedule calls ------------------------------------------------------------------------------

    def enter(self) -> None:
        """Note that a call begins; the first call starts the thread."""
        with self._lock:
            self._running += 1
            if self._thread is None:
                self._open()
                self._thread = threading.Thread(target=self._run, name="tessera-floor", daemon=True)
                self._thread.start()
            self._began_ns = time.monotonic_ns()
            if self._ballast is not None:
                self._note_start(self._ballast.ended_ns())
                self._ballast.begin_work()

    def leave(self) -> None:
        """Note that a call has ended; its work may still be queued."""
        with self._lock:
            self._running -= 1
            self._until_s = time.monotonic() + LINGER_S
            if self._ballast is not None:
                self._ballast.end_work()

    def report(self) -> BallastReport:
        """Return the figures so far."""
        with self._lock:
            ballast, control = self._ballast, self._control
            return BallastReport(
                floor_w=self.floor_w,
                max_ramp_w_per_s=self.max_ramp_w_per_s,
                where=self._where,
                ran_s=self._ran_s + (ballast.ran_s() if ballast is not None else 0.0),
                energy_j=self._energy_j + (control.energy_j if control is not None else 0.0),
                total_j=self._total_j,
                lowest_w=self._extremes[0] if self._extremes else None,
                highest_w=self._extremes[1] if self._extremes else None,
                paused_s=self._pacer.counts().waited_s if self._pacer is not None else 0.0,
                notes=tuple(self._notes.values()),
            )

    @property
    def _sampler(self) -> Any:
        return self._given_sampler or monitor.default().sampler

    # -- the thread -----------------------------------------------------------------------------------------

    def _open(self) -> None:
        sampler = self._sampler
        torch: Any = sys.modules.get("torch")
        cuda = torch is not None and torch.cuda.is_available()
        device = int(torch.cuda.current_device()) if cuda else -1
        counted = sampler.counted_domains()
        gpus = [n for n in counted if n.startswith("gpu")]
        names = gpus[device : device + 1] if cuda else counted
        if not names:
            raise ScheduleError(
                "a power floor needs a power sensor, and there is none for this device",
                why="ballast follows what is measured",
                fix="run `tessera doctor`",
            )
        self._zone = PowerZone("floor", names, [])
        if any(domain.basis == "modelled" for domain in self._zone.domains(sampler)):
            self._notes["basis"] = "the power here is modelled, not measured: so is the floor"
        labels = [(n, sampler.series[n].domain.label if n in sampler.series else "") for n in names]
        most_w = max(self.floor_w or 0.0, 300.0)
        idle_w, burst_w = guess_power(labels, most_w)
        self._ballast = self._make(device)
        if self._make_pacer is not None and self.max_ramp_w_per_s is not None and cuda and self._pacer is None:
            # the pacer owes no pause for work that ran before the start
            self._pacer = self._make_pacer(device, most_work_s=2 * SLICE_S)
        self._where = self._ballast.where
        self._control = BallastControl(
            floor_w=self.floor_w,
            max_ramp_w_per_s=self.max_ramp_w_per_s,
            idle_w=idle_w,
            full_w=max(burst_w, idle_w + 1),
            blur_s=self._zone.blur_s(sampler),
        )
        self._calibrate(self._ballast, self._control)
        self._ballast.set_levels(self._control.levels)

    def _calibrate(self, ballast: Ballast, control: BallastControl) -> None:
        """Measure the device without work and with ballast only: for half a second, once, before the first work."""
        idle = self._measure(ballast)
        ballast.set_levels([1.0] * BINS)
        time.sleep(SETTLE_S)
        full = self._measure(ballast)
        ballast.set_levels([0.0] * BINS)
        if idle is not None and full is not None and full[1] > 0.2 and full[0] > 1.05 * idle[0]:
            control.start_from(idle[0], idle[0] + (full[0] - idle[0]) / full[1])
        else:
            self._notes["guess"] = "the watts of ballast could not be measured: its joules are the catalogue's guess"

    def _measure(self, ballast: Ballast) -> tuple[float, float] | None:
        """Return the mean power over `CALIBRATE_S`, and the share of that time in which ballast worked."""
        self._zone.read_ns = None
        began_s, ran_s = time.monotonic(), ballast.ran_s()
        energy_j = seconds = 0.0
        while seconds < CALIBRATE_S and time.monotonic() < began_s + GIVE_UP_S:
            self._wait_for_reading()
            reading = self._zone.read(self._sampler)
            if reading is not None and reading.start_ns >= round(began_s * 1e9):
                energy_j, seconds = energy_j + reading.power_w * reading.seconds, seconds + reading.seconds
        worked = (ballast.ran_s() - ran_s) / (time.monotonic() - began_s)
        return (energy_j / seconds, min(worked, 1.0)) if seconds >= CALIBRATE_S / 2 else None

    def _wait_for_reading(self) -> None:
        """Ask the sensor for new samples. If nobody asks, a ring of samples is read only every second or two."""
        since_ns = self._zone.read_ns or time.monotonic_ns() - round(TICK_S * 1e9)
        self._sampler.wait_for(since_ns + round(TICK_S * 0.5e9), timeout_s=TICK_S, names=self._zone.names)
        time.sleep(TICK_S / 4)

    def _run(self) -> None:
        try:
            while self._running or time.monotonic() < self._until_s:
                self._wait_for_reading()
                self._tick(time.monotonic_ns())
        except Exception as exc:  # noqa: BLE001  (a lost sensor must not leave ballast on)
            self._notes["lost"] = f"the floor was given up: {type(exc).__name__}: {exc}"
        finally:
            self._end()

    def _note_start(self, ended_ns: int | None) -> None:
        """Note that a call begins. After a pause, its first work is paused where it would draw more than it may."""
        if ended_ns is None or self._began_ns - ended_ns < PAUSE_S * 1e9 or self._control is None:
            return
        self._start_ns = self._began_ns
        self._control.begin_work()
        self._pace_start(self._began_ns)

    def _pace_start(self, now_ns: int) -> None:
        if self._pacer is not None and self._control is not None and self._start_ns:
            duty = self._control.get_start_duty((now_ns - self._start_ns) * 1e-9)
            self._pacer.obey(PaceCommand(ratio=1.0 / duty - 1.0, slice_s=SLICE_S))

    def _tick(self, now_ns: int) -> None:
        ballast, control = self._ballast, self._control
        assert ballast is not None and control is not None
        self._pace_start(now_ns)
        self._ran.append((now_ns, ballast.ran_s()))
        reading = self._zone.read(self._sampler)
        if reading is None:
            return
        worked = (self._ran_at(reading.time_ns) - self._ran_at(reading.start_ns)) / max(reading.seconds, 1e-9)
        since_s = self._find_time_since_work(reading, ballast.ended_ns())
        began_ns = (reading.start_ns + reading.time_ns) // 2 - self._start_ns
        began_s = began_ns * 1e-9 if reading.start_ns >= self._start_ns > 0 else None
        worked = min(max(worked, 0.0), 1.0)
        ballast.set_levels(control.observe(reading.power_w, reading.seconds, worked, since_s, began_s))
        self._add(reading)

    def _find_time_since_work(self, reading: MeanPower, ended_ns: int | None) -> float | None:
        """Return the time from the end of the work before a reading to the reading's middle; None where work ran.

        A reading is some 20 ms old: the work that it shows may be over, or the next work may already run.
        """
        middle_ns = (reading.start_ns + reading.time_ns) // 2
        if ended_ns is not None and (not self._pauses or self._pauses[-1][0] != ended_ns):
            self._pauses.append((ended_ns, None))
        if ended_ns is None and self._pauses and self._pauses[-1][1] is None:
            self._pauses[-1] = (self._pauses[-1][0], self._began_ns)
        for began_ns, until_ns in reversed(self._pauses):
            if middle_ns >= began_ns:
                return (middle_ns - began_ns) * 1e-9 if until_ns is None or reading.time_ns <= until_ns else None
        return None

    def _ran_at(self, time_ns: int) -> float:
        """Return the seconds that ballast had worked at a time, interpolated between two looks."""
        after = next(((t, s) for t, s in self._ran if t >= time_ns), self._ran[-1])
        before = next(((t, s) for t, s in reversed(self._ran) if t <= time_ns), self._ran[0])
        if after[0] <= before[0]:
            return before[1]
        return before[1] + (after[1] - before[1]) * (time_ns - before[0]) / (after[0] - before[0])

    def _add(self, reading: MeanPower) -> None:
        self._total_j += reading.power_w * reading.seconds
        self._seen_s += reading.seconds
        if self._seen_s > FIRST_S and self._running:
            low, high = self._extremes or (reading.power_w, reading.power_w)
            self._extremes = (min(low, reading.power_w), max(high, reading.power_w))

    def _end(self) -> None:
        with self._lock:
            ballast, control, self._ballast, self._control = self._ballast, self._control, None, None
            self._thread, self._start_ns = None, 0
            if ballast is not None:
                self._ran_s += ballast.ran_s()
            if control is not None:
                self._energy_j += control.energy_j
        if self._pacer is not None:
            self._pacer.obey(PaceCommand())
        if ballast is not None:
            ballast.close()
