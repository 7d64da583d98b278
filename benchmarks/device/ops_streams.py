"""Streams, copies, prefetch, mixtures and spectral convolutions on the GPU at hand: whether they do what the docs say.

    PYTHONPATH=src:.carry/site python benchmarks/device/ops_streams.py OUT.json
        [--budget-s 60] [--only SECTION ...] [--quick]

Sections: overlap (copy beside compute: wall against sum), pool (a pinned block comes back only after its copy), prefetch
(against plain copies and pin_memory + non_blocking; and "staging": what a pinned block takes, and filling it, here and on
a new thread), moe (grouped against one launch per expert: seconds, joules, numbers), spectral (conv2d against Fourier
transforms for kernels of 3 to 31: joules, and whether the cost model picked the cheaper), and last, since a process that
has used the profiler launches slower ever after: names (which id a trace has for a named stream), step (the example on
three streams). Joules by `tessera.monitor`, CUDA graphs where a call can be one. `--quick` is tiny, and runs on a CPU
too. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics as st
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from ops_restart import replace_result
from tessera import event, memcpy, monitor, op, profile, stream
from tessera.profile import kineto_collector as collector
from tessera.timeline import stream_names

Row = dict[str, Any]
Step = Callable[[], Any]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if CUDA else "cpu")
HALF = torch.bfloat16 if CUDA else torch.float32
SETTLE_S, MEASURED_S, GRAPH_S, MAX_COPIES = 0.15, 0.28, 0.004, 100


class Report:
    """Rows to a file as they come, and to the screen at the end."""

    def __init__(self, path: Path, budget_s: float, quick: bool) -> None:
        self.path, self.quick = path, quick
        self.end_s = time.perf_counter() + budget_s
        self.reserve_s = 0.0  # kept for the sections to come
        gpu = torch.cuda.get_device_name() if CUDA else "none (CPU)"
        self.data: Row = {
            "about": {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version(), "quick": quick,
                      "budget_s": budget_s},
            "rows": [], "skipped": [], "errors": [],
        }  # fmt: skip
        self._open: list[tuple[Row, str, Any, int]] = []

    def left(self, wanted_s: float, what: str) -> bool:
        """Whether there is time for something; else it is noted as skipped."""
        if time.perf_counter() + wanted_s + self.reserve_s < self.end_s:
            return True
        self.data["skipped"].append(what)
        return False

    def add(self, section: str, row: Row) -> None:
        self.data["rows"].append({"section": section} | row if "section" not in row else row)
        self.save()

    def joules(self, row: Row, prefix: str, found: tuple[Row, Any, int]) -> None:
        """Times now, and joules when the section ends: the sensor lags, and nobody should wait for it."""
        row |= {f"{prefix}_{k}": v for k, v in found[0].items()}
        self._open.append((row, prefix, *found[1:]))

    def settle(self) -> None:
        for row, prefix, scope, n in self._open:
            try:
                row[f"{prefix}_J"], row[f"{prefix}_J_error"] = scope.energy.joules / n, scope.energy.error_j / n
            except Exception as exc:  # noqa: BLE001 - a sensor that fails must not cost the times
                row[f"{prefix}_J_why"] = str(exc).splitlines()[0]
        self._open.clear()
        self.save()

    def save(self) -> None:
        replace_result(self.path, self.data)


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def seconds_of(fn: Step, times: int = 5) -> float:
    """The median wall time of a call, device included."""
    fn()
    took = []
    for _ in range(times):
        wait()
        t0 = time.perf_counter()
        fn()
        wait()
        took.append(time.perf_counter() - t0)
    return st.median(took)


def replayed(fn: Step) -> tuple[Step, int]:
    """The call as a CUDA graph of some milliseconds, and how often it is in there; 0 where it cannot be one."""
    if not CUDA:
        return fn, 0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    copies = min(max(round(GRAPH_S / seconds_of(fn, 3)), 1), MAX_COPIES)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the monitor's thread is no part of it
            for _ in range(copies):
                fn()
    except RuntimeError:  # something in it waits for the host
        wait()
        return fn, 0
    return graph.replay, copies


def steady(fn: Step, quick: bool, graph: bool = True) -> tuple[Row, Any, int]:
    """Milliseconds of a call in steady state, and the closed energy scope over `n` of them."""
    run, copies = replayed(fn) if graph else (fn, 0)
    each_s = seconds_of(run, 3)
    settle_s, measured_s = (0.0, 0.002) if quick else (SETTLE_S, MEASURED_S)
    for _ in range(int(settle_s / each_s)):
        run()
    n = max(2, int(measured_s / each_s))
    begin, end = event.create(timing=True), event.create(timing=True)
    with monitor.energy_scope() as scope:
        begin.record()
        for _ in range(n):
            run()
        end.record()
    calls = n * max(copies, 1)
    return {"ms": begin.elapsed_s(end) / calls * 1e3, "graph": copies > 0}, scope, calls


def rand(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


# -- names -------------------------------------------------------------------------------------------------------------


def names(report: Report) -> None:
    """A kernel that tells each stream from the others, in a session, and which name its lane got."""
    made = {name: stream.create(name=name, device=DEVICE) for name in ("h2d", "compute", "reduce")}
    x = rand(1 << 20, dtype=torch.float32)
    kinds: dict[str, Step] = {
        "h2d": lambda: torch.sin(x),
        "compute": lambda: torch.erfinv(x),
        "reduce": lambda: x.cumsum(0),
    }
    told = {"h2d": "aten::sin", "compute": "aten::erfinv", "reduce": "aten::cumsum"}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile.session(path=Path(folder) / "names.tessera", exporters=[profile.chrome(trace)]) as session:
            for name, s in made.items():
                with stream.on(s, x):
                    kinds[name]()
        timeline = session.timeline()
        lanes = [e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "thread_name"]
    for name, s in made.items():
        rows = [r for r in timeline.records() if r.kind == "kernel" and r.op == told[name]]
        seen = {r.stream_id for r in rows}
        label = stream_names.label(timeline.meta, 0, next(iter(seen)), None) if len(seen) == 1 else None
        ids = {way.__name__: way(s.handle) if s.handle else None for way in (collector.by_cupti, collector.by_driver)}
        report.add("names", {
            "name": name, "trace_stream": sorted(seen), **ids, "label": label,
            "right": bool(label and label.startswith(f"{name} (stream")) if CUDA else None,
            "in_chrome": any(text.startswith(f"{name} (stream") for text in lanes),
        })  # fmt: skip


# -- the whole step -----------------------------------------------------------------------------------------------------


def step(report: Report) -> None:
    """examples/three_streams.py as it stands: which lanes its trace has, and whether it learnt."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module("three_streams")
    sizes = ["--batch", "2", "--length", "16"] if report.quick else ["--batch", "16", "--length", "1024"]
    with tempfile.TemporaryDirectory() as folder:
        losses = example.main(["--folder", folder, "--steps", "8", "--device", DEVICE.type, *sizes])
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        exports = sorted(p.name for p in Path(folder).iterdir())
    lanes = sorted({e["args"]["name"] for e in events if e["name"] == "thread_name" and "(stream" in e["args"]["name"]})
    report.add("step", {"lanes": lanes, "losses": losses, "learns": losses[-1] < losses[0], "exports": exports})


# -- overlap -----------------------------------------------------------------------------------------------------------


def overlap(report: Report) -> None:
    """A copy and products at once, and how much of the shorter one is hidden."""
    n, size = (64, 1 << 12) if report.quick else (8192, 256 << 20)
    a, b = rand(n, n), rand(n, n)
    dst = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    sources = {"pinned": memcpy.empty_pinned(size, torch.uint8), "pageable": torch.empty(size, dtype=torch.uint8)}
    copying, working = stream.create(name="h2d", device=DEVICE), stream.create(name="compute", device=DEVICE)

    def compute() -> None:
        for _ in range(4):
            op.matmul(a, b, stream=working)

    for kind, src in sources.items():
        if not report.left(1.0, f"overlap {kind}"):
            continue
        src.zero_()

        def copy(src: torch.Tensor = src) -> event.Event:
            return memcpy.async_(dst=dst, src=src, stream=copying)

        def both(copy: Step = copy) -> None:
            copy()
            compute()

        alone = [seconds_of(copy), seconds_of(compute)]
        together = seconds_of(both)
        report.add("overlap", {
            "host_memory": kind, "bytes": size, "copy_ms": alone[0] * 1e3, "compute_ms": alone[1] * 1e3,
            "together_ms": together * 1e3, "hidden": (sum(alone) - together) / min(alone),
            "copy_GBps": size / alone[0] * 1e-9,
        })  # fmt: skip


# -- the pool of pinned memory -----------------------------------------------------------------------------------------


def pool(report: Report) -> None:
    """A block whose copy waits behind a sleeping kernel must not be handed out again."""
    size = 1 << 12 if report.quick else 32 << 20
    s = stream.create(name="sleepy", device=DEVICE)
    dst = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    src = memcpy.empty_pinned(size, torch.uint8).fill_(7)
    first = src.data_ptr()
    if CUDA:
        with torch.cuda.stream(s.raw):
            torch.cuda._sleep(600_000_000)  # cycles: 0.3 s at 1.98 GHz
    done = memcpy.async_(dst=dst, src=src, stream=s)
    pending = not done.query()
    del src
    early = [memcpy.empty_pinned(size, torch.uint8).fill_(9) for _ in range(3)]
    reused_early = first in [t.data_ptr() for t in early]
    done.synchronize()
    right = bool((dst == 7).all())
    back = memcpy.empty_pinned(size, torch.uint8)
    memcpy.async_(dst=back, src=dst, stream=s).synchronize()  # and lets go of what is done
    right &= bool((back == 7).all())
    del early
    late = [memcpy.empty_pinned(size, torch.uint8) for _ in range(6)]
    report.add("pool", {
        "was_pending": pending, "reused_while_pending": reused_early if CUDA else None, "copied_right": right,
        "reused_afterwards": first in [t.data_ptr() for t in late], **{k: getattr(memcpy.stats(), k) for k in
        ("taken", "reused", "peak_bytes", "over_limit")},
    })  # fmt: skip


# -- prefetch ----------------------------------------------------------------------------------------------------------


class Batches(torch.utils.data.Dataset[Any]):
    """Whole batches that lie in memory: what is compared is the copying."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        self.made = [torch.randn(shape) for _ in range(4)]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i >= self.count:
            raise IndexError
        return self.made[i % 4], i


def prefetch(report: Report) -> None:
    """Milliseconds a batch, with as much work on the device as a batch takes to copy."""
    count, shape = (4, (2, 3, 8, 8)) if report.quick else (40, (128, 3, 224, 224))
    data = Batches(count, shape)
    n = 32 if report.quick else 4096
    a, b = rand(n, n), rand(n, n)
    loader = torch.utils.data.DataLoader

    def plain() -> Iterator[Any]:
        return ((x.to(DEVICE), i) for x, i in data)

    def pinned(workers: int) -> Iterator[Any]:
        made = loader(data, batch_size=None, pin_memory=CUDA, num_workers=workers, timeout=15 if workers else 0)
        return ((x.to(DEVICE, non_blocking=True), i) for x, i in made)

    staging(report, "before any DataLoader", data.made[0])
    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "compute only": lambda: ((None, i) for i in range(count)),
        "plain .to": plain,
        "DataLoader pin_memory, non_blocking, 0 workers": lambda: pinned(0),
        "memcpy.prefetch before DataLoader workers": lambda: memcpy.prefetch(data, device=DEVICE),
        "memcpy.prefetch over DataLoader pin_memory, 0 workers": lambda: memcpy.prefetch(
            loader(data, batch_size=None, pin_memory=CUDA), device=DEVICE
        ),
        "DataLoader pin_memory, non_blocking, 2 workers": lambda: pinned(0 if report.quick else 2),
        "memcpy.prefetch": lambda: memcpy.prefetch(data, device=DEVICE),
        "memcpy.prefetch over DataLoader, 2 workers": lambda: memcpy.prefetch(
            loader(data, batch_size=None, num_workers=0 if report.quick else 2, timeout=0 if report.quick else 15),
            device=DEVICE,
        ),
    }
    for name, way in ways.items():
        if not report.left(2.5, f"prefetch {name}"):
            continue
        before, made_before = memcpy.stats(), blocks_made()
        try:
            took, order, last = pass_over(way, a, b)
        except Exception as exc:  # noqa: BLE001 - workers may lack shared memory there
            report.data["errors"].append(f"prefetch {name}: {type(exc).__name__}: {exc}")
            continue
        wanted = data.made[(count - 1) % 4] * 0.5
        report.add("prefetch", {
            "way": name, "ms_per_batch": took / count * 1e3, "in_order": order == list(range(count)),
            "right": None if last is None else torch.equal(last.cpu(), wanted), "batch_bytes": wanted.nbytes,
            "staged_per_batch": (memcpy.stats().taken - before.taken) / (2 * count),  # of both passes
            "reused_per_batch": (memcpy.stats().reused - before.reused) / (2 * count),
            **{k: None if v is None else v - made_before[k] for k, v in blocks_made().items()},
        })  # fmt: skip
    staging(report, "after DataLoader workers", data.made[0])


def blocks_made() -> Row:
    """Pinned blocks torch has asked the driver for, and the milliseconds of it; None where torch does not count."""
    known = torch.cuda.host_memory_stats() if CUDA and hasattr(torch.cuda, "host_memory_stats") else {}
    us = known.get("host_alloc_time.total")
    return {"driver_blocks": known.get("num_host_alloc"), "driver_ms": None if us is None else us * 1e-3}


def staging(report: Report, when: str, batch: torch.Tensor) -> None:
    """What filling pinned memory takes on this thread and on a new one, and what a new block takes.

    A thread that `DataLoader(pin_memory=True, num_workers=2)` starts sets torch's threads to 1 for all threads after it.
    """
    if not report.left(1.5, f"staging {when}"):
        return
    before, t0 = blocks_made()["driver_blocks"], time.perf_counter()
    dst = torch.empty_like(batch, pin_memory=CUDA)
    block_s, after = time.perf_counter() - t0, blocks_made()["driver_blocks"]

    def fill() -> tuple[float, int]:
        return seconds_of(lambda: dst.copy_(batch)), torch.get_num_threads()

    here_s, here_threads = fill()
    with ThreadPoolExecutor(1) as one:
        there_s, there_threads = one.submit(fill).result()
    report.add("staging", {
        "when": when, "bytes": batch.nbytes, "block_ms": block_s * 1e3, "block_is_new": None if before is None else after > before,
        "fill_ms": here_s * 1e3, "fill_on_a_thread_ms": there_s * 1e3, "threads": here_threads,
        "threads_on_a_thread": there_threads, "is_pinned_us": seconds_of(batch.is_pinned) * 1e6,
    })  # fmt: skip


def pass_over(
    way: Callable[[], Iterator[Any]], a: torch.Tensor, b: torch.Tensor
) -> tuple[float, list[int], torch.Tensor | None]:
    """The second of two passes (the first makes pinned blocks and starts libraries), its order and last result."""
    took, order, last = 0.0, [], None
    for _ in range(2):
        order = []
        wait()
        t0 = time.perf_counter()
        for x, i in way():
            last = None if x is None else x * 0.5
            for _ in range(8):
                torch.mm(a, b)
            order.append(i)
        wait()
        took = time.perf_counter() - t0
    return took, order, last


# -- mixtures ----------------------------------------------------------------------------------------------------------


def moe(report: Report) -> None:
    """Grouped against one by one: the same numbers, empty experts too, and what each takes."""
    shapes = [(8192, 8, 2048, 4096, 2), (8192, 64, 1024, 512, 6), (256, 8, 2048, 4096, 2)]
    for shape in [(64, 4, 32, 16, 2)] if report.quick else shapes:
        if not report.left(3.0, f"moe {shape}"):
            continue
        try:
            one_mixture(report, *shape)
        except Exception as exc:  # noqa: BLE001 - one shape must not cost the others
            report.data["errors"].append(f"moe {shape}: {type(exc).__name__}: {exc}")


def one_mixture(report: Report, tokens: int, experts: int, width: int, hidden: int, top_k: int) -> None:
    module = importlib.import_module("tessera.op.moe")
    can_group = module.can_group
    x = rand(tokens, width).requires_grad_()
    w1, w3 = (rand(experts, hidden, width).mul_(width**-0.5).requires_grad_() for _ in range(2))
    w2 = rand(experts, width, hidden).mul_(hidden**-0.5).requires_grad_()
    logits = torch.randn(tokens, experts, device=DEVICE)
    logits[:, 1] = -1e4  # an expert without a token
    seed = torch.randn_like(x)

    def forward() -> torch.Tensor:
        return op.moe(x, logits, w1, w2, w3, top_k=top_k)

    def backward() -> Any:
        return torch.autograd.grad(forward(), (x, w1, w2, w3), seed)

    row: Row = {"section": "moe", "tokens": tokens, "experts": experts, "width": width, "hidden": hidden,
                "top_k": top_k, "grouped": can_group(x, w1)}  # fmt: skip
    found = {}
    for way in ("grouped", "loop"):
        module.can_group = can_group if way == "grouped" else lambda rows, w: False
        try:
            found[way] = [forward().detach(), *backward()]
            with torch.no_grad():
                report.joules(row, f"{way}_forward", steady(forward, report.quick, graph=False))
            report.joules(row, f"{way}_both", steady(backward, report.quick, graph=False))
        finally:
            module.can_group = can_group
    both = list(zip(found["grouped"], found["loop"], strict=True))
    row["relative_errors"] = [float((g.float() - one.float()).norm() / one.float().norm()) for g, one in both]
    row["empty_expert_gradient"] = float(found["grouped"][2][1].float().abs().max())
    report.add("moe", row)


# -- spectral convolution ----------------------------------------------------------------------------------------------


def spectral(report: Report) -> None:
    """Both ways for growing kernels, and what the model said."""
    cases = (
        [((2, 4, 12, 12), 4, 4, "fp32"), ((2, 4, 12, 12), 4, 1, "fp32")]
        if report.quick
        else [
            ((8, 256, 64, 64), 256, 256, "bf16"),
            ((16, 64, 64, 64), 64, 1, "bf16"),
            ((8, 256, 64, 64), 256, 256, "fp32"),
            ((16, 64, 64, 64), 64, 1, "fp32"),
            ((8, 32, 224, 224), 32, 1, "bf16"),
        ]
    )
    for k in (3, 31, 7, 15, 5, 11, 21):  # the ends first, should time run out
        for shape, out, groups, dtype in cases:
            if k > shape[-1] or not report.left(1.6, f"spectral k={k} {shape} groups={groups} {dtype}"):
                continue
            try:
                one_convolution(report, k, shape, out, groups, dtype)
            except Exception as exc:  # noqa: BLE001 - one shape must not cost the others
                report.data["errors"].append(f"spectral k={k} {shape} {dtype}: {type(exc).__name__}: {exc}")


def one_convolution(report: Report, k: int, shape: tuple[int, ...], out: int, groups: int, dtype: str) -> None:
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    x, w = rand(*shape, dtype=kind), rand(out, shape[1] // groups, k, k, dtype=kind)
    options = {"padding": k // 2, "groups": groups}
    said = op.spectral_wins(shape, tuple(w.shape), on="h200", dtype=dtype, **options)
    row: Row = {"section": "spectral", "k": k, "x": shape, "groups": groups, "dtype": dtype, "model_wins": said.wins,
                "model_direct_ms": said.direct_s * 1e3, "model_spectral_ms": said.spectral_s * 1e3,
                "model_direct_J": said.direct_j, "model_spectral_J": said.spectral_j}  # fmt: skip
    with torch.no_grad():
        few = x.numel() * w.numel() // shape[1] < 1 << 34  # products: fp64 convolutions are slow
        exact = F.conv2d(x.double(), w.double(), **options) if few else None
        if exact is not None:
            for name, fn in (("direct", F.conv2d), ("spectral", op.spectral_conv2d)):
                row[f"{name}_error"] = float((fn(x, w, **options).double() - exact).norm() / exact.norm())
            del exact
        report.joules(row, "direct", steady(lambda: F.conv2d(x, w, **options), report.quick))
        report.joules(row, "spectral", steady(lambda: op.spectral_conv2d(x, w, **options), report.quick))
    report.add("spectral", row)


# -- all of it ---------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Report], None]] = {
    "overlap": overlap, "pool": pool, "prefetch": prefetch, "moe": moe, "spectral": spectral, "names": names, "step": step,
}  # fmt: skip
LEAST_S = {"names": 6.0, "step": 5.0, "overlap": 2.0, "pool": 1.0, "prefetch": 7.0, "moe": 4.0, "spectral": 3.0}


def verdicts(rows: list[Row]) -> Iterator[str]:
    """What the rows come to."""
    by = {name: [r for r in rows if r["section"] == name] for name in SECTIONS}
    for r in by["names"]:
        yield f"names     {r['name']:8} trace {r['trace_stream']} cupti {r['by_cupti']} driver {r['by_driver']} right {r['right']}"
    for r in by["step"]:
        yield f"step      lanes {r['lanes']}, learns {r['learns']}, exports {r['exports']}"
    for r in by["overlap"]:
        yield (f"overlap   {r['host_memory']:9} copy {r['copy_ms']:.2f} ms, compute {r['compute_ms']:.2f}, together "
               f"{r['together_ms']:.2f}: {r['hidden']:.0%} of the shorter hidden, {r['copy_GBps']:.0f} GB/s")  # fmt: skip
    for r in by["pool"]:
        yield f"pool      pending {r['was_pending']}, reused meanwhile {r['reused_while_pending']}, later {r['reused_afterwards']}"
    for r in by["prefetch"]:
        yield f"prefetch  {r['way']:48} {r['ms_per_batch']:8.3f} ms a batch, in order {r['in_order']}, right {r['right']}, {r.get('driver_blocks')} blocks made"
    for r in (r for r in rows if r["section"] == "staging"):
        yield (f"staging   {r['when']:24} block {r['block_ms']:.2f} ms (new: {r['block_is_new']}), fill {r['fill_ms']:.2f} ({r['threads']} threads), "
               f"on a new thread {r['fill_on_a_thread_ms']:.2f} ({r['threads_on_a_thread']} threads)")  # fmt: skip
    for r in by["moe"]:
        yield (f"moe       {r['tokens']}x{r['width']} E={r['experts']} top {r['top_k']}: forward "
               f"{pair(r, 'grouped_forward', 'loop_forward')}, both ways {pair(r, 'grouped_both', 'loop_both')} "
               f"(grouped | loop), errors {[f'{e:.1e}' for e in r.get('relative_errors', [])]}, "
               f"empty expert's gradient {r.get('empty_expert_gradient')}")  # fmt: skip
    agreed = []
    for r in by["spectral"]:
        known = r.get("direct_J") is not None and r.get("spectral_J") is not None
        wins = r["spectral_J"] < r["direct_J"] if known else None
        agreed += [wins == r["model_wins"]] if known else []
        yield (f"spectral  k={r['k']:2} {r['dtype']} {r['x']} groups {r['groups']}: {pair(r, 'direct', 'spectral')} "
               f"(direct | spectral), model {r['model_direct_ms']:.3f} | {r['model_spectral_ms']:.3f} ms, model says "
               f"{r['model_wins']}, measured {wins}")  # fmt: skip
    if agreed:
        yield f"spectral  the model picked the way of fewer joules in {sum(agreed)} of {len(agreed)}"


def pair(row: Row, *names: str) -> str:
    def one(name: str) -> str:
        joules = row.get(f"{name}_J")
        ms = row.get(f"{name}_ms")
        return "-" if ms is None else f"{ms:.3f} ms" + (f" {joules * 1e3:.2f} mJ" if joules is not None else "")

    return " | ".join(map(one, names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", choices=sorted(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if not CUDA and not args.quick:
        parser.error("no CUDA device here; --quick runs the logic on a CPU")
    torch.manual_seed(0)
    report = Report(args.out, args.budget_s, args.quick)
    chosen = [name for name in SECTIONS if name in args.only]
    for i, name in enumerate(chosen):
        report.reserve_s = 0.0 if args.quick else sum(LEAST_S[later] for later in chosen[i + 1 :])
        if not report.left(0.0 if args.quick else LEAST_S[name], name):
            continue
        t0 = time.perf_counter()
        try:
            SECTIONS[name](report)
        except Exception as exc:  # noqa: BLE001 - one section must not cost the others
            traceback.print_exc(limit=-4)
            report.data["errors"].append(f"{name}: {type(exc).__name__}: {exc}")
        report.settle()
        report.data["about"][f"{name}_s"] = time.perf_counter() - t0
        if CUDA:
            torch.cuda.empty_cache()
    report.save()
    print("\n".join(verdicts(report.data["rows"])))
    for what in ("skipped", "errors"):
        if report.data[what]:
            print(f"{what}: " + "; ".join(report.data[what]))
    return 1 if report.data["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
