"""The samples and counter ticks of one power domain, in bounded memory however long it runs.

Every sample of the last ~11 minutes is kept (`FINE_SPAN_NS`, at most `FINE_SAMPLES`). Older samples become one row a
second (energy, seen seconds, highest power) for two hours; when that is full too, pairs of rows are merged (one row
every 2 s for four hours, 16 s for a day and a half, and so on). The running sums beside the samples never end, so a
window that was opened long ago is still exact: its start was marked when it was new.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from ..anchors import CounterHistory
from ..joules import ZERO, DomainSamples, Floats, Ints, Mark, Sums, accumulate, find_reach_ns, mark
from ..schema import Domain, Hold
from ..sensors.processes import OwnCpu, OwnCpuReading

FINE_SAMPLES = 1 << 15
COARSE_ROWS = 1 << 13
FINE_SPAN_NS = 660_000_000_000
COARSE_NS = 1_000_000_000
_FIRST_CAPACITY = 1 << 10
# Edges are marked within seconds, so a minute of a modelled sensor's samples is enough.
_KEPT_CPU = 600
# The kernel adds the time of other running threads only at its ticks (CONFIG_HZ=250, as in most distributions).
_TICK_S = 0.004
# A sample is divided into at most this many parts, so that a recording does not grow with every short scope.
_MOST_PARTS = 64

CpuEdge = tuple[int, OwnCpuReading]
"""A moment, and the CPU time of this process then."""


class PowerSeries:
    """Samples of one domain with their running sums; the sampler appends, windows mark.

    Not thread-safe: the sampler that owns it holds one lock for all its series.
    """

    def __init__(self, domain: Domain, *, fine: int = FINE_SAMPLES, coarse: int = COARSE_ROWS) -> None:
        self.update(domain)
        self._fine_limit = fine
        self._coarse_limit = coarse
        self._coarse_ns = COARSE_NS
        self._n = 0
        self._first_ns = 0
        self._times = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._values = np.zeros((4, _FIRST_CAPACITY))  # watts, joules, covered_s, variance_j2
        self._coarse: list[Floats] = []  # rows of time_ns, joules, covered_s, variance_j2, peak_w
        self._cpu: dict[int, OwnCpu] = {}  # by the time of the sample
        self._core_w = 0.0

    def update(self, domain: Domain) -> None:
        """Take what the sensor has learnt about its domain since (its true resolution, a note)."""
        self.domain = domain
        self._mean = domain.hold is Hold.MEAN
        self._lag_ns = round(domain.lag_s * 1e9)
        self._reach_ns = find_reach_ns(domain)

    @property
    def last_ns(self) -> int | None:
        """Sensor time of the newest sample."""
        return int(self._times[self._n - 1]) if self._n else None

    @property
    def last_w(self) -> float | None:
        """Newest known power."""
        watts = self._values[0, : self._n]
        return float(watts[-1]) if self._n and not np.isnan(watts[-1]) else None

    @property
    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        return self._times.nbytes + self._values.nbytes + sum(r.nbytes for r in self._coarse)

    def covers(self, time_ns: int) -> bool:
        """Return whether the samples reach a true time, including the lag."""
        last = self.last_ns
        return last is not None and last >= time_ns + self._lag_ns

    def extend(self, samples: Sequence[tuple[int, float]], *, replaces: bool = False) -> int:
        """Append samples that are newer than the last one; return how many were new.

        With `replaces`, first forget the samples from the time of the first new one on.
        """
        last = int(self._times[self._n - 1]) if self._n else -(1 << 62)
        if replaces and samples and samples[0][0] <= last:
            self._n = int(np.searchsorted(self._times[: self._n], samples[0][0]))
            last = int(self._times[self._n - 1]) if self._n else -(1 << 62)
        fresh = []
        for time_ns, power_w in samples:
            if time_ns > last:
                fresh.append((time_ns, power_w))
                last = time_ns
        if len(fresh) == 1 and self._n:
            self._reserve(1)
            self._append_one(*fresh[0])
        elif fresh:
            self._reserve(len(fresh))
            times = np.array([t for t, _ in fresh], dtype=np.int64)
            watts = np.array([w for _, w in fresh], dtype=np.float64)
            self._append(times, watts)
        return len(fresh)

    def _append_one(self, time_ns: int, power_w: float) -> None:
        """Do the same as `_append` without arrays, which would take most of the time for a single sample."""
        n = self._n
        last_w, joules, covered_s, variance_j2 = self._values[:, n - 1].tolist()
        seconds = (time_ns - int(self._times[n - 1])) * 1e-9
        if not math.isnan(power_w):
            begin_w = power_w if self._mean or math.isnan(last_w) else last_w
            level_w, rise_w = 0.5 * (power_w + begin_w), power_w - begin_w
            joules += level_w * seconds
            covered_s += seconds
            variance_j2 += (rise_w * seconds) ** 2 / 12.0 + (self.domain.sample_noise * level_w * seconds) ** 2
        self._times[n] = time_ns
        self._values[:, n] = (power_w, joules, covered_s, variance_j2)
        self._n = n + 1

    def _append(self, times: Ints, watts: Floats) -> None:
        n, more = self._n, len(times)
        if n == 0:
            self._first_ns = int(times[0])
        joined_t, joined_w, start = times, watts, ZERO
        if n:
            joined_t = np.concatenate([self._times[n - 1 : n], times])
            joined_w = np.concatenate([self._values[0, n - 1 : n], watts])
            joules, covered_s, variance_j2 = (float(v) for v in self._values[1:, n - 1])
            start = Mark(joules, covered_s, variance_j2, 0.0)
        sums = accumulate(joined_t, joined_w, mean=self._mean, noise=self.domain.sample_noise, start=start)
        skip = 1 if n else 0
        self._times[n : n + more] = times
        self._values[:, n : n + more] = (watts, sums.joules[skip:], sums.covered_s[skip:], sums.variance_j2[skip:])
        self._n = n + more

    def _reserve(self, more: int) -> None:
        old = self._n >= _FIRST_CAPACITY and self._times[self._n - 1] - self._times[0] > 2 * FINE_SPAN_NS
        if old or self._n + more > self._fine_limit:
            self._thin(more)
        capacity = len(self._times)
        while capacity < self._n + more:
            capacity *= 2
        if capacity != len(self._times):
            times, values = np.zeros(capacity, dtype=np.int64), np.zeros((4, capacity))
            times[: self._n], values[:, : self._n] = self._times[: self._n], self._values[:, : self._n]
            self._times, self._values = times, values

    def _thin(self, more: int) -> None:
        """Turn the older half of the fine samples (or as many as needed) into coarse rows."""
        move = min(max(self._n // 2, self._n + more - self._fine_limit), self._n - 1)
        if move <= 0:
            return
        bins = self._times[:move] // self._coarse_ns
        ends = np.append(np.flatnonzero(np.diff(bins)), move - 1)
        peaks = np.fmax.reduceat(self._values[0, :move], np.append(0, ends[:-1] + 1))  # NaN only if all are NaN
        self._coarse.append(np.vstack([self._times[ends].astype(np.float64), self._values[1:, ends], peaks]))
        keep = self._n - move
        self._times[:keep] = self._times[move : self._n].copy()
        self._values[:, :keep] = self._values[:, move : self._n].copy()
        self._n = keep
        rows = self._coarse_rows()
        while rows.shape[1] > self._coarse_limit:
            rows = _merge_pairs(rows)
            self._coarse_ns *= 2
        self._coarse = [rows]

    def _coarse_rows(self) -> Floats:
        return np.concatenate(self._coarse, axis=1) if self._coarse else np.zeros((5, 0))

    def _past_rows(self) -> Floats:
        """Return the coarse rows after a row for the very first sample: the first interval needs a start."""
        rows = self._coarse_rows()
        if rows.shape[1] == 0 or rows[0, 0] == self._first_ns:
            return rows
        origin = np.array([[self._first_ns], [0.0], [0.0], [0.0], [np.nan]])
        return np.concatenate([origin, rows], axis=1)

    def note_cpu(self, cpu: OwnCpu, core_w: float) -> None:
        """Keep this process's CPU time at the newest sample; a busy core draws `core_w`."""
        self._core_w = core_w
        if self._n:
            self._cpu[int(self._times[self._n - 1])] = cpu
        if len(self._cpu) > _KEPT_CPU:
            del self._cpu[next(iter(self._cpu))]

    def mark(self, time_ns: int, cpu: OwnCpu | None = None) -> Mark:
        """Return the running sums at a true time: shifted by the lag, exact between the samples.

        `cpu` is this process's CPU time then; a sample is divided by it if the sensor measures this process.
        """
        x = time_ns + self._lag_ns
        if self._n == 0 or (x < self._times[0] and self._coarse):
            return self._coarse_mark(x)
        times, v = self._times[: self._n], self._values[:, : self._n]
        by_time = mark(times, v[0], Sums(v[1], v[2], v[3]), x, mean=self._mean, reach_ns=self._reach_ns)
        return by_time if cpu is None or not self._cpu else self._divide_by_cpu(x, cpu, by_time)

    def _divide_by_cpu(self, x: int, cpu: OwnCpu, by_time: Mark) -> Mark:
        """Divide a sample by this process's CPU time until `cpu`, and that of children it has waited for.

        What other children used is divided by time. It may lie anywhere in the sample, as far as one core suffices.
        """
        i = int(np.searchsorted(self._times[: self._n], x, side="right")) - 1
        if not 0 <= i < self._n - 1:
            return by_time
        (begin_ns, end_ns), (begin_j, end_j) = self._times[i : i + 2].tolist(), self._values[1, i : i + 2].tolist()
        begin, end = self._cpu.get(begin_ns), self._cpu.get(end_ns)
        if begin is None or end is None:
            return by_time
        seconds, part = (end_ns - begin_ns) * 1e-9, (x - begin_ns) / (end_ns - begin_ns)
        all_j, threads_j = end_j - begin_j, self._core_w * (end.own_s - begin.own_s)
        own_j = min(threads_j, all_j)
        # This may include time that was counted in earlier samples.
        waited_j = 0.0 if cpu.waited_s is None else self._core_w * ((end.waited_s or 0.0) - (begin.waited_s or 0.0))
        ended_j = min(waited_j, all_j - own_j)
        other_j = all_j - own_j - ended_j
        joules = begin_j + other_j * part
        joules += own_j * _share(begin.own_s, cpu.own_s, end.own_s)
        joules += ended_j * _share(begin.waited_s or 0.0, cpu.waited_s or 0.0, end.waited_s or 0.0)
        loose_j = other_j if waited_j <= ended_j else other_j + ended_j
        duty = min(loose_j / seconds / self._core_w, 1.0)
        loose_j2 = part * (1.0 - part) * loose_j**2 * ((1.0 - duty) ** 2 + part * (1.0 - part) / 3.0)
        threads = max(threads_j / seconds / self._core_w - 1.0, 0.0)
        loose_j2 += threads * (self._core_w * min(_TICK_S, seconds)) ** 2 / 12.0
        return dataclasses.replace(by_time, joules=joules, loose_j2=loose_j2)

    def _coarse_mark(self, x_ns: float) -> Mark:
        if self._n == 0:
            return ZERO
        first_fine = np.array([[self._times[0]], *self._values[1:, :1], [np.nan]], dtype=np.float64)
        rows = np.concatenate([self._past_rows(), first_fine], axis=1)
        joules, covered_s, variance_j2 = (float(np.interp(x_ns, rows[0], rows[k])) for k in (1, 2, 3))
        return Mark(joules, covered_s, variance_j2, 0.0)

    def divide_samples(self, times_ns: Ints, watts: Floats, edges: Sequence[CpuEdge]) -> tuple[Ints, Floats]:
        """Divide samples of this series at those edges where this process's CPU time is known."""
        parts = list[tuple[int, float]]()
        for end_ns, power_w in zip(times_ns.tolist(), watts.tolist(), strict=True):
            parts += self._divide_sample(end_ns, edges) if not np.isnan(power_w) else []
            if not parts or parts[-1][0] < end_ns:
                parts.append((end_ns, power_w))
        return np.array([t for t, _ in parts], np.int64), np.array([w for _, w in parts])

    def _divide_sample(self, end_ns: int, edges: Sequence[CpuEdge]) -> list[tuple[int, float]]:
        """Return the parts of one sample; none if the CPU time is not known at its start and end."""
        i = int(np.searchsorted(self._times[: self._n], end_ns))
        begin_ns = int(self._times[i - 1]) if i else end_ns
        inside = sorted((edge for edge in edges if begin_ns < edge[0] < end_ns), key=lambda edge: edge[0])
        if not inside or begin_ns not in self._cpu or end_ns not in self._cpu:
            return []
        marks = [
            (time_ns, self.mark(time_ns, OwnCpu.of(cpu))) for time_ns, cpu in inside[:: len(inside) // _MOST_PARTS + 1]
        ]
        parts, last_ns, last_j = [], begin_ns, self.mark(begin_ns).joules
        for time_ns, at in [*marks, (end_ns, self.mark(end_ns))]:
            if time_ns > last_ns:
                joules = max(at.joules, last_j)  # two threads may have noted their edges in the wrong order
                parts.append((time_ns, (joules - last_j) / ((time_ns - last_ns) * 1e-9)))
                last_ns, last_j = time_ns, joules
        return parts

    def column(self, start_ns: int, end_ns: int) -> DomainSamples:
        """Return the samples of a window, with one beyond each edge; rows of a second for old times."""
        lo, hi = start_ns + self._lag_ns, end_ns + self._lag_ns
        times, watts = self._times[: self._n], self._values[0, : self._n]
        i = max(int(np.searchsorted(times, lo, side="right")) - 1, 0)
        j = min(int(np.searchsorted(times, hi, side="left")) + 1, self._n)
        fine = (times[i:j].copy(), watts[i:j].copy(), watts[i:j].copy())
        rows = self._past_rows()
        if rows.shape[1] == 0 or lo >= times[0]:
            return DomainSamples(self.domain, *fine)
        first = max(int(np.searchsorted(rows[0], lo, side="right")) - 1, 0)
        last = int(np.searchsorted(rows[0], hi, side="left")) + 1
        seen_s, joules = np.diff(rows[2], prepend=0.0), np.diff(rows[1], prepend=0.0)
        # If nothing was seen in a row it is a gap, not 0 W.
        means = np.divide(joules, seen_s, out=np.full_like(joules, np.nan), where=seen_s > 0)
        merged = [row[first:last] for row in (rows[0].astype(np.int64), means, rows[4])]
        if last > rows.shape[1]:  # otherwise the window ends before the fine samples begin
            merged = [np.concatenate(pair) for pair in zip(merged, fine, strict=True)]
        return DomainSamples(self.domain, *merged)


def _share(begin: float, at: float, end: float) -> float:
    """Return the position of a value between two others, as a share from 0 to 1."""
    return min(max((at - begin) / (end - begin), 0.0), 1.0) if end > begin else 0.0


def _merge_pairs(rows: Floats) -> Floats:
    """Return half as many rows: every second row of the (cumulative) sums, the higher peak of each pair."""
    even = rows[:, : rows.shape[1] // 2 * 2]
    merged = even[:, 1::2].copy()
    merged[4] = np.fmax(even[4, 0::2], even[4, 1::2])
    return np.concatenate([merged, rows[:, even.shape[1] :]], axis=1)


class CounterAnchors:
    """Places the ticks of an energy counter on the running sums of the samples, once these have reached them."""

    def __init__(self, series: PowerSeries) -> None:
        self._series = series
        self._waiting: deque[tuple[int, float]] = deque(maxlen=64)
        self.history = CounterHistory(series.domain)

    def __len__(self) -> int:
        return len(self.history.anchors)

    def add(self, time_ns: int, joules: float) -> None:
        """Add a tick; it becomes an anchor when the samples have caught up with it."""
        self._waiting.append((time_ns, joules))
        self.catch_up()

    def restart(self) -> None:
        """Stop comparing with earlier values: the counter may have been reset (a driver restart)."""
        self.history.restart()
        self._waiting.clear()

    def catch_up(self, force: bool = False) -> None:
        """Place the ticks that the samples have reached; all ticks if no more samples will come (`force`)."""
        self.history.domain = self._series.domain
        while self._waiting and (force or self._series.covers(self._waiting[0][0])):
            time_ns, joules = self._waiting.popleft()
            self.history.add(time_ns, joules, self._series.mark(time_ns))
