"""Minutes at high load, and whether memory, file descriptors and threads stay where they were.

    python benchmarks/measure/soak.py [--minutes 10] [--save FILE]

In one process: a sensor of 8 boards, each with 500 samples and 50 rows of telemetry and readings of its counter a second;
a session with a run file, regions, marks and counters about 5 000 times a second; energy scopes; the Prometheus exporter
scraped ten times a second over HTTP; and every few seconds a reader that opens the run file while it is written. Once a
second RSS, descriptors and threads are looked at. The first 150 s are warm-up (rings and queues fill); growth is the slope
of a line through the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import platform
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tessera import monitor, profile
from tessera.clock import now_ns
from tessera.monitor.series import FINE_SAMPLES
from tessera.monitor.snapshot import PowerWatch
from tessera.profile.runfile import RunFile
from tessera.report import metrics
from tessera.schema import Capability, Domain, Telemetry
from tessera.sensors.base import Batch
from tessera.sensors.discover import DiscoveredSensors

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

BENCHMARKS = Path(__file__).resolve().parents[1]
BOARDS, HZ = 8, 500
ROWS_PER_S = 5_000
SCRAPES_PER_S = 10
READ_EVERY_S = 5.0
WARM_UP_S = (
    2.3 * FINE_SAMPLES / HZ
)  # until the rings of samples and the queues of telemetry and anchors are full: 150 s
# RSS of CPython moves by pages of the allocator; a leak of one sample (16 B) in ten at this load would be 3.7 MiB/min.
FLAT_MIB_PER_MIN = 1.0


class Boards:
    """Eight boards whose power is a sine, sampled every 2 ms, with a counter and telemetry at each read.

    Fifty reads a second, where a real board has one, so that the queues of both are full within the warm-up.
    """

    name, period_s = "boards", 0.02

    def __init__(self) -> None:
        self._next_ns, self._read_ns, self._joules = 0, 0, 0.0

    def start(self) -> None:
        self._next_ns = self._read_ns = now_ns()

    def stop(self) -> None: ...

    def domains(self) -> list[Domain]:
        return [Domain(name=f"gpu{i}", source="soak", resolution_s=1 / HZ, lag_s=0.005) for i in range(BOARDS)]

    def capabilities(self) -> list[Capability]:
        return []

    def read(self) -> Batch:
        batch, now = Batch(), now_ns()
        times = range(self._next_ns, now, 1_000_000_000 // HZ)
        samples = [(t, 400.0 + 300.0 * math.sin(t * 1e-9)) for t in times]
        for i in range(BOARDS):
            batch.samples[f"gpu{i}"] = samples
        self._next_ns = times[-1] + 1_000_000_000 // HZ if samples else self._next_ns
        self._joules += 400.0 * (now - self._read_ns) * 1e-9
        self._read_ns = now
        for i in range(BOARDS):
            batch.anchors[f"gpu{i}"] = [(now, self._joules)]
            batch.telemetry.append(
                Telemetry(time_ns=now, domain=f"gpu{i}", temperature_c=60.0, clocks_mhz={"sm": 1980.0})
            )
        return batch


def started() -> Boards:
    """As `discover` hands them out."""
    boards = Boards()
    boards.start()
    return boards


class Counted:
    """How often each part of the load did its work, and what went wrong in a thread."""

    def __init__(self) -> None:
        self.scrapes = self.reads = self.rows = self.scopes = 0
        self.failed: list[str] = []


@contextlib.contextmanager
def exporter(done: threading.Event, counted: Counted) -> Iterator[None]:
    """Serves on loopback, and asks itself."""
    with (
        metrics.bind(socket.AF_INET, ("127.0.0.1", 0)) as server,
        PowerWatch(DiscoveredSensors([started()], []), 1.0) as watch,
        metrics.serve(server, metrics.SnapshotCollector(watch.take_snapshot)),
    ):
        url = f"http://127.0.0.1:{server.server_port}/metrics"

        def scrape() -> None:
            while not done.wait(1 / SCRAPES_PER_S):
                with urllib.request.urlopen(url, timeout=10) as answer:
                    text = answer.read()
                if text.count(b"joules_total") < BOARDS:
                    counted.failed.append("a scrape without joules")
                counted.scrapes += 1

        with running(scrape, counted, done):
            yield


@contextlib.contextmanager
def measured(board: monitor.Monitor) -> Iterator[None]:
    """The process's monitor inside the `with`."""
    monitor.use(board.start())
    try:
        yield
    finally:
        monitor.use(None)


@contextlib.contextmanager
def running(work: Any, counted: Counted, done: threading.Event) -> Iterator[None]:
    def guarded() -> None:
        try:
            work()
        except Exception as exc:  # noqa: BLE001  (a soak reports whatever comes)
            counted.failed.append(f"{work.__name__}: {type(exc).__name__}: {exc}"[:200])

    thread = threading.Thread(target=guarded, name=f"soak-{work.__name__}")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def reader(path: Path, done: threading.Event, counted: Counted) -> Any:
    def read() -> None:
        while not done.wait(READ_EVERY_S):
            with RunFile(path) as run:
                next(run.chunks(("start_ns", "end_ns")), None)
                _ = run.rows, run.domains, run.notes
            counted.reads += 1

    return read


def load(seconds: float, counted: Counted) -> Iterator[float]:
    """Regions, marks, counters and scopes in bursts; yields the time gone once a second."""
    begun = time.monotonic()
    told = 0.0
    for i in itertools.count():
        with monitor.energy_scope("burst"):
            for k in range(100):
                with profile.region(f"layer{k % 12}"):
                    pass
                if k % 10 == 0:
                    profile.mark("batch")
                    profile.counter("loss", 1.0 / (i + 1))
        counted.rows += 120
        counted.scopes += 1
        gone = time.monotonic() - begun
        if gone >= told + 1.0:
            told = gone
            yield gone
        if gone >= seconds:
            return
        time.sleep(max(begun + counted.rows / ROWS_PER_S - time.monotonic(), 0.0))


def look() -> tuple[float, int, int]:
    """RSS in MiB, descriptors, threads."""
    gc.collect()  # what waits for the collector is no leak
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd")) - 1, threading.active_count()


def soak(seconds: float) -> dict[str, Any]:
    counted, done = Counted(), threading.Event()
    rows: list[tuple[float, float, int, int]] = []
    before = look()
    with tempfile.TemporaryDirectory(prefix="tessera-soak-") as folder, measured(monitor.Monitor([started()])):
        path = Path(folder) / "soak.tessera"
        with (
            exporter(done, counted),
            profile.session(["power"], path=path),
            running(reader(path, done, counted), counted, done),
        ):
            for gone in load(seconds, counted):
                rows.append((gone, *look()))
                if len(rows) % 30 == 0:
                    print(
                        f"{gone:6.0f} s  {rows[-1][1]:7.1f} MiB  {rows[-1][2]} descriptors  {rows[-1][3]} threads",
                        flush=True,
                    )
        size_mib = path.stat().st_size / 2**20
        with RunFile(path) as run:
            kept, crashed = run.rows, run.crashed
    after = look()
    return summary(rows, counted) | {
        "run_file_mib": round(size_mib, 1), "run_file_rows": kept, "run_file_whole": not crashed,
        "before_and_after": {"descriptors": (before[1], after[1]), "threads": (before[2], after[2])},
    }  # fmt: skip


def summary(rows: list[tuple[float, float, int, int]], counted: Counted) -> dict[str, Any]:
    """First and last after the warm-up, and the slope of each."""
    kept = np.array([r for r in rows if r[0] >= min(WARM_UP_S, 0.5 * rows[-1][0])])
    minutes, half = kept[:, 0] / 60.0, len(kept) // 2
    figures: dict[str, Any] = {"seconds": round(rows[-1][0], 1), "warm_up_s": round(float(kept[0, 0]), 1)}
    for i, name in enumerate(("rss_mib", "descriptors", "threads"), start=1):
        values = kept[:, i]
        figures[name] = {
            "first": round(float(values[0]), 1), "last": round(float(values[-1]), 1), "most": round(float(values.max()), 1),
            "per_min": round(float(np.polyfit(minutes, values, 1)[0]), 3),
            "per_min_last_half": round(float(np.polyfit(minutes[half:], values[half:], 1)[0]), 3),
        }  # fmt: skip
    seconds = rows[-1][0]
    figures["load"] = {
        "samples_per_s": BOARDS * HZ, "rows_per_s": round(counted.rows / seconds), "scopes_per_s": round(counted.scopes / seconds, 1),
        "scrapes": counted.scrapes, "reads_of_the_live_file": counted.reads,
    }  # fmt: skip
    figures["failed"] = counted.failed
    return figures


def flat(figures: dict[str, Any]) -> bool:
    """Whether nothing grew: threads and descriptors end as they began, and RSS rises less than a leak would."""
    ends = figures["before_and_after"]
    same = all(ends[name][0] == ends[name][1] for name in ends)
    steady = all(
        abs(figures[n]["last"] - figures[n]["first"]) <= 2 and abs(figures[n]["per_min"]) < 1
        for n in ("descriptors", "threads")
    )
    return same and steady and figures["rss_mib"]["per_min"] < FLAT_MIB_PER_MIN and not figures["failed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--save", type=Path, default=BENCHMARKS / "results" / "soak.json")
    given = parser.parse_args()
    figures = soak(60.0 * given.minutes)
    figures["flat"] = flat(figures)
    figures["machine"] = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    print(json.dumps(figures, indent=1))
    write_result(given.save, figures)
    raise SystemExit(0 if figures["flat"] else 1)


if __name__ == "__main__":
    main()
