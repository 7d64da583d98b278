"""Rules about what the device ran: precision, alignment, fusion; and, from hardware counters, what slowed it down."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..advice import Advice
from ..attribute.work import OpWork
from ..record import CODE
from ..timeline.columns import NONE, Ints
from ..units import format_bytes
from .evidence import RunEvidence, save_by_products
from .kernel_names import short
from .kernels import CounterMeans

# Shares of the run's joules below which advice is not worth a user's time: chosen, not measured.
FUSE_SHARE = 0.2
FP32_SHARE = 0.1
UNALIGNED_SHARE = 0.05
LOW_TENSOR_SHARE = 0.1
ACCUMULATOR_SHARE = 0.1
KERNEL_SHARE = 0.05
# Large products reach 65-95% of the peak on an H200; under half of that, something is wrong.
LOW_TENSOR_PCT = 35.0
# Factor on the rows of a product: the saving is predicted for this many times the rows, the least that is worth a
# change.
LARGER = 4
# Tiles and swizzles are multiples of 64 elements. 16-byte loads of 16-bit numbers need multiples of 8 (cuBLAS, "Tensor
# Core Usage"); 64 costs hardly more and suits every kernel: 50257 becomes 50304.
PADDING = 64

_FP32_GEMM = re.compile(r"(?<!t)sgemm|simt_\w*gemm|f32f32_f32f32|ffma\w*gemm", re.IGNORECASE)
_UNALIGNED = re.compile(r"gemm\w*align[12](?!\d)", re.IGNORECASE)
_POINTWISE = re.compile(
    r"elementwise|multi_tensor_apply|dropout|layer_norm|batch_norm|softmax|reduce_kernel|CatArray|masked_|GammaBeta",
    re.IGNORECASE,
)
_COMPILED = re.compile(r"^triton_")
# cuBLAS and CUTLASS name the accumulator before the instruction: s16816 is fp32, h16816 is fp16.
_FP16_INTO_FP32 = re.compile(r"_s1(?:6816|688)gemm_f(?:p)?16", re.IGNORECASE)
_CHAINED = frozenset({"elementwise", "copy", "norm", "batch_norm", "softmax", "random", "reduce"})
# An SM hides the latency of memory with about half its warps (NVIDIA's CUDA best practices guide, "Occupancy": more
# than 50% rarely helps); below half of that, it cannot.
LOW_OCCUPANCY_PCT = 25.0
# Chosen: the share of a warp's life above which it mostly waits for memory.
MEMORY_STALL_PCT = 40.0
# Streams reach 85-95% of HBM on an H200: waiting for memory at less than half of that means latency.
LOW_DRAM_PCT = 40.0
REACHED_PCT = 85.0
# A kernel that keeps the tensor cores this busy has few warps on purpose (WGMMA: 12 of 64 on an H200 reach 90%).
BUSY_TENSOR_PCT = 50.0
DIVERGENCE_PCT = 20.0

_FIELDS = (
    *("sm_occupancy", "memory_stall_pct", "warp_divergence_pct", "inst_issue_eff_pct", "tc_util_pct"),
    *("dram_read_gbps", "dram_write_gbps"),
)


def check_fp32(run: RunEvidence) -> Advice | None:
    """Advise if products in full fp32 on the vector units take 10% of the joules or more, where TF32 or bf16 would do.

    The saving is predicted for the same products in TF32, or comes from the catalogue's joules per FLOP.
    """
    joules, seconds = run.sum_kernels(lambda r: r.kind == "kernel" and _is_fp32_gemm(r.name))
    if run.share(joules) < FP32_SHARE:
        return None
    evidence = f"matrix products in full fp32 spend {run.format_amount(joules)}"
    formats = run.formats
    if formats is None:
        formats = frozenset(("tf32", "bf16"))
    narrow = next((f for f in ("tf32", "bf16", "fp16") if f in formats), None)
    if narrow is None:
        return None  # this chip has no matrix unit for any of them
    action = _name_formats(formats)
    saves = None
    if run.calls is not None:
        saves = save_by_products(run, run.match_calls(_is_fp32_gemm), lambda w: ("fp32", w.sizes or (), narrow))
    if saves is not None:
        return run.advise("fp32", joules, evidence, action, saves=saves, by="prediction", confidence="high")
    figures = run.device.energy if run.device is not None else {}
    wide, less = figures.get("matmul_fp32_j_per_flop"), figures.get(f"matmul_{narrow}_j_per_flop")
    if wide and less:
        left = less.value / wide.value
        saves = (joules * (1.0 - left), seconds * (1.0 - left))
        return run.advise("fp32", joules, evidence, action, saves=saves, by="roofline", confidence="medium")
    return run.advise("fp32", joules, evidence, action)


def _name_formats(formats: frozenset[str]) -> str:
    """Say how to use the narrow formats that a chip has."""
    ways = ['torch.set_float32_matmul_precision("high") (TF32)'] if "tf32" in formats else []
    ways += ["bf16 autocast"] if "bf16" in formats else ["fp16 autocast with a GradScaler"] if "fp16" in formats else []
    return (
        f"{' or '.join(ways)} takes a sixth of it or less" if "tf32" in formats else f"{' or '.join(ways)} takes less"
    )


def _is_fp32_gemm(name: str) -> bool:
    return bool(_FP32_GEMM.search(name)) and "tf32" not in name


def check_alignment(run: RunEvidence) -> Advice | None:
    """Advise if products with sizes that are not multiples of 8 run on kernels that load single elements, for 5%.

    Such kernels have align1 or align2 in their names. The saving is predicted for the same products padded to multiples
    of 64.
    """
    joules, seconds = run.sum_kernels(lambda r: r.kind == "kernel" and _UNALIGNED.search(r.name))
    if run.share(joules) < UNALIGNED_SHARE:
        return None
    evidence = f"matrix products of odd sizes (kernels with align1) spend {run.format_amount(joules)}"
    action = "pad the dimension to a multiple of 8 (a vocabulary of 50257 to 50304), so that the fast kernels fit"
    saves = None
    if run.calls is not None:
        chosen = run.match_calls(_UNALIGNED.search)
        odd = _odd_sizes(run, chosen)
        if odd is not None:
            evidence = (
                f"matrix products with a dimension of {odd} (kernels with align1) spend {run.format_amount(joules)}"
            )
            action = f"pad {odd} to {_pad(odd)}, or any multiple of 8, so that the fast kernels fit"
        saves = save_by_products(run, chosen, _with_padding, layouts=("nt", "nn", "tn"))
    if saves is not None:
        if saves[1] > 0:
            evidence += f", {seconds / max(seconds - saves[1], 1e-12):.0f} times the time of padded ones"
        return run.advise("unaligned", joules, evidence, action, saves=saves, by="prediction", confidence="high")
    return run.advise("unaligned", joules, evidence, action)


def _with_padding(work: OpWork) -> tuple[str | None, Sequence[int], str | None]:
    batch, *sizes = work.sizes or (1, 1, 1, 1)
    return work.precision, (batch, *map(_pad, sizes)), work.precision


def _pad(size: int) -> int:
    return size if size % 8 == 0 else -(-size // PADDING) * PADDING


def _odd_sizes(run: RunEvidence, chosen: NDArray[np.bool_]) -> int | None:
    """Return the odd dimension that takes most of the time."""
    calls = run.calls
    assert calls is not None
    spent: dict[int, float] = {}
    for number, work in enumerate(calls.works):
        own = chosen & (calls.work == number)
        for size in (work.sizes or ())[1:]:
            if size % 8 and np.any(own):
                spent[size] = spent.get(size, 0.0) + float(calls.seconds[own].sum())
    return max(spent, key=spent.__getitem__) if spent else None


def check_tensor_use(run: RunEvidence) -> Advice | None:
    """Advise if aligned 16- or 8-bit products above the ridge reach under 35% of the peak, for 10% of the joules.

    The saving is what the same FLOPs would cost in products of four times the rows.
    """
    calls, ceilings = run.calls, run.ceilings
    if calls is None or ceilings is None:
        return None
    peaks = np.array([*(ceilings.flops_per_s.get(u, np.nan) for u in calls.units), np.nan])[calls.unit]
    matrix = np.array([*(u.startswith("matrix") for u in calls.units), False])[calls.unit]
    product = np.array([*(w.sizes is not None for w in calls.works), False])[calls.work]
    with np.errstate(divide="ignore", invalid="ignore"):
        pct = 100.0 * calls.flops / calls.seconds / peaks
        above = calls.flops / calls.bytes >= peaks / (ceilings.bytes_per_s or np.inf)
    low = matrix & product & above & (pct < LOW_TENSOR_PCT) & (calls.flops > 0) & ~run.match_calls(_UNALIGNED.search)
    joules = float(run.joules[low].sum())
    if not np.any(low) or run.share(joules) < LOW_TENSOR_SHARE:
        return None
    mean_pct = float(np.average(pct[low], weights=calls.seconds[low]))
    evidence = f"matrix products reach {mean_pct:.0f}% of the tensor cores' peak and spend {run.format_amount(joules)}"
    action = "fewer, larger products (batch, fuse q, k and v), dimensions that are multiples of 64, contiguous operands"
    saves = save_by_products(run, low, _larger, work_factor=LARGER)
    if saves is None:
        return run.advise("low tensor use", joules, evidence, action, saves=(0.0, None), by="roofline")
    return run.advise("low tensor use", joules, evidence, action, saves=saves, by="prediction", confidence="low")


def _larger(work: OpWork) -> tuple[str | None, Sequence[int], str | None]:
    batch, m, n, k = work.sizes or (1, 1, 1, 1)
    return work.precision, (batch, m * LARGER, n, k), work.precision


def check_accumulators(run: RunEvidence) -> Advice | None:
    """Advise if a GeForce runs fp16 products with fp32 accumulators, at half rate, for 10% of the joules.

    Source: NVIDIA's Ada architecture whitepaper, table of peak rates (FP16 with FP32 accumulate is half of FP16
    accumulate on GeForce boards). Data-centre boards have one rate for both.
    """
    if run.device is None or not run.device.id.startswith("rtx-") or "ada" in run.device.id or "a6000" in run.device.id:
        return None
    joules, seconds = run.sum_kernels(lambda r: r.kind == "kernel" and _FP16_INTO_FP32.search(r.name))
    if run.share(joules) < ACCUMULATOR_SHARE:
        return None
    evidence = f"fp16 products with fp32 accumulators, at half this board's rate, spend {run.format_amount(joules)}"
    action = "torch.backends.cuda.matmul.allow_fp16_accumulation = True, where the sums stay in range"
    saves = (0.3 * joules, 0.5 * seconds)  # time halves; the operations switch as much as before
    return run.advise("accumulators", joules, evidence, action, saves=saves, by="roofline", confidence="low")


def check_fusion(run: RunEvidence) -> Advice | None:
    """Advise if elementwise and reduction kernels spend 20% of the joules or more, and nothing was compiled.

    The saving is by the bytes of intermediates: what one kernel writes and the next on its stream reads again.
    """
    if any(_COMPILED.match(r.name) for r in run.table.kernels):
        return None
    rows = [r for r in run.table.kernels if r.kind == "kernel" and _POINTWISE.search(r.name)]
    joules = sum(r.energy_j for r in rows)
    if run.share(joules) < FUSE_SHARE:
        return None
    calls = sum(r.calls for r in rows)
    evidence = f"{calls:,} elementwise and reduction kernels spend {run.format_amount(joules)} moving memory"
    action = "torch.compile fuses them, so that each tensor moves once"
    chains = _sum_chains(run)
    if chains is None:
        return run.advise("fuse", joules, evidence, action)
    moved, saved_j, saved_s = chains
    if moved <= 0.0:
        return None  # no kernel takes what another made, so there is nothing to fuse
    evidence += f", {format_bytes(moved)} of it only between two of them"
    return run.advise("fuse", joules, evidence, action, saves=(saved_j, saved_s), by="roofline", confidence="medium")


def _sum_chains(run: RunEvidence) -> tuple[float, float, float] | None:
    """Return bytes between consecutive kernels with tensors of one size, and their joules and seconds.

    In training, the backward pass needs most of what the forward pass made, so only the second read is saved.
    """
    calls, timeline = run.calls, run.timeline
    if calls is None or timeline is None or not calls.shapes_recorded:
        return None
    order: Ints = np.lexsort(
        (timeline["start_ns"][calls.rows], timeline["stream"][calls.rows], timeline["device"][calls.rows])
    )
    order = order[timeline["kind"][calls.rows][order] == CODE["kernel"]]
    works = calls.works
    chained = np.array([*(w.family in _CHAINED and bool(w.out_bytes is not None) for w in works), False], bool)
    written = np.array([*(w.out_bytes or 0.0 for w in works), 0.0])
    elements = np.array([*(w.elements or -1 for w in works), -1])
    first, second = order[:-1], order[1:]
    a, b = calls.work[first], calls.work[second]
    both = chained[a] & chained[b] & (elements[a] == elements[b]) & (written[a] > 0)
    both &= timeline["stream"][calls.rows[first]] == timeline["stream"][calls.rows[second]]
    both &= calls.op[first] != calls.op[second]
    training = bool(np.any(timeline.linked.forward_op != NONE))
    spared = np.zeros(len(calls.rows))
    np.add.at(spared, second[both], written[a[both]])
    if not training:
        np.add.at(spared, first[both], written[a[both]])
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(calls.bytes > 0, np.clip(spared / calls.bytes, 0.0, 1.0), 0.0)
    return float(spared.sum()), float((run.joules * part).sum()), float((calls.seconds * part).sum())


# -- hardware counters: silent without them -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _CountedKernel:
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


def check_occupancy(run: RunEvidence) -> Advice | None:
    """Advise if occupancy is under 25% while warps wait for memory 40% of their life: too few warps to hide it."""
    worst = _find_worst(run, lambda k: k.below("sm_occupancy", LOW_OCCUPANCY_PCT) and _waits_for_memory(k))
    if worst is None:
        return None
    most, joules, seconds = worst
    evidence = (
        f"{short(most.name, 'kernel')} has {most.values['sm_occupancy']:.0f}% of its warps and waits for memory "
        f"{most.values['memory_stall_pct']:.0f}% of the time, {run.format_amount(joules)}"
    )
    action = "smaller tiles, fewer registers (launch bounds, maxnreg) or less shared memory let more blocks run at once"
    return _advise_kernel(run, "low occupancy", most, joules, seconds, evidence, action)


def check_coalescing(run: RunEvidence) -> Advice | None:
    """Advise if enough warps wait for memory 40% of the time at under 40% of its bandwidth: a poor access pattern."""
    worst = _find_worst(
        run,
        lambda k: (
            _waits_for_memory(k)
            and not k.below("sm_occupancy", LOW_OCCUPANCY_PCT)
            and k.dram_pct is not None
            and k.dram_pct < LOW_DRAM_PCT
        ),
    )
    if worst is None:
        return None
    most, joules, seconds = worst
    evidence = (
        f"{short(most.name, 'kernel')} waits for memory {most.values['memory_stall_pct']:.0f}% of the time at "
        f"{most.dram_pct:.0f}% of its bandwidth, {run.format_amount(joules)}"
    )
    action = "coalesce its accesses (layout, contiguous inner dimension) and prefetch with cp.async or TMA"
    return _advise_kernel(run, "uncoalesced", most, joules, seconds, evidence, action)


def check_divergence(run: RunEvidence) -> Advice | None:
    """Advise if a fifth of the threads are inactive in the average instruction; their issue slots would be saved."""
    worst = _find_worst(run, lambda k: k.at_least("warp_divergence_pct", DIVERGENCE_PCT))
    if worst is None:
        return None
    most, joules, seconds = worst
    pct, issue_pct = most.values["warp_divergence_pct"] or 0.0, most.values["inst_issue_eff_pct"]
    name, amount = short(most.name, "kernel"), run.format_amount(joules)
    evidence = f"{pct:.0f}% of the threads of {name} sit out its instructions, {amount}"
    action = "predicate short branches, sort or group work so that a warp agrees, use warp shuffles and full warps"
    # An inactive thread costs something only when instructions are issued.
    part = pct / 100.0 * (issue_pct if issue_pct is not None else 0.0) / 100.0
    saves = (joules * part, seconds * part)
    return run.advise("divergence", joules, evidence, action, saves=saves, by="counters", confidence="medium")


def _waits_for_memory(kernel: _CountedKernel) -> bool:
    return kernel.at_least("memory_stall_pct", MEMORY_STALL_PCT) and not kernel.at_least("tc_util_pct", BUSY_TENSOR_PCT)


def _advise_kernel(
    run: RunEvidence, kind: str, most: _CountedKernel, joules: float, seconds: float, evidence: str, action: str
) -> Advice:
    """Advise on a kernel; the saving is by the same bytes at the bandwidth that streams reach."""
    if most.dram_pct is None:
        return run.advise(kind, joules, evidence, action, saves=(0.0, None), by="counters", confidence="low")
    part = max(0.0, 1.0 - most.dram_pct / REACHED_PCT)
    return run.advise(
        kind, joules, evidence, action, saves=(joules * part, seconds * part), by="counters", confidence="low"
    )


def _find_worst(
    run: RunEvidence, matches: Callable[[_CountedKernel], bool]
) -> tuple[_CountedKernel, float, float] | None:
    """Return the most expensive matching kernel, and the joules and seconds of all matches; None under the share."""
    hits = [k for k in _kernels(run) if matches(k)]
    joules, seconds = sum(k.joules for k in hits), sum(k.seconds for k in hits)
    if not hits or run.share(joules) < KERNEL_SHARE:
        return None
    return max(hits, key=lambda k: k.joules), joules, seconds


def _kernels(run: RunEvidence) -> list[_CountedKernel]:
    """Return every kernel that has counters."""
    calls, timeline = run.calls, run.timeline
    if calls is None or timeline is None or not timeline.extra:
        return []
    names = timeline["name"][calls.rows]
    bandwidth = run.ceilings.bytes_per_s if run.ceilings is not None else None
    kernels = []
    for number in np.unique(names).tolist():
        own = names == number
        mean = CounterMeans(timeline, calls.rows[own], _FIELDS)
        if mean.counted_s == 0.0:
            continue
        values: dict[str, Any] = {f: mean.value(f) for f in _FIELDS}
        read, write = values["dram_read_gbps"], values["dram_write_gbps"]
        dram_pct = None
        if read is not None and write is not None and bandwidth:
            dram_pct = 100.0 * (read + write) * 1e9 / bandwidth
        kernels.append(
            _CountedKernel(
                name=timeline.names[number],
                seconds=mean.seconds,
                joules=float(run.joules[own].sum()),
                values=values,
                dram_pct=dram_pct,
            )
        )
    return kernels
