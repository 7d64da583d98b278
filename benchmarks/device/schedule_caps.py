"""Power caps on the GPU at hand: what is held, what it costs, and what a cap costs that is not reached.

    PYTHONPATH=src:.carry/site python benchmarks/device/schedule_caps.py RESULTS.json [--budget-s 240]
        [--only overhead,moe,vit,decode,gpt2,bert,node] [--quick]

overhead  GPT-2 training, MoE training, eager and graph decode (1.1B, batch 16) under a cap 30% above the highest
          window that they draw, in turns with none: medians of the ratios.
moe, vit, decode, gpt2, bert
          each load, synchronised every 8 calls: free, at fixed duties, and under caps of 0.7, 0.85 and 0.5 of its free
          power. Mean, and worst window of 200 ms, from 0.5 s on; the first half second beside them; throughput against
          the fixed duties, interpolated at the same power. 0.7 comes first, with nothing learnt of the load before. A
          cap below what the GPU draws idle (with a context, measured before) says so and runs for 8 s.
node      two processes of GEMMs under one cap for the node.

Power is the driver's ring, read by another process that knows nothing of Tessera. No clock, limit or mode is changed.
`--quick` runs the logic on a CPU with tiny shapes; its watts are made up.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics as st
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TESSERA_SENSORS", "nvml")
os.environ["TESSERA_CONTROL"] = "0"  # limits and clocks of this GPU are never changed here, whatever the shell says

import torch
from torch import nn

from tessera import schedule
from tessera.runtime import control_loop, gpu_pacer
from tessera.runtime.control_loop import get_loop
from tessera.runtime.controller import FASTEST_S, PaceCommand
from tessera.runtime.pause_kernel import PauseKernel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

WINDOW_S, SETTLED_S, LAG_S = 0.2, 0.5, 0.015
SHARES = (0.7, 0.85, 0.5)
DUTIES = (0.75, 0.5, 0.3)
SLICE_S = 0.0012
EVERY = 8  # calls between synchronisations
ROOMY_S = 60.0  # with so much time left, comparisons are made too
BELOW_S = 8.0  # a cap below idle: the program is slow, and it takes a second to know
ABOVE = 1.3  # a cap that is not reached, of the free power; of itself where it was reached
TRIES = 3
Step = Callable[[], Any]
QUICK = False
FIRST_CALL_S = [0.0]  # what the host needed for the first call of the last load


# -- the ring, by another process --------------------------------------------------------------------------------


class Ring:
    """The samples that the other process has written."""

    def __init__(self) -> None:
        self._path = Path(tempfile.mkdtemp()) / "ring.txt"
        watcher = str(Path(__file__).with_name("ring_watch.py"))
        self._process = subprocess.Popen([sys.executable, watcher, str(self._path), *(["--fake"] if QUICK else [])])
        self.between(0.0, time.time())  # it is at work

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def between(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Samples of a span of epoch seconds, less the sensor's lag; waits until they are there."""
        for _ in range(50):
            lines = self._path.read_text().splitlines()[:-1] if self._path.exists() else []
            rows = [(float(t) - LAG_S, float(w)) for t, w in (line.split() for line in lines)]
            if rows and rows[-1][0] >= end:
                break
            time.sleep(0.1)
        return [(t, w) for t, w in rows if begin <= t <= end]


def mean_of(samples: list[tuple[float, float]]) -> float:
    """The mean over time."""
    joules = sum((b - a) * (v + w) / 2 for (a, v), (b, w) in itertools.pairwise(samples))
    return joules / (samples[-1][0] - samples[0][0])


def worst_window(samples: list[tuple[float, float]]) -> float:
    """The highest mean over 200 ms that ends at a sample."""
    sums = list(
        itertools.accumulate(((b - a) * (v + w) / 2 for (a, v), (b, w) in itertools.pairwise(samples)), initial=0.0)
    )
    worst = 0.0
    for i, (t, _) in enumerate(samples):
        edge = t - WINDOW_S
        j = next((k for k in range(i, -1, -1) if samples[k][0] <= edge), None)
        if j is not None:
            (a, _), (b, _) = samples[j], samples[j + 1]
            worst = max(worst, (sums[i] - sums[j] - (sums[j + 1] - sums[j]) * (edge - a) / (b - a)) / WINDOW_S)
    return worst


# -- loads -------------------------------------------------------------------------------------------------------


def tiny(*_: Any, **__: Any) -> Step:
    layer, x = nn.Linear(64, 64), torch.ones(8, 64)
    return lambda: layer(x).sum().backward()


def make_moe() -> Step:
    from cupti_light import make_training

    return make_training(12, 768, 12, moe_at=6)


def make_gpt2() -> Step:
    from cupti_light import make_training

    return make_training(12, 768, 12)


def make_decode(graph: bool = False) -> Step:
    import cupti_light

    return cupti_light.make_decode(graph=graph)


def make_vit() -> Step:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    model = ViTModel(config, add_pooling_layer=False).to("cuda", torch.bfloat16).eval()
    images = torch.randn(64, 3, 224, 224, device="cuda", dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> None:
        model(images)

    return step


def make_bert() -> Step:
    from transformers import BertConfig, BertModel

    model = torch.compile(BertModel(BertConfig()).to("cuda", torch.bfloat16).eval())
    ids = torch.randint(0, 30000, (32, 128), device="cuda")

    @torch.no_grad()
    def step() -> None:
        for _ in range(4):  # 2.4 ms each
            model(ids)

    return step


LOADS: dict[str, tuple[str, Callable[[], Step]]] = {
    "moe": ("MoE training", make_moe),
    "vit": ("ViT-L/16 inference, batch 64", make_vit),
    "decode": ("eager decode, 1.1B, batch 16", make_decode),
    "gpt2": ("GPT-2 training", make_gpt2),
    "bert": ("compiled BERT", make_bert),
}
UNREACHED: dict[str, Callable[[], Step]] = {
    "eager decode": make_decode,
    "MoE training": make_moe,
    "GPT-2 training": make_gpt2,
    "graph decode": lambda: make_decode(graph=True),
}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_load(step: Step, seconds: float) -> tuple[float, float, float]:
    """Calls a second from half a second on; begin and end in epoch seconds. The first call is timed."""
    synchronize()
    begin, calls, counted_from = time.time(), 0, None
    step()
    FIRST_CALL_S[:] = [time.time() - begin]
    while time.time() - begin < seconds:
        for _ in range(EVERY):
            step()
        synchronize()
        calls += EVERY
        if counted_from is None and time.time() - begin >= SETTLED_S:
            counted_from = (time.time(), calls)
    end = time.time()
    since, before = counted_from or (begin, 0)
    return (calls - before) / max(end - since, 1e-9), begin, end


def measure(ring: Ring, step: Step, seconds: float) -> dict[str, Any]:
    rate, begin, end = run_load(step, seconds)
    samples = ring.between(begin, end)
    settled = [s for s in samples if s[0] >= begin + SETTLED_S]
    first = [s for s in samples if s[0] < begin + SETTLED_S]
    mean_w = mean_of(settled)
    return {
        "calls_per_s": rate,
        "joules_per_call": mean_w / rate if rate else None,  # a cap below idle: no call ended after half a second
        "mean_w": mean_w,
        "worst_window_w": worst_window(settled),
        "first_worst_window_w": worst_window(first),
        "first_mean_w": mean_of(first),
        "first_call_s": FIRST_CALL_S[0],
    }


# -- parts -------------------------------------------------------------------------------------------------------


class Rows:
    """The rows of one process, printed as they come; a failure is a row too."""

    def __init__(self, budget_s: float) -> None:
        self.end, self.rows = time.monotonic() + budget_s, {}

    def add(self, name: str, seconds: float, fn: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        value: dict[str, Any]
        if time.monotonic() + seconds > self.end:
            value = {"skipped": f"{seconds:.0f} s do not fit any more"}
        else:
            try:
                value = fn()
            except Exception as exc:  # noqa: BLE001  (one row must not cost the others)
                traceback.print_exc()
                value = {"error": f"{type(exc).__name__}: {exc}"}
        self.rows[name] = value
        shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
        print(f"  {name:48s} {shown}", file=sys.stderr, flush=True)
        return None if "skipped" in value or "error" in value else value


def interpolate(points: list[tuple[float, float]], power_w: float) -> float | None:
    """Calls a second of the fixed duties at a power, between its neighbours."""
    points = sorted(points)
    for (w0, r0), (w1, r1) in itertools.pairwise(points):
        if w0 <= power_w <= w1 and w1 > w0:
            return r0 + (r1 - r0) * (power_w - w0) / (w1 - w0)
    return None


def capped_row(
    ring: Ring, step: Step, cap_w: float, seconds: float, points: list[tuple[float, float]], idle_w: float
) -> Any:
    if cap_w <= idle_w:
        seconds = max(seconds, BELOW_S)
    capped = schedule(power_cap=cap_w)(step)
    found: dict[str, Any] = measure(ring, capped, seconds)
    report = capped.report()
    best = interpolate(points, found["mean_w"])
    return {
        "cap_w": cap_w,
        **(
            {"below_idle": f"the GPU draws {idle_w:.0f} W without work: no pause holds this cap"}
            if cap_w <= idle_w
            else {}
        ),
        "mean_off_pct": 100 * (found["mean_w"] / cap_w - 1),
        "worst_window_off_pct": 100 * (found["worst_window_w"] / cap_w - 1),
        "first_worst_window_off_pct": 100 * (found["first_worst_window_w"] / cap_w - 1),
        "first_mean_off_pct": 100 * (found["first_mean_w"] / cap_w - 1),
        "of_best_fixed_duty_pct": None if best is None else 100 * found["calls_per_s"] / best,
        "reported_mean_w": report.mean_w,
        "reported_peak_w": report.peak_w,
        "reported_slowdown": report.slowdown,
        "pauses_per_s": report.waits / seconds,
        "notes": list(report.notes),
        **found,
    }


def in_stream_row(ring: Ring, step: Step, seconds: float) -> dict[str, Any]:
    """For comparison: the same thread puts waits of one warp into the program's own stream."""

    def make_kernel(device: int) -> PauseKernel:
        kernel = PauseKernel(device)
        kernel._stream, kernel._arguments[3].value = ctypes.c_void_p(0), 1
        kernel._grid = tuple(ctypes.c_uint(n) for n in (1, 1, 1, 1, 1, 1, 0))
        return kernel

    kernel, stopped = make_kernel(0), threading.Event()

    def launch() -> None:
        kernel.make_current()
        while not stopped.wait(0.002):
            kernel.launch()

    kernel.set_limits(busy_s=0.05, longest_s=0.5)
    kernel.set_ratio(0.4 / 0.6)
    thread = threading.Thread(target=launch)
    thread.start()
    found = measure(ring, step, 0.55 * seconds)
    stopped.set()
    thread.join()
    kernel.set_ratio(0.0)
    return found


def load_part(part: str, rows: Rows) -> None:
    get_loop().stop()
    control_loop._loop = None  # what was learnt of another load is forgotten
    name, make = LOADS[part]
    step = tiny() if QUICK else make()
    t0 = time.time()
    for _ in range(EVERY):
        step()
    synchronize()
    print(f"  {name}: built and warm after {time.time() - t0:.1f} s", file=sys.stderr)
    ring, seconds = Ring(), 1.2 if QUICK else 3.2
    try:
        time.sleep(1.0)
        idle_w = mean_of(ring.between(time.time() - 0.5, time.time() - 0.05))  # with a context
        rows.rows[f"{name} idle"] = {"mean_w": idle_w}
        free = rows.add(f"{name} free", 3, lambda: measure(ring, step, seconds / 2))
        if free is None:
            return
        # The first cap of the process is cold; its throughput is judged when the fixed duties are known.
        first = rows.add(
            f"{name} at {SHARES[0]}",
            seconds,
            lambda: capped_row(ring, step, SHARES[0] * free["mean_w"], seconds, [], idle_w),
        )
        time.sleep(1.0)
        points = [(free["mean_w"], free["calls_per_s"])]
        pacer = gpu_pacer.make_pacer(0 if torch.cuda.is_available() else -1)
        for duty in DUTIES:
            pacer.obey(PaceCommand((1 - duty) / duty, max(SLICE_S, FASTEST_S * duty)))
            found = rows.add(f"{name} fixed duty {duty}", 2.5, lambda: measure(ring, step, 0.55 * seconds))
            if found is not None:
                points.append((found["mean_w"], found["calls_per_s"]))
        pacer.obey(PaceCommand())
        if torch.cuda.is_available() and rows.end - time.monotonic() > ROOMY_S:
            rows.add(f"{name} waits in its stream, duty 0.6", 2.5, lambda: in_stream_row(ring, step, seconds))
        if first is not None and (best := interpolate(points, first["mean_w"])):
            first["of_best_fixed_duty_pct"] = 100 * first["calls_per_s"] / best
        for share in SHARES[1:]:
            cap_w = share * free["mean_w"]
            rows.add(
                f"{name} at {share}",
                seconds if cap_w > idle_w else BELOW_S,
                lambda cap_w=cap_w: capped_row(ring, step, cap_w, seconds, points, idle_w),
            )
            time.sleep(1.0)
    finally:
        ring.close()


def overhead_part(rows: Rows) -> None:
    ring, block_s, turns = Ring(), 0.3 if QUICK else 0.8, 2 if QUICK else 8

    def timed(step: Step, steps: int) -> float:
        synchronize()
        t0 = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        return (time.perf_counter() - t0) / steps

    def row(make: Callable[[], Step]) -> dict[str, Any]:
        step = tiny() if QUICK else make()
        for _ in range(5):
            step()
        steps = max(round(block_s / timed(step, 5)), 1)
        begin = time.time()
        while time.time() - begin < 0.8:
            step()
        synchronize()
        free = ring.between(begin + 0.3, time.time() - 0.05)
        found = {"free_w": mean_of(free), "cap_w": worst_window(free), "waits": 1}
        for _ in range(TRIES):  # a host that became faster since then reaches the cap: then that says nothing
            if not found["waits"]:
                break
            cap_w = ABOVE * found["cap_w"]
            found |= {"cap_w": cap_w, **in_turns(step, schedule(power_cap=cap_w)(step), steps)}
        return found

    def in_turns(step: Step, capped: Any, steps: int) -> dict[str, Any]:
        times: dict[str, list[float]] = {"plain": [], "capped": []}
        for turn in range(turns):
            for which in ("plain", "capped") if turn % 2 else ("capped", "plain"):
                times[which].append(timed(step if which == "plain" else capped, steps))
                if which == "capped":
                    time.sleep(0.6)  # the cap lingers half a second after its last call
        ratios = [c / p for p, c in zip(times["plain"], times["capped"], strict=True)]
        report = capped.report()
        return {
            "plain_ms": 1e3 * st.median(times["plain"]),
            "over_pct": 100 * (st.median(times["capped"]) / st.median(times["plain"]) - 1),
            "fastest_over_pct": 100 * (min(times["capped"]) / min(times["plain"]) - 1),
            "each_pct": [round(100 * (r - 1), 2) for r in ratios],
            "waits": report.waits,
            "peak_w": report.peak_w,
        }

    try:
        for name, make in UNREACHED.items():
            rows.add(f"{name} under a cap that is not reached", 16, lambda make=make: row(make))
    finally:
        ring.close()


def node_worker(cap_w: float, seconds: float) -> None:
    """One of two processes of GEMMs under the node's cap."""
    n = 64 if QUICK else 4096
    device, dtype = ("cpu", torch.float32) if QUICK else ("cuda", torch.bfloat16)
    a = torch.randn(n, n, device=device, dtype=dtype)
    capped = schedule(power_cap=f"node:{cap_w:g}W")(lambda: [torch.mm(a, a) for _ in range(20)])
    rate, *_ = run_load(capped, seconds)
    print(json.dumps({"calls_per_s": rate}))


def node_part(rows: Rows) -> None:
    ring, cap_w, seconds = Ring(), 450.0, 2.0 if QUICK else 7.0

    def row() -> dict[str, Any]:
        call = [sys.executable, __file__, os.devnull, "--worker", str(cap_w), "--budget-s", str(seconds)]
        call += ["--quick"] if QUICK else []
        workers = [subprocess.Popen(call, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        outs = [json.loads(w.communicate(timeout=60)[0].splitlines()[-1]) for w in workers]
        end = time.time() - 1.0
        samples = ring.between(end - seconds / 2, end)
        return {
            "cap_w": cap_w,
            "mean_off_pct": 100 * (mean_of(samples) / cap_w - 1),
            "worst_window_off_pct": 100 * (worst_window(samples) / cap_w - 1),
            "calls_per_s": [o["calls_per_s"] for o in outs],
        }

    try:
        rows.add("two processes on one GPU, 450 W", seconds + 8, row)
    finally:
        ring.close()


PARTS = ("overhead", "vit", "moe", "decode", "gpt2", "bert", "node")


def run_part(part: str, budget_s: float) -> None:
    """In a process of its own; the rows go to stdout."""
    rows = Rows(budget_s)
    try:
        for each in part.split(","):
            if each in LOADS:
                load_part(each, rows)
            else:
                {"overhead": overhead_part, "node": node_part}[each](rows)
    finally:
        print(json.dumps(rows.rows), flush=True)
        get_loop().stop()


def main() -> None:
    global QUICK  # noqa: PLW0603  (a script's own switch)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--together", action="store_true", help="all parts in one process, which takes less time")
    args = parser.parse_args()
    QUICK = args.quick
    if args.worker:
        node_worker(args.worker, args.budget_s)
    elif args.part:
        run_part(args.part, args.budget_s)
    else:
        parts = [args.only] if args.together else args.only.split(",")
        run_all(args.out, parts, args.budget_s)


def run_all(out: Path, parts: list[str], budget_s: float) -> None:
    end = time.monotonic() + budget_s
    rows: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    rows["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    rows["torch"] = torch.__version__
    for part in parts:
        left_s = end - time.monotonic()
        if left_s < 12:
            print(f"{part}: no time left", flush=True)
            continue
        print(part, flush=True)
        call = [sys.executable, __file__, os.devnull, "--part", part, "--budget-s", str(left_s - 8)]
        call += ["--quick"] if QUICK else []
        try:
            done = subprocess.run(call, stdout=subprocess.PIPE, text=True, timeout=left_s + 5, check=False)
            rows |= json.loads(done.stdout.strip().splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, ValueError) as exc:
            print(f"{part} failed: {type(exc).__name__}: {exc}", flush=True)
        write_result(out, rows)


if __name__ == "__main__":
    main()
