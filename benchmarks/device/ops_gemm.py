"""op.matmul, gemm, linear and conv2d against torch's best path: GPU time and joules; numerics of the Triton kernels.

    PYTHONPATH=src:.carry/site python benchmarks/device/ops_gemm.py OUT.json
        [--budget-s 200] [--only gemm unaligned fused numerics tiles conv] [--quick]

Each way of a row is captured into a CUDA graph and replayed; ways take turns, there and back, so that drift falls on
all; joules from the driver's sample ring through `tessera.monitor`. A row whose way fails keeps the error and the others.
OUT.json is rewritten after each row. A kernel that kills the CUDA context costs its row: the script starts anew. `--quick`
runs tiny shapes wherever it is, on a CPU without joules. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics as st
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from ops_restart import again, dead, replace_result
from record_kernels import capture, quick_time
from record_models import figures, machine, nvml_state, steady, tidy
from tessera import op
from tessera.op import hints, padding
from tessera.op.tile import Tile

SETTLE_S, MEASURED_S, GRAPH_S, MAX_COPIES = 0.12, 0.25, 0.004, 200
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
Step = Callable[[], Any]
Row = dict[str, Any]


@dataclass
class Case:
    """One row: ways to compute the same, the first is what ours is held against; `ours` names the one that counts."""

    group: str
    name: str
    make: Callable[[], dict[str, Step]]
    ours: str = "op"
    turns: int = 2
    extra: Row = field(default_factory=dict)


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_(grad)


# -- the rows --------------------------------------------------------------------------------------------------------


def gemms(quick: bool) -> Iterator[Case]:
    sizes = [(s, s, s) for s in (512, 1024, 2048, 4096, 8192)] + [
        (1, 4096, 4096), (16, 4096, 4096), (64, 14336, 4096), (8192, 64, 4096), (8192, 768, 3072), (197, 3072, 768),
    ]  # fmt: skip
    stacks = [(96, 1024, 1024, 64), (8, 4096, 4096, 128), (384, 128, 64, 128), (64, 1024, 512, 2048)]
    if quick:
        sizes, stacks = [(16, 32, 8), (1, 8, 8)], [(2, 8, 8, 8)]
    for m, n, k in sizes:
        yield product_case(f"matmul {m}x{n}x{k}", lambda m=m, n=n, k=k: (rand(m, k), rand(k, n)))
    for b, m, n, k in stacks:
        yield product_case(f"matmul {b} of {m}x{n}x{k}", lambda b=b, m=m, n=n, k=k: (rand(b, m, k), rand(b, k, n)))
    s = 8 if quick else 2048
    yield product_case(f"matmul fp16 {s}", lambda: (rand(s, s, dtype=torch.float16), rand(s, s, dtype=torch.float16)))
    yield product_case(f"matmul fp32 {s}", lambda: (rand(s, s, dtype=torch.float32), rand(s, s, dtype=torch.float32)))
    m, n, k = (16, 8, 24) if quick else (8192, 3072, 768)

    def biased() -> dict[str, Step]:
        x, w, b = rand(m, k), rand(n, k), rand(n)
        return {"torch": lambda: F.linear(x, w, b), "op": lambda: op.linear(x, w, b)}

    def added() -> dict[str, Step]:
        x, w, c = rand(m, k), rand(k, n), rand(m, n)
        return {"torch": lambda: torch.addmm(c, x, w), "op": lambda: op.gemm(x, w, c)}

    yield Case("gemm", f"linear+bias {m}x{n}x{k}", biased)
    yield Case("gemm", f"gemm+c {m}x{n}x{k}", added)


def product_case(name: str, operands: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Case:
    def make() -> dict[str, Step]:
        a, b = operands()
        return {"torch": lambda: torch.matmul(a, b), "op": lambda: op.matmul(a, b)}

    return Case("gemm", name, make)


def unaligned(quick: bool) -> Iterator[Case]:
    shapes = [
        (8192, 50257, 768, False), (2048, 50257, 768, False), (256, 50257, 768, False), (4096, 30522, 768, True),
        (8192, 4097, 1023, True), (8192, 650, 650, False), (2048, 1001, 2048, True), (4096, 4096, 4095, False),
    ]  # fmt: skip
    for m, n, k, bias in [(16, 2051, 24, False), (8, 17, 9, True)] if quick else shapes:
        yield Case("unaligned", f"linear {m}x{n}x{k}{' +bias' if bias else ''}", linear_ways(m, n, k, bias))
    for m, n, k in [(16, 2051, 24)] if quick else [(8192, 50257, 768), (2048, 50257, 768), (4096, 4097, 1023)]:
        yield Case("unaligned", f"linear fwd+bwd {m}x{n}x{k}", both_passes(m, n, k))
    for m, n, k, layout in [(8, 16, 17, "nn")] if quick else [(8192, 768, 50257, "nn"), (50257, 768, 8192, "tn")]:
        yield Case("unaligned", f"matmul {layout} {m}x{n}x{k}", matrix_ways(m, n, k, layout))


def linear_ways(m: int, n: int, k: int, bias: bool) -> Callable[[], dict[str, Step]]:
    def make() -> dict[str, Step]:
        x, w, b = rand(m, k), rand(n, k), rand(n) if bias else None
        return {
            "torch": lambda: F.linear(x, w, b),
            "op": lambda: op.linear(x, w, b),
            "extents": lambda: padding.multiply_padded(x, w.t(), b),
        }

    return make


def matrix_ways(m: int, n: int, k: int, layout: str) -> Callable[[], dict[str, Step]]:
    def make() -> dict[str, Step]:
        a, b = rand(m, k) if layout == "nn" else rand(k, m).t(), rand(k, n)
        return {
            "torch": lambda: torch.matmul(a, b),
            "op": lambda: op.matmul(a, b),
            "extents": lambda: padding.multiply_padded(a, b),
        }

    return make


def both_passes(m: int, n: int, k: int) -> Callable[[], dict[str, Step]]:
    def make() -> dict[str, Step]:
        x, w, seed = rand(m, k, grad=True), rand(n, k, grad=True), rand(m, n)

        def way(fn: Step) -> Step:
            return lambda: torch.autograd.grad(fn(), (x, w), seed)

        return {"torch": way(lambda: F.linear(x, w)), "op": way(lambda: op.linear(x, w))}

    return make


ACTS = {"relu": torch.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}


def fused(quick: bool) -> Iterator[Case]:
    for m, n, k in [(16, 8, 24)] if quick else [(8192, 3072, 768), (2048, 14336, 4096), (16384, 1024, 256)]:
        for name in ("relu", "gelu_tanh", "gelu", "silu")[: 1 if quick else 4]:
            yield Case("fused", f"linear+{name} {m}x{n}x{k}", fused_ways(m, n, k, name))


def fused_ways(m: int, n: int, k: int, name: str) -> Callable[[], dict[str, Step]]:
    def make() -> dict[str, Step]:
        x, w, b, act = rand(m, k), rand(n, k), rand(n), ACTS[name]
        tile = (64, 64, 32) if not CUDA else (128, 256, 64)
        return {
            "torch": lambda: act(F.linear(x, w, b)),
            "op": lambda: op.linear(x, w, b, activation=name),
            "triton": lambda: op.linear(x, w, b, activation=name, tile_shape=tile),
        }

    return make


TILES = (((128, 256, 64), 3), ((128, 128, 64), 3), ((128, 128, 64), 4), ((256, 128, 64), 3), ((64, 128, 64), 4), ((128, 128, 32), 4))  # fmt: skip


def tiles(quick: bool) -> Iterator[Case]:
    for m, n, k in (
        [(16, 8, 24)] if quick else [(4096, 4096, 4096), (8192, 8192, 8192), (8192, 3072, 768), (256, 4096, 4096)]
    ):

        def make(m: int = m, n: int = n, k: int = k) -> dict[str, Step]:
            a, b = rand(m, k), rand(k, n)

            def way(shape: tuple[int, int, int], stages: int) -> Step:
                def run() -> Any:
                    with hints.use(hints.Hints(cp_async_depth=stages)):
                        return op.matmul(a, b, tile_shape=shape)

                return run

            ways = {f"{'x'.join(map(str, t))} s{s}": way(t, s) for t, s in TILES[: 1 if quick else None]}
            return {"torch": lambda: torch.matmul(a, b), **ways}

        yield Case("tiles", f"matmul {m}x{n}x{k}", make, ours="best tile", turns=1)


def convs(quick: bool) -> Iterator[Case]:
    shapes = [(64, 64, 56, 64, 3), (64, 256, 14, 256, 3), (64, 256, 56, 64, 1), (64, 3, 224, 64, 7)]
    for n, c, size, filters, taps in [(1, 3, 8, 4, 3)] if quick else shapes:

        def make(n: int = n, c: int = c, size: int = size, filters: int = filters, taps: int = taps) -> dict[str, Step]:
            last = torch.channels_last
            x, w = rand(n, c, size, size).to(memory_format=last), rand(filters, c, taps, taps).to(memory_format=last)
            pad = taps // 2
            shapes = ((64, 64, 32),) if not CUDA else ((128, 64, 64), (128, 128, 64), (64, 64, 32))
            ways: dict[str, Step] = {
                "torch": lambda: F.conv2d(x, w, padding=pad),
                "op": lambda: op.conv2d(x, w, padding=pad),
            }
            for t in shapes:
                ways["x".join(map(str, t))] = lambda t=t: op.conv2d(x, w, padding=pad, tile_shape=t)
            return ways

        yield Case("conv", f"conv2d {n}x{c}x{size}^2 by {filters}x{taps}^2", make, turns=1)


# -- measuring -------------------------------------------------------------------------------------------------------


class Way:
    """One way of a row on the GPU: its graph, and what was measured of it."""

    def __init__(self, fn: Step) -> None:
        fn()
        torch.cuda.synchronize()
        each = quick_time(fn)
        self.calls = min(max(math.ceil(GRAPH_S / each), 1), MAX_COPIES)
        self.graph = capture([fn], self.calls, keep=False)
        self.scopes: list[tuple[Any, int, Row]] = []

    def measure(self) -> None:
        each = quick_time(self.graph.replay)
        for _ in range(max(int(SETTLE_S / each), 1)):
            self.graph.replay()
        scope, n, state = steady(self.graph.replay, each, MEASURED_S, reads=1)
        self.scopes.append((scope, n * self.calls, state))

    def figures(self) -> Row:
        """Waits for the sensor; the mean over turns."""
        turns = [figures(scope, n, state) for scope, n, state in self.scopes]
        mean = {key: st.fmean(t[key] for t in turns) for key in ("ms", "J", "W", "J_error", "sm_mhz")}
        return mean | {"spread": max(t["ms"] for t in turns) / min(t["ms"] for t in turns) - 1.0}


class HostWay:
    """One way on a CPU: seconds alone."""

    def __init__(self, fn: Step) -> None:
        fn()
        self.fn, self.ms = fn, math.inf

    def measure(self) -> None:
        begin = time.perf_counter()
        self.fn()
        self.ms = min(self.ms, (time.perf_counter() - begin) * 1e3)

    def figures(self) -> Row:
        return {"ms": self.ms, "J": None}


def prepared(case: Case) -> tuple[Row, dict[str, Any]]:
    """The row, and its ways that could be made."""
    row: Row = {"group": case.group, "name": case.name, "ours": case.ours, "ways": {}}
    ways = {}
    with torch.set_grad_enabled("bwd" in case.name):
        for name, fn in case.make().items():
            try:
                ways[name] = Way(fn) if CUDA else HostWay(fn)
            except Exception as e:  # noqa: BLE001 - one way's failure must not cost the others
                row["ways"][name] = {"error": f"{type(e).__name__}: {str(e)[:300]}"}
    order = list(ways)
    for turn in range(case.turns):
        for name in order if turn % 2 == 0 else order[::-1]:
            if name not in ways:
                continue
            try:
                ways[name].measure()
            except Exception as e:  # noqa: BLE001
                row["ways"][name] = {"error": f"{type(e).__name__}: {str(e)[:300]}"}
                del ways[name]
    return row, ways


def finished(row: Row, ways: dict[str, Any]) -> Row:
    for name, way in ways.items():
        row["ways"][name] = way.figures()
    found = row["ways"]
    ours = row["ours"]
    if ours == "best tile":
        ours = min((n for n in found if n != "torch" and "ms" in found[n]), key=lambda n: found[n]["ms"], default="")
        row["ours"] = ours
    if "ms" in found.get(ours, {}) and "ms" in found.get("torch", {}):
        row["time_ratio"] = found[ours]["ms"] / found["torch"]["ms"]
        if found[ours].get("J"):
            row["joule_ratio"] = found[ours]["J"] / found["torch"]["J"]
    return row


# -- numerics --------------------------------------------------------------------------------------------------------


def numerics(quick: bool, deadline: float) -> Row:
    """Relative errors of the Triton kernels and of padding against float64, outputs filled with NaN first."""
    pick = random.Random(7)
    report: Row = {"matmul": [], "conv2d": [], "padding": [], "failed": [], "not_written": 0}
    rounds = 2 if quick else 20  # in turn, so that a deadline costs each kind some cases and none all of them
    for i in range(rounds):
        for j in range(3):
            guarded(report, "matmul", deadline, lambda i=i, j=j: matmul_error(pick, 3 * i + j, quick))
        guarded(report, "conv2d", deadline, lambda i=i: conv_error(pick, i, quick))
        guarded(report, "padding", deadline, lambda i=i: padding_error(pick, i, quick))
    for name in ("matmul", "conv2d", "padding"):
        errors = [e for e, _ in report[name]]
        report["not_written"] += sum(math.isnan(e) for e in errors)
        report[f"{name}_worst"] = max(report[name], default=None, key=lambda found: (math.isnan(found[0]), found[0]))
        report[f"{name}_cases"] = len(errors)
        del report[name]
    return report


def guarded(report: Row, name: str, deadline: float, fn: Callable[[], tuple[float, str]]) -> None:
    if time.monotonic() > deadline:
        report["stopped_early"] = True
        return
    try:
        report[name].append(fn())
    except Exception as e:  # noqa: BLE001
        report["failed"].append(f"{name}: {type(e).__name__}: {str(e)[:200]}")


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.detach().double() - true.detach()).norm() / true.detach().norm().clamp_min(1e-30))


def matmul_error(pick: random.Random, i: int, quick: bool) -> tuple[float, str]:
    top = 40 if quick else 600
    m, n, k = (pick.randint(1, top) * (16 if i % 3 == 0 and not quick else 1) for _ in range(3))
    if i % 3 == 1:
        m, n, k = m | 1, n | 1, k | 1
    batch, layout = pick.choice([1, 1, 3]), pick.choice(["nn", "nt", "tn"])
    a = rand(batch, k, m).mT if layout == "tn" else rand(batch, m, k)
    b = rand(batch, n, k).mT if layout == "nt" else rand(batch, k, n)
    # Compilations take a second: many tiles where rows are aligned, few where each shape is a pattern.
    even = i % 3 == 0
    shape = Tile(*pick.choice([(128, 128, 64), (64, 64, 32)])) if even or i % 9 == 1 else Tile(64, 64, 32)
    true = a.double() @ b.double()
    if not CUDA:
        return relative(op.matmul(a, b, tile_shape=shape), true), f"{m}x{n}x{k}"
    from tessera.op.kernels.matmul import launch_matmul

    out = torch.full((batch, m, n), math.nan, device=DEVICE, dtype=torch.bfloat16)
    launch_matmul(a, b, out, tile=shape, stages=3, warps=4)
    return relative(out, true), f"{batch} of {m}x{n}x{k} {layout} {shape}"


def conv_error(pick: random.Random, i: int, quick: bool) -> tuple[float, str]:
    groups, each = pick.choice([(1, 3), (1, 64), (2, 32), (1, 17)])
    filters, taps = groups * pick.choice([8, 40, 65]), pick.choice([1, 3])
    size = pick.randint(taps, 9 if quick else 40)
    options = {"stride": pick.choice([1, 2]), "padding": pick.choice([0, 1, 2]), "groups": groups}
    x, w, b = rand(2, groups * each, size, size + 3), rand(filters, each, taps, taps), rand(filters)
    true = F.conv2d(x.double(), w.double(), b.double() if not CUDA else None, **options)
    what = f"{tuple(x.shape)} by {tuple(w.shape)} {options}"
    if not CUDA:
        return relative(op.conv2d(x, w, b, **options, tile_shape=(64, 64, 32)), true), what
    from tessera.op.kernels.matmul import launch_conv

    out = torch.full((2, *true.shape[2:], filters), math.nan, device=DEVICE, dtype=torch.bfloat16)
    both = {key: (options[key],) * 2 for key in ("stride", "padding")}
    launch_conv(
        x.permute(0, 2, 3, 1).contiguous(), w.permute(0, 2, 3, 1).contiguous(), out, **both, dilation=(1, 1),
        groups=groups, tile=Tile(64, 64, 32), stages=3, warps=4,
    )  # fmt: skip
    return relative(out.permute(0, 3, 1, 2), true), what


def padding_error(pick: random.Random, i: int, quick: bool) -> tuple[float, str]:
    """The worst of the product and both its gradients."""
    top = 60 if quick else 3000
    m, n, k = (pick.randint(1, top) for _ in range(3))
    x, w, seed = rand(m, k, grad=True), rand(n, k, grad=True), rand(m, n)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    with padding.use("always"):
        found = op.linear(x, w)
        gradients = torch.autograd.grad(found, (x, w), seed)
    true = F.linear(*wide)
    trues = (true, *torch.autograd.grad(true, wide, seed.double()))
    return max(relative(f, t) for f, t in zip((found, *gradients), trues, strict=True)), f"{m}x{n}x{k}"


# -- all of it -------------------------------------------------------------------------------------------------------

GROUPS = {"gemm": gemms, "unaligned": unaligned, "fused": fused, "tiles": tiles, "conv": convs}
ORDER = ("gemm", "unaligned", "fused", "numerics", "tiles", "conv")


class Results:
    """Rows, written to a file after each."""

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, {"rows": [], "skipped": []}

    def save(self) -> None:
        replace_result(self.path, self.content)

    def has(self, case: Case) -> bool:
        """Whether a row was tried before this process began."""
        return any((row["group"], row["name"]) == (case.group, case.name) for row in self.content["rows"])


def run(args: argparse.Namespace, results: Results) -> None:
    begin = time.monotonic()
    deadline = begin + args.budget_s
    waiting: deque[tuple[Row, dict[str, Any]]] = deque()
    for group in ORDER:
        if args.only and group not in args.only:
            continue
        if group == "numerics":
            if "numerics" not in results.content:
                share_s = args.budget_s if args.only == ["numerics"] else args.budget_s / 4
                results.content["numerics"] = numerics(args.quick, min(deadline, time.monotonic() + share_s))
                results.save()
            restart(results, deadline)
            continue
        for case in GROUPS[group](args.quick):
            if results.has(case):
                continue
            if time.monotonic() > deadline:
                results.content["skipped"].append(f"{group}: {case.name}")
                continue
            try:
                waiting.append(prepared(case))
            except Exception as e:  # noqa: BLE001
                results.content["rows"].append(
                    {"group": group, "name": case.name, "error": f"{type(e).__name__}: {str(e)[:300]}"}
                )
            restart(results, deadline, waiting)
            while len(waiting) > 2:  # by then the sensor has caught up
                keep(waiting, results)
            if CUDA and torch.cuda.memory_reserved() > 40 << 30:
                tidy()
        print(f"{time.monotonic() - begin:6.1f} s  {group} done", flush=True)
    while waiting:
        keep(waiting, results)
    results.content["seconds"] = time.monotonic() - begin
    results.save()


def restart(results: Results, deadline: float, waiting: deque[tuple[Row, dict[str, Any]]] | None = None) -> None:
    """Go on in a new process where this one's context is dead; the last row, which may have killed it, is not tried again."""
    why = dead()
    if not why:
        return
    if waiting:
        row, _ = waiting.pop()
        results.content["rows"].append(row | {"error": why})  # the others that wait are measured again
    results.save()
    again(results.path, max(deadline - time.monotonic(), 5.0))


def keep(waiting: deque[tuple[Row, dict[str, Any]]], results: Results) -> None:
    row, ways = waiting.popleft()
    try:
        results.content["rows"].append(finished(row, ways))
    except Exception as e:  # noqa: BLE001
        results.content["rows"].append(row | {"error": f"{type(e).__name__}: {str(e)[:300]}"})
    results.save()


def table(content: Row) -> None:
    print(f"\n{'':34s} {'torch ms':>9s} {'ours ms':>9s} {'time':>6s} {'joules':>7s}  other ways (time ratio)")
    for row in content["rows"]:
        ways, ours = row.get("ways", {}), row.get("ours", "")
        if "time_ratio" not in row:
            print(f"{row['name']:34s} {row.get('error') or {n: w.get('error') for n, w in ways.items()}}")
            continue
        base = ways["torch"]["ms"]
        others = [
            f"{n} {w['ms'] / base:.3f}" if "ms" in w else f"{n}: {w['error'][:60]}"
            for n, w in ways.items()
            if n not in ("torch", ours)
        ]
        joules = f"{row['joule_ratio']:7.3f}" if "joule_ratio" in row else "      -"
        print(
            f"{row['name']:34s} {base:9.4f} {ways[ours]['ms']:9.4f} {row['time_ratio']:6.3f} {joules}  {ours}; {', '.join(others)}"
        )
    for group in GROUPS:
        for what in ("time_ratio", "joule_ratio"):
            ratios = [(row[what], row["name"]) for row in content["rows"] if row["group"] == group and what in row]
            if ratios:
                mean = math.exp(st.fmean(math.log(max(r, 1e-9)) for r, _ in ratios))
                wins = sum(r <= 0.9 for r, _ in ratios)
                print(
                    f"{group:10s} {what:12s} geometric mean {mean:.3f}, worst {max(ratios)[0]:.3f} ({max(ratios)[1]}), {wins} of {len(ratios)} better by 10%"
                )
    if "numerics" in content:
        print("numerics:", json.dumps(content["numerics"]))
    if content["skipped"]:
        print(f"skipped for lack of time: {', '.join(content['skipped'])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--only", nargs="*", choices=ORDER)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on with what OUT.json lacks")
    args = parser.parse_args()
    torch.manual_seed(0)
    results = Results(args.out)
    if args.resume and args.out.exists():
        results.content = json.loads(args.out.read_text())
    if CUDA:
        import pynvml

        from tessera import monitor

        pynvml.nvmlInit()
        torch.zeros(1, device="cuda")
        monitor.default()
        results.content["machine"] = machine() | nvml_state()
    run(args, results)
    table(results.content)


if __name__ == "__main__":
    main()
