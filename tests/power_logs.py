"""Power logs and a trace of the same time, written for the tests."""

from __future__ import annotations

import gzip
import json
from datetime import datetime
from pathlib import Path

BASE_NS = 1_790_000_000_000_000_000


def write_own(path: Path, watts: list[float], every_ms: float = 20.0, domain: str = "gpu0") -> Path:
    lines = ["epoch_us,domain,watts"]
    lines += [f"{BASE_NS // 1000 + round(i * every_ms * 1000)},{domain},{w}" for i, w in enumerate(watts)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_trace(path: Path, kernels: int = 200) -> Path:
    events = []
    for i in range(kernels):
        start_us = 100_000 + i * 10_000
        events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": start_us - 20.5,
                       "dur": 10.25, "args": {"External id": i + 1}})  # fmt: skip
        events.append({"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": start_us, "dur": 8000.125,
                       "args": {"External id": i + 1, "device": 0, "stream": 7, "correlation": i + 1}})  # fmt: skip
    data = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, "traceEvents": events,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}  # fmt: skip
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(json.dumps(data).encode()))
    else:
        path.write_text(json.dumps(data))
    return path


def smi(path: Path, field: str, rows: list[tuple[float, int, str]], units: bool = True) -> Path:
    lines = [f"timestamp, index, name, {field}{' [W]' if units else ''}"]
    for seconds, index, text in rows:
        stamp = datetime.fromtimestamp(BASE_NS / 1e9 + seconds).strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
        lines.append(f"{stamp}, {index}, NVIDIA H200, {text}")
    path.write_text("\n".join(lines) + "\n")
    return path
