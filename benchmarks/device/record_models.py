"""Record whole models on the GPU at hand: time, energy and memory of one iteration, and the kernels it is made of.

    PYTHONPATH=src:.carry/site python benchmarks/device/record_models.py CASES.py OUT_PREFIX
        [--only NAME ...] [--from INDEX] [--seconds LIMIT] [--stages eager trace graph] [--quick] [--dry]

CASES.py defines `CASES` (see dev_cases.py). OUT_PREFIX_models.jsonl.gz gets one row per measurement (eager, and CUDA
graph replay of inference where capture works), OUT_PREFIX_traces.jsonl.gz the kernels of one iteration per case. A
failure writes a row with `error`. Traces come last, in a second round over the cases: a process that has once used
the profiler launches up to twice as slowly ever after (CUPTI stays attached). `--quick` measures for a shorter time. `--dry` builds and steps every case on the meta device, without timing. No clock,
limit or mode is changed.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import importlib.util
import json
import math
import statistics as st
import sys
import tempfile
import time
import traceback
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_S, MEASURED_S = 0.4, 1.25
QUICK_S = 0.5
STAGES = ("eager", "trace", "graph")
KEPT_NAME = 120  # characters of a kernel's name
Row = dict[str, Any]
Step = Callable[[], Any]


class JsonLines:
    """Rows of a .jsonl.gz, each readable as soon as it is written."""

    def __init__(self, path: Path | str) -> None:
        self._file = gzip.open(path, "wt")  # noqa: SIM115 - open as long as rows come

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(row, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def load_cases(path: str) -> list[Any]:
    spec = importlib.util.spec_from_file_location("cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return list(module.CASES)


def machine() -> Row:
    import pynvml

    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((x.split(":")[1].strip() for x in info if x.startswith("model name")), "?")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "torch": torch.__version__,
        "cpu": cpu,
        "date": str(date.today()),
    }


# -- one iteration ----------------------------------------------------------------------------------------------


def logits_of(out: Any) -> torch.Tensor:
    """The tensor a model answers with, whatever it is wrapped in."""
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, tuple):
        return logits_of(out[0])
    for name in ("logits", "out", "pooler_output", "last_hidden_state"):
        found = out.get(name) if hasattr(out, "get") else getattr(out, name, None)
        if found is not None:
            return found
    raise TypeError(f"no logits in {type(out).__name__}")


def by_class(logits: torch.Tensor) -> torch.Tensor:
    """Logits as cross_entropy wants them: (batch, classes, ...), or (batch * sequence, classes)."""
    return logits.flatten(0, 1) if logits.dim() == 3 else logits


def target_of(logits: torch.Tensor) -> torch.Tensor:
    logits = by_class(logits)
    shape = (logits.shape[0], *logits.shape[2:])
    return torch.randint(0, logits.shape[1], shape, device=logits.device)


def call(model: Any, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters())
    return torch.optim.SGD(model.parameters(), momentum=0.9)


def training_step(model: torch.nn.Module, inputs: Any, optimizer: str) -> Step:
    """Forward, loss, backward, step, zero_grad; returns the loss."""
    own_loss = isinstance(inputs, dict) and "labels" in inputs
    opt = make_optimizer(optimizer, model)
    target = None
    if not own_loss:
        with torch.no_grad():
            target = target_of(logits_of(call(model, inputs)))

    def step() -> torch.Tensor:
        out = call(model, inputs)
        loss = out.loss if own_loss else torch.nn.functional.cross_entropy(by_class(logits_of(out)).float(), target)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def inference_step(model: torch.nn.Module, inputs: Any) -> Step:
    def step() -> Any:
        with torch.no_grad():
            return call(model, inputs)

    return step


def prepare(case: Any, device: str) -> tuple[torch.nn.Module, Step]:
    """The model of a case and one iteration of it."""
    torch.manual_seed(0)
    model, inputs = case.factory(device, DTYPES[case.dtype])
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs = tuple(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs)
    if case.mode == "train":
        return model, training_step(model.train(), inputs, case.optimizer)
    return model, inference_step(model.eval(), inputs)


# -- measuring --------------------------------------------------------------------------------------------------


def nvml_state() -> Row:
    """Clock, throttle bits and temperature, now."""
    import pynvml

    h = pynvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM),
        "throttle": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(h),
        "temp_c": pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU),
    }


def states_of(reads: list[Row]) -> Row:
    throttle = 0
    for r in reads:
        throttle |= r["throttle"]
    return {"sm_mhz": st.median(r["sm_mhz"] for r in reads), "throttle": throttle, "temp_c": reads[-1]["temp_c"]}


def warm_up(fn: Step, at_least: int = 5, seconds: float = WARM_S) -> float:
    """Seconds per iteration without synchronisation, from the later half."""
    torch.cuda.synchronize()
    begin, n, each = time.perf_counter(), 0, 0.0
    while n < at_least or time.perf_counter() - begin < seconds:
        t0 = time.perf_counter()
        for _ in range(3):
            fn()
        torch.cuda.synchronize()
        n, each = n + 3, (time.perf_counter() - t0) / 3
    return each


def steady(fn: Step, each_s: float, seconds: float, reads: int = 5) -> tuple[Any, int, Row]:
    """Iterate without synchronising; the (closed, not yet read) energy scope, the iterations, the device's state."""
    from tessera import monitor

    n = max(math.ceil(seconds / each_s), 2)
    look = {n * (i + 1) // (reads + 1) for i in range(reads)}
    seen = []
    with monitor.energy_scope() as scope:
        for i in range(n):
            fn()
            if i in look:
                seen.append(nvml_state())
    seen.append(nvml_state())
    torch.cuda.synchronize()
    return scope, n, states_of(seen)


def figures(scope: Any, n: int, state: Row) -> Row:
    """Waits for the sensor. Seconds are the device's, between the edges of the scope in its stream."""
    e = scope.energy
    return {
        "ms": e.time_s / n * 1e3,
        "W": e.energy_j / e.time_s,
        "J": e.energy_j / n,
        "J_error": e.error_j / n,
        **state,
        "span_s": e.time_s,
        "iterations": n,
    }


def host_ms(fn: Step, times: int = 15) -> float:
    """Milliseconds the host takes to issue an iteration, the queue being empty."""
    took = []
    for _ in range(times):
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        fn()
        took.append(time.perf_counter() - t0)
    torch.cuda.synchronize()
    return st.median(took) * 1e3


def memory(fn: Step) -> Row:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return {"allocated_bytes": before, "peak_bytes": torch.cuda.max_memory_allocated()}


def capture(fn: Step) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        fn()
    return graph


@contextmanager
def masks_as_in_eager() -> Iterator[None]:
    """Transformers builds attention masks it would leave out, and so takes other kernels, when it sees a capture."""
    module = sys.modules.get("transformers.utils.import_utils")
    if module is None:
        yield
        return
    kept = module.is_cuda_stream_capturing
    module.is_cuda_stream_capturing = lambda: False
    try:
        yield
    finally:
        module.is_cuda_stream_capturing = kept


def capture_as_eager(fn: Step) -> tuple[torch.cuda.CUDAGraph, bool]:
    """The graph, and whether it had to differ from the eager iteration."""
    try:
        with masks_as_in_eager():
            return capture(fn), False
    except RuntimeError:  # the eager path reads a value on the host
        torch.cuda.synchronize()
        return capture(fn), True


def answer_of(fn: Step) -> Row:
    """Whether what is computed is still numbers: NaN and infinity draw less power."""
    x = logits_of(fn()).float()
    return {"finite": bool(torch.isfinite(x).all()), "out_std": float(x.std()) if x.numel() > 1 else float(x)}


def measure_eager(fn: Step, quick: bool) -> Row:
    each = warm_up(fn, 5, 0.15 if quick else WARM_S)
    row = figures(*steady(fn, each, QUICK_S if quick else MEASURED_S))
    return {**row, "host_ms": host_ms(fn), **memory(fn), **answer_of(fn)}


def measure_graph(fn: Step, quick: bool) -> Row:
    graph, differs = capture_as_eager(fn)
    each = warm_up(graph.replay, 5, 0.15 if quick else 0.3)
    row = figures(*steady(graph.replay, each, QUICK_S if quick else MEASURED_S))
    return {**row, "capture_differs": differs}


# -- the kernels of an iteration --------------------------------------------------------------------------------

GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
MARK = "tessera_iteration"


def profile(fn: Step) -> list[Row]:
    """Events of the chrome trace of two iterations."""
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as profiler

    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as p:
        for _ in range(2):
            with record_function(MARK):
                fn()
            torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        p.export_chrome_trace(f.name)
        return json.loads(Path(f.name).read_text())["traceEvents"]


class Table:
    """Each value once, and its index."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._index: dict[str, int] = {}

    def add(self, value: Any) -> int:
        key = json.dumps(value)
        if key not in self._index:
            self._index[key] = len(self.values)
            self.values.append(value)
        return self._index[key]


def last_iteration(events: list[Row]) -> tuple[float, float]:
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == MARK]
    last = max(marks, key=lambda e: e["ts"])
    return last["ts"], last["ts"] + last["dur"]


def ops_by_id(events: list[Row]) -> dict[int, Row]:
    found: dict[int, Row] = {}
    for e in events:
        if e.get("cat") == "cpu_op":
            found[e["args"].get("External id")] = e
    return found


def launched(events: list[Row], begin: float, end: float) -> Iterator[tuple[Row, Row]]:
    """(launch on the host, work on the GPU) of the iteration, in the GPU's order."""
    calls = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    for e in sorted((e for e in events if e.get("cat") in GPU_WORK), key=lambda e: e["ts"]):
        at = calls.get(e["args"].get("correlation"))
        if at is not None and begin <= at["ts"] < end:
            yield at, e


def innermost_at(events: list[Row]) -> Callable[[Row], Row | None]:
    """The innermost cpu_op on the thread of a launch around its time: for work that carries no External id."""
    threads = defaultdict(list)
    for e in events:
        if e.get("cat") == "cpu_op":
            threads[e["tid"]].append(e)
    for ops in threads.values():
        ops.sort(key=lambda e: e["ts"])
    starts = {tid: [e["ts"] for e in ops] for tid, ops in threads.items()}

    def find(at: Row) -> Row | None:
        ops, i = threads.get(at["tid"], []), bisect_right(starts.get(at["tid"], []), at["ts"]) - 1
        for j in range(i, max(i - 200, -1), -1):
            if ops[j]["ts"] + ops[j]["dur"] >= at["ts"]:
                return ops[j]
        return None

    return find


def top_level_ops(events: list[Row], begin: float, end: float) -> dict[int, list[Row]]:
    """Operators the iteration calls itself, by thread (an operator inside another is left out)."""
    found: dict[int, list[Row]] = defaultdict(list)
    inside = (e for e in events if e.get("cat") == "cpu_op" and begin <= e["ts"] < end)
    for e in sorted(inside, key=lambda e: e["ts"]):
        mine = found[e["tid"]]
        if e["name"].startswith("aten::") and not (mine and e["ts"] < mine[-1]["ts"] + mine[-1]["dur"]):
            mine.append(e)
    return found


def outer_name(top: dict[int, list[Row]], at: Row) -> str | None:
    """The operator at top level around a launch, e.g. aten::embedding where aten::gather launched."""
    ops = top.get(at["tid"], [])
    i = bisect_right(ops, at["ts"], key=lambda e: e["ts"]) - 1
    return ops[i]["name"] if i >= 0 and at["ts"] <= ops[i]["ts"] + ops[i]["dur"] else None


def describe(op: Row | None) -> list[Any]:
    """[name, dims, types, strides, concrete inputs] of the operator that launched something."""
    if op is None:
        return [None, None, None, None, None]
    args = op.get("args", {})
    return [op["name"], *(args.get(k) for k in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs"))]


def kernels_of(events: list[Row]) -> Row:
    """One iteration: its `kernels`, with indices into `ops` and `names` (see `columns`)."""
    begin, end = last_iteration(events)
    by_id, innermost = ops_by_id(events), innermost_at(events)
    top = top_level_ops(events, begin, end)
    ops, names, rows, first = Table(), Table(), [], None
    for at, work in launched(events, begin, end):
        first = work["ts"] if first is None else first
        op = by_id.get(work["args"].get("External id")) or innermost(at)
        which = [ops.add(describe(op)), names.add(outer_name(top, at)), names.add(work["name"][:KEPT_NAME])]
        rows.append([*which, round(work["dur"], 3), round(work["ts"] - first, 3), round(at["ts"] - begin, 2)])
    return {
        "columns": ["op", "outer", "name", "dur_us", "start_us", "launch_us"],
        "op_columns": ["name", "dims", "types", "strides", "concrete"],
        "ops": ops.values,
        "names": names.values,
        "kernels": rows,
        "gpu_us": sum(r[3] for r in rows),
        "host_us": end - begin,
        "top_level_ops": sum(len(ops) for ops in top.values()),
    }


# -- the cases --------------------------------------------------------------------------------------------------


def about(case: Any) -> Row:
    shown = {k: getattr(case, k) for k in ("name", "batch", "dtype", "mode", "optimizer", "channels_last")}
    if case.mode == "infer":
        shown["optimizer"] = None
    return {"case": "model", **shown}


def error_row(stage: str) -> Row:
    kind, value, _ = sys.exc_info()
    return {"stage": stage, "error": f"{getattr(kind, '__name__', '?')}: {str(value)[:400]}"}


def tidy() -> None:
    """Give back what the last case left: cycles, cuBLAS workspaces (one per stream used), cached blocks."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def record_model(case: Any, models: JsonLines, host: Row, args: argparse.Namespace) -> None:
    """The measurements of one case; each may fail alone."""
    base = {**about(case), "before_bytes": torch.cuda.memory_allocated()}
    model, fn = prepare(case, "cuda")
    base["params"] = sum(p.numel() for p in model.parameters())
    if "eager" in args.stages:
        row = guarded("eager", lambda: measure_eager(fn, args.quick))
        models.write({**base, "graph_replay": False, **row, **host})
        say(case.name, "eager", row)
    if "graph" in args.stages and case.mode == "infer":
        row = guarded("graph", lambda: measure_graph(fn, args.quick))
        models.write({**base, "graph_replay": True, **row, **host})
        say(case.name, "graph", row)


def record_trace(case: Any, traces: JsonLines, host: Row) -> None:
    model, fn = prepare(case, "cuda")
    params = sum(p.numel() for p in model.parameters())
    traces.write({**about(case), "params": params, **guarded("trace", lambda: kernels_of(profile(fn))), **host})


def guarded(stage: str, fn: Callable[[], Row]) -> Row:
    try:
        return fn()
    except Exception:  # noqa: BLE001 - one failure must not cost the others
        traceback.print_exc(limit=-3)
        return error_row(stage)


def say(name: str, stage: str, row: Row) -> None:
    text = row.get("error") or "  ".join(
        f"{k} {row[k]:.4g}"
        for k in ("ms", "W", "J", "sm_mhz", "throttle", "host_ms", "peak_bytes", "out_std")
        if k in row
    )
    print(f"{name:32s} {stage:6s} {text}", flush=True)


def record_round(cases: list[Any], args: argparse.Namespace, one: Callable[[Any], None], failed: JsonLines) -> None:
    """`one` for every case, as long as the time lasts."""
    for i, case in enumerate(cases[args.first :], args.first):
        if time.monotonic() > args.until:
            print(f"stopped before case {i}: go on with --from {i}", flush=True)
            break
        t0 = time.monotonic()
        try:
            one(case)
        except Exception:  # noqa: BLE001
            traceback.print_exc(limit=-3)
            failed.write({**about(case), **error_row("build")})
        tidy()
        print(f"   [{i}] {time.monotonic() - t0:.1f} s", flush=True)


def record_all(cases: list[Any], args: argparse.Namespace) -> None:
    import pynvml

    from tessera import monitor

    pynvml.nvmlInit()
    torch.zeros(1, device="cuda")
    monitor.default()
    args.until = time.monotonic() + args.seconds
    host = machine()
    if {"eager", "graph"} & set(args.stages):
        models = JsonLines(f"{args.prefix}_models.jsonl.gz")
        record_round(cases, args, lambda case: record_model(case, models, host, args), models)
        models.close()
    if "trace" in args.stages:
        traces = JsonLines(f"{args.prefix}_traces.jsonl.gz")
        record_round(cases, args, lambda case: record_trace(case, traces, host), traces)
        traces.close()


def dry(cases: list[Any]) -> None:
    """Build and step on the meta device."""
    for i, case in enumerate(cases):
        t0 = time.monotonic()
        try:
            model, fn = prepare(case, "meta")
            shape = tuple(logits_of(fn()).shape)
            params = sum(p.numel() for p in model.parameters())
            print(f"[{i}] {case.name:32s} {params / 1e6:8.1f} M {shape} {time.monotonic() - t0:.1f} s", flush=True)
        except Exception:  # noqa: BLE001
            print(f"[{i}] {case.name:32s} FAILED {error_row('dry')['error']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases")
    parser.add_argument("prefix")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--stages", nargs="*", default=STAGES, choices=STAGES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    cases = [c for c in load_cases(args.cases) if not args.only or c.name in args.only]
    if args.dry:
        dry(cases)
    else:
        record_all(cases, args)


if __name__ == "__main__":
    main()
