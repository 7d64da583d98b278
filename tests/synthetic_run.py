"""A training run that never was, with known joules: a timeline, power samples, telemetry and the table they give."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.analyze.result import Result
from tessera.attribute.table import EnergyRow, EnergyTable
from tessera.profile.runfile import RunFile, RunWriter
from tessera.schema import Domain, Telemetry
from tessera.timeline.columns import Builder, Timeline

START_NS = 1_790_000_000_000_000_000
IDLE_W = 118.0
ADD = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, "
    "3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
MUL = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, "
    "c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)"
)
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float)"
FLASH = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"
FLASH_BACK = "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0"
GEMM = "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_TNT"
GEMM_BIAS = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_NNT"
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>, float>(int)"
)
COPY = "Memcpy HtoD (Pageable -> Device)"
EVIL = "<script>alert('x')</script>&\"kernel\""
# (operator, kernel, microseconds, watts)
FORWARD = (
    ("aten::layer_norm", NORM, 30, 330.0), ("aten::addmm", GEMM_BIAS, 120, 620.0),
    ("aten::_scaled_dot_product_cudnn_attention", FLASH, 90, 560.0), ("aten::addmm", GEMM_BIAS, 110, 620.0),
    ("aten::add", ADD, 28, 350.0), ("aten::mul", MUL, 26, 345.0),
)  # fmt: skip
BACKWARD = (
    ("aten::mul", MUL, 40, 345.0), ("aten::mm", GEMM, 210, 640.0), ("aten::mm", GEMM, 190, 640.0),
    ("aten::_scaled_dot_product_cudnn_attention_backward", FLASH_BACK, 230, 575.0), ("aten::add", ADD, 30, 350.0),
)  # fmt: skip
GROUPS = {ADD: 0, MUL: 0}


@dataclass
class Made:
    """The parts of a synthetic run."""

    timeline: Timeline
    table: EnergyTable
    times_ns: Any
    watts: Any
    telemetry: list[Telemetry]
    domain: Domain
    end_ns: int

    def write(self, path: Path, *, close: bool = True, **facts: Any) -> RunFile:
        command = ["python", "train.py", "--model", "gpt2"]
        writer = RunWriter(path, meta={"command": command, "torch": "2.8.0", "host": "node7", **facts})
        writer.add_timeline(self.timeline)
        writer.add_samples(self.domain, self.times_ns, self.watts)
        writer.add_telemetry(self.telemetry, 0)
        writer.set("start_ns", START_NS)
        writer.set("end_ns", self.end_ns)
        if close:
            writer.close()
        else:
            writer.flush()
        return RunFile(path)


class _Maker:
    def __init__(self) -> None:
        self.b = Builder()
        self.now = START_NS  # of the host
        self.free = START_NS  # when the device is done with what is queued
        self.pieces: list[tuple[int, int, float]] = []
        self.number = 0

    def region(self, name: str, start_ns: int) -> None:
        self.b.add("region", name, start_ns, self.now, thread=1)

    def launch(self, op: str, kernel: str, us: float, watts: float, kind: Any = "kernel", host_us: float = 12) -> None:
        start = self.now
        self.now += round(host_us * 1000)
        self.number += 1
        at = self.b.add("op", op, start, self.now, thread=1)
        self.b.add("runtime", "cudaLaunchKernel", start + 2000, self.now - 1000, thread=1, correlation=self.number)
        begin = max(self.free, self.now)
        self.free = begin + round(us * 1000)
        self.b.add(kind, kernel, begin, self.free, device=0, stream=7, correlation=self.number, parent=at)
        self.pieces.append((begin, self.free, watts))

    def wait(self) -> None:
        start, self.now = self.now, max(self.now, self.free)
        if self.now > start:
            self.b.add("runtime", "cudaStreamSynchronize", start, self.now, thread=1)


def make(steps: int = 12, layers: int = 12, *, data_ms: float = 6.0, evil: bool = False, seed: int = 1) -> Made:
    """`steps` training steps of `layers` layers, the data loader making the device wait `data_ms` before each."""
    m, rng = _Maker(), np.random.default_rng(seed)
    m.now += 60_000_000
    m.free = m.now
    bounds = []
    for step in range(steps):
        began = m.now
        start = m.now
        m.now += round(data_ms * 1e6 * rng.uniform(0.8, 1.2))
        m.region("DataLoader.__next__", start)
        m.launch("aten::to", COPY, 400, 180.0, kind="memcpy")
        start = m.now
        for _ in range(layers):
            inner = m.now
            for row in FORWARD:
                m.launch(*row)
            m.region("block", inner)
        if evil:
            m.launch("aten::<b>bold</b>", EVIL, 150, 500.0)
        m.region("forward", start)
        start = m.now
        for _ in range(layers):
            for row in BACKWARD:
                m.launch(*row)
        m.wait()
        m.region("backward", start)
        start = m.now
        for _ in range(20):
            m.launch("aten::_fused_adamw_", ADAM, 45, 420.0, host_us=60)
        m.wait()
        m.region("optimizer.step", start)
        m.region(f"step_{step}", began)
        bounds.append((f"step_{step}", began, m.now))
        if step == steps // 2:
            m.b.add("mark", "checkpoint saved", m.now, m.now, thread=1)
    end = m.now + 80_000_000
    m.b.meta["deviceProperties"] = [{"name": "NVIDIA H200"}]
    return _made(m, end, bounds, rng)


def _made(m: _Maker, end: int, bounds: list[tuple[str, int, int]], rng: np.random.Generator) -> Made:
    timeline = m.b.build()
    starts, ends, watts = (np.array(c) for c in zip(*m.pieces, strict=True))
    spent = (ends - starts) * 1e-9 * watts
    energy = np.full(len(timeline), np.nan)
    rows = timeline.device_rows
    energy[rows] = spent
    timeline.energy_j, timeline.error_j = energy, energy * 0.06
    # Running joules at any time, idle included: exact means for the samples.
    edges = np.concatenate([[START_NS], np.stack([starts, ends], 1).ravel(), [end]])
    level = np.concatenate([np.stack([np.full(len(starts), IDLE_W), watts], 1).ravel(), [IDLE_W]])
    sums = np.concatenate([[0.0], np.cumsum(np.diff(edges) * 1e-9 * level)])
    times = np.arange(START_NS, end + 1, 20_000_000)
    means = np.diff(np.interp(times, edges, sums)) / 0.02
    times, samples = times[1:], means * rng.normal(1.0, 0.01, len(means))
    domain = Domain(name="gpu0", source="nvml-samples", resolution_s=0.02, sample_noise=0.01, label="NVIDIA H200")
    table = _table(timeline, rows, spent, float(sums[-1]), (end - START_NS) * 1e-9, bounds)
    return Made(timeline, table, times, samples, _telemetry(times, samples), domain, end)


def _telemetry(times: Any, watts: Any) -> list[Telemetry]:
    return [
        Telemetry(
            time_ns=int(t), domain="gpu0", temperature_c=41 + 0.02 * i, clocks_mhz={"sm": 1980.0 - max(0.0, w - 500),
            "memory": 3201.0}, power_limit_w=700.0, throttle=("power cap",) if w > 560 else (), utilization_pct=97.0,
        )
        for i, (t, w) in enumerate(zip(times[::5].tolist(), watts[::5].tolist(), strict=True))
    ]  # fmt: skip


def _table(
    timeline: Timeline, rows: Any, spent: Any, total: float, seconds: float, bounds: list[tuple[str, int, int]]
) -> EnergyTable:
    lengths = (timeline["end_ns"][rows] - timeline["start_ns"][rows]) * 1e-9
    kernels = _rows(timeline, timeline["name"][rows], rows, spent, lengths, total, None)
    ops = _rows(timeline, timeline["name"][timeline["parent"][rows]], rows, spent, lengths, total, "op")
    starts = timeline["start_ns"][rows]
    steps = []
    for name, begin, end in bounds:
        inside = (starts >= begin) & (starts < end)
        wall = (end - begin) * 1e-9
        joules = float(spent[inside].sum()) + IDLE_W * (wall - float(lengths[inside].sum()))
        steps.append(
            EnergyRow(
                name=name, kind="step", calls=1, time_s=float(lengths[inside].sum()), energy_j=joules,
                error_j=0.03 * joules, share=joules / total, wall_s=wall,
            )
        )  # fmt: skip
    busy = float(lengths.sum())
    return EnergyTable(
        energy_j=total, error_j=0.008 * total, idle_j=total - float(spent.sum()), idle_error_j=0.02 * total,
        time_s=seconds, busy_s=busy, kernels=kernels, ops=ops, regions=_regions(timeline, rows, spent, lengths, total),
        steps=steps, groups=_groups(kernels), source="nvml-samples+counter", idle_w=IDLE_W,
        notes=["2 kernels always run together"],
    )  # fmt: skip


def _groups(kernels: list[EnergyRow]) -> list[EnergyRow]:
    members = [k for k in kernels if k.group == 0]
    joules = sum(k.energy_j for k in members)
    name = " + ".join(k.name for k in members)
    return [dataclasses.replace(members[0], name=name, kind="group", energy_j=joules, error_j=0.01 * joules)]


def _rows(
    timeline: Timeline, names: Any, rows: Any, spent: Any, lengths: Any, total: float, kind: str | None
) -> list[EnergyRow]:
    out = []
    for n in np.unique(names).tolist():
        mine = names == n
        name, joules = timeline.names[n], float(spent[mine].sum())
        out.append(
            EnergyRow(
                name=name, kind=kind or timeline.kind(int(rows[mine][0])), calls=int(mine.sum()),
                time_s=float(lengths[mine].sum()), energy_j=joules, error_j=0.06 * joules + 0.01,
                share=joules / total, group=GROUPS.get(name) if kind is None else None,
            )
        )  # fmt: skip
    return out


def _regions(timeline: Timeline, rows: Any, spent: Any, lengths: Any, total: float) -> list[EnergyRow]:
    launched = timeline["start_ns"][timeline["parent"][rows]]
    out: dict[str, EnergyRow] = {}
    for r in timeline.rows("region").tolist():
        name = timeline.name(r)
        if name.startswith("step_"):
            continue
        inside = (launched >= timeline["start_ns"][r]) & (launched < timeline["end_ns"][r])
        old = out.get(name) or EnergyRow(
            name=name, kind="region", calls=0, time_s=0.0, energy_j=0.0, error_j=0.0, share=0.0, wall_s=0.0
        )
        joules = old.energy_j + float(spent[inside].sum())
        wall = (old.wall_s or 0.0) + int(timeline["end_ns"][r] - timeline["start_ns"][r]) * 1e-9
        out[name] = dataclasses.replace(
            old, calls=old.calls + 1, energy_j=joules, error_j=0.04 * joules, share=joules / total, wall_s=wall,
            time_s=old.time_s + float(lengths[inside].sum()),
            with_backward_j=joules * 2.4 if name == "forward" else None,
        )  # fmt: skip
    return list(out.values())


def results(made: Made) -> dict[str, Result]:
    """What the analyses would say of it, were there shapes, counters, allocations and a second GPU."""
    return {
        "roofline": _roofline(made),
        "stalls": _stalls(made),
        "collectives": _collectives(),
        "memory": _memory(made),
    }


def _result(kind: str, rows: list[dict[str, Any]], **more: Any) -> Result:
    return Result(kind=kind, title=kind, columns=(), rows=rows, **more)


def _roofline(made: Made) -> Result:
    rows = []
    for i, k in enumerate(sorted(made.table.kernels, key=lambda r: -r.time_s)):
        matrix = "nvjet" in k.name or "flash" in k.name
        intensity = (300.0 + 40 * i) if matrix else 0.2 * (1 + i)
        flop_per_s = 0.6 * 989e12 if matrix else 0.8 * 4.8e12 * intensity
        flops = flop_per_s * k.time_s
        known = k.kind == "kernel"
        rows.append({
            "name": k.name, "op": None, "calls": k.calls, "time_s": k.time_s, "energy_j": k.energy_j,
            "unit": "matrix.bf16" if matrix else "vector.fp32", "intensity": intensity if known else None,
            "flop_per_s": flop_per_s if known else None, "bytes_from": "shapes" if known else None,
            "bound": ("compute" if matrix else "memory") if known else None, "roof_pct": 60.0 if known else None,
            "flop_per_j": flops / k.energy_j if known else None, "energy_pct": 50.0 if known else None,
        })  # fmt: skip
    facts = {
        "device": "h200", "device_name": "NVIDIA H200", "hbm_bytes_per_s": 4.8e12, "best_bytes_per_j": 6.6e9,
        "ceilings_flop_per_s": {"matrix.bf16": 989e12, "vector.fp32": 67e12, "matrix.fp8": 1979e12},
        "best_flop_per_j": {"matrix.bf16": 971e9, "vector.fp32": 76e9}, "mfu_pct": 31.0,
    }  # fmt: skip
    return _result("roofline", rows, facts=facts, missing={"l2_pct": "the catalogue has no L2 bandwidth of h200"})


def _stalls(made: Made) -> Result:
    rows = [
        {
            "name": k.name, "calls": k.calls, "time_s": k.time_s, "stalled_s": 0.7 * k.time_s, "energy_j": k.energy_j,
            "memory_stall_pct": 20.0 + 5 * i, "dependency_stall_pct": 18.0, "structural_stall_pct": 9.0,
            "main_reason": "long_scoreboard", "main_reason_means": "waits for device memory",
        }
        for i, k in enumerate(sorted(made.table.kernels, key=lambda r: -r.time_s)[:6])
    ]  # fmt: skip
    return _result("stalls", rows, facts={"memory_stall_pct": 31.0, "dependency_stall_pct": 18.0, "counted_pct": 92.0})


def _collectives() -> Result:
    rng, rows = np.random.default_rng(3), []
    for i in range(120):
        size = int(2 ** rng.integers(12, 28))
        rows.append({
            "kind": ("all_reduce", "all_gather", "reduce_scatter")[i % 3], "bytes": size,
            "time_s": 12e-6 + size / 250e9 * rng.uniform(0.8, 1.6),
            "overlap_pct": None if size < 2**14 else min(100.0, float(rng.uniform(4, 10) * np.log2(size / 2**14))),
            "start_s": 0.001 * i,
        })  # fmt: skip
    groups = [
        {"name": name, "count": 40, "bytes": 3e9, "time_s": 0.014 + 0.003 * i, "latency_s": 4e-4, "bytes_per_s": 2.1e11,
         "bus_bytes_per_s": 3.6e11, "overlap_pct": 55.0, "wait_s": 0.002, "path": "within a node",
         "algorithm": "ring LL"}
        for i, name in enumerate(("AllGather[dp]", "ReduceScatter[dp]", "AllReduce[tp]"))
    ]  # fmt: skip
    return _result("collectives", rows, facts={"count": 120, "by_group": groups})


def _memory(made: Made) -> Result:
    span = (made.timeline.end_ns - made.timeline.start_ns) * 1e-9
    points = [[span * i / 200, (12 + 20 * abs(np.sin(i / 200 * 12 * np.pi))) * 2**30] for i in range(200)]
    row = {
        "where": "GPU 0", "peak_bytes": 32 * 2.0**30, "peak_at_s": 0.1, "peak_op": "aten::mm", "mean_bytes": 2e10,
        "first_bytes": 1e10, "last_bytes": 1.3e10, "changes": 200,
    }  # fmt: skip
    return _result("memory", [row], facts={"timeline": {"GPU 0": points}})
