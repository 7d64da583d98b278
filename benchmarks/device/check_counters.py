"""Check the counters of a replay against what is known of a few kernels, on the GPU at hand.

    PYTHONPATH=src:.carry/site python benchmarks/device/check_counters.py OUT_DIR [--cases]

A small script streams 2 GiB (y = x + 1), multiplies two matrices in bf16, takes a softmax, and runs two kernels of ours
whose divergence and bank conflicts are known by construction. It runs once under Kineto (names and launch sizes) and
once under ncu; each counter stands beside what it should be, as a ratio. Writes counters.json and ncu.log to OUT_DIR.
Takes half a minute; `--cases` adds as much, for how replay behaves where launches are left out or things go wrong. No
clock, limit or mode is changed. What it printed on an H200 is in benchmarks/results/counters.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tessera.errors import TesseraError
from tessera.profile.counters import KernelCounters, merge, replay
from tessera.profile.counters.ncu import find_ncu
from tessera.timeline.columns import Builder, Launch

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

STREAM_ELEMENTS = 1 << 29  # of fp32: 2 GiB read, 2 GiB written
GEMM_N = 8192
SOFTMAX_SHAPE = (32768, 4096)  # bf16
PEAK_DRAM_GBPS = 4800.0  # NVIDIA H200 datasheet (src/tessera/hardware/catalog/h200.toml)

SCRIPT = r"""
import os, sys, time
import torch
SOURCE = '''
extern "C" __global__ void diverging(float* out, int rounds) {
    // Lane i of a warp goes i + 1 times round: 16.5 of 32 threads take part in the average round.
    float sum = 0.0f;
    for (int r = 0; r < rounds; ++r)
        for (int i = 0; i <= (threadIdx.x & 31); ++i) sum = sum * 1.0001f + __sinf(sum + i);
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
extern "C" __global__ void conflicting(float* out, int rounds) {
    // All 32 lanes of a warp hit one bank: 32 wavefronts for each access, 31 more than needed.
    __shared__ float data[32 * 33];
    volatile float* shared = data;
    int lane = threadIdx.x & 31;
    float sum = 0.0f;
    for (int r = 0; r < rounds; ++r) sum += shared[lane * 32];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
'''
try:
    compiled = {n: torch.cuda._compile_kernel(SOURCE, n) for n in ("diverging", "conflicting")}
except Exception as error:
    print("torch cannot compile:", error)
    import cupy
    raw = {n: cupy.RawKernel(SOURCE, n) for n in ("diverging", "conflicting")}
    def run(n, grid, block, args):
        raw[n](grid, block, (cupy.asarray(args[0]), cupy.int32(args[1])))
    compiled = {n: lambda n=n, **k: run(n, **k) for n in raw}
x = torch.randn(STREAM, device="cuda")
y = torch.empty_like(x)
a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
s = torch.randn(*SOFTMAX, device="cuda", dtype=torch.bfloat16)
out = torch.empty(1056 * 256, device="cuda")

def work():
    for step in range(3):
        torch.cuda.nvtx.range_push(f"step {step}")
        torch.add(x, 1.0, out=y)
        torch.mul(x, 2.0, out=y)
        a @ b
        torch.softmax(s, -1)
        compiled["diverging"](grid=(1056, 1, 1), block=(256, 1, 1), args=[out, 64])
        compiled["conflicting"](grid=(1056, 1, 1), block=(256, 1, 1), args=[out, 256])
        torch.cuda.nvtx.range_pop()
    x.sum()

if len(sys.argv) > 1:
    from torch.profiler import ProfilerActivity, profile
    work()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        work()
        torch.cuda.synchronize()
    p.export_chrome_trace(sys.argv[1])
else:
    assert os.environ["TESSERA_REPLAY"] == "1"
    work()
    torch.cuda.synchronize()
    time.sleep(float(os.environ.get("LINGER_S", "0")))
print("done")
"""


def script() -> str:
    text = SCRIPT.replace("SOFTMAX", repr(SOFTMAX_SHAPE)).replace("STREAM", str(STREAM_ELEMENTS))
    return text.replace("GEMM", str(GEMM_N))


def kineto(argv: list[str], folder: Path) -> list[dict[str, Any]]:
    """The kernels of the script as Kineto saw them."""
    trace = folder / "trace.json"
    subprocess.run([*argv, str(trace)], check=True, timeout=100)
    events = json.loads(trace.read_text())["traceEvents"]
    return [
        {"name": e["name"], "grid": e["args"]["grid"], "block": e["args"]["block"], "us": e["dur"], "ts_us": e["ts"]}
        for e in events
        if e.get("cat") == "kernel"
    ]


def timeline_of(kernels: list[dict[str, Any]]) -> Any:
    built = Builder()
    for k in kernels:
        start = round(k["ts_us"] * 1000)
        launch = built.intern_launch(Launch(grid=tuple(k["grid"]), block=tuple(k["block"])))
        built.add("kernel", k["name"], start, start + round(k["us"] * 1000), launch=launch)
    return built.build()


def seconds_of(seen: list[dict[str, Any]], kernel: KernelCounters) -> float:
    """Mean seconds of a kernel under Kineto."""
    same = [k["us"] for k in seen if k["name"] == kernel.name and tuple(k["grid"]) == kernel.grid]
    return sum(same) / len(same) * 1e-6 if same else 0.0


def known(kernel: KernelCounters) -> dict[str, tuple[float | None, float]]:
    """Counter -> (what it says, what it should be)."""
    v, f = kernel.values, kernel.figures
    stream_bytes = 4.0 * STREAM_ELEMENTS
    softmax_bytes = 2.0 * SOFTMAX_SHAPE[0] * SOFTMAX_SHAPE[1]
    dram = (v.get("dram_read_gbps") or 0.0) + (v.get("dram_write_gbps") or 0.0)
    if "elementwise" in kernel.name and f.get("dram_read_bytes", 0.0) > 1e9:
        return {
            "dram_read_bytes": (f.get("dram_read_bytes"), stream_bytes),
            "dram_write_bytes": (f.get("dram_write_bytes"), stream_bytes),
            "dram_gbps of the datasheet's": (dram, PEAK_DRAM_GBPS),
            "l1 sectors": (v.get("l1_transactions"), 2.0 * stream_bytes / 32.0),
            "warps_launched": (v.get("warps_launched"), warps(kernel)),
            # PyTorch adds with a factor, alpha: one fused multiply-add.
            "flops": (v.get("flops"), STREAM_ELEMENTS * (2.0 if "_add" in kernel.name else 1.0)),
            "l2_bytes": (f.get("l2_bytes"), 2.0 * stream_bytes),
        }
    if "gemm" in kernel.name.lower() or "nvjet" in kernel.name:
        return {
            "tc_util_pct of 100": (v.get("tc_util_pct"), 100.0),
            # The tensor cores multiply whole tiles: with tiles of 320 rows, 8320 of them for 8192 (ratio 1.0156).
            "flops": (v.get("flops"), 2.0 * GEMM_N**3),
            "warps_launched": (v.get("warps_launched"), warps(kernel)),
        }
    if "softmax" in kernel.name.lower():
        return {
            "dram_read_bytes": (f.get("dram_read_bytes"), softmax_bytes),
            "dram_write_bytes": (f.get("dram_write_bytes"), softmax_bytes),
        }
    if "diverging" in kernel.name:
        return {"warp_divergence_pct": (v.get("warp_divergence_pct"), 100.0 * (1.0 - 16.5 / 32.0))}
    if "conflicting" in kernel.name:
        conflicts = warps(kernel) * 256.0 * 31.0
        return {
            "smem_bank_conflicts": (v.get("smem_bank_conflicts"), conflicts),
            "smem_transactions": (v.get("smem_transactions"), conflicts * 32.0 / 31.0),
            "warp_divergence_pct": (v.get("warp_divergence_pct"), 0.0),
        }
    return {}


def warps(kernel: KernelCounters) -> float:
    grid, block = kernel.grid or (0,), kernel.block or (0,)
    blocks = grid[0] * grid[1] * grid[2]
    return blocks * -(-block[0] * block[1] * block[2] // 32)


def show(kernel: KernelCounters, seen: list[dict[str, Any]]) -> dict[str, Any]:
    print(f"\n{kernel.name[:110]}  grid {kernel.grid} block {kernel.block}")
    plain = {k: v for k, v in {**kernel.values, **kernel.figures}.items() if not isinstance(v, dict)}
    print("   ", ", ".join(f"{k}={v:.6g}" for k, v in plain.items()))
    stalls = kernel.values.get("stall_reasons") or {}
    print("    stalls:", ", ".join(f"{k} {v:.1f}" for k, v in sorted(stalls.items(), key=lambda i: -i[1]) if v >= 0.5))
    print("    missing:", kernel.missing)
    checks = {}
    timed = {"seconds under Kineto": (kernel.figures.get("seconds"), seconds_of(seen, kernel))}
    for what, (got, should) in {**known(kernel), **timed}.items():
        ratio = None if got is None or not should else got / should
        checks[what] = {"got": got, "known": should, "ratio": ratio}
        print(f"    {what}: {got} against {should:.6g}" + ("" if ratio is None else f": ratio {ratio:.4f}"))
    return {"name": kernel.name, "grid": kernel.grid, "block": kernel.block, "values": kernel.values,
            "figures": kernel.figures, "missing": kernel.missing, "checks": checks}  # fmt: skip


def cases_of(argv: list[str]) -> None:
    """How replay behaves where things go wrong or are left out."""
    cases: dict[str, tuple[list[str], dict[str, Any]]] = {
        "without flops": (argv, {"kernels": 1}),
        "one step, one kernel": (argv, {"kernels": 1, "nvtx": "step 1/", "match": "elementwise|conflicting"}),
        "fails": ([sys.executable, "-c", "import sys; print('oh'); sys.exit(3)"], {}),
        "no kernel": ([sys.executable, "-c", "pass"], {}),
        "time runs out": (["env", "LINGER_S=60", *argv], {"kernels": 1, "timeout_s": 14.0}),
    }
    for case, (line, options) in cases.items():
        started = time.monotonic()
        try:
            found = replay(line, **options)
            names = [(k.name[:60], k.grid) for k in found]
            print(
                f"\n== {case}: {len(found)} launches, {found.passes} passes, notes {found.notes}", *names, sep="\n   "
            )
        except TesseraError as error:
            print(f"\n== {case}: {type(error).__name__}: {error}")
        print(f"   {time.monotonic() - started:.1f} s")


def version() -> str:
    said = subprocess.run([find_ncu(), "--version"], capture_output=True, text=True, check=True).stdout
    return said.strip().splitlines()[-1]


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.py")
        path.write_text(script())
        argv = [sys.executable, str(path)]
        started = time.monotonic()
        seen = kineto(argv, Path(folder))
        plain_s = time.monotonic() - started
        ticks: list[float] = []
        found = replay(argv, kernels=2, flops=True, timeout_s=60.0, progress=ticks.append)
        print(f"Kineto {plain_s:.1f} s; replay {found.seconds:.1f} s, {len(found)} launches, {found.passes} passes")
        print(f"progress was called {len(ticks)} times; notes: {found.notes}")
        merged = merge(timeline_of(seen), found)
        print("\n".join(merged.notes()))
        kernels = [show(k, seen) for k in merged.kernels]
        for k in found:
            if not any(k.name == m.name and k.grid == m.grid for m in merged.kernels):
                print("not in the timeline:", k.name[:100], k.grid, k.block)
        result = {
            "gpu": torch.cuda.get_device_name(), "ncu": version(), "kineto_s": plain_s, "replay_s": found.seconds, "launches": len(found), "passes": found.passes,
            "notes": found.notes, "merge": merged.notes(), "coverage": merged.coverage, "kernels": kernels,
            "kineto": [{k: v for k, v in e.items() if k != "ts_us"} for e in seen],
        }  # fmt: skip
        write_result(out / "counters.json", result)
        if "--cases" in sys.argv:
            cases_of(argv)


if __name__ == "__main__":
    main()
