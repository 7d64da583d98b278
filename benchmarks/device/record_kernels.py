"""Record single operators in steady state on the GPU at hand, and what calling them costs the host.

    PYTHONPATH=src:.carry/site python benchmarks/device/record_kernels.py OUT.jsonl.gz
        [--only CASE ...] [--from INDEX] [--seconds LIMIT] [--dry]

Each operator is captured many times into a CUDA graph that is replayed: about 0.15 s to settle (0.35 s at the power
limit), 0.28 s measured; joules from the driver's sample ring through `tessera.monitor`, read a few operators later
so that nobody waits for the sensor. `cold` rows go round enough buffers to leave the 60 MB L2 (for `linear` the weights
alone: activations are warm in a model). `pass` is forward or forward+backward. `host_call` rows are microseconds the
host needs to issue a call. `--dry` runs everything once on the meta device. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import math
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import kernel_case
from host_calls import chains, host_calls, host_speed, record_chains, record_host_calls
from kernel_case import Op, Row, Step
from kernels_elements import (
    activation_backwards,
    cold_elementwise,
    elementwise,
    indexing,
    optimizers,
    permutations,
)
from kernels_products import (
    attentions,
    backward_gemms,
    bmms,
    cold_convs,
    cold_gemms,
    convs,
    gemms,
    other_convs,
    recurrent,
)
from kernels_rows import cold_norms, norms, pools, reductions, softmaxes
from record_models import JsonLines, error_row, figures, machine, nvml_state, states_of, steady, tidy

COLD_BYTES = 260 << 20  # more than four times the L2
MAX_SETS, MAX_COPIES, GRAPH_S = 400, 200, 0.004
SETTLE_S, CAPPED_SETTLE_S, MEASURED_S = 0.15, 0.2, 0.28
RESERVED_LIMIT = 30 << 30

FAMILIES: list[Callable[[], Iterator[Op]]] = [
    gemms, cold_gemms, backward_gemms, convs, attentions, elementwise, norms, softmaxes, permutations, reductions, indexing,
    cold_elementwise, cold_norms, cold_convs, other_convs, pools, bmms, activation_backwards, optimizers, recurrent,
]  # fmt: skip


# -- measuring --------------------------------------------------------------------------------------------------


@contextmanager
def precision(dtype: str | None) -> Iterator[None]:
    """TF32 for matrix products only where the row says so: convolutions have it by default."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def quick_time(fn: Step, times: int = 3) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times * 1e-3


def buffer_sets(op: Op) -> list[Step]:
    """The call on one set of buffers, or on as many as leave the cache."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    first = op.make()
    kept = first()
    size = max(torch.cuda.memory_allocated() - before, 1)
    del kept
    if not op.cold:
        return [first]
    more = min(max(math.ceil(COLD_BYTES / size), 2), MAX_SETS) - 1
    return [first, *(op.make() for _ in range(more))]


def capture(calls: list[Step], copies: int, keep: bool) -> torch.cuda.CUDAGraph:
    """`copies` calls in one graph; with `keep` no two of them share an output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(copies):
            out = calls[i % len(calls)]()
            if keep:
                kept.append(out)
            del out
    return graph


def graph_of(op: Op) -> tuple[Step, int, Row, list[Step]]:
    """(one replay, operators in it, how it was made, the buffers to keep alive)."""
    calls = buffer_sets(op)
    for call in calls[:2]:
        call()
    each = quick_time(calls[0])
    copies = min(max(math.ceil(GRAPH_S / each), 1), MAX_COPIES)
    copies = math.ceil(copies / len(calls)) * len(calls)
    graph = capture(calls, copies, keep=op.cold)
    return graph.replay, copies, {"cold": op.cold, "sets": len(calls), "copies": copies, "graph": True}, calls


def settle(fn: Step) -> float:
    """Run until power and clock are steady; seconds per replay."""
    each = quick_time(fn)
    for seconds in (SETTLE_S, CAPPED_SETTLE_S):
        for _ in range(max(int(seconds / each), 1)):
            fn()
        state = nvml_state()
        torch.cuda.synchronize()
        if not states_of([state])["throttle"] & 4:
            break
    return quick_time(fn)


def measure(op: Op) -> tuple[Row, Any]:
    """The row so far, and what its figures will be read from."""
    with precision(op.params.get("dtype")):
        fn, copies, how, calls = graph_of(op)
        each = settle(fn)
        scope, n, state = steady(fn, each, MEASURED_S, reads=2)
    del calls
    return {"case": op.case, **op.params, **how}, (scope, n * copies, state)


class Recorder:
    """Writes a row a few operators after it was measured, when the sensor has long caught up."""

    def __init__(self, out: JsonLines, lag: int = 6) -> None:
        self._out, self._lag = out, lag
        self._waiting: deque[tuple[Row, Any]] = deque()
        self.failed: list[str] = []

    def add(self, op: Op) -> None:
        try:
            self._waiting.append(measure(op))
        except Exception:  # noqa: BLE001 - one failure must not cost the others
            self.failed.append(f"{op.case} {op.params}: {error_row('')['error'][:160]}")
            self._out.write({"case": op.case, **op.params, "cold": op.cold, **error_row("measure")})
        self.flush(self._lag)

    def flush(self, left: int = 0) -> None:
        while len(self._waiting) > left:
            row, (scope, n, state) = self._waiting.popleft()
            self._out.write({**row, **figures(scope, n, state)})


# -- all of it --------------------------------------------------------------------------------------------------


def all_ops(only: list[str] | None) -> Iterator[Op]:
    for family in FAMILIES:
        yield from (op for op in family() if not only or op.case in only)


def record_ops(args: argparse.Namespace, out: JsonLines) -> None:
    begin, recorder, last = time.monotonic(), Recorder(out), ""
    for i, op in enumerate(all_ops(args.only)):
        if i < args.first:
            continue
        if time.monotonic() - begin > args.seconds:
            print(f"stopped before operator {i}: go on with --from {i}", flush=True)
            break
        if op.case != last:
            print(f"{time.monotonic() - begin:6.1f} s  [{i}] {op.case}", flush=True)
            last = op.case
        recorder.add(op)
        del op
        if torch.cuda.memory_reserved() > RESERVED_LIMIT:
            tidy()
    recorder.flush()
    print("failed:", len(recorder.failed), *recorder.failed, sep="\n  ", flush=True)


def record_all(args: argparse.Namespace) -> None:
    import pynvml

    from tessera import monitor

    pynvml.nvmlInit()
    torch.zeros(1, device="cuda")
    monitor.default()
    out = JsonLines(args.out)
    out.write({"case": "machine", **machine()})
    out.write(host_speed())
    if not args.only or "host_call" in args.only:
        record_host_calls(out)
        record_chains(out)
    record_ops(args, out)
    out.write(host_speed())
    out.close()


def dry(only: list[str] | None) -> None:
    """Run everything once on the meta device."""
    kernel_case.device = "meta"
    seen, failed = Counter[str](), []
    for op in all_ops(only):
        seen[op.case] += 1
        try:
            op.make()()
        except Exception:  # noqa: BLE001
            failed.append(f"{op.case} {op.params}: {traceback.format_exc(limit=-1)[-300:]}")
    for name, fn in host_calls(grad=True).items():
        try:
            fn()
        except Exception as e:  # noqa: BLE001
            failed.append(f"host_call {name}: {e}")
    for fn, shape in chains().values():
        fn(torch.randn(shape, device=kernel_case.device))
    print(dict(seen), sum(seen.values()))
    print(len(failed), "failed", *failed, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.dry:
        dry(args.only)
    else:
        record_all(args)


if __name__ == "__main__":
    main()
