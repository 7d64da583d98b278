"""Damaged traces through the reader and every analysis: each ends in a result or one of our own errors, and soon.

    python benchmarks/fuzz/fuzz_traces.py 100000

A trace is a small one with everything in it, with one to four damages: cut anywhere, bytes flipped, values of wrong
types, huge and negative numbers, NaN, deep nesting, events doubled or dropped. Every case is made from its number, so
that one which fails can be made again: --case N.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import multiprocessing
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera import analyze
from tessera.errors import TesseraError
from tessera.recording import Facts, Recording
from tessera.timeline import kineto

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

BENCHMARKS = Path(__file__).resolve().parents[1]
ANALYSES = ("breakdown", "overlap", "kernels", "critical_path", "collectives", "memcpy", "memory")
LIMIT_S = 5.0
ODD: tuple[Any, ...] = (
    None, True, "", "x", "1e5", -1, 0, 2**63, 2**64, -(2**70), 1e308, -1e308, 1e19, 0.5, float("nan"), float("inf"),
    [], {}, [1, [2]], {"a": None}, "\x00\ud800", "é" * 40,
)  # fmt: skip


def whole() -> dict[str, Any]:
    """A trace with a bit of everything."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 1.0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 9, "tid": 9, "ts": 1.0, "args": {"name": "main"}},
    ]
    for i in range(6):
        t = 1000.0 + 100.0 * i
        ids = {"External id": i + 1, "correlation": i + 1}
        where = {"device": 0, "stream": 7}
        events += [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 9, "ts": t, "dur": 40.5,
             "args": {"External id": i + 1, "Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"], "Sequence number": i}},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": t + 5, "dur": 9.25, "args": dict(ids)},
            {"ph": "X", "cat": "kernel", "name": f"gemm_{i % 2}", "pid": 0, "tid": 7, "ts": t + 12, "dur": 70.125,
             "args": {**ids, **where, "grid": [1, 2, 3], "block": [32, 1, 1], "registers per thread": 32}},
            {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32", "pid": 0, "tid": 20, "ts": t + 50, "dur": 40.0,
             "args": {**where, "stream": 20, "Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20,
                      "dtype": "Float", "Group size": 2, "Process Group Name": "0"}},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "pid": 0, "tid": 7, "ts": t + 90, "dur": 3.5,
             "args": {**where, "bytes": 4096}},
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 9, "tid": 9, "ts": t + 1,
             "args": {"Total Allocated": 4096 * i, "Device Id": 0, "Device Type": 1}},
            {"ph": "C", "name": "GPU 0 power", "pid": 0, "ts": t + 2, "args": {"W": 300.0 + i}},
            {"ph": "s", "id": i, "pid": 9, "tid": 9, "ts": t + 5, "cat": "ac2g", "name": "ac2g"},
            {"ph": "f", "id": i, "pid": 0, "tid": 7, "ts": t + 12, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        ]  # fmt: skip
    events += [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 9, "tid": 9, "ts": 990.0, "dur": 300.0, "args": {}},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#2", "pid": 9, "tid": 9, "ts": 1290.0, "dur": 400.0, "args": {}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "pid": 9, "tid": 9, "ts": 1560.0, "dur": 90.0, "args": {"correlation": 99}},
    ]  # fmt: skip
    return {"schemaVersion": 1, "baseTimeNanoseconds": 1790857026000000000,
            "distributedInfo": {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]},
            "traceEvents": events}  # fmt: skip


WHOLE = whole()


def _spot(rng: random.Random, trace: dict[str, Any]) -> tuple[Any, Any]:
    """A place in the trace: a container and a key of it."""
    here: Any = trace
    key: Any = "traceEvents" if rng.random() < 0.9 else rng.choice(list(trace) or ["x"])
    for _ in range(rng.randint(0, 4)):
        inner = here[key] if key in here or isinstance(here, list) else None
        if isinstance(inner, dict) and inner:
            here, key = inner, rng.choice(list(inner))
        elif isinstance(inner, list) and inner:
            here, key = inner, rng.randrange(len(inner))
        else:
            break
    return here, key


def _odd(rng: random.Random, trace: dict[str, Any]) -> None:
    here, key = _spot(rng, trace)
    here[key] = (
        copy.deepcopy(rng.choice(ODD)) if rng.random() < 0.8 else rng.choice((1, -1)) * 10.0 ** rng.uniform(-10, 25)
    )


def _drop(rng: random.Random, trace: dict[str, Any]) -> None:
    here, key = _spot(rng, trace)
    if isinstance(here, dict):
        here.pop(key, None)
    elif here:
        del here[key]


def _double(rng: random.Random, trace: dict[str, Any]) -> None:
    events = trace.get("traceEvents")
    if isinstance(events, list) and events:
        events[rng.randrange(len(events)) : 0] = [copy.deepcopy(rng.choice(events))] * rng.randint(1, 20)


def _deep(rng: random.Random, trace: dict[str, Any]) -> None:
    nest: Any = 1
    for _ in range(rng.choice((10, 100, 300))):
        nest = [nest] if rng.random() < 0.5 else {"a": nest}
    here, key = _spot(rng, trace)
    here[key] = nest


def _shuffle(rng: random.Random, trace: dict[str, Any]) -> None:
    events = trace.get("traceEvents")
    if isinstance(events, list):
        rng.shuffle(events)


def cut(rng: random.Random, text: bytes) -> bytes:
    """Only the beginning."""
    return text[: rng.randrange(len(text) + 1)]


def flip(rng: random.Random, text: bytes) -> bytes:
    """A few bytes of it at random."""
    data = bytearray(text)
    for _ in range(rng.randint(1, 8)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _splice(rng: random.Random, text: bytes) -> bytes:
    a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return text[:a] + rng.choice((b"", text[b:], b"[" * 3000, b'{"a":' * 300, b"NaN", b"1e999", b'"', b"}")) + text[b:]


def _pack(rng: random.Random, text: bytes) -> bytes:
    packed = gzip.compress(text, 1)
    return cut(rng, packed) if rng.random() < 0.5 else flip(rng, packed)


def case(number: int) -> bytes:
    """A damaged trace, always the same for one number."""
    rng = random.Random(number)
    trace = copy.deepcopy(WHOLE)
    in_objects: tuple[Callable[[random.Random, dict[str, Any]], None], ...] = (
        _odd,
        _odd,
        _odd,
        _drop,
        _double,
        _deep,
        _shuffle,
    )
    for _ in range(rng.randint(0, 4)):
        rng.choice(in_objects)(rng, trace)
    text = json.dumps(trace, indent=rng.choice((None, 1))).encode("utf-8", "surrogatepass")
    if rng.random() < 0.4:
        text = rng.choice((cut, flip, _splice, _pack))(rng, text)
    return text


class Hang(Exception):
    """A case took too long."""


def _alarm(*_: object) -> None:
    raise Hang


def run(number: int) -> str:
    """How a case ended: "result", "result with a note", or "error"; anything else is raised."""
    signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an overflow in numpy is a wrong number
            recording = Recording(timeline := kineto.read(case(number)), facts=Facts(name="fuzz"))
            for kind in ANALYSES:
                options = {"by": "step"} if kind == "breakdown" and number % 2 else {}
                result = getattr(analyze, kind)(recording, **options)
                result.to_json()
                if number % 8 == 0:
                    str(result)
                    result._repr_html_()
    except TesseraError as error:
        assert error.what
        return "error"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return "result with a note" if timeline.notes else "result"


def _tried(number: int) -> tuple[int, str, float]:
    start = time.perf_counter()
    try:
        how = run(number)
    except BaseException as error:  # noqa: BLE001  (a fuzzer reports whatever comes)
        how = f"FAILED: {type(error).__name__}: {error}"[:200]
    return number, how, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int, help="run one case and show how it fails")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", type=Path, default=BENCHMARKS / "results" / "fuzz_traces.json")
    given = parser.parse_args()
    if given.case is not None:
        print(case(given.case)[:3000])
        print(run(given.case))
        return
    ends: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    slowest = (0.0, -1)
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        for number, how, seconds in pool.imap_unordered(_tried, range(given.first, given.first + given.count), 200):
            ends[how.partition(":")[0]] += 1
            slowest = max(slowest, (seconds, number))
            if how.startswith("FAILED"):
                failed.append((number, how))
                if len(failed) <= 20:
                    print(number, how, flush=True)
    figures = {
        "cases": given.count, "ends": dict(ends), "failed": failed[:50], "slowest_s": slowest[0],
        "slowest_case": slowest[1], "seconds": time.perf_counter() - start,
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    write_result(given.save, figures)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
