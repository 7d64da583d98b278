"""Make rewrites from an observed compilation: which eager operators became which kernel, and what that saves.

Both programs are priced, as eager torch launches it and as Inductor does: by the model alone, or with the seconds and
joules that were measured. Each kernel gets the operators it replaced; its saving is their cost minus its own. One more
line is the time for which the device no longer waits for the host. The line "rest" has what the two totals differ by
beyond all other lines, so that the lines add up to the difference of the totals.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..graph.rewrites import Rewrite
from .compilation import Compilation, InductorKernel, Replacement
from .eager_ops import EagerOp
from .kernel_times import KernelProfile, group_by_kernel, group_by_operator
from .program_cost import (
    HostWork,
    OpCost,
    ProgramCost,
    add_up,
    count_flops,
    estimate_program,
    set_kernel_times,
    share_measured_joules,
)

if TYPE_CHECKING:
    from ..device import Device
    from .variants import Variant

TIMED = "timed"
"""The basis of savings whose seconds were measured kernel by kernel; the model divides their measured joules."""
_CASTS = frozenset({"aten._to_copy"})
_COPIES = frozenset({"aten.clone", "aten.contiguous", "aten.copy"})
_LABEL_PARTS = 6
_HOST_ERROR = 0.5  # relative error: hosts of one kind were found at 0.84 to 1.34 times the constants (estimate/host.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteTrace:
    """What was rewritten, and both programs as they were priced; the rewrites add up to the difference.

    With `basis` "timed", seconds and joules are measured; otherwise they are "modelled".
    """

    rewrites: list[Rewrite]
    before_s: float | None = None
    before_j: float | None = None
    after_s: float | None = None
    after_j: float | None = None
    launches_before: int = 0
    launches_after: int = 0
    device: str = ""
    basis: str = "modelled"
    notes: tuple[str, ...] = ()


def trace_rewrites(
    compilation: Compilation,
    device: Device | None,
    *,
    replayed: bool,
    host: HostWork | None = None,
    eager_s: float | None = None,
    profiles: tuple[KernelProfile, KernelProfile] | None = None,
) -> RewriteTrace:
    """Return the rewrites of a compilation; `replayed` tells that its kernels are replayed as CUDA graphs.

    `profiles` are the kernels of the program before and after, on this chip. Without them, `eager_s`, the measured time
    of the program before, tells how long the program kept the device waiting.
    """
    if not compilation.complete:
        rewrites = [replacement_to_rewrite(r) for r in compilation.replacements]
        return RewriteTrace(rewrites=rewrites, notes=tuple(compilation.missing))
    compilation = compilation.put_back_replaced()
    after = compilation.list_ops_after()
    if device is None:
        return _trace_bytes(compilation, after)
    host, ours = host or HostWork(), [(each, _price_replacement(each, device)) for each in compilation.replacements]
    if profiles is not None:
        basis, extra = TIMED, OpCost()
        old, new = price_by_profile(compilation, after, device, host, replayed, profiles)
        launched = new
    else:
        # missing in the program, because our passes ran before it was read
        basis, extra = "modelled", add_up(saved for _, saved in ours)
        old, launched = estimate_program(compilation.ops, device, host), estimate_program(after, device)
        old = old if eager_s is None else old.set_time(eager_s)
        new = estimate_program(after, device, replayed=True) if replayed else launched
    lines = [
        *_list_fusions(compilation, old.costs, launched.costs, timed=basis == TIMED),
        _make_launch_line(old, launched, new, replayed, timed=basis == TIMED),
        *_list_reused_memory(compilation),
    ]
    lines = [replace(r, basis=basis) for r in lines] + _list_ours(ours)
    before_s, before_j = old.time_s + extra.time_s, old.energy_j + extra.energy_j
    lines += _list_rest(lines, before_s - new.time_s, before_j - new.energy_j, before_j, basis)
    lines = [replace(r, device=device.id) for r in lines]
    return RewriteTrace(
        rewrites=sorted(lines, key=lambda r: -(r.saved_j or 0.0)),
        before_s=before_s,
        before_j=before_j,
        after_s=new.time_s,
        after_j=new.energy_j,
        launches_before=old.launches,
        launches_after=new.launches,
        device=device.id,
        basis=basis,
        notes=tuple(compilation.missing),
    )


def _price_replacement(replacement: Replacement, device: Device) -> OpCost:
    """Return the saving of one of our passes: the operators it replaced against those it inserted, each alone."""
    if replacement.saved_j is not None:
        return OpCost(replacement.saved_s or 0.0, replacement.saved_j, 0.5 * abs(replacement.saved_j))
    if not replacement.ops_before or not replacement.ops_after:
        return OpCost()
    sides = (replacement.ops_before, replacement.ops_after)
    old, new = (add_up(estimate_program(ops, device, replayed=True).costs) for ops in sides)
    return old - new


def price_by_profile(
    compilation: Compilation,
    after: Sequence[EagerOp],
    device: Device,
    host: HostWork,
    replayed: bool,
    profiles: tuple[KernelProfile, KernelProfile],
) -> tuple[ProgramCost, ProgramCost]:
    """Price both programs with the seconds that their kernels took, and the measured joules shared out among them."""
    old_profile, new_profile = profiles
    old = set_kernel_times(
        estimate_program(compilation.ops, device, host),
        group_by_operator(dict(enumerate(compilation.ops)), old_profile.kernels),
        old_profile.iteration_s,
    )
    new = set_kernel_times(
        estimate_program(after, device, replayed=replayed),
        group_by_kernel(compilation.kernels, compilation.ops, new_profile.kernels, replayed=replayed),
        new_profile.iteration_s,
    )
    single = {k: own[0] for k, own in compilation.list_launching_ops().items() if len(own) == 1}
    new = _copy_work(compilation, single, old, new)
    same = [
        (i, k)
        for k, i in single.items()
        if (call := compilation.kernels[k].call) and call.channels_last == compilation.ops[i].channels_last
    ]  # the library call is the same as before
    return share_measured_joules(old, new, same, old_profile.iteration_j, new_profile.iteration_j)


def _copy_work(
    compilation: Compilation, single: Mapping[int, int], before: ProgramCost, after: ProgramCost
) -> ProgramCost:
    """Give a generated kernel of one operator that operator's work: the model knows only the kernel's bytes."""
    costs = list(after.costs)
    for k, i in single.items():
        if compilation.kernels[k].call is None:
            same = before.costs[i].set_seconds(costs[k].time_s, after.limit_w)
            costs[k] = replace(same, nbytes=costs[k].nbytes)
    return replace(after, costs=tuple(costs))


# -- lines ---------------------------------------------------------------------------------------------------------


def _list_fusions(
    compilation: Compilation, before: Sequence[OpCost], after: Sequence[OpCost], *, timed: bool = False
) -> Iterable[Rewrite]:
    """Yield one line for every kind of change, its occurrences added up.

    If another kernel computes a single operator, that is a change only if both were `timed`: the model has one rate for
    both.
    """
    owned, (_, vanished) = compilation.list_launching_ops(), compilation.assign_ops()
    sums: dict[tuple[str, str, str], list[OpCost]] = defaultdict(list)
    ours: dict[tuple[str, str, str], list[OpCost]] = defaultdict(list)
    for k, kernel in enumerate(compilation.kernels):
        own = owned.get(k, [])
        replacement = compilation.replaced.get(kernel.call.nodes[0]) if kernel.call is not None else None
        if replacement is not None:
            key = (replacement.rule, replacement.before, replacement.after)
            ours[key].append(add_up(before[i] for i in own) - after[k])
            continue
        for rule, label, result, saved in _explain_kernel(compilation, kernel, own, before, after[k]):
            sums[rule, label, result].append(saved)
        if timed and kernel.call is None and len(own) == 1:
            label = make_label([compilation.ops[own[0]]])
            sums["generated", label, "a generated kernel"].append(before[own[0]] - after[k])
    for group, spent in zip(vanished, _charge_new_calls(compilation, vanished, after), strict=True):
        ops = [compilation.ops[i] for i in group]
        rule, result = _explain_vanished(ops)
        sums[rule, make_label(ops), result].append(add_up(before[i] for i in group) - spent)
    for by, lines in (("inductor", sums), ("tessera", ours)):
        for (rule, label, result), costs in lines.items():
            yield _make_line(rule, label, result, costs, by=by)


def _make_line(rule: str, before: str, after: str, costs: Sequence[OpCost], by: str = "inductor") -> Rewrite:
    saved = add_up(costs)
    return Rewrite(
        rule=rule,
        before=before,
        after=after,
        by=by,
        times=len(costs),
        saved_bytes=saved.nbytes,
        saved_j=saved.energy_j,
        saved_error_j=saved.error_j,
        saved_s=saved.time_s,
    )


def _explain_kernel(
    compilation: Compilation, kernel: InductorKernel, indices: Sequence[int], before: Sequence[OpCost], own: OpCost
) -> Iterable[tuple[str, str, str, OpCost]]:
    """Yield what one kernel stands for: a fusion, and the casts and copies that disappeared into it."""
    ops = compilation.ops
    if kernel.call is not None:
        old = ops[indices[0]] if len(indices) == 1 else None
        if old is not None and old.kind == "conv" and kernel.call.channels_last != old.channels_last:
            layout = "with channels last" if kernel.call.channels_last else "with channels first"
            yield "layout", make_label([kernel.call]), layout, before[indices[0]] - own
        return
    if len(indices) < 2:
        return
    casts = [i for i in indices if ops[i].name in _CASTS]
    copies = [i for i in indices if ops[i].name in _COPIES]
    work = [i for i in indices if i not in casts and i not in copies]
    if len(work) < 2:
        # There is one operator with casts around it: only the casts are saved.
        rule, gone = ("drop_cast", casts) if casts else ("drop_transpose", copies)
        saved = add_up(before[i] for i in indices) - own
        yield rule, make_label([ops[i] for i in gone]), "inside a kernel", saved
        return
    for rule, gone in (("drop_cast", casts), ("drop_transpose", copies)):
        for i in gone:
            yield rule, make_label([ops[i]]), "inside a kernel", before[i]
    rule = "fuse_reduction" if any(ops[i].reduces for i in work) else "fuse_elementwise"
    yield rule, make_label([ops[i] for i in work]), "one kernel", add_up(before[i] for i in work) - own


def make_label(ops: Sequence[EagerOp]) -> str:
    """Return the names of operators, each with its count: add + 2 layer_norm + gelu."""
    counts: dict[str, int] = {}
    for op in ops:
        counts[op.short] = counts.get(op.short, 0) + 1
    parts = [f"{n} {name}" if n > 1 else name for name, n in counts.items()]
    more = f" + {len(parts) - _LABEL_PARTS} more" if len(parts) > _LABEL_PARTS else ""
    return " + ".join(parts[:_LABEL_PARTS]) + more


def _charge_new_calls(
    compilation: Compilation, vanished: Sequence[Sequence[int]], after: Sequence[OpCost]
) -> list[OpCost]:
    """Charge each new call to the group of vanished operators that is most like it in work.

    A fused attention is charged to products and softmaxes, addmm to mm and add, a padded product to the one it
    replaced.
    """
    spent = [OpCost() for _ in vanished]
    groups = [[compilation.ops[i] for i in group] for group in vanished]
    kinds = [_explain_vanished(ops)[0] for ops in groups]
    for k, kernel in enumerate(compilation.kernels):
        if kernel.call is None or any(node in graph for graph in compilation.nodes for node in kernel.call.nodes):
            continue  # the call was in the program as it was written
        rules = {"attention": ("flash_attention",), "gemm": ("fuse_epilogue", "pad_gemm")}.get(kernel.call.kind, ())
        payers = [g for g, rule in enumerate(kinds) if rule in rules]
        if payers:
            work = count_flops([kernel.call])
            # Among equal groups, take the one charged least so far: a layer's attention is charged to that layer's
            # operators.
            distance = {g: _compare_work(work, count_flops(groups[g])) for g in payers}
            nearest = min(payers, key=lambda g: (distance[g], spent[g].energy_j))
            spent[nearest] = spent[nearest] + after[k]
    return spent


def _compare_work(a: float, b: float) -> float:
    return round(abs(math.log(max(a, 1.0) / max(b, 1.0))), 1)


def _explain_vanished(ops: Sequence[EagerOp]) -> tuple[str, str]:
    kinds = {op.kind for op in ops}
    if "softmax" in kinds and "gemm" in kinds:
        return "flash_attention", "scaled_dot_product_attention"
    if "gemm" in kinds:
        return ("fuse_epilogue", "addmm") if len(ops) > 1 else ("pad_gemm", "the product with padded rows")
    names = {op.name for op in ops}
    if names <= _CASTS:
        return "drop_cast", "nothing"
    if names <= _COPIES | _CASTS:
        return "drop_transpose", "nothing"
    return "fold", "nothing"


def _make_launch_line(
    before: ProgramCost, launched: ProgramCost, after: ProgramCost, replayed: bool, *, timed: bool
) -> Rewrite:
    """Return the line for launches: shorter waits for the host and, in a replay, less idling between kernels."""
    gaps = add_up(launched.costs) - add_up(after.costs)
    saved_s = before.wait_s - after.wait_s + gaps.time_s
    saved_j = before.wait_j - after.wait_j + gaps.energy_j

    def describe(program: ProgramCost) -> str:
        wait = f"the device waits {program.wait_s * 1e3:.2f} ms"
        return f"{program.launches} launches, {wait if timed else f'{program.host_s * 1e3:.2f} ms of the host'}"

    why = "" if saved_s else "the device is never kept waiting: launches cost the host's time alone"
    saved = OpCost(saved_s, saved_j, abs(saved_j) * (before.watts_error if timed else _HOST_ERROR))
    rule, result = ("cuda_graph", "replayed") if replayed else ("fewer_launches", describe(after))
    return replace(_make_line(rule, describe(before), result, [saved]), why=why)


def _list_ours(ours: Iterable[tuple[Replacement, OpCost]]) -> list[Rewrite]:
    """Return the rewrites of our own passes that no kernel stands for, with equal ones on one line."""
    sums: dict[tuple[str, str, str, str], list[OpCost]] = defaultdict(list)
    for each, saved in ours:
        sums[each.rule, each.before, each.after, each.why].append(saved)
    return [
        replace(_make_line(rule, before, after, costs, by="tessera"), why=why)
        for (rule, before, after, why), costs in sums.items()
    ]


def replacement_to_rewrite(replacement: Replacement, why: str = "") -> Rewrite:
    """Return a replacement by one of our passes as a rewrite without savings."""
    return Rewrite(
        rule=replacement.rule,
        before=replacement.before,
        after=replacement.after,
        by="tessera",
        where=replacement.where,
        why=why or replacement.why or "Inductor did not say what it fused: nothing to price",
    )


def _list_reused_memory(compilation: Compilation) -> list[Rewrite]:
    if not compilation.reused_bytes:
        return []
    nbytes = sum(n for _, n in compilation.reused_bytes)
    line = _make_line("in_place", "a new tensor", "the memory of one that is no longer read", [OpCost()])
    why = f"{nbytes / 1e6:.1f} MB less are allocated; the bytes moved are the same"
    return [replace(line, times=len(compilation.reused_bytes), why=why)]


def _list_rest(lines: Sequence[Rewrite], saved_s: float, saved_j: float, before_j: float, basis: str) -> list[Rewrite]:
    rest_s = saved_s - sum(r.saved_s or 0.0 for r in lines)
    rest_j = saved_j - sum(r.saved_j or 0.0 for r in lines)
    if abs(rest_j) < 1e-3 * before_j:
        return []
    timed, modelled = "library kernels, copies into and out of graphs", "generated instead of library kernels"
    why = f"what the totals differ by beyond the lines: clock, cache, {timed if basis == TIMED else modelled}"
    saved = OpCost(rest_s, rest_j, abs(rest_j))
    line = _make_line("rest", "the same kernels", "at another clock, from another cache", [saved])
    return [replace(line, basis=basis, why=why)]


def _trace_bytes(compilation: Compilation, after: Sequence[EagerOp]) -> RewriteTrace:
    """Return a trace with bytes only, because no chip is known for which to price them."""
    old, new = ([OpCost(nbytes=float(_count_bytes(op))) for op in ops] for ops in (compilation.ops, after))
    lines = [*_list_fusions(compilation, old, new), *map(replacement_to_rewrite, compilation.replacements)]
    why = "no joules of single rewrites: this machine's chip is not in the catalogue; name one: on='h200'"
    bare = [replace(r, saved_j=None, saved_s=None, saved_error_j=None, why=r.why or why) for r in lines]
    return RewriteTrace(
        rewrites=sorted(bare, key=lambda r: -(r.saved_bytes or 0.0)),
        notes=(*compilation.missing, why),
        launches_before=sum(op.launches for op in compilation.ops),
        launches_after=len(after),
    )


def _count_bytes(op: EagerOp) -> int:
    return sum(t.nbytes for _, t in (*op.reads, *op.writes)) if op.launches else 0


def make_graph_rewrite(best: Variant, tried: Sequence[Variant]) -> Rewrite:
    """Return the rewrite of an eager program that is replayed, with its measured saving."""
    eager = tried[0]
    saved_s = eager.time_s - best.time_s if eager.time_s and best.time_s else None
    saved_j = eager.energy_j - best.energy_j if eager.energy_j and best.energy_j else None
    return Rewrite(
        rule="cuda_graph",
        before="eager launches",
        after="replayed",
        by="tessera",
        saved_s=saved_s,
        saved_j=saved_j,
        saved_error_j=math.hypot(eager.error_j or 0.0, best.error_j or 0.0) if saved_j is not None else None,
        saved_bytes=0.0,
        basis="measured" if saved_s is not None else "modelled",
    )
