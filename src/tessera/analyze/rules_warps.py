"""Rules about what happens inside kernels, from hardware counters: silent without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .evidence import Case, Finding
from .kernel_names import short
from .stalls import Weighted

# Of the run's joules: below it a finding is not worth a user's time. Chosen.
KERNEL_SHARE = 0.05
# An SM hides the latency of memory with about half its warps (NVIDIA's CUDA best practices guide, "Occupancy": beyond
# 50% more seldom helps); below half of that it cannot.
LOW_OCCUPANCY_PCT = 25.0
# Chosen: of the life of a warp, when waiting for memory is what it mostly does.
MEMORY_STALL_PCT = 40.0
# Streams reach 85-95% of HBM on an H200 (h200/kernels.jsonl): waiting for memory at under half of that is latency.
LOW_DRAM_PCT = 40.0
REACHED_PCT = 85.0
# A kernel that keeps the tensor cores this busy has few warps on purpose (WGMMA: 12 of 64 on an H200 reach 90%).
BUSY_TENSOR_PCT = 50.0
DIVERGENCE_PCT = 20.0

_FIELDS = (
    "sm_occupancy", "memory_stall_pct", "warp_divergence_pct", "inst_issue_eff_pct", "tc_util_pct", "dram_read_gbps",
    "dram_write_gbps", "l2_hit_rate", "cp_async_inflight",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """A kernel with its counters and what it spent."""

    name: str
    seconds: float
    joules: float
    values: Mapping[str, float | None]
    dram_pct: float | None

    def at_least(self, field: str, limit: float) -> bool:
        value = self.values.get(field)
        return value is not None and value >= limit

    def below(self, field: str, limit: float) -> bool:
        value = self.values.get(field)
        return value is not None and value < limit


def low_occupancy(case: Case) -> Finding | None:
    """Occupancy under 25% while warps wait for memory 40% of their life: too few of them to hide it."""
    found = _worst(case, lambda k: k.below("sm_occupancy", LOW_OCCUPANCY_PCT) and _waits_for_memory(k))
    if found is None:
        return None
    most, joules, seconds = found
    evidence = (
        f"{short(most.name, 'kernel')} has {most.values['sm_occupancy']:.0f}% of its warps and waits for memory "
        f"{most.values['memory_stall_pct']:.0f}% of the time, {case.amount(joules)}"
    )
    action = "smaller tiles, fewer registers (launch bounds, maxnreg) or less shared memory let more blocks run at once"
    return _found(case, "low occupancy", most, joules, seconds, evidence, action)


def uncoalesced(case: Case) -> Finding | None:
    """Waiting for memory 40% of the time at under 40% of its bandwidth, with enough warps: how it is read, not what."""
    found = _worst(
        case,
        lambda k: (
            _waits_for_memory(k)
            and not k.below("sm_occupancy", LOW_OCCUPANCY_PCT)
            and k.dram_pct is not None
            and k.dram_pct < LOW_DRAM_PCT
        ),
    )
    if found is None:
        return None
    most, joules, seconds = found
    evidence = (
        f"{short(most.name, 'kernel')} waits for memory {most.values['memory_stall_pct']:.0f}% of the time at "
        f"{most.dram_pct:.0f}% of its bandwidth, {case.amount(joules)}"
    )
    action = "coalesce its accesses (layout, contiguous inner dimension) and prefetch with cp.async or TMA"
    return _found(case, "uncoalesced", most, joules, seconds, evidence, action)


def diverging(case: Case) -> Finding | None:
    """A fifth of the threads sit out the average instruction; saved are the issue slots spent on them."""
    found = _worst(case, lambda k: k.at_least("warp_divergence_pct", DIVERGENCE_PCT))
    if found is None:
        return None
    most, joules, seconds = found
    pct, issue_pct = most.values["warp_divergence_pct"] or 0.0, most.values["inst_issue_eff_pct"]
    evidence = (
        f"{pct:.0f}% of the threads of {short(most.name, 'kernel')} sit out its instructions, {case.amount(joules)}"
    )
    action = "predicate short branches, sort or group work so that a warp agrees, use warp shuffles and full warps"
    # Only where instructions are issued does a thread that sits out cost anything.
    part = pct / 100.0 * (issue_pct if issue_pct is not None else 0.0) / 100.0
    saves = (joules * part, seconds * part)
    return case.finding("divergence", joules, evidence, action, saves=saves, by="counters", confidence="medium")


def _waits_for_memory(kernel: _Kernel) -> bool:
    return kernel.at_least("memory_stall_pct", MEMORY_STALL_PCT) and not kernel.at_least("tc_util_pct", BUSY_TENSOR_PCT)


def _found(case: Case, kind: str, most: _Kernel, joules: float, seconds: float, evidence: str, action: str) -> Finding:
    """The saving: the same bytes at the bandwidth that streams reach."""
    if most.dram_pct is None:
        return case.finding(kind, joules, evidence, action, saves=(0.0, None), by="counters", confidence="low")
    part = max(0.0, 1.0 - most.dram_pct / REACHED_PCT)
    return case.finding(
        kind, joules, evidence, action, saves=(joules * part, seconds * part), by="counters", confidence="low"
    )  # fmt: skip


def _worst(case: Case, matches: Callable[[_Kernel], bool]) -> tuple[_Kernel, float, float] | None:
    """Of the kernels that match, the dearest, and the joules and seconds of all; None under the share."""
    hits = [k for k in _kernels(case) if matches(k)]
    joules, seconds = sum(k.joules for k in hits), sum(k.seconds for k in hits)
    if not hits or case.share(joules) < KERNEL_SHARE:
        return None
    return max(hits, key=lambda k: k.joules), joules, seconds


def _kernels(case: Case) -> list[_Kernel]:
    """Every kernel that has counters."""
    calls, timeline = case.calls, case.timeline
    if calls is None or timeline is None or not timeline.extra:
        return []
    names = timeline["name"][calls.rows]
    bandwidth = case.roofs.bytes_per_s if case.roofs is not None else None
    found = []
    for number in np.unique(names).tolist():
        mine = names == number
        mean = Weighted(timeline, calls.rows[mine], _FIELDS)
        if mean.counted_s == 0.0:
            continue
        values: dict[str, Any] = {f: mean.value(f) for f in _FIELDS}
        read, write = values["dram_read_gbps"], values["dram_write_gbps"]
        known = read is not None and write is not None and bandwidth
        found.append(_Kernel(
            name=timeline.names[number], seconds=mean.seconds, joules=float(case.joules[mine].sum()), values=values,
            dram_pct=100.0 * (read + write) * 1e9 / bandwidth if known and bandwidth else None,
        ))  # fmt: skip
    return found
