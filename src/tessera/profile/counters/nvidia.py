"""Converts the metrics of Nsight Compute (NVIDIA) to the schema.

Sources of the names: [CLI] the nvprof comparison table in Nsight Compute's CLI manual
(docs.nvidia.com/nsight-compute/NsightComputeCli, "Metric Comparison"); [SEC] the section file in Nsight Compute's
`sections/` folder that shows the metric; [PG] the metrics and stall reasons in its Profiling Guide
(docs.nvidia.com/nsight-compute/ProfilingGuide). `ncu --query-metrics` lists all of these names for an H200 (sm_90, ncu
2025.3.1); benchmarks/device/check_counters.py compares them with what is known of some kernels. A metric that another
chip does not have is not asked for there, and its field stays None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .names import CounterMetric, Normalised, apply, giga, put, same

THREADS_PER_WARP = 32
TMA_SINCE = 9  # compute capability: Hopper
SECTOR_BYTES = 32  # [PG] a cache line is four sectors of 32 bytes


def _divergence(threads: float) -> float:
    # Threads that take part in an average warp instruction. Partial warps and early exits also count as divergence.
    return 100.0 * (1.0 - threads / THREADS_PER_WARP)


def _sectors(count: float) -> float:
    return count * SECTOR_BYTES


def _sector_rate(per_second: float) -> float:
    return per_second * SECTOR_BYTES * 1e-9


_ACTIVE = ".avg.pct_of_peak_sustained_active"  # of the cycles in which the unit had work, not of the elapsed cycles
_CLI, _OCC, _SCHED = "[CLI]", "[SEC] Occupancy", "[SEC] SchedulerStatistics"
_PIPES, _MEM, _LAUNCH = "[SEC] ComputeWorkloadAnalysis", "[SEC] MemoryWorkloadAnalysis", "[SEC] LaunchStatistics"
_MATRIX = "sm__pipe_tensor_type_hmma_hgmma_qgmma_imma_igmma_bmma_bgmma_cycles_active"
_THREADS = "smsp__thread_inst_executed_per_inst_executed.ratio"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
TABLE: dict[str, CounterMetric] = {
    "gpu__time_duration.sum": CounterMetric("seconds", same, "s", "[SEC] SpeedOfLight: duration"),
    "sm__warps_active" + _ACTIVE: CounterMetric("sm_occupancy", same, "%", f"{_OCC}: achieved occupancy"),
    "sm__maximum_warps_per_active_cycle_pct": CounterMetric("theoretical_occupancy_pct", same, "%", _OCC),
    "sm__warps_active.avg.per_cycle_active": CounterMetric("warps_active", same, "warps per SM", _OCC),
    "smsp__warps_eligible.sum.per_cycle_active": CounterMetric("warps_eligible_gpu", same, "warps", _SCHED),
    "smsp__warps_launched.sum": CounterMetric("warps_launched", same, "warps", f"{_CLI} warps_launched"),
    _THREADS: CounterMetric("warp_divergence_pct", _divergence, "%", f"{_CLI} warp_execution_efficiency"),
    "smsp__issue_active" + _ACTIVE: CounterMetric("inst_issue_eff_pct", same, "%", f"{_SCHED}: one or more eligible"),
    "dram__bytes_read.sum": CounterMetric("dram_read_bytes", same, "B", f"{_CLI} dram_read_bytes"),
    "dram__bytes_write.sum": CounterMetric("dram_write_bytes", same, "B", f"{_CLI} dram_write_bytes"),
    "dram__bytes_read.sum.per_second": CounterMetric("dram_read_gbps", giga, "GB/s", f"{_CLI} dram_read_throughput"),
    "dram__bytes_write.sum.per_second": CounterMetric("dram_write_gbps", giga, "GB/s", f"{_CLI} dram_write_throughput"),
    "lts__t_sector_hit_rate.pct": CounterMetric("l2_hit_rate", same, "%", _MEM),
    # lts__t_bytes would count bytes twice that cross between the halves of the L2 (1.55 of a stream's bytes, H200).
    "lts__t_sectors_srcunit_tex.sum": CounterMetric("l2_bytes", _sectors, "B", "[PG] L2 slices, from the SMs' L1TEX"),
    "lts__t_sectors_srcunit_tex.sum.per_second": CounterMetric("l2_gbps", _sector_rate, "GB/s", "[PG] L2 slices"),
    "l1tex__t_sectors.sum": CounterMetric(
        "l1_transactions", same, "32 B sectors", f"{_CLI} gld_transactions and the like"
    ),
    _WAVEFRONTS: CounterMetric(
        "smem_transactions", same, "wavefronts", f"{_CLI} shared_load_transactions and the like"
    ),
    _CONFLICTS: CounterMetric(
        "smem_bank_conflicts", same, "wavefronts", "[PG] l1tex: more wavefronts than without conflicts"
    ),
    # Matrix instructions alone, if the chip can tell: the tensor pipe also runs HFMA2, which is not a matrix product.
    _MATRIX + _ACTIVE: CounterMetric("tc_util_pct", same, "%", "ncu --query-metrics: without HFMA2.MMA"),
    "sm__pipe_tensor_cycles_active" + _ACTIVE: CounterMetric("tc_util_pct", same, "%", _PIPES),
    "sm__pipe_tensor_op_dmma_cycles_active" + _ACTIVE: CounterMetric(
        "dmma_util_pct", same, "%", f"{_PIPES}: FP64 matrices"
    ),
    "sm__pipe_alu_cycles_active" + _ACTIVE: CounterMetric("alu_util_pct", same, "%", f"{_PIPES}: integer and logic"),
    "sm__pipe_fma_cycles_active" + _ACTIVE: CounterMetric("alu_util_pct", same, "%", f"{_PIPES}: FP32"),
    "sm__pipe_fp64_cycles_active" + _ACTIVE: CounterMetric("alu_util_pct", same, "%", f"{_PIPES}: FP64"),
    "smsp__inst_executed_op_ldgsts.sum": CounterMetric("cp_async_instructions", same, "instructions", "[PG] LDGSTS"),
    "sm__inst_executed_pipe_tma.sum": CounterMetric("tma_instructions", same, "instructions", f"{_PIPES}: TMA"),
    "launch__registers_per_thread": CounterMetric("registers_per_thread", same, "registers", _LAUNCH),
    "launch__waves_per_multiprocessor": CounterMetric("waves_per_sm", same, "waves", _LAUNCH),
    "launch__sm_count": CounterMetric("sms", same, "SMs", _LAUNCH),
}
LARGEST = ("alu_util_pct",)
"""Fields that take the largest of several metrics: the busiest arithmetic pipe is the one that limits."""

MEMORY, DEPENDENCY, STRUCTURAL, NO_STALL = "memory_stall_pct", "dependency_stall_pct", "structural_stall_pct", None


class Stall(NamedTuple):
    """The class of a stall reason, and its meaning (after the descriptions in [PG], "Warp Stall Reasons")."""

    kind: str | None
    reason: str


STALLS: dict[str, Stall] = {
    "long_scoreboard": Stall(MEMORY, "waits for data of global, local, surface or texture memory"),
    "lg_throttle": Stall(MEMORY, "the queue for local and global accesses is full"),
    "tex_throttle": Stall(MEMORY, "the queue for texture and surface accesses is full"),
    "mio_throttle": Stall(MEMORY, "the memory input/output queue is full: shared memory, special functions, branches"),
    "drain": Stall(MEMORY, "after its exit, waits for stores to be written"),
    "membar": Stall(MEMORY, "waits at a memory barrier for accesses to finish"),
    "imc_miss": Stall(MEMORY, "missed in the cache of immediate constants"),
    "short_scoreboard": Stall(DEPENDENCY, "waits for a result of shared memory or a special function"),
    "wait": Stall(DEPENDENCY, "waits a fixed number of cycles for the instruction before"),
    "barrier": Stall(DEPENDENCY, "waits for the other warps of the block"),
    "gmma": Stall(DEPENDENCY, "waits for its warp group (WGMMA; Hopper only)"),
    "branch_resolving": Stall(DEPENDENCY, "waits for the target of a branch"),
    "sleeping": Stall(DEPENDENCY, "all its threads sleep, or have yielded to others"),
    "math_pipe_throttle": Stall(STRUCTURAL, "the arithmetic pipe it needs is taken"),
    "dispatch_stall": Stall(STRUCTURAL, "the dispatcher holds it back: a conflict over registers or pipes"),
    "not_selected": Stall(STRUCTURAL, "could issue, but the scheduler's one slot went to another warp"),
    "no_instruction": Stall(STRUCTURAL, "its next instruction has not been fetched"),
    "misc": Stall(NO_STALL, "a reason the hardware does not tell"),
    "selected": Stall(NO_STALL, "issues in this cycle: no stall"),
}
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"  # [SEC] WarpStateStatistics
STALL_METRICS = {_STALL.format(s): s for s in STALLS}
"""Cycles that a warp spends in a state per issued instruction; their sum is the time between two of its issues."""

# [SEC] SpeedOfLight_RooflineChart: an addition or a product is one operation, a fused one two; per thread, predicated
# on. HFMA2 and similar instructions are left out: compilers also use them to load constants.
_SASS = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum"
FLOPS: dict[str, float] = {
    _SASS.format(kind + op): each for kind in "fd" for op, each in (("add", 1.0), ("mul", 1.0), ("fma", 2.0))
}
# [SEC] SpeedOfLight_HierarchicalTensorRooflineChart: operations of the tensor cores, a multiply-add being two.
FLOPS |= {
    f"sm__ops_path_tensor_src_{kind}.sum": 1.0 for kind in ("bf16_dst_fp32", "fp16", "tf32_dst_fp32", "fp64", "fp8")
}

CP_ASYNC = "ncu counts asynchronous copies as they are issued (LDGSTS, TMA), not how many are under way"


def metrics(flops: bool = False) -> list[str]:
    """Return the metrics to ask ncu for. Those for FLOPs need passes of their own, so they must be asked for."""
    return [*TABLE, *STALL_METRICS, *(FLOPS if flops else ())]


def available(wanted: Iterable[str], base_names: Iterable[str]) -> list[str]:
    """Return the metrics that a chip has, by `ncu --query-metrics`, which does not list launch attributes."""
    on_chip = frozenset(base_names)
    return [m for m in wanted if m.partition(".")[0] in on_chip or m.startswith(("launch__", "sm__maximum_"))]


def normalise(raw: Mapping[str, float]) -> Normalised:
    """Convert raw ncu metrics in SI units to the schema."""
    result = apply(TABLE, raw, LARGEST)
    tma = 0.0 if raw.get("device__attribute_compute_capability_major", TMA_SINCE) < TMA_SINCE else None
    copies = raw.get("smsp__inst_executed_op_ldgsts.sum"), raw.get("sm__inst_executed_pipe_tma.sum", tma)
    if copies == (0.0, 0.0):  # nothing was issued, so nothing was under way
        put(result, "cp_async_inflight", 0.0)
    else:
        result.missing["cp_async_inflight"] = CP_ASYNC
    eligible, sms = (result.figures.pop(f, None) for f in ("warps_eligible_gpu", "sms"))
    if eligible is not None and sms:
        put(result, "warps_eligible", eligible / sms)  # from the sum: ncu prints only two decimals of the mean
    else:
        result.missing["warps_eligible"] = "the profiler gave no smsp__warps_eligible or launch__sm_count"
    dmma = result.figures.pop("dmma_util_pct", 0.0)
    if dmma > result.values.get("tc_util_pct", 0.0):
        put(result, "tc_util_pct", min(100.0, dmma))
    states = {s: raw[m] for m, s in STALL_METRICS.items() if raw.get(m) is not None}
    cycles = sum(states.values())
    if cycles > 0.0:
        shares = {s: 100.0 * v / cycles for s, v in states.items()}
        put(result, "stall_reasons", {s: round(v, 3) for s, v in shares.items() if v >= 5e-4 and s != "selected"})
        for kind in (MEMORY, DEPENDENCY, STRUCTURAL):
            put(result, kind, sum(v for s, v in shares.items() if STALLS[s].kind == kind))
    else:
        result.missing.update(dict.fromkeys((MEMORY, DEPENDENCY, STRUCTURAL, "stall_reasons"), "no warp states given"))
    counted = {m: each * raw[m] for m, each in FLOPS.items() if raw.get(m) is not None}
    if counted:
        put(result, "flops", sum(counted.values()))
    return result
