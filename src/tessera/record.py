"""`Record`: one event on the timeline, in one schema for every vendor.

A field that nobody measured is None, never 0, and `why(field)` says what would provide it. Percentages are 0 to 100.
Times are integer nanoseconds of the wall clock (epoch), which Kineto, drivers and other hosts share.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

Kind = Literal[
    "kernel", "memcpy", "memset", "collective", "runtime", "graph_launch", "op", "region", "mark", "counter", "python"
]
"""In a timeline's column `kind`, a Python frame is an "op"; `meta["frames"]` tells which ones are frames."""
KINDS: tuple[Kind, ...] = get_args(Kind)
CODE: dict[str, int] = {kind: code for code, kind in enumerate(KINDS)}
ON_DEVICE: tuple[Kind, ...] = ("kernel", "memcpy", "memset", "collective")
"""The kinds that run on an accelerator and spend its joules."""
APART = 0.0
"""Value of a region that is not inside another of its name, whatever their times say: asyncio tasks share a thread."""

NEEDS_NCU = "needs ncu: tessera run --counters"
NEEDS_POWER = 'needs power samples: activities=["gpu", "power"]'
NEEDS_SHAPES = "needs record_shapes=True"
NEEDS_TELEMETRY = "needs telemetry of the device: record with `tessera run`; `tessera doctor` shows what it reports"
NOT_THROTTLED = "none"
"""The reason of a device that reported no throttling."""
NEEDS_GPM = "needs GPM (Hopper or later)"
NEEDS_NCCL = "needs NCCL's own log (NCCL_DEBUG=INFO)"

CAPABILITY: dict[str, str] = {
    "sm_occupancy": NEEDS_NCU, "warp_divergence_pct": NEEDS_NCU, "inst_issue_eff_pct": NEEDS_NCU,
    "dram_read_gbps": NEEDS_NCU, "dram_write_gbps": NEEDS_NCU, "l2_hit_rate": NEEDS_NCU, "l2_gbps": NEEDS_NCU,
    "smem_bank_conflicts": NEEDS_NCU, "l1_transactions": NEEDS_NCU, "smem_transactions": NEEDS_NCU,
    "tc_util_pct": NEEDS_NCU, "alu_util_pct": NEEDS_NCU, "cp_async_inflight": NEEDS_NCU,
    "warps_launched": NEEDS_NCU, "warps_active": NEEDS_NCU, "warps_eligible": NEEDS_NCU,
    "memory_stall_pct": NEEDS_NCU, "dependency_stall_pct": NEEDS_NCU, "structural_stall_pct": NEEDS_NCU,
    "power_w": NEEDS_POWER, "temp_c": NEEDS_TELEMETRY, "throttle_reason": NEEDS_TELEMETRY,
    "energy_j": NEEDS_POWER, "error_j": NEEDS_POWER,
    "pcie_gbps": NEEDS_GPM, "nvlink_gbps": NEEDS_GPM,
    "flops": NEEDS_SHAPES, "shapes": NEEDS_SHAPES,
    "collective_algorithm": NEEDS_NCCL, "collective_path": NEEDS_NCCL,
}  # fmt: skip
"""Field -> what would provide it if it is missing."""

COUNTERS = frozenset(f for f, why in CAPABILITY.items() if why == NEEDS_NCU) | {"stall_reasons"}
"""The fields that hardware counters provide."""

_ONLY: dict[str, tuple[Kind, ...]] = {
    "memcpy_dir": ("memcpy",), "memcpy_gbps": ("memcpy",), "pinned": ("memcpy",),
    "collective_type": ("collective",), "collective_bytes": ("collective",), "collective_overlap_pct": ("collective",),
    "collective_algorithm": ("collective",), "collective_path": ("collective",), "value": ("counter",),
}  # fmt: skip


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One kernel, copy, collective, runtime call, operator, region, mark or counter on the timeline."""

    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    kernel_name: str | None = None
    device: int | None = None
    stream_id: int | None = None
    thread_id: int | None = None
    rank: int | None = None
    host: str | None = None
    op: str | None = None
    region: str | None = None
    module: str | None = None
    shapes: str | None = None
    flops: float | None = None
    bytes: int | None = None
    value: float | None = None
    unit: str | None = None

    energy_j: float | None = None
    error_j: float | None = None
    power_w: float | None = None
    temp_c: float | None = None
    throttle_reason: str | None = None

    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = None
    shared_bytes: int | None = None

    sm_occupancy: float | None = None
    warp_divergence_pct: float | None = None
    inst_issue_eff_pct: float | None = None
    warps_launched: float | None = None
    warps_active: float | None = None
    warps_eligible: float | None = None
    tc_util_pct: float | None = None
    alu_util_pct: float | None = None
    memory_stall_pct: float | None = None
    dependency_stall_pct: float | None = None
    structural_stall_pct: float | None = None
    stall_reasons: dict[str, float] | None = None
    dram_read_gbps: float | None = None
    dram_write_gbps: float | None = None
    l2_hit_rate: float | None = None
    l2_gbps: float | None = None
    l1_transactions: float | None = None
    smem_transactions: float | None = None
    smem_bank_conflicts: float | None = None
    cp_async_inflight: float | None = None

    memcpy_dir: str | None = None
    memcpy_gbps: float | None = None
    pinned: bool | None = None
    pcie_gbps: float | None = None
    nvlink_gbps: float | None = None

    collective_type: str | None = None
    collective_bytes: int | None = None
    collective_overlap_pct: float | None = None
    collective_algorithm: str | None = None
    collective_path: str | None = None

    @property
    def start_us(self) -> float:
        """Start in microseconds of the wall clock; a float of that size has steps of 0.25 us."""
        return self.start_ns / 1e3

    @property
    def end_us(self) -> float:
        """End in microseconds of the wall clock."""
        return self.end_ns / 1e3

    @property
    def seconds(self) -> float:
        """Seconds from start to end."""
        return (self.end_ns - self.start_ns) * 1e-9

    def why(self, field: str) -> str | None:
        """Return what would provide a field, or that it does not apply; None if the field has a value."""
        if getattr(self, field) is not None:
            return None
        kinds = _ONLY.get(field)
        if kinds is not None and self.kind not in kinds:
            return f"only a {' or '.join(kinds)} has it"
        if field == "flops" and self.shapes is not None:
            return "shapes do not tell its FLOPs" if self.kind == "op" else "an operator has FLOPs: see its own record"
        if self.kind not in ON_DEVICE and field in ("energy_j", "error_j", "power_w"):
            return f"a table has the joules of {self.kind}s, which are those of what they launched: recording.energy()"
        if field in CAPABILITY and self.kind not in ON_DEVICE and field not in ("shapes", "flops"):
            return "only what runs on a device has it"
        return CAPABILITY.get(field, "not recorded")

    @property
    def missing(self) -> dict[str, str]:
        """Every field that is None -> why."""
        fields: tuple[str, ...] = self.__struct_fields__
        return {f: why for f in fields if (why := self.why(f)) is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, including those that are None."""
        return {f: getattr(self, f) for f in self.__struct_fields__}
