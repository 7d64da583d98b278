"""Measures how far a rank's wall clock is from rank 0's, by a ping-pong over torch.distributed on the CPU.

::

    rank r   t1 ────────────► ◄──────────── t4        rank 0's clock less ours: (t2 - t1 + t3 - t4) / 2,
    rank 0          t2 ─ t3                           wrong by at most half of the round trip

Each round bounds the offset from both sides, and the offset must lie within the bounds of all rounds. The quick rounds
decide, so a slow one (a busy host, a full network) does no harm. Ranks that share a host share its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clock import boot_id
from ...errors import MeasurementError
from ...units import format_duration

ROUNDS = 48
# With clocks further apart than this, times cannot order the rows of two ranks: a collective takes less.
UNSYNCHRONISED_NS = 1_000_000
# Clocks that NTP or PTP steers agree to better than this over minutes; a free-running quartz is 1-50 ppm off.
GROWING_PPM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """One exchange: rank 0's clock less ours, at our time `at_ns`, with a guaranteed error of at most `error_ns`."""

    rank: int
    offset_ns: float
    error_ns: float
    at_ns: int
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """What to add to a rank's times to get times of the reference rank.

    `offset_ns` holds at `at_ns` and grows by `drift_ppm`. `error_ns` is the half-width of a 90% interval anywhere in
    the run; None if nothing ties the clocks together. `source` is "exchange", "collectives", "same host" or "none".
    """

    rank: int
    offset_ns: float = 0.0
    drift_ppm: float = 0.0
    error_ns: float | None = None
    at_ns: int = 0
    source: str = "none"
    matched: int = 0
    notes: tuple[str, ...] = ()

    def apply(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert times of this rank to times of the reference rank."""
        grown = (times_ns - self.at_ns) * (self.drift_ppm * 1e-6)
        moved: NDArray[np.int64] = times_ns + np.rint(self.offset_ns + grown).astype(np.int64)
        return moved

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as a run file has it under "clock"."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Offset:
        """Read what `to_dict` returned; ignore fields of later versions."""
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        return cls(**{**known, "notes": tuple(known.get("notes", ()))})


def exchange(*, clock_ns: Callable[[], int] = time.time_ns, by_host: bool = True) -> ClockReading:
    """Compare clocks with rank 0. Every rank of the job calls this, at the start and at the end of a session.

    A gloo group is made if the job does not run on gloo, since on a GPU's stream a ping-pong would wait for kernels.
    With `by_host`, only one rank of each other host exchanges.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise MeasurementError(
            "there are no other ranks to compare clocks with",
            why="torch.distributed is not initialised",
            fix="call it after torch.distributed.init_process_group",
        )
    group = None if "gloo" in dist.get_backend() else dist.new_group(backend="gloo")
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        hosts: list[str] = [""] * size
        dist.all_gather_object(hosts, boot_id(), group=group)
        leaders = [r for r in range(size) if r == 0 or not by_host or hosts.index(hosts[r]) == r]
        reading = ClockReading(rank=rank, offset_ns=0.0, error_ns=0.0, at_ns=clock_ns(), host=hosts[rank])
        tensor = torch.zeros(2, dtype=torch.int64)
        for other in leaders[1:]:
            if rank == 0:
                _answer(dist, tensor, other, group, clock_ns)
            elif rank == other:
                reading = _ask(dist, tensor, group, clock_ns, rank, hosts[rank])
        readings: list[Any] = [None] * size
        dist.all_gather_object(readings, reading, group=group)
    finally:
        if group is not None:
            dist.destroy_process_group(group)
    if rank in leaders:
        return reading
    shared = readings[hosts.index(hosts[rank])]
    return ClockReading(
        rank=rank, offset_ns=shared.offset_ns, error_ns=shared.error_ns, at_ns=shared.at_ns, host=hosts[rank]
    )


def _answer(dist: Any, tensor: Any, other: int, group: Any, clock_ns: Callable[[], int]) -> None:
    for _ in range(ROUNDS + 1):
        dist.recv(tensor, src=other, group=group)
        tensor[0] = clock_ns()
        tensor[1] = clock_ns()
        dist.send(tensor, dst=other, group=group)


def _ask(dist: Any, tensor: Any, group: Any, clock_ns: Callable[[], int], rank: int, host: str) -> ClockReading:
    stamps = []
    for i in range(ROUNDS + 1):
        sent = clock_ns()
        dist.send(tensor, dst=0, group=group)
        dist.recv(tensor, src=0, group=group)
        back = clock_ns()
        if i:  # the first round opens the connection
            stamps.append((sent, int(tensor[0]), int(tensor[1]), back))
    return read(rank, stamps, host)


def read(rank: int, stamps: Iterable[tuple[int, int, int, int]], host: str = "") -> ClockReading:
    """Return an offset from rounds of (sent, received, answered, back); `received` and `answered` by rank 0's clock.

    Rank 0's clock less ours is at most `received - sent`, and at least `answered - back`.
    """
    t = np.array(list(stamps), dtype=np.int64)
    base = int(t[0, 1] - t[0, 0])  # offsets may be years; the remainder fits a float exactly
    high = (t[:, 1] - t[:, 0] - base).astype(np.float64)
    low = (t[:, 2] - t[:, 3] - base).astype(np.float64)
    least, most, spread = float(np.max(low)), float(np.min(high)), 0.0
    if least > most:  # a clock was set or slewed meanwhile: use the quickest round
        spread = (least - most) / 2.0
        best = int(np.argmin(high - low))
        least, most = float(low[best]), float(high[best])
    return ClockReading(
        rank=rank,
        offset_ns=base + (least + most) / 2.0,
        error_ns=(most - least) / 2.0 + spread,
        at_ns=int((t[0, 0] + t[-1, 3]) // 2),
        host=host,
    )


def settle(start: ClockReading, end: ClockReading | None = None) -> Offset:
    """Return offset and drift from the exchanges at a session's start and end (the start alone gives no drift)."""
    offset_ns, error_ns, drift_ppm, drift_error_ppm = start.offset_ns, start.error_ns, 0.0, 0.0
    if end is not None and end.at_ns > start.at_ns:
        span_ns = end.at_ns - start.at_ns
        grown_ns, unsure_ns = end.offset_ns - start.offset_ns, start.error_ns + end.error_ns
        error_ns = max(start.error_ns, end.error_ns)
        if abs(grown_ns) <= unsure_ns:  # the drift is within the uncertainty: use one offset for the whole run
            offset_ns = (start.offset_ns + end.offset_ns) / 2.0
            error_ns += abs(grown_ns) / 2.0
        else:
            drift_ppm, drift_error_ppm = grown_ns / span_ns * 1e6, unsure_ns / span_ns * 1e6
    return Offset(
        rank=start.rank,
        offset_ns=offset_ns,
        drift_ppm=drift_ppm,
        error_ns=error_ns,
        at_ns=start.at_ns,
        source="exchange",
        notes=notes(start.rank, offset_ns, drift_ppm, drift_error_ppm),
    )


def notes(rank: int, offset_ns: float, drift_ppm: float, drift_error_ppm: float) -> tuple[str, ...]:
    """Return notes about a host whose clock is not synchronised."""
    found = []
    fix = "synchronise the hosts (chrony, ntpd or PTP); the merged times are corrected"
    if abs(offset_ns) > UNSYNCHRONISED_NS:
        side = "behind" if offset_ns > 0 else "ahead of"
        found.append(f"rank {rank}'s host clock is {format_duration(abs(offset_ns) * 1e-9, 3)} {side} rank 0's: {fix}")
    if abs(drift_ppm) > max(GROWING_PPM, drift_error_ppm):
        found.append(f"rank {rank}'s host clock drifts by {drift_ppm:+.3g} ppm against rank 0's: {fix}")
    return tuple(found)
