"""Power caps by waits in the stream on the GPU at hand: what is held, and what it costs.

    PYTHONPATH=src:.carry/site python benchmarks/device/schedule_caps.py RESULTS.json [--budget-s 200] [--quick]
        [--only gemm,node] [--curve EARLIER.json]

A GEMM loop at 600/500/400/300 W and GPT-2-small training at 500/400/300 W: mean and worst 200 ms window after the first
second, by the driver's ring and by the energy counter, and the throughput against the best fixed duty cycle at that
power, found in the same run. Then graphs, two processes under one node cap of which one is killed, what points cost,
and the overhead where nothing limits. No clock, limit or mode is changed.

The ring looks every 20 ms through a filter of about 11 ms: work that switches every few milliseconds beats with that,
and its windows are then the ring's own (tests/fakes/plant.py). The counter's windows, between every second of its ticks
of 100 ms, are beside them; where both agree they were drawn.

`--only` takes some of points, gemm, node, gpt2, graphs, ripple. `--curve` takes the fixed duty cycles of an earlier run instead of
measuring them, where the free power of each load is that of now within 2%; the result says so. Under 120 s fewer of
them are measured. The ring's samples and the counter's ticks of every row go to RESULTS.series.json.

`--quick` runs the logic on a CPU with tiny shapes; its watts are modelled and say nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import re
import signal
import statistics as st
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("TESSERA_SENSORS", "nvml")  # "node" is then the GPUs alone, whatever RAPL may say
os.environ["TESSERA_CONTROL"] = "0"  # limits and clocks of this GPU are never changed here, whatever the shell says

import torch
from tessera.runtime.launches import Cadence, Countdown, PointPlacer

from tessera import monitor, schedule
from tessera.cli.model_loader import import_package
from tessera.runtime import controller
from tessera.runtime.cap_report import MeanPower, PowerMeter, ScheduleReport
from tessera.runtime.control_loop import get_loop
from tessera.runtime.controller import PaceCommand
from tessera.runtime.pacer import PaceCounts, make_pacer

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

WINDOW_S, FIRST_S = 0.2, 1.0
AGREE = 0.02  # by so much their means may differ; bursts of 8 ms at half the time were 5% apart on 2026-11-15
TICK_S = 0.1  # of the energy counter (shared/design.md)
Step = Callable[[], int]  # does some work, and says how many units
# By the length of a burst: duties on both sides of each cap, near enough that a line between them is the curve. Longer
# bursts gave the same joules per GEMM on 2026-11-15, as far as the sensors can tell; two of them are there to see it.
GEMM_DUTIES = {0.0012: (0.6, 0.49, 0.38, 0.27, 0.17), 0.004: (0.49, 0.27)}
GPT2_DUTIES = {0.0024: (0.9, 0.7, 0.55, 0.38)}
FEW_GEMM_DUTIES = {0.0012: (0.57, 0.45, 0.33, 0.21)}
SHORT_S = 120.0  # with less time than this they will do
# Neighbours of a curve further apart are not joined: power stands still from a duty of 0.7 on, throughput does not, and
# a line from 0.49 to 1.0 is 11% above what 0.6 gave (2026-11-15).
APART = 0.21
SAME_W = 0.02  # by so much the free power of an earlier curve may differ
PARTS = ("points", "gemm", "node", "gpt2", "graphs", "ripple")


class Run:
    """The results so far, written after every row, and the time that is left."""

    def __init__(self, out: Path, budget_s: float, quick: bool) -> None:
        self.out, self.quick = out, quick
        self.end = time.monotonic() + budget_s
        self.rows: dict[str, Any] = {}
        self.series: dict[str, Any] = {}
        self.earlier: dict[str, Any] = {}  # the rows of another run, for its curves
        self.short = budget_s < SHORT_S
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.domain = next(iter(monitor.default().sampler.counted_domains()))

    def row(self, name: str, seconds: float, fn: Callable[[], Any]) -> Any:
        """Do one row unless the time is short; a failure is a row too."""
        if time.monotonic() + seconds > self.end:
            value: Any = {"skipped": f"{seconds:.0f} s do not fit any more"}
        else:
            began = time.monotonic()
            try:
                value = fn()
            except Exception as exc:  # noqa: BLE001  (one row must not cost the others)
                traceback.print_exc()
                value = {"error": f"{type(exc).__name__}: {exc}"}
            if isinstance(value, dict):
                value["took_s"] = round(time.monotonic() - began, 2)
                self._keep(name, value.pop("series", None))
        self.rows[name] = value
        print(f"  {name:44s} {text(value)}", flush=True)
        write_result(self.out, self.rows)
        return value if isinstance(value, dict) and "error" not in value and "skipped" not in value else None

    def _keep(self, name: str, series: Any) -> None:
        """The samples of a row: what a window that went over looked like."""
        if series is not None and self.out != Path(os.devnull):
            self.series[name] = series
            self.out.with_suffix(".series.json").write_text(json.dumps(self.series))

    def built(self, name: str, make: Callable[[], Step]) -> Step | None:
        """A load; None, with a row that says why, where it cannot be made."""
        try:
            return make()
        except Exception as exc:  # noqa: BLE001  (a package that is missing must not cost the other rows)
            traceback.print_exc()
            self.rows[name] = {"error": f"{type(exc).__name__}: {exc}"}
            return None

    def s(self, seconds: float) -> float:
        """A length of time, shorter in a quick run."""
        return min(seconds, 1.5) if self.quick else seconds

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def text(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items() if k != "curve")


# -- measuring ---------------------------------------------------------------------------------------------------


class Counter:
    """Ticks of the energy counter, one every 100 ms, from the second second on.

    A read takes some 3 ms, and the ring must be read meanwhile: only around a tick is it read again and again.
    """

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._read = lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        self._stop = threading.Event()
        self.ticks: list[tuple[float, float]] = []  # (s, J)
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        wait_s = FIRST_S - 0.1
        while not self._stop.wait(wait_s):
            value, before = self._read(), time.monotonic()
            while not self._stop.is_set():
                new, after = self._read(), time.monotonic()
                if new != value:  # it ticked between the end of the last read and the end of this one
                    self.ticks.append(((before + after) / 2, new * 1e-3))
                    break
                before = after
            wait_s = TICK_S - 0.012

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def mean_w(self) -> float | None:
        """The mean between the first and the last tick."""
        if len(self.ticks) < 2:
            return None
        (t0, j0), (t1, j1) = self.ticks[0], self.ticks[-1]
        return (j1 - j0) / (t1 - t0)

    def windows(self) -> dict[str, float]:
        """The worst 200 ms, by every second tick. Ticks are regular, our times of them are not: by a line through them.

        `counter_tick_off_ms` is how far they are from it; twice that over the window is what a window may be off.
        """
        if len(self.ticks) < 6:
            return {}
        times, joules = (list(x) for x in zip(*self.ticks, strict=True))
        n = [round((t - times[0]) / TICK_S) for t in times]  # one may have been missed
        each_s, first_s = st.linear_regression(n, times)
        watts = [(joules[i + 2] - joules[i]) / (2 * each_s) for i in range(len(n) - 2) if n[i + 2] - n[i] == 2]
        return {
            "counter_worst_window_w": max(watts, default=float("nan")),
            "counter_tick_ms": each_s * 1e3,
            "counter_tick_off_ms": st.pstdev([t - first_s - each_s * i for i, t in zip(n, times, strict=True)]) * 1e3,
        }


@contextmanager
def measured(run: Run) -> Iterator[dict[str, float]]:
    """Mean and worst window of the block after its first second, by the ring; the mean by the counter beside it."""
    found: dict[str, float] = {}
    counter = Counter() if run.cuda else None
    with monitor.power_trace() as trace:
        begin = time.monotonic_ns()
        try:
            yield found
        finally:
            if counter:
                counter.stop()
            run.sync()
            end = time.monotonic_ns()
            time.sleep(0.15)
    column = trace.columns[run.domain]
    times = column.times_ns - column.lag_ns - trace.to_epoch(0)  # monotonic, as the counter's
    meter = PowerMeter(WINDOW_S)
    for (t0, w0), (t1, w1) in zip(
        zip(times, column.watts, strict=True), zip(times[1:], column.watts[1:], strict=True), strict=False
    ):
        if t0 >= begin and t1 <= end and w0 == w0 and w1 == w1:
            meter.add(MeanPower(int(t1), float(t1 - t0) * 1e-9, float((w0 + w1) / 2)))
    found["ring_mean_w"] = float(meter.mean_w or 0.0)
    found["worst_window_w"] = float(meter.peak_w or 0.0)
    found["first_second_worst_w"] = float(meter.first_peak_w or 0.0)
    found["mean_w"] = (counter.mean_w() if counter else None) or found["ring_mean_w"]
    found |= counter.windows() if counter else {}
    found["series"] = {  # type: ignore[assignment]
        "ring_ms_w": [
            [round((t - begin) * 1e-6, 1), round(float(w), 1)]
            for t, w in zip(times, column.watts, strict=True)
            if begin <= t <= end and w == w
        ],
        "counter_ms_j": [[round(t * 1e3 - begin * 1e-6, 1), j] for t, j in (counter.ticks if counter else [])],
    }


def timed(run: Run, step: Step, seconds: float) -> tuple[int, float]:
    """Units of work and seconds, after the first second of a while."""
    begun = time.monotonic()
    while time.monotonic() - begun < min(FIRST_S, seconds / 3):
        step()
    run.sync()
    t0, units = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        units += step()
    run.sync()
    return units, time.monotonic() - t0


def load_row(run: Run, step: Step, seconds: float) -> dict[str, float]:
    with measured(run) as found:
        units, past_s = timed(run, step, run.s(seconds))
    found["units_per_s"] = units / past_s
    found["joules_per_unit"] = found["mean_w"] * past_s / max(units, 1)
    return found


# -- loads -------------------------------------------------------------------------------------------------------


def few_in_flight(run: Run) -> Callable[[], None]:
    """Called after each batch: the host goes on until three of them are queued."""
    pending: list[Any] = []

    def queued() -> None:
        if run.cuda:
            event = torch.cuda.Event()
            event.record()
            pending.append(event)
            if len(pending) > 3:
                pending.pop(0).synchronize()

    return queued


def gemm_step(run: Run) -> Step:
    n = 128 if run.quick else 4096
    dtype = torch.bfloat16 if run.cuda else torch.float32
    a, b = (torch.randn(n, n, device=run.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    queued = few_in_flight(run)

    def step() -> int:
        """100 GEMMs (about 20 ms), at most three such batches in flight."""
        for _ in range(100):
            torch.mm(a, b, out=out)
        queued()
        return 100

    return step


def gpt2_step(run: Run) -> Step:
    if run.quick:
        import_package("torchvision", "transformers")  # a wheel beside another build of torch needs stubs
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=128) if run.quick else GPT2Config()
    dtype = torch.bfloat16 if run.cuda else torch.float32
    model = GPT2LMHeadModel(config).to(run.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (1, 16) if run.quick else (8, 1024)
    ids = torch.randint(0, config.vocab_size, shape, device=run.device)

    def step() -> int:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return 1

    return step


# -- fixed duty cycles, and caps ---------------------------------------------------------------------------------


def fixed(step: Step, cadence: Cadence, countdown: Countdown, command: PaceCommand) -> Step:
    """A step at a duty that nobody adapts, by the same points."""

    def paced() -> int:
        with PointPlacer(lambda _out=None: cadence, countdown, each_call=False):
            units = step()
        cadence.adapt(cadence.pacer.counts(), command)
        return units

    return paced


def duty_curve(
    run: Run, name: str, step: Step, duties: dict[float, tuple[float, ...]], seconds: float
) -> list[dict[str, float]]:
    """(watts, units a second) of fixed duty cycles, by the length of their bursts."""
    cadence, countdown = Cadence(make_pacer(0 if run.cuda else -1)), Countdown()
    curve = []
    for slice_s, duty in [(s, d) for s, each in duties.items() for d in each]:
        command = PaceCommand((1 - duty) / duty, slice_s)
        cadence.pacer.obey(command)

        def row(command: PaceCommand = command) -> dict[str, float]:
            before = cadence.pacer.counts()
            found = load_row(run, fixed(step, cadence, countdown, command), seconds)
            return found | waits_of(before, cadence.pacer.counts())

        found = run.row(f"{name} fixed duty {duty} x {slice_s * 1e3:g} ms", run.s(seconds) + 1.0, row)
        if found:
            curve.append({"slice_s": slice_s, "duty": duty, **found})
    cadence.pacer.obey(PaceCommand())
    return curve


def earlier_curve(run: Run, name: str, free: dict[str, float] | None) -> list[dict[str, float]] | None:
    """The fixed duty cycles of another run, where its board drew the same without a cap."""
    was = run.earlier.get(f"{name} free", {}).get("mean_w")
    if was is None or free is None:
        return None
    off = free["mean_w"] / was - 1
    taken = abs(off) <= SAME_W
    run.rows[f"{name} curve"] = {"earlier_free_w": was, "off_pct": 100 * off, "taken_from_an_earlier_run": taken}
    if not taken:
        return None
    curve = []
    for row, found in run.earlier.items():
        told = re.fullmatch(rf"{re.escape(name)} fixed duty ([\d.]+) x ([\d.]+) ms", row)
        if told and "mean_w" in found:
            curve.append({"slice_s": float(told[2]) * 1e-3, "duty": float(told[1]), **found})
    return curve


def waits_of(before: PaceCounts, after: PaceCounts) -> dict[str, float]:
    """How long slices and waits really were."""
    waits = after.waits - before.waits
    worked_s, waited_s = after.worked_s - before.worked_s, after.waited_s - before.waited_s
    past_s = worked_s + waited_s
    if not waits or past_s <= 0:
        return {"waits_per_s": 0.0}
    return {
        "waits_per_s": waits / past_s,
        "points_per_s": (after.points - before.points) / past_s,
        "slice_ms": worked_s / waits * 1e3,
        "period_ms": past_s / waits * 1e3,
    }


def best_fixed(curve: list[dict[str, float]], free: dict[str, float] | None, power_w: float) -> float | None:
    """The most units a second that a fixed duty cycle gives at a power: between its neighbours, the better length.

    Neighbours are at most `APART`. Where ring and counter do not agree on the mean (`AGREE`), one of them beats with the bursts, and it is not known.
    """
    curve = [c for c in curve if abs(c["ring_mean_w"] / c["mean_w"] - 1) <= AGREE]
    rates = []
    for slice_s in sorted({c["slice_s"] for c in curve}):
        points = sorted((c["duty"], c["mean_w"], c["units_per_s"]) for c in curve if c["slice_s"] == slice_s)
        if free:
            points.append((1.0, free["mean_w"], free["units_per_s"]))
        for (d0, w0, r0), (d1, w1, r1) in itertools.pairwise(points):
            if w0 <= power_w <= w1 and w1 > w0 and d1 - d0 <= APART:
                rates.append(r0 + (r1 - r0) * (power_w - w0) / (w1 - w0))
    return max(rates, default=None)


def capped_row(run: Run, step: Step, cap_w: float, seconds: float, curve: Any, free: Any) -> dict[str, Any]:
    capped = schedule(power_cap=cap_w)(step)
    if not get_loop()._cadences:  # the first cap of a process compiles its points: that is not of the second left out
        schedule(power_cap=cap_w)(step)()
        drain()
    found: dict[str, Any] = load_row(run, capped, seconds)
    report = capped.report()
    best = best_fixed(curve, free, found["mean_w"])
    found |= against(found, cap_w) | held_by(report)
    found["of_best_fixed_duty_pct"] = None if best is None else 100 * found["units_per_s"] / best
    found["notes"] = list(report.notes)
    drain()
    return found


def against(found: dict[str, Any], cap_w: float) -> dict[str, float]:
    """What was drawn, against the cap."""
    off = {
        "mean_off_pct": "mean_w",
        "ring_mean_off_pct": "ring_mean_w",
        "worst_window_off_pct": "worst_window_w",
        "counter_window_off_pct": "counter_worst_window_w",
    }
    return {name: 100 * (found[key] / cap_w - 1) for name, key in off.items() if key in found}


def first_second(found: dict[str, Any], cap_w: float) -> dict[str, float]:
    return {"first_second_off_pct": 100 * (found["first_second_worst_w"] / cap_w - 1)}


def held_by(report: ScheduleReport) -> dict[str, float]:
    """The waits that held it."""
    worked_s = report.waited_s / report.slowdown if report.slowdown else 0.0
    return waits_of(PaceCounts(), PaceCounts(report.points, report.waits, report.waited_s, worked_s))


def drain() -> None:
    """Let the loop forget the last schedule."""
    deadline = time.monotonic() + 2.0
    while not get_loop()._idle and time.monotonic() < deadline:
        time.sleep(0.02)


def caps(
    run: Run, name: str, step: Step, watts: tuple[float, ...], duties: dict[float, tuple[float, ...]], seconds: float
) -> None:
    free_s, duty_s = (3.0, 2.4) if run.short else (4.0, 3.3)
    free = run.row(f"{name} free", run.s(free_s) + 1.0, lambda: load_row(run, step, free_s))
    known = earlier_curve(run, name, free)
    curve = duty_curve(run, name, step, duties, duty_s) if known is None else known
    for cap_w in watts:
        run.row(
            f"{name} capped at {cap_w:g} W",
            run.s(seconds) + 1.5,
            lambda cap_w=cap_w: capped_row(run, step, cap_w, seconds, curve, free),
        )


# -- points, graphs, overhead ------------------------------------------------------------------------------------


def point_cost(run: Run) -> dict[str, float]:
    """What a point costs the host and the stream, and how exact a wait is."""
    pacer = make_pacer(0 if run.cuda else -1)
    pacer.obey(PaceCommand(0.0, 10.0))
    count = 200
    run.sync()
    t0 = time.perf_counter()
    for _ in range(count):
        pacer.point()
    host_us = (time.perf_counter() - t0) / count * 1e6
    found = {"host_us": host_us}
    if run.cuda:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                pacer.point()
        graph.replay()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        found["stream_us"] = a.elapsed_time(b) / count * 1e3
    step = gemm_step(run)
    pacer.obey(PaceCommand(1.0, 0.0))
    before = pacer.counts()
    for _ in range(20):
        pacer.point(restart=True)
        step()
        pacer.point()
    run.sync()
    after = pacer.counts()
    worked = after.worked_s - before.worked_s
    found["waited_over_worked_goal_1"] = (after.waited_s - before.waited_s) / worked if worked else 0.0
    pacer.obey(PaceCommand())
    return found


def graph_rows(run: Run) -> None:
    """A graph captured under the cap has its points inside; one captured before has them between replays."""
    if not run.cuda:
        print("  graphs need CUDA", flush=True)
        return
    cap_w = 400.0
    operands: list[Any] = []

    def captured() -> Any:
        a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))

        def many() -> None:
            for _ in range(50):
                torch.mm(a, b)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            many()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        operands.append((a, b))  # the graph reads them for as long as it is replayed
        return graph

    def replay_of(graph: Any) -> Step:
        pending: list[Any] = []

        def step() -> int:
            graph.replay()
            event = torch.cuda.Event()
            event.record()
            pending.append(event)
            if len(pending) > 3:
                pending.pop(0).synchronize()
            return 50

        return step

    def before() -> dict[str, Any]:
        return capped_row(run, replay_of(captured()), cap_w, 5.0, [], None)

    def inside() -> dict[str, Any]:
        body = gemm_step(run)
        with schedule(power_cap=cap_w) as held:
            for _ in range(20):  # 0.4 s: the loop learns how often points are to come
                body()
            graph = captured()
            found: dict[str, Any] = load_row(run, replay_of(graph), 5.0)
        found |= against(found, cap_w) | held_by(held.report())
        drain()
        return found

    run.row("graph of 50 GEMMs, points between replays, 400 W", 8.0, before)
    run.row("graph of 50 GEMMs, points inside, 400 W", 8.0, inside)


def overhead(run: Run, step: Step, options: dict[str, Any], pairs: int, steps: int) -> dict[str, float]:
    """Blocks with and without in turn; the half-width is of a 90% interval (Student's t)."""
    scheduled = schedule(**options)(step)

    def block(fn: Step) -> float:
        run.sync()
        t0 = time.perf_counter()
        for _ in range(steps):
            fn()
        run.sync()
        return (time.perf_counter() - t0) / steps * 1e3

    block(step), block(scheduled)
    ratios = []
    for i in range(pairs):
        first, second = (step, scheduled) if i % 2 else (scheduled, step)
        one, two = block(first), block(second)
        plain, with_it = (one, two) if i % 2 else (two, one)
        ratios.append(with_it / plain - 1)
    return {
        "slowdown_pct": 100 * st.mean(ratios),
        "error_pct": 100 * 2.0 * st.stdev(ratios) / len(ratios) ** 0.5,
        "median_pct": 100 * st.median(ratios),
    }


# -- the node's bucket -------------------------------------------------------------------------------------------


def work_for(seconds: float, cap: str, quick: bool) -> None:
    """A worker: GEMMs under a node cap; a line (time, GEMMs so far) every 100 ms."""
    run = Run(Path(os.devnull), 600.0, quick)
    step = gemm_step(run)
    step()
    run.sync()
    capped = schedule(power_cap=cap)(step)
    end, mark, units = time.monotonic() + seconds, 0.0, 0
    while time.monotonic() < end:
        units += capped()
        if time.monotonic() - mark > 0.1:
            mark = time.monotonic()
            print(f"{mark:.4f} {units}", flush=True)
    run.sync()


def rate(lines: list[tuple[float, int]], start: float, end: float) -> float:
    inside = [x for x in lines if start <= x[0] <= end]
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0]) if len(inside) > 2 else 0.0


class Worker:
    """Another process under the node's cap; a thread reads its lines, so that one that hangs holds nobody up."""

    def __init__(self, cap: str, seconds: float, quick: bool) -> None:
        command = [sys.executable, __file__, "-", "--worker", cap, "--seconds", str(seconds)]
        self.process = subprocess.Popen(
            command + ["--quick"] * quick, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[tuple[float, int]] = []
        self.errors: list[str] = []
        for read in (self._read, self._read_errors):
            threading.Thread(target=read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.count(" ") == 1:
                at, units = line.split()
                self.lines.append((float(at), int(units)))

    def _read_errors(self) -> None:
        self.errors += list(self.process.stderr or ())[-8:]

    def has_begun(self, deadline: float) -> None:
        while not self.lines:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"a worker did not begin: {''.join(self.errors)[-600:]}")
            time.sleep(0.02)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)


def node_row(run: Run) -> dict[str, Any]:
    """Two processes on this GPU under 450 W together; one is killed half-way."""
    cap_w = 450.0 if not run.quick else 2000.0
    begun = time.monotonic()
    workers = [Worker(f"node:{cap_w:g}W", run.s(11.0) + 30.0, run.quick) for _ in range(2)]
    try:
        for worker in workers:
            worker.has_begun(begun + 30.0)
        both = time.monotonic()
        with measured(run) as found:
            time.sleep(run.s(6.0))
        killed = time.monotonic()
        workers[0].process.send_signal(signal.SIGKILL)
        with measured(run) as after:  # its first second is apart: a context that goes holds the GPU up for a while
            time.sleep(run.s(5.0))
        stopped = time.monotonic()
    finally:
        for worker in workers:
            worker.end()
    first, second = (w.lines for w in workers)
    shares = [rate(x, both + min(1.5, run.s(6.0) / 3), killed) for x in (first, second)]
    steady = rate(second, killed + min(2.0, run.s(5.0) / 3), stopped)
    took = next(
        (t - killed for t, _ in second if t > killed and rate(second, t, t + 0.5) >= 0.9 * steady), float("nan")
    )
    return {
        **found,
        "cap_w": cap_w,
        "start_s": both - begun,
        "units_per_s_each": [round(s, 1) for s in shares],
        "fairness": min(shares) / max(shares) if max(shares) else 0.0,
        "alone_units_per_s": steady,
        "took_over_after_s": took,
        **against(found, cap_w),
        **{f"after_kill_{k}": v for k, v in (against(after, cap_w) | first_second(after, cap_w)).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--curve", type=Path, help="results of an earlier run, for its fixed duty cycles")
    parser.add_argument("--worker")
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    if args.quick:
        os.environ["TESSERA_SENSORS"] = "modelled"
    if args.worker:
        work_for(args.seconds, args.worker, args.quick)
        return
    faulthandler.dump_traceback_later(args.budget_s + 60.0, exit=True)  # what hangs must not take the others' time
    run = Run(Path(args.out), args.budget_s, args.quick)
    run.rows["machine"] = {
        "gpu": torch.cuda.get_device_name() if run.cuda else "cpu",
        "torch": torch.__version__,
        "date": str(date.today()),
        "quick": args.quick,
    }
    if args.curve is not None:
        run.earlier = json.loads(args.curve.read_text())
    only = args.only.split(",")
    if unknown := set(only) - set(PARTS):
        parser.error(f"--only: no such part: {', '.join(sorted(unknown))}")
    time.sleep(run.s(1.5))
    measure(run, only)
    summary(run)


def measure(run: Run, only: list[str]) -> None:
    """The parts that are wanted, in order."""
    watts = (600.0, 500.0, 400.0, 300.0) if not run.quick else (6.0,)
    gemm = gemm_step(run)
    if "points" in only:
        run.row("points", 3.0, lambda: point_cost(run))
    if "gemm" in only:
        caps(run, "gemm", gemm, watts, FEW_GEMM_DUTIES if run.short else GEMM_DUTIES, 6.0)
    if "node" in only:
        run.row("node: two processes, one killed", 20.0, lambda: node_row(run))
    train = run.built("gpt2", lambda: gpt2_step(run)) if "gpt2" in only else None
    if train is not None:
        training(run, train)
    if "graphs" in only:
        graph_rows(run)
    if "ripple" in only:
        ripple_rows(run, gemm, watts[-2] if len(watts) > 1 else watts[0])


def summary(run: Run) -> None:
    """The capped rows beside their goals."""
    heads = ("mean (3%)", "window (5%)", "by counter", "of best duty (95%)", "waits/s", "slice ms")
    print(f"\n{'':50s} " + " ".join(f"{h:>18s}" if "best" in h else f"{h:>11s}" for h in heads))
    for name, row in run.rows.items():
        if isinstance(row, dict) and "mean_off_pct" in row:
            cells = [
                (row.get(k), text)
                for k, text in (
                    ("mean_off_pct", "+11.1f"),
                    ("worst_window_off_pct", "+11.1f"),
                    ("counter_window_off_pct", "+11.1f"),
                    ("of_best_fixed_duty_pct", "18.1f"),
                    ("waits_per_s", "11.0f"),
                    ("slice_ms", "11.2f"),
                )
            ]
            print(
                f"{name:50s} "
                + " ".join(f"{'-':>{t.strip('+').split('.')[0]}s}" if v is None else f"{v:{t}}" for v, t in cells)
            )
    for name, row in run.rows.items():
        if name.startswith(("overhead", "points")):
            print(f"{name:50s} {text(row)}")
    skipped = [k for k, v in run.rows.items() if isinstance(v, dict) and ("skipped" in v or "error" in v)]
    print(f"written to {run.out}; skipped or failed: {skipped or 'nothing'}")


def ripple_rows(run: Run, step: Step, cap_w: float) -> None:
    """Longer slices, as they were before 2026-11-15: fewer waits, and windows of the ring's beside those drawn."""
    chosen, controller.RIPPLE = controller.RIPPLE, 0.01
    run.row(
        f"gemm capped at {cap_w:g} W, RIPPLE 0.01",
        run.s(6.0) + 1.5,
        lambda: capped_row(run, step, cap_w, 6.0, [], None),
    )
    controller.RIPPLE = chosen


def training(run: Run, train: Step) -> None:
    for _ in range(3 if run.quick else 20):
        train()
    run.row("overhead, nothing limits", 12.0, lambda: overhead(run, train, {}, 6, 5 if run.quick else 20))
    watts = (500.0, 400.0, 300.0) if not run.quick else (6.0,)
    caps(run, "gpt2 train", train, watts, GPT2_DUTIES, 7.0)
    slack = {"power_cap": "20kW"}
    run.row("overhead, a cap that does not bind", 12.0, lambda: overhead(run, train, slack, 6, 5 if run.quick else 20))


if __name__ == "__main__":
    main()
