"""Rules about what the device ran: precision, alignment, fusion, copies, collectives."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..attribute.work import OpWork
from ..record import CODE
from ..timeline.columns import NONE, Ints
from ..timeline.view import collective_overlap_pct
from ..units import format_bytes, format_energy
from .evidence import Case, Finding, changed_products

# Shares of the run's joules below which a finding is not worth a user's time: chosen, not measured.
COPY_SHARE = 0.05
FUSE_SHARE = 0.2
FP32_SHARE = 0.1
UNALIGNED_SHARE = 0.05
COMMUNICATION_SHARE = 0.15
EXPOSED_SHARE = 0.05
LOW_TENSOR_SHARE = 0.1
ACCUMULATOR_SHARE = 0.1
# Large products reach 65-95% of the peak on an H200 (h200/kernels.jsonl); under half of that something is wrong.
LOW_TENSOR_PCT = 35.0
# Rows of a product that would fill the chip: predicted for four times as many, the least that is worth a change.
LARGER = 4
# Tiles and swizzles are multiples of 64 elements; 8 is what 16-byte loads of 16-bit numbers ask for (cuBLAS, "Tensor
# Core Usage"), 64 costs hardly more and suits every kernel: 50257 becomes 50304.
PADDED = 64
# What copies of pinned memory reach of a PCIe link's line rate (55 of 63 GB/s is what gen 5 x16 gives in practice).
PINNED_SHARE = 0.87

_FP32_GEMM = re.compile(r"(?<!t)sgemm|simt_\w*gemm|f32f32_f32f32|ffma\w*gemm", re.IGNORECASE)
_UNALIGNED = re.compile(r"gemm\w*align[12](?!\d)", re.IGNORECASE)
_POINTWISE = re.compile(
    r"elementwise|multi_tensor_apply|dropout|layer_norm|batch_norm|softmax|reduce_kernel|CatArray|masked_|GammaBeta",
    re.IGNORECASE,
)
_COMPILED = re.compile(r"^triton_")
# cuBLAS and CUTLASS name the accumulator before the instruction: s16816 is fp32, h16816 is fp16.
_FP16_INTO_FP32 = re.compile(r"_s1(?:6816|688)gemm_f(?:p)?16", re.IGNORECASE)
_GEFORCE = ("rtx-3090", "rtx-4090", "rtx-5090")
_CHAINED = frozenset({"elementwise", "copy", "norm", "batch_norm", "softmax", "random", "reduce"})


def fp32(case: Case) -> Finding | None:
    """Matrix products on the vector units in full fp32, 10% of the joules or more, where TF32 or bf16 would do.

    The saving is the predicted one of the same products in TF32, else the catalogue's joules per FLOP.
    """
    joules, seconds = case.spent(lambda r: r.kind == "kernel" and _FP32_GEMM.search(r.name) and "tf32" not in r.name)
    if case.share(joules) < FP32_SHARE:
        return None
    evidence = f"matrix products in full fp32 spend {case.amount(joules)}"
    action = 'torch.set_float32_matmul_precision("high") (TF32) or bf16 autocast takes a sixth of it or less'
    saves = None
    if case.calls is not None:
        chosen = case.named(lambda n: _FP32_GEMM.search(n) and "tf32" not in n)
        saves = changed_products(case, chosen, lambda w: ("fp32", w.sizes or (), "tf32"))
    if saves is not None:
        return case.finding("fp32", joules, evidence, action, saves=saves, by="prediction", confidence="high")
    figures = case.device.energy if case.device is not None else {}
    wide, narrow = figures.get("matmul_fp32_j_per_flop"), figures.get("matmul_tf32_j_per_flop")
    if wide and narrow:
        left = narrow.value / wide.value
        saves = (joules * (1.0 - left), seconds * (1.0 - left))
        return case.finding("fp32", joules, evidence, action, saves=saves, by="roofline", confidence="medium")
    return case.finding("fp32", joules, evidence, action)


def unaligned(case: Case) -> Finding | None:
    """Products of sizes that are no multiple of 8 run on kernels that load single elements (align1, align2): 5%.

    The saving is the predicted one of the same products padded to multiples of 64.
    """
    joules, seconds = case.spent(lambda r: r.kind == "kernel" and _UNALIGNED.search(r.name))
    if case.share(joules) < UNALIGNED_SHARE:
        return None
    evidence = f"matrix products of odd sizes (kernels with align1) spend {case.amount(joules)}"
    action = "pad the dimension to a multiple of 8 (a vocabulary of 50257 to 50304), so that the fast kernels fit"
    saves = None
    if case.calls is not None:
        chosen = case.named(_UNALIGNED.search)
        odd = _odd_sizes(case, chosen)
        if odd is not None:
            evidence = f"matrix products with a dimension of {odd} (kernels with align1) spend {case.amount(joules)}"
            action = f"pad {odd} to {_padded(odd)}, or any multiple of 8, so that the fast kernels fit"
        saves = changed_products(case, chosen, _with_padding, layouts=("nt", "nn", "tn"))
    if saves is not None:
        if saves[1] > 0:
            evidence += f", {seconds / max(seconds - saves[1], 1e-12):.0f} times the time of padded ones"
        return case.finding("unaligned", joules, evidence, action, saves=saves, by="prediction", confidence="high")
    return case.finding("unaligned", joules, evidence, action)


def _with_padding(work: OpWork) -> tuple[str | None, Sequence[int], str | None]:
    batch, *sizes = work.sizes or (1, 1, 1, 1)
    return work.precision, (batch, *map(_padded, sizes)), work.precision


def _padded(size: int) -> int:
    return size if size % 8 == 0 else -(-size // PADDED) * PADDED


def _odd_sizes(case: Case, chosen: NDArray[np.bool_]) -> int | None:
    """The odd dimension that most of the time goes to."""
    calls = case.calls
    assert calls is not None
    spent: dict[int, float] = {}
    for number, work in enumerate(calls.works):
        mine = chosen & (calls.work == number)
        for size in (work.sizes or ())[1:]:
            if size % 8 and np.any(mine):
                spent[size] = spent.get(size, 0.0) + float(calls.seconds[mine].sum())
    return max(spent, key=spent.__getitem__) if spent else None


def low_tensor_use(case: Case) -> Finding | None:
    """Aligned 16- or 8-bit products above the ridge that reach under 35% of the tensor cores' peak: 10% of the joules.

    The saving is what the same FLOPs would cost in products of four times the rows.
    """
    calls, roofs = case.calls, case.roofs
    if calls is None or roofs is None:
        return None
    peaks = np.array([*(roofs.flops_per_s.get(u, np.nan) for u in calls.units), np.nan])[calls.unit]
    matrix = np.array([*(u.startswith("matrix") for u in calls.units), False])[calls.unit]
    product = np.array([*(w.sizes is not None for w in calls.works), False])[calls.work]
    with np.errstate(divide="ignore", invalid="ignore"):
        pct = 100.0 * calls.flops / calls.seconds / peaks
        above = calls.flops / calls.bytes >= peaks / (roofs.bytes_per_s or np.inf)
    low = matrix & product & above & (pct < LOW_TENSOR_PCT) & (calls.flops > 0) & ~case.named(_UNALIGNED.search)
    joules = float(case.joules[low].sum())
    if not np.any(low) or case.share(joules) < LOW_TENSOR_SHARE:
        return None
    mean_pct = float(np.average(pct[low], weights=calls.seconds[low]))
    evidence = f"matrix products reach {mean_pct:.0f}% of the tensor cores' peak and spend {case.amount(joules)}"
    action = "fewer, larger products (batch, fuse q, k and v), dimensions that are multiples of 64, contiguous operands"
    saves = changed_products(case, low, _larger, work_factor=LARGER)
    if saves is None:
        return case.finding("low tensor use", joules, evidence, action, saves=(0.0, None), by="roofline")
    return case.finding("low tensor use", joules, evidence, action, saves=saves, by="prediction", confidence="low")


def _larger(work: OpWork) -> tuple[str | None, Sequence[int], str | None]:
    batch, m, n, k = work.sizes or (1, 1, 1, 1)
    return work.precision, (batch, m * LARGER, n, k), work.precision


def accumulators(case: Case) -> Finding | None:
    """fp16 products with fp32 accumulators on a GeForce, whose tensor cores then run at half rate: 10% of the joules.

    Source: NVIDIA's Ada architecture whitepaper, table of peak rates (FP16 with FP32 accumulate is half of FP16
    accumulate on GeForce boards). Data-centre boards have one rate for both.
    """
    if (
        case.device is None
        or not case.device.id.startswith("rtx-")
        or "ada" in case.device.id
        or "a6000" in case.device.id
    ):
        return None
    joules, seconds = case.spent(lambda r: r.kind == "kernel" and _FP16_INTO_FP32.search(r.name))
    if case.share(joules) < ACCUMULATOR_SHARE:
        return None
    evidence = f"fp16 products with fp32 accumulators, at half this board's rate, spend {case.amount(joules)}"
    action = "torch.backends.cuda.matmul.allow_fp16_accumulation = True, where the sums stay in range"
    saves = (0.3 * joules, 0.5 * seconds)  # time halves; the operations switch as much as before
    return case.finding("accumulators", joules, evidence, action, saves=saves, by="roofline", confidence="low")


def copies(case: Case) -> Finding | None:
    """Copies spend 5% of the joules or more. The saving of pageable ones is by the link's rate from pinned memory."""
    rows = [r for r in case.table.kernels if r.kind == "memcpy"]
    joules = sum(r.energy_j for r in rows)
    if case.share(joules) < COPY_SHARE:
        return None
    most = max(rows, key=lambda r: r.energy_j)
    evidence = f"copies spend {case.amount(joules)}, most of it {most.name} ({most.calls:,} x)"
    if "pageable" in most.name.lower():
        action = "pin the host's memory (pin_memory=True) and copy with non_blocking=True"
        saves = _pinned(case)
        if saves is not None:
            return case.finding("copies", joules, evidence, action, saves=saves, by="roofline", confidence="medium")
    elif "dtod" in most.name.lower():
        action = "avoid .clone(), .contiguous() and cat on large tensors"
        return case.finding(
            "copies", joules, evidence, action, saves=(joules, sum(r.time_s for r in rows)), by="energy table",
            confidence="medium",
        )  # fmt: skip
    else:
        action = "keep tensors on the device, or copy while it computes"
    return case.finding("copies", joules, evidence, action)


def _pinned(case: Case) -> tuple[float, float] | None:
    """Joules and seconds that pageable copies would save at the link's rate."""
    link = case.device.interconnect.get("pcie") if case.device is not None else None
    if link is None or case.calls is None or case.timeline is None:
        return None
    mine = case.named(lambda n: "pageable" in n.lower())
    moved = case.timeline["bytes"][case.calls.rows]
    mine &= moved > 0
    seconds = case.calls.seconds
    if not np.any(mine):
        return None
    new_s = np.minimum(seconds, moved / (PINNED_SHARE * link.one_way_bytes_per_s))
    left = np.divide(new_s, seconds, out=np.ones(len(seconds)), where=seconds > 0)
    return float((case.joules * (1.0 - left))[mine].sum()), float((seconds - new_s)[mine].sum())


def fuse(case: Case) -> Finding | None:
    """Elementwise and reduction kernels spend 20% of the joules or more, and nothing was compiled.

    The saving is by the bytes of intermediates: what one kernel writes and the next on its stream reads again.
    """
    if any(_COMPILED.match(r.name) for r in case.table.kernels):
        return None
    rows = [r for r in case.table.kernels if r.kind == "kernel" and _POINTWISE.search(r.name)]
    joules = sum(r.energy_j for r in rows)
    if case.share(joules) < FUSE_SHARE:
        return None
    calls = sum(r.calls for r in rows)
    evidence = f"{calls:,} elementwise and reduction kernels spend {case.amount(joules)} moving memory"
    action = "torch.compile fuses them, so that each tensor moves once"
    found = _chains(case)
    if found is None:
        return case.finding("fuse", joules, evidence, action)
    moved, saved_j, saved_s = found
    if moved <= 0.0:
        return None  # no kernel takes what another made: there is nothing to fuse
    evidence += f", {format_bytes(moved)} of it only between two of them"
    return case.finding("fuse", joules, evidence, action, saves=(saved_j, saved_s), by="roofline", confidence="medium")


def _chains(case: Case) -> tuple[float, float, float] | None:
    """Bytes between kernels that follow each other with tensors of one size, and their joules and seconds.

    In training the backward pass needs most of what the forward pass made: then only the second read is spared.
    """
    calls, timeline = case.calls, case.timeline
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
    return float(spared.sum()), float((case.joules * part).sum()), float((calls.seconds * part).sum())


def communication(case: Case) -> Finding | None:
    """Collectives with nothing computing beside them: 5% of the joules or more (15% where overlap is not known).

    The saving is the joules of the time they were alone: at best all of it is hidden.
    """
    joules, _ = case.spent(lambda r: r.kind == "collective")
    if joules <= 0.0:
        return None
    action = "overlap it with compute, or send less (larger buckets, bf16 gradients, accumulation)"
    if case.calls is None or case.timeline is None:
        if case.share(joules) < COMMUNICATION_SHARE:
            return None
        return case.finding("communication", joules, f"collectives spend {case.amount(joules)}", action)
    overlap = collective_overlap_pct(case.timeline, case.calls.rows)
    places = {int(r): i for i, r in enumerate(case.calls.rows.tolist()) if int(r) in overlap}
    alone = {row: 1.0 - pct / 100.0 for row, pct in overlap.items()}
    exposed_j = sum(float(case.joules[i]) * alone[row] for row, i in places.items())
    exposed_s = sum(float(case.calls.seconds[i]) * alone[row] for row, i in places.items())
    if case.share(exposed_j) < EXPOSED_SHARE:
        return None
    evidence = f"collectives spend {case.amount(joules)}, {format_energy(exposed_j, 3)} of it with nothing beside them"
    action += "; reduce-scatter and sharded optimizers send half, hierarchical rings stay within a node"
    return case.finding(
        "communication", joules, evidence, action, saves=(exposed_j, exposed_s), by="energy table", confidence="medium"
    )  # fmt: skip
